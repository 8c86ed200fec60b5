"""A pod that outgrows its VRAM budget is evicted, through the whole chain on a real cluster, with delivered settings.

The pods and their process trees are real. Each process holds as much simulated GPU memory as 40 times its RAM.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from deploy.standalone.stack import Chain, Plan
from gpuwarden import procfs
from gpuwarden.evidence import GpuMemoryFacts
from gpuwarden.kube.budget import RESOURCE
from remediator.clients.exporter import ExporterClient
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory
from remediator.plan import ContainerState
from testbed.gpu_simulator import SimulatedGpus, Slot
from testbed.kubernetes.cluster import Cluster
from tests.tenants import Tenants, pod_settings
from tests.waiting import answered, eventually

pytestmark = [pytest.mark.kube, pytest.mark.needs_parts, pytest.mark.slow]

MIB: Final = 2**20
HOST: Final = "node-1"
BOUND_S: Final = 120.0
"""Time from the growth to the eviction, seconds."""

RATIO: Final = 40
GROWS: Final = """
import signal, time
kept = []
signal.signal(signal.SIGUSR1, lambda *_: kept.append(bytearray(b"x") * (160 << 20)))
while True: time.sleep(1)
"""
TREE: Final = ["sh", "-c", f"python3 -c '{GROWS}' & wait"]


class Card:
    """Simulated GPUs of 16 GiB, whose processes hold memory by their RAM."""

    def __init__(self, gpus: SimulatedGpus) -> None:
        self.gpus = gpus
        self.trees: Mapping[str, frozenset[int]] = {}
        self.others: Mapping[str, Mapping[int, int]] = {}

    def update(self) -> None:
        self.gpus.held = {
            gpu: {pid: RATIO * _ram_bytes(pid) for pid in pids} | dict(self.others.get(gpu, {}))
            for gpu, pids in self.trees.items()
        }

    @contextmanager
    def updates(self) -> Iterator[None]:
        closing_ = threading.Event()

        def run() -> None:
            while not closing_.wait(0.2):
                self.update()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            closing_.set()
            thread.join()


def _ram_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The chain of one node, and its tenants."""

    chain: Chain
    tenants: Tenants
    ledger: Ledger
    witness: ExporterClient
    first: Mapping[str, ContainerState]
    card: Card

    def episodes(self, name: str) -> list[EpisodeHistory]:
        found = (self.ledger.reports.get(each.episode_id) for each in self.ledger.reports.newest())
        return [each for each in found if each is not None and f"/{name}-" in each.worker]

    def journal_text(self, name: str) -> str:
        entries = [entry for episode in self.episodes(name) for entry in episode.entries]
        return "\n".join(f"{entry.act} {entry.what}: {entry.message}" for entry in entries)

    def until(self, holds: Any, what: str, within_s: float = BOUND_S) -> None:
        eventually(holds, what, within_s=within_s, log=lambda: self.chain.log_tail("execute", 40))

    def grow(self, name: str) -> float:
        """Let the process of a tenant allocate. Returns the time, Unix seconds."""
        (child,) = [pid for pid in self.first[name].pids if b"python3" in procfs.read(f"/proc/{pid}/comm")]
        os.kill(child, signal.SIGUSR1)
        return time.time()

    def gpu(self, name: str) -> GpuMemoryFacts:
        beside = self.first[f"beside-{name}"].name
        cards = answered(lambda: self.witness.container_evidence(beside, host=HOST)).cards
        assert cards is not None
        return next(each for each in cards if each.gpu == f"GPU-sim-{name}")

    def uids(self, name: str) -> list[str]:
        return [each.metadata.uid for each in self.tenants.named(f"{name}-")]


def uid(state: ContainerState) -> str:
    return state.incarnation.partition("@")[0]


