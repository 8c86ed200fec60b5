"""Whether the chain is alive: heartbeats of executors, drills, and the last arrival of the watchdog alert."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, case, delete, func, insert, or_, select, true, update

from gpuwarden.db.migrate import refuse_other_revisions
from gpuwarden.db.transactions import reading, upsert, writing
from remediator.alert import drill_number
from remediator.ledger.database import LedgerPart
from remediator.ledger.schema import ALERTS, ARRIVALS, DRILLS, EXECUTORS, LEDGER

KEPT_S: Final = 90 * 86400.0
"""Retention of drills, seconds."""

DEAD_S: Final = 300.0
"""The chain is dead if the watchdog alert has not arrived for this long, seconds. It arrives once a minute."""

NEWEST_MAX: Final = 1000
"""Most new alerts that are searched for those of a drill."""

INTERRUPTED: Final = "interrupted"

WATCHDOG: Final = "watchdog"


@dataclass(frozen=True, kw_only=True)
class ExecutorHeartbeat:
    """One host's executor. Times are Unix seconds."""

    host: str
    pid: int
    armed: bool
    started_at: float
    heartbeat_at: float
    errors: int
    workers: int | None
    seats_on: bool
    seats_failures: int


class Executors(LedgerPart):
    """The executors of all hosts and their heartbeats."""

    def beat(
        self,
        *,
        host: str,
        pid: int,
        armed: bool,
        started_at: float,
        errors: int,
        now: float,
        workers: int | None = None,
        seats_on: bool = False,
        seats_failures: int = 0,
    ) -> None:
        """Write the heartbeat of an executor, with the number of containers it watches.

        Raises:
            NewerTablesError: a newer gpuwarden migrated the tables.
            DatabaseError: it could not be written.
        """
        row: dict[str, float | None] = {"pid": pid, "armed": armed, "started_at": started_at, "heartbeat_at": now}
        row |= {"errors": errors, "workers": workers, "seats_on": seats_on, "seats_failures": seats_failures}
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            connection.execute(
                upsert(connection, EXECUTORS)
                .values(host=host, **row)
                .on_conflict_do_update(index_elements=[EXECUTORS.c.host], set_=row)
            )

    def last_beats(self) -> dict[str, float]:
        """The last heartbeat of each host's executor, Unix seconds."""
        return {each.host: each.heartbeat_at for each in self.list_all()}

    def list_all(self) -> list[ExecutorHeartbeat]:
        """List the executors by host."""
        names = [EXECUTORS.c[name] for name in ExecutorHeartbeat.__dataclass_fields__]
        with reading(self._engine) as connection:
            rows = connection.execute(select(*names).order_by(EXECUTORS.c.host)).mappings()
            return [ExecutorHeartbeat(**row) for row in rows]


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A drill of one host. Times are Unix seconds, `None` until they happen.

    Args:
        until: `serve` publishes the drill until then.
        delivered_at: the webhook stored its alert.
        decided_at: the executor took the alert and decided to do nothing.
        broken: the first hop that did not answer.
    """

    drill_id: int
    host: str
    who: str
    started_at: float
    until: float
    delivered_at: float | None = None
    decided_at: float | None = None
    broken: str | None = None


@dataclass(frozen=True, kw_only=True)
class WatchdogArrival:
    """The last arrival of the watchdog alert, and the last time without one for `DEAD_S`. Unix seconds."""

    at: float
    gap_from: float | None
    gap_to: float | None


class Chain(LedgerPart):
    """Drills, and arrivals of the watchdog alert."""

    def start(self, hosts: Collection[str], *, who: str, timeout_s: float) -> list[Drill]:
        """Start a drill of each host, and delete old ones."""
        now = self._clock.now()
        with writing(self._engine) as connection:
            connection.execute(delete(DRILLS).where(DRILLS.c.started_at < now - KEPT_S))
            row = {"who": who, "started_at": now, "until": now + timeout_s}
            first = insert(DRILLS).returning(DRILLS.c.drill_id)
            ids = [connection.execute(first.values(host=host, **row)).scalar_one() for host in hosts]
        return self.read(ids)

    def read(self, drill_ids: Collection[int]) -> list[Drill]:
        """Read drills, also alerts that no executor has taken."""
        with reading(self._engine) as connection:
            found = _read(connection, drill_ids)
            if all(each.delivered_at is not None for each in found):
                return found
            new = select(ALERTS.c.labels, ALERTS.c.received_at).where(ALERTS.c.state == "new")
            rows = connection.execute(new.order_by(ALERTS.c.alert_id.desc()).limit(NEWEST_MAX)).all()
        waiting = {drill_number(row.labels): row.received_at for row in rows if isinstance(row.labels, dict)}
        arrived = {each.drill_id: waiting.get(each.drill_id) for each in found}
        return [
            each if each.delivered_at is not None else Drill(**{**vars(each), "delivered_at": arrived[each.drill_id]})
            for each in found
        ]

    def end(self, broken: Mapping[int, str | None]) -> None:
        """End drills, by number with the hop that did not answer."""
        now = self._clock.now()
        with writing(self._engine) as connection:
            for drill_id, hop in broken.items():
                this = update(DRILLS).where(DRILLS.c.drill_id == drill_id)
                connection.execute(this.values(until=now, broken=hop))

    def last(self, *, host: str | None = None) -> list[Drill]:
        """The last drill with a result of each host, or of one."""
        its = true() if host is None else DRILLS.c.host == host
        over = or_(DRILLS.c.decided_at.is_not(None), DRILLS.c.broken != INTERRUPTED)
        newest = select(func.max(DRILLS.c.drill_id)).where(its, over).group_by(DRILLS.c.host)
        with reading(self._engine) as connection:
            return _read(connection, list(connection.scalars(newest)))

    def mark_watchdog(self) -> None:
        """Note an arrival of the watchdog alert."""
        now = self._clock.now()
        with writing(self._engine) as connection:
            first = upsert(connection, ARRIVALS).values(name=WATCHDOG, at=now)
            was = ARRIVALS.c.at
            long = was < now - DEAD_S
            gap = {"gap_from": case((long, was), else_=ARRIVALS.c.gap_from)}
            gap["gap_to"] = case((long, now), else_=ARRIVALS.c.gap_to)
            connection.execute(first.on_conflict_do_update(index_elements=[ARRIVALS.c.name], set_={"at": now, **gap}))

    def watchdog(self) -> WatchdogArrival | None:
        """The last arrival of the watchdog alert at a webhook of this ledger; `None` if it never arrived."""
        with reading(self._engine) as connection:
            row = connection.execute(select(ARRIVALS).where(ARRIVALS.c.name == WATCHDOG)).one_or_none()
        return None if row is None else WatchdogArrival(at=row.at, gap_from=row.gap_from, gap_to=row.gap_to)


def open_drills(connection: Connection, now: float) -> list[tuple[int, str]]:
    """Number and host of each drill that waits for its alert."""
    rows = connection.execute(select(DRILLS.c.drill_id, DRILLS.c.host).where(DRILLS.c.until > now))
    return [(row.drill_id, row.host) for row in rows]


def last_passed(connection: Connection, host: str) -> float | None:
    """When the executor of a host last took the alert of a drill, Unix seconds."""
    at: float | None = connection.scalar(select(func.max(DRILLS.c.decided_at)).where(DRILLS.c.host == host))
    return at


def decide(
    connection: Connection, arrived: Sequence[tuple[Mapping[str, str], float]], *, host: str, now: float
) -> None:
    """Note that the executor of a host took these alerts."""
    for labels, received_at in arrived:
        its = DRILLS.c.drill_id == drill_number(labels), DRILLS.c.host == host, DRILLS.c.decided_at.is_(None)
        connection.execute(update(DRILLS).where(*its).values(delivered_at=received_at, decided_at=now))


def _read(connection: Connection, drill_ids: Collection[int]) -> list[Drill]:
    rows = connection.execute(select(DRILLS).where(DRILLS.c.drill_id.in_(drill_ids)).order_by(DRILLS.c.drill_id))
    return [Drill(**row) for row in rows.mappings()]
