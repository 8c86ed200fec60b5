"""Orders of operators, and the circuit breaker: given, standing, answered."""

from sqlalchemy import ColumnElement, Connection, insert, or_, select, text

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.transactions import reading, writing
from gpuwarden.errors import GpuwardenError
from remediator.ledger.database import LedgerPart
from remediator.ledger.episodes import read_episode
from remediator.ledger.journal import storable, write
from remediator.ledger.recent import NOT_FREED, frees_since, orders_in_force, read_order, recent_activity
from remediator.ledger.reports import held_episodes
from remediator.ledger.schema import EPISODES, LEDGER, ORDERS
from remediator.plan import Stage, Wait
from remediator.reasons import Reason
from remediator.remedies.guards import TOPIC, Act, Latch, Order, Orders, Recent, Safeguards, Wish


class NotAskedError(GpuwardenError):
    """A person answered what an episode does not ask, or not any more; the message says which."""


class OrderBook(LedgerPart):
    """Orders of operators, and the circuit breaker: given, standing, answered."""

    def give(self, order: Order) -> int:
        """Keep an order; every open episode that it is about tells of it. Its number."""
        with writing(self._engine) as connection:
            return give(connection, self._host, order)

    def arm_at_first(self, *, host: str, who: str, now: float) -> bool:
        """Arm every remedy of a host about which nobody has ordered anything yet; whether that was so."""
        with writing(self._engine) as connection:
            wait_for_others(connection)
            about = ORDERS.c.topic == TOPIC[Act.ARM], or_(ORDERS.c.host.is_(None), ORDERS.c.host == host)
            if connection.scalar(select(ORDERS.c.order_id).where(*about).limit(1)) is not None:
                return False
            because = "as it was started, before anybody ordered otherwise"
            give(connection, self._host, Order(act=Act.ARM, at=now, who=who, because=because, host=host))
            return True

    def current(self) -> Orders:
        """The orders that may still matter."""
        now = self._clock.now()
        with reading(self._engine) as connection:
            return orders_in_force(connection, now)

    def standing(self, wanted: Wish, safeguards: Safeguards, *, now: float) -> tuple[Orders, Recent]:
        """What decides whether a free may be begun."""
        with reading(self._engine) as connection:
            orders = orders_in_force(connection, now)
            return orders, recent_activity(connection, wanted, orders, safeguards, now=now)

    def answer(
        self, episode_id: int, act: Act, *, who: str, because: str, now: float, until: float | None = None
    ) -> tuple[Order, str]:
        """Keep a person's yes or no to what an open episode asks, for the incarnation that it asks about.

        With it comes what was asked.

        Raises:
            NotAskedError: it asks nothing, and why.
        """
        with writing(self._engine) as connection:
            wait_for_others(connection)
            found = select(EPISODES).where(EPISODES.c.episode_id == episode_id).with_for_update()
            row = connection.execute(found).one_or_none()
            if row is None:
                raise NotAskedError(f"the ledger has no episode {episode_id}: `gpuwarden status` names those that ask")
            if row.closed_at is not None:
                raise NotAskedError(f"episode {episode_id} is over ({row.outcome}: {row.message}): nothing is asked")
            (held,) = (each for each in held_episodes(connection, row.host) if each.episode_id == episode_id)
            free = read_episode(connection, row).free
            if row.asked is None or (free is not None and free.stage is not Stage.PLANNED):
                waits = f"waits for something else ({held.reason}): {held.message}" if held.reason else "is at work"
                raise NotAskedError(f"episode {episode_id} asks nobody: it {waits}")
            order = Order(
                act=act,
                at=now,
                who=who,
                because=because,
                host=row.host,
                remedy=row.remedy,
                until=until,
                episode_id=episode_id,
                key=row.asked,
            )
            give(connection, self._host, order)
            return order, held.message

    def given_since(self, *, since: float) -> list[Order]:
        """Every order since then, oldest first: who armed what, and when."""
        with reading(self._engine) as connection:
            found = select(ORDERS).where(ORDERS.c.at >= since).order_by(ORDERS.c.order_id)
            return [read_order(row) for row in connection.execute(found)]

    def freed_since(self, since: float, *, host: str | None = None) -> list[tuple[str, str, float]]:
        """The containers freed since then: host, name, and when, Unix seconds; oldest first."""
        with reading(self._engine) as connection:
            rows = [row for row in frees_since(connection, since=since) if row.stage not in NOT_FREED]
            return [(row.host, row.data["name"], row.entered_at) for row in rows if host in (None, row.host)]


def wait_for_others(connection: Connection) -> None:
    """Let no other begin or order anything until this transaction is over; writers of SQLite take turns anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"LOCK TABLE {ORDERS.name} IN SHARE ROW EXCLUSIVE MODE"))


def give(connection: Connection, host: str | None, order: Order) -> int:
    """Write an order, and a line for each open episode that it is about. Return its number."""
    who, because = storable(order.who), storable(order.because[:1000])
    names = ("at", "act", "host", "remedy", "until", "episode_id", "key", "since", "ends")
    row = {name: getattr(order, name) for name in names}
    given = insert(ORDERS).values(**row, topic=TOPIC[order.act], who=who, because=because)
    order_id: int = connection.execute(given.returning(ORDERS.c.order_id)).scalar_one()
    about: list[ColumnElement[bool]] = [EPISODES.c.closed_at.is_(None)]
    about += [] if order.host is None else [EPISODES.c.host == order.host]
    about += [] if order.remedy is None else [EPISODES.c.remedy == order.remedy]
    about += [] if order.episode_id is None else [EPISODES.c.episode_id == order.episode_id]
    for episode_id in connection.scalars(select(EPISODES.c.episode_id).where(*about)).all():
        write(connection, host, episode_id, "ordered", order.act, f"by {who}: {because}", order.at)
    notify_after_commit(connection, LEDGER.channel)
    return order_id


def trip_breaker(connection: Connection, host: str | None, found: Latch, now: float) -> Wait:
    """Open the circuit breaker: nothing begins until an operator releases it."""
    who = f"the executor of {host}"
    give(connection, host, Order(act=Act.BRAKE, at=now, who=who, because=found.message))
    return Wait(reason=Reason.CIRCUIT_BREAKER, message=f"the brake was latched here: {found.message}")
