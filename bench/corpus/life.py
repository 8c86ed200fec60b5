"""One program: its activity in each second, and the state files of its worker."""

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
"""RAM of a program at its start."""
SWING_S: Final = 30
ENDED: Final = (Process.KILLED, Process.UNREAPED)
"""Ended processes that left their files."""
SUSPENDED: Final = (Process.STOPPED, Process.PAUSED)
"""Processes without CPU time."""
SUPERVISOR: Final = 99
"""The first process of a shared container; it started the workers."""
CHECK_FAULTS: Final = 640
"""Page faults of a health check, `sh -c "curl -m 5 … || exit 1"`: 560 to 640 by measurement."""
CHECK_S: Final = 5
"""Timeout of the health check of a hung program."""
CHECK_PID: Final = 250
"""Pid of a health check, relative to its program."""
HELPER_PID: Final = 500
"""Pid of a process that works for a worker, relative to it."""


@dataclass(frozen=True, kw_only=True)
class _Usage:
    """Memory of a program, and totals of its work."""

    ram_mib: float = RAM_MIB
    vram_mib: float = 0.0
    io_bytes: float = 0.0
    faults: float = 0.0
    cpu_s: float = 0.0

    def after(self, doing: Doing, seconds: int) -> "_Usage":
        """Its usage after some seconds; independent of the number of samples."""
        return _Usage(
            ram_mib=self.ram_mib + doing.ram_mib_per_s * seconds,
            vram_mib=self.vram_mib + doing.vram_mib_per_s * seconds,
            io_bytes=self.io_bytes + doing.io_mib_per_s * MIB * seconds,
            faults=self.faults + doing.faults_per_s * seconds,
            cpu_s=self.cpu_s + doing.cpu_cores * seconds,
        )


class StateFiles:
    """The state files of a worker, like those of `Reporter`."""

    def __init__(self, program: Program) -> None:
        self.worker: WorkerFile | None = None
        self.job: JobFile | None = None
        self._program = program
        self._attempts = 0
        self._steps = StepTiming()
        self._phases = PhaseTiming(0.0)

    @property
    def incarnation(self) -> str:
        """Incarnation of the worker, or empty."""
        return "" if self.worker is None else self.worker.incarnation

    def start(self, second: int, now: Stamp, *, pid: int) -> None:
        """Start another incarnation of the worker."""
        self.worker = WorkerFile(
            worker=self._program.name, incarnation=f"{self._program.name}-{second}", queue="gpu", pid=pid,
            started=now, heartbeat=now, loop=now,
        )  # fmt: skip

    def remove(self) -> None:
        """Remove the files."""
        self.worker = self.job = None

    def beat(self, at: Stamp) -> None:
        """Write a heartbeat."""
        if self.worker is not None:
            self.worker = replace(self.worker, heartbeat=at)

    def work_on(self, doing: Doing, now: Stamp) -> None:
        """Start a job, and enter a phase. The phase `step` makes the job monitored; from then on a phase is a beat."""
        if self.job is None:
            self._attempts += 1
            self._steps = StepTiming()
            program = self._program
            started = replace(now, boottime_s=now.boottime_s - program.ran_s) if self._attempts == 1 else now
            self._phases = PhaseTiming(started.boottime_s)
            budget_s = program.job_class.budget_s if program.budget_s is None else program.budget_s
            # A gang is requeued as a whole, so the next job is the same one.
            job_id = 1 + program.rank if program.gang else self._attempts
            self.job = JobFile(
                # A new attempt, so that stale series of the previous one differ.
                job_id=job_id, attempt=program.attempt + self._attempts - 1, worker=program.name,
                incarnation=self.incarnation, job_class=program.job_class, model=None, budget_s=budget_s or 0.0,
                stall_timeout_s=program.timeout_s, started=started, phase=Phase.LOAD, phase_started=started,
                step_beat=None, step=0, steps_total=None, step_mean_s=None, step_max_s=None, items_done=0,
                items_failed=0, ranks=program.ranks, gang=program.gang, rank=program.rank,
            )  # fmt: skip
        if doing.phase is not None and doing.phase != self.job.phase:
            monitored = self.job.step_beat is not None or doing.phase is Phase.STEP
            self._steps.enter(now.boottime_s, steps=doing.phase is Phase.STEP)
            self._phases.enter(now.boottime_s, doing.phase)
            self.job = replace(
                self.job, phase=doing.phase, phase_started=now, step_beat=now if monitored else None,
                timeout_s=doing.timeout_s, stays=_long_steps(self._phases.longest(doing.phase)),
            )  # fmt: skip

    def step(self, at: Stamp) -> None:
        """Complete a step, which ends the phase `idle`."""
        job = self.job
        if job is None:
            return
        if job.phase is Phase.IDLE:
            self._steps.reset_start()
            job = replace(job, phase=Phase.STEP, phase_started=at, timeout_s=None)
        self._steps.step(at.boottime_s)
        self.job = replace(
            job,
            longest=_long_steps(self._steps.longest),
            step=job.step + 1,
            step_beat=at if job.step_beat or job.phase is not Phase.LOAD else None,
            step_mean_s=self._steps.mean_s,
            step_max_s=self._steps.max_s,
        )


