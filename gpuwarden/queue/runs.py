"""Jobs that belong together: they are submitted as a run, wait for one another, and end it.

A run's row is locked before its jobs are, by whoever changes what waits for what: so no two of them miss one another's
last job. A run is over when its last job is; one job that fails ends it at once, by its event (A10), and one that is
cancelled takes with it what needs it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, Executable, case, exists, func, insert, or_, select, update

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.fields import made_from
from gpuwarden.job import FINAL, QUEUE_CLASSES, JobClass, JobId, Kind, Move, State, stall_timeout_s
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import Result, Run, Submission, SubmissionError
from gpuwarden.queue.schema import DEPENDENCIES, JOBS, QUEUE, QUEUES, RUNS
from gpuwarden.queue.sql import Prepared


class Runs(QueueBase):
    """What is submitted, and what becomes of it as a whole."""

    def submit(self, submission: Submission, *, now: float) -> JobId:
        """Queue a job, and open its run when it is the first of it; the id of a gang is that of its rank 0.

        A gang that is of no run is given one of its own.

        Raises:
            SubmissionError: its run is over, what it needs is not of its run or will never complete, or nobody has set
                a budget for its queue.
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
        now: float,
    ) -> dict[str, JobId]:
        """Queue a whole run in one transaction: all of it is there, or nothing.

        Args:
            run_id: the run; it may be there already, and grows then.
            submissions: the jobs, by names that mean something in this call alone; their own `run_id` and `needs` are
                to be left out.
            needs: which jobs each one waits for, by those names.
            wrangled: whether its workers and it are judged by how its items go; as it was when not given.
            now: the queue's time, Unix seconds.

        Raises:
            SubmissionError: as `submit`; or the jobs wait for one another in a circle.
        """
        graph = {name: set((needs or {}).get(name, ())) for name in submissions}
        if strangers := {each for name in needs or {} for each in {name, *(needs or {})[name]}} - set(submissions):
            raise SubmissionError(f"no job of this run is called {min(strangers)!r}")
        try:
            order = list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            raise SubmissionError(f"these wait for one another for ever: {' -> '.join(error.args[1])}") from None
        ids: dict[str, JobId] = {}
        if not submissions:
            return ids
        with writing(self._engine) as connection:
            open_run(connection, run_id, now)
            if wrangled is not None:
                connection.execute(update(RUNS).where(RUNS.c.run_id == run_id).values(wrangled=wrangled))
            for name in order:
                if submissions[name].run_id not in (None, run_id) or submissions[name].needs:
                    raise SubmissionError(f"{name!r}: its run and its needs are said for the run as a whole")
                ids[name] = _insert(connection, submissions[name], [ids[each] for each in graph[name]], now, run_id)
            notify_after_commit(connection, QUEUE.channel)
        return {name: ids[name] for name in submissions}

    def get(self, run_id: str) -> Run | None:
        """A run and how many of its jobs are in which state; `None` for one that nobody submitted."""
        with reading(self._engine) as connection:
            row = connection.execute(select(RUNS).where(RUNS.c.run_id == run_id)).one_or_none()
            if row is None:
                return None
            counted = select(JOBS.c.state, func.count()).where(JOBS.c.run_id == run_id).group_by(JOBS.c.state)
            jobs = {State(state): int(count) for state, count in connection.execute(counted)}
        return made_from(row, Run, jobs=jobs)

    def state(self, run_id: str) -> str | None:
        """`running`, `completed`, `failed` or `cancelled`; `None` for a run nobody submitted."""
        with reading(self._engine) as connection:
            return connection.scalar(select(RUNS.c.state).where(RUNS.c.run_id == run_id))

    def inputs(self, job_id: int) -> dict[JobId, Result]:
        """What the jobs that this one needs have left as their results."""
        needed = select(JOBS.c.job_id, JOBS.c.result).join(DEPENDENCIES, DEPENDENCIES.c.needs_job_id == JOBS.c.job_id)
        with reading(self._engine) as connection:
            found = connection.execute(needed.where(DEPENDENCIES.c.job_id == job_id).order_by(JOBS.c.job_id))
            return {JobId(row.job_id): row.result for row in found}

    def needs(self, job_id: int) -> list[JobId]:
        """The jobs that this one needs."""
        with reading(self._engine) as connection:
            needed = select(DEPENDENCIES.c.needs_job_id).where(DEPENDENCIES.c.job_id == job_id)
            return [JobId(each) for each in connection.scalars(needed.order_by(DEPENDENCIES.c.needs_job_id))]


