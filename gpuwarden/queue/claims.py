"""What a worker does: register, claim, renew, and bring a result."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Executable, Select, and_, delete, exists, insert, not_, select, update

from gpuwarden.database import reading, writing
from gpuwarden.job import FRESH_S, LEASE_S, JobId, Move, Trip
from gpuwarden.queue import statements
from gpuwarden.queue.records import DrainedError, Job, ReplacedError, to_job
from gpuwarden.queue.room import Room
from gpuwarden.queue.statements import Prepared
from gpuwarden.schema import DEAD_WORKERS, JOBS, WORKER_GPUS, WORKERS


class Claims(Room):
    """A worker's moves: each names its attempt and its incarnation, and is refused once either has changed."""

    def register(
        self, queue: str, *, host: str, worker: str, incarnation: str, now: float, gpus: Sequence[str] = ()
    ) -> list[JobId]:
        """A new incarnation of a worker begins, and what the one before it held is settled; the ids of those jobs.

        It must hold the slot's lock already: that is what proves that the one before it in the same state folder is
        over. Nothing proves it of a worker of that name in another folder of the host, which would be ended, as this
        one would by its next start. A job of the incarnation before that still runs is queued again, at no cost of a
        retry; one that is fenced stays with whoever settles it.
        """
        with writing(self._engine) as connection:
            statements.see_worker(connection, host, worker, queue, incarnation, now, model=None)  # also locks the row
            connection.execute(*_unflag(host=host, worker=worker))
            slot = and_(WORKER_GPUS.c.host == host, WORKER_GPUS.c.worker == worker)
            connection.execute(delete(WORKER_GPUS).where(slot))
            if gpus:
                rows = [{"host": host, "worker": worker, "gpu": gpu} for gpu in sorted(set(gpus))]
                connection.execute(insert(WORKER_GPUS), rows)
            held = and_(JOBS.c.host == host, JOBS.c.worker == worker, JOBS.c.claimed_by != incarnation)
            return statements.give_away(connection, Move.SUPERSEDE, held, "its worker was started anew", now)

    def claim(
        self, queue: str, *, host: str, worker: str, incarnation: str, now: float, lease_s: float = LEASE_S
    ) -> Job | None:
        """Take the queue's next job for this incarnation, raising its attempt; `None` when there is none for it.

        There is none for a worker whose GPU is in quarantine, and a job is left to others for a while by the GPUs it
        was taken from. A slot that nobody has registered for is registered by its first claim. An incarnation has one
        job at a time: the one that it holds already, of a claim whose answer was lost, is given to it again.

        Raises:
            ReplacedError: this incarnation is over.
            DrainedError: it was asked to end once it has nothing to do.
        """
        slot = {"host": host, "worker": worker}
        mine = {**slot, "incarnation": incarnation}
        until = now + lease_s
        # What is there for it depends on who else is there.
        looks = {**slot, "queue": queue, "now": now, "fresh_since": now - FRESH_S}
        over = ReplacedError(f"incarnation {incarnation} of worker {host}/{worker} is over: it claims nothing")
        # A look first: a claim that finds nothing must write nothing, or idle workers would wake one another for ever.
        with reading(self._engine) as connection:
            if connection.scalar(*_is_over(**mine)):
                raise over
            if connection.scalar(*_is_drained(**mine)):
                raise DrainedError(f"worker {host}/{worker} was asked to end, and has nothing to do")
            if connection.scalar(*_mine(**mine)) is None and connection.scalar(*_next_job(**looks)) is None:
                return None
        with writing(self._engine) as connection:
            # The worker's row first: it keeps this claim and the registration of the next incarnation apart.
            if not statements.touch_worker(connection, host, worker, queue, incarnation, now):
                raise over
            # Looked for behind that row's lock: a commit that was still on its way when its answer was given up for
            # lost is done by now.
            row = connection.execute(*_take_again(**mine, until=until)).one_or_none()
            if row is None:
                row = connection.execute(*_take(**looks, incarnation=incarnation, until=until)).one_or_none()
            if row is None:
                return None
            statements.touch_worker(connection, host, worker, queue, incarnation, now, model=row.model or row.job_class)
            return to_job(row)

    def heartbeat(self, *, host: str, worker: str, queue: str, incarnation: str, model: str | None, now: float) -> bool:
        """Refresh the worker's row; `model` is what it holds now, `None` while it holds nothing.

        False when this incarnation is over, and then the worker must stop.
        """
        with writing(self._engine) as connection:
            accepted = statements.touch_worker(connection, host, worker, queue, incarnation, now, model=model)
            if accepted:
                connection.execute(*_unflag(host=host, worker=worker))
            return accepted

    def renew(self, job_id: int, *, attempt: int, incarnation: str, now: float, lease_s: float = LEASE_S) -> bool:
        """Lengthen the lease; false when the job is no longer this attempt's, and then the worker must stop."""
        claim = {"job_id": job_id, "attempt": attempt, "incarnation": incarnation}
        with writing(self._engine) as connection:
            return connection.execute(*_renew(**claim, until=now + lease_s)).rowcount == 1

    def owns(self, job_id: int, *, attempt: int, incarnation: str) -> bool:
        """Whether the attempt still holds its job; a read, cheap enough for every second."""
        with reading(self._engine) as connection:
            return connection.scalar(*_owned(job_id=job_id, attempt=attempt, incarnation=incarnation)) is not None

    def complete(self, job_id: int, *, attempt: int, incarnation: str, now: float) -> bool:
        """The attempt finished its work; false when it no longer held the job, and nothing was written."""
        claim = {"job_id": job_id, "attempt": attempt, "incarnation": incarnation}
        with writing(self._engine) as connection:
            return connection.execute(*_complete(**claim, now=now)).rowcount == 1

    def fail_by_worker(self, job_id: int, *, attempt: int, incarnation: str, because: str, now: float) -> bool:
        """The job's own code failed: terminal, with its `failed` event. False when the job was no longer held."""
        held = statements.held(job_id, attempt, incarnation)
        with writing(self._engine) as connection:
            return statements.end_failed(connection, Move.FAIL_BY_WORKER, held, job_id, attempt, because, now)

    def release(self, job_id: int, *, attempt: int, incarnation: str, now: float) -> bool:
        """Give the job back unharmed, as a worker does that is asked to stop. Counts as no retry."""
        held = statements.held(job_id, attempt, incarnation)
        with writing(self._engine) as connection:
            return bool(statements.give_away(connection, Move.RELEASE, held, "released by its worker", now))

    def retired_for(self, *, host: str, worker: str, incarnation: str) -> Trip | None:
        """The trip for which this incarnation's job was taken; `None` where none was, or its replacement is there."""
        trip = select(WORKERS.c.retired_for).where(
            WORKERS.c.host == host, WORKERS.c.worker == worker, WORKERS.c.retired == incarnation
        )
        with reading(self._engine) as connection:
            found = connection.scalar(trip)
        return None if found is None else Trip(found)


