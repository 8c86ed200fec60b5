"""What goes into the queue and comes out of it: submissions, jobs, slots, quarantines; and what is refused."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from sqlalchemy import Row

from gpuwarden.errors import GpuwardenError
from gpuwarden.fields import made_from
from gpuwarden.job import ATTEMPTS_MAX, ItemState, JobClass, JobId, Kind, State
from gpuwarden.state_file import SECONDS_MAX, TEXT_MAX, is_text

PRIORITY: Final = 100
"""A job's priority when its submitter names none; lower runs sooner."""

RANKS_MAX: Final = 4096
"""Ranks that one job may have."""

RESULT_MAX_BYTES: Final = 65536
"""A job's result is an answer, and no place for data."""

PAYLOAD_MAX_BYTES: Final = 2**20
"""A job's payload says what is to be done, and with which files."""

Result: TypeAlias = Any
"""What JSON can hold; `None` where a job left nothing."""

COUNT_MAX: Final = 2**31
"""Whole numbers stay below this: it is what the databases' integers hold."""


class SubmissionError(GpuwardenError):
    """A submission asks for what no worker could report and no rule could police."""


class BlockedError(GpuwardenError):
    """A blocked job cannot be let go."""


class SpentError(GpuwardenError):
    """A job has used up its attempts, or its reclaims, and what was asked for would fail it."""


class ResultError(GpuwardenError):
    """A result cannot be kept."""


class UnknownJobError(GpuwardenError):
    """No job has that id."""


class DrainedError(GpuwardenError):
    """A person asked this incarnation of a worker to end once it has nothing to do; it has."""


class ReplacedError(GpuwardenError):
    """This incarnation of a worker is over: a newer one has registered, or its process is being ended."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job to be done. Unset budgets and timeouts come from its class."""

    queue: str
    job_class: JobClass | None = None
    """`None`: what its queue says."""
    model: str | None = None
    """What it needs loaded: a worker that has it loaded takes it before others of its priority."""
    reports_steps: bool = True
    payload: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None
    priority: int = PRIORITY
    steps_total: int | None = None
    budget_s: float | None = None
    stall_timeout_s: float | None = None
    attempts_max: int = ATTEMPTS_MAX
    needs: tuple[JobId, ...] = ()
    """The jobs of its run that must have completed before it is queued."""
    ranks: int = 1
    """How many workers it takes at once: each runs a rank, and they end as one."""

    def __post_init__(self) -> None:
        check_json(self.payload, "payload", PAYLOAD_MAX_BYTES, SubmissionError)
        for name in ("queue", "model", "run_id"):
            text = getattr(self, name)
            if text is not None and not is_text(text):
                raise SubmissionError(f"{name} {text[:80]!a} will not do: 1 to {TEXT_MAX} printable characters")
        for name in ("budget_s", "stall_timeout_s"):
            figure = getattr(self, name)
            if figure is not None and not 0 <= figure < SECONDS_MAX:
                raise SubmissionError(f"{name} {figure} will not do: a number from 0, below {SECONDS_MAX:.0e}")
        for name, least in (("steps_total", 0), ("attempts_max", 1), ("priority", 1 - COUNT_MAX), ("ranks", 1)):
            count = getattr(self, name)
            if count is not None and not least <= count < COUNT_MAX:
                raise SubmissionError(f"{name} {count} will not do: a whole number from {least}, below {COUNT_MAX}")
        if self.ranks > RANKS_MAX:
            raise SubmissionError(f"ranks {self.ranks} will not do: {RANKS_MAX} at most")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as the queue knows it. Times are Unix seconds; `budget_s` is that of its present or last attempt."""

    job_id: JobId
    run_id: str | None
    queue: str
    job_class: JobClass
    model: str | None
    payload: dict[str, Any]
    asked_budget_s: float | None
    budget_s: float
    stall_timeout_s: float
    steps_total: int | None
    state: State
    priority: int
    attempt: int
    attempts_max: int
    watchdog_retries: int
    reclaims: int
    claimed_by: str | None
    host: str | None
    worker: str | None
    lease_expires_at: float | None
    because: str | None
    needs: int
    """How many jobs had to complete before it could be queued."""
    pending: int
    """How many of them have yet to."""
    gang: JobId | None
    """The job of rank 0, which is also what the gang is called; `None` for a job of one rank."""
    rank: int
    ranks: int
    submitted_at: float
    queued_at: float | None
    claimed_at: float | None
    ended_at: float | None
    result: Result
    inputs: Mapping[JobId, Result] = field(default_factory=dict)
    """To its body: what the jobs that it needs have left."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Jobs that belong together; `state` is running, completed, failed or cancelled, times Unix seconds.

    `forgiven_at` and `forgiven_by` say when wrangling of it was undone last, and who did it.
    """

    run_id: str
    state: str
    submitted_at: float
    ended_at: float | None
    forgiven_at: float | None
    forgiven_by: str | None
    jobs: Mapping[State, int]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A job ended, or with it its run: see `Kind`. Delivered at least once to each consumer, in one order to all.

    `waited_s` is from when its last attempt could be claimed until it was, `ran_s` from then to its end, seconds.
    """

    position: int
    kind: Kind
    job_id: JobId
    attempt: int
    run_id: str | None
    queue: str | None
    job_class: JobClass | None
    waited_s: float | None
    ran_s: float | None
    written_at: float


