"""Looks at the host once a second and keeps the newest snapshot. Read-only: nothing it looks at is changed.

Each source fails alone: what it would have told is unknown in that snapshot, and everything else stands.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import structlog

from exporter.change_log import ChangeLog
from exporter.evidence import container_history, gpu_attribution, process_ownership
from exporter.evidence.container_history import ContainerHistory, RamUse, WorkUse
from exporter.evidence.gpu_attribution import GpuUse
from exporter.evidence.gpu_history import GpuHistory
from exporter.evidence.gpu_loss import Losses, LossHistory
from exporter.evidence.vram_budgets import may_be_ranked
from exporter.evidence.vram_reclaim import ReturnHistory
from exporter.evidence.worker_liveness import CpuHistory, DeathHistory
from exporter.model.container import Container, ContainerEvidence, GpuShare, ServerEvidence
from exporter.model.gpu import NUMBERED, WITH_NODES, GpuReadings
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import WorkerReadings, WorkerSighting
from exporter.source_runner import Driver, SourceRunner
from exporter.sources import processes, workers
from exporter.sources.containers.cgroups import Places, Unlisted
from exporter.sources.containers.poller import Listing
from exporter.sources.containers.systemd import Units
from exporter.sources.gpu.nvml.presence import NvidiaHost
from exporter.sources.process_io import Work
from exporter.sources.servers.monitor import Servers
from exporter.sources.tasks import Tasks
from gpuwarden import cgroup, clock
from gpuwarden.state_file import Stamp

log: Final = structlog.get_logger("exporter")

Listings = Mapping[str, Listing | None]
"""The newest listing of each engine, by kind; `None` where it tells none."""

RESTED_MAX_S: Final = 10.0
"""For how long it is believed of a container that its processes have done nothing because none has had any CPU time,
seconds: one that was moved by hand into a cgroup of another's CPU time would do so unseen."""

HOLDING: Final = frozenset({"docker", "podman"})
"""The engines whose containers can be servers, or have folders of workers mounted: of a pod neither is read."""

BEGINNING_TOLD: Final = HOLDING | {"kubernetes", "systemd"}
"""The kinds of containers of which it is told which process they began with; of others `pid` is any."""


class Containers(Protocol):
    """Where the running containers of one kind come from."""

    def latest(self) -> Listing:
        """The newest listing, or OSError with the reason why there is none."""


