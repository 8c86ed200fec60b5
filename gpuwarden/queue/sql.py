"""Statements that several moves share. Only `transition` writes a job's state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, Union

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    Float,
    FromClause,
    Select,
    String,
    Update,
    and_,
    bindparam,
    case,
    cast,
    delete,
    exists,
    false,
    func,
    insert,
    literal,
    literal_column,
    not_,
    null,
    or_,
    select,
    update,
)

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.transactions import upsert
from gpuwarden.job import LEASE_S, MOVES, RECLAIMS_MAX, REQUEUE_PRIORITY, JobId, Kind, Move, State
from gpuwarden.queue.models import Slot
from gpuwarden.queue.schema import (
    GPU_AVOIDANCE,
    JOBS,
    OUTBOX_EVENTS,
    QUARANTINED_GPUS,
    QUEUE,
    RUN_EXCLUSIONS,
    WORKER_GPUS,
    WORKERS,
)

GHOST_AGE_S: Final = 100.0
"""How far in the past a retired worker's last contact is set, seconds (A12)."""

SWEEP_MAX: Final = 1000
"""Most jobs that one sweep of leases requeues. The next sweep continues."""

UNCLAIMED: Final[dict[str, None]] = {"claimed_by": None, "host": None, "worker": None, "lease_expires_at": None}


T = TypeVar("T")
Value: TypeAlias = Union[ColumnElement[T], T]  # noqa: UP007 - a bare type variable knows no |


class Prepared:
    """A statement that is built once per set of arguments, with a parameter `p_NAME` for each.

    Building it again would take most of the time of a claim.
    """

    def __init__(self, build: Callable[..., Executable]) -> None:
        self._build = build
        self.statements: dict[frozenset[str], Executable] = {}
        self.__doc__ = build.__doc__

    def __call__(self, **values: object) -> tuple[Executable, dict[str, object]]:
        """Return the statement and its parameters."""
        names = frozenset(values)
        if (statement := self.statements.get(names)) is None:
            statement = self._build(**{name: bindparam(f"p_{name}") for name in names})
            self.statements[names] = statement
        return statement, {f"p_{name}": value for name, value in values.items()}


def from_sources(move: Move, job: FromClause = JOBS) -> ColumnElement[bool]:
    """Whether a job is in a state in which this move starts."""
    return is_in(MOVES[move].sources, job)


def is_in(states: Iterable[State], job: FromClause = JOBS) -> ColumnElement[bool]:
    """Whether a job is in one of these states, as literals for the partial indexes."""
    wanted = [literal_column(f"'{state}'", String) for state in sorted(states)]
    return job.c.state == wanted[0] if len(wanted) == 1 else job.c.state.in_(wanted)


def transition(move: Move, *where: ColumnElement[bool], **values: Any) -> Update:
    """Write a job's state: compare with the move's sources, set its target."""
    # Parameters keep a partial index from replacing the index that `where` needs: it may grow while the plan is cached.
    sources = or_(*(JOBS.c.state == literal(state) for state in sorted(MOVES[move].sources)))
    return update(JOBS).where(sources, *where).values(state=MOVES[move].target, **values)


def is_held(job_id: Value[int], attempt: Value[int], incarnation: Value[str]) -> ColumnElement[bool]:
    """Whether the claim is valid. A lost job must first run again: `recover_lost`."""
    return and_(is_claimed(job_id, attempt, incarnation), JOBS.c.state == State.RUNNING)


def is_claimed(job_id: Value[int], attempt: Value[int], incarnation: Value[str]) -> ColumnElement[bool]:
    """Whether the job belongs to this attempt, in any state."""
    return and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt, JOBS.c.claimed_by == incarnation)


def recover_lost(
    connection: Connection, job_id: int, attempt: int, incarnation: str, now: float, *, until: float | None = None
) -> bool:
    """Mark a lost job as running again after its worker's contact (D6); False if it was not lost.

    Without `until` the job keeps its lease, or gets a new one.
    """
    lost = is_claimed(job_id, attempt, incarnation)
    lease = func.coalesce(JOBS.c.lease_expires_at, now + LEASE_S) if until is None else until
    return connection.execute(transition(Move.RETURN, lost, lease_expires_at=lease)).rowcount == 1


