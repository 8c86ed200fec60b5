"""What the exporter costs on a full host: 8 GPUs, 64 containers and 256 GPU processes, by a running exporter.

Real are the program, the 256 processes and the 64 cgroups they are in (root is needed to make them). The GPUs are those
of the stand-in for NVIDIA's library, whose own work is in the figures; the containers are listed by a stand-in for
Docker's API, whose work is not.
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
"""How long it samples once a second and is scraped each `SCRAPE_EACH_S`, while its CPU time is taken, seconds."""

SCRAPE_EACH_S: Final = 5.0
SETTLE_S: Final = 5.0
READY_S: Final = 30.0


def measure(place: Place) -> Iterator[Figure]:
    """Scrapes one after another, then a minute as it is in production, and one in which no GPU has anything to do."""
    work = place.folder / "exporter-host"
    work.mkdir()
    progress("exporter on a full host")
    driver = nvidia.Driver(nvidia.build(work), work / "nvml.script")
    with host(driver) as crowd, engine(crowd) as api, ours(work / "run", crowd.environment, api.url) as subject:
        every = len(crowd.containers)
        wait_until(lambda: subject.sees(b"gpuwarden_container_info{", at_least=every), within_s=READY_S,
              what="every container is seen")  # fmt: skip
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
            used_s, passed_s = watched(subject, WATCHED_S)
            yield figure("exporter", f"full host, {doing}: {what}", "% of a core", [100 * used_s / passed_s])
        yield figure("exporter", "full host: resident memory", "MiB", [subject.resident_mib()])


def watched(subject: Subject, for_s: float) -> tuple[float, float]:
    """CPU time and time passed, with a scrape each `SCRAPE_EACH_S`."""
    before_s, started_s = subject.cpu_s(), time.monotonic()
    while time.monotonic() < started_s + for_s:
        time.sleep(SCRAPE_EACH_S)
        subject.fetch()
    return subject.cpu_s() - before_s, time.monotonic() - started_s
