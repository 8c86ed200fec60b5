"""Callers that wait for a job. A job wakes one of them, not all."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

CLAIMING_S: Final = 1.0
"""How long a woken caller counts as about to claim, seconds."""


@dataclass
class _Queue:
    waiters: deque[asyncio.Future[bool]] = field(default_factory=deque)
    woken_s: deque[float] = field(default_factory=deque)
    """When callers were woken that have not claimed since."""
    claimable: int = 0
    counted_s: float = 0.0


class Waiters:
    """The waiting callers of each queue. For one event loop."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._closed = False

    def close(self) -> None:
        """Answer every caller, and later ones at once."""
        self._closed = True
        for its in self._queues.values():
            for waiter in its.waiters:
                if not waiter.done():
                    waiter.set_result(False)

    def counts(self) -> dict[str, int]:
        """Number of waiting callers of each queue that has some. For any thread."""
        return {queue: len(its.waiters) for queue, its in list(self._queues.items()) if its.waiters}

    def counted_s(self, queue: str) -> float:
        """When the queue's jobs were last counted, `time.monotonic`; 0 if that is forgotten."""
        its = self._queues.get(queue)
        return 0.0 if its is None else its.counted_s

    async def wait(self, queue: str, timeout_s: float) -> bool:
        """True once a job of the queue waits for this caller; False after `timeout_s`."""
        if self._closed:
            return False
        its = self._queues.setdefault(queue, _Queue())
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        its.waiters.append(waiter)
        _wake(its)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and its.woken_s:  # woken too late: the next one's
                its.woken_s.pop()
                _wake(its)
            raise
        finally:
            with suppress(ValueError):
                its.waiters.remove(waiter)
            self._forget(queue)

    def claimed(self, queue: str) -> bool:
        """A caller has claimed, with or without a job; returns whether one was woken for it."""
        its = self._queues.get(queue)
        if its is None:
            return False
        its.claimable = max(0, its.claimable - 1)
        was_woken = bool(its.woken_s)
        if was_woken:
            its.woken_s.popleft()
        return was_woken

    def wake(self, claimable: Mapping[str, int]) -> None:
        """Wake a caller for each claimable job, less those that are about to claim.

        Callers that come within `CLAIMING_S` get the jobs that are left.
        """
        for queue, jobs in claimable.items():
            its = self._queues.get(queue)
            if its is not None:
                its.claimable, its.counted_s = jobs, time.monotonic()
                _wake(its)

    def wake_one(self, queue: str) -> None:
        """Wake one caller more, or the next one that comes."""
        its = self._queues.setdefault(queue, _Queue())
        _expire(its)
        self.wake({queue: len(its.woken_s) + 1})
        self._forget(queue)

    def _forget(self, queue: str) -> None:
        """Drop a queue without callers, once its count of jobs is too old."""
        its = self._queues.get(queue)
        if its is not None and not its.waiters:
            left_s = its.counted_s + CLAIMING_S - time.monotonic()
            if its.claimable and left_s > 0:
                asyncio.get_running_loop().call_later(left_s + 0.01, self._forget, queue)
            else:
                del self._queues[queue]


def _expire(its: _Queue) -> None:
    now_s = time.monotonic()
    while its.woken_s and now_s - its.woken_s[0] >= CLAIMING_S:
        its.woken_s.popleft()


def _wake(its: _Queue) -> None:
    now_s = time.monotonic()
    if now_s - its.counted_s >= CLAIMING_S:
        return
    _expire(its)
    while its.waiters and len(its.woken_s) < its.claimable:
        waiter = its.waiters.popleft()
        if not waiter.done():
            waiter.set_result(True)
            its.woken_s.append(now_s)
