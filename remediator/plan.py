"""The facts that a remedy decides from, and the steps it may choose. Pure.

A remedy is a function `decide(facts) -> Step`, called with new facts after every step and on a timer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from gpuwarden.evidence import ContainerFacts, OnDemandFacts, ServerFacts, WorkerFacts
from gpuwarden.job import Condition, State
from gpuwarden.procfs import ProcessId
from gpuwarden.queue.items.tally import RunTally
from remediator.reasons import Code, Reason


class Subject(StrEnum):
    """What an episode is about. A server is a container without workers, a tenant one over its VRAM budget."""

    WORKER = "worker"
    SERVER = "server"
    HOST = "host"
    TENANT = "tenant"
    RUN = "run"
    GPU = "gpu"
    ON_DEMAND = "on_demand"


class Kind(StrEnum):
    """Kinds of intents."""

    FREE = "free"
    SETTLE = "settle"


class Stage(StrEnum):
    """Stage of an intent.

    A restart goes through planned, stopping, dead, starting, done; a settle through planned, fenced, done.
    """

    PLANNED = "planned"
    FENCED = "fenced"
    STOPPING = "stopping"
    DEAD = "dead"
    STARTING = "starting"
    DONE = "done"
    ABANDONED = "abandoned"
    WITHDRAWN = "withdrawn"


OVER: Final = frozenset({Stage.DONE, Stage.ABANDONED, Stage.WITHDRAWN})
"""Stages of closed intents."""


class Outcome(Code):
    """How an episode ended."""

    FIXED = "fixed", "the remedy did all its steps", "Nothing. If it happens again, look for the cause."
    PARTLY = "partly_fixed", "a step failed or was abandoned", "Finish by hand: see `gpuwarden ledger show EPISODE`."
    UNCONFIRMED = "unconfirmed", "the alert ended before gpuwarden did anything", "Nothing."
    REFUSED = "refused", "gpuwarden may not restart this target", "Act by hand, or change what the reason names."
    SUPERSEDED = "superseded", "the worker, container or attempt was over or replaced before", "Nothing."


@dataclass(frozen=True, kw_only=True)
class Intent:
    """A planned action, written before it begins and kept until its end.

    `entered_at` is when it reached its stage, Unix seconds. `data` of a restart has the container, its GPUs and pids,
    the tries of this stage, quarantined GPUs and the warning. `data` of a settle has the worker incarnation.
    """

    intent_id: int
    kind: Kind
    key: str
    stage: Stage
    created_at: float
    entered_at: float
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether it is closed."""
        return self.stage in OVER


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One failure, from alert to outcome.

    Args:
        worker: name of the target: worker, container, host, run or GPU.
        conditions: of the firing alerts.
        incarnation: of the worker, or of the container; `None` for a host or run.
        fingerprints: Alertmanager's ids of the firing alerts.
        rules: names of all its alerts, also of resolved ones.
    """

    episode_id: int
    remedy: str
    condition: Condition
    host: str
    worker: str
    opened_at: float
    firing: bool
    conditions: frozenset[Condition]
    incarnation: str | None
    job_id: int | None
    attempt: int | None
    free: Intent | None
    settle: Intent | None
    dry_run_recorded: bool
    subject: Subject = Subject.WORKER
    fingerprints: frozenset[str] = frozenset()
    rules: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ContainerState:
    """A container as its engine reports it. `handle` survives a restart; `incarnation` does not.

    Args:
        vanishes: the engine removes it when it stops.
        unstartable: why a start would fail; "" if nothing is known to be missing.
        left_down: a stop was requested, in spite of its restart policy.
        starting: the engine waits for it to come up.
        log_file: its log, if it is a separate file.
        process_group: of its processes, if no cgroup holds them.
        startable: false for processes that a dead worker in no container left.
        refusal: why it is not managed; "" if its labels do not say more.
    """

    kind: str
    handle: str
    name: str
    incarnation: str
    running: bool
    managed: bool
    pids: frozenset[int]
    cgroup: str | None
    paused: bool = False
    vanishes: bool = False
    unstartable: str = ""
    left_down: bool = False
    starting: bool = False
    log_file: str | None = None
    process_group: int | None = None
    startable: bool = True
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """A job in its queue. `claimed_by` is the incarnation of its worker."""

    job_id: int
    attempt: int
    state: State
    claimed_by: str | None
    attempts_max: int
    watchdog_retries: int
    retried: bool


@dataclass(frozen=True, kw_only=True)
class HeldJob:
    """A running or lost job of a host. `heard_s_ago` is the age of its worker's last heartbeat, seconds."""

    job_id: int
    attempt: int
    state: State
    heard_s_ago: float | None


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What other hosts know about a silent host.

    Args:
        shows_life: its executor has a recent new heartbeat, or the gateway heard it lately.
        lost: a central gateway has marked it as lost; `None` if no gateway decides about it.
        silent_for_s: time this executor has observed no new heartbeat, seconds.
        accused: number of silent hosts, including it.
        alive: number of live hosts, including ours.
        taken: its jobs are marked lost.
    """

    jobs: tuple[HeldJob, ...]
    shows_life: bool
    lost: bool | None = None
    silent_for_s: float
    accused: int
    alive: int
    taken: bool


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Item outcomes of a run, and whether this episode has a decision and has carried it out."""

    tally: RunTally | None
    decided: bool
    done: bool


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """The Kubernetes node of a faulty GPU.

    Args:
        fault: why the GPU is faulty now; "" if it shows no fault.
        fatal: whether only a reset ends the fault.
        doubt: why a GPU without a fault does not count as working; "" if it does.
        works_for_s: time the GPU has been listed without a fault.
        tainted: the node has the taint.
        begun: this episode has decided to set it.
        set_here: this episode has set it.
        others: GPUs of the node whose open episodes decided the same.
        tainted_nodes: number of other nodes with such an episode.
        nodes: number of nodes with an executor.
    """

    fault: str = ""
    fatal: bool = False
    doubt: str = ""
    works_for_s: float = 0.0
    tainted: bool = False
    begun: bool = False
    set_here: bool = False
    others: tuple[str, ...] = ()
    tainted_nodes: int = 0
    nodes: int = 1