@dataclass(frozen=True, kw_only=True)
class Item:
    """A piece of a run's work, such as a frame; `job_id`, `attempt`, `host` and `worker` are of who has or had it."""

    run_id: str
    item: str
    state: ItemState
    job_id: JobId | None
    attempt: int | None
    host: str | None
    worker: str | None
    because: str | None
    result: Result


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """What a queue's owner has set, when (Unix seconds) and who. `None` is: as for every queue.

    `lost_hold_s` is how long a job of a lost host is held before it is given away, seconds; `None` for ever.
    """

    queue: str
    job_class: JobClass | None
    budget_s: float | None
    lost_hold_s: float | None
    set_at: float
    set_by: str


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One worker's place: what a requeued job stays away from. Its GPUs are UUIDs, as far as they are known."""

    host: str
    worker: str
    gpus: tuple[str, ...] = ()


def is_gpu(name: str) -> bool:
    """Whether this names a GPU, or a part of one, by UUID, as `nvidia-smi -L` does; a number is no identity."""
    return name.startswith(("GPU-", "MIG-")) and is_text(name)


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A GPU that nobody uses, since when (Unix seconds) and why. `worker` is the slot that held it."""

    gpu: str
    host: str
    worker: str | None
    since: float
    because: str


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """One worker's slot as the queue knows it. Times are Unix seconds; `alive` is: seen lately, and not over."""

    host: str
    worker: str
    queue: str
    incarnation: str
    alive: bool
    last_seen_at: float
    job_id: JobId | None
    current_model: str | None
    loaded_model: str | None
    gpus: tuple[str, ...]
    draining: bool
    locked_at: float | None
    locked_by: str | None
    locked_because: str | None
    unlocked_at: float | None
    unlocked_by: str | None


@dataclass(frozen=True, kw_only=True)
class HostsJob:
    """A job that runs on a host, or is lost with it. `heard_at` is when its worker was last heard of, Unix seconds.

    It is `None` where that worker's row is another incarnation's by now, or there is none.
    """

    job_id: JobId
    attempt: int
    state: State
    heard_at: float | None


@dataclass(frozen=True, kw_only=True)
class DeadWorker:
    """A worker that was found dead while it held a job, since when, and when that was last seen, Unix seconds."""

    host: str
    worker: str
    queue: str
    incarnation: str
    since: float
    stamped_at: float
    because: str


def to_worker(row: Row[Any], gpus: Sequence[str], *, fresh_since: float) -> WorkerRow:
    """A row of the table as a value."""
    return made_from(
        row,
        WorkerRow,
        alive=row.last_seen_at > fresh_since and row.retired != row.incarnation,
        gpus=tuple(gpus),
        draining=row.draining == row.incarnation,
    )


def to_quarantine(row: Row[Any]) -> Quarantine:
    """A row of the table as a value."""
    return Quarantine(gpu=row.gpu, host=row.host, worker=row.worker or None, since=row.since, because=row.because)


def to_job(row: Row[Any]) -> Job:
    """A row of the table as a value."""
    return made_from(row, Job, job_class=JobClass(row.job_class), state=State(row.state))


def to_event(row: Row[Any]) -> Event:
    """A row of the table as a value."""
    job_class = None if row.job_class is None else JobClass(row.job_class)
    return made_from(row, Event, kind=Kind(row.kind), job_class=job_class)


def to_item(row: Row[Any]) -> Item:
    """A row of the table as a value."""
    return made_from(row, Item, state=ItemState(row.state))


def to_settings(row: Row[Any]) -> QueueSettings:
    """A row of the table as a value."""
    return made_from(row, QueueSettings, job_class=None if row.job_class is None else JobClass(row.job_class))


def check_result(result: Result) -> None:
    """Whether a job's result can be kept in both databases.

    Raises:
        ResultError: it is no JSON, has a NUL in a text, or is longer than `RESULT_MAX_BYTES`.
    """
    check_json(result, "result", RESULT_MAX_BYTES, ResultError)


def check_json(value: object, what: str, size_max_bytes: int, error: type[GpuwardenError]) -> None:
    """Whether a job's result or payload can be kept in both databases; raises `error` where it cannot."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as because:
        raise error(f"a job's {what} is what JSON can hold, and this is not: {because}") from None
    if len(text) > size_max_bytes:
        raise error(
            f"a job's {what} may have {size_max_bytes} bytes as JSON, and this has {len(text)}: leave the data in a "
            "file, and the path of it here"
        )
    if "\\u0000" in text.replace("\\\\", ""):
        raise error(f"a job's {what} has a text with a NUL in it, which not every database can keep")
