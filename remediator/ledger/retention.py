"""What the ledger forgets: what has been over for long, and too much of what came to nothing. In small bites.

Of an episode that is open, or of which anything is owed, nothing goes. An alert that was accepted and that nobody has
taken up for as long, for its host's executor is gone, is abandoned first, with that on record, and goes later. That
something was done is never forgotten: the keys of intents outlive them, for a container that could not be stopped may
still run, and is not freed a second time. Numbers are not given anew: the newest of each stays. SQLite uses the pages
that are freed for what comes next; its file does not grow again before they are full, and does not shrink.
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
    not_,
    or_,
    select,
    true,
    update,
)

from gpuwarden.db.transactions import upsert
from remediator.ledger.schema import ALERTS, CAPTURES, EPISODES, INTENTS, JOURNAL, ORDERS, RUN_DECISIONS, SPENT
from remediator.plan import OVER
from remediator.reasons import Reason

EPISODES_AT_ONCE: Final = 50
"""Episodes that are forgotten in one transaction, at most."""

BITES: Final[dict[Table, int]] = {CAPTURES: 10, JOURNAL: 500, RUN_DECISIONS: 500, ALERTS: 500, ORDERS: 500}
"""Rows of each table that are deleted in one transaction, at most: whoever else writes waits no longer than for these.

A capture is large (256 KiB, `--capture-max-bytes`).
"""

ASIDE_MAX: Final = 10_000
"""So many refused alerts are kept, and so many resolved ones that found nothing open, the newest: whoever may call the
webhook could fill the disk with them."""

ABANDONED_S: Final = 30 * 86400.0
"""So much older than anything else an alert is when it goes that was abandoned, seconds: so long that is on record."""

ASIDE_BITE: Final = 50_000
"""So many of them are deleted at a time, at most: more than one transaction ever adds."""


def matters(now: float | BindParameter[float]) -> ColumnElement[bool]:
    """Whether an order may still matter, to whatever episode; what answers one episode is read with that one."""
    undo = ORDERS.c.topic.not_in(("approval", "pause"))
    newest = select(func.max(ORDERS.c.order_id)).where(undo).group_by(ORDERS.c.topic, ORDERS.c.host, ORDERS.c.remedy)
    # What ends a pause ahead of its time has that time too.
    pauses = and_(ORDERS.c.topic == "pause", or_(ORDERS.c.until > now, ORDERS.c.until.is_(None)))
    return or_(ORDERS.c.order_id.in_(newest), pauses)


def is_due(connection: Connection, *, before: float) -> bool:
    """Whether there is anything to forget."""
    return bool(
        _episodes(connection, before) or _aside(connection, before, 1) or connection.scalar(_orders(before).limit(1))
    )


def forget_some(connection: Connection, *, before: float) -> int:
    """Forget a bite of what was over before then, Unix seconds; how many rows, and 0 once there is nothing left."""
    if episodes := _episodes(connection, before):
        return _forget_episodes(connection, episodes)
    if alerts := _aside(connection, before, BITES[ALERTS]):
        return connection.execute(delete(ALERTS).where(ALERTS.c.alert_id.in_(alerts))).rowcount
    orders = list(connection.scalars(_orders(before).limit(BITES[ORDERS])))
    return connection.execute(delete(ORDERS).where(ORDERS.c.order_id.in_(orders))).rowcount if orders else 0


def untaken(connection: Connection, *, before: float) -> list[int]:
    """Of the oldest alerts that no executor has taken the numbers of those that came before then.

    Only what is oldest is looked at: of a host that is gone there may be many, and most of them too young.
    """
    new = select(ALERTS.c.alert_id, ALERTS.c.received_at).where(ALERTS.c.state == "new")
    oldest = connection.execute(new.order_by(ALERTS.c.alert_id).limit(BITES[ALERTS]))
    return [row.alert_id for row in oldest if row.received_at < before]


def abandon_some(connection: Connection, *, before: float, now: float) -> Counter[str]:
    """Abandon a bite of them; how many of each host. One that an executor takes meanwhile is that one's."""
    message = (
        f"its host's executor did not take it up within {(now - before) / 86400:g} days: where the host is there "
        "still, start `gpuwarden remediator execute` on it, and Alertmanager tells again what fires"
    )
    abandon = (
        update(ALERTS)
        .where(ALERTS.c.alert_id.in_(untaken(connection, before=before)), ALERTS.c.state == "new")
        .values(state="abandoned", reason=Reason.ABANDONED, message=message)
    )
    return Counter(connection.scalars(abandon.returning(ALERTS.c.host)))


