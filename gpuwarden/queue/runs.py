"""Runs: jobs that are submitted together, wait for one another, and end together.

A run's row is locked before its jobs, so that two transactions cannot both miss the last job. A failed job ends its run
through an event (A10).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, Executable, case, exists, func, insert, or_, select, update

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.rows import BadJson
from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.format import operator_name
from gpuwarden.job import FINAL, QUEUE_CLASSES, JobClass, JobId, Kind, Move, State, stall_timeout_s
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import KNOWN_STATES, Result, Run, Submission, SubmissionError
from gpuwarden.queue.rows import to_run
from gpuwarden.queue.schema import DEPENDENCIES, JOBS, QUEUE, QUEUES, RUNS
from gpuwarden.queue.sql import Prepared
from gpuwarden.state_file import TEXT_MAX


class Runs(QueueBase):
    """Submission and state of runs."""

    def submit(self, submission: Submission, *, now: float) -> JobId:
        """Submit a job and open its run if the run is new; returns its id (of rank 0).

        Raises:
            SubmissionError: the run is over, a need is invalid, or the job has no budget.
        """
        if submission.run_id is None and submission.ranks > 1:
            submission = replace(submission, run_id=f"gang-{uuid4().hex}")
        with writing(self._engine) as connection:
            if submission.run_id is not None:
                open_run(connection, submission.run_id, now)
            job_id = _insert(connection, submission, submission.needs, now)
            notify_after_commit(connection, QUEUE.channel)
        return job_id

    def submit_run(
        self,
        run_id: str,
        submissions: Mapping[str, Submission],
        *,
        needs: Mapping[str, Iterable[str]] | None = None,
        wrangled: bool | None = None,
        notify: str | None = None,
        now: float,
    ) -> dict[str, JobId]:
        """Submit a whole run in one transaction.

        Args:
            run_id: the run. An existing run grows.
            submissions: jobs by name, without `run_id` and `needs`.
            needs: names of the jobs that each job waits for.
            wrangled: whether its items are judged. `None` keeps the setting.
            notify: address for its jobs without their own. `None` keeps the setting.
            now: the queue's time, Unix seconds.

        Raises:
            SubmissionError: as for `submit`, or the needs form a cycle.
        """
        graph = {name: set((needs or {}).get(name, ())) for name in submissions}
        if strangers := {each for name in needs or {} for each in {name, *(needs or {})[name]}} - set(submissions):
            raise SubmissionError(f"no job of this run is named {min(strangers)!r}")
        try:
            order = list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            raise SubmissionError(f"these jobs wait for one another: {' -> '.join(error.args[1])}") from None
        ids: dict[str, JobId] = {}
        if not submissions:
            return ids
        with writing(self._engine) as connection:
            open_run(connection, run_id, now)
            changed = {"wrangled": wrangled, "notify": notify}
            if new := {name: value for name, value in changed.items() if value is not None}:
                connection.execute(update(RUNS).where(RUNS.c.run_id == run_id).values(**new))
            for name in order:
                if submissions[name].run_id not in (None, run_id) or submissions[name].needs:
                    raise SubmissionError(f"{name!r}: leave run_id and needs of a job unset, and give them for the run")
                ids[name] = _insert(connection, submissions[name], [ids[each] for each in graph[name]], now, run_id)
            notify_after_commit(connection, QUEUE.channel)
        return {name: ids[name] for name in submissions}

    def get(self, run_id: str) -> Run | None:
        """A run with its job counts; `None` if it is unknown."""
        with reading(self._engine) as connection:
            row = connection.execute(select(RUNS).where(RUNS.c.run_id == run_id)).one_or_none()
            if row is None:
                return None
            counted = select(JOBS.c.state, func.count()).where(JOBS.c.run_id == run_id).group_by(JOBS.c.state)
            jobs = {State(state): int(count) for state, count in connection.execute(counted) if state in KNOWN_STATES}
        return to_run(row, jobs)

    def state(self, run_id: str) -> str | None:
        """The run's state; `None` if it is unknown."""
        with reading(self._engine) as connection:
            return connection.scalar(select(RUNS.c.state).where(RUNS.c.run_id == run_id))

    def inputs(self, job_id: int) -> dict[JobId, Result]:
        """Results of the jobs that this job needs, by id."""
        needed = select(JOBS.c.job_id, JOBS.c.result).join(DEPENDENCIES, DEPENDENCIES.c.needs_job_id == JOBS.c.job_id)
        with reading(self._engine) as connection:
            found = connection.execute(needed.where(DEPENDENCIES.c.job_id == job_id).order_by(JOBS.c.job_id))
            return {JobId(row.job_id): None if isinstance(row.result, BadJson) else row.result for row in found}

    def needs(self, job_id: int) -> list[JobId]:
        """Ids of the jobs that this job needs."""
        with reading(self._engine) as connection:
            needed = select(DEPENDENCIES.c.needs_job_id).where(DEPENDENCIES.c.job_id == job_id)
            return [JobId(each) for each in connection.scalars(needed.order_by(DEPENDENCIES.c.needs_job_id))]


