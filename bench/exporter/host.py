"""A full host: 64 containers of 4 processes, two on each of its two GPUs, 256 processes on 8 GPUs in all.

A container is a cgroup as Docker makes it, named by a full id, and its processes sleep; that they compute is what the
stand-in for the driver says, which has new samples of each, each second.
"""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from bench.figures import BenchError, wait_until
from exporter.sources.gpu.nvml.pcie import FIELDS
from gpuwarden import cgroup
from tests.nvml.driver import Card, Driver, Sample

CONTAINERS: Final = 64
PROCESSES_EACH: Final = 4
GPUS: Final = 8
GPUS_EACH: Final = 2
GONE_S: Final = 10.0
TOLD_EACH_S: Final = 1.0
BUSY_PERCENT: Final = (2, 3, 4)
"""What each process that computes uses of its GPU, by turns: 32 of them nearly all of it, and by two a container is not
idle. No look finds what the last one has found."""

MARK: Final = str(os.getpid())
"""The last argument of every process of this host's containers."""

_SENSORS: Final = (
    "nvmlDeviceGetEnforcedPowerLimit 0 700000",
    "nvmlDeviceGetPowerManagementLimit 0 700000",
    *(f"nvmlDeviceGetClockInfo {clock} 1980" for clock in range(4)),
    "nvmlDeviceGetCurrentClocksThrottleReasons 0 4",
    *(f"nvmlDeviceGetTotalEccErrors {counter} 0" for counter in range(4)),
    "nvmlDeviceGetPcieReplayCounter 0 0",
    "nvmlDeviceGetRemappedRows 0 0 0 0 0",
    "nvmlDeviceGetEncoderUtilization 0 0 167000",
    "nvmlDeviceGetDecoderUtilization 0 0 167000",
    *(f"nvmlDeviceGetPcieThroughput {counter} 1000" for counter in range(2)),
    *(f"nvmlDeviceGetFieldValues {field} 0" for field in FIELDS.values()),
)
"""What a GPU of a data centre tells beside its use: it has no fan of its own, and these have no NVLink. Temperature and
power, which never stand still, come beside them."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """One container."""

    number: int
    id: str
    pids: tuple[int, ...]
    gpus: tuple[int, ...]


class Crowd:
    """The host's containers as they are now; who starts or ends one has `tell` let the driver know.

    Their processes compute, unless they are set to be `idle`.
    """

    def __init__(self, driver: Driver, roots: Sequence[Path]) -> None:
        self.containers: list[Box] = []
        self.idle = False
        self.environment = driver.environment
        """That in which its driver is found."""
        self._driver = driver
        self._roots = roots
        self._inside: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._told = 0
        self._telling = threading.Lock()

    def start(self, number: int, *, run: Callable[[Path], tuple[int, ...]] | None = None) -> Box:
        """A container of this number, with processes that sleep.

        With `run`, the processes that it starts in the cgroup it is given instead, whose end is up to their owner.

        Raises:
            BenchError: no cgroups can be made here.
        """
        full_id = f"{number:064x}"
        groups = [root / full_id for root in self._roots]
        try:
            for group in groups:
                group.mkdir(parents=True)
        except OSError as error:
            raise BenchError(f"no cgroup can be made at {group} ({error.strerror}): root is needed") from None
        inside = self._inside[full_id] = []
        # It sleeps the sum of its arguments; the last tells whose process this is among others of the machine.
        command = ["sleep", "infinity", MARK]
        inside.extend(subprocess.Popen(command) for _ in range(PROCESSES_EACH if run is None else 0))
        pids = tuple(each.pid for each in inside) if run is None else run(groups[0])
        for group in groups:
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
        gpus = tuple((number * GPUS_EACH + each) % GPUS for each in range(GPUS_EACH))
        box = Box(number=number, id=full_id, pids=pids, gpus=gpus)
        self.containers.append(box)
        return box

    def end(self, box: Box) -> None:
        """Its processes are killed and its cgroup is removed."""
        self.containers.remove(box)
        self._end(box.id)

    def tell(self) -> None:
        """The driver answers with the processes of these containers, and has sampled all since the last time."""
        with self._telling:
            self._told += 1
            boxes, computes = tuple(self.containers), not self.idle
            self._driver.answer(*(_card(index, boxes, self._told, computes=computes) for index in range(GPUS)))

    def close(self) -> None:
        """All end."""
        for inside in self._inside.values():
            for process in inside:
                process.kill()
        for full_id in list(self._inside):
            self._end(full_id)
        self._remove(self._roots)

    def _end(self, full_id: str) -> None:
        for process in self._inside.pop(full_id):
            process.kill()
            process.wait()
        self._remove([root / full_id for root in self._roots])

    @staticmethod
    def _remove(groups: Sequence[Path]) -> None:
        for group in groups:
            with suppress(BenchError):
                wait_until(partial(_removed, group), within_s=GONE_S, what=f"{group} is gone")


@contextmanager
def host(driver: Driver, *, containers: int = CONTAINERS) -> Iterator[Crowd]:
    """Make it, and take it away again.

    Raises:
        BenchError: no cgroups can be made here.
    """
    crowd, ending = Crowd(driver, _roots()), threading.Event()

    def tell_on() -> None:
        while not ending.wait(TOLD_EACH_S):
            crowd.tell()

    telling = threading.Thread(target=tell_on, name="driver")
    try:
        for number in range(containers):
            crowd.start(number)
        crowd.tell()
        telling.start()
        yield crowd
    finally:
        ending.set()
        if telling.ident is not None:
            telling.join()
        crowd.close()


def _roots() -> list[Path]:
    """Where this bench's cgroups are: of version 1 in the two hierarchies that the exporter reads, memory's first.

    Docker makes a container's group in each hierarchy.
    """
    name = f"gpuwarden-bench-{os.getpid()}"
    if (cgroup.ROOT / "memory").is_dir():
        return [cgroup.ROOT / each / name for each in ("memory", "cpuacct") if (cgroup.ROOT / each).is_dir()]
    with suppress(OSError):
        (cgroup.ROOT / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        (cgroup.ROOT / name).mkdir()
        (cgroup.ROOT / name / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
    return [cgroup.ROOT / name]


def _removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def _card(index: int, boxes: Sequence[Box], told: int, *, computes: bool) -> Card:
    """A GPU with one process of each container that has it for every GPU that one has."""
    pids = [pid for box in boxes if index in box.gpus for pid in box.pids[box.gpus.index(index) :: GPUS_EACH]]
    used = {pid: BUSY_PERCENT[(place + told) % len(BUSY_PERCENT)] for place, pid in enumerate(pids)} if computes else {}
    return Card(
        uuid=f"GPU-{index}",
        size_bytes=80 * 2**30,
        used_bytes=len(pids) * 2**28,
        utilization=min(100, sum(used.values())),
        compute=dict.fromkeys(pids, 2**28),
        samples=tuple(Sample(pid=pid, timestamp_us=told * 10**6, sm=percent) for pid, percent in used.items()),
        figures=(
            f"nvmlDeviceGetTemperature 0 {60 + told % 4}",
            f"nvmlDeviceGetPowerUsage 0 {310_000 + told % 100 * 250}",
            *_SENSORS,
        ),
    )
