"""Play a scenario on a host, and return the series that its exporter publishes.

Only what programs do is simulated. The exporter's pure modules and collectors make all series.
"""

import math
from collections.abc import Container as Names
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from prometheus_client.core import Metric

from bench.corpus.driver import Driver
from bench.corpus.exporter import AnsweredFile, Exporter
from bench.corpus.life import MIB, Life
from bench.corpus.scenario import Doing, Program, Scenario, at
from exporter.collectors import COLLECTORS
from exporter.collectors.family import Family, gauge
from exporter.evidence import vram_budgets
from exporter.evidence.windows import WORK_WINDOW_S
from exporter.evidence.work_history import HEAVY_FAULTS_PER_S, HEAVY_IO_BYTES_PER_S
from exporter.model.container import Container
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from gpuwarden.queue.hosts.silence import SeenHost, decide
from gpuwarden.queue.items.tally import RunTally, WorkerTally
from gpuwarden.state_file import Stamp
from remediator.plan import Limits
from remediator.remedies import recycle_container

STARTED_S: Final = 1_000_000
"""Start of a scenario, seconds since boot."""
BEFORE_S: Final = int(WORK_WINDOW_S + Thresholds.gap_max_s)
"""The host is sampled each second from this long before a change, for the averages over a window."""
AFTERWARDS_S: Final = int(30 + WORK_WINDOW_S + Thresholds.gap_max_s)
"""And until this long after a change, when the evidence is steady again."""
SCRAPED: Final = ("watched", "node", "clock set", "rebooted")
"""Hosts whose scrapes succeed."""
LOOK_S: Final = 5
BLIND: Final = ("unwatched", "frozen", "asleep")
"""Hosts whose exporter does not sample."""

JOB: Final = ("job", "gpuwarden-exporter")
LOST: Final = "gpuwarden_gateway_host_lost"

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A series: name and labels, with `host`."""


class Host:
    """One host with its programs, GPUs and exporter."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self.name = name
        self._scenario = scenario
        self._timeline = scenario.hosts.get(name, ())
        self._thresholds = Thresholds()
        mine = [each for each in scenario.programs if each.host == name]
        self.lives = [Life(each, pid=100 + number) for number, each in enumerate(mine)]
        self._driver = Driver(name, scenario, self.lives)
        self._boots = 0
        self._now = Stamp(boottime_s=float(STARTED_S), boot_id="boot-0", unix_s=float(STARTED_S))
        self._places: dict[str, Container] = {}
        self._answered = AnsweredFile()
        self._every_s = math.gcd(int(self._thresholds.gap_max_s), scenario.scrape_s)
        self._every_second = frozenset(self._seconds_near_changes(mine))
        self._exporter = self._start_exporter()

    def _start_exporter(self) -> Exporter:
        return Exporter(
            self.name, self.lives, self._driver, places=self._places, answered=self._answered, now=lambda: self._now
        )

    @property
    def snapshot(self) -> Snapshot | None:
        """The exporter's last sample; `None` before the first."""
        return self._exporter.snapshot

    def play(self, second: int) -> None:
        """Let programs act until this second, and the exporter sample if it runs."""
        state = at(self._timeline, second, "watched")
        unix_s = STARTED_S + second + (3600 if state == "clock set" else 0)
        boots = sum(each == "rebooted" and since_s <= second for since_s, each in self._timeline)
        self._now = now = Stamp(boottime_s=float(STARTED_S + second), boot_id=f"boot-{boots}", unix_s=float(unix_s))
        for life in self.lives:
            if state == "asleep":
                life.sleep(second)
            else:
                life.advance(second, now)
        if state == "unwatched" or boots != self._boots:
            self._exporter = self._start_exporter()
            self._driver.began_s = second
        if boots != self._boots:
            self._driver.booted_s = second
        self._boots = boots
        if state not in BLIND:
            self._exporter.sample(second, now, is_node=state == "node")

    def needs_sample(self, second: int) -> bool:
        """Whether a sample at this second can change a series other than by the time that passed."""
        return second % self._every_s == 0 or second in self._every_second

    def _seconds_near_changes(self, programs: Sequence[Program]) -> Iterator[int]:
        ends_s = self._scenario.plays_s
        changes = {0} | {
            since_s for timeline in (self._timeline, *self._scenario.gpus.values()) for since_s, _ in timeline
        }
        for program in programs:
            changes |= {since_s for since_s, _ in program.does}
            for (since_s, doing), (until_s, _) in pairwise((*program.does, (ends_s, Doing()))):
                if program.asked_every_s or _needs_every_second(doing, self._thresholds):
                    yield from range(since_s, until_s)
        for since_s in changes:
            yield from range(max(0, since_s - BEFORE_S), since_s + AFTERWARDS_S + 1)

    def answers(self, second: int) -> bool:
        """Whether a scrape succeeds."""
        return at(self._timeline, second, "watched") in SCRAPED and self.snapshot is not None

    def scrape(self, second: int, names: Names[str], hosts: Sequence["Host"]) -> dict[Key, float]:
        """Return the series with these names; none if the scrape fails.

        Raises:
            RuntimeError: a collector fails.
        """
        if self.snapshot is None or not self.answers(second):
            return {}
        found = (*self._exporter.collector.collect(), *remediator(hosts), self._quarantine(second))
        families = [each for each in found if isinstance(each, Family)]
        (success,) = [each for each in families if each.sample_name == "gpuwarden_collector_success"]
        if failed := [name for (name,), value in success.rows if name in COLLECTORS and not value]:
            raise RuntimeError(f"collector {failed[0]} failed at {second}s on host {self.name}, see the log above")
        return {
            (family.sample_name, (*zip(family.labels, values, strict=True), ("host", self.name))): float(value)
            for family in families
            if family.sample_name in names
            for values, value in family.rows
        }

    def _quarantine(self, second: int) -> Metric:
        rows = [((gpu,), 1.0) for gpu in self._driver.quarantined(second)]
        name = "gpuwarden_queue_host_gpu_quarantined_info"
        return gauge(name, "", ("gpu",), rows, source="the scenario", absent="never")