def running_with(host: Value[str], worker: Value[str], incarnation: Value[str]) -> ColumnElement[bool]:
    """The job that this incarnation runs, lost host or not."""
    return and_(
        JOBS.c.host == host,
        JOBS.c.worker == worker,
        JOBS.c.claimed_by == incarnation,
        is_in({State.RUNNING, State.HOST_LOST}),
    )


def least(column: ColumnElement[int], bound: int) -> ColumnElement[int]:
    """The smaller of a column and a number."""
    return case((column < bound, column), else_=bound)


def end_failed(
    connection: Connection,
    move: Move,
    where: ColumnElement[bool],
    job_id: int,
    reason: str,
    now: float,
    *,
    traceback: str | None = None,
) -> bool:
    """Fail a job and write its `failed` event; False if the move did not apply."""
    ended = transition(move, where, reason=reason, traceback=traceback, ended_at=now, **UNCLAIMED)
    if connection.execute(ended).rowcount != 1:
        return False
    connection.execute(*write_event(kind=Kind.FAILED, now=now, job_id=job_id))
    return True


@Prepared
def write_event(**its: ColumnElement[Any]) -> Executable:
    """Insert the event of a job or run that has just ended."""
    return insert(OUTBOX_EVENTS).from_select(EVENT, event_of(its).where(JOBS.c.job_id == its["job_id"]))


def write_untimed(connection: Connection, kind: Kind, job_ids: Sequence[int], now: float) -> None:
    """Insert the events of jobs that were just cancelled or blocked."""
    if job_ids:
        its: dict[str, ColumnElement[Any]] = {"kind": literal(kind), "now": literal(now)}
        found = event_of(its, timed=False).where(JOBS.c.job_id.in_(job_ids)).order_by(JOBS.c.job_id)
        connection.execute(insert(OUTBOX_EVENTS).from_select(EVENT, found))


EVENT: Final = ("kind", "job_id", "attempt", "run_id", "queue", "job_class", "waited_s", "ran_s", "written_at")
"""The columns that are written with an event."""


def event_of(its: Mapping[str, ColumnElement[Any]], job: FromClause = JOBS, *, timed: bool = True) -> Select[Any]:
    """The values of an event, without `timed` without durations."""
    about = [job.c[name] for name in ("job_id", "attempt", "run_id", "queue", "job_class")]
    waited_s, ran_s = job.c.claimed_at - job.c.queued_at, its["now"] - job.c.claimed_at
    times = [waited_s, ran_s] if timed else [null(), null()]
    return select(cast(its["kind"], String), *about, *times, cast(its["now"], Float))


def lock_jobs(jobs: Select[Any], *, skip: bool = False) -> Select[Any]:
    """Lock these jobs in the order of their ids, to avoid deadlocks."""
    # An expression: SQLite would read all jobs in this order.
    return jobs.order_by(JOBS.c.job_id + literal_column("0")).with_for_update(skip_locked=skip)


def requeue_or_fail(
    connection: Connection, move: Move, where: ColumnElement[bool], why: str, now: float
) -> list[JobId]:
    """Requeue unfinished jobs, or fail those at a cap; returns their ids.

    Reclaims, new incarnations and fatal errors share a cap (A13). A move from a barred worker (B5) is no reclaim.
    """
    lost = move in (Move.RECLAIM, Move.SUPERSEDE, Move.GIVE_BACK)
    moved = and_(JOBS.c.state == State.FENCING, is_barred(JOBS, JOBS.c.host, JOBS.c.worker))
    found = select(JOBS, moved.label("moved")).where(where, from_sources(move)).limit(SWEEP_MAX)
    found = lock_jobs(found, skip=move is Move.RECLAIM)
    back: list[JobId] = []
    spent: list[JobId] = []
    for row in connection.execute(found).all():
        if row.attempt >= row.attempts_max:
            used = f"all {row.attempts_max} attempts"
        elif lost and not row.moved and row.reclaims + 1 >= RECLAIMS_MAX:
            used = f"all {RECLAIMS_MAX} lost attempts"
        else:
            back.append(row.job_id)
            continue
        spent.append(row.job_id)
        this, reason = JOBS.c.job_id == row.job_id, f"{why}, and {used} are used"
        end_failed(connection, Move.EXHAUST, this, row.job_id, reason, now)
    # A fenced job keeps the reason of its fence.
    fenced = JOBS.c.state == State.FENCING
    reason_of = case((fenced, JOBS.c.reason + ", and its fence ran out"), else_=why)
    values: dict[str, Any] = {"reason": reason_of, "queued_at": now, **UNCLAIMED}
    if lost:
        values |= {
            "priority": least(JOBS.c.priority, REQUEUE_PRIORITY),
            "reclaims": JOBS.c.reclaims + case((moved, 0), else_=1),
        }
    if back:
        connection.execute(transition(move, JOBS.c.job_id.in_(back), **values))
        notify_after_commit(connection, QUEUE.channel)
    return sorted(back + spent)


