"""Workers, their processes, and tasks of other runners, as last read. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # driver processes load this module and must stay small
    from gpuwarden.state_file import JobFile, TaskFile, WorkerFile


@dataclass(frozen=True, kw_only=True)
class WorkerReading:
    """One worker's files and lock.

    Attributes:
        alive: whether the lock is held; `None` if unknown.
        pid: the lock holder's host pid.
        container_id: its container, or its last one.
        folder: the subdirectory of its files.
    """

    worker: "WorkerFile"
    job: "JobFile | None"
    alive: bool | None
    pid: int | None
    container_id: str | None
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class CpuUse:
    """CPU time of all threads of one process, clock ticks.

    `uninterruptible` is state D of its main thread, as in a wait for storage.
    """

    start_ticks: int
    used_ticks: int
    uninterruptible: bool = False


class ProcessWork(NamedTuple):
    """Totals of one process and the children it waited for. `io_bytes` includes the page cache."""

    start_ticks: int
    io_bytes: int | None
    faults: int
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerReadings:
    """Every worker of the host, and unreadable files.

    Attributes:
        errors: count by reason.
        first_errors: one file and its fault, by reason.
        unread: folders with workers that are missing here.
    """

    workers: tuple[WorkerReading, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    first_errors: Mapping[str, str] = field(default_factory=dict)
    duplicates: int = 0
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TaskReading:
    """One task of another runner; `alive` is `None` if unknown."""

    task: "TaskFile"
    alive: bool | None


@dataclass(frozen=True, kw_only=True)
class TaskReadings:
    """Every task of other runners, and unreadable files as for workers."""

    tasks: tuple[TaskReading, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    first_errors: Mapping[str, str] = field(default_factory=dict)
