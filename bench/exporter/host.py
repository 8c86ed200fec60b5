"""A full host: 64 containers of 4 processes, each on the two GPUs of its container, 256 processes on 8 GPUs in all.

A container is a cgroup as Docker makes it, named by a full id, and its processes sleep.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.figures import BenchError, until
from gpuwarden import cgroup
from tests.nvml.driver import Card, Driver, Sample

CONTAINERS: Final = 64
PROCESSES_EACH: Final = 4
GPUS: Final = 8
GPUS_EACH: Final = 2
GONE_S: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class Box:
    """One container."""

    number: int
    id: str
    pids: tuple[int, ...]
    gpus: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """The host's containers, and the environment in which its driver is found."""

    containers: tuple[Box, ...]
    environment: dict[str, str]


@contextmanager
def host(driver: Driver) -> Iterator[Crowd]:
    """Make it, and take it away again.

    Raises:
        BenchError: no cgroups can be made here.
    """
    root = _root()
    processes: list[subprocess.Popen[bytes]] = []
    boxes: list[Box] = []
    groups: list[Path] = []
    try:
        for number in range(CONTAINERS):
            full_id = f"{number:064x}"
            group = root / full_id
            try:
                group.mkdir(parents=True)
            except OSError as error:
                raise BenchError(f"no cgroup can be made at {group} ({error.strerror}): root is needed") from None
            groups.append(group)
            inside = [subprocess.Popen(["sleep", "infinity"]) for _ in range(PROCESSES_EACH)]
            processes += inside
            for each in inside:
                (group / "cgroup.procs").write_text(str(each.pid), encoding="ascii")
            gpus = tuple((number * GPUS_EACH + each) % GPUS for each in range(GPUS_EACH))
            boxes.append(Box(number=number, id=full_id, pids=tuple(each.pid for each in inside), gpus=gpus))
        driver.answer(*(_card(index, boxes) for index in range(GPUS)))
        yield Crowd(containers=tuple(boxes), environment=driver.environment)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for group in (*groups, root):
            with suppress(BenchError):
                until(lambda group=group: _removed(group), within_s=GONE_S, what=f"{group} is gone")  # type: ignore[misc]


def _root() -> Path:
    """Where this bench's cgroups are: where memory is accounted, in version 1 or 2."""
    name = f"gpuwarden-bench-{os.getpid()}"
    if (cgroup.ROOT / "memory").is_dir():
        return cgroup.ROOT / "memory" / name
    with suppress(OSError):
        (cgroup.ROOT / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        (cgroup.ROOT / name).mkdir()
        (cgroup.ROOT / name / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
    return cgroup.ROOT / name


def _removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def _card(index: int, boxes: list[Box]) -> Card:
    """A GPU with one process of each container that has it for every GPU that one has."""
    pids = [pid for box in boxes if index in box.gpus for pid in box.pids[box.gpus.index(index) :: GPUS_EACH]]
    return Card(
        uuid=f"GPU-{index}",
        size_bytes=80 * 2**30,
        used_bytes=len(pids) * 2**28,
        utilization=90,
        compute=dict.fromkeys(pids, 2**28),
        samples=tuple(Sample(pid=pid, timestamp_us=10**6, sm=2) for pid in pids),
    )
