"""GPU memory through the whole pipeline: which containers are recycled when a GPU is short of memory.

The containers are real. The exporter reads a fake NVML library, in which each process holds a fixed amount while it
lives. First everything is a dry run. Then the remedy is armed, with nothing else changed. Then tenants grow.
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
"""Far longer than the delay of a scrape and an evaluation, which take a second each."""

SUSPENDED_S: Final = 12.0
"""How long Prometheus is suspended: less than the time after which Alertmanager resolves its alerts."""

PROGRAM: Final = "import time\nwhile True: time.sleep(1)"


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One container: its GPU of 16 GiB, the memory it holds at first and its budget, both in GiB, and its labels."""

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
    "free-rider": Tenant(gpu="blameless", holds=9.0),
    "modest": Tenant(gpu="blameless", holds=6.0, budget=7),
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
NOT_RECYCLED: Final = [name for name in TENANTS if name not in ("arena", *TIED)]
SHORT: Final = {"GPU-sim-crowded", "GPU-sim-tie", "GPU-sim-blameless", "GPU-sim-kept"}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The stage, with a tenant in each of its containers."""

    stage: Stage
    fleet: DockerFleet
    first: Mapping[str, str]
    relay: Relay
    client: docker.DockerClient

    def episodes(self, name: str) -> list[EpisodeHistory]:
        return [episode for episode in self.stage.ledger.reports.newest() if episode.worker == full_name(name)]

    def journal_text(self, name: str) -> str:
        return "\n".join(f"{entry.act} {entry.what}: {entry.message}" for entry in self.stage.journal(full_name(name)))

    def kill(self, name: str, kept_gib: float) -> None:
        """Kill a tenant, while the driver still counts this much of its memory as used."""
        pid = self.fleet.pid(full_name(name))
        self.relay.kept = {**self.relay.kept, pid: (f"GPU-sim-{TENANTS[name].gpu}", int(kept_gib * GIB))}
        self.client.containers.get(full_name(name)).kill()

    def firing(self, alert: str, label: str, state: str = "firing") -> set[str]:
        found = self.stage.chain.query(f'ALERTS{{alertname="{alert}", alertstate="{state}"}}')
        return {each["metric"][label] for each in found}

    def lifecycle(self, name: str) -> list[str]:
        return [what for what in self.fleet.history(full_name(name)) if what in ("start", "stop", "die", "restart")]

    def card(self, name: str) -> GpuMemoryFacts:
        cards = answered(
            lambda: self.stage.witness.container_evidence(full_name(name), host=self.stage.chain.plan.host)
        ).cards
        assert cards is not None
        (card,) = cards
        return card

    def hold(self, name: str, gib: float) -> None:
        """Set the GPU memory that a tenant's process holds."""
        gpu, held = f"GPU-sim-{TENANTS[name].gpu}", self.stage.gpus.held
        held_on_gpu = {**held.get(gpu, {}), self.fleet.pid(full_name(name)): int(gib * GIB)}
        self.stage.gpus.held = {**held, gpu: held_on_gpu}

    def entered_at(self, name: str, prefix: str) -> float:
        """Unix seconds of the newest journal entry that starts with `prefix`; 0 without one."""
        journal = self.stage.journal(full_name(name))
        return max((each.at for each in journal if f"{each.act} {each.what}".startswith(prefix)), default=0.0)

    def until(self, holds: Callable[[], object], what: str, within_s: float = 120) -> None:
        eventually(holds, what, within_s=within_s, log=lambda: self.stage.chain.log_tail("execute"))


def full_name(name: str) -> str:
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
    """Every container runs and holds its GPU memory; nothing is armed."""
    slots = [Slot(worker=full_name(name), gpus=(f"GPU-sim-{each.gpu}",)) for name, each in TENANTS.items()]
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
            add_tenant(client, fleet, name, tenant)
        first = {name: fleet.incarnation(full_name(name)) for name in TENANTS}
        found = Scene(stage=set_up, fleet=fleet, first=first, relay=relay, client=client)
        for name, tenant in TENANTS.items():
            found.hold(name, tenant.holds)
        yield found


