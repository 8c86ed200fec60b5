"""Bounds the parts' logs: a file over its size becomes `.1`, the older ones move up, the oldest goes.

The parts write straight into their files, so that nothing of ours stands between them and their log: what they say is
kept also when we are killed, and a log that nobody reads blocks no part. So the file is copied and emptied in place (it
is open for appending, each line lands at its end). A line written between the copy's last look and the emptying, some
microseconds, is lost.
"""

import os
import shutil
from pathlib import Path
from typing import Final

SIZE_MAX_BYTES: Final = 10 * 2**20
KEPT: Final = 3
"""Older files kept of each log, so that one takes four times SIZE_MAX_BYTES at most."""


def rotate(log: Path, *, size_max_bytes: int = SIZE_MAX_BYTES, kept: int = KEPT) -> bool:
    """Rotate one log if it is over its size; whether it was.

    Raises:
        OSError: there is no room for a copy, say; everything is as it was.
    """
    try:
        if log.stat().st_size <= size_max_bytes:
            return False
    except FileNotFoundError:
        return False
    new = log.with_name(f"{log.name}.new")
    try:
        with log.open("rb") as source, new.open("wb") as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            while more := source.read():
                copy.write(more)
                copy.flush()
            os.truncate(log, 0)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    for number in range(kept - 1, 0, -1):
        older = _numbered(log, number)
        if older.exists():
            older.replace(_numbered(log, number + 1))
    new.replace(_numbered(log, 1))
    return True


def _numbered(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
