"""Reports for operators and metrics. Read only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, or_, select

from gpuwarden.db.transactions import reading
from gpuwarden.fields import made_from
from remediator.ledger import export_rows
from remediator.ledger.counters import Totals, count_totals
from remediator.ledger.database import LedgerPart
from remediator.ledger.journal import Entry, read_entry
from remediator.ledger.recent import orders_in_force
from remediator.ledger.schema import EPISODES, JOURNAL


@dataclass(frozen=True, kw_only=True)
class EpisodeHistory:
    """One episode with its journal."""

    episode_id: int
    remedy: str
    condition: str
    host: str
    worker: str
    job_id: int | None
    attempt: int | None
    opened_at: float
    closed_at: float | None
    outcome: str | None
    reason: str | None
    message: str | None
    wait_reason: str | None = None
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeldEpisode:
    """The current wait of an open episode.

    Without a wait, `reason` and `message` are "" and `since` is when the episode opened.
    """

    episode_id: int
    host: str
    worker: str
    remedy: str
    opened_at: float
    reason: str
    message: str
    since: float


class Reports(LedgerPart):
    """Reports for operators and metrics. Read only."""

    def newest(self, *, last: int = 50) -> list[EpisodeHistory]:
        """List the newest episodes, oldest first, without journal."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(EPISODES).order_by(EPISODES.c.episode_id.desc()).limit(last)).all()
            return [_history(row) for row in reversed(rows)]

    def get(self, episode_id: int) -> EpisodeHistory | None:
        """Read one episode with its journal."""
        with reading(self._engine) as connection:
            row = connection.execute(select(EPISODES).where(EPISODES.c.episode_id == episode_id)).one_or_none()
            if row is None:
                return None
            lines = select(JOURNAL).where(JOURNAL.c.episode_id == episode_id).order_by(JOURNAL.c.entry_id)
            return _history(row, tuple(read_entry(line) for line in connection.execute(lines)))

    def export(
        self, *, since: float = 0.0, until: float | None = None, captures: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Export every episode that was open between two times, oldest first. See `remediator.ledger.export_rows`.

        Each page is its own transaction, so that a long export does not block cleanup.
        """
        after = 0
        while True:
            with reading(self._engine) as connection:
                page = export_rows.page(connection, after=after, since=since, until=until, captures=captures)
            if not page:
                return
            yield from page
            after = page[-1]["episode_id"]

    def totals(self, host: str) -> Totals:
        """Count one host's part of the ledger."""
        now = self._clock.now()
        with reading(self._engine) as connection:
            return count_totals(connection, host, orders=orders_in_force(connection, now), now=now)

    def list_held(self, *, host: str | None = None) -> list[HeldEpisode]:
        """List the waits of open episodes, oldest first."""
        with reading(self._engine) as connection:
            return held_episodes(connection, host)

    def since(self, since: float, *, host: str | None = None) -> list[EpisodeHistory]:
        """List the episodes open since a time with their journals, oldest first."""
        its = [or_(EPISODES.c.closed_at.is_(None), EPISODES.c.closed_at >= since)]
        if host is not None:
            its.append(EPISODES.c.host == host)
        lines = select(JOURNAL).where(JOURNAL.c.episode_id.in_(select(EPISODES.c.episode_id).where(*its)))
        entries: dict[int, list[Entry]] = {}
        with reading(self._engine) as connection:
            for line in connection.execute(lines.order_by(JOURNAL.c.entry_id)):
                entries.setdefault(line.episode_id, []).append(read_entry(line))
            rows = connection.execute(select(EPISODES).where(*its).order_by(EPISODES.c.episode_id))
            return [_history(row, tuple(entries.get(row.episode_id, ()))) for row in rows]


def held_episodes(connection: Connection, host: str | None) -> list[HeldEpisode]:
    """List the waits of open episodes of one host or all, oldest first."""
    found = select(EPISODES).where(EPISODES.c.closed_at.is_(None))
    if host is not None:
        found = found.where(EPISODES.c.host == host)
    return [
        made_from(
            row,
            HeldEpisode,
            reason=row.wait_reason or "",
            message=row.wait_message or "",
            since=row.opened_at if row.wait_since is None else row.wait_since,
        )
        for row in connection.execute(found.order_by(EPISODES.c.episode_id))
    ]


def _history(row: Row[Any], entries: tuple[Entry, ...] = ()) -> EpisodeHistory:
    return made_from(row, EpisodeHistory, entries=entries)
