"""Files that are replaced whole, and values that are read again when their files change. Standard library only.

A write goes to a scratch file in the same folder, which then takes the file's place by rename. A reader sees the old
content or the new one, never a part. Nothing reaches the disk before a crash unless `sync` asks for it.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Final, Generic, TypeVar

from gpuwarden.errors import GpuwardenError

READS_MAX: Final = 3
"""Files that name others are read so often at most, when the others change meanwhile."""

T = TypeVar("T")


def atomic_write(
    path: Path, content: str | bytes, *, mode: int = 0o666, sync: bool = False, many_writers: bool = False
) -> None:
    """Replace a file with this content; text is UTF-8. The arguments and errors are those of `atomic_open`."""
    with atomic_open(path, mode=mode, sync=sync, many_writers=many_writers) as file:
        if isinstance(content, str):
            file.write(content)
        else:
            file.buffer.write(content)


@contextmanager
def atomic_open(
    path: Path, *, mode: int = 0o666, sync: bool = False, many_writers: bool = False
) -> Iterator[TextIOWrapper]:
    """Open a scratch file that replaces `path` when the block ends, and is removed when the block raises.

    Args:
        path: the file to replace; its folder must exist.
        mode: its permissions, less the process's umask.
        sync: whether the content is on the disk before the file is replaced.
        many_writers: whether other processes may write the file at the same time. Each then has its own scratch file,
            and a killed writer leaves one behind; else the next write removes it.

    Raises:
        OSError: it cannot be written; the file is as it was. Its `filename` is set.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new" if many_writers else f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    try:
        # Not through a link that somebody put there, nor into a file that an interrupted write still has open.
        number = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(number, "w", encoding="utf-8", newline="") as file:  # noqa: PTH123 - it is open already
            yield file
            file.flush()
            if sync:
                os.fsync(number)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        if error.filename is None:  # a full disk names no file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


class ReloadingFile(Generic[T]):
    """A value that is read from files, and read again once one of them changes. Safe to share between threads.

    Files are compared by inode, size and times, not by content. Replace them by rename: half a file may be valid.

    Args:
        files: the files that the value comes from.
        read: reads them.
        named: the further files that a value names, and that it comes from too.

    Raises:
        Exception: what `read` raises.
    """

    def __init__(
        self, files: Iterable[Path], read: Callable[[], T], *, named: Callable[[T], Iterable[Path]] = lambda _: ()
    ) -> None:
        self._files = tuple(files)
        self._read, self._named = read, named
        self._lock = threading.Lock()
        self.value, self._stamps = self._read_stamped(self._files)

    def reload(self) -> bool:
        """Read again if a file has changed; whether the value is a new one.

        Raises:
            Exception: what `read` raises. The value is as it was, and the next call tries again.
        """
        with self._lock:
            if _stamps(self._stamps) == self._stamps:
                return False
            self.value, self._stamps = self._read_stamped(self._stamps)
            return True

    def _read_stamped(self, known: Iterable[Path]) -> tuple[T, dict[Path, "_Stamp | None"]]:
        """Read, and the state of each file right before: what changes meanwhile is read again."""
        for _ in range(READS_MAX):
            stamps = _stamps(known)
            value = self._read()
            known = dict.fromkeys((*self._files, *self._named(value)))
            if all(path in stamps for path in known):
                return value, {path: stamps[path] for path in known}
        raise GpuwardenError(f"{', '.join(map(str, self._files))}: changes faster than it can be read")


_Stamp = tuple[int, ...]


def _stamps(paths: Iterable[Path]) -> dict[Path, _Stamp | None]:
    return {path: _stamp(path) for path in paths}


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
