"""What a host's exporter publishes while a scenario is played: seconds of what happens in, series out.

What programs do is made up here. What is seen of them is computed by the exporter's own pure modules and published by
its own collectors: no series is made up.
"""

import math
from collections import Counter, deque
from collections.abc import Container as Names
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from prometheus_client.core import Metric

from bench.corpus.scenario import Condition, Doing, Process, Program, Scenario, at, gpus_of
from exporter.collectors import COLLECTORS
from exporter.collectors.family import Family, gauge
from exporter.collectors.registry import SnapshotCollector
from exporter.evidence import container_history, gpu_attribution, process_ownership, vram_budgets, work_history
from exporter.evidence.container_history import ContainerHistory
from exporter.evidence.gpu_attribution import GpuUse
from exporter.evidence.gpu_loss import LossHistory
from exporter.evidence.process_ownership import Born
from exporter.evidence.server_health import Asking
from exporter.evidence.vram_reclaim import ReturnHistory
from exporter.evidence.windows import WORK_WINDOW_S
from exporter.evidence.work_history import WorkUse
from exporter.evidence.worker_liveness import CpuHistory, DeathHistory
from exporter.model.container import Container, ContainerEvidence, Probe, RamUse, ServerEvidence, Tenancy
from exporter.model.gpu import NUMBERED, UNTOLD, Gpu, GpuFigures, GpuProcess, GpuReadings, MigInstance
from exporter.model.snapshot import DriverHealth, Snapshot, SourceHealth
from exporter.model.thresholds import Thresholds
from exporter.model.worker import CpuUse, ProcessWork, WorkerReadings, WorkerSighting
from exporter.sources.gpu.nvml import process_samples
from exporter.sources.gpu.nvml.process_samples import Cursor, Listed
from exporter.state import answered_servers
from exporter.state.file import KeptError
from gpuwarden.job import HEARTBEAT_S, Phase
from gpuwarden.queue.items.tally import RunTally, WorkerTally
from gpuwarden.state_file import JobFile, LongStep, Stamp, WorkerFile
from gpuwarden.step_timing import Pace, Stays, Steps
from remediator.plan import Limits
from remediator.remedies import recycle_container

