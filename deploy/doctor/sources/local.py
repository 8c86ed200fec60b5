"""Files, disks and databases of this host."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from deploy.doctor.facts import Disk, File, Ledger, Offset, Readable
from deploy.doctor.finding import Unread
from deploy.doctor.sources.addresses import Addresses
from deploy.doctor.sources.rights import is_denied
from deploy.standalone.receivers import SECRET
from gpuwarden.queue import JobStore
from gpuwarden.queue.open import check_there as check_queue_there
from gpuwarden.reporter import host_key
from remediator.commands.addresses import NONE
from remediator.commands.notify import FILE_ENV
from remediator.commands.open_ledger import existing


def read_key(addresses: Addresses) -> str | Unread:
    """The host key. Raises GpuwardenError."""
    if is_denied(file := addresses.runtime_dir / "host"):
        return Unread(why=f"this user may not read {file}", denied=True)
    return host_key(addresses.runtime_dir)


def read_ledger(addresses: Addresses, now: Callable[[], float]) -> Ledger | Unread:
    """Open the ledger without a migration, and check that it can be read and written. Raises GpuwardenError."""
    url = addresses.ledger
    if url == NONE:
        return Unread(why="excluded", skipped=True)
    if url is None:
        return Unread(why="no ledger found")
    if (denied := _denied(url)) is not None:
        return denied
    with closing(existing(url)) as ledger:
        ledger.health.check_usable()
        executors, began_s = ledger.executors.list_all(), now()
        at_s = ledger.now()
        half_s = (now() - began_s) / 2
        offset = Offset(of="the database", ahead_s=at_s - began_s - half_s, uncertain_s=half_s)
        return Ledger(
            now_s=at_s,
            executors=executors,
            unsent=ledger.notices.unsent(),
            offset=offset if ledger.shared else None,
        )


def read_queue(addresses: Addresses) -> Readable | Unread:
    """Open the queue without a migration, and take its write lock. Raises GpuwardenError."""
    url = addresses.queue
    if url == NONE:
        return Unread(why="excluded", skipped=True)
    if url is None:
        return Unread(why="no queue found")
    if (denied := _denied(url)) is not None:
        return denied
    check_queue_there(url)
    with closing(JobStore.open(url, migrate=False)) as store:
        store.check_writable()
    return Readable()


def _denied(url: str) -> Unread | None:
    """Why this user may not open an SQLite database."""
    path = database_file(url)
    if path is None or not is_denied(path, os.R_OK | os.W_OK):
        return None
    return Unread(why=f"this user may not read and write {path}", denied=True)


def read_files(addresses: Addresses, tokens: Sequence[Path]) -> list[File]:
    """The files that gpuwarden trusts, its secrets, and the sockets of the settings."""
    place = addresses.place
    folder = place.env_file.parent if place.env_file else place.data
    tokens = tokens or ([folder / "token"] if folder else [])
    trusted = [
        (addresses.runtime_dir, "the folder", False),
        (addresses.runtime_dir / "host", "the host key", False),
        (place.env_file, "the settings file", False),
        (database_file(addresses.ledger), "the ledger", False),
        (database_file(addresses.queue), "the queue", False),
        *((each, "the token", True) for each in tokens),
        (_path(addresses.variables.get(FILE_ENV)), "the notify file", True),
        *((each, "the secret of --notify", True) for each in (sorted(folder.glob(f"{SECRET}*")) if folder else ())),
    ]
    found = [_file(path, what, secret=secret) for path, what, secret in trusted if path is not None]
    return [each for each in found if each is not None] + list(_sockets(addresses))


def _file(path: Path, what: str, *, secret: bool) -> File | None:
    """A file with the rights of other users, or nothing for one that another check reports as missing."""
    try:
        mode = path.stat().st_mode
        closed = any(not folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)
    except FileNotFoundError:
        return None
    except OSError:
        return File(path=path, what=what, secret=secret, others=None)
    return File(
        path=path, what=what, secret=secret, others=0 if closed else mode & 0o7, sticky=bool(mode & stat.S_ISVTX)
    )


def _path(name: str | None) -> Path | None:
    return Path(name) if name else None


def _sockets(addresses: Addresses) -> Iterator[File]:
    for name in ("docker", "podman"):
        url = addresses.variables.get(f"GPUWARDEN_REMEDIATOR_{name.upper()}", NONE)
        if urlsplit(url).scheme == "unix":
            path = Path(urlsplit(url).path)
            yield File(path=path, what=f"{name.title()} socket", missing=not path.is_socket())


def read_disks(addresses: Addresses) -> list[Disk]:
    """Free space of the folders with databases and state files, one of each file system."""
    files = [database_file(addresses.ledger), database_file(addresses.queue)]
    folders = [file.parent for file in files if file is not None] + [addresses.runtime_dir]
    disks = dict[int, Disk]()
    for folder in folders:
        if folder.is_dir():
            found = os.statvfs(folder)
            disks.setdefault(
                folder.stat().st_dev,
                Disk(
                    path=folder,
                    free_bytes=found.f_bavail * found.f_frsize,
                    size_bytes=found.f_blocks * found.f_frsize,
                    free_files=found.f_favail if found.f_files else None,
                ),
            )
    return list(disks.values())


def database_file(url: str | None) -> Path | None:
    """The file of an SQLite database."""
    try:
        parsed = make_url(url or "")
    except (ArgumentError, ValueError):  # opening it gives a better error
        return None
    return Path(parsed.database) if parsed.get_backend_name() == "sqlite" and parsed.database else None
