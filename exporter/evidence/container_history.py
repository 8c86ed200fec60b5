"""Durations of idle GPUs, idle RAM and missing work, from one sample a second.

A duration restarts after a gap in the samples, and is unknown while an input is. Pure. Times: CLOCK_BOOTTIME seconds.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from exporter.evidence.gpu_attribution import GpuAttribution, attribute_gpus
from exporter.evidence.gpu_trackers import GpuIdleTracker, GpuLostTracker, GpuSaturatedTracker
from exporter.evidence.windows import MOVED_SHARE, IdleWindow, Movement
from exporter.evidence.work_history import NOT_SAMPLED, ContainerWork, WorkTracker
from exporter.model.container import Container, ContainerEvidence, GpuShare, RamUse
from exporter.model.gpu import GpuReadings
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown

PAUSES_MAX: Final = 64
"""Pauses remembered per container."""


PAUSED: Final = Unknown(reason="paused", message="the container is paused")


def stopped_container_evidence(container: Container) -> ContainerEvidence:
    """Return the evidence of a stopped container: its identity alone."""
    message = "the container does not run"
    down = Unknown(reason="down", message=message)
    return ContainerEvidence(
        container=container, shares=(), gpus=(), gpu_idle_s=None, gpu_unknown=down, busy_s={},
        ram=RamUse(usage_bytes=None), ram_idle_s=None, ram_unknown=down, work_unknown=down,
    )  # fmt: skip


class RamTracker:
    """Measure how long the RAM has been idle."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._window = IdleWindow(thresholds.ram_idle_bytes)
        self._movement = Movement(int(thresholds.ram_idle_bytes * MOVED_SHARE))

    def observe(self, usage_bytes: int | None, *, now_s: float) -> float | None:
        """Add one sample; returns seconds."""
        if usage_bytes is None:
            self.forget()
            return None
        idle_s, still_s = self._window.add(now_s, usage_bytes), self._movement.add(now_s, usage_bytes)
        return idle_s if still_s is None else min(idle_s, still_s)

    def forget(self) -> None:
        """Restart."""
        self._window.forget()
        self._movement.forget()


class UsageCounters:
    """Busy seconds and peak memory by GPU UUID."""

    def __init__(self) -> None:
        self._busy_s: dict[str, float] = {}
        self._peak_bytes: dict[str, int] = {}

    def observe(self, shares: Sequence[GpuShare], gap_s: float) -> tuple[Mapping[str, float], Mapping[str, int]]:
        """Add one sample; returns both."""
        for gpu, ratio, size, _, _ in shares:
            # From 0 at the first sample: `increase()` cannot see the first increase of a counter that appears later.
            if ratio is not None:
                self._busy_s[gpu] = self._busy_s.get(gpu, 0.0) + gap_s * ratio
            if size is not None:
                self._peak_bytes[gpu] = max(size, self._peak_bytes.get(gpu, 0))
        return dict(self._busy_s), dict(self._peak_bytes)


