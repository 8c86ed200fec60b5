"""Counts claimable jobs for the callers that wait for them."""

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden.format import error_text
from gpuwarden.gateway.waiters import Waiters

if TYPE_CHECKING:
    from gpuwarden.db.changes import Changes
    from gpuwarden.queue import JobStore

LOOK_S: Final = 0.1
"""Longest time between checks for the end and for new callers, seconds."""

LEAST_S: Final = 0.05
"""Least time between counts of waiting jobs, seconds."""

COUNT_S: Final = 5.0
"""Longest time between counts, seconds."""

PASSES_MAX: Final = 16
"""Most times in `COUNT_S` that jobs are counted because a woken caller could take none."""

SPARE: Final = 64
"""Jobs that are counted for callers that are about to come."""

RETRY_S: Final = 1.0

log: Final = structlog.get_logger("gateway")


class JobWatcher:
    """The waiting callers of each queue, and a thread that watches the queue for them."""

    def __init__(self, store: "JobStore") -> None:
        self._store = store
        self._waiters = Waiters()
        self._changed_s = time.monotonic()
        self._due = False
        self._passes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpuwarden-changes", daemon=True)

    def start(self) -> None:
        """Start to watch. Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and answer every caller."""
        self._ending.set()
        self._waiters.close()

    @property
    def count(self) -> int:
        """Number of waiting callers."""
        return sum(self._waiters.counts().values())

    async def wait(self, queue: str, timeout_s: float) -> bool:
        """See `Waiters.wait`."""
        if self._waiters.counted_s(queue) <= self._changed_s:  # a job may have come before this caller
            asyncio.get_running_loop().call_soon(self._count_now)  # once this caller is counted
        return await self._waiters.wait(queue, timeout_s)

    def claimed(self, queue: str, *, found: bool) -> None:
        """A caller has claimed. The job that a woken one may not take, as it is locked, is soon another's."""
        if self._waiters.claimed(queue) and not found and self._passes < PASSES_MAX:
            self._passes += 1
            self._due = True

    def _count_now(self) -> None:
        self._due = True

    def _watch(self) -> None:
        """Count claimable jobs after each change, and now and then: a retry becomes due without a change."""
        changes: Changes | None = None
        next_s = next_pass_s = 0.0
        while not self._ending.is_set():
            try:
                changes = changes or self._store.changes()
                if changes.wait(LOOK_S):
                    self._changed_s, self._due = time.monotonic(), True
                if time.monotonic() >= next_pass_s:
                    self._passes, next_pass_s = 0, time.monotonic() + COUNT_S
                if self._ending.is_set() or not (self._due or time.monotonic() >= next_s):
                    continue
                self._due, next_s = False, time.monotonic() + COUNT_S
                waiting = self._waiters.counts()
                counts, now = self._store.counts, self._store.now() if waiting else 0.0
                found = {queue: counts.claimable(queue, now=now, at_most=n + SPARE) for queue, n in waiting.items()}
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._waiters.wake, found)
                self._ending.wait(LEAST_S)
            except Exception as error:  # noqa: BLE001 - without this thread, callers wait for their timeout
                log.warning("changes of the queue are not seen; trying again", reason=error_text(error))
                with suppress(Exception):
                    if changes is not None:
                        changes.close()
                changes = None
                self._ending.wait(RETRY_S)
        if changes is not None:
            changes.close()
