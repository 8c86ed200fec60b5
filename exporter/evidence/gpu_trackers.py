"""For how long the GPUs of a container have been idle, saturated or lost. Pure: times are CLOCK_BOOTTIME seconds."""

from collections.abc import Collection
from typing import Final

from exporter.evidence.gpu_attribution import NO_GPU, GpuUse, decisive
from exporter.model.container import Container
from exporter.model.thresholds import Thresholds

UNTOLD_LOOKS: Final = 5
"""In how many looks it may be unknown whether a GPU is pegged that has not been seen to be in more than that."""

OUTAGE_S: Final = 1200.0
"""For how long nobody may have been able to look at a GPU before that is no driver any more that is loaded anew, or
built for a new kernel first, seconds. How long such a thing takes is no matter of the jobs, so it is no setting of
theirs."""


class GpuIdleTracker:
    """For how long the GPUs have been idle, and for how long none was seen busy.

    `asks` says whether there is any source of GPUs on this host.
    """

    def __init__(self, thresholds: Thresholds, *, asks: bool) -> None:
        self._thresholds = thresholds
        self._asks = asks
        self._idle_since_s: float | None = None
        self._seen_busy_s: float | None = None
        self._asked_s = 0.0
        self._outage_s: tuple[float, float] | None = None

    def observe(self, gpu: GpuUse | None, *, now_s: float) -> tuple[float | None, float | None]:
        """Take in one look, `None` of a paused container.

        Returns for how long the GPUs have been idle, and for how long none was seen busy.
        """
        return self._idle(None if gpu is None else gpu.utilization_ratio, now_s), self._not_seen_busy(gpu, now_s)

    def forget(self) -> None:
        """Begin again, as at the first look."""
        self._idle_since_s = self._seen_busy_s = self._outage_s = None

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


class GpuSaturatedTracker:
    """For how long the same GPUs have been fully taken."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._since_s: float | None = None
        self._seen_s = 0.0
        self._looks = [0, 0]
        self._full: frozenset[str] = frozenset()

    def observe(self, gpu: GpuUse | None, lost: Collection[str], *, now_s: float) -> float | None:
        """For how long the same GPUs of it have been fully taken, and the others idle; `None` where any is unknown.

        One that is `lost` does nothing for it any more: who waits in a collective for the rank on it spins for ever.
        What computes pauses now and then, and one that is pegged and then idle has done something: both start it anew.
        A look that cannot tell breaks it off no sooner than a gap does, unless what it can tell says otherwise, or most
        of the looks so far could not tell.
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
        if in_part or full != (self._full if whole else self._full.intersection(known)):
            self._since_s = None
        if not whole:
            self._looks[1] += 1
            return None
        self._full = full
        if not full:
            return 0.0
        told, untold = self._looks
        if self._since_s is None or now_s - self._seen_s > limits.gap_max_s or untold > max(told, UNTOLD_LOOKS):
            self._since_s = now_s
            self._looks = [0, 0]
        self._seen_s = now_s
        self._looks[0] += 1
        return now_s - self._since_s

    def forget(self) -> None:
        """Begin again, as at the first look."""
        self._since_s = None


class GpuLostTracker:
    """For how long one of the GPUs has been lost."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._lost_s: tuple[float, float] | None = None

    def observe(self, container: Container, gpu: GpuUse, lost: Collection[str], *, now_s: float) -> float | None:
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

    def forget(self) -> None:
        """Begin again, as at the first look."""
        self._lost_s = None
