"""What a worker and its job import to be seen: the lock, the heartbeat, `step()` and `phase()`.

Nothing here needs more than the standard library, and nothing here raises into the job once `open()` has returned: a
state file that cannot be written is counted in `write_errors` and tried again at the next beat.

The lock is a POSIX record lock, taken once on a file that this process never opens again, because closing *any*
descriptor of a file drops the process's record locks on it. The kernel releases it at death and only then, SIGKILL
included, and tells the exporter the holder's pid in the host's pid namespace, across containers.
"""

import errno
import fcntl
import operator
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, Self
from uuid import uuid4

from gpuwarden import clock, state_file
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.job import HEARTBEAT_S, JobClass, Phase
from gpuwarden.state_file import JobFile, LongStep, WorkerFile
from gpuwarden.step_timing import Pace, Stays, Steps

DEFAULT_DIR: Final = Path("/run/gpuwarden")
STEP_WRITE_S: Final = 1.0
"""`step()` writes its file at most this often, seconds."""
SLEPT_S: Final = 0.5
"""A machine that slept for less since an attempt began did not sleep, seconds: its clocks are read one by one."""


class LockHeldError(GpuwardenError):
    """Another live process holds this worker's lock."""


class StateFolderError(GpuwardenError):
    """The worker's folder cannot be made, or its files cannot be written."""


class HostKeyError(GpuwardenError):
    """The host's key cannot be read."""


# For `step`, which takes 225 ns: Python 3.11 takes 65 more to look a member up in its enum.
_IDLE: Final = Phase.IDLE

# POSIX locks do not exclude their own process, so that a second reporter in it is refused here: (pid, lock file).
_OPEN: Final[set[tuple[int, str]]] = set()


def state_directory() -> Path:
    """`$GPUWARDEN_RUNTIME_DIR`, else /run/gpuwarden: where every program looks for state files and the host key."""
    return Path(os.environ.get("GPUWARDEN_RUNTIME_DIR", DEFAULT_DIR))


def host_key(directory: Path) -> str:
    """The host's identity, chosen at set-up, from `<directory>/host`; a container's own hostname is not it.

    Raises:
        HostKeyError: the file is missing, empty, or holds what cannot be a label.
    """
    path = directory / "host"
    try:
        return state_file.check_name(path.read_text(encoding="utf-8").strip(), what="host")
    except (OSError, UnicodeDecodeError, state_file.StateFileError) as error:
        raise HostKeyError(
            f"no host key at {path} ({error}): write this host's name there, and mount the file into its containers"
        ) from None


