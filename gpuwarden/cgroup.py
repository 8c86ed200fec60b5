"""Control groups as the kernel shows them: which container a process is in, its processes, its memory.

Works on cgroup v1, v2 and the hybrid of both. `proc` and `root` can point at directories shaped like the kernel's.
Sources: cgroups(7); Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.
"""

import contextlib
import errno
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from gpuwarden import procfs

ROOT: Final = Path("/sys/fs/cgroup")

GROUPS_MAX: Final = 20_000
"""Groups of a host that are looked through for containers."""

PARTS_READS: Final = 10
"""For how many readings in a row the parts of a charge that does not change are believed: the kernel adds them up over
all groups below each time, which costs more than all else that is read of a container."""

_OWNERS_MAX: Final = 512
"""Lists of cgroups of which is remembered whose they are."""

UNIT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.@\\-]*\.service")
"""A service of systemd's by its whole name (systemd.unit(5)). What systemd escapes in a cgroup's name is none here."""

_LINKS_ALONE: Final = 2
"""Links of a directory with none below it: its name, and its own `.`."""

# Not of its conmon (libpod-conmon-ID, crio-conmon-ID), which watches a container and is outside of it.
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
"""Who runs a container, by what the systemd driver of each calls its scopes, and Docker its parent."""


class Memory(NamedTuple):
    """A cgroup's memory, bytes. `usage` is the whole charge, page cache included (what A2 watches).

    `oom_kills` is how many of its processes the kernel has killed for want of memory, those of the groups below it too
    in version 2 and its own alone in version 1; `None` where the kernel does not count them (before 4.13).
    """

    usage_bytes: int
    anon_bytes: int | None
    working_set_bytes: int | None
    oom_kills: int | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a container is accounted: what lists its processes, and what charges its memory, where anything does."""

    group: Path | None
    memory: Path | None


def container_id(pid: int, *, proc: Path = procfs.PROC) -> str | None:
    """The full id of the container that a process of this host is in; `None` for a process in none.

    Raises:
        OSError: the process is gone, or may not be looked at.
    """
    found = owner(pid, proc=proc)
    return None if found is None else found[0]


def owner(pid: int, *, proc: Path = procfs.PROC) -> tuple[str, str | None] | None:
    """The full id of the container that a process is in, and who runs it as far as its cgroup's name tells.

    Raises:
        OSError: the process is gone, or may not be looked at.
    """
    return _owner(procfs.read(f"{proc}/{pid}/cgroup"))


@lru_cache(maxsize=_OWNERS_MAX)
def _owner(said: bytes) -> tuple[str, str | None] | None:
    """Who owns what is in these cgroups: hundreds of processes are in the same few, look after look."""
    for line in said.decode("utf-8", "surrogateescape").splitlines():
        path = line.split(":", 2)[2]
        found = _CONTAINER_ID.search(path)
        if found:
            above = path[: found.start(1)]
            named = _RUNTIME.search(above)
            if named is None or (named[2] and _USERS.search(above)):  # a user's own Docker is not the system's
                return found.group(1), None
            return found.group(1), RUNTIMES[named[1] or named[2]]
    return None


def containers(root: Path = ROOT) -> dict[str, Path]:
    """Every container that has a group of its own on this host, by full id, and that group's directory.

    A container's own groups below it are not looked into: what a container runs inside itself is its own.
    """
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
        return []  # gone since it was listed


def unit(pid: int, *, proc: Path = procfs.PROC) -> str | None:
    """The service of the host's systemd that a process is in; `None` for a process in none.

    Groups that a service made inside itself count as its own: a user's services are in that user's `user@UID.service`.

    Raises:
        OSError: the process is gone, or may not be looked at.
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
    """Where a process is in the hierarchy that systemd keeps: its named one, else the unified one."""
    unified = ""
    for line in (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "name=systemd":
            return path
        if not controllers:
            unified = path
    return unified


def memory_directory(pid: int, container: str, *, proc: Path = procfs.PROC, root: Path = ROOT) -> Path | None:
    """Where the memory of a container is accounted, by its id and one of its processes; `None` where nowhere.

    A service of systemd's is named by its unit, as in all that follows.

    Groups that a container made inside itself count as its own.

    Raises:
        OSError: the process is gone.
    """
    unified: Path | None = None
    for controllers, path in _groups(pid, container, proc):
        if "memory" in controllers.split(","):
            return root / "memory" / path
        if not controllers:
            unified = root / path
    return unified if unified is not None and (unified / "memory.current").exists() else None


def memory(directory: Path) -> Memory:
    """Read a memory cgroup of either version.

    Raises:
        OSError: the cgroup is gone.
        ValueError: its files hold something else than numbers.
    """
    return MemoryFiles(directory).read()


class File:
    """A file of the kernel's that stays open: to read it again costs a fraction of opening it again.

    It stays with what it was opened of: once that cgroup or process is gone it tells nothing more (ENODEV, ESRCH),
    whatever is at its path by then. It is closed with the object.

    Raises:
        OSError: it is not there, or may not be looked at.
    """

    __slots__ = ("_descriptor",)

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self) -> bytes:
        """What it says now, whole.

        Raises:
            OSError: what it tells of is gone.
        """
        found = os.pread(self._descriptor, procfs.READ_BYTES, 0)
        # A short answer is the end of most; of those that come by the page only an empty one is.
        if len(found) < procfs.SHORT_BYTES:
            return found
        while more := os.pread(self._descriptor, procfs.READ_BYTES, len(found)):
            found += more
        return found


