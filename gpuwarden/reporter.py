"""What a job and its worker import: lock, heartbeat, `step()` and `phase()`. Standard library only.

After `open()` nothing here raises into the job: a failed write counts in `write_errors`.

The lock is a POSIX record lock. Its file is opened once: the close of *any* descriptor drops the process's locks on it.
The kernel reports the holder's pid across containers.
"""

import errno
import fcntl
import operator
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Self
from uuid import uuid4

from gpuwarden import clock, procfs, state_file
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.job import HEARTBEAT_S, JobClass, Phase
from gpuwarden.state_file import JobFile, LongStep, WorkerFile
from gpuwarden.step_timing import PhaseTiming, Steps, StepTiming

DEFAULT_DIR: Final = Path("/run/gpuwarden")
JOB_FILE: Final = "GPUWARDEN_JOB_FILE"
"""Variable with a script's job file."""
HIDDEN_SUFFIX: Final = ".suspended.json"
RUN_QUEUE: Final = "run"
"""Queue of supervised commands."""
STEP_WRITE_S: Final = 1.0
"""Least time between two writes by `step()`, seconds."""
SLEPT_S: Final = 0.5
"""Smaller clock differences do not count as a suspend, seconds."""


class LockHeldError(GpuwardenError):
    """Another live process holds this worker's lock."""


class StateFolderError(GpuwardenError):
    """The worker's folder or files cannot be written."""


class HostKeyError(GpuwardenError):
    """The host key cannot be read."""


# `step` takes 225 ns. In Python 3.11 an enum lookup would add 65 ns.
_IDLE: Final = Phase.IDLE

# A process does not exclude itself by POSIX locks: (pid, lock file) of open reporters.
_OPEN: Final[set[tuple[int, str]]] = set()


def state_directory() -> Path:
    """`$GPUWARDEN_RUNTIME_DIR`, else /run/gpuwarden: folder of state files and the host key."""
    return Path(os.environ.get("GPUWARDEN_RUNTIME_DIR", DEFAULT_DIR))


def host_key(directory: Path) -> str:
    """The host's name from `<directory>/host`; a container's hostname differs.

    Raises:
        HostKeyError: the file is missing or invalid.
    """
    path = directory / "host"
    try:
        return state_file.check_name(path.read_text(encoding="utf-8").strip(), what="host")
    except (OSError, UnicodeDecodeError, state_file.StateFileError) as error:
        raise HostKeyError(
            f"no host key at {path} ({error}): write this host's name to the file, and mount it into the containers"
        ) from None


