"""Files that are replaced whole, and values that are read again when their files change. Standard library only.

A write goes to a scratch file in the same folder, which then takes the file's place by rename. A reader sees the old
content or the new one, never a part. Nothing reaches the disk before a crash unless `sync` asks for it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path


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
