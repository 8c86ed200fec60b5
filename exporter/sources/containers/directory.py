"""All running containers of the host, and their processes."""

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
from exporter.sources.containers.cgroups import ContainerCgroups, UnlistedContainers
from exporter.sources.containers.poller import Listing
from exporter.sources.containers.systemd import Units
from gpuwarden import cgroup

Listings = Mapping[str, Listing | None]
"""The newest listing of each engine, by kind; `None` without one."""

HOLDING: Final = frozenset({"docker", "podman"})
"""Engines whose containers can be servers or mount workers' folders. Those of pods are not read."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """The running containers in one sample, by incarnation.

    Attributes:
        listed_kinds: kinds of containers that were listed.
        silent: kinds that were not.
        whole: whether no running container is missing.
    """

    containers: Mapping[str, Container]
    listed_kinds: frozenset[str]
    silent: frozenset[str]
    whole: bool


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Processes and RAM of each container, by incarnation.

    Attributes:
        readings: processes (`None` if unknown) and RAM.
        pids: the processes of all containers.
        whole: whether all are known.
    """

    readings: Mapping[str, tuple[frozenset[int] | None, RamUse]]
    pids: frozenset[int]
    whole: bool


class ContainerDirectory:
    """Finds the running containers.

    Args:
        units: the systemd services.
        places: their cgroups.
        unlisted: finds unlisted ones.
        met: called with unlisted engines that have a container.
        unknown: counts failures.
    """

    def __init__(
        self,
        *,
        units: Units,
        places: ContainerCgroups,
        unlisted: UnlistedContainers,
        met: Callable[[Collection[str]], None] | None,
        unknown: UnknownCounter,
    ) -> None:
        self._units = units
        self._places = places
        self._unlisted = unlisted
        self._met = met
        self._unknown = unknown
        self._last_listed: dict[str, Mapping[str, Container]] = {}
        self._remaining: dict[str, Mapping[str, Container]] = {}
        self._placed: frozenset[int] = frozenset()

    def running(self, found: WorkerReadings | None, gpus: GpuReadings | None, listings: Listings) -> Running:
        """Find the running containers: of engines, services, workers outside of both, and unlisted ones."""
        whole = found is not None and all(each is not None and each.whole for each in listings.values())
        by_kind = {kind: self._containers_of(kind, listing) for kind, listing in listings.items()}
        unlisted = self._find_unlisted(found, gpus, listings, by_kind)
        containers, complete = self._merge(found, by_kind, unlisted)
        silent = {kind for kind, listing in listings.items() if listing is None}
        silent |= gpu_attribution.WITHOUT_ENGINE if found is None else frozenset()
        return Running(
            containers=containers,
            listed_kinds=frozenset({*listings, *gpu_attribution.WITHOUT_ENGINE} - silent),
            silent=frozenset(silent),
            whole=whole and complete,
        )

    def place(self, running: Running) -> Placement:
        """Read the processes and RAM of each container."""
        self._places.keep(running.containers)
        readings = {each: self._places.read(container) for each, container in running.containers.items()}
        within = [pids for pids, _ in readings.values()]
        self._placed = frozenset[int]().union(*filter(None, within))
        return Placement(readings=readings, pids=self._placed, whole=running.whole and None not in within)

    def _containers_of(self, kind: str, listing: Listing | None) -> Mapping[str, Container]:
        """The containers of one engine, by id. Without a listing, the last ones that still run.

        Names and labels do not change while a container runs.
        """
        if listing is not None:
            self._last_listed[kind] = listing.containers
            self._remaining.pop(kind, None)
            return listing.containers
        if kind not in self._remaining:
            last = self._last_listed.pop(kind, {})
            self._remaining[kind] = {each: replace(its, listed=False) for each, its in last.items()}
        # An ended one is not checked again, because another may use its path.
        self._remaining[kind] = {each: its for each, its in self._remaining[kind].items() if self._places.stands(its)}
        return self._remaining[kind]

    def _find_unlisted(
        self,
        found: WorkerReadings | None,
        gpus: GpuReadings | None,
        listings: Listings,
        by_kind: Mapping[str, Mapping[str, Container]],
    ) -> list[Container]:
        """Find containers of live workers and of GPU processes that no engine lists."""
        listed = frozenset[str]().union(*by_kind.values())
        pids = {
            each.pid
            for each in (() if found is None else found.workers)
            if each.pid is not None and each.container_id is not None and each.container_id not in listed
        }
        if gpus is not None:  # skip the processes that the last sample placed
            pids |= gpus.by_pid.keys() - self._placed
        unlisted = self._unlisted.find(pids, listings)
        if self._unlisted.met and self._met is not None:
            self._met(self._unlisted.met)
        return unlisted

    def _merge(
        self,
        found: WorkerReadings | None,
        by_kind: Mapping[str, Mapping[str, Container]],
        unlisted: list[Container],
    ) -> tuple[Mapping[str, Container], bool]:
        """All containers by incarnation, and whether none is missing.

        The first of two with one name counts. A pod's container counts for Kubernetes and not for its engine.
        """
        complete = True
        by_id = {full_id: each for containers in by_kind.values() for full_id, each in containers.items()}
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
                    containers.append(
                        processes.container(sighting.pid, sighting.worker.worker, command=sighting.process)
                    )
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
    """Names of containers with a VRAM budget that cannot be ranked."""
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
