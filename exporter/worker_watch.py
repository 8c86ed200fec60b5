"""The process of each worker: its container, its CPU time, its death."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from exporter.evidence import container_history, ranks
from exporter.evidence.unknown import UnknownCounter
from exporter.evidence.worker_liveness import CpuIdleTracker, DeathTracker
from exporter.model.container import Container
from exporter.model.thresholds import Thresholds
from exporter.model.worker import DeadProcess, WorkerReading, WorkerReadings
from exporter.sources import processes
from exporter.sources.containers.directory import Listings, Running, holding
from exporter.sources.containers.systemd import Units
from gpuwarden.procfs import ProcessId


@dataclass(frozen=True, kw_only=True)
class WorkersSeen:
    """Workers, with the containers of dead ones; `ended` are such containers that do not run.

    `cpu_idle_s`, `dead_s` and `dead_processes` are as in `Snapshot`.
    """

    workers: WorkerReadings | None
    ended: tuple[Container, ...]
    cpu_idle_s: Mapping[int, float]
    dead_s: Mapping[str, float]
    dead_processes: Mapping[str, DeadProcess]


class WorkerWatch:
    """Keeps the state of each worker."""

    def __init__(self, thresholds: Thresholds, *, units: Units, unknown: UnknownCounter) -> None:
        self._thresholds = thresholds
        self._units = units
        self._unknown = unknown
        self._cpu_histories: dict[tuple[int, int], CpuIdleTracker] = {}
        self._deaths: dict[tuple[str, str], DeathTracker] = {}
        self._last_places: dict[tuple[str, str], Container] = {}
        self._processes: dict[tuple[str, str], ProcessId] = {}

    def observe(
        self, found: WorkerReadings | None, running: Running, listings: Listings, *, now_s: float
    ) -> WorkersSeen:
        """Add one sample."""
        by_id = {each.id: each for each in running.containers.values()}
        cpu_idle_s = self._measure_cpu_idle(found, by_id, now_s)
        ended: dict[str, Container] = {}
        if found is not None:
            found = self._locate_dead_workers(found, by_id, listings, ended)
        dead_s = self._measure_deaths(found, {**ended, **by_id}, now_s)
        return WorkersSeen(
            workers=found,
            ended=tuple(ended.values()),
            cpu_idle_s=cpu_idle_s,
            dead_s=dead_s,
            dead_processes=self._read_dead_processes(found),
        )

    def _locate_dead_workers(
        self, found: WorkerReadings, by_id: Mapping[str, Container], listings: Listings, ended: dict[str, Container]
    ) -> WorkerReadings:
        """Set the containers of dead workers; those that do not run join `ended`.

        A dead worker's lock has no holder, so its container is remembered, or is the only one that mounts its folder.
        If none mounts it, its file names its process.
        """
        trees = {each.pid: each for each in by_id.values() if each.kind == "process"}
        remembered: dict[tuple[str, str], Container] = {}
        sightings: list[WorkerReading] = []
        for sighting in found.workers:
            key = sighting.worker.worker, sighting.worker.incarnation
            place = self._last_places.get(key)
            if sighting.alive is False:
                if place is not None and place.kind == "systemd":
                    place = by_id.get(place.id) or self._units.refresh(place)
                else:
                    place = locate(place, sighting.folder, listings)
                    if place is None and is_unmounted(sighting.folder, listings):
                        place = processes.container_of_dead(sighting.worker)
                if place is not None and place.id not in by_id:
                    ended[place.id] = place
            elif sighting.container_id is not None:
                place = by_id.get(sighting.container_id, place)
            elif sighting.pid is not None:
                place = trees.get(sighting.pid, place)
            if place is not None:
                remembered[key] = place
            dead_in = None if sighting.alive is not False or place is None else place.id
            sightings.append(sighting if dead_in is None else replace(sighting, container_id=dead_in))
        self._last_places = remembered
        return replace(found, workers=tuple(sightings))

    def _read_dead_processes(self, found: WorkerReadings | None) -> dict[str, DeadProcess]:
        """The process of each dead worker, by name: the last holder of its lock, else the one in its file."""
        seen = () if found is None else found.workers
        started = {ProcessId(*process).pid: ProcessId(*process) for process in self._cpu_histories}
        held: dict[tuple[str, str], ProcessId] = {}
        dead: dict[str, DeadProcess] = {}
        live = {each.pid for each in seen if each.alive and each.pid is not None}
        for sighting in seen:
            key = sighting.worker.worker, sighting.worker.incarnation
            process = started.get(sighting.pid or 0) or self._processes.get(key)
            if process is not None:
                held[key] = process
            elif sighting.alive is False:
                process = processes.of_file(sighting.worker)
            if sighting.alive is False and process is not None:
                dead[sighting.worker.worker] = processes.dead_process(process, live)
        self._processes = held
        return dead

    def _measure_deaths(
        self, found: WorkerReadings | None, places: dict[str, Container], now_s: float
    ) -> dict[str, float]:
        """Seconds for which each worker has been dead, by name."""
        histories: dict[tuple[str, str], DeathTracker] = {}
        dead_s: dict[str, float] = {}
        for sighting in () if found is None else found.workers:
            if sighting.alive is not False:
                continue
            key = sighting.worker.worker, sighting.worker.incarnation
            place = places.get(sighting.container_id or "")
            if place is not None and place.paused:  # the time restarts when the container continues
                self._unknown.add(place.name, "death", container_history.PAUSED.reason)
                continue
            histories[key] = self._deaths.get(key) or DeathTracker(self._thresholds)
            dead_s[sighting.worker.worker] = histories[key].observe(
                None if place is None else place.incarnation, sighting.worker.heartbeat, now_s=now_s
            )
        self._deaths = histories
        return dead_s

    def _measure_cpu_idle(
        self, found: WorkerReadings | None, by_id: Mapping[str, Container], now_s: float
    ) -> dict[int, float]:
        """Seconds without CPU time and waits in the kernel, by pid of each live worker."""
        histories: dict[tuple[int, int], CpuIdleTracker] = {}
        workers_found = () if found is None else found.workers
        still_s: dict[int, float] = {}
        for sighting in workers_found:
            pid = sighting.pid
            if pid in still_s or not sighting.alive:  # several workers may share a process
                continue
            place = by_id.get(sighting.container_id or "")
            name = place.name if place else sighting.worker.worker
            if place is not None and place.paused:
                self._unknown.add(name, "cpu", container_history.PAUSED.reason)
                continue
            if pid is None:
                self._unknown.add(name, "cpu", "pid_unknown")
                continue
            try:
                use = processes.cpu_use(pid)
            except (OSError, ValueError):
                self._unknown.add(name, "cpu", "unreadable")
                continue
            process = (pid, use.start_ticks)
            histories[process] = self._cpu_histories.get(process) or CpuIdleTracker(self._thresholds)
            idle_s = histories[process].observe(use, now_s=now_s)
            if sighting.process is None or sighting.process.pid == pid:
                still_s[pid] = idle_s  # a supervisor uses none while its command works
        # Processes that were not read restart, as after a gap.
        self._cpu_histories = histories
        return still_s


def sharing(found: WorkerReadings | None) -> Mapping[str, Sequence[WorkerReading]]:
    """The live workers of each container, by its id; the ranks of a command instead of its only worker."""
    found_in: dict[str, list[WorkerReading]] = {}
    for each in () if found is None else found.workers:
        place = each.container_id or (processes.id_of_tree(each.worker) if each.ranks else None)
        if each.alive and each.pid is not None and place is not None:
            found_in.setdefault(place, []).append(each)
    return {place: ranks.as_workers(its[0]) or its if len(its) == 1 else its for place, its in found_in.items()}


def is_unmounted(folder: str, listings: Listings) -> bool:
    """Whether no container mounts a folder of workers."""
    asked = holding(listings)
    return not any(
        listing is None
        or any(folder in each.folders for each in (*listing.containers.values(), *listing.down.values()))
        for listing in asked
    )


def locate(last: Container | None, folder: str, listings: Listings) -> Container | None:
    """The present container of a dead worker, as its engine lists it."""
    if last is not None:
        listing = listings.get(last.kind)
        if listing is None:
            return last
        listed = listing.containers.get(last.id) or listing.down.get(last.id)
        if listed is None and not last.listed:  # its engine answers again
            return replace(last, listed=True)
        return listed or last
    asked = holding(listings)
    known = [listing for listing in asked if listing is not None]
    if len(known) < len(asked):
        return None  # the failing engine may have another container with the folder
    every = (each for listing in known for each in (*listing.containers.values(), *listing.down.values()))
    found = [each for each in every if folder in each.folders]
    return found[0] if len(found) == 1 else None
