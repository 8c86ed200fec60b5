"""Workers that wait for a job. A new job wakes one of them, not all."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import structlog

from gpuwarden.db.changes import Changes
from gpuwarden.format import error_text
from gpuwarden.queue import JobStore

LOOK_S: Final = 1.0
"""Longest time between checks for the end, seconds."""

LEAST_S: Final = 0.05
"""Least time between counts of waiting jobs, seconds."""

COUNT_S: Final = 5.0
"""Longest time between counts, seconds."""

CLAIMING_S: Final = 1.0
"""How long a woken worker counts as about to claim, seconds."""

RETRY_S: Final = 1.0

log: Final = structlog.get_logger("gateway")


class Waiting:
    """The waiting workers of each queue, and a thread that watches the queue for them."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._waiters: dict[str, deque[asyncio.Future[bool]]] = {}
        self._woken_s: dict[str, deque[float]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpuwarden-changes", daemon=True)

    def start(self) -> None:
        """Start to watch. Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and answer every waiter."""
        self._ending.set()
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(False)

    @property
    def count(self) -> int:
        """Number of waiting workers."""
        return sum(map(len, self._waiters.values()))

    async def wait(self, queue: str, timeout_s: float) -> bool:
        """True once a job of the queue waits for this caller; False after `timeout_s`."""
        if self._ending.is_set():
            return False
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(queue, deque())
        waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            return False
        finally:
            with suppress(ValueError):
                waiters.remove(waiter)
            if not waiters and self._waiters.get(queue) is waiters:
                del self._waiters[queue]
                self._woken_s.pop(queue, None)

    def claimed(self, queue: str) -> None:
        """A worker of the queue has claimed, with or without a job."""
        woken_s = self._woken_s.get(queue)
        if woken_s:
            woken_s.popleft()

    def wake(self, claimable: Mapping[str, int]) -> None:
        """Wake a worker for each claimable job, less those that are about to claim."""
        now_s = time.monotonic()
        for queue, jobs in claimable.items():
            waiters = self._waiters.get(queue)
            if not waiters:
                continue
            woken_s = self._woken_s.setdefault(queue, deque())
            while woken_s and now_s - woken_s[0] >= CLAIMING_S:
                woken_s.popleft()
            while waiters and len(woken_s) < jobs:
                waiter = waiters.popleft()
                if not waiter.done():
                    waiter.set_result(True)
                    woken_s.append(now_s)

    def _watch(self) -> None:
        """Count claimable jobs after each change, and now and then: a retry becomes due without a change."""
        changes: Changes | None = None
        next_s = 0.0
        while not self._ending.is_set():
            try:
                changes = changes or self._store.changes()
                changed = changes.wait(LOOK_S)
                if self._ending.is_set() or not (changed or time.monotonic() >= next_s):
                    continue
                next_s = time.monotonic() + COUNT_S
                waiting = {queue: len(waiters) for queue, waiters in list(self._waiters.items()) if waiters}
                counts, now = self._store.counts, self._store.now() if waiting else 0.0
                found = {queue: counts.claimable(queue, now=now, at_most=count) for queue, count in waiting.items()}
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self.wake, found)
                self._ending.wait(LEAST_S)
            except Exception as error:  # noqa: BLE001 - without this thread, workers wait for COUNT_S or longer
                log.warning("changes of the queue are not seen; trying again", reason=error_text(error))
                with suppress(Exception):
                    if changes is not None:
                        changes.close()
                changes = None
                self._ending.wait(RETRY_S)
        if changes is not None:
            changes.close()
