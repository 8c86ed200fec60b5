"""Compare our exporter with others on one full host: cost of a scrape, CPU between scrapes, memory.

Each exporter runs alone while it is measured, because some sample all the time. Each round starts all of them, in
another order. Scrapes follow each other after 1.1 s: a sample that is cached for 1 s is never used twice.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bench.exporter import SCRAPE_EACH_S, measure_cpu, peers
from bench.exporter.engine import engine
from bench.exporter.host import host
from bench.exporter.peers import PEERS, PeerMissing
from bench.exporter.subject import Page, Subject, ours
from bench.figures import Figure, Place, figure, progress, wait_until
from gpuwarden import procfs
from tests.nvml import driver as nvidia

OURS: Final = "ours"
AFTER_S: Final = 0.1
"""CPU time until this long after the answer belongs to a scrape, seconds."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Durations. All rounds have 100 scrapes or more, for a p99."""

    rounds: int = 3
    settle_s: float = 3.0
    idle_s: float = 15.0
    scrapes: int = 34
    scrape_each_s: float = 1.1
    watched_s: float = 20.0
    """With a scrape each `SCRAPE_EACH_S`."""

    containers: int = 64


@dataclass(frozen=True, kw_only=True)
class Found:
    """Measurements of one exporter: one of `took_ms` per scrape, of the others one per round."""

    took_ms: list[float] = field(default_factory=list)
    scrape_cpu_ms: list[float] = field(default_factory=list)
    """CPU time from request to `AFTER_S` after the answer, less the idle use in that time."""

    idle_percent: list[float] = field(default_factory=list)
    watched_percent: list[float] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)
    page_kib: list[float] = field(default_factory=list)
    series: list[float] = field(default_factory=list)


_Starts = Callable[[], AbstractContextManager[Subject]]


def measure(place: Place, turns: Turns | None = None) -> Iterator[Figure]:
    """Measure ours and all available exporters."""
    turns = turns or Turns()
    work = place.folder / "exporter-peers"
    work.mkdir()
    driver = nvidia.Driver(nvidia.build(work), work / "nvml.script")
    with host(driver, containers=turns.containers) as crowd, engine(crowd) as api:
        starts: dict[str, _Starts] = {OURS: partial(ours, work / "run", crowd.environment, api.url)}
        for peer in PEERS:
            starts[peer.name] = partial(peers.running, peer, crowd, work / peer.name)
        found = {name: Found() for name in starts}
        processes = len([each for each in procfs.PROC.iterdir() if each.name.isdigit()])
        yield figure("peers", "processes on this machine, these containers' among them", "", [processes])
        for number in range(turns.rounds):
            for name in rotated(list(starts), number):
                if name not in found:
                    continue
                progress(f"peers, round {number + 1} of {turns.rounds}: {name}")
                try:
                    with starts[name]() as subject:
                        if name == OURS:
                            _wait_for_containers(subject, turns.containers)
                        _measure_turn(subject, turns, found[name])
                except PeerMissing as missing:
                    progress(f"{name} skipped: {missing}")
                    del found[name]
    yield from compared(found)


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The names, with another one first in each round."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def compared(found: dict[str, Found]) -> Iterator[Figure]:
    """Figures of each exporter, with the ratio to ours; more than 1 costs more than ours."""
    for what, unit, of in _MEASURES:
        base: float | None = None
        for name, each in found.items():
            line = figure("peers", f"{what}, {name}", unit, of(each), base=base, against=OURS)
            base = line.median if name == OURS else base
            yield line


def _per_series(of: Callable[[Found], Sequence[float]], *, times: float) -> Callable[[Found], list[float]]:
    def per_series(each: Found) -> list[float]:
        series = figure("", "", "", each.series).median
        return [value * times / series for value in of(each)]

    return per_series


WATCHED: Final = f"CPU with a scrape each {SCRAPE_EACH_S:g} s"
_MEASURES: Final[tuple[tuple[str, str, Callable[[Found], Sequence[float]]], ...]] = (
    ("series", "", lambda each: each.series),
    ("size of a scrape", "KiB", lambda each: each.page_kib),
    ("one scrape", "ms", lambda each: each.took_ms),
    ("one scrape, a series of it", "µs", _per_series(lambda each: each.took_ms, times=1000)),
    ("CPU of a scrape", "ms", lambda each: each.scrape_cpu_ms),
    ("CPU of a scrape, a series of it", "µs", _per_series(lambda each: each.scrape_cpu_ms, times=1000)),
    ("CPU without a scrape", "% of a core", lambda each: each.idle_percent),
    (WATCHED, "% of a core", lambda each: each.watched_percent),
    (f"{WATCHED}, 1000 series", "% of a core", _per_series(lambda each: each.watched_percent, times=1000)),
    ("resident memory", "MiB", lambda each: each.resident_mib),
    ("resident memory, a series", "KiB", _per_series(lambda each: each.resident_mib, times=1024)),
)


def _wait_for_containers(subject: Subject, containers: int) -> None:
    wait_until(lambda: subject.sees(b"gpuwarden_container_info{", at_least=containers), within_s=peers.READY_S,
          what="our exporter sees every container")  # fmt: skip


def _measure_turn(subject: Subject, turns: Turns, found: Found) -> None:
    time.sleep(turns.settle_s)
    before_s, started_s = subject.cpu_s(), time.monotonic()
    time.sleep(turns.idle_s)
    idle = (subject.cpu_s() - before_s) / (time.monotonic() - started_s)
    found.idle_percent.append(100 * idle)
    started_s, used_s = time.monotonic(), 0.0
    for number in range(turns.scrapes):
        time.sleep(max(0.0, started_s + number * turns.scrape_each_s - time.monotonic()))
        before_s, asked_s = subject.cpu_s(), time.perf_counter()
        subject.fetch()
        found.took_ms.append((time.perf_counter() - asked_s) * 1000)
        time.sleep(AFTER_S)
        used_s += subject.cpu_s() - before_s - idle * (time.perf_counter() - asked_s)
    found.scrape_cpu_ms.append(max(0.0, 1000 * used_s / turns.scrapes))
    used_s, passed_s = measure_cpu(subject, turns.watched_s)
    found.watched_percent.append(100 * used_s / passed_s)
    found.resident_mib.append(subject.resident_mib())
    page: Page = subject.page()
    found.page_kib.append(len(page.text) / 1024)
    found.series.append(float(page.series))
