"""Seats on a real cluster: an executor advertises its node, and the scheduler seats pods by their budgets (C1)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from kubernetes.client import CoreV1Api

from remediator.clients.nodes import Nodes
from remediator.seats import RESOURCE, Node
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from testbed.kubernetes.node import NAME
from tests.conftest import Cli
from tests.remediator.prometheus import prometheus
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.behaviour("C1"), pytest.mark.slow]

LABEL = "nvidia.com/gpu.present"
TOKEN = "the-token-of-prometheus"
BUDGETS = (3000, 5000, 2000, 1800, 1500)


class Host:
    """An exporter with a simulated GPU, and an executor, of the cluster's node."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self.nodes = Nodes(cluster.api(), RESOURCE)
        (folder / "run").mkdir()
        (folder / "run/host").write_text(f"{cluster.node}\n")

    def set_gpus(self, *sizes_mib: int) -> None:
        listed = [
            {
                "uuid": f"GPU-sim-{number}",
                "index": number,
                "utilization_ratio": 0.0,
                "memory_used_bytes": 0,
                "memory_size_bytes": mib * 2**20,
                "processes": [],
            }
            for number, mib in enumerate(sizes_mib)
        ]
        written = self._folder / "new.json"
        written.write_text(json.dumps({"gpus": listed}))
        written.replace(self._folder / "gpus.json")

    @contextmanager
    def program(self, name: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "gpuwarden", *name.split(), "--runtime-dir", str(self._folder / "run"), *options]
        with (self._folder / f"{name.rsplit(maxsplit=1)[-1]}.log").open("ab") as log:
            process = subprocess.Popen(argv, stderr=log, env=os.environ | {"KUBECONFIG": str(self._cluster.kubeconfig)})
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=20)

    @contextmanager
    def exporter(self, *options: str) -> Iterator[int]:
        """Yield its port."""
        log = self._folder / "exporter.log"
        options = options or ("--pods", "off")
        options = ("--port", "0", "--docker", "none", "--podman", "none", *options)
        with self.program("exporter", *options, "--simulate-gpu", str(self._folder / "gpus.json")):
            line = eventually(
                lambda: next((each for each in log.read_text().splitlines() if "exporter ready" in each), None),
                "the exporter is ready",
                log=log.read_text,
            )
            yield int(json.loads(line)["port"])

    @contextmanager
    def executor(self, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        databases = [f"sqlite:///{self._folder}/{name}.db" for name in ("ledger", "queue")]
        with self.program(
            "remediator execute",
            *("--ledger", databases[0], "--queue-db", databases[1], "--docker", "none"),
            *("--exporter", f"http://127.0.0.1:{port}", "--node-name", self._cluster.node, *options),
        ) as process:
            yield process

    @contextmanager
    def webhook(self, *options: str) -> Iterator[str]:
        """Yield its address."""
        (self._folder / "token").write_text(TOKEN)
        (self._folder / "web.yml").write_text("bearer_token_file: token\n")
        log = self._folder / "serve.log"
        databases = ("--ledger", f"sqlite:///{self._folder}/ledger.db", "--web-config-file", f"{self._folder}/web.yml")
        with self.program("remediator serve", *databases, "--port", "0", *options):
            line = eventually(
                lambda: next((each for each in log.read_text().splitlines() if "remediator ready" in each), None),
                "the webhook is ready",
                log=log.read_text,
            )
            yield f"127.0.0.1:{json.loads(line)['port']}"

    def node(self) -> Node:
        return self.nodes.read(self._cluster.node)

    def advertises(self, mib: int | None, *, within_s: float = 45) -> None:
        """Wait until the scheduler counts with this."""
        eventually(
            lambda: (self.node().capacity_mib, self.node().allocatable_mib) == (mib, mib),
            f"the node advertises {mib}",
            log=self.log_text,
            within_s=within_s,
        )

    def log_text(self) -> str:
        path = self._folder / "execute.log"
        return path.read_text() if path.exists() else ""


def set_label(core: CoreV1Api, value: str | None) -> None:
    core.patch_node(NAME, {"metadata": {"labels": {LABEL: value}}}, _content_type="application/merge-patch+json")


@pytest.fixture
def core(cluster: Cluster) -> CoreV1Api:
    return CoreV1Api(cluster.api())


@pytest.fixture
def host(cluster: Cluster, core: CoreV1Api, tmp_path: Path) -> Iterator[Host]:
    set_label(core, "true")
    host = Host(cluster, tmp_path)
    host.set_gpus(15360)
    yield host
    set_label(core, None)
    host.nodes.advertise(cluster.node, None)
    host.advertises(None)


@pytest.fixture
def port(host: Host) -> Iterator[int]:
    with host.exporter() as port:
        yield port


def test_seats_survive_the_kubelet_and_the_node_object_and_are_removed(
    cluster: Cluster, core: CoreV1Api, host: Host, port: int, command: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    with host.executor(port, "--seats", "on"):
        host.advertises(14000)
        cluster.restart("kubelet")
        cluster.wait_until_ready()
        host.advertises(14000)

        core.delete_node(cluster.node)
        cluster.restart("kubelet")
        cluster.wait_until_ready()
        set_label(core, "true")
        host.advertises(14000)
        assert command("seats", "check", "--prometheus", "none")[0] == 0
        code, _, said = command("seats", "remove", "--all")
        assert (code, "an executor advertises the seats of node-1 again" in said) == (1, True)
        host.advertises(14000)

    assert command("seats", "remove", cluster.node)[0] == 0
    host.advertises(None)
    code, said, _ = command("seats", "check", "--prometheus", "none")
    assert (code, "node-1 advertises no seats" in said) == (1, True)


def phase(core: CoreV1Api, namespace: str, name: str) -> str:
    return str(core.read_namespaced_pod(name, namespace).status.phase)


def run_pods(core: CoreV1Api, namespace: str) -> list[str]:
    """Run five pods with budgets of 13,300 MiB."""
    names = [f"tenant-{mib}" for mib in BUDGETS]
    for name, mib in zip(names, BUDGETS, strict=True):
        core.create_namespaced_pod(namespace, pods.pod(name, limits={RESOURCE: mib}))
    assert_running(core, namespace, names)
    return names


def assert_running(core: CoreV1Api, namespace: str, names: list[str]) -> None:
    eventually(lambda: {phase(core, namespace, name) for name in names} == {"Running"}, "all pods run")


def test_pods_are_seated_by_their_budgets_and_the_sixth_waits(
    cluster: Cluster,
    core: CoreV1Api,
    namespace: str,
    host: Host,
    port: int,
    command: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    with host.executor(port, "--seats", "on"):
        host.advertises(14000)
        names = run_pods(core, namespace)
        core.create_namespaced_pod(namespace, pods.pod("sixth", limits={RESOURCE: 1000}))

        def reason() -> str:
            conditions = core.read_namespaced_pod("sixth", namespace).status.conditions or []
            return " ".join(each.message or "" for each in conditions)

        eventually(lambda: f"Insufficient {RESOURCE}" in reason(), "the scheduler names the resource")
        assert phase(core, namespace, "sixth") == "Pending"
        _, said, _ = command("seats", "show", "--json", "--prometheus", "none")
        assert {"advertised_mib": 14000, "declared_mib": 13300, "free_mib": 700, "pods": 5}.items() <= json.loads(
            said
        ).items()
        _, said, _ = command("seats", "check", "--prometheus", "none")
        assert "drain it before it is rebuilt" in said
        assert "ends all 5 pods that declare 13300 MiB" in said

        core.delete_namespaced_pod(names[-1], namespace, grace_period_seconds=0)
        eventually(lambda: phase(core, namespace, "sixth") == "Running", "the sixth pod is seated")


@pytest.mark.behaviour("C6")
def test_pod_without_a_seat_raises_an_alert_until_it_is_seated(
    cluster: Cluster, core: CoreV1Api, namespace: str, host: Host, tmp_path: Path
) -> None:
    host.nodes.advertise(cluster.node, 14000)
    host.advertises(14000)
    names = run_pods(core, namespace)
    core.create_namespaced_pod(namespace, pods.pod("sixth", limits={RESOURCE: 1000}))

    with (
        host.webhook("--pending-pods", "--pod-pending-s", "5") as address,
        prometheus(tmp_path / "prometheus", address, authorization={"credentials": TOKEN}) as url,
    ):

        def alerts() -> list[str]:
            found = httpx.get(f"{url}/api/v1/alerts").json()["data"]["alerts"]
            firing = [each["annotations"]["summary"] for each in found if each["state"] == "firing"]
            return [each for each in firing if "waits for" in each]

        def count() -> str | None:
            found = httpx.get(f"{url}/api/v1/query", params={"query": "gpuwarden_pending_pods"}).json()
            return next((each["value"][1] for each in found["data"]["result"]), None)

        expected = [f"pod {namespace}/sixth waits for 1000MiB of GPU memory"]
        eventually(lambda: alerts() == expected, "the alert fires", log=lambda: f"{alerts()} {count()}")
        core.delete_namespaced_pod(names[-1], namespace, grace_period_seconds=0)
        eventually(lambda: phase(core, namespace, "sixth") == "Running", "the sixth pod is seated")
        eventually(lambda: (alerts(), count()) == ([], "0"), "the alert is gone, and no pod waits")


def test_seats_never_fall_below_running_pods_and_rise_for_no_other(
    cluster: Cluster, core: CoreV1Api, namespace: str, host: Host, port: int
) -> None:
    with host.executor(port, "--seats", "on"):
        host.advertises(14000)
        names = run_pods(core, namespace)
        cluster.end("kubelet")
        forced = pods.pod("forced", limits={RESOURCE: 8000})
        forced["spec"]["nodeName"] = cluster.node
        core.create_namespaced_pod(namespace, forced)
        host.nodes.advertise(cluster.node, None)
        eventually(lambda: host.node().capacity_mib is not None, "the executor advertises again")
        cluster.begin("kubelet")
        eventually(lambda: phase(core, namespace, "forced") == "Failed", "the kubelet refuses the pod")
        host.advertises(14000)
        assert_running(core, namespace, names)

    reserve = ("--seats", "on", "--seats-reserve-mib", "8360")
    with host.executor(port, *reserve):
        host.advertises(13300)
        cluster.restart("kubelet")
        cluster.wait_until_ready()
        eventually(lambda: "its pods declare 13300 MiB and its GPUs have 7000" in host.log_text(), "the log says why")
        assert_running(core, namespace, names)

    for name in names:
        core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
    with host.executor(port, *reserve):
        host.advertises(7000)


def test_dry_run_says_what_it_would_advertise(host: Host, port: int) -> None:
    with host.executor(port):
        eventually(lambda: "dry run: would advertise seats" in host.log_text(), "it is logged", log=host.log_text)

    assert '"mib": 14000' in host.log_text()
    assert host.node().capacity_mib is None


def test_several_gpus_are_advertised_only_if_the_owner_says_so(host: Host, port: int) -> None:
    host.set_gpus(15360, 9552)
    with host.executor(port, "--seats", "on"):
        eventually(lambda: "the node has 2 GPUs" in host.log_text(), "the refusal is logged", log=host.log_text)
        assert host.node().capacity_mib is None

    with host.executor(port, "--seats", "on", "--seats-several-gpus"):
        host.advertises(14000 + 8192)


def test_executor_outlasts_the_api_server(cluster: Cluster, host: Host, port: int) -> None:
    with host.executor(port, "--seats", "on") as process:
        host.advertises(14000)
        cluster.end("kube-apiserver")
        try:
            eventually(lambda: "seats not checked" in host.log_text(), "the failure is logged", log=host.log_text)
        finally:
            cluster.begin("kube-apiserver")
            cluster.wait_until_ready()
        host.nodes.advertise(cluster.node, None)
        host.advertises(14000)
        assert process.poll() is None
