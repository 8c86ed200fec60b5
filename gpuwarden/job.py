"""States, moves, classes, budgets and caps of jobs. Pure. See `docs/reference/jobs-and-identities.md`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

from gpuwarden.errors import GpuwardenError

JobId = NewType("JobId", int)

STALL_TIMEOUT_S: Final = 120.0
"""Default stall timeout (A2), seconds."""

MIN_TIMEOUT_S: Final = 30.0
"""Minimum timeout of a phase, seconds: a live process can look idle for this long."""

WATCHDOG_RETRIES_MAX: Final = 3
"""Requeues by the remediator before a job fails (A8)."""

RECLAIMS_MAX: Final = 3
"""The reclaim that fails a job (A13)."""

ATTEMPTS_MAX: Final = 20
"""Attempts of a job before it fails."""

RETRY_WAIT_S: Final = 5.0
"""Wait before the first retry of a job that raised an exception, seconds. It doubles each time."""

RETRY_WAIT_MAX_S: Final = 300.0
"""Longest wait before such a retry, seconds."""

REQUEUE_PRIORITY: Final = 10
"""Highest priority number of a requeued job (A9)."""

LEASE_S: Final = 600.0
"""Length of a lease (A13), seconds."""

FENCE_S: Final = 90.0
"""Length of a fence, seconds. The executor renews it every `HEARTBEAT_S`, else a sweep reclaims the job."""

AVOID_S: Final = 600.0
"""How long a requeued job avoids its last GPUs, seconds."""

FRESH_S: Final = 30.0
"""A worker seen within this time is alive (A12), seconds."""

HEARTBEAT_S: Final = 10.0
"""Interval of lease renewals (A12, A13), seconds."""


AFFINITY_S: Final = 300.0
"""How long jobs for a loaded model may overtake others, seconds."""


class State(StrEnum):
    """State of a job."""

    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    FENCING = "fencing"
    HOST_LOST = "host_lost"
    FINISHED = "finished"
    BLOCKED = "blocked"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Move(StrEnum):
    """Each state change of a job."""

    READY = "ready"
    CLAIM = "claim"
    COMPLETE = "complete"
    FAIL_BY_WORKER = "fail_by_worker"
    RETRY = "retry"
    RELEASE = "release"
    GIVE_BACK = "give_back"
    FINISH = "finish"
    CLOSE = "close"
    RECALL = "recall"
    RECLAIM = "reclaim"
    SUPERSEDE = "supersede"
    EXHAUST = "exhaust"
    FENCE = "fence"
    REQUEUE = "requeue"
    FAIL = "fail"
    LOSE = "lose"
    RETURN = "return"
    BLOCK = "block"
    UNBLOCK = "unblock"
    DEFER = "defer"
    HALT = "halt"
    CANCEL = "cancel"


@dataclass(frozen=True, kw_only=True)
class Legal:
    """Source and target states of a move."""

    sources: frozenset[State]
    target: State


def _legal(target: State, *sources: State) -> Legal:
    return Legal(sources=frozenset(sources), target=target)


MOVES: Final[Mapping[Move, Legal]] = {
    Move.READY: _legal(State.QUEUED, State.WAITING),
    # Moves of the attempt that has the claim.
    Move.CLAIM: _legal(State.RUNNING, State.QUEUED),
    Move.COMPLETE: _legal(State.COMPLETED, State.RUNNING),
    Move.FAIL_BY_WORKER: _legal(State.FAILED, State.RUNNING),
    Move.RETRY: _legal(State.QUEUED, State.RUNNING),
    Move.RELEASE: _legal(State.QUEUED, State.RUNNING),
    Move.GIVE_BACK: _legal(State.QUEUED, State.RUNNING),
    # A gang's ranks end together.
    Move.FINISH: _legal(State.FINISHED, State.RUNNING),
    Move.CLOSE: _legal(State.COMPLETED, State.FINISHED),
    Move.RECALL: _legal(State.QUEUED, State.RUNNING, State.HOST_LOST, State.FINISHED),
    # The end of a lease, a fence, or a lost host's hold (D4).
    Move.RECLAIM: _legal(State.QUEUED, State.RUNNING, State.FENCING, State.HOST_LOST),
    Move.SUPERSEDE: _legal(State.QUEUED, State.RUNNING, State.HOST_LOST),
    # A requeue at a cap fails the job.
    Move.EXHAUST: _legal(State.FAILED, State.RUNNING, State.FENCING, State.HOST_LOST, State.FINISHED),
    # Fence first, to keep attempts and claims away; then settle.
    Move.FENCE: _legal(State.FENCING, State.RUNNING, State.HOST_LOST),
    Move.REQUEUE: _legal(State.QUEUED, State.FENCING),
    Move.FAIL: _legal(State.FAILED, State.FENCING),
    Move.LOSE: _legal(State.HOST_LOST, State.RUNNING),
    Move.RETURN: _legal(State.RUNNING, State.HOST_LOST),
    # Operators, and wrangling.
    Move.BLOCK: _legal(State.BLOCKED, State.WAITING, State.QUEUED),
    Move.HALT: _legal(State.BLOCKED, State.RUNNING),
    Move.UNBLOCK: _legal(State.QUEUED, State.BLOCKED),
    Move.DEFER: _legal(State.WAITING, State.BLOCKED),
    Move.CANCEL: _legal(
        State.CANCELLED,
        *(State.WAITING, State.QUEUED, State.RUNNING, State.FENCING, State.HOST_LOST, State.FINISHED, State.BLOCKED),
    ),
}

FINAL: Final = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})


class ItemState(StrEnum):
    """State of an item of a run."""

    PENDING = "pending"
    CLAIMED = "claimed"
    DONE = "done"
    FAILED = "failed"


class ItemMove(StrEnum):
    """Each state change of an item."""

    TAKE = "take"
    FINISH = "finish"
    TRY_AGAIN = "try_again"
    GIVE_UP = "give_up"
    RESET = "reset"


class ItemOutcome(StrEnum):
    """Outcome of one try. Forgiven failures do not count."""

    DONE = "done"
    FAILED = "failed"
    CLEARED = "cleared"


ITEM_MOVES: Final[Mapping[ItemMove, tuple[frozenset[ItemState], ItemState]]] = {
    # An ended attempt's item can be taken.
    ItemMove.TAKE: (frozenset({ItemState.PENDING, ItemState.CLAIMED}), ItemState.CLAIMED),
    ItemMove.FINISH: (frozenset({ItemState.CLAIMED}), ItemState.DONE),
    ItemMove.TRY_AGAIN: (frozenset({ItemState.CLAIMED}), ItemState.PENDING),
    ItemMove.GIVE_UP: (frozenset({ItemState.CLAIMED}), ItemState.FAILED),
    ItemMove.RESET: (frozenset({ItemState.FAILED}), ItemState.PENDING),
}

ITEM_TRIES_MAX: Final = 3
"""Failures of an item before it is not retried."""


class Kind(StrEnum):
    """Kind of a dispatch event."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    BLOCKED = "blocked"
    RUN_COMPLETED = "run_completed"
    RUN_FAILED = "run_failed"
    RUN_CANCELLED = "run_cancelled"


