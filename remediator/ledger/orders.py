"""Orders of operators, and the circuit breaker."""

from sqlalchemy import ColumnElement, Connection, insert, or_, select, text

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.transactions import reading, writing
from gpuwarden.errors import GpuwardenError
from remediator.ledger.database import LedgerPart
from remediator.ledger.episodes import read_episodes
from remediator.ledger.journal import storable, write
from remediator.ledger.recent import NOT_RESTARTED, orders_in_force, read_order, recent_activity, restart_intents_since
from remediator.ledger.reports import held_episodes
from remediator.ledger.schema import EPISODES, LEDGER, ORDERS
from remediator.plan import Stage, Wait
from remediator.reasons import Reason
from remediator.remedies.guards import (
    TOPIC,
    Act,
    Order,
    Orders,
    ProposedAction,
    RecentActivity,
    SafetyLimits,
    TripBreaker,
)


class NoApprovalAskedError(GpuwardenError):
    """An answer to an episode that asks for no approval; the message says why."""


class OrderBook(LedgerPart):
    """Orders of operators, and the circuit breaker."""

    def give(self, order: Order) -> int:
        """Store an order, and note it in the journal of each open episode in its scope. Returns its id."""
        with writing(self._engine) as connection:
            return give(connection, self._host, order)

    def arm_by_default(self, *, host: str, who: str, now: float) -> bool:
        """Arm every remedy of a host that has no arming order yet. Returns whether it did."""
        with writing(self._engine) as connection:
            wait_for_others(connection)
            about = ORDERS.c.topic == TOPIC[Act.ARM], or_(ORDERS.c.host.is_(None), ORDERS.c.host == host)
            if connection.scalar(select(ORDERS.c.order_id).where(*about).limit(1)) is not None:
                return False
            reason = "started with --armed"
            give(connection, self._host, Order(act=Act.ARM, at=now, who=who, reason=reason, host=host))
            return True

    def current(self) -> Orders:
        """Read the orders that may still apply."""
        now = self._clock.now()
        with reading(self._engine) as connection:
            return orders_in_force(connection, now)

    def with_activity(
        self, action: ProposedAction, safety_limits: SafetyLimits, *, now: float
    ) -> tuple[Orders, RecentActivity]:
        """Read the orders and recent activity that limit an action."""
        with reading(self._engine) as connection:
            orders = orders_in_force(connection, now)
            return orders, recent_activity(connection, action, orders, safety_limits, now=now)

    def answer(
        self, episode_id: int, act: Act, *, who: str, reason: str, now: float, until: float | None = None
    ) -> tuple[Order, str]:
        """Store an operator's yes or no for the incarnation an episode asks about. Returns the order and the question.

        Raises:
            NoApprovalAskedError: the episode asks for no approval.
        """
        with writing(self._engine) as connection:
            wait_for_others(connection)
            found = select(EPISODES).where(EPISODES.c.episode_id == episode_id).with_for_update()
            row = connection.execute(found).one_or_none()
            if row is None:
                raise NoApprovalAskedError(
                    f"no episode {episode_id} in the ledger: `gpuwarden status` lists episodes that ask"
                )
            if row.closed_at is not None:
                raise NoApprovalAskedError(f"episode {episode_id} is closed ({row.outcome}: {row.message})")
            (held,) = (each for each in held_episodes(connection, row.host) if each.episode_id == episode_id)
            (episode,) = read_episodes(connection, [row])
            free = episode.free
            if row.approval_asked_for is None or (free is not None and free.stage is not Stage.PLANNED):
                waits = f"waits for something else ({held.reason}): {held.message}" if held.reason else "acts now"
                raise NoApprovalAskedError(f"episode {episode_id} asks for no approval: it {waits}")
            order = Order(
                act=act,
                at=now,
                who=who,
                reason=reason,
                host=row.host,
                remedy=row.remedy,
                until=until,
                episode_id=episode_id,
                key=row.approval_asked_for,
            )
            give(connection, self._host, order)
            return order, held.message

    def given_since(self, *, since: float) -> list[Order]:
        """List the orders since a time, oldest first."""
        with reading(self._engine) as connection:
            found = select(ORDERS).where(ORDERS.c.at >= since).order_by(ORDERS.c.order_id)
            return [read_order(row) for row in connection.execute(found)]

    def restarts_since(self, since: float, *, host: str | None = None) -> list[tuple[str, str, float]]:
        """List the restarts since a time: host, container and time, Unix seconds; oldest first."""
        with reading(self._engine) as connection:
            rows = [
                row
                for row in restart_intents_since(connection, since=since)
                if row.stage not in NOT_RESTARTED and isinstance(row.data, dict) and "name" in row.data
            ]
            return [(row.host, row.data["name"], row.entered_at) for row in rows if host in (None, row.host)]


def wait_for_others(connection: Connection) -> None:
    """Block other begins and orders until this transaction ends. SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"LOCK TABLE {ORDERS.name} IN SHARE ROW EXCLUSIVE MODE"))


def give(connection: Connection, host: str | None, order: Order) -> int:
    """Write an order, and a journal entry for each open episode in its scope. Returns its id."""
    who, reason = storable(order.who), storable(order.reason[:1000])
    names = ("at", "act", "host", "remedy", "until", "episode_id", "key", "since", "ends")
    row = {name: getattr(order, name) for name in names}
    given = insert(ORDERS).values(**row, topic=TOPIC[order.act], who=who, reason=reason)
    order_id: int = connection.execute(given.returning(ORDERS.c.order_id)).scalar_one()
    about: list[ColumnElement[bool]] = [EPISODES.c.closed_at.is_(None)]
    about += [] if order.host is None else [EPISODES.c.host == order.host]
    about += [] if order.remedy is None else [EPISODES.c.remedy == order.remedy]
    about += [] if order.episode_id is None else [EPISODES.c.episode_id == order.episode_id]
    for episode_id in connection.scalars(select(EPISODES.c.episode_id).where(*about)).all():
        write(connection, host, episode_id, "ordered", order.act, f"by {who}: {reason}", order.at)
    notify_after_commit(connection, LEDGER.channel)
    return order_id


def open_breaker(connection: Connection, host: str | None, found: TripBreaker, now: float) -> Wait:
    """Open the circuit breaker: no action begins until an operator releases it."""
    who = f"the executor of {host}"
    give(connection, host, Order(act=Act.BREAKER, at=now, who=who, reason=found.message))
    return Wait(reason=Reason.CIRCUIT_BREAKER, message=f"the circuit breaker opened: {found.message}")
