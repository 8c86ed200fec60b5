"""Control groups: containers of processes, processes of containers, and memory.

Cgroup v1, v2 and hybrids. Sources: cgroups(7), cgroup-v2.rst, cgroup-v1/memory.rst.
"""

import contextlib
import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from gpuwarden import procfs

ROOT: Final = Path("/sys/fs/cgroup")

GROUPS_MAX: Final = 20_000
"""Limit of groups searched for containers."""

PARTS_READS: Final = 10
"""Reads for which the parts of an unchanged charge are reused.

The kernel sums them over all groups below: the most expensive read.
"""


UNIT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.@\\-]*\.service")
"""A systemd service's name (systemd.unit(5))."""

_LINKS_ALONE: Final = 2
"""Links of a directory without subdirectories."""

# Not conmon's group, which is outside its container.
_CONTAINER_ID = re.compile(r"(?:^|[/:]|(?<!conmon)-)([0-9a-f]{64})(?:\.scope)?(?=/|$)")

_RUNTIME = re.compile(r"(?:(cri-containerd|nerdctl|crio|libpod)[-:]|(?:^|/)(docker)[-/])$")

_USERS = re.compile(r"(?:^|/)user\.slice/")

DOCKER: Final = "docker"

RUNTIMES: Final = {
    "cri-containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "cri-o",
    "libpod": "libpod",
    "docker": DOCKER,
}
"""Container runtimes, by the prefix of their cgroups."""


class Memory(NamedTuple):
    """Memory of a cgroup, bytes; `usage_bytes` includes page cache (A2).

    `oom_kills` includes the groups below in version 2 only. `None` before Linux 4.13.
    """

    usage_bytes: int
    anon_bytes: int | None
    working_set_bytes: int | None
    oom_kills: int | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A container's process list and memory group."""

    group: Path | None
    memory: Path | None


def container_id(pid: int, *, proc: Path = procfs.PROC) -> str | None:
    """Full id of a process's container, if any; see `owner`."""
    found = owner(pid, proc=proc)
    return None if found is None else found[0]


def owner(pid: int, *, proc: Path = procfs.PROC) -> tuple[str, str | None] | None:
    """Full id and runtime of a process's container.

    Raises:
        OSError: the process ended, or is not readable.
    """
    said = procfs.read(f"{proc}/{pid}/cgroup")
    for line in said.decode("utf-8", "surrogateescape").splitlines():
        path = line.split(":", 2)[2]
        found = _CONTAINER_ID.search(path)
        if found:
            above = path[: found.start(1)]
            named = _RUNTIME.search(above)
            if named is None or (named[2] and _USERS.search(above)):  # a user's rootless Docker is another engine
                return found.group(1), None
            return found.group(1), RUNTIMES[named[1] or named[2]]
    return None


def containers(root: Path = ROOT) -> dict[str, Path]:
    """All containers with a group on this host, by full id."""
    found: dict[str, Path] = {}
    waiting = [root / "memory" if (root / "memory").is_dir() else root]
    for _ in range(GROUPS_MAX):
        if not waiting:
            break
        for folder in _folders_in(waiting.pop()):
            named = _CONTAINER_ID.search(folder.name)
            if named:
                found[named.group(1)] = folder
            else:
                waiting.append(folder)
    return found


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []  # gone since the listing


def unit(pid: int, *, proc: Path = procfs.PROC) -> str | None:
    """The host's systemd service that contains a process, if any.

    A user's services are in `user@UID.service`.

    Raises:
        OSError: the process ended, or is not readable.
    """
    place = _systemd_path(pid, proc)
    root = _systemd_path(1, proc).removesuffix("/init.scope").rstrip("/")
    if not place.startswith(f"{root}/"):
        return None
    for name in place[len(root) + 1 :].split("/"):
        if not name.endswith(".slice"):
            return name if UNIT.fullmatch(name) else None
    return None


