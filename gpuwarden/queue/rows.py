"""Rows of the tables as values."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row

from gpuwarden.db.rows import converted
from gpuwarden.fields import made_from
from gpuwarden.job import ItemState, JobClass, Kind, State
from gpuwarden.queue.models import (
    DeadWorker,
    Event,
    HostsJob,
    Item,
    Job,
    Quarantine,
    QueueSettings,
    Run,
    WorkerRow,
)
from gpuwarden.queue.schema import (
    DEAD_WORKERS,
    ITEMS,
    JOBS,
    OUTBOX_EVENTS,
    QUARANTINED_GPUS,
    QUEUES,
    RUNS,
    WORKERS,
)


def to_worker(row: Row[Any], gpus: Sequence[str], *, fresh_since: float) -> WorkerRow:
    """Convert a row."""
    return converted(
        row,
        WORKERS,
        lambda row: made_from(
            row,
            WorkerRow,
            alive=row.last_seen_at > fresh_since and row.retired_incarnation != row.incarnation,
            gpus=tuple(gpus),
            draining=row.draining_incarnation == row.incarnation,
        ),
    )


def to_quarantine(row: Row[Any]) -> Quarantine:
    """Convert a row."""
    return converted(row, QUARANTINED_GPUS, lambda row: made_from(row, Quarantine, worker=row.worker or None))


def to_job(row: Row[Any]) -> Job:
    """Convert a row."""
    return converted(
        row, JOBS, lambda row: made_from(row, Job, job_class=JobClass(row.job_class), state=State(row.state))
    )


def to_hosts_job(row: Row[Any]) -> HostsJob:
    """Convert a row of a job with its worker's last contact."""
    heard_at = row.last_seen_at if isinstance(row.last_seen_at, int | float) else None
    return converted(row, JOBS, lambda row: made_from(row, HostsJob, state=State(row.state), heard_at=heard_at))


def to_run(row: Row[Any], jobs: Mapping[State, int]) -> Run:
    """Convert a row."""
    return converted(row, RUNS, lambda row: made_from(row, Run, jobs=jobs))


def to_event(row: Row[Any]) -> Event:
    """Convert a row."""
    return converted(
        row,
        OUTBOX_EVENTS,
        lambda row: made_from(
            row, Event, kind=Kind(row.kind), job_class=None if row.job_class is None else JobClass(row.job_class)
        ),
    )


def to_item(row: Row[Any]) -> Item:
    """Convert a row."""
    return converted(row, ITEMS, lambda row: made_from(row, Item, state=ItemState(row.state)))


def to_dead_worker(row: Row[Any]) -> DeadWorker:
    """Convert a row."""
    return converted(row, DEAD_WORKERS, lambda row: made_from(row, DeadWorker))


def to_settings(row: Row[Any]) -> QueueSettings:
    """Convert a row."""
    return converted(
        row,
        QUEUES,
        lambda row: made_from(row, QueueSettings, job_class=None if row.job_class is None else JobClass(row.job_class)),
    )
