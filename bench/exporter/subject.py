"""An exporter that is measured: scraped as Prometheus does it, and watched from outside with all it has started."""

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
"""As long as Prometheus waits by default (its scrape_timeout), seconds."""

ACCEPT: Final = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@dataclass(frozen=True, kw_only=True)
class Page:
    """What one scrape was answered: the text, and how many bytes of it were sent."""

    text: bytes
    sent: int

    @property
    def series(self) -> int:
        """How many there are."""
        return sum(bool(line) and line[:1] != b"#" for line in self.text.splitlines())

    def count(self, begin: bytes) -> int:
        """How many series begin so."""
        return sum(line.startswith(begin) for line in self.text.splitlines())


@dataclass(frozen=True, kw_only=True)
class Subject:
    """It runs, and answers on this port of loopback."""

    pid: int
    port: int

    def fetch(self) -> bytes:
        """One page as it is sent, packed by whoever packs; over a connection of its own, which not all keep open.

        Raises:
            BenchError: it did not answer, or another status than 200.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SCRAPE_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics", headers={"Accept": ACCEPT, "Accept-Encoding": "gzip"})
            answer = connection.getresponse()
            page = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"no page came from port {self.port}: {error!r}") from None
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise BenchError(f"port {self.port} answered {answer.status}: {page[:200]!r}")
        return page

    def page(self) -> Page:
        """One page, unpacked."""
        sent = self.fetch()
        return Page(text=gzip.decompress(sent) if sent.startswith(b"\x1f\x8b") else sent, sent=len(sent))

    def sees(self, begin: bytes, *, at_least: int) -> bool:
        """Whether it answers already, with so many series that begin so."""
        with suppress(BenchError):
            return self.page().count(begin) >= at_least
        return False

    def cpu_s(self) -> float:
        """All the CPU time it has used, and those that it has started with it."""
        used = (processes.cpu_use(pid).used_ticks for pid in processes.process_tree(self.pid))
        return sum(used) / procfs.TICKS_PER_S

    def resident_mib(self) -> float:
        """What they hold in RAM."""
        return processes.resident_bytes(processes.process_tree(self.pid)) / 2**20

    def descriptors(self) -> int:
        """The files they have open."""
        return sum(len(list((procfs.PROC / str(pid) / "fd").iterdir())) for pid in processes.process_tree(self.pid))

    def threads(self) -> int:
        """Their threads."""
        return sum(len(list((procfs.PROC / str(pid) / "task").iterdir())) for pid in processes.process_tree(self.pid))


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextmanager
def ours(directory: Path, environment: dict[str, str], engine_url: str) -> Iterator[Subject]:
    """`gpuwarden exporter` on these state files, this driver and this engine, as delivered but for a free port.

    Raises:
        BenchError: it ended before it was ready.
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
