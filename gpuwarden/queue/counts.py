"""Counts of the queue for operators and for Prometheus. Only `ended` reads finished jobs.

`waiting` grows with the claimable jobs, about 200 ms for a million. `failing` grows with the item outcomes of wrangled
runs. All others are cheap.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Executable,
    Row,
    Select,
    String,
    and_,
    case,
    func,
    literal,
    literal_column,
    or_,
    select,
    union_all,
)

from gpuwarden.db.transactions import autocommit, reading
from gpuwarden.job import FRESH_S, ItemOutcome, Move, State
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.claims import LOCKED_BY_ERRORS
from gpuwarden.queue.fencing import FLAG_FRESH_S
from gpuwarden.queue.models import KNOWN_STATES
from gpuwarden.queue.schema import (
    AT_WORK,
    CONSUMERS,
    DEAD_WORKERS,
    DELETED_RETRIES,
    ITEM_OUTCOMES,
    JOBS,
    OUTBOX_EVENTS,
    QUARANTINED_GPUS,
    RUNS,
    WORKERS,
)
from gpuwarden.queue.sql import Prepared

OUTCOMES_MAX: Final = 20_000
"""Events read at a time. The next call reads the rest."""

FAILING_MAX: Final = 200
"""Limit of failing workers listed, the worst first."""


@dataclass(frozen=True, kw_only=True)
class ClaimableJobs:
    """A queue's claimable jobs, and when the oldest became claimable (Unix seconds)."""

    jobs: int
    oldest_at: float | None


@dataclass(frozen=True, kw_only=True)
class FailingWorker:
    """Items of a run that one worker failed and finished. Repeated failures of an item count once."""

    run_id: str
    host: str
    worker: str
    failed: int
    done: int


