"""The queue in one database."""

from typing import Self

from sqlalchemy import insert, select

from gpuwarden.database import Changes, open_database, reading, tell, upsert, watch, writing
from gpuwarden.job import JobId, State, stall_timeout_s
from gpuwarden.queue.claims import Claims
from gpuwarden.queue.gpus import Gpus
from gpuwarden.queue.people import People
from gpuwarden.queue.records import Job, Submission, SubmissionError, UnknownJobError, to_job
from gpuwarden.queue.sweeps import Sweeps
from gpuwarden.queue.trips import Trips
from gpuwarden.schema import DISPATCH_EVENTS, JOBS, QUEUE, RUNS


class JobStore(Claims, Trips, People, Gpus, Sweeps):
    """The queue in one database. Safe to share between threads."""

    @classmethod
    def open(cls, url: str, *, migrate: bool = True) -> Self:
        """Open the queue at an SQLAlchemy URL; `migrate` as `open_database` has it.

        Raises:
            DatabaseError: it cannot be opened.
        """
        return cls(open_database(url, QUEUE, migrate=migrate))

    def close(self) -> None:
        """Let go of every connection."""
        self._engine.dispose()

    def check_writable(self) -> None:
        """Be the one writer for a moment, and write nothing.

        Raises:
            DatabaseError: another process holds the write lock, or the database cannot be written.
        """
        with writing(self._engine):
            pass

    def changes(self) -> Changes:
        """A cheap watch on the queue, for one thread."""
        return watch(self._engine, QUEUE)

    def submit(self, submission: Submission, *, now: float) -> JobId:
        """Queue a job, and open its run when it is the first of it.

        Raises:
            SubmissionError: its run has failed already.
        """
        budget_s = submission.job_class.budget_s if submission.budget_s is None else submission.budget_s
        silence_s = stall_timeout_s(
            submission.job_class, reports_steps=submission.reports_steps, configured_s=submission.stall_timeout_s
        )
        with writing(self._engine) as connection:
            if submission.run_id is not None:
                opened = upsert(connection, RUNS).values(run_id=submission.run_id, state="running", submitted_at=now)
                connection.execute(opened.on_conflict_do_nothing())
                # Locked, so that a job is not added to a run while that fails and cancels what it finds.
                run = select(RUNS.c.state).where(RUNS.c.run_id == submission.run_id).with_for_update(read=True)
                if (state := connection.scalar(run)) != "running":
                    raise SubmissionError(f"run {submission.run_id!r} has {state}: give the job another run")
            job_id = connection.scalar(
                insert(JOBS)
                .values(
                    run_id=submission.run_id,
                    queue=submission.queue,
                    job_class=submission.job_class,
                    model=submission.model,
                    payload=submission.payload,
                    budget_s=budget_s,
                    stall_timeout_s=silence_s,
                    steps_total=submission.steps_total,
                    state=State.QUEUED,
                    priority=submission.priority,
                    attempt=0,
                    attempts_max=submission.attempts_max,
                    watchdog_retries=0,
                    reclaims=0,
                    submitted_at=now,
                )
                .returning(JOBS.c.job_id)
            )
            tell(connection, QUEUE.channel)
        return JobId(int(job_id or 0))

    def job(self, job_id: int) -> Job:
        """One job.

        Raises:
            UnknownJobError: there is none of that id.
        """
        with reading(self._engine) as connection:
            row = connection.execute(select(JOBS).where(JOBS.c.job_id == job_id)).one_or_none()
        if row is None:
            raise UnknownJobError(f"the queue has no job {job_id}")
        return to_job(row)

    def jobs(self, *, states: frozenset[State] = frozenset(State)) -> list[Job]:
        """Every job in one of `states`, oldest first."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(JOBS).where(JOBS.c.state.in_(states)).order_by(JOBS.c.job_id))
            return [to_job(row) for row in rows]

    def run_state(self, run_id: str) -> str | None:
        """`running` or `failed`; `None` for a run nobody submitted."""
        with reading(self._engine) as connection:
            return connection.scalar(select(RUNS.c.state).where(RUNS.c.run_id == run_id))

    def dispatch_events(self, job_id: int) -> list[str]:
        """The kinds of the events written for a job, in order."""
        with reading(self._engine) as connection:
            events = select(DISPATCH_EVENTS.c.kind).where(DISPATCH_EVENTS.c.job_id == job_id)
            return list(connection.scalars(events.order_by(DISPATCH_EVENTS.c.event_id)))
