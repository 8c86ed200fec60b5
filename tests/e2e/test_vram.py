"""GPU memory through the whole chain: who is recycled when a GPU is short of it, and who is left alone.

The containers are real, the memory that the driver says their processes hold is played: a process holds what it was
given for as long as it lives. First everything is a dry run; then, with nothing else changed, it is armed.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Final

import docker
import pytest

from deploy.engine import Engine
from deploy.fleet import STAGE_LABEL, DockerFleet
from deploy.simulator import Slot
from deploy.stage import Stage, stage
from exporter.tenancy import BUDGET_LABEL, MANAGED_LABEL, PROTECTED_LABEL
from gpuwarden.facts import CardFacts
from remediator.ledger import Story
from remediator.safety import Act, Order
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts]

GIB: Final = 2**30
SLEEPS: Final = "import time\nwhile True: time.sleep(1)"


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One container: its GPU of 16 GiB, what it holds of it in GiB at first and then, its budget, and its labels."""

    gpu: str
    holds: float
    budget: int | None = None
    managed: bool = True
    protected: bool = False


TENANTS: Final[Mapping[str, Tenant]] = {
    "arena": Tenant(gpu="crowded", holds=7.0, budget=2),
    "largest": Tenant(gpu="crowded", holds=8.0, budget=9),
    "burst": Tenant(gpu="slack", holds=9.0, budget=2),
    "tie-1": Tenant(gpu="tie", holds=7.5, budget=4),
    "tie-2": Tenant(gpu="tie", holds=7.5, budget=4),
    "free-rider": Tenant(gpu="nobody", holds=9.0),
    "modest": Tenant(gpu="nobody", holds=6.0, budget=7),
    "protected": Tenant(gpu="kept", holds=9.0, budget=2, protected=True),
    "not-ours": Tenant(gpu="kept", holds=6.0, budget=2, managed=False),
}
TIED: Final = ("tie-1", "tie-2")
LEFT_ALONE: Final = [name for name in TENANTS if name not in ("arena", *TIED)]
SHORT: Final = {"GPU-sim-crowded", "GPU-sim-tie", "GPU-sim-nobody", "GPU-sim-kept"}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The stage, and a tenant in each of its containers."""

    stage: Stage
    fleet: DockerFleet
    first: Mapping[str, str]

    def stories(self, name: str) -> list[Story]:
        return [story for story in self.stage.ledger.stories() if story.worker == named(name)]

    def told(self, name: str) -> str:
        return "\n".join(f"{entry.act} {entry.step}: {entry.because}" for entry in self.stage.account(named(name)))

    def firing(self, alert: str, label: str, state: str = "firing") -> set[str]:
        found = self.stage.chain.query(f'ALERTS{{alertname="{alert}", alertstate="{state}"}}')
        return {each["metric"][label] for each in found}

    def happened(self, name: str) -> list[str]:
        return [what for what in self.fleet.history(named(name)) if what in ("start", "stop", "die", "restart")]

    def card(self, name: str) -> CardFacts:
        cards = self.stage.witness.about_server(named(name), host=self.stage.chain.plan.host).cards
        assert cards is not None
        (card,) = cards
        return card

    def until(self, holds: Callable[[], object], what: str, within_s: float = 120) -> None:
        eventually(holds, what, within_s=within_s, log=lambda: self.stage.chain.log_tail("execute"))


def named(name: str) -> str:
    return f"gpuwarden-tenant-{name}"


@pytest.fixture(scope="module")
def scene(work: Any, engine: Engine) -> Iterator[Scene]:
    """Every container runs, and the memory of its GPU is taken; nothing is armed."""
    slots = [Slot(worker=named(name), gpus=(f"GPU-sim-{each.gpu}",)) for name, each in TENANTS.items()]
    with ExitStack() as stack:
        set_up = stack.enter_context(stage(work, engine, slots, armed=False, stop_grace_s=1.0))
        fleet = set_up.fleet
        assert isinstance(fleet, DockerFleet)
        client = stack.enter_context(closing(docker.DockerClient(base_url=engine.base_url)))
        held: dict[str, dict[int, int]] = {}
        for name, tenant in TENANTS.items():
            move_in(client, fleet, name, tenant)
            its = held.setdefault(f"GPU-sim-{tenant.gpu}", {})
            its[fleet.pid(named(name))] = int(tenant.holds * GIB)
        set_up.gpus.held = held
        yield Scene(stage=set_up, fleet=fleet, first={name: fleet.incarnation(named(name)) for name in TENANTS})


def move_in(client: docker.DockerClient, fleet: DockerFleet, name: str, tenant: Tenant) -> None:
    """Put a tenant where the stage has made a worker's container, and start it."""
    before = fleet.container(named(name))
    image, environment = before.attrs["Config"]["Image"], before.attrs["Config"]["Env"]
    before.remove(force=True)
    labels = {STAGE_LABEL: "true"} | ({MANAGED_LABEL: "true"} if tenant.managed else {})
    labels |= {} if tenant.budget is None else {BUDGET_LABEL: str(tenant.budget * 1024)}
    labels |= {PROTECTED_LABEL: "true"} if tenant.protected else {}
    fleet._containers[named(name)] = client.containers.create(
        image,
        ["/usr/bin/python3", "-c", SLEEPS],
        name=named(name),
        labels=labels,
        environment=environment,
        network_mode="none",
    )
    fleet.start(named(name))


