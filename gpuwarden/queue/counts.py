"""How much there is of everything in the queue, for people and for Prometheus; no statement looks at a finished job.

Every count but two is of a small index or a small table. One is of the jobs that wait for a worker, `waiting`: it
grows with their number, to some 200 ms for a million. The other is of the items that failed, `failing`: it grows with
those that were done or failed in the runs that go on and asked for wrangling.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Executable, Row, Select, String, and_, case, func, literal_column, or_, select

from gpuwarden.db.transactions import reading
from gpuwarden.job import FRESH_S, ItemOutcome, State
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.fencing import FLAG_FRESH_S
from gpuwarden.queue.schema import (
    AT_WORK,
    CONSUMERS,
    DEAD_WORKERS,
    DISPATCH_EVENTS,
    ITEM_OUTCOMES,
    JOBS,
    QUARANTINED_GPUS,
    RUNS,
    WORKERS,
)
from gpuwarden.queue.sql import Prepared

OUTCOMES_MAX: Final = 20_000
"""So many events are read at a time; the next look takes up the rest."""

FAILING_MAX: Final = 200
"""So many workers of runs are told of that have failed items: those first who finished none, and failed most."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The jobs of a queue that a worker may claim, and since when (Unix seconds) the oldest of them may be."""

    jobs: int
    oldest_at: float | None


@dataclass(frozen=True, kw_only=True)
class FailingWorker:
    """One worker that has failed items of a run, each counted once and forgiven ones left out, and how many it did."""

    run_id: str
    host: str
    worker: str
    failed: int
    done: int


