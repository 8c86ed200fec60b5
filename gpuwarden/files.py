"""Atomic file replacement, and values that follow their files. Standard library only."""

import os
import resource
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Final, Generic, TypeVar

from gpuwarden.errors import GpuwardenError
from gpuwarden.state_file import SIZE_MAX_BYTES, StateFileError

OPEN_FILES: Final = 8192
"""Enough for 2,000 processes and 400 containers of an exporter."""

READS_MAX: Final = 3
"""Reads before a reload fails."""

T = TypeVar("T")


def atomic_write(
    path: Path, content: str | bytes, *, mode: int = 0o666, sync: bool = False, many_writers: bool = False
) -> None:
    """Replace a file; see `atomic_open`."""
    with atomic_open(path, mode=mode, sync=sync, many_writers=many_writers) as file:
        if isinstance(content, str):
            file.write(content)
        else:
            file.buffer.write(content)


@contextmanager
def atomic_open(
    path: Path, *, mode: int = 0o666, sync: bool = False, many_writers: bool = False
) -> Iterator[TextIOWrapper]:
    """Open a scratch file that replaces `path` at the end of the block, unless the block raises.

    Args:
        path: the file to replace.
        mode: permissions, less the umask.
        sync: flush to disk before the rename.
        many_writers: use one scratch file per process.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new" if many_writers else f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    try:
        # Refuse a symlink, and an interrupted write's open file.
        number = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(number, "w", encoding="utf-8", newline="") as file:  # noqa: PTH123 - opened above
            yield file
            file.flush()
            if sync:
                os.fsync(number)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        if error.filename is None:  # a full disk sets no file name
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def open_regular(path: Path | str) -> int:
    """Open a regular file, not a link, without waiting. Raises OSError or StateFileError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StateFileError("not_a_file", "not a regular file")
    return descriptor


def read_owned(path: Path | str) -> tuple[str, os.stat_result]:
    """Read a file of a tenant, and its owner and mode.

    Raises:
        OSError: it cannot be read.
        StateFileError: it is not regular, too long, or not UTF-8.
    """
    descriptor = open_regular(path)
    try:
        status = os.fstat(descriptor)
        data = os.read(descriptor, SIZE_MAX_BYTES + 1)
        while len(data) <= SIZE_MAX_BYTES and (more := os.read(descriptor, SIZE_MAX_BYTES + 1 - len(data))):
            data += more
    finally:
        os.close(descriptor)
    if len(data) > SIZE_MAX_BYTES:
        raise StateFileError("oversized", f"over {SIZE_MAX_BYTES} bytes")
    try:
        return data.decode("utf-8"), status
    except UnicodeDecodeError:
        raise StateFileError("not_json", "not UTF-8") from None


def raise_file_limit() -> None:
    """Raise this process's limit of open files, which is 1024 in a systemd service."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ReloadingFile(Generic[T]):
    """A value that is read again after one of its files changes. Thread-safe.

    Files are compared by inode, size and times: replace them by rename.

    Args:
        files: the files that the value comes from.
        read: reads them.
        named: returns further files that the value names.
    """

    def __init__(
        self, files: Iterable[Path], read: Callable[[], T], *, named: Callable[[T], Iterable[Path]] = lambda _: ()
    ) -> None:
        self._files = tuple(files)
        self._read, self._named = read, named
        self._lock = threading.Lock()
        self.value, self._stamps = self._read_stamped(self._files)

    def reload(self) -> bool:
        """Read again if a file has changed; returns whether it did.

        Raises:
            Exception: from `read`. The old value stays.
        """
        with self._lock:
            if _stamps(self._stamps) == self._stamps:
                return False
            self.value, self._stamps = self._read_stamped(self._stamps)
            return True

    def _read_stamped(self, known: Iterable[Path]) -> tuple[T, dict[Path, "_Stamp | None"]]:
        """Read the value, after the files' states."""
        for _ in range(READS_MAX):
            stamps = _stamps(known)
            value = self._read()
            known = dict.fromkeys((*self._files, *self._named(value)))
            if all(path in stamps for path in known):
                return value, {path: stamps[path] for path in known}
        raise GpuwardenError(f"{', '.join(map(str, self._files))}: files change faster than they can be read")


_Stamp = tuple[int, ...]


def _stamps(paths: Iterable[Path]) -> dict[Path, _Stamp | None]:
    return {path: _stamp(path) for path in paths}


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