class Unconfirmed(StrEnum):
    """What to do with a fenced job whose process exit is unconfirmed after the timeout."""

    REQUEUE = "requeue"
    HOLD = "hold"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a remedy, from settings and policy; seconds."""

    evidence_fresh_s: float = 5.0
    settle_timeout_s: float = 60.0
    restart_timeout_s: float = 120.0
    start_seen_s: float = 2.0
    pod_ready_timeout_s: float = 600.0
    gpu_lost_s: float = 60.0
    retries_max: int = 3
    requeue_avoid_gpu_s: float = 600.0
    host_lost_after_s: float = 180.0
    wrangle_activation: int = 5
    wrangle_migrations_max: int = 3
    wrangle_timeout_s: float = 1800.0
    unconfirmed: Unconfirmed = Unconfirmed.REQUEUE
    warn_signal: str | None = None
    warn_grace_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything a remedy may use. Unreadable facts are `None`, with the reason in `unknown`.

    Durations are by this executor's clock and count only while its loop runs.

    Args:
        evidence: about a worker.
        server: about a container without a worker.
        successor: the pod that a controller created in place of an evicted one; it runs once it is ready.
        scaled_on: whether this episode last decided to start its tenant on demand, or to stop it.
        forbidden: why this executor may not scale it.
        quarantined: its GPUs in quarantine, or why that is unknown.
        worker_ended: the exporter's current sample has no such worker: it ended cleanly, or its files are unreadable.
        free_for_s: time the restart has been at its stage; so `settle_for_s`.
        quiet_for_s: time without a failed source.
        runs_for_s: time this incarnation of the container has been seen running.
        queue_stuck_for_s: time without an accepted write.
        refused_s_ago: time since the queue's last refusal; `None` after a successful write.
        warned_for_s: time since the warning was known to be sent.
        listener: the process to warn; `None` with the reason in `deaf`.
    """

    armed: bool
    limits: Limits
    episode: Episode
    evidence: WorkerFacts | None
    container: ContainerState | None
    container_known: bool
    job: JobFacts | None
    job_known: bool
    server: ServerFacts | None = None
    successor: ContainerState | None = None
    host: HostFacts | None = None
    run: RunFacts | None = None
    node: NodeFacts | None = None
    on_demand: OnDemandFacts | None = None
    scaled_on: bool | None = None
    forbidden: str = ""
    quarantined: str = ""
    worker_ended: bool = False
    free_for_s: float = 0.0
    settle_for_s: float = 0.0
    quiet_for_s: float = 0.0
    runs_for_s: float = 0.0
    queue_stuck_for_s: float = 0.0
    refused_s_ago: float | None = None
    stopped_s_ago: float | None = None
    warned_for_s: float = 0.0
    listener: ProcessId | None = None
    deaf: str = ""
    unknown: str = ""

    @property
    def place(self) -> ContainerFacts | None:
        """The evidence about the container and its GPUs."""
        return self.evidence if self.episode.subject is Subject.WORKER else self.server


