"""Idle, saturated and lost times of GPUs. Pure. Times: CLOCK_BOOTTIME seconds."""

from collections.abc import Collection
from typing import Final

from exporter.evidence.gpu_attribution import NO_GPU, GpuAttribution, busiest_engine_ratio
from exporter.model.container import Container
from exporter.model.thresholds import Thresholds

MAX_UNKNOWN_SAMPLES: Final = 5
"""Unknown samples that a saturated time allows; more only if there are more known ones."""

OUTAGE_S: Final = 1200.0
"""Seconds without readings that are more than a reload of the driver. No setting: jobs do not matter."""


class GpuIdleTracker:
    """Measure how long GPUs have been idle, and how long none was seen busy."""

    def __init__(self, thresholds: Thresholds, *, has_gpu_source: bool) -> None:
        self._thresholds = thresholds
        self._has_gpu_source = has_gpu_source
        self._idle_since_s: float | None = None
        self._seen_busy_s: float | None = None
        self._asked_s = 0.0
        self._outage_s: tuple[float, float] | None = None

    def observe(self, gpu: GpuAttribution | None, *, now_s: float) -> tuple[float | None, float | None]:
        """Add one sample, `None` for a paused container; returns both, seconds."""
        return self._idle(None if gpu is None else gpu.utilization_ratio, now_s), self._not_seen_busy(gpu, now_s)

    def forget(self) -> None:
        """Restart."""
        self._idle_since_s = self._seen_busy_s = self._outage_s = None

    def _idle(self, utilization_ratio: float | None, now_s: float) -> float | None:
        if utilization_ratio is None:
            self._idle_since_s = None
            return None
        if utilization_ratio > self._thresholds.gpu_idle_ratio:
            self._idle_since_s = None
            return 0.0
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return now_s - self._idle_since_s

    def _not_seen_busy(self, gpu: GpuAttribution | None, now_s: float) -> float | None:
        """Seconds since a GPU was last measured busy: idle and unknown samples both count.

        Unknown while the container may be on an unassigned GPU, or a GPU cannot be read. After `OUTAGE_S` such an
        outage counts too, from its start.
        """
        without = gpu is not None and gpu.unknown is not None and gpu.unknown.reason == NO_GPU
        if gpu is None or (without and not gpu.shares and gpu.may_be_elsewhere):
            self._seen_busy_s = self._outage_s = None
            return None
        gpu_idle_ratio, since_s, busy = self._thresholds.gpu_idle_ratio, self._seen_busy_s, False
        for _, ratio, _, _, busiest in gpu.shares:
            if (busiest if busiest is not None else ratio or 0.0) > gpu_idle_ratio:
                self._seen_busy_s, since_s, busy = None, None, True
        if gpu.may_use_unread_gpu or (
            gpu.unknown is not None and gpu.unknown.reason == "source_failed" and not gpu.shares
        ):
            return self._not_seen_for_an_outage(now_s, busy=busy)
        self._outage_s = None
        if now_s - self._asked_s > self._thresholds.gap_max_s:
            since_s = None
        self._asked_s = now_s
        self._seen_busy_s = since_s = now_s if since_s is None else since_s
        return now_s - since_s

    def _not_seen_for_an_outage(self, now_s: float, *, busy: bool) -> float | None:
        began_s, since_s = self._outage_s or (now_s, now_s)
        self._outage_s = began_s, now_s if busy else since_s
        return now_s - self._outage_s[1] if self._has_gpu_source and now_s - began_s >= OUTAGE_S else None


class GpuSaturatedTracker:
    """Measure how long the same GPUs were saturated."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._since_s: float | None = None
        self._seen_s = 0.0
        self._samples = [0, 0]
        self._full: frozenset[str] = frozenset()

    def observe(self, gpu: GpuAttribution | None, lost: Collection[str], *, now_s: float) -> float | None:
        """Seconds for which the same GPUs were saturated and the others idle.

        A `lost` GPU does not count: a rank that waits for it spins without end. Real work pauses, so a change of the
        saturated set restarts the time. Unknown samples do not, unless they are the majority.
        """
        limits = self._thresholds
        if gpu is None:
            self._since_s = None
            return None
        known: list[str] = []
        full_ones: list[str] = []
        in_part = False
        for uuid, ratio, _, _, busiest in gpu.shares:
            if busiest is not None:
                ratio = busiest  # noqa: PLW2901
            if ratio is not None:
                known.append(uuid)
                if ratio >= limits.gpu_saturated_ratio:
                    full_ones.append(uuid)
                elif ratio > limits.gpu_idle_ratio:
                    in_part = True
        whole = gpu.unknown is None and len(known) == len(gpu.shares)
        if lost and known and not gpu.nameless and not gpu.may_be_elsewhere:
            whole = set(gpu.gpus) - set(lost) <= {share.gpu for share in gpu.shares if share.attributed}
        full = frozenset(full_ones)
        if in_part or full != (self._full if whole else self._full.intersection(known)):
            self._since_s = None
        if not whole:
            self._samples[1] += 1
            return None
        self._full = full
        if not full:
            return 0.0
        known_samples, unknown_samples = self._samples
        if (
            self._since_s is None
            or now_s - self._seen_s > limits.gap_max_s
            or unknown_samples > max(known_samples, MAX_UNKNOWN_SAMPLES)
        ):
            self._since_s = now_s
            self._samples = [0, 0]
        self._seen_s = now_s
        self._samples[0] += 1
        return now_s - self._since_s

    def forget(self) -> None:
        """Restart."""
        self._since_s = None


class GpuLostTracker:
    """Measure how long a GPU was lost."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._lost_s: tuple[float, float] | None = None

    def observe(
        self, container: Container, gpu: GpuAttribution, lost: Collection[str], *, now_s: float
    ) -> float | None:
        """Seconds for which one GPU was lost and each other one idle or lost."""
        if not lost and self._lost_s is None:
            return None
        others = [share for share in gpu.shares if share.gpu not in lost]
        attributed = {share.gpu for share in others if share.attributed}
        known_samples = not gpu.may_be_elsewhere and set(gpu.gpus) - set(lost) <= attributed
        busy = any((busiest_engine_ratio(share) or 0.0) > self._thresholds.gpu_idle_ratio for share in others)
        if container.paused or busy or gpu.unknown is None:
            self._lost_s = None
        if container.paused or not known_samples or set(lost).isdisjoint(gpu.gpus):
            return None
        if busy:
            return 0.0
        if self._lost_s is None or now_s - self._lost_s[1] > self._thresholds.gap_max_s:
            self._lost_s = now_s, now_s
        self._lost_s = self._lost_s[0], now_s
        return now_s - self._lost_s[0]

    def forget(self) -> None:
        """Restart."""
        self._lost_s = None
