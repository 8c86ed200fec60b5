"""What a person does: end, hold and free jobs; lock, unlock and drain workers."""

from sqlalchemy import ColumnElement, and_, func, or_, select, update

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import FRESH_S, JobId, Kind, Move, State
from gpuwarden.queue import runs, sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.items.failures import refuse_while_held
from gpuwarden.queue.models import BlockedError, WorkerRow, to_worker
from gpuwarden.queue.schema import JOBS, QUEUE, WORKER_GPUS, WORKERS


class Admin(QueueBase):
    """Moves that a person makes by hand: each is refused from a state that it does not start from."""

    def cancel(self, job_id: int, *, because: str, now: float) -> bool:
        """End a job that is not over, all its ranks, and what needs it; its workers stop themselves within a second.

        False when it was over, or not there yet.
        """
        with writing(self._engine) as connection:
            run_id = runs.lock_run_of(connection, job_id)
            gang = select(JOBS.c.gang).where(JOBS.c.job_id == job_id).scalar_subquery()
            # One of a run that was submitted meanwhile is not of what was locked: it was not there to be cancelled.
            its = and_(or_(JOBS.c.job_id == job_id, JOBS.c.gang == gang), JOBS.c.run_id.is_not_distinct_from(run_id))
            ids = runs.cancel(connection, its, because, now)
            if run_id is not None and ids:
                runs.cancel_what_needs(connection, ids, now)
                runs.close(connection, run_id, job_id, now)
            notify_after_commit(connection, QUEUE.channel)
            return bool(ids)

    def cancel_run(self, run_id: str, *, because: str, now: float) -> list[JobId]:
        """End a run: nothing is added to it any more, and its jobs that are not over are; the ids of those."""
        with writing(self._engine) as connection:
            runs.lock(connection, run_id)
            ids = runs.cancel(connection, JOBS.c.run_id == run_id, because, now)
            last = connection.scalar(select(func.max(JOBS.c.job_id)).where(JOBS.c.run_id == run_id))
            # One without jobs ends without an event: there is nobody whose it would be.
            runs.end(connection, run_id, Kind.RUN_CANCELLED, ids[0] if ids else last, now)
            notify_after_commit(connection, QUEUE.channel)
            return ids

    def block(self, job_id: int, *, because: str) -> bool:
        """Nobody claims the job until it is unblocked (B9); false unless it waits."""
        with writing(self._engine) as connection:
            held = sql.transition(Move.BLOCK, JOBS.c.job_id == job_id, because=because)
            return connection.execute(held).rowcount == 1

    def unblock(self, job_id: int, *, because: str, now: float) -> bool:
        """Let a blocked job be claimed again, once what it needs is done; false unless it is blocked.

        Raises:
            BlockedError: a worker that it was taken from may still run it, or it has no attempt left.
        """
        this = JOBS.c.job_id == job_id
        with writing(self._engine) as connection:
            runs.lock_run_of(connection, job_id)
            blocked = sql.locked(select(JOBS).where(this, sql.from_sources(Move.UNBLOCK)))
            if (row := connection.execute(blocked).one_or_none()) is None:
                return False
            refuse_while_held(row, now)
            if row.attempt >= row.attempts_max:
                raise BlockedError(
                    f"job {job_id} stays blocked: it has used all {row.attempts_max} attempts; "
                    f"`gpuwarden wrangle forgive` of its run gives it one more"
                )
            values = {"because": because, "lease_expires_at": None}
            freed = sql.transition(Move.UNBLOCK, this, JOBS.c.pending == 0, **values)
            waits = sql.transition(Move.DEFER, this, JOBS.c.pending > 0, **values)
            done = connection.execute(freed).rowcount == 1 or connection.execute(waits).rowcount == 1
            notify_after_commit(connection, QUEUE.channel)
            return done

    def workers(self, *, now: float) -> list[WorkerRow]:
        """Every slot that has ever registered, by host and name, with the job it runs."""
        has = sql.is_in({State.RUNNING, State.HOST_LOST})
        job = select(JOBS.c.job_id).where(JOBS.c.host == WORKERS.c.host, JOBS.c.worker == WORKERS.c.worker, has)
        found = select(WORKERS, job.limit(1).scalar_subquery().label("job_id"))
        with reading(self._engine) as connection:
            gpus: dict[tuple[str, str], list[str]] = {}
            for row in connection.execute(select(WORKER_GPUS).order_by(WORKER_GPUS.c.gpu)):
                gpus.setdefault((row.host, row.worker), []).append(row.gpu)
            rows = connection.execute(found.order_by(WORKERS.c.host, WORKERS.c.worker)).all()
        return [to_worker(row, gpus.get((row.host, row.worker), ()), fresh_since=now - FRESH_S) for row in rows]

    def lock(self, *, host: str, worker: str, who: str, because: str, now: float) -> bool:
        """Have a worker claim nothing until it is unlocked, however often it is started anew (B9).

        What it runs already, it finishes. False when there is no such worker.
        """
        with writing(self._engine) as connection:
            locked = update(WORKERS).where(_slot(host, worker))
            row = {"locked_at": now, "locked_by": who, "locked_because": because}
            return connection.execute(locked.values(**row)).rowcount == 1

    def unlock(self, *, host: str, worker: str, who: str, now: float) -> bool:
        """Let a worker claim again; false unless it was locked. Who did it last, and when, is kept with the worker."""
        with writing(self._engine) as connection:
            locked = update(WORKERS).where(_slot(host, worker), WORKERS.c.locked_at.is_not(None))
            free = dict.fromkeys(("locked_at", "locked_by", "locked_because"))
            done = connection.execute(locked.values(**free, unlocked_at=now, unlocked_by=who)).rowcount == 1
            notify_after_commit(connection, QUEUE.channel)
            return done

    def drain(self, *, host: str, worker: str) -> bool:
        """Have a worker end once what it runs is finished; false when there is no such worker.

        The one that is started after it is another, and claims.
        """
        with writing(self._engine) as connection:
            drained = update(WORKERS).where(_slot(host, worker)).values(draining=WORKERS.c.incarnation)
            done = connection.execute(drained).rowcount == 1
            notify_after_commit(connection, QUEUE.channel)
            return done


def _slot(host: str, worker: str) -> ColumnElement[bool]:
    return and_(WORKERS.c.host == host, WORKERS.c.worker == worker)
