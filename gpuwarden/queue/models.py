"""Values that enter and leave the queue, and its errors. Without SQLAlchemy: gateways and their workers use them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import ATTEMPTS_MAX, ItemState, JobClass, JobId, Kind, State
from gpuwarden.notify.address import check
from gpuwarden.state_file import SECONDS_MAX, TEXT_MAX, is_text

PRIORITY: Final = 100
"""Default priority of a job. A lower number runs sooner."""

RANKS_MAX: Final = 4096
"""Most ranks of one job."""

RESULT_MAX_BYTES: Final = 65536
"""Most bytes of a result as JSON."""

PAYLOAD_MAX_BYTES: Final = 2**20
"""Most bytes of a payload as JSON."""

Result: TypeAlias = Any
"""Any JSON value; `None` if the job left no result."""

KNOWN_STATES: Final = frozenset(State)

COUNT_MAX: Final = 2**31
"""Limit of whole numbers, from the databases' integer type."""


class SubmissionError(GpuwardenError):
    """A submission is invalid."""


class BlockedError(GpuwardenError):
    """A blocked job cannot be unblocked."""


class SpentError(GpuwardenError):
    """A job has no attempt or reclaim left."""


class ResultError(GpuwardenError):
    """A result cannot be stored."""


class UnknownJobError(GpuwardenError):
    """No job has this id."""


class DrainedError(GpuwardenError):
    """This incarnation is draining and has no job."""


class ReplacedError(GpuwardenError):
    """This incarnation is over."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job to submit. Unset budgets and timeouts come from its class."""

    queue: str
    job_class: JobClass | None = None
    """`None`: the class of its queue."""
    model: str | None = None
    """Workers with this model loaded take the job first within its priority."""
    reports_steps: bool = True
    payload: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None
    priority: int = PRIORITY
    steps_total: int | None = None
    budget_s: float | None = None
    stall_timeout_s: float | None = None
    busy_timeout_s: float | None = None
    """`None`: from the host."""
    attempts_max: int = ATTEMPTS_MAX
    retries_max: int = 0
    """Retries after an exception of the job."""
    needs: tuple[JobId, ...] = ()
    """Jobs of the same run that must complete first."""
    ranks: int = 1
    """Number of workers that run it together."""
    notify: str | None = field(default=None, repr=False)
    """Address to notify if the job fails or is blocked."""

    def __post_init__(self) -> None:
        check_json(self.payload, "payload", PAYLOAD_MAX_BYTES, SubmissionError)
        for name in ("queue", "model", "run_id"):
            text = getattr(self, name)
            if text is not None and not is_text(text):
                raise SubmissionError(f"{name} {text[:80]!a} is invalid: use 1 to {TEXT_MAX} printable characters")
        for name in ("budget_s", "stall_timeout_s", "busy_timeout_s"):
            figure = getattr(self, name)
            if figure is not None and not 0 <= figure < SECONDS_MAX:
                raise SubmissionError(f"{name} {figure} is invalid: use a number from 0, below {SECONDS_MAX:.0e}")
        least_of = {"steps_total": 0, "attempts_max": 1, "retries_max": 0, "priority": 1 - COUNT_MAX, "ranks": 1}
        for name, least in least_of.items():
            count = getattr(self, name)
            if count is not None and not least <= count < COUNT_MAX:
                raise SubmissionError(f"{name} {count} is invalid: use a whole number from {least}, below {COUNT_MAX}")
        if self.notify is not None:
            check(self.notify)
        if self.ranks > RANKS_MAX:
            raise SubmissionError(f"ranks {self.ranks} is invalid: at most {RANKS_MAX}")
        if self.ranks > 1 and self.retries_max:
            raise SubmissionError(
                f"retries_max {self.retries_max} is invalid: a gang is not retried after an exception"
            )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job. Times are Unix seconds. `budget_s` is the current or last attempt's."""

    job_id: JobId
    run_id: str | None
    queue: str
    job_class: JobClass
    model: str | None
    payload: dict[str, Any]
    submitted_budget_s: float | None
    budget_s: float
    stall_timeout_s: float
    busy_timeout_s: float | None
    steps_total: int | None
    state: State
    priority: int
    attempt: int
    attempts_max: int
    retries_max: int
    retries: int
    retry_at: float | None
    watchdog_retries: int
    reclaims: int
    claimed_by: str | None
    host: str | None
    worker: str | None
    lease_expires_at: float | None
    reason: str | None
    traceback: str | None
    """Its end, of the last attempt that raised an exception."""
    needs: int
    """How many jobs this job needs."""
    pending: int
    """How many of these jobs have not completed."""
    gang: JobId | None
    """Job id of rank 0; `None` for a single rank."""
    rank: int
    ranks: int
    submitted_at: float
    queued_at: float | None
    claimed_at: float | None
    ended_at: float | None
    result: Result
    inputs: Mapping[JobId, Result] = field(default_factory=dict)
    """For the handler: the results of the jobs that this job needs."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Jobs that belong together. Times are Unix seconds.

    `forgiven_at` and `forgiven_by` are the last undo of its wrangling.
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
    """A job or a run ended.

    `waited_s` is the last attempt's wait for its claim, `ran_s` its duration after that, seconds.
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
    """A piece of a run's work, with the attempt and slot that last had it."""

    run_id: str
    item: str
    state: ItemState
    job_id: JobId | None
    attempt: int | None
    host: str | None
    worker: str | None
    reason: str | None
    result: Result


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """A queue's settings and who set them when (Unix seconds). `None`: the default.

    `lost_hold_s` is how long a lost host's job is held, seconds. `retention_days` is how long a finished job is kept;
    0: for ever.
    """

    queue: str
    job_class: JobClass | None
    budget_s: float | None
    lost_hold_s: float | None
    retention_days: int | None = None
    set_at: float
    set_by: str


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A worker's host and name, with its known GPUs by UUID."""

    host: str
    worker: str
    gpus: tuple[str, ...] = ()


