"""Containers by their cgroups: processes, RAM, and containers that no engine lists.

Processes are read from the cgroup in every sample, so that a reused pid is not mistaken.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from exporter.model.container import Container, RamUse
from exporter.model.unknown import Unknown
from exporter.sources import processes
from exporter.sources.containers.poller import Listing
from exporter.sources.process_io import max_open_files
from gpuwarden import cgroup, clock, procfs

ASKED_MAX_S: Final = 0.1
"""Longest check whether a container is frozen, seconds."""


class ContainerCgroups:
    """The cgroups of running containers, found once per incarnation.

    Files of `open_max` containers stay open, by default a fifth of the files that this process may open. Opening them
    in every sample takes 0.4 % of a core for 64 containers.
    """

    def __init__(self, *, proc: Path = procfs.PROC, root: Path = cgroup.ROOT, open_max: int | None = None) -> None:
        self._proc = proc
        self._root = root
        self._open_max = max_open_files() // 20 if open_max is None else open_max
        self._places: dict[str, cgroup.Place] = {}
        self._files: dict[str, _CgroupFiles] = {}
        self._first: dict[str, tuple[Path, int]] = {}

    def read(self, container: Container) -> tuple[frozenset[int] | None, RamUse]:
        """The processes (`None` if unknown) and RAM of a container."""
        try:
            if container.kind == "process":
                pids = processes.process_tree(container.pid, proc=self._proc)
                return pids, RamUse(usage_bytes=processes.resident_bytes(pids, proc=self._proc))
            return self._read_again(container.incarnation) or self._read(container)
        except (OSError, ValueError) as error:
            self._places.pop(container.incarnation, None)
            self._files.pop(container.incarnation, None)
            return None, RamUse(usage_bytes=None, unknown=Unknown(reason="unreadable", message=str(error)))

    def stands(self, container: Container) -> bool:
        """Whether a container still has its cgroup, with processes. A restart makes a new inode at its path."""
        group, inode = self._first.get(container.incarnation, (None, 0))
        try:
            return group is not None and group.stat().st_ino == inode and bool(cgroup.processes(group))
        except OSError:
            return False

    def _read_again(self, incarnation: str) -> tuple[frozenset[int], RamUse] | None:
        """Read the open files; `None` if there are none, or the cgroup ended."""
        kept = self._files.get(incarnation)
        if kept is None:
            return None
        try:
            if pids := kept.group.processes():
                return pids, _ram(kept.memory)
        except OSError:  # it ended; another may use its path
            pass
        del self._files[incarnation]
        return None

    def _read(self, container: Container) -> tuple[frozenset[int] | None, RamUse]:
        place = self._places.get(container.incarnation)
        found = None if place is None or place.group is None else cgroup.processes(place.group)
        # A running container has a process, so its cgroup moved.
        if place is None or not found:
            place = self._place(container)
            found = None if place.group is None else cgroup.processes(place.group)
            self._places[container.incarnation] = place
            if place.group is not None and container.incarnation not in self._first:
                self._first[container.incarnation] = place.group, place.group.stat().st_ino
        memory = None if place.memory is None else cgroup.MemoryFiles(place.memory)
        ram = _ram(memory)
        if found and place.group is not None and len(self._files) < self._open_max:
            self._files[container.incarnation] = _CgroupFiles(group=cgroup.Group(place.group), memory=memory)
        if not found and place.group is not None and procfs.is_zombie(container.pid, proc=self._proc):
            return frozenset(), ram
        return found or None, ram

    def _place(self, container: Container) -> cgroup.Place:
        if container.group is not None:
            return cgroup.at(Path(container.group))
        return cgroup.place(container.pid, container.id, proc=self._proc, root=self._root)

    def frozen_s(self, container: Container) -> float | None:
        """When the kernel reported the whole container frozen, CLOCK_BOOTTIME seconds; `None` if not, or too slow."""
        asked_s = clock.boottime_s()
        try:
            frozen = cgroup.frozen(container.pid, container.id, proc=self._proc, root=self._root)
        except OSError:  # its first process ended
            return None
        return asked_s if frozen and clock.boottime_s() - asked_s <= ASKED_MAX_S else None

    def keep(self, incarnations: Collection[str]) -> None:
        """Forget all other containers."""
        self._places = {each: place for each, place in self._places.items() if each in incarnations}
        self._files = {each: kept for each, kept in self._files.items() if each in incarnations}
        self._first = {each: first for each, first in self._first.items() if each in incarnations}


@dataclass(frozen=True, kw_only=True)
class _CgroupFiles:
    group: cgroup.Group
    memory: cgroup.MemoryFiles | None


def _ram(files: cgroup.MemoryFiles | None) -> RamUse:
    if files is None:
        message = "no memory controller accounts for the container"
        return RamUse(usage_bytes=None, unknown=Unknown(reason="no_controller", message=message))
    return RamUse(**files.read()._asdict())


@dataclass(frozen=True, kw_only=True)
class _Found:
    """`inode` is that of the cgroup's directory: a restart makes another one."""

    container: Container
    group: Path
    inode: int

    def runs(self) -> bool:
        """Whether it is the same cgroup, with processes."""
        try:
            return self.group.stat().st_ino == self.inode and bool(cgroup.processes(self.group))
        except OSError:
            return False


