"""Rotate logs by size: a large file becomes `.1`, older ones move up, the oldest is deleted.

The parts write directly to their files, so their logs survive a crash of `up`. The file is copied and truncated in
place. A line written in the microseconds between both is lost.
"""

import os
import shutil
from pathlib import Path
from typing import Final

SIZE_MAX_BYTES: Final = 10 * 2**20
KEPT: Final = 3
"""Older files per log. One log takes at most four times SIZE_MAX_BYTES."""


def rotate(log: Path, *, size_max_bytes: int = SIZE_MAX_BYTES, kept: int = KEPT) -> bool:
    """Rotate a log that is too large. Returns whether it rotated.

    Raises:
        OSError: for example no space for the copy. Nothing changed.
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
        older = _numbered_path(log, number)
        if older.exists():
            older.replace(_numbered_path(log, number + 1))
    new.replace(_numbered_path(log, 1))
    return True


def _numbered_path(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
