"""Workers from their state files and locks. Liveness comes from the kernel: F_GETLK names the holder's pid."""

import fcntl
import os
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from exporter.readings import WorkerReadings, WorkerSighting
from gpuwarden import cgroup, statefile
from gpuwarden.statefile import JobFile, StateFileError, WorkerFile

FILES_MAX: Final = 4096
"""Worker files read in one look; more are counted as errors and left out."""

# struct flock of Linux with 64-bit offsets: l_type, l_whence, l_start, l_len, l_pid (fcntl(2)).
_FLOCK: Final = struct.Struct("hhqqi4x")


def read(directory: Path, *, proc: Path = cgroup.PROC) -> WorkerReadings:
    """Look at every worker below `$GPUWARDEN_DIR`.

    A file that cannot be trusted costs its own worker only. Of two that claim one name, the one whose lock is held is
    kept, then the one that started first; the other is counted.

    Raises:
        OSError: the directory itself cannot be read.
    """
    errors: Counter[str] = Counter()
    kept: dict[str, WorkerSighting] = {}
    duplicates = 0
    for path in _worker_files(directory, errors):
        try:
            sighting = _sight(path, proc, errors)
        except StateFileError as error:
            errors[error.reason] += 1
            continue
        except OSError:
            errors["unreadable"] += 1
            continue
        name = sighting.worker.worker
        if name in kept:
            duplicates += 1
            kept[name] = min(kept[name], sighting, key=_precedence)
        else:
            kept[name] = sighting
    return WorkerReadings(workers=tuple(kept[name] for name in sorted(kept)), errors=errors, duplicates=duplicates)


def _worker_files(directory: Path, errors: Counter[str]) -> Iterator[Path]:
    found = 0
    for folder in sorted(entry for entry in directory.iterdir() if entry.is_dir() and not entry.is_symlink()):
        try:
            paths = sorted(folder.glob("*" + statefile.WORKER_SUFFIX))
        except OSError:
            errors["unreadable"] += 1
            continue
        for path in paths:
            found += 1
            if found > FILES_MAX:
                errors["too_many"] += 1
            elif not path.name.startswith("."):
                yield path


def _sight(path: Path, proc: Path, errors: Counter[str]) -> WorkerSighting:
    worker = statefile.parse_worker(_text(path))
    base = path.name.removesuffix(statefile.WORKER_SUFFIX)
    if worker.worker != base:
        raise StateFileError("name", f"{path} says it is of worker {worker.worker!r}")
    alive, pid = _lock(path.with_name(base + statefile.LOCK_SUFFIX))
    container_id = None
    if pid is not None:
        try:
            container_id = cgroup.container_id(pid, proc=proc)
        except OSError:
            pid = None  # it died between the two looks; the lock will say so at the next
    return WorkerSighting(
        worker=worker,
        job=_job(path.with_name(base + statefile.JOB_SUFFIX), worker, errors),
        alive=alive,
        pid=pid,
        container_id=container_id,
    )


def _job(path: Path, worker: WorkerFile, errors: Counter[str]) -> JobFile | None:
    try:
        job = statefile.parse_job(_text(path))
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


def _lock(path: Path) -> tuple[bool | None, int | None]:
    """Whether the lock is held, and by which pid of this namespace; `None` for what cannot be told."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False, None
    except OSError:
        return None, None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    except OSError:
        return None, None
    finally:
        os.close(descriptor)
    if kind == fcntl.F_UNLCK:
        return False, None
    return True, pid if pid > 0 else None


def _text(path: Path) -> str:
    """At most one byte more than is valid, never through a link: a tenant writes these files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(statefile.SIZE_MAX_BYTES + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise StateFileError("not_json", f"{path} is not UTF-8") from None


def _precedence(sighting: WorkerSighting) -> tuple[bool, float]:
    return (not sighting.alive, sighting.worker.started.unix_s)
