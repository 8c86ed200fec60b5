"""The SQL queue: every change of a job is one transaction and one compare-and-set.

A worker's moves name its attempt and its incarnation, and are refused once either has changed; a trip's moves name the
attempt. Which state each move starts from and ends in comes from `gpuwarden.job.MOVES` and from nowhere else. `now` is
Unix seconds by the queue's own clock, `JobStore.now`, passed in by the caller.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    FromClause,
    Row,
    Select,
    Update,
    and_,
    case,
    delete,
    exists,
    false,
    func,
    insert,
    not_,
    or_,
    select,
    tuple_,
    update,
)

from gpuwarden.database import (
    Changes,
    DatabaseClock,
    is_shared,
    only_one,
    open_database,
    reading,
    tell,
    upsert,
    watch,
    writing,
)
from gpuwarden.errors import GpuwardenError
from gpuwarden.job import (
    ATTEMPTS_MAX,
    FENCE_S,
    FRESH_S,
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
from gpuwarden.schema import (
    AVOIDED,
    DISPATCH_EVENTS,
    JOBS,
    QUARANTINED_GPUS,
    QUEUE,
    RUNS,
    WORKER_GPUS,
    WORKERS,
)
from gpuwarden.statefile import SECONDS_MAX, TEXT_MAX, is_text

PRIORITY: Final = 100
"""A job's priority when its submitter names none; lower runs sooner."""

GHOST_AGE_S: Final = 100.0
"""How far into the past a killed worker's last-seen time is set (A12), seconds."""

SWEEP_MAX: Final = 1000
"""How many jobs one sweep of leases gives away; the next sweep takes up the rest."""

COUNT_MAX: Final = 2**31
"""Whole numbers stay below this: it is what the databases' integers hold."""


class SubmissionError(GpuwardenError):
    """A submission asks for what no worker could report and no rule could police."""


class UnknownJobError(GpuwardenError):
    """No job has that id."""


class ReplacedError(GpuwardenError):
    """This incarnation of a worker is over: a newer one has registered, or its process is being ended."""


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
    attempts_max: int = ATTEMPTS_MAX

    def __post_init__(self) -> None:
        for name in ("queue", "model", "run_id"):
            text = getattr(self, name)
            if text is not None and not is_text(text):
                raise SubmissionError(f"{name} {text[:80]!a} will not do: 1 to {TEXT_MAX} printable characters")
        for name in ("budget_s", "stall_timeout_s"):
            figure = getattr(self, name)
            if figure is not None and not 0 <= figure < SECONDS_MAX:
                raise SubmissionError(f"{name} {figure} will not do: a number from 0, below {SECONDS_MAX:.0e}")
        for name, least in (("steps_total", 0), ("attempts_max", 1), ("priority", -COUNT_MAX)):
            count = getattr(self, name)
            if count is not None and not least <= count < COUNT_MAX:
                raise SubmissionError(f"{name} {count} will not do: a whole number from {least}, below {COUNT_MAX}")


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
    attempts_max: int
    watchdog_retries: int
    reclaims: int
    claimed_by: str | None
    host: str | None
    worker: str | None
    lease_expires_at: float | None
    because: str | None


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One worker's place: what a requeued job stays away from. Its GPUs are UUIDs, as far as they are known."""

    host: str
    worker: str
    gpus: tuple[str, ...] = ()


