"""Workers from their state files and locks. F_GETLK returns the pid of a lock's holder."""

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
from exporter.sources.untrusted_files import InvalidFiles
from gpuwarden import cgroup, procfs, state_file
from gpuwarden.files import open_regular, read_owned
from gpuwarden.procfs import ProcessId
from gpuwarden.state_file import JobFile, StateFileError, WorkerFile
from gpuwarden.supervisor import files
from gpuwarden.supervisor.files import SupervisedFileError

FILES_MAX: Final = 64
"""Worker files read in one folder; more are counted only, so that a tenant crowds out only itself."""

ENTRIES_MAX: Final = 4096
"""Entries read in one folder."""

T = TypeVar("T")

# struct flock of Linux with 64-bit offsets: l_type, l_whence, l_start, l_len, l_pid (fcntl(2)).
_FLOCK: Final = struct.Struct("hhqqi4x")


def read(directory: Path, *, proc: Path = procfs.PROC) -> WorkerReadings:
    """Read every worker below `$GPUWARDEN_RUNTIME_DIR`.

    An invalid file is counted and skipped. Of two files with one worker name, the one with a held lock counts, then the
    one whose process started first.

    Raises:
        OSError: the directory cannot be read.
    """
    invalid = InvalidFiles()
    kept: dict[str, WorkerReading] = {}
    duplicates = 0
    unread: set[str] = set()
    _WORKER_FILES.begin()
    _JOB_FILES.begin()
    for folder, base in _find_worker_files(directory, invalid, unread):
        try:
            sighting = _read_worker(directory, folder, base, proc, invalid)
        except StateFileError as error:
            invalid.add(error.reason, f"{directory}/{folder}/{base}{state_file.WORKER_SUFFIX}", error)
            unread.add(folder)
            continue
        except FileNotFoundError:
            continue  # the worker ended after the listing
        except (OSError, ValueError) as error:
            invalid.add("unreadable", f"{directory}/{folder}/{base}{state_file.WORKER_SUFFIX}", error)
            unread.add(folder)
            continue
        name = sighting.worker.worker
        if name in kept:
            duplicates += 1
            kept[name], other = sorted((kept[name], sighting), key=lambda each: _precedence(each, proc))
            twice = f"worker {name} in folders {kept[name].folder} and {other.folder}"
            invalid.first_errors.setdefault("duplicate", twice)
            if other.alive is not False:
                unread.add(other.folder)
        else:
            kept[name] = sighting
    found = tuple(kept[name] for name in sorted(kept))
    return WorkerReadings(
        workers=found,
        errors=invalid.counts,
        first_errors=invalid.first_errors,
        duplicates=duplicates,
        unread=frozenset(unread),
    )


