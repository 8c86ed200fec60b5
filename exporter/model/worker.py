"""Workers, their processes, and tasks of other runners, as they were last read. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # not for the processes that ask drivers: they know GPUs alone, and are to be small
    from gpuwarden.state_file import JobFile, TaskFile, WorkerFile


@dataclass(frozen=True, kw_only=True)
class WorkerSighting:
    """One worker's files and lock. `alive` is the lock: held, free, or `None` when it could not be tested.

    `pid` is the lock holder's in the host's namespace; `container_id` its container, `None` when in none or unknown.
    Of a dead worker it is the container it was in, where that is still known; `folder` is its files' subdirectory.
    """

    worker: "WorkerFile"
    job: "JobFile | None"
    alive: bool | None
    pid: int | None
    container_id: str | None
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class CpuUse:
    """All the CPU time that one process has used, over every thread it had, clock ticks.

    With `start_ticks`, when it started, a pid names one process until the next boot. `uninterruptible` is whether its
    main thread waits in the kernel for what must not be interrupted, as for storage: its state is D.
    """

    start_ticks: int
    used_ticks: int
    uninterruptible: bool = False


class ProcessWork(NamedTuple):
    """What one process has done since it started, all its threads and the children it has waited for together.

    `io_bytes` is what it read and wrote, from the page cache or a disk, `None` where the kernel will not say; `faults`
    are page faults, minor and major.
    """

    start_ticks: int
    io_bytes: int | None
    faults: int
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerReadings:
    """Every worker of the host, and what could not be read: (reason, how many).

    `such_as` says which file is the first of a reason, and what is wrong with it. `unread` are the folders with workers
    that are left out here, though they may live.
    """

    workers: tuple[WorkerSighting, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    such_as: Mapping[str, str] = field(default_factory=dict)
    duplicates: int = 0
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TaskSighting:
    """One task of another runner's, and whether its process is there; `None` where that cannot be told."""

    task: "TaskFile"
    alive: bool | None


@dataclass(frozen=True, kw_only=True)
class TaskReadings:
    """Every task of other runners, and what could not be read: (reason, how many); `such_as` as of workers."""

    tasks: tuple[TaskSighting, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    such_as: Mapping[str, str] = field(default_factory=dict)