def add_tenant(client: docker.DockerClient, fleet: DockerFleet, name: str, tenant: Tenant) -> None:
    """Replace a worker's container by a tenant, and start it."""
    before = fleet.container(full_name(name))
    image, environment = before.attrs["Config"]["Image"], before.attrs["Config"]["Env"]
    before.remove(force=True)
    labels = {STAGE_LABEL: "true"} | ({MANAGED_LABEL: "true"} if tenant.managed else {})
    labels |= {} if tenant.budget is None else {BUDGET_LABEL: str(tenant.budget * 1024)}
    labels |= {PROTECTED_LABEL: "true"} if tenant.protected else {}
    fleet._containers[full_name(name)] = client.containers.create(
        image,
        ["/usr/bin/python3", "-c", PROGRAM],
        name=full_name(name),
        labels=labels,
        environment=environment,
        network_mode="none",
    )
    fleet.start(full_name(name))


@pytest.fixture(scope="module")
def observed(scene: Scene) -> Scene:
    """A dry run has recorded its decision for each GPU that is short."""
    scene.until(lambda: "would act" in scene.journal_text("arena"), "the dry run would recycle the arena")
    scene.until(
        lambda: any("would act" in scene.journal_text(name) for name in TIED), "one of the two equal tenants is chosen"
    )
    scene.until(lambda: scene.firing("GpuwardenVramLow", "gpu") == SHORT, "an alert fires for each GPU that is short")
    return scene


@pytest.mark.behaviour("C5")
def test_dry_run_reports_the_recycle_and_the_ranking_and_does_nothing(observed: Scene) -> None:
    would = f"would act: would stop {full_name('arena')} and start it: {full_name('arena')} is most over its budget"
    ranking = f"{full_name('arena')} 7168 MiB of 2048 MiB (+5120), {full_name('largest')} 8192 MiB of 9216 MiB (-1024)"

    assert would in observed.journal_text("arena")
    assert ranking in observed.journal_text("arena")
    assert [name for name in TENANTS if observed.lifecycle(name) != ["start"]] == []


@pytest.mark.behaviour("C6")
def test_alerts_name_exactly_the_tenants_over_budget_on_short_gpus(observed: Scene) -> None:
    def recycle_due() -> set[str]:
        return observed.firing("GpuwardenVramRecycleDue", "container")

    expected = {full_name(name) for name in ("arena", *TIED)}
    observed.until(lambda: recycle_due() == expected, "the alert names the tenants to recycle")
    over = {full_name(name) for name in ("arena", "burst", *TIED, "protected", "not-ours", "second", "borrows", "pays")}
    observed.until(
        lambda: observed.firing("GpuwardenVramOverBudget", "container", "pending") == over,
        "every tenant over its budget is reported",
    )
    sources = observed.stage.chain.query("last_over_time(gpuwarden_gpu_info[30s])")
    assert {each["metric"]["source"] for each in sources} == {"nvml"}


@pytest.fixture(scope="module")
def armed(observed: Scene) -> Scene:
    """The remedy is armed, and the recycled containers run again."""
    ledger = observed.stage.ledger
    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="a test", reason="", remedy="recycle_container"))
    observed.until(lambda: is_fixed(observed, "arena"), "the arena is recycled")
    observed.until(lambda: any(is_fixed(observed, name) for name in TIED), "one of the two equal tenants is chosen")
    observed.until(lambda: not observed.firing("GpuwardenVramRecycleDue", "container"), "no tenant has to be recycled")
    return observed


def is_fixed(scene: Scene, name: str) -> bool:
    return outcomes(scene, name) == ["fixed"]


def outcomes(scene: Scene, name: str) -> list[str | None]:
    return [episode.outcome for episode in with_action(scene.episodes(name))]


@pytest.mark.behaviour("C3")
def test_tenant_most_over_its_budget_is_recycled_and_its_memory_returns(armed: Scene) -> None:
    (episode,) = with_action(armed.episodes("arena"))

    assert (episode.remedy, episode.condition, episode.job_id) == ("recycle_container", "vram", None)
    assert armed.lifecycle("arena") == ["start", "die", "stop", "start"]
    assert "decided stop: " + full_name(
        "arena"
    ) + " is most over its budget, by 5120 MiB: 1024 MiB free" in armed.journal_text("arena")
    assert "8192 MiB free on GPU-sim-crowded, the floor is 1536 MiB" in armed.journal_text("arena")
    assert armed.card("largest").free_bytes == 8 * GIB


