"""Deletes finished jobs with their events and items, in small batches.

The newest job and the jobs of the newest events stay, so that ids are not reused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, Connection, Table, and_, case, delete, exists, func, or_, select, tuple_

from gpuwarden.db.transactions import upsert
from gpuwarden.job import FINAL, Kind
from gpuwarden.queue import sql
from gpuwarden.queue.schema import (
    DELETED_RETRIES,
    DEPENDENCIES,
    GPU_AVOIDANCE,
    ITEM_OUTCOMES,
    ITEMS,
    JOBS,
    OUTBOX_EVENTS,
    QUEUES,
    RUN_EXCLUSIONS,
    RUNS,
)

KEPT_DAYS: Final = 90
"""Default retention of finished jobs, days."""

BATCH_JOBS: Final = 200
"""Most jobs of one transaction."""

BATCH_ROWS: Final = 1000
"""Most rows of each other table."""

DAY_S: Final = 86400.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """The last job of a batch. Time in Unix seconds."""

    ended_at: float = 0.0
    job_id: int = 0


START: Final = Place()


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Old jobs, their runs, and where the next batch begins."""

    jobs: Sequence[int]
    runs: Sequence[str]
    end: Place

    def intersection(self, other: "Batch") -> "Batch":
        """What both batches delete."""
        jobs, runs = sorted({*self.jobs} & {*other.jobs}), sorted({*self.runs} & {*other.runs})
        return Batch(jobs=jobs, runs=runs, end=self.end)


def next_batch(connection: Connection, after: Place, now: float) -> Batch:
    """The next old jobs, oldest first."""
    shortest = connection.scalar(select(func.min(QUEUES.c.retention_days)).where(QUEUES.c.retention_days > 0))
    before = now - DAY_S * min(KEPT_DAYS, KEPT_DAYS if shortest is None else shortest)
    place = tuple_(JOBS.c.ended_at, JOBS.c.job_id) > tuple_(after.ended_at, after.job_id)
    found = (
        select(JOBS.c.job_id, JOBS.c.ended_at, JOBS.c.run_id, _is_old(now).label("is_old"))
        .select_from(
            JOBS.outerjoin(RUNS, RUNS.c.run_id == JOBS.c.run_id).outerjoin(QUEUES, QUEUES.c.queue == JOBS.c.queue)
        )
        .where(JOBS.c.ended_at < before, place)
        .order_by(JOBS.c.ended_at, JOBS.c.job_id)
        .limit(BATCH_JOBS)
    )
    rows = connection.execute(found).all()
    kept = _newest(connection)
    old = [row for row in rows if row.is_old and row.job_id not in kept]
    end = START if len(rows) < BATCH_JOBS else Place(ended_at=rows[-1].ended_at, job_id=rows[-1].job_id)
    runs = sorted({row.run_id for row in old if row.run_id is not None})
    return Batch(jobs=[row.job_id for row in old], runs=runs, end=end)


def delete_batch(connection: Connection, batch: Batch) -> bool:
    """Delete jobs with their rows; False if rows are left."""
    its = batch.jobs
    for table, where in (
        (ITEM_OUTCOMES, ITEM_OUTCOMES.c.job_id.in_(its)),
        (ITEMS, ITEMS.c.job_id.in_(its)),
        (ITEMS, and_(ITEMS.c.run_id.in_(batch.runs), ITEMS.c.job_id.is_(None))),
        (OUTBOX_EVENTS, OUTBOX_EVENTS.c.job_id.in_(its)),
        (GPU_AVOIDANCE, GPU_AVOIDANCE.c.job_id.in_(its)),
        (DEPENDENCIES, DEPENDENCIES.c.job_id.in_(its)),
        (DEPENDENCIES, DEPENDENCIES.c.needs_job_id.in_(its)),
    ):
        if _delete_rows(connection, table, where) == BATCH_ROWS:
            return False
    _keep_retries(connection, its)
    connection.execute(delete(JOBS).where(JOBS.c.job_id.in_(its)))
    left = select(RUNS.c.run_id).where(RUNS.c.run_id.in_(batch.runs), exists().where(JOBS.c.run_id == RUNS.c.run_id))
    gone = set(batch.runs) - set(connection.scalars(left))
    for table in (RUN_EXCLUSIONS, RUNS):
        connection.execute(delete(table).where(table.c.run_id.in_(gone)))
    return True


def _is_old(now: float) -> ColumnElement[bool]:
    """Whether a job and its run ended before the retention of its queue."""
    days = func.coalesce(QUEUES.c.retention_days, KEPT_DAYS)
    before = now - DAY_S * days
    run_is_old = or_(JOBS.c.run_id.is_(None), and_(RUNS.c.state != "running", RUNS.c.ended_at < before))
    unread = exists().where(
        OUTBOX_EVENTS.c.job_id == JOBS.c.job_id,
        OUTBOX_EVENTS.c.kind == Kind.FAILED,
        OUTBOX_EVENTS.c.run_failed_at.is_(None),
    )
    old = and_(days > 0, sql.is_in(FINAL), JOBS.c.ended_at < before, run_is_old, ~unread)
    return case((old, 1), else_=0)


def _newest(connection: Connection) -> set[int | None]:
    found = {connection.scalar(select(func.max(JOBS.c.job_id)))}
    for column in (OUTBOX_EVENTS.c.event_id, OUTBOX_EVENTS.c.position):
        newest = select(func.max(column)).scalar_subquery()
        found.add(connection.scalar(select(OUTBOX_EVENTS.c.job_id).where(column == newest)))
    return found


def _delete_rows(connection: Connection, table: Table, where: ColumnElement[bool]) -> int:
    key = table.primary_key.columns
    batch = select(*key).where(where).limit(BATCH_ROWS)
    return connection.execute(delete(table).where(tuple_(*key).in_(batch))).rowcount


def _keep_retries(connection: Connection, jobs: Sequence[int]) -> None:
    """Count the retries of deleted jobs: the metric must not go down."""
    sums = {name: func.sum(JOBS.c[name]) for name in ("watchdog_retries", "reclaims")}
    retried = or_(JOBS.c.watchdog_retries > 0, JOBS.c.reclaims > 0)
    counted = select(JOBS.c.queue, *sums.values()).where(JOBS.c.job_id.in_(jobs), retried).group_by(JOBS.c.queue)
    rows = [{"queue": queue, **dict(zip(sums, its, strict=True))} for queue, *its in connection.execute(counted)]
    if rows:
        adds = upsert(connection, DELETED_RETRIES)
        more = {name: DELETED_RETRIES.c[name] + adds.excluded[name] for name in sums}
        connection.execute(adds.on_conflict_do_update(index_elements=[DELETED_RETRIES.c.queue], set_=more), rows)
