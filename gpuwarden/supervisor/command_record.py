"""A job's command, in the folder of its worker: its record, and its locks.

The worker takes a flock on `<worker>.command.lock`, writes the record, and starts the command's supervisor, which
inherits the flock. So the flock is free only if no supervisor runs or can still start. A record without a supervisor
then names a command that never started; one without an end names a lost command.

The supervisor also takes a record lock on that file, as the kernel names its holder. It locks one byte of
`commands.lock` for the job, so that attempts of two workers never run at the same time.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gpuwarden import clock
from gpuwarden.files import atomic_write
from gpuwarden.procfs import ProcessId
from gpuwarden.supervisor.files import (
    COMMAND_LOCK_SUFFIX,
    COMMAND_SUFFIX,
    SupervisedFileError,
    process_of,
    read_object,
)

JOBS_LOCK: Final = "commands.lock"
POLL_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class CommandEnd:
    """How a command ended.

    Args:
        code: a shell's exit code.
        text: the same in words.
        stopped: a signal to its supervisor ended it.
    """

    code: int
    text: str
    stopped: bool = False


@dataclass(frozen=True, kw_only=True)
class Record:
    """The command of one attempt.

    Args:
        key: the job, unique among all queues.
        boot_id: of the boot in which it started.
    """

    key: str
    job_id: int
    attempt: int
    incarnation: str
    boot_id: str
    supervisor: ProcessId | None = None
    process: ProcessId | None = None
    end: CommandEnd | None = None

    @property
    def never_started(self) -> bool:
        """Whether no supervisor began with it, if the flock is free."""
        return self.supervisor is None

    @property
    def of_earlier_boot(self) -> bool:
        """Whether the host has restarted since."""
        return self.boot_id != clock.boot_id()


def write(folder: Path, name: str, record: Record) -> None:
    """Replace the record. An end is on disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / f"{name}{COMMAND_SUFFIX}"
    atomic_write(path, json.dumps(asdict(record)) + "\n", mode=0o644, sync=record.end is not None, many_writers=True)
    if record.end is not None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(folder: Path, name: str) -> Record | None:
    """Read the record; `None` without one.

    Raises:
        SupervisedFileError: it is invalid.
    """
    path = folder / f"{name}{COMMAND_SUFFIX}"
    fields = read_object(path)
    if fields is None:
        return None
    its = {each: fields.get(each) for each in ("supervisor", "process")}
    try:
        end = fields.get("end")
        return Record(
            key=str(fields["key"]),
            job_id=int(fields["job_id"]),
            attempt=int(fields["attempt"]),
            incarnation=str(fields["incarnation"]),
            boot_id=str(fields["boot_id"]),
            **{each: None if value is None else process_of(value) for each, value in its.items()},
            end=None
            if end is None
            else CommandEnd(code=int(end["code"]), text=str(end["text"]), stopped=end["stopped"] is True),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SupervisedFileError(f"cannot read {path}: field {error} is missing or invalid") from None


def remove(folder: Path, name: str) -> None:
    """Remove the record of a settled attempt."""
    with suppress(OSError):
        (folder / f"{name}{COMMAND_SUFFIX}").unlink(missing_ok=True)


def take(folder: Path, name: str) -> int | None:
    """Take the flock. Returns its descriptor, or `None` if another process has it.

    Raises:
        OSError: the file cannot be opened.
    """
    path = folder / f"{name}{COMMAND_LOCK_SUFFIX}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_free(folder: Path, name: str) -> bool:
    """Whether no supervisor of a command runs or can still start."""
    descriptor = take(folder, name)
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


def renew(folder: Path, name: str) -> None:
    """Show the supervisor that the worker has renewed its lease: by the lock file's time."""
    with suppress(OSError):
        os.utime(folder / f"{name}{COMMAND_LOCK_SUFFIX}")


def renewed_ns(folder: Path, name: str) -> int:
    """The time of `renew`; 0 if unknown."""
    with suppress(OSError):
        return (folder / f"{name}{COMMAND_LOCK_SUFFIX}").stat().st_mtime_ns
    return 0


def lock_job(folder: Path, key: str, *, give_up: Callable[[], bool]) -> bool:
    """Take this job's byte of the host's lock file, for the life of this process. Returns whether it was taken.

    Waits while another attempt ends. The folder above `folder` may be read-only.

    Raises:
        OSError: no lock file can be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(folder.parent / JOBS_LOCK, flags, 0o644)
    except OSError:
        descriptor = os.open(folder / JOBS_LOCK, flags, 0o644)
    at = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
        except (BlockingIOError, PermissionError):
            if give_up():
                return False
            time.sleep(POLL_S)
        else:
            return True
