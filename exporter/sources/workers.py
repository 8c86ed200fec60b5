"""Workers from their state files and locks. Liveness comes from the kernel: F_GETLK names the holder's pid."""

import contextlib
import fcntl
import math
import os
import struct
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final

from exporter.readings import WorkerReadings, WorkerSighting
from exporter.sources import tenantfiles
from gpuwarden import cgroup, statefile
from gpuwarden.statefile import JobFile, StateFileError, WorkerFile

FILES_MAX: Final = 64
"""Worker files read in one folder; more are counted as errors and left out, so that a tenant crowds out itself only."""

ENTRIES_MAX: Final = 4096
"""Entries looked at in one folder."""

# struct flock of Linux with 64-bit offsets: l_type, l_whence, l_start, l_len, l_pid (fcntl(2)).
_FLOCK: Final = struct.Struct("hhqqi4x")


def read(directory: Path, *, proc: Path = cgroup.PROC) -> WorkerReadings:
    """Look at every worker below `$GPUWARDEN_DIR`.

    A file that cannot be trusted costs its own worker only. Of two that claim one name, the one whose lock is held is
    kept, then the one whose process started first, by the kernel's word; the other is counted.

    Raises:
        OSError: the directory itself cannot be read.
    """
    errors: Counter[str] = Counter()
    kept: dict[str, WorkerSighting] = {}
    duplicates = 0
    unread: set[str] = set()
    for path in _worker_files(directory, errors, unread):
        try:
            sighting = _sight(path, proc, errors)
        except StateFileError as error:
            errors[error.reason] += 1
            unread.add(path.parent.name)
            continue
        except FileNotFoundError:
            continue  # the worker ended, cleanly, since the folder was listed
        except (OSError, ValueError):
            errors["unreadable"] += 1
            unread.add(path.parent.name)
            continue
        name = sighting.worker.worker
        if name in kept:
            duplicates += 1
            kept[name], other = sorted((kept[name], sighting), key=lambda each: _precedence(each, proc))
            if other.alive is not False:
                unread.add(other.folder)
        else:
            kept[name] = sighting
    found = tuple(kept[name] for name in sorted(kept))
    return WorkerReadings(workers=found, errors=errors, duplicates=duplicates, unread=frozenset(unread))


def _worker_files(directory: Path, errors: Counter[str], unread: set[str]) -> Iterator[Path]:
    for folder in sorted(entry for entry in directory.iterdir() if entry.is_dir() and not entry.is_symlink()):
        try:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in islice(entries, ENTRIES_MAX)]
        except OSError:
            errors["unreadable"] += 1
            unread.add(folder.name)
            continue
        found = sorted(name for name in names if name.endswith(statefile.WORKER_SUFFIX) and not name.startswith("."))
        if len(found) > FILES_MAX or len(names) == ENTRIES_MAX:
            errors["too_many"] += 1
            unread.add(folder.name)
        yield from (folder / name for name in found[:FILES_MAX])


def _sight(path: Path, proc: Path, errors: Counter[str]) -> WorkerSighting:
    worker = statefile.parse_worker(tenantfiles.text(path))
    base = path.name.removesuffix(statefile.WORKER_SUFFIX)
    if worker.worker != base:
        raise StateFileError("name", f"{path} says it is of worker {worker.worker!r}")
    alive, pid = _lock(path.with_name(base + statefile.LOCK_SUFFIX), errors)
    container_id = None
    if pid is not None:
        try:
            found_in = cgroup.container_id(pid, proc=proc)
            # In the container that the exporter itself is in, it sees nothing but processes.
            container_id = None if found_in == own_container() else found_in
        except OSError:
            pid = None  # it died between the two looks; the lock will say so at the next
    return WorkerSighting(
        worker=worker,
        job=_job(path.with_name(base + statefile.JOB_SUFFIX), worker, errors),
        alive=alive,
        pid=pid,
        container_id=container_id,
        folder=path.parent.name,
    )


@cache
def own_container() -> str | None:
    """The container that the exporter itself is in."""
    return cgroup.container_id(os.getpid())


def _job(path: Path, worker: WorkerFile, errors: Counter[str]) -> JobFile | None:
    try:
        job = statefile.parse_job(tenantfiles.text(path))
    except FileNotFoundError:
        return None
    except StateFileError as error:
        errors[error.reason] += 1
        return None
    except OSError:
        errors["unreadable"] += 1
        return None
    if (job.worker, job.incarnation) != (worker.worker, worker.incarnation):
        errors["foreign"] += 1
        return None
    return job


def _lock(path: Path, errors: Counter[str]) -> tuple[bool | None, int | None]:
    """Whether the lock is held, and by which pid of this namespace; `None` for what cannot be told.

    A worker never takes its lock file away: where it is missing somebody else did, and its holder may live.
    """
    try:
        descriptor = tenantfiles.open_plain(path)
    except FileNotFoundError:
        errors["lock_missing"] += 1
        return None, None
    except (OSError, StateFileError):
        errors["lock_unreadable"] += 1
        return None, None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError:
        errors["lock_unreadable"] += 1
        return None, None
    finally:
        os.close(descriptor)
    if kind == fcntl.F_UNLCK:
        return False, None
    return True, pid if pid > 0 else None


def _precedence(sighting: WorkerSighting, proc: Path) -> tuple[bool, float, float]:
    """What a file says of its start is a claim: another tenant could claim to be older and hide this worker."""
    ticks = math.inf
    if sighting.pid is not None:
        with contextlib.suppress(OSError):
            ticks = cgroup.start_ticks(sighting.pid, proc=proc)
    return (not sighting.alive, ticks, sighting.worker.started.unix_s)
