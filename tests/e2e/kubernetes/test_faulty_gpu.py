"""A faulty GPU on a real cluster: by real rules and a real Alertmanager, its node gets no new pod until it works."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes.client import CoreV1Api

from remediator.clients.nodes import TAINT
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from tests.conftest import Cli
from tests.e2e.kubernetes.test_seats import TOKEN, Host, phase
from tests.remediator.alertmanager import alertmanager
from tests.remediator.prometheus import prometheus
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.behaviour("C9"), pytest.mark.slow]


@pytest.fixture
def core(cluster: Cluster) -> CoreV1Api:
    return CoreV1Api(cluster.api())


@pytest.fixture
def host(cluster: Cluster, tmp_path: Path) -> Iterator[Host]:
    host = Host(cluster, tmp_path)
    host.set_gpus(15360, 15360)
    yield host
    host.nodes.set_taint(cluster.node, tainted=False)


def test_lost_gpu_keeps_new_pods_away_until_it_is_back_or_a_person_decides(
    cluster: Cluster,
    core: CoreV1Api,
    namespace: str,
    host: Host,
    command: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    core.create_namespaced_pod(namespace, pods.pod("old"))
    eventually(lambda: phase(core, namespace, "old") == "Running", "a pod runs")
    lost = ("--gpu-lost-s", "3")
    with (
        host.exporter("--pods", "api", "--node-name", cluster.node, *lost) as port,
        host.webhook() as webhook,
        host.executor(port, "--seats", "off", "--armed", *lost),
        alertmanager(
            tmp_path / "alertmanager",
            url=f"http://{webhook}/api/v1/alerts",
            http_config={"authorization": {"credentials": TOKEN}},
        ) as alerts,
        prometheus(
            tmp_path / "prometheus",
            alertmanager=alerts.removeprefix("http://"),
            authorization={"credentials": TOKEN},
            static_configs=[{"targets": [webhook, f"127.0.0.1:{port}"], "labels": {"host": cluster.node}}],
        ),
    ):

        def taints() -> list[dict[str, str]]:
            found = core.read_node(cluster.node).spec.taints or []
            return [{"key": each.key, "effect": each.effect} for each in found]

        host.set_gpus(15360)
        eventually(lambda: taints() == [TAINT], "the node is tainted", log=host.log_text, within_s=60)
        core.create_namespaced_pod(namespace, pods.pod("new"))
        eventually(
            lambda: any(
                "gpuwarden/gpu-faulty" in (each.message or "")
                for each in core.read_namespaced_pod("new", namespace).status.conditions or ()
            ),
            "the scheduler names the taint",
        )
        assert (phase(core, namespace, "old"), phase(core, namespace, "new")) == ("Running", "Pending")

        host.set_gpus(15360, 15360)
        eventually(lambda: taints() == [], "the taint is removed", log=host.log_text)
        eventually(lambda: phase(core, namespace, "new") == "Running", "the new pod runs")

        host.set_gpus(15360)
        eventually(lambda: taints() == [TAINT], "the node is tainted again", log=host.log_text, within_s=60)
        code, _, error = command("seats", "untaint", cluster.node)
        assert (code, error) == (0, "")
        eventually(lambda: "a person removed the taint" in host.log_text(), "it waits", log=host.log_text)
        assert taints() == []
