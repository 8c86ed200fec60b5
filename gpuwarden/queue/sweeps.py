"""What runs on a timer: leases that ran out, and events to be consumed."""

from collections.abc import Iterable

from sqlalchemy import and_, delete, select, tuple_, update

from gpuwarden.database import only_one, reading, writing
from gpuwarden.job import JobId, Move
from gpuwarden.queue import statements
from gpuwarden.queue.room import Room
from gpuwarden.schema import AVOIDED, DISPATCH_EVENTS, JOBS, RUNS


class Sweeps(Room):
    """One sweep of a kind at a time, whoever runs it."""

    def expired(self, *, now: float) -> frozenset[tuple[JobId, int]]:
        """The jobs whose lease, or fence, has run out, each with its attempt."""
        found = select(JOBS.c.job_id, JOBS.c.attempt).where(
            JOBS.c.lease_expires_at < now, statements.from_sources(Move.RECLAIM)
        )
        with reading(self._engine) as connection:
            return frozenset((JobId(row.job_id), row.attempt) for row in connection.execute(found))

    def reclaim_expired(self, *, now: float, among: Iterable[JobId] | None = None) -> list[JobId]:
        """Queue again the jobs whose lease ran out (A13), or fail them at a cap, `SWEEP_MAX` at most; the ids touched.

        `among` bounds it to some jobs. A lease is by the wall clock, so a caller that sweeps on a timer gives a machine
        that woke from a suspend, or a queue that was away, the time of a renewal first. Nothing while another sweeps,
        and nothing to a job that somebody is writing to: that is looked at by the next sweep. What jobs had to avoid
        and need not any more is forgotten, too.
        """
        expired = JOBS.c.lease_expires_at < now
        if among is not None:
            expired = and_(expired, JOBS.c.job_id.in_(sorted(among)))
        with writing(self._engine) as connection:
            if not only_one(connection, "sweep of leases"):
                return []
            past = select(*AVOIDED.primary_key.columns).where(AVOIDED.c.until <= now).with_for_update(skip_locked=True)
            connection.execute(delete(AVOIDED).where(tuple_(*AVOIDED.primary_key.columns).in_(past)))
            return statements.give_away(connection, Move.RECLAIM, expired, "lease expired", now)

    def consume_events(self, *, now: float) -> int:
        """Do what unread `failed` events ask, once each: fail the run, cancel its other jobs (A10). How many."""
        with writing(self._engine) as connection:
            if not only_one(connection, "consumer of dispatch events"):
                return 0
            unread = select(DISPATCH_EVENTS).where(DISPATCH_EVENTS.c.consumed_at.is_(None))
            events = connection.execute(unread.order_by(DISPATCH_EVENTS.c.event_id)).all()
            for event in events:
                if event.run_id is not None:
                    connection.execute(
                        update(RUNS)
                        .where(RUNS.c.run_id == event.run_id, RUNS.c.state == "running")
                        .values(state="failed", ended_at=now)
                    )
                    siblings = and_(JOBS.c.run_id == event.run_id, statements.from_sources(Move.CANCEL))
                    connection.execute(statements.locked(select(JOBS.c.job_id).where(siblings)))
                    because = f"job {event.job_id} of its run failed"
                    connection.execute(
                        statements.transition(
                            Move.CANCEL, siblings, because=because, ended_at=now, **statements.UNCLAIMED
                        )
                    )
                connection.execute(
                    update(DISPATCH_EVENTS).where(DISPATCH_EVENTS.c.event_id == event.event_id).values(consumed_at=now)
                )
            return len(events)
