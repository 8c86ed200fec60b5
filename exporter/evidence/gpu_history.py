"""Totals of each GPU over time. Pure."""

from collections import Counter
from collections.abc import Mapping

from exporter.model.gpu import GpuReadings, GpuTotals
from exporter.model.thresholds import Thresholds


class GpuHistory:
    """Busy seconds and unknown samples of every GPU of this host."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._last_s: float | None = None
        self._busy_s: dict[str, float] = {}
        self._unknown: dict[str, Counter[tuple[str, str]]] = {}

    def observe(
        self, readings: GpuReadings | None, *, now_s: float, returning_unknown: Mapping[str, str] | None = None
    ) -> Mapping[str, GpuTotals]:
        """Add one sample; returns the totals of the listed GPUs, by UUID.

        `returning_unknown` says by UUID why the memory that is being freed is unknown.
        """
        gap_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if not 0 <= gap_s <= self._gap_max_s:
            gap_s = 0.0
        if readings is None:
            return {}
        if not readings.failed:  # a missing GPU may belong to the failed source
            present = {gpu.uuid for gpu in readings.gpus}
            # MIG instances come and go under new names without end.
            self._busy_s = {uuid: busy_s for uuid, busy_s in self._busy_s.items() if uuid in present}
            self._unknown = {uuid: counts for uuid, counts in self._unknown.items() if uuid in present}
        for gpu in readings.gpus:
            if gpu.utilization_ratio is not None:
                added_s = gap_s * gpu.utilization_ratio if gpu.uuid in self._busy_s else 0.0
                self._busy_s[gpu.uuid] = self._busy_s.get(gpu.uuid, 0.0) + added_s
            self._unknown.setdefault(gpu.uuid, Counter()).update(gpu.figures.unknown.items())
            if returning_unknown and gpu.uuid in returning_unknown:
                self._unknown[gpu.uuid]["memory_reclaiming_bytes", returning_unknown[gpu.uuid]] += 1
        return {
            gpu.uuid: GpuTotals(busy_s=self._busy_s.get(gpu.uuid), unknown=dict(self._unknown[gpu.uuid]))
            for gpu in readings.gpus
        }
