"""The SQL queue: every change of a job is one transaction and one compare-and-set.

A worker's moves name its attempt and its incarnation, and are refused once either has changed; a trip's moves name the
attempt. Which state each move starts from and ends in comes from `gpuwarden.job.MOVES` and from nowhere else. `now` is
Unix seconds, passed in by the caller.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Self

from sqlalchemy import ColumnElement, Connection, Engine, Row, Update, and_, case, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from gpuwarden.database import Changes, open_database, reading, writing
from gpuwarden.errors import GpuwardenError
from gpuwarden.job import (
    FINAL,
    LEASE_S,
    MOVES,
    RECLAIMS_MAX,
    REQUEUE_PRIORITY,
    JobClass,
    JobId,
    Move,
    State,
    Trip,
    stall_timeout_s,
)
from gpuwarden.schema import DISPATCH_EVENTS, JOBS, METADATA, RUNS, WORKERS
from gpuwarden.statefile import SECONDS_MAX, TEXT_MAX, is_text

PRIORITY: Final = 100
"""A job's priority when its submitter names none; lower runs sooner."""

GHOST_AGE_S: Final = 100.0
"""How far into the past a killed worker's last-seen time is set (A12), seconds."""


class SubmissionError(GpuwardenError):
    """A submission asks for what no worker could report and no rule could police."""