def is_gpu(name: str) -> bool:
    """Whether this names a GPU, or a part of one, by UUID, as `nvidia-smi -L` does; a number is no identity."""
    return name.startswith(("GPU-", "MIG-")) and is_text(name)


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A GPU that nobody uses, since when (Unix seconds) and why. `worker` is the slot that held it."""

    gpu: str
    host: str
    worker: str | None
    since: float
    because: str


class JobStore:
    """The queue in one database. Safe to share between threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._clock = DatabaseClock(engine)
        self.shared = is_shared(engine)
        """Whether other hosts work on this queue, so that it can be lost to this one and go on without it."""

    @classmethod
    def open(cls, url: str, *, migrate: bool = True) -> Self:
        """Open the queue at an SQLAlchemy URL; `migrate` as `open_database` has it.

        Raises:
            DatabaseError: it cannot be opened.
        """
        return cls(open_database(url, QUEUE, migrate=migrate))

    def close(self) -> None:
        """Let go of every connection."""
        self._engine.dispose()

    def check_writable(self) -> None:
        """Be the one writer for a moment, and write nothing.

        Raises:
            DatabaseError: another process holds the write lock, or the database cannot be written.
        """
        with writing(self._engine):
            pass

    def changes(self) -> Changes:
        """A cheap watch on the queue, for one thread."""
        return watch(self._engine, QUEUE)

    def now(self) -> float:
        """The time that leases go by, Unix seconds: the server's on PostgreSQL, this host's on SQLite.

        Raises:
            DatabaseError: the server's time is not known.
        """
        return self._clock.now()

    # --- what a submitter and a reader ask

    def submit(self, submission: Submission, *, now: float) -> JobId:
        """Queue a job, and open its run when it is the first of it.

        Raises:
            SubmissionError: its run has failed already.
        """
        budget_s = submission.job_class.budget_s if submission.budget_s is None else submission.budget_s
        silence_s = stall_timeout_s(
            submission.job_class, reports_steps=submission.reports_steps, configured_s=submission.stall_timeout_s
        )
        with writing(self._engine) as connection:
            if submission.run_id is not None:
                opened = upsert(connection, RUNS).values(run_id=submission.run_id, state="running", submitted_at=now)
                connection.execute(opened.on_conflict_do_nothing())
                # Locked, so that a job is not added to a run while that fails and cancels what it finds.
                run = select(RUNS.c.state).where(RUNS.c.run_id == submission.run_id).with_for_update(read=True)
                if (state := connection.scalar(run)) != "running":
                    raise SubmissionError(f"run {submission.run_id!r} has {state}: give the job another run")
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
                    attempts_max=submission.attempts_max,
                    watchdog_retries=0,
                    reclaims=0,
                    submitted_at=now,
                )
                .returning(JOBS.c.job_id)
            )
            tell(connection, QUEUE.channel)
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
            _see_worker(connection, host, worker, queue, incarnation, now, model=None)  # also locks the row
            slot = and_(WORKER_GPUS.c.host == host, WORKER_GPUS.c.worker == worker)
            connection.execute(delete(WORKER_GPUS).where(slot))
            if gpus:
                rows = [{"host": host, "worker": worker, "gpu": gpu} for gpu in sorted(set(gpus))]
                connection.execute(insert(WORKER_GPUS), rows)
            held = and_(JOBS.c.host == host, JOBS.c.worker == worker, JOBS.c.claimed_by != incarnation)
            return _give_away(connection, Move.SUPERSEDE, held, "its worker was started anew", now)

    def claim(
        self, queue: str, *, host: str, worker: str, incarnation: str, now: float, lease_s: float = LEASE_S
    ) -> Job | None:
        """Take the queue's next job for this incarnation, raising its attempt; `None` when there is none for it.

        There is none for a worker whose GPU is in quarantine, and a job is left to others for a while by the GPUs it
        was taken from. A slot that nobody has registered for is registered by its first claim. An incarnation has one
        job at a time: the one that it holds already, of a claim whose answer was lost, is given to it again.

        Raises:
            ReplacedError: this incarnation is over.
        """
        job = JOBS.alias("job")
        next_job = (
            select(job.c.job_id)
            .where(job.c.queue == queue, job.c.state.in_(sorted(MOVES[Move.CLAIM].sources)))
            .where(not_(_in_quarantine(host, worker)), not_(_better_elsewhere(job, host, worker, now)))
            .order_by(job.c.priority, job.c.job_id)
            .limit(1)
        )
        take = _move(
            Move.CLAIM,
            JOBS.c.job_id == next_job.with_for_update(skip_locked=True).scalar_subquery(),
            attempt=JOBS.c.attempt + 1,
            claimed_by=incarnation,
            host=host,
            worker=worker,
            claimed_at=now,
            lease_expires_at=now + lease_s,
            because=None,
        ).returning(JOBS)
        mine = _running_with(host, worker, incarnation)
        take_again = update(JOBS).where(mine).values(lease_expires_at=now + lease_s).returning(JOBS)
        over = ReplacedError(f"incarnation {incarnation} of worker {host}/{worker} is over: it claims nothing")
        # A look first: a claim that finds nothing must write nothing, or idle workers would wake one another for ever.
        with reading(self._engine) as connection:
            if connection.scalar(_is_over(host, worker, incarnation)):
                raise over
            if connection.scalar(select(JOBS.c.job_id).where(mine)) is None and connection.scalar(next_job) is None:
                return None
        with writing(self._engine) as connection:
            # The worker's row first: it keeps this claim and the registration of the next incarnation apart.
            if not _touch_worker(connection, host, worker, queue, incarnation, now):
                raise over
            # Looked for behind that row's lock: a commit that was still on its way when its answer was given up for
            # lost is done by now.
            row = connection.execute(take_again).one_or_none() or connection.execute(take).one_or_none()
            if row is None:
                return None
            _touch_worker(connection, host, worker, queue, incarnation, now, model=row.model or row.job_class)
            return _job(row)

    def heartbeat(self, *, host: str, worker: str, queue: str, incarnation: str, model: str | None, now: float) -> bool:
        """Refresh the worker's row; `model` is what it holds now, `None` while it holds nothing.

        False when this incarnation is over, and then the worker must stop.
        """
        with writing(self._engine) as connection:
            return _touch_worker(connection, host, worker, queue, incarnation, now, model=model)

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

    def release(self, job_id: int, *, attempt: int, incarnation: str, now: float) -> bool:
        """Give the job back unharmed, as a worker does that is asked to stop. Counts as no retry."""
        held = _held(job_id, attempt, incarnation)
        with writing(self._engine) as connection:
            return bool(_give_away(connection, Move.RELEASE, held, "released by its worker", now))

    # --- what a trip does: fence, then requeue or fail

    def fence(self, job_id: int, *, attempt: int, incarnation: str, trip: Trip, now: float) -> bool:
        """Take the job from an attempt: from now on nothing of that attempt is accepted and nobody claims the job.

        The worker's incarnation claims nothing more either, and its row stops advertising a model (A12). False unless
        `incarnation` holds the job: what a worker's state files say of another worker's job moves nothing.
        """
        held = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt, JOBS.c.claimed_by == incarnation)
        take = _move(Move.FENCE, held, because=f"{trip}: fenced", lease_expires_at=now + FENCE_S)
        with writing(self._engine) as connection:
            slot = connection.execute(select(JOBS.c.host, JOBS.c.worker).where(held)).one_or_none()
            if slot is None:
                return False
            # The worker's row before the job's, as a registration takes them: else the two could wait for one another.
            its_row = and_(WORKERS.c.host == slot.host, WORKERS.c.worker == slot.worker)
            connection.execute(select(WORKERS.c.incarnation).where(its_row).with_for_update())
            if connection.execute(take).rowcount != 1:
                return False
            retire = _of_worker(slot.host, slot.worker, incarnation)
            connection.execute(retire.values(**_retired(incarnation, now), retired_for=trip))
            tell(connection, QUEUE.channel)
            return True

    def hold_fence(self, job_id: int, *, attempt: int, now: float) -> bool:
        """Lengthen a fence, as whoever owes the settle does; false when the job is no longer fenced."""
        fenced = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt, JOBS.c.state == State.FENCING)
        with writing(self._engine) as connection:
            longer = update(JOBS).where(fenced).values(lease_expires_at=now + FENCE_S)
            return connection.execute(longer).rowcount == 1

    def requeue(
        self, job_id: int, *, attempt: int, trip: Trip, now: float, avoid: Slot | None = None, avoid_s: float = 0.0
    ) -> bool:
        """Queue a fenced job again (A9): claim cleared, sooner than most, one watchdog retry more. No event.

        For `avoid_s` it is left to workers other than the slot `avoid`, and to other GPUs, while there are any. False,
        and nothing written, when it is no longer fenced or has no attempt left: see `Job.attempts_max`.
        """
        back = _move(
            Move.REQUEUE,
            JOBS.c.job_id == job_id,
            JOBS.c.attempt == attempt,
            JOBS.c.attempt < JOBS.c.attempts_max,
            priority=_least(JOBS.c.priority, REQUEUE_PRIORITY),
            watchdog_retries=JOBS.c.watchdog_retries + 1,
            because=f"{trip}: requeued",
            **_UNCLAIMED,
        )
        with writing(self._engine) as connection:
            if connection.execute(back).rowcount != 1:
                return False
            connection.execute(delete(AVOIDED).where(AVOIDED.c.job_id == job_id, AVOIDED.c.until <= now))
            if avoid is not None and avoid_s > 0:
                for gpu in {"", *avoid.gpus}:
                    row = {"job_id": job_id, "host": avoid.host, "worker": avoid.worker, "gpu": gpu}
                    kept = upsert(connection, AVOIDED).values(**row, until=now + avoid_s)
                    keys = [AVOIDED.c.job_id, AVOIDED.c.host, AVOIDED.c.worker, AVOIDED.c.gpu]
                    connection.execute(kept.on_conflict_do_update(index_elements=keys, set_={"until": now + avoid_s}))
            tell(connection, QUEUE.channel)
            return True

    def fail(self, job_id: int, *, attempt: int, because: str, now: float) -> bool:
        """End a fenced job for good (A10): the terminal mark and its `failed` event, in one transaction."""
        fenced = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt)
        with writing(self._engine) as connection:
            return _end_failed(connection, Move.FAIL, fenced, job_id, attempt, because, now)

    def retire_worker(self, *, host: str, worker: str, incarnation: str, now: float) -> bool:
        """A worker whose process is being ended claims nothing more and stops advertising a model (A12).

        By incarnation, so that its replacement is free. False when the row is absent or already replaced.
        """
        with writing(self._engine) as connection:
            trip = case((WORKERS.c.retired == incarnation, WORKERS.c.retired_for), else_=None)
            retire = _of_worker(host, worker, incarnation).values(**_retired(incarnation, now), retired_for=trip)
            return connection.execute(retire).rowcount == 1

    def retired_for(self, *, host: str, worker: str, incarnation: str) -> Trip | None:
        """The trip for which this incarnation's job was taken; `None` where none was, or its replacement is there."""
        trip = select(WORKERS.c.retired_for).where(
            WORKERS.c.host == host, WORKERS.c.worker == worker, WORKERS.c.retired == incarnation
        )
        with reading(self._engine) as connection:
            found = connection.scalar(trip)
        return None if found is None else Trip(found)

    # --- GPUs that nobody uses

    def quarantine(self, gpus: Sequence[str], *, host: str, worker: str | None, because: str, now: float) -> None:
        """Nothing is claimed by the workers that have one of these GPUs, nor by the slot `worker`, until released."""
        with writing(self._engine) as connection:
            for gpu in gpus:
                row = {"gpu": gpu, "host": host, "worker": worker or "", "since": now, "because": because}
                connection.execute(upsert(connection, QUARANTINED_GPUS).values(**row).on_conflict_do_nothing())

    def release_gpu(self, gpu: str) -> bool:
        """Put a GPU back to use, whoever held it; false when it was not in quarantine."""
        with writing(self._engine) as connection:
            released = connection.execute(delete(QUARANTINED_GPUS).where(QUARANTINED_GPUS.c.gpu == gpu)).rowcount > 0
            tell(connection, QUEUE.channel)
            return released

    def keeps_anyone_from(self, gpu: str, *, host: str, worker: str | None) -> bool:
        """Whether a quarantine of this GPU would: a worker has registered it, or the slot `worker` is known."""
        of_slot = exists().where(WORKERS.c.host == host, WORKERS.c.worker == (worker or ""))
        with reading(self._engine) as connection:
            return bool(connection.scalar(select(or_(exists().where(WORKER_GPUS.c.gpu == gpu), of_slot))))

    def quarantine_of(self, *, host: str, worker: str) -> Quarantine | None:
        """Why this worker claims nothing: the GPU of its that is longest in quarantine, if any is."""
        its = select(QUARANTINED_GPUS).where(_quarantined_for(host, worker)).order_by(*_LONGEST_FIRST).limit(1)
        with reading(self._engine) as connection:
            row = connection.execute(its).one_or_none()
            return None if row is None else _quarantine(row)

    def quarantined(self) -> list[Quarantine]:
        """Every GPU in quarantine, the longest first; once for each slot that held it."""
        with reading(self._engine) as connection:
            return [_quarantine(row) for row in connection.execute(select(QUARANTINED_GPUS).order_by(*_LONGEST_FIRST))]

    # --- what runs on a timer

    def expired(self, *, now: float) -> frozenset[tuple[JobId, int]]:
        """The jobs whose lease, or fence, has run out, each with its attempt."""
        found = select(JOBS.c.job_id, JOBS.c.attempt).where(JOBS.c.lease_expires_at < now, _from(Move.RECLAIM))
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
            return _give_away(connection, Move.RECLAIM, expired, "lease expired", now)

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
                    siblings = and_(JOBS.c.run_id == event.run_id, _from(Move.CANCEL))
                    connection.execute(_locked(select(JOBS.c.job_id).where(siblings)))
                    because = f"job {event.job_id} of its run failed"
                    connection.execute(_move(Move.CANCEL, siblings, because=because, ended_at=now, **_UNCLAIMED))
                connection.execute(
                    update(DISPATCH_EVENTS).where(DISPATCH_EVENTS.c.event_id == event.event_id).values(consumed_at=now)
                )
            return len(events)


