"""State files in `--state-dir` for the next exporter.

One JSON object each, UTF-8, replaced by rename and not synced: no state outlives a boot.

    {"format": a number,
     "written": {"boottime_s": CLOCK_BOOTTIME, "boot_id": /proc/sys/kernel/random/boot_id, "unix_s": since 1970},
     ...}                                      fields of the module that owns the file

A forged file could restart a healthy container.
"""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpuwarden.errors import GpuwardenError
from gpuwarden.files import atomic_write
from gpuwarden.state_file import Stamp

INCARNATION_MAX: Final = 256
"""Docker and Podman use about 100."""

BOOTTIME_MAX_S: Final = 1e12
"""Longer than any uptime."""


class PersistedFileError(GpuwardenError):
    """A state file is invalid or not trusted."""


class PersistedFile:
    """One file."""

    def __init__(self, folder: Path, name: str, *, size_max_bytes: int) -> None:
        self._folder = folder
        self._size_max_bytes = size_max_bytes
        self.path = folder / name

    def content(self) -> bytes | None:
        """Read the file; `None` if it does not exist.

        Raises:
            PersistedFileError: another user may write it.
            OSError: it is unreadable.
        """
        try:
            # Do not follow symlinks; do not block on a FIFO.
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise PersistedFileError(f"{self.path} is not a regular file: remove it")
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PersistedFileError(
                    f"{self.path} belongs to user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; expected "
                    f"user {os.geteuid()} and no other writers: remove it and use another --state-dir"
                )
            return file.read(self._size_max_bytes + 1)

    def replace(self, content: bytes) -> None:
        """Replace the file.

        Raises:
            OSError: the old file stays.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        atomic_write(self.path, content, mode=0o600)


def render(fields: Mapping[str, Any], *, format: int, now: Stamp) -> bytes:  # noqa: A002 - the field's name
    """Encode the fields for `parse`."""
    written = {"boottime_s": now.boottime_s, "boot_id": now.boot_id, "unix_s": now.unix_s}
    return (json.dumps({"format": format, "written": written, **fields}) + "\n").encode()


def parse(content: bytes, *, name: str, format: int, size_max_bytes: int, now: Stamp) -> Mapping[str, Any]:  # noqa: A002
    """Decode the fields.

    Raises:
        PersistedFileError: the content is invalid.
    """
    if len(content) > size_max_bytes:
        raise PersistedFileError(f"{name} is over {size_max_bytes} bytes: remove it")
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PersistedFileError(f"{name} is not valid JSON ({error}): remove it") from None
    if not isinstance(found, Mapping) or found.get("format") != format:
        raise PersistedFileError(f"{name} has not format {format}: remove it")
    written = found.get("written")
    if not isinstance(written, Mapping) or not is_seconds(written.get("boottime_s")):
        raise PersistedFileError(f"{name} has no valid time: remove it")
    if written.get("boot_id") != now.boot_id:
        raise PersistedFileError(f"{name} is from another boot: ignored")
    if written["boottime_s"] > now.boottime_s:
        raise PersistedFileError(
            f"{name} was written {written['boottime_s'] - now.boottime_s:.0f} s in the future: remove it"
        )
    return found


def is_seconds(found: object) -> bool:
    """Whether it is seconds since boot."""
    return isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found <= BOOTTIME_MAX_S


def is_incarnation(found: object) -> bool:
    """Whether it is an incarnation."""
    return isinstance(found, str) and 1 <= len(found) <= INCARNATION_MAX