MIB: Final = 2**20
GPU_MIB: Final = 15360
"""The memory of every GPU."""
RAM_MIB: Final = 2048
"""What a program's RAM begins with."""
SWING_S: Final = 30
ASKED_EVERY_S: Final = 10
STARTED_S: Final = 1_000_000
"""By the host's clock as a scenario begins, seconds since its boot."""
SHARED_RATIO: Final = 0.4
ENDED: Final = (Process.KILLED, Process.UNREAPED)
"""Those that have ended and left their files."""
STILL: Final = (Process.STOPPED, Process.PAUSED)
"""Processes that are there and get no time."""
SUPERVISOR: Final = 99
"""The first process of a container that several workers share: it started each of them."""
ASKED_FAULTS: Final = 640
"""Page faults of a container's health check, `sh -c "curl -m 5 … || exit 1"`: 560 to 640 were measured."""
ASKED_S: Final = 5
"""How long that waits for the answer of one that wedged."""
ASKER: Final = 250
"""By how much the pid of that is greater than that of whom it asks."""
HELPER: Final = 500
"""By how much the pid of whoever does a worker's work is greater than the worker's own, where that is another."""
BEFORE_S: Final = int(WORK_WINDOW_S + Thresholds.gap_max_s)
"""For so long before a change it is looked each second: what is averaged over a window then is so of equal looks."""
AFTERWARDS_S: Final = int(30 + WORK_WINDOW_S + Thresholds.gap_max_s)
"""And after one: by then the exporter's evidence has come to what it goes on with until the next."""
SCRAPED: Final = ("watched", "clock set", "rebooted")
"""Hosts whose scrapes succeed."""
BLIND: Final = ("unwatched", "frozen", "asleep")
"""Hosts whose exporter does not look."""

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A series: its name and its labels, `host` among them."""


@dataclass(frozen=True, kw_only=True)
class _Used:
    """What a program holds, and what it has used so far."""

    ram_mib: float = RAM_MIB
    vram_mib: float = 0.0
    io_bytes: float = 0.0
    faults: float = 0.0
    cpu_s: float = 0.0

    def after(self, doing: Doing, seconds: int) -> "_Used":
        """And once it has done so for a while: the same, however often somebody looks meanwhile."""
        return _Used(
            ram_mib=self.ram_mib + doing.ram_mib_per_s * seconds,
            vram_mib=self.vram_mib + doing.vram_mib_per_s * seconds,
            io_bytes=self.io_bytes + doing.io_mib_per_s * MIB * seconds,
            faults=self.faults + doing.faults_per_s * seconds,
            cpu_s=self.cpu_s + doing.cpu_cores * seconds,
        )


class _Life:
    """One program as it lives: what it is doing, and what it has used, reported and got so far."""

    def __init__(self, program: Program, *, pid: int) -> None:
        self.program = program
        self.pid = pid
        self.doing = Doing(process=Process.LEFT)
        self.lives = 0
        self.used = _Used()
        self.worker: WorkerFile | None = None
        self.job: JobFile | None = None
        self.attempts = 0
        self.finished = self.failed = 0
        self._used_before = self.used  # it began to do what it does
        self._done_s = self._beats = 0
        self._entered_s = self._last_s = 0
        self._changes = deque(program.does)
        self._pace = Pace()
        self._stays = Stays(0.0)

    @property
    def runs(self) -> bool:
        """Whether it has a process."""
        return self.doing.process in (Process.WORKS, Process.WAITS, *STILL)

    @property
    def container_runs(self) -> bool:
        return self.runs or self.doing.process in (Process.STARTING, Process.UNREAPED)

    @property
    def works_in(self) -> int:
        """The process that does what it does, its GPU's work and all."""
        return self.pid + HELPER if self.program.works_in else self.pid

    @property
    def born(self) -> dict[int, Born]:
        """Its processes."""
        parent = self.pid if self.program.works_in == "child" else SUPERVISOR
        return {
            self.works_in: Born(parent=parent, start_ticks=self.lives),
            self.pid: Born(parent=SUPERVISOR, start_ticks=self.lives),
        }

    @property
    def identity(self) -> dict[str, str]:
        """By what an alert tells it from whoever was or will be in its place."""
        if self.program.kind != "worker":
            return {"incarnation": f"{self.program.container}@{self.lives}"}
        job = self.job
        return {"job_id": str(job.job_id), "attempt": str(job.attempt), "incarnation": job.incarnation} if job else {}

    @property
    def work(self) -> ProcessWork:
        used = self.used
        return ProcessWork(
            start_ticks=self.lives, io_bytes=int(used.io_bytes), faults=int(used.faults), cpu_s=used.cpu_s
        )

    @property
    def ticks(self) -> int:
        """Its CPU time, and that of its heartbeats, as the kernel counts it: by 10 ms, and those that are whole."""
        return int(round(100 * self.used.cpu_s, 6)) + self._beats

    def asked(self, second: int) -> dict[int, ProcessWork]:
        """The health check that asks in its container at the moment, by pid."""
        every_s = self.program.asked_every_s
        if not every_s or second % every_s >= ASKED_S:
            return {}
        start_ticks = second // every_s + 1
        return {self.pid + ASKER: ProcessWork(start_ticks=start_ticks, io_bytes=0, faults=ASKED_FAULTS, cpu_s=0.0)}

    def ram_now_mib(self, second: int) -> float:
        swings_up = (second - self._entered_s) // SWING_S % 2 == 0
        return self.used.ram_mib + (self.doing.ram_swings_mib if swings_up else 0.0)

    def sleep(self, second: int) -> None:
        """Its machine slept: no time has passed for it."""
        self._last_s = second

    def advance(self, second: int, now: Stamp) -> None:
        """Do until this second what it has been doing, and go on to what it does from then on."""
        passed_s, self._last_s, doing = second - self._last_s, second, self.doing
        if self.container_runs and doing.process not in STILL:
            self._done_s += passed_s
            self.used = self._used_before.after(doing, self._done_s)
            if self.worker is not None and self.runs:
                self._report(second - passed_s, second, now)
        while self._changes and self._changes[0][0] <= second:  # earlier ones were due while its machine slept
            _, doing = self._changes.popleft()
            self._become(doing, second, now)

    def _become(self, doing: Doing, second: int, now: Stamp) -> None:
        before, self.doing, self._entered_s = self.doing, doing, second
        ended = second > 0 and before.process in (*ENDED, Process.LEFT)
        if doing.process is Process.STARTING or (self.runs and ended):
            self._start_anew()
        if doing.vram_mib is not None:
            self.used = replace(self.used, vram_mib=doing.vram_mib)
        self._used_before, self._done_s = self.used, 0
        if self.program.kind != "worker":
            return
        if doing.process is Process.LEFT:
            self.worker = self.job = None
        anew = self.runs and before.process in (*ENDED, Process.STARTING)
        if doing.process is Process.WAITS or anew:
            self.job = None
        if self.runs and (self.worker is None or anew):
            self.worker = WorkerFile(
                worker=self.program.name, incarnation=f"{self.program.name}-{second}", queue="gpu", pid=self.pid,
                started=now, heartbeat=now, loop=now,
            )  # fmt: skip
        if doing.process is Process.WORKS:
            self._work_on(doing, now)

    def _start_anew(self) -> None:
        """Its container is started again: another incarnation, and other processes."""
        self.lives += 1
        self.pid += 1000
        self.used = _Used()
        self._beats = 0

    def _work_on(self, doing: Doing, now: Stamp) -> None:
        """As `Reporter` reports it: a change of phase is a beat once the job is armed, and one to `step` arms it."""
        if self.job is None:
            self.attempts += 1
            self._pace = Pace()
            program = self.program
            started = replace(now, boottime_s=now.boottime_s - program.ran_s) if self.attempts == 1 else now
            self._stays = Stays(started.boottime_s)
            budget_s = program.job_class.budget_s if program.budget_s is None else program.budget_s
            # Whoever is of a gang is queued again with it: what it runs next is the same job.
            job_id = 1 + program.rank if program.gang else self.attempts
            self.job = JobFile(
                # Another attempt each time, so that what Prometheus repeats of the one before is a series of its own.
                job_id=job_id, attempt=program.attempt + self.attempts - 1, worker=program.name,
                incarnation=self.worker_incarnation, job_class=program.job_class, model=None, budget_s=budget_s or 0.0,
                stall_timeout_s=program.patience_s, started=started, phase=Phase.LOAD, phase_started=started,
                beat=None, step=0, steps_total=None, step_mean_s=None, step_max_s=None, items_done=0,
                items_failed=0, ranks=program.ranks, gang=program.gang, rank=program.rank,
            )  # fmt: skip
        if doing.phase is not None and doing.phase != self.job.phase:
            armed = self.job.beat is not None or doing.phase is Phase.STEP
            self._pace.goes_on(now.boottime_s, steps=doing.phase is Phase.STEP)
            self._stays.goes_on(now.boottime_s, doing.phase)
            self.job = replace(
                self.job, phase=doing.phase, phase_started=now, beat=now if armed else None,
                patience_s=doing.patience_s, stays=_told(self._stays.longest(doing.phase)),
            )  # fmt: skip

    @property
    def worker_incarnation(self) -> str:
        return "" if self.worker is None else self.worker.incarnation

    def _report(self, before_s: int, second: int, now: Stamp) -> None:
        """The heartbeats and steps of the time that has passed."""
        beat_s = second - second % int(HEARTBEAT_S)
        if self.doing.heartbeat and self.worker is not None and beat_s > before_s:
            self.worker = replace(self.worker, heartbeat=_earlier(now, second - beat_s))
            self._beats += self.doing.heartbeat_cpu
        if self.job is None:
            return
        for step_s in self._due(self.doing.step_every_s, before_s, second):
            self.job = self._stepped(self.job, _earlier(now, second - step_s))
        self.finished += len(self._due(self.doing.finishes_every_s, before_s, second))
        self.failed += len(self._due(self.doing.fails_every_s, before_s, second))

    def _due(self, every_s: int | None, before_s: int, second: int) -> list[int]:
        """When something that is done every so often was, after one second and until another."""
        passed = range(before_s + 1, second + 1)
        return [each for each in passed if (each - self._entered_s) % every_s == 0] if every_s else []

    def _stepped(self, job: JobFile, at: Stamp) -> JobFile:
        """As `Reporter` reports it: a step ends the phase `idle`."""
        if job.phase is Phase.IDLE:
            self._pace.begins_anew()
            job = replace(job, phase=Phase.STEP, phase_started=at, patience_s=None)  # of neither are stays told
        self._pace.step(at.boottime_s)
        return replace(
            job,
            longest=_told(self._pace.longest),
            step=job.step + 1,
            beat=at if job.beat or job.phase is not Phase.LOAD else None,
            step_mean_s=self._pace.mean_s,
            step_max_s=self._pace.max_s,
        )


