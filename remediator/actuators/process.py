"""Supervised processes, for hosts without a container engine: started from a file of commands.

The file is TOML. A worker opts in by being listed:

    [worker.trainer-0]
    argv = ["/opt/venv/bin/gpuwarden", "worker", "run", "--name", "trainer-0", "--handler", "train:load"]
    env = { GPUWARDEN_QUEUE_DB = "sqlite:////var/lib/gpuwarden/queue.db" }   # added to the remediator's environment
    pid_file = "/run/gpuwarden/trainer-0.pid"                             # written here
    log_file = "/var/log/gpuwarden/trainer-0.log"

The handle is the worker's name. During a start, `.starting` next to the pid file holds a mark that the environment has
too: after a crash the process is found by it. Each process leads its own session and is stopped with its children.
Signals go through a pidfd (Linux 5.3), so that a reused pid is never hit.

Of a dead worker that is not listed, only the orphans are ended.
"""

import errno
import os
import re
import secrets
import signal
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuwarden import clock, procfs
from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.procfs import ProcessId
from remediator.actuators import ActuatorError
from remediator.plan import ContainerState

MARK: Final = "GPUWARDEN_STARTED_AS"
"""Environment variable that holds the mark."""

POLL_S: Final = 0.05
KILL_WAIT_S: Final = 5.0


ORPHANS: Final = "orphans"
"""Kind of container."""

_ORPHANS: Final = re.compile(r"(?P<worker>\S+) process:(?P<pid>[0-9]+):(?P<ticks>[0-9]+)@(?P<boot>\S+) (?P<uid>[0-9]+)")


class _Command(BaseModel):
    model_config = ConfigDict(extra="forbid")
    argv: list[str] = Field(min_length=1)
    env: dict[str, str] = {}
    pid_file: Path
    log_file: Path


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    worker: dict[str, _Command]


class ProcessActuator:
    """Inspects, stops and starts listed processes."""

    def __init__(self, path: Path) -> None:
        try:
            self._commands = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).worker
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
            raise GpuwardenError(f"invalid file of supervised workers {path}: {error}") from None

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:  # noqa: ARG002 - part of the protocol
        """See `Actuator.look`."""
        command = self._commands.get(handle)
        if command is None:
            return None
        found = _find(command.pid_file)
        running = found is not None and _runs(found)
        return ContainerState(
            kind="process",
            handle=handle,
            name=handle,
            incarnation="" if found is None else f"process:{found.pid}:{found.start_ticks}@{clock.boot_id()}",
            running=running,
            managed=True,
            pids=frozenset(each.pid for each in _session(found)) if found is not None else frozenset(),
            cgroup=None,
            log_file=str(command.log_file),
            session=None if found is None else found.pid,
        )

    def stop(self, handle: str, *, grace_s: float) -> None:
        """See `Actuator.stop`. SIGTERM, then SIGKILL, to every process of its session."""
        command = self._command(handle)
        found = _find(command.pid_file)
        if found is not None and not _end(found, grace_s=grace_s):
            raise ActuatorError(f"worker {handle} (pid {found.pid}) still runs after SIGKILL")

    def start(self, handle: str) -> None:
        """See `Actuator.start`."""
        command = self._command(handle)
        found = _find(command.pid_file)
        if found is not None and _runs(found):
            return
        mark, mark_file = secrets.token_hex(16), _mark_file(command.pid_file)
        try:
            atomic_write(mark_file, mark)
            pid = os.posix_spawnp(
                command.argv[0],
                command.argv,
                {**os.environ, **command.env, MARK: mark},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, command.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores these; the child must not
            )
        except (OSError, ValueError) as error:
            with suppress(OSError):
                mark_file.unlink(missing_ok=True)
            raise ActuatorError(f"worker {handle} cannot be started: {error}") from None
        process = ProcessId(pid, 0)
        try:
            process = ProcessId.of(pid)
            _record(command.pid_file, process)
        except OSError as error:
            _end(process, grace_s=0.0)  # without a pid file it would be started twice
            raise ActuatorError(f"worker {handle} was stopped: cannot write its pid file: {error}") from None

    def _command(self, handle: str) -> _Command:
        try:
            return self._commands[handle]
        except KeyError:
            raise ActuatorError(f"worker {handle} is not listed in the file of supervised workers") from None


