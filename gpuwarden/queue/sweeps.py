"""Timed work: reclaim expired leases, consume `failed` events, and delete old jobs."""

from collections.abc import Iterable

from sqlalchemy import Engine, Executable, String, and_, delete, literal_column, select, tuple_, update

from gpuwarden.db.locks import try_advisory_lock
from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import INGEST, JobId, Kind, Move
from gpuwarden.queue import ranks, retention, runs, sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.schema import GPU_AVOIDANCE, JOBS, OUTBOX_EVENTS
from gpuwarden.queue.sql import Prepared


class Sweeps(QueueBase):
    """Sweeps. Only one of each kind runs at a time."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._place = retention.START

    def expired(self, *, now: float) -> frozenset[tuple[JobId, int]]:
        """Jobs whose lease or fence has expired, with their attempts."""
        found = select(JOBS.c.job_id, JOBS.c.attempt).where(
            JOBS.c.lease_expires_at < now, sql.from_sources(Move.RECLAIM)
        )
        with reading(self._engine) as connection:
            return frozenset((JobId(row.job_id), row.attempt) for row in connection.execute(found))

    def reclaim_expired(
        self, *, now: float, among: Iterable[JobId] | None = None, ingest: bool | None = None
    ) -> list[JobId]:
        """Requeue jobs with an expired lease, or fail those at a cap (A13); returns their ids.

        Skips locked jobs, and does nothing while another sweep runs. `ingest` selects jobs that ingest data, or the
        others (A17). After a suspend or an outage, the caller must first wait for a renewal.
        """
        if ingest is None:
            chosen = None if among is None else list(among)
            try:
                found = self.reclaim_expired(now=now, among=chosen, ingest=False)
            finally:
                ingest_ones = self.reclaim_expired(now=now, among=chosen, ingest=True)
            return sorted([*found, *ingest_ones])
        expired = and_(JOBS.c.lease_expires_at < now, JOBS.c.job_class.in_(sorted(INGEST)) == ingest)
        if among is not None:
            expired = and_(expired, JOBS.c.job_id.in_(sorted(among)))
        with writing(self._engine) as connection:
            if not try_advisory_lock(connection, "sweep of ingest leases" if ingest else "sweep of leases"):
                return []
            ranks.lock_runs_of(connection, and_(expired, sql.from_sources(Move.RECLAIM)))
            reclaimed = sql.requeue_or_fail(connection, Move.RECLAIM, expired, "lease expired", now)
            ranks.recall(connection, reclaimed, now)
            if not ingest:  # last: a requeue locks its job before these rows
                key = GPU_AVOIDANCE.primary_key.columns
                past = select(*key).where(GPU_AVOIDANCE.c.until <= now).with_for_update(skip_locked=True)
                connection.execute(delete(GPU_AVOIDANCE).where(tuple_(*key).in_(past)))
            return reclaimed

    def consume_events(self, *, now: float) -> int:
        """Fail the run of each new `failed` event (A10); returns the number of events."""
        with writing(self._engine) as connection:
            if not try_advisory_lock(connection, "consumer of dispatch events"):
                return 0
            events = connection.execute(*_unheeded()).all()
            runs.lock_all(connection, [event.run_id for event in events if event.run_id is not None])
            for event in events:
                if event.run_id is not None:
                    runs.end(connection, event.run_id, Kind.RUN_FAILED, event.job_id, now)
                    reason = f"job {event.job_id} of its run failed"
                    runs.cancel(connection, JOBS.c.run_id == event.run_id, reason, now)
                heeded = update(OUTBOX_EVENTS).where(OUTBOX_EVENTS.c.event_id == event.event_id)
                connection.execute(heeded.values(run_failed_at=now))
            return len(events)

    def delete_old(self, *, now: float) -> bool:
        """Delete a batch of old jobs, from where the last call ended; False if it has none."""
        with reading(self._engine) as connection:
            batch = retention.next_batch(connection, self._place, now)
        whole = True
        if batch.jobs:
            with writing(self._engine) as connection:
                if not try_advisory_lock(connection, "deletion of jobs"):
                    return False
                runs.lock_all(connection, batch.runs)
                # A run may have been reopened.
                again = retention.next_batch(connection, self._place, now)
                whole = retention.delete_batch(connection, batch.intersection(again))
        if whole:
            self._place = batch.end
        return bool(batch.jobs)


@Prepared
def _unheeded() -> Executable:
    failed = OUTBOX_EVENTS.c.kind == literal_column(f"'{Kind.FAILED}'", String)
    unread = select(OUTBOX_EVENTS).where(OUTBOX_EVENTS.c.run_failed_at.is_(None), failed)
    return unread.order_by(OUTBOX_EVENTS.c.event_id).limit(sql.SWEEP_MAX)
