"""The outbox. Each consumer reads every event at least once and acknowledges it.

All consumers get one order, which the first reader assigns. On PostgreSQL, event ids do not become visible in order.
"""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Executable, case, func, select, update

from gpuwarden.db.locks import try_advisory_lock
from gpuwarden.db.rows import readable
from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import Event, PersonsJob
from gpuwarden.queue.queries import Unreadable
from gpuwarden.queue.rows import to_event
from gpuwarden.queue.schema import CONSUMERS, JOBS, OUTBOX_EVENTS, RUNS
from gpuwarden.queue.sql import Prepared

BATCH: Final = 500
"""Events that are placed and read at a time."""


class Outbox(QueueBase):
    """Events for programs that continue after a job: see `docs/reference/python-api.md`."""

    def events(
        self, consumer: str, *, limit: int = BATCH, after: Event | None = None, unreadable: Unreadable = None
    ) -> list[Event]:
        """The next events that this consumer has not acknowledged, oldest first, and only those after `after`.

        An unreadable event is skipped: see `readable`.
        """
        self.place_events()
        seen = select(CONSUMERS.c.position).where(CONSUMERS.c.consumer == consumer).scalar_subquery()
        last = 0 if after is None else after.position
        while True:
            next_ones = select(OUTBOX_EVENTS).where(OUTBOX_EVENTS.c.position > func.coalesce(seen, 0))
            next_ones = next_ones.where(OUTBOX_EVENTS.c.position > last).order_by(OUTBOX_EVENTS.c.position)
            with reading(self._engine) as connection:
                rows = connection.execute(next_ones.limit(limit)).all()
            found = list(readable(rows, to_event, unreadable))
            if found or not rows:
                return found
            last = rows[-1].position

    def acknowledge(self, consumer: str, event: Event, *, now: float) -> None:
        """Mark this event and all earlier ones as done for a consumer."""
        with writing(self._engine) as connection:
            row = {"position": event.position, "moved_at": now}
            moved = upsert(connection, CONSUMERS).values(consumer=consumer, **row)
            further = CONSUMERS.c.position < event.position
            connection.execute(moved.on_conflict_do_update(index_elements=["consumer"], set_=row, where=further))

    def consumers(self) -> dict[str, int]:
        """How many events each consumer has not acknowledged."""
        self.place_events()
        newest = select(func.coalesce(func.max(OUTBOX_EVENTS.c.position), 0)).scalar_subquery()
        with reading(self._engine) as connection:
            found = connection.execute(select(CONSUMERS.c.consumer, newest - CONSUMERS.c.position))
            return {row.consumer: max(0, int(row[1])) for row in found}

    def begin(self, consumer: str, *, now: float) -> None:
        """Register a new consumer after the newest event."""
        self.place_events()
        newest = func.coalesce(select(func.max(OUTBOX_EVENTS.c.position)).scalar_subquery(), 0)
        with writing(self._engine) as connection:
            row = upsert(connection, CONSUMERS).values(consumer=consumer, position=newest, moved_at=now)
            connection.execute(row.on_conflict_do_nothing())

    def jobs_of_people(self, events: Sequence[Event]) -> dict[int, PersonsJob]:
        """The jobs of these events by id, with addresses."""
        address = func.coalesce(JOBS.c.notify, RUNS.c.notify)
        its = JOBS.c.job_id, JOBS.c.run_id, JOBS.c.queue, func.coalesce(JOBS.c.reason, ""), address, JOBS.c.submitted_by
        found = select(*its).select_from(JOBS.outerjoin(RUNS, RUNS.c.run_id == JOBS.c.run_id))
        ids = JOBS.c.job_id.in_(sorted({event.job_id for event in events}))
        with reading(self._engine) as connection:
            return {row.job_id: PersonsJob(*row) for row in connection.execute(found.where(ids))}

    def address_of(self, job_id: int) -> str | None:
        """The own address of a job."""
        with reading(self._engine) as connection:
            address: str | None = connection.scalar(select(JOBS.c.notify).where(JOBS.c.job_id == job_id))
            return address

    def place_events(self) -> None:
        """Assign a position to each event without one."""
        while True:
            with reading(self._engine) as connection:
                if connection.scalar(*_unplaced(limit=1)) is None:
                    return
            with writing(self._engine) as connection:
                if not try_advisory_lock(connection, "placing of dispatch events"):
                    return
                ids = list(connection.scalars(*_unplaced(limit=BATCH)))
                last = connection.scalar(*_last_place()) or 0
                rows = [{"p_event_id": each, "p_position": last + n} for n, each in enumerate(ids, 1)]
                if rows:
                    connection.execute(_place(event_id=0, position=0)[0], rows)

    def events_of(self, job_id: int) -> list[str]:
        """The kinds of a job's events, in order."""
        with reading(self._engine) as connection:
            events = select(OUTBOX_EVENTS.c.kind).where(OUTBOX_EVENTS.c.job_id == job_id)
            return list(connection.scalars(events.order_by(OUTBOX_EVENTS.c.event_id)))


@Prepared
def _unplaced(**its: ColumnElement[Any]) -> Executable:
    unplaced = select(OUTBOX_EVENTS.c.event_id).where(OUTBOX_EVENTS.c.position.is_(None))
    return unplaced.order_by(OUTBOX_EVENTS.c.event_id).limit(its["limit"])


@Prepared
def _last_place() -> Executable:
    """The highest position ever. After its event is deleted, only a consumer has it."""
    newest = select(func.max(OUTBOX_EVENTS.c.position)).scalar_subquery()
    furthest = select(func.max(CONSUMERS.c.position)).scalar_subquery()
    greater = case((func.coalesce(newest, 0) > func.coalesce(furthest, 0), newest), else_=furthest)
    return select(greater)


@Prepared
def _place(**its: ColumnElement[Any]) -> Executable:
    this = OUTBOX_EVENTS.c.event_id == its["event_id"]
    return update(OUTBOX_EVENTS).where(this).values(position=its["position"])
