"""Processes as the kernel shows them in /proc: which one a pid is, and whether it has ended. Standard library only.

A pid names no process for long: another gets it once the first is gone. A pid and its start time name one process
until the next boot (`ProcessId`). Sources: proc_pid_stat(5), pidfd_open(2). `proc` can point at a folder shaped like
the kernel's.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, Self

PROC: Final = Path("/proc")

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
"""Clock ticks a second, the unit of times in /proc/PID/stat; 100 nearly everywhere."""

READ_BYTES: Final = 16384
"""Bytes asked of the kernel at a time: most of its files are shorter, and long lists of pids come by the page."""

SHORT_BYTES: Final = 2048
"""What is shorter than this, half of the smallest page, is no page of a longer file's."""


class ProcessId(NamedTuple):
    """One process of this boot.

    Args:
        pid: its number now.
        start_ticks: when it started, clock ticks since boot.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int, *, proc: Path = PROC) -> Self:
        """The process that has this pid now.

        Raises:
            OSError: there is none, or it may not be looked at.
        """
        return cls(pid, start_ticks(pid, proc=proc))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read what `str` wrote; `None` where the text is something else."""
        words = text.split()
        return cls(*map(int, words)) if len(words) == 2 and all(word.isdecimal() for word in words) else None

    def __str__(self) -> str:
        return f"{self.pid} {self.start_ticks}"

    def runs(self) -> bool:
        """Whether it is seen to run: it is there and no zombie."""
        try:
            fields = stat(self.pid)
        except OSError:
            return False
        return int(fields[19]) == self.start_ticks and not has_ended(fields)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A pidfd of this very process, for as long as the block lasts.

        A process that has the pid later started later. So the start time, read once the descriptor is open, shows
        that the descriptor is of this process, whatever happens next.

        Raises:
            ProcessLookupError: it is gone; another process may have its pid.
            OSError: the kernel gives no such descriptor, or hides the process.
        """
        descriptor = os.pidfd_open(self.pid)
        try:
            if start_ticks(self.pid) != self.start_ticks:
                raise ProcessLookupError(errno.ESRCH, "another process has this pid")
            yield descriptor
        finally:
            os.close(descriptor)


def start_ticks(pid: int, *, proc: Path = PROC) -> int:
    """When a process started, clock ticks since boot: with the pid and the boot id it is one process for ever.

    Raises:
        OSError: the process is gone.
    """
    # Hundreds of times a second: what comes after it is not taken apart.
    return int(read(f"{proc}/{pid}/stat").rpartition(b")")[2].split(None, 20)[19])


def stat(pid: int, *, proc: Path = PROC) -> list[str]:
    """What the kernel says of a process after its name: state, parent, group, session, … (proc_pid_stat(5)).

    The name stands in brackets and may hold brackets and spaces itself, so field N of the manual is the one at N - 3.

    Raises:
        OSError: the process is gone.
    """
    return read(f"{proc}/{pid}/stat").decode("utf-8", "replace").rpartition(")")[2].split()


def has_ended(stat: Sequence[str]) -> bool:
    """Whether a process of which the kernel says this (`stat`) has ended, though nobody has waited for it yet.

    The state is its main thread's: where that has ended before the others, or one of them is killed and hangs in a
    driver, it is a zombie's, and the process lives on with all that it holds.
    """
    return stat[0] in ("Z", "X") and all(int(threads) <= 1 for threads in stat[17:18])


def read(path: str, *, folder: int | None = None) -> bytes:
    """A file of the kernel's, whole, for less than half of what `Path` costs: hundreds are read each second.

    With the descriptor of a `folder`, its path is from there.

    Raises:
        OSError: it is gone, or may not be looked at.
    """
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
