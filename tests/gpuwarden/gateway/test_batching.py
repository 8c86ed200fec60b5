"""What a host's gateway asks the central one for all its slots together."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gpuwarden.gateway import batching
from gpuwarden.gateway.batching import Batching
from gpuwarden.gateway.operations import Claim, Operation, Wait
from gpuwarden.gateway.upstream import Answer


def done(result: Any) -> Answer:
    return Answer(status=200, content={"result": result}, outcome="done")


class Central:
    """A central gateway that answers a wait by hand, and any other operation with `None`."""

    def __init__(self) -> None:
        self.waits: list[asyncio.Future[bool]] = []
        self.most = 0

    @property
    def open(self) -> list["asyncio.Future[bool]"]:
        return [each for each in self.waits if not each.done()]

    async def carry_out(self, operation: Operation, **_: Any) -> Answer:
        if not isinstance(operation, Wait):
            return done(None)
        self.waits.append(asyncio.get_running_loop().create_future())
        self.most = max(self.most, len(self.open))
        return done(await self.waits[-1])

    async def close(self) -> None:
        pass


async def until(holds: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end_s, what
        await asyncio.sleep(0.01)


def wait(host: Batching, worker: str) -> "asyncio.Task[Answer]":
    its = Wait(worker=worker, queue="gpu", timeout_s=20)
    return asyncio.create_task(host.carry_out(its, host="box1", request_id=""))


def played(play: Callable[[Batching, Central], Awaitable[None]]) -> Central:
    central = Central()

    async def run() -> None:
        host = Batching(central, "box1")
        await play(host, central)
        await host.close()

    asyncio.run(run())
    return central


def test_waiting_workers_of_a_host_are_one_request_and_each_job_wakes_one() -> None:
    async def play(host: Batching, central: Central) -> None:
        workers = [wait(host, f"w{n}") for n in range(8)]
        for n in range(8):
            await until(lambda: central.open, "the host asks")
            central.open[0].set_result(True)
            await until(lambda n=n: sum(each.done() for each in workers) == n + 1, "one more is woken")  # type: ignore[misc]
        await asyncio.sleep(0.05)

    central = played(play)

    assert (len(central.waits), central.most) == (8, 1)


def test_host_without_a_waiting_worker_asks_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "LOOK_S", 0.01)

    async def play(host: Batching, central: Central) -> None:
        worker = wait(host, "w1")
        await until(lambda: central.open, "the host asks")
        worker.cancel()
        await until(lambda: not central.open, "the host hangs up")

    assert played(play).waits[0].cancelled()


def test_wake_that_finds_no_worker_is_the_next_ones() -> None:
    async def play(host: Batching, central: Central) -> None:
        gone = wait(host, "w1")
        await until(lambda: central.open, "the host asks")
        gone.cancel()
        central.open[0].set_result(True)
        await asyncio.sleep(0.05)
        comes = wait(host, "w2")
        assert (await comes).content == {"result": True}

    assert len(played(play).waits) == 1


def test_worker_that_hangs_up_as_it_is_woken_passes_the_wake_on() -> None:
    async def play(host: Batching, central: Central) -> None:
        gone, waits = wait(host, "w1"), wait(host, "w2")
        await until(lambda: central.open, "the host asks")
        host._waiters.wake_one("gpu")
        gone.cancel()
        assert (await waits).content == {"result": True}

    played(play)


def test_worker_that_claims_makes_room_for_the_next_wake() -> None:
    async def play(host: Batching, central: Central) -> None:
        workers = [wait(host, f"w{n}") for n in range(3)]
        await until(lambda: central.open, "the host asks")
        host._waiters.wake({"gpu": 1})
        host._waiters.wake({"gpu": 1})  # counted before the first has claimed
        await asyncio.sleep(0.02)
        assert sum(each.done() for each in workers) == 1
        claim = Claim(worker="w0", queue="gpu", incarnation="i", lease_s=600)
        await host.carry_out(claim, host="box1", request_id="")
        host._waiters.wake({"gpu": 1})
        await until(lambda: sum(each.done() for each in workers) == 2, "the next is woken")

    played(play)
