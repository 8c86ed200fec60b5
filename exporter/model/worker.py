"""Workers and tasks of other runners, as last read. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # keeps driver processes small
    from gpuwarden.procfs import ProcessId
    from gpuwarden.state_file import JobFile, TaskFile, WorkerFile


@dataclass(frozen=True, kw_only=True)
class WorkerReading:
    """One worker's files and lock.

    Attributes:
        alive: whether the lock is held, if known.
        pid: the lock holder's host pid.
        container_id: also of its last container.
        uid: owner of its file.
        process: the command of a supervisor, if that holds the lock.
        ranks: running ones, if all report.
    """

    worker: "WorkerFile"
    job: "JobFile | None"
    alive: bool | None
    pid: int | None
    container_id: str | None
    folder: str = ""
    uid: int | None = None
    process: "ProcessId | None" = None
    ranks: "tuple[JobFile, ...]" = ()


class DeadProcess(NamedTuple):
    """The process of a dead worker. `live_workers`: in the session or group that it led."""

    ended: bool | None
    live_workers: int | None


@dataclass(frozen=True, kw_only=True)
class CpuUse:
    """CPU time of one process, clock ticks; `uninterruptible` is state D."""

    start_ticks: int
    used_ticks: int
    uninterruptible: bool = False


class ProcessWork(NamedTuple):
    """Totals of one process and its reaped children. `io_bytes` includes the page cache."""

    start_ticks: int
    io_bytes: int | None
    faults: int
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerReadings:
    """Workers of the host, unreadable files by reason, and `unread` folders with missing workers."""

    workers: tuple[WorkerReading, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    first_errors: Mapping[str, str] = field(default_factory=dict)
    duplicates: int = 0
    unread: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TaskReading:
    """One task of another runner."""

    task: "TaskFile"
    alive: bool | None


@dataclass(frozen=True, kw_only=True)
class TaskReadings:
    """Tasks of other runners, and unreadable files."""

    tasks: tuple[TaskReading, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    first_errors: Mapping[str, str] = field(default_factory=dict)
