"""Whether a worker is dead, and how many workers share a container. Pure."""

from collections.abc import Iterable

from exporter.model.container import Container
from exporter.model.thresholds import Thresholds
from exporter.model.worker import CpuUse, WorkerReading, WorkerReadings
from gpuwarden.state_file import Stamp


def is_dead(sighting: WorkerReading, cpu_idle_s: float | None, *, now: Stamp, dead_after_s: float) -> bool:
    """Whether a live worker with a job is dead (A14): a native call may block its heartbeats alone."""
    heartbeat_age_s = sighting.worker.heartbeat.age_s(now)
    if sighting.job is None or not sighting.alive or heartbeat_age_s is None or cpu_idle_s is None:
        return False
    return min(heartbeat_age_s, cpu_idle_s) >= dead_after_s


def may_have_unknown_workers(container: Container, workers: WorkerReadings, containers: Iterable[Container]) -> bool:
    """Whether a container may have unknown workers: unplaced ones or unreadable files of its folder, or of none."""
    if not workers.unread.isdisjoint(container.folders):
        return True
    known = list(containers)
    mounted = {folder for each in known for folder in each.folders}
    if container.kind == "systemd" and workers.unread - mounted:
        return True  # a service mounts no folder
    trees = {each.pid for each in known if each.kind == "process"}
    for each in workers.workers:
        if each.alive is None:
            placed = False
        elif each.alive:
            placed = each.container_id is not None or each.pid in trees
        else:
            placed = True
        if not placed and each.folder in (container.folders or {each.folder} - mounted):
            return True
    return False


def count_workers(container: Container, workers: WorkerReadings, running: Iterable[Container]) -> int | None:
    """Count the workers that end with a container, also dead ones; `None` if some may be unknown."""
    running = list(running)
    ends = {container.id, *(each.id for each in running if each.unit == container.unit)}
    count = sum(each.container_id in ends for each in workers.workers)
    return count if count or not may_have_unknown_workers(container, workers, running) else None


class DeathTracker:
    """Measure how long a dead worker's lock has been free, in one incarnation of its container."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._last_s: float | None = None
        self._since_s = 0.0
        self._seen: tuple[str | None, Stamp] | None = None

    def observe(self, place: str | None, heartbeat: Stamp, *, now_s: float) -> float:
        """Add one sample, with the container's incarnation `place`; returns seconds."""
        unbroken = self._last_s is not None and 0 <= now_s - self._last_s <= self._gap_max_s
        if not unbroken or (place, heartbeat) != self._seen:
            self._since_s = now_s
        self._last_s = now_s
        self._seen = place, heartbeat
        return now_s - self._since_s


class CpuIdleTracker:
    """Measure how long a process used no CPU time."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._last_s: float | None = None
        self._since_s = 0.0
        self._used_ticks = 0

    def observe(self, use: CpuUse, *, now_s: float) -> float:
        """Add one sample; returns seconds. A kill has no effect in the kernel, where NFS may hold Python's lock."""
        unbroken = self._last_s is not None and 0 <= now_s - self._last_s <= self._gap_max_s
        if not unbroken or use.used_ticks != self._used_ticks or use.uninterruptible:
            self._since_s = now_s
        self._last_s = now_s
        self._used_ticks = use.used_ticks
        return now_s - self._since_s
