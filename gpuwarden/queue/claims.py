"""The queue operations of a worker: register, claim a job, renew its lease, and return its result."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Row,
    and_,
    delete,
    exists,
    func,
    insert,
    literal,
    not_,
    select,
    update,
)

from gpuwarden.db.engine import is_shared
from gpuwarden.db.errors import UnreadableRowError
from gpuwarden.db.transactions import autocommit, reading, upsert, writing
from gpuwarden.job import (
    AFFINITY_S,
    AVOID_S,
    FRESH_S,
    LEASE_S,
    Condition,
    JobId,
    Kind,
    Move,
    State,
    retry_wait_s,
)
from gpuwarden.queue import ranks, runs, sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.claiming import one_trip, parts
from gpuwarden.queue.models import Completion, DrainedError, Job, ReplacedError, Result, Slot, Success, check_result
from gpuwarden.queue.rows import to_job
from gpuwarden.queue.schema import DEAD_WORKERS, FATAL_ERRORS, JOBS, WORKER_GPUS, WORKERS
from gpuwarden.queue.sql import Prepared

FATAL_JOBS_MAX: Final = 3
"""Different jobs with a fatal error until their worker is locked."""

FOLLOWS_MAX: Final = 80
"""Most characters that the queue adds to a reason."""

FATAL_WINDOW_S: Final = 3600.0
"""How long a fatal error counts, seconds."""

LOCKED_BY_ERRORS: Final = "gpuwarden, after fatal errors"
"""Who locked it."""


class Claims(QueueBase):
    """The queue operations of a worker."""

    def register(
        self, queue: str, *, host: str, worker: str, incarnation: str, now: float, gpus: Sequence[str] = ()
    ) -> list[JobId]:
        """Start a new incarnation of a worker and requeue the jobs of its earlier incarnations; returns their ids.

        The caller must hold the lock of the worker's state file, which proves that the earlier incarnation has ended.
        Two workers with one name in different state folders are not detected. Fenced jobs stay fenced.
        """
        with writing(self._engine) as connection:
            sql.set_incarnation(connection, host, worker, queue, incarnation, now, model=None)  # also locks the row
            connection.execute(*delete_dead_flag(host=host, worker=worker, incarnation=incarnation))
            slot = and_(WORKER_GPUS.c.host == host, WORKER_GPUS.c.worker == worker)
            connection.execute(delete(WORKER_GPUS).where(slot))
            if gpus:
                rows = [{"host": host, "worker": worker, "gpu": gpu} for gpu in sorted(set(gpus))]
                connection.execute(insert(WORKER_GPUS), rows)
            held = and_(JOBS.c.host == host, JOBS.c.worker == worker, JOBS.c.claimed_by != incarnation)
            ranks.lock_runs_of(connection, and_(held, sql.from_sources(Move.SUPERSEDE)))
            settled = sql.requeue_or_fail(connection, Move.SUPERSEDE, held, "its worker was restarted", now)
            ranks.recall(connection, settled, now)
            return settled

    def claim(
        self,
        queue: str,
        *,
        host: str,
        worker: str,
        incarnation: str,
        now: float,
        lease_s: float = LEASE_S,
        loaded: str | None = None,
    ) -> Job | None:
        """Claim the next job of the queue and increase its attempt number; `None` if this worker can take no job.

        Jobs go by priority, then age. Within a priority, jobs for the model `loaded` go first until another job has
        waited for `AFFINITY_S`. If the connection failed before a claim returned, the next claim returns the same job.

        Raises:
            ReplacedError: this incarnation was replaced or retired.
            DrainedError: the worker is draining and has no job.
        """
        question = _question(queue, host, worker, incarnation, now, lease_s, loaded)
        row = None
        if is_shared(self._engine):
            with autocommit(self._engine) as connection:
                found = one_trip.claim.execute(connection, **question).one()
            if found.job_id is not None:
                row = found
            elif found.next is None and not (found.over or found.drained or found.mine):
                return None
        if row is None:
            row = self._claim_in_steps(question)
        return None if row is None else self._begin(row, incarnation, now)

    def _claim_in_steps(self, question: Mapping[str, Any]) -> Row[Any] | None:
        host, worker, incarnation = question["host"], question["worker"], question["incarnation"]
        seen = (host, worker, question["queue"], incarnation, question["now"])
        mine = {"host": host, "worker": worker, "incarnation": incarnation, "until": question["until"]}
        loaded = question.get("loaded")
        over = ReplacedError(f"incarnation {incarnation} of worker {host}/{worker} is over")
        # Read first: a claim that finds no job must not write: a write would wake the other idle workers.
        with reading(self._engine) as connection:
            found = connection.execute(*_find_next(**question)).one()
        if found.over:
            raise over
        if found.drained and not found.mine:
            raise DrainedError(f"worker {host}/{worker} is draining and has no job")
        if not found.mine and found.next is None:
            return None
        with writing(self._engine) as connection:
            # Lock the worker's row first: it orders the claim and the next registration.
            if not sql.touch_worker(connection, *seen, loaded=loaded):
                raise over
            # Check again under the lock: an earlier claim of this worker may have been committed since the read.
            row = connection.execute(*_extend_own_claim(**mine)).one_or_none()
            if row is None:
                row = connection.execute(*_take(**question)).one_or_none()
            elif sql.recover_lost(connection, row.job_id, row.attempt, incarnation, question["now"]):
                row = connection.execute(*_extend_own_claim(**mine)).one()
            if row is not None:
                sql.touch_worker(connection, *seen, model=row.model or row.job_class, loaded=loaded)
            return row

    def _begin(self, row: Row[Any], incarnation: str, now: float) -> Job | None:
        """The claimed job; `None` if it is unreadable, and so failed."""
        if row.gang is not None:  # in its own transaction: otherwise claims of two ranks of a gang deadlock
            with writing(self._engine) as connection:
                ranks.begin(connection, row.gang)
        try:
            return to_job(row)
        except UnreadableRowError as error:
            its = {"attempt": row.attempt, "incarnation": incarnation}
            self.fail_by_worker(row.job_id, **its, reason=str(error), now=now)
            return None

    def heartbeat(
        self,
        *,
        host: str,
        worker: str,
        queue: str,
        incarnation: str,
        model: str | None,
        now: float,
        loaded: str | None = None,
        completed_at: float | None = None,
    ) -> bool:
        """Refresh the worker's row; False if this incarnation was replaced or retired: the worker must stop.

        `model` is the model of the current job. `loaded` is the model that the worker keeps for later jobs.
        """
        # The calling thread may be suspended at any point: see autocommit.
        with autocommit(self._engine) as connection:
            accepted = sql.touch_worker(
                *(connection, host, worker, queue, incarnation, now),
                model=model,
                loaded=loaded,
                completed_at=completed_at,
            )
            if accepted:
                connection.execute(*delete_dead_flag(host=host, worker=worker, incarnation=incarnation))
            return accepted

    def renew(self, job_id: int, *, attempt: int, incarnation: str, now: float, lease_s: float = LEASE_S) -> bool:
        """Extend the lease; False if this attempt no longer owns the job."""
        claim = {"job_id": job_id, "attempt": attempt, "incarnation": incarnation}
        until = now + lease_s
        # The calling thread may be suspended at any point: see autocommit.
        with autocommit(self._engine) as connection:

            def renew() -> bool:
                return connection.execute(*_renew(**claim, until=until)).rowcount == 1

            def recover() -> bool:
                return sql.recover_lost(connection, job_id, attempt, incarnation, now, until=until)

            return renew() or recover() or renew()

    def owns(self, job_id: int, *, attempt: int, incarnation: str) -> bool:
        """Whether the attempt still owns its job; one cheap read."""
        with reading(self._engine) as connection:
            return connection.scalar(*_owned_job(job_id=job_id, attempt=attempt, incarnation=incarnation)) is not None

    def complete(
        self,
        job_id: int,
        *,
        attempt: int,
        incarnation: str,
        now: float,
        result: Result = None,
        reason: str | None = None,
        of: tuple[str, str] | None = None,
    ) -> bool:
        """Complete the job; False, with nothing written, if this attempt no longer owns the job.

        The jobs of a gang complete together, when the last rank finishes. `result` is stored with the job, as is
        `reason`, a warning about it. `of` is the host and the worker that must have claimed the attempt.

        Raises:
            ResultError: the result is not JSON, or is too long.
        """
        check_result(result)
        its = _its_end(job_id, attempt, incarnation, now, result, reason)
        if is_shared(self._engine):
            slot = {} if of is None else {"host": of[0], "worker": of[1]}
            with autocommit(self._engine) as connection:
                if one_trip.complete.execute(connection, **its, **slot).first() is not None:
                    return True
        if of is not None and not self.is_of(
            job_id, attempt=attempt, incarnation=incarnation, host=of[0], worker=of[1]
        ):
            return False
        with writing(self._engine) as connection:
            return _complete_in_steps(connection, **its)

    def complete_and_claim(
        self,
        success: Success,
        *,
        queue: str,
        host: str,
        worker: str,
        incarnation: str,
        now: float,
        lease_s: float = LEASE_S,
        loaded: str | None = None,
    ) -> Completion:
        """Complete a job of this slot, refresh the worker's row and claim the next job, in one transaction.

        `done` is what `complete` returns. Without a job, and not idle, `claim` gives the reason.

        Raises:
            ResultError: the result is not JSON, or is too long.
        """
        check_result(success.result)
        job_id, attempt, result, reason, in_run = success
        its = _its_end(job_id, attempt, incarnation, now, result, reason)
        question = _question(queue, host, worker, incarnation, now, lease_s, loaded)
        found = None
        if is_shared(self._engine) and not in_run:
            with autocommit(self._engine) as connection:
                found = one_trip.complete_and_claim.execute(connection, **its | question).one()
        if found is not None and found.done is not None:
            row, is_idle = found if found.job_id is not None else None, not found.busy
        else:
            with writing(self._engine) as connection:
                # The worker's row first, as a claim does: no deadlock.
                connection.execute(select(WORKERS.c.worker).where(_is_slot(host, worker)).with_for_update())
                claim = {"job_id": job_id, "attempt": attempt, "incarnation": incarnation}
                is_its = connection.scalar(*_claimed_by_slot(**claim, host=host, worker=worker)) is not None
                if not (is_its and _complete_in_steps(connection, **its)):
                    return Completion(done=False)
                seen = connection.execute(*_find_next(**question)).one()
                row, is_idle = None, not (seen.over or seen.drained or seen.mine)
                if is_idle and seen.next is not None:
                    row = connection.execute(*_take(**question)).one_or_none()
                model = None if row is None else row.model or row.job_class
                sql.touch_worker(
                    *(connection, host, worker, queue, incarnation, now),
                    model=model,
                    loaded=loaded,
                    completed_at=now,
                )
        job = None if row is None else self._begin(row, incarnation, now)
        return Completion(done=True, job=job, idle=row is None and is_idle)

    def fail_by_worker(
        self, job_id: int, *, attempt: int, incarnation: str, reason: str, now: float, traceback: str | None = None
    ) -> bool:
        """Fail the job because its code failed; False if this attempt no longer owns the job."""
        held = sql.is_held(job_id, attempt, incarnation)
        with writing(self._engine) as connection:
            sql.recover_lost(connection, job_id, attempt, incarnation, now)
            return sql.end_failed(connection, Move.FAIL_BY_WORKER, held, job_id, reason, now, traceback=traceback)

    def retry(
        self, job_id: int, *, attempt: int, incarnation: str, reason: str, now: float, traceback: str | None = None
    ) -> bool:
        """Requeue the job because its code failed, with a wait that doubles.

        False if this attempt no longer owns the job, or if no retry or attempt is left.
        """
        held = sql.is_held(job_id, attempt, incarnation)
        left = and_(JOBS.c.retries < JOBS.c.retries_max, JOBS.c.attempt < JOBS.c.attempts_max)
        with writing(self._engine) as connection:
            sql.recover_lost(connection, job_id, attempt, incarnation, now)
            row = connection.execute(sql.lock_jobs(select(JOBS).where(held, left))).one_or_none()
            if row is None:
                return False
            wait_s = retry_wait_s(row.retries)
            its = {"retries": row.retries + 1, "retry_at": now + wait_s, "queued_at": now, "traceback": traceback}
            reason = f"{reason}; retry {row.retries + 1} of {row.retries_max}"
            connection.execute(sql.transition(Move.RETRY, held, reason=reason, **its, **sql.UNCLAIMED))
            return True

    def release(self, job_id: int, *, attempt: int, incarnation: str, now: float) -> bool:
        """Requeue the job of a worker that stops. No retry is counted."""
        held = sql.is_held(job_id, attempt, incarnation)
        with writing(self._engine) as connection:
            ranks.lock_runs_of(connection, sql.is_claimed(job_id, attempt, incarnation))
            sql.recover_lost(connection, job_id, attempt, incarnation, now)
            released = sql.requeue_or_fail(connection, Move.RELEASE, held, "released by its worker", now)
            ranks.recall(connection, released, now)
            return bool(released)

    def give_back(
        self,
        job_id: int,
        *,
        attempt: int,
        incarnation: str,
        slot: Slot,
        reason: str,
        now: float,
        traceback: str | None = None,
    ) -> bool:
        """Requeue the job of a worker whose process cannot go on; False if this attempt no longer owns it.

        It counts as a reclaim, and the job avoids the worker. After `FATAL_JOBS_MAX` such jobs in `FATAL_WINDOW_S` the
        worker is locked.
        """
        held = sql.is_held(job_id, attempt, incarnation)
        with writing(self._engine) as connection:
            # The worker's row first, as a registration does: no deadlock.
            connection.execute(select(WORKERS.c.worker).where(_is_slot(slot.host, slot.worker)).with_for_update())
            ranks.lock_runs_of(connection, sql.is_claimed(job_id, attempt, incarnation))
            sql.recover_lost(connection, job_id, attempt, incarnation, now)
            settled = sql.requeue_or_fail(connection, Move.GIVE_BACK, held, reason, now)
            ranks.recall(connection, settled, now)
            if settled:
                connection.execute(update(JOBS).where(JOBS.c.job_id == job_id).values(traceback=traceback))
                sql.avoid(connection, job_id, slot, until=now + AVOID_S, now=now)
                _note_fatal_error(connection, slot, job_id, now)
            return bool(settled)

    def is_of(self, job_id: int, *, attempt: int, incarnation: str, host: str, worker: str) -> bool:
        """Whether this slot claimed the attempt. An attempt never moves to another slot."""
        claim = {"job_id": job_id, "attempt": attempt, "incarnation": incarnation}
        with autocommit(self._engine) as connection:
            return connection.scalar(*_claimed_by_slot(**claim, host=host, worker=worker)) is not None

    def is_settled(
        self, job_id: int, *, attempt: int, reason: str | None, given_back: bool, retried_after: int | None
    ) -> bool:
        """Whether the queue has this result of the attempt, from a commit whose answer was lost.

        `retried_after` is the number of retries before it, if it is to be retried.
        """
        with autocommit(self._engine) as connection:
            found = connection.execute(select(JOBS).where(JOBS.c.job_id == job_id)).one_or_none()
        if found is None:
            return False
        if retried_after is not None:
            return bool(found.retries > retried_after)
        if reason is None:
            ours = found.state in (State.COMPLETED, State.FINISHED)
        elif given_back:
            # More may follow it. The limit keeps the answer from telling texts that the caller does not know.
            said = str(found.reason)
            ours = said.startswith(reason) and len(said) - len(reason) <= FOLLOWS_MAX
        else:
            ours = found.state == State.FAILED and found.reason == reason
        return bool(ours and found.attempt == attempt)

    def others_completed(self, queue: str, *, host: str, worker: str, since: float) -> bool:
        """Whether another worker of the queue has completed a job since then."""
        other = and_(WORKERS.c.queue == queue, not_(_is_slot(host, worker)), WORKERS.c.completed_at >= since)
        with reading(self._engine) as connection:
            return bool(connection.scalar(select(exists().where(other))))

    def retired_for(self, *, host: str, worker: str, incarnation: str) -> Condition | None:
        """The condition for which gpuwarden took this incarnation's job; `None` if none, or once it is replaced."""
        condition = select(WORKERS.c.retired_for).where(
            WORKERS.c.host == host, WORKERS.c.worker == worker, WORKERS.c.retired_incarnation == incarnation
        )
        with reading(self._engine) as connection:
            found = connection.scalar(condition)
        return None if found is None else Condition(found)


