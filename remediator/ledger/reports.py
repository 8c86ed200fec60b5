"""Reports for operators and metrics. Read only."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    func,
    literal_column,
    or_,
    select,
    true,
    union,
)

from gpuwarden.db.rows import converted, readable
from gpuwarden.db.transactions import reading
from gpuwarden.fields import made_from
from remediator.ledger import export_rows
from remediator.ledger.counters import Totals, count_totals
from remediator.ledger.database import LedgerPart
from remediator.ledger.journal import Entry, read_entry
from remediator.ledger.recent import orders_in_force
from remediator.ledger.schema import ACTED, EPISODES, JOURNAL
from remediator.plan import Outcome


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
class JournalLine:
    """A journal entry with its episode."""

    entry_id: int
    entry: Entry
    episode: EpisodeHistory


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


@dataclass(frozen=True, kw_only=True)
class Would:
    """An action that a dry run recorded: first time and outcome."""

    episode_id: int
    at: float
    host: str
    worker: str
    message: str
    outcome: str | None


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Counts since a time: closed episodes by outcome, open ones by wait, steps by act and step."""

    outcomes: Mapping[str, int]
    waiting: Mapping[str, int]
    steps: Mapping[tuple[str, str], int]
    would: Sequence[Would]


class Reports(LedgerPart):
    """Reports for operators and metrics. Read only."""

    def newest(self, *, last: int = 50) -> list[EpisodeHistory]:
        """List the newest episodes, oldest first, without journal."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(EPISODES).order_by(EPISODES.c.episode_id.desc()).limit(last)).all()
            return list(readable(reversed(rows), _history))

    def get(self, episode_id: int) -> EpisodeHistory | None:
        """Read one episode with its journal."""
        with reading(self._engine) as connection:
            row = connection.execute(select(EPISODES).where(EPISODES.c.episode_id == episode_id)).one_or_none()
            if row is None:
                return None
            lines = select(JOURNAL).where(JOURNAL.c.episode_id == episode_id).order_by(JOURNAL.c.entry_id)
            return _history(row, tuple(readable(connection.execute(lines), read_entry)))

    def last_entry(self) -> int:
        """The number of the newest journal entry; 0 without one."""
        with reading(self._engine) as connection:
            return connection.scalar(select(func.max(JOURNAL.c.entry_id))) or 0

    def journal_after(self, entry_id: int, *, limit: int = 500) -> list[JournalLine]:
        """List the next journal entries of all episodes, oldest first."""
        after = select(JOURNAL).where(JOURNAL.c.entry_id > entry_id).order_by(JOURNAL.c.entry_id).limit(limit)
        with reading(self._engine) as connection:
            rows = connection.execute(after).all()
            its = select(EPISODES).where(EPISODES.c.episode_id.in_({row.episode_id for row in rows}))
            episodes = {each.episode_id: each for each in readable(connection.execute(its), _history)} if rows else {}
            rows = [row for row in rows if row.episode_id in episodes]
            return list(readable(rows, lambda row: _journal_line(row, episodes[row.episode_id])))

    def export(
        self, *, since: float = 0.0, until: float | None = None, captures: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Export every episode that was open between two times, oldest first. See `remediator.ledger.export_rows`.

        Each page is its own transaction, so that a long export does not block cleanup.
        """
        with reading(self._engine) as connection:
            episodes = export_rows.open_between(connection, since=since, until=until)
        for start in range(0, len(episodes), export_rows.PAGE):
            its = episodes[start : start + export_rows.PAGE]
            with reading(self._engine) as connection:
                page = export_rows.page(connection, its, captures=captures)
            yield from page

    def totals(self, host: str) -> Totals:
        """Count one host's part of the ledger."""
        now = self._clock.now()
        with reading(self._engine) as connection:
            return count_totals(connection, host, orders=orders_in_force(connection, now), now=now)

    def list_held(self, *, host: str | None = None) -> list[HeldEpisode]:
        """List the waits of open episodes, oldest first."""
        with reading(self._engine) as connection:
            return held_episodes(connection, host)

    def closed_since(
        self, since: float, *, outcomes: Collection[Outcome], host: str | None = None
    ) -> list[EpisodeHistory]:
        """List the episodes that closed with these outcomes since a time, oldest first, without journal."""
        its = EPISODES.c.outcome.in_(sorted(outcomes)), EPISODES.c.closed_at >= since, _of_host(host)
        with reading(self._engine) as connection:
            rows = connection.execute(select(EPISODES).where(*its).order_by(EPISODES.c.closed_at))
            return list(readable(rows, _history))

    def activity_since(self, since: float, *, host: str | None = None) -> Activity:
        """Count the episodes that were open since a time, and the steps since then."""
        # Expressions: SQLite would group by an index and read all episodes.
        ends = func.coalesce(EPISODES.c.outcome, "")
        closed = select(ends, func.count()).where(EPISODES.c.closed_at >= since, _of_host(host))
        waits = func.coalesce(EPISODES.c.wait_reason, "")
        waiting = select(waits, func.count()).where(EPISODES.c.closed_at.is_(None), _of_host(host))
        acts = JOURNAL.join(EPISODES, EPISODES.c.episode_id == JOURNAL.c.episode_id) if host else JOURNAL
        of_act = and_(literal_column(ACTED), JOURNAL.c.at >= since, JOURNAL.c.act.in_(("did", "failed")))
        steps = select(JOURNAL.c.act, JOURNAL.c.step, func.count()).select_from(acts).where(of_act, _of_host(host))
        with reading(self._engine) as connection:
            return Activity(
                outcomes=dict(_pairs(connection, closed.group_by(ends))),
                waiting=dict(_pairs(connection, waiting.group_by(waits))),
                steps={
                    (row[0], row[1]): row[2]
                    for row in connection.execute(steps.group_by(JOURNAL.c.act, JOURNAL.c.step))
                },
                would=[made_from(row, Would) for row in connection.execute(_would(since, host))],
            )


