"""Work of processes, from kernel files that stay open between samples.

Opening the files of 256 processes per sample takes 0.5 % of a core more. An open file never reads as another process
with the same pid.
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
"""The I/O counters in /proc/PID/io (proc_pid_io(5)): bytes of system calls, and bytes of disks, which include mmap."""

_BYTES_MAX: Final = 4096


@dataclass(slots=True)
class _Files:
    """Descriptors of one process's files, and their last content."""

    stat: int
    io: int | None = None
    read: tuple[tuple[bytes, bytes | None], ProcessWork] | None = None


class Work:
    """Read the work of processes, from one thread at a time; at most `open_max` of them keep their files open."""

    def __init__(self, *, proc: Path = procfs.PROC, open_max: int | None = None) -> None:
        self._proc = proc
        self._open_max = max_open_files() // 4 if open_max is None else open_max
        self._files: dict[int, _Files] = {}
        self._read_pids: set[int] = set()
        weakref.finalize(self, _close_all, self._files)

    def read(self, pids: Iterable[int]) -> dict[int, ProcessWork]:
        """Read the totals of each process that still exists.

        Raises:
            OSError: a process is not readable for this user.
            ValueError: a kernel file has an unknown format.
        """
        found: dict[int, ProcessWork] = {}
        for pid in pids:
            self._read_pids.add(pid)
            try:
                found[pid] = self._one(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    def close_unused(self, but: Collection[int] = ()) -> None:
        """Close the files of processes that were not read since the last call, except `but`."""
        for pid in self._files.keys() - self._read_pids:
            if pid not in but:
                _close(self._files.pop(pid))
        self._read_pids = set()

    def _one(self, pid: int) -> ProcessWork:
        files = self._files.get(pid)
        if files is not None:
            try:
                return self._parse(pid, files)
            except ProcessLookupError:  # ended; its pid may be reused
                _close(self._files.pop(pid))
        files = _Files(os.open(f"{self._proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC))
        kept = len(self._files) < self._open_max
        if kept:
            self._files[pid] = files
        try:
            return self._parse(pid, files)
        finally:
            if not kept:
                _close(files)

    def _parse(self, pid: int, files: _Files) -> ProcessWork:
        held = stat, io = os.pread(files.stat, _BYTES_MAX, 0), self._io(pid, files)
        if files.read is not None and files.read[0] == held:
            return files.read[1]
        # Field N of proc_pid_stat(5) is at N - 3, after the name in brackets, which may contain brackets.
        fields = stat.rpartition(b")")[2].split(None, 20)
        if len(fields) < 20:
            raise ValueError(f"process {pid}: stat has {len(fields)} fields after the name, expected 20 or more")
        work = ProcessWork(
            start_ticks=int(fields[19]),
            io_bytes=None if io is None else _parse_io(io),
            faults=sum(map(int, fields[7:11])),
            cpu_s=sum(map(int, fields[11:15])) / procfs.TICKS_PER_S,
        )
        files.read = held, work
        return work

    def _io(self, pid: int, files: _Files) -> bytes | None:
        # `None` if the kernel does not account I/O, or not for this user.
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


def _parse_io(io: bytes) -> int:
    found = _IO.match(io)
    if found is None:
        raise ValueError(f"/proc/PID/io has an unknown format: {io[:40]!r}")
    return sum(map(int, found.groups()))


def max_open_files() -> int:
    """The number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**16 if soft == resource.RLIM_INFINITY else soft


def _close(files: _Files) -> None:
    os.close(files.stat)
    if files.io is not None:
        os.close(files.io)


def _close_all(files: dict[int, _Files]) -> None:
    while files:
        _close(files.popitem()[1])