class Folder(File):
    """A directory of the kernel's that stays open, with its cgroup as a file does: its name is not looked up again."""

    def links(self) -> int:
        """How many there are to it; 0 once it is gone, where its file system says so.

        Raises:
            OSError: it is gone.
        """
        return os.fstat(self._descriptor).st_nlink

    def itself(self) -> Path:
        """A path that leads to it whatever it is called by now, and never to what is in its place (proc_pid_fd(5))."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    def read_in(self, name: str) -> bytes:
        """What a file in it says, which is opened for that.

        Raises:
            OSError: it is gone.
        """
        return procfs.read(name, folder=self._descriptor)


class MemoryFiles:
    """The files of a memory cgroup of either version, open.

    Raises:
        OSError: the cgroup is gone.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._usage, self._version_2 = File(f"{directory}/memory.current"), True
        except FileNotFoundError:
            self._usage, self._version_2 = File(f"{directory}/memory.usage_in_bytes"), False
        self._stat = File(f"{directory}/memory.stat")
        self._told: Memory | None = None
        self._stands = 0
        self._events: File | None = None
        with contextlib.suppress(FileNotFoundError):
            self._events = File(f"{directory}/{'memory.events' if self._version_2 else 'memory.oom_control'}")

    def read(self) -> Memory:
        """What they say now; of a charge that is the same to the byte, what its parts were within `PARTS_READS`.

        Raises:
            OSError: the cgroup is gone.
            ValueError: its files hold something else than numbers.
        """
        usage_bytes = int(self._usage.read())
        if self._told is None or self._told.usage_bytes != usage_bytes or self._stands == PARTS_READS - 1:
            self._told, self._stands = self._parts(usage_bytes), 0
        else:
            self._stands += 1
        return self._told

    def _parts(self, usage_bytes: int) -> Memory:
        stat = self._stat.read()
        inactive = _figure(stat, b"inactive_file" if self._version_2 else b"total_inactive_file")
        return Memory(
            usage_bytes=usage_bytes,
            anon_bytes=_figure(stat, b"anon" if self._version_2 else b"total_rss"),
            working_set_bytes=None if inactive is None else max(0, usage_bytes - inactive),
            oom_kills=None if self._events is None else _figure(self._events.read(), b"oom_kill"),
        )


def _figure(text: bytes, name: bytes) -> int | None:
    """The number after a name at the begin of a line; `None` where there is no such line. Of some forty, one is asked.

    Raises:
        ValueError: there is a line, and no number.
    """
    _, there, rest = b"\n".join((b"", text, b"")).partition(b"\n" + name)
    while there and rest[:1] not in (b" ", b"\n"):  # a longer name that begins so
        _, there, rest = rest.partition(b"\n" + name)
    return int(rest.partition(b"\n")[0]) if there else None


def frozen(pid: int, container: str, *, proc: Path = procfs.PROC, root: Path = ROOT) -> bool:
    """Whether the kernel says that it has frozen each process of a container; False where it does not tell.

    By `frozen` in cgroup.events, in version 1 by freezer.state (cgroup-v1/freezer-subsystem.rst).

    Raises:
        OSError: the process is gone.
    """
    for controllers, path in _groups(pid, container, proc):
        told: tuple[tuple[Path, bytes], ...] = ()
        if "freezer" in controllers.split(","):
            told = ((root / "freezer" / path / "freezer.state", b"FROZEN"),)
        elif not controllers:
            told = tuple((each / path / "cgroup.events", b"frozen 1") for each in (root, root / "unified"))
        for file, word in told:
            with contextlib.suppress(OSError):  # not there: another version's, or the container's end
                if word in procfs.read(str(file)).splitlines():
                    return True
    return False


