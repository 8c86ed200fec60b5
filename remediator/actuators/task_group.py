"""Ends the process group of a task of another runner, on a person's order (D7).

The order is an id. All else comes from the task's file on this host, which only its owner may write. So this ends only
what that owner could end: processes of the same user, in a group whose leader is as old as the file says.
"""

import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Never

from gpuwarden import clock, procfs, state_file
from gpuwarden.files import read_owned
from gpuwarden.format import storable
from gpuwarden.procfs import ProcessId
from gpuwarden.queue.hosts.task_orders import TaskOutcome, TaskResult
from gpuwarden.state_file import TASK_START_SLACK_S, StateFileError, TaskFile
from remediator.actuators import ActuatorError
from remediator.actuators.process import end_all

_KERNEL_THREAD: Final = 0x00200000
"""PF_KTHREAD of the flags in proc_pid_stat(5)."""

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class _NotEndedError(Exception):
    """Nothing is signalled; the message says why."""

    def __init__(self, outcome: TaskOutcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class TaskGroups:
    """The process groups of tasks.

    Args:
        folders: where runners write a file per task.
        grace_s: time between SIGTERM and SIGKILL, seconds.
    """

    def __init__(self, folders: Sequence[Path], *, grace_s: float) -> None:
        self._folders, self._grace_s = tuple(folders), grace_s

    def end(self, task_id: int) -> TaskResult:
        """End the processes of a task, if the checks allow it."""
        try:
            file, uid = self._file(task_id)
            outcome, message = self._end(_leader(file, uid), uid)
        except _NotEndedError as error:
            outcome, message = error.outcome, str(error)
        except ActuatorError as error:
            outcome, message = TaskOutcome.FAILED, str(error)
        return TaskResult(task_id=task_id, outcome=outcome, message=storable(message))

    def _end(self, leader: ProcessId, uid: int) -> tuple[TaskOutcome, str]:
        number, seen = leader.pid, set[ProcessId]()

        def listed() -> list[ProcessId]:
            found = procfs.group(number)
            if any(each.pid == number and each != leader for each in found):
                return []  # the group has ended, and another one has its number
            theirs = [each for each in found if _is_of(each, uid)]
            seen.update(theirs)
            return theirs

        if not end_all(listed, grace_s=self._grace_s):
            may = "" if os.geteuid() in (0, uid) else f": the executor is not root and not user {uid}"
            return TaskOutcome.FAILED, f"group {number} still runs after SIGKILL{may}"
        left = len(procfs.group(number))
        others = f"; {left} of other users left in it" if left else ""
        return TaskOutcome.ENDED, f"group {number}, processes: {len(seen)}{others}"

    def _file(self, task_id: int) -> tuple[TaskFile, int]:
        """The task's file, and the user who owns it."""
        found: list[tuple[TaskFile, int]] = []
        name = f"{task_id}{state_file.TASK_SUFFIX}"
        for folder in self._folders:
            path = folder / name
            try:
                text, status = read_owned(path)
                file = state_file.parse_task(text)
                others_write_folder = _others_may_write_in(folder)
            except FileNotFoundError as error:
                if not folder.is_dir():
                    _refuse(f"folder {folder} cannot be read: {error.strerror}")
                continue
            except OSError as error:  # also a link
                _refuse(f"{path} cannot be read: {error.strerror}")
            except StateFileError as error:
                _refuse(f"{path} is invalid: {error}")
            if status.st_mode & _OTHERS_WRITE:
                _refuse(f"others may write its file {path}: start its runner with umask 022")
            if others_write_folder:
                _refuse(f"others may write in the folder of its file, {folder}: remove that right")
            if file.task_id != task_id:
                _refuse(f"{path} is of task {file.task_id}")
            found.append((file, status.st_uid))
        if not found:
            _refuse(f"no file of this task here: no {name} in {', '.join(map(str, self._folders))}")
        if len(found) > 1:
            _refuse(f"{len(found)} folders have a file {name}")
        return found[0]


def _others_may_write_in(folder: Path) -> bool:
    """Whether others may replace files; a sticky folder does not let them."""
    mode = folder.stat().st_mode
    return bool(mode & _OTHERS_WRITE) and not mode & stat.S_ISVTX


def _leader(file: TaskFile, uid: int) -> ProcessId:
    """The leader of the task's group, after all checks."""
    pid, group = file.pid, file.pgid
    if group is None:
        _refuse("its file has no remote_pgid")
    if group <= 1 or pid <= 1:
        _refuse(f"group {group} and process {pid} are not of a task")
    if group in (os.getpgrp(), os.getsid(0)):
        _refuse(f"group {group} is that of the executor")
    if file.started_unix_s > time.time() + TASK_START_SLACK_S:
        _refuse("its timestamp is in the future; seconds since 1970 are expected")
    left = procfs.group(group)
    if _has_ended(pid) and not left:
        raise _NotEndedError(TaskOutcome.GONE, f"process {pid} has ended")
    for each in dict.fromkeys((pid, group)):
        if _has_ended(each):
            _refuse(f"process {each} has ended, and {len(left)} of group {group} run: end them by hand")
    process, leader = (_checked(each, file, uid, group) for each in (pid, group))
    if not (process.runs() and leader.runs()):  # their users were read by pid
        _refuse(f"process {pid} or {group} ended during the checks")
    return leader


def _checked(pid: int, file: TaskFile, uid: int, group: int) -> ProcessId:
    """A process that is the task's, by user, age and group."""
    try:
        fields, user = procfs.stat(pid), procfs.real_uid(pid)
    except OSError as error:
        _refuse(f"process {pid} cannot be read: {error.strerror}")
    if int(fields[6]) & _KERNEL_THREAD:
        _refuse(f"process {pid} is a kernel thread")
    if user != uid:
        _refuse(f"process {pid} is of user {user}, and the task's file of user {uid}")
    if int(fields[2]) != group:
        _refuse(f"process {pid} is in group {fields[2]}, not {group}")
    process = ProcessId(pid, int(fields[19]))
    if file.predates(clock.started_unix_s(process.start_ticks)):
        _refuse(f"process {pid} started after the task: its pid was used again")
    return process


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        if procfs.sees_all_pids():
            return True
        _refuse(f"process {pid} is not seen from the executor's pid namespace")
    return procfs.is_zombie(pid)


def _is_of(process: ProcessId, uid: int) -> bool:
    try:
        return procfs.real_uid(process.pid) == uid
    except OSError:
        return False  # it ended


def _refuse(message: str) -> Never:
    raise _NotEndedError(TaskOutcome.REFUSED, message)
