"""Workers outside of containers: ends their processes by identity, and starts nothing.

The handle is the worker's name. Its process holds the lock in the worker's folder, or is the child of a supervisor that
holds it (`gpuwarden run`). A supervisor reads in the worker's notice why its process ended, and starts it again.

Signals go through a pidfd (Linux 5.3), so that a reused pid is never hit.

Of a dead worker without a supervisor, only the orphans are ended.
"""

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuwarden import clock, procfs, state_file
from gpuwarden.job import Condition
from gpuwarden.procfs import ProcessId
from gpuwarden.supervisor import files
from gpuwarden.supervisor.files import Notice, ProcessFile, SupervisedFileError
from remediator.actuators import ActuatorError
from remediator.plan import ContainerState

POLL_S: Final = 0.05
KILL_WAIT_S: Final = 5.0


ORPHANS: Final = "orphans"
"""Kind of container."""

_ORPHANS: Final = re.compile(r"(?P<worker>\S+) process:(?P<pid>[0-9]+):(?P<ticks>[0-9]+)@(?P<boot>\S+) (?P<uid>[0-9]+)")


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A worker's process, and its supervisor's file if it has one."""

    folder: Path
    process: ProcessId
    file: ProcessFile | None
    locked: bool


class ProcessActuator:
    """Inspects and ends the processes of workers below `$GPUWARDEN_RUNTIME_DIR`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:  # noqa: ARG002 - part of the protocol
        """See `Actuator.look`."""
        found = self._find(handle)
        if found is None:
            return None
        running = found.process.runs()
        return ContainerState(
            kind="process",
            handle=handle,
            name=handle,
            incarnation=f"process:{found.process.pid}:{found.process.start_ticks}@{clock.boot_id()}",
            running=running,
            managed=True,
            pids=frozenset(each.pid for each in procfs.family(found.process)),
            cgroup=None,
            left_down=not running and found.file is not None and not found.file.restarts,
            starting=running and not found.locked,
            log_file=found.file.log_file if found.file else None,
            process_group=_group(found.process),
        )

    def stop(self, handle: str, *, grace_s: float) -> None:
        """See `Actuator.stop`. SIGTERM, then SIGKILL, to the process and all that it started."""
        found = self._find(handle)
        if found is None:
            raise ActuatorError(f"worker {handle} has no process and no supervisor")
        if not _end(found.process, grace_s=grace_s):
            raise ActuatorError(f"worker {handle} (pid {found.process.pid}) still runs after SIGKILL")

    def start(self, handle: str) -> None:
        """See `Actuator.start`. Its supervisor starts it."""
        found = self._find(handle)
        if found is None or (not found.process.runs() and (found.file is None or not found.file.restarts)):
            raise ActuatorError(f"nothing starts worker {handle}: start it by hand")

    def announce(self, handle: str, *, condition: Condition, acts: bool, message: str) -> None:
        """See `Announces.announce`."""
        found = self._find(handle)
        if found is None or found.file is None:
            return
        notice = Notice(process=found.process, condition=condition, acts=acts, message=message)
        try:
            files.write(found.folder, handle, notice)
        except OSError as error:
            raise ActuatorError(f"worker {handle}: its supervisor was not informed: {error}") from None

    def _find(self, handle: str) -> _Found | None:
        """The process of a worker. The folder of a held lock counts before others."""
        state_file.check_name(handle)
        try:
            with os.scandir(self._directory) as entries:
                folders = sorted(Path(each.path) for each in entries if each.is_dir(follow_symlinks=False))
        except OSError as error:
            raise ActuatorError(f"cannot read {self._directory}: {error}") from None
        known = [found for folder in folders if (found := _look_in(folder, handle)) is not None]
        known = [each for each in known if each.locked] or known
        if len(known) > 1:
            raise ActuatorError(f"worker {handle} runs in folders {' and '.join(each.folder.name for each in known)}")
        return known[0] if known else None


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
            process_group=process.pid,
            startable=False,
        )

    def stop(self, handle: str, *, grace_s: float) -> None:
        """See `Actuator.stop`."""
        if not end_all(lambda: self._orphans(handle), grace_s=grace_s):
            raise ActuatorError(f"processes that worker {_parts(handle)['worker']} left still run after SIGKILL")

    def start(self, handle: str) -> None:
        """Refuse: its command is unknown."""
        raise ActuatorError(f"worker {_parts(handle)['worker']} has no supervisor")

    def _orphans(self, handle: str) -> list[ProcessId]:
        found = _parts(handle)
        leader = ProcessId(int(found["pid"]), int(found["ticks"]))
        if found["boot"] != clock.boot_id():
            return []
        if leader.has_ended() is not True:
            raise ActuatorError(f"process {leader.pid} of worker {found['worker']} runs, or cannot be read")
        return [each for each in _led(leader) if _is_owned(each.pid, int(found["uid"]))]


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


def _look_in(folder: Path, handle: str) -> _Found | None:
    try:
        held, holder = files.lock_holder(folder, handle)
    except FileNotFoundError:
        held, holder = False, None
    except OSError as error:
        raise ActuatorError(f"cannot read the lock of worker {handle}: {error}") from None
    try:
        file = files.supervised(folder, handle, holder=holder)
    except SupervisedFileError as error:
        raise ActuatorError(str(error)) from None
    if file is not None:
        return _Found(folder=folder, process=file.process, file=file, locked=held)
    if not held:
        return None
    if holder is None:
        raise ActuatorError(f"the lock of worker {handle} is held outside of this process namespace")
    try:
        if folder.lstat().st_uid != (procfs.PROC / str(holder)).stat().st_uid:
            raise ActuatorError(f"worker {handle}: its folder and process {holder} belong to different users")
        return _Found(folder=folder, process=ProcessId.of(holder), file=None, locked=True)
    except OSError:
        return None  # it has just ended


def _group(process: ProcessId) -> int:
    try:
        return int(procfs.stat(process.pid)[2])
    except OSError:
        return process.pid  # it has ended


def _end(leader: ProcessId, *, grace_s: float) -> bool:
    """End a process and all that it started. Returns whether they ended."""
    return end_all(lambda: procfs.family(leader), grace_s=grace_s)


def end_all(listed: Callable[[], list[ProcessId]], *, grace_s: float) -> bool:
    """End the listed processes: SIGTERM, and SIGKILL after the grace. Returns whether they ended.

    Raises:
        ActuatorError: the kernel cannot signal by identity.
    """
    left = set(listed())
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
        for process in left:
            _signal(process, number)
            if number is signal.SIGTERM:
                _signal(process, signal.SIGCONT)  # a stopped process would not handle it
        deadline_s = time.monotonic() + wait_s
        while left := {each for each in {*left, *listed()} if each.runs()}:
            if time.monotonic() >= deadline_s:
                break
            if number is signal.SIGKILL:  # also children forked during the listing
                for process in left:
                    _signal(process, number)
            time.sleep(POLL_S)
        else:
            return True
    return False


def _led(leader: ProcessId) -> list[ProcessId]:
    """The living processes of the session and group that a dead leader led."""
    return [each for each in procfs.family(leader) if each != leader]


def _signal(process: ProcessId, number: signal.Signals) -> None:
    try:
        procfs.signal_process(process, number)
    except OSError as error:
        reason = "needs Linux 5.3 or later" if error.errno == errno.ENOSYS else str(error)
        raise ActuatorError(f"process {process.pid} was not signalled: {reason}") from None