def _told(steps: Steps) -> tuple[LongStep, ...]:
    return tuple(LongStep(took_s=took_s, began_s=began_s) for took_s, began_s in steps)


def _earlier(now: Stamp, seconds: int) -> Stamp:
    return replace(now, boottime_s=now.boottime_s - seconds, unix_s=now.unix_s - seconds)


class Host:
    """One host: its programs, its GPUs, and the exporter that looks at them."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self.name = name
        self._scenario = scenario
        self._timeline = scenario.hosts.get(name, ())
        self._thresholds = Thresholds()
        mine = [each for each in scenario.programs if each.host == name]
        self.lives = [_Life(each, pid=100 + number) for number, each in enumerate(mine)]
        names = gpus_of(name, mine, scenario.gpus)
        self._gpus = sorted(names, key=lambda each: [*map(int, each.split(":"))])
        self._conditions = {
            each: scenario.gpus.get(f"{name}/{each}", scenario.gpus.get(each, ())) for each in self._gpus
        }
        self._reports = {each: _reported([one for _, one in timeline]) for each, timeline in self._conditions.items()}
        self._held_on: dict[str, dict[tuple[str, int], float]] = {}  # MiB, by GPU and life
        self._boots = 0
        self._booted_s = self._began_s = -1  # its driver, and its exporter, count since then
        self._places: dict[str, Container] = {}  # the engine's: it lists those that are down too
        self._every_s = math.gcd(int(self._thresholds.gap_max_s), scenario.scrape_s)
        self._closely = frozenset(self._looked_at_closely(mine))
        self._told: tuple[object, GpuReadings | None] = ((), None)
        self._answered_file = b""
        self._start_exporter()

    def _start_exporter(self) -> None:
        self._snapshot: Snapshot | None = None
        self._collector = SnapshotCollector(
            lambda: self._snapshot, host=self.name, thresholds=self._thresholds, now=lambda: self._now
        )
        self._succeeded_unix_s: dict[str, float] = {}
        self._containers: dict[str, ContainerHistory] = {}
        self._apart_histories: dict[tuple[str, str, int], ContainerHistory] = {}
        self._cpu: dict[int, CpuHistory] = {}
        self._deaths: dict[str, DeathHistory] = {}
        self._askings: dict[str, Asking] = {}
        self._answered: set[str] | None = None
        self._losses = LossHistory(gap_max_s=self._thresholds.gap_max_s)
        self._returns = ReturnHistory(bound_s=self._thresholds.vram_return_s, gap_max_s=self._thresholds.gap_max_s)

    @property
    def snapshot(self) -> Snapshot | None:
        """What the exporter saw last; `None` while it does not run, and before its first look."""
        return self._snapshot

    def play(self, second: int) -> None:
        """Programs do until this second what they do, and the exporter looks, where it runs."""
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
            self._start_exporter()
            self._began_s = second
        if boots != self._boots:
            self._booted_s = second
        self._boots = boots
        if state not in BLIND:
            self._snapshot = self._look(second, now)

    def finds_more(self, second: int) -> bool:
        """Whether a look at this second finds what the ones around it do not tell.

        Else every look would find what the last one found, or the same more of it, and change no figure but by the time
        that has passed.
        """
        return second % self._every_s == 0 or second in self._closely

    def _looked_at_closely(self, programs: Sequence[Program]) -> Iterator[int]:
        ends_s = self._scenario.plays_s
        changes = {0} | {
            since_s for timeline in (self._timeline, *self._scenario.gpus.values()) for since_s, _ in timeline
        }
        for program in programs:
            changes |= {since_s for since_s, _ in program.does}
            for (since_s, doing), (until_s, _) in pairwise((*program.does, (ends_s, Doing()))):
                if program.asked_every_s or _varies(doing, self._thresholds):
                    yield from range(since_s, until_s)
        for since_s in changes:
            yield from range(max(0, since_s - BEFORE_S), since_s + AFTERWARDS_S + 1)

    def answers(self, second: int) -> bool:
        """Whether a scrape of it succeeds."""
        return at(self._timeline, second, "watched") in SCRAPED and self._snapshot is not None

    def scraped(self, second: int, names: Names[str], hosts: Sequence["Host"]) -> dict[Key, float]:
        """What a scrape gets of these names; nothing where it fails. Of the queue every host tells the whole.

        Raises:
            RuntimeError: a collector fails, of which a real exporter tells no more than that it did.
        """
        if self._snapshot is None or not self.answers(second):
            return {}
        families = [each for each in (*self._collector.collect(), *remediator(hosts)) if isinstance(each, Family)]
        (success,) = [each for each in families if each.sample_name == "gpuwarden_collector_success"]
        if failed := [name for (name,), value in success.rows if name in COLLECTORS and not value]:
            raise RuntimeError(f"collector {failed[0]} fails at {second}s of host {self.name}; the log above says why")
        return {
            (family.sample_name, (*zip(family.labels, values, strict=True), ("host", self.name))): float(value)
            for family in families
            if family.sample_name in names
            for values, value in family.rows
        }

    def _look(self, second: int, now: Stamp) -> Snapshot:
        losses, gpus = self._losses.observe(self._answer(second), now_s=now.boottime_s)
        running = {each.incarnation: each for each in self._listed()}
        self._containers = {key: found for key, found in self._containers.items() if key in running}
        self._apart: dict[str, ContainerEvidence] = {}
        self._told_apart: dict[tuple[str, str, int], ContainerHistory] = {}
        found = {each.id: self._evidence(each, gpus, losses.named, second, now) for each in running.values()}
        self._apart_histories = self._told_apart
        sightings, ended, dead_s, cpu_still_s = [], {}, {}, {}
        for life in self.lives:
            if life.worker is None:
                continue
            key = life.program.container
            place = next((each for each in running.values() if each.id == key), self._places.get(key))
            if place is None:
                continue
            # What is down is paused no more.
            self._places[key] = replace(place, paused=False) if place.paused else place
            sightings.append(
                WorkerSighting(
                    worker=life.worker, job=life.job, alive=life.runs, pid=life.pid if life.runs else None,
                    container_id=key, folder=life.program.name,
                )
            )  # fmt: skip
            if place.incarnation not in running:
                ended[key] = container_history.without_figures(replace(place, pid=0))
            if place.paused or (life.runs and "cpu" in life.doing.unread):
                self._cpu.pop(life.pid, None)
            elif life.runs:
                self._deaths.pop(life.program.name, None)
                history = self._cpu.setdefault(life.pid, CpuHistory(self._thresholds))
                use = CpuUse(
                    start_ticks=life.lives, used_ticks=life.ticks, uninterruptible=life.doing.waits_for_storage
                )
                stores = life.job is not None and life.job.phase in container_history.STORES
                cpu_still_s[life.pid] = history.observe(use, now_s=now.boottime_s, stores=stores)
            else:
                death = self._deaths.setdefault(life.program.name, DeathHistory(self._thresholds))
                dead_s[life.program.name] = death.observe(
                    place.incarnation, life.worker.heartbeat, now_s=now.boottime_s
                )
        return Snapshot(
            host=self.name, taken=now, gpus=gpus, workers=WorkerReadings(workers=tuple(sightings)),
            containers=tuple(found.values()), sources=tuple(self._sources(gpus, now)), thresholds=self._thresholds,
            ended=tuple(ended.values()), dead_s=dead_s, cpu_still_s=cpu_still_s,
            servers=tuple(self._servers(running, second, now)), gpu_lost_s=losses.seconds, lost_gpus=losses.named,
            drivers=self._drivers(second), apart=self._apart,
            returning_bytes=self._returns.observe(gpus, now_s=now.boottime_s),
        )  # fmt: skip

    def _sources(self, gpus: GpuReadings | None, now: Stamp) -> Iterator[SourceHealth]:
        """How reading each source went: of those that are played a driver alone can fail, and it answers at once."""
        success = {"workers": True, "docker": True}
        if self._gpus:
            success[NUMBERED] = gpus is not None
        for source, did in success.items():
            if did:
                self._succeeded_unix_s[source] = now.unix_s
            yield SourceHealth(
                source=source, success=did, duration_s=0.0, succeeded_unix_s=self._succeeded_unix_s.get(source)
            )

    def _answer(self, second: int) -> GpuReadings | None:
        """What the driver tells; nothing while it does not answer, for one GPU or another."""
        states = {number: at(each, second, Condition()).state for number, each in self._conditions.items()}
        figures = {number: self._figures(number, second) for number in self._gpus}
        asked = (
            *states.values(),
            *figures.values(),
            *((each.pid, each.doing, each.used.vram_mib) for each in self.lives),
        )
        before, told = self._told
        if asked != before:
            self._told = asked, (told := None if "unanswered" in states.values() else self._readings(states, figures))
        return told

    def _figures(self, number: str, second: int) -> GpuFigures:
        """Its errors and what holds its clocks down, each where anything is said of it at any time."""
        timeline, reports = self._conditions[number], self._reports[number]
        found = [each.ecc_uncorrected or 0 for since_s, each in timeline if self._booted_s < since_s <= second]
        throttled = at(timeline, second, Condition()).throttled or ()
        return GpuFigures(
            ecc_uncorrected=sum(found) if "ecc_uncorrected" in reports else None,
            throttled=throttled if "throttled" in reports else None,
        )

    def _drivers(self, second: int) -> Mapping[str, DriverHealth]:
        """The errors that its driver has reported since its exporter began to wait for them."""
        found = Counter(
            (f"GPU-{number}", each.xid)
            for number, timeline in self._conditions.items()
            for since_s, each in timeline
            if each.xid is not None and self._began_s < since_s <= second
        )
        told = any("xid" in reports for reports in self._reports.values())
        return {NUMBERED: DriverHealth(xids=found)} if told else {}

    def _readings(self, states: Mapping[str, str], figures: Mapping[str, GpuFigures]) -> GpuReadings:
        told: list[Gpu] = []
        for number, state in states.items():
            parent, _, part = number.partition(":")
            if state == "vanished" or (part and states[parent] in ("lost", "vanished")):
                continue
            if part:
                told.append(self._instance(number, state))
            elif parts := [each for each in self._gpus if each.startswith(f"{number}:")]:
                told.append(self._cut(number, state, parts, figures[number]))
            else:
                told.append(replace(self._gpu(number, state), figures=figures[number]))
        return GpuReadings(
            source="nvml",
            gpus=tuple(replace(each, xids_watched="xid" in self._reports[each.number]) for each in told),
        )

    def _cut(self, number: str, state: str, parts: Sequence[str], figures: GpuFigures) -> Gpu:
        """A GPU in MIG mode, as the NVML source reads it: only its instances say what each process does."""
        used_mib = sum(
            self._used_mib(each, [life for life in self.lives if life.runs and each in life.program.gpus])
            for each in parts
        )
        return replace(
            self._gpu(number, state), figures=figures, utilization_ratio=None, processes=None, attribution=UNTOLD,
            memory_used_bytes=None if state == "lost" else int(used_mib * MIB),
            memory_free_bytes=None if state == "lost" else int((GPU_MIB - used_mib) * MIB),
        )  # fmt: skip

    def _instance(self, number: str, state: str) -> Gpu:
        """An instance of it: how busy that is, and what each process does there, is told by nobody."""
        parent, _, part = number.partition(":")
        size = int(GPU_MIB * MIB / sum(each.startswith(f"{parent}:") for each in self._gpus))
        lives = [each for each in self.lives if each.runs and number in each.program.gpus]
        listed = {each.works_in: Listed(each.works_in, int(each.used.vram_mib * MIB)) for each in lives}
        used = int(self._used_mib(number, lives, holds_on=state == "holds on") * MIB)
        return Gpu(
            uuid=f"MIG-{number}", index=int(parent), name="NVIDIA A100 MIG", utilization_ratio=None,
            memory_used_bytes=used, memory_size_bytes=size, memory_free_bytes=size - used,
            processes=None if state == "unlisted" else process_samples.measured(listed, None, Cursor()),
            attribution=UNTOLD,
            mig=MigInstance(parent=f"GPU-{parent}", number=int(part), gpu_instance=int(part) + 1, compute_instance=0),
        )  # fmt: skip

    def _gpu(self, number: str, state: str) -> Gpu:
        """As its driver tells it."""
        lives = [each for each in self.lives if each.runs and number in each.program.gpus]
        ratios = [None if state == "unmeasured" else self._ratio(each, number) for each in lives]
        used_mib = self._used_mib(number, lives, holds_on=state == "holds on")
        beside = SHARED_RATIO if state == "shared" else 0.0
        known = state not in ("lost", "unmeasured")
        return Gpu(
            uuid=f"GPU-{number}",
            index=int(number),
            name="NVIDIA T4",
            utilization_ratio=min(1.0, beside + sum(each or 0.0 for each in ratios)) if known else None,
            memory_used_bytes=None if state == "lost" else int(used_mib * MIB),
            memory_size_bytes=GPU_MIB * MIB,
            memory_free_bytes=None if state == "lost" else int((GPU_MIB - used_mib) * MIB),
            processes=None
            if state in ("lost", "unlisted")
            else tuple(
                GpuProcess(pid=each.works_in, utilization_ratio=ratio, memory_bytes=int(each.used.vram_mib * MIB))
                for each, ratio in zip(lives, ratios, strict=True)
            ),
            unknown="the GPU is lost" if state == "lost" else None,
            lost=state == "lost",
        )

    def _used_mib(self, number: str, lives: Sequence[_Life], *, holds_on: bool = False) -> float:
        """What its driver counts as in use: also what those held who have ended since it began to hold on to that."""
        held = {(each.program.name, each.pid): each.used.vram_mib for each in lives}
        self._held_on[number] = {**self._held_on.get(number, {}), **held} if holds_on else held
        return sum(self._held_on[number].values())

    def _ratio(self, life: _Life, number: str) -> float | None:
        if life.doing.process is not Process.WORKS:
            return 0.0
        ratios = life.doing.gpu_ratio
        return ratios[0] if len(ratios) == 1 else ratios[life.program.gpus.index(number)]

    def _listed(self) -> Iterator[Container]:
        """The containers that run; several workers may share one."""
        listed: set[str] = set()
        for life in self.lives:
            program = life.program
            if not life.container_runs or program.container in listed:
                continue
            listed.add(program.container)
            budget = None if program.budget_mib is None else program.budget_mib * MIB
            shared = sum(each.program.container == program.container for each in self.lives) > 1
            yield Container(
                kind="docker", id=program.container, name=program.container,
                incarnation=f"{program.container}@{life.lives}", pid=SUPERVISOR if shared else life.pid,
                gpu_request=program.gpus or None, image="worker",
                tenancy=Tenancy(budget_bytes=budget, recyclable=program.managed and not program.protected),
                paused=life.doing.process is Process.PAUSED,
            )  # fmt: skip

    def _evidence(
        self, container: Container, gpus: GpuReadings | None, lost: Sequence[str], second: int, now: Stamp
    ) -> ContainerEvidence:
        inside = [each for each in self.lives if each.program.container == container.name and each.runs]
        asked = {pid: work for each in inside for pid, work in each.asked(second).items()}
        born = frozenset(pid for each in inside for pid in each.born)
        unreaped = any(
            each.doing.process is Process.UNREAPED and each.program.container == container.name for each in self.lives
        )
        # Of one that runs and has no process to be seen, the exporter knows none.
        pids = None if unreaped and not inside else born | asked.keys()
        unread = {what for each in inside for what in each.doing.unread}
        ram = RamUse(usage_bytes=int(sum(each.ram_now_mib(second) for each in inside) * MIB))
        if "ram" in unread:
            ram = RamUse(usage_bytes=None)
        history = self._containers.get(container.incarnation)
        if history is None:
            history = self._containers[container.incarnation] = ContainerHistory(
                self._thresholds, found=self._snapshot is None
            )
        use = history.use(container, pids, gpus)
        members = self._members(container, inside, gpus, history)
        work = WorkUse(processes={each.works_in: each.work for each in inside} | asked)
        if "work" in unread:
            work = work_history.NOT_LOOKED_AT
        for each in members:
            own_ram = sum(life.ram_now_mib(second) for life in inside if life.works_in in each.pids)
            self._apart[each.worker] = each.history.observe(
                container, each.use, RamUse(usage_bytes=int(own_ram * MIB)), work_history.work_of(work, each.pids),
                now_s=now.boottime_s,
            )  # fmt: skip
        return history.observe(
            container,
            use,
            ram,
            work,
            now_s=now.boottime_s,
            lost=lost,
            frozen_s=now.boottime_s if container.paused else None,
        )

    def _members(
        self, container: Container, inside: Sequence[_Life], gpus: GpuReadings | None, history: ContainerHistory
    ) -> list["_Member"]:
        """The live workers that share a container, each by what counts as its own processes."""
        workers = {each.program.name: each.pid for each in inside if each.worker is not None}
        if len(workers) < 2:
            return []
        born = {pid: each for life in inside for pid, each in life.born.items()}
        members = []
        for name, pids in process_ownership.own(born.keys(), born, workers, first=container.pid).items():
            key = (container.incarnation, name, workers[name])
            own = self._told_apart[key] = self._apart_histories.get(key) or ContainerHistory(
                self._thresholds, found=self._snapshot is None
            )
            use = gpu_attribution.gpu_use(container, pids, gpus, self._thresholds, history.gpus, history.there)
            members.append(_Member(worker=name, history=own, pids=pids, use=use))
        return members

    def _servers(self, running: Mapping[str, Container], second: int, now: Stamp) -> Iterator[ServerEvidence]:
        if self._answered is None:  # as an exporter that is started reads its file
            self._answered = set(self._kept(now))
        for life in self.lives:
            key = f"{life.program.container}@{life.lives}"
            if life.program.kind != "server" or key not in running:
                continue
            asking = self._askings.get(key, Asking())
            if running[key].paused:
                asking = asking.forgotten()
            elif second % ASKED_EVERY_S == 0:
                told = life.doing.answers and life.doing.process is Process.WORKS
                asking = asking.then(told, began_s=now.boottime_s, ended_s=now.boottime_s, gap_max_s=30.0)
            self._askings[key] = asking
            if asking.answered and key not in self._answered:
                self._answered.add(key)
                self._answered_file = answered_servers.render(self._answered, now=now)
            yield ServerEvidence(
                container=running[key],
                probe=Probe(kind="http", silence_s=life.program.silence_s, port=80, target="/"),
                workers=0,
                answered=key in self._answered,
                unanswered_s=asking.unanswered_s(now_s=now.boottime_s, fresh_s=30.0),
            )

    def _kept(self, now: Stamp) -> tuple[str, ...]:
        try:
            return answered_servers.parse(self._answered_file, now=now)
        except KeptError:
            return ()


def _reported(conditions: Iterable[Condition]) -> frozenset[str]:
    """What its driver reports of a GPU beside how it is used."""
    parts = ("xid", "ecc_uncorrected", "throttled")
    return frozenset(part for each in conditions for part in parts if getattr(each, part) is not None)


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One of several workers of a container: its history, what counts as its own processes, and their use of GPUs."""

    worker: str
    history: ContainerHistory
    pids: frozenset[int]
    use: GpuUse


