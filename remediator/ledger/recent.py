"""What decides whether something may begin: the orders in force, and what was begun lately."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, func, select

from gpuwarden.fields import made_from
from remediator.ledger import retention
from remediator.ledger.schema import EPISODES, EXECUTORS, INTENTS, ORDERS, RUN_DECISIONS
from remediator.plan import OVER, BlockRun, Kind, LockWorker, Migrate, Stage, Wrangle
from remediator.remedies.guards import (
    RATE_WINDOW_S,
    Act,
    Order,
    Orders,
    Recent,
    Safeguards,
    Wish,
    condemned_run,
    condemned_worker,
    target,
)

WRANGLING: Final[Mapping[type[Wrangle], str]] = {LockWorker: "lock", Migrate: "move", BlockRun: "block"}
"""What is done about runs and their workers, as the journal and `run_decisions` name it."""

NOT_FREED: Final = frozenset({Stage.PLANNED, Stage.WITHDRAWN})
"""Stages of a free at which nothing was done to its container."""

FLEET_FRESH_S: Final = 600.0
"""An executor that has shown no life for longer counts no workers into the fleet, seconds."""

# What each look of an executor asks is put together once: to do so each time took longer than to ask.
_ORDERS: Final = select(ORDERS).where(retention.matters(bindparam("at_now"))).order_by(ORDERS.c.order_id)


def orders_in_force(connection: Connection, now: float) -> Orders:
    """The orders that may still matter."""
    rows = connection.execute(_ORDERS, {"at_now": now})
    return Orders(given=tuple(read_order(row) for row in rows))


def read_order(row: Row[Any]) -> Order:
    """An order of a row."""
    return made_from(row, Order, act=Act(row.act))


def recent_activity(
    connection: Connection, wanted: Wish, orders: Orders, safeguards: Safeguards, *, now: float
) -> Recent:
    """What was begun lately that limits what may begin now."""
    longest_s = max(safeguards.storm_window_s, safeguards.cooldown_s, safeguards.vram_cooldown_s, RATE_WINDOW_S)
    frees = frees_since(connection, since=now - longest_s)
    released_at = orders.released_at() or 0.0
    # A release that seems yet to come is one before the clock was set back: it excuses nothing.
    released_at = released_at if released_at <= now else 0.0
    storm_since = max(now - safeguards.storm_window_s, released_at)
    rate_since = max(now - RATE_WINDOW_S, released_at)
    # Nor does a free that seems yet to come count for longer than it would have.
    storm_until, rate_until = now + safeguards.storm_window_s, now + RATE_WINDOW_S
    targets = {target(row.host, row.data["handle"]) for row in frees if storm_since < row.created_at < storm_until}
    freed_at = [
        row.entered_at
        for row in frees
        if (row.host, row.data["handle"]) == (wanted.host, wanted.handle) and row.stage not in NOT_FREED
    ]
    beside = [
        row.entered_at if row.stage in OVER else now
        for row in frees
        if row.host == wanted.host
        and row.episode_id != wanted.episode_id
        and not wanted.gpus.isdisjoint(row.data.get("gpus", ()))
    ]
    answers = select(ORDERS).where(ORDERS.c.episode_id == wanted.episode_id).order_by(ORDERS.c.order_id.desc())
    answer = connection.execute(answers.limit(1)).one_or_none()
    fleet = select(func.sum(EXECUTORS.c.workers)).where(EXECUTORS.c.beat_at > now - FLEET_FRESH_S)
    return Recent(
        targets=frozenset(targets),
        frees=sum(rate_since < row.created_at < rate_until for row in frees),
        # The nearest to now, either way: one that seems yet to come is of before the clock was set back.
        freed_s_ago=min((now - at for at in freed_at), key=abs, default=None),
        gpu_freed_s_ago=min((now - at for at in beside), key=abs, default=None),
        fleet=connection.scalar(fleet),
        condemned=_condemned(connection, since=storm_since, until=storm_until),
        answer=None if answer is None else read_order(answer),
    )


def _condemned(connection: Connection, *, since: float, until: float) -> frozenset[str]:
    """The workers that were to be locked, and the runs to be blocked, by what was decided between two times."""
    found = (
        select(RUN_DECISIONS, EPISODES.c.worker.label("run"))
        .join(EPISODES, EPISODES.c.episode_id == RUN_DECISIONS.c.episode_id)
        .where(RUN_DECISIONS.c.kind.in_([WRANGLING[LockWorker], WRANGLING[BlockRun]]))
        .where(RUN_DECISIONS.c.decided_at > since, RUN_DECISIONS.c.decided_at < until)
    )
    return frozenset(
        condemned_run(row.run) if row.worker is None else condemned_worker(row.host, row.worker)
        for row in connection.execute(found)
    )


def frees_since(connection: Connection, *, since: float) -> Sequence[Row[Any]]:
    """The frees that were begun or came further since then, without those for which nothing was ever done."""
    its = INTENTS.c.kind == Kind.FREE, INTENTS.c.entered_at > since, INTENTS.c.retired.is_(None)
    return connection.execute(select(INTENTS).where(*its).order_by(INTENTS.c.entered_at)).all()
