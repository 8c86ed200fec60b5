"""Containers and their measurements. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from exporter.model.unknown import Unknown
from gpuwarden import conditions

KUBERNETES: Final = "kubernetes"
"""Kind of a pod's container."""

EMPTY_MAPPING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A server's probe: its `docker` health check, or `http`."""

    kind: str
    restart_after_s: float
    port: int = 0
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class HealthCheck:
    """Docker's `newest` health check result (id or empty), stale after `fresh_s`."""

    status: str
    failing_streak: int
    newest: str
    passed: bool
    fresh_s: float


@dataclass(frozen=True, kw_only=True)
class Server:
    """A container with a probe label."""

    probe: Probe | Unknown
    address: str | None = None
    health: HealthCheck | None = None


@dataclass(frozen=True, kw_only=True)
class VramBudget:
    """A container's VRAM budget per GPU."""

    budget_bytes: int | None = None
    recyclable: bool = False
    invalid: Unknown | None = None


@dataclass(frozen=True, kw_only=True)
class Container:
    """An engine's container, a systemd service, or a worker's process tree.

    Attributes:
        incarnation: changes at every start.
        pid: 0 if it does not run.
        gpu_request: as in NVIDIA_VISIBLE_DEVICES; also render nodes, `dri` for all.
        folders: mounted subdirectories of `$GPUWARDEN_RUNTIME_DIR`.
        managed: whether it opted in to restarts.
        group: cgroup directory.
        listed: whether its engine still does.
    """

    kind: str
    id: str
    name: str
    incarnation: str
    pid: int
    gpu_request: tuple[str, ...] | None
    image: str | None = None
    folders: tuple[str, ...] = ()
    server: Server | None = None
    paused: bool = False
    managed: bool | None = None
    vram_budget: VramBudget = field(default_factory=VramBudget)
    namespace: str | None = None
    pod: str | None = None
    group: str | None = None
    listed: bool = True

    @property
    def unit(self) -> str:
        """Its pod's uid, or its id."""
        return self.incarnation.partition("@")[0] if self.kind == KUBERNETES else self.id


class GpuShare(NamedTuple):
    """One container's part of one GPU; `None` is unknown.

    Attributes:
        attributed: whether all work on the GPU has known owners.
        busiest_ratio: of the busiest engine.
    """

    gpu: str
    utilization_ratio: float | None
    memory_bytes: int | None
    attributed: bool | None = None
    busiest_ratio: float | None = None


class RamUse(NamedTuple):
    """A container's RAM, bytes."""

    usage_bytes: int | None
    anon_bytes: int | None = None
    working_set_bytes: int | None = None
    oom_kills: int | None = None
    unknown: Unknown | None = None


class ContainerEvidence(NamedTuple):
    """One container's measurements and idle times; `None` is unknown.

    A NamedTuple because a dataclass takes three times as long to create.
    """

    container: Container
    shares: tuple[GpuShare, ...]
    gpus: tuple[str, ...]
    gpu_idle_s: float | None
    gpu_unknown: Unknown | None
    busy_s: Mapping[str, float]
    ram: RamUse
    ram_idle_s: float | None
    ram_unknown: Unknown | None
    io_idle_s: float | None = None
    page_fault_idle_s: float | None = None
    cpu_idle_s: float | None = None
    heavy_work_idle_s: float | None = None
    heavy_page_fault_idle_s: float | None = None
    work_unknown: Unknown | None = None
    gpu_saturated_s: float | None = None
    """Time with the same GPUs saturated and the others idle."""
    gpu_last_busy_age_s: float | None = None
    """Time since any was busy."""
    peak_bytes: Mapping[str, int] = EMPTY_MAPPING
    """Memory maximum by GPU."""
    lost_gpus: tuple[str, ...] = ()
    gpu_lost_s: float | None = None
    """Time with a GPU lost and no other busy."""
    nameless: tuple[str, ...] = ()
    """Requested names without a known UUID."""
    pauses: tuple[tuple[float, float], ...] = ()
    """Start and end, CLOCK_BOOTTIME seconds."""
    paused_s: float = 0.0
    """All pauses, seconds."""

    @property
    def ram_bytes(self) -> int | None:
        """RAM in use, bytes."""
        return self.ram.usage_bytes

    @property
    def work_idle_s(self) -> float | None:
        """Seconds without I/O, page faults and CPU time."""
        return conditions.least(self.io_idle_s, self.page_fault_idle_s, self.cpu_idle_s)

    @property
    def no_progress_s(self) -> float | None:
        """Seconds without progress (A14b, A19)."""
        return conditions.no_progress_s(
            gpu_saturated_s=self.gpu_saturated_s,
            gpu_last_busy_age_s=self.gpu_last_busy_age_s,
            cpu_idle_s=self.cpu_idle_s,
            ram_idle_s=self.ram_idle_s,
            io_idle_s=self.io_idle_s,
            page_fault_idle_s=self.page_fault_idle_s,
        )

    @property
    def spinning_s(self) -> float | None:
        """Seconds with only a GPU active, and saturated."""
        return conditions.spinning_s(
            gpu_saturated_s=self.gpu_saturated_s,
            ram_idle_s=self.ram_idle_s,
            io_idle_s=self.io_idle_s,
            page_fault_idle_s=self.page_fault_idle_s,
        )


@dataclass(frozen=True, kw_only=True)
class ServerEvidence:
    """One server, its probe results, and its number of workers."""

    container: Container
    probe: Probe | Unknown
    workers: int | None
    answered: bool | None = None
    probe_failing_s: float | None = None
    unknown: Unknown | None = None
    message: str = ""