class PauseTracker:
    """Observed pauses of a container, and their total."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self.total_s = 0.0
        self._frozen_s: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=PAUSES_MAX)

    def observe(self, frozen_s: float | None) -> tuple[tuple[float, float], ...]:
        """Add the time at which the whole container was seen frozen, or `None`; returns the pauses so far."""
        before_s, self._frozen_s = self._frozen_s, frozen_s
        if frozen_s is not None and before_s is not None and 0 < frozen_s - before_s <= self._gap_max_s:
            self.total_s += frozen_s - before_s
            goes_on = self._pauses and self._pauses[-1][1] == before_s
            self._pauses.append((self._pauses.pop()[0] if goes_on else before_s, frozen_s))
        return tuple(self._pauses)

    def forget(self) -> None:
        """End the current pause."""
        self._frozen_s = None


class ContainerHistory:
    """The samples of one container incarnation so far.

    Args:
        thresholds: the host's limits.
        has_gpu_source: whether this host has a source of GPUs.
        ran_before: whether the container ran before the exporter started, which then takes its assigned GPUs as seen.

    Attributes:
        gpus: UUIDs of its GPUs, as last known.
        seen_present: UUIDs of its GPUs that were seen present.
        kind: the container's kind.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        *,
        has_gpu_source: bool = True,
        ran_before: bool = False,
    ) -> None:
        self.gpus: tuple[str, ...] = ()
        self.seen_present: frozenset[str] = frozenset()
        self.kind = ""
        self._thresholds = thresholds
        self._ran_before = ran_before
        self._last_s: float | None = None
        self._ram = RamTracker(thresholds)
        self._idle = GpuIdleTracker(thresholds, has_gpu_source=has_gpu_source)
        self._saturated = GpuSaturatedTracker(thresholds)
        self._lost = GpuLostTracker(thresholds)
        self._work = WorkTracker(thresholds)
        self._usage = UsageCounters()
        self._pauses = PauseTracker(thresholds)

    def attribute(
        self, container: Container, pids: frozenset[int] | None, readings: GpuReadings | None
    ) -> GpuAttribution:
        """Attribute GPUs to the container."""
        return attribute_gpus(container, pids, readings, self._thresholds, self.gpus, self.seen_present)

    def observe(
        self,
        container: Container,
        gpu: GpuAttribution,
        ram: RamUse,
        work: ContainerWork = NOT_SAMPLED,
        *,
        now_s: float,
        lost: Collection[str] = (),
        frozen_s: float | None = None,
    ) -> ContainerEvidence:
        """Add one sample and return the evidence.

        `lost` are the host's lost GPUs. `frozen_s` is when the kernel reported the whole container frozen.
        """
        self.gpus = gpu.gpus or self.gpus
        self.seen_present = self.seen_present.union(gpu.present)
        if lost:  # with every GPU it never had one that was lost before
            lost = (self.seen_present.union(gpu.gpus) if self._ran_before else self.seen_present).intersection(lost)
        self.kind = container.kind
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if not 0 <= gap_s <= self._thresholds.gap_max_s:
            gap_s = 0.0
            for tracker in (self._ram, self._idle, self._saturated, self._lost, self._work, self._pauses):
                tracker.forget()
        busy_s, peak_bytes = self._usage.observe(gpu.shares, gap_s)
        unknown = PAUSED if container.paused else None
        seen = None if unknown else gpu
        idle_s, last_busy_age_s = self._idle.observe(seen, now_s=now_s)
        still = self._work.observe(NOT_SAMPLED if unknown else work, now_s=now_s)
        return ContainerEvidence(
            container=container,
            shares=gpu.shares,
            gpus=gpu.gpus,
            nameless=gpu.nameless,
            gpu_idle_s=idle_s,
            gpu_saturated_s=self._saturated.observe(seen, lost, now_s=now_s),
            gpu_last_busy_age_s=last_busy_age_s,
            gpu_unknown=gpu.unknown or unknown,
            busy_s=busy_s,
            ram=ram,
            ram_idle_s=self._ram.observe(None if unknown else ram.usage_bytes, now_s=now_s),
            ram_unknown=ram.unknown or unknown,
            io_idle_s=still.io_idle_s,
            page_fault_idle_s=still.page_fault_idle_s,
            cpu_idle_s=still.cpu_idle_s,
            heavy_work_idle_s=still.heavy_work_idle_s,
            heavy_page_fault_idle_s=still.heavy_page_fault_idle_s,
            work_unknown=work.unknown or unknown,
            peak_bytes=peak_bytes,
            lost_gpus=tuple(uuid for uuid in gpu.gpus if uuid in lost) if lost else (),
            gpu_lost_s=self._lost.observe(container, gpu, lost, now_s=now_s),
            pauses=self._pauses.observe(frozen_s),
            paused_s=self._pauses.total_s,
        )
