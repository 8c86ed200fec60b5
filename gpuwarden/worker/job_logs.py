"""Job logs: the output of each attempt, in a file of limited size.

`log_writer` writes it and passes the output on. It also records native code, and output is readable while the
interpreter hangs.
"""

import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from gpuwarden.db import running_up
from gpuwarden.errors import GpuwardenError
from gpuwarden.worker import log_writer
from gpuwarden.worker.log_writer import OLDER

JOBS_MAX: Final = 100
"""Jobs whose logs a folder keeps by default, the newest."""

SIZE_MAX_BYTES: Final = 4 * 2**20
"""Most bytes of a log. Of a longer one the newer half or more is kept."""

END_S: Final = 2.0
"""Time for the last lines of an attempt, seconds."""

FOLLOW_S: Final = 0.2
"""Interval between reads of a followed log, seconds."""

_lingering: Final[list["subprocess.Popen[bytes]"]] = []

_NAME: Final = re.compile(r"job-(\d+)-attempt-(\d+)\.log(?:\.1)?")


class JobLogError(GpuwardenError):
    """A job's log cannot be written or found."""


def default_folder(queue_db: str) -> Path:
    """The logs of this queue's jobs on this host, in the user's state folder.

    Raises:
        JobLogError: the user has no home folder.
    """
    from sqlalchemy import make_url  # noqa: PLC0415 - a worker behind a gateway has no database
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415

    try:
        url = make_url(queue_db)
        name = url.database or ""
        place = str(Path(name).absolute()) if url.get_backend_name() == "sqlite" else f"{url.host}:{url.port}/{name}"
        state = running_up.path_of(os.environ).parent
    except (ArgumentError, ValueError, RuntimeError) as error:
        raise JobLogError(f"no folder for logs ({error}): name one with --logs") from None
    return state / "job-logs" / f"{Path(name).stem or 'queue'}-{sha256(place.encode()).hexdigest()[:8]}"


def path_of(directory: Path, job_id: int, attempt: int) -> Path:
    """The path of an attempt's log."""
    return directory / name_of(job_id, attempt)


def name_of(job_id: int, attempt: int) -> str:
    """The file name of an attempt's log."""
    return f"job-{job_id}-attempt-{attempt}.log"


def check_folder(directory: Path) -> None:
    """Create the folder of logs, for this user only.

    Raises:
        JobLogError: it cannot be created or written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise JobLogError(f"cannot write logs to {directory} ({error}): name another folder with --logs") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise JobLogError(
            f"cannot write logs to {directory}: make it writable for this user, or name another with --logs"
        )


@contextmanager
def kept(
    directory: Path, job_id: int, attempt: int, *, submitted_at: float = 0.0, jobs_max: int = JOBS_MAX
) -> Iterator[None]:
    """Write what this process prints to the attempt's log. A full disk does not stop the job.

    Args:
        directory: the folder.
        job_id: the job.
        attempt: the attempt.
        submitted_at: the job's; older logs belong to another queue and are deleted.
        jobs_max: jobs whose logs are kept.

    Raises:
        JobLogError: the writer cannot run.
        OSError: the log cannot be written.
    """
    _delete_old(directory, job_id, submitted_at, jobs_max)
    path = path_of(directory, job_id, attempt)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    _flush()
    before = [(stream, os.dup(stream)) for stream in (1, 2)]
    ends = [os.pipe(), os.pipe()]
    (output, _), (errors, _) = ends
    try:
        writer = subprocess.Popen(
            [sys.executable, "-I", "-S", log_writer.__file__, path, str(SIZE_MAX_BYTES), str(errors)],
            stdin=output,
            pass_fds=(errors,),
            start_new_session=True,  # Ctrl-C is for the worker only
        )
    except OSError as error:
        for end in (*(each for _, each in ends), *(saved for _, saved in before)):
            os.close(end)
        raise JobLogError(f"cannot write the job's log: {error}") from None
    finally:
        os.close(output)
        os.close(errors)
    for (stream, _), (_, end) in zip(before, ends, strict=True):
        os.dup2(end, stream)
        os.close(end)
    try:
        yield
    finally:
        _flush()
        for stream, saved in before:
            os.dup2(saved, stream)
            os.close(saved)
        try:
            writer.wait(END_S)
        except subprocess.TimeoutExpired:
            # A process of the job still has the output open: the writer ends with it.
            _lingering.append(writer)
        _lingering[:] = [each for each in _lingering if each.poll() is None]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _delete_old(directory: Path, job_id: int, submitted_at: float, jobs_max: int) -> None:
    """Keep the logs of the newest jobs, and those that are written now."""
    logs: dict[int, list[Path]] = {}
    newest: dict[int, float] = {}
    for path, job, _ in _found(directory):
        with suppress(FileNotFoundError):  # another worker deleted it
            at = path.lstat().st_mtime
            if job == job_id and at < submitted_at:
                _delete(path)
            elif job != job_id:
                logs.setdefault(job, []).append(path)
                newest[job] = max(at, newest.get(job, 0.0))
    for job in sorted(logs, key=lambda job: (-newest[job], job))[jobs_max - 1 :]:
        for path in logs[job]:
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a log, unless it is written now."""
    with suppress(OSError), path.open("rb") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def _found(directory: Path) -> Iterator[tuple[Path, int, int]]:
    """Each log with its job and attempt."""
    with suppress(OSError):
        for path in directory.iterdir():
            if match := _NAME.fullmatch(path.name):
                yield path, int(match[1]), int(match[2])


def newest(directory: Path, job_id: int, attempt: int | None = None, *, submitted_at: float = 0.0) -> Path:
    """The log of an attempt, or of the latest one.

    Raises:
        JobLogError: it is not here.
    """
    attempts = []
    for path, job, number in _found(directory):
        with suppress(OSError):
            if job == job_id and path.lstat().st_mtime >= submitted_at:
                attempts.append(number)
    wanted = max(attempts, default=None) if attempt is None else attempt
    if wanted is not None and wanted in attempts:
        return path_of(directory, job_id, wanted)
    which = f"job {job_id}" if attempt is None else f"attempt {attempt} of job {job_id}"
    raise JobLogError(
        f"no log of {which} in {directory}: see the host and user that ran it, or give its worker's --logs"
    )


def lines(path: Path, *, goes_on: Callable[[], bool] | None = None) -> Iterator[str]:
    """A log's lines, and later ones while `goes_on` returns true.

    Raises:
        JobLogError: it cannot be read.
    """
    older = path.with_name(path.name + OLDER)
    try:
        for part in (older, path) if older.exists() else (path,):
            yield from _part(part, path, goes_on if part == path else None)
    except OSError as error:
        raise JobLogError(f"cannot read {path}: {error}") from None


def _part(part: Path, path: Path, goes_on: Callable[[], bool] | None) -> Iterator[str]:
    log = part.open(encoding="utf-8", errors="backslashreplace")
    try:
        while True:
            more = goes_on is not None and goes_on()
            full = more and _is_other(path, log.fileno())  # asked before the last read
            yield from log
            if not more:
                return
            if full:
                log.close()
                log = path.open(encoding="utf-8", errors="backslashreplace")
            else:
                time.sleep(FOLLOW_S)
    finally:
        log.close()


def _is_other(path: Path, file: int) -> bool:
    """Whether the log began a new half."""
    with suppress(FileNotFoundError):
        return path.stat().st_ino != os.fstat(file).st_ino
    return False
