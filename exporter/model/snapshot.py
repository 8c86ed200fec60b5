"""One sample of the whole host. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from exporter.model.thresholds import Thresholds

if TYPE_CHECKING:  # not for the processes that ask drivers: they know GPUs alone, and are to be small
    from gpuwarden.state_file import JobFile, Stamp
from exporter.model.container import ContainerEvidence, GpuShare, ServerEvidence
from exporter.model.gpu import GpuReadings, GpuTotals
from exporter.model.worker import TaskReadings, WorkerReadings, WorkerSighting


@dataclass(frozen=True, kw_only=True)
class DriverHealth:
    """How asking the drivers of one source went so far, and what they have reported unasked: NVIDIA's alone does.

    Of the processes that ask, `killed` are those of which a call did not return, and `abandoned` those of them that
    still hang in it, beyond any signal. `xids` counts the errors that it reported, by GPU and NVIDIA's number for them.
    """

    killed: int = 0
    abandoned: int = 0
    xids: Mapping[tuple[str, int], int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When a process was asked for what it has told last, monotonic, and how long its answer took, both in seconds."""

    asked_s: float
    took_s: float


@dataclass(frozen=True, kw_only=True)
class SourceHealth:
    """How one source's last reading went, why it failed where it did, and when one last went well, Unix seconds.

    Of engines, which are asked in threads of their own, it is the listing: what that took, and when it was taken. Of
    drivers, which are asked in processes of their own, it is the answer: what that took, and when it was asked for.
    """

    source: str
    success: bool
    duration_s: float
    because: str | None = None
    succeeded_unix_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything known at `taken`, immutable: scrapes and `/evidence` read it and change nothing."""

    host: str
    taken: "Stamp"
    gpus: GpuReadings | None
    workers: WorkerReadings | None
    containers: tuple[ContainerEvidence, ...]
    sources: tuple[SourceHealth, ...]
    thresholds: Thresholds
    """By which the evidence was judged."""
    ended: tuple[ContainerEvidence, ...] = ()
    """Where dead workers were, as far as that does not run any more: identity, and no figures."""
    dead_s: Mapping[str, float] = field(default_factory=dict)
    """For how long each dead worker's lock has been seen free beside its files, seconds, by worker."""
    cpu_still_s: Mapping[int, float] = field(default_factory=dict)
    """For how long each lock holder's process has used no CPU time, seconds, by pid; one not here is unknown."""
    servers: tuple[ServerEvidence, ...] | None = None
    """The containers that are to be asked as servers; `None` when containers cannot be listed."""
    tasks: TaskReadings | None = None
    """The tasks of other runners; `None` when no folder of theirs is given, or none can be read."""
    drivers: Mapping[str, DriverHealth] = field(default_factory=dict)
    """By the source whose drivers are asked in a process of its own."""
    gpu_totals: Mapping[str, GpuTotals] = field(default_factory=dict)
    """What has been counted of each GPU, by UUID."""
    unplaced: tuple[GpuShare, ...] = ()
    """What the processes on each GPU's list have of it that are in none of the containers; empty where it is not known
    of every container which processes are in it."""
    returning_bytes: Mapping[str, int] = field(default_factory=dict)
    """How much of each GPU's memory processes held that have ended and the driver counts as in use still, by UUID; of
    one not here unknown."""
    gpu_lost_s: Mapping[str, float] = field(default_factory=dict)
    """For how long each GPU has been lost, seconds, by UUID; 0 for one that is there, and of one not here unknown."""
    lost_gpus: tuple[str, ...] = ()
    """The GPUs that are lost, by UUID; without those that have not told theirs."""
    unseen: tuple[str, ...] = ()
    """Containers that run and may be ranked by their VRAM budgets, of which nothing more is known."""
    apart: Mapping[str, ContainerEvidence] = field(default_factory=dict)
    """By worker, of each that shares its container with another live one: the same of what counts as its own processes,
    its RAM without the page cache. A worker that has its container to itself is not here."""
    unknown: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    """How many samples so far left something unknown, by (container, what, reason)."""
    took_s: float | None = None
    """How long the look took, seconds."""

    def container_of(self, sighting: WorkerSighting) -> ContainerEvidence | None:
        """The container a worker lives in, or its own process tree; of a dead one, where it was."""
        by_id, by_pid = self._places
        if sighting.container_id is not None:
            return by_id.get(sighting.container_id)
        return None if sighting.pid is None else by_pid.get(sighting.pid)

    def grace_s(self, job: "JobFile") -> float | None:
        """How long after its start a window of GPU health begins at the soonest (A7); `None` of a job without a GPU."""
        limits = self.thresholds
        return limits.patience.grace_s(job, grace_s=limits.health_grace_s, window_s=limits.health_window_s)

    def cpu_still_of(self, sighting: WorkerSighting) -> float | None:
        """For how long a worker's process has been seen to use no CPU time, seconds."""
        return None if sighting.pid is None else self.cpu_still_s.get(sighting.pid)

    @cached_property
    def _places(self) -> tuple[Mapping[str, ContainerEvidence], Mapping[int, ContainerEvidence]]:
        """Containers by id, and process trees by the pid of their worker: asked several times for each worker."""
        by_id = {each.container.id: each for each in (*self.ended, *self.containers)}
        trees = (each for each in self.containers if each.container.kind == "process")
        return by_id, {each.container.pid: each for each in trees}
