"""What a host's gateway asks the central one for all its slots together."""

import asyncio
import random
from contextlib import suppress
from typing import Any, Final

from gpuwarden.gateway.operations import Claim, Operation, Wait
from gpuwarden.gateway.upstream import Answer, Upstream
from gpuwarden.gateway.waiters import Waiters
from gpuwarden.gateway.wire import WAIT_MAX_S

LOOK_S: Final = 1.0
"""How long a request waits for a job after its last worker is gone, seconds."""

RETRY_S: Final = 1.0


class Batching:
    """An upstream with one wait per queue, however many workers of the host wait.

    Args:
        upstream: the central gateway.
        host: this host.
    """

    def __init__(self, upstream: Upstream, host: str) -> None:
        self._upstream, self._host = upstream, host
        self._waiters = Waiters()
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def carry_out(self, operation: Operation, *, host: str, request_id: str) -> Answer:
        """See `Upstream`."""
        if isinstance(operation, Wait):
            if operation.queue not in self._asking:
                self._asking[operation.queue] = asyncio.create_task(self._ask(operation))
            return _done(await self._waiters.wait(operation.queue, operation.timeout_s))
        try:
            return await self._upstream.carry_out(operation, host=host, request_id=request_id)
        finally:
            if isinstance(operation, Claim):
                self._waiters.claimed(operation.queue)

    async def close(self) -> None:
        """See `Upstream`."""
        self._waiters.close()
        for task in list(self._asking.values()):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self._upstream.close()

    async def _ask(self, operation: Wait) -> None:
        """Ask for jobs while workers of the queue wait."""
        queue, longest = operation.queue, operation.model_copy(update={"timeout_s": WAIT_MAX_S})
        try:
            while queue in self._waiters.counts():
                asking = asyncio.ensure_future(self._upstream.carry_out(longest, host=self._host, request_id=""))
                try:
                    while not asking.done() and queue in self._waiters.counts():
                        await asyncio.wait([asking], timeout=LOOK_S)
                finally:
                    asking.cancel()  # no worker waits any more: the job is another host's
                if not asking.done():
                    continue
                answer = asking.result()
                if answer.status != 200:
                    await asyncio.sleep(RETRY_S * (0.5 + random.random()))  # noqa: S311 - no secret
                elif _result(answer):
                    self._waiters.wake_one(queue)
        finally:
            del self._asking[queue]


def _done(result: Any) -> Answer:
    return Answer(status=200, content={"result": result}, outcome="done")


def _result(answer: Answer) -> Any:
    return answer.content.get("result") if isinstance(answer.content, dict) else None