def keep_newest(connection: Connection, state: str) -> None:
    """Of the alerts of a state that came to nothing, delete those that `ASIDE_MAX` newer ones have followed."""
    of_it = select(ALERTS.c.alert_id).where(ALERTS.c.state == state)
    last = of_it.order_by(ALERTS.c.alert_id.desc()).offset(ASIDE_MAX).limit(1).scalar_subquery()
    # Nobody waits for another who is at it.
    rest = of_it.where(ALERTS.c.alert_id <= last).order_by(ALERTS.c.alert_id).limit(ASIDE_BITE)
    rest = rest.with_for_update(skip_locked=True)
    connection.execute(delete(ALERTS).where(ALERTS.c.alert_id.in_(rest)))


def is_spent(connection: Connection, kind: str, key: str) -> bool:
    """Whether something was promised to this target, though it may be forgotten what.

    In this order: on PostgreSQL a key may move from the one table to the other in between.
    """
    for table, its in ((INTENTS, INTENTS.c.retired.is_(None)), (SPENT, true())):
        found = select(literal(1)).where(table.c.kind == kind, table.c.key == key, its)
        if connection.scalar(found) is not None:
            return True
    return False


def _episodes(connection: Connection, before: float) -> list[int]:
    newest = select(func.max(EPISODES.c.episode_id)).scalar_subquery()
    owes = exists().where(INTENTS.c.episode_id == EPISODES.c.episode_id, INTENTS.c.stage.not_in(OVER))
    due = EPISODES.c.closed_at < before, EPISODES.c.episode_id < newest, not_(owes)
    oldest = select(EPISODES.c.episode_id).where(*due).order_by(EPISODES.c.closed_at).limit(EPISODES_AT_ONCE)
    return list(connection.scalars(oldest))


def _forget_episodes(connection: Connection, episodes: list[int]) -> int:
    """What belongs to them first; they themselves, with their intents, once nothing else does."""
    gone = 0
    for table in (CAPTURES, JOURNAL, RUN_DECISIONS, ALERTS):
        (number,) = table.primary_key
        bite = select(number).where(table.c.episode_id.in_(episodes)).limit(BITES[table])
        count = connection.execute(delete(table).where(number.in_(bite))).rowcount
        gone += count
        if count == BITES[table]:
            return gone
    theirs = INTENTS.c.episode_id.in_(episodes)
    spent = select(INTENTS.c.kind, INTENTS.c.key).where(theirs, INTENTS.c.retired.is_(None))
    connection.execute(upsert(connection, SPENT).from_select(["kind", "key"], spent).on_conflict_do_nothing())
    gone += connection.execute(delete(INTENTS).where(theirs)).rowcount
    return gone + connection.execute(delete(EPISODES).where(EPISODES.c.episode_id.in_(episodes))).rowcount


def _aside(connection: Connection, before: float, limit: int) -> list[int]:
    """Of the oldest alerts that came to nothing those that are old enough."""
    newest = connection.scalar(select(func.max(ALERTS.c.alert_id)))
    found: list[int] = []
    for state, until in (("refused", before), ("idle", before), ("abandoned", before - ABANDONED_S)):
        its = select(ALERTS.c.alert_id, ALERTS.c.received_at).where(ALERTS.c.state == state)
        oldest = connection.execute(its.order_by(ALERTS.c.alert_id).limit(limit))
        found += [row.alert_id for row in oldest if row.received_at < until and row.alert_id != newest]
    return found[:limit]


def _orders(before: float) -> Select[tuple[int]]:
    is_open = select(EPISODES.c.episode_id).where(EPISODES.c.closed_at.is_(None))
    answers = and_(ORDERS.c.topic == "approval", ORDERS.c.episode_id.in_(is_open))
    return select(ORDERS.c.order_id).where(ORDERS.c.at < before, not_(matters(before)), not_(answers))
