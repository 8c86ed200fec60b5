"""What the exporter costs on a full host: 8 GPUs, 64 containers and 256 GPU processes, by a running exporter.

Real are the program, the 256 processes and the 64 cgroups they are in (root is needed to make them). The GPUs are those
of the stand-in for NVIDIA's library, whose own work is in the figures; the containers are listed by a stand-in for
Docker's API, whose work is not.
"""

import gzip
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.exporter.engine import engine
from bench.exporter.host import host
from bench.figures import BenchError, Figure, Place, figure, progress, until
from exporter.sources import processes
from tests.nvml import driver as nvidia

SCRAPES: Final = 300
WATCHED_S: Final = 60.0
"""How long it samples once a second and is scraped each `SCRAPE_EACH_S`, while its CPU time is taken, seconds."""

SCRAPE_EACH_S: Final = 5.0
READY_S: Final = 30.0
ACCEPT: Final = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The exporter that is measured."""

    pid: int
    port: int

    def scrape(self) -> bytes:
        """A page as Prometheus asks for it, packed; a connection of its own, as this server gives them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/metrics", headers={"Accept": ACCEPT, "Accept-Encoding": "gzip"})
            return connection.getresponse().read()
        finally:
            connection.close()

    def cpu_s(self) -> float:
        """All the CPU time it has used, and those that it has started with it."""
        used = (processes.cpu_use(pid).used_ticks for pid in processes.tree(self.pid))
        return sum(used) / processes.TICKS_PER_S

    def resident_mib(self) -> float:
        """What they hold in RAM."""
        return processes.resident_bytes(processes.tree(self.pid)) / 2**20


def measure(place: Place) -> Iterator[Figure]:
    """Scrapes one after another, then a minute as it is in production."""
    work = place.folder / "exporter-host"
    work.mkdir()
    progress("exporter on a full host")
    driver = nvidia.Driver(nvidia.build(work), work / "nvml.script")
    with host(driver) as crowd, engine(crowd) as url, _exporter(work, crowd.environment, url) as subject:
        until(lambda: _series(subject, b"gpuwarden_container_info{") == len(crowd.containers), within_s=READY_S,
              what="every container is seen")  # fmt: skip
        took = []
        for _ in range(SCRAPES):
            started_s = time.perf_counter()
            page = subject.scrape()
            took.append((time.perf_counter() - started_s) * 1000)
        text = gzip.decompress(page)
        yield figure("exporter", "full host: one scrape over HTTP", "ms", took)
        yield figure("exporter", "full host: series", "", [sum(line[:1] != b"#" for line in text.splitlines())])
        yield figure("exporter", "full host: size of a scrape", "KiB", [len(text) / 1024])
        yield figure("exporter", "full host: the same, packed", "KiB", [len(page) / 1024])
        used_s, passed_s = _watched(subject)
        what = f"full host: CPU, sampling every second and a scrape each {SCRAPE_EACH_S:g} s"
        yield figure("exporter", what, "% of a core", [100 * used_s / passed_s])
        yield figure("exporter", "full host: resident memory", "MiB", [subject.resident_mib()])


def _series(subject: Subject, begin: bytes) -> int:
    return sum(line.startswith(begin) for line in gzip.decompress(subject.scrape()).splitlines())


def _watched(subject: Subject) -> tuple[float, float]:
    """CPU time and time passed."""
    before_s, started_s = subject.cpu_s(), time.monotonic()
    while time.monotonic() < started_s + WATCHED_S:
        time.sleep(SCRAPE_EACH_S)
        subject.scrape()
    return subject.cpu_s() - before_s, time.monotonic() - started_s


@contextmanager
def _exporter(work: Path, environment: dict[str, str], engine_url: str) -> Iterator[Subject]:
    directory = work / "run"
    directory.mkdir()
    (directory / "host").write_text("bench\n", encoding="ascii")
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuwarden", "exporter", "--dir", directory, "--nvml", "on", "--docker", engine_url,
         "--port", "0"],
        env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        port = None
        while port is None:
            line = process.stderr.readline() if process.stderr else ""
            if not line:
                raise BenchError("the exporter ended before it was ready")
            port = json.loads(line).get("port")
        yield Subject(pid=process.pid, port=port)
    finally:
        process.terminate()
        process.communicate()