class IllegalMoveError(GpuwardenError):
    """A move does not start in this state."""


def after(state: State, move: Move) -> State:
    """The state after `move`.

    Raises:
        IllegalMoveError: it does not start here.
    """
    legal = MOVES[move]
    if state not in legal.sources:
        wanted = ", ".join(sorted(legal.sources))
        raise IllegalMoveError(f"cannot {move} a job that is {state}: it must be {wanted}")
    return legal.target


class JobClass(StrEnum):
    """Kind of work: decides budget and conditions (A1, A6, A17)."""

    GPU = "gpu"
    GPU_VIDEO = "gpu_video"
    INGEST_FETCH = "ingest_fetch"
    INGEST_LOAD = "ingest_load"
    INGEST = "ingest"
    INPUT = "input"
    CPU = "cpu"

    @property
    def budget_s(self) -> float | None:
        """Default time budget, seconds (A1); `None` if the queue must set one."""
        return _BUDGET_S.get(self)

    @property
    def uses_gpu(self) -> bool:
        """Whether GPU health applies (A7)."""
        return self in (JobClass.GPU, JobClass.GPU_VIDEO)

    @property
    def retried(self) -> bool:
        """Whether the remediator requeues such a job (A17)."""
        return not self.ingests

    @property
    def ingests(self) -> bool:
        """Whether such a job ingests data for all runs (A17)."""
        return self in INGEST


