"""From one sample a second to durations: how long GPUs have been idle, RAM still, and a process without CPU time.

A duration is published instead of raw samples so that a rule compares instants and works at any scrape interval. Each
counts only what was seen: it starts at the first sample, starts anew after a gap in the samples (a suspended machine, a
stalled exporter), and does not exist while anything it needs is unknown. Pure: times are arguments, CLOCK_BOOTTIME
seconds.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from exporter.readings import (
    Container,
    ContainerEvidence,
    CpuUse,
    Gpu,
    GpuReadings,
    GpuShare,
    Unknown,
    WorkerSighting,
)
from gpuwarden.statefile import JobFile, Stamp


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What counts as idle, as still, as a gap, and as dead.

    Args:
        idle_ratio: a GPU at or under this share of its time is idle (A2).
        ram_delta_bytes: RAM that moved by no more than this, either way, is still (A2).
        gap_max_s: samples further apart than this prove nothing about the time between, seconds.
        dead_after_s: a worker that owns a job is dead after this long without heartbeat and CPU time, seconds (A14).
    """

    idle_ratio: float = 0.05
    ram_delta_bytes: int = 5120 * 2**20
    gap_max_s: float = 5.0
    dead_after_s: float = 30.0


NO_GPU: Final = "no_gpu"
"""The reason of a container that was given no GPU: nothing to know rather than something unknown."""

EXTREMES_MAX: Final = 14_400
"""Samples kept to tell for how long RAM is still; past them the oldest go, and the time told is too short."""

_DIGITS: Final = 9
"""Ratios are sums and differences of whole percents: what binary fractions add to 0.90 - 0.85 is not over 0.05."""


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """One container's GPUs at one moment: its shares, and the greatest utilisation or why it is unknown."""

    gpus: tuple[str, ...]
    shares: tuple[GpuShare, ...]
    utilization_ratio: float | None
    unknown: Unknown | None


@dataclass(frozen=True, kw_only=True)
class RamUse:
    """One container's RAM at one moment, bytes, or why it is unknown."""

    usage_bytes: int | None
    anon_bytes: int | None = None
    working_set_bytes: int | None = None
    unknown: Unknown | None = None


def gpu_use(
    container: Container, pids: frozenset[int] | None, readings: GpuReadings | None, thresholds: Thresholds
) -> GpuUse:
    """Attribute GPU time and memory to a container by its processes.

    Utilisation is known only when every GPU assigned to the container is measured: its processes listed and each of its
    own measured. What a GPU does beyond the processes on its list could be anyone's, so more than idle of it vetoes.
    A GPU that lists a process of the container is its GPU too, whatever was asked for: indexes are numbered otherwise
    by CUDA than by the driver, and work seen on another GPU is no idleness.
    """
    if container.gpu_request is None:
        return _unknown_use((), NO_GPU, "no GPU is assigned")
    if readings is None:
        return _unknown_use((), "source_failed", "no GPU source answers")
    assigned, missing = _assigned(container.gpu_request, pids or frozenset(), readings.gpus)
    uuids = tuple(gpu.uuid for gpu in assigned) + missing
    if missing:
        return _unknown_use(uuids, "gpu_missing", f"assigned GPU {missing[0]} is not reported")
    if not assigned:
        return _unknown_use((), "gpu_missing", "the host reports no GPU")
    if pids is None:
        return _unknown_use(uuids, "processes_unknown", "the container's processes are unknown")
    shares = tuple(_share(gpu, pids) for gpu in assigned)
    unknown = next(
        filter(None, (_why_unknown(gpu, share, thresholds) for gpu, share in zip(assigned, shares, strict=True))), None
    )
    known = [share.utilization_ratio for share in shares if share.utilization_ratio is not None]
    return GpuUse(gpus=uuids, shares=shares, utilization_ratio=None if unknown else max(known), unknown=unknown)


def unattributed_ratio(gpu: Gpu) -> float | None:
    """What a GPU does beyond the processes on its list; `None` when either is unknown."""
    if gpu.utilization_ratio is None or gpu.processes is None:
        return None
    known = [process.utilization_ratio for process in gpu.processes]
    if any(ratio is None for ratio in known):
        return None
    return max(0.0, round(gpu.utilization_ratio - sum(ratio for ratio in known if ratio is not None), _DIGITS))


