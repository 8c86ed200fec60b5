"""GPUs: readings, processes, MIG instances. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple


class GpuProcess(NamedTuple):
    """A GPU's process, with its host pid."""

    pid: int
    utilization_ratio: float | None
    memory_bytes: int | None
    busiest_ratio: float | None = None
    """Of its busiest engine, if greater."""


RATIO_DIGITS: Final = 9
"""0.90 - 0.85 must not exceed 0.05."""


THROTTLE_REASONS: Final = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)
"""Bits of nvmlClocksThrottleReasons, lowest first."""


STALL_METRICS: Final = ("gpu", "utilization", "memory", "processes", "process_utilization")
"""Metrics that decide a stall."""


UNLOGGED_REASONS: Final = frozenset({"hung", "asleep", "not_told"})
"""Page `/` omits these: hangs are logged, the others come and go."""


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """Sensors and error counters; `unknown` has the reason by metric.

    ECC errors count since the driver was loaded, unless `lifetime`.
    """

    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_hertz: float | None = None
    memory_clock_hertz: float | None = None
    throttled: Sequence[str] | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    ecc_lifetime_corrected: int | None = None
    ecc_lifetime_uncorrected: int | None = None
    remapped_rows_corrected: int | None = None
    remapped_rows_uncorrected: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    pcie_replays: int | None = None
    pcie_errors: Mapping[str, int] | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MigInstance:
    """An instance of the GPU `parent` (UUID)."""

    parent: str
    number: int
    gpu_instance: int
    compute_instance: int
    shares_memory: bool = False


