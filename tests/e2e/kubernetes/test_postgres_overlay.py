"""The overlay `postgres` in a real cluster: seats, evictions with the node's own account, and one executor.

Ledger and queue are in a real PostgreSQL, and the test sends the alerts as Alertmanager does.
"""

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import psycopg
import pytest
from kubernetes.client import AppsV1Api, CoreV1Api

from gpuwarden.kube.budget import RESOURCE
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory
from remediator.plan import ContainerState
from testbed.kubernetes.cluster import Cluster
from testbed.postgres import Postgres
from tests import certificates
from tests.manifests import (
    AS_ALERTMANAGER,
    KUBECTL,
    MANIFESTS,
    SPACE,
    TOKEN,
    WEB,
    Kubectl,
    gpu_node,
    ready_pods,
    runnable,
    seats,
    write_gpus,
)
from tests.relay import relay
from tests.remediator import builders
from tests.tenants import Tenants
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.needs_postgres, pytest.mark.slow]

PROGRAM: Final = "gpuwarden-node"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The applied overlay. `granted` and `forbidden` have one tenant each, with a budget of 3000 MiB and a GPU."""

    cluster: Cluster
    kubectl: Kubectl
    pod: Any
    ledger: Ledger
    folder: Path
    granted: Tenants
    forbidden: Tenants
    first: Mapping[str, ContainerState]

    @property
    def core(self) -> CoreV1Api:
        return self.granted.core

    def gpuwarden(self, *arguments: str) -> str:
        return self.kubectl.gpuwarden(self.pod.metadata.name, *arguments)

    def hold(self, **mib: int) -> None:
        """Let tenants that still run hold memory of their GPUs."""
        write_gpus(
            self.folder,
            [
                {node_pid(pid): mib.get(name, 0) for pid in state.pids if is_alive(pid)}
                for name, state in self.first.items()
            ],
        )

    def report(self, name: str) -> None:
        """Send the alert about a tenant."""
        state = self.first[name]
        gpu = f"GPU-{[*self.first].index(name)}"
        alert = builders.tenant_alert(
            name, gpu=gpu, host=self.cluster.node, container=state.name, incarnation=state.incarnation
        )
        sent = builders.sent(name) | {"labels": dict(alert.labels)}
        url = f"http://{self.pod.status.pod_ip}:9836/api/v1/alerts"
        httpx.post(url, json=builders.payload(sent), headers=AS_ALERTMANAGER).raise_for_status()

    def episode(self, name: str) -> EpisodeHistory | None:
        """The only episode of a tenant, once it is open."""
        found = (self.ledger.reports.get(each.episode_id) for each in self.ledger.reports.newest())
        mine = [each for each in found if each is not None and each.worker == self.first[name].name]
        assert len(mine) <= 1
        return mine[0] if mine else None

    def until(self, holds: Callable[[], EpisodeHistory | None], what: str) -> EpisodeHistory:
        def log() -> str:
            return str(self.core.read_namespaced_pod_log(self.pod.metadata.name, SPACE, container="executor"))

        return eventually(holds, what, within_s=90, log=log)


def node_pid(pid: int) -> int:
    """The pid that the node sees: its namespace is below this host's."""
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("NSpid:")]
    return int(line.split()[2])


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextmanager
def databases(cluster: Cluster, postgres: Postgres) -> Iterator[dict[str, str]]:
    """URLs of the databases that `gpuwarden init-db` made, for pods."""
    names = {part: f"{part}_{uuid4().hex[:8]}" for part in ("queue", "ledger")}
    with relay(cluster.host_address, postgres.port) as port:
        server = f"postgresql://postgres@{cluster.host_address}:{port}/postgres"
        options = [word for part, name in names.items() for word in (f"--{part}", name)]
        command = [str(KUBECTL.with_name("gpuwarden")), "init-db", server, *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        yield dict(zip(names, [line.partition("=")[2] for line in done.stderr.splitlines()], strict=True))
        for name in names.values():
            postgres.drop(name)
            with psycopg.connect(postgres.url("postgres").replace("+psycopg", ""), autocommit=True) as connection:
                connection.execute(f"DROP ROLE {name}".encode())


def make_secrets(kubectl: Kubectl, folder: Path, urls: Mapping[str, str]) -> None:
    """Make the secrets that docs/how-to/kubernetes.md names."""
    server = certificates.authority(folder / "tls").server
    (folder / "web.yml").write_text(WEB)
    (folder / "gateway.yml").write_text("tls_server_config: {cert_file: tls.crt, key_file: tls.key}\n")
    kubectl.secret("gpuwarden-web", f"--from-file={folder}/web.yml", f"--from-literal=token={TOKEN}")
    kubectl.secret("gpuwarden-databases", *(f"--from-literal={part}={url}" for part, url in urls.items()))
    files = {"web.yml": folder / "gateway.yml", "tls.crt": server.cert, "tls.key": server.key}
    kubectl.secret("gpuwarden-gateway-web", *(f"--from-file={name}={path}" for name, path in files.items()))


@pytest.fixture(scope="module")
def scene(cluster: Cluster, postgres: Postgres, work: Path) -> Iterator[Scene]:
    """Deletes the overlay at the end, and checks that nothing is left."""
    kubectl, folder = Kubectl(cluster), work / "overlay"
    before = kubectl.names()
    with ExitStack() as stack:
        stack.enter_context(gpu_node(cluster))
        stack.callback(kubectl.remove_seats)
        spaces = [cluster.new_namespace() for _ in range(2)]
        for space in spaces:
            stack.callback(cluster.delete_namespace, space)
        granted, forbidden = (Tenants(cluster, space) for space in spaces)
        urls = stack.enter_context(databases(cluster, postgres))
        listed = [f"GPUWARDEN_{program}_POD_NAMESPACES={','.join(spaces)}" for program in ("EXPORTER", "REMEDIATOR")]
        overlay = runnable("overlays/postgres", folder, [*listed, "GPUWARDEN_REMEDIATOR_SEATS_SEVERAL_GPUS=true"])
        write_gpus(folder, [{}, {}])
        stack.enter_context(kubectl.applied(overlay, lambda: make_secrets(kubectl, work, urls)))
        kubectl("apply", f"--namespace={granted.namespace}", "-k", str(MANIFESTS / "evict"))
        cluster.wait(lambda: ready_pods(granted.core, PROGRAM), "ready pod of the node")
        cluster.wait(lambda: seats(granted.core, cluster) == "28k", "seats of the node")
        (pod,) = ready_pods(granted.core, PROGRAM)
        for tenants in (granted, forbidden):
            tenants.workload("Deployment", "web", limits={RESOURCE: 3000})
        yield Scene(
            cluster=cluster,
            kubectl=kubectl,
            pod=pod,
            ledger=stack.enter_context(closing(Ledger.open(urls["ledger"]))),
            folder=folder,
            granted=granted,
            forbidden=forbidden,
            first={"granted": granted.running("web"), "forbidden": forbidden.running("web")},
        )
    cluster.wait(lambda: kubectl.names() <= before, "removal of all")
    assert seats(granted.core, cluster) is None


@pytest.mark.behaviour("C1")
def test_programs_are_ready_and_status_says_ok(scene: Scene) -> None:
    said = scene.gpuwarden("status", "--alertmanager", "none", "--prometheus", "none")
    scene.cluster.wait(lambda: len(ready_pods(scene.core, "gpuwarden-gateway")) == 2, "ready central gateways")

    assert f"executor {scene.cluster.node} ok" in said
    assert "nothing needs an operator" in said
    for container in ("exporter", "executor", "gateway", "remediator"):
        log = scene.core.read_namespaced_pod_log(scene.pod.metadata.name, SPACE, container=container)
        assert '"level": "error"' not in log


@pytest.mark.behaviour("C9")
def test_second_executor_of_a_node_says_why_it_does_not_act(scene: Scene) -> None:
    daemon = AppsV1Api(scene.granted.api).read_namespaced_daemon_set(PROGRAM, SPACE)
    template = scene.granted.api.sanitize_for_serialization(daemon.spec.template)
    spec = template["spec"] | {"restartPolicy": "Never"}
    spec["containers"] = [each for each in spec["containers"] if each["name"] == "executor"]
    scene.core.create_namespaced_pod(SPACE, {"metadata": {"name": "second"}, "spec": spec})

    scene.cluster.wait(lambda: scene.core.read_namespaced_pod("second", SPACE).status.phase == "Failed", "its end")

    said = scene.core.read_namespaced_pod_log("second", SPACE)
    scene.core.delete_namespaced_pod("second", SPACE, grace_period_seconds=0)
    assert "another executor holds this ledger's lock" in said
    assert f"executor of {scene.cluster.node}" in said


@pytest.mark.behaviour("C9")
def test_namespace_without_the_role_is_refused_by_the_api_and_the_ledger_says_so(scene: Scene) -> None:
    scene.gpuwarden("arm", "--yes", "--reason", "a test")
    scene.hold(forbidden=14500)
    scene.report("forbidden")

    def waiting() -> EpisodeHistory | None:
        episode = scene.episode("forbidden")
        return episode if episode is not None and episode.wait_reason == "eviction_forbidden" else None

    episode = scene.until(waiting, "the episode waits")
    assert episode.outcome is None
    account = f"system:serviceaccount:{SPACE}:gpuwarden-node"
    assert f'User "{account}" cannot create resource "pods/eviction"' in episode.entries[-1].message
    assert [each.metadata.uid for each in scene.forbidden.named("web")] == [
        scene.first["forbidden"].incarnation.partition("@")[0]
    ]


@pytest.mark.behaviour("C3")
@pytest.mark.behaviour("C9")
def test_pod_over_budget_is_evicted_with_the_account_of_the_node(scene: Scene) -> None:
    scene.hold(granted=14500, forbidden=14500)
    scene.report("granted")

    def closed() -> EpisodeHistory | None:
        scene.hold(granted=14500, forbidden=14500)
        episode = scene.episode("granted")
        return episode if episode is not None and episode.outcome is not None else None

    episode = scene.until(closed, "the pod is replaced")
    assert episode.outcome == "fixed", episode.message
    assert [entry.what for entry in episode.entries if entry.act == "decided"].count("stop") == 1
    (new,) = scene.granted.named("web")
    assert new.metadata.uid != scene.first["granted"].incarnation.partition("@")[0]