@dataclass(frozen=True, kw_only=True)
class Step:
    """What to do next in an episode. `message` is for operators, and steps that differ only in it are equal."""

    message: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Wait(Step):
    """Do nothing now. The episode stays open and is checked again.

    `asks` is the incarnation that needs approval. `about` is the cause; a new entry is recorded when it changes.
    """

    reason: Reason
    asks: str | None = None
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Close(Step):
    """Close the episode."""

    outcome: Outcome
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class WouldAct(Step):
    """Record what would be done (dry run), and tell the container's supervisor."""

    container_kind: str | None = None
    container_handle: str | None = None


@dataclass(frozen=True, kw_only=True)
class Begin(Step):
    """Write the intents.

    Args:
        settle_key: `None` if the container runs no job of the queue.
        worker_incarnation: the worker in the evidence; only its job is settled.
        pids: processes that must exit before the container counts as dead, with those in `cgroup`.
        gone: its worker and every process of it have ended.
    """

    condition: Condition

    free_key: str
    container_kind: str
    container_handle: str
    container_name: str
    settle_key: str | None
    worker_incarnation: str
    gpus: tuple[str, ...] = ()
    pids: frozenset[int] = frozenset()
    cgroup: str | None = None
    gone: bool = False


@dataclass(frozen=True, kw_only=True)
class Withdraw(Step):
    """Withdraw planned intents."""

    reason: Reason


@dataclass(frozen=True, kw_only=True)
class Warn(Step):
    """Send the warning signal to the worker."""

    signal: str
    listener: ProcessId


@dataclass(frozen=True, kw_only=True)
class Fence(Step):
    """Fence the job."""


@dataclass(frozen=True, kw_only=True)
class Stop(Step):
    """Stop this incarnation of the container."""


@dataclass(frozen=True, kw_only=True)
class Start(Step):
    """Start the container."""


@dataclass(frozen=True, kw_only=True)
class Quarantine(Step):
    """Quarantine the `lost` GPUs, or all GPUs if a process on them cannot be killed."""

    reason: Reason
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Requeue(Step):
    """Requeue the fenced job, for `avoid_s` seconds not on its old GPUs."""

    avoid_s: float
    retry: int
    seen_dead: bool


@dataclass(frozen=True, kw_only=True)
class Fail(Step):
    """Fail the fenced job."""

    reason: Reason


@dataclass(frozen=True, kw_only=True)
class Lose(Step):
    """Mark these running jobs of a host as lost. They keep their GPUs."""

    jobs: tuple[HeldJob, ...]


@dataclass(frozen=True, kw_only=True)
class Return(Step):
    """Mark these lost jobs running again, for one lease."""

    jobs: tuple[HeldJob, ...]


@dataclass(frozen=True, kw_only=True)
class Taint(Step):
    """Taint the node of the faulty GPU. `fatal`: only a reset ends the fault."""

    fatal: bool = False


@dataclass(frozen=True, kw_only=True)
class Untaint(Step):
    """Remove that taint."""


@dataclass(frozen=True, kw_only=True)
class LockWorker(Step):
    """Lock the worker, requeue its job of the run, and retry its failed items."""

    host: str
    worker: str
    tell: Literal["administrator"] = "administrator"

    @property
    def deed(self) -> str:
        """The action in words, as shown for approval."""
        return f"lock {self.worker} on {self.host}"


@dataclass(frozen=True, kw_only=True)
class Migrate(Step):
    """Move the run to a worker that has not run it."""

    host: str
    worker: str
    tell: None = None

    @property
    def deed(self) -> str:
        """See `LockWorker`."""
        return f"move it from {self.worker} on {self.host}"


@dataclass(frozen=True, kw_only=True)
class BlockRun(Step):
    """Block the run's jobs, and stop the running ones."""

    tell: Literal["submitter"] = "submitter"

    @property
    def deed(self) -> str:
        """See `LockWorker`."""
        return "block it"


Wrangle = LockWorker | Migrate | BlockRun
"""An action on a run with failing items or on its worker. `tell`: the person to inform."""


@dataclass(frozen=True, kw_only=True)
class Scale(Step):
    """Start or stop a tenant on demand, which uses or may use these GPUs."""

    on: bool
    container_kind: str
    container_handle: str
    gpus: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Advance(Step):
    """Record that an intent reached a stage or is abandoned. `unspent`: it had no effect."""

    kind: Kind
    stage: Stage
    reason: Reason
    unspent: bool = False
