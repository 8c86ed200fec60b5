"""Control groups as the kernel shows them: which container a process is in, its processes, its memory.

Works on cgroup v1, v2 and the hybrid of both. `proc` and `root` can point at directories shaped like the kernel's.
Sources: cgroups(7); Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.
"""

import errno
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
ROOT: Final = Path("/sys/fs/cgroup")

UNIT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.@\\-]*\.service")
"""A service of systemd's by its whole name (systemd.unit(5)). What systemd escapes in a cgroup's name is none here."""

_CONTAINER_ID = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A cgroup's memory, bytes. `usage` is the whole charge, page cache included (what A2 watches)."""

    usage_bytes: int
    anon_bytes: int | None
    working_set_bytes: int | None


def container_id(pid: int, *, proc: Path = PROC) -> str | None:
    """The full id of the container that a process of this host is in; `None` for a process in none.

    Raises:
        OSError: the process is gone, or may not be looked at.
    """
    for line in (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
        found = _CONTAINER_ID.search(line.split(":", 2)[2])
        if found:
            return found.group(1)
    return None


def unit(pid: int, *, proc: Path = PROC) -> str | None:
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
    for line in (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "name=systemd":
            return path
        if not controllers:
            unified = path
    return unified


def memory_directory(pid: int, container: str, *, proc: Path = PROC, root: Path = ROOT) -> Path | None:
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
    version_2 = (directory / "memory.current").exists()
    usage_file = "memory.current" if version_2 else "memory.usage_in_bytes"
    usage_bytes = int((directory / usage_file).read_text(encoding="ascii"))
    stat = dict(line.split() for line in (directory / "memory.stat").read_text(encoding="ascii").splitlines())
    anon = stat.get("anon" if version_2 else "total_rss")
    inactive = stat.get("inactive_file" if version_2 else "total_inactive_file")
    return Memory(
        usage_bytes=usage_bytes,
        anon_bytes=None if anon is None else int(anon),
        working_set_bytes=None if inactive is None else max(0, usage_bytes - int(inactive)),
    )


def directory(pid: int, container: str, *, proc: Path = PROC, root: Path = ROOT) -> Path | None:
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
    for listing in [group / "cgroup.procs", *group.glob("**/cgroup.procs")]:
        try:
            pids.update(int(line) for line in listing.read_text(encoding="ascii").split())
        except OSError as error:
            # Gone between the listing and the reading; or a threaded group, whose processes its parent lists.
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                raise
    return frozenset(pids)


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
    for line in (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for named in bears.finditer(path):
            if named.group(1) == container:
                found.append((controllers, path[: named.end()].strip("/")))
                break
    return found


def start_ticks(pid: int, *, proc: Path = PROC) -> int:
    """When a process started, clock ticks since boot: with the pid and the boot id it is one process for ever.

    Raises:
        OSError: the process is gone.
    """
    return int(stat(pid, proc=proc)[19])


def stat(pid: int, *, proc: Path = PROC) -> list[str]:
    """What the kernel says of a process after its name: state, parent, group, session, … (proc_pid_stat(5)).

    The name stands in brackets and may hold brackets and spaces itself, so field N of the manual is the one at N - 3.

    Raises:
        OSError: the process is gone.
    """
    return (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
