"""Jobs per second with 1 to 32 worker processes on one PostgreSQL, for our queue and the others.

A window is one second of one chore on newly filled tables. In each round the queues take turns in another order, so
that other load on the machine affects all of them.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from bench.figures import Figure, figure, progress
from bench.queue.ours import Ours
from bench.queue.pool import pool
from bench.queue.worker import Chore, Worker

PROCESSES: Final = (1, 2, 4, 8, 16, 32)
ROUNDS: Final = 3
WINDOW_S: Final = 1.0
FILL: Final = 10_000
FILL_FOR_TENS: Final = 50_000
"""Several times the jobs of a window."""

WARM: Final = 12
"""Chores before the first window, until statements are prepared and planned."""

WARM_AGAIN: Final = 2
"""Chores before the other windows, until statements are planned for the new tables."""

AGAINST: Final = {Chore.COMPLETE: Chore.NEXT, Chore.COMPLETE_TEN: Chore.NEXT}
"""Our chore to compare another queue's with: each as its worker runs jobs."""

_Key = tuple[Chore, int, type[Worker]]


@dataclass(frozen=True, kw_only=True)
class Lap:
    """One process's window, monotonic seconds."""

    began_s: float
    ended_s: float
    jobs: int
    took_ms: list[float]


def measure(databases: Mapping[type[Worker], str]) -> Iterator[Figure]:
    """Measure all queues by their database URLs."""
    found: dict[_Key, list[list[Lap]]] = defaultdict(list)
    for processes in PROCESSES:
        with ExitStack() as stack:
            pools = {worker: stack.enter_context(pool(worker, url, processes)) for worker, url in databases.items()}
            for number in range(ROUNDS):
                progress(f"queue on PostgreSQL, {processes} process(es), round {number + 1} of {ROUNDS}")
                for worker in _rotate(list(databases), number):
                    for chore in worker.chores:
                        worker.refill(databases[worker], FILL_FOR_TENS if chore is Chore.COMPLETE_TEN else FILL)
                        play = partial(window, chore=chore, warm=WARM_AGAIN if number else WARM)
                        found[chore, processes, worker].append(pools[worker].run(play))
    for chore in Chore:
        for processes in PROCESSES:
            for worker in databases:
                if chore in worker.chores:
                    yield from _figures(found, chore, processes, worker)


async def window(worker: Worker, ready: Callable[[], None], *, chore: Chore, warm: int) -> Lap:
    """Do a chore `warm` times, then until the window ends."""
    worker.held = None
    for _ in range(warm):
        await worker.do(chore)
    jobs, took_ms = 0, []
    ready()
    began_s = now_s = time.monotonic()
    while now_s < began_s + WINDOW_S and (done := await worker.do(chore)):
        before_s, now_s = now_s, time.monotonic()
        took_ms.append((now_s - before_s) * 1000)
        jobs += done
    return Lap(began_s=began_s, ended_s=now_s, jobs=jobs, took_ms=took_ms)


def _figures(
    found: Mapping[_Key, list[list[Lap]]], chore: Chore, processes: int, worker: type[Worker]
) -> Iterator[Figure]:
    """The rate, and for `COMPLETE` the duration of a job, against ours or against one process."""
    laps = found[chore, processes, worker]
    rates = [_rate(each) for each in laps]
    median = statistics.median(rates)
    against = (chore, PROCESSES[0], Ours) if worker is Ours else (AGAINST.get(chore, chore), processes, Ours)
    base = statistics.median(_rate(each) for each in found[against])
    what = f"{processes} process(es), PostgreSQL, {worker.title}"
    yield Figure(
        part="queue",
        what=f"{chore}, {what}",
        unit="jobs/s",
        median=median,
        worst=min(rates),
        count=len(rates),
        ratio=median / base if base else None,
        against="1 process" if worker is Ours else Ours.title,
    )
    if chore is Chore.COMPLETE:
        took_ms = _took_ms(laps)
        ours_ms = None if worker is Ours else statistics.median(_took_ms(found[chore, processes, Ours]))
        yield figure("queue", f"one job, {what}", "ms", took_ms, base=ours_ms, against=Ours.title)


def _rate(laps: list[Lap]) -> float:
    return sum(lap.jobs for lap in laps) / (max(lap.ended_s for lap in laps) - min(lap.began_s for lap in laps))


def _took_ms(rounds: list[list[Lap]]) -> list[float]:
    return [took for laps in rounds for lap in laps for took in lap.took_ms]


def _rotate(workers: list[type[Worker]], by: int) -> list[type[Worker]]:
    first = by % len(workers)
    return workers[first:] + workers[:first]
