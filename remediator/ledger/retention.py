"""Deletes old rows, in small batches.

Open episodes and intents stay. An alert that no executor took is first abandoned, and deleted later. The keys of
intents outlive them: a container that could not be stopped is not restarted twice. The newest row of each table stays,
so that ids are not reused.
"""

from collections import Counter
from typing import Final

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    delete,
    exists,
    func,
    literal,
    literal_column,
    not_,
    or_,
    select,
    true,
    update,
)

from gpuwarden.db.transactions import upsert
from remediator.ledger.schema import (
    ALERTS,
    CAPTURES,
    EPISODES,
    INTENTS,
    JOURNAL,
    ORDERS,
    OWED,
    RUN_DECISIONS,
    USED_INTENT_KEYS,
)
from remediator.reasons import Reason

EPISODES_BATCH: Final = 50
"""Maximum episodes deleted in one transaction."""

BATCH_ROWS: Final[dict[Table, int]] = {CAPTURES: 10, JOURNAL: 500, RUN_DECISIONS: 500, ALERTS: 500, ORDERS: 500}
"""Maximum rows deleted in one transaction. A capture is large (256 KiB)."""

UNUSED_ALERTS_MAX: Final = 10_000
"""Maximum refused alerts kept, and maximum alerts without an episode."""

ABANDONED_S: Final = 30 * 86400.0
"""Extra time for which abandoned alerts are kept, seconds."""

UNUSED_ALERTS_BATCH: Final = 50_000
"""Maximum deleted at a time."""


def may_apply(now: float | BindParameter[float]) -> ColumnElement[bool]:
    """Select the orders that may still apply. Answers to an episode are read with that episode."""
    undo = ORDERS.c.topic.not_in(("approval", "pause"))
    newest = select(func.max(ORDERS.c.order_id)).where(undo).group_by(ORDERS.c.topic, ORDERS.c.host, ORDERS.c.remedy)
    # An order that ends a pause early has the same `until`.
    pauses = and_(ORDERS.c.topic == "pause", or_(ORDERS.c.until > now, ORDERS.c.until.is_(None)))
    return or_(ORDERS.c.order_id.in_(newest), pauses)


def has_old_rows(connection: Connection, *, before: float) -> bool:
    """Whether there are old rows."""
    if _closed_episodes(connection, before) or _unused_alerts(connection, before, 1):
        return True
    return bool(connection.scalar(_old_orders(before).limit(1)))


def delete_batch(connection: Connection, *, before: float) -> int:
    """Delete a batch of rows older than a time, Unix seconds. Returns the number, 0 if none is left."""
    if episodes := _closed_episodes(connection, before):
        return _delete_episodes(connection, episodes)
    if alerts := _unused_alerts(connection, before, BATCH_ROWS[ALERTS]):
        return connection.execute(delete(ALERTS).where(ALERTS.c.alert_id.in_(alerts))).rowcount
    orders = list(connection.scalars(_old_orders(before).limit(BATCH_ROWS[ORDERS])))
    return connection.execute(delete(ORDERS).where(ORDERS.c.order_id.in_(orders))).rowcount if orders else 0


def untaken_alerts(connection: Connection, *, before: float) -> list[int]:
    """Ids of the oldest untaken alerts that arrived before a time. Only one batch is checked."""
    new = select(ALERTS.c.alert_id, ALERTS.c.received_at).where(ALERTS.c.state == "new")
    oldest = connection.execute(new.order_by(ALERTS.c.alert_id).limit(BATCH_ROWS[ALERTS]))
    return [row.alert_id for row in oldest if row.received_at < before]


def abandon_batch(connection: Connection, *, before: float, now: float) -> Counter[str]:
    """Abandon a batch of untaken alerts. Returns counts by host."""
    message = (
        f"the executor of its host did not process it within {(now - before) / 86400:g} days: if the host "
        "still exists, start `gpuwarden remediator execute` there; Alertmanager resends firing alerts"
    )
    abandon = (
        update(ALERTS)
        .where(ALERTS.c.alert_id.in_(untaken_alerts(connection, before=before)), ALERTS.c.state == "new")
        .values(state="abandoned", reason=Reason.ABANDONED, message=message)
    )
    return Counter(connection.scalars(abandon.returning(ALERTS.c.host)))


