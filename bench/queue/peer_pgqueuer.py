"""pgqueuer, with the calls of `pgqueuer.core.qm.QueueManager`: `dequeue` and `log_jobs`.

Like its own program it uses one asyncpg connection on uvloop. A worker of GPU jobs claims one job at a time; the
program claims ten by default.
"""

import uuid
from collections.abc import Coroutine
from datetime import timedelta
from importlib.metadata import version
from typing import Any, ClassVar, Final, Self

import asyncpg
import uvloop
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.adapters.persistence.queries import Queries
from pgqueuer.core.listeners import (
    PGNoticeEventListener,
    default_event_router,
    initialize_notice_event_listener,
)
from pgqueuer.domain.models import Job
from pgqueuer.domain.settings import Durability, db_settings
from pgqueuer.domain.types import QueueEntrypoint, QueueManagerId
from pgqueuer.ports.repository import EntrypointExecutionParameter

from bench.figures import BenchError
from bench.queue.worker import QUEUE_NAME, Chore, Worker, execute, libpq

BATCH: Final = 10
HEARTBEAT: Final = timedelta(seconds=30)
ENTRYPOINTS: Final = {QueueEntrypoint(QUEUE_NAME): EntrypointExecutionParameter(concurrency_limit=0)}


class Pgqueuer(Worker):
    """No concurrency limits, for the plain claim. Completed jobs move to its log, which is its default."""

    title: ClassVar[str] = f"pgqueuer {version('pgqueuer')}"
    chores: ClassVar[tuple[Chore, ...]] = (*Worker.chores, Chore.COMPLETE_TEN)

    def __init__(self, connection: Any) -> None:
        super().__init__()
        self._connection = connection
        self._queries = Queries(AsyncpgDriver(connection))
        self._manager = QueueManagerId(uuid.uuid4())
        self._changed = PGNoticeEventListener()

    @staticmethod
    def run(main: Coroutine[Any, Any, None]) -> None:
        """See `Worker.run`."""
        uvloop.run(main)

    @classmethod
    def install(cls, url: str) -> None:
        """See `Worker.install`."""
        if db_settings().durability is not Durability.durable:
            raise BenchError("tables of pgqueuer are less durable than ours: unset PGQUEUER_DURABILITY")

        async def install() -> None:
            connection = await asyncpg.connect(libpq(url))
            await Queries(AsyncpgDriver(connection)).install()
            await connection.close()

        cls.run(install())

    @classmethod
    def refill(cls, url: str, count: int) -> None:
        """See `Worker.refill`: jobs and their first log entries."""
        execute(
            url,
            "TRUNCATE pgqueuer, pgqueuer_log, pgqueuer_statistics RESTART IDENTITY",
            "INSERT INTO pgqueuer (priority, entrypoint, status) "  # noqa: S608 - a constant, and a count
            f"SELECT 0, '{QUEUE_NAME}', 'queued' FROM generate_series(1, {count})",
            "INSERT INTO pgqueuer_log (job_id, status, entrypoint, priority) "
            "SELECT id, status, entrypoint, priority FROM pgqueuer",
            "VACUUM (ANALYZE) pgqueuer, pgqueuer_log",
        )

    @classmethod
    async def open(cls, url: str, name: str) -> Self:  # noqa: ARG003 - workers have UUIDs
        """See `Worker.open`."""
        return cls(await asyncpg.connect(libpq(url)))

    async def submit(self) -> None:
        """See `Worker.submit`."""
        await self._queries.enqueue(QUEUE_NAME, None)

    async def claim(self) -> Job | None:
        """See `Worker.claim`."""
        taken = await self._dequeue(1)
        return taken[0] if taken else None

    async def complete(self, job: Job) -> None:
        """See `Worker.complete`."""
        await self._queries.log_jobs([(job, "successful", None)])

    async def give_back(self, job: Job) -> None:
        """See `Worker.give_back`: a retry at once."""
        await self._queries.retry_job(job, timedelta(0), None)

    async def do(self, chore: Chore) -> int:
        """See `Worker.do`."""
        if chore is Chore.COMPLETE_TEN:
            taken = await self._dequeue(BATCH)
            if taken:
                await self._queries.log_jobs([(job, "successful", None) for job in taken])
            return len(taken)
        return await super().do(chore)

    async def _dequeue(self, count: int) -> list[Job]:
        return await self._queries.dequeue(
            batch_size=count,
            entrypoints=ENTRYPOINTS,
            queue_manager_id=self._manager,
            global_concurrency_limit=None,
            heartbeat_timeout=HEARTBEAT,
        )

    async def listen(self) -> None:
        """See `Worker.listen`: on the same connection."""
        router = default_event_router(notice_event_queue=self._changed, canceled={}, pending_health_check={})
        await initialize_notice_event_listener(self._queries.driver, db_settings().channel, router)

    async def wait(self) -> None:
        """See `Worker.wait`."""
        await self._changed.get()

    async def close(self) -> None:
        """See `Worker.close`."""
        await self._connection.close()