class Gateway:
    """A central gateway, which hears each host while its scrapes succeed. Each host has jobs."""

    def __init__(self) -> None:
        self._seen: dict[str, SeenHost] = {}

    def look(self, second: int, heard: Iterable[str]) -> None:
        """Decide which hosts are lost."""
        self._seen |= {name: SeenHost(host=name, heard_at=second) for name in heard}
        limits = {"since": 0.0, "after_s": Limits.host_lost_after_s}
        for each in decide(self._seen.values(), at_work=self._seen, now=second, **limits).lost:
            self._seen[each.host] = replace(each, lost_at=second)

    def lost(self) -> dict[str, bool]:
        """Whether each known host is lost."""
        return {name: each.lost_at is not None for name, each in self._seen.items()}


def _needs_every_second(doing: Doing, thresholds: Thresholds) -> bool:
    """Whether less frequent samples change the evidence: with low rates and with changing memory."""
    rates = (
        (doing.io_mib_per_s * MIB, thresholds.io_idle_bytes_per_s),
        (doing.faults_per_s, thresholds.page_faults_idle_per_s),
        (doing.cpu_cores, thresholds.cpu_idle_ratio),
        (doing.io_mib_per_s * MIB, HEAVY_IO_BYTES_PER_S),
        (doing.faults_per_s, HEAVY_FAULTS_PER_S),
    )
    grows = doing.ram_mib_per_s or doing.ram_swings_mib or doing.vram_mib_per_s
    return bool(grows) or any(0 < rate <= least for rate, least in rates)


def remediator(hosts: Iterable[Host]) -> Iterator[Metric]:
    """Series of each host's remediator that rules read: health, a setting, items of runs."""
    yield gauge("gpuwarden_remediator_ledger_up", "", (), [((), 1.0)], source="the scenario", absent="never")
    yield gauge(
        "gpuwarden_remediator_wrangle_activation_items",
        "",
        (),
        [((), float(Limits.wrangle_activation))],
        source="the scenario",
        absent="never",
    )
    found = [
        ((life.program.run, host.name, life.program.name), life)
        for host in hosts
        for life in host.lives
        if life.program.run and life.failed
    ]
    labels = ("run", "worker_host", "worker")
    yield gauge(
        "gpuwarden_queue_run_items_failed",
        "",
        labels,
        [(key, float(life.failed)) for key, life in found],
        source="the scenario",
        absent="never",
    )
    yield gauge(
        "gpuwarden_queue_run_items_done",
        "",
        labels,
        [(key, float(life.finished)) for key, life in found],
        source="the scenario",
        absent="never",
    )


