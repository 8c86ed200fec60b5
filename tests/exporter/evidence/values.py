"""Values that several modules of tests of evidence share."""

from exporter.evidence.gpu_attribution import GpuAttribution
from exporter.model.container import GpuShare, RamUse
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown

THRESHOLDS = Thresholds(gpu_idle_ratio=0.05, ram_idle_bytes=100, gap_max_s=5.0)
OWN = frozenset({4001, 4002})
OTHER_PID = 9999


def use(utilization_ratio: float | None) -> GpuAttribution:
    share = GpuShare(gpu="GPU-0", utilization_ratio=utilization_ratio, memory_bytes=0)
    unknown = Unknown(reason="not_listed", message="said so") if utilization_ratio is None else None
    return GpuAttribution(gpus=("GPU-0",), shares=(share,), utilization_ratio=utilization_ratio, unknown=unknown)


def ram(usage_bytes: int | None) -> RamUse:
    return RamUse(usage_bytes=usage_bytes)
