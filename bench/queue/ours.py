"""Our `JobStore`, as workers and the remediator use it."""

import sqlite3
from contextlib import closing
from typing import ClassVar, Final, Self

from bench.figures import BenchError
from bench.queue.worker import QUEUE_NAME, Chore, Worker, execute
from gpuwarden.db.changes import Changes
from gpuwarden.job import Condition
from gpuwarden.queue import Job, JobStore, Submission
from gpuwarden.queue.models import Success
from gpuwarden.queue.schema import JOBS, METADATA
from gpuwarden.worker.worker import IDLE_WAIT_S

ATTEMPTS_MAX: Final = 2**31 - 1  # jobs are released many times
COLUMNS: Final = ", ".join(column.name for column in JOBS.columns if not column.primary_key)
TABLES: Final = ", ".join(table.name for table in METADATA.sorted_tables)


class Ours(Worker):
    """A worker of our queue, with the queue's clock."""

    title: ClassVar[str] = "gpuwarden"
    chores: ClassVar[tuple[Chore, ...]] = (*Worker.chores, Chore.FENCE, Chore.NEXT)

    def __init__(self, store: JobStore, name: str) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._begun = 0
        self._incarnation = f"{name}-0"
        self._changes: Changes | None = None

    @classmethod
    def install(cls, url: str) -> None:
        """See `Worker.install`."""
        JobStore.open(url).close()

    @classmethod
    def refill(cls, url: str, count: int) -> None:
        """See `Worker.refill`: submit one job and copy it. An SQLite file must be new."""
        on_sqlite = url.startswith("sqlite:")
        if not on_sqlite:
            execute(url, f"TRUNCATE {TABLES} RESTART IDENTITY")
        store = JobStore.open(url)
        _submit(store)
        store.close()
        more = (
            f"INSERT INTO jobs ({COLUMNS}) "  # noqa: S608 - names of our own tables
            f"WITH RECURSIVE more(n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM more WHERE n < {count}) "
            f"SELECT {COLUMNS} FROM jobs, more WHERE n <= {count}"
        )
        if on_sqlite:
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as database:
                database.execute(more)
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            execute(url, more, f"VACUUM (ANALYZE) {TABLES}")

    @classmethod
    async def open(cls, url: str, name: str) -> Self:
        """See `Worker.open`; the first claim registers."""
        return cls(JobStore.open(url), name)

    async def submit(self) -> None:
        """See `Worker.submit`."""
        _submit(self._store)

    async def claim(self) -> Job | None:
        """See `Worker.claim`."""
        return self._store.claims.claim(
            QUEUE_NAME, host="bench", worker=self._name, incarnation=self._incarnation, now=self._store.now()
        )

    async def complete(self, job: Job) -> None:
        """See `Worker.complete`."""
        _require(
            self._store.claims.complete(
                job.job_id, attempt=job.attempt, incarnation=self._incarnation, now=self._store.now()
            ),
            job,
        )

    async def give_back(self, job: Job) -> None:
        """See `Worker.give_back`: release, as at a stop."""
        _require(
            self._store.claims.release(
                job.job_id, attempt=job.attempt, incarnation=self._incarnation, now=self._store.now()
            ),
            job,
        )

    async def do(self, chore: Chore) -> int:
        """See `Worker.do`."""
        if chore is Chore.FENCE:
            if self.held is not None:
                self._fence(self.held)
            self.held = await self.claim()
            return 0 if self.held is None else 1
        if chore is Chore.NEXT:
            job = self.held or await self.claim()
            if job is None:
                return 0
            accepted, self.held, _ = self._store.claims.complete_and_claim(
                Success(job.job_id, job.attempt),
                queue=QUEUE_NAME,
                host="bench",
                worker=self._name,
                incarnation=self._incarnation,
                now=self._store.now(),
            )
            _require(accepted, job)
            return 1
        return await super().do(chore)

    def _fence(self, job: Job) -> None:
        """Fence and requeue the job, and restart the worker."""
        condition, store = Condition.STALL, self._store
        _require(
            store.fencing.fence(
                job.job_id, attempt=job.attempt, incarnation=self._incarnation, condition=condition, now=store.now()
            ),
            job,
        )
        _require(store.fencing.requeue(job.job_id, attempt=job.attempt, condition=condition, now=store.now()), job)
        self._begun += 1
        self._incarnation = f"{self._name}-{self._begun}"
        store.claims.register(
            QUEUE_NAME, host="bench", worker=self._name, incarnation=self._incarnation, now=store.now()
        )

    async def listen(self) -> None:
        """See `Worker.listen`."""
        self._changes = self._store.changes()

    async def wait(self) -> None:
        """See `Worker.wait`: with the timeout of a worker."""
        while self._changes is not None and not self._changes.wait(IDLE_WAIT_S):
            pass

    async def close(self) -> None:
        """See `Worker.close`."""
        if self._changes is not None:
            self._changes.close()
        self._store.close()


def _submit(store: JobStore) -> None:
    store.runs.submit(Submission(queue=QUEUE_NAME, attempts_max=ATTEMPTS_MAX), now=store.now())


def _require(accepted: object, job: Job) -> None:
    if not accepted:
        raise BenchError(f"the queue refused a change of job {job.job_id}")
