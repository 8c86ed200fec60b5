"""Tasks of other runners, from their files, and whether the process of each is alive (D1).

A pid can be reused. A task's process starts before its file is written, so a later start is another process. The first
sample that sees both fixes the process by pid and start time.
The pids are the host's. In another pid namespace, a process that was never seen is unknown and not dead.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from exporter.model.worker import TaskReading, TaskReadings
from exporter.sources.untrusted_files import InvalidFiles
from gpuwarden import clock, files, procfs, state_file
from gpuwarden.procfs import ProcessId
from gpuwarden.state_file import StateFileError, TaskFile

TASKS_MAX: Final = 256
"""Task files read in one folder; more are counted only, to bound the number of series."""

ENTRIES_MAX: Final = 4096
"""Entries read in one folder."""

_NAME: Final = re.compile(r"(0|[1-9][0-9]{0,18})" + re.escape(state_file.TASK_SUFFIX))

_Stamp = tuple[int, int, int]


@dataclass(kw_only=True)
class _KnownTask:
    """A parsed file, and its process once seen."""

    stamp: _Stamp
    file: TaskFile
    process: ProcessId | None = None


class Tasks:
    """Read the task files of some folders; unchanged files are not parsed again."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._known: dict[Path, _KnownTask] = {}
        self._alive: frozenset[Path] = frozenset()
        self._sees_all = procfs.sees_all_pids()

    def read(self) -> TaskReadings:
        """Read every task.

        An invalid file or folder is counted and skipped. Of two files with one id, the one with a live process counts,
        then the first folder's.

        Raises:
            OSError: no folder can be read.
        """
        invalid = InvalidFiles()
        known: dict[Path, _KnownTask] = {}
        living: set[Path] = set()
        found: dict[int, TaskReading] = {}
        unread: list[OSError] = []
        for folder in self._folders:
            try:
                entries = list(self._entries(folder, invalid))
            except OSError as error:
                reason = "folder_missing" if isinstance(error, FileNotFoundError) else "folder_unreadable"
                invalid.add(reason, folder, error)
                unread.append(error)
                continue
            for path, stamp in entries:
                each = self._file(path, stamp, invalid)
                if each is None:
                    continue
                known[path] = each
                sighting = TaskReading(task=each.file, alive=self._is_alive(each))
                if sighting.alive:
                    living.add(path)
                other = found.setdefault(sighting.task.task_id, sighting)
                if other is not sighting:
                    invalid.add("duplicate", path, f"another file has the task id {sighting.task.task_id}")
                    if sighting.alive and not other.alive:
                        found[sighting.task.task_id] = sighting
        if len(unread) == len(self._folders):
            raise unread[0]
        self._known, self._alive = known, frozenset(living)
        return TaskReadings(
            tasks=tuple(found[each] for each in sorted(found)), errors=invalid.counts, first_errors=invalid.first_errors
        )

    def _entries(self, folder: Path, invalid: InvalidFiles) -> Iterator[tuple[Path, _Stamp]]:
        # Live ones first, then the newest: files that SIGKILL leaves behind must not hide new tasks.
        stamps: dict[str, _Stamp] = {}
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number == ENTRIES_MAX:
                    invalid.add("too_many", folder, f"over {ENTRIES_MAX} entries")
                    break
                if entry.name.startswith(".") or not entry.name.endswith(state_file.TASK_SUFFIX):
                    continue
                if not _NAME.fullmatch(entry.name):
                    invalid.add(
                        "name",
                        folder / entry.name,
                        f"invalid name, expected running_log_id{state_file.TASK_SUFFIX}",
                    )
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # the task ended after the listing
                stamps[entry.name] = (status.st_ino, status.st_mtime_ns, status.st_size)

        def rank(name: str) -> tuple[bool, int, int, str]:
            return (folder / name in self._alive, stamps[name][1], len(name), name)

        names = sorted(stamps, key=rank, reverse=True)
        if len(names) > TASKS_MAX:
            invalid.add("too_many", folder, f"{len(names)} task files, only {TASKS_MAX} are read")
        for name in names[:TASKS_MAX]:
            yield folder / name, stamps[name]

    def _file(self, path: Path, stamp: _Stamp, invalid: InvalidFiles) -> _KnownTask | None:
        known = self._known.get(path)
        if known is not None and known.stamp == stamp:
            return known
        try:
            file = state_file.parse_task(files.read_owned(path)[0])
        except StateFileError as error:
            invalid.add(error.reason, path, error)
            return None
        except FileNotFoundError:
            return None
        except OSError as error:
            invalid.add("unreadable", path, error)
            return None
        if path.name != f"{file.task_id}{state_file.TASK_SUFFIX}":
            invalid.add("name", path, f"the content has task id {file.task_id}")
            return None
        # The runner wrote the same content again.
        same = known is not None and known.file == file
        return _KnownTask(stamp=stamp, file=file, process=known.process if known is not None and same else None)

    def _is_alive(self, known: _KnownTask) -> bool | None:
        found = _alive(known)
        if found is False and known.process is None and not self._sees_all:
            return None
        return found


def _alive(known: _KnownTask) -> bool | None:
    try:
        os.kill(known.file.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists, for another user
    try:
        fields = procfs.stat(known.file.pid)
        ended, process = procfs.has_ended(fields), ProcessId(known.file.pid, int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None  # hidden (hidepid in proc(5)), or just ended
    if ended:
        return False
    if known.process is None:
        if known.file.predates(clock.started_unix_s(process.start_ticks)):
            return False
        known.process = process
    return known.process == process