class UnknownJobError(GpuwardenError):
    """No job has that id."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job to be done. Unset budgets and timeouts come from its class."""

    queue: str
    job_class: JobClass = JobClass.GPU
    model: str | None = None
    reports_steps: bool = True
    payload: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None
    priority: int = PRIORITY
    steps_total: int | None = None
    budget_s: float | None = None
    stall_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("queue", "model", "run_id"):
            text = getattr(self, name)
            if text is not None and not is_text(text):
                raise SubmissionError(f"{name} {text[:80]!a} will not do: 1 to {TEXT_MAX} printable characters")
        for name in ("budget_s", "stall_timeout_s", "steps_total"):
            figure = getattr(self, name)
            if figure is not None and not 0 <= figure < SECONDS_MAX:
                raise SubmissionError(f"{name} {figure} will not do: a number from 0, below {SECONDS_MAX:.0e}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as the queue knows it."""

    job_id: JobId
    run_id: str | None
    queue: str
    job_class: JobClass
    model: str | None
    payload: dict[str, Any]
    budget_s: float
    stall_timeout_s: float
    steps_total: int | None
    state: State
    priority: int
    attempt: int
    watchdog_retries: int
    reclaims: int
    claimed_by: str | None
    host: str | None
    worker: str | None
    lease_expires_at: float | None
    because: str | None


class JobStore:
    """The queue in one database. Safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the queue at an SQLAlchemy URL.

        Raises:
            DatabaseError: it cannot be opened.
        """
        return cls(open_database(url, METADATA))

    def close(self) -> None:
        """Let go of every connection."""
        self._engine.dispose()

    def changes(self) -> Changes:
        """A cheap watch on the queue, for one thread."""
        return Changes(self._engine)

    # --- what a submitter and a reader ask

    def submit(self, submission: Submission, *, now: float) -> JobId:
        """Queue a job, and open its run when it is the first of it."""
        budget_s = submission.job_class.budget_s if submission.budget_s is None else submission.budget_s
        silence_s = stall_timeout_s(
            submission.job_class, reports_steps=submission.reports_steps, configured_s=submission.stall_timeout_s
        )
        with writing(self._engine) as connection:
            if submission.run_id is not None:
                connection.execute(
                    upsert(RUNS)
                    .values(run_id=submission.run_id, state="running", submitted_at=now)
                    .on_conflict_do_nothing()
                )
            job_id = connection.scalar(
                insert(JOBS)
                .values(
                    run_id=submission.run_id,
                    queue=submission.queue,
                    job_class=submission.job_class,
                    model=submission.model,
                    payload=submission.payload,
                    budget_s=budget_s,
                    stall_timeout_s=silence_s,
                    steps_total=submission.steps_total,
                    state=State.QUEUED,
                    priority=submission.priority,
                    attempt=0,
                    watchdog_retries=0,
                    reclaims=0,
                    submitted_at=now,
                )
                .returning(JOBS.c.job_id)
            )
        return JobId(int(job_id or 0))

    def job(self, job_id: int) -> Job:
        """One job.

        Raises:
            UnknownJobError: there is none of that id.
        """
        with reading(self._engine) as connection:
            row = connection.execute(select(JOBS).where(JOBS.c.job_id == job_id)).one_or_none()
        if row is None:
            raise UnknownJobError(f"the queue has no job {job_id}")
        return _job(row)

    def jobs(self, *, states: frozenset[State] = frozenset(State)) -> list[Job]:
        """Every job in one of `states`, oldest first."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(JOBS).where(JOBS.c.state.in_(states)).order_by(JOBS.c.job_id))
            return [_job(row) for row in rows]

    def run_state(self, run_id: str) -> str | None:
        """`running` or `failed`; `None` for a run nobody submitted."""
        with reading(self._engine) as connection:
            return connection.scalar(select(RUNS.c.state).where(RUNS.c.run_id == run_id))

    def dispatch_events(self, job_id: int) -> list[str]:
        """The kinds of the events written for a job, in order."""
        with reading(self._engine) as connection:
            events = select(DISPATCH_EVENTS.c.kind).where(DISPATCH_EVENTS.c.job_id == job_id)
            return list(connection.scalars(events.order_by(DISPATCH_EVENTS.c.event_id)))

    # --- what a worker does

    def claim(
        self, queue: str, *, host: str, worker: str, incarnation: str, now: float, lease_s: float = LEASE_S
    ) -> Job | None:
        """Take the queue's next job for this incarnation, raising its attempt; `None` when there is none."""
        next_job = (
            select(JOBS.c.job_id)
            .where(JOBS.c.queue == queue, _from(Move.CLAIM))
            .order_by(JOBS.c.priority, JOBS.c.job_id)
            .limit(1)
            .scalar_subquery()
        )
        take = _move(
            Move.CLAIM,
            JOBS.c.job_id == next_job,
            attempt=JOBS.c.attempt + 1,
            claimed_by=incarnation,
            host=host,
            worker=worker,
            claimed_at=now,
            lease_expires_at=now + lease_s,
            because=None,
        ).returning(JOBS)
        with writing(self._engine) as connection:
            row = connection.execute(take).one_or_none()
            if row is None:
                return None
            _see_worker(connection, host, worker, queue, incarnation, now, model=row.model or row.job_class)
            return _job(row)

    def heartbeat(self, *, host: str, worker: str, queue: str, incarnation: str, model: str | None, now: float) -> None:
        """Refresh the worker's row; `model` is what it holds now, `None` while it holds nothing."""
        with writing(self._engine) as connection:
            _see_worker(connection, host, worker, queue, incarnation, now, model=model)

    def renew(self, job_id: int, *, attempt: int, incarnation: str, now: float, lease_s: float = LEASE_S) -> bool:
        """Lengthen the lease; false when the job is no longer this attempt's, and then the worker must stop."""
        lengthen = update(JOBS).where(_held(job_id, attempt, incarnation)).values(lease_expires_at=now + lease_s)
        with writing(self._engine) as connection:
            return connection.execute(lengthen).rowcount == 1

    def owns(self, job_id: int, *, attempt: int, incarnation: str) -> bool:
        """Whether the attempt still holds its job; a read, cheap enough for every second."""
        with reading(self._engine) as connection:
            return connection.scalar(select(JOBS.c.job_id).where(_held(job_id, attempt, incarnation))) is not None

    def complete(self, job_id: int, *, attempt: int, incarnation: str, now: float) -> bool:
        """The attempt finished its work; false when it no longer held the job, and nothing was written."""
        done = _move(Move.COMPLETE, _held(job_id, attempt, incarnation), ended_at=now, **_UNCLAIMED)
        with writing(self._engine) as connection:
            return connection.execute(done).rowcount == 1

    def fail_by_worker(self, job_id: int, *, attempt: int, incarnation: str, because: str, now: float) -> bool:
        """The job's own code failed: terminal, with its `failed` event. False when the job was no longer held."""
        held = _held(job_id, attempt, incarnation)
        with writing(self._engine) as connection:
            return _end_failed(connection, Move.FAIL_BY_WORKER, held, job_id, attempt, because, now)

    def release(self, job_id: int, *, attempt: int, incarnation: str) -> bool:
        """Give the job back unharmed, as a worker does that is asked to stop. Counts as no retry."""
        back = _move(Move.RELEASE, _held(job_id, attempt, incarnation), because="released by its worker", **_UNCLAIMED)
        with writing(self._engine) as connection:
            return connection.execute(back).rowcount == 1

    # --- what a trip does: fence, then requeue or fail

    def fence(self, job_id: int, *, attempt: int, incarnation: str, trip: Trip, now: float) -> bool:
        """Take the job from an attempt: from now on nothing of that attempt is accepted and nobody claims the job.

        False unless `incarnation` holds it: what a worker's state files say of another worker's job moves nothing.
        """
        take = _move(
            Move.FENCE,
            JOBS.c.job_id == job_id,
            JOBS.c.attempt == attempt,
            JOBS.c.claimed_by == incarnation,
            because=f"{trip}: fenced",
            lease_expires_at=now,
        )
        with writing(self._engine) as connection:
            return connection.execute(take).rowcount == 1

    def requeue(self, job_id: int, *, attempt: int, trip: Trip) -> bool:
        """Queue a fenced job again (A9): claim cleared, sooner than most, one watchdog retry more. No event."""
        back = _move(
            Move.REQUEUE,
            JOBS.c.job_id == job_id,
            JOBS.c.attempt == attempt,
            priority=_least(JOBS.c.priority, REQUEUE_PRIORITY),
            watchdog_retries=JOBS.c.watchdog_retries + 1,
            because=f"{trip}: requeued",
            **_UNCLAIMED,
        )
        with writing(self._engine) as connection:
            return connection.execute(back).rowcount == 1

    def fail(self, job_id: int, *, attempt: int, because: str, now: float) -> bool:
        """End a fenced job for good (A10): the terminal mark and its `failed` event, in one transaction."""
        fenced = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt)
        with writing(self._engine) as connection:
            return _end_failed(connection, Move.FAIL, fenced, job_id, attempt, because, now)

    def clear_busy_ghost(self, *, host: str, worker: str, incarnation: str, now: float) -> bool:
        """A killed worker's row stops advertising a model (A12). False when the row is absent or already replaced."""
        age = (
            update(WORKERS)
            .where(WORKERS.c.host == host, WORKERS.c.worker == worker, WORKERS.c.incarnation == incarnation)
            .values(current_model=None, last_seen_at=now - GHOST_AGE_S)
        )
        with writing(self._engine) as connection:
            return connection.execute(age).rowcount == 1

    # --- what runs on a timer

    def expired(self, *, now: float) -> frozenset[tuple[JobId, int]]:
        """The running jobs whose lease has run out, each with its attempt."""
        found = select(JOBS.c.job_id, JOBS.c.attempt).where(JOBS.c.lease_expires_at < now, _from(Move.RECLAIM))
        with reading(self._engine) as connection:
            return frozenset((JobId(row.job_id), row.attempt) for row in connection.execute(found))

    def reclaim_expired(self, *, now: float, among: Iterable[JobId] | None = None) -> list[JobId]:
        """Queue again every running job whose lease ran out (A13), or fail it at the reclaim cap; the ids touched.

        `among` bounds it to some jobs. A lease is by the wall clock, so a caller that sweeps on a timer gives a machine
        that woke from a suspend, or a queue that was away, the time of a renewal first.
        """
        expired = and_(JOBS.c.lease_expires_at < now, _from(Move.RECLAIM))
        if among is not None:
            expired = and_(expired, JOBS.c.job_id.in_(sorted(among)))
        with writing(self._engine) as connection:
            spent = connection.execute(select(JOBS).where(expired, JOBS.c.reclaims >= RECLAIMS_MAX)).all()
            for row in spent:
                because = f"lease expired {RECLAIMS_MAX + 1} times"
                connection.execute(_move(Move.FENCE, JOBS.c.job_id == row.job_id))
                fenced = and_(JOBS.c.job_id == row.job_id, JOBS.c.attempt == row.attempt)
                _end_failed(connection, Move.FAIL, fenced, row.job_id, row.attempt, because, now)
            back = _move(
                Move.RECLAIM,
                expired,
                priority=_least(JOBS.c.priority, REQUEUE_PRIORITY),
                reclaims=JOBS.c.reclaims + 1,
                because="lease expired",
                **_UNCLAIMED,
            ).returning(JOBS.c.job_id)
            return [JobId(row.job_id) for row in spent] + [JobId(found) for found in connection.scalars(back)]

    def consume_events(self, *, now: float) -> int:
        """Do what unread `failed` events ask, once each: fail the run, cancel its other jobs (A10). How many."""
        with writing(self._engine) as connection:
            unread = select(DISPATCH_EVENTS).where(DISPATCH_EVENTS.c.consumed_at.is_(None))
            events = connection.execute(unread.order_by(DISPATCH_EVENTS.c.event_id)).all()
            for event in events:
                if event.run_id is not None:
                    connection.execute(
                        update(RUNS)
                        .where(RUNS.c.run_id == event.run_id, RUNS.c.state == "running")
                        .values(state="failed", ended_at=now)
                    )
                    siblings = and_(JOBS.c.run_id == event.run_id, JOBS.c.state.not_in(FINAL))
                    because = f"job {event.job_id} of its run failed"
                    connection.execute(_move(Move.CANCEL, siblings, because=because, ended_at=now, **_UNCLAIMED))
                connection.execute(
                    update(DISPATCH_EVENTS).where(DISPATCH_EVENTS.c.event_id == event.event_id).values(consumed_at=now)
                )
            return len(events)


