"""What `Reporter.step()` costs compared to an empty call, and its write, which happens at most once a second."""

import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Final

from bench.crowd import start_job
from bench.figures import Figure, Place, figure, progress, time_calls_ms
from gpuwarden.job import Phase
from gpuwarden.reporter import Reporter

ROUNDS: Final = 7
ROUND_S: Final = 1.5
"""Duration of a round, seconds: long enough for one write."""


def measure(places: list[Place]) -> Iterator[Figure]:
    """Call in a loop, which is part of both figures."""
    empty_ns = _call_ns(_nothing)
    empty = figure("step", "empty function call", "ns", empty_ns)
    yield empty
    for place in places:
        progress(f"step(), state files on {place.name}")
        with Reporter(place.folder / "step", worker="bench", queue="bench") as report:
            start_job(report, job_id=1)
            found = _call_ns(report.step)
            yield figure(
                "step", f"step(), writes included, {place.name}", "ns", found, base=empty.median, against="empty call"
            )
            writes_us = [ms * 1000 for ms in time_calls_ms(lambda: report.phase(Phase.STEP), count=500)]
            yield figure("step", f"one write of the job file, {place.name}", "us", writes_us)


def _nothing() -> None:
    pass


def _call_ns(call: Callable[[], None]) -> list[float]:
    count = 100_000
    count = max(count, int(count * ROUND_S / _loop_s(call, count)))
    return [_loop_s(call, count) / count * 1e9 for _ in range(ROUNDS)]


def _loop_s(call: Callable[[], None], count: int) -> float:
    started_s = time.perf_counter()
    for _ in repeat(None, count):
        call()
    return time.perf_counter() - started_s