def keep_newest(connection: Connection, state: str) -> None:
    """Delete alerts of a state beyond the newest `UNUSED_ALERTS_MAX`."""
    of_it = select(ALERTS.c.alert_id).where(ALERTS.c.state == state)
    last = of_it.order_by(ALERTS.c.alert_id.desc()).offset(UNUSED_ALERTS_MAX).limit(1).scalar_subquery()
    # Skip rows that another transaction deletes.
    rest = of_it.where(ALERTS.c.alert_id <= last).order_by(ALERTS.c.alert_id).limit(UNUSED_ALERTS_BATCH)
    rest = rest.with_for_update(skip_locked=True)
    connection.execute(delete(ALERTS).where(ALERTS.c.alert_id.in_(rest)))


def is_used(connection: Connection, kind: str, key: str) -> bool:
    """Whether this key was ever used. A key may move from the first table to the second in between."""
    for table, its in ((INTENTS, INTENTS.c.retired.is_(None)), (USED_INTENT_KEYS, true())):
        found = select(literal(1)).where(table.c.kind == kind, table.c.key == key, its)
        if connection.scalar(found) is not None:
            return True
    return False


def _closed_episodes(connection: Connection, before: float) -> list[int]:
    newest = select(func.max(EPISODES.c.episode_id)).scalar_subquery()
    owes = exists().where(INTENTS.c.episode_id == EPISODES.c.episode_id, literal_column(OWED))
    due = EPISODES.c.closed_at < before, EPISODES.c.episode_id < newest, not_(owes)
    oldest = select(EPISODES.c.episode_id).where(*due).order_by(EPISODES.c.closed_at).limit(EPISODES_BATCH)
    return list(connection.scalars(oldest))


def _delete_episodes(connection: Connection, episodes: list[int]) -> int:

    gone = 0
    for table in (CAPTURES, JOURNAL, RUN_DECISIONS, ALERTS):
        (number,) = table.primary_key
        batch = select(number).where(table.c.episode_id.in_(episodes)).limit(BATCH_ROWS[table])
        count = connection.execute(delete(table).where(number.in_(batch))).rowcount
        gone += count
        if count == BATCH_ROWS[table]:
            return gone
    theirs = INTENTS.c.episode_id.in_(episodes)
    spent = select(INTENTS.c.kind, INTENTS.c.key).where(theirs, INTENTS.c.retired.is_(None))
    connection.execute(
        upsert(connection, USED_INTENT_KEYS).from_select(["kind", "key"], spent).on_conflict_do_nothing()
    )
    gone += connection.execute(delete(INTENTS).where(theirs)).rowcount
    return gone + connection.execute(delete(EPISODES).where(EPISODES.c.episode_id.in_(episodes))).rowcount


def _unused_alerts(connection: Connection, before: float, limit: int) -> list[int]:

    newest = connection.scalar(select(func.max(ALERTS.c.alert_id)))
    found: list[int] = []
    for state, until in (("refused", before), ("ignored", before), ("abandoned", before - ABANDONED_S)):
        its = select(ALERTS.c.alert_id, ALERTS.c.received_at).where(ALERTS.c.state == state)
        oldest = connection.execute(its.order_by(ALERTS.c.alert_id).limit(limit))
        found += [row.alert_id for row in oldest if row.received_at < until and row.alert_id != newest]
    return found[:limit]


def _old_orders(before: float) -> Select[tuple[int]]:
    is_open = select(EPISODES.c.episode_id).where(EPISODES.c.closed_at.is_(None))
    answers = and_(ORDERS.c.topic == "approval", ORDERS.c.episode_id.in_(is_open))
    return select(ORDERS.c.order_id).where(ORDERS.c.at < before, not_(may_apply(before)), not_(answers))
