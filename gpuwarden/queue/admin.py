"""Operator actions: cancel, block and unblock jobs; lock, unlock and drain workers."""

from sqlalchemy import ColumnElement, and_, func, or_, select, update

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.rows import readable
from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import FRESH_S, JobId, Kind, Move, State
from gpuwarden.queue import runs, sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.items.failures import refuse_while_held
from gpuwarden.queue.models import BlockedError, LockedWorker, WorkerRow
from gpuwarden.queue.rows import to_worker
from gpuwarden.queue.schema import JOBS, QUEUE, WORKER_GPUS, WORKERS


class Admin(QueueBase):
    """Operator actions."""

    def cancel(self, job_id: int, *, reason: str, now: float) -> bool:
        """Cancel a job, its ranks, and the jobs that need it; False if it has ended.

        Their workers stop within a second.
        """
        with writing(self._engine) as connection:
            run_id = runs.lock_run_of(connection, job_id)
            gang = select(JOBS.c.gang).where(JOBS.c.job_id == job_id).scalar_subquery()
            its = and_(or_(JOBS.c.job_id == job_id, JOBS.c.gang == gang), JOBS.c.run_id.is_not_distinct_from(run_id))
            ids = runs.cancel(connection, its, reason, now)
            if run_id is not None and ids:
                runs.cancel_what_needs(connection, ids, now)
                runs.close(connection, run_id, job_id, now)
            notify_after_commit(connection, QUEUE.channel)
            return bool(ids)

    def cancel_run(self, run_id: str, *, reason: str, now: float) -> list[JobId]:
        """Cancel a run and its unfinished jobs; returns their ids."""
        with writing(self._engine) as connection:
            runs.lock(connection, run_id)
            ids = runs.cancel(connection, JOBS.c.run_id == run_id, reason, now)
            last = connection.scalar(select(func.max(JOBS.c.job_id)).where(JOBS.c.run_id == run_id))
            # An event names a job: without jobs the run ends without an event.
            runs.end(connection, run_id, Kind.RUN_CANCELLED, ids[0] if ids else last, now)
            notify_after_commit(connection, QUEUE.channel)
            return ids

    def block(self, job_id: int, *, reason: str, now: float) -> bool:
        """Keep workers from claiming a waiting job (B9); False if it does not wait."""
        with writing(self._engine) as connection:
            held = sql.transition(Move.BLOCK, JOBS.c.job_id == job_id, reason=reason)
            if connection.execute(held).rowcount != 1:
                return False
            sql.write_untimed(connection, Kind.BLOCKED, [job_id], now)
            return True

    def unblock(self, job_id: int, *, reason: str, now: float) -> bool:
        """Make a blocked job claimable once its needs are done; False if it is not blocked.

        Raises:
            BlockedError: its last worker may still run it, or it has no attempt left.
        """
        this = JOBS.c.job_id == job_id
        with writing(self._engine) as connection:
            runs.lock_run_of(connection, job_id)
            blocked = sql.lock_jobs(select(JOBS).where(this, sql.from_sources(Move.UNBLOCK)))
            if (row := connection.execute(blocked).one_or_none()) is None:
                return False
            refuse_while_held(row, now)
            if row.attempt >= row.attempts_max:
                raise BlockedError(
                    f"job {job_id} stays blocked: it has used all {row.attempts_max} attempts; "
                    f"`gpuwarden wrangle forgive` of its run gives it one more"
                )
            values = {"reason": reason, "lease_expires_at": None}
            freed = sql.transition(Move.UNBLOCK, this, JOBS.c.pending == 0, **values)
            waits = sql.transition(Move.DEFER, this, JOBS.c.pending > 0, **values)
            done = connection.execute(freed).rowcount == 1 or connection.execute(waits).rowcount == 1
            notify_after_commit(connection, QUEUE.channel)
            return done

    def workers(self, *, now: float) -> list[WorkerRow]:
        """All registered slots, by host and name, with the jobs they run."""
        has = sql.is_in({State.RUNNING, State.HOST_LOST})
        job = select(JOBS.c.job_id).where(JOBS.c.host == WORKERS.c.host, JOBS.c.worker == WORKERS.c.worker, has)
        found = select(WORKERS, job.limit(1).scalar_subquery().label("job_id"))
        with reading(self._engine) as connection:
            gpus: dict[tuple[str, str], list[str]] = {}
            for row in connection.execute(select(WORKER_GPUS).order_by(WORKER_GPUS.c.gpu)):
                gpus.setdefault((row.host, row.worker), []).append(row.gpu)
            rows = connection.execute(found.order_by(WORKERS.c.host, WORKERS.c.worker)).all()
        return list(
            readable(
                rows,
                lambda row: to_worker(row, gpus.get((row.host, row.worker), ()), fresh_since=now - FRESH_S),
            )
        )

    def locked_by_gpuwarden(self) -> list[LockedWorker]:
        """Workers that gpuwarden locked. Only operators have an @ in their name."""
        its = WORKERS.c.host, WORKERS.c.worker, WORKERS.c.locked_at, func.coalesce(WORKERS.c.locked_reason, "")
        found = select(*its).where(WORKERS.c.locked_at.is_not(None), WORKERS.c.locked_by.not_like("%@%"))
        with reading(self._engine) as connection:
            return [LockedWorker(*row) for row in connection.execute(found.order_by(WORKERS.c.host, WORKERS.c.worker))]

    def lock(self, *, host: str, worker: str, who: str, reason: str, now: float) -> bool:
        """Keep a slot from claiming until it is unlocked (B9); False if it is unknown."""
        with writing(self._engine) as connection:
            locked = update(WORKERS).where(_slot(host, worker))
            row = {"locked_at": now, "locked_by": who, "locked_reason": reason}
            return connection.execute(locked.values(**row)).rowcount == 1

    def unlock(self, *, host: str, worker: str, who: str, now: float) -> bool:
        """Let a locked worker claim again; False if it was not locked."""
        with writing(self._engine) as connection:
            locked = update(WORKERS).where(_slot(host, worker), WORKERS.c.locked_at.is_not(None))
            free = dict.fromkeys(("locked_at", "locked_by", "locked_reason"))
            done = connection.execute(locked.values(**free, unlocked_at=now, unlocked_by=who)).rowcount == 1
            notify_after_commit(connection, QUEUE.channel)
            return done

    def drain(self, *, host: str, worker: str) -> bool:
        """Stop this incarnation of a worker after its current job; False if it is unknown."""
        with writing(self._engine) as connection:
            drained = update(WORKERS).where(_slot(host, worker)).values(draining_incarnation=WORKERS.c.incarnation)
            done = connection.execute(drained).rowcount == 1
            notify_after_commit(connection, QUEUE.channel)
            return done


def _slot(host: str, worker: str) -> ColumnElement[bool]:
    return and_(WORKERS.c.host == host, WORKERS.c.worker == worker)
