"""From one sample a second to durations: how long GPUs have been idle, RAM still, and processes without work.

A duration is published instead of raw samples so that a rule compares instants and works at any scrape interval. Each
counts only what was seen: it starts at the first sample, starts anew after a gap in the samples (a suspended machine, a
stalled exporter), and does not exist while anything it needs is unknown. Pure: times are arguments, CLOCK_BOOTTIME
seconds.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from operator import is_not
from typing import Final, NamedTuple

from exporter.evidence.gpu_attribution import NO_GPU, GpuUse, decisive, gpu_use
from exporter.evidence.windows import ProcessStarts, StillRate, StillWindow
from exporter.model.container import Container, ContainerEvidence, GpuShare
from exporter.model.gpu import GpuReadings
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import ProcessWork
from gpuwarden.job import Phase

PAUSES_MAX: Final = 64
"""Pauses of a container that are remembered; past them the oldest go, and the steps they fell into count whole."""

WORK_APART_S: Final = 3.0
"""How far apart looks at the work of a container are whose GPU is pegged or unknown and that worked within `WORKED_S`,
seconds: it is not still for long enough, and to read hundreds of processes a second would cost the most."""

BUSY_APART_S: Final = 10.0
"""And of one that is seen to use its GPU in part, seconds: no stillness of its processes is proof of anything then.
What begins and ends between two such looks is not seen, so that none is told: it counts from looks that are closer."""

UNTOLD_LOOKS: Final = 5
"""In how many looks it may be unknown whether a GPU is pegged that has not been seen to be in more than that."""

OUTAGE_S: Final = 1200.0
"""For how long nobody may have been able to look at a GPU before that is no driver any more that is loaded anew, or
built for a new kernel first, seconds. How long such a thing takes is no matter of the jobs, so it is no setting of
theirs."""

WORKED_S: Final = 30.0
"""Who worked within this time is not still for as long as any condition asks, seconds."""


_Inputs = tuple[Container, frozenset[int] | None, GpuReadings | None, tuple[str, ...], frozenset[str]]
"""What a container's use of its GPUs is told by: itself, its processes, the readings, its GPUs, those seen there."""


class RamUse(NamedTuple):
    """One container's RAM at one moment, bytes, or why it is unknown."""

    usage_bytes: int | None
    anon_bytes: int | None = None
    working_set_bytes: int | None = None
    oom_kills: int | None = None
    unknown: Unknown | None = None


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

PAUSED: Final = Unknown(reason="paused", because="the container is paused")
"""What is paused shows no sign of life, and owes none: its durations start anew when it goes on."""


def without_figures(container: Container) -> ContainerEvidence:
    """What is known of a container that does not run: who it is."""
    because = "the container does not run"
    down = Unknown(reason="down", because=because)
    return ContainerEvidence(
        container=container, shares=(), gpus=(), gpu_idle_s=None, gpu_unknown=down, busy_s={}, ram_bytes=None,
        ram_anon_bytes=None, ram_working_set_bytes=None, ram_still_s=None, ram_unknown=down, work_unknown=down,
    )  # fmt: skip


STORES: Final = frozenset({Phase.LOAD, Phase.SAVE, Phase.CHECKPOINT})
"""The phases of a job that waits for storage: how long it may is its patience in them, which the stall rules know."""


