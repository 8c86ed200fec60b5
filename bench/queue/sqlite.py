"""Jobs per second of one SQLite file, with every commit synced."""

import statistics
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Final

from bench.figures import BenchError, Figure, Place, figure, progress
from gpuwarden.queue import JobStore, Submission

JOBS: Final = 400
PROCESSES: Final = (1, 4)
ROUNDS: Final = 3
ROUND_S: Final = 60.0

_Lap = tuple[float, float, list[float]]
"""Start and end of a process, monotonic seconds, and durations of its jobs, milliseconds."""


def measure(place: Place) -> Iterator[Figure]:
    """Measure claim and completion of jobs."""
    base: float | None = None
    for processes in PROCESSES:
        progress(f"queue on {place.name}, {processes} process(es)")
        files = [place.folder / f"queue_{processes}_{number}.db" for number in range(ROUNDS)]
        rounds = [_measure_round(f"sqlite:///{each}", processes) for each in files]
        what = f"{processes} process(es), {place.name}"
        rates = [rate for rate, _ in rounds]
        median = statistics.median(rates)
        yield Figure(
            part="queue",
            what=f"claims and completes, {what}",
            unit="jobs/s",
            median=median,
            worst=min(rates),
            count=ROUNDS,
            ratio=median / base if base else None,
            against="1 process",
        )
        base = base or median
        yield figure("queue", f"one job, {what}", "ms", [each for _, laps in rounds for each in laps])


def _measure_round(url: str, processes: int) -> tuple[float, list[float]]:
    store = JobStore.open(url)
    for _ in range(JOBS):
        store.runs.submit(Submission(queue="bench"), now=time.time())
    store.close()
    context = get_context("spawn")
    barrier = context.Barrier(processes)
    laps: list[_Lap] = []
    running = []
    for number in range(processes):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_drain, args=(url, f"worker-{number}", barrier, theirs), daemon=True)
        child.start()
        running.append((child, ours))
    for child, ours in running:
        if not ours.poll(ROUND_S):
            raise BenchError(f"a process did not drain its share of {JOBS} jobs in {ROUND_S:.0f} s")
        laps.append(ours.recv())
        child.join()
    each = [took for lap in laps for took in lap[2]]
    return len(each) / (max(lap[1] for lap in laps) - min(lap[0] for lap in laps)), each


def _drain(url: str, worker: str, barrier: Barrier, answer: "Connection[_Lap, _Lap]") -> None:
    store = JobStore.open(url)
    took_ms: list[float] = []
    barrier.wait(ROUND_S)
    began_s = now_s = time.monotonic()
    while job := store.claims.claim("bench", host="bench", worker=worker, incarnation=worker, now=time.time()):
        if not store.claims.complete(job.job_id, attempt=job.attempt, incarnation=worker, now=time.time()):
            raise BenchError(f"the queue refused the completion of job {job.job_id}")
        before_s, now_s = now_s, time.monotonic()
        took_ms.append((now_s - before_s) * 1000)
    answer.send((began_s, now_s, took_ms))
    store.close()
