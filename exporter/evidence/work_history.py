"""For how long the processes of a container have done nothing: no I/O, no page faults, no CPU time. Pure."""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from exporter.evidence.gpu_attribution import NO_GPU, GpuUse
from exporter.evidence.windows import ProcessStarts, StillRate
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import ProcessWork

WORK_APART_S: Final = 3.0
"""How far apart looks at the work of a container are whose GPU is pegged or unknown and that worked within `WORKED_S`,
seconds: it is not still for long enough, and to read hundreds of processes a second would cost the most."""

BUSY_APART_S: Final = 10.0
"""And of one that is seen to use its GPU in part, seconds: no stillness of its processes is proof of anything then.
What begins and ends between two such looks is not seen, so that none is told: it counts from looks that are closer."""

WORKED_S: Final = 30.0
"""Who worked within this time is not still for as long as any condition asks, seconds."""


@dataclass(frozen=True, kw_only=True)
class WorkUse:
    """What each process of one container has done up to now, by pid; `None`, or its I/O alone, where unknown."""

    processes: Mapping[int, ProcessWork] | None
    unknown: Unknown | None = None


def work_of(work: WorkUse, pids: AbstractSet[int]) -> WorkUse:
    """What some of a container's processes have done, by one look at all of them."""
    if work.processes is None:  # which `AS_IT_WAS` is too, and stays
        return work
    return replace(work, processes={pid: each for pid, each in work.processes.items() if pid in pids})


NOT_LOOKED_AT: Final = WorkUse(processes=None)


AS_IT_WAS: Final = WorkUse(processes=None)
"""Instead of a look at the work: it is not this look's turn, and what was told stands until it is."""


class WorkStill(NamedTuple):
    """For how long each has been still, seconds; `None` where unknown."""

    io_still_s: float | None = None
    fault_still_s: float | None = None
    cpu_still_s: float | None = None


class WorkTracker:
    """What the processes of a container did, one look after another."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._work: Mapping[int, ProcessWork] | None = None
        self._looked_s: float | None = None
        self._told: tuple[WorkStill, Unknown | None] = (WorkStill(), None)
        self._starts = ProcessStarts()
        self._io = StillRate(thresholds.io_still_bytes_per_s)
        self._faults = StillRate(thresholds.faults_still_per_s)
        self._cpu = StillRate(thresholds.cpu_still_ratio)

    def wants(self, gpu: GpuUse, *, now_s: float, lost: Collection[str] = ()) -> bool:
        """Whether this look is to read what the processes have done; else `observe` is given `AS_IT_WAS`.

        Each look is, while their stillness may count, to the second: while the GPUs are idle or there are none, or one
        is lost, and, while they are pegged or unknown, of who has done no I/O and touched no memory for a while.
        """
        last_s, ratio, limits = self._looked_s, gpu.utilization_ratio, self._thresholds
        if last_s is None or not 0 <= now_s - last_s < BUSY_APART_S:
            return True
        if ratio is None and gpu.unknown is not None and gpu.unknown.reason == NO_GPU:
            return True
        if lost and not set(lost).isdisjoint(gpu.gpus):
            return True
        if ratio is not None and ratio < limits.pegged_ratio:
            return ratio <= limits.idle_ratio
        (io_still_s, fault_still_s, _), _ = self._told
        return now_s - last_s >= WORK_APART_S or min(io_still_s or 0.0, fault_still_s or 0.0) >= WORKED_S

    def observe(self, work: WorkUse, *, now_s: float) -> tuple[WorkStill, Unknown | None]:
        """Take in one look; returns also why its work is unknown, where it is."""
        if work is not AS_IT_WAS:
            self._told = self._still(work, now_s), work.unknown
        return self._told

    def forget(self) -> None:
        """Begin again, as at the first look."""
        self._work = self._looked_s = None
        self._starts = ProcessStarts()
        for rate in (self._io, self._faults, self._cpu):
            rate.forget()

    def _still(self, work: WorkUse, now_s: float) -> WorkStill:
        """For how long I/O, page faults and CPU time have been still; what processes do as they start is left out."""
        if work.processes is None:
            self.forget()
            return WorkStill()
        before, self._work = self._work if self._work is not None else work.processes, work.processes
        seen = self._looked_s is None or now_s - self._looked_s <= self._thresholds.gap_max_s
        self._looked_s = now_s
        if before is work.processes and work.unknown is None:  # none of them has run since
            self._starts.left_out(frozenset(), now_s)
            return WorkStill(
                self._io.add(now_s, 0.0, seen=seen),
                self._faults.add(now_s, 0.0, seen=seen),
                self._cpu.add(now_s, 0.0, seen=seen),
            )
        new = frozenset(pid for pid, process in work.processes.items() if _is_new(before.get(pid), process))
        starting = self._starts.left_out(new, now_s)
        done = [
            _nothing_of(process) if pid in starting else _work_since(before.get(pid), process)
            for pid, process in work.processes.items()
        ]
        faults_still_s = self._faults.add(now_s, sum(each.faults for each in done), seen=seen)
        cpu_still_s = self._cpu.add(now_s, sum(each.cpu_s for each in done), seen=seen)
        sizes = [each.io_bytes for each in done]
        if None in sizes:
            self._io.forget()
            return WorkStill(None, faults_still_s, cpu_still_s)
        io_still_s = self._io.add(now_s, sum(size or 0 for size in sizes), seen=seen)
        return WorkStill(io_still_s, faults_still_s, cpu_still_s)


_NOTHING: Final = ProcessWork(start_ticks=0, io_bytes=0, faults=0, cpu_s=0.0)


def _is_new(before: ProcessWork | None, now: ProcessWork) -> bool:
    return before is None or before.start_ticks != now.start_ticks


def _nothing_of(now: ProcessWork) -> ProcessWork:
    """As if it had done nothing; what is unknown stays so."""
    return _NOTHING if now.io_bytes is not None else replace(_NOTHING, io_bytes=None)


def _work_since(before: ProcessWork | None, now: ProcessWork) -> ProcessWork:
    """What a process has done since it was last looked at; one that was not there then has done all of it since."""
    if before is now and now.io_bytes is not None:
        return _NOTHING
    if before is None or before.start_ticks != now.start_ticks:
        return now
    unknown = now.io_bytes is None or before.io_bytes is None
    return ProcessWork(
        start_ticks=now.start_ticks,
        io_bytes=None if unknown else max(0, (now.io_bytes or 0) - (before.io_bytes or 0)),
        faults=max(0, now.faults - before.faults),
        cpu_s=max(0.0, now.cpu_s - before.cpu_s),
    )