def _varies(doing: Doing, still: Thresholds) -> bool:
    """Whether looks that are seconds apart would find otherwise of what is done than looks each second.

    Not where at each look there is nothing, or more of it than counts as still.
    """
    rates = (
        (doing.io_mib_per_s * MIB, still.io_still_bytes_per_s),
        (doing.faults_per_s, still.faults_still_per_s),
        (doing.cpu_cores, still.cpu_still_ratio),
    )
    grows = doing.ram_mib_per_s or doing.ram_swings_mib or doing.vram_mib_per_s
    return bool(grows) or any(0 < rate <= least for rate, least in rates)


def remediator(hosts: Iterable[Host]) -> Iterator[Metric]:
    """What the remediator of each host tells the rules: that it works, two settings, how the items of runs get on."""
    yield gauge("gpuwarden_remediator_ledger_up", "", (), [((), 1.0)], source="the scenario")
    yield gauge(
        "gpuwarden_remediator_node_lost_after_seconds", "", (), [((), Limits.node_lost_after_s)], source="the scenario"
    )
    yield gauge(
        "gpuwarden_remediator_wrangle_activation_items",
        "",
        (),
        [((), float(Limits.wrangle_activation))],
        source="the scenario",
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
    )
    yield gauge(
        "gpuwarden_queue_run_items_done",
        "",
        labels,
        [(key, float(life.finished)) for key, life in found],
        source="the scenario",
    )


