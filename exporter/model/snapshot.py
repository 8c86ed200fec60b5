"""One sample of the host. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from exporter.model.thresholds import Thresholds
from gpuwarden import conditions

if TYPE_CHECKING:  # keeps driver processes small
    from gpuwarden.evidence import OnDemandFacts
    from gpuwarden.state_file import JobFile, Stamp
from exporter.model.container import ContainerEvidence, GpuShare, ServerEvidence
from exporter.model.gpu import GpuReadings, GpuTotals
from exporter.model.worker import DeadProcess, TaskReadings, WorkerReading, WorkerReadings


@dataclass(frozen=True, kw_only=True)
class DriverHealth:
    """Driver processes `killed` or, beyond signals, `abandoned` in a call; `xids` by GPU and number."""

    killed: int = 0
    abandoned: int = 0
    xids: Mapping[tuple[str, int], int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When a process was last read, monotonic."""

    asked_s: float
    took_s: float


@dataclass(frozen=True, kw_only=True)
class SourceHealth:
    """Result of one source's last reading."""

    source: str
    success: bool
    duration_s: float
    message: str | None = None
    succeeded_unix_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One sample of the host."""

    host: str
    taken: "Stamp"
    gpus: GpuReadings | None
    workers: WorkerReadings | None
    containers: tuple[ContainerEvidence, ...]
    sources: tuple[SourceHealth, ...]
    thresholds: Thresholds
    ended: tuple[ContainerEvidence, ...] = ()
    """Stopped containers of dead workers."""
    dead_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since each worker's lock became free."""
    dead_processes: Mapping[str, DeadProcess] = field(default_factory=dict)
    """By worker."""
    cpu_idle_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds without CPU time, by pid."""
    servers: tuple[ServerEvidence, ...] | None = None
    """`None` if containers cannot be listed."""
    tasks: TaskReadings | None = None
    """`None` if no folder can be read."""
    drivers: Mapping[str, DriverHealth] = field(default_factory=dict)
    gpu_totals: Mapping[str, GpuTotals] = field(default_factory=dict)
    unplaced: tuple[GpuShare, ...] = ()
    """Use outside containers; empty if partly unknown."""
    reclaiming_bytes: Mapping[str, int] = field(default_factory=dict)
    """Unfreed memory of ended processes by GPU, if known."""
    gpu_lost_s: Mapping[str, float] = field(default_factory=dict)
    """0 if present; others are unknown."""
    lost_gpus: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    """Budgeted containers that cannot be inspected."""
    worker_evidence: Mapping[str, ContainerEvidence] = field(default_factory=dict)
    """For shared containers; RAM without page cache."""
    job_evidence: Mapping[str, ContainerEvidence] = field(default_factory=dict)
    unknown: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    """Unknown samples by (container, field, reason)."""
    advertised_bytes: int | None = None
    declared_bytes: int | None = None
    on_demand: tuple["OnDemandFacts", ...] = ()
    took_s: float | None = None

    def container_of(self, sighting: WorkerReading) -> ContainerEvidence | None:
        """The worker's (last) container or process tree."""
        by_id, by_pid = self._places
        if sighting.container_id is not None:
            return by_id.get(sighting.container_id)
        return None if sighting.pid is None else by_pid.get(sighting.pid)

    def evidence_of_job(self, sighting: WorkerReading) -> ContainerEvidence | None:
        """Evidence of its job."""
        return self.job_evidence.get(sighting.worker.worker) or self.container_of(sighting)

    def health_grace_s(self, job: "JobFile") -> float | None:
        """Seconds until the GPU is checked (A7)."""
        limits = self.thresholds
        return limits.timeouts.health_grace_s(job, grace_s=limits.health_grace_s, window_s=limits.health_window_s)

    def server_fault_idle_s(self, server: ServerEvidence) -> float | None:
        """Seconds without the page faults of a load or a compilation; `None` is unknown."""
        place = next((each for each in self.containers if each.container.id == server.container.id), None)
        faults_s = place.heavy_page_fault_idle_s if place else None
        return conditions.server_fault_idle_s(faults_s, server.probe_failing_s, self.thresholds.timeouts.busy_s)

    def cpu_still_of(self, sighting: WorkerReading) -> float | None:
        """Seconds without CPU time."""
        return None if sighting.pid is None else self.cpu_idle_s.get(sighting.pid)

    @cached_property
    def _places(self) -> tuple[Mapping[str, ContainerEvidence], Mapping[int, ContainerEvidence]]:
        by_id = {each.container.id: each for each in (*self.ended, *self.containers)}
        trees = (each for each in self.containers if each.container.kind == "process")
        return by_id, {each.container.pid: each for each in trees}
