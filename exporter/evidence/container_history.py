"""From one sample a second to durations: how long GPUs have been idle, RAM still, and processes without work.

A duration is published instead of raw samples so that a rule compares instants and works at any scrape interval. Each
counts only what was seen: it starts at the first sample, starts anew after a gap in the samples (a suspended machine, a
stalled exporter), and does not exist while anything it needs is unknown. Pure: times are arguments, CLOCK_BOOTTIME
seconds.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from exporter.evidence.gpu_attribution import GpuUse, gpu_use
from exporter.evidence.gpu_trackers import GpuIdleTracker, GpuLostTracker, GpuSaturatedTracker
from exporter.evidence.windows import StillWindow
from exporter.evidence.work_history import NOT_LOOKED_AT, WorkTracker, WorkUse
from exporter.model.container import Container, ContainerEvidence, GpuShare, RamUse
from exporter.model.gpu import GpuReadings
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from gpuwarden.job import Phase

PAUSES_MAX: Final = 64
"""Pauses of a container that are remembered; past them the oldest go, and the steps they fell into count whole."""


PAUSED: Final = Unknown(reason="paused", because="the container is paused")
"""What is paused shows no sign of life, and owes none: its durations start anew when it goes on."""


def without_figures(container: Container) -> ContainerEvidence:
    """What is known of a container that does not run: who it is."""
    because = "the container does not run"
    down = Unknown(reason="down", because=because)
    return ContainerEvidence(
        container=container, shares=(), gpus=(), gpu_idle_s=None, gpu_unknown=down, busy_s={},
        ram=RamUse(usage_bytes=None), ram_still_s=None, ram_unknown=down, work_unknown=down,
    )  # fmt: skip


STORES: Final = frozenset({Phase.LOAD, Phase.SAVE, Phase.CHECKPOINT})
"""The phases of a job that waits for storage: how long it may is its patience in them, which the stall rules know."""


class RamTracker:
    """For how long the RAM has been still."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._window = StillWindow(thresholds.ram_delta_bytes)

    def observe(self, usage_bytes: int | None, *, now_s: float) -> float | None:
        """Take in one look; `None` where it is unknown."""
        if usage_bytes is None:
            self._window.forget()
            return None
        return self._window.add(now_s, usage_bytes)

    def forget(self) -> None:
        """Begin again, as at the first look."""
        self._window.forget()


class UsageCounters:
    """How long each GPU was busy for a container, and the most memory that it had there, by UUID."""

    def __init__(self) -> None:
        self._busy_s: dict[str, float] = {}
        self._peak_bytes: dict[str, int] = {}

    def observe(self, shares: Sequence[GpuShare], gap_s: float) -> tuple[Mapping[str, float], Mapping[str, int]]:
        """Add up how long each GPU was busy, and note the most memory."""
        for gpu, ratio, size, _, _ in shares:
            # From 0 at the first sample: a counter that is born later hides its first increase from `increase()`.
            if ratio is not None:
                self._busy_s[gpu] = self._busy_s.get(gpu, 0.0) + gap_s * ratio
            if size is not None:
                self._peak_bytes[gpu] = max(size, self._peak_bytes.get(gpu, 0))
        return dict(self._busy_s), dict(self._peak_bytes)


class PauseTracker:
    """The pauses of a container that were seen, from when to when each."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._frozen_s: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=PAUSES_MAX)

    def observe(self, frozen_s: float | None) -> tuple[tuple[float, float], ...]:
        """Take in when all of it was frozen, `None` where it was not.

        A pause is as long as it was seen for sure: from one look that saw all of it frozen to the next.
        """
        before_s, self._frozen_s = self._frozen_s, frozen_s
        if frozen_s is not None and before_s is not None and 0 < frozen_s - before_s <= self._gap_max_s:
            goes_on = self._pauses and self._pauses[-1][1] == before_s
            self._pauses.append((self._pauses.pop()[0] if goes_on else before_s, frozen_s))
        return tuple(self._pauses)

    def forget(self) -> None:
        """End the pause that was seen last; those that were seen stay."""
        self._frozen_s = None


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
        self._last_s: float | None = None
        self._ram = RamTracker(thresholds)
        self._idle = GpuIdleTracker(thresholds, asks=asks)
        self._saturated = GpuSaturatedTracker(thresholds)
        self._lost = GpuLostTracker(thresholds)
        self._work = WorkTracker(thresholds)
        self._usage = UsageCounters()
        self._pauses = PauseTracker(thresholds)

    def use(self, container: Container, pids: frozenset[int] | None, readings: GpuReadings | None) -> GpuUse:
        """`gpu_use` with what has been seen of it so far."""
        return gpu_use(container, pids, readings, self._thresholds, self.gpus, self.there)

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
        self.gpus = gpu.gpus or self.gpus
        self.there = self.there.union(gpu.there)
        if lost:  # who was given every GPU has none among its own that was lost before
            lost = (self.there.union(gpu.gpus) if self._found else self.there).intersection(lost)
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
        idle_s, not_seen_busy_s = self._idle.observe(seen, now_s=now_s)
        still = self._work.observe(NOT_LOOKED_AT if unknown else work, now_s=now_s)
        return ContainerEvidence(
            container=container,
            shares=gpu.shares,
            gpus=gpu.gpus,
            nameless=gpu.nameless,
            gpu_idle_s=idle_s,
            gpu_pegged_s=self._saturated.observe(seen, lost, now_s=now_s),
            gpu_not_seen_busy_s=not_seen_busy_s,
            gpu_unknown=gpu.unknown or unknown,
            busy_s=busy_s,
            ram=ram,
            ram_still_s=self._ram.observe(None if unknown else ram.usage_bytes, now_s=now_s),
            ram_unknown=ram.unknown or unknown,
            io_still_s=still.io_still_s,
            fault_still_s=still.fault_still_s,
            cpu_still_s=still.cpu_still_s,
            work_unknown=work.unknown or unknown,
            peak_bytes=peak_bytes,
            lost_gpus=tuple(uuid for uuid in gpu.gpus if uuid in lost) if lost else (),
            gpu_lost_s=self._lost.observe(container, gpu, lost, now_s=now_s),
            pauses=self._pauses.observe(frozen_s),
        )