def unattributed_bytes(gpu: Gpu) -> int | None:
    """GPU memory used beyond the processes on its list; `None` when either is unknown."""
    if gpu.memory_used_bytes is None or gpu.processes is None:
        return None
    known = [process.memory_bytes for process in gpu.processes]
    if any(used is None for used in known):
        return None
    return max(0, gpu.memory_used_bytes - sum(used for used in known if used is not None))


def suspicion(job: JobFile, beat_age_s: float | None, evidence: ContainerEvidence | None) -> str | None:
    """Why a silent job is suspected of a stall but not accused (A4); `None` when it is not silent, or is wedged.

    What this sees as a sign of life restarts the silence by itself: the durations that the rule compares begin anew.
    """
    silence_s = job.silence_s
    if silence_s == 0 or beat_age_s is None or beat_age_s < silence_s:
        return None
    if evidence is None:
        return "its container is unknown"
    if evidence.gpu_idle_s is None:
        return f"GPU unknown: {evidence.gpu_unknown.because if evidence.gpu_unknown else 'not measured'}"
    if evidence.ram_still_s is None:
        return f"RAM unknown: {evidence.ram_unknown.because if evidence.ram_unknown else 'not measured'}"
    if evidence.gpu_idle_s < silence_s:
        return f"GPU was busy or unseen {evidence.gpu_idle_s:.0f} s ago"
    if evidence.ram_still_s < silence_s:
        return f"RAM moved or was unseen {evidence.ram_still_s:.0f} s ago"
    return None


def is_dead(sighting: WorkerSighting, cpu_still_s: float | None, *, now: Stamp, dead_after_s: float) -> bool:
    """Whether a worker owns a job and lives, but has had no heartbeat and no CPU time for `dead_after_s` (A14).

    Without a heartbeat alone it may well work: a native call that holds the interpreter lets no other thread beat.
    """
    heartbeat_age_s = sighting.worker.heartbeat.age_s(now)
    if sighting.job is None or not sighting.alive or heartbeat_age_s is None or cpu_still_s is None:
        return False
    return min(heartbeat_age_s, cpu_still_s) >= dead_after_s


class CpuHistory:
    """Of one process: since when its CPU time has not moved, as far as it was looked at without a gap."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._last_s: float | None = None
        self._since_s = 0.0
        self._used_ticks = 0

    def observe(self, use: CpuUse, *, now_s: float) -> float:
        """Take in one sample; returns for how long the process has used no CPU time, seconds.

        A process that slept with its machine has used none either, so a gap starts the duration anew.
        """
        unbroken = self._last_s is not None and 0 <= now_s - self._last_s <= self._gap_max_s
        if not unbroken or use.used_ticks != self._used_ticks:
            self._since_s = now_s
        self._last_s = now_s
        self._used_ticks = use.used_ticks
        return now_s - self._since_s


class ContainerHistory:
    """What has been seen of one container incarnation, one sample after another."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._last_s: float | None = None
        self._idle_since_s: float | None = None
        self._ram = _StillWindow(thresholds.ram_delta_bytes)
        self._busy_s: dict[str, float] = {}

    def observe(self, container: Container, gpu: GpuUse, ram: RamUse, *, now_s: float) -> ContainerEvidence:
        """Take in one sample and return the evidence as it stands now."""
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if not 0 <= gap_s <= self._thresholds.gap_max_s:
            gap_s = 0.0
            self._idle_since_s = None
            self._ram.forget()
        for share in gpu.shares:
            if share.utilization_ratio is not None:
                # From 0 at the first sample: a counter that is born later hides its first increase from `increase()`.
                self._busy_s[share.gpu] = self._busy_s.get(share.gpu, 0.0) + gap_s * share.utilization_ratio
        idle_s = self._idle(gpu.utilization_ratio, now_s)
        still_s = None
        if ram.usage_bytes is None:
            self._ram.forget()
        else:
            still_s = self._ram.add(now_s, ram.usage_bytes)
        return ContainerEvidence(
            container=container,
            shares=gpu.shares,
            gpus=gpu.gpus,
            gpu_idle_s=idle_s,
            gpu_unknown=gpu.unknown,
            busy_s=dict(self._busy_s),
            ram_bytes=ram.usage_bytes,
            ram_anon_bytes=ram.anon_bytes,
            ram_working_set_bytes=ram.working_set_bytes,
            ram_still_s=still_s,
            ram_unknown=ram.unknown,
        )

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