NO_ATTRIBUTION: Final = "none"
"""Attribution without any utilisation."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG instance of it.

    Attributes:
        unknown: why it cannot list `processes`.
        memory_free_bytes: less than size - used if the driver reserves memory.
        source: of its readings, if not the common one.
        node: render node, such as `renderD128`.
        attribution: of utilisation, to a `process`, the `device` or `none`.
        lost: `None` if unknown.
    """

    uuid: str
    index: int
    name: str
    utilization_ratio: float | None
    memory_used_bytes: int | None
    memory_size_bytes: int | None
    processes: tuple[GpuProcess, ...] | None
    unknown: str | None = None
    memory_free_bytes: int | None = None
    source: str | None = None
    node: str | None = None
    other_names: tuple[str, ...] = ()
    attribution: str = "process"
    figures: GpuFigures = field(default_factory=GpuFigures)
    xids_watched: bool = False
    mig: MigInstance | None = None
    lost: bool | None = False

    @property
    def number(self) -> str:
        """`0`, or `0:1` for an instance."""
        return str(self.index) if self.mig is None else f"{self.index}:{self.mig.number}"

    @property
    def place(self) -> int:
        """Index or render node's minor number."""
        return self.index if self.node is None else int(self.node.removeprefix("renderD"))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in requests. Drivers before R470 named instances by numbers."""
        if self.node is not None:
            return self.uuid, self.node, *self.other_names
        if self.mig is None:
            return self.uuid, self.number
        older = f"MIG-{self.mig.parent}/{self.mig.gpu_instance}/{self.mig.compute_instance}"
        return self.uuid, self.number, older, f"{self.index}/gi{self.mig.gpu_instance}"

    @property
    def is_hung(self) -> bool:
        """Whether a driver call hangs."""
        return self.figures.unknown.get("gpu") == "hung"

    @property
    def unread_metrics(self) -> Mapping[str, str]:
        """Reasons of unknown `STALL_METRICS`, without `UNLOGGED_REASONS`."""
        unknown = self.figures.unknown
        return {
            each: unknown[each] for each in STALL_METRICS if each in unknown and unknown[each] not in UNLOGGED_REASONS
        }

    @cached_property
    def by_pid(self) -> Mapping[int, Sequence[GpuProcess]]:
        """Processes by pid."""
        found: dict[int, list[GpuProcess]] = {}
        for process in self.processes or ():
            found.setdefault(process.pid, []).append(process)
        return found

    @cached_property
    def listed_ratio(self) -> float | None:
        """Utilisation of listed processes."""
        known = [process[1] for process in self.processes or ()]
        return None if self.processes is None or None in known else float(sum(filter(None, known)))

    @cached_property
    def unattributed_ratio(self) -> float | None:
        """Utilisation beyond the listed processes; may be negative."""
        if self.utilization_ratio is None or self.listed_ratio is None:
            return None
        return round(self.utilization_ratio - self.listed_ratio, RATIO_DIGITS)

    @cached_property
    def hidden_ratio(self) -> float | None:
        """Utilisation that no listed process can have caused.

        Some drivers count copies and video, so each process counts with its busiest engine.
        """
        if (beyond := self.unattributed_ratio) is None:
            return None
        more = [each for each in self.processes or () if each[3] is not None]
        others = ((each.busiest_ratio or 0.0) - (each.utilization_ratio or 0.0) for each in more)
        return round(beyond - sum(others), RATIO_DIGITS) if more else beyond

    @cached_property
    def listed_bytes(self) -> int | None:
        """Memory of listed processes."""
        known = [process.memory_bytes for process in self.processes or ()]
        return None if self.processes is None or None in known else sum(used or 0 for used in known)


UNIDENTIFIED: Final = "unidentified-"
"""Name prefix of GPUs without a UUID, before the index."""


NVIDIA_SOURCE: Final = "gpu"
"""Source of NVIDIA GPUs."""


DRM_SOURCE: Final = "drm"
"""Source of AMD and Intel GPUs."""


@dataclass(frozen=True, kw_only=True)
class GpuReadings:
    """Every GPU of the host.

    Attributes:
        failed: sources without an answer.
        gone: UUIDs of missing GPUs by render node.
        nvidia_unread: NVIDIA hardware may lack readings.
        unlisted: pids with unreadable files; `None` for too many.
        dropped: UUIDs that drivers no longer list.
    """

    source: str
    gpus: tuple[Gpu, ...]
    failed: tuple[str, ...] = ()
    gone: Mapping[str, str] = field(default_factory=dict)
    nvidia_unread: bool = False
    unlisted: tuple[int, ...] | None = ()
    dropped: tuple[str, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, Sequence[int]]:
        """Positions by name."""
        found: dict[str, list[int]] = {}
        for place, gpu in enumerate(self.gpus):
            for name in gpu.names:
                found.setdefault(name, []).append(place)
        return found

    @cached_property
    def by_pid(self) -> Mapping[int, Sequence[int]]:
        """Positions by pid."""
        found: dict[int, list[int]] = {}
        for place, gpu in enumerate(self.gpus):
            for pid in gpu.by_pid:
                found.setdefault(pid, []).append(place)
        return found

    @cached_property
    def present(self) -> frozenset[str]:
        """UUIDs of present GPUs."""
        return frozenset(gpu.uuid for gpu in self.gpus if gpu.lost is False)

    def filter_present(self, uuids: tuple[str, ...]) -> tuple[str, ...]:
        """Return the UUIDs that are present."""
        return tuple(uuid for uuid in uuids if uuid in self.present)

    @cached_property
    def hung(self) -> frozenset[str]:
        """UUIDs of hung GPUs."""
        return frozenset(gpu.uuid for gpu in self.gpus if gpu.is_hung)

    @cached_property
    def nodes_are_known(self) -> bool:
        """Whether any render node is or was present."""
        return bool(self.gone) or DRM_SOURCE in self.failed or any(gpu.node is not None for gpu in self.gpus)

    @cached_property
    def numbered(self) -> frozenset[str]:
        """UUIDs of NVIDIA GPUs."""
        return frozenset(gpu.uuid for gpu in self.gpus if gpu.node is None)


@dataclass(frozen=True, kw_only=True)
class GpuTotals:
    """Busy seconds, and unknown samples by (metric, reason)."""

    busy_s: float | None = None
    unknown: Mapping[tuple[str, str], int] = field(default_factory=dict)