def place(pid: int, container: str, *, proc: Path = procfs.PROC, root: Path = ROOT) -> Place:
    """Where a container is accounted, by its id and one of its processes. It does not move as long as it is there.

    Raises:
        OSError: the process is gone.
    """
    return Place(
        group=directory(pid, container, proc=proc, root=root),
        memory=memory_directory(pid, container, proc=proc, root=root),
    )


def at(group: Path) -> Place:
    """Where a container is accounted whose group is known, as `containers` finds it."""
    accounted = any((group / each).exists() for each in ("memory.current", "memory.usage_in_bytes"))
    return Place(group=group, memory=group if accounted else None)


def directory(pid: int, container: str, *, proc: Path = procfs.PROC, root: Path = ROOT) -> Path | None:
    """A directory that lists the processes of a container: where memory is accounted, else the unified one.

    In this order, because on hybrid hosts some runtimes leave their containers' unified group at the daemon's.

    Raises:
        OSError: the process is gone.
    """
    accounted = memory_directory(pid, container, proc=proc, root=root)
    if accounted is not None and (accounted / "cgroup.procs").exists():
        return accounted
    for controllers, path in _groups(pid, container, proc):
        if not controllers:
            for candidate in (root / path, root / "unified" / path):
                if (candidate / "cgroup.procs").exists():
                    return candidate
    return None


def processes(group: Path) -> frozenset[int]:
    """The pids in a cgroup and the cgroups below it, in this pid namespace; empty once it is gone.

    Raises:
        OSError: it is there and cannot be read, so that nothing is known of what runs in it.
    """
    pids: set[int] = set()
    waiting = [str(group)]
    while waiting:
        folder = waiting.pop()
        try:
            pids.update(map(int, procfs.read(f"{folder}/cgroup.procs").split()))
        except OSError as error:
            # Gone between the listing and the reading; or a threaded group, whose processes its parent lists.
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                raise
        if has_groups_below(folder):
            waiting += [str(below) for below in _folders_in(Path(folder))]
    return frozenset(pids)


class Group:
    """The list of a cgroup's processes, taken apart only where it says something else than before.

    Of version 2 it stays open. Of version 1 it is opened anew each time: there the kernel makes the list when it is
    opened, and whoever reads on in an open one more often than once a second gets the same list for ever
    (`cgroup_pidlist` in kernel/cgroup/cgroup-v1.c).

    Raises:
        OSError: the cgroup is gone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._folder = Folder(str(directory))
        self._itself = self._folder.itself()
        version_2 = (directory / "cgroup.controllers").exists()
        self._list = File(f"{directory}/cgroup.procs") if version_2 else None
        self._said: bytes | None = None
        self._pids = frozenset[int]()

    def processes(self) -> frozenset[int]:
        """The pids in it and in the cgroups below it, as `processes` tells them.

        Raises:
            OSError: it is gone, whatever is in its place by then, or cannot be read.
        """
        if (links := self._folder.links()) != _LINKS_ALONE:
            if links == 0:
                raise FileNotFoundError(errno.ENOENT, "the cgroup is gone", str(self._directory))
            return processes(self._itself)
        said = self._folder.read_in("cgroup.procs") if self._list is None else self._list.read()
        if said != self._said:
            self._said, self._pids = said, frozenset(map(int, said.split()))
        return self._pids


def has_groups_below(folder: str | Path) -> bool:
    """Whether a group need be listed: its links are two, and one for each group below it.

    Where a file system counts none there is one (btrfs, for a directory shaped like the kernel's).
    """
    try:
        return os.stat(folder).st_nlink != _LINKS_ALONE  # noqa: PTH116 - hundreds of times a second
    except OSError:
        return False


def _groups(pid: int, container: str, proc: Path) -> list[tuple[str, str]]:
    """A process's cgroups that bear its container's id, as (controllers, path from the root) of the container's own.

    A service's bear the name of its unit.

    Others are left out: a process that has exited, and was not waited for, is in the root of each version 1 hierarchy,
    among all processes of the host; and a pid may be somebody else's by now.
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