@dataclass(slots=True)
class _Extreme:
    """A sample that is the greatest or least from its time on, and when the sample after it was taken."""

    at_s: float
    value: int
    next_s: float


class _StillWindow:
    """The longest time up to now within which the values lie at most `delta` apart: greatest less least.

    Two monotonic queues hold the window's greatest and least, so that a sample costs constant time on average and a
    still container costs a handful of entries, whatever the window's length.
    """

    def __init__(self, delta: int) -> None:
        self._delta = delta
        self.forget()

    def forget(self) -> None:
        self._start_s: float | None = None
        self._greatest: deque[_Extreme] = deque()
        self._least: deque[_Extreme] = deque()

    def add(self, now_s: float, value: int) -> float:
        """Take in one value; returns the window's length, seconds."""
        for queue in (self._greatest, self._least):
            if queue:
                queue[-1].next_s = now_s
        start_s = now_s if self._start_s is None else self._start_s
        while self._greatest and self._greatest[-1].value <= value:
            self._greatest.pop()
        while self._least and self._least[-1].value >= value:
            self._least.pop()
        self._greatest.append(_Extreme(now_s, value, now_s))
        self._least.append(_Extreme(now_s, value, now_s))
        while self._greatest[0].value - self._least[0].value > self._delta:
            older = self._greatest if self._greatest[0].at_s < self._least[0].at_s else self._least
            start_s = max(start_s, older.popleft().next_s)
        for queue in (self._greatest, self._least):
            if len(queue) > EXTREMES_MAX:  # RAM that creeps the same way at every sample
                start_s = max(start_s, queue.popleft().next_s)
        self._start_s = start_s
        return now_s - start_s


def _unknown_use(gpus: tuple[str, ...], reason: str, because: str) -> GpuUse:
    return GpuUse(gpus=gpus, shares=(), utilization_ratio=None, unknown=Unknown(reason=reason, because=because))


def _assigned(request: Iterable[str], pids: frozenset[int], gpus: tuple[Gpu, ...]) -> tuple[list[Gpu], tuple[str, ...]]:
    """The GPUs that a request names, by `all`, index or UUID, or that list one of the pids; and names that fit none."""
    wanted = set(request)
    if "all" in wanted:
        return list(gpus), ()
    found = [
        gpu
        for gpu in gpus
        if not wanted.isdisjoint((gpu.uuid, str(gpu.index))) or any(each.pid in pids for each in gpu.processes or ())
    ]
    known = {name for gpu in gpus for name in (gpu.uuid, str(gpu.index))}
    return found, tuple(sorted(wanted - known))


def _share(gpu: Gpu, pids: frozenset[int]) -> GpuShare:
    if gpu.processes is None:
        return GpuShare(gpu=gpu.uuid, utilization_ratio=None, memory_bytes=None)
    own = [process for process in gpu.processes if process.pid in pids]
    ratios = [process.utilization_ratio for process in own]
    sizes = [process.memory_bytes for process in own]
    return GpuShare(
        gpu=gpu.uuid,
        utilization_ratio=None if None in ratios else min(1.0, round(sum(ratio or 0.0 for ratio in ratios), _DIGITS)),
        memory_bytes=None if None in sizes else sum(size or 0 for size in sizes),
    )


def _why_unknown(gpu: Gpu, share: GpuShare, thresholds: Thresholds) -> Unknown | None:
    if gpu.processes is None:
        return Unknown(reason="not_listed", because=f"{gpu.uuid}: {gpu.unknown or 'its processes cannot be listed'}")
    if share.utilization_ratio is None:
        because = gpu.unknown or "a process of the container is not measured"
        return Unknown(reason="not_measured", because=f"{gpu.uuid}: {because}")
    beyond = unattributed_ratio(gpu)
    if beyond is None:
        return Unknown(reason="not_measured", because=f"{gpu.uuid}: {gpu.unknown or 'a process is not measured'}")
    if beyond > thresholds.idle_ratio:
        return Unknown(reason="unattributed", because=f"{gpu.uuid}: {beyond:.0%} of it is used by no listed process")
    return None
