"""Read files that tenants write, without waiting, following links, or filling the memory."""

import os
import stat
from collections import Counter
from pathlib import Path

from gpuwarden.state_file import SIZE_MAX_BYTES, StateFileError


class InvalidFiles:
    """Files that are invalid or unreadable: counts, and the first one by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first_errors: dict[str, str] = {}

    def add(self, reason: str, which: Path | str, message: Exception | str) -> None:
        """Count one file; only the first of a reason is kept."""
        self.counts[reason] += 1
        if reason not in self.first_errors:
            said = message.strerror if isinstance(message, OSError) else None
            name = os.fsencode(which).decode("utf-8", "backslashreplace")  # other bytes would break the page
            self.first_errors[reason] = f"{name}: {said or message}"


def open_regular(path: Path | str) -> int:
    """Open a regular file, without following a link and without waiting.

    Raises:
        OSError: it cannot be opened.
        StateFileError: it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StateFileError("not_a_file", "not a regular file")
    return descriptor


def read_text(path: Path | str) -> str:
    """See `read_owned`."""
    return read_owned(path)[0]


def read_owned(path: Path | str) -> tuple[str, int]:
    """Read a file, at most one byte too many, and the uid of its owner.

    Raises:
        OSError: it cannot be read.
        StateFileError: it is not a regular file, too long, or not UTF-8.
    """
    descriptor = open_regular(path)
    try:
        uid = os.fstat(descriptor).st_uid
        data = os.read(descriptor, SIZE_MAX_BYTES + 1)
        while len(data) <= SIZE_MAX_BYTES and (more := os.read(descriptor, SIZE_MAX_BYTES + 1 - len(data))):
            data += more
    finally:
        os.close(descriptor)
    if len(data) > SIZE_MAX_BYTES:
        raise StateFileError("oversized", f"over {SIZE_MAX_BYTES} bytes")
    try:
        return data.decode("utf-8"), uid
    except UnicodeDecodeError:
        raise StateFileError("not_json", "not UTF-8") from None
