"""Limits of the exporter, and the gauges of those that rules read. Pure."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from exporter.model.timeouts import PhaseTimeouts


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits for evidence; see `exporter.settings`."""

    gpu_idle_ratio: float = 0.05
    gpu_saturated_ratio: float = 0.99
    ram_idle_bytes: int = 5120 * 2**20
    io_idle_bytes_per_s: float = 256 * 2**10
    page_faults_idle_per_s: float = 50.0
    cpu_idle_ratio: float = 0.05
    gap_max_s: float = 5.0
    dead_after_s: float = 30.0
    health_window_s: float = 300.0
    health_grace_s: float = 360.0
    timeouts: PhaseTimeouts = field(default_factory=PhaseTimeouts)
    vram_floor_bytes: int = 1536 * 2**20
    vram_tie_bytes: int = 256 * 2**20
    vram_return_s: float = 30.0
    demand_gate_after_s: float = 60.0
    demand_gate_idle_s: float = 300.0
    demand_gate_min_s: float = 600.0
    gpu_lost_s: float = 60.0
    not_ready_s: float = 1800.0
    server_page_after_ratio: float = 10.0
    slow_ratio: float = 2.0
    # Only a reset fixes these: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
    xids_fatal: tuple[int, ...] = (46, 48, 62, 64, 74, 79, 95, 119, 120, 140, 143)


class Limit(NamedTuple):
    """The gauge and the option of one field."""

    name: str
    help_text: str
    field: str
    option: str
    values: str = ""


GAUGES: Final = (
    Limit(
        "gpuwarden_gpu_idle_threshold_ratio",
        "A GPU at or under this utilisation is idle.",
        "gpu_idle_ratio",
        "--gpu-idle-ratio",
    ),
    Limit(
        "gpuwarden_ram_idle_threshold_bytes",
        "RAM that changes by at most this is inactive.",
        "ram_idle_bytes",
        "--ram-idle-mib",
    ),
    Limit(
        "gpuwarden_io_idle_threshold_bytes_per_second",
        "A container with at most this much I/O is inactive.",
        "io_idle_bytes_per_s",
        "--io-idle-kib-per-s",
    ),
    Limit(
        "gpuwarden_page_fault_idle_threshold_per_second",
        "A container with at most this many page faults is inactive.",
        "page_faults_idle_per_s",
        "--page-faults-idle-per-s",
    ),
    Limit(
        "gpuwarden_cpu_idle_threshold_ratio",
        "A container that uses at most this share of one CPU is inactive.",
        "cpu_idle_ratio",
        "--cpu-idle-ratio",
    ),
    Limit(
        "gpuwarden_demand_gate_after_threshold_seconds",
        "A tenant on demand is scaled once it has had room, or its GPU too little free memory, for this long.",
        "demand_gate_after_s",
        "--demand-gate-after-s",
    ),
    Limit(
        "gpuwarden_demand_gate_idle_threshold_seconds",
        "A tenant on demand that has been idle for this long is not in use.",
        "demand_gate_idle_s",
        "--demand-gate-idle-s",
    ),
    Limit(
        "gpuwarden_demand_gate_min_threshold_seconds",
        "A tenant on demand stays on or off for at least this long.",
        "demand_gate_min_s",
        "--demand-gate-min-s",
    ),
    Limit(
        "gpuwarden_gpu_lost_threshold_seconds",
        "A GPU that has been lost for this long raises an alert.",
        "gpu_lost_s",
        "--gpu-lost-s",
    ),
    Limit(
        "gpuwarden_server_not_ready_threshold_seconds",
        "A server that has never answered its probes for this long raises an alert.",
        "not_ready_s",
        "--not-ready-s",
    ),
    Limit(
        "gpuwarden_server_page_after_ratio",
        "A server whose probes fail for this multiple of its restart time raises an alert.",
        "server_page_after_ratio",
        "--server-page-after-ratio",
        "ratio, 1 or more",
    ),
    Limit(
        "gpuwarden_job_slow_threshold_ratio",
        "A job whose steps take this multiple of their mean raises an alert.",
        "slow_ratio",
        "--slow-ratio",
        "ratio, more than 1",
    ),
)
