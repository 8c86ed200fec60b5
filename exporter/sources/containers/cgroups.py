"""Containers by the kernel's word: where each is accounted, and those that no engine lists.

A container's processes are read from its cgroup at each look, so that one that moved, or one with a pid that was
somebody else's, is never taken for another. What is remembered is only what cannot change while its key stands: the
place of a container's incarnation, and which container a process of one start is in, for `OWNER_S`.
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
from exporter.sources.process_io import files_max
from gpuwarden import cgroup, clock, procfs
from gpuwarden.procfs import ProcessId

OWNER_S: Final = 5.0
"""How long it is believed that a process has not moved into another container, seconds."""

ASKED_MAX_S: Final = 0.1
"""How long it may take to ask whether a container is frozen, seconds."""


class Places:
    """Where the running containers are accounted: looked for once in each incarnation, and again when it is gone.

    The files of `kept_max` containers stay open at most, for a fifth of the files that this process may open; those of
    more are opened with each look. To open them each time takes 0.4 % of a core with 64 containers.
    """

    def __init__(self, *, proc: Path = procfs.PROC, root: Path = cgroup.ROOT, kept_max: int | None = None) -> None:
        self._proc = proc
        self._root = root
        self._kept_max = files_max() // 20 if kept_max is None else kept_max
        self._known: dict[str, cgroup.Place] = {}
        self._kept: dict[str, _Kept] = {}
        self._first: dict[str, tuple[Path, int]] = {}

    def look(self, container: Container) -> tuple[frozenset[int] | None, RamUse]:
        """A container's processes and its RAM; `None` for processes that are unknown."""
        try:
            if container.kind == "process":
                pids = processes.tree(container.pid, proc=self._proc)
                return pids, RamUse(usage_bytes=processes.resident_bytes(pids, proc=self._proc))
            return self._read_again(container.incarnation) or self._read(container)
        except (OSError, ValueError) as error:
            self._known.pop(container.incarnation, None)
            self._kept.pop(container.incarnation, None)
            return None, RamUse(usage_bytes=None, unknown=Unknown(reason="unreadable", because=str(error)))

    def stands(self, container: Container) -> bool:
        """Whether a container that was looked at still has the group that it began with, and processes in it.

        A group made anew at its path has another number: then it was started again, and is another incarnation.
        """
        group, inode = self._first.get(container.incarnation, (None, 0))
        try:
            return group is not None and group.stat().st_ino == inode and bool(cgroup.processes(group))
        except OSError:
            return False

    def _read_again(self, incarnation: str) -> tuple[frozenset[int], RamUse] | None:
        """By the files that are open; `None` where there are none, or they tell of nothing any more."""
        kept = self._kept.get(incarnation)
        if kept is None:
            return None
        try:
            if pids := kept.group.processes():
                return pids, _ram(kept.memory)
        except OSError:  # it is gone, and another may be in its place
            pass
        del self._kept[incarnation]
        return None

    def _read(self, container: Container) -> tuple[frozenset[int] | None, RamUse]:
        place = self._known.get(container.incarnation)
        found = None if place is None or place.group is None else cgroup.processes(place.group)
        # One that runs has a process: none means that its group is not there, or went while it was looked at.
        if place is None or not found:
            place = self._place(container)
            found = None if place.group is None else cgroup.processes(place.group)
            self._known[container.incarnation] = place
            if place.group is not None and container.incarnation not in self._first:
                self._first[container.incarnation] = place.group, place.group.stat().st_ino
        memory = None if place.memory is None else cgroup.MemoryFiles(place.memory)
        ram = _ram(memory)
        if found and place.group is not None and len(self._kept) < self._kept_max:
            self._kept[container.incarnation] = _Kept(group=cgroup.Group(place.group), memory=memory)
        return found or None, ram

    def _place(self, container: Container) -> cgroup.Place:
        if container.group is not None:
            return cgroup.at(Path(container.group))
        return cgroup.place(container.pid, container.id, proc=self._proc, root=self._root)

    def frozen_s(self, container: Container) -> float | None:
        """When, CLOCK_BOOTTIME seconds, the kernel said that all of a container is frozen; `None` where it does not.

        Nor where the asking took so long that nobody knows when that was.
        """
        asked_s = clock.boottime_s()
        try:
            frozen = cgroup.frozen(container.pid, container.id, proc=self._proc, root=self._root)
        except OSError:  # its first process is gone
            return None
        return asked_s if frozen and clock.boottime_s() - asked_s <= ASKED_MAX_S else None

    def keep(self, incarnations: Collection[str]) -> None:
        """Forget all others."""
        there = frozenset(incarnations)
        if all(there.issuperset(each) for each in (self._known, self._kept, self._first)):
            return  # as at nearly every look
        self._known = {each: place for each, place in self._known.items() if each in incarnations}
        self._kept = {each: kept for each, kept in self._kept.items() if each in incarnations}
        self._first = {each: first for each, first in self._first.items() if each in incarnations}


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """The files of one container, open; no `memory` where nothing accounts for it."""

    group: cgroup.Group
    memory: cgroup.MemoryFiles | None


