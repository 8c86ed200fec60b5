"""Seats through an API whose watches fail, on a real cluster: they are asserted again, also while no event arrives."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpuwarden.kube import api as kube_api
from remediator.clients import nodes
from remediator.clients.exporter import ExporterClient
from remediator.clients.nodes import Nodes
from remediator.executor import seats
from remediator.executor.seats import SeatKeeper
from remediator.seats import RESOURCE, Rules
from testbed.kubernetes.cluster import Cluster
from tests.api_proxy import Fault, Proxy, api_proxy
from tests.exporter import builders as host
from tests.exporter.http.test_server import live, served
from tests.manifests import gpu_node
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.behaviour("C1")]

MIB = 2**20
FAULTS = {
    "expired": Fault(to="watch=", status=401),
    "gone": Fault(to="watch=", status=410),
    "busy": Fault(to="watch=", status=429, headers={"Retry-After": "1"}),
    "failing": Fault(to="watch=", status=503, body="<html>"),
    "slow": Fault(to="watch=", hangs=True),
    "half": Fault(to="watch=", after="half"),
    "everything": Fault(status=500),
}


@pytest.fixture
def proxy(cluster: Cluster, tmp_path: Path) -> Iterator[Proxy]:
    with api_proxy(cluster, tmp_path) as found:
        yield found


@pytest.fixture
def keeper(cluster: Cluster, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A keeper behind the proxy, which checks its node every two seconds at the latest."""
    monkeypatch.setattr(seats, "RETRY_S", 0.05)
    monkeypatch.setattr(seats, "CHECK_S", 2.0)
    monkeypatch.setattr(nodes, "ANSWER_S", 1.0)
    card = host.gpu(0, memory_size_bytes=15360 * MIB)
    with (
        gpu_node(cluster),
        served(live(gpus=host.gpus(card))) as port,
        closing(ExporterClient(f"http://127.0.0.1:{port}")) as exporter,
    ):
        client = Nodes(kube_api.connect(proxy.kubeconfig, timeout_s=1.0), RESOURCE)
        its = SeatKeeper(cluster.node, nodes=client, exporter=exporter, rules=Rules(), may_act=lambda: True)
        its.start()
        yield
        its.close()
        Nodes(cluster.api(), RESOURCE).advertise(cluster.node, None)


@pytest.mark.usefixtures("keeper")
def test_seats_are_asserted_again_during_and_after_faults_of_the_watch(cluster: Cluster, proxy: Proxy) -> None:
    node = Nodes(cluster.api(), RESOURCE)

    def advertises() -> bool:
        return node.read(cluster.node).capacity_mib == 14000

    eventually(advertises, "the seats")
    proxy.silent = True
    node.advertise(cluster.node, None)
    eventually(advertises, "the seats while a watch has no event")
    proxy.silent = False

    for name, fault in FAULTS.items():
        proxy.faults = [fault]
        node.advertise(cluster.node, None)
        if name == "everything":
            proxy.ends.wait(1)
            assert not advertises()
            proxy.faults = []
        eventually(advertises, f"the seats: {name}")
