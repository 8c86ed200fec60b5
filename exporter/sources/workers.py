"""Workers from their state files and locks. Liveness comes from the kernel: F_GETLK names the holder's pid."""

import contextlib
import fcntl
import math
import os
import struct
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final, Generic, TypeVar

from exporter.model.worker import WorkerReading, WorkerReadings
from exporter.sources import untrusted_files
from exporter.sources.untrusted_files import Refused
from gpuwarden import cgroup, procfs, state_file
from gpuwarden.state_file import JobFile, StateFileError, WorkerFile

FILES_MAX: Final = 64
"""Worker files read in one folder; more are counted as errors and left out, so that a tenant crowds out itself only."""

ENTRIES_MAX: Final = 4096
"""Entries looked at in one folder."""

T = TypeVar("T")

# struct flock of Linux with 64-bit offsets: l_type, l_whence, l_start, l_len, l_pid (fcntl(2)).
_FLOCK: Final = struct.Struct("hhqqi4x")


def read(directory: Path, *, proc: Path = procfs.PROC) -> WorkerReadings:
    """Look at every worker below `$GPUWARDEN_DIR`.

    A file that cannot be trusted costs its own worker only. Of two that claim one name, the one whose lock is held is
    kept, then the one whose process started first, by the kernel's word; the other is counted.

    Raises:
        OSError: the directory itself cannot be read.
    """
    refused = Refused()
    kept: dict[str, WorkerReading] = {}
    duplicates = 0
    unread: set[str] = set()
    _WORKER_FILES.begin()
    _JOB_FILES.begin()
    for folder, base in _worker_files(directory, refused, unread):
        try:
            sighting = _sight(directory, folder, base, proc, refused)
        except StateFileError as error:
            refused.add(error.reason, f"{directory}/{folder}/{base}{state_file.WORKER_SUFFIX}", error)
            unread.add(folder)
            continue
        except FileNotFoundError:
            continue  # the worker ended, cleanly, since the folder was listed
        except (OSError, ValueError) as error:
            refused.add("unreadable", f"{directory}/{folder}/{base}{state_file.WORKER_SUFFIX}", error)
            unread.add(folder)
            continue
        name = sighting.worker.worker
        if name in kept:
            duplicates += 1
            kept[name], other = sorted((kept[name], sighting), key=lambda each: _precedence(each, proc))
            twice = f"worker {name}, in the folders {kept[name].folder} and {other.folder}"
            refused.first_errors.setdefault("duplicate", twice)
            if other.alive is not False:
                unread.add(other.folder)
        else:
            kept[name] = sighting
    found = tuple(kept[name] for name in sorted(kept))
    return WorkerReadings(
        workers=found,
        errors=refused.counts,
        first_errors=refused.first_errors,
        duplicates=duplicates,
        unread=frozenset(unread),
    )


def _worker_files(directory: Path, refused: Refused, unread: set[str]) -> Iterator[tuple[str, str]]:
    """The folder and the name of each worker that a file says is there."""
    with os.scandir(directory) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for folder in folders:
        try:
            with os.scandir(f"{directory}/{folder}") as entries:
                names = [entry.name for entry in islice(entries, ENTRIES_MAX)]
        except OSError as error:
            refused.add("unreadable", f"{directory}/{folder}", error)
            unread.add(folder)
            continue
        found = sorted(name for name in names if name.endswith(state_file.WORKER_SUFFIX) and not name.startswith("."))
        if len(found) > FILES_MAX or len(names) == ENTRIES_MAX:
            refused.add("too_many", f"{directory}/{folder}", f"{len(found)} worker files among {len(names)} files")
            unread.add(folder)
        yield from ((folder, name.removesuffix(state_file.WORKER_SUFFIX)) for name in found[:FILES_MAX])


class _Parsed(Generic[T]):
    """What the files of the last look and of this one hold, by their text: from look to look hardly any is written.

    Every file is read at every look all the same. What a text says it says for ever, so that nothing here goes stale.
    """

    def __init__(self) -> None:
        self._before: dict[str, T] = {}
        self._now: dict[str, T] = {}

    def begin(self) -> None:
        """Another look begins: what the last one did not come by is forgotten."""
        self._before, self._now = self._now, {}

    def read(self, text: str, parse: Callable[[str], T]) -> T:
        """What a text says, by the one function that is given for it.

        Raises:
            StateFileError: it cannot be trusted.
        """
        found = self._now.get(text) or self._before.get(text) or parse(text)
        self._now[text] = found
        return found


_WORKER_FILES: Final[_Parsed[WorkerFile]] = _Parsed()
_JOB_FILES: Final[_Parsed[JobFile]] = _Parsed()


def _sight(directory: Path, folder: str, base: str, proc: Path, refused: Refused) -> WorkerReading:
    stem = f"{directory}/{folder}/{base}"
    worker = _WORKER_FILES.read(untrusted_files.text(stem + state_file.WORKER_SUFFIX), state_file.parse_worker)
    if worker.worker != base:
        raise StateFileError("name", f"it says that it is of worker {worker.worker}")
    alive, pid = _lock(stem + state_file.LOCK_SUFFIX, refused)
    container_id = None
    if pid is not None:
        try:
            found_in = cgroup.container_id(pid, proc=proc)
            # In the container that the exporter itself is in, it sees nothing but processes.
            container_id = None if found_in == own_container() else found_in
        except OSError:
            pid = None  # it died between the two looks; the lock will say so at the next
    return WorkerReading(
        worker=worker,
        job=_job(stem + state_file.JOB_SUFFIX, worker, refused),
        alive=alive,
        pid=pid,
        container_id=container_id,
        folder=folder,
    )


@cache
def own_container() -> str | None:
    """The container that the exporter itself is in."""
    return cgroup.container_id(os.getpid())


def _job(path: str, worker: WorkerFile, refused: Refused) -> JobFile | None:
    try:
        job = _JOB_FILES.read(untrusted_files.text(path), state_file.parse_job)
    except FileNotFoundError:
        return None
    except StateFileError as error:
        refused.add(error.reason, path, error)
        return None
    except OSError as error:
        refused.add("unreadable", path, error)
        return None
    if (job.worker, job.incarnation) != (worker.worker, worker.incarnation):
        refused.add("foreign", path, f"it is of another life of worker {worker.worker}, or of another worker")
        return None
    return job


def _lock(path: str, refused: Refused) -> tuple[bool | None, int | None]:
    """Whether the lock is held, and by which pid of this namespace; `None` for what cannot be told.

    A worker never takes its lock file away: where it is missing somebody else did, and its holder may live.
    """
    try:
        descriptor = untrusted_files.open_plain(path)
    except FileNotFoundError:
        refused.add("lock_missing", path, "it is not there")
        return None, None
    except (OSError, StateFileError) as error:
        refused.add("lock_unreadable", path, error)
        return None, None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError as error:
        refused.add("lock_unreadable", path, error)
        return None, None
    finally:
        os.close(descriptor)
    if kind == fcntl.F_UNLCK:
        return False, None
    return True, pid if pid > 0 else None


def _precedence(sighting: WorkerReading, proc: Path) -> tuple[bool, float, float]:
    """What a file says of its start is a claim: another tenant could claim to be older and hide this worker."""
    ticks = math.inf
    if sighting.pid is not None:
        with contextlib.suppress(OSError):
            ticks = procfs.start_ticks(sighting.pid, proc=proc)
    return (not sighting.alive, ticks, sighting.worker.started.unix_s)
