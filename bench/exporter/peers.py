"""Exporters beside ours: nvitop-exporter from PyPI, node-exporter and process-exporter from Debian's packages.

Debian's two are used from PATH, else unpacked into `.parts` like the parts of the chain, of which they are none: only
this measurement runs them.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.exporter.host import MARK, Crowd
from bench.exporter.subject import Subject, free_port
from bench.figures import BenchError, wait_until
from deploy.standalone import debian_packages
from gpuwarden import procfs

READY_S: Final = 60.0


class PeerMissing(Exception):  # noqa: N818 - it reads as what happened
    """A peer is not installed and cannot be had; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a peer's page has once it sees all of the host: so many series that begin so."""

    begin: bytes
    at_least: int


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One exporter: how it is started, and by what it is known to be ready.

    `command` is told the host, a folder for its files and the port of loopback on which it is to answer.

    Raises (from `command`):
        PeerMissing: it is not installed and cannot be had.
    """

    name: str
    command: Callable[[Crowd, Path, int], list[str]]
    sign: Callable[[Crowd], Sign]


def _nvitop(_crowd: Crowd, _folder: Path, port: int) -> list[str]:
    """By default it looks once a second, as ours does; it is told the host's name, which it asks the network for."""
    if importlib.util.find_spec("nvitop_exporter") is None:
        raise PeerMissing("there is no nvitop_exporter: pip install -e '.[bench]'")
    return [sys.executable, "-m", "nvitop_exporter", "--hostname", "bench", "--port", str(port)]


def _node(_crowd: Crowd, folder: Path, port: int) -> list[str]:
    """Its default collectors; that of text files has an empty folder, so that no error is written at each scrape."""
    texts = folder / "textfile"
    texts.mkdir(exist_ok=True)
    return [
        _debian("prometheus-node-exporter"),
        f"--web.listen-address=127.0.0.1:{port}",
        f"--collector.textfile.directory={texts}",
    ]


def _process(crowd: Crowd, folder: Path, port: int) -> list[str]:
    """The containers' processes, a group for each container.

    Without the two of its defaults that cost most and tell what ours does not: names of threads and proportional
    memory.
    """
    program, configuration = _debian("prometheus-process-exporter"), folder / "process-exporter.yml"
    box = crowd.containers[0]
    listing = (procfs.PROC / str(box.pids[0]) / "cgroup").read_text(encoding="ascii")
    configuration.write_text(process_groups(listing, box.id), encoding="ascii")
    return [
        program,
        *("-config.path", str(configuration), "-threads=false", "-gather-smaps=false"),
        f"-web.listen-address=127.0.0.1:{port}",
    ]


def process_groups(listing: str, container_id: str) -> str:
    """A configuration of process-exporter that groups by container; `listing` is /proc/PID/cgroup of one in this one.

    Its template has the paths of that file in their order, in which all processes of a host have the same hierarchies.

    Raises:
        BenchError: the container has no line of it.
    """
    paths = [line.split(":", 2)[2] for line in listing.splitlines()]
    place = next((place for place, path in enumerate(paths) if path.endswith(f"/{container_id}")), None)
    if place is None:
        raise BenchError(f"no process of container {container_id} is in it by its cgroups: {listing}")
    return (
        f"process_names:\n  - name: \"{{{{index .Cgroups {place}}}}}\"\n    comm: [sleep]\n    cmdline: [' {MARK}$']\n"
    )


def _debian(program: str) -> str:
    try:
        return shutil.which(program) or str(debian_packages.unpack(program, [program]) / "usr/bin" / program)
    except debian_packages.PartMissing as missing:
        raise PeerMissing(str(missing)) from None


PEERS: Final = (
    Peer(
        name="nvitop-exporter",
        command=_nvitop,
        sign=lambda crowd: Sign(
            begin=b"process_gpu_memory_MiB{", at_least=sum(len(box.pids) for box in crowd.containers)
        ),
    ),
    Peer(name="node-exporter", command=_node, sign=lambda _: Sign(begin=b"node_cpu_seconds_total{", at_least=1)),
    Peer(
        name="process-exporter",
        command=_process,
        sign=lambda crowd: Sign(begin=b"namedprocess_namegroup_num_procs{", at_least=len(crowd.containers)),
    ),
)


@contextmanager
def running(peer: Peer, crowd: Crowd, folder: Path) -> Iterator[Subject]:
    """A peer that sees all of this host.

    Raises:
        PeerMissing: it is not installed and cannot be had.
        BenchError: it was not ready in time.
    """
    folder.mkdir(exist_ok=True)
    port = free_port()
    command = peer.command(crowd, folder, port)
    sign = peer.sign(crowd)
    environment: Mapping[str, str] = {**os.environ, **crowd.environment}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        subject = Subject(pid=process.pid, port=port)
        try:
            wait_until(lambda: _ended(process, peer, folder) or subject.sees(sign.begin, at_least=sign.at_least),
                  within_s=READY_S, what=f"{peer.name} sees the host")  # fmt: skip
            yield subject
        finally:
            process.terminate()


def _ended(process: subprocess.Popen[bytes], peer: Peer, folder: Path) -> bool:
    if process.poll() is None:
        return False
    last = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise BenchError(f"{peer.name} ended before it was ready: {''.join(last)}")