def retired_row(incarnation: str, now: float) -> dict[str, Any]:
    """Column values of a worker whose process is being ended."""
    row = {"current_model": None, "loaded_model": None, "last_seen_at": now - GHOST_AGE_S}
    return {**row, "retired_incarnation": incarnation}


def update_worker(host: Value[str], worker: Value[str], incarnation: Value[str]) -> Update:
    """An update of a worker's row for this incarnation only."""
    return update(WORKERS).where(
        WORKERS.c.host == host, WORKERS.c.worker == worker, WORKERS.c.incarnation == incarnation
    )


def is_over(host: Value[str], worker: Value[str], incarnation: Value[str]) -> Select[Any]:
    """Whether an incarnation was replaced or retired; no row for an unknown slot."""
    over = or_(
        WORKERS.c.incarnation != incarnation, func.coalesce(WORKERS.c.retired_incarnation == incarnation, false())
    )
    return select(over).where(WORKERS.c.host == host, WORKERS.c.worker == worker)


def set_incarnation(
    connection: Connection, host: str, worker: str, queue: str, incarnation: str, now: float, *, model: str | None
) -> None:
    """Set the incarnation of a worker's row."""
    row = {
        "queue": queue,
        "incarnation": incarnation,
        "current_model": model,
        "loaded_model": None,
        "last_seen_at": now,
    }
    connection.execute(
        upsert(connection, WORKERS)
        .values(host=host, worker=worker, **row)
        .on_conflict_do_update(index_elements=[WORKERS.c.host, WORKERS.c.worker], set_=row)
    )


def touch_worker(
    connection: Connection,
    host: str,
    worker: str,
    queue: str,
    incarnation: str,
    now: float,
    *,
    model: str | None = None,
    loaded: str | None = None,
    completed_at: float | None = None,
) -> bool:
    """Refresh the worker's row; False if this incarnation was replaced or retired."""
    row = {"queue": queue, "current_model": model, "loaded_model": loaded, "last_seen_at": now}
    completed = {} if completed_at is None else {"completed_at": completed_at}
    slot = {"host": host, "worker": worker, "incarnation": incarnation}
    its = touch(**slot, queue=queue, model=model, loaded=loaded, now=now, **completed)
    if connection.execute(*its).rowcount == 1:
        return True
    first = upsert(connection, WORKERS).values(host=host, worker=worker, incarnation=incarnation, **row)
    inserted = first.on_conflict_do_nothing().returning(WORKERS.c.worker)  # rowcount of an insert is not reliable
    return connection.scalar(inserted) is not None


@Prepared
def touch(**its: ColumnElement[Any]) -> Executable:
    """Refresh the row of a worker whose incarnation is not retired."""
    row = {
        "queue": its["queue"],
        "current_model": its["model"],
        "loaded_model": its["loaded"],
        "last_seen_at": its["now"],
    }
    if "completed_at" in its:
        row["completed_at"] = its["completed_at"]
    return (
        update_worker(its["host"], its["worker"], its["incarnation"])
        .where(is_not_retired(its["incarnation"]))
        .values(**row)
    )


def is_not_retired(incarnation: Value[str]) -> ColumnElement[bool]:
    """Whether this incarnation is not retired."""
    return or_(WORKERS.c.retired_incarnation.is_(None), WORKERS.c.retired_incarnation != incarnation)


def is_locked(host: Value[str], worker: Value[str]) -> ColumnElement[bool]:
    """Whether an operator has locked this worker."""
    row = WORKERS.alias("locked")
    locked = exists().where(row.c.host == host, row.c.worker == worker, row.c.locked_at.is_not(None))
    return locked.correlate_except(row)


def gpus_of(host: Value[str], worker: Value[str]) -> Select[tuple[str]]:
    """GPUs that a worker registered."""
    its = select(WORKER_GPUS.c.gpu).where(WORKER_GPUS.c.host == host, WORKER_GPUS.c.worker == worker)
    return its.correlate_except(WORKER_GPUS)