class UnlistedContainers:
    """Finds containers that no engine lists, by the processes of workers and on GPUs.

    A container counts as unlisted once every engine has listed its containers after it was first seen.
    """

    def __init__(self, own: str | None = None, *, proc: Path = procfs.PROC, root: Path = cgroup.ROOT) -> None:
        self._own = own
        self._proc = proc
        self._root = root
        self._first_seen_s: dict[str, float] = {}
        self._found: dict[str, _Found] = {}
        self.met: frozenset[str] = frozenset()
        """Engines that are not listed but have a container, by its cgroup's name."""

    def find(self, pids: Iterable[int], listings: Mapping[str, Listing | None]) -> list[Container]:
        """Find the unlisted containers of these processes, and earlier ones that still run."""
        now_s = time.monotonic()
        seen = {owner[0]: (pid, owner[1]) for pid in pids if (owner := self._owner(pid)) and owner[0] != self._own}
        self._first_seen_s = {each: self._first_seen_s.get(each, now_s) for each in seen}
        known = [listing for listing in listings.values() if listing is not None]
        listed = frozenset[str]().union(*(listing.ids for listing in known))
        self._found = {each: found for each, found in self._found.items() if each not in listed and found.runs()}
        for each, first_s in self._first_seen_s.items():
            all_listed = len(known) == len(listings) and all(
                listing.taken_s - listing.lag_s > first_s for listing in known
            )
            if all_listed and each not in listed and each not in self._found:
                found = self._container(each, *seen[each])
                if found is not None:
                    self._found[each] = found
                    if seen[each][1] == cgroup.DOCKER:
                        self.met = frozenset({cgroup.DOCKER})
        return [found.container for found in self._found.values()]

    def _owner(self, pid: int) -> tuple[str, str | None] | None:
        """The container of a process and its runtime; `None` without one, or if it ended or is not readable."""
        try:
            return cgroup.owner(pid, proc=self._proc)
        except (OSError, LookupError):
            return None

    def _container(self, full_id: str, pid: int, runtime: str | None) -> _Found | None:
        try:
            group = cgroup.directory(pid, full_id, proc=self._proc, root=self._root)
            if group is None:
                return None
            inode = group.stat().st_ino
            request = processes.gpus_of_container(pid, proc=self._proc)
        except OSError:
            return None  # it just ended
        container = Container(
            # Only Docker knows the name and labels.
            kind="container" if runtime is None or runtime == cgroup.DOCKER else runtime,
            id=full_id,
            name=full_id[:12],
            incarnation=f"{full_id}@{inode}",
            pid=pid,
            gpu_request=request,
        )
        return _Found(container=container, group=group, inode=inode)