_UNCLAIMED: Final[dict[str, None]] = {"claimed_by": None, "host": None, "worker": None, "lease_expires_at": None}


def _from(move: Move) -> ColumnElement[bool]:
    return JOBS.c.state.in_(sorted(MOVES[move].sources))


def _move(move: Move, *where: ColumnElement[bool], **values: Any) -> Update:
    """The one way a job's state is written: compare with the move's sources, set its target."""
    return update(JOBS).where(_from(move), *where).values(state=MOVES[move].target, **values)


def _held(job_id: int, attempt: int, incarnation: str) -> ColumnElement[bool]:
    """The claim stands: see `gpuwarden.job.claim_is_valid`, which says the same of one job in memory."""
    return and_(
        JOBS.c.job_id == job_id,
        JOBS.c.attempt == attempt,
        JOBS.c.claimed_by == incarnation,
        JOBS.c.state == State.RUNNING,
    )


def _least(column: ColumnElement[int], bound: int) -> ColumnElement[int]:
    return case((column < bound, column), else_=bound)


def _end_failed(
    connection: Connection, move: Move, where: ColumnElement[bool], job_id: int, attempt: int, because: str, now: float
) -> bool:
    ended = connection.execute(
        _move(move, where, because=because, ended_at=now, **_UNCLAIMED).returning(JOBS.c.run_id)
    ).one_or_none()
    if ended is None:
        return False
    connection.execute(
        insert(DISPATCH_EVENTS).values(
            kind="failed", job_id=job_id, attempt=attempt, run_id=ended.run_id, written_at=now
        )
    )
    return True


def _see_worker(
    connection: Connection, host: str, worker: str, queue: str, incarnation: str, now: float, *, model: str | None
) -> None:
    row = {"queue": queue, "incarnation": incarnation, "current_model": model, "last_seen_at": now}
    connection.execute(
        upsert(WORKERS)
        .values(host=host, worker=worker, **row)
        .on_conflict_do_update(index_elements=[WORKERS.c.host, WORKERS.c.worker], set_=row)
    )


def _job(row: Row[Any]) -> Job:
    return Job(
        job_id=JobId(row.job_id),
        run_id=row.run_id,
        queue=row.queue,
        job_class=JobClass(row.job_class),
        model=row.model,
        payload=row.payload,
        budget_s=float(row.budget_s),
        stall_timeout_s=float(row.stall_timeout_s),
        steps_total=row.steps_total,
        state=State(row.state),
        priority=row.priority,
        attempt=row.attempt,
        watchdog_retries=row.watchdog_retries,
        reclaims=row.reclaims,
        claimed_by=row.claimed_by,
        host=row.host,
        worker=row.worker,
        lease_expires_at=row.lease_expires_at,
        because=row.because,
    )
