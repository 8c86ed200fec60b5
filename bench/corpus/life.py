"""One program as it lives: what it does second by second, and the state files that its worker writes."""

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from bench.corpus.scenario import Doing, Process, Program
from exporter.evidence.process_ownership import ProcessOrigin
from exporter.model.worker import ProcessWork
from gpuwarden.job import HEARTBEAT_S, Phase
from gpuwarden.state_file import JobFile, LongStep, Stamp, WorkerFile
from gpuwarden.step_timing import PhaseTiming, Steps, StepTiming

MIB: Final = 2**20
RAM_MIB: Final = 2048
"""What a program's RAM begins with."""
SWING_S: Final = 30
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


class StateFiles:
    """The state files of a worker, as `Reporter` writes them."""

    def __init__(self, program: Program) -> None:
        self.worker: WorkerFile | None = None
        self.job: JobFile | None = None
        self._program = program
        self._attempts = 0
        self._pace = StepTiming()
        self._stays = PhaseTiming(0.0)

    @property
    def incarnation(self) -> str:
        """The worker's."""
        return "" if self.worker is None else self.worker.incarnation

    def start(self, second: int, now: Stamp, *, pid: int) -> None:
        """Another incarnation of the worker begins."""
        self.worker = WorkerFile(
            worker=self._program.name, incarnation=f"{self._program.name}-{second}", queue="gpu", pid=pid,
            started=now, heartbeat=now, loop=now,
        )  # fmt: skip

    def remove(self) -> None:
        """The worker has left."""
        self.worker = self.job = None

    def beat(self, at: Stamp) -> None:
        """A heartbeat."""
        if self.worker is not None:
            self.worker = replace(self.worker, heartbeat=at)

    def work_on(self, doing: Doing, now: Stamp) -> None:
        """A change of phase is a beat once the job is armed, and one to `step` arms it."""
        if self.job is None:
            self._attempts += 1
            self._pace = StepTiming()
            program = self._program
            started = replace(now, boottime_s=now.boottime_s - program.ran_s) if self._attempts == 1 else now
            self._stays = PhaseTiming(started.boottime_s)
            budget_s = program.job_class.budget_s if program.budget_s is None else program.budget_s
            # Whoever is of a gang is queued again with it: what it runs next is the same job.
            job_id = 1 + program.rank if program.gang else self._attempts
            self.job = JobFile(
                # Another attempt each time, so that what Prometheus repeats of the one before is a series of its own.
                job_id=job_id, attempt=program.attempt + self._attempts - 1, worker=program.name,
                incarnation=self.incarnation, job_class=program.job_class, model=None, budget_s=budget_s or 0.0,
                stall_timeout_s=program.timeout_s, started=started, phase=Phase.LOAD, phase_started=started,
                beat=None, step=0, steps_total=None, step_mean_s=None, step_max_s=None, items_done=0,
                items_failed=0, ranks=program.ranks, gang=program.gang, rank=program.rank,
            )  # fmt: skip
        if doing.phase is not None and doing.phase != self.job.phase:
            armed = self.job.beat is not None or doing.phase is Phase.STEP
            self._pace.enter(now.boottime_s, steps=doing.phase is Phase.STEP)
            self._stays.enter(now.boottime_s, doing.phase)
            self.job = replace(
                self.job, phase=doing.phase, phase_started=now, beat=now if armed else None,
                timeout_s=doing.timeout_s, stays=_told(self._stays.longest(doing.phase)),
            )  # fmt: skip

    def step(self, at: Stamp) -> None:
        """A step is done, which ends the phase `idle`."""
        job = self.job
        if job is None:
            return
        if job.phase is Phase.IDLE:
            self._pace.reset_start()
            job = replace(job, phase=Phase.STEP, phase_started=at, timeout_s=None)  # of neither are stays told
        self._pace.step(at.boottime_s)
        self.job = replace(
            job,
            longest=_told(self._pace.longest),
            step=job.step + 1,
            beat=at if job.beat or job.phase is not Phase.LOAD else None,
            step_mean_s=self._pace.mean_s,
            step_max_s=self._pace.max_s,
        )


