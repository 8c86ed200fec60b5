"""Export episodes with all their rows, in pages.

An episode is its columns, and `alerts`, `journal`, `intents`, `run_decisions` and optionally `captures`: lists of rows,
oldest first, without ids.
"""

from typing import Any, Final

from sqlalchemy import Connection, Table, or_, select

from remediator.ledger.schema import ALERTS, CAPTURES, EPISODES, INTENTS, JOURNAL, RUN_DECISIONS

PAGE: Final = 20
"""Maximum episodes in one transaction and in memory."""

_LEFT_OUT: Final = frozenset({"episode_id", "alert_id", "entry_id", "intent_id", "capture_id", "decision_id"})

_KNOWN_OF_ALERTS: Final = frozenset({"state", "reason"})
"""Columns that are equal for every alert of an episode."""


def page(
    connection: Connection, *, after: int, since: float, until: float | None, captures: bool
) -> list[dict[str, Any]]:
    """Read the next episodes after id `after` that were open between two times, oldest first."""
    its = [EPISODES.c.episode_id > after, or_(EPISODES.c.closed_at.is_(None), EPISODES.c.closed_at >= since)]
    if until is not None:
        its.append(EPISODES.c.opened_at <= until)
    rows = connection.execute(select(EPISODES).where(*its).order_by(EPISODES.c.episode_id).limit(PAGE)).mappings()
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
