"""Tasks of other runners from the files they leave, and whether each one's process is still there (D1).

A file says which process a task is, and a pid alone names none: another may have it by now. A task's process had
started when its file was written, so one that started later is another's. Which process it is is settled at the first
look that sees both, by pid and start time, and from then on no clock that is set can confuse the two.

The pids in the files are the host's. In another pid namespace a process that is not seen may well be there, so that
only one that was seen is told dead.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from exporter.model.worker import TaskReading, TaskReadings
from exporter.sources import untrusted_files
from exporter.sources.untrusted_files import Refused
from gpuwarden import clock, procfs, state_file
from gpuwarden.procfs import ProcessId
from gpuwarden.state_file import StateFileError, TaskFile

TASKS_MAX: Final = 256
"""Task files read in one folder; more are counted and left out, so that the number of series is bounded."""

ENTRIES_MAX: Final = 4096
"""Entries looked at in one folder."""

START_SLACK_S: Final = 5.0
"""How much later than its file says a task's process may have started, seconds: `date +%s` cuts the fraction off, and a
runner may take the time before it starts the shell that is the task. A pid is not given again within that time."""

_NAME: Final = re.compile(r"(0|[1-9][0-9]{0,18})" + re.escape(state_file.TASK_SUFFIX))

_Stamp = tuple[int, int, int]

_HOSTS_PID_NAMESPACE: Final = 4026531836
"""Inode of the first pid namespace (PROC_PID_INIT_INO of the kernel's linux/proc_ns.h)."""


@dataclass(kw_only=True)
class _Known:
    """A file as it was read, and which process it means, once that has been seen."""

    stamp: _Stamp
    file: TaskFile
    process: ProcessId | None = None


class Tasks:
    """The task files of some folders, one look after another; what has not changed is not read again."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._known: dict[Path, _Known] = {}
        self._alive: frozenset[Path] = frozenset()
        self._sees_all = _sees_the_hosts_processes()

    def read(self) -> TaskReadings:
        """Look at every file.

        A file that cannot be trusted costs its own task, and a folder that cannot be read its own tasks; both are
        counted. Of two that claim one id the one with a live process is kept, then the first folder's.

        Raises:
            OSError: not one of the folders can be read.
        """
        refused = Refused()
        known: dict[Path, _Known] = {}
        living: set[Path] = set()
        found: dict[int, TaskReading] = {}
        unread: list[OSError] = []
        for folder in self._folders:
            try:
                entries = list(self._entries(folder, refused))
            except OSError as error:
                reason = "folder_missing" if isinstance(error, FileNotFoundError) else "folder_unreadable"
                refused.add(reason, folder, error)
                unread.append(error)
                continue
            for path, stamp in entries:
                each = self._file(path, stamp, refused)
                if each is None:
                    continue
                known[path] = each
                sighting = TaskReading(task=each.file, alive=self._is_alive(each))
                if sighting.alive:
                    living.add(path)
                other = found.setdefault(sighting.task.task_id, sighting)
                if other is not sighting:
                    refused.add("duplicate", path, f"another file tells of a task {sighting.task.task_id}, too")
                    if sighting.alive and not other.alive:
                        found[sighting.task.task_id] = sighting
        if len(unread) == len(self._folders):
            raise unread[0]
        self._known, self._alive = known, frozenset(living)
        return TaskReadings(
            tasks=tuple(found[each] for each in sorted(found)), errors=refused.counts, first_errors=refused.first_errors
        )

    def _entries(self, folder: Path, refused: Refused) -> Iterator[tuple[Path, _Stamp]]:
        """The task files of a folder, with what tells whether one has changed.

        Those come first that were alive at the last look, then the newest: what SIGKILL leaves behind is there for
        ever, and would hide every task after it.
        """
        stamps: dict[str, _Stamp] = {}
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number == ENTRIES_MAX:
                    refused.add("too_many", folder, f"over {ENTRIES_MAX} entries")
                    break
                if entry.name.startswith(".") or not entry.name.endswith(state_file.TASK_SUFFIX):
                    continue
                if not _NAME.fullmatch(entry.name):
                    refused.add(
                        "name",
                        folder / entry.name,
                        f"no name of a task's: its running_log_id and {state_file.TASK_SUFFIX} are wanted",
                    )
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # the task ended since the folder was listed
                stamps[entry.name] = (status.st_ino, status.st_mtime_ns, status.st_size)

        def rank(name: str) -> tuple[bool, int, int, str]:
            return (folder / name in self._alive, stamps[name][1], len(name), name)

        names = sorted(stamps, key=rank, reverse=True)
        if len(names) > TASKS_MAX:
            refused.add("too_many", folder, f"{len(names)} task files, of which {TASKS_MAX} are read")
        for name in names[:TASKS_MAX]:
            yield folder / name, stamps[name]

    def _file(self, path: Path, stamp: _Stamp, refused: Refused) -> _Known | None:
        known = self._known.get(path)
        if known is not None and known.stamp == stamp:
            return known
        try:
            file = state_file.parse_task(untrusted_files.text(path))
        except StateFileError as error:
            refused.add(error.reason, path, error)
            return None
        except FileNotFoundError:
            return None
        except OSError as error:
            refused.add("unreadable", path, error)
            return None
        if path.name != f"{file.task_id}{state_file.TASK_SUFFIX}":
            refused.add("name", path, f"it says that it is of task {file.task_id}")
            return None
        # Written again by a runner that still means the same process: what is known of that stays known.
        same = known is not None and known.file == file
        return _Known(stamp=stamp, file=file, process=known.process if known is not None and same else None)

    def _is_alive(self, known: _Known) -> bool | None:
        """Whether the task's process is there; `None` where that cannot be told."""
        found = _alive(known)
        if found is False and known.process is None and not self._sees_all:
            return None
        return found


def _sees_the_hosts_processes() -> bool:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _HOSTS_PID_NAMESPACE
    except OSError:
        return False


def _alive(known: _Known) -> bool | None:
    """Whether the task's process is there; `None` where the kernel does not tell."""
    try:
        os.kill(known.file.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is there, and somebody else's
    try:
        fields = procfs.stat(known.file.pid)
        ended, process = procfs.has_ended(fields), ProcessId(known.file.pid, int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None  # hidden from us (hidepid of proc(5)), or gone since: the next look tells
    if ended:
        return False
    if known.process is None:
        now = clock.stamp()
        started_unix_s = now.unix_s - now.boottime_s + process.start_ticks / procfs.TICKS_PER_S
        if started_unix_s > known.file.started_unix_s + START_SLACK_S:
            return False
        known.process = process
    return known.process == process