@Prepared
def _unflag(**its: ColumnElement[Any]) -> Executable:
    """A sign of life: it is not dead, or not any more."""
    return delete(DEAD_WORKERS).where(DEAD_WORKERS.c.host == its["host"], DEAD_WORKERS.c.worker == its["worker"])


@Prepared
def _is_over(**its: ColumnElement[Any]) -> Executable:
    return statements.is_over(its["host"], its["worker"], its["incarnation"])


@Prepared
def _is_drained(**its: ColumnElement[Any]) -> Executable:
    """Whether it is asked to end, and holds nothing of a claim whose answer was lost."""
    held = exists().where(statements.running_with(its["host"], its["worker"], its["incarnation"]))
    drained = WORKERS.c.draining == its["incarnation"]
    slot = and_(WORKERS.c.host == its["host"], WORKERS.c.worker == its["worker"])
    return select(WORKERS.c.worker).where(slot, drained, not_(held))


@Prepared
def _mine(**its: ColumnElement[Any]) -> Executable:
    return select(JOBS.c.job_id).where(statements.running_with(its["host"], its["worker"], its["incarnation"]))


@Prepared
def _next_job(**its: ColumnElement[Any]) -> Executable:
    return _next(its)


@Prepared
def _take(**its: ColumnElement[Any]) -> Executable:
    return statements.transition(
        Move.CLAIM,
        JOBS.c.job_id == _next(its).with_for_update(skip_locked=True).scalar_subquery(),
        attempt=JOBS.c.attempt + 1,
        claimed_by=its["incarnation"],
        host=its["host"],
        worker=its["worker"],
        claimed_at=its["now"],
        lease_expires_at=its["until"],
        because=None,
    ).returning(JOBS)


@Prepared
def _take_again(**its: ColumnElement[Any]) -> Executable:
    mine = statements.running_with(its["host"], its["worker"], its["incarnation"])
    return update(JOBS).where(mine).values(lease_expires_at=its["until"]).returning(JOBS)


@Prepared
def _renew(**its: ColumnElement[Any]) -> Executable:
    return update(JOBS).where(_held(its)).values(lease_expires_at=its["until"])


@Prepared
def _owned(**its: ColumnElement[Any]) -> Executable:
    return select(JOBS.c.job_id).where(_held(its))


@Prepared
def _complete(**its: ColumnElement[Any]) -> Executable:
    return statements.transition(Move.COMPLETE, _held(its), ended_at=its["now"], **statements.UNCLAIMED)


def _held(its: Mapping[str, ColumnElement[Any]]) -> ColumnElement[bool]:
    return statements.held(its["job_id"], its["attempt"], its["incarnation"])


def _next(its: Mapping[str, ColumnElement[Any]]) -> Select[tuple[int]]:
    """The first job of its queue that a worker may have."""
    job, host, worker = JOBS.alias("job"), its["host"], its["worker"]
    elsewhere = statements.better_elsewhere(job, host, worker, its["now"], its["fresh_since"])
    return (
        select(job.c.job_id)
        .where(job.c.queue == its["queue"], statements.from_sources(Move.CLAIM, job))
        .where(not_(statements.is_locked(host, worker)))
        .where(not_(statements.in_quarantine(host, worker)), not_(elsewhere))
        .order_by(job.c.priority, job.c.job_id)
        .limit(1)
    )