def _find_worker_files(directory: Path, invalid: InvalidFiles, unread: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the folder and name of each worker file."""
    with os.scandir(directory) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for folder in folders:
        try:
            with os.scandir(f"{directory}/{folder}") as entries:
                names = [entry.name for entry in islice(entries, ENTRIES_MAX)]
        except OSError as error:
            invalid.add("unreadable", f"{directory}/{folder}", error)
            unread.add(folder)
            continue
        found = sorted(name for name in names if name.endswith(state_file.WORKER_SUFFIX) and not name.startswith("."))
        if len(found) > FILES_MAX or len(names) == ENTRIES_MAX:
            invalid.add("too_many", f"{directory}/{folder}", f"{len(found)} worker files among {len(names)} files")
            unread.add(folder)
        yield from ((folder, name.removesuffix(state_file.WORKER_SUFFIX)) for name in found[:FILES_MAX])


class _ParseCache(Generic[T]):
    """Cache of parsed files, by their text, of this sample and the one before: 0.5 % of a core for 64 workers."""

    def __init__(self) -> None:
        self._before: dict[str, T] = {}
        self._now: dict[str, T] = {}

    def begin(self) -> None:
        """Start a sample: drop what the last one did not use."""
        self._before, self._now = self._now, {}

    def read(self, text: str, parse: Callable[[str], T]) -> T:
        """Parse a text, always with the same function.

        Raises:
            StateFileError: it is invalid.
        """
        found = self._now.get(text) or self._before.get(text) or parse(text)
        self._now[text] = found
        return found


_WORKER_FILES: Final[_ParseCache[WorkerFile]] = _ParseCache()
_JOB_FILES: Final[_ParseCache[JobFile]] = _ParseCache()


def _read_worker(directory: Path, folder: str, base: str, proc: Path, invalid: InvalidFiles) -> WorkerReading:
    stem = f"{directory}/{folder}/{base}"
    text, status = read_owned(stem + state_file.WORKER_SUFFIX)
    worker = _WORKER_FILES.read(text, state_file.parse_worker)
    if worker.worker != base:
        raise StateFileError("name", f"the content has worker {worker.worker}")
    alive, pid = _lock(stem + state_file.LOCK_SUFFIX, invalid)
    container_id = process = None
    if pid is not None:
        try:
            found_in = cgroup.container_id(pid, proc=proc)
            # In its own container the exporter sees processes only.
            container_id = None if found_in == own_container() else found_in
        except OSError:
            pid = None  # it just ended; the next sample sees the lock free
    if pid is not None and container_id is None:
        try:
            supervised = files.supervised(directory / folder, base, holder=pid, proc=proc)
            process = None if supervised is None else supervised.process
            if supervised is not None and pid not in (supervised.process.pid, supervised.supervisor.pid):
                pid = supervised.supervisor.pid  # a job's command is in another tree than its worker
        except SupervisedFileError as error:
            invalid.add("foreign", f"{stem}{files.PROCESS_SUFFIX}", error)
    job = _job(stem + state_file.JOB_SUFFIX, worker, invalid)
    if alive is False and _runs_command(directory / folder, base, proc):
        alive = None  # a worker that starts again takes the command over
    return WorkerReading(
        worker=worker,
        job=job,
        alive=alive,
        pid=pid,
        container_id=container_id,
        folder=folder,
        uid=status.st_uid,
        process=process,
        ranks=() if job is None else _ranks(stem + state_file.JOB_SUFFIX, worker, job, proc, invalid),
    )


def _runs_command(folder: Path, base: str, proc: Path) -> bool:
    try:
        return files.supervised_command(folder, base, proc=proc) is not None
    except SupervisedFileError:
        return False


@cache
def own_container() -> str | None:
    """The container of this process."""
    return cgroup.container_id(os.getpid())


def _job(path: str, worker: WorkerFile, invalid: InvalidFiles) -> JobFile | None:
    try:
        job = _JOB_FILES.read(read_owned(path)[0], state_file.parse_job)
    except FileNotFoundError:
        return None
    except StateFileError as error:
        invalid.add(error.reason, path, error)
        return None
    except OSError as error:
        invalid.add("unreadable", path, error)
        return None
    if (job.worker, job.incarnation) != (worker.worker, worker.incarnation):
        invalid.add("foreign", path, f"of another worker or another incarnation of worker {worker.worker}")
        return None
    return job


def _ranks(path: str, worker: WorkerFile, job: JobFile, proc: Path, invalid: InvalidFiles) -> tuple[JobFile, ...]:
    """The jobs of a command's running ranks, or none: if one never reported, no rank is judged alone."""
    if not 1 < job.local_ranks <= state_file.LOCAL_RANKS_MAX:
        return ()
    others = [_job(f"{path}.{rank}", worker, invalid) for rank in range(1, job.local_ranks)]
    known = [each for each in (job, *others) if each is not None and each.process is not None]
    if [each.local_rank for each in known if each.attempt == job.attempt] != list(range(job.local_ranks)):
        return ()
    return tuple(each for each in known if each.process and ProcessId(*each.process).runs(proc=proc))


def _lock(path: str, invalid: InvalidFiles) -> tuple[bool | None, int | None]:
    """Whether the lock is held, and by which pid of this namespace; `None` is unknown.

    A worker never removes its lock file. If it is missing, the worker may still live.
    """
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        invalid.add("lock_missing", path, "the file is missing")
        return None, None
    except (OSError, StateFileError) as error:
        invalid.add("lock_unreadable", path, error)
        return None, None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError as error:
        invalid.add("lock_unreadable", path, error)
        return None, None
    finally:
        os.close(descriptor)
    if kind == fcntl.F_UNLCK:
        return False, None
    return True, pid if pid > 0 else None


def _precedence(sighting: WorkerReading, proc: Path) -> tuple[bool, float, float]:
    # By the kernel's start time: a file could claim any time to hide this worker.
    ticks = math.inf
    if sighting.pid is not None:
        with contextlib.suppress(OSError):
            ticks = procfs.start_ticks(sighting.pid, proc=proc)
    return (not sighting.alive, ticks, sighting.worker.started.unix_s)
