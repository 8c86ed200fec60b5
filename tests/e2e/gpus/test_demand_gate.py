"""The demand gate through the whole chain: real containers are started and stopped by the free memory of a GPU."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Final

import docker
import pytest

from exporter.evidence.demand_gate import LABEL
from exporter.evidence.vram_budgets import MANAGED_LABEL
from remediator.remedies.guards import Act, Order
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage
from testbed.workers import STAGE_LABEL, DockerFleet
from tests.waiting import eventually

pytestmark = [
    pytest.mark.needs_docker,
    pytest.mark.needs_parts,
    pytest.mark.slow,
    pytest.mark.behaviour("C7"),
]

GPU: Final = "GPU-sim-shared"
GIB: Final = 2**30
NEEDED_GIB: Final = 9
AFTER_S: Final = 3
MIN_S: Final = 8
TENANTS: Final = ("painter", "sketcher")
PROGRAM: Final = "import signal, time\nsignal.signal(15, lambda *_: exit())\nwhile True: time.sleep(1)"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The stage, with a container that holds GPU memory and two tenants on demand, which are off."""

    stage: Stage
    client: docker.DockerClient

    def pid(self, name: str) -> int:
        return int(self.client.api.inspect_container(name)["State"]["Pid"])

    def hold(self, name: str, gib: float) -> None:
        """Set the GPU memory that a container holds while it runs."""
        gpus = self.stage.gpus
        gpus.held = {GPU: {**gpus.held.get(GPU, {}), self.pid(name): int(gib * GIB)}}

    def on(self) -> list[str]:
        return [name for name in TENANTS if self.pid(name)]

    def lifecycle(self, name: str) -> list[str]:
        fleet = self.stage.fleet
        assert isinstance(fleet, DockerFleet)
        return [what for what in fleet.history(name) if what in ("start", "die")]

    def journal(self, name: str) -> str:
        return "\n".join(f"{each.act} {each.what}: {each.message}" for each in self.stage.journal(name))

    def until(self, holds: Callable[[], object], what: str, within_s: float = 60) -> None:
        eventually(holds, what, within_s=within_s, log=self.tail)

    def tail(self) -> str:
        return "\n".join([*(self.journal(name) for name in TENANTS), self.stage.chain.log_tail("execute")])


@pytest.fixture(scope="module")
def scene(work: Any, engine: Engine) -> Iterator[Scene]:
    slots = [Slot(worker=name, gpus=(GPU,)) for name in ("hog", *TENANTS)]
    with ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setenv("GPUWARDEN_EXPORTER_DEMAND_GATE_AFTER_S", str(AFTER_S))
        patched.setenv("GPUWARDEN_EXPORTER_DEMAND_GATE_IDLE_S", "3")
        patched.setenv("GPUWARDEN_EXPORTER_DEMAND_GATE_MIN_S", str(MIN_S))
        patched.setenv("GPUWARDEN_EXPORTER_VRAM_RETURN_S", "2")
        found = stack.enter_context(stage(work, engine, slots, armed=False, vram_cooldown_s=1.0))
        client = stack.enter_context(closing(docker.DockerClient(base_url=engine.base_url)))
        assert isinstance(found.fleet, DockerFleet)
        for name in ("hog", *TENANTS):
            gate = {LABEL: str(NEEDED_GIB * 1024), MANAGED_LABEL: "true"} if name in TENANTS else {}
            make_container(client, found.fleet, name, gate)
        found.fleet.start("hog")
        scene = Scene(stage=found, client=client)
        scene.hold("hog", 12)
        yield scene


def make_container(client: docker.DockerClient, fleet: DockerFleet, name: str, labels: dict[str, str]) -> None:
    """Replace a worker's container by one without a worker. It does not run."""
    before = fleet.container(name)
    image, environment = before.attrs["Config"]["Image"], before.attrs["Config"]["Env"]
    before.remove(force=True)
    fleet._containers[name] = client.containers.create(
        image,
        ["/usr/bin/python3", "-c", PROGRAM],
        name=name,
        labels={STAGE_LABEL: "true", **labels},
        environment=environment,
        network_mode="none",
    )


def test_containers_on_demand_are_started_and_stopped_by_free_memory(scene: Scene) -> None:
    room = "min(gpuwarden_on_demand_state_seconds) >= scalar(min(gpuwarden_demand_gate_min_threshold_seconds))"
    scene.until(lambda: scene.stage.chain.query(room), "both have been off for the minimum time")

    # Memory that flaps never lasts. A dry run starts nothing.
    for each in range(12):
        scene.hold("hog", 1 if each % 2 else 12)
        time.sleep(1)
    assert "GpuwardenOnDemandUp" not in str(scene.stage.chain.query("ALERTS"))
    scene.hold("hog", 1)
    scene.until(lambda: any("would act: would start" in scene.journal(name) for name in TENANTS), "a dry run says it")
    assert scene.on() == []

    arm(scene)
    scene.until(scene.on, "one is started")
    (first,) = scene.on()
    (second,) = set(TENANTS) - {first}
    # It loads: its memory is not in use yet, and the other one gets none of it.
    scene.until(lambda: "9216 MiB for other tenants" in scene.journal(second) or gone_quiet(scene, second),
                "the other one has no room")  # fmt: skip
    scene.hold(first, NEEDED_GIB)
    scene.until(lambda: "did scale_up: took" in scene.journal(first), "the start is recorded")
    scene.until(lambda: "decided close: fixed" in scene.journal(first), "its episode is closed")

    # Short of memory and idle: it is stopped, and not started again.
    scene.hold("hog", 6)
    scene.until(lambda: not scene.on(), "it is stopped")
    scene.until(lambda: scene.journal(first).count("decided close: fixed") == 2, "its second episode is closed")
    assert "idle for" in scene.journal(first)
    assert (scene.lifecycle(first), scene.lifecycle(second)) == (["start", "die"], [])
    assert scene.client.containers.get("hog").status == "running"


def gone_quiet(scene: Scene, name: str) -> bool:
    """Whether its alert ended."""
    return not scene.stage.chain.query(f'ALERTS{{alertname="GpuwardenOnDemandUp", tenant="{name}"}}')


def arm(scene: Scene) -> None:
    order = Order(act=Act.ARM, at=time.time(), who="a test", reason="", remedy="scale_tenant")
    scene.stage.ledger.orders.give(order)