class SlotClaim(NamedTuple):
    """An attempt, and the slot that says it has it."""

    job_id: int
    attempt: int
    incarnation: str
    host: str
    worker: str


class PersonsJob(NamedTuple):
    """A job for a notification. `address` is its own, else its run's."""

    job_id: JobId
    run_id: str | None
    queue: str
    reason: str
    address: str | None
    submitted_by: str | None


class LockedWorker(NamedTuple):
    """A worker that gpuwarden locked at a time, Unix seconds."""

    host: str
    worker: str
    at: float
    reason: str


class Beat(NamedTuple):
    """A worker's heartbeat. `completed`: it has completed a job since the last one."""

    worker: str
    queue: str
    incarnation: str
    model: str | None = None
    loaded: str | None = None
    completed: bool = False


class Success(NamedTuple):
    """An attempt that completed, and what is stored with the job."""

    job_id: int
    attempt: int
    result: Result = None
    reason: str | None = None
    in_run: bool = False


class Completion(NamedTuple):
    """Whether a job was completed, and the job that was claimed with it. `idle`: there was none to claim."""

    done: bool
    job: "Job | None" = None
    idle: bool = False


class Renewal(NamedTuple):
    """A claim, and the new length of its lease, seconds."""

    claim: SlotClaim
    lease_s: float


class Synced(NamedTuple):
    """The heartbeats of incarnations that are over or draining, and the claims that are lost."""

    over: list[Beat]
    lost: list[SlotClaim]
    draining: list[Beat]


def is_gpu(name: str) -> bool:
    """Whether the text is a UUID of a GPU or a MIG device; an index is not."""
    return name.startswith(("GPU-", "MIG-")) and is_text(name)


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A GPU out of use since `since` (Unix seconds). `worker` is the slot that held it."""

    gpu: str
    host: str
    worker: str | None
    since: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerRow:
    """A worker slot. Times are Unix seconds."""

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
    locked_reason: str | None
    unlocked_at: float | None
    unlocked_by: str | None


@dataclass(frozen=True, kw_only=True)
class HostsJob:
    """A job on a host, lost or running. `heard_at` is its worker's last contact, Unix seconds."""

    job_id: JobId
    attempt: int
    state: State
    heard_at: float | None


@dataclass(frozen=True, kw_only=True)
class DeadWorker:
    """A worker that was found dead with a job. Times are Unix seconds."""

    host: str
    worker: str
    queue: str
    incarnation: str
    since: float
    stamped_at: float
    reason: str


def check_result(result: Result) -> None:
    """Check that both databases can store a job's result.

    Raises:
        ResultError: it is not JSON, contains NUL, or is longer than `RESULT_MAX_BYTES`.
    """
    check_json(result, "result", RESULT_MAX_BYTES, ResultError)


def check_json(value: object, what: str, size_max_bytes: int, error: type[GpuwardenError]) -> None:
    """Raise `error` unless both databases can store this result or payload."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as reason:
        raise error(f"a job's {what} is not JSON: {reason}") from None
    if "\\ud" in text:  # a surrogate, of a pair or alone
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise error(f"a job's {what} has a lone surrogate, which is no text: encode it first") from None
    if len(text) > size_max_bytes:
        raise error(
            f"a job's {what} has {len(text)} bytes as JSON, more than {size_max_bytes}: write the data to a "
            "file and give its path"
        )
    if "\\u0000" in text.replace("\\\\", ""):
        raise error(f"a job's {what} contains a NUL character, which PostgreSQL cannot store")
