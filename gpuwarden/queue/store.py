"""The queue in one database."""

from typing import Self

from sqlalchemy import select

from gpuwarden.database import Changes, open_database, reading, watch, writing
from gpuwarden.job import State
from gpuwarden.queue.claims import Claims
from gpuwarden.queue.counts import Counts
from gpuwarden.queue.events import Events
from gpuwarden.queue.gangs import Gangs
from gpuwarden.queue.gpus import Gpus
from gpuwarden.queue.hosts import Hosts
from gpuwarden.queue.items import Items
from gpuwarden.queue.lists import Lists
from gpuwarden.queue.people import People
from gpuwarden.queue.queues import Queues
from gpuwarden.queue.records import Job, UnknownJobError, to_job
from gpuwarden.queue.runs import Runs
from gpuwarden.queue.sweeps import Sweeps
from gpuwarden.queue.trips import Trips
from gpuwarden.queue.wrangling import Wrangling
from gpuwarden.schema import JOBS, QUEUE


class JobStore(
    Claims, Runs, Gangs, Items, Wrangling, Trips, People, Queues, Hosts, Gpus, Sweeps, Events, Lists, Counts
):
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