def open_run(connection: Connection, run_id: str, now: float) -> None:
    """Have the run there and locked, so that a job is not added to one that ends meanwhile."""
    opened = upsert(connection, RUNS).values(run_id=run_id, state="running", submitted_at=now)
    connection.execute(opened.on_conflict_do_nothing())
    state = lock(connection, run_id)
    if state == "completed":
        connection.execute(update(RUNS).where(RUNS.c.run_id == run_id).values(state="running", ended_at=None))
    elif state != "running":
        told = "has failed" if state == "failed" else "was cancelled"
        raise SubmissionError(f"run {run_id!r} {told}: give the job another run")


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
            f"jobs of class {job_class} have the budget that their queue says: give the job one, or set it with "
            f"`gpuwarden queue set {submission.queue} --budget-s SECONDS`"
        )
    if job_class.ingests and run_id is not None:
        raise SubmissionError(f"a job of class {job_class} belongs to no run: submit it without one")
    needs = _with_their_ranks(connection, needs)
    pending = _unmet(connection, run_id, needs)
    row = insert(JOBS).values(
        run_id=run_id,
        queue=submission.queue,
        job_class=job_class,
        model=submission.model,
        payload=submission.payload,
        asked_budget_s=submission.budget_s,
        budget_s=budget_s,
        stall_timeout_s=stall_timeout_s(
            job_class, reports_steps=submission.reports_steps, configured_s=submission.stall_timeout_s
        ),
        steps_total=submission.steps_total,
        state=State.WAITING if pending else State.QUEUED,
        priority=submission.priority,
        attempt=0,
        attempts_max=submission.attempts_max,
        watchdog_retries=0,
        reclaims=0,
        submitted_at=now,
        queued_at=None if pending else now,
        needs=len(set(needs)),
        pending=pending,
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
    """Who needs a gang needs all its ranks."""
    if not needs:
        return needs
    mates = select(JOBS.c.job_id).where(JOBS.c.gang.in_(select(JOBS.c.gang).where(JOBS.c.job_id.in_(needs))))
    return [*needs, *connection.scalars(mates)]


def _unmet(connection: Connection, run_id: str | None, needs: Sequence[int]) -> int:
    """How many of the jobs that one needs have yet to complete."""
    if not needs:
        return 0
    if run_id is None:
        raise SubmissionError("a job that needs others belongs to their run: name it")
    # Its run is locked, and with it every completion in it.
    found = connection.execute(select(JOBS.c.job_id, JOBS.c.run_id, JOBS.c.state).where(JOBS.c.job_id.in_(needs)))
    states = {row.job_id: State(row.state) for row in found if row.run_id == run_id}
    for each in sorted(set(needs)):
        if each not in states:
            raise SubmissionError(f"job {each} is not of run {run_id!r}: what a job needs is of its own run")
        if states[each] in (State.FAILED, State.CANCELLED):
            raise SubmissionError(f"job {each} is {states[each]}: what needs it would wait for ever")
    return sum(state is not State.COMPLETED for state in states.values())


def lock(connection: Connection, run_id: str) -> str | None:
    """Lock a run, before any job of it is; its state, or `None` for one that is not there.

    Not against those that only ask whether it is there. On PostgreSQL that is whoever changes a job twice in one
    transaction, by the job's foreign key and with the job locked: who has the run could wait for that job.
    """
    its = select(RUNS.c.state).where(RUNS.c.run_id == run_id)
    state: str | None = connection.scalar(its.with_for_update(key_share=True))
    return state


def lock_all(connection: Connection, run_ids: Iterable[str]) -> None:
    """Lock several runs, in one order, so that two who do never wait for one another in a circle."""
    for run_id in sorted(set(run_ids)):
        lock(connection, run_id)


def lock_run_of(connection: Connection, job_id: int) -> str | None:
    """Lock a job's run, before anything of the job is; its id, or `None` for a job without one."""
    run_id: str | None = connection.scalar(*_run_of(job_id=job_id))
    if run_id is not None:
        lock(connection, run_id)
    return run_id


@Prepared
def _run_of(**its: ColumnElement[Any]) -> Executable:
    return select(JOBS.c.run_id).where(JOBS.c.job_id == its["job_id"])


def go_on(connection: Connection, run_id: str, job_id: int, now: float) -> None:
    """A job of a locked run has completed: queue what waited for it alone, and end the run if it was the last."""
    waiting = select(DEPENDENCIES.c.job_id).where(DEPENDENCIES.c.needs_job_id == job_id)
    freed = update(JOBS).where(JOBS.c.job_id.in_(waiting), sql.is_in({State.WAITING, State.BLOCKED}))
    # Also of one that is blocked: it is queued by whoever unblocks it, and has waited since now.
    since = case((JOBS.c.pending == 1, now), else_=JOBS.c.queued_at)
    if connection.execute(freed.values(pending=JOBS.c.pending - 1, queued_at=since)).rowcount:
        ready = sql.transition(Move.READY, JOBS.c.job_id.in_(waiting), JOBS.c.pending == 0)
        if connection.execute(ready).rowcount:
            notify_after_commit(connection, QUEUE.channel)
    close(connection, run_id, job_id, now)


def cancel_what_needs(connection: Connection, job_ids: Sequence[int], now: float) -> None:
    """What needs a job that will never complete never runs either, nor what needs that: they are cancelled too."""
    while job_ids:
        lost = select(DEPENDENCIES.c.job_id).where(DEPENDENCIES.c.needs_job_id.in_(job_ids))
        job_ids = cancel(connection, JOBS.c.job_id.in_(lost), f"job {min(job_ids)}, which it needs, was cancelled", now)


def cancel(connection: Connection, which: ColumnElement[bool], because: str, now: float) -> list[JobId]:
    """Cancel the jobs that are not over, each with its event; their ids."""
    found = sql.locked(select(JOBS.c.job_id).where(which, sql.from_sources(Move.CANCEL)))
    ids = [JobId(each) for each in connection.scalars(found)]
    if ids:
        ended = {"because": because, "ended_at": now, **sql.UNCLAIMED}
        connection.execute(sql.transition(Move.CANCEL, JOBS.c.job_id.in_(ids), **ended))
        sql.write_cancelled(connection, ids, now)
    return ids


def close(connection: Connection, run_id: str, job_id: int, now: float) -> None:
    """End a locked run whose last job has just ended, which was `job_id`; one that failed is ended by its event."""
    its = JOBS.c.run_id == run_id
    left = exists().where(its, or_(sql.is_in(set(State) - FINAL), sql.is_in({State.FAILED})))
    if connection.scalar(select(left)):
        return
    cancelled = connection.scalar(select(exists().where(its, sql.is_in({State.CANCELLED}))))
    end(connection, run_id, Kind.RUN_CANCELLED if cancelled else Kind.RUN_COMPLETED, job_id, now)


def end(connection: Connection, run_id: str, kind: Kind, job_id: int | None, now: float) -> None:
    """End a run that is not over, with its event, which names the job that ended it."""
    state = kind.removeprefix("run_")
    over = update(RUNS).where(RUNS.c.run_id == run_id, RUNS.c.state == "running").values(state=state, ended_at=now)
    if connection.execute(over).rowcount == 1 and job_id is not None:
        connection.execute(*sql.write_event(kind=kind, now=now, job_id=job_id))