class Life:
    """One program: its activity, usage and files."""

    def __init__(self, program: Program, *, pid: int) -> None:
        self.program = program
        self.pid = pid
        self.doing = Doing(process=Process.LEFT)
        self.lives = 0
        self.used = _Usage()
        self.files = StateFiles(program)
        self.finished = self.failed = 0
        self._used_before = self.used  # at the start of `doing`
        self._done_s = self._beats = 0
        self._entered_s = self._last_s = 0
        self._changes = deque(program.does)

    @property
    def runs(self) -> bool:
        """Whether it has a process."""
        return self.doing.process in (Process.WORKS, Process.WAITS, *SUSPENDED)

    @property
    def container_runs(self) -> bool:
        """Whether its container runs."""
        return self.runs or self.doing.process in (Process.STARTING, Process.UNREAPED)

    @property
    def works_in(self) -> int:
        """Pid of the process that works."""
        return self.pid + HELPER_PID if self.program.works_in else self.pid

    @property
    def origins(self) -> dict[int, ProcessOrigin]:
        """Its processes by pid."""
        parent = self.pid if self.program.works_in == "child" else SUPERVISOR
        return {
            self.works_in: ProcessOrigin(parent=parent, start_ticks=self.lives),
            self.pid: ProcessOrigin(parent=SUPERVISOR, start_ticks=self.lives),
        }

    @property
    def identity(self) -> dict[str, str]:
        """Labels that identify its attempt or container in an alert."""
        if self.program.kind != "worker":
            return {"incarnation": f"{self.program.container}@{self.lives}"}
        job = self.files.job
        return {"job_id": str(job.job_id), "attempt": str(job.attempt), "incarnation": job.incarnation} if job else {}

    @property
    def work(self) -> ProcessWork:
        """The kernel's totals of its process."""
        used = self.used
        return ProcessWork(
            start_ticks=self.lives, io_bytes=int(used.io_bytes), faults=int(used.faults), cpu_s=used.cpu_s
        )

    @property
    def ticks(self) -> int:
        """CPU time with heartbeats, whole ticks of 10 ms."""
        return int(round(100 * self.used.cpu_s, 6)) + self._beats

    def health_checks(self, second: int) -> dict[int, ProcessWork]:
        """The running health check of its container, by pid."""
        every_s = self.program.asked_every_s
        if not every_s or second % every_s >= CHECK_S:
            return {}
        start_ticks = second // every_s + 1
        return {self.pid + CHECK_PID: ProcessWork(start_ticks=start_ticks, io_bytes=0, faults=CHECK_FAULTS, cpu_s=0.0)}

    def ram_now_mib(self, second: int) -> float:
        """Its RAM at this second."""
        swings_up = (second - self._entered_s) // SWING_S % 2 == 0
        return self.used.ram_mib + (self.doing.ram_swings_mib if swings_up else 0.0)

    def sleep(self, second: int) -> None:
        """Skip the time until this second, during which the host slept."""
        self._last_s = second

    def advance(self, second: int, now: Stamp) -> None:
        """Act until this second, then start the next activity if due."""
        passed_s, self._last_s, doing = second - self._last_s, second, self.doing
        if self.container_runs and doing.process not in SUSPENDED:
            self._done_s += passed_s
            self.used = self._used_before.after(doing, self._done_s)
            if self.files.worker is not None and self.runs:
                self._report(second - passed_s, second, now)
        while self._changes and self._changes[0][0] <= second:  # earlier ones were due during sleep
            _, doing = self._changes.popleft()
            self._start_doing(doing, second, now)

    def _start_doing(self, doing: Doing, second: int, now: Stamp) -> None:
        before, self.doing, self._entered_s = self.doing, doing, second
        ended = second > 0 and before.process in (*ENDED, Process.LEFT)
        if doing.process is Process.STARTING or (self.runs and ended):
            self._restart()
        if doing.vram_mib is not None:
            self.used = replace(self.used, vram_mib=doing.vram_mib)
        self._used_before, self._done_s = self.used, 0
        if self.program.kind != "worker":
            return
        files = self.files
        if doing.process is Process.LEFT:
            files.remove()
        restarted = self.runs and before.process in (*ENDED, Process.STARTING)
        if doing.process is Process.WAITS or restarted:
            files.job = None
        if self.runs and (files.worker is None or restarted):
            files.start(second, now, pid=self.pid)
        if doing.process is Process.WORKS:
            files.work_on(doing, now)

    def _restart(self) -> None:
        """Restart its container, with another incarnation and other processes."""
        self.lives += 1
        self.pid += 1000
        self.used = _Usage()
        self._beats = 0

    def _report(self, before_s: int, second: int, now: Stamp) -> None:
        """Write the heartbeats and steps of the passed time."""
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
        """Due seconds after `before_s` and until `second`."""
        passed = range(before_s + 1, second + 1)
        return [each for each in passed if (each - self._entered_s) % every_s == 0] if every_s else []


def _long_steps(steps: Steps) -> tuple[LongStep, ...]:
    return tuple(LongStep(took_s=took_s, began_s=began_s) for took_s, began_s in steps)


def _earlier(now: Stamp, seconds: int) -> Stamp:
    return replace(now, boottime_s=now.boottime_s - seconds, unix_s=now.unix_s - seconds)
