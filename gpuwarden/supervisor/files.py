"""Files between a supervisor, the exporter and the executor of its host.

In the folder of a worker:

    <worker>.process.json   the supervised process       (ProcessFile, by the supervisor)
    <worker>.notice.json    why a process is ended       (Notice, by the executor, before its signal)
    <worker>.command.json   the command of a job         (`command_record.Record`, by the command's own supervisor)
    <worker>.command.lock   record lock of that supervisor

In `$GPUWARDEN_RUNTIME_DIR`:

    executor.json           whether the executor acts    (ExecutorStatus, by the executor)

A process file proves nothing: `supervised` also asks the kernel. Other users may write these folders, so links are not
followed and sizes are limited.
"""

import fcntl
import json
import os
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from gpuwarden import clock, procfs, state_file
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.procfs import ProcessId
from gpuwarden.state_file import LOCK_SUFFIX, SIZE_MAX_BYTES

PROCESS_SUFFIX: Final = ".process.json"
NOTICE_SUFFIX: Final = ".notice.json"
COMMAND_SUFFIX: Final = ".command.json"
COMMAND_LOCK_SUFFIX: Final = ".command.lock"
EXECUTOR_FILE: Final = "executor.json"
EXECUTOR_FRESH_S: Final = 60.0
"""An executor that wrote its file within this time runs, seconds."""

# struct flock of Linux with 64-bit offsets: l_type, l_whence, l_start, l_len, l_pid (fcntl(2)).
_FLOCK: Final = struct.Struct("hhqqi4x")


class SupervisedFileError(GpuwardenError):
    """A file of a supervisor is invalid, or its claim is not what the kernel says."""


@dataclass(frozen=True, kw_only=True)
class ProcessFile:
    """A supervised process.

    Args:
        restarts: whether the supervisor starts it again after gpuwarden ended it.
        log_file: its output, if that is a file.
    """

    process: ProcessId
    supervisor: ProcessId
    restarts: bool
    log_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Why a process is ended, or in dry run would be."""

    process: ProcessId
    condition: str
    acts: bool
    message: str


@dataclass(frozen=True, kw_only=True)
class ExecutorStatus:
    """Whether this host's executor acts."""

    armed: bool
    age_s: float


def own_log_file() -> str | None:
    """The file that this process's standard output goes to, if it is one."""
    try:
        return str(Path("/proc/self/fd/1").readlink()) if stat.S_ISREG(os.fstat(1).st_mode) else None
    except OSError:
        return None


def write(folder: Path, name: str, value: ProcessFile | Notice) -> None:
    """Replace a file of the worker `name`.

    Raises:
        OSError: it cannot be written.
    """
    suffix = PROCESS_SUFFIX if isinstance(value, ProcessFile) else NOTICE_SUFFIX
    atomic_write(folder / f"{name}{suffix}", json.dumps(asdict(value)) + "\n", mode=0o644)


def read_process(folder: Path, name: str) -> ProcessFile | None:
    """Read a process file; `None` without one.

    Raises:
        SupervisedFileError: it cannot be read.
    """
    fields = read_object(folder / f"{name}{PROCESS_SUFFIX}")
    return None if fields is None else _process_file(fields)


def remove_process(folder: Path, name: str) -> None:
    """Say that the supervisor left nothing."""
    with suppress(OSError):
        (folder / f"{name}{PROCESS_SUFFIX}").unlink()


def _process_file(fields: Mapping[str, Any]) -> ProcessFile:
    log_file = fields.get("log_file")
    return ProcessFile(
        process=process_of(fields.get("process")),
        supervisor=process_of(fields.get("supervisor")),
        restarts=fields.get("restarts") is True,
        log_file=log_file if isinstance(log_file, str) and state_file.is_text(log_file) else None,
    )


def read_notice(folder: Path, name: str) -> Notice | None:
    """Read a notice, as `read_process`."""
    fields = read_object(folder / f"{name}{NOTICE_SUFFIX}")
    if fields is None:
        return None
    return Notice(
        process=process_of(fields.get("process")),
        condition=str(fields.get("condition")),
        acts=fields.get("acts") is True,
        message=str(fields.get("message", "")),
    )


def write_executor(directory: Path, *, armed: bool) -> None:
    """Say whether the executor acts.

    Raises:
        OSError: the file cannot be written.
    """
    atomic_write(directory / EXECUTOR_FILE, json.dumps({"armed": armed, **asdict(clock.stamp())}) + "\n", mode=0o644)


def remove_executor(directory: Path) -> None:
    """Say that the executor ends."""
    with suppress(OSError):
        (directory / EXECUTOR_FILE).unlink()