def series(scenario: Scenario, *, wanted: Names[str]) -> dict[Key, list[float | str | None]]:
    """Return the sample of each series at each scrape: a value, `stale` after its last one, or `None`.

    While Prometheus is down, it marks no series as stale: it returns ended ones for five more minutes.

    Args:
        scenario: to play.
        wanted: names of the series.
    """
    hosts = [Host(name, scenario) for name in sorted({each.host for each in scenario.programs} | set(scenario.hosts))]
    scrapes = scenario.plays_s // scenario.scrape_s + 1
    found: dict[Key, list[float | str | None]] = {}
    present: set[Key] = set()
    gateway = Gateway()
    for second in range(scenario.plays_s + 1):
        for host in hosts:
            if host.needs_sample(second):
                host.play(second)
        if second % LOOK_S == 0:
            gateway.look(second, [host.name for host in hosts if host.answers(second)])
        if scenario.prometheus and at(scenario.prometheus, second, "up") == "down":
            present = set()
            continue
        number, rest = divmod(second, scenario.scrape_s)
        if rest:
            continue
        now = {key: value for host in hosts for key, value in host.scrape(second, wanted, hosts).items()}
        if "up" in wanted:
            now |= {("up", (("host", host.name), JOB)): float(host.answers(second)) for host in hosts}
        if LOST in wanted:
            now |= {(LOST, (("host", name),)): float(lost) for name, lost in gateway.lost().items()}
        for key, value in now.items():
            found.setdefault(key, [None] * scrapes)[number] = value
        for key in present - now.keys():
            found[key][number] = "stale"
        present = set(now)
    return found


def identities(scenario: Scenario, second: int) -> dict[str, dict[str, str]]:
    """Labels that identify each program at that second, by name: of a worker's attempt, or of a container."""
    return {life.program.name: life.identity for host in _play_until(scenario, second) for life in host.lives}


def recycle_second(scenario: Scenario, container: str, seconds: Sequence[int]) -> int | None:
    """Return the first of these seconds at which the remedy chooses the container, if any."""
    (host,) = {each.host for each in scenario.programs if each.name == container}
    box = Host(host, scenario)
    asked = set(seconds)
    for second in range(max(seconds, default=-1) + 1):
        if box.needs_sample(second) or second in asked:
            box.play(second)
        if second in asked and box.snapshot is not None:
            cards = vram_budgets.gpu_memory(box.snapshot, container) or []
            incarnations = {
                tenant.incarnation for card in cards for tenant in card.tenants if tenant.container == container
            }
            if any(recycle_container.choose(card).victim in incarnations for card in cards):
                return second
    return None


def tally(scenario: Scenario, run: str, second: int) -> RunTally:
    """The queue's counts of a run's items at that second."""
    return RunTally(
        run_id=run, asked=True, over=False, ranked=False, unsettled=0, migrations=0,
        workers=tuple(
            WorkerTally(
                host=host.name, worker=life.program.name, done=life.finished, failed=life.failed,
                runs_for_s=None if life.files.job is None else STARTED_S + second - life.files.job.started.boottime_s,
            )
            for host in _play_until(scenario, second)
            for life in host.lives
            if life.program.run == run
        ),
    )  # fmt: skip


def _play_until(scenario: Scenario, second: int) -> list[Host]:
    """Play the hosts of its programs until that second."""
    hosts = [Host(name, scenario) for name in sorted({each.host for each in scenario.programs})]
    changes = {since_s for program in scenario.programs for since_s, _ in program.does if since_s <= second}
    for each in sorted({*changes, second}):
        for host in hosts:
            host.play(each)
    return hosts