class ContainerHistory:
    """What has been seen of one container incarnation, one sample after another.

    `gpus` are its GPUs, by UUID, at the last look at which any was known; `there` each that was seen there while it was
    its own. `kind` is the container's, once it was seen.
    `asks` says whether there is any source of GPUs on this host: where none is, none fails. It was `found` where it ran
    already as the exporter began to look: what it was given by name it is then taken to have had.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        *,
        asks: bool = True,
        found: bool = False,
    ) -> None:
        self.gpus: tuple[str, ...] = ()
        self.there: frozenset[str] = frozenset()
        self.kind = ""
        self._thresholds = thresholds
        self._found = found
        self._used: tuple[_Inputs, GpuUse] | None = None
        self._last_s: float | None = None
        self._idle_since_s: float | None = None
        self._pegged_since_s: float | None = None
        self._pegged_seen_s = 0.0
        self._pegged_looks = [0, 0]
        self._pegged: frozenset[str] = frozenset()
        self._seen_busy_s: float | None = None
        self._asked_s = 0.0
        self._asks = asks
        self._outage_s: tuple[float, float] | None = None
        self._ram = StillWindow(thresholds.ram_delta_bytes)
        self._busy_s: dict[str, float] = {}
        self._peak_bytes: dict[str, int] = {}
        self._lost_s: tuple[float, float] | None = None
        self._frozen_s: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=PAUSES_MAX)
        self._work: Mapping[int, ProcessWork] | None = None
        self._work_looked_s: float | None = None
        self._work_told: tuple[tuple[float | None, float | None, float | None], Unknown | None] = (
            (None, None, None),
            None,
        )
        self._starts = ProcessStarts()
        self._io = StillRate(thresholds.io_still_bytes_per_s)
        self._faults = StillRate(thresholds.faults_still_per_s)
        self._cpu = StillRate(thresholds.cpu_still_ratio)

    def use(self, container: Container, pids: frozenset[int] | None, readings: GpuReadings | None) -> GpuUse:
        """`gpu_use` with what has been seen of it so far. Of the very same as at the last look it is the very same.

        On GPUs at rest that is what most looks come to.
        """
        asked = container, pids, readings, self.gpus, self.there
        if self._used is None or any(map(is_not, asked, self._used[0])):
            self._used = asked, gpu_use(container, pids, readings, self._thresholds, self.gpus, self.there)
        return self._used[1]

    def wants_work(self, gpu: GpuUse, *, now_s: float, lost: Collection[str] = ()) -> bool:
        """Whether this look is to read what the processes have done; else `observe` is given `AS_IT_WAS`.

        Each look is, while their stillness may count, to the second: while the GPUs are idle or there are none, or one
        is lost, and, while they are pegged or unknown, of who has done no I/O and touched no memory for a while.
        """
        last_s, ratio, limits = self._work_looked_s, gpu.utilization_ratio, self._thresholds
        if last_s is None or not 0 <= now_s - last_s < BUSY_APART_S:
            return True
        if ratio is None and gpu.unknown is not None and gpu.unknown.reason == NO_GPU:
            return True
        if lost and not set(lost).isdisjoint(gpu.gpus):
            return True
        if ratio is not None and ratio < limits.pegged_ratio:
            return ratio <= limits.idle_ratio
        (io_still_s, fault_still_s, _), _ = self._work_told
        return now_s - last_s >= WORK_APART_S or min(io_still_s or 0.0, fault_still_s or 0.0) >= WORKED_S

    def observe(
        self,
        container: Container,
        gpu: GpuUse,
        ram: RamUse,
        work: WorkUse = NOT_LOOKED_AT,
        *,
        now_s: float,
        lost: Collection[str] = (),
        frozen_s: float | None = None,
    ) -> ContainerEvidence:
        """Take in one sample and return the evidence as it stands now.

        `lost` are the host's GPUs that are; it has lost only those of them that it was seen to have, or was found with.
        `frozen_s` is when the kernel said at this look that all of it is frozen; `None` where it is not, or unasked.
        """
        if frozen_s is not None or self._frozen_s is not None:
            self._pause(frozen_s)
        if gpu.gpus and gpu.gpus != self.gpus:  # else the very same stay, by which `use` knows them
            self.gpus = gpu.gpus
        if not self.there.issuperset(gpu.there):
            self.there = self.there.union(gpu.there)
        if lost:  # who was given every GPU has none among its own that was lost before
            lost = (self.there.union(gpu.gpus) if self._found else self.there).intersection(lost)
        self.kind = container.kind
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if not 0 <= gap_s <= self._thresholds.gap_max_s:
            gap_s = 0.0
            self._idle_since_s = self._pegged_since_s = self._seen_busy_s = self._outage_s = None
            self._ram.forget()
            self._forget_work()
        self._count(gpu.shares, gap_s)
        unknown = PAUSED if container.paused else None
        idle_s = self._idle(None if unknown else gpu.utilization_ratio, now_s)
        still_s = None
        if unknown or ram.usage_bytes is None:
            self._ram.forget()
        else:
            still_s = self._ram.add(now_s, ram.usage_bytes)
        if unknown or work is not AS_IT_WAS:
            self._work_told = self._work_still(NOT_LOOKED_AT if unknown else work, now_s), work.unknown
        (io_still_s, fault_still_s, cpu_still_s), work_unknown = self._work_told
        return ContainerEvidence(
            container=container,
            shares=gpu.shares,
            gpus=gpu.gpus,
            nameless=gpu.nameless,
            gpu_idle_s=idle_s,
            gpu_pegged_s=self._pegged_for(None if unknown else gpu, lost, now_s),
            gpu_not_seen_busy_s=self._not_seen_busy(None if unknown else gpu, now_s),
            gpu_unknown=gpu.unknown or unknown,
            busy_s=self._busy_s,
            ram_bytes=ram.usage_bytes,
            ram_anon_bytes=ram.anon_bytes,
            ram_working_set_bytes=ram.working_set_bytes,
            ram_still_s=still_s,
            ram_unknown=ram.unknown or unknown,
            io_still_s=io_still_s,
            fault_still_s=fault_still_s,
            cpu_still_s=cpu_still_s,
            work_unknown=work_unknown or unknown,
            peak_bytes=self._peak_bytes,
            oom_kills=ram.oom_kills,
            lost_gpus=tuple(uuid for uuid in gpu.gpus if uuid in lost) if lost else (),
            gpu_lost_s=self._lost(container, gpu, lost, now_s),
            pauses=tuple(self._pauses) if self._pauses else (),
        )

    def _count(self, shares: Sequence[GpuShare], gap_s: float) -> None:
        """Add up how long each GPU was busy, and note the most memory.

        What was told of the looks before is another dictionary, but where nothing has changed since.
        """
        busy_s, peak_bytes = self._busy_s, self._peak_bytes
        for gpu, ratio, size, _, _ in shares:
            # From 0 at the first sample: a counter that is born later hides its first increase from `increase()`.
            if ratio is not None and ((added_s := gap_s * ratio) or gpu not in busy_s):
                if busy_s is self._busy_s:
                    busy_s = busy_s.copy()
                busy_s[gpu] = busy_s.get(gpu, 0.0) + added_s
            if size is not None and size > peak_bytes.get(gpu, -1):
                peak_bytes = {**peak_bytes, gpu: size}
        self._busy_s, self._peak_bytes = busy_s, peak_bytes

    def _pause(self, frozen_s: float | None) -> None:
        """A pause is as long as it was seen for sure: from one look that saw all of it frozen to the next."""
        before_s, self._frozen_s = self._frozen_s, frozen_s
        if frozen_s is None or before_s is None or not 0 < frozen_s - before_s <= self._thresholds.gap_max_s:
            return
        goes_on = self._pauses and self._pauses[-1][1] == before_s
        self._pauses.append((self._pauses.pop()[0] if goes_on else before_s, frozen_s))

    def _lost(self, container: Container, gpu: GpuUse, lost: Collection[str], now_s: float) -> float | None:
        """For how long one of its GPUs has been lost and each other one idle or lost.

        A look that cannot tell breaks it off no sooner than a gap does.
        """
        if not lost and self._lost_s is None:
            return None
        others = [share for share in gpu.shares if share.gpu not in lost]
        attributed = {share.gpu for share in others if share.attributed}
        told = not gpu.may_be_elsewhere and set(gpu.gpus) - set(lost) <= attributed
        busy = any((decisive(share) or 0.0) > self._thresholds.idle_ratio for share in others)
        if container.paused or busy or gpu.unknown is None:
            self._lost_s = None
        if container.paused or not told or set(lost).isdisjoint(gpu.gpus):
            return None
        if busy:
            return 0.0
        if self._lost_s is None or now_s - self._lost_s[1] > self._thresholds.gap_max_s:
            self._lost_s = now_s, now_s
        self._lost_s = self._lost_s[0], now_s
        return now_s - self._lost_s[0]

    def _work_still(self, work: WorkUse, now_s: float) -> tuple[float | None, float | None, float | None]:
        """For how long I/O, page faults and CPU time have been still; what processes do as they start is left out."""
        if work.processes is None:
            self._forget_work()
            return None, None, None
        before, self._work = self._work if self._work is not None else work.processes, work.processes
        seen = self._work_looked_s is None or now_s - self._work_looked_s <= self._thresholds.gap_max_s
        self._work_looked_s = now_s
        if before is work.processes and work.unknown is None:  # none of them has run since
            self._starts.left_out(frozenset(), now_s)
            return (
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
            return None, faults_still_s, cpu_still_s
        return self._io.add(now_s, sum(size or 0 for size in sizes), seen=seen), faults_still_s, cpu_still_s

    def _forget_work(self) -> None:
        self._work = self._work_looked_s = None
        self._starts = ProcessStarts()
        for rate in (self._io, self._faults, self._cpu):
            rate.forget()

    def _idle(self, utilization_ratio: float | None, now_s: float) -> float | None:
        if utilization_ratio is None:
            self._idle_since_s = None
            return None
        if utilization_ratio > self._thresholds.idle_ratio:
            self._idle_since_s = None
            return 0.0
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return now_s - self._idle_since_s

    def _pegged_for(self, gpu: GpuUse | None, lost: Collection[str], now_s: float) -> float | None:
        """For how long the same GPUs of it have been fully taken, and the others idle; `None` where any is unknown.

        One that is `lost` does nothing for it any more: who waits in a collective for the rank on it spins for ever.
        What computes pauses now and then, and one that is pegged and then idle has done something: both start it anew.
        A look that cannot tell breaks it off no sooner than a gap does, unless what it can tell says otherwise, or most
        of the looks so far could not tell.
        """
        limits = self._thresholds
        if gpu is None:
            self._pegged_since_s = None
            return None
        known: list[str] = []
        full_ones: list[str] = []
        in_part = False
        for uuid, ratio, _, _, busiest in gpu.shares:
            if busiest is not None:
                ratio = busiest  # noqa: PLW2901 - by which it is idle or not
            if ratio is not None:
                known.append(uuid)
                if ratio >= limits.pegged_ratio:
                    full_ones.append(uuid)
                elif ratio > limits.idle_ratio:
                    in_part = True
        whole = gpu.unknown is None and len(known) == len(gpu.shares)
        if lost and known and not gpu.nameless and not gpu.may_be_elsewhere:
            whole = set(gpu.gpus) - set(lost) <= {share.gpu for share in gpu.shares if share.attributed}
        full = frozenset(full_ones)
        if in_part or full != (self._pegged if whole else self._pegged.intersection(known)):
            self._pegged_since_s = None
        if not whole:
            self._pegged_looks[1] += 1
            return None
        self._pegged = full
        if not full:
            return 0.0
        told, untold = self._pegged_looks
        if (
            self._pegged_since_s is None
            or now_s - self._pegged_seen_s > limits.gap_max_s
            or untold > max(told, UNTOLD_LOOKS)
        ):
            self._pegged_since_s = now_s
            self._pegged_looks = [0, 0]
        self._pegged_seen_s = now_s
        self._pegged_looks[0] += 1
        return now_s - self._pegged_since_s

    def _not_seen_busy(self, gpu: GpuUse | None, now_s: float) -> float | None:
        """For how long no GPU was measured to do anything for it: each was idle, or unknown.

        Of one that was given none it is told while it is known to be on none. Not while nobody could look at one of its
        own, for its source does not answer or it hangs, which starts it anew once that lasts longer than a gap may. But
        what lasts for `OUTAGE_S` without a break is unknown like any other, from its begin.
        """
        without = gpu is not None and gpu.unknown is not None and gpu.unknown.reason == NO_GPU
        if gpu is None or (without and not gpu.shares and gpu.may_be_elsewhere):
            self._seen_busy_s = self._outage_s = None
            return None
        idle_ratio, since_s, busy = self._thresholds.idle_ratio, self._seen_busy_s, False
        for _, ratio, _, _, busiest in gpu.shares:
            if (busiest if busiest is not None else ratio or 0.0) > idle_ratio:
                self._seen_busy_s, since_s, busy = None, None, True
        if gpu.left_out or (gpu.unknown is not None and gpu.unknown.reason == "source_failed" and not gpu.shares):
            return self._not_seen_for_an_outage(now_s, busy=busy)
        self._outage_s = None
        if now_s - self._asked_s > self._thresholds.gap_max_s:
            since_s = None
        self._asked_s = now_s
        self._seen_busy_s = since_s = now_s if since_s is None else since_s
        return now_s - since_s

    def _not_seen_for_an_outage(self, now_s: float, *, busy: bool) -> float | None:
        """Since it began, or since another GPU of it was seen busy in it; `None` while it may be over soon."""
        began_s, since_s = self._outage_s or (now_s, now_s)
        self._outage_s = began_s, now_s if busy else since_s
        return now_s - self._outage_s[1] if self._asks and now_s - began_s >= OUTAGE_S else None


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
