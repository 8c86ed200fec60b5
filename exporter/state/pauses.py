"""From when until when containers were seen paused, by incarnation, in a file that outlives the exporter.

`<--state-dir>/paused.json`, as `exporter.state.file` says, of at most `SIZE_MAX_BYTES`, with

    "paused": {"<incarnation>": [[from, until], ...], ...}    CLOCK_BOOTTIME seconds, until > from, none from after it
                                               was written; at most INCARNATIONS_MAX, PAUSES_MAX of each, the newest

A job cannot tell a pause from a step that took so long. An exporter that has forgotten one allows a wedged job twenty
times as long as that was. And whoever could write the file could have a slow job restarted.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import structlog

from exporter.evidence.container_history import PAUSES_MAX
from exporter.model.readings import ContainerEvidence
from exporter.state import file as kept
from exporter.state.file import KeptError, KeptFile, is_incarnation, is_seconds
from gpuwarden import clock
from gpuwarden.errors import GpuwardenError
from gpuwarden.state_file import Stamp

log: Final = structlog.get_logger("exporter")

NAME: Final = "paused.json"
FORMAT: Final = 1

INCARNATIONS_MAX: Final = 256
"""Incarnations that are kept. Those of one that has ended are never seen again, and make room in time."""

SIZE_MAX_BYTES: Final = 2**20
"""More than `INCARNATIONS_MAX` with `PAUSES_MAX` pauses each, bytes."""

WRITTEN_APART_S: Final = 10.0
"""While somebody is paused, whose pause grows with each look, it is written no more often, seconds."""

Spans = tuple[tuple[float, float], ...]
"""From when until when a container was paused, CLOCK_BOOTTIME seconds."""


class Kept(Protocol):
    """Where pauses are kept beyond the process."""

    def read(self) -> Mapping[str, Spans]:
        """What is kept."""

    def write(self, paused: Mapping[str, Spans]) -> None:
        """Replace it."""


class PausedFile:
    """The file in a folder of the exporter's own, which is made where its parent is there."""

    def __init__(self, folder: Path) -> None:
        self._file = KeptFile(folder, NAME, size_max_bytes=SIZE_MAX_BYTES)
        self.path = self._file.path

    def read(self) -> Mapping[str, Spans]:
        """The pauses of each incarnation; none where there is no file.

        Raises:
            KeptError: it cannot be believed.
            OSError: it cannot be read.
        """
        content = self._file.content()
        return {} if content is None else parse(content, now=clock.stamp())

    def write(self, paused: Mapping[str, Spans]) -> None:
        """Replace what is kept.

        Raises:
            OSError: it cannot be written; what was there before stays.
        """
        self._file.replace(render(paused, now=clock.stamp()))


class Pauses:
    """The pauses of each incarnation that have been seen, by this exporter and, where they are `kept`, those before."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        # In order, those that were seen last at the end: incarnations that have ended make room, and none comes back.
        self._seen: dict[str, Spans] = {}
        self._written: Mapping[str, Spans] = {}
        self._written_s: float | None = None
        try:
            self._seen = dict(kept.read())
        except (GpuwardenError, OSError) as error:
            log.warning("which containers were paused before is not known", because=str(error))
        self._written = dict(self._seen)

    def of(self, incarnation: str) -> Spans:
        """What is known of one that is seen for the first time."""
        return self._seen.get(incarnation, ())

    def keep(self, found: Iterable[ContainerEvidence], *, now_s: float) -> None:
        """Take in what one look found, and write it down where that has changed.

        Raises:
            OSError: it cannot be written now; it is known on, and the next call tries again.
        """
        grows = False
        for each in found:
            if each.pauses:
                incarnation = each.container.incarnation
                self._seen.pop(incarnation, None)
                self._seen[incarnation] = each.pauses
                grows |= each.container.paused
        for incarnation in list(self._seen)[:-INCARNATIONS_MAX]:
            del self._seen[incarnation]
        if self._seen == self._written:
            return
        if grows and self._written_s is not None and 0 <= now_s - self._written_s < WRITTEN_APART_S:
            return
        self._kept.write(self._seen)
        self._written, self._written_s = dict(self._seen), now_s


def render(paused: Mapping[str, Spans], *, now: Stamp) -> bytes:
    """What `parse` reads back as these, or as those of them that come last where there are more than fit."""
    told = {each: list(spans)[-PAUSES_MAX:] for each, spans in list(paused.items())[-INCARNATIONS_MAX:]}
    return kept.render({"paused": told}, format=FORMAT, now=now)


def parse(content: bytes, *, now: Stamp) -> Mapping[str, Spans]:
    """The pauses that a file's content tells.

    Raises:
        KeptError: it is torn, of another format or another boot, or of a time that has not come.
    """
    found = kept.parse(content, name=NAME, format=FORMAT, size_max_bytes=SIZE_MAX_BYTES, now=now)
    paused, until_s = found.get("paused"), found["written"]["boottime_s"]
    if not isinstance(paused, Mapping) or len(paused) > INCARNATIONS_MAX or not all(map(is_incarnation, paused)):
        raise KeptError(f"{NAME} does not tell of at most {INCARNATIONS_MAX} incarnations: remove it")
    return {incarnation: _spans(told, until_s) for incarnation, told in paused.items()}


def _spans(told: object, until_s: float) -> Spans:
    """Pauses that follow one another and were over, or went on, as it was written.

    Raises:
        KeptError: they are none.
    """
    if not isinstance(told, list) or len(told) > PAUSES_MAX:
        raise KeptError(f"{NAME} holds no list of at most {PAUSES_MAX} pauses: remove it")
    spans = []
    before_s = 0.0
    for each in told:
        if not (isinstance(each, list) and len(each) == 2 and all(map(is_seconds, each))):
            raise KeptError(f"{NAME} holds something else than pauses: remove it")
        from_s, to_s = map(float, each)
        if not before_s <= from_s < to_s <= until_s:
            raise KeptError(f"{NAME} holds pauses that cannot have been: remove it")
        spans.append((from_s, to_s))
        before_s = to_s
    return tuple(spans)
