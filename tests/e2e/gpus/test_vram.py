"""GPU memory through the whole chain: who is recycled when a GPU is short of it, and who is left alone.

The containers are real, and so is how the exporter asks: NVIDIA's library, by a stand-in. What it says that their
processes hold is played: a process holds what it was given for as long as it lives. First everything is a dry run;
then, with nothing else changed, it is armed; then tenants grow.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Final

import docker
import pytest

from deploy.standalone import debian_packages
from exporter.evidence.vram_budgets import BUDGET_LABEL, MANAGED_LABEL, PROTECTED_LABEL
from exporter.model.thresholds import Thresholds
from gpuwarden.evidence import GpuMemoryFacts
from remediator.ledger.reports import EpisodeHistory
from remediator.remedies.guards import Act, Order
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from testbed.workers import STAGE_LABEL, DockerFleet
from tests.nvml.driver import Driver, build
from tests.nvml.relay import Relay
from tests.waiting import answered, eventually

pytestmark = [pytest.mark.needs_compiler, pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

GIB: Final = 2**30
COOLDOWN_S: Final = 45.0
"""Far longer than the telemetry's lag here, also on a busy machine: a scrape and an evaluation, of a second each."""

STANDS_STILL_S: Final = 12.0
"""For how long of it Prometheus stands still: less than until its alerts end without it."""

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
    "grower": Tenant(gpu="turns", holds=1.0, budget=2),
    "second": Tenant(gpu="turns", holds=5.0, budget=2),
    "neighbour": Tenant(gpu="turns", holds=3.0, budget=7),
    "quits": Tenant(gpu="returned", holds=5.0, budget=12),
    "borrows": Tenant(gpu="returned", holds=6.0, budget=2),
    "crashes": Tenant(gpu="leaked", holds=5.0, budget=12),
    "pays": Tenant(gpu="leaked", holds=6.0, budget=2),
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
    relay: Relay
    client: docker.DockerClient

    def stories(self, name: str) -> list[EpisodeHistory]:
        return [story for story in self.stage.ledger.reports.newest() if story.worker == named(name)]

    def told(self, name: str) -> str:
        return "\n".join(f"{entry.act} {entry.what}: {entry.message}" for entry in self.stage.journal(named(name)))

    def end(self, name: str, kept_gib: float) -> None:
        """Have a tenant end by itself, its GPU's driver counting so much as in use still that it held."""
        pid = self.fleet.pid(named(name))
        self.relay.kept = {**self.relay.kept, pid: (f"GPU-sim-{TENANTS[name].gpu}", int(kept_gib * GIB))}
        self.client.containers.get(named(name)).kill()

    def firing(self, alert: str, label: str, state: str = "firing") -> set[str]:
        found = self.stage.chain.query(f'ALERTS{{alertname="{alert}", alertstate="{state}"}}')
        return {each["metric"][label] for each in found}

    def happened(self, name: str) -> list[str]:
        return [what for what in self.fleet.history(named(name)) if what in ("start", "stop", "die", "restart")]

    def card(self, name: str) -> GpuMemoryFacts:
        cards = answered(
            lambda: self.stage.witness.container_evidence(named(name), host=self.stage.chain.plan.host)
        ).cards
        assert cards is not None
        (card,) = cards
        return card

    def hold(self, name: str, gib: float) -> None:
        """Have a tenant's process hold so much from now on."""
        gpu, held = f"GPU-sim-{TENANTS[name].gpu}", self.stage.gpus.held
        its = {**held.get(gpu, {}), self.fleet.pid(named(name)): int(gib * GIB)}
        self.stage.gpus.held = {**held, gpu: its}

    def at(self, name: str, told: str) -> float:
        """When the newest entry that begins so was written in a tenant's account, Unix seconds; 0: there is none."""
        account = self.stage.journal(named(name))
        return max((each.at for each in account if f"{each.act} {each.what}".startswith(told)), default=0.0)

    def until(self, holds: Callable[[], object], what: str, within_s: float = 120) -> None:
        eventually(holds, what, within_s=within_s, log=lambda: self.stage.chain.log_tail("execute"))


