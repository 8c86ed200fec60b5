"""A measured exporter: its scrapes, and the resources of its process tree."""

import gzip
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.figures import BenchError
from exporter.sources import processes
from gpuwarden import procfs

SCRAPE_TIMEOUT_S: Final = 10.0
"""Prometheus's default scrape_timeout, seconds."""

ACCEPT: Final = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Text of one scrape, and its size on the wire, bytes."""

    text: bytes
    sent: int

    @property
    def series(self) -> int:
        """Number of series."""
        return sum(bool(line) and line[:1] != b"#" for line in self.text.splitlines())

    def count(self, begin: bytes) -> int:
        """Number of series with this prefix."""
        return sum(line.startswith(begin) for line in self.text.splitlines())


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A running exporter on a loopback port."""

    pid: int
    port: int

    def fetch(self) -> bytes:
        """Scrape once over a new connection; the page may be gzipped.

        Raises:
            BenchError: it does not answer, or not with status 200.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SCRAPE_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics", headers={"Accept": ACCEPT, "Accept-Encoding": "gzip"})
            answer = connection.getresponse()
            page = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"scrape of port {self.port} failed: {error!r}") from None
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise BenchError(f"port {self.port} answered {answer.status}: {page[:200]!r}")
        return page

    def page(self) -> Page:
        """Scrape one page and unpack it."""
        sent = self.fetch()
        return Page(text=gzip.decompress(sent) if sent.startswith(b"\x1f\x8b") else sent, sent=len(sent))

    def sees(self, begin: bytes, *, at_least: int) -> bool:
        """Whether it answers with enough series of this prefix."""
        with suppress(BenchError):
            return self.page().count(begin) >= at_least
        return False

    def cpu_s(self) -> float:
        """CPU seconds of the process tree."""
        used = (processes.cpu_use(pid).used_ticks for pid in processes.process_tree(self.pid))
        return sum(used) / procfs.TICKS_PER_S

    def resident_mib(self) -> float:
        """RAM of the process tree, MiB."""
        return processes.resident_bytes(processes.process_tree(self.pid)) / 2**20

    def descriptors(self) -> int:
        """Open files of the process tree."""
        return sum(len(list((procfs.PROC / str(pid) / "fd").iterdir())) for pid in processes.process_tree(self.pid))

    def threads(self) -> int:
        """Threads of the process tree."""
        return sum(len(list((procfs.PROC / str(pid) / "task").iterdir())) for pid in processes.process_tree(self.pid))


def free_port() -> int:
    """A free loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextmanager
def ours(directory: Path, environment: dict[str, str], engine_url: str) -> Iterator[Subject]:
    """Run `gpuwarden exporter` with the defaults on a free port.

    Raises:
        BenchError: it ends before it is ready.
    """
    directory.mkdir(exist_ok=True)
    (directory / "host").write_text("bench\n", encoding="ascii")
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuwarden", "exporter", "--runtime-dir", directory, "--nvml", "on", "--docker",
         engine_url, "--port", "0"],
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
