"""For how long the processes of a container have done nothing: no I/O, no page faults, no CPU time. Pure."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from exporter.evidence.windows import ProcessStarts, StillRate
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import ProcessWork


@dataclass(frozen=True, kw_only=True)
class WorkUse:
    """What each process of one container has done up to now, by pid; `None`, or its I/O alone, where unknown."""

    processes: Mapping[int, ProcessWork] | None
    unknown: Unknown | None = None


def work_of(work: WorkUse, pids: AbstractSet[int]) -> WorkUse:
    """What some of a container's processes have done, by one look at all of them."""
    if work.processes is None:
        return work
    return replace(work, processes={pid: each for pid, each in work.processes.items() if pid in pids})


NOT_LOOKED_AT: Final = WorkUse(processes=None)


class WorkStill(NamedTuple):
    """For how long each has been still, seconds; `None` where unknown."""

    io_still_s: float | None = None
    fault_still_s: float | None = None
    cpu_still_s: float | None = None


class WorkTracker:
    """What the processes of a container did, one look after another."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._work: Mapping[int, ProcessWork] | None = None
        self._starts = ProcessStarts()
        self._io = StillRate(thresholds.io_still_bytes_per_s)
        self._faults = StillRate(thresholds.faults_still_per_s)
        self._cpu = StillRate(thresholds.cpu_still_ratio)

    def observe(self, work: WorkUse, *, now_s: float) -> WorkStill:
        """For how long I/O, page faults and CPU time have been still; what processes do as they start is left out."""
        if work.processes is None:
            self.forget()
            return WorkStill()
        before, self._work = self._work if self._work is not None else work.processes, work.processes
        # The source gives the same object again of a process that has done nothing, as most have.
        changed = {pid: each for pid, each in work.processes.items() if before.get(pid) is not each}
        new = frozenset(pid for pid, each in changed.items() if _is_new(before.get(pid), each))
        starting = self._starts.left_out(new, now_s)
        done = [_work_since(before.get(pid), each) for pid, each in changed.items() if pid not in starting]
        faults_still_s = self._faults.add(now_s, sum(each.faults for each in done))
        cpu_still_s = self._cpu.add(now_s, sum(each.cpu_s for each in done))
        sizes = [each.io_bytes for each in done]
        if None in sizes or any(each.io_bytes is None for each in work.processes.values()):
            self._io.forget()
            return WorkStill(None, faults_still_s, cpu_still_s)
        io_still_s = self._io.add(now_s, sum(size or 0 for size in sizes))
        return WorkStill(io_still_s, faults_still_s, cpu_still_s)

    def forget(self) -> None:
        """Begin again, as at the first look."""
        self._work = None
        self._starts = ProcessStarts()
        for rate in (self._io, self._faults, self._cpu):
            rate.forget()


def _is_new(before: ProcessWork | None, now: ProcessWork) -> bool:
    return before is None or before.start_ticks != now.start_ticks


def _work_since(before: ProcessWork | None, now: ProcessWork) -> ProcessWork:
    """What a process has done since it was last looked at; one that was not there then has done all of it since."""
    if before is None or before.start_ticks != now.start_ticks:
        return now
    io_bytes = None
    if now.io_bytes is not None and before.io_bytes is not None:
        io_bytes = max(0, now.io_bytes - before.io_bytes)
    faults, cpu_s = max(0, now.faults - before.faults), max(0.0, now.cpu_s - before.cpu_s)
    return ProcessWork(now.start_ticks, io_bytes, faults, cpu_s)
