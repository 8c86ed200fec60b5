"""How long a claim takes while many jobs wait: one worker, which submits one before each claim."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from bench.figures import Figure, figure, progress
from bench.queue.crew import crew
from bench.queue.ours import Ours
from bench.queue.worker import Worker, execute

DEPTHS: Final = (10, 10_000, 1_000_000)
BLOCKS: Final = 4
BLOCK: Final = 50
WARM: Final = 12


def measure(databases: Mapping[type[Worker], str]) -> Iterator[Figure]:
    """On PostgreSQL: blocks of claims, the queues in turn."""
    for depth in DEPTHS:
        progress(f"queue on PostgreSQL, claims with {depth:,} jobs queued")
        for worker, url in databases.items():
            worker.refill(url, depth)
        execute(next(iter(databases.values())), "CHECKPOINT")  # or the writing of what was filled in meets one of them
        took_ms: dict[type[Worker], list[float]] = {worker: [] for worker in databases}
        with ExitStack() as stack:
            crews = {worker: stack.enter_context(crew(worker, url, 1)) for worker, url in databases.items()}
            for each in crews.values():
                each.run(partial(claims, count=WARM))
            for _ in range(BLOCKS):
                for worker, each in crews.items():
                    took_ms[worker] += each.run(partial(claims, count=BLOCK))[0]
        for worker, found in took_ms.items():
            base = None if worker is Ours else statistics.median(took_ms[Ours])
            what = f"a claim, {depth:,} queued, PostgreSQL, {worker.title}"
            yield figure("queue", what, "ms", found, base=base, against=Ours.title)


def measure_sqlite(folder: Path, name: str) -> Iterator[Figure]:
    """On SQLite: ours alone."""
    base: float | None = None
    for depth in DEPTHS:
        progress(f"queue on {name}, claims with {depth:,} jobs queued")
        path = folder / f"depth_{depth}.db"
        Ours.refill(f"sqlite:///{path}", depth)
        with crew(Ours, f"sqlite:///{path}", 1) as alone:
            alone.run(partial(claims, count=WARM))
            found = alone.run(partial(claims, count=BLOCKS * BLOCK))[0]
        path.unlink()
        yield figure(
            "queue", f"a claim, {depth:,} queued, SQLite, {name}", "ms", found, base=base, against=f"{DEPTHS[0]} queued"
        )
        base = base or statistics.median(found)


async def claims(worker: Worker, ready: Callable[[], None], *, count: int) -> list[float]:
    """How long each of `count` claims took, milliseconds."""
    found = []
    ready()
    for _ in range(count):
        await worker.submit()
        started_s = time.perf_counter()
        job = await worker.claim()
        found.append((time.perf_counter() - started_s) * 1000)
        await worker.complete(job)
    return found