INGEST: Final = frozenset({JobClass.INGEST_FETCH, JobClass.INGEST_LOAD, JobClass.INGEST})
"""Classes that ingest data outside of runs (A17)."""

QUEUE_CLASSES: Final[Mapping[str, JobClass]] = {
    "gpu": JobClass.GPU,
    "cpu": JobClass.CPU,
    "fetch": JobClass.INGEST_FETCH,
    "load": JobClass.INGEST_LOAD,
    "__input__": JobClass.INPUT,
}
"""Default class by queue."""

_BUDGET_S: Final[Mapping[JobClass, float]] = {
    JobClass.GPU: 8100.0,
    JobClass.GPU_VIDEO: 1800.0,
    JobClass.INGEST_FETCH: 7200.0,
    JobClass.INGEST_LOAD: 3600.0,
    JobClass.INPUT: 120.0,
    JobClass.CPU: 2100.0,
}


def stall_timeout_s(job_class: JobClass, *, reports_steps: bool, configured_s: float | None = None) -> float:
    """Stall timeout of a job, seconds; 0 means none (A6)."""
    if job_class is not JobClass.GPU or not reports_steps:
        return 0.0
    return STALL_TIMEOUT_S if configured_s is None else configured_s


def retry_wait_s(retries: int) -> float:
    """Wait before the next retry of a job that was retried this often, seconds."""
    return min(RETRY_WAIT_S * 2.0 ** min(retries, 16), RETRY_WAIT_MAX_S)


class Phase(StrEnum):
    """Phase of an attempt, as its worker reports it."""

    LOAD = "load"
    STEP = "step"
    EVAL = "eval"
    CHECKPOINT = "checkpoint"
    SAVE = "save"
    IDLE = "idle"

    @property
    def counts_work(self) -> bool:
        """Whether any I/O, page faults and CPU time count as activity in this phase (A5).

        In steps only heavy work does: a hung job may spin.
        """
        return self in (Phase.LOAD, Phase.EVAL, Phase.SAVE, Phase.CHECKPOINT)


class Condition(StrEnum):
    """The condition for which gpuwarden acts (A18)."""

    STALL = "stall"
    BUDGET = "budget"
    HEALTH = "health"
    DEAD_WORKER = "dead_worker"
    GANG = "gang"
    SERVER = "server"
    HOST_LOST = "host_lost"
    VRAM = "vram"
    ITEMS = "items"
    GPU_FAULTY = "gpu_faulty"
    DEMAND_UP = "demand_up"
    DEMAND_DOWN = "demand_down"

    @property
    def exit_code(self) -> int:
        """Exit code of a worker that lost its job (A18)."""
        return _EXIT_CODES.get(self, EXIT_DISOWNED)


EXIT_DISOWNED: Final = 77
"""Exit code for an unknown reason (A11)."""

EXIT_FATAL: Final = 79
"""Exit code after an error that the process cannot survive."""

_EXIT_CODES: Final[Mapping[Condition, int]] = {
    Condition.BUDGET: 75,
    Condition.STALL: 76,
    Condition.GANG: 76,
    Condition.HEALTH: 78,
}