def read_executor(directory: Path) -> ExecutorStatus | None:
    """The executor of this host, if it runs."""
    with suppress(SupervisedFileError, KeyError, TypeError, ValueError):
        fields = read_object(directory / EXECUTOR_FILE)
        if fields is not None and fields["boot_id"] == clock.boot_id():
            age_s = clock.boottime_s() - float(fields["boottime_s"])
            if 0 <= age_s <= EXECUTOR_FRESH_S:
                return ExecutorStatus(armed=fields["armed"] is True, age_s=age_s)
    return None


def supervised(folder: Path, name: str, *, holder: int | None, proc: Path = procfs.PROC) -> ProcessFile | None:
    """The process file of a worker, if the kernel confirms it; `None` without a running supervisor.

    Args:
        folder: the worker's folder.
        name: the worker.
        holder: the process that holds its lock.
        proc: the proc file system.

    The supervisor must run, be the parent of the process while that runs, and belong to the folder's owner, as the
    process does. One of both must hold the lock, if anyone does. A job's command counts before the worker's process.

    Raises:
        SupervisedFileError: the file is invalid or claims another process.
    """
    if (command := supervised_command(folder, name, proc=proc)) is not None:
        return command
    found = read_process(folder, name)
    if found is None:
        return None
    claim = f"{folder / name}{PROCESS_SUFFIX} names process {found.process.pid}"
    if not found.supervisor.runs(proc=proc):
        return None  # left behind
    if holder is not None and holder not in (found.supervisor.pid, found.process.pid):
        raise SupervisedFileError(f"{claim}, but process {holder} holds the worker's lock")
    return _checked(found, folder, claim, proc)


def supervised_command(folder: Path, name: str, *, proc: Path = procfs.PROC) -> ProcessFile | None:
    """The command of a worker's job, as `supervised`. Its supervisor outlives the worker and holds another lock."""
    try:
        holder = lock_holder(folder, name, suffix=COMMAND_LOCK_SUFFIX)[1]
    except OSError:
        return None
    if holder is None:
        return None
    fields = read_object(folder / f"{name}{COMMAND_SUFFIX}")
    if fields is None or fields.get("process") is None:
        return None  # it has not started
    found = _process_file({**fields, "restarts": True})
    claim = f"{folder / name}{COMMAND_SUFFIX} names process {found.process.pid}"
    if holder != found.supervisor.pid or not found.supervisor.runs(proc=proc):
        raise SupervisedFileError(f"{claim}, but process {holder} holds the command's lock")
    return _checked(found, folder, claim, proc)


def _checked(found: ProcessFile, folder: Path, claim: str, proc: Path) -> ProcessFile:
    try:
        owner = folder.lstat().st_uid
        users = {(proc / str(found.supervisor.pid)).stat().st_uid}
        if found.process.runs(proc=proc):
            parent = int(procfs.stat(found.process.pid, proc=proc)[1])
            if parent != found.supervisor.pid:
                raise SupervisedFileError(f"{claim}, whose parent is {parent} and not {found.supervisor.pid}")
            users.add((proc / str(found.process.pid)).stat().st_uid)
    except OSError as error:
        raise SupervisedFileError(f"{claim}, which cannot be read: {error}") from None
    if users != {owner}:
        raise SupervisedFileError(f"{claim} of user {sorted(users)}, but the folder belongs to user {owner}")
    return found


def lock_holder(folder: Path, name: str, *, suffix: str = LOCK_SUFFIX) -> tuple[bool, int | None]:
    """Whether a worker's lock is held, and by which pid of this namespace.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = _open(folder / f"{name}{suffix}")
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        os.close(descriptor)
    return kind != fcntl.F_UNLCK, pid if kind != fcntl.F_UNLCK and pid > 0 else None


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def read_object(path: Path) -> Mapping[str, Any] | None:
    """Read a JSON object; `None` without a file.

    Raises:
        SupervisedFileError: it cannot be read.
    """
    try:
        descriptor = _open(path)
        try:
            data = os.read(descriptor, SIZE_MAX_BYTES)
        finally:
            os.close(descriptor)
        found = json.loads(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise SupervisedFileError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise SupervisedFileError(f"cannot read {path}: a JSON object was wanted")
    return found


def process_of(value: object) -> ProcessId:
    """The process in a field.

    Raises:
        SupervisedFileError: it is none.
    """
    if isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value):
        return ProcessId(*value)
    raise SupervisedFileError(f"pid and start time were wanted, {ascii(value)[:80]} found")
