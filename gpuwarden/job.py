"""What a job may become, and what it may cost: states, legal moves, fencing, classes, budgets and caps.

Pure: no clock, no database. The queue (`gpuwarden.queue`) takes every state it writes from `MOVES`, so that a move
which is not listed here cannot be made anywhere. `docs/identity.md` explains the words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NewType

from gpuwarden.errors import GpuwardenError

JobId = NewType("JobId", int)

STALL_TIMEOUT_S: Final = 120.0
"""Silence after which an armed job is suspected (A2), seconds."""

WATCHDOG_RETRIES_MAX: Final = 3
"""Trips that requeue a job; the next one fails it (A8). One counter for every kind of trip."""

RECLAIMS_MAX: Final = 10
"""Expired leases that requeue a job; the next one fails it (A13). Counted apart from watchdog retries."""

ATTEMPTS_MAX: Final = 20
"""Attempts that a job may have in all, however they ended; what would queue it once more fails it instead.

The default leaves room for every watchdog retry and every reclaim, and for a few drains.
"""

REQUEUE_PRIORITY: Final = 10
"""A requeued job's priority becomes the lesser of its own and this (A9); lower runs sooner."""

LEASE_S: Final = 600.0
"""How long a claim holds without renewal (A13), seconds."""

FENCE_S: Final = 90.0
"""How long a fence holds without renewal, seconds. The executor that owes the settle renews it every `HEARTBEAT_S`.

Then a sweep queues the job again. That is a reclaim: it uses no watchdog retry, and no slot is avoided.
"""

AVOID_S: Final = 600.0
"""For how long a requeued job stays away from the GPUs it was taken from, while others could run it, seconds."""

FRESH_S: Final = 30.0
"""A worker seen within this time is there (A12), seconds."""

HEARTBEAT_S: Final = 10.0
"""How often a worker renews its lease and refreshes its row and its files (A12, A13), seconds."""


AFFINITY_S: Final = 300.0
"""For how long a job at the head of its queue may be overtaken by others of its priority whose model a worker has
loaded, seconds: then it goes first."""


class State(StrEnum):
    """Where a job stands. `completed`, `failed` and `cancelled` are final."""

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
    """Each way a job changes state. The name is also what logs and the ledger call it."""

    READY = "ready"
    CLAIM = "claim"
    COMPLETE = "complete"
    FAIL_BY_WORKER = "fail_by_worker"
    RELEASE = "release"
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
    """From which states a move starts and where it ends."""

    sources: frozenset[State]
    target: State


def _legal(target: State, *sources: State) -> Legal:
    return Legal(sources=frozenset(sources), target=target)


