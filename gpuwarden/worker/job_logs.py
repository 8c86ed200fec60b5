"""What a job prints, kept: a file for each attempt, beside what the worker prints anyway.

Everything the process writes to its standard output and error goes through `tee`, which adds it to the attempt's file
and passes it on: what native code prints, too, and whatever the process does meanwhile. A job whose interpreter hangs
in native code can still be read.
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
"""A folder keeps this many attempts' logs; the oldest go first."""

END_S: Final = 2.0
"""How long the last lines of an attempt may take to be written, seconds."""

FOLLOW_S: Final = 0.2
"""How often a log that is followed is looked at, seconds."""

_lingering: Final[list["subprocess.Popen[bytes]"]] = []

_NAME: Final = re.compile(r"job-(\d+)-attempt-(\d+)\.log")


class JobLogError(GpuwardenError):
    """A job's log cannot be kept, or there is none."""


def path_of(directory: Path, job_id: int, attempt: int) -> Path:
    """Where an attempt's log is."""
    return directory / name_of(job_id, attempt)


def name_of(job_id: int, attempt: int) -> str:
    """What an attempt's log is called."""
    return f"job-{job_id}-attempt-{attempt}.log"


def check_folder(directory: Path) -> None:
    """Make the folder of logs.

    Raises:
        JobLogError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobLogError(f"cannot keep logs in {directory} ({error}): name another with --logs") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise JobLogError(f"cannot keep logs in {directory}: let this user write there, or name another with --logs")
    if shutil.which("tee") is None:
        raise JobLogError("a job's log is kept by `tee`, which is not here: install coreutils, or leave out --logs")


@contextmanager
def kept(directory: Path, job_id: int, attempt: int) -> Iterator[None]:
    """Inside, what this process prints is kept in the log of the attempt; a full disk keeps no job from running.

    Raises:
        JobLogError: there is no `tee`.
    """
    _forget_oldest(directory)
    _flush()
    try:
        tee = subprocess.Popen(
            ["tee", "--append", "--", path_of(directory, job_id, attempt)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            start_new_session=True,  # Ctrl-C is for the worker, and the last lines are written after it
        )
    except OSError as error:
        raise JobLogError(f"a job's log is kept by `tee`, which cannot be run: {error}") from None
    pipe = tee.stdin
    if pipe is None:
        raise AssertionError("it was asked for a pipe")
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
            # A process that the job left behind holds its output still: `tee` goes on for it, and ends with it.
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
                with suppress(FileNotFoundError):  # another worker has just forgotten it
                    found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[: max(0, len(found) - LOGS_MAX + 1)]:
        with suppress(OSError):
            path.unlink()


def newest(directory: Path, job_id: int, attempt: int | None = None) -> Path:
    """The log of a job's latest attempt that is kept here, or of one attempt.

    Raises:
        JobLogError: there is none.
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
    raise JobLogError(
        f"no log of {which} in {directory}: it is on the host that ran it, where its worker was started with --logs"
    )


def lines(path: Path, *, goes_on: Callable[[], bool] | None = None) -> Iterator[str]:
    """A log's lines; with `goes_on`, also those that come, for as long as it says so.

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
