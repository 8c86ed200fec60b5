"""Limits of the exporter, with their defaults. Pure.

Each is a setting of the same name. Those that rules read are in `exporter.collectors.thresholds`.
"""

from dataclasses import dataclass, field

from exporter.model.timeouts import PhaseTimeouts


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The limits that evidence is judged by. `exporter.settings` describes each."""

    idle_ratio: float = 0.05
    pegged_ratio: float = 0.99
    ram_delta_bytes: int = 5120 * 2**20
    io_still_bytes_per_s: float = 256 * 2**10
    faults_still_per_s: float = 50.0
    cpu_still_ratio: float = 0.05
    gap_max_s: float = 5.0
    dead_after_s: float = 30.0
    health_window_s: float = 300.0
    health_grace_s: float = 360.0
    timeouts: PhaseTimeouts = field(default_factory=PhaseTimeouts)
    vram_floor_bytes: int = 1536 * 2**20
    vram_tie_bytes: int = 256 * 2**20
    vram_return_s: float = 30.0
    gpu_lost_s: float = 60.0
    never_answered_s: float = 1800.0
    server_silent_times: float = 10.0
    slowed_ratio: float = 2.0
    # Errors that only a reset fixes, in order: processing stopped, double-bit ECC, controller halt, rows not remapped,
    # NVLink, off the bus, uncontained ECC, GSP (two), ECC, initialisation.
    # https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
    xids_fatal: tuple[int, ...] = (46, 48, 62, 64, 74, 79, 95, 119, 120, 140, 143)
