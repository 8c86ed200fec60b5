"""The exporter of a full host, scraped a hundred thousand times while containers come and go: does anything grow?

Up to two containers a second end and as many start, each a cgroup, a worker in it with its files and lock, a process
of the driver's and a container of the engine's. Memory, open files, threads and the page are looked at a hundred times,
after a start in which caches fill. A container that is told of longer than `STALE_S` after its end is no figure but an
error.
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
"""The first number of those that come and go: all names are of one length, and so is the page."""

SAMPLES: Final = 100
WARM: Final = 5
"""So many of them are left out: the start, in which caches and pools fill."""

STALE_S: Final = 15.0
READY_S: Final = 60.0
GROWTH_MAX: Final = 1.05
"""What is called flat: at the end at most so many times what it was at the start."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the exporter holds after so many scrapes."""

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
    """Containers that come and go, a step at a time."""

    crowd: Crowd
    api: Api
    workers: Tenants
    at_a_time: int = AT_A_TIME
    step: int = 0
    boxes: dict[int, Box] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)
    """When each that is gone was, by the monotonic clock."""

    def fill(self) -> None:
        """The first of them."""
        for number in churn.alive(FIRST, at_a_time=self.at_a_time):
            self._start(number)
        self._tell()

    def turn(self) -> None:
        """The oldest ends, every other one by being killed, and another starts."""
        oldest = FIRST + self.step
        name = churn.name(oldest)
        (self.workers.kill if oldest % 2 else self.workers.end)(name)
        self.crowd.end(self.boxes.pop(oldest))
        self.step += 1
        self._start(churn.alive(FIRST + self.step, at_a_time=self.at_a_time)[-1])
        self._tell()
        self.ended_s[name] = time.monotonic()

    def names(self) -> frozenset[str]:
        """All that there are."""
        return frozenset(churn.name(each.number) for each in self.crowd.containers)

    def stale(self, named: frozenset[str], now_s: float) -> frozenset[str]:
        """Those of a page that were gone long before it was asked for."""
        return frozenset(name for name in named if now_s - self.ended_s.get(name, now_s) > STALE_S)

    def _start(self, number: int) -> None:
        name = churn.name(number)
        self.boxes[number] = self.crowd.start(number, run=lambda group: (self.workers.start(name, group),))

    def _tell(self) -> None:
        self.crowd.tell()
        self.api.tell()


def measure(place: Place, *, scrapes: int = SCRAPES, containers: int = CONTAINERS) -> Iterator[Figure]:
    """Scrape after scrape without a pause."""
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
        wait_until(lambda: _told(subject) == turnover.names(), within_s=READY_S, what="every container is told of")
        seen: set[str] = set()
        took: list[float] = []
        samples: list[Sample] = []
        with _turning(turnover) as failed:
            for number in range(1, scrapes + 1):
                asked_s = time.perf_counter()
                subject.fetch()
                took.append((time.perf_counter() - asked_s) * 1000)
                if number % max(1, scrapes // SAMPLES) == 0:
                    samples.append(_sampled(subject, turnover, seen))
                    _say(number, scrapes, samples[-1], turnover)
                if failed:
                    raise BenchError(f"containers stopped coming and going: {failed[0]!r}") from failed[0]
        wait_until(
            lambda: _told(subject) == turnover.names(), within_s=READY_S, what="none is told of but those there are"
        )
        came = seen & turnover.ended_s.keys()
        yield figure("soak", f"{scrapes:,} scrapes: one over HTTP", "ms", took)
        yield figure("soak", "containers that came and went", "", [turnover.step])
        yield figure("soak", f"of them seen in the {len(samples)} pages that were looked at", "", [len(came)])
        yield from grown(samples)


def grown(samples: Sequence[Sample]) -> Iterator[Figure]:
    """Each of them at the start, in the middle and at the end, a tenth of the samples each; and whether all is flat."""
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
    yield figure("soak", f"{verdict}: what grew most, for a bound of {GROWTH_MAX:g}", "x the start", [max(ratios)])


def _told(subject: Subject) -> frozenset[str]:
    return churn.named(subject.page().text)


def _sampled(subject: Subject, turnover: Turnover, seen: set[str]) -> Sample:
    asked_s = time.monotonic()
    text = subject.page().text
    named = churn.named(text)
    if stale := turnover.stale(named, asked_s):
        raise BenchError(f"told of {STALE_S:g} s after they were gone: {', '.join(sorted(stale))}")
    seen |= named
    return Sample(
        resident_mib=subject.resident_mib(),
        descriptors=statistics.median(subject.descriptors() for _ in range(3)),  # one more while it reads a file
        threads=statistics.median(subject.threads() for _ in range(3)),
        page_kib=len(text) / 1024,
    )


def _say(number: int, scrapes: int, sample: Sample, turnover: Turnover) -> None:
    progress(
        f"soak: {number:,} of {scrapes:,} scrapes, {turnover.step:,} containers came and went; "
        f"{sample.resident_mib:.1f} MiB, {sample.descriptors:g} files, {sample.threads:g} threads"
    )


@contextmanager
def _turning(turnover: Turnover) -> Iterator[list[Exception]]:
    """Turn after turn in a thread, until the end; what went wrong there, if it did."""
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
