"""How soon an idle worker has a job: from the return of the submission, which is committed then, to that of the claim.

A submitter in one process, a worker in another, and a pause of its own before each job, in which the worker falls idle.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from bench.figures import Figure, figure, progress
from bench.queue.crew import crew
from bench.queue.ours import Ours
from bench.queue.worker import Worker

JOBS: Final = 120
PAUSE_S: Final = (0.08, 0.13)
"""Longer than a claim takes, and never the same, so that no rhythm falls in with the waiting worker's."""


def measure(databases: Mapping[type[Worker], str], where: str) -> Iterator[Figure]:
    """One queue after another; `where` is what their databases are."""
    base: float | None = None
    for worker, url in databases.items():
        progress(f"queue on {where}, an idle worker of {worker.title}")
        with crew(worker, url, 2) as pair:
            claimed_s, submitted_s = pair.run(partial(claim_told, count=JOBS), partial(submit_apart, count=JOBS))
        found = [(end - start) * 1000 for start, end in zip(submitted_s, claimed_s, strict=True)]
        what = f"commit to claimed, idle worker, {where}, {worker.title}"
        yield figure("queue", what, "ms", found, base=base, against=Ours.title)
        base = base or statistics.median(found)


async def claim_told(worker: Worker, ready: Callable[[], None], *, count: int) -> list[float]:
    """When each job was claimed, monotonic seconds."""
    await worker.listen()
    await _claim_all(worker)
    ready()
    found: list[float] = []
    while len(found) < count:
        await worker.wait()
        found += await _claim_all(worker)
    return found


async def submit_apart(worker: Worker, ready: Callable[[], None], *, count: int) -> list[float]:
    """When each job was submitted, monotonic seconds."""
    draw = random.Random(0)  # noqa: S311 - the same pauses for everyone
    ready()
    found = []
    for _ in range(count):
        await asyncio.sleep(draw.uniform(*PAUSE_S))
        await worker.submit()
        found.append(time.monotonic())
    return found


async def _claim_all(worker: Worker) -> list[float]:
    """Claim and complete until nothing is left, as a worker does before it waits."""
    found = []
    while (job := await worker.claim()) is not None:
        found.append(time.monotonic())
        await worker.complete(job)
    return found