@pytest.mark.behaviour("C4")
def test_one_of_two_equal_tenants_is_recycled(armed: Scene) -> None:
    """The first by name is recycled. The cool-down holds the other while the driver still counts the memory."""
    kept, recycled = sorted(TIED, key=lambda name: len(armed.lifecycle(name)))

    assert (armed.lifecycle(kept), armed.lifecycle(recycled)) == (["start"], ["start", "die", "stop", "start"])
    assert armed.card("tie-1").free_bytes == int(8.5 * GIB)
    assert recycled == min(TIED)
    assert outcomes(armed, recycled) == ["fixed"]
    assert "fixed" not in outcomes(armed, kept)


@pytest.mark.parametrize("name", NOT_RECYCLED)
def test_tenant_is_not_recycled(armed: Scene, name: str) -> None:
    assert armed.lifecycle(name) == ["start"]
    assert armed.fleet.incarnation(full_name(name)) == armed.first[name]
    assert armed.episodes(name) == []


@pytest.mark.behaviour("C2")
def test_evidence_of_tenants_that_are_not_recycled(armed: Scene) -> None:
    def excess_gib(name: str) -> dict[str, int]:
        return {
            each.container.removeprefix("gpuwarden-tenant-"): ((each.used_bytes or 0) - each.budget_bytes) // GIB
            for each in armed.card(name).tenants
            if each.budget_bytes is not None
        }

    assert excess_gib("burst") == {"burst": 7}
    assert (armed.card("burst").free_bytes or 0) > armed.card("burst").floor_bytes
    assert excess_gib("modest") == {"modest": -1}
    assert (armed.card("modest").free_bytes or 0) < armed.card("modest").floor_bytes
    assert excess_gib("protected") == {"protected": 7, "not-ours": 4}
    assert (armed.card("protected").free_bytes or 0) < armed.card("protected").floor_bytes
    assert [each.recyclable for each in armed.card("protected").tenants] == [False, False]
    short = {"GPU-sim-blameless", "GPU-sim-kept"}
    armed.until(
        lambda: armed.firing("GpuwardenVramLow", "gpu") == short, "an alert fires for the two GPUs that are short"
    )


def test_burst_tenant_is_recycled_once_its_neighbour_needs_the_memory(armed: Scene) -> None:
    """Control of `burst`: only the memory of its neighbour changes."""
    pid = armed.fleet.pid(full_name("largest"))
    slack = {**armed.stage.gpus.held["GPU-sim-slack"], pid: 6 * GIB}

    armed.stage.gpus.held = {**armed.stage.gpus.held, "GPU-sim-slack": slack}

    armed.until(lambda: is_fixed(armed, "burst"), "the tenant is recycled")
    assert armed.lifecycle("burst") == ["start", "die", "stop", "start"]


# --- tenants that grow


@pytest.fixture(scope="module")
def grown(armed: Scene) -> Scene:
    """A tenant grows past its budget, first while memory is free and then until the GPU is short."""
    over = f'gpuwarden_container_gpu_memory_bytes{{container="{full_name("grower")}"}} == {4 * GIB}'
    armed.hold("grower", 4.0)
    armed.until(lambda: armed.stage.chain.query(over), "Prometheus has the memory over the budget")
    assert [armed.lifecycle(name) for name in ("grower", "second", "neighbour")] == [["start"]] * 3
    armed.hold("grower", 7.0)
    armed.until(lambda: is_fixed(armed, "grower"), "the tenant is recycled")
    return armed


@pytest.mark.behaviour("C3")
def test_only_the_tenant_that_grows_until_the_gpu_is_short_is_recycled(grown: Scene) -> None:
    ranking = (
        f"{full_name('grower')} 7168 MiB of 2048 MiB (+5120), {full_name('second')} 5120 MiB of 2048 MiB (+3072), "
        f"{full_name('neighbour')} 3072 MiB of 7168 MiB (-4096)"
    )

    assert grown.lifecycle("grower") == ["start", "die", "stop", "start"]
    assert f"by 5120 MiB: 1024 MiB free on GPU-sim-turns, the floor is 1536 MiB; {ranking}" in grown.journal_text(
        "grower"
    )
    assert "; 8192 MiB free on GPU-sim-turns, the floor is 1536 MiB" in grown.journal_text("grower")
    assert grown.card("second").free_bytes == 8 * GIB
    assert [grown.lifecycle(name) for name in ("second", "neighbour")] == [["start"]] * 2


