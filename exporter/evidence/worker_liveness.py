"""Whether a worker is dead, and which workers share a container. Pure."""

from collections.abc import Iterable

from exporter.model.container import Container
from exporter.model.thresholds import Thresholds
from exporter.model.worker import CpuUse, WorkerReadings, WorkerSighting
from gpuwarden.state_file import Stamp


def is_dead(sighting: WorkerSighting, cpu_still_s: float | None, *, now: Stamp, dead_after_s: float) -> bool:
    """Whether a worker owns a job and lives, but has had no heartbeat and no CPU time for `dead_after_s` (A14).

    Without a heartbeat alone it may well work: a native call that holds the interpreter lets no other thread beat.
    """
    heartbeat_age_s = sighting.worker.heartbeat.age_s(now)
    if sighting.job is None or not sighting.alive or heartbeat_age_s is None or cpu_still_s is None:
        return False
    return min(heartbeat_age_s, cpu_still_s) >= dead_after_s


def may_hold_others(container: Container, workers: WorkerReadings, containers: Iterable[Container]) -> bool:
    """Whether workers may live in a container beside those that are known to.

    One that cannot be placed, or whose lock cannot be tested, may be in what has its folder; where nothing has it, in
    whatever has no folder of its own. A worker file that cannot be read counts for the containers with its folder.
    """
    if not workers.unread.isdisjoint(container.folders):
        return True
    known = list(containers)
    mounted = {folder for each in known for folder in each.folders}
    if container.kind == "systemd" and workers.unread - mounted:
        return True  # a service has no folder mounted: the file may be of one in it
    trees = {each.pid for each in known if each.kind == "process"}
    for each in workers.workers:
        if each.alive is None:
            placed = False
        elif each.alive:
            placed = each.container_id is not None or each.pid in trees
        else:  # the dead are in nobody's way
            placed = True
        if not placed and each.folder in (container.folders or {each.folder} - mounted):
            return True
    return False


def workers_of(container: Container, workers: WorkerReadings, running: Iterable[Container]) -> int | None:
    """How many workers are its own, dead ones included; `None` where there may be others than those that are known."""
    count = sum(each.container_id == container.id for each in workers.workers)
    return count if count or not may_hold_others(container, workers, running) else None


class DeathHistory:
    """Of one dead worker: since when its lock has been seen free, in one incarnation of its container, without a gap.

    A container that was started since may bring its worker back by itself: it is given the whole time anew. So is a
    worker whose heartbeat moves: it lost its lock, or holds it in another kernel than ours, and lives.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._last_s: float | None = None
        self._since_s = 0.0
        self._seen: tuple[str | None, Stamp] | None = None

    def observe(self, place: str | None, heartbeat: Stamp, *, now_s: float) -> float:
        """Take in one look, with the container's incarnation where known; returns the time so far, seconds."""
        unbroken = self._last_s is not None and 0 <= now_s - self._last_s <= self._gap_max_s
        if not unbroken or (place, heartbeat) != self._seen:
            self._since_s = now_s
        self._last_s = now_s
        self._seen = place, heartbeat
        return now_s - self._since_s


class CpuHistory:
    """Of one process: since when its CPU time has not moved, as far as it was looked at without a gap."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._gap_max_s = thresholds.gap_max_s
        self._last_s: float | None = None
        self._since_s = 0.0
        self._used_ticks = 0

    def observe(self, use: CpuUse, *, now_s: float, stores: bool = False) -> float:
        """Take in one sample; returns for how long the process has used no CPU time, seconds.

        A process that slept with its machine has used none either, so a gap starts the duration anew. So does a wait
        for storage where its job `stores`: to close a file on NFS waits for the server, and who does that with the
        interpreter held, as PyTorch ends an archive, neither beats nor computes meanwhile.
        """
        unbroken = self._last_s is not None and 0 <= now_s - self._last_s <= self._gap_max_s
        if not unbroken or use.used_ticks != self._used_ticks or (stores and use.uninterruptible):
            self._since_s = now_s
        self._last_s = now_s
        self._used_ticks = use.used_ticks
        return now_s - self._since_s
