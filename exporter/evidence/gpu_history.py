"""What each GPU did over time, whichever container used it. Pure."""

from collections import Counter
from collections.abc import Mapping

from exporter.model.gpu import GpuReadings, GpuTotals
from exporter.model.thresholds import Thresholds


class GpuHistory:
    """What has been counted of every GPU of this host, one look after another."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._last_s: float | None = None
        self._busy_s: dict[str, float] = {}
        self._unknown: dict[str, Counter[tuple[str, str]]] = {}

    def observe(
        self, readings: GpuReadings | None, *, now_s: float, returning_unknown: Mapping[str, str] | None = None
    ) -> Mapping[str, GpuTotals]:
        """Take in one look; returns what has been counted so far of the GPUs that are there, by UUID.

        `returning_unknown` is why it is unknown what of a GPU's memory is on its way back, by UUID.

        A look that measured a GPU stands for the time since the look before it; one that did not, or that comes after a
        gap, adds nothing.
        """
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if not 0 <= gap_s <= self._gap_max_s:
            gap_s = 0.0
        if readings is None:
            return {}
        if not readings.failed:  # otherwise those that are missing may be of a source that does not answer
            there = {gpu.uuid for gpu in readings.gpus}
            # Instances are made and unmade under new names for ever.
            self._busy_s = {uuid: busy_s for uuid, busy_s in self._busy_s.items() if uuid in there}
            self._unknown = {uuid: counts for uuid, counts in self._unknown.items() if uuid in there}
        for gpu in readings.gpus:
            if gpu.utilization_ratio is not None:
                # From 0 at the first look: a counter that is born later hides its first increase from `increase()`.
                added_s = gap_s * gpu.utilization_ratio if gpu.uuid in self._busy_s else 0.0
                self._busy_s[gpu.uuid] = self._busy_s.get(gpu.uuid, 0.0) + added_s
            self._unknown.setdefault(gpu.uuid, Counter()).update(gpu.figures.unknown.items())
            if returning_unknown and gpu.uuid in returning_unknown:
                self._unknown[gpu.uuid]["memory_returning_bytes", returning_unknown[gpu.uuid]] += 1
        return {
            gpu.uuid: GpuTotals(busy_s=self._busy_s.get(gpu.uuid), unknown=dict(self._unknown[gpu.uuid]))
            for gpu in readings.gpus
        }
