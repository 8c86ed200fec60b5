"""The queue in one database."""

from collections import Counter
from typing import Final, Self

from sqlalchemy import Engine, select

from gpuwarden.db.changes import Changes, watch
from gpuwarden.db.clock import DatabaseClock
from gpuwarden.db.engine import is_shared
from gpuwarden.db.migrate import open_database
from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import ItemState, JobId, State
from gpuwarden.queue.admin import Admin
from gpuwarden.queue.claims import Claims
from gpuwarden.queue.counts import Counts
from gpuwarden.queue.fencing import Fencing
from gpuwarden.queue.gpu_quarantine import GpuQuarantine
from gpuwarden.queue.hosts.batches import Batches
from gpuwarden.queue.hosts.lost_hosts import LostHosts
from gpuwarden.queue.hosts.reports import HostReports
from gpuwarden.queue.hosts.seen_hosts import SeenHosts
from gpuwarden.queue.hosts.task_orders import TaskOrders
from gpuwarden.queue.hosts.tokens import HostTokens
from gpuwarden.queue.items.failures import ItemFailures
from gpuwarden.queue.items.items import Items
from gpuwarden.queue.models import Job, Result, UnknownJobError
from gpuwarden.queue.outbox import Outbox
from gpuwarden.queue.queries import Queries
from gpuwarden.queue.queue_settings import Settings
from gpuwarden.queue.rows import to_job
from gpuwarden.queue.runs import Runs
from gpuwarden.queue.schema import JOBS, QUEUE
from gpuwarden.queue.sweeps import Sweeps


class JobStore:
    """The queue in one database, and its parts. Threads may share it."""

    idle_claim_s: Final = 5.0
    """Interval between claims while idle, without a seen change, seconds."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._clock = DatabaseClock(engine)
        self.claims = Claims(engine)
        self.runs = Runs(engine)
        self.items = Items(engine)
        self.item_failures = ItemFailures(engine)
        self.fencing = Fencing(engine)
        self.admin = Admin(engine)
        self.queue_settings = Settings(engine)
        self.lost_hosts = LostHosts(engine)
        self.gpu_quarantine = GpuQuarantine(engine)
        self.sweeps = Sweeps(engine)
        self.outbox = Outbox(engine)
        self.queries = Queries(engine)
        self.counts = Counts(engine)

    @classmethod
    def open(cls, url: str, *, migrate: bool = True, connections: int | None = None) -> Self:
        """Open the queue at an SQLAlchemy URL. See `open_database`.

        Raises:
            DatabaseError: it cannot be opened.
        """
        return cls(open_database(url, QUEUE, migrate=migrate, connections=connections))

    @property
    def shared(self) -> bool:
        """Whether other hosts use this queue. Then it can go on without this host."""
        return is_shared(self._engine)

    @property
    def host_tokens(self) -> HostTokens:
        """Tokens of hosts."""
        return HostTokens(self._engine)

    @property
    def host_reports(self) -> HostReports:
        """Reports of hosts that are not scraped."""
        return HostReports(self._engine)

    @property
    def seen_hosts(self) -> SeenHosts:
        """Hosts that were heard."""
        return SeenHosts(self._engine)

    @property
    def task_orders(self) -> TaskOrders:
        """Orders to end tasks on hosts."""
        return TaskOrders(self._engine)

    @property
    def batches(self) -> Batches:
        """What gateways ask for many workers at once."""
        return Batches(self._engine)

    def now(self) -> float:
        """The clock of the leases, Unix seconds.

        Raises:
            DatabaseError: the server did not answer.
        """
        return self._clock.now()

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def check_writable(self) -> None:
        """Take the write lock and write nothing.

        Raises:
            DatabaseError: the lock is held elsewhere, or the database is not writable.
        """
        with writing(self._engine):
            pass

    def changes(self) -> Changes:
        """A cheap watch for changes of the queue, for one thread."""
        return watch(self._engine, QUEUE.channel)

    def job(self, job_id: int) -> Job:
        """Return one job.

        Raises:
            UnknownJobError: the id is unknown.
        """
        with reading(self._engine) as connection:
            row = connection.execute(select(JOBS).where(JOBS.c.job_id == job_id)).one_or_none()
        if row is None:
            raise UnknownJobError(f"the queue has no job {job_id}: see `gpuwarden job list`")
        return to_job(row)

    def inputs(self, job: Job) -> dict[JobId, Result]:
        """Results of the jobs that this job needs."""
        return self.runs.inputs(job.job_id)

    def ranks(self, job: Job) -> list[Job]:
        """The ranks of this job's gang, in order."""
        return [] if job.gang is None else self.queries.of_gang(job.gang)

    def item_counts(self, job: Job) -> Counter[ItemState]:
        """Number of items of the job's run by state."""
        return Counter() if job.run_id is None else self.items.counts(job.run_id)

    def jobs(self, *, states: frozenset[State] = frozenset(State)) -> list[Job]:
        """Every job in one of `states`, oldest first."""
        return list(self.queries.newest(states=states))
