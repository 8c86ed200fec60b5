"""What processes have done, from files of the kernel's that stay open from one look to the next.

To open the files of 256 processes at each look takes 0.5 % of a core more than to read open ones again. An open file
also stays with its process: once that is gone it tells nothing more, whoever has the pid by then.
"""

import os
import re
import resource
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from exporter.model.worker import ProcessWork
from gpuwarden import procfs

_IO: Final = re.compile(rb"rchar: (\d+)\nwchar: (\d+)\n(?:.*\n)*?read_bytes: (\d+)\nwrite_bytes: (\d+)\n")
"""What counts as I/O of /proc/PID/io (proc_pid_io(5)): the first two pass through system calls and are there with a
warm page cache too; the others reach a disk, also by mmap and io_uring. What does both counts twice."""

FILES_WANTED: Final = 8192
"""Enough to keep those of 2,000 processes and 400 containers open."""

_BYTES_MAX: Final = 4096
"""More than either file holds."""


@dataclass(slots=True)
class _Files:
    """The descriptors of one process's `stat` and `io`, the latter `None` while it has not been opened.

    `read` is what both held at the last look, and what that means. The files of a process that sleeps hold the same.
    """

    stat: int
    io: int | None = None
    read: tuple[tuple[bytes, bytes | None], ProcessWork] | None = None


class Work:
    """Reads what processes have done; one thread at a time.

    Files of `kept_max` processes stay open at most, for half of the files that this process may open; those of more are
    opened with each look.
    """

    def __init__(self, *, proc: Path = procfs.PROC, kept_max: int | None = None) -> None:
        self._proc = proc
        self._kept_max = files_max() // 4 if kept_max is None else kept_max
        self._files: dict[int, _Files] = {}
        self._asked: set[int] = set()
        weakref.finalize(self, _close_all, self._files)

    def read(self, pids: Iterable[int]) -> dict[int, ProcessWork]:
        """What each of these processes has done since it started; one that is gone by now is left out.

        Raises:
            OSError: one of them is not ours to look at.
            ValueError: what the kernel answers is no such line.
        """
        found: dict[int, ProcessWork] = {}
        for pid in pids:
            self._asked.add(pid)
            try:
                found[pid] = self._one(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    def let_go(self, but: Collection[int] = ()) -> None:
        """Close the files of those that were not asked for since the last call, `but` of these."""
        for pid in self._files.keys() - self._asked:
            if pid not in but:
                _close(self._files.pop(pid))
        self._asked = set()

    def _one(self, pid: int) -> ProcessWork:
        files = self._files.get(pid)
        if files is not None:
            try:
                return self._told(pid, files)
            except ProcessLookupError:  # it has ended; its pid may be another's by now
                _close(self._files.pop(pid))
        files = _Files(os.open(f"{self._proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC))
        kept = len(self._files) < self._kept_max
        if kept:
            self._files[pid] = files
        try:
            return self._told(pid, files)
        finally:
            if not kept:
                _close(files)

    def _told(self, pid: int, files: _Files) -> ProcessWork:
        held = stat, io = os.pread(files.stat, _BYTES_MAX, 0), self._io(pid, files)
        if files.read is not None and files.read[0] == held:
            return files.read[1]
        # Field N of proc_pid_stat(5) is at N - 3, after the name, which stands in brackets and may hold some itself.
        fields = stat.rpartition(b")")[2].split(None, 20)
        if len(fields) < 20:
            raise ValueError(f"process {pid} has {len(fields)} fields after its name, not 20 or more")
        work = ProcessWork(
            start_ticks=int(fields[19]),
            io_bytes=None if io is None else _io_bytes(io),
            faults=sum(map(int, fields[7:11])),
            cpu_s=sum(map(int, fields[11:15])) / procfs.TICKS_PER_S,
        )
        files.read = held, work
        return work

    def _io(self, pid: int, files: _Files) -> bytes | None:
        """What the kernel says of a process's I/O; `None` where it keeps no account of it, or not for us."""
        try:
            if files.io is None:
                files.io = os.open(f"{self._proc}/{pid}/io", os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(files.io, _BYTES_MAX, 0)
        except PermissionError:
            return None
        except FileNotFoundError:
            if (self._proc / str(pid) / "stat").exists():
                return None
            raise


def _io_bytes(io: bytes) -> int:
    """What a process has read and written, from its `io` file."""
    found = _IO.match(io)
    if found is None:
        raise ValueError(f"/proc/PID/io begins {io[:40]!r}, which is not its format")
    return sum(map(int, found.groups()))


def allow_files() -> None:
    """Let this process open `FILES_WANTED` files, as far as it may: systemd allows a service 1024 unless it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def files_max() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**16 if soft == resource.RLIM_INFINITY else soft


def _close(files: _Files) -> None:
    os.close(files.stat)
    if files.io is not None:
        os.close(files.io)


def _close_all(files: dict[int, _Files]) -> None:
    while files:
        _close(files.popitem()[1])
