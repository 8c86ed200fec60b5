"""Other exporters: nvitop-exporter from PyPI, node-exporter and process-exporter from Debian packages.

Programs on PATH are preferred. Other Debian packages are unpacked into `.parts`.
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


class PeerMissing(Exception):  # noqa: N818 - named like `PartMissing`
    """An exporter is not installed and cannot be downloaded; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """Series that show that an exporter sees the whole host."""

    begin: bytes
    at_least: int


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One exporter.

    Attributes:
        command: makes its command line from the host, a folder for files and a port; raises `PeerMissing`.
        sign: shows that it is ready.
    """

    name: str
    command: Callable[[Crowd, Path, int], list[str]]
    sign: Callable[[Crowd], Sign]


def _nvitop(_crowd: Crowd, _folder: Path, port: int) -> list[str]:
    """Like ours it samples once a second. `--hostname` avoids a query to the network."""
    if importlib.util.find_spec("nvitop_exporter") is None:
        raise PeerMissing("nvitop_exporter is not installed: pip install -e '.[bench]'")
    return [sys.executable, "-m", "nvitop_exporter", "--hostname", "bench", "--port", str(port)]


def _node(_crowd: Crowd, folder: Path, port: int) -> list[str]:
    """Default collectors. The text file collector needs a folder, or each scrape logs an error."""
    texts = folder / "textfile"
    texts.mkdir(exist_ok=True)
    return [
        _debian("prometheus-node-exporter"),
        f"--web.listen-address=127.0.0.1:{port}",
        f"--collector.textfile.directory={texts}",
    ]


def _process(crowd: Crowd, folder: Path, port: int) -> list[str]:
    """One group per container, without thread names and proportional memory, which cost most and which ours lacks."""
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
    """Configure process-exporter to group by container.

    Its template has the cgroup paths of a process by position, which is the same for all processes of a host.

    Args:
        listing: /proc/PID/cgroup of a process in the container.
        container_id: full id.

    Raises:
        BenchError: no line names the container.
    """
    paths = [line.split(":", 2)[2] for line in listing.splitlines()]
    place = next((place for place, path in enumerate(paths) if path.endswith(f"/{container_id}")), None)
    if place is None:
        raise BenchError(f"no cgroup names container {container_id}: {listing}")
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
    """Run an exporter and wait until it sees the whole host.

    Raises:
        PeerMissing: it is not installed and cannot be downloaded.
        BenchError: it is not ready in time.
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
            wait_until(lambda: _check_runs(process, peer, folder) or subject.sees(sign.begin, at_least=sign.at_least),
                  within_s=READY_S, what=f"{peer.name} sees the host")  # fmt: skip
            yield subject
        finally:
            process.terminate()


def _check_runs(process: subprocess.Popen[bytes], peer: Peer, folder: Path) -> bool:
    if process.poll() is None:
        return False
    last = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise BenchError(f"{peer.name} ended before it was ready: {''.join(last)}")