@pytest.fixture(scope="module")
def scene(work: Path, cluster: Cluster) -> Iterator[Scene]:
    """Two GPUs, each with a tenant that grows and a neighbour; one of the tenants has a PodDisruptionBudget."""
    cards = ("free", "guarded")
    namespace = cluster.new_namespace()
    with ExitStack() as stack:
        stack.callback(cluster.delete_namespace, namespace)
        tenants = Tenants(cluster, namespace)
        capacity = {"status": {"capacity": {RESOURCE: "32000"}}}
        tenants.core.patch_node_status(cluster.node, capacity)
        simulation = work / "gpus.json"
        (work / "run").mkdir()
        slots = [Slot(worker="none", gpus=tuple(f"GPU-sim-{name}" for name in cards))]
        gpus = stack.enter_context(SimulatedGpus(simulation, directory=work / "run", slots=slots))
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in pod_settings(cluster, namespace).items():
            environment.setenv(name, value)
        for name in cards:
            tenants.workload("StatefulSet", name, TREE, limits={RESOURCE: 3000})
            tenants.workload("Deployment", f"beside-{name}", limits={RESOURCE: 10000})
        first = {name: tenants.running(f"{name}-") for name in (*cards, *(f"beside-{name}" for name in cards))}
        tenants.protect("guarded")
        card = Card(gpus)
        card.trees = {f"GPU-sim-{name}": first[name].pids for name in cards}
        card.others = {f"GPU-sim-{name}": {min(first[f"beside-{name}"].pids): 9000 * MIB} for name in cards}
        stack.enter_context(card.updates())
        chain = stack.enter_context(Chain(Plan(work=work, host=HOST, docker=None, simulate_gpu=simulation, armed=True)))
        ledger = stack.enter_context(closing(Ledger.open(chain.ledger_url)))
        witness = stack.enter_context(closing(ExporterClient(chain.exporter_url)))
        found = Scene(chain=chain, tenants=tenants, ledger=ledger, witness=witness, first=first, card=card)
        seen = f'gpuwarden_container_recyclable{{container="{first["guarded"].name}"}} == 1'
        found.until(lambda: chain.query(seen), "Prometheus has the pods")
        yield found


@pytest.mark.behaviour("C2")
@pytest.mark.behaviour("C3")
@pytest.mark.behaviour("C8")
def test_pod_that_outgrows_its_budget_is_evicted_by_uid_and_its_memory_returns(scene: Scene) -> None:
    grown_at = scene.grow("free")

    scene.until(lambda: [each.outcome for each in scene.episodes("free")] == ["fixed"], "the pod is replaced")

    text = scene.journal_text("free")
    (episode,) = scene.episodes("free")
    stopped_at = next(each.at for each in episode.entries if f"{each.act} {each.what}" == "decided stop")
    assert stopped_at - grown_at < BOUND_S
    assert episode.worker == scene.first["free"].name
    assert "is most over its budget" in text
    assert "the floor is 1536 MiB" in text
    assert "replaces it and is ready" in text
    assert scene.uids("free") != [uid(scene.first["free"])]
    assert (scene.gpu("free").free_bytes or 0) > 7000 * MIB
    for name in ("beside-free", "beside-guarded", "guarded"):
        assert scene.uids(name) == [uid(scene.first[name])]


def test_disruption_budget_delays_it_and_an_executor_that_was_killed_continues(scene: Scene) -> None:
    scene.grow("guarded")
    scene.until(lambda: "disruption budget" in scene.journal_text("guarded"), "the episode waits for the budget")
    assert [each.wait_reason for each in scene.episodes("guarded")] == ["disruption_budget"]
    scene.chain.kill("execute")
    scene.tenants.cluster.end("kube-apiserver")
    scene.chain.start("execute")
    scene.tenants.cluster.begin("kube-apiserver")
    scene.tenants.cluster.wait_until_ready()
    assert scene.uids("guarded") == [uid(scene.first["guarded"])]

    scene.tenants.unprotect("guarded")

    scene.until(lambda: [each.outcome for each in scene.episodes("guarded")] == ["fixed"], "the pod is replaced")
    assert scene.journal_text("guarded").count("decided stop") == 1
    assert scene.uids("guarded") != [uid(scene.first["guarded"])]
