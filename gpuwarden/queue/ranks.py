"""Gangs: jobs of several ranks. Each rank is a job with its worker, claim and lease.

A rank that is done stays `finished` until the last one completes them all. A requeue of one rank requeues all, finished
ones too. The failure of one rank fails the run.

The run's row is locked before more than one rank changes.
"""

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, and_, case, exists, select, update

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.job import MOVES, REQUEUE_PRIORITY, Kind, Move, State
from gpuwarden.queue import runs, sql
from gpuwarden.queue.models import COUNT_MAX
from gpuwarden.queue.schema import JOBS, QUEUE

BEGUN: Final = -COUNT_MAX
"""Priority of waiting ranks while others of their gang run, above any submitted one."""


def close(connection: Connection, run_id: str, gang: int, now: float) -> None:
    """Complete a gang whose ranks have all finished."""
    its = JOBS.c.gang == gang
    others = exists().where(its, JOBS.c.state != State.FINISHED)
    if connection.scalar(select(others)):
        return
    ids = list(connection.scalars(select(JOBS.c.job_id).where(its).order_by(JOBS.c.job_id)))
    connection.execute(sql.transition(Move.CLOSE, its, ended_at=now))
    for job_id in ids:
        connection.execute(*sql.write_event(kind=Kind.COMPLETED, now=now, job_id=job_id))
    for job_id in ids:
        runs.queue_dependents(connection, run_id, job_id, now)


def lock_runs_of(connection: Connection, which: ColumnElement[bool]) -> None:
    """Lock the runs of these jobs' gangs, before any job is locked."""
    found = select(JOBS.c.run_id).where(which, JOBS.c.gang.is_not(None)).distinct()
    runs.lock_all(connection, connection.scalars(found).all())


def recall(connection: Connection, job_ids: Iterable[int], now: float, *, tripped: bool = False) -> None:
    """Requeue the other ranks of requeued ranks, or fail those at a cap.

    `tripped` counts a watchdog retry for each, so that all reach the cap together.
    """
    these = and_(JOBS.c.job_id.in_(list(job_ids)), JOBS.c.gang.is_not(None), JOBS.c.state == State.QUEUED)
    ranks = connection.execute(select(JOBS.c.gang, JOBS.c.requeued_with_ranks).where(these)).all()
    gangs = {row.gang for row in ranks if not row.requeued_with_ranks}
    if any(row.requeued_with_ranks for row in ranks):
        connection.execute(update(JOBS).where(these).values(requeued_with_ranks=False))
    if not gangs:
        return
    # Lock all ranks before a decision: a concurrent fence happens before or after it.
    every = connection.execute(sql.lock_jobs(select(JOBS).where(JOBS.c.gang.in_(gangs)))).all()
    fenced = [row.job_id for row in every if row.state == State.FENCING]
    connection.execute(update(JOBS).where(JOBS.c.job_id.in_(fenced)).values(requeued_with_ranks=True))
    waiting = [row.job_id for row in every if row.state == State.QUEUED]
    connection.execute(update(JOBS).where(JOBS.c.job_id.in_(waiting)).values(priority=_again()))
    found = [row for row in every if row.state in MOVES[Move.RECALL].sources]
    back = [row.job_id for row in found if row.attempt < row.attempts_max]
    for row in found:
        if row.attempt >= row.attempts_max:
            reason = f"another rank was queued again, and all {row.attempts_max} attempts are used"
            sql.end_failed(connection, Move.EXHAUST, JOBS.c.job_id == row.job_id, row.job_id, reason, now)
    values: dict[str, Any] = {"reason": "another rank was queued again", "queued_at": now, "result": None}
    if tripped:
        values["watchdog_retries"] = JOBS.c.watchdog_retries + 1
    again = {"priority": _again(), **sql.UNCLAIMED}
    move = sql.transition(Move.RECALL, JOBS.c.job_id.in_(back), **values, **again)
    connection.execute(move)
    notify_after_commit(connection, QUEUE.channel)


def begin(connection: Connection, gang: int) -> None:
    """Raise the priority of a gang's waiting ranks after its first claim."""
    waiting = and_(JOBS.c.gang == gang, JOBS.c.state == State.QUEUED)
    connection.execute(update(JOBS).where(waiting).values(priority=BEGUN))


def _again() -> ColumnElement[int]:
    return case((JOBS.c.priority == BEGUN, REQUEUE_PRIORITY), else_=sql.least(JOBS.c.priority, REQUEUE_PRIORITY))