def series(scenario: Scenario, *, wanted: Names[str]) -> dict[Key, list[float | str | None]]:
    """What Prometheus has of each series at each scrape: a figure, `stale` where it has just vanished, or nothing.

    Only those of the wanted names: the others decide nothing. Its own `up` is there of each host, heard of or not. A
    Prometheus that is stopped marks nothing as vanished, nor does one that starts: what is gone meanwhile it goes on to
    tell, for five minutes.
    """
    hosts = [Host(name, scenario) for name in sorted({each.host for each in scenario.programs} | set(scenario.hosts))]
    scrapes = scenario.plays_s // scenario.scrape_s + 1
    found: dict[Key, list[float | str | None]] = {}
    there: set[Key] = set()
    for second in range(scenario.plays_s + 1):
        for host in hosts:
            if host.finds_more(second):
                host.play(second)
        if scenario.prometheus and at(scenario.prometheus, second, "up") == "down":
            there = set()
            continue
        number, rest = divmod(second, scenario.scrape_s)
        if rest:
            continue
        now = {key: value for host in hosts for key, value in host.scraped(second, wanted, hosts).items()}
        if "up" in wanted:
            now |= {("up", (("host", host.name),)): float(host.answers(second)) for host in hosts}
        for key, value in now.items():
            found.setdefault(key, [None] * scrapes)[number] = value
        for key in there - now.keys():
            found[key][number] = "stale"
        there = set(now)
    return found


