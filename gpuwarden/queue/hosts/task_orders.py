"""Orders of people to end a task of another runner on a host (D7). The host takes them in the answer to a report.

An order is the id of a task and nothing else. The host decides whether it may end the task.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, insert, or_, select, update

from gpuwarden.db.locks import advisory_lock
from gpuwarden.db.rows import converted, readable
from gpuwarden.db.transactions import reading, writing
from gpuwarden.fields import made_from
from gpuwarden.format import storable
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.schema import TASK_ORDERS

LIFE_S: Final = 86400.0
"""Default time in which a host may take an order, seconds."""

LIFE_MAX_S: Final = 7 * 86400.0

KEPT_S: Final = 90 * 86400.0
"""How long an order is kept, seconds."""

TAKEN_MAX: Final = 100
"""Most orders in one answer."""


class TaskOutcome(StrEnum):
    """How a host answers an order."""

    ENDED = "ended"
    GONE = "gone"
    REFUSED = "refused"
    """It may not be ended by an order."""
    FAILED = "failed"


class Ending(StrEnum):
    """How an order ends without an answer."""

    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What a host did on an order."""

    task_id: int
    outcome: TaskOutcome
    message: str


@dataclass(frozen=True, kw_only=True)
class TaskOrder:
    """An order. Times are Unix seconds."""

    order_id: int
    host: str
    task_id: int
    ordered_at: float
    ordered_by: str
    reason: str
    expires_at: float
    taken_at: float | None
    settled_at: float | None
    outcome: TaskOutcome | Ending | None
    message: str

    @property
    def is_done(self) -> bool:
        """Whether the task has ended."""
        return self.outcome in (TaskOutcome.ENDED, TaskOutcome.GONE)


class TaskOrders(QueueBase):
    """Orders to end tasks, at most one open order per task."""

    def give(self, host: str, task_id: int, *, who: str, reason: str, life_s: float, now: float) -> TaskOrder:
        """Return the open order about a task, which is new if there was none."""
        with writing(self._engine) as connection:
            advisory_lock(connection, "task orders")
            _expire(connection, now)
            if (found := _open_order(connection, host, task_id)) is not None:
                return found
            its = {"host": host, "task_id": task_id, "ordered_at": now, "expires_at": now + life_s}
            its |= {"ordered_by": storable(who), "reason": storable(reason), "message": ""}
            row = connection.execute(insert(TASK_ORDERS).values(its).returning(TASK_ORDERS)).one()
            # After the insert: SQLite would use the newest id again.
            connection.execute(delete(TASK_ORDERS).where(TASK_ORDERS.c.ordered_at < now - KEPT_S))
            return _to_order(row)

    def withdraw(self, host: str, task_id: int, *, who: str, now: float) -> TaskOrder | None:
        """Withdraw the open order about a task, if any. A host that took it may still end the task."""
        with writing(self._engine) as connection:
            advisory_lock(connection, "task orders")
            _expire(connection, now)
            found = _open_order(connection, host, task_id)
            if found is None:
                return None
            its = TASK_ORDERS.c.order_id == found.order_id
            gone = {"outcome": Ending.WITHDRAWN, "settled_at": now, "message": f"by {storable(who)}"}
            return _to_order(
                connection.execute(update(TASK_ORDERS).where(its).values(gone).returning(TASK_ORDERS)).one()
            )

    def exchange(self, host: str, results: Sequence[TaskResult], *, now: float) -> list[int]:
        """Store what a host did, and return the tasks that it shall end.

        A result settles the newest order that the host took, also an expired or withdrawn one.
        """
        with reading(self._engine) as connection:
            if not results and not connection.execute(_takeable(host, now).limit(1)).first():
                return []  # nearly always, and without a lock
        with writing(self._engine) as connection:
            advisory_lock(connection, "task orders")
            for each in results:
                _settle(connection, host, each, now)
            taken = connection.execute(_takeable(host, now).limit(TAKEN_MAX)).all()
            new = [order_id for order_id, _, taken_at in taken if taken_at is None]
            if new:
                connection.execute(update(TASK_ORDERS).where(TASK_ORDERS.c.order_id.in_(new)).values(taken_at=now))
        return [task_id for _, task_id, _ in taken]

    def of_host(self, host: str, *, now: float, most: int = 20) -> list[TaskOrder]:
        """The newest orders of a host, the newest first."""
        return self._found(TASK_ORDERS.c.host == host, now, most)

    def order(self, order_id: int, *, now: float) -> TaskOrder | None:
        """An order; `None` if it was deleted."""
        return next(iter(self._found(TASK_ORDERS.c.order_id == order_id, now, 1)), None)

    def _found(self, wanted: ColumnElement[bool], now: float, most: int) -> list[TaskOrder]:
        found = select(TASK_ORDERS).where(wanted).order_by(TASK_ORDERS.c.order_id.desc()).limit(most)
        with reading(self._engine) as connection:
            return [_as_of(each, now) for each in readable(connection.execute(found), _to_order)]


def _as_of(order: TaskOrder, now: float) -> TaskOrder:
    """An order, expired if its time is over."""
    if order.outcome is not None or now < order.expires_at:
        return order
    return replace(order, outcome=Ending.EXPIRED, settled_at=order.expires_at)


def _takeable(host: str, now: float) -> Any:
    its = TASK_ORDERS.c
    wanted = and_(its.host == host, its.outcome.is_(None), its.expires_at > now)
    return select(its.order_id, its.task_id, its.taken_at).where(wanted).order_by(its.task_id)


def _settle(connection: Connection, host: str, result: TaskResult, now: float) -> None:
    its = TASK_ORDERS.c
    about = and_(its.host == host, its.task_id == result.task_id, its.taken_at.is_not(None))
    newest = select(its.order_id).where(about).order_by(its.order_id.desc()).limit(1).scalar_subquery()
    unanswered = or_(its.outcome.is_(None), its.outcome.in_(set(Ending)))
    answer = {"outcome": result.outcome, "settled_at": now, "message": storable(result.message)}
    connection.execute(update(TASK_ORDERS).where(its.order_id == newest, unanswered).values(answer))


def _expire(connection: Connection, now: float) -> None:
    its = TASK_ORDERS.c
    over = update(TASK_ORDERS).where(its.outcome.is_(None), its.expires_at <= now)
    connection.execute(over.values(outcome=Ending.EXPIRED, settled_at=its.expires_at))


def _open_order(connection: Connection, host: str, task_id: int) -> TaskOrder | None:
    its = TASK_ORDERS.c
    found = select(TASK_ORDERS).where(its.host == host, its.task_id == task_id, its.outcome.is_(None))
    row = connection.execute(found).one_or_none()
    return None if row is None else _to_order(row)


def _to_order(row: Row[Any]) -> TaskOrder:
    return converted(row, TASK_ORDERS, lambda row: made_from(row, TaskOrder, outcome=_outcome(row.outcome)))


def _outcome(text: str | None) -> TaskOutcome | Ending | None:
    if text is None:
        return None
    return Ending(text) if text in set(Ending) else TaskOutcome(text)
