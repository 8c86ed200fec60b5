"""Parts of the statements that claim and complete jobs."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Select,
    Update,
    and_,
    case,
    exists,
    func,
    literal_column,
    not_,
    or_,
    select,
)

from gpuwarden.job import RETRY_WAIT_MAX_S, JobClass, Move
from gpuwarden.queue import sql
from gpuwarden.queue.schema import JOBS, QUEUES, WORKERS

Params: TypeAlias = Mapping[str, ColumnElement[Any]]


def look(params: Params) -> Select[Any]:
    """What a claim would do: whether the incarnation is over, drained or has a job, and the next job's id."""
    host, worker, incarnation = params["host"], params["worker"], params["incarnation"]
    over = sql.is_over(host, worker, incarnation).scalar_subquery()
    drained = is_drained(params)
    mine = exists().where(sql.running_with(host, worker, incarnation))
    following = next_job(params, may_claim(params))
    return select(over.label("over"), drained.label("drained"), mine.label("mine"), following.label("next"))


def is_drained(params: Params) -> ColumnElement[bool]:
    """Whether the incarnation takes no further job."""
    slot = and_(WORKERS.c.host == params["host"], WORKERS.c.worker == params["worker"])
    return exists().where(slot, WORKERS.c.draining_incarnation == params["incarnation"])


def take(params: Params, *where: ColumnElement[bool]) -> Update:
    """Claim the next job."""
    return sql.transition(
        Move.CLAIM,
        JOBS.c.job_id == next_job(params, may_claim(params), *where, lock=True),
        attempt=JOBS.c.attempt + 1,
        claimed_by=params["incarnation"],
        host=params["host"],
        worker=params["worker"],
        claimed_at=params["now"],
        lease_expires_at=params["until"],
        budget_s=budget_s(),
        reason=None,
    )


def is_held(params: Params) -> ColumnElement[bool]:
    """Whether the attempt holds its running job."""
    return sql.is_held(params["job_id"], params["attempt"], params["incarnation"])


def left_by(params: Params) -> dict[str, Any]:
    """What an attempt leaves."""
    return {name: params[name] for name in ("result", "reason") if name in params} | sql.UNCLAIMED


def budget_s() -> ColumnElement[float]:
    """The budget of a claimed job, seconds."""
    of_queue = select(QUEUES.c.budget_s).where(QUEUES.c.queue == JOBS.c.queue).correlate(JOBS).scalar_subquery()
    by_class = {each: budget_s for each in JobClass if (budget_s := each.budget_s) is not None}
    of_class = case(by_class, value=JOBS.c.job_class, else_=JOBS.c.budget_s)
    return func.coalesce(JOBS.c.submitted_budget_s, of_queue, of_class)


def next_job(params: Params, *where: ColumnElement[bool], lock: bool = False) -> ColumnElement[Any]:
    """The id of the job that the worker claims next; null if there is none."""
    if "loaded" not in params:
        first = claimable(params, JOBS.alias("job"), *where)
        return _job_id_of(first.with_for_update(skip_locked=True) if lock else first)
    head = claimable(params, JOBS.alias("head")).subquery("head_job")
    job = JOBS.alias("alike")
    same_model = claimable(
        params,
        job,
        *where,
        job.c.model == params["loaded"],
        job.c.priority == head.c.priority,
        head.c.queued_at > params["overtaken_since"],
    )
    first = claimable(params, JOBS.alias("job"), *where)
    if lock:
        same_model, first = (
            same_model.with_for_update(skip_locked=True, of=job),
            first.with_for_update(skip_locked=True),
        )
    return func.coalesce(_job_id_of(same_model), _job_id_of(first))


def _job_id_of(jobs: Select[Any]) -> ColumnElement[Any]:
    return jobs.with_only_columns(jobs.selected_columns.job_id).scalar_subquery()


def claimable(params: Params, job: Any, *where: ColumnElement[bool]) -> Select[Any]:
    """The first job that the worker may claim."""
    elsewhere = sql.is_better_elsewhere(job, params["host"], params["worker"], params["now"], params["fresh_since"])
    barred = sql.is_barred(job, params["host"], params["worker"])
    # A clock that was set back holds no job for longer than a wait.
    longest = params["now"] + literal_column(str(RETRY_WAIT_MAX_S))
    free = not_(or_(elsewhere, barred))
    due = or_(job.c.retry_at.is_(None), job.c.retry_at <= params["now"], job.c.retry_at > longest)
    return (
        select(job.c.job_id, job.c.priority, job.c.queued_at)
        .where(job.c.queue == params["queue"], sql.from_sources(Move.CLAIM, job), due, free, *where)
        .order_by(job.c.priority, job.c.job_id)
        .limit(literal_column("1"))
    )


def may_claim(params: Params) -> ColumnElement[bool]:
    """Whether no lock, quarantine or lost job keeps the worker from claims."""
    host, worker = params["host"], params["worker"]
    reasons = (sql.is_locked, sql.is_in_quarantine, sql.is_held_by_lost)
    return not_(or_(*(applies(host, worker) for applies in reasons)))