def identities(scenario: Scenario, second: int) -> dict[str, dict[str, str]]:
    """Who each program is at that second, by its name: the labels by which an alert says on whom to act.

    A worker's are those of the attempt that it holds, where it holds one; of whoever else, those of its container.
    """
    return {life.program.name: life.identity for host in _as_of(scenario, second) for life in host.lives}


def recycled(scenario: Scenario, container: str, seconds: Sequence[int]) -> int | None:
    """The first of these seconds at which the remediator of its host would recycle a container; `None` for none.

    By the choice of the remedy, from what the exporter of the host sees in that second.
    """
    (host,) = {each.host for each in scenario.programs if each.name == container}
    box = Host(host, scenario)
    asked = set(seconds)
    for second in range(max(seconds, default=-1) + 1):
        if box.finds_more(second) or second in asked:
            box.play(second)
        if second in asked and box.snapshot is not None:
            cards = vram_budgets.cards(box.snapshot, container) or []
            incarnations = {
                tenant.incarnation for card in cards for tenant in card.tenants if tenant.container == container
            }
            if any(recycle_container.choose(card).victim in incarnations for card in cards):
                return second
    return None


def tally(scenario: Scenario, run: str, second: int) -> RunTally:
    """How the items of a run get on at that second, as the queue would count them, for whoever decides about it."""
    return RunTally(
        run_id=run, asked=True, over=False, ranked=False, unsettled=0, migrations=0,
        workers=tuple(
            WorkerTally(
                host=host.name, worker=life.program.name, done=life.finished, failed=life.failed,
                runs_for_s=None if life.job is None else STARTED_S + second - life.job.started.boottime_s,
            )
            for host in _as_of(scenario, second)
            for life in host.lives
            if life.program.run == run
        ),
    )  # fmt: skip


def _as_of(scenario: Scenario, second: int) -> list[Host]:
    """The hosts of its programs, played until that second."""
    hosts = [Host(name, scenario) for name in sorted({each.host for each in scenario.programs})]
    changes = {since_s for program in scenario.programs for since_s, _ in program.does if since_s <= second}
    for each in sorted({*changes, second}):
        for host in hosts:
            host.play(each)
    return hosts