class _Timing:
    """Step and phase timing of one attempt."""

    __slots__ = ("_ahead_s", "_phase_timing", "pace", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.pace = StepTiming()
        self._phase_timing = PhaseTiming(time.monotonic())
        self._ahead_s = _boottime_ahead_s()

    def enter(self, phase: Phase) -> None:
        """Enter a phase."""
        now_s = time.monotonic()
        self.pace.enter(now_s, steps=phase is Phase.STEP)
        self._phase_timing.enter(now_s, phase)

    def in_job(self, job: JobFile) -> JobFile:
        """The job file with this timing."""
        # After a suspend the start times are unknown.
        ahead_s = _boottime_ahead_s()
        awake_ahead_s = ahead_s if abs(ahead_s - self._ahead_s) < SLEPT_S else None
        return replace(
            job,
            step=self.steps,
            step_mean_s=self.pace.mean_s,
            step_max_s=self.pace.max_s,
            longest=_to_long_steps(self.pace.longest, awake_ahead_s),
            stays=_to_long_steps(self._phase_timing.longest(job.phase), awake_ahead_s),
        )


class Reporter:
    """Reports a worker, its heartbeat and its job.

    `Reporter()` reports for a script under `gpuwarden run`; elsewhere it does nothing.

    Args:
        directory: `$GPUWARDEN_RUNTIME_DIR`.
        worker: the slot's name, unique on the host.
        queue: the queue it serves.
        subdirectory: the container's folder in `directory`.
        heartbeat_s: seconds between heartbeats; with 0 the caller calls `beat`.
        incarnation: of an earlier process, whose job goes on.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        worker: str = "script",
        queue: str = RUN_QUEUE,
        subdirectory: str | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        incarnation: str | None = None,
    ) -> None:
        is_script = directory is None
        job = _supervised_job() if is_script else None
        if job is not None:
            directory, worker, subdirectory = job[0].parent.parent, job[1].worker, job[0].parent.name
        elif directory is None:
            directory = DEFAULT_DIR  # nothing is written
        state_file.check_name(worker)
        self.folder = directory / state_file.check_name(subdirectory or worker, what="subdirectory")
        self.incarnation = incarnation or uuid4().hex
        self.write_errors = 0
        self._heartbeat_s = None if is_script else heartbeat_s
        self._base = self.folder / worker
        now = clock.stamp()
        self._worker = WorkerFile(
            worker=worker,
            incarnation=self.incarnation,
            queue=queue,
            pid=os.getpid(),
            started=now,
            heartbeat=now,
            loop=now,
            start_ticks=_own_start_ticks(),
            pid_namespace=procfs.pid_namespace(),
        )
        self._job: JobFile | None = None if job is None else job[1]
        self._busy_timeout_s: float | None = None
        self._timing = _Timing()
        self._next_write_s = 0.0
        self._idle_since_s = 0.0
        self._lock_fd: int | None = None
        # Re-entrant: a signal handler may call `phase` during `step`.
        self._changing = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_heartbeat, name="gpuwarden-heartbeat", daemon=True)
        if self._job is not None and self._job.local_ranks > 1 and not _reports(self._path(_suffix(self._job))):
            self._publish_job()  # a rank counts before its first step
            self._next_write_s = 0.0

    @property
    def _is_script(self) -> bool:
        return self._heartbeat_s is None

    def open(self) -> Self:
        """Take the lock, publish the worker file and start the heartbeat.

        Raises:
            LockHeldError: another process or reporter is this worker.
            StateFolderError: the folder cannot be written.
        """
        if self._is_script:
            return self
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = self._take_lock()
            self._job = _job_of(self._path(state_file.JOB_SUFFIX), self.incarnation)
            if self._job is None:
                _remove_ranks(self._path(state_file.JOB_SUFFIX))
                self._path(state_file.JOB_SUFFIX).unlink(missing_ok=True)
            self._replace(state_file.WORKER_SUFFIX, state_file.render(self._worker))
        except OSError as error:
            self._release_lock()
            raise StateFolderError(
                f"cannot write state files in {self.folder} ({error}): create it, writable for this user"
            ) from error
        if self._heartbeat_s:
            self._thread.start()
        return self

    def beat(self) -> None:
        """Write both heartbeats."""
        self.loop_seen()
        self._write(state_file.WORKER_SUFFIX, replace(self._worker, heartbeat=clock.stamp()))

    def loop_seen(self) -> None:
        """The main loop runs, outside of a job."""
        self._worker = replace(self._worker, loop=clock.stamp())

    def start_job(  # noqa: PLR0913 - the fields of a job file
        self,
        *,
        job_id: int,
        attempt: int,
        job_class: JobClass,
        model: str | None,
        budget_s: float,
        stall_timeout_s: float,
        busy_timeout_s: float | None = None,
        steps_total: int | None = None,
        ranks: int = 1,
        gang: str | None = None,
        rank: int = 0,
        health_window_s: float | None = None,
        health_acts: bool = True,
        after_gpu_use: bool = False,
    ) -> None:
        """Begin an attempt in phase `load`, not yet monitored, or go on with it. `rank` starts at 0."""
        if self._job is not None and (self._job.job_id, self._job.attempt) == (job_id, attempt):
            return
        now = clock.stamp()
        self._timing = _Timing()
        job = JobFile(
            job_id=job_id,
            attempt=attempt,
            worker=self._worker.worker,
            incarnation=self.incarnation,
            job_class=job_class,
            model=model,
            budget_s=budget_s,
            stall_timeout_s=stall_timeout_s,
            busy_timeout_s=busy_timeout_s,
            started=now,
            phase=Phase.LOAD,
            phase_started=now,
            step_beat=None,
            step=0,
            steps_total=steps_total,
            step_mean_s=None,
            step_max_s=None,
            items_done=0,
            items_failed=0,
            ranks=ranks,
            gang=gang,
            rank=rank,
            health_window_s=health_window_s,
            health_acts=health_acts,
            after_gpu_use=after_gpu_use,
        )
        with self._changing:
            self._job, self._busy_timeout_s = job, busy_timeout_s
            self._publish_job()

    def ready(self) -> None:
        """End the load with a first step beat, so that a job that never steps is monitored too (A3)."""
        with self._changing:
            if self._job is not None:
                now = clock.stamp()
                self._timing.enter(Phase.STEP)
                self._job = replace(self._job, phase=Phase.STEP, phase_started=now, step_beat=now, timeout_s=None)
                self._publish_job()

    def phase(self, phase: Phase, *, timeout_s: float | None = None, busy_timeout_s: float | None = None) -> None:
        """Enter a phase: a step beat once the job is monitored. `step` starts the monitoring.

        Args:
            phase: the current phase. Enter `idle` after all threads stepped.
            timeout_s: time that it may be inactive in this phase, seconds, at least 30.
            busy_timeout_s: time for which it may work in `step` without a step beat.
        """
        if phase not in list(Phase):
            self.write_errors += 1
            return
        if timeout_s is not None and not _is_timeout(timeout_s):
            self.write_errors += 1
            timeout_s = None
        if busy_timeout_s is not None and not _is_timeout(busy_timeout_s):
            self.write_errors += 1
            busy_timeout_s = None
        with self._changing:
            job = self._job
            if job is not None:
                now = clock.stamp()
                armed = job.step_beat is not None or phase == Phase.STEP
                self._timing.enter(Phase(phase))
                self._job = replace(
                    job,
                    phase=Phase(phase),
                    phase_started=now,
                    step_beat=now if armed else None,
                    timeout_s=None if timeout_s is None else float(timeout_s),
                    busy_timeout_s=self._busy_timeout_s if busy_timeout_s is None else float(busy_timeout_s),
                )
                self._publish_job()
                if phase == Phase.IDLE:
                    self._idle_since_s = time.monotonic()
                    self._next_write_s = 0.0  # publish the next step at once, as it ends `idle`

    def step_beat(self) -> None:
        """Refresh a monitored job's step beat alone."""
        with self._changing:
            if self._job is not None and self._job.step_beat is not None:
                self._job = replace(self._job, step_beat=clock.stamp())
                self._publish_job()

    def step(self) -> None:
        """Report a step; never raises. Takes under a microsecond, plus one write a second.

        A step in `idle` enters `step`.
        """
        now_s = time.monotonic()
        job, timing = self._job, self._timing
        timing.steps += 1
        if job is not None and job.phase is _IDLE and now_s > self._idle_since_s:
            timing.pace.reset_start()
        timing.pace.step(now_s)
        # Another thread is writing the same now: do not wait for it.
        if now_s >= self._next_write_s and self._changing.acquire(blocking=False):
            try:
                job = self._job
                # A step from before `idle` does not end it.
                if job is not None and (job.phase is not Phase.IDLE or now_s > self._idle_since_s):
                    # Steps of a load do not start the monitoring (A3).
                    armed, now = job.step_beat is not None or job.phase is not Phase.LOAD, clock.stamp()
                    if job.phase is Phase.IDLE or (self._is_script and job.phase is Phase.LOAD):
                        job, armed = replace(job, phase=Phase.STEP, phase_started=now, timeout_s=None), True
                    self._job = replace(job, step_beat=now if armed else None)
                    self._publish_job()
            finally:
                self._changing.release()

    def hide_job(self) -> None:
        """Hide a suspended command's job."""
        with suppress(OSError):
            self._path(state_file.JOB_SUFFIX).rename(self._path(HIDDEN_SUFFIX))

    def show_job(self) -> None:
        """Show it again. Its inactivity restarts."""
        path = self._path(state_file.JOB_SUFFIX)
        _restamp(self._path(HIDDEN_SUFFIX), path)
        self._remove(HIDDEN_SUFFIX)
        for each in path.parent.glob(f"{path.name}.[0-9]*"):
            _restamp(each, each)

    def items(self, *, done: int, failed: int) -> None:
        """Report how many of the job's items are done and failed."""
        try:
            done, failed = operator.index(done), operator.index(failed)
        except TypeError:
            done = failed = -1
        if done < 0 or failed < 0:
            self.write_errors += 1
            return
        with self._changing:
            if self._job is not None:
                self._job = replace(self._job, items_done=done, items_failed=failed)

    def end_job(self) -> None:
        """Remove the job file of a settled attempt."""
        if self._is_script:
            return
        with self._changing:
            self._job = None
            _remove_ranks(self._path(state_file.JOB_SUFFIX))
            self._remove(state_file.JOB_SUFFIX)
        self.loop_seen()

    def close(self, *, leave_files: bool = False) -> None:
        """Remove the files, then release the lock; does nothing in a forked child."""
        if self._lock_fd is None or os.getpid() != self._worker.pid:
            return
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        if not leave_files:
            self.end_job()
            self._remove(state_file.WORKER_SUFFIX)
        self._release_lock()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_lock(self) -> int:
        path = self._path(state_file.LOCK_SUFFIX)
        held = LockHeldError(
            f"another process is worker {self._worker.worker!r} and holds {path}: stop it, or use another name"
        )
        key = os.getpid(), os.path.realpath(path)
        if key in _OPEN:
            raise held
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock_fd)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise held from None
        _OPEN.add(key)
        return lock_fd

    def _release_lock(self) -> None:
        if self._lock_fd is not None:
            _OPEN.discard((os.getpid(), os.path.realpath(self._path(state_file.LOCK_SUFFIX))))
            os.close(self._lock_fd)
            self._lock_fd = None

    def _run_heartbeat(self) -> None:
        while not self._closing.wait(self._heartbeat_s):
            self._write(state_file.WORKER_SUFFIX, replace(self._worker, heartbeat=clock.stamp()))

    def _publish_job(self) -> None:
        self._next_write_s = time.monotonic() + STEP_WRITE_S
        if self._job is not None:
            self._job = self._timing.in_job(self._job)
            self._write(_suffix(self._job), self._job)

    def _path(self, suffix: str) -> Path:
        return self._base.with_name(self._base.name + suffix)

    def _write(self, suffix: str, value: WorkerFile | JobFile) -> None:
        try:
            self._replace(suffix, state_file.render(value))
        except (OSError, ValueError, TypeError):  # ValueError, TypeError: the job gave numbers that JSON lacks
            self.write_errors += 1

    def _replace(self, suffix: str, text: str) -> None:
        atomic_write(self._path(suffix), text)

    def _remove(self, suffix: str) -> None:
        try:
            self._path(suffix).unlink(missing_ok=True)
        except OSError:
            self.write_errors += 1