def _systemd_path(pid: int, proc: Path) -> str:
    unified = ""
    for line in (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "name=systemd":
            return path
        if not controllers:
            unified = path
    return unified


def memory_directory(pid: int, container: str, *, proc: Path = procfs.PROC, root: Path = ROOT) -> Path | None:
    """The group that accounts a container's memory, if any.

    A systemd service's id is its unit.

    Raises:
        OSError: the process ended.
    """
    unified: Path | None = None
    for controllers, path in _container_groups(pid, container, proc):
        if "memory" in controllers.split(","):
            return root / "memory" / path
        if not controllers:
            unified = root / path
    return unified if unified is not None and (unified / "memory.current").exists() else None


def memory(directory: Path) -> Memory:
    """Read a memory cgroup of either version; see `MemoryFiles.read`."""
    return MemoryFiles(directory).read()


class File:
    """An open kernel file: a read costs a fraction of a new open.

    Reads fail (ENODEV, ESRCH) once its cgroup or process is gone, even if the path exists again.

    Raises:
        OSError: it does not exist, or is not readable.
    """

    __slots__ = ("_descriptor",)

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self) -> bytes:
        """Read the whole file."""
        found = os.pread(self._descriptor, procfs.READ_BYTES, 0)
        # Files that come by the page have longer reads.
        if len(found) < procfs.SHORT_BYTES:
            return found
        while more := os.pread(self._descriptor, procfs.READ_BYTES, len(found)):
            found += more
        return found