_LONGEST_FIRST: Final = tuple(QUARANTINED_GPUS.c[name] for name in ("since", "gpu", "host", "worker"))

_UNCLAIMED: Final[dict[str, None]] = {"claimed_by": None, "host": None, "worker": None, "lease_expires_at": None}


def _from(move: Move) -> ColumnElement[bool]:
    return JOBS.c.state.in_(sorted(MOVES[move].sources))


def _move(move: Move, *where: ColumnElement[bool], **values: Any) -> Update:
    """The one way a job's state is written: compare with the move's sources, set its target."""
    return update(JOBS).where(_from(move), *where).values(state=MOVES[move].target, **values)


def _held(job_id: int, attempt: int, incarnation: str) -> ColumnElement[bool]:
    """The claim stands, so that a renewal or a result may be accepted.

    Only a running job has a holder: fencing takes the job from its attempt before anything is stopped.
    """
    return and_(
        JOBS.c.job_id == job_id,
        JOBS.c.attempt == attempt,
        JOBS.c.claimed_by == incarnation,
        JOBS.c.state == State.RUNNING,
    )


def _running_with(host: str, worker: str, incarnation: str) -> ColumnElement[bool]:
    return and_(
        JOBS.c.host == host,
        JOBS.c.worker == worker,
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


def _locked(jobs: Select[Any], *, skip: bool = False) -> Select[Any]:
    """Lock these jobs, lowest id first, so that two who change many of them never wait for one another in a circle."""
    return jobs.order_by(JOBS.c.job_id).with_for_update(skip_locked=skip)


def _give_away(connection: Connection, move: Move, where: ColumnElement[bool], why: str, now: float) -> list[JobId]:
    """Queue jobs again that their attempt did not finish, or fail those at a cap; the ids touched.

    A reclaim and the registration of a new incarnation are one kind of loss, and share a cap (A13).
    """
    lost = move in (Move.RECLAIM, Move.SUPERSEDE)
    found = _locked(select(JOBS).where(where, _from(move)).limit(SWEEP_MAX), skip=move is Move.RECLAIM)
    back: list[JobId] = []
    spent: list[JobId] = []
    for row in connection.execute(found).all():
        if row.attempt >= row.attempts_max:
            used = f"all {row.attempts_max} attempts"
        elif lost and row.reclaims >= RECLAIMS_MAX:
            used = f"all {RECLAIMS_MAX} reclaims"
        else:
            back.append(row.job_id)
            continue
        spent.append(row.job_id)
        this, because = JOBS.c.job_id == row.job_id, f"{why}, and {used} are used"
        _end_failed(connection, Move.EXHAUST, this, row.job_id, row.attempt, because, now)
    # A fenced job keeps the reason of its fence.
    fenced = JOBS.c.state == State.FENCING
    because_of = case((fenced, JOBS.c.because + ", and nobody settled it in time"), else_=why)
    values: dict[str, Any] = {"because": because_of, **_UNCLAIMED}
    if lost:
        values |= {"priority": _least(JOBS.c.priority, REQUEUE_PRIORITY), "reclaims": JOBS.c.reclaims + 1}
    if back:
        connection.execute(_move(move, JOBS.c.job_id.in_(back), **values))
        tell(connection, QUEUE.channel)
    return sorted(back + spent)


def _retired(incarnation: str, now: float) -> dict[str, Any]:
    return {"current_model": None, "last_seen_at": now - GHOST_AGE_S, "retired": incarnation}


def _of_worker(host: str, worker: str, incarnation: str) -> Update:
    return update(WORKERS).where(
        WORKERS.c.host == host, WORKERS.c.worker == worker, WORKERS.c.incarnation == incarnation
    )


def _is_over(host: str, worker: str, incarnation: str) -> Select[Any]:
    """Whether an incarnation was replaced or retired; nothing for a slot without a row."""
    over = or_(WORKERS.c.incarnation != incarnation, func.coalesce(WORKERS.c.retired == incarnation, false()))
    return select(over).where(WORKERS.c.host == host, WORKERS.c.worker == worker)


def _see_worker(
    connection: Connection, host: str, worker: str, queue: str, incarnation: str, now: float, *, model: str | None
) -> None:
    row = {"queue": queue, "incarnation": incarnation, "current_model": model, "last_seen_at": now}
    connection.execute(
        upsert(connection, WORKERS)
        .values(host=host, worker=worker, **row)
        .on_conflict_do_update(index_elements=[WORKERS.c.host, WORKERS.c.worker], set_=row)
    )


def _touch_worker(
    connection: Connection,
    host: str,
    worker: str,
    queue: str,
    incarnation: str,
    now: float,
    *,
    model: str | None = None,
) -> bool:
    """Refresh the row of this incarnation; false when it is over: replaced, or retired."""
    row = {"queue": queue, "current_model": model, "last_seen_at": now}
    alive = or_(WORKERS.c.retired.is_(None), WORKERS.c.retired != incarnation)
    if connection.execute(_of_worker(host, worker, incarnation).where(alive).values(**row)).rowcount == 1:
        return True
    first = upsert(connection, WORKERS).values(host=host, worker=worker, incarnation=incarnation, **row)
    inserted = first.on_conflict_do_nothing().returning(WORKERS.c.worker)  # an insert's rowcount is not always told
    return connection.scalar(inserted) is not None


_Name = ColumnElement[str] | str


def _gpus_of(host: _Name, worker: _Name) -> Select[tuple[str]]:
    its = select(WORKER_GPUS.c.gpu).where(WORKER_GPUS.c.host == host, WORKER_GPUS.c.worker == worker)
    return its.correlate_except(WORKER_GPUS)


def _quarantined_for(host: _Name, worker: _Name) -> ColumnElement[bool]:
    held = and_(QUARANTINED_GPUS.c.host == host, QUARANTINED_GPUS.c.worker == worker)
    return or_(held, QUARANTINED_GPUS.c.gpu.in_(_gpus_of(host, worker)))


def _in_quarantine(host: _Name, worker: _Name) -> ColumnElement[bool]:
    return exists().where(_quarantined_for(host, worker)).correlate_except(QUARANTINED_GPUS)


def _better_elsewhere(job: FromClause, host: str, worker: str, now: float) -> ColumnElement[bool]:
    """Whether a job avoids this worker, and another that it does not avoid is there to take it."""
    other = WORKERS.alias("other")
    there = exists().where(
        other.c.queue == job.c.queue,
        other.c.last_seen_at > now - FRESH_S,
        or_(other.c.retired.is_(None), other.c.retired != other.c.incarnation),
        not_(_avoids(job, other.c.host, other.c.worker, now)),
        not_(_in_quarantine(other.c.host, other.c.worker)),
    )
    return and_(_avoids(job, host, worker, now), there.correlate_except(other))


def _avoids(job: FromClause, host: _Name, worker: _Name, now: float) -> ColumnElement[bool]:
    slot = and_(AVOIDED.c.host == host, AVOIDED.c.worker == worker)
    here = or_(slot, AVOIDED.c.gpu.in_(_gpus_of(host, worker)))
    return exists().where(AVOIDED.c.job_id == job.c.job_id, AVOIDED.c.until > now, here).correlate_except(AVOIDED)


def _quarantine(row: Row[Any]) -> Quarantine:
    return Quarantine(gpu=row.gpu, host=row.host, worker=row.worker or None, since=row.since, because=row.because)


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
        attempts_max=row.attempts_max,
        watchdog_retries=row.watchdog_retries,
        reclaims=row.reclaims,
        claimed_by=row.claimed_by,
        host=row.host,
        worker=row.worker,
        lease_expires_at=row.lease_expires_at,
        because=row.because,
    )