MOVES: Final[Mapping[Move, Legal]] = {
    # The last job that it needs has completed.
    Move.READY: _legal(State.QUEUED, State.WAITING),
    # A worker's own moves: each is accepted only from the incarnation and attempt that hold the claim.
    Move.CLAIM: _legal(State.RUNNING, State.QUEUED),
    Move.COMPLETE: _legal(State.COMPLETED, State.RUNNING),
    Move.FAIL_BY_WORKER: _legal(State.FAILED, State.RUNNING),
    Move.RELEASE: _legal(State.QUEUED, State.RUNNING),
    # A rank of a gang is done while others are not; the last one completes them all. One that is queued again takes the
    # others along: they are ended as one.
    Move.FINISH: _legal(State.FINISHED, State.RUNNING),
    Move.CLOSE: _legal(State.COMPLETED, State.FINISHED),
    Move.RECALL: _legal(State.QUEUED, State.RUNNING, State.HOST_LOST, State.FINISHED),
    # The lease gives away what nobody renews. A fence has one too: whoever owes the settle renews it. A job whose host
    # is lost has one only where its queue says for how long it is to be held (D4).
    Move.RECLAIM: _legal(State.QUEUED, State.RUNNING, State.FENCING, State.HOST_LOST),
    # A new incarnation of the worker has registered, so the one that held the job is over. A fenced job's settle is
    # owed already, and stays so.
    Move.SUPERSEDE: _legal(State.QUEUED, State.RUNNING, State.HOST_LOST),
    # What would queue the job once more finds a cap used up.
    Move.EXHAUST: _legal(State.FAILED, State.RUNNING, State.FENCING, State.HOST_LOST, State.FINISHED),
    # A trip: fence first, so that neither the old attempt nor a new claim can move the job; then settle.
    Move.FENCE: _legal(State.FENCING, State.RUNNING, State.HOST_LOST),
    Move.REQUEUE: _legal(State.QUEUED, State.FENCING),
    Move.FAIL: _legal(State.FAILED, State.FENCING),
    # A silent host is not a failed job.
    Move.LOSE: _legal(State.HOST_LOST, State.RUNNING),
    Move.RETURN: _legal(State.RUNNING, State.HOST_LOST),
    # A person, or a rule about the whole job.
    Move.BLOCK: _legal(State.BLOCKED, State.WAITING, State.QUEUED),
    # A rule about the whole job: nobody else claims it, so its worker may take a second to find out.
    Move.HALT: _legal(State.BLOCKED, State.RUNNING),
    Move.UNBLOCK: _legal(State.QUEUED, State.BLOCKED),
    # Unblocked while a job that it needs is not done.
    Move.DEFER: _legal(State.WAITING, State.BLOCKED),
    Move.CANCEL: _legal(
        State.CANCELLED,
        *(State.WAITING, State.QUEUED, State.RUNNING, State.FENCING, State.HOST_LOST, State.FINISHED, State.BLOCKED),
    ),
}

FINAL: Final = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})


class ItemState(StrEnum):
    """Where an item of a run stands; a job of the run takes it, does it, and takes the next."""

    PENDING = "pending"
    TAKEN = "taken"
    DONE = "done"
    FAILED = "failed"


class ItemMove(StrEnum):
    """Each way an item changes state."""

    TAKE = "take"
    FINISH = "finish"
    TRY_AGAIN = "try_again"
    GIVE_UP = "give_up"
    RESET = "reset"


class ItemOutcome(StrEnum):
    """How it went with an item, one time. What was forgiven counts no more: a person had the item tried again."""

    DONE = "done"
    FAILED = "failed"
    FORGIVEN = "forgiven"


ITEM_MOVES: Final[Mapping[ItemMove, tuple[frozenset[ItemState], ItemState]]] = {
    # What an attempt that is over had taken is there to be taken, too.
    ItemMove.TAKE: (frozenset({ItemState.PENDING, ItemState.TAKEN}), ItemState.TAKEN),
    ItemMove.FINISH: (frozenset({ItemState.TAKEN}), ItemState.DONE),
    ItemMove.TRY_AGAIN: (frozenset({ItemState.TAKEN}), ItemState.PENDING),
    ItemMove.GIVE_UP: (frozenset({ItemState.TAKEN}), ItemState.FAILED),
    # A person, or a rule about the worker that failed it.
    ItemMove.RESET: (frozenset({ItemState.FAILED}), ItemState.PENDING),
}

ITEM_TRIES_MAX: Final = 3
"""How often an item may fail, on whichever workers, before it has failed for good."""