def _would(since: float, host: str | None) -> Select[Any]:
    """The first recorded act of each dry run since a time, and of those that are open."""
    would = and_(literal_column(ACTED), JOURNAL.c.act == "would")
    lately = select(JOURNAL.c.episode_id).where(would, JOURNAL.c.at >= since)
    still_open = select(EPISODES.c.episode_id).where(EPISODES.c.closed_at.is_(None))
    first = (
        select(func.min(JOURNAL.c.entry_id).label("entry_id"))
        .where(JOURNAL.c.act == "would", JOURNAL.c.episode_id.in_(union(lately, still_open)))
        .group_by(JOURNAL.c.episode_id)
        .subquery("first_act")
    )
    return (
        select(JOURNAL.c.at, JOURNAL.c.message, *(EPISODES.c[n] for n in ("episode_id", "host", "worker", "outcome")))
        .select_from(first)
        .join(JOURNAL, JOURNAL.c.entry_id == first.c.entry_id)
        .join(EPISODES, EPISODES.c.episode_id == JOURNAL.c.episode_id)
        .where(or_(JOURNAL.c.at >= since, EPISODES.c.closed_at.is_(None)), _of_host(host))
        .order_by(EPISODES.c.episode_id)
    )


def _of_host(host: str | None) -> ColumnElement[bool]:
    return true() if host is None else EPISODES.c.host == host


def _pairs(connection: Connection, counted: Select[Any, int]) -> list[tuple[str, int]]:
    return [(str(row[0]), int(row[1])) for row in connection.execute(counted)]


def held_episodes(connection: Connection, host: str | None) -> list[HeldEpisode]:
    """List the waits of open episodes of one host or all, oldest first."""
    found = select(EPISODES).where(EPISODES.c.closed_at.is_(None))
    if host is not None:
        found = found.where(EPISODES.c.host == host)
    return list(readable(connection.execute(found.order_by(EPISODES.c.episode_id)), _held))


def _held(row: Row[Any]) -> HeldEpisode:
    return converted(
        row,
        EPISODES,
        lambda row: made_from(
            row,
            HeldEpisode,
            reason=row.wait_reason or "",
            message=row.wait_message or "",
            since=row.opened_at if row.wait_since is None else row.wait_since,
        ),
    )


def _journal_line(row: Row[Any], episode: EpisodeHistory) -> JournalLine:
    return JournalLine(entry_id=row.entry_id, entry=read_entry(row), episode=episode)


def _history(row: Row[Any], entries: tuple[Entry, ...] = ()) -> EpisodeHistory:
    return converted(row, EPISODES, lambda row: made_from(row, EpisodeHistory, entries=entries))
