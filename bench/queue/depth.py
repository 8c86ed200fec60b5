"""How long a claim takes while many jobs wait. One worker submits a job before each claim."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from bench.figures import Figure, figure, progress
from bench.queue.ours import Ours
from bench.queue.pool import pool
from bench.queue.worker import Worker, execute

DEPTHS: Final = (10, 10_000, 1_000_000)
BLOCKS: Final = 4
BLOCK: Final = 50
WARM: Final = 12


def measure(databases: Mapping[type[Worker], str]) -> Iterator[Figure]:
    """Measure PostgreSQL: blocks of claims, with the queues in turns."""
    for depth in DEPTHS:
        progress(f"queue on PostgreSQL, claims with {depth:,} jobs queued")
        for worker, url in databases.items():
            worker.refill(url, depth)
        execute(next(iter(databases.values())), "CHECKPOINT")  # else it writes during a measurement
        took_ms: dict[type[Worker], list[float]] = {worker: [] for worker in databases}
        with ExitStack() as stack:
            pools = {worker: stack.enter_context(pool(worker, url, 1)) for worker, url in databases.items()}
            for each in pools.values():
                each.run(partial(claims, count=WARM))
            for _ in range(BLOCKS):
                for worker, each in pools.items():
                    took_ms[worker] += each.run(partial(claims, count=BLOCK))[0]
        for worker, found in took_ms.items():
            base = None if worker is Ours else statistics.median(took_ms[Ours])
            what = f"a claim, {depth:,} queued, PostgreSQL, {worker.title}"
            yield figure("queue", what, "ms", found, base=base, against=Ours.title)


def measure_sqlite(folder: Path, name: str) -> Iterator[Figure]:
    """Measure our queue on SQLite."""
    base: float | None = None
    for depth in DEPTHS:
        progress(f"queue on {name}, claims with {depth:,} jobs queued")
        path = folder / f"depth_{depth}.db"
        Ours.refill(f"sqlite:///{path}", depth)
        with pool(Ours, f"sqlite:///{path}", 1) as alone:
            alone.run(partial(claims, count=WARM))
            found = alone.run(partial(claims, count=BLOCKS * BLOCK))[0]
        path.unlink()
        yield figure(
            "queue", f"a claim, {depth:,} queued, SQLite, {name}", "ms", found, base=base, against=f"{DEPTHS[0]} queued"
        )
        base = base or statistics.median(found)


async def claims(worker: Worker, ready: Callable[[], None], *, count: int) -> list[float]:
    """Durations of `count` claims, milliseconds."""
    found = []
    ready()
    for _ in range(count):
        await worker.submit()
        started_s = time.perf_counter()
        job = await worker.claim()
        found.append((time.perf_counter() - started_s) * 1000)
        await worker.complete(job)
    return found