def match_quarantines(host: Value[str], worker: Value[str]) -> ColumnElement[bool]:
    """The quarantines that keep a worker from claiming."""
    held = and_(QUARANTINED_GPUS.c.host == host, QUARANTINED_GPUS.c.worker == worker)
    return or_(held, QUARANTINED_GPUS.c.gpu.in_(gpus_of(host, worker)))


def is_in_quarantine(host: Value[str], worker: Value[str]) -> ColumnElement[bool]:
    """Whether a quarantine keeps this worker from claiming."""
    return exists().where(match_quarantines(host, worker)).correlate_except(QUARANTINED_GPUS)


def is_held_by_lost(host: Value[str], worker: Value[str]) -> ColumnElement[bool]:
    """Whether a lost worker's job may still run on a GPU of this worker (D4)."""
    lost, theirs = JOBS.alias("lost"), WORKER_GPUS.alias("theirs")
    same = and_(theirs.c.host == lost.c.host, theirs.c.worker == lost.c.worker, theirs.c.gpu.in_(gpus_of(host, worker)))
    return exists().where(is_in({State.HOST_LOST}, lost), same).correlate_except(lost, theirs)


def is_better_elsewhere(
    job: FromClause, host: Value[str], worker: Value[str], now: Value[float], fresh_since: Value[float]
) -> ColumnElement[bool]:
    """Whether the job avoids this worker and another live worker can take it."""
    other = WORKERS.alias("other")
    there = exists().where(
        other.c.queue == job.c.queue,
        other.c.last_seen_at > fresh_since,
        or_(other.c.retired_incarnation.is_(None), other.c.retired_incarnation != other.c.incarnation),
        other.c.locked_at.is_(None),
        or_(other.c.draining_incarnation.is_(None), other.c.draining_incarnation != other.c.incarnation),
        not_(avoids(job, other.c.host, other.c.worker, now)),
        not_(is_barred(job, other.c.host, other.c.worker)),
        not_(is_in_quarantine(other.c.host, other.c.worker)),
        not_(is_held_by_lost(other.c.host, other.c.worker)),
    )
    return and_(avoids(job, host, worker, now), there.correlate_except(other))


def avoids(job: FromClause, host: Value[str], worker: Value[str], now: Value[float]) -> ColumnElement[bool]:
    """Whether a job must avoid a worker for now."""
    slot = and_(GPU_AVOIDANCE.c.host == host, GPU_AVOIDANCE.c.worker == worker)
    here = or_(slot, GPU_AVOIDANCE.c.gpu.in_(gpus_of(host, worker)))
    return (
        exists()
        .where(GPU_AVOIDANCE.c.job_id == job.c.job_id, GPU_AVOIDANCE.c.until > now, here)
        .correlate_except(GPU_AVOIDANCE)
    )


def avoid(connection: Connection, job_id: int, slot: Slot, *, until: float, now: float) -> None:
    """Let a requeued job avoid a slot and its GPUs, while other workers can take it."""
    past = and_(GPU_AVOIDANCE.c.job_id == job_id, GPU_AVOIDANCE.c.until <= now)
    connection.execute(delete(GPU_AVOIDANCE).where(past))
    # A rank avoids no worker: the worker would take a rank of another gang, and the gangs could deadlock.
    in_gang = connection.scalar(select(JOBS.c.gang).where(JOBS.c.job_id == job_id)) is not None
    if until <= now or in_gang:
        return
    keys = [GPU_AVOIDANCE.c.job_id, GPU_AVOIDANCE.c.host, GPU_AVOIDANCE.c.worker, GPU_AVOIDANCE.c.gpu]
    for gpu in {"", *slot.gpus}:
        row = {"job_id": job_id, "host": slot.host, "worker": slot.worker, "gpu": gpu}
        kept = upsert(connection, GPU_AVOIDANCE).values(**row, until=until)
        connection.execute(kept.on_conflict_do_update(index_elements=keys, set_={"until": until}))


def is_barred(job: FromClause, host: Value[str], worker: Value[str]) -> ColumnElement[bool]:
    """Whether a worker is barred from the job's run."""
    its = exists().where(
        RUN_EXCLUSIONS.c.run_id == job.c.run_id, RUN_EXCLUSIONS.c.host == host, RUN_EXCLUSIONS.c.worker == worker
    )
    return its.correlate_except(RUN_EXCLUSIONS)