def open_run(connection: Connection, run_id: str, now: float) -> None:
    """Create or reopen the run and lock it."""
    opened = upsert(connection, RUNS).values(run_id=run_id, state="running", submitted_at=now)
    state = None
    while state is None:  # an old run may be deleted before it is locked
        connection.execute(opened.on_conflict_do_nothing())
        state = lock(connection, run_id)
    if state == "completed":
        connection.execute(update(RUNS).where(RUNS.c.run_id == run_id).values(state="running", ended_at=None))
    elif state != "running":
        ended = "has failed" if state == "failed" else "was cancelled"
        raise SubmissionError(f"run {run_id!r} {ended}: give the job another run")


def _insert(
    connection: Connection, submission: Submission, needs: Sequence[int], now: float, run_id: str | None = None
) -> JobId:
    run_id = run_id or submission.run_id
    queue = connection.execute(select(QUEUES).where(QUEUES.c.queue == submission.queue)).one_or_none()
    job_class = submission.job_class or JobClass(
        queue.job_class if queue and queue.job_class else QUEUE_CLASSES.get(submission.queue, JobClass.GPU)
    )
    budgets = (submission.budget_s, queue and queue.budget_s, job_class.budget_s)
    budget_s = next((each for each in budgets if each is not None), None)
    if budget_s is None:
        raise SubmissionError(
            f"class {job_class} has no default budget: give the job one, or set the queue's with "
            f"`gpuwarden queue set {submission.queue} --budget-s SECONDS`"
        )
    if job_class.ingests and run_id is not None:
        raise SubmissionError(f"a job of class {job_class} cannot be in a run: submit it without one")
    needs = _with_their_ranks(connection, needs)
    pending = _unmet(connection, run_id, needs)
    row = insert(JOBS).values(
        run_id=run_id,
        queue=submission.queue,
        job_class=job_class,
        model=submission.model,
        payload=submission.payload,
        submitted_budget_s=submission.budget_s,
        budget_s=budget_s,
        stall_timeout_s=stall_timeout_s(
            job_class, reports_steps=submission.reports_steps, configured_s=submission.stall_timeout_s
        ),
        busy_timeout_s=submission.busy_timeout_s,
        steps_total=submission.steps_total,
        state=State.WAITING if pending else State.QUEUED,
        priority=submission.priority,
        attempt=0,
        attempts_max=submission.attempts_max,
        retries_max=submission.retries_max,
        watchdog_retries=0,
        reclaims=0,
        submitted_at=now,
        queued_at=None if pending else now,
        needs=len(set(needs)),
        pending=pending,
        notify=submission.notify,
        submitted_by=operator_name()[:TEXT_MAX],
    )
    ids = [JobId(int(connection.scalar(row.returning(JOBS.c.job_id)) or 0)) for _ in range(submission.ranks)]
    if submission.ranks > 1:
        for rank, job_id in enumerate(ids):
            place = {"gang": ids[0], "rank": rank, "ranks": submission.ranks}
            connection.execute(update(JOBS).where(JOBS.c.job_id == job_id).values(**place))
    if needs:
        rows = [{"job_id": job_id, "needs_job_id": each} for job_id in ids for each in sorted(set(needs))]
        connection.execute(insert(DEPENDENCIES), rows)
    return ids[0]


def _with_their_ranks(connection: Connection, needs: Sequence[int]) -> Sequence[int]:
    if not needs:
        return needs
    mates = select(JOBS.c.job_id).where(JOBS.c.gang.in_(select(JOBS.c.gang).where(JOBS.c.job_id.in_(needs))))
    return [*needs, *connection.scalars(mates)]


