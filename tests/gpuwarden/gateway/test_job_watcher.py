"""Which waiting callers are woken for a job."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from gpuwarden.gateway.job_watcher import JobWatcher


class Changes:
    def wait(self, timeout_s: float) -> bool:
        return threading.Event().wait(timeout_s)

    def close(self) -> None:
        pass


def test_job_that_the_woken_worker_may_not_take_wakes_the_next_one_soon() -> None:
    store: Any = SimpleNamespace(changes=Changes, now=lambda: 0.0, counts=SimpleNamespace(claimable=lambda *_, **__: 1))
    woken: list[int] = []

    async def run() -> None:
        watcher = JobWatcher(store)

        async def locked(number: int) -> None:
            while await watcher.wait("gpu", 20):
                woken.append(number)
                watcher.claimed("gpu", found=False)

        async with asyncio.timeout(4):
            others = [asyncio.create_task(locked(number)) for number in range(8)]
            await asyncio.sleep(0)
            may_take = asyncio.create_task(watcher.wait("gpu", 20))
            watcher.start()
            assert await may_take
        await asyncio.sleep(1)
        watcher.close()
        for each in others:
            each.cancel()

    asyncio.run(run())

    assert 8 <= len(woken) <= 20, "a job that none may take costs little"
