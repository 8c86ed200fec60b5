"""The commands of a play: workers, a sweeper, and the gateways between workers and the queue."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.standalone import ports
from gpuwarden.queue import JobStore

LEASE_S: Final = 3.0
HEARTBEAT_S: Final = 1.0
RENEWAL_S: Final = 2 * HEARTBEAT_S
"""How long a lease must have expired before the sweeper requeues the job."""

WORKERS: Final = 6
QUEUE: Final = "chaos"
HOSTS: Final = ("chaos", "chaos-2")
"""Without gateways, all workers are on the first."""

_GPUWARDEN: Final = (sys.executable, "-m", "gpuwarden")


@dataclass(kw_only=True)
class Process:
    """One slot, and its process, if any."""

    name: str
    command: Sequence[str]
    port: int = 0
    popen: subprocess.Popen[bytes] | None = None
    start_at_s: float = 0.0
    stopped_at_s: float | None = None
    resume_at_s: float = 0.0

    @property
    def is_running(self) -> bool:
        """Whether it exists and is not stopped."""
        return self.popen is not None and self.stopped_at_s is None

    @property
    def is_listening(self) -> bool:
        """Whether its port is taken."""
        try:
            ports.check(self.port)
        except OSError:
            return True
        return False


def sweeper(url: str) -> Process:
    """The sweeper of leases and events."""
    return Process(name="sweeper", command=[sys.executable, "-m", "bench.chaos.sweeper", url, str(RENEWAL_S)])


def workers(folder: Path, url: str, *, through_gateways: bool) -> list[Process]:
    """The workers: on one host with the database, or on two hosts that have only a gateway."""
    found = []
    for number in range(WORKERS):
        name, directory = f"w{number}", folder / HOSTS[number % 2 if through_gateways else 0]
        (directory / name).mkdir(parents=True, exist_ok=True)
        its = ["worker", "run", "--handler", "bench.chaos.body:load", "--queue", QUEUE, "--name", name]
        its += ["--queue-db", "gateway" if through_gateways else url, "--runtime-dir", str(directory)]
        its += ["--log-level", "warning", "--lease-s", str(LEASE_S), "--heartbeat-s", str(HEARTBEAT_S)]
        found.append(Process(name=name, command=[*_GPUWARDEN, *its]))
        (directory / "host").write_text(f"{directory.name}\n", encoding="ascii")
    return found


def gateways(folder: Path, url: str, store: JobStore) -> list[Process]:
    """Two central gateways, and in front of each the gateway of a host."""
    found = []
    for host, central, own in zip(HOSTS, ports.free_ports(2), ports.free_ports(2), strict=True):
        token = folder / host / "token"
        token.write_text(store.host_tokens.enrol(host, now=store.now()), encoding="ascii")
        ends = ["gateway", "central", "--queue-db", url, "--port", str(central)]
        its = ["gateway", "host", "--central", f"http://127.0.0.1:{central}", "--token-file", str(token)]
        its += ["--runtime-dir", str(folder / host), "--port", str(own)]
        for name, command, port in ((f"central of {host}", ends, central), (f"host {host}", its, own)):
            found.append(Process(name=name, command=[*_GPUWARDEN, *command, "--log-level", "warning"], port=port))
    return found
