"""Every container of the host that runs, whoever runs it, and the processes in each."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from exporter.evidence import gpu_attribution
from exporter.evidence.unknown import UnknownCounter
from exporter.evidence.vram_budgets import is_recycle_candidate
from exporter.model.container import Container, RamUse
from exporter.model.gpu import GpuReadings
from exporter.model.worker import WorkerReadings
from exporter.sources import processes
from exporter.sources.containers.cgroups import Places, Unlisted
from exporter.sources.containers.poller import Listing
from exporter.sources.containers.systemd import Units
from gpuwarden import cgroup

Listings = Mapping[str, Listing | None]
"""The newest listing of each engine, by kind; `None` where it tells none."""

HOLDING: Final = frozenset({"docker", "podman"})
"""The engines whose containers can be servers, or have folders of workers mounted: of a pod neither is read."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """The containers that run at one look, by incarnation.

    Of the kinds of containers, `told` were told of at this look, and `silent` were not. `whole` says whether every
    container that runs is here.
    """

    containers: Mapping[str, Container]
    told: frozenset[str]
    silent: frozenset[str]
    whole: bool


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What each container's cgroup says, by incarnation: its processes, `None` where unknown, and its RAM.

    `pids` are the processes of all containers, and `whole` says whether those of every container are known.
    """

    looks: Mapping[str, tuple[frozenset[int] | None, RamUse]]
    pids: frozenset[int]
    whole: bool


class ContainerDirectory:
    """Finds the containers that run.

    Args:
        units: the services that are to be looked at.
        places: where containers are accounted.
        unlisted: finds those that no engine lists.
        met: is called with the engines of which a container was met and that are not asked.
        unknown: counts what cannot be found.
    """

    def __init__(
        self,
        *,
        units: Units,
        places: Places,
        unlisted: Unlisted,
        met: Callable[[Collection[str]], None] | None,
        unknown: UnknownCounter,
    ) -> None:
        self._units = units
        self._places = places
        self._unlisted = unlisted
        self._met = met
        self._unknown = unknown
        self._told_last: dict[str, Mapping[str, Container]] = {}
        self._left: dict[str, Mapping[str, Container]] = {}
        self._placed: frozenset[int] = frozenset()

    def running(self, found: WorkerReadings | None, gpus: GpuReadings | None, listings: Listings) -> Running:
        """Every container that runs: of engines, of services, of workers in none, and those that no engine lists."""
        whole = found is not None and all(each is not None and each.whole for each in listings.values())
        told = {kind: self._told_by(kind, listing) for kind, listing in listings.items()}
        unlisted = self._without_engine(found, gpus, listings, told)
        containers, complete = self._all_of(found, told, unlisted)
        silent = {kind for kind, listing in listings.items() if listing is None}
        silent |= gpu_attribution.OUTSIDE if found is None else frozenset()
        return Running(
            containers=containers,
            told=frozenset({*listings, *gpu_attribution.OUTSIDE} - silent),
            silent=frozenset(silent),
            whole=whole and complete,
        )

    def place(self, running: Running) -> Placement:
        """Look which processes are in each container."""
        self._places.keep(running.containers)
        looks = {each: self._places.look(container) for each, container in running.containers.items()}
        within = [pids for pids, _ in looks.values()]
        self._placed = frozenset[int]().union(*filter(None, within))
        return Placement(looks=looks, pids=self._placed, whole=running.whole and None not in within)

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
            pids |= gpus.by_pid.keys() - self._placed
        unlisted = self._unlisted.find(pids, listings)
        if self._unlisted.met and self._met is not None:
            self._met(self._unlisted.met)
        return unlisted

    def _all_of(
        self,
        found: WorkerReadings | None,
        told: Mapping[str, Mapping[str, Container]],
        unlisted: list[Container],
    ) -> tuple[Mapping[str, Container], bool]:
        """Every container there is, by incarnation, and whether none is missing.

        Of two with one name the first is kept. Of a pod's container that its engine lists too, the pod's is kept:
        Kubernetes runs it.
        """
        complete = True
        by_id = {full_id: each for containers in told.values() for full_id, each in containers.items()}
        containers = [*by_id.values(), *unlisted]
        units = self._units.containers(() if found is None else found.workers)
        containers.extend(units.values())
        if found is not None:
            for sighting in found.workers:
                unit = sighting.container_id
                if unit is not None and cgroup.UNIT.fullmatch(unit) and unit not in units:
                    complete = False
                    self._unknown.add(sighting.worker.worker, "processes", "unreadable")
        for sighting in () if found is None else found.workers:
            if sighting.pid is not None and sighting.container_id is None:
                try:
                    containers.append(processes.container(sighting.pid, sighting.worker.worker))
                except OSError:
                    complete = False
                    self._unknown.add(sighting.worker.worker, "processes", "unreadable")
        by_name: dict[str, Container] = {}
        for container in containers:
            if by_name.setdefault(container.name, container) is not container:
                complete = False
                self._unknown.add(container.name, "processes", "duplicate_name")
        return {container.incarnation: container for container in by_name.values()}, complete


def unseen(listings: Listings, running: Running) -> Iterator[str]:
    """Containers that may be ranked by their VRAM budgets and are in no ranking, for whatever reason."""
    seen = {each.id for each in running.containers.values()}
    for listing in listings.values():
        if listing is not None:
            yield from listing.unseen
            for each in listing.containers.values():
                if each.id not in seen and is_recycle_candidate(each.vram_budget):
                    yield each.name


def holding(listings: Listings) -> list[Listing | None]:
    """The listings of the engines in `HOLDING`."""
    return [listing for kind, listing in listings.items() if kind in HOLDING]