class Kind(StrEnum):
    """What a dispatch event tells of: a job that ended, or with it its run."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RUN_COMPLETED = "run_completed"
    RUN_FAILED = "run_failed"
    RUN_CANCELLED = "run_cancelled"


class IllegalMoveError(GpuwardenError):
    """A move was asked for from a state that does not allow it."""


def after(state: State, move: Move) -> State:
    """The state that `move` leads to from `state`.

    Raises:
        IllegalMoveError: the move does not start from that state.
    """
    legal = MOVES[move]
    if state not in legal.sources:
        wanted = ", ".join(sorted(legal.sources))
        raise IllegalMoveError(f"cannot {move} a job that is {state}: it must be {wanted}")
    return legal.target


class JobClass(StrEnum):
    """What kind of work a job is; decides its budget and which conditions police it (A1, A6, A17)."""

    GPU = "gpu"
    GPU_VIDEO = "gpu_video"
    INGEST_FETCH = "ingest_fetch"
    INGEST_LOAD = "ingest_load"
    INGEST = "ingest"
    INPUT = "input"
    CPU = "cpu"

    @property
    def budget_s(self) -> float | None:
        """The default wall-clock budget of one attempt, seconds (A1); `None` where its queue has to say."""
        return _BUDGET_S.get(self)

    @property
    def uses_gpu(self) -> bool:
        """Whether such a job is to use its container's GPUs, so that GPU health watches it (A7)."""
        return self in (JobClass.GPU, JobClass.GPU_VIDEO)

    @property
    def retried(self) -> bool:
        """Whether a trip requeues such a job; an ingest job is failed at once (A17)."""
        return not self.ingests

    @property
    def ingests(self) -> bool:
        """Whether such a job brings data in for all runs, and belongs to none (A17)."""
        return self in INGEST


INGEST: Final = frozenset({JobClass.INGEST_FETCH, JobClass.INGEST_LOAD, JobClass.INGEST})
"""Sweeps that bring data in, and belong to no run (A17). The last is of the queues that a host defines itself."""

QUEUE_CLASSES: Final[Mapping[str, JobClass]] = {
    "gpu": JobClass.GPU,
    "cpu": JobClass.CPU,
    "fetch": JobClass.INGEST_FETCH,
    "load": JobClass.INGEST_LOAD,
    "__input__": JobClass.INPUT,
}
"""What a job is when its submitter does not say, by the queue it is for; in any other queue a GPU job."""

_BUDGET_S: Final[Mapping[JobClass, float]] = {
    JobClass.GPU: 8100.0,
    JobClass.GPU_VIDEO: 1800.0,
    JobClass.INGEST_FETCH: 7200.0,
    JobClass.INGEST_LOAD: 3600.0,
    JobClass.INPUT: 120.0,
    JobClass.CPU: 2100.0,
}


def stall_timeout_s(job_class: JobClass, *, reports_steps: bool, configured_s: float | None = None) -> float:
    """The silence this job is allowed, seconds; 0 means that the stall condition does not police it (A6)."""
    if job_class is not JobClass.GPU or not reports_steps:
        return 0.0
    return STALL_TIMEOUT_S if configured_s is None else configured_s


class Phase(StrEnum):
    """What an attempt is doing, as its worker reports it."""

    LOAD = "load"
    STEP = "step"
    EVAL = "eval"
    CHECKPOINT = "checkpoint"
    SAVE = "save"
    IDLE = "idle"

    @property
    def counts_work(self) -> bool:
        """Whether I/O, page faults and CPU time are signs of life in this phase too (A5).

        A healthy job can leave GPU and RAM untouched for minutes here: a warm page cache, a slow disk, metrics that are
        computed on the CPU. In its steps they prove nothing: a job that hangs in a driver may well spin.
        """
        return self in (Phase.LOAD, Phase.EVAL, Phase.SAVE, Phase.CHECKPOINT)


class Condition(StrEnum):
    """Which condition ended an attempt, a server or a tenant, has jobs held or a run judged; told apart (A18)."""

    STALL = "stall"
    BUDGET = "budget"
    HEALTH = "health"
    DEAD_WORKER = "dead_worker"
    GANG = "gang"
    SERVER = "server"
    HOST_LOST = "host_lost"
    VRAM = "vram"
    ITEMS = "items"

    @property
    def exit_code(self) -> int:
        """What a worker that can still end by itself ends with when its job was taken for this trip (A18)."""
        return _EXIT_CODES.get(self, EXIT_DISOWNED)


EXIT_DISOWNED: Final = 77
"""The exit code of a worker that found it no longer owns its job and stopped itself (A11)."""

_EXIT_CODES: Final[Mapping[Condition, int]] = {
    Condition.BUDGET: 75,
    Condition.STALL: 76,
    Condition.GANG: 76,
    Condition.HEALTH: 78,
}