def _question(
    queue: str, host: str, worker: str, incarnation: str, now: float, lease_s: float, loaded: str | None
) -> dict[str, Any]:
    """Parameters of a claim."""
    slot = {"queue": queue, "host": host, "worker": worker, "incarnation": incarnation}
    times = {"now": now, "fresh_since": now - FRESH_S, "until": now + lease_s}
    return slot | times | ({} if loaded is None else {"loaded": loaded, "overtaken_since": now - AFFINITY_S})


def _its_end(
    job_id: int, attempt: int, incarnation: str, now: float, result: Result, reason: str | None
) -> dict[str, Any]:
    """Parameters of a completion."""
    claim = {"job_id": job_id, "attempt": attempt, "incarnation": incarnation}
    return claim | {"now": now, "result": result} | ({} if reason is None else {"reason": reason})


def _complete_in_steps(
    connection: Connection, *, job_id: int, attempt: int, incarnation: str, now: float, **left: Any
) -> bool:
    run_id = runs.lock_run_of(connection, job_id)
    gang = None if run_id is None else connection.scalar(*_gang_of(job_id=job_id))
    claim: dict[str, Any] = {"job_id": job_id, "attempt": attempt, "incarnation": incarnation}
    done = (_complete if gang is None else _finish)(**claim, now=now, **left)
    if connection.execute(*done).rowcount != 1 and not (
        sql.recover_lost(connection, job_id, attempt, incarnation, now) and connection.execute(*done).rowcount == 1
    ):
        return False
    if run_id is not None and gang is not None:
        ranks.close(connection, run_id, gang, now)
        return True
    connection.execute(*sql.write_event(kind=Kind.COMPLETED, now=now, job_id=job_id))
    if run_id is not None:
        runs.queue_dependents(connection, run_id, job_id, now)
    return True