class Sampler:
    """Takes a snapshot every `interval_s`, in a thread of its own."""

    def __init__(
        self,
        *,
        host: str,
        directory: Path,
        containers: Mapping[str, Containers],
        gpus: Callable[[], GpuReadings] | None,
        drm: Callable[[], GpuReadings] | None = None,
        thresholds: Thresholds,
        interval_s: float = 1.0,
        servers: Servers | None = None,
        units: Units | None = None,
        tasks: Tasks | None = None,
        drivers: Mapping[str, Driver] | None = None,
        nvidia: NvidiaHost | None = None,
        met: Callable[[Collection[str]], None] | None = None,
    ) -> None:
        self._met = met
        self._tasks = tasks
        self._units = units or Units(())
        self._places = Places()
        self._unlisted = Unlisted(workers.own_container())
        self._attributed: set[int] = set()
        self._all_placed = False
        self._servers = servers
        self._runner = SourceRunner(drivers or {})
        self._changes = ChangeLog(thresholds)
        self._host = host
        self._directory = directory
        self._containers = containers
        self._gpus = {name: read for name, read in ((NUMBERED, gpus), (WITH_NODES, drm)) if read is not None}
        self._nvidia = nvidia or NvidiaHost()
        self._nodes: dict[str, str] = {}
        self._thresholds = thresholds
        self._interval_s = interval_s
        self._histories: dict[str, ContainerHistory] = {}
        self._apart_histories: dict[_Own, ContainerHistory] = {}
        self._listed: frozenset[str] = frozenset()  # kinds of containers that were told of at some look before
        self._told_apart: set[_Own] = set()
        self._cpu_histories: dict[tuple[int, int], CpuHistory] = {}
        self._gpu_history = GpuHistory(thresholds)
        self._loss_history = LossHistory(gap_max_s=thresholds.gap_max_s)
        self._losses = Losses()
        self._found_gpus: GpuReadings | None = None
        self._return_history = ReturnHistory(bound_s=thresholds.vram_return_s, gap_max_s=thresholds.gap_max_s)
        self._deaths: dict[tuple[str, str], DeathHistory] = {}
        self._last_places: dict[tuple[str, str], Container] = {}
        self._unknown: Counter[tuple[str, str, str]] = Counter()
        self._told_last: dict[str, Mapping[str, Container]] = {}
        self._left: dict[str, Mapping[str, Container]] = {}
        self._work = Work()
        self._rested: dict[str, _Rested] = {}
        self._snapshot: Snapshot | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, name="sampler", daemon=True)

    def latest(self) -> Snapshot | None:
        """The newest snapshot, however old; `None` before the first."""
        return self._snapshot

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._closing.set()
        self._thread.join(timeout=5)

    def _sample_on(self) -> None:
        next_s = time.monotonic()
        while not self._closing.is_set():
            try:
                self.sample()
            except Exception:
                # The thread must outlive a defect: the snapshot grows old meanwhile, and is published as such.
                log.exception("this look at the host failed")
            next_s = max(next_s + self._interval_s, time.monotonic())
            self._closing.wait(next_s - time.monotonic())

    def sample(self) -> Snapshot:
        """Look once; the snapshot replaces the one before."""
        began_s = time.monotonic()
        ask = self._runner.read
        self._runner.begin()
        found_workers = ask("workers", lambda: workers.read(self._directory))
        if found_workers is not None:
            found_workers = self._units.place(found_workers)
        self._runner.ask_drivers()
        found_gpus = self._together({source: ask(source, read) for source, read in self._gpus.items()})
        found_tasks = None if self._tasks is None else ask("tasks", self._tasks.read)
        listings = {kind: ask(kind, source.latest) for kind, source in self._containers.items()}
        now = clock.stamp()
        self._losses, found_gpus = self._loss_history.observe(found_gpus, now_s=now.boottime_s)
        if found_gpus == self._found_gpus:  # then what has been worked out of them stands too
            found_gpus = self._found_gpus
        self._found_gpus = found_gpus
        self._all_placed = found_workers is not None and all(
            each is not None and each.whole for each in listings.values()
        )
        told = {kind: self._told_by(kind, listing) for kind, listing in listings.items()}
        unlisted = self._without_engine(found_workers, found_gpus, listings, told)
        running = self._running(found_workers, told, unlisted)
        self._forget_unknowns({container.name for container in running.values()}, found_workers)
        # What is not told of now may be told of again, and is then still on the GPUs that it was on.
        silent = {kind for kind, listing in listings.items() if listing is None}
        silent |= gpu_attribution.OUTSIDE if found_workers is None else frozenset()
        self._histories = {
            incarnation: history
            for incarnation, history in self._histories.items()
            if incarnation in running or history.kind in silent
        }
        self._rested = {each: rested for each, rested in self._rested.items() if each in running}
        self._places.keep(running)
        self._told_apart = set()
        sharing = _sharing(found_workers)
        looks = {each: self._places.look(container) for each, container in running.items()}
        self._note_placed(looks)
        looked = [
            self._look_at(container, looks[each], found_gpus, now, sharing.get(container.id, ()))
            for each, container in running.items()
        ]
        found = tuple(each for each, _ in looked)
        self._listed = self._listed.union({*listings, *gpu_attribution.OUTSIDE} - silent)
        own = {name: told for _, each in looked for name, told in each.items()}
        # Who was not told apart in this look starts anew, as after a gap.
        self._apart_histories = {key: each for key, each in self._apart_histories.items() if key in self._told_apart}
        self._work.let_go(self._attributed)
        cpu_still_s = self._cpu_still(found_workers, running, now)
        ended: dict[str, Container] = {}
        if found_workers is not None:
            found_workers = self._place_the_dead(found_workers, running, listings, ended)
        dead_s = self._dead_for(found_workers, {**ended, **{each.id: each for each in running.values()}}, now)
        servers = self._look_at_servers(running, found_workers, listings, now)
        snapshot = Snapshot(
            host=self._host,
            taken=now,
            gpus=found_gpus,
            workers=found_workers,
            containers=found,
            sources=self._runner.health,
            thresholds=self._thresholds,
            ended=tuple(container_history.without_figures(each) for each in ended.values()),
            cpu_still_s=cpu_still_s,
            dead_s=dead_s,
            servers=servers,
            tasks=found_tasks,
            drivers=self._runner.driver_health,
            returning_bytes=self._return_history.observe(
                found_gpus, ended=self._ended(found_gpus), now_s=now.boottime_s
            ),
            # After what is returning, for it counts the looks at which that was unknown.
            gpu_totals=self._gpu_history.observe(
                found_gpus, now_s=now.boottime_s, returning_unknown=self._return_history.unknown
            ),
            unplaced=self._unplaced(found_gpus),
            gpu_lost_s=self._losses.seconds,
            lost_gpus=self._losses.named,
            unseen=tuple(sorted(_unseen(listings, running))),
            apart=own,
            unknown=dict(self._unknown),
            took_s=time.monotonic() - began_s,
        )
        self._changes.log_changes(snapshot)
        self._snapshot = snapshot
        return snapshot

    def _look_at_servers(
        self,
        running: Mapping[str, Container],
        found_workers: WorkerReadings | None,
        listings: Listings,
        now: Stamp,
    ) -> tuple[ServerEvidence, ...] | None:
        if self._servers is None or not listings or None in _holding(listings):
            return None
        look = self._servers.look
        found = self._runner.read("servers", lambda: look(running.values(), found_workers, now_s=now.boottime_s))
        if self._servers.keeps:
            self._runner.read("answered", self._servers.keep)
        for each in found or ():
            if each.unknown is not None:
                self._unknown[each.container.name, "probe", each.unknown.reason] += 1
        return found

    def _together(self, answers: Mapping[str, GpuReadings | None]) -> GpuReadings | None:
        """The GPUs of every source that answered; `None` where none did."""
        told = [readings for readings in answers.values() if readings is not None]
        if not told:
            return None
        gpus = tuple(gpu for readings in told for gpu in readings.gpus)
        nodes = {gpu.node: gpu.uuid for gpu in gpus if gpu.node is not None}
        self._nodes.update(nodes)
        if any(gpu.node is None for gpu in gpus):
            self._nvidia.told()
        return replace(
            told[0],
            gpus=gpus,
            failed=tuple(source for source, readings in answers.items() if readings is None),
            gone={node: uuid for node, uuid in self._nodes.items() if node not in nodes},
            nvidia_unread=all(gpu.node is not None for gpu in gpus) and self._nvidia.may_be_there(),
            unlisted=None
            if any(readings.unlisted is None for readings in told)
            else tuple(pid for readings in told for pid in readings.unlisted or ()),
        )

    def _told_by(self, kind: str, listing: Listing | None) -> Mapping[str, Container]:
        """The containers of one engine, by id; while it tells of none, those that it told of last and that still stand.

        An id is in its cgroup's path, and name and labels stay as they are for as long as it runs.
        """
        if listing is not None:
            self._told_last[kind] = listing.containers
            self._left.pop(kind, None)
            return listing.containers
        if kind not in self._left:
            last = self._told_last.pop(kind, {})
            self._left[kind] = {each: replace(its, listed=False) for each, its in last.items()}
        # One that has ended is not asked for again: another may begin in its place.
        self._left[kind] = {each: its for each, its in self._left[kind].items() if self._places.stands(its)}
        return self._left[kind]

    def _without_engine(
        self,
        found: WorkerReadings | None,
        gpus: GpuReadings | None,
        listings: Listings,
        told: Mapping[str, Mapping[str, Container]],
    ) -> list[Container]:
        """Containers of live workers, and of processes on a GPU, that no engine tells of."""
        listed = frozenset[str]().union(*told.values())
        pids = {
            each.pid
            for each in (() if found is None else found.workers)
            if each.pid is not None and each.container_id is not None and each.container_id not in listed
        }
        if gpus is not None:  # whom the last look has placed is looked for no more: the others are few
            pids |= gpus.by_pid.keys() - self._attributed
        unlisted = self._unlisted.find(pids, listings)
        if self._unlisted.met and self._met is not None:
            self._met(self._unlisted.met)
        return unlisted

    def _running(
        self,
        found: WorkerReadings | None,
        told: Mapping[str, Mapping[str, Container]],
        unlisted: list[Container],
    ) -> dict[str, Container]:
        """Every container there is, by incarnation; of two with one name the first is kept.

        Of a pod's container that its engine lists too, the pod's is kept: Kubernetes runs it.
        """
        by_id = {full_id: each for containers in told.values() for full_id, each in containers.items()}
        containers = [*by_id.values(), *unlisted]
        units = self._units.containers(() if found is None else found.workers)
        containers.extend(units.values())
        if found is not None:
            for sighting in found.workers:
                unit = sighting.container_id
                if unit is not None and cgroup.UNIT.fullmatch(unit) and unit not in units:
                    self._all_placed = False
                    self._unknown[sighting.worker.worker, "processes", "unreadable"] += 1
        for sighting in () if found is None else found.workers:
            if sighting.pid is not None and sighting.container_id is None:
                try:
                    containers.append(processes.container(sighting.pid, sighting.worker.worker))
                except OSError:
                    self._all_placed = False
                    self._unknown[sighting.worker.worker, "processes", "unreadable"] += 1
        by_name: dict[str, Container] = {}
        for container in containers:
            if by_name.setdefault(container.name, container) is not container:
                self._all_placed = False
                self._unknown[container.name, "processes", "duplicate_name"] += 1
        return {container.incarnation: container for container in by_name.values()}

    def _forget_unknowns(self, running: set[str], found: WorkerReadings | None) -> None:
        """Drop the counts of what is gone: containers come and go under new names for ever."""
        names = running.union(() if found is None else (sighting.worker.worker for sighting in found.workers))
        for key in [key for key in self._unknown if key[0] not in names]:
            del self._unknown[key]

    def _note_placed(self, looks: Mapping[str, tuple[frozenset[int] | None, RamUse]]) -> None:
        """Note which processes are in a container, and whether that is known of all containers."""
        within = [pids for pids, _ in looks.values()]
        self._attributed = set().union(*filter(None, within))
        self._all_placed = self._all_placed and None not in within

    def _new_history(self, container: Container) -> ContainerHistory:
        found = container.kind not in self._listed
        return ContainerHistory(self._thresholds, asks=bool(self._gpus), found=found)

    def _look_at(
        self,
        container: Container,
        look: tuple[frozenset[int] | None, RamUse],
        gpus: GpuReadings | None,
        now: Stamp,
        sharing: Sequence[WorkerSighting],
    ) -> tuple[ContainerEvidence, Mapping[str, ContainerEvidence]]:
        """What is seen of a container; and, where several workers share it, of what counts as each one's own, by name.

        Unlike the container's, nothing of theirs is known while it is not known which processes there are.
        """
        pids, ram = look
        history = self._histories.get(container.incarnation)
        if history is None:
            history = self._new_history(container)
            self._histories[container.incarnation] = history
        use, now_s = history.use(container, pids, gpus), now.boottime_s
        members = () if pids is None or len(sharing) < 2 else self._members(container, pids, gpus, history, sharing)
        wanted = (
            pids is None
            or history.wants_work(use, now_s=now_s, lost=self._losses.named)
            or (bool(members) and any(each.history.wants_work(each.use, now_s=now_s) for each in members))
        )
        work = self._work_of(container, pids, now_s) if wanted else container_history.AS_IT_WAS
        frozen_s = self._places.frozen_s(container) if container.paused else None
        found = history.observe(container, use, ram, work, now_s=now_s, lost=self._losses.named, frozen_s=frozen_s)
        if found.gpu_unknown or found.ram_unknown or found.work_unknown:
            self._count_unknown(found)
        if not members:
            return found, _NONE_APART
        own = {
            each.worker: each.history.observe(
                container, each.use, _ram_of(each.pids), container_history.work_of(work, each.pids), now_s=now_s
            )
            for each in members
        }
        for told in own.values():
            if told.ram_unknown is not None and found.ram_unknown is None:
                self._unknown[container.name, "worker_ram", told.ram_unknown.reason] += 1
        return found, own

    def _count_unknown(self, found: ContainerEvidence) -> None:
        for what, unknown in (("gpu", found.gpu_unknown), ("ram", found.ram_unknown), ("work", found.work_unknown)):
            if unknown is not None and unknown.reason != gpu_attribution.NO_GPU:
                self._unknown[found.container.name, what, unknown.reason] += 1

    def _members(
        self,
        container: Container,
        pids: frozenset[int],
        gpus: GpuReadings | None,
        history: ContainerHistory,
        sharing: Sequence[WorkerSighting],
    ) -> Sequence["_Member"]:
        """The workers that share a container, with what counts as each one's own of its processes."""
        if len(pids) > processes.PROCESSES_MAX:  # which is counted with their work
            return ()
        workers = {each.worker.worker: each.pid for each in sharing if each.pid is not None}
        first = container.pid if container.kind in BEGINNING_TOLD else None
        own = process_ownership.own(pids, processes.born(pids), workers, first=first)
        members = []
        for each in sharing:
            name, pid = each.worker.worker, each.pid
            if pid is None or name not in own:
                continue
            key = _Own(container.incarnation, name, each.worker.incarnation, pid)
            if key not in self._apart_histories:
                self._apart_histories[key] = self._new_history(container)
            self._told_apart.add(key)
            use = gpu_attribution.gpu_use(container, own[name], gpus, self._thresholds, history.gpus, history.there)
            members.append(_Member(worker=name, history=self._apart_histories[key], pids=own[name], use=use))
        return members

    def _unplaced(self, gpus: GpuReadings | None) -> tuple[GpuShare, ...]:
        """What processes in no container have of each GPU; nothing where any container's processes are not known."""
        if gpus is None or not self._all_placed:
            return ()
        return tuple(gpu_attribution.unplaced(gpu, self._attributed) for gpu in gpus.gpus)

    def _ended(self, gpus: GpuReadings | None) -> frozenset[int]:
        """Of the processes on the GPUs' lists those that have ended; whoever is in a container has not."""
        listed = frozenset[int]() if gpus is None else gpus.by_pid.keys() - self._attributed
        return frozenset(pid for pid in listed if processes.has_ended(pid))

    def _work_of(self, container: Container, pids: frozenset[int] | None, now_s: float) -> WorkUse:
        """What a container's processes have done; as it was read before where none of them has run since.

        Who does no I/O, touches no memory and uses no CPU time needs none of it, and a full host has hundreds of them.
        """
        if pids is None:
            return WorkUse(processes=None)  # which is counted already, as the GPU's or the RAM's unknown
        # Before the processes are read: who runs while they are has moved it by the next look.
        cpu_time = self._places.cpu_time(container)
        rested = self._rested.get(container.incarnation)
        if (
            rested is not None
            and rested.cpu_time == cpu_time
            and rested.pids == pids
            and 0 <= now_s - rested.read_s < RESTED_MAX_S
        ):
            return rested.work
        work = self._work_read(pids)
        self._rested.pop(container.incarnation, None)
        if cpu_time is not None and work.processes is not None:
            self._rested[container.incarnation] = _Rested(cpu_time=cpu_time, pids=pids, read_s=now_s, work=work)
        return work

    def _work_read(self, pids: frozenset[int]) -> WorkUse:
        if len(pids) > processes.PROCESSES_MAX:
            because = f"{len(pids)} processes are more than {processes.PROCESSES_MAX}"
            return WorkUse(processes=None, unknown=Unknown(reason="too_many", because=because))
        try:
            found = self._work.read(pids)
        except (OSError, ValueError, KeyError) as error:
            return WorkUse(processes=None, unknown=Unknown(reason="unreadable", because=str(error)))
        if any(each.io_bytes is None for each in found.values()):
            because = "the kernel does not tell us the I/O of its processes"
            return WorkUse(processes=found, unknown=Unknown(reason="io_unreadable", because=because))
        return WorkUse(processes=found)

    def _place_the_dead(
        self, found: WorkerReadings, running: dict[str, Container], listings: Listings, ended: dict[str, Container]
    ) -> WorkerReadings:
        """Give dead workers the container they were in, as far as it is known; what of it does not run joins `ended`.

        A dead worker's files name no container: their lock has no holder any more. So each worker's is remembered while
        it lives; and where nobody here has seen it alive, it is the one container that its folder is mounted into.
        """
        by_id = {each.id: each for each in running.values()}
        trees = {each.pid: each for each in running.values() if each.kind == "process"}
        remembered: dict[tuple[str, str], Container] = {}
        sightings: list[WorkerSighting] = []
        for sighting in found.workers:
            key = sighting.worker.worker, sighting.worker.incarnation
            place = self._last_places.get(key)
            if sighting.alive is False:
                if place is not None and place.kind == "systemd":
                    place = by_id.get(place.id) or self._units.renewed(place)
                else:
                    place = _place_now(place, sighting.folder, listings)
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

    def _dead_for(self, found: WorkerReadings | None, places: dict[str, Container], now: Stamp) -> dict[str, float]:
        """For how long each dead worker has been seen dead, by name."""
        histories: dict[tuple[str, str], DeathHistory] = {}
        dead_s: dict[str, float] = {}
        for sighting in () if found is None else found.workers:
            if sighting.alive is not False:
                continue
            key = sighting.worker.worker, sighting.worker.incarnation
            place = places.get(sighting.container_id or "")
            if place is not None and place.paused:  # its time starts anew when the container goes on
                self._unknown[place.name, "death", container_history.PAUSED.reason] += 1
                continue
            histories[key] = self._deaths.get(key) or DeathHistory(self._thresholds)
            dead_s[sighting.worker.worker] = histories[key].observe(
                None if place is None else place.incarnation, sighting.worker.heartbeat, now_s=now.boottime_s
            )
        self._deaths = histories
        return dead_s

    def _cpu_still(self, found: WorkerReadings | None, running: dict[str, Container], now: Stamp) -> dict[int, float]:
        """For how long the process of each live worker has used no CPU time, nor waited for storage, by pid."""
        by_id = {container.id: container for container in running.values()}
        histories: dict[tuple[int, int], CpuHistory] = {}
        workers_found = () if found is None else found.workers
        stores = {
            each.pid for each in workers_found if each.job is not None and each.job.phase in container_history.STORES
        }
        still_s: dict[int, float] = {}
        for sighting in workers_found:
            pid = sighting.pid
            if pid in still_s or not sighting.alive:  # one process can be several workers
                continue
            place = by_id.get(sighting.container_id or "")
            name = place.name if place else sighting.worker.worker
            if place is not None and place.paused:
                self._unknown[name, "cpu", container_history.PAUSED.reason] += 1
                continue
            if pid is None:
                self._unknown[name, "cpu", "pid_unknown"] += 1
                continue
            try:
                use = processes.cpu_use(pid)
            except (OSError, ValueError):
                self._unknown[name, "cpu", "unreadable"] += 1
                continue
            process = (pid, use.start_ticks)
            histories[process] = self._cpu_histories.get(process) or CpuHistory(self._thresholds)
            still_s[pid] = histories[process].observe(use, now_s=now.boottime_s, stores=pid in stores)
        # What was not read in this look starts anew, as after a gap.
        self._cpu_histories = histories
        return still_s


