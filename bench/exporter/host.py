"""A full host: 8 GPUs and 64 containers of 4 processes, two on each of the container's two GPUs.

A container is a cgroup like those of Docker. Its processes sleep, and a fake driver reports their GPU use with new
samples each second.
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
UPDATE_EACH_S: Final = 1.0
BUSY_PERCENT: Final = (2, 3, 4)
"""GPU use of each busy process, in turns: 32 processes nearly fill a GPU, and every sample differs from the last."""

MARK: Final = str(os.getpid())
"""Last argument of every process in the containers."""

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
"""Constant readings of a data centre GPU without fan and NVLink."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """One container."""

    number: int
    id: str
    pids: tuple[int, ...]
    gpus: tuple[int, ...]


class Crowd:
    """The current containers of the host. Call `update_driver` after a start or an end.

    Their processes are busy unless `idle` is set.
    """

    def __init__(self, driver: Driver, roots: Sequence[Path]) -> None:
        self.containers: list[Box] = []
        self.idle = False
        self.environment = driver.environment
        """Environment variables that select the fake driver."""
        self._driver = driver
        self._roots = roots
        self._inside: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._updates = 0
        self._updating = threading.Lock()

    def start(self, number: int, *, run: Callable[[Path], tuple[int, ...]] | None = None) -> Box:
        """Start a container with sleeping processes.

        Args:
            number: of the container.
            run: starts other processes in the cgroup instead, which the caller must end.

        Raises:
            BenchError: cgroups cannot be made.
        """
        full_id = f"{number:064x}"
        groups = [root / full_id for root in self._roots]
        try:
            for group in groups:
                group.mkdir(parents=True)
        except OSError as error:
            raise BenchError(f"cannot make cgroup {group} ({error.strerror}): run as root") from None
        inside = self._inside[full_id] = []
        # `sleep` adds its arguments up; the last one marks the process.
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
        """Kill its processes and remove its cgroup."""
        self.containers.remove(box)
        self._end(box.id)

    def update_driver(self) -> None:
        """Have the driver list the current processes, with a new sample of each."""
        with self._updating:
            self._updates += 1
            boxes, busy = tuple(self.containers), not self.idle
            self._driver.answer(*(_card(index, boxes, self._updates, busy=busy) for index in range(GPUS)))

    def close(self) -> None:
        """End all containers."""
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
                wait_until(partial(_try_remove, group), within_s=GONE_S, what=f"{group} is gone")


@contextmanager
def host(driver: Driver, *, containers: int = CONTAINERS) -> Iterator[Crowd]:
    """Run the host's containers.

    Raises:
        BenchError: cgroups cannot be made.
    """
    crowd, ending = Crowd(driver, _roots()), threading.Event()

    def update() -> None:
        while not ending.wait(UPDATE_EACH_S):
            crowd.update_driver()

    updating = threading.Thread(target=update, name="driver")
    try:
        for number in range(containers):
            crowd.start(number)
        crowd.update_driver()
        updating.start()
        yield crowd
    finally:
        ending.set()
        if updating.ident is not None:
            updating.join()
        crowd.close()


def _roots() -> list[Path]:
    """Parents of the cgroups: one, or with version 1 one in each hierarchy that the exporter reads, memory first."""
    name = f"gpuwarden-bench-{os.getpid()}"
    if (cgroup.ROOT / "memory").is_dir():
        return [cgroup.ROOT / each / name for each in ("memory", "cpuacct") if (cgroup.ROOT / each).is_dir()]
    with suppress(OSError):
        (cgroup.ROOT / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        (cgroup.ROOT / name).mkdir()
        (cgroup.ROOT / name / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
    return [cgroup.ROOT / name]


def _try_remove(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


def _card(index: int, boxes: Sequence[Box], update: int, *, busy: bool) -> Card:
    """One GPU, with the processes of each container in turns over its GPUs."""
    pids = [pid for box in boxes if index in box.gpus for pid in box.pids[box.gpus.index(index) :: GPUS_EACH]]
    used = {pid: BUSY_PERCENT[(place + update) % len(BUSY_PERCENT)] for place, pid in enumerate(pids)} if busy else {}
    return Card(
        uuid=f"GPU-{index}",
        size_bytes=80 * 2**30,
        used_bytes=len(pids) * 2**28,
        utilization=min(100, sum(used.values())),
        compute=dict.fromkeys(pids, 2**28),
        samples=tuple(Sample(pid=pid, timestamp_us=update * 10**6, sm=percent) for pid, percent in used.items()),
        figures=(
            f"nvmlDeviceGetTemperature 0 {60 + update % 4}",
            f"nvmlDeviceGetPowerUsage 0 {310_000 + update % 100 * 250}",
            *_SENSORS,
        ),
    )