def _is_slot(host: str, worker: str) -> ColumnElement[bool]:
    return and_(WORKERS.c.host == host, WORKERS.c.worker == worker)


def _note_fatal_error(connection: Connection, slot: Slot, job_id: int, now: float) -> None:
    """Record the error, and lock the worker after several since its unlock."""
    its = and_(FATAL_ERRORS.c.host == slot.host, FATAL_ERRORS.c.worker == slot.worker)
    row = {"host": slot.host, "worker": slot.worker, "job_id": job_id}
    noted = upsert(connection, FATAL_ERRORS).values(**row, at=now)
    keys = [FATAL_ERRORS.c.host, FATAL_ERRORS.c.worker, FATAL_ERRORS.c.job_id]
    connection.execute(noted.on_conflict_do_update(index_elements=keys, set_={"at": now}))
    connection.execute(delete(FATAL_ERRORS).where(its, FATAL_ERRORS.c.at <= now - FATAL_WINDOW_S))
    counted = select(func.count()).where(its, FATAL_ERRORS.c.at > func.coalesce(WORKERS.c.unlocked_at, 0))
    lock = update(WORKERS).where(
        _is_slot(slot.host, slot.worker),
        WORKERS.c.locked_at.is_(None),
        counted.scalar_subquery() >= FATAL_JOBS_MAX,
    )
    reason = f"{FATAL_JOBS_MAX} jobs in an hour met an error that its process could not survive"
    connection.execute(lock.values(locked_at=now, locked_by=LOCKED_BY_ERRORS, locked_reason=reason))