def _supervised_job() -> tuple[Path, JobFile] | None:
    """This script's job file, and the job. Under torchrun each process has its own."""
    path, ranks = os.environ.get(JOB_FILE), _environment_number("LOCAL_WORLD_SIZE", 1)
    rank = _environment_number("LOCAL_RANK", 0)
    if path is None or not rank < min(ranks, state_file.LOCAL_RANKS_MAX):
        return None
    try:
        job = state_file.parse_job(Path(path).read_text(encoding="utf-8"))
        if ranks == 1:
            return Path(path), job
        own = procfs.ProcessId.of(os.getpid())
    except (OSError, ValueError, state_file.StateFileError):
        return None
    # Rank 0 writes this file too, and may be ahead.
    now = clock.stamp()
    fresh = replace(job, phase=Phase.LOAD, phase_started=now, step_beat=None, step=0, longest=(), stays=())
    return Path(path), replace(fresh, local_rank=rank, local_ranks=ranks, process=own)


def _environment_number(name: str, default: int) -> int:
    given = os.environ.get(name, "")
    return int(given) if given.isdecimal() else default


def _suffix(job: JobFile) -> str:
    return f"{state_file.JOB_SUFFIX}.{job.local_rank}" if job.local_rank else state_file.JOB_SUFFIX


