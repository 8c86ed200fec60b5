"""Which servers have answered, by their containers' incarnations, in a file that outlives the exporter.

`<--state-dir>/answered.json`, as `exporter.state.file` says, of at most `SIZE_MAX_BYTES`, with

    "answered": ["<incarnation>", ...]         at most ANSWERED_MAX, those that were seen last at the end

It arms: whoever could write it could have a server restarted that only loads.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from exporter.state import file as kept
from exporter.state.file import KeptError, KeptFile, is_incarnation
from gpuwarden import clock
from gpuwarden.state_file import Stamp

NAME: Final = "answered.json"
FORMAT: Final = 1

ANSWERED_MAX: Final = 1024
"""Incarnations that are kept. Those of one that has ended are never seen again, and make room in time."""

SIZE_MAX_BYTES: Final = 2**19
"""More than `ANSWERED_MAX` of the longest, bytes."""


class AnsweredFile:
    """The file in a folder of the exporter's own, which is made where its parent is there."""

    def __init__(self, folder: Path) -> None:
        self._file = KeptFile(folder, NAME, size_max_bytes=SIZE_MAX_BYTES)
        self.path = self._file.path

    def read(self) -> tuple[str, ...]:
        """The incarnations that have answered; none where there is no file.

        Raises:
            KeptError: it cannot be believed.
            OSError: it cannot be read.
        """
        content = self._file.content()
        return () if content is None else parse(content, now=clock.stamp())

    def write(self, answered: Collection[str]) -> None:
        """Replace what is kept.

        Raises:
            OSError: it cannot be written; what was there before stays.
        """
        self._file.replace(render(answered, now=clock.stamp()))


def render(answered: Collection[str], *, now: Stamp) -> bytes:
    """What `parse` reads back as these, or as those of them that come last where there are more than fit."""
    return kept.render({"answered": list(answered)[-ANSWERED_MAX:]}, format=FORMAT, now=now)


def parse(content: bytes, *, now: Stamp) -> tuple[str, ...]:
    """The incarnations that a file's content tells.

    Raises:
        KeptError: it is torn, of another format or another boot, or of a time that has not come.
    """
    found = kept.parse(content, name=NAME, format=FORMAT, size_max_bytes=SIZE_MAX_BYTES, now=now)
    answered = found.get("answered")
    if not isinstance(answered, list) or len(answered) > ANSWERED_MAX or not all(map(is_incarnation, answered)):
        raise KeptError(f"{NAME} holds no list of at most {ANSWERED_MAX} incarnations: remove it")
    return tuple(answered)
