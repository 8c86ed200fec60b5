"""Jobs of several ranks: each rank is a job with a worker, a claim and a lease of its own, and they end as one.

A rank that is done is `finished` until all are; then all complete, in the transaction of the last. One that has to be
queued again, for whatever reason, takes the others along, those that are finished too: their workers find within a
second that they no longer own their jobs, and stop. One that fails fails their run, and with it the others.

A gang is of one run, whose row is locked before more than one rank is changed.
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
"""The priority of ranks that wait while others of their gang run: before any that a submitter can name."""


def close(connection: Connection, run_id: str, gang: int, now: float) -> None:
    """Complete a gang of a locked run whose last rank has just finished; nothing while another has not."""
    its = JOBS.c.gang == gang
    others = exists().where(its, JOBS.c.state != State.FINISHED)
    if connection.scalar(select(others)):
        return
    ids = list(connection.scalars(select(JOBS.c.job_id).where(its).order_by(JOBS.c.job_id)))
    connection.execute(sql.transition(Move.CLOSE, its, ended_at=now))
    for job_id in ids:
        connection.execute(*sql.write_event(kind=Kind.COMPLETED, now=now, job_id=job_id))
    for job_id in ids:
        runs.go_on(connection, run_id, job_id, now)


def lock_runs_of(connection: Connection, which: ColumnElement[bool]) -> None:
    """Lock the runs of the gangs among some jobs, before any of the jobs is locked."""
    found = select(JOBS.c.run_id).where(which, JOBS.c.gang.is_not(None)).distinct()
    runs.lock_all(connection, connection.scalars(found).all())


def recall(connection: Connection, job_ids: Iterable[int], now: float, *, tripped: bool = False) -> None:
    """Jobs were queued again: queue the other ranks of their gangs too, or fail those at a cap.

    `tripped` counts a watchdog retry for them as for the one that was tripped, so that all come to the cap as one.
    """
    these = and_(JOBS.c.job_id.in_(list(job_ids)), JOBS.c.gang.is_not(None), JOBS.c.state == State.QUEUED)
    ranks = connection.execute(select(JOBS.c.gang, JOBS.c.recalled).where(these)).all()
    gangs = {row.gang for row in ranks if not row.recalled}
    if any(row.recalled for row in ranks):
        connection.execute(update(JOBS).where(these).values(recalled=False))
    if not gangs:
        return
    # All of them locked before any is judged: one that is being fenced at this moment is fenced, or is taken along.
    every = connection.execute(sql.locked(select(JOBS).where(JOBS.c.gang.in_(gangs)))).all()
    # A rank that is fenced is queued by whoever settles it, once its process is known to be gone.
    fenced = [row.job_id for row in every if row.state == State.FENCING]
    connection.execute(update(JOBS).where(JOBS.c.job_id.in_(fenced)).values(recalled=True))
    waiting = [row.job_id for row in every if row.state == State.QUEUED]
    connection.execute(update(JOBS).where(JOBS.c.job_id.in_(waiting)).values(priority=_again()))
    found = [row for row in every if row.state in MOVES[Move.RECALL].sources]
    back = [row.job_id for row in found if row.attempt < row.attempts_max]
    for row in found:
        if row.attempt >= row.attempts_max:
            because = f"another rank was queued again, and all {row.attempts_max} attempts are used"
            sql.end_failed(connection, Move.EXHAUST, JOBS.c.job_id == row.job_id, row.job_id, because, now)
    values: dict[str, Any] = {"because": "another rank was queued again", "queued_at": now, "result": None}
    if tripped:
        values["watchdog_retries"] = JOBS.c.watchdog_retries + 1
    again = {"priority": _again(), **sql.UNCLAIMED}
    move = sql.transition(Move.RECALL, JOBS.c.job_id.in_(back), **values, **again)
    connection.execute(move)
    notify_after_commit(connection, QUEUE.channel)


def begin(connection: Connection, gang: int) -> None:
    """A rank was claimed: the others come before all that has not begun, so that no other gang takes their workers."""
    waiting = and_(JOBS.c.gang == gang, JOBS.c.state == State.QUEUED)
    connection.execute(update(JOBS).where(waiting).values(priority=BEGUN))


def _again() -> ColumnElement[int]:
    """The priority of a rank whose gang is queued again: no more that of one that has begun."""
    return case((JOBS.c.priority == BEGUN, REQUEUE_PRIORITY), else_=sql.least(JOBS.c.priority, REQUEUE_PRIORITY))
