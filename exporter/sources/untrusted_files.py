"""Files that tenants make, read so that none of them can hold us up, lead us elsewhere, or fill our memory."""

import os
import stat
from collections import Counter
from pathlib import Path

from gpuwarden.state_file import SIZE_MAX_BYTES, StateFileError


class Refused:
    """What cannot be trusted or read in one look: how many by reason, and of each reason the first, for a person."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first_errors: dict[str, str] = {}

    def add(self, reason: str, which: Path | str, because: Exception | str) -> None:
        """One more. Only the first of a reason is named: tenants may make any number of them."""
        self.counts[reason] += 1
        if reason not in self.first_errors:
            said = because.strerror if isinstance(because, OSError) else None
            name = os.fsencode(which).decode("utf-8", "backslashreplace")  # what is no UTF-8 would fail the page
            self.first_errors[reason] = f"{name}: {said or because}"


def open_plain(path: Path | str) -> int:
    """A descriptor of a plain file, never through a link and never waiting.

    Raises:
        OSError: it cannot be opened.
        StateFileError: it is a pipe, a socket, a folder or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StateFileError("not_a_file", "it is no plain file")
    return descriptor


def text(path: Path | str) -> str:
    """What a file holds; at most one byte more than is valid is read.

    Raises:
        OSError: it cannot be read.
        StateFileError: it is no plain file, too long, or no text.
    """
    descriptor = open_plain(path)
    try:
        data = os.read(descriptor, SIZE_MAX_BYTES + 1)
        while len(data) <= SIZE_MAX_BYTES and (more := os.read(descriptor, SIZE_MAX_BYTES + 1 - len(data))):
            data += more
    finally:
        os.close(descriptor)
    if len(data) > SIZE_MAX_BYTES:
        raise StateFileError("oversized", f"it is over {SIZE_MAX_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise StateFileError("not_json", "it is not UTF-8") from None