@Prepared
def delete_dead_flag(**params: ColumnElement[Any]) -> Executable:
    """Delete the flag of a dead worker (A14) whose incarnation lives."""
    its_flag = and_(DEAD_WORKERS.c.host == params["host"], DEAD_WORKERS.c.worker == params["worker"])
    its_row = and_(WORKERS.c.host == params["host"], WORKERS.c.worker == params["worker"])
    lives = and_(its_row, WORKERS.c.incarnation == params["incarnation"], sql.is_not_retired(params["incarnation"]))
    return delete(DEAD_WORKERS).where(its_flag, exists(select(literal(1)).where(lives)))


@Prepared
def _find_next(**params: ColumnElement[Any]) -> Executable:
    return parts.look(params)


@Prepared
def _take(**params: ColumnElement[Any]) -> Executable:
    return parts.take(params).returning(JOBS)


@Prepared
def _extend_own_claim(**params: ColumnElement[Any]) -> Executable:
    mine = sql.running_with(params["host"], params["worker"], params["incarnation"])
    return update(JOBS).where(mine).values(lease_expires_at=params["until"]).returning(JOBS)


@Prepared
def _renew(**params: ColumnElement[Any]) -> Executable:
    return update(JOBS).where(parts.is_held(params)).values(lease_expires_at=params["until"])


@Prepared
def _claimed_by_slot(**params: ColumnElement[Any]) -> Executable:
    claimed = sql.is_claimed(params["job_id"], params["attempt"], params["incarnation"])
    return select(JOBS.c.job_id).where(claimed, JOBS.c.host == params["host"], JOBS.c.worker == params["worker"])


@Prepared
def _owned_job(**params: ColumnElement[Any]) -> Executable:
    claimed = sql.is_claimed(params["job_id"], params["attempt"], params["incarnation"])
    return select(JOBS.c.job_id).where(claimed, sql.is_in({State.RUNNING, State.HOST_LOST}))


@Prepared
def _complete(**params: ColumnElement[Any]) -> Executable:
    return sql.transition(Move.COMPLETE, parts.is_held(params), ended_at=params["now"], **parts.left_by(params))


@Prepared
def _finish(**params: ColumnElement[Any]) -> Executable:
    return sql.transition(Move.FINISH, parts.is_held(params), **parts.left_by(params))


@Prepared
def _gang_of(**params: ColumnElement[Any]) -> Executable:
    return select(JOBS.c.gang).where(JOBS.c.job_id == params["job_id"])
