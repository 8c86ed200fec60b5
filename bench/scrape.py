"""What the exporter costs by number of workers: one sample, one scrape, memory and CPU."""

import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import httpx
from prometheus_client import CollectorRegistry

from bench.crowd import crowd
from bench.figures import Figure, Place, figure, progress, time_calls_ms, wait_until
from deploy.standalone.stack import Chain, Plan
from exporter.collectors.registry import SnapshotCollector
from exporter.http.exposition import render
from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.sources.gpu import simulated

COUNTS: Final = (10, 100, 500)
LOOKS: Final = 15
ALONE_S: Final = 8.0
"""Duration of the CPU measurement without scrapes, seconds."""

_Found = tuple[str, str, list[float]]
"""Name, unit and values."""


def measure(place: Place) -> Iterator[Figure]:
    """Measure the parts in this process, then a running `gpuwarden exporter`."""
    base: dict[str, float] = {}
    for count in COUNTS:
        progress(f"exporter, {count} workers")
        work = place.folder / f"exporter-{count}"
        chain = Chain(Plan(work=work, host="bench", docker=None, simulate_gpu=work / "gpus.json"))
        try:
            with crowd(chain.directory, work / "gpus.json", count):
                for what, unit, found in (
                    *_measure_sampler(chain.directory, work / "gpus.json"),
                    *_measure_exporter(chain),
                ):
                    first = base.get(what)
                    base.setdefault(what, statistics.median(found))
                    against = f"{COUNTS[0]} workers"
                    yield figure("exporter", f"{count} workers: {what}", unit, found, base=first, against=against)
        finally:
            chain.stop("exporter")
            chain.http.close()


def _measure_sampler(directory: Path, simulation: Path) -> Iterator[_Found]:
    thresholds = Thresholds()
    sampler = Sampler(
        host="bench",
        directory=directory,
        containers={},
        gpus=partial(simulated.read, simulation),
        thresholds=thresholds,
    )
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(sampler.latest, host="bench", thresholds=thresholds))
    looks, reads, renders = [], [], []
    for _ in range(LOOKS):
        looks += time_calls_ms(sampler.sample, count=1)
        reads.append(sum(each.duration_s * 1000 for each in sampler.sample().sources if each.source == "workers"))
        renders += time_calls_ms(lambda: render(registry.collect()), count=1)
    yield "one look, Sampler.sample()", "ms", looks
    yield "of that, state files and locks", "ms", reads
    yield "one scrape rendered", "ms", renders
    yield "size of it", "KiB", [len(render(registry.collect())) / 1024]


def _measure_exporter(chain: Chain) -> Iterator[_Found]:
    def is_ready() -> bool:
        with suppress(httpx.HTTPError):
            return chain.http.get(f"{chain.exporter_url}/-/ready").is_success
        return False

    chain.start_exporter()
    wait_until(is_ready, within_s=30, what="the exporter answers")
    yield "one scrape over HTTP", "ms", time_calls_ms(lambda: _series(chain), count=LOOKS)
    before, started_s = _series(chain), time.monotonic()
    time.sleep(ALONE_S)
    after, passed_s = _series(chain), time.monotonic() - started_s
    cpu_s = after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]
    yield "CPU, sampling every second", "% of a core", [100 * cpu_s / passed_s]
    yield "resident memory", "MiB", [after["process_resident_memory_bytes"] / 2**20]


def _series(chain: Chain) -> dict[str, float]:
    """Values of the process metrics by name."""
    text = chain.http.get(f"{chain.exporter_url}/metrics").raise_for_status().text
    pairs = (line.split(" ", 1) for line in text.splitlines() if line.startswith("process_"))
    return {name: float(value) for name, value in pairs}