def _ram(files: cgroup.MemoryFiles | None) -> RamUse:
    if files is None:
        because = "no memory controller accounts for the container"
        return RamUse(usage_bytes=None, unknown=Unknown(reason="no_controller", because=because))
    return RamUse(**files.read()._asdict())


@dataclass(frozen=True, kw_only=True)
class _Owner:
    process: ProcessId
    read_s: float
    container: str | None
    runtime: str | None


@dataclass(frozen=True, kw_only=True)
class _Found:
    """`inode` is the number that the kernel gave to the group's directory as it was made: a restart makes another."""

    container: Container
    group: Path
    inode: int

    def runs(self) -> bool:
        """Whether it is still the same, with processes."""
        try:
            return self.group.stat().st_ino == self.inode and bool(cgroup.processes(self.group))
        except OSError:
            return False


class Unlisted:
    """Containers that no engine lists, found by the processes that matter: workers', and those on a GPU.

    Such as containerd's and CRI-O's, a user's own Podman, and any that runs while its engine is not asked. One is taken
    for unlisted only once each engine has listed its containers after it was first seen, and it is not among them; as
    long as an engine does not answer, nobody new is.
    """

    def __init__(self, own: str | None = None, *, proc: Path = procfs.PROC, root: Path = cgroup.ROOT) -> None:
        self._own = own
        self._proc = proc
        self._root = root
        self._owners: dict[int, _Owner] = {}
        self._first_seen_s: dict[str, float] = {}
        self._found: dict[str, _Found] = {}
        self.met: frozenset[str] = frozenset()
        """The engines of which a container runs, by its cgroup's name, that none of those that are asked lists."""

    def find(self, pids: Iterable[int], listings: Mapping[str, Listing | None]) -> list[Container]:
        """The unlisted containers of these processes, and those that were found before and still have processes.

        `own` is the exporter's own container, in which it sees nothing but processes.
        """
        now_s = time.monotonic()
        self._owners = {pid: owner for pid in pids if (owner := self._owner(pid, now_s)) is not None}
        seen = {
            each.container: (pid, each.runtime)
            for pid, each in self._owners.items()
            if each.container is not None and each.container != self._own
        }
        self._first_seen_s = {each: self._first_seen_s.get(each, now_s) for each in seen}
        known = [listing for listing in listings.values() if listing is not None]
        listed = frozenset[str]().union(*(listing.ids for listing in known))
        self._found = {each: found for each, found in self._found.items() if each not in listed and found.runs()}
        for each, first_s in self._first_seen_s.items():
            told = len(known) == len(listings) and all(listing.taken_s - listing.lag_s > first_s for listing in known)
            if told and each not in listed and each not in self._found:
                found = self._container(each, *seen[each])
                if found is not None:
                    self._found[each] = found
                    if seen[each][1] == cgroup.DOCKER:
                        self.met = frozenset({cgroup.DOCKER})
        return [found.container for found in self._found.values()]

    def _owner(self, pid: int, now_s: float) -> _Owner | None:
        """Which container a process is in; `None` when it is gone, or not ours to look at."""
        try:
            process = ProcessId.of(pid, proc=self._proc)
            known = self._owners.get(pid)
            if known is not None and known.process == process and now_s - known.read_s < OWNER_S:
                return known
            container, runtime = cgroup.owner(pid, proc=self._proc) or (None, None)
        except (OSError, LookupError):
            return None
        return _Owner(process=process, read_s=now_s, container=container, runtime=runtime)

    def _container(self, full_id: str, pid: int, runtime: str | None) -> _Found | None:
        try:
            group = cgroup.directory(pid, full_id, proc=self._proc, root=self._root)
            if group is None:
                return None
            inode = group.stat().st_ino
            request = processes.gpus_of_container(pid, proc=self._proc)
        except OSError:
            return None  # it ended between the two looks
        container = Container(
            # Of one of Docker's too no more is known than of any: its name and labels are Docker's to tell.
            kind="container" if runtime is None or runtime == cgroup.DOCKER else runtime,
            id=full_id,
            name=full_id[:12],
            incarnation=f"{full_id}@{inode}",
            pid=pid,
            gpu_request=request,
        )
        return _Found(container=container, group=group, inode=inode)
