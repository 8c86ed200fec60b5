"""The sockets: one in each worker's folder, made and removed with it.

A hostile worker owns its folder, so nothing in it is followed: the folder is opened once, without links.
"""

import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from gpuwarden.gateway.wire import SOCKET_NAME, reachable
from gpuwarden.state_file import StateFileError, check_name

BACKLOG: Final = 64

POOL_MAX: Final = 64
"""Most workers of one folder."""

_NUMBERS: Final = frozenset(map(str, range(POOL_MAX)))

FOLDERS_MAX: Final = 4096
"""Most folders that get a socket."""

log: Final = structlog.get_logger("gateway")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A listening socket in a folder, the inodes of both, and the user id of their owner."""

    listener: socket.socket
    owner: int
    folder: tuple[int, int]
    inode: tuple[int, int]


class Sockets:
    """The sockets of a host's slots.

    Args:
        directory: `$GPUWARDEN_RUNTIME_DIR`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.bound: dict[str, Bound] = {}
        self.folders: set[str] = set()
        self._seen: set[str] = set()
        self._logged: dict[str, str] = {}

    def look(self, *, opened: Callable[[str, socket.socket], None], closed: Callable[[str], None]) -> None:
        """Make missing sockets and drop those of removed folders.

        Raises:
            OSError: the directory cannot be read.
        """
        found = self.folders = self._folders()
        self._seen = self._seen | found if len(self._seen) <= FOLDERS_MAX else set(found)
        for name in [name for name in self.bound if name not in found]:
            self._drop(name, closed)
        for name in found:
            try:
                self._keep(name, opened, closed)
            except OSError as error:
                self._tell(name, error.strerror or str(error))

    def is_folder(self, name: str) -> bool:
        """Whether a slot has this folder, or had it since the gateway's start."""
        return name in self._seen or (self._directory / name).is_dir()

    def may_be(self, folder: str, worker: str) -> bool:
        """Whether a worker of this name may use the folder's socket.

        It is named as its folder, or FOLDER-N with N below `POOL_MAX` if no other folder has that name.
        """
        if worker == folder:
            return True
        start, dash, number = worker.rpartition("-")
        in_pool = number in _NUMBERS
        return bool(dash) and start == folder and in_pool and not self.is_folder(worker)

    def close(self) -> None:
        """Stop to listen. The sockets stay, so that workers know that a gateway is to come back."""
        for each in self.bound.values():
            each.listener.close()
        self.bound.clear()

    def _folders(self) -> set[str]:
        names: set[str] = set()
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with suppress(StateFileError):
                    if entry.is_dir(follow_symlinks=False) and len(names) < FOLDERS_MAX:
                        names.add(check_name(entry.name, what="subdirectory"))
        return names

    def _keep(self, name: str, opened: Callable[[str, socket.socket], None], closed: Callable[[str], None]) -> None:
        folder = os.open(self._directory / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            its = os.fstat(folder)
            held = self.bound.get(name)
            if held is not None:
                now = its.st_uid, _inode(its), _socket_in(folder)
                if now == (held.owner, held.folder, held.inode):
                    return
                self._drop(name, closed)
            self.bound[name] = _bind(folder, its)
            opened(name, self.bound[name].listener)
            self._logged.pop(name, None)
        finally:
            os.close(folder)

    def _drop(self, name: str, closed: Callable[[str], None]) -> None:
        closed(name)
        self.bound.pop(name).listener.close()
        self._logged.pop(name, None)

    def _tell(self, name: str, reason: str) -> None:
        if self._logged.get(name) != reason:
            self._logged[name] = reason
            log.warning("no socket in this folder", folder=name, reason=reason)


def _bind(folder: int, its: os.stat_result) -> Bound:
    """A socket that the folder's owner alone may use.

    Raises:
        OSError: the folder has another file of this name that cannot be removed, or is not writable.
    """
    with suppress(FileNotFoundError):
        os.unlink(SOCKET_NAME, dir_fd=folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(reachable(folder))
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    try:
        if its.st_uid != os.geteuid():
            os.chown(SOCKET_NAME, its.st_uid, its.st_gid, dir_fd=folder, follow_symlinks=False)
        listener.listen(BACKLOG)
        found = os.stat(SOCKET_NAME, dir_fd=folder, follow_symlinks=False)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return Bound(listener=listener, owner=its.st_uid, folder=_inode(its), inode=_inode(found))


def _socket_in(folder: int) -> tuple[int, int] | None:
    try:
        found = os.stat(SOCKET_NAME, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return _inode(found) if stat.S_ISSOCK(found.st_mode) else None


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