class Folder(File):
    """An open kernel directory."""

    def links(self) -> int:
        """Number of links; 0 once it is gone, on some file systems."""
        return os.fstat(self._descriptor).st_nlink

    def itself(self) -> Path:
        """A path to this directory, never to its replacement (proc_pid_fd(5))."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    def read_in(self, name: str) -> bytes:
        """Read a file in it."""
        return procfs.read(name, folder=self._descriptor)


class MemoryFiles:
    """The open files of a memory cgroup; see `File`."""

    def __init__(self, directory: Path) -> None:
        try:
            self._usage, self._version_2 = File(f"{directory}/memory.current"), True
        except FileNotFoundError:
            self._usage, self._version_2 = File(f"{directory}/memory.usage_in_bytes"), False
        self._stat = File(f"{directory}/memory.stat")
        self._memory: Memory | None = None
        self._stands = 0
        self._events: File | None = None
        with contextlib.suppress(FileNotFoundError):
            self._events = File(f"{directory}/{'memory.events' if self._version_2 else 'memory.oom_control'}")

    def read(self) -> Memory:
        """Read the memory.

        Raises:
            OSError: the cgroup is gone.
            ValueError: a file has no number.
        """
        usage_bytes = int(self._usage.read())
        if self._memory is None or self._memory.usage_bytes != usage_bytes or self._stands == PARTS_READS - 1:
            self._memory, self._stands = self._parts(usage_bytes), 0
        else:
            self._stands += 1
        return self._memory

    def _parts(self, usage_bytes: int) -> Memory:
        stat = self._stat.read()
        inactive = _read_number(stat, b"inactive_file" if self._version_2 else b"total_inactive_file")
        return Memory(
            usage_bytes=usage_bytes,
            anon_bytes=_read_number(stat, b"anon" if self._version_2 else b"total_rss"),
            working_set_bytes=None if inactive is None else max(0, usage_bytes - inactive),
            oom_kills=None if self._events is None else _read_number(self._events.read(), b"oom_kill"),
        )


def _read_number(text: bytes, name: bytes) -> int | None:
    """The number on the line that starts with a name, if any."""
    _, there, rest = b"\n".join((b"", text, b"")).partition(b"\n" + name)
    while there and rest[:1] not in (b" ", b"\n"):  # a longer name with this prefix
        _, there, rest = rest.partition(b"\n" + name)
    return int(rest.partition(b"\n")[0]) if there else None


def frozen(pid: int, container: str, *, proc: Path = procfs.PROC, root: Path = ROOT) -> bool:
    """Whether the kernel reports a container as frozen (cgroup-v1/freezer-subsystem.rst).

    Raises:
        OSError: the process ended.
    """
    for controllers, path in _container_groups(pid, container, proc):
        states: tuple[tuple[Path, bytes], ...] = ()
        if "freezer" in controllers.split(","):
            states = ((root / "freezer" / path / "freezer.state", b"FROZEN"),)
        elif not controllers:
            states = tuple((each / path / "cgroup.events", b"frozen 1") for each in (root, root / "unified"))
        for file, word in states:
            with contextlib.suppress(OSError):  # absent: another version, or the container ended
                if word in procfs.read(str(file)).splitlines():
                    return True
    return False


def place(pid: int, container: str, *, proc: Path = procfs.PROC, root: Path = ROOT) -> Place:
    """The groups of a container. They never change."""
    group = directory(pid, container, proc=proc, root=root)
    memory = memory_directory(pid, container, proc=proc, root=root)
    if group is None or (memory is not None and not memory.is_dir()):
        # Inside LXC, /proc names groups from the host's root.
        found = containers(root).get(container)
        if found is not None:
            return at(found)
    return at(group) if group is not None and memory is None else Place(group=group, memory=memory)


def at(group: Path) -> Place:
    """The groups of a container that `containers` found."""
    accounted = any((group / each).exists() for each in ("memory.current", "memory.usage_in_bytes"))
    return Place(group=group, memory=group if accounted else None)


def directory(pid: int, container: str, *, proc: Path = procfs.PROC, root: Path = ROOT) -> Path | None:
    """The group that lists a container's processes; none of a zombie.

    Prefer the memory group: on hybrid hosts the unified group may be the daemon's.

    Raises:
        OSError: the process ended.
    """
    if procfs.is_zombie(pid, proc=proc):
        return containers(root).get(container)
    accounted = memory_directory(pid, container, proc=proc, root=root)
    if accounted is not None and (accounted / "cgroup.procs").exists():
        return accounted
    for controllers, path in _container_groups(pid, container, proc):
        if not controllers:
            for candidate in (root / path, root / "unified" / path):
                if (candidate / "cgroup.procs").exists():
                    return candidate
    return None


def processes(group: Path) -> frozenset[int]:
    """The pids in a cgroup and below; empty once it is gone."""
    pids: set[int] = set()
    waiting = [str(group)]
    while waiting:
        folder = waiting.pop()
        try:
            pids.update(map(int, procfs.read(f"{folder}/cgroup.procs").split()))
        except OSError as error:
            # Gone, or threaded: the parent lists the processes of a threaded group.
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                raise
        if has_groups_below(folder):
            waiting += [str(below) for below in _folders_in(Path(folder))]
    return frozenset(pids)


class Group:
    """The process list of a cgroup, parsed after a change.

    Version 1 repeats an open list to fast readers (`cgroup_pidlist` in cgroup-v1.c), so it is opened for each read.

    Raises:
        OSError: the cgroup is gone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._folder = Folder(str(directory))
        self._itself = self._folder.itself()
        version_2 = (directory / "cgroup.controllers").exists()
        self._list = File(f"{directory}/cgroup.procs") if version_2 else None
        self._content: bytes | None = None
        self._pids = frozenset[int]()

    def processes(self) -> frozenset[int]:
        """The pids in the cgroup and below.

        Raises:
            OSError: it is gone.
        """
        if (links := self._folder.links()) != _LINKS_ALONE:
            if links == 0:
                raise FileNotFoundError(errno.ENOENT, "the cgroup is gone", str(self._directory))
            return processes(self._itself)
        said = self._folder.read_in("cgroup.procs") if self._list is None else self._list.read()
        if said != self._content:
            self._content, self._pids = said, frozenset(map(int, said.split()))
        return self._pids


def has_groups_below(folder: str | Path) -> bool:
    """Whether a group may have subgroups. btrfs always reports 1 link."""
    try:
        return os.stat(folder).st_nlink != _LINKS_ALONE  # noqa: PTH116 - hundreds of times a second
    except OSError:
        return False


def _container_groups(pid: int, container: str, proc: Path) -> list[tuple[str, str]]:
    """A process's cgroups with its container's id, as (controllers, path).

    A zombie is in each root of version 1.
    """
    found = []
    bears = _CONTAINER_ID
    if UNIT.fullmatch(container):
        bears = re.compile(rf"/({re.escape(container)})(?=/|$)")
    for line in (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        for named in bears.finditer(path):
            if named.group(1) == container:
                found.append((controllers, path[: named.end()].strip("/")))
                break
    return found