@dataclass(frozen=True, kw_only=True)
class Failing:
    """The workers that have failed items of the runs that go on and asked for wrangling; `left_out` more there are."""

    workers: tuple[FailingWorker, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often jobs of a queue were queued again: after trips, and after leases that were lost."""

    watchdog: int
    reclaims: int


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The workers of a queue: `busy` were seen within `FRESH_S` and work with a model (A12), `by_state` is for all."""

    busy: int
    by_state: dict[str, int]


class Outcome(NamedTuple):
    """An event, as far as it is counted; seconds. Its class and kind are words of `JobClass` and `Kind`."""

    event_id: int
    queue: str | None
    job_class: str | None
    kind: str
    waited_s: float | None
    ran_s: float | None


HOST_WORKERS_MAX: Final = 1000
"""So many workers of one host are told of, by name: more than any has."""

WORKER_STATES: Final = ("busy", "idle", "locked", "draining", "gone")
"""As `gpuwarden worker list` tells them; the first that holds of: locked, gone, draining, busy, idle."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The queue at one moment, `now` by its clock, but for the claimable jobs.

    `at_work` has the jobs that are neither over nor claimable, by queue and state, where there are any; `retries` are
    of all jobs there ever were, `crews` of every slot that has ever registered, by queue; `dead` are the workers that
    were found dead and have not come back (A14), by queue; `lags` the events that each consumer has yet to acknowledge.
    """

    now: float
    at_work: Mapping[tuple[str, State], int]
    crews: Mapping[str, Crew]
    retries: Mapping[str, Retries]
    dead: Mapping[str, int]
    quarantined: int
    lags: Mapping[str, int]


class Counts(QueueBase):
    """Reads alone."""

    def waiting(self) -> dict[str, Waiting]:
        """The claimable jobs, by queue; a queue without any is left out."""
        with reading(self._engine) as connection:
            return {row[0]: Waiting(jobs=int(row[1]), oldest_at=row[2]) for row in connection.execute(*_waiting())}

    def failing(self) -> Failing:
        """Who has failed items, `FAILING_MAX` at most; what wrangling would be asked to judge is among the first."""
        with reading(self._engine) as connection:
            rows = connection.execute(_failing()).all()
        workers = tuple(
            FailingWorker(run_id=row.run_id, host=row.host, worker=row.worker, failed=row.failed, done=row.done)
            for row in rows
        )
        return Failing(workers=workers, left_out=int(rows[0].them) - len(rows) if rows else 0)

    def look(self, *, now: float) -> Look:
        """All that is cheap to count, in one transaction; nothing is written for it."""
        newest = select(func.coalesce(func.max(DISPATCH_EVENTS.c.position), 0)).scalar_subquery()
        unplaced = select(func.count()).where(DISPATCH_EVENTS.c.position.is_(None))
        dead = select(DEAD_WORKERS.c.queue, func.count()).where(DEAD_WORKERS.c.stamped_at > now - FLAG_FRESH_S)
        with reading(self._engine) as connection:
            lags = connection.execute(select(CONSUMERS.c.consumer, newest - CONSUMERS.c.position)).all()
            more = int(connection.scalar(unplaced) or 0) if lags else 0
            return Look(
                now=now,
                at_work={(row[0], State(row[1])): int(row[2]) for row in connection.execute(*_at_work())},
                crews=_crews_of(connection.execute(*_crews(fresh_since=now - FRESH_S)).all()),
                retries={
                    row[0]: Retries(watchdog=int(row[1]), reclaims=int(row[2])) for row in connection.execute(*_tried())
                },
                dead={row[0]: int(row[1]) for row in connection.execute(dead.group_by(DEAD_WORKERS.c.queue))},
                quarantined=int(connection.scalar(select(func.count(QUARANTINED_GPUS.c.gpu.distinct()))) or 0),
                lags={row[0]: max(0, int(row[1])) + more for row in lags},
            )

    def of_host(self, host: str, *, now: float) -> list[tuple[str, str]]:
        """The workers of one host that are there: (queue, worker), by name, `HOST_WORKERS_MAX` at most."""
        with reading(self._engine) as connection:
            found = connection.execute(*_of_host(host=host, fresh_since=now - FRESH_S, limit=HOST_WORKERS_MAX))
            return [(row.queue, row.worker) for row in found]

    def last_event(self) -> int:
        """The greatest number of an event; 0 where there is none."""
        with reading(self._engine) as connection:
            return int(connection.scalar(select(func.max(DISPATCH_EVENTS.c.event_id))) or 0)

    def outcomes_after(self, event_id: int, *, and_of: Collection[int] = ()) -> list[Outcome]:
        """The next events after this number, `OUTCOMES_MAX` at most, in the order of their numbers; and these.

        On PostgreSQL one of a lower number may be seen later: whoever counts asks again for the numbers it missed.
        """
        missed = select(*_COUNTED).where(DISPATCH_EVENTS.c.event_id.in_(sorted(and_of)))
        with reading(self._engine) as connection:
            late = connection.execute(missed).all() if and_of else []
            found = connection.execute(*_outcomes(after=event_id, limit=OUTCOMES_MAX)).all()
        return [Outcome(*row) for row in (*late, *found)]


_COUNTED: Final = tuple(DISPATCH_EVENTS.c[name] for name in Outcome._fields)


def _crews_of(rows: Sequence[Row[Any]]) -> dict[str, Crew]:
    busy: dict[str, int] = {}
    states: dict[str, dict[str, int]] = {}
    for row in rows:
        its = states.setdefault(row.queue, dict.fromkeys(WORKER_STATES, 0))
        its[row.state] += int(row.workers)
        busy[row.queue] = busy.get(row.queue, 0) + int(row.busy)
    return {queue: Crew(busy=busy[queue], by_state=states[queue]) for queue in states}


@Prepared
def _waiting() -> Executable:
    claimable = sql.is_in({State.QUEUED})
    return select(JOBS.c.queue, func.count(), func.min(JOBS.c.queued_at)).where(claimable).group_by(JOBS.c.queue)


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
def _tried() -> Executable:
    again = or_(JOBS.c.watchdog_retries > literal_column("0"), JOBS.c.reclaims > literal_column("0"))
    sums = func.sum(JOBS.c.watchdog_retries), func.sum(JOBS.c.reclaims)
    return select(JOBS.c.queue, *sums).where(again).group_by(JOBS.c.queue)


@Prepared
def _of_host(**its: ColumnElement[Any]) -> Executable:
    over = and_(WORKERS.c.retired.is_not(None), WORKERS.c.retired == WORKERS.c.incarnation)
    there = and_(WORKERS.c.host == its["host"], WORKERS.c.last_seen_at > its["fresh_since"], ~over)
    return select(WORKERS.c.queue, WORKERS.c.worker).where(there).order_by(WORKERS.c.worker).limit(its["limit"])


@Prepared
def _crews(**its: ColumnElement[Any]) -> Executable:
    fresh = WORKERS.c.last_seen_at > its["fresh_since"]
    over = and_(WORKERS.c.retired.is_not(None), WORKERS.c.retired == WORKERS.c.incarnation)
    busy = and_(fresh, WORKERS.c.current_model.is_not(None))
    state = case(
        (WORKERS.c.locked_at.is_not(None), _word("locked")),
        (or_(~fresh, over), _word("gone")),
        (and_(WORKERS.c.draining.is_not(None), WORKERS.c.draining == WORKERS.c.incarnation), _word("draining")),
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
    after = select(*_COUNTED).where(DISPATCH_EVENTS.c.event_id > its["after"])
    return after.order_by(DISPATCH_EVENTS.c.event_id).limit(its["limit"])