def named(name: str) -> str:
    return f"gpuwarden-tenant-{name}"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = tmp_path_factory.mktemp("nvml")
    try:
        return Driver(build(folder), folder / "nvml.script")
    except debian_packages.PartMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def scene(work: Any, engine: Engine, driver: Driver) -> Iterator[Scene]:
    """Every container runs, and the memory of its GPU is taken; nothing is armed."""
    slots = [Slot(worker=named(name), gpus=(f"GPU-sim-{each.gpu}",)) for name, each in TENANTS.items()]
    with ExitStack() as stack:
        set_up = stack.enter_context(
            stage(work, engine, slots, armed=False, stop_grace_s=1.0, vram_cooldown_s=COOLDOWN_S)
        )
        relay = Relay(work / "gpus.json", driver)
        stack.enter_context(relay.going_on())
        relay.stands_in(set_up.chain)
        fleet = set_up.fleet
        assert isinstance(fleet, DockerFleet)
        client = stack.enter_context(closing(docker.DockerClient(base_url=engine.base_url)))
        for name, tenant in TENANTS.items():
            move_in(client, fleet, name, tenant)
        first = {name: fleet.incarnation(named(name)) for name in TENANTS}
        found = Scene(stage=set_up, fleet=fleet, first=first, relay=relay, client=client)
        for name, tenant in TENANTS.items():
            found.hold(name, tenant.holds)
        yield found


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
def test_each_tenant_over_its_budget_on_a_gpu_that_is_short_is_named_and_no_other(observed: Scene) -> None:
    def victims() -> set[str]:
        return observed.firing("GpuwardenVramRecycleDue", "container")

    wanted = {named(name) for name in ("arena", *TIED)}
    observed.until(lambda: victims() == wanted, "those over their budgets are named")
    over = {named(name) for name in ("arena", "burst", *TIED, "protected", "not-ours", "second", "borrows", "pays")}
    observed.until(lambda: observed.firing("GpuwardenVramOverBudget", "container", "pending") == over, "all are told")
    sources = observed.stage.chain.query("last_over_time(gpuwarden_gpu_info[30s])")
    assert {each["metric"]["source"] for each in sources} == {"nvml"}


@pytest.fixture(scope="module")
def armed(observed: Scene) -> Scene:
    """Armed, and whoever goes is back."""
    ledger = observed.stage.ledger
    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="a test", because="", remedy="recycle_container"))
    observed.until(lambda: mended(observed, "arena"), "the arena is recycled")
    observed.until(lambda: any(mended(observed, name) for name in TIED), "and one of the two that are level")
    observed.until(lambda: not observed.firing("GpuwardenVramRecycleDue", "container"), "nobody is to go any more")
    return observed


def mended(scene: Scene, name: str) -> bool:
    return outcomes(scene, name) == ["mended"]


def outcomes(scene: Scene, name: str) -> list[str | None]:
    return [story.outcome for story in with_action(scene.stories(name))]


@pytest.mark.behaviour("C3")
def test_the_one_most_over_its_budget_is_recycled_and_its_memory_is_seen_to_come_back(armed: Scene) -> None:
    (story,) = with_action(armed.stories("arena"))

    assert (story.remedy, story.condition, story.job_id) == ("recycle_container", "vram", None)
    assert armed.happened("arena") == ["start", "die", "stop", "start"]
    assert "decided stop: " + named("arena") + " is most over its budget, by 5120 MiB: 1024 MiB free" in armed.told(
        "arena"
    )
    assert "8192 MiB free on GPU-sim-crowded, the floor is 1536 MiB" in armed.told("arena")
    assert armed.card("largest").free_bytes == 8 * GIB


@pytest.mark.behaviour("C4")
def test_of_two_that_are_level_one_goes_and_the_other_stays(armed: Scene) -> None:
    """The first by name goes. While the driver still counts its memory, the cool-down holds the other one."""
    stays, goes = sorted(TIED, key=lambda name: len(armed.happened(name)))

    assert (armed.happened(stays), armed.happened(goes)) == (["start"], ["start", "die", "stop", "start"])
    assert armed.card("tie-1").free_bytes == int(8.5 * GIB)
    assert goes == min(TIED)
    assert outcomes(armed, goes) == ["mended"]
    assert "mended" not in outcomes(armed, stays)


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
    short = {"GPU-sim-nobody", "GPU-sim-kept"}
    armed.until(lambda: armed.firing("GpuwardenVramLow", "gpu") == short, "a person is told of the two that are short")


def test_once_its_slack_is_taken_the_one_that_burst_into_it_goes_too(armed: Scene) -> None:
    """The control of the burst: the same container with the same memory, and only its neighbour's is new."""
    pid = armed.fleet.pid(named("largest"))
    slack = {**armed.stage.gpus.held["GPU-sim-slack"], pid: 6 * GIB}

    armed.stage.gpus.held = {**armed.stage.gpus.held, "GPU-sim-slack": slack}

    armed.until(lambda: mended(armed, "burst"), "it is recycled")
    assert armed.happened("burst") == ["start", "die", "stop", "start"]


# --- one grows, and then the next


@pytest.fixture(scope="module")
def grown(armed: Scene) -> Scene:
    """A tenant grows past its budget while there is room, and on until there is none."""
    over = f'gpuwarden_container_gpu_memory_bytes{{container="{named("grower")}"}} == {4 * GIB}'
    armed.hold("grower", 4.0)
    armed.until(lambda: armed.stage.chain.query(over), "the whole chain has seen that it is over its budget")
    assert [armed.happened(name) for name in ("grower", "second", "neighbour")] == [["start"]] * 3
    armed.hold("grower", 7.0)
    armed.until(lambda: mended(armed, "grower"), "it is recycled")
    return armed


