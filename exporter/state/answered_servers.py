"""Servers that have answered a probe, in the format of `exporter.state.file`: `<--state-dir>/answered.json`.

"answered": ["<incarnation>", ...]         at most ANSWERED_MAX, the newest last
"""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from exporter.state import file as persisted
from exporter.state.file import PersistedFile, PersistedFileError, is_incarnation
from gpuwarden import clock
from gpuwarden.state_file import Stamp

NAME: Final = "answered.json"
FORMAT: Final = 1

ANSWERED_MAX: Final = 1024
"""Incarnations in the file; the oldest are dropped first."""

SIZE_MAX_BYTES: Final = 2**19


class AnsweredFile:
    """The file."""

    def __init__(self, folder: Path) -> None:
        self._file = PersistedFile(folder, NAME, size_max_bytes=SIZE_MAX_BYTES)
        self.path = self._file.path

    def read(self) -> tuple[str, ...]:
        """Read the incarnations.

        Raises:
            PersistedFileError: the file is invalid.
            OSError: it cannot be read.
        """
        content = self._file.content()
        return () if content is None else parse(content, now=clock.stamp())

    def write(self, answered: Collection[str]) -> None:
        """Replace the incarnations.

        Raises:
            OSError: the disk refuses it.
        """
        self._file.replace(render(answered, now=clock.stamp()))


def render(answered: Collection[str], *, now: Stamp) -> bytes:
    """Encode the last incarnations."""
    return persisted.render({"answered": list(answered)[-ANSWERED_MAX:]}, format=FORMAT, now=now)


def parse(content: bytes, *, now: Stamp) -> tuple[str, ...]:
    """Decode incarnations.

    Raises:
        PersistedFileError: the content is invalid.
    """
    found = persisted.parse(content, name=NAME, format=FORMAT, size_max_bytes=SIZE_MAX_BYTES, now=now)
    answered = found.get("answered")
    if not isinstance(answered, list) or len(answered) > ANSWERED_MAX or not all(map(is_incarnation, answered)):
        raise PersistedFileError(f"{NAME} has no list of at most {ANSWERED_MAX} incarnations: remove it")
    return tuple(answered)