def _unmet(connection: Connection, run_id: str | None, needs: Sequence[int]) -> int:
    if not needs:
        return 0
    if run_id is None:
        raise SubmissionError("a job that needs other jobs must be in their run: set the run")
    # The run is locked, so no job in it completes now.
    found = connection.execute(select(JOBS.c.job_id, JOBS.c.run_id, JOBS.c.state).where(JOBS.c.job_id.in_(needs)))
    states = {row.job_id: State(row.state) for row in found if row.run_id == run_id}
    for each in sorted(set(needs)):
        if each not in states:
            raise SubmissionError(f"job {each} is not in run {run_id!r}: needs must name jobs of the same run")
        if states[each] in (State.FAILED, State.CANCELLED):
            raise SubmissionError(f"job {each} is {states[each]}: a job that needs it would never start")
    return sum(state is not State.COMPLETED for state in states.values())


def lock(connection: Connection, run_id: str) -> str | None:
    """Lock a run before its jobs; returns its state, or `None` if it is unknown.

    `FOR NO KEY UPDATE`: a transaction with a job locked may still read the run through the foreign key.
    """
    its = select(RUNS.c.state).where(RUNS.c.run_id == run_id)
    state: str | None = connection.scalar(its.with_for_update(key_share=True))
    return state


def lock_all(connection: Connection, run_ids: Iterable[str]) -> None:
    """Lock several runs in order."""
    for run_id in sorted(set(run_ids)):
        lock(connection, run_id)


def lock_run_of(connection: Connection, job_id: int) -> str | None:
    """Lock a job's run before the job; returns the run id."""
    run_id: str | None = connection.scalar(*_run_of(job_id=job_id))
    if run_id is not None:
        lock(connection, run_id)
    return run_id


@Prepared
def _run_of(**its: ColumnElement[Any]) -> Executable:
    return select(JOBS.c.run_id).where(JOBS.c.job_id == its["job_id"])


def queue_dependents(connection: Connection, run_id: str, job_id: int, now: float) -> None:
    """Queue the jobs that waited only for a completed job, and end a finished run."""
    waiting = select(DEPENDENCIES.c.job_id).where(DEPENDENCIES.c.needs_job_id == job_id)
    freed = update(JOBS).where(JOBS.c.job_id.in_(waiting), sql.is_in({State.WAITING, State.BLOCKED}))
    # A blocked job counts too. Its wait starts now.
    since = case((JOBS.c.pending == 1, now), else_=JOBS.c.queued_at)
    if connection.execute(freed.values(pending=JOBS.c.pending - 1, queued_at=since)).rowcount:
        ready = sql.transition(Move.READY, JOBS.c.job_id.in_(waiting), JOBS.c.pending == 0)
        if connection.execute(ready).rowcount:
            notify_after_commit(connection, QUEUE.channel)
    close(connection, run_id, job_id, now)


def cancel_what_needs(connection: Connection, job_ids: Sequence[int], now: float) -> None:
    """Cancel all jobs that need these, directly or not."""
    while job_ids:
        lost = select(DEPENDENCIES.c.job_id).where(DEPENDENCIES.c.needs_job_id.in_(job_ids))
        job_ids = cancel(connection, JOBS.c.job_id.in_(lost), f"job {min(job_ids)}, which it needs, was cancelled", now)


def cancel(connection: Connection, which: ColumnElement[bool], reason: str, now: float) -> list[JobId]:
    """Cancel unfinished jobs and write their events; returns their ids."""
    found = sql.lock_jobs(select(JOBS.c.job_id).where(which, sql.from_sources(Move.CANCEL)))
    ids = [JobId(each) for each in connection.scalars(found)]
    if ids:
        ended = {"reason": reason, "ended_at": now, **sql.UNCLAIMED}
        connection.execute(sql.transition(Move.CANCEL, JOBS.c.job_id.in_(ids), **ended))
        sql.write_untimed(connection, Kind.CANCELLED, ids, now)
    return ids


def close(connection: Connection, run_id: str, job_id: int, now: float) -> None:
    """End a locked run after its last job, `job_id`. An event ends a failed run."""
    its = JOBS.c.run_id == run_id
    left = exists().where(its, or_(sql.is_in(set(State) - FINAL), sql.is_in({State.FAILED})))
    if connection.scalar(select(left)):
        return
    cancelled = connection.scalar(select(exists().where(its, sql.is_in({State.CANCELLED}))))
    end(connection, run_id, Kind.RUN_CANCELLED if cancelled else Kind.RUN_COMPLETED, job_id, now)


def end(connection: Connection, run_id: str, kind: Kind, job_id: int | None, now: float) -> None:
    """End a running run and write its event."""
    state = kind.removeprefix("run_")
    over = update(RUNS).where(RUNS.c.run_id == run_id, RUNS.c.state == "running").values(state=state, ended_at=now)
    if connection.execute(over).rowcount == 1 and job_id is not None:
        connection.execute(*sql.write_event(kind=kind, now=now, job_id=job_id))
