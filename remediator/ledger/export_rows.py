"""Export episodes with all their rows, in pages.

An episode is its columns, and `alerts`, `journal`, `intents`, `run_decisions` and optionally `captures`: lists of rows,
oldest first, without ids.
"""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Table, select

from remediator.ledger.schema import ALERTS, CAPTURES, EPISODES, INTENTS, JOURNAL, RUN_DECISIONS

PAGE: Final = 20
"""Maximum episodes in one transaction and in memory."""

_LEFT_OUT: Final = frozenset({"episode_id", "alert_id", "entry_id", "intent_id", "capture_id", "decision_id"})

_KNOWN_OF_ALERTS: Final = frozenset({"state", "reason"})
"""Columns that are equal for every alert of an episode."""


def open_between(connection: Connection, *, since: float, until: float | None) -> list[int]:
    """The ids of the episodes that were open between two times, in order."""
    later = () if until is None else (EPISODES.c.opened_at <= until,)
    # Two queries, so that each reads an index.
    queries = (
        select(EPISODES.c.episode_id).where(its, *later)
        for its in (EPISODES.c.closed_at >= since, EPISODES.c.closed_at.is_(None))
    )
    return sorted(number for query in queries for number in connection.scalars(query))


def page(connection: Connection, episodes: Sequence[int], *, captures: bool) -> list[dict[str, Any]]:
    """Read these episodes, oldest first. A deleted one is left out."""
    its = select(EPISODES).where(EPISODES.c.episode_id.in_(episodes))
    rows = connection.execute(its.order_by(EPISODES.c.episode_id)).mappings()
    found = {row["episode_id"]: dict(row) for row in rows}
    for table in (ALERTS, JOURNAL, INTENTS, RUN_DECISIONS, *((CAPTURES,) if captures else ())):
        for episode in found.values():
            episode[table.name] = []
        for number, row in _of(connection, table, list(found)):
            found[number][table.name].append(row)
    return list(found.values())


def _of(connection: Connection, table: Table, episodes: list[int]) -> list[tuple[int, dict[str, Any]]]:
    rows = connection.execute(
        select(table).where(table.c.episode_id.in_(episodes)).order_by(*table.primary_key)
    ).mappings()
    left_out = _LEFT_OUT | (_KNOWN_OF_ALERTS if table is ALERTS else set())
    return [(row["episode_id"], {name: value for name, value in row.items() if name not in left_out}) for row in rows]
