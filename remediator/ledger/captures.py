"""Captures of processes before their stop."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, exists, select

from gpuwarden.db.transactions import reading, upsert, writing
from remediator.ledger.database import LedgerPart
from remediator.ledger.journal import write
from remediator.ledger.schema import CAPTURES, EPISODES
from remediator.plan import Episode

CAPTURES_MAX: Final = 1000
"""Maximum captures kept; at 256 KiB each, 250 MiB."""


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A new capture. `document` is described in `remediator.capture.capture`."""

    armed: bool
    took_s: float
    document: Mapping[str, Any]

    @property
    def message(self) -> str:
        """A summary in one sentence."""
        of = self.document
        threads = [thread for process in of["processes"] for thread in process["seen"]]
        stacks = sum("python" in thread for thread in threads)
        seen = f"processes: {len(of['processes'])}, threads: {len(threads)}, Python stacks: {stacks}"
        drawn = f"curves: {len(of['curves'])}"
        return "; ".join(
            [f"{seen}, {drawn}", f"took {self.took_s:.1f} s", *([of["cut_short"]] if of["cut_short"] else [])]
        )


@dataclass(frozen=True, kw_only=True)
class SavedCapture:
    """A stored capture. `at` is Unix seconds."""

    at: float
    host: str | None
    document: Mapping[str, Any]


class Captures(LedgerPart):
    """Captures of processes before their stop."""

    def has(self, episode: Episode) -> bool:
        """Whether the restart of an episode, or its dry run, has a capture."""
        with reading(self._engine) as connection:
            return connection.scalar(select(CAPTURES.c.capture_id).where(*_for_restart(episode))) is not None

    def save(self, episode: Episode, captured: Capture, *, now: float) -> bool:
        """Save a capture; false if one is already stored."""
        row = {"episode_id": episode.episode_id, "at": now, "host": self._host, "document": captured.document}
        row["intent_id"] = None if episode.free is None else episode.free.intent_id
        with writing(self._engine) as connection:
            keep = upsert(connection, CAPTURES).values(**row).on_conflict_do_nothing()
            if connection.scalar(keep.returning(CAPTURES.c.capture_id)) is None:
                return False
            # Keep those of open episodes: they prevent a second capture.
            closed = exists().where(EPISODES.c.episode_id == CAPTURES.c.episode_id, EPISODES.c.closed_at.is_not(None))
            newest = select(CAPTURES.c.capture_id).order_by(CAPTURES.c.capture_id.desc()).limit(CAPTURES_MAX)
            connection.execute(delete(CAPTURES).where(CAPTURES.c.capture_id.not_in(newest), closed))
            write(connection, self._host, episode.episode_id, "saw", "capture", captured.message, now)
            return True

    def of_episode(self, episode_id: int) -> list[SavedCapture]:
        """List the captures of an episode, oldest first."""
        found = select(CAPTURES.c.at, CAPTURES.c.host, CAPTURES.c.document).where(CAPTURES.c.episode_id == episode_id)
        with reading(self._engine) as connection:
            rows = connection.execute(found.order_by(CAPTURES.c.capture_id))
            return [SavedCapture(at=row.at, host=row.host, document=row.document) for row in rows]


def _for_restart(episode: Episode) -> list[ColumnElement[bool]]:
    if episode.free is not None:
        return [CAPTURES.c.intent_id == episode.free.intent_id]
    return [CAPTURES.c.episode_id == episode.episode_id, CAPTURES.c.intent_id.is_(None)]