class _Timing:
    """The steps of one attempt and the time that they and its phases took; the attempt begins with it, in `load`."""

    __slots__ = ("_ahead_s", "_stays", "pace", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.pace = Pace()
        self._stays = Stays(time.monotonic())
        self._ahead_s = _boottime_ahead_s()

    def goes_on(self, phase: Phase) -> None:
        """The attempt goes on to this phase."""
        now_s = time.monotonic()
        self.pace.goes_on(now_s, steps=phase is Phase.STEP)
        self._stays.goes_on(now_s, phase)

    def in_job(self, job: JobFile) -> JobFile:
        """The job file of the attempt, with these figures."""
        # By CLOCK_BOOTTIME, which counts what the machine slept: if it did, none is known to have begun then.
        ahead_s = _boottime_ahead_s()
        awake_ahead_s = ahead_s if abs(ahead_s - self._ahead_s) < SLEPT_S else None
        return replace(
            job,
            step=self.steps,
            step_mean_s=self.pace.mean_s,
            step_max_s=self.pace.max_s,
            longest=_told(self.pace.longest, awake_ahead_s),
            stays=_told(self._stays.longest(job.phase), awake_ahead_s),
        )


class Reporter:
    """One worker's voice: who it is, that it lives, and how its job gets on.

    Args:
        directory: `$GPUWARDEN_RUNTIME_DIR` as this process sees it.
        worker: the slot's name; unique on the host.
        queue: the queue it serves.
        subdirectory: the container's own folder in `directory`; the worker's name when not given.
        heartbeat_s: seconds between refreshes of the worker file.
    """

    def __init__(
        self,
        directory: Path,
        *,
        worker: str,
        queue: str,
        subdirectory: str | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        state_file.check_name(worker)
        self.folder = directory / state_file.check_name(subdirectory or worker, what="subdirectory")
        self.incarnation = uuid4().hex
        self.write_errors = 0
        self._heartbeat_s = heartbeat_s
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
        )
        self._job: JobFile | None = None
        self._timing = _Timing()
        self._next_write_s = 0.0
        self._idle_since_s = 0.0
        self._lock_fd: int | None = None
        # Re-entrant: a signal handler may call `phase` while its own thread is in `step`.
        self._changing = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="gpuwarden-heartbeat", daemon=True)

    def open(self) -> Self:
        """Take the lock, publish the worker file and start the heartbeat.

        Raises:
            LockHeldError: another live process is this worker, or another reporter of this process.
            StateFolderError: the folder cannot be made or written; nothing was published.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = self._take_lock()
            self._path(state_file.JOB_SUFFIX).unlink(missing_ok=True)
            self._replace(state_file.WORKER_SUFFIX, state_file.render(self._worker))
        except OSError as error:
            self._let_go()
            raise StateFolderError(
                f"cannot keep state files in {self.folder} ({error}): make it, and let this user write there"
            ) from error
        self._thread.start()
        return self

    def loop_seen(self) -> None:
        """The main loop is outside any job body, and alive."""
        self._worker = replace(self._worker, loop=clock.stamp())

    def start_job(
        self,
        *,
        job_id: int,
        attempt: int,
        job_class: JobClass,
        model: str | None,
        budget_s: float,
        stall_timeout_s: float,
        steps_total: int | None = None,
        ranks: int = 1,
        gang: str | None = None,
        rank: int = 0,
    ) -> None:
        """A new attempt begins, in phase `load` and not yet armed.

        `ranks` is how many its gang has, `gang` what they have in common, and `rank` which of them it is, from 0.
        """
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
            started=now,
            phase=Phase.LOAD,
            phase_started=now,
            beat=None,
            step=0,
            steps_total=steps_total,
            step_mean_s=None,
            step_max_s=None,
            items_done=0,
            items_failed=0,
            ranks=ranks,
            gang=gang,
            rank=rank,
        )
        with self._changing:
            self._job = job
            self._publish_job()

    def arm(self) -> None:
        """The load has ended: the first beat, sent by the worker so that a job which never steps is caught too (A3)."""
        with self._changing:
            if self._job is not None:
                now = clock.stamp()
                self._timing.goes_on(Phase.STEP)
                self._job = replace(self._job, phase=Phase.STEP, phase_started=now, beat=now, timeout_s=None)
                self._publish_job()

    def phase(self, phase: Phase, *, timeout_s: float | None = None) -> None:
        """The job goes on to `phase`. A beat, once armed; a job that moves itself to `step` arms itself.

        A phase that is none of ours is counted in `write_errors` and changes nothing.

        Args:
            phase: what it does now. While it is `idle` neither its silence nor its GPU is policed. A step ends that:
                say it once the last one is done, and of a job with several threads once none of them steps any more.
            timeout_s: how long it may show no sign of life in this phase, seconds, above 0, and held to be 30 where it
                is less; when not given, as long as the host and its owner allow. What is no such number is counted in
                `write_errors`, and not given.
        """
        if phase not in list(Phase):
            self.write_errors += 1
            return
        if timeout_s is not None and not _is_patience(timeout_s):
            self.write_errors += 1
            timeout_s = None
        with self._changing:
            job = self._job
            if job is not None:
                now = clock.stamp()
                armed = job.beat is not None or phase == Phase.STEP
                self._timing.goes_on(Phase(phase))
                self._job = replace(
                    job,
                    phase=Phase(phase),
                    phase_started=now,
                    beat=now if armed else None,
                    timeout_s=None if timeout_s is None else float(timeout_s),
                )
                self._publish_job()
                if phase == Phase.IDLE:
                    self._idle_since_s = time.monotonic()
                    self._next_write_s = 0.0  # the step that ends it is told at once: the next one may never be done

    def step(self) -> None:
        """One step is done. Costs well under a microsecond but for one write a second; never raises.

        Whoever steps is not idle: one in the phase `idle` is in `step` from then on, armed and policed.
        """
        now_s = time.monotonic()
        job, timing = self._job, self._timing
        timing.steps += 1
        if job is not None and job.phase is _IDLE and now_s > self._idle_since_s:
            timing.pace.begins_anew()
        timing.pace.step(now_s)
        # Another thread that is writing now tells as much: a step waits for nobody.
        if now_s >= self._next_write_s and self._changing.acquire(blocking=False):
            try:
                job = self._job
                # A step that was done before idle was said, and was overtaken, ends nothing.
                if job is not None and (job.phase is not Phase.IDLE or now_s > self._idle_since_s):
                    # A warm-up step of a load is progress and no arming: the worker arms when the load has ended (A3).
                    armed, now = job.beat is not None or job.phase is not Phase.LOAD, clock.stamp()
                    if job.phase is Phase.IDLE:
                        job = replace(job, phase=Phase.STEP, phase_started=now, timeout_s=None)
                    self._job = replace(job, beat=now if armed else None)
                    self._publish_job()
            finally:
                self._changing.release()

    def items(self, *, done: int, failed: int) -> None:
        """How many of the job's items are done and failed so far; published with the next write.

        Whole numbers of any library will do; what is none is counted in `write_errors` and changes nothing.
        """
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
        """The attempt is over and settled: its file goes."""
        with self._changing:
            self._job = None
            self._remove(state_file.JOB_SUFFIX)
        self.loop_seen()

    def close(self) -> None:
        """A clean end: the files go, then the lock. What is left beside a free lock is a dead worker.

        Nothing in a process that was forked off while the reporter was open: the files are its parent's.
        """
        if self._lock_fd is None or os.getpid() != self._worker.pid:
            return
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self.end_job()
        self._remove(state_file.WORKER_SUFFIX)
        self._let_go()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_lock(self) -> int:
        path = self._path(state_file.LOCK_SUFFIX)
        held = LockHeldError(
            f"another live process is worker {self._worker.worker!r} (it holds {path}): stop it, or take another name"
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

    def _let_go(self) -> None:
        if self._lock_fd is not None:
            _OPEN.discard((os.getpid(), os.path.realpath(self._path(state_file.LOCK_SUFFIX))))
            os.close(self._lock_fd)
            self._lock_fd = None

    def _beat_on(self) -> None:
        while not self._closing.wait(self._heartbeat_s):
            self._write(state_file.WORKER_SUFFIX, replace(self._worker, heartbeat=clock.stamp()))

    def _publish_job(self) -> None:
        self._next_write_s = time.monotonic() + STEP_WRITE_S
        if self._job is not None:
            self._job = self._timing.in_job(self._job)
            self._write(state_file.JOB_SUFFIX, self._job)

    def _path(self, suffix: str) -> Path:
        return self._base.with_name(self._base.name + suffix)

    def _write(self, suffix: str, value: WorkerFile | JobFile) -> None:
        try:
            self._replace(suffix, state_file.render(value))
        except (OSError, ValueError, TypeError):  # the last two: the job gave figures that JSON does not know
            self.write_errors += 1

    def _replace(self, suffix: str, text: str) -> None:
        atomic_write(self._path(suffix), text)

    def _remove(self, suffix: str) -> None:
        try:
            self._path(suffix).unlink(missing_ok=True)
        except OSError:
            self.write_errors += 1


def _boottime_ahead_s() -> float:
    """By how much CLOCK_BOOTTIME is ahead of CLOCK_MONOTONIC: for how long the machine has slept, seconds."""
    return clock.boottime_s() - time.monotonic()


def _told(steps: Steps, ahead_s: float | None) -> tuple[LongStep, ...]:
    """What a job file says of them; `ahead_s` is `None` where the clocks do not tell when one began."""
    return tuple(
        LongStep(took_s=took_s, began_s=None if ahead_s is None or began_s is None else began_s + ahead_s)
        for took_s, began_s in steps
    )


def _is_patience(given: object) -> bool:
    """Whether a job's own patience is one that a state file can hold: a number, and none that is only read as one."""
    if isinstance(given, bool | str | bytes | bytearray):
        return False
    try:
        return 0 < float(given) < state_file.SECONDS_MAX  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
