"""What an exporter keeps for the next one, in files of its `--state-dir`: how they are written, read and believed.

Each is one JSON object, UTF-8, of a bounded size, replaced whole by rename:

    {"format": a number,
     "written": {"boottime_s": CLOCK_BOOTTIME, "boot_id": /proc/sys/kernel/random/boot_id, "unix_s": since 1970},
     ...}                                      what it is about, as the module that owns the file says

Whoever could write it could have somebody restarted who is sound. So it is believed only where this process's own user
owns it, nobody else may write it, and it was written in this boot, at a time that has passed. What runs after a boot
is another incarnation anyway, so nothing has to reach the disk, and nothing is synced.
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
"""Characters of one; Docker's and Podman's, an id and a time, have about a hundred."""

BOOTTIME_MAX_S: Final = 1e12
"""No host has been up for longer, seconds; what is more is no time, nor always a number that can be reckoned with."""


class KeptError(GpuwardenError):
    """What is in the file cannot be believed, and why."""


class KeptFile:
    """One file in a folder of the exporter's own, which is made where its parent is there."""

    def __init__(self, folder: Path, name: str, *, size_max_bytes: int) -> None:
        self._folder = folder
        self._size_max_bytes = size_max_bytes
        self.path = folder / name

    def content(self) -> bytes | None:
        """What is in it, one byte more than fits at most; `None` where there is no file.

        Raises:
            KeptError: somebody else may have written it.
            OSError: it cannot be read.
        """
        try:
            # Neither a link that leads elsewhere nor a pipe that nobody writes.
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise KeptError(f"{self.path} is no plain file: remove it")
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise KeptError(
                    f"{self.path} is of user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; wanted: of user "
                    f"{os.geteuid()}, and writable by nobody else. Remove it, and give the exporter a folder of its own"
                )
            return file.read(self._size_max_bytes + 1)

    def replace(self, content: bytes) -> None:
        """Replace what is kept.

        Raises:
            OSError: it cannot be written; what was there before stays.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        atomic_write(self.path, content, mode=0o600)


def render(fields: Mapping[str, Any], *, format: int, now: Stamp) -> bytes:  # noqa: A002 - the field's name
    """What `parse` reads back as these fields."""
    written = {"boottime_s": now.boottime_s, "boot_id": now.boot_id, "unix_s": now.unix_s}
    return (json.dumps({"format": format, "written": written, **fields}) + "\n").encode()


def parse(content: bytes, *, name: str, format: int, size_max_bytes: int, now: Stamp) -> Mapping[str, Any]:  # noqa: A002
    """The fields of a file's content, which is of this boot.

    Raises:
        KeptError: it is torn, of another format or another boot, or of a time that has not come.
    """
    if len(content) > size_max_bytes:
        raise KeptError(f"{name} is over {size_max_bytes} bytes: remove it")
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise KeptError(f"{name} is not whole JSON ({error}): remove it") from None
    if not isinstance(found, Mapping) or found.get("format") != format:
        raise KeptError(f"{name} is not of format {format}: remove it")
    written = found.get("written")
    if not isinstance(written, Mapping) or not is_seconds(written.get("boottime_s")):
        raise KeptError(f"{name} does not tell when it was written: remove it")
    if written.get("boot_id") != now.boot_id:
        raise KeptError(f"{name} is of another boot: whatever ran then has ended")
    if written["boottime_s"] > now.boottime_s:
        raise KeptError(f"{name} was written {written['boottime_s'] - now.boottime_s:.0f} s from now: remove it")
    return found


def is_seconds(found: object) -> bool:
    """Whether it is a time since boot."""
    return isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found <= BOOTTIME_MAX_S


def is_incarnation(found: object) -> bool:
    """Whether it may be the incarnation of a container."""
    return isinstance(found, str) and 1 <= len(found) <= INCARNATION_MAX
