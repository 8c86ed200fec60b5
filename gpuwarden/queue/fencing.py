"""The remediator's moves: fence, requeue or fail a job; retire a worker."""

from typing import Final

from sqlalchemy import Connection, and_, case, select, update

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.rows import readable
from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.job import FENCE_S, REQUEUE_PRIORITY, Condition, Move, State
from gpuwarden.queue import ranks, sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import DeadWorker, Slot
from gpuwarden.queue.rows import to_dead_worker
from gpuwarden.queue.schema import DEAD_WORKERS, JOBS, QUEUE, WORKERS

STAMP_S: Final = 30.0
"""Least time between two stamps of a dead worker's flag, seconds (A14)."""

FLAG_FRESH_S: Final = 90.0
"""Age at which a flag expires after its last stamp, seconds (A14)."""


class Fencing(QueueBase):
    """The remediator's moves."""

    def fence(self, job_id: int, *, attempt: int, incarnation: str, condition: Condition, now: float) -> bool:
        """Take a job from an attempt and retire its worker's incarnation (A12).

        False unless `incarnation` holds the job: one worker's state files cannot move another worker's job.
        """
        held = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt, JOBS.c.claimed_by == incarnation)
        take = sql.transition(Move.FENCE, held, reason=f"{condition}: fenced", lease_expires_at=now + FENCE_S)
        with writing(self._engine) as connection:
            slot = connection.execute(select(JOBS.c.host, JOBS.c.worker, JOBS.c.queue).where(held)).one_or_none()
            if slot is None:
                return False
            # The worker's row before the job's, as a registration does, to avoid a deadlock.
            its_row = and_(WORKERS.c.host == slot.host, WORKERS.c.worker == slot.worker)
            connection.execute(select(WORKERS.c.incarnation).where(its_row).with_for_update())
            if connection.execute(take).rowcount != 1:
                return False
            retire = sql.update_worker(slot.host, slot.worker, incarnation)
            connection.execute(retire.values(**sql.retired_row(incarnation, now), retired_for=condition))
            if condition is Condition.DEAD_WORKER:
                _flag(
                    connection, slot.host, slot.worker, slot.queue, incarnation, f"job {job_id} was taken from it", now
                )
            notify_after_commit(connection, QUEUE.channel)
            return True

    def hold_fence(self, job_id: int, *, attempt: int, now: float) -> bool:
        """Extend a fence; False if the job is not fenced.

        Stamps the flag of its dead worker again.
        """
        fenced = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt, JOBS.c.state == State.FENCING)
        with writing(self._engine) as connection:
            longer = update(JOBS).where(fenced).values(lease_expires_at=now + FENCE_S)
            holder = connection.execute(longer.returning(JOBS.c.claimed_by)).one_or_none()
            if holder is None:
                return False
            its = and_(DEAD_WORKERS.c.incarnation == holder.claimed_by, DEAD_WORKERS.c.stamped_at <= now - STAMP_S)
            connection.execute(update(DEAD_WORKERS).where(its).values(stamped_at=now))
            return True

    def requeue(
        self,
        job_id: int,
        *,
        attempt: int,
        condition: Condition,
        now: float,
        avoid: Slot | None = None,
        avoid_s: float = 0.0,
    ) -> bool:
        """Requeue a fenced job with a higher priority and one more watchdog retry (A9).

        For `avoid_s` seconds the job avoids the slot `avoid` and its GPUs, while other workers can take it. False, with
        nothing written, if it is not fenced or has no attempt left.
        """
        back = sql.transition(
            Move.REQUEUE,
            JOBS.c.job_id == job_id,
            JOBS.c.attempt == attempt,
            JOBS.c.attempt < JOBS.c.attempts_max,
            priority=sql.least(JOBS.c.priority, REQUEUE_PRIORITY),
            watchdog_retries=JOBS.c.watchdog_retries + 1,
            reason=f"{condition}: requeued",
            queued_at=now,
            **sql.UNCLAIMED,
        )
        with writing(self._engine) as connection:
            ranks.lock_runs_of(connection, JOBS.c.job_id == job_id)
            if connection.execute(back).rowcount != 1:
                return False
            ranks.recall(connection, [job_id], now, tripped=True)
            if avoid is not None:
                sql.avoid(connection, job_id, avoid, until=now + avoid_s, now=now)
            notify_after_commit(connection, QUEUE.channel)
            return True

    def fail(self, job_id: int, *, attempt: int, reason: str, now: float) -> bool:
        """Fail a fenced job and write its `failed` event (A10)."""
        fenced = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt)
        with writing(self._engine) as connection:
            return sql.end_failed(connection, Move.FAIL, fenced, job_id, reason, now)

    def dead_workers(self, *, now: float, host: str | None = None, queue: str | None = None) -> list[DeadWorker]:
        """Dead workers, stamped within `FLAG_FRESH_S` (A14)."""
        found = select(DEAD_WORKERS).where(DEAD_WORKERS.c.stamped_at > now - FLAG_FRESH_S)
        if host is not None:
            found = found.where(DEAD_WORKERS.c.host == host)
        if queue is not None:
            found = found.where(DEAD_WORKERS.c.queue == queue)
        with reading(self._engine) as connection:
            rows = connection.execute(found.order_by(DEAD_WORKERS.c.host, DEAD_WORKERS.c.worker))
            return list(readable(rows, to_dead_worker))

    def retire_worker(self, *, host: str, worker: str, incarnation: str, now: float) -> bool:
        """Retire an incarnation whose process is being ended (A12); False if it was replaced."""
        with writing(self._engine) as connection:
            condition = case((WORKERS.c.retired_incarnation == incarnation, WORKERS.c.retired_for), else_=None)
            retire = sql.update_worker(host, worker, incarnation).values(
                **sql.retired_row(incarnation, now), retired_for=condition
            )
            return connection.execute(retire).rowcount == 1


def _flag(
    connection: Connection, host: str, worker: str, queue: str, incarnation: str, reason: str, now: float
) -> None:
    row = {"queue": queue, "incarnation": incarnation, "since": now, "stamped_at": now, "reason": reason}
    flag = upsert(connection, DEAD_WORKERS).values(host=host, worker=worker, **row)
    keys = [DEAD_WORKERS.c.host, DEAD_WORKERS.c.worker]
    connection.execute(flag.on_conflict_do_update(index_elements=keys, set_=row))
