"""Which servers have answered, by their containers' incarnations, in a file that outlives the exporter.

`<--state-dir>/answered.json`, one JSON object of at most `SIZE_MAX_BYTES`, UTF-8, replaced whole by rename:

    {"format": 1,
     "written": {"boottime_s": CLOCK_BOOTTIME, "boot_id": /proc/sys/kernel/random/boot_id, "unix_s": since 1970},
     "answered": ["<incarnation>", ...]}       at most ANSWERED_MAX, those that were seen last at the end

It arms: whoever could write it could have a server restarted that only loads. So it is believed only where this
process's own user owns it, nobody else may write it, and it was written in this boot, at a time that has passed. What
runs after a boot is another incarnation anyway, so nothing has to reach the disk, and nothing is synced.
"""

import json
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from gpuwarden import clock
from gpuwarden.errors import GpuwardenError
from gpuwarden.statefile import Stamp

NAME: Final = "answered.json"
FORMAT: Final = 1

ANSWERED_MAX: Final = 1024
"""Incarnations that are kept. Those of one that has ended are never seen again, and make room in time."""

INCARNATION_MAX: Final = 256
"""Characters of one; Docker's and Podman's, an id and a time, have about a hundred."""

SIZE_MAX_BYTES: Final = 2**19
"""More than `ANSWERED_MAX` of the longest, bytes."""

BOOTTIME_MAX_S: Final = 1e12
"""No host has been up for longer, seconds; what is more is no time, nor always a number that can be reckoned with."""


class AnsweredError(GpuwardenError):
    """What is in the file cannot be believed, and why."""


class AnsweredFile:
    """The file in a folder of the exporter's own, which is made where its parent is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / NAME

    def read(self) -> tuple[str, ...]:
        """The incarnations that have answered; none where there is no file.

        Raises:
            AnsweredError: it cannot be believed.
            OSError: it cannot be read.
        """
        try:
            # Neither a link that leads elsewhere nor a pipe that nobody writes.
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return ()
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise AnsweredError(f"{self.path} is no plain file: remove it")
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise AnsweredError(
                    f"{self.path} is of user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; wanted: of user "
                    f"{os.geteuid()}, and writable by nobody else. Remove it, and give the exporter a folder of its own"
                )
            return parse(file.read(SIZE_MAX_BYTES + 1), now=clock.stamp())

    def write(self, answered: Collection[str]) -> None:
        """Replace what is kept.

        Raises:
            OSError: it cannot be written; what was there before stays.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        scratch = self._folder / f".{NAME}.new"
        scratch.unlink(missing_ok=True)  # one that was killed in the middle left it
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(render(answered, now=clock.stamp()))
        except OSError as error:  # it does not say by itself of which file: the disk of that is full
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        scratch.replace(self.path)


def render(answered: Collection[str], *, now: Stamp) -> bytes:
    """What `parse` reads back as these, or as those of them that come last where there are more than fit."""
    written = {"boottime_s": now.boottime_s, "boot_id": now.boot_id, "unix_s": now.unix_s}
    kept = list(answered)[-ANSWERED_MAX:]
    return (json.dumps({"format": FORMAT, "written": written, "answered": kept}) + "\n").encode()


def parse(content: bytes, *, now: Stamp) -> tuple[str, ...]:
    """The incarnations that a file's content tells.

    Raises:
        AnsweredError: it is torn, of another format or another boot, or of a time that has not come.
    """
    if len(content) > SIZE_MAX_BYTES:
        raise AnsweredError(f"{NAME} is over {SIZE_MAX_BYTES} bytes: remove it")
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AnsweredError(f"{NAME} is not whole JSON ({error}): remove it") from None
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        raise AnsweredError(f"{NAME} is not of format {FORMAT}: remove it")
    written, answered = found.get("written"), found.get("answered")
    if not isinstance(written, Mapping) or not _is_seconds(written.get("boottime_s")):
        raise AnsweredError(f"{NAME} does not tell when it was written: remove it")
    if written.get("boot_id") != now.boot_id:
        raise AnsweredError(f"{NAME} is of another boot: whatever ran then has ended")
    if written["boottime_s"] > now.boottime_s:
        raise AnsweredError(f"{NAME} was written {written['boottime_s'] - now.boottime_s:.0f} s from now: remove it")
    if not isinstance(answered, list) or len(answered) > ANSWERED_MAX or not all(map(_is_incarnation, answered)):
        raise AnsweredError(f"{NAME} holds no list of at most {ANSWERED_MAX} incarnations: remove it")
    return tuple(answered)


def _is_seconds(found: object) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found <= BOOTTIME_MAX_S


def _is_incarnation(found: object) -> bool:
    return isinstance(found, str) and 1 <= len(found) <= INCARNATION_MAX
