"""Supervised processes, for hosts without a container engine: started from a file of commands, watched by pid file.

The file is TOML; only what it names has opted in, and only its owner can write it:

    [worker.trainer-0]
    argv = ["/opt/venv/bin/gpuwarden", "worker", "--name", "trainer-0", "--body", "train:load"]
    env = { GPUWARDEN_STORE = "sqlite:////var/lib/gpuwarden/queue.db" }   # added to the remediator's own
    pid_file = "/run/gpuwarden/trainer-0.pid"                             # made and owned here
    log_file = "/var/log/gpuwarden/trainer-0.log"

The handle is the worker's name. What is started has a mark in its environment, which stands beside the pid file while
it is being started (`.starting`): one that was started, and not put on record by who was killed at it, is known by
its mark, and is put on record by the next one who looks. Each process leads a session of its own, so that it outlives
the remediator and is ended with its children. Each is signalled by a descriptor of the process itself (pidfd_open(2),
Linux 5.3), checked once it is held: a pid that ends and is given to somebody else meanwhile costs that somebody
nothing.
"""

import errno
import os
import secrets
import signal
import time
import tomllib
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
"""The name of the mark in the environment of what is started."""

POLL_S: Final = 0.05
KILL_WAIT_S: Final = 5.0


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
    """Looks at, stops and starts the processes that one file names."""

    def __init__(self, path: Path) -> None:
        try:
            self._commands = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).worker
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, ValidationError) as error:
            raise GpuwardenError(f"the file of supervised workers {path} cannot be used: {error}") from None

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:  # noqa: ARG002 - a process has none
        """See `Actuator.look`."""
        command = self._commands.get(handle)
        if command is None:
            return None
        found = _known(command.pid_file)
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
        """See `Actuator.stop`. SIGTERM, then SIGKILL, to what is left of its session, with or without its leader."""
        command = self._command(handle)
        found = _known(command.pid_file)
        if found is not None and not _end(found, grace_s=grace_s):
            raise ActuatorError(f"worker {handle} (pid {found.pid}) does not die")

    def start(self, handle: str) -> None:
        """See `Actuator.start`."""
        command = self._command(handle)
        found = _known(command.pid_file)
        if found is not None and _runs(found):
            return
        mark, promise = secrets.token_hex(16), _promise(command.pid_file)
        try:
            atomic_write(promise, mark)
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
                setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores them, and a child would inherit that
            )
        except (OSError, ValueError) as error:
            with suppress(OSError):  # it promises nothing: no process has its mark
                promise.unlink(missing_ok=True)
            raise ActuatorError(f"worker {handle} cannot be started: {error}") from None
        process = ProcessId(pid, 0)
        try:
            process = ProcessId.of(pid)
            _record(command.pid_file, process)
        except OSError as error:
            _end(process, grace_s=0.0)  # what is on no record would be started a second time
            raise ActuatorError(f"worker {handle} cannot be put on record, and was ended: {error}") from None

    def _command(self, handle: str) -> _Command:
        try:
            return self._commands[handle]
        except KeyError:
            raise ActuatorError(f"worker {handle} is not in the file of supervised workers") from None


def _promise(pid_file: Path) -> Path:
    """Where the mark stands of what is being started."""
    return pid_file.with_name(f"{pid_file.name}.starting")


def _record(pid_file: Path, process: ProcessId) -> None:
    """The record first: with both gone, what was started would be nobody's."""
    atomic_write(pid_file, f"{process}\n")
    _promise(pid_file).unlink(missing_ok=True)


def _known(pid_file: Path) -> ProcessId | None:
    """The process on record, or which belongs there: it was started, and who started it was killed before he said so.

    Raises:
        ActuatorError: it runs and cannot be put on record.
    """
    try:
        mark = _promise(pid_file).read_text(encoding="ascii")
    except FileNotFoundError:
        return _recorded(pid_file)
    except (OSError, ValueError) as error:
        raise ActuatorError(f"what was started last cannot be known: {error}") from None
    found = _marked(mark)
    if found is None:
        return _recorded(pid_file)
    try:
        _record(pid_file, found)
    except OSError as error:
        raise ActuatorError(f"process {found.pid} runs, and cannot be put on record: {error}") from None
    return found


def _marked(mark: str) -> ProcessId | None:
    """The process with this mark that leads its session: its children have the mark too."""
    sought = f"{MARK}={mark}".encode()
    for entry in procfs.PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = procfs.stat(int(entry.name))
                leads = fields[3] == entry.name and not procfs.has_ended(fields)
                if leads and sought in (entry / "environ").read_bytes().split(b"\0"):
                    return ProcessId(int(entry.name), int(fields[19]))
            except OSError:  # gone meanwhile, or not ours to look at
                continue
    return None


def _recorded(pid_file: Path) -> ProcessId | None:
    try:
        found = ProcessId.parse(pid_file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return found if found is not None and found.pid > 1 else None


def _runs(process: ProcessId) -> bool:
    _reap(process.pid)
    return process.runs()


def _end(leader: ProcessId, *, grace_s: float) -> bool:
    """SIGTERM, then after `grace_s` SIGKILL, to every process of a session; false when some outlive it."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
        for process in _session(leader):
            _signal(process, number)
        deadline_s = time.monotonic() + wait_s
        while left := _session(leader):
            if time.monotonic() >= deadline_s:
                break
            if number is signal.SIGKILL:  # also what was forked while the session was listed
                for process in left:
                    _signal(process, number)
            time.sleep(POLL_S)
        else:
            return True
    return False


def _session(leader: ProcessId) -> list[ProcessId]:
    """The living processes of the session that one process led, itself included.

    The kernel gives a pid to nobody else while a session bears it. So a leader of that pid with another start means
    that the session is over, and that what bears its number now is a stranger's.
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
            if int(fields[3]) == leader.pid and not procfs.has_ended(fields):
                found.append(ProcessId(int(entry.name), int(fields[19])))
    return found


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return  # another program started it, and reaps it


def _signal(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to this process and to no other; nothing where it is gone.

    Raises:
        ActuatorError: the kernel has no such descriptors, or none is left.
    """
    try:
        # Gone meanwhile, or somebody else's: then it shows as left.
        with process.opened() as descriptor, suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, number)
    except (FileNotFoundError, ProcessLookupError):
        return
    except OSError as error:
        because = "Linux 5.3 or later is wanted" if error.errno == errno.ENOSYS else str(error)
        raise ActuatorError(f"process {process.pid} cannot be held to be signalled, and was not: {because}") from None