class OrphanActuator:
    """Ends the orphans of a dead worker in no container: its user's processes in the group or session that it led."""

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState:  # noqa: ARG002 - part of the protocol
        """See `Actuator.look`."""
        found = _parts(handle)
        process = ProcessId(int(found["pid"]), int(found["ticks"]))
        pids = frozenset(each.pid for each in self._orphans(handle))
        return ContainerState(
            kind=ORPHANS,
            handle=handle,
            name=found["worker"],
            incarnation=handle.split()[1],
            running=bool(pids),
            managed=True,
            pids=pids,
            cgroup=None,
            session=process.pid,
            startable=False,
        )

    def stop(self, handle: str, *, grace_s: float) -> None:
        """See `Actuator.stop`."""
        if not _end_all(lambda: self._orphans(handle), grace_s=grace_s):
            raise ActuatorError(f"processes that worker {_parts(handle)['worker']} left still run after SIGKILL")

    def start(self, handle: str) -> None:
        """Refuse: its command is unknown."""
        raise ActuatorError(f"worker {_parts(handle)['worker']} is not listed in a file of supervised workers")

    def _orphans(self, handle: str) -> list[ProcessId]:
        found = _parts(handle)
        leader = ProcessId(int(found["pid"]), int(found["ticks"]))
        if found["boot"] != clock.boot_id():
            return []
        if leader.has_ended() is not True:
            raise ActuatorError(f"process {leader.pid} of worker {found['worker']} runs, or cannot be read")
        return [each for each in _session(leader) if _is_owned(each.pid, int(found["uid"]))]


def orphans_handle(worker: str, incarnation: str, uid: int) -> str:
    """Handle of a dead worker's orphans."""
    return f"{worker} {incarnation} {uid}"


def _parts(handle: str) -> re.Match[str]:
    found = _ORPHANS.fullmatch(handle)
    if found is None:
        raise ActuatorError(f"{handle[:200]!r} names no process of a worker")
    return found


def _is_owned(pid: int, uid: int) -> bool:
    try:
        return (procfs.PROC / str(pid)).stat().st_uid == uid
    except OSError:
        return False


def _mark_file(pid_file: Path) -> Path:
    return pid_file.with_name(f"{pid_file.name}.starting")


def _record(pid_file: Path, process: ProcessId) -> None:
    # The pid file first: without either file the process would be lost.
    atomic_write(pid_file, f"{process}\n")
    _mark_file(pid_file).unlink(missing_ok=True)


def _find(pid_file: Path) -> ProcessId | None:
    """Find the process by its pid file, or by its mark after an interrupted start."""
    try:
        mark = _mark_file(pid_file).read_text(encoding="ascii")
    except FileNotFoundError:
        return _read_pid_file(pid_file)
    except (OSError, ValueError) as error:
        raise ActuatorError(f"cannot read the mark of the last start: {error}") from None
    found = _find_by_mark(mark)
    if found is None:
        return _read_pid_file(pid_file)
    try:
        _record(pid_file, found)
    except OSError as error:
        raise ActuatorError(f"cannot write the pid file of process {found.pid}: {error}") from None
    return found


def _find_by_mark(mark: str) -> ProcessId | None:
    # Children inherit the mark, so only a session leader counts.
    sought = f"{MARK}={mark}".encode()
    for entry in procfs.PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = procfs.stat(int(entry.name))
                leads = fields[3] == entry.name and not procfs.has_ended(fields)
                if leads and sought in (entry / "environ").read_bytes().split(b"\0"):
                    return ProcessId(int(entry.name), int(fields[19]))
            except OSError:  # gone, or not readable
                continue
    return None


def _read_pid_file(pid_file: Path) -> ProcessId | None:
    try:
        found = ProcessId.parse(pid_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return found if found is not None and found.pid > 1 else None


def _runs(process: ProcessId) -> bool:
    _reap(process.pid)
    return process.runs()


def _end(leader: ProcessId, *, grace_s: float) -> bool:
    """Stop a session. Returns whether all its processes ended."""
    return _end_all(lambda: _session(leader), grace_s=grace_s)


def _end_all(listed: Callable[[], list[ProcessId]], *, grace_s: float) -> bool:
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
        for process in listed():
            _signal(process, number)
        deadline_s = time.monotonic() + wait_s
        while left := listed():
            if time.monotonic() >= deadline_s:
                break
            if number is signal.SIGKILL:  # also children forked during the listing
                for process in left:
                    _signal(process, number)
            time.sleep(POLL_S)
        else:
            return True
    return False


def _session(leader: ProcessId) -> list[ProcessId]:
    """List the living processes of a leader's session and process group, with the leader.

    The kernel does not reuse a pid while one of them has it. A leader with another start time means that they are over.
    """
    _reap(leader.pid)
    with suppress(OSError):
        if ProcessId.of(leader.pid) != leader:
            return []
    found: list[ProcessId] = []
    for entry in procfs.PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = procfs.stat(int(entry.name))
            except OSError:
                continue
            if leader.led(fields) and not procfs.has_ended(fields):
                found.append(ProcessId(int(entry.name), int(fields[19])))
    return found


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # not our child


def _signal(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to this process and no other. Does nothing if it is gone."""
    try:
        # Gone, or of another user: then the caller still lists it.
        with process.opened() as descriptor, suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, number)
    except (FileNotFoundError, ProcessLookupError):
        return
    except OSError as error:
        reason = "needs Linux 5.3 or later" if error.errno == errno.ENOSYS else str(error)
        raise ActuatorError(f"process {process.pid} was not signalled: {reason}") from None
