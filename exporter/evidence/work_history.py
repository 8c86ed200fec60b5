"""How long a container has done no I/O, page faults or CPU work. Pure."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from exporter.evidence.windows import IdleRate, ProcessStarts
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import ProcessWork

HEAVY_CPU_RATIO: Final = 0.9
HEAVY_FAULTS_PER_S: Final = 400.0
HEAVY_IO_BYTES_PER_S: Final = 16.0 * 2**20
"""Work that counts in steps (A5)."""


@dataclass(frozen=True, kw_only=True)
class ContainerWork:
    """Totals of each process of one container, by pid; `None` if unknown."""

    processes: Mapping[int, ProcessWork] | None
    unknown: Unknown | None = None


def select_work(work: ContainerWork, pids: AbstractSet[int]) -> ContainerWork:
    """Return the totals of some of a container's processes."""
    if work.processes is None:
        return work
    return replace(work, processes={pid: each for pid, each in work.processes.items() if pid in pids})


NOT_SAMPLED: Final = ContainerWork(processes=None)


class WorkStill(NamedTuple):
    """Seconds without each kind of work; `None` is unknown."""

    io_idle_s: float | None = None
    page_fault_idle_s: float | None = None
    cpu_idle_s: float | None = None
    heavy_work_idle_s: float | None = None
    heavy_page_fault_idle_s: float | None = None


class WorkTracker:
    """Work of a container's processes over time."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._work: Mapping[int, ProcessWork] | None = None
        self._starts = ProcessStarts()
        self._io = IdleRate(thresholds.io_idle_bytes_per_s)
        self._faults = IdleRate(thresholds.page_faults_idle_per_s)
        self._cpu = IdleRate(thresholds.cpu_idle_ratio)
        self._heavy_io = IdleRate(HEAVY_IO_BYTES_PER_S)
        self._heavy_faults = IdleRate(HEAVY_FAULTS_PER_S)
        self._heavy_cpu = IdleRate(HEAVY_CPU_RATIO)

    def observe(self, work: ContainerWork, *, now_s: float) -> WorkStill:
        """Add one sample; returns seconds without each kind of work."""
        if work.processes is None:
            self.forget()
            return WorkStill()
        before, self._work = self._work if self._work is not None else work.processes, work.processes
        # The source returns the same object for a process that did nothing.
        changed = {pid: each for pid, each in work.processes.items() if before.get(pid) is not each}
        new = frozenset(pid for pid, each in changed.items() if _is_new(before.get(pid), each))
        starting = self._starts.skip_starting(new, now_s)
        done = [_work_since(before.get(pid), each) for pid, each in changed.items() if pid not in starting]
        faults, cpu_s = sum(each.faults for each in done), sum(each.cpu_s for each in done)
        faults_still_s, cpu_idle_s = self._faults.add(now_s, faults), self._cpu.add(now_s, cpu_s)
        # Threads that poll a GPU use a CPU and fault no page: only both together are work.
        heavy_fault_idle_s = self._heavy_faults.add(now_s, faults)
        computing_idle_s = max(heavy_fault_idle_s, self._heavy_cpu.add(now_s, cpu_s))
        sizes = [each.io_bytes for each in done]
        if None in sizes or any(each.io_bytes is None for each in work.processes.values()):
            self._io.forget()
            self._heavy_io.forget()
            return WorkStill(None, faults_still_s, cpu_idle_s, None, heavy_fault_idle_s)
        io_bytes = sum(size or 0 for size in sizes)
        io_idle_s, heavy_io_idle_s = self._io.add(now_s, io_bytes), self._heavy_io.add(now_s, io_bytes)
        heavy_work_idle_s = min(computing_idle_s, heavy_io_idle_s)
        return WorkStill(io_idle_s, faults_still_s, cpu_idle_s, heavy_work_idle_s, heavy_fault_idle_s)

    def forget(self) -> None:
        """Restart, as at the first sample."""
        self._work = None
        self._starts = ProcessStarts()
        for rate in (self._io, self._faults, self._cpu, self._heavy_io, self._heavy_faults, self._heavy_cpu):
            rate.forget()


def _is_new(before: ProcessWork | None, now: ProcessWork) -> bool:
    return before is None or before.start_ticks != now.start_ticks


def _work_since(before: ProcessWork | None, now: ProcessWork) -> ProcessWork:
    if before is None or before.start_ticks != now.start_ticks:
        return now
    io_bytes = None
    if now.io_bytes is not None and before.io_bytes is not None:
        io_bytes = max(0, now.io_bytes - before.io_bytes)
    faults, cpu_s = max(0, now.faults - before.faults), max(0.0, now.cpu_s - before.cpu_s)
    return ProcessWork(now.start_ticks, io_bytes, faults, cpu_s)