@pytest.mark.behaviour("C3")
def test_next_tenant_waits_for_the_cooldown_and_is_measured_again(grown: Scene) -> None:
    """Prometheus is suspended during the cool-down, so that its samples and its alert are old."""
    chain = grown.stage.chain
    grown.hold("second", 12.0)
    grown.until(
        lambda: "decided wait: gpu_cooldown" in grown.journal_text("second"), "the tenant waits for the cool-down"
    )
    freed_at = grown.entered_at("grower", "saw free: done")
    # Not earlier: Alertmanager resolves an alert that it no longer receives.
    grown.until(lambda: time.time() > freed_at + COOLDOWN_S - SUSPENDED_S, "the cool-down ends soon")
    chain.signal("prometheus", signal.SIGSTOP)
    suspended_at = time.time()
    try:
        grown.hold("second", 5.0)
        grown.until(
            lambda: grown.entered_at("second", "decided wait: unconfirmed") > suspended_at,
            "the memory is measured again",
        )
        assert "this host: enough memory is free: 8192 MiB free on GPU-sim-turns" in grown.journal_text("second")
        grown.until(lambda: time.time() > freed_at + COOLDOWN_S + 2, "the cool-down is over")
        assert grown.lifecycle("second") == ["start"]
        grown.hold("second", 12.0)
        grown.until(lambda: "fixed" in outcomes(grown, "second"), "the same alert recycles it when the GPU is short")
    finally:
        chain.signal("prometheus", signal.SIGCONT)

    assert grown.lifecycle("second") == ["start", "die", "stop", "start"]
    assert grown.entered_at("second", "decided begin") >= freed_at + COOLDOWN_S
    assert [grown.lifecycle(name) for name in ("grower", "neighbour")] == [["start", "die", "stop", "start"], ["start"]]


# --- tenants that end while the driver still counts their memory


@dataclass(frozen=True, kw_only=True)
class AfterEnds:
    """On each of two GPUs a tenant has ended. Its neighbour is over its budget."""

    scene: Scene
    at: float


@pytest.fixture(scope="module")
def after_ends(grown: Scene) -> AfterEnds:
    """One GPU gets the memory back after half of `vram_return_s`, the other never."""
    at = time.time()
    for name in ("quits", "crashes"):
        grown.kill(name, 9.0)
    low = 'gpuwarden_gpu_memory_free_bytes{gpu=~"GPU-sim-(returned|leaked)"} == 1073741824'
    grown.until(lambda: len(grown.stage.chain.query(low)) == 2, "Prometheus has two GPUs that are short")
    grown.until(lambda: time.time() > at + Thresholds.vram_return_s / 2, "half of the time is over")
    grown.relay.kept = {pid: kept for pid, kept in grown.relay.kept.items() if kept[0] == "GPU-sim-leaked"}
    grown.until(lambda: is_fixed(grown, "pays"), "the neighbour is recycled where the memory is not returned")
    return AfterEnds(scene=grown, at=at)


@pytest.mark.behaviour("C3")
def test_no_tenant_is_recycled_while_memory_of_an_ended_one_returns(after_ends: AfterEnds) -> None:
    scene, alerts = after_ends.scene, 'ALERTS{alertname="GpuwardenVramRecycleDue", gpu=~"GPU-sim-(returned|leaked)"}'
    ever = scene.stage.chain.query(f"group by (container) (last_over_time({alerts}[1h]))")

    assert scene.lifecycle("quits") == ["start", "die"]
    assert (scene.lifecycle("borrows"), scene.episodes("borrows")) == (["start"], [])
    assert [each["metric"]["container"] for each in ever] == [full_name("pays")]


def test_tenant_over_budget_is_recycled_when_memory_does_not_return_in_time(after_ends: AfterEnds) -> None:
    (episode,) = with_action(after_ends.scene.episodes("pays"))

    assert episode.outcome == "fixed"
    assert after_ends.scene.lifecycle("pays") == ["start", "die", "stop", "start"]
    assert after_ends.scene.entered_at("pays", "decided begin") >= after_ends.at + Thresholds.vram_return_s
