"""How soon an idle worker gets a job: from the committed submission to the claim.

One process submits, with a pause before each job, and another one works.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from bench.figures import Figure, figure, progress
from bench.queue.ours import Ours
from bench.queue.pool import pool
from bench.queue.worker import Worker

JOBS: Final = 120
PAUSE_S: Final = (0.08, 0.13)
"""Longer than a claim, and random, so that it does not match the poll interval of a worker."""


def measure(databases: Mapping[type[Worker], str], where: str) -> Iterator[Figure]:
    """Measure one queue after another; `where` names the kind of their databases."""
    base: float | None = None
    for worker, url in databases.items():
        progress(f"queue on {where}, an idle worker of {worker.title}")
        with pool(worker, url, 2) as pair:
            claimed_s, submitted_s = pair.run(partial(claim_notified, count=JOBS), partial(submit_spaced, count=JOBS))
        found = [(end - start) * 1000 for start, end in zip(submitted_s, claimed_s, strict=True)]
        what = f"commit to claimed, idle worker, {where}, {worker.title}"
        yield figure("queue", what, "ms", found, base=base, against=Ours.title)
        base = base or statistics.median(found)


async def claim_notified(worker: Worker, ready: Callable[[], None], *, count: int) -> list[float]:
    """Claim times, monotonic seconds."""
    await worker.listen()
    await _claim_all(worker)
    ready()
    found: list[float] = []
    while len(found) < count:
        await worker.wait()
        found += await _claim_all(worker)
    return found


async def submit_spaced(worker: Worker, ready: Callable[[], None], *, count: int) -> list[float]:
    """Submission times, monotonic seconds."""
    draw = random.Random(0)  # noqa: S311 - the same pauses for all queues
    ready()
    found = []
    for _ in range(count):
        await asyncio.sleep(draw.uniform(*PAUSE_S))
        await worker.submit()
        found.append(time.monotonic())
    return found


async def _claim_all(worker: Worker) -> list[float]:
    """Claim and complete until the queue is empty, like a worker."""
    found = []
    while (job := await worker.claim()) is not None:
        found.append(time.monotonic())
        await worker.complete(job)
    return found
