"""A worker with its own connections to the database, for the same operations."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from gpuwarden.gateway.operations import OnJob, Operation, Wait
from gpuwarden.gateway.upstream import Answer
from gpuwarden.gateway.wire import to_wire
from gpuwarden.queue import JobStore
from gpuwarden.worker.worker import IDLE_WAIT_S

THREADS: Final = 3
"""Threads of a worker that use the database: its own, the lease's, and one to spare."""


class Direct:
    """Answers a worker from the database, as the worker itself would ask it.

    Args:
        url: of the database.
    """

    def __init__(self, url: str) -> None:
        self._store = JobStore.open(url, migrate=False)
        self._changes = self._store.changes()
        self._threads = ThreadPoolExecutor(THREADS)

    async def carry_out(self, operation: Operation, *, host: str, request_id: str) -> Answer:  # noqa: ARG002
        """See `Upstream`."""
        loop = asyncio.get_running_loop()
        found: Any = False
        if isinstance(operation, Wait):
            until_s = loop.time() + operation.timeout_s
            while not found and loop.time() < until_s:
                found = await loop.run_in_executor(self._threads, self._changes.wait, IDLE_WAIT_S)
        else:
            # The gateway checks the owner of a job first. A worker does not.
            run = operation.on_job if isinstance(operation, OnJob) else operation.run
            found = await loop.run_in_executor(self._threads, run, self._store, host)
        return Answer(status=200, content={"result": to_wire(found)}, outcome="")

    async def close(self) -> None:
        """See `Upstream`."""
        self._threads.shutdown()
        self._changes.close()
        self._store.close()
