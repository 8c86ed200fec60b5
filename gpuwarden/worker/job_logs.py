"""Job logs: one file for each attempt, next to the worker's output.

`tee` writes the standard output and error of the process to the file. It also records native code, and output is
readable while the interpreter hangs.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gpuwarden.errors import GpuwardenError

LOGS_MAX: Final = 1000
"""Logs kept in a folder. The oldest are deleted."""

END_S: Final = 2.0
"""Time for the last lines of an attempt, seconds."""

FOLLOW_S: Final = 0.2
"""Interval between reads of a followed log, seconds."""

_lingering: Final[list["subprocess.Popen[bytes]"]] = []

_NAME: Final = re.compile(r"job-(\d+)-attempt-(\d+)\.log")


class JobLogError(GpuwardenError):
    """A job's log cannot be written or found."""


def path_of(directory: Path, job_id: int, attempt: int) -> Path:
    """The path of an attempt's log."""
    return directory / name_of(job_id, attempt)


def name_of(job_id: int, attempt: int) -> str:
    """The file name of an attempt's log."""
    return f"job-{job_id}-attempt-{attempt}.log"


def check_folder(directory: Path) -> None:
    """Create the folder of logs.

    Raises:
        JobLogError: it cannot be created or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobLogError(f"cannot write logs to {directory} ({error}): name another folder with --logs") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise JobLogError(
            f"cannot write logs to {directory}: make it writable for this user, or name another with --logs"
        )
    if shutil.which("tee") is None:
        raise JobLogError("`tee` not found: install coreutils, or leave out --logs")


@contextmanager
def kept(directory: Path, job_id: int, attempt: int) -> Iterator[None]:
    """Write what this process prints to the attempt's log. A full disk does not stop the job.

    Raises:
        JobLogError: `tee` cannot run.
    """
    _forget_oldest(directory)
    _flush()
    try:
        tee = subprocess.Popen(
            ["tee", "--append", "--", path_of(directory, job_id, attempt)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            start_new_session=True,  # Ctrl-C is for the worker only
        )
    except OSError as error:
        raise JobLogError(f"cannot run `tee` for the job's log: {error}") from None
    pipe = tee.stdin
    if pipe is None:
        raise AssertionError("tee has no pipe")
    before = [(stream, os.dup(stream)) for stream in (1, 2)]
    for stream, _ in before:
        os.dup2(pipe.fileno(), stream)
    pipe.close()
    try:
        yield
    finally:
        _flush()
        for stream, saved in before:
            os.dup2(saved, stream)
            os.close(saved)
        try:
            tee.wait(END_S)
        except subprocess.TimeoutExpired:
            # A process of the job still has the output open: `tee` ends with it.
            _lingering.append(tee)
        _lingering[:] = [each for each in _lingering if each.poll() is None]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _forget_oldest(directory: Path) -> None:
    found: list[tuple[float, Path]] = []
    with suppress(OSError):
        for path in directory.iterdir():
            if _NAME.fullmatch(path.name):
                with suppress(FileNotFoundError):  # another worker deleted it
                    found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[: max(0, len(found) - LOGS_MAX + 1)]:
        with suppress(OSError):
            path.unlink()


def newest(directory: Path, job_id: int, attempt: int | None = None) -> Path:
    """The log of an attempt, or of the latest one.

    Raises:
        JobLogError: it is not here.
    """
    found: dict[int, Path] = {}
    with suppress(OSError):
        for path in directory.iterdir():
            if (match := _NAME.fullmatch(path.name)) and int(match[1]) == job_id:
                found[int(match[2])] = path
    if attempt is None and found:
        return found[max(found)]
    if attempt in found:
        return found[attempt]
    which = f"job {job_id}" if attempt is None else f"attempt {attempt} of job {job_id}"
    raise JobLogError(f"no log of {which} in {directory}: see the host that ran it, if its worker has --logs")


def lines(path: Path, *, goes_on: Callable[[], bool] | None = None) -> Iterator[str]:
    """A log's lines, and later ones while `goes_on` returns true.

    Raises:
        JobLogError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="backslashreplace") as log:
            while True:
                more = goes_on is not None and goes_on()
                yield from log
                if not more:
                    return
                time.sleep(FOLLOW_S)
    except OSError as error:
        raise JobLogError(f"cannot read {path}: {error}") from None
