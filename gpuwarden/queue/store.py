"""The queue in one database."""

from typing import Self

from sqlalchemy import select

from gpuwarden.db.engine import Changes, open_database, reading, watch, writing
from gpuwarden.job import State
from gpuwarden.queue.admin import People
from gpuwarden.queue.claims import Claims
from gpuwarden.queue.counts import Counts
from gpuwarden.queue.fencing import Trips
from gpuwarden.queue.gpu_quarantine import Gpus
from gpuwarden.queue.items.failures import Wrangling
from gpuwarden.queue.items.items import Items
from gpuwarden.queue.lost_hosts import Hosts
from gpuwarden.queue.models import Job, UnknownJobError, to_job
from gpuwarden.queue.outbox import Events
from gpuwarden.queue.queries import Lists
from gpuwarden.queue.queue_settings import Queues
from gpuwarden.queue.ranks import Gangs
from gpuwarden.queue.runs import Runs
from gpuwarden.queue.schema import JOBS, QUEUE
from gpuwarden.queue.sweeps import Sweeps


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
