"""What counts as idle, as still, as work, as a gap, and as dead: every limit of the exporter, with its default.

A new one is a field here, a setting of the same name (exporter/settings.py) and, where a rule reads it, a row of
`exporter.collectors.thresholds`. Pure.
"""

from dataclasses import dataclass, field

from exporter.model.timeouts import Patience


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The limits that evidence is judged by. Settings pass to the fields of the same name.

    Args:
        idle_ratio: a GPU at or under this share of its time is idle (A2).
        pegged_ratio: a GPU at or over this share of its time does one thing without a pause (A14b).
        ram_delta_bytes: RAM that moved by no more than this, either way, is still (A2).
        io_still_bytes_per_s: a container that reads and writes no more than this does no I/O (A5).
        faults_still_per_s: a container with no more page faults than this touches no new memory (A5).
        cpu_still_ratio: a container that uses no more than this share of one CPU computes nothing (A5).
        gap_max_s: samples further apart than this prove nothing about the time between, seconds.
        dead_after_s: a worker that owns a job is dead after this long without heartbeat and CPU time, or without its
            process, seconds (A14).
        health_window_s: a GPU job whose container shows no sign of life for so long is wedged, seconds (A7).
        health_grace_s: time from the start of an attempt that GPU health leaves to its load, seconds (A7).
        patience: how long a job may show no sign of life, by its phase.
        vram_floor_bytes: a GPU with less free memory than this has too little (C3).
        vram_tie_bytes: two who are over their VRAM budgets by amounts this close are level.
        vram_return_s: for how long at most what ended processes held is taken to be on its way back, seconds.
        gpu_lost_s: people are told of a GPU that has been lost for this long, seconds.
        never_answered_s: and of a server that has been asked for this long and has never answered, seconds.
        server_silent_times: and of one that leaves askings unanswered for so many times the silence that it is allowed.
        slowed_ratio: and of a job each step of which takes so many times as long as its own mean.
        xids_fatal: and of these errors of a GPU, NVIDIA's numbers for what the card or its firmware does not get over
            without a reset: it stopped processing (46), double-bit ECC (48), internal micro-controller halt (62), rows
            that could not be remapped (64), NVLink (74), fallen off the bus (79), uncontained ECC (95), its firmware
            (GSP) silent or in error (119, 120), ECC without recovery (140), no initialisation (143). Those of a
            program, as 13, 31, 43 and 45, are no fault of the card.
            https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
    """

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
    patience: Patience = field(default_factory=Patience)
    vram_floor_bytes: int = 1536 * 2**20
    vram_tie_bytes: int = 256 * 2**20
    vram_return_s: float = 30.0
    gpu_lost_s: float = 60.0
    never_answered_s: float = 1800.0
    server_silent_times: float = 10.0
    slowed_ratio: float = 2.0
    xids_fatal: tuple[int, ...] = (46, 48, 62, 64, 74, 79, 95, 119, 120, 140, 143)