@pytest.fixture(scope="module")
def observed(scene: Scene) -> Scene:
    """In a dry run: the ledger tells what would be done, for one tenant of each GPU that is short."""
    scene.until(lambda: "would act" in scene.told("arena"), "the arena would be recycled")
    scene.until(lambda: any("would act" in scene.told(name) for name in TIED), "and one of the two that are level")
    scene.until(lambda: scene.firing("GpuwardenVramLow", "gpu") == SHORT, "a person is told of each GPU that is short")
    return scene


@pytest.mark.behaviour("C5")
def test_in_a_dry_run_what_would_be_done_is_told_with_the_ranking_and_nothing_is(observed: Scene) -> None:
    would = f"would act: would stop {named('arena')} and start it: {named('arena')} is most over its budget"
    ranking = f"{named('arena')} 7168 MiB of 2048 MiB (+5120), {named('largest')} 8192 MiB of 9216 MiB (-1024)"

    assert would in observed.told("arena")
    assert ranking in observed.told("arena")
    assert [name for name in TENANTS if observed.happened(name) != ["start"]] == []


@pytest.mark.behaviour("C6")
def test_a_person_is_told_of_each_gpu_that_is_short_and_one_tenant_of_it_is_named_at_most(observed: Scene) -> None:
    victims = observed.firing("GpuwardenVramVictim", "container")

    assert named("arena") in victims
    assert len(victims & {named(name) for name in TIED}) == 1
    assert victims <= {named(name) for name in ("arena", *TIED)}
    over = {named(name) for name in ("arena", "burst", *TIED, "protected", "not-ours")}
    assert observed.firing("GpuwardenVramOverBudget", "container", state="pending") == over


@pytest.fixture(scope="module")
def armed(observed: Scene) -> Scene:
    """Armed, and whoever goes is back."""
    ledger = observed.stage.ledger
    ledger.order(Order(act=Act.ARM, at=time.time(), who="a test", because="", remedy="recycle_container"))
    observed.until(lambda: mended(observed, "arena"), "the arena is recycled")
    observed.until(lambda: any(mended(observed, name) for name in TIED), "and one of the two that are level")
    observed.until(lambda: not observed.firing("GpuwardenVramVictim", "container"), "nobody is to go any more")
    return observed


def mended(scene: Scene, name: str) -> bool:
    return [story.outcome for story in scene.stories(name)] == ["mended"]


@pytest.mark.behaviour("C3")
def test_the_one_most_over_its_budget_is_recycled_and_its_memory_is_seen_to_come_back(armed: Scene) -> None:
    (story,) = armed.stories("arena")

    assert (story.remedy, story.trip, story.job_id) == ("recycle_container", "vram", None)
    assert armed.happened("arena") == ["start", "die", "stop", "start"]
    assert "decided stop: " + named("arena") + " is most over its budget, by 5120 MiB: 1024 MiB free" in armed.told(
        "arena"
    )
    assert "8192 MiB free on GPU-sim-crowded, the floor is 1536 MiB" in armed.told("arena")
    assert armed.card("largest").free_bytes == 8 * GIB


@pytest.mark.behaviour("C4")
def test_of_two_that_are_level_one_goes_and_the_other_stays(armed: Scene) -> None:
    histories = sorted(armed.happened(name) for name in TIED)

    assert histories == [["start"], ["start", "die", "stop", "start"]]
    assert armed.card("tie-1").free_bytes == int(8.5 * GIB)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_tenant_is_left_alone_that_is(armed: Scene, name: str) -> None:
    assert armed.happened(name) == ["start"]
    assert armed.fleet.incarnation(named(name)) == armed.first[name]
    assert armed.stories(name) == []


@pytest.mark.behaviour("C2")
def test_why_each_of_them_is_left_alone(armed: Scene) -> None:
    def over(name: str) -> dict[str, int]:
        return {
            each.container.removeprefix("gpuwarden-tenant-"): ((each.used_bytes or 0) - each.budget_bytes) // GIB
            for each in armed.card(name).tenants
            if each.budget_bytes is not None
        }

    assert over("burst") == {"burst": 7}
    assert (armed.card("burst").free_bytes or 0) > armed.card("burst").floor_bytes
    assert over("modest") == {"modest": -1}
    assert (armed.card("modest").free_bytes or 0) < armed.card("modest").floor_bytes
    assert over("protected") == {"protected": 7, "not-ours": 4}
    assert (armed.card("protected").free_bytes or 0) < armed.card("protected").floor_bytes
    assert [each.recyclable for each in armed.card("protected").tenants] == [False, False]
    assert armed.firing("GpuwardenVramLow", "gpu") == {"GPU-sim-nobody", "GPU-sim-kept"}


def test_once_its_slack_is_taken_the_one_that_burst_into_it_goes_too(armed: Scene) -> None:
    """The control of the burst: the same container with the same memory, and only its neighbour's is new."""
    pid = armed.fleet.pid(named("largest"))
    slack = {**armed.stage.gpus.held["GPU-sim-slack"], pid: 6 * GIB}

    armed.stage.gpus.held = {**armed.stage.gpus.held, "GPU-sim-slack": slack}

    armed.until(lambda: mended(armed, "burst"), "it is recycled")
    assert armed.happened("burst") == ["start", "die", "stop", "start"]