@dataclass(frozen=True, kw_only=True)
class Failing:
    """Workers that failed items of wrangled runs. `left_out` is how many are not listed."""

    workers: tuple[FailingWorker, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often a queue's jobs were requeued by the remediator and after lost leases."""

    watchdog: int
    reclaims: int


@dataclass(frozen=True, kw_only=True)
class WorkerCounts:
    """Workers of a queue. `busy` were seen within `FRESH_S` and have a model (A12)."""

    busy: int
    by_state: dict[str, int]


class Outcome(NamedTuple):
    """The counted part of an event, times in seconds."""

    event_id: int
    queue: str | None
    job_class: str | None
    kind: str
    waited_s: float | None
    ran_s: float | None


LOCKED_MAX: Final = 200
"""Limit of listed workers that fatal errors locked."""

HOST_WORKERS_MAX: Final = 1000
"""Limit of workers listed for one host. No host has so many."""

WORKER_STATES: Final = ("busy", "idle", "locked", "draining", "gone")
"""In the words of `gpuwarden worker list`."""


@dataclass(frozen=True, kw_only=True)
class QueueSnapshot:
    """Counts of the queue at the time `now`, without claimable jobs.

    `at_work` has unfinished jobs by queue and state. `lags` are unacknowledged events by consumer. The others are by
    queue: workers, requeues ever, and dead workers (A14). `locked` has queue, host and name of
    each worker that fatal errors locked.
    """

    now: float
    at_work: Mapping[tuple[str, State], int]
    workers: Mapping[str, WorkerCounts]
    retries: Mapping[str, Retries]
    dead: Mapping[str, int]
    quarantined: int
    locked: Sequence[tuple[str, str, str]]
    lags: Mapping[str, int]


class Counts(QueueBase):
    """Reads only."""

    def waiting(self) -> dict[str, ClaimableJobs]:
        """The claimable jobs by queue. A queue without any is absent."""
        with reading(self._engine) as connection:
            return {
                row[0]: ClaimableJobs(jobs=int(row[1]), oldest_at=row[2]) for row in connection.execute(*_waiting())
            }

    def claimable(self, queue: str, *, now: float, at_most: int) -> int:
        """The claimable jobs of a queue, counted up to a limit."""
        due = or_(JOBS.c.retry_at.is_(None), JOBS.c.retry_at <= now)
        its = and_(JOBS.c.queue == queue, sql.from_sources(Move.CLAIM), due)
        # In the order of claims, so that both databases use its index.
        some = select(JOBS.c.job_id).where(its).order_by(JOBS.c.priority, JOBS.c.job_id).limit(at_most).subquery()
        with autocommit(self._engine) as connection:
            return int(connection.scalar(select(func.count()).select_from(some)) or 0)

    def ended(self) -> dict[tuple[str, State], int]:
        """Ended jobs by queue and state."""
        with reading(self._engine) as connection:
            return {
                (row[0], State(row[1])): int(row[2]) for row in connection.execute(*_ended()) if row[1] in KNOWN_STATES
            }

    def failing(self) -> Failing:
        """Workers that failed items, at most `FAILING_MAX`."""
        with reading(self._engine) as connection:
            rows = connection.execute(_failing()).all()
        workers = tuple(
            FailingWorker(run_id=row.run_id, host=row.host, worker=row.worker, failed=row.failed, done=row.done)
            for row in rows
        )
        return Failing(workers=workers, left_out=int(rows[0].them) - len(rows) if rows else 0)

    def snapshot(self, *, now: float) -> QueueSnapshot:
        """All cheap counts, read in one transaction."""
        newest = select(func.coalesce(func.max(OUTBOX_EVENTS.c.position), 0)).scalar_subquery()
        unplaced = select(func.count()).where(OUTBOX_EVENTS.c.position.is_(None))
        dead = select(DEAD_WORKERS.c.queue, func.count()).where(DEAD_WORKERS.c.stamped_at > now - FLAG_FRESH_S)
        with reading(self._engine) as connection:
            lags = connection.execute(select(CONSUMERS.c.consumer, newest - CONSUMERS.c.position)).all()
            more = int(connection.scalar(unplaced) or 0) if lags else 0
            return QueueSnapshot(
                now=now,
                at_work={(row[0], State(row[1])): int(row[2]) for row in connection.execute(*_at_work())},
                workers=_group_workers(connection.execute(*_count_workers(fresh_since=now - FRESH_S)).all()),
                retries={
                    row[0]: Retries(watchdog=int(row[1]), reclaims=int(row[2]))
                    for row in connection.execute(*_count_retries())
                },
                dead={row[0]: int(row[1]) for row in connection.execute(dead.group_by(DEAD_WORKERS.c.queue))},
                quarantined=int(connection.scalar(select(func.count(QUARANTINED_GPUS.c.gpu.distinct()))) or 0),
                locked=[(row.queue, row.host, row.worker) for row in connection.execute(*_locked_by_errors())],
                lags={row[0]: max(0, int(row[1])) + more for row in lags},
            )

    def of_host(self, host: str, *, now: float) -> list[tuple[str, str]]:
        """Live workers of a host as (queue, worker), by name."""
        with reading(self._engine) as connection:
            found = connection.execute(*_of_host(host=host, fresh_since=now - FRESH_S, limit=HOST_WORKERS_MAX))
            return [(row.queue, row.worker) for row in found]

    def last_event(self) -> int:
        """The highest event id, or 0."""
        with reading(self._engine) as connection:
            return int(connection.scalar(select(func.max(OUTBOX_EVENTS.c.event_id))) or 0)

    def outcomes_after(self, event_id: int, *, and_of: Collection[int] = ()) -> list[Outcome]:
        """The next events by id, at most `OUTCOMES_MAX`, and those with the ids `and_of`.

        On PostgreSQL an event with a lower id may become visible later.
        """
        missed = select(*_COUNTED).where(OUTBOX_EVENTS.c.event_id.in_(sorted(and_of)))
        with reading(self._engine) as connection:
            late = connection.execute(missed).all() if and_of else []
            found = connection.execute(*_outcomes(after=event_id, limit=OUTCOMES_MAX)).all()
        return [Outcome(*row) for row in (*late, *found)]


_COUNTED: Final = tuple(OUTBOX_EVENTS.c[name] for name in Outcome._fields)


def _group_workers(rows: Sequence[Row[Any]]) -> dict[str, WorkerCounts]:
    busy: dict[str, int] = {}
    states: dict[str, dict[str, int]] = {}
    for row in rows:
        its = states.setdefault(row.queue, dict.fromkeys(WORKER_STATES, 0))
        its[row.state] += int(row.workers)
        busy[row.queue] = busy.get(row.queue, 0) + int(row.busy)
    return {queue: WorkerCounts(busy=busy[queue], by_state=states[queue]) for queue in states}


@Prepared
def _waiting() -> Executable:
    claimable = sql.is_in({State.QUEUED})
    return select(JOBS.c.queue, func.count(), func.min(JOBS.c.queued_at)).where(claimable).group_by(JOBS.c.queue)


@Prepared
def _ended() -> Executable:
    over = select(JOBS.c.queue, JOBS.c.state, func.count()).where(JOBS.c.ended_at.is_not(None))
    return over.group_by(JOBS.c.queue, JOBS.c.state)


def _failing() -> Select[Any]:
    names = ("run_id", "host", "worker")
    its = [ITEM_OUTCOMES.c[name] for name in names]
    judged = select(RUNS.c.run_id).where(RUNS.c.wrangled, RUNS.c.state == "running")
    how_many = func.count(ITEM_OUTCOMES.c.item.distinct())
    failed = (
        select(*its, how_many.label("failed"))
        .where(ITEM_OUTCOMES.c.run_id.in_(judged), ITEM_OUTCOMES.c.outcome == ItemOutcome.FAILED)
        .group_by(*its)
        .subquery("who")
    )
    same = [ITEM_OUTCOMES.c[name] == failed.c[name] for name in names]
    done = select(how_many).where(*same, ITEM_OUTCOMES.c.outcome == ItemOutcome.DONE).scalar_subquery()
    each = select(failed, done.label("done")).subquery("each")
    worst_first = case((each.c.done > 0, 1), else_=0), each.c.failed.desc(), *(each.c[name] for name in names)
    return select(each, func.count().over().label("them")).order_by(*worst_first).limit(FAILING_MAX)


@Prepared
def _at_work() -> Executable:
    found = select(JOBS.c.queue, JOBS.c.state, func.count()).where(literal_column(AT_WORK))
    return found.group_by(JOBS.c.state, JOBS.c.queue)


@Prepared
def _count_retries() -> Executable:
    again = or_(JOBS.c.watchdog_retries > literal_column("0"), JOBS.c.reclaims > literal_column("0"))
    names = ("queue", "watchdog_retries", "reclaims")
    kept = select(*(JOBS.c[name] for name in names)).where(again)
    each = union_all(kept, select(*(DELETED_RETRIES.c[name] for name in names))).subquery("each")
    sums = func.sum(each.c.watchdog_retries), func.sum(each.c.reclaims)
    return select(each.c.queue, *sums).group_by(each.c.queue)


@Prepared
def _of_host(**its: ColumnElement[Any]) -> Executable:
    over = and_(WORKERS.c.retired_incarnation.is_not(None), WORKERS.c.retired_incarnation == WORKERS.c.incarnation)
    there = and_(WORKERS.c.host == its["host"], WORKERS.c.last_seen_at > its["fresh_since"], ~over)
    return select(WORKERS.c.queue, WORKERS.c.worker).where(there).order_by(WORKERS.c.worker).limit(its["limit"])


@Prepared
def _locked_by_errors() -> Executable:
    its = [WORKERS.c[name] for name in ("queue", "host", "worker")]
    locked = select(*its).where(WORKERS.c.locked_at.is_not(None), WORKERS.c.locked_by == literal(LOCKED_BY_ERRORS))
    return locked.order_by(*its).limit(literal(LOCKED_MAX))


@Prepared
def _count_workers(**its: ColumnElement[Any]) -> Executable:
    fresh = WORKERS.c.last_seen_at > its["fresh_since"]
    over = and_(WORKERS.c.retired_incarnation.is_not(None), WORKERS.c.retired_incarnation == WORKERS.c.incarnation)
    busy = and_(fresh, WORKERS.c.current_model.is_not(None))
    state = case(
        (WORKERS.c.locked_at.is_not(None), _word("locked")),
        (or_(~fresh, over), _word("gone")),
        (
            and_(WORKERS.c.draining_incarnation.is_not(None), WORKERS.c.draining_incarnation == WORKERS.c.incarnation),
            _word("draining"),
        ),
        (WORKERS.c.current_model.is_not(None), _word("busy")),
        else_=_word("idle"),
    ).label("state")
    one = select(WORKERS.c.queue, state, case((busy, 1), else_=0).label("busy")).subquery("one")
    counted = select(one.c.queue, one.c.state, func.count().label("workers"), func.sum(one.c.busy).label("busy"))
    return counted.group_by(one.c.queue, one.c.state)


def _word(word: str) -> ColumnElement[str]:
    return literal_column(f"'{word}'", String)


@Prepared
def _outcomes(**its: ColumnElement[Any]) -> Executable:
    after = select(*_COUNTED).where(OUTBOX_EVENTS.c.event_id > its["after"])
    return after.order_by(OUTBOX_EVENTS.c.event_id).limit(its["limit"])
