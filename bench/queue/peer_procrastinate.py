"""procrastinate, with the calls of `procrastinate.worker.Worker`: `fetch_job` and `finish_job`.

Its connector has a pool of one connection, which keeps its prepared statements. Each call checks the connection and
runs one transaction.
"""

import asyncio
from importlib.metadata import version
from typing import Any, ClassVar, Final, Self

from procrastinate import App, PsycopgConnector
from procrastinate.jobs import Job, Notification, Status

from bench.queue.worker import QUEUE_NAME, Worker, execute, libpq

QUEUES: Final = [QUEUE_NAME]


class Procrastinate(Worker):
    """Completed jobs stay in the table, which is its default."""

    title: ClassVar[str] = f"procrastinate {version('procrastinate')}"

    def __init__(self, app: App, worker_id: int) -> None:
        super().__init__()
        self._app = app
        self._jobs = app.job_manager
        self._worker_id = worker_id
        self._changed = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    def install(cls, url: str) -> None:
        """See `Worker.install`."""

        async def apply() -> None:
            async with _app(url).open_async() as app:
                await app.schema_manager.apply_schema_async()

        cls.run(apply())

    @classmethod
    def refill(cls, url: str, count: int) -> None:
        """See `Worker.refill`: jobs and their first events."""
        execute(
            url,
            "TRUNCATE procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers RESTART IDENTITY",
            "INSERT INTO procrastinate_jobs (queue_name, task_name) "  # noqa: S608 - a constant, and a count
            f"SELECT '{QUEUE_NAME}', '{QUEUE_NAME}' FROM generate_series(1, {count})",
            "INSERT INTO procrastinate_events (job_id, type) SELECT id, 'deferred' FROM procrastinate_jobs",
            "VACUUM (ANALYZE) procrastinate_jobs, procrastinate_events",
        )

    @classmethod
    async def open(cls, url: str, name: str) -> Self:  # noqa: ARG003 - workers have numbers
        """See `Worker.open`."""
        app = _app(url)
        await app.open_async()
        return cls(app, await app.job_manager.register_worker())

    async def submit(self) -> None:
        """See `Worker.submit`."""
        await self._app.configure_task(QUEUE_NAME, queue=QUEUE_NAME).defer_async()

    async def claim(self) -> Job | None:
        """See `Worker.claim`."""
        return await self._jobs.fetch_job(queues=QUEUES, worker_id=self._worker_id)

    async def complete(self, job: Job) -> None:
        """See `Worker.complete`."""
        await self._jobs.finish_job(job=job, status=Status.SUCCEEDED, delete_job=False)

    async def give_back(self, job: Job) -> None:
        """See `Worker.give_back`: a retry at once."""
        await self._jobs.retry_job(job=job)

    async def listen(self) -> None:
        """See `Worker.listen`: on a separate connection."""
        self._listener = asyncio.create_task(self._jobs.listen_for_jobs(on_notification=self._notify, queues=QUEUES))

    async def _notify(self, *, channel: str, notification: Notification) -> None:  # noqa: ARG002 - the callback's shape
        if notification["type"] == "job_inserted":
            self._changed.set()

    async def wait(self) -> None:
        """See `Worker.wait`."""
        await self._changed.wait()
        self._changed.clear()

    async def close(self) -> None:
        """See `Worker.close`."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        await self._app.close_async()


def _app(url: str) -> App:
    pool: dict[str, Any] = {"min_size": 1, "max_size": 1}
    return App(connector=PsycopgConnector(conninfo=libpq(url), **pool))
