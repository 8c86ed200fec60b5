"""Orders in force and recent activity, which limit what may begin."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, func, select

from gpuwarden.db.errors import UnreadableRowError
from gpuwarden.db.rows import converted
from gpuwarden.fields import made_from
from remediator.ledger import retention
from remediator.ledger.schema import EPISODES, EXECUTORS, INTENTS, ORDERS, RUN_DECISIONS
from remediator.plan import OVER, BlockRun, Kind, LockWorker, Migrate, Stage, Wrangle
from remediator.remedies.guards import (
    RATE_WINDOW_S,
    Act,
    Order,
    Orders,
    ProposedAction,
    RecentActivity,
    SafetyLimits,
    run_lock_key,
    target,
    worker_lock_key,
)

WRANGLING: Final[Mapping[type[Wrangle], str]] = {LockWorker: "lock", Migrate: "move", BlockRun: "block"}

NOT_RESTARTED: Final = frozenset({Stage.PLANNED, Stage.WITHDRAWN})
"""Stages of a restart before any action on its container."""

FLEET_FRESH_S: Final = 600.0
"""Workers of an executor count into the fleet for this long after its heartbeat, seconds."""

# Built once: building the query took longer than running it.
_ORDERS: Final = select(ORDERS).where(retention.may_apply(bindparam("at_now"))).order_by(ORDERS.c.order_id)


def orders_in_force(connection: Connection, now: float) -> Orders:
    """Read the orders that may still apply."""
    rows = connection.execute(_ORDERS, {"at_now": now})
    return Orders(given=tuple(read_order(row) for row in rows))


def read_order(row: Row[Any]) -> Order:
    """Build an order from its row. An unreadable one holds all actions: it may be a pause."""
    try:
        return converted(row, ORDERS, lambda row: made_from(row, Order, act=Act(row.act)))
    except UnreadableRowError as error:
        return Order(act=Act.PAUSE, at=0.0, who="gpuwarden", reason=str(error), order_id=row.order_id)


def recent_activity(
    connection: Connection, action: ProposedAction, orders: Orders, safety_limits: SafetyLimits, *, now: float
) -> RecentActivity:
    """Read the recent actions that limit what may begin now."""
    longest_s = max(
        safety_limits.breaker_window_s, safety_limits.cooldown_s, safety_limits.vram_cooldown_s, RATE_WINDOW_S
    )
    frees = restart_intents_since(connection, since=now - longest_s)
    breaker_reset_at = orders.breaker_reset_at() or 0.0
    # A release in the future is from before the clock was set back: ignore it.
    breaker_reset_at = breaker_reset_at if breaker_reset_at <= now else 0.0
    storm_since = max(now - safety_limits.breaker_window_s, breaker_reset_at)
    rate_since = max(now - RATE_WINDOW_S, breaker_reset_at)
    # A restart in the future counts no longer than its window.
    storm_until, rate_until = now + safety_limits.breaker_window_s, now + RATE_WINDOW_S
    targets = {target(row.host, _of(row, "handle")) for row in frees if storm_since < row.created_at < storm_until}
    freed_at = [
        row.entered_at
        for row in frees
        if target(row.host, _of(row, "handle")) == action.target and row.stage not in NOT_RESTARTED
    ]
    beside = [
        row.entered_at if row.stage in OVER else now
        for row in frees
        if row.host == action.host
        and row.episode_id != action.episode_id
        and not action.gpus.isdisjoint(_of(row, "gpus"))
    ]
    answers = select(ORDERS).where(ORDERS.c.episode_id == action.episode_id).order_by(ORDERS.c.order_id.desc())
    answer = connection.execute(answers.limit(1)).one_or_none()
    fleet = select(func.sum(EXECUTORS.c.workers)).where(EXECUTORS.c.heartbeat_at > now - FLEET_FRESH_S)
    return RecentActivity(
        targets=frozenset(targets),
        restarts=sum(rate_since < row.created_at < rate_until for row in frees),
        # The nearest in time: a future one is from before the clock was set back.
        restarted_s_ago=min((now - at for at in freed_at), key=abs, default=None),
        gpu_restarted_s_ago=min((now - at for at in beside), key=abs, default=None),
        fleet=connection.scalar(fleet),
        lock_targets=_faulty_targets(connection, since=storm_since, until=storm_until),
        answer=None if answer is None else read_order(answer),
    )


def _of(row: Row[Any], name: str) -> Any:
    """A field of an intent's data; empty if it is unreadable."""
    return row.data.get(name, "") if isinstance(row.data, dict) else ""


def _faulty_targets(connection: Connection, *, since: float, until: float) -> frozenset[str]:
    """Workers to lock and runs to block, by decisions between two times."""
    found = (
        select(RUN_DECISIONS, EPISODES.c.worker.label("run"))
        .join(EPISODES, EPISODES.c.episode_id == RUN_DECISIONS.c.episode_id)
        .where(RUN_DECISIONS.c.kind.in_([WRANGLING[LockWorker], WRANGLING[BlockRun]]))
        .where(RUN_DECISIONS.c.decided_at > since, RUN_DECISIONS.c.decided_at < until)
    )
    return frozenset(
        run_lock_key(row.run) if row.worker is None else worker_lock_key(row.host, row.worker)
        for row in connection.execute(found)
    )


def restart_intents_since(connection: Connection, *, since: float) -> Sequence[Row[Any]]:
    """List the restart intents that changed since a time, without retired ones."""
    its = INTENTS.c.kind == Kind.FREE, INTENTS.c.entered_at > since, INTENTS.c.retired.is_(None)
    return connection.execute(select(INTENTS).where(*its).order_by(INTENTS.c.entered_at)).all()