def _reports(path: Path) -> bool:
    """Whether a running process has this job file."""
    try:
        process = state_file.parse_job(path.read_text(encoding="utf-8")).process
    except (OSError, ValueError, state_file.StateFileError):
        return False
    return process is not None and procfs.ProcessId(*process).runs()


def _restamp(source: Path, path: Path) -> None:
    now = clock.stamp()
    with suppress(OSError, ValueError, state_file.StateFileError):
        job = state_file.parse_job(source.read_text(encoding="utf-8"))
        job = replace(job, phase_started=now, step_beat=now if job.step_beat else None)
        atomic_write(path, state_file.render(job))


def _remove_ranks(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}.[0-9]*"):
        with suppress(OSError):
            each.unlink()


def _job_of(path: Path, incarnation: str) -> JobFile | None:
    with suppress(OSError, ValueError, state_file.StateFileError):
        job = state_file.parse_job(path.read_text(encoding="utf-8"))
        return job if job.incarnation == incarnation else None
    return None


def _boottime_ahead_s() -> float:
    """CLOCK_BOOTTIME less CLOCK_MONOTONIC: suspended time, seconds."""
    return clock.boottime_s() - time.monotonic()


def _own_start_ticks() -> int | None:
    try:
        return procfs.start_ticks(os.getpid())
    except OSError:
        return None


def _to_long_steps(steps: Steps, ahead_s: float | None) -> tuple[LongStep, ...]:
    return tuple(
        LongStep(took_s=took_s, began_s=None if ahead_s is None or began_s is None else began_s + ahead_s)
        for took_s, began_s in steps
    )


def _is_timeout(given: object) -> bool:
    """Whether a state file can hold this timeout."""
    if isinstance(given, bool | str | bytes | bytearray):
        return False
    try:
        return 0 < float(given) < state_file.SECONDS_MAX  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
