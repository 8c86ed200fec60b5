"""What a running exporter costs on a full host: 8 GPUs, 64 containers and 256 GPU processes.

Exporter, processes and cgroups are real (cgroups need root). Fakes replace NVIDIA's library, whose work is part of the
figures, and Docker's API, whose work is not.
"""

import gzip
import time
from collections.abc import Iterator
from typing import Final

from bench.exporter.engine import engine
from bench.exporter.host import host
from bench.exporter.subject import Subject, ours
from bench.figures import Figure, Place, figure, progress, wait_until
from tests.nvml import driver as nvidia

SCRAPES: Final = 300
WATCHED_S: Final = 60.0
"""Duration of the CPU measurement, seconds."""

SCRAPE_EACH_S: Final = 5.0
SETTLE_S: Final = 5.0
READY_S: Final = 30.0


def measure(place: Place) -> Iterator[Figure]:
    """Measure scrapes without pause, then a minute with busy GPUs and a minute with idle GPUs."""
    work = place.folder / "exporter-host"
    work.mkdir()
    progress("exporter on a full host")
    driver = nvidia.Driver(nvidia.build(work), work / "nvml.script")
    with host(driver) as crowd, engine(crowd) as api, ours(work / "run", crowd.environment, api.url) as subject:
        every = len(crowd.containers)
        wait_until(lambda: subject.sees(b"gpuwarden_container_info{", at_least=every), within_s=READY_S,
              what="the exporter lists every container")  # fmt: skip
        took = []
        for _ in range(SCRAPES):
            started_s = time.perf_counter()
            sent = subject.fetch()
            took.append((time.perf_counter() - started_s) * 1000)
        text = gzip.decompress(sent)
        yield figure("exporter", "full host: one scrape over HTTP", "ms", took)
        yield figure("exporter", "full host: series", "", [sum(line[:1] != b"#" for line in text.splitlines())])
        yield figure("exporter", "full host: size of a scrape", "KiB", [len(text) / 1024])
        yield figure("exporter", "full host: the same, packed", "KiB", [len(sent) / 1024])
        what = f"CPU, sampling every second and a scrape each {SCRAPE_EACH_S:g} s"
        for crowd.idle, doing in ((False, "all compute"), (True, "none computes")):
            progress(f"exporter on a full host: {doing}")
            time.sleep(SETTLE_S)
            used_s, passed_s = measure_cpu(subject, WATCHED_S)
            yield figure("exporter", f"full host, {doing}: {what}", "% of a core", [100 * used_s / passed_s])
        yield figure("exporter", "full host: resident memory", "MiB", [subject.resident_mib()])


def measure_cpu(subject: Subject, for_s: float) -> tuple[float, float]:
    """CPU seconds and seconds passed, with a scrape each `SCRAPE_EACH_S`."""
    before_s, started_s = subject.cpu_s(), time.monotonic()
    while time.monotonic() < started_s + for_s:
        time.sleep(SCRAPE_EACH_S)
        subject.fetch()
    return subject.cpu_s() - before_s, time.monotonic() - started_s
