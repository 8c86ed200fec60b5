"""Processes in /proc. Standard library only.

A pid with its start time names one process of this boot. Sources: proc_pid_stat(5), pidfd_open(2).
"""

import errno
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

PROC: Final = Path("/proc")

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second."""

READ_BYTES: Final = 16384
"""Bytes per read."""

SHORT_BYTES: Final = 2048
"""A shorter read is the whole file."""


HOSTS_PID_NAMESPACE: Final = 4026531836
"""PROC_PID_INIT_INO."""


class ProcessId(NamedTuple):
    """One process of this boot."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int, *, proc: Path = PROC) -> Self:
        """The process with this pid; see `start_ticks`."""
        return cls(pid, start_ticks(pid, proc=proc))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the output of `str`."""
        words = text.split()
        return cls(*map(int, words)) if len(words) == 2 and all(word.isdecimal() for word in words) else None

    def __str__(self) -> str:
        return f"{self.pid} {self.start_ticks}"

    def runs(self, *, proc: Path = PROC) -> bool:
        """Whether it runs and has not ended."""
        try:
            fields = stat(self.pid, proc=proc)
        except OSError:
            return False
        return int(fields[19]) == self.start_ticks and not has_ended(fields)

    def has_ended(self) -> bool | None:
        """Whether it has ended; `None` if unreadable."""
        try:
            os.kill(self.pid, 0)  # also if /proc hides it (hidepid)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        try:
            fields = stat(self.pid)
        except OSError:
            return None
        return int(fields[19]) != self.start_ticks or has_ended(fields)

    def led(self, stat: Sequence[str]) -> bool:
        """Whether it leads a process's group or session."""
        return str(self.pid) in stat[2:4]

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open a pidfd of this process.

        The start time is checked after the open.

        Raises:
            ProcessLookupError: it ended.
            OSError: the kernel refuses the descriptor, or hides the process.
        """
        descriptor = os.pidfd_open(self.pid)
        try:
            if start_ticks(self.pid) != self.start_ticks:
                raise ProcessLookupError(errno.ESRCH, "another process has this pid")
            yield descriptor
        finally:
            os.close(descriptor)


def signal_process(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to this process and no other; nothing if it is gone, or of another user.

    Raises:
        OSError: not possible before Linux 5.3.
    """
    try:
        with process.opened() as descriptor, suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, number)
    except (FileNotFoundError, ProcessLookupError):
        return


def family(leader: ProcessId, *, proc: Path = PROC) -> list[ProcessId]:
    """A leader's living processes: its process group, its session, and all their children.

    The kernel does not reuse a pid while a group or session has it.
    """
    stats = _stats(proc)
    if leader.pid in stats and int(stats[leader.pid][19]) != leader.start_ticks:
        return []
    return _with_children(
        stats, [pid for pid, each in stats.items() if leader.pid in (pid, int(each[2]), int(each[3]))]
    )


def group(number: int, *, proc: Path = PROC) -> list[ProcessId]:
    """The living processes of a process group."""
    stats = _stats(proc)
    members = [pid for pid, each in stats.items() if int(each[2]) == number and not has_ended(each)]
    return [ProcessId(pid, int(stats[pid][19])) for pid in sorted(members)]


def real_uid(pid: int, *, proc: Path = PROC) -> int:
    """The user who started a process. Raises OSError if it ended or is hidden."""
    for line in read(f"{proc}/{pid}/status").split(b"\n"):
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    raise ProcessLookupError(errno.ESRCH, "no user")


def started_with(variable: str, *, proc: Path = PROC) -> list[ProcessId]:
    """The living processes that this user may inspect and whose first environment has `NAME=value`."""
    found = []
    for pid, fields in _stats(proc).items():
        with suppress(OSError):
            if variable.encode() in read(f"{proc}/{pid}/environ").split(b"\0") and not has_ended(fields):
                found.append(ProcessId(pid, int(fields[19])))
    return found


def descendants(pid: int, *, proc: Path = PROC) -> list[ProcessId]:
    """Living children, and theirs."""
    stats = _stats(proc)
    return _with_children(stats, [each for each, fields in stats.items() if int(fields[1]) == pid])


def _with_children(stats: Mapping[int, list[str]], roots: list[int]) -> list[ProcessId]:
    children: dict[int, list[int]] = {}
    for pid, fields in stats.items():
        children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    while roots:
        pid = roots.pop()
        if pid not in found:
            found.add(pid)
            roots += children.get(pid, ())
    return [ProcessId(pid, int(stats[pid][19])) for pid in sorted(found) if not has_ended(stats[pid])]


def _stats(proc: Path) -> dict[int, list[str]]:
    """The fields of every process, by pid."""
    found = {}
    for entry in os.scandir(proc):
        if entry.name.isdigit():
            with suppress(OSError):  # it ended
                found[int(entry.name)] = stat(int(entry.name), proc=proc)
    return found


def start_ticks(pid: int, *, proc: Path = PROC) -> int:
    """Start, clock ticks since boot.

    Raises:
        OSError: the process ended.
    """
    # Called hundreds of times a second.
    return int(read(f"{proc}/{pid}/stat").rpartition(b")")[2].split(None, 20)[19])


def sees_all_pids() -> bool:
    """Whether the host's pids are visible."""
    return pid_namespace() == HOSTS_PID_NAMESPACE


def pid_namespace() -> int | None:
    """The inode of this process's pid namespace."""
    try:
        return (PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return None


def stat(pid: int, *, proc: Path = PROC) -> list[str]:
    """/proc/PID/stat after the name: field N is at N - 3."""
    return read(f"{proc}/{pid}/stat").decode("utf-8", "replace").rpartition(")")[2].split()


def has_ended(stat: Sequence[str]) -> bool:
    """Whether a process has ended, by its `stat`.

    A zombie main thread with other threads may hang in a driver, and still holds memory.
    """
    return stat[0] in ("Z", "X") and all(int(threads) <= 1 for threads in stat[17:18])


def is_zombie(pid: int, *, proc: Path = PROC) -> bool:
    """Whether a process is a zombie; false if unknown."""
    try:
        return has_ended(stat(pid, proc=proc))
    except OSError:
        return False


def read(path: str, *, folder: int | None = None) -> bytes:
    """Read a kernel file, at half the cost of `Path.read_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.read(descriptor, READ_BYTES)
        if len(found) < SHORT_BYTES:
            return found
        while more := os.read(descriptor, READ_BYTES):
            found += more
    finally:
        os.close(descriptor)
    return found