@pytest.mark.behaviour("C3")
def test_who_grows_past_its_budget_until_its_gpu_is_short_is_the_only_one_that_goes(grown: Scene) -> None:
    ranking = (
        f"{named('grower')} 7168 MiB of 2048 MiB (+5120), {named('second')} 5120 MiB of 2048 MiB (+3072), "
        f"{named('neighbour')} 3072 MiB of 7168 MiB (-4096)"
    )

    assert grown.happened("grower") == ["start", "die", "stop", "start"]
    assert f"by 5120 MiB: 1024 MiB free on GPU-sim-turns, the floor is 1536 MiB; {ranking}" in grown.told("grower")
    assert "; 8192 MiB free on GPU-sim-turns, the floor is 1536 MiB" in grown.told("grower")
    assert grown.card("second").free_bytes == 8 * GIB
    assert [grown.happened(name) for name in ("second", "neighbour")] == [["start"]] * 2


@pytest.mark.behaviour("C3")
def test_the_next_one_waits_for_the_cool_down_and_goes_by_what_is_measured_then(grown: Scene) -> None:
    """Prometheus stands still meanwhile, as one that lags: what it knows, and its alert, is of before."""
    chain = grown.stage.chain
    grown.hold("second", 12.0)
    grown.until(lambda: "decided wait: gpu_cooldown" in grown.told("second"), "it is to go, and waits")
    freed_at = grown.at("grower", "saw free: done")
    # Not sooner: Alertmanager ends an alert of which it hears no more.
    grown.until(lambda: time.time() > freed_at + COOLDOWN_S - STANDS_STILL_S, "the cool-down is over soon")
    chain.signal("prometheus", signal.SIGSTOP)
    stopped_at = time.time()
    try:
        grown.hold("second", 5.0)
        grown.until(lambda: grown.at("second", "decided wait: unconfirmed") > stopped_at, "it is measured anew")
        assert "this host: enough memory is free: 8192 MiB free on GPU-sim-turns" in grown.told("second")
        grown.until(lambda: time.time() > freed_at + COOLDOWN_S + 2, "the cool-down is over")
        assert grown.happened("second") == ["start"]
        grown.hold("second", 12.0)
        grown.until(lambda: "mended" in outcomes(grown, "second"), "where there is no room it goes, by the same alert")
    finally:
        chain.signal("prometheus", signal.SIGCONT)

    assert grown.happened("second") == ["start", "die", "stop", "start"]
    assert grown.at("second", "decided begin") >= freed_at + COOLDOWN_S
    assert [grown.happened(name) for name in ("grower", "neighbour")] == [["start", "die", "stop", "start"], ["start"]]


# --- one ends by itself, and the driver counts its memory still


@dataclass(frozen=True, kw_only=True)
class Ended:
    """On two GPUs alike one has grown and ended, and has left a neighbour that is over its budget."""

    scene: Scene
    at: float


@pytest.fixture(scope="module")
def ended(grown: Scene) -> Ended:
    """Of one GPU the memory is back after half the bound, of the other it never is."""
    at = time.time()
    for name in ("quits", "crashes"):
        grown.end(name, 9.0)
    low = 'gpuwarden_gpu_memory_free_bytes{gpu=~"GPU-sim-(returned|leaked)"} == 1073741824'
    grown.until(lambda: len(grown.stage.chain.query(low)) == 2, "the whole chain has seen that they are short")
    grown.until(lambda: time.time() > at + Thresholds.vram_return_s / 2, "half the bound is over")
    grown.relay.kept = {pid: kept for pid, kept in grown.relay.kept.items() if kept[0] == "GPU-sim-leaked"}
    grown.until(lambda: mended(grown, "pays"), "where it never is back the neighbour is recycled")
    return Ended(scene=grown, at=at)


@pytest.mark.behaviour("C3")
def test_nobody_goes_for_the_memory_of_one_that_has_ended_by_itself_while_it_is_on_its_way_back(ended: Ended) -> None:
    scene, alerts = ended.scene, 'ALERTS{alertname="GpuwardenVramRecycleDue", gpu=~"GPU-sim-(returned|leaked)"}'
    ever = scene.stage.chain.query(f"group by (container) (last_over_time({alerts}[1h]))")

    assert scene.happened("quits") == ["start", "die"]
    assert (scene.happened("borrows"), scene.stories("borrows")) == (["start"], [])
    assert [each["metric"]["container"] for each in ever] == [named("pays")]


def test_what_is_not_back_within_the_bound_is_taken_to_stay_and_who_is_over_its_budget_goes(ended: Ended) -> None:
    (story,) = with_action(ended.scene.stories("pays"))

    assert story.outcome == "mended"
    assert ended.scene.happened("pays") == ["start", "die", "stop", "start"]
    assert ended.scene.at("pays", "decided begin") >= ended.at + Thresholds.vram_return_s