class Life:
    """One program as it lives: what it is doing, and what it has used, reported and got so far."""

    def __init__(self, program: Program, *, pid: int) -> None:
        self.program = program
        self.pid = pid
        self.doing = Doing(process=Process.LEFT)
        self.lives = 0
        self.used = _Used()
        self.files = StateFiles(program)
        self.finished = self.failed = 0
        self._used_before = self.used  # it began to do what it does
        self._done_s = self._beats = 0
        self._entered_s = self._last_s = 0
        self._changes = deque(program.does)

    @property
    def runs(self) -> bool:
        """Whether it has a process."""
        return self.doing.process in (Process.WORKS, Process.WAITS, *STILL)

    @property
    def container_runs(self) -> bool:
        """Whether its container does."""
        return self.runs or self.doing.process in (Process.STARTING, Process.UNREAPED)

    @property
    def works_in(self) -> int:
        """The process that does what it does, its GPU's work and all."""
        return self.pid + HELPER if self.program.works_in else self.pid

    @property
    def born(self) -> dict[int, ProcessOrigin]:
        """Its processes."""
        parent = self.pid if self.program.works_in == "child" else SUPERVISOR
        return {
            self.works_in: ProcessOrigin(parent=parent, start_ticks=self.lives),
            self.pid: ProcessOrigin(parent=SUPERVISOR, start_ticks=self.lives),
        }

    @property
    def identity(self) -> dict[str, str]:
        """By what an alert tells it from whoever was or will be in its place."""
        if self.program.kind != "worker":
            return {"incarnation": f"{self.program.container}@{self.lives}"}
        job = self.files.job
        return {"job_id": str(job.job_id), "attempt": str(job.attempt), "incarnation": job.incarnation} if job else {}

    @property
    def work(self) -> ProcessWork:
        """What the kernel counts of its process."""
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
        """What of the host's RAM it holds."""
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
            if self.files.worker is not None and self.runs:
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
        files = self.files
        if doing.process is Process.LEFT:
            files.remove()
        anew = self.runs and before.process in (*ENDED, Process.STARTING)
        if doing.process is Process.WAITS or anew:
            files.job = None
        if self.runs and (files.worker is None or anew):
            files.start(second, now, pid=self.pid)
        if doing.process is Process.WORKS:
            files.work_on(doing, now)

    def _start_anew(self) -> None:
        """Its container is started again: another incarnation, and other processes."""
        self.lives += 1
        self.pid += 1000
        self.used = _Used()
        self._beats = 0

    def _report(self, before_s: int, second: int, now: Stamp) -> None:
        """The heartbeats and steps of the time that has passed."""
        beat_s = second - second % int(HEARTBEAT_S)
        if self.doing.heartbeat and beat_s > before_s:
            self.files.beat(_earlier(now, second - beat_s))
            self._beats += self.doing.heartbeat_cpu
        if self.files.job is None:
            return
        for step_s in self._due(self.doing.step_every_s, before_s, second):
            self.files.step(_earlier(now, second - step_s))
        self.finished += len(self._due(self.doing.finishes_every_s, before_s, second))
        self.failed += len(self._due(self.doing.fails_every_s, before_s, second))

    def _due(self, every_s: int | None, before_s: int, second: int) -> list[int]:
        """When something that is done every so often was, after one second and until another."""
        passed = range(before_s + 1, second + 1)
        return [each for each in passed if (each - self._entered_s) % every_s == 0] if every_s else []


def _told(steps: Steps) -> tuple[LongStep, ...]:
    return tuple(LongStep(took_s=took_s, began_s=began_s) for took_s, began_s in steps)


def _earlier(now: Stamp, seconds: int) -> Stamp:
    return replace(now, boottime_s=now.boottime_s - seconds, unix_s=now.unix_s - seconds)