class _Own(NamedTuple):
    """Whose processes are told apart: a worker as one process, in one incarnation of its container."""

    container: str
    worker: str
    incarnation: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rested:
    """What a container's processes had done by a look, and the CPU time that they had used together before it."""

    cpu_time: bytes
    pids: frozenset[int]
    read_s: float
    work: WorkUse


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One of several workers of a container: its history, its own processes, and what these use of the GPUs."""

    worker: str
    history: ContainerHistory
    pids: frozenset[int]
    use: GpuUse


_NONE_APART: Final[Mapping[str, ContainerEvidence]] = MappingProxyType({})


def _sharing(found: WorkerReadings | None) -> Mapping[str, Sequence[WorkerSighting]]:
    """The live workers of each container, by its id."""
    sharing: dict[str, list[WorkerSighting]] = {}
    for each in () if found is None else found.workers:
        if each.alive and each.pid is not None and each.container_id is not None:
            sharing.setdefault(each.container_id, []).append(each)
    return sharing


def _ram_of(pids: frozenset[int]) -> RamUse:
    """What processes hold in RAM: of the page cache nothing, which is accounted to their container as a whole."""
    try:
        return RamUse(usage_bytes=processes.resident_bytes(pids))
    except (OSError, ValueError) as error:
        return RamUse(usage_bytes=None, unknown=Unknown(reason="unreadable", because=str(error)))


def _unseen(listings: Listings, running: Mapping[str, Container]) -> Iterator[str]:
    """Containers that may be ranked by their VRAM budgets and are in no ranking, for whatever reason."""
    seen = {each.id for each in running.values()}
    for listing in listings.values():
        if listing is not None:
            yield from listing.unseen
            for each in listing.containers.values():
                if each.id not in seen and may_be_ranked(each.tenancy):
                    yield each.name


def _place_now(last: Container | None, folder: str, listings: Listings) -> Container | None:
    """Where a dead worker was, as its engine has that container now."""
    if last is not None:
        listing = listings.get(last.kind)
        if listing is None:
            return last
        listed = listing.containers.get(last.id) or listing.down.get(last.id)
        if listed is None and not last.listed:  # remembered while its engine was silent, which it is no more
            return replace(last, listed=True)
        return listed or last
    holding = _holding(listings)
    known = [listing for listing in holding if listing is not None]
    if len(known) < len(holding):
        return None  # the engine that does not answer may have another that holds the folder
    every = (each for listing in known for each in (*listing.containers.values(), *listing.down.values()))
    found = [each for each in every if folder in each.folders]
    return found[0] if len(found) == 1 else None


def _holding(listings: Listings) -> list[Listing | None]:
    return [listing for kind, listing in listings.items() if kind in HOLDING]
