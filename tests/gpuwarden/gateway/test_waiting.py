"""Which waiting callers are woken for a job."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from gpuwarden.gateway.waiting import Waiting


class Changes:
    def wait(self, timeout_s: float) -> bool:
        return threading.Event().wait(timeout_s)

    def close(self) -> None:
        pass


def test_job_that_the_woken_worker_may_not_take_wakes_the_next_one_soon() -> None:
    store: Any = SimpleNamespace(changes=Changes, now=lambda: 0.0, counts=SimpleNamespace(claimable=lambda *_, **__: 1))
    woken: list[int] = []

    async def run() -> None:
        waiting = Waiting(store)

        async def locked(number: int) -> None:
            while await waiting.wait("gpu", 20):
                woken.append(number)
                waiting.claimed("gpu", found=False)

        async with asyncio.timeout(4):
            others = [asyncio.create_task(locked(number)) for number in range(8)]
            await asyncio.sleep(0)
            may_take = asyncio.create_task(waiting.wait("gpu", 20))
            waiting.start()
            assert await may_take
        await asyncio.sleep(1)
        waiting.close()
        for each in others:
            each.cancel()

    asyncio.run(run())

    assert 8 <= len(woken) <= 20, "a job that none may take costs little"
