"""Scrape the exporter of a full host 100,000 times while containers come and go: does anything grow?

Up to two containers a second end and start, each with a cgroup, a worker, a driver process and an entry of the
engine. Memory, open files, threads and page size are sampled 100 times after a warm-up. A container that is published
more than `STALE_S` after its end is an error.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from bench.exporter import churn
from bench.exporter.engine import Api, engine
from bench.exporter.host import Box, Crowd, host
from bench.exporter.subject import Subject, ours
from bench.exporter.tenants import Tenants, tenants
from bench.figures import BenchError, Figure, Place, figure, progress, wait_until
from tests.nvml import driver as nvidia

SCRAPES: Final = 100_000
CONTAINERS: Final = 64
AT_A_TIME: Final = 8
STEP_S: Final = 0.5
FIRST: Final = 100_000
"""First number of these containers: all names have the same length."""

SAMPLES: Final = 100
WARM: Final = 5
"""Samples to skip at the start, while caches fill."""

STALE_S: Final = 15.0
READY_S: Final = 60.0
GROWTH_MAX: Final = 1.05
"""Greatest ratio of end to start that counts as flat."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Resources of the exporter."""

    resident_mib: float
    descriptors: float
    threads: float
    page_kib: float


_MEASURES: Final[tuple[tuple[str, str, Callable[[Sample], float]], ...]] = (
    ("resident memory", "MiB", lambda each: each.resident_mib),
    ("open files", "", lambda each: each.descriptors),
    ("threads", "", lambda each: each.threads),
    ("size of a scrape", "KiB", lambda each: each.page_kib),
)


@dataclass(kw_only=True)
class Turnover:
    """Containers that come and go in steps."""

    crowd: Crowd
    api: Api
    workers: Tenants
    at_a_time: int = AT_A_TIME
    step: int = 0
    boxes: dict[int, Box] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    """End of each container, monotonic seconds."""

    def fill(self) -> None:
        """Start the first containers."""
        for number in churn.alive(FIRST, at_a_time=self.at_a_time):
            self._start(number)
        self._update()

    def turn(self) -> None:
        """End the oldest container and start another; every second one is killed."""
        oldest = FIRST + self.step
        name = churn.name(oldest)
        (self.workers.kill if oldest % 2 else self.workers.end)(name)
        self.crowd.end(self.boxes.pop(oldest))
        self.step += 1
        self._start(churn.alive(FIRST + self.step, at_a_time=self.at_a_time)[-1])
        self._update()
        self.ended_s[name] = time.monotonic()

    def names(self) -> frozenset[str]:
        """Names of all current containers."""
        return frozenset(churn.name(each.number) for each in self.crowd.containers)

    def stale(self, named: frozenset[str], now_s: float) -> frozenset[str]:
        """Containers of a page that ended long before the scrape."""
        return frozenset(name for name in named if now_s - self.ended_s.get(name, now_s) > STALE_S)

    def _start(self, number: int) -> None:
        name = churn.name(number)
        self.boxes[number] = self.crowd.start(number, run=lambda group: (self.workers.start(name, group),))

    def _update(self) -> None:
        self.crowd.update_driver()
        self.api.update()


def measure(place: Place, *, scrapes: int = SCRAPES, containers: int = CONTAINERS) -> Iterator[Figure]:
    """Scrape without pause."""
    work = place.folder / "exporter-soak"
    run = work / "run"
    run.mkdir(parents=True)
    driver = nvidia.Driver(nvidia.build(work), work / "nvml.script")
    with (
        host(driver, containers=containers) as crowd,
        engine(crowd) as api,
        tenants(run) as workers,
        ours(run, crowd.environment, api.url) as subject,
    ):
        turnover = Turnover(crowd=crowd, api=api, workers=workers)
        turnover.fill()
        wait_until(lambda: _published(subject) == turnover.names(), within_s=READY_S, what="the page is complete")
        seen: set[str] = set()
        took: list[float] = []
        samples: list[Sample] = []
        with _turning(turnover) as failed:
            for number in range(1, scrapes + 1):
                asked_s = time.perf_counter()
                subject.fetch()
                took.append((time.perf_counter() - asked_s) * 1000)
                if number % max(1, scrapes // SAMPLES) == 0:
                    samples.append(_sample(subject, turnover, seen))
                    _report(number, scrapes, samples[-1], turnover)
                if failed:
                    raise BenchError(f"containers stopped coming and going: {failed[0]!r}") from failed[0]
        wait_until(lambda: _published(subject) == turnover.names(), within_s=READY_S, what="no ended container is left")
        came = seen & turnover.ended_s.keys()
        yield figure("soak", f"{scrapes:,} scrapes: one over HTTP", "ms", took)
        yield figure("soak", "containers that came and went", "", [turnover.step])
        yield figure("soak", f"of them on the {len(samples)} sampled pages", "", [len(came)])
        yield from grown(samples)


def grown(samples: Sequence[Sample]) -> Iterator[Figure]:
    """Compare start, middle and end, a tenth of the samples each; the last figure says whether all is flat."""
    samples = samples[WARM:] if len(samples) > 2 * WARM else samples
    tenth = max(1, len(samples) // 10)
    middle = (len(samples) - tenth) // 2
    parts = {"start": samples[:tenth], "middle": samples[middle : middle + tenth], "end": samples[-tenth:]}
    ratios = []
    for what, unit, of in _MEASURES:
        base = None
        for when, part in parts.items():
            line = figure("soak", f"{what}, {when}", unit, [of(each) for each in part], base=base, against="start")
            base = base or line.median
            yield line
        ratios.append(line.ratio or 1.0)
    verdict = "flat" if max(ratios) <= GROWTH_MAX else "NOT FLAT"
    yield figure("soak", f"{verdict}: greatest growth, limit {GROWTH_MAX:g}", "x the start", [max(ratios)])


def _published(subject: Subject) -> frozenset[str]:
    return churn.named(subject.page().text)


def _sample(subject: Subject, turnover: Turnover, seen: set[str]) -> Sample:
    asked_s = time.monotonic()
    text = subject.page().text
    named = churn.named(text)
    if stale := turnover.stale(named, asked_s):
        raise BenchError(f"published {STALE_S:g} s after their end: {', '.join(sorted(stale))}")
    seen |= named
    return Sample(
        resident_mib=subject.resident_mib(),
        descriptors=statistics.median(subject.descriptors() for _ in range(3)),  # may include one short-lived file
        threads=statistics.median(subject.threads() for _ in range(3)),
        page_kib=len(text) / 1024,
    )


def _report(number: int, scrapes: int, sample: Sample, turnover: Turnover) -> None:
    progress(
        f"soak: {number:,} of {scrapes:,} scrapes, {turnover.step:,} containers came and went; "
        f"{sample.resident_mib:.1f} MiB, {sample.descriptors:g} files, {sample.threads:g} threads"
    )


@contextmanager
def _turning(turnover: Turnover) -> Iterator[list[Exception]]:
    """Replace containers in a thread; yields its errors."""
    failed: list[Exception] = []
    ended = threading.Event()

    def turn() -> None:
        try:
            while not ended.wait(STEP_S):
                turnover.turn()
        except (BenchError, OSError, ValueError) as error:
            failed.append(error)

    thread = threading.Thread(target=turn, name="turnover")
    thread.start()
    try:
        yield failed
    finally:
        ended.set()
        thread.join()
