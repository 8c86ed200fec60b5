"""What a remedy knows when it decides, and the closed set of steps it may choose from. Pure.

A remedy is a function `decide(facts) -> Step`. It is asked again after every step and on a timer, each time with facts
read anew, so that it never acts on what was true before. Every step carries the sentence that the ledger keeps; it is
for people, and two steps that differ in nothing else are equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from gpuwarden.evidence import ContainerFacts, ServerFacts, WorkerFacts
from gpuwarden.job import State, Trip
from gpuwarden.procfs import ProcessId
from gpuwarden.queue.items.tally import RunTally
from remediator.reasons import Reason


class Subject(StrEnum):
    """What an episode is about: a worker, with the job it runs, a container without one, a host, or a run.

    A container is a server, which is asked and does not answer, or a tenant, which holds more of a GPU's memory than it
    may. A host that is silent is nobody's own: whoever shares its ledger works on such an episode. A run whose items
    fail is judged by the host whose worker fails them; where workers of several hosts do, by each of those.
    """

    WORKER = "worker"
    SERVER = "server"
    HOST = "host"
    TENANT = "tenant"
    RUN = "run"


class Kind(StrEnum):
    """The two intents of an episode."""

    FREE = "free"
    SETTLE = "settle"


class Stage(StrEnum):
    """How far an intent is. A free goes planned, stopping, dead, starting, done; a settle planned, fenced, done.

    One that was withdrawn had done nothing: it gives its key back, and its episode no longer has it.
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
"""Stages at which nothing is owed any more."""


class Outcome(StrEnum):
    """How an episode closed."""

    MENDED = "mended"
    PARTLY = "partly_mended"
    UNCONFIRMED = "unconfirmed"
    REFUSED = "refused"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, kw_only=True)
class Intent:
    """One thing that was promised: written before anything is done, and kept to its end.

    `entered_at` is when it came to its stage, Unix seconds. `data` of a free holds the container's kind, handle,
    GPUs, pids and cgroup, how many tries its stage has had, whether its GPUs were put in quarantine, which of them were
    because they are lost, and how its worker was warned: the signal, how often that was decided, whether it is known to
    be done, and whether it was under a promise that was taken back since. That of a settle holds the worker incarnation
    that held the job.
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
        """Whether nothing is owed any more."""
        return self.stage in OVER


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One wedge as the ledger has it. The identity that the alert claimed is checked against local evidence.

    Several rules may report one wedge: `trips` are those of the alerts that fire, `trip` the one it is known by;
    `fingerprints` are what Alertmanager knows them by.
    `worker` is the name of its subject and `incarnation` what was accused: of a worker its own, of a server or a tenant
    the container's name and the container's incarnation, of a host its key and none, of a run its id and none. `rules`
    are the names of the rules that accused it, also of those whose alert has ended since.
    """

    episode_id: int
    remedy: str
    trip: Trip
    host: str
    worker: str
    opened_at: float
    firing: bool
    trips: frozenset[Trip]
    incarnation: str | None
    job_id: int | None
    attempt: int | None
    free: Intent | None
    settle: Intent | None
    would_act: bool
    subject: Subject = Subject.WORKER
    fingerprints: frozenset[str] = frozenset()
    rules: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class ContainerState:
    """One container as its engine has it now. `handle` survives a restart; `incarnation` does not.

    `vanishes` is set where its engine removes it as soon as it ends: one that is stopped is never started again.
    `left_down` is set where its engine restarts it however it ends, and leaves it down: it was told to stop.
    `starting` is set while its engine waits for it to come up, and may yet give it up.
    `log_file` is where its output goes, where that is a file of its own; `session` the one its processes are of, where
    no cgroup holds them.
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
    left_down: bool = False
    starting: bool = False
    log_file: str | None = None
    session: int | None = None


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """One job as its queue has it now. `claimed_by` is the worker incarnation that holds it."""

    job_id: int
    attempt: int
    state: State
    claimed_by: str | None
    attempts_max: int
    watchdog_retries: int
    retried: bool


@dataclass(frozen=True, kw_only=True)
class HeldJob:
    """One job that a host has, by its queue: it runs there, or that host was taken for lost.

    `heard_s_ago` is how long ago the worker that holds it was last heard of, by the queue's own clock, seconds; `None`
    where it never was.
    """

    job_id: int
    attempt: int
    state: State
    heard_s_ago: float | None


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What is known elsewhere of a host that is accused of being silent.

    `shows_life` is set where its own remediator gave a sign of life that was new to this one, and did so lately;
    `silent_for_s` is for how long this one has looked on, without a break, while it gave none. Of all hosts `accused`
    are said to be silent now, it among them, and `alive` show life, ours among them. `taken` is set where the ledger
    has that its jobs were taken for lost in this episode.
    """

    jobs: tuple[HeldJob, ...]
    shows_life: bool
    silent_for_s: float
    accused: int
    alive: int
    taken: bool


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What its queue knows of a run that is to be judged, now; `tally` is `None` where it has no such run.

    Of this episode the ledger has that something was `decided` about it or its workers, and that it was `done`.
    """

    tally: RunTally | None
    decided: bool
    done: bool


class Unconfirmed(StrEnum):
    """What becomes of a fenced job whose process was not seen dead within the bound."""

    REQUEUE = "requeue"
    HOLD = "hold"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a remedy, from the settings and its own policy; seconds."""

    evidence_fresh_s: float = 5.0
    settle_bound_s: float = 60.0
    free_bound_s: float = 120.0
    start_seen_s: float = 2.0
    gpu_lost_s: float = 60.0
    retries_max: int = 3
    avoid_s: float = 600.0
    node_lost_after_s: float = 180.0
    wrangle_activation: int = 5
    wrangle_migrations_max: int = 3
    wrangle_patience_s: float = 1800.0
    unconfirmed: Unconfirmed = Unconfirmed.REQUEUE
    warn_signal: str | None = None
    warn_grace_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything a remedy may look at. What could not be read is `None`, with why in `unknown`.

    Patience is measured by this executor's own steady clock and counts only while it looks on, so that neither its
    downtime, nor a suspended machine, nor a clock that is set uses any of it up. `free_for_s` and `settle_for_s` are
    for how long it has known the intents at their stages, `runs_for_s` for how long it has seen this incarnation of the
    container run, `quiet_for_s` for how long it has looked on without a break, with nobody silent. `refused_s_ago` is
    how long ago the queue refused what was to become of the job or its GPUs, `None` where it has taken something since;
    `stopped_s_ago` is how long ago this executor's newest stop came to an end, however it went, `None`: it tried none.
    `worker_ended` is
    set where the exporter did answer, from a fresh look, and sees no such worker: one that ended cleanly took its files
    away, while one that died or was killed leaves them; but files that it cannot read look the same. `evidence` is
    about a worker, `server` about a container without one, `host` about a host, `run` about a run: an episode has one
    of them. `listener` is whom a warning would reach, or `None` with why in `deaf`; `warned_for_s` is for how long this
    executor has known that it was warned.
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
    host: HostFacts | None = None
    run: RunFacts | None = None
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
        """What the exporter says about the container and the host's GPUs, whoever the episode is about."""
        return self.evidence if self.episode.subject is Subject.WORKER else self.server


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Do nothing now; the episode stays open and is looked at again.

    `asks` is the container's incarnation that a person is asked about, where one is. `about` is whom or what a run's
    episode waits for, without the figures: where that changes, what it waits for is told anew.
    """

    reason: Reason
    message: str = field(compare=False)
    asks: str | None = None
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Close:
    """The episode is over."""

    outcome: Outcome
    reason: Reason
    message: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class WouldAct:
    """Dry run: everything is confirmed and nothing is done but this record."""

    message: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Write the two intents. `settle_key` is `None` where the container runs no job of the queue.

    `worker_incarnation` is the worker that local evidence saw: nobody else's job is settled on its account. `trip` is
    the condition that was confirmed; `pids` and `cgroup` are what must be gone before the container counts as dead.
    """

    trip: Trip

    free_key: str
    container_kind: str
    container_handle: str
    container_name: str
    settle_key: str | None
    worker_incarnation: str
    message: str = field(compare=False)
    gpus: tuple[str, ...] = ()
    pids: frozenset[int] = frozenset()
    cgroup: str | None = None


@dataclass(frozen=True, kw_only=True)
class Withdraw:
    """Take back the intents that are only planned: nothing was done for them. The episode is considered anew."""

    reason: Reason
    message: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Warn:
    """Signal the worker's own process, and leave it time for a checkpoint; nothing is taken from it yet."""

    message: str = field(compare=False)
    signal: str
    listener: ProcessId


@dataclass(frozen=True, kw_only=True)
class Fence:
    """Take the job from the attempt."""

    message: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop the container, and that incarnation of it only."""

    message: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start the container again."""

    message: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """Take GPUs out of use: those of the free that are `lost`; else all, for a process on them cannot be killed."""

    reason: Reason
    message: str = field(compare=False)
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Requeue:
    """Queue the fenced job again; for `avoid_s` seconds not on the GPUs it was taken from, if others can run it.

    `retry` is which retry by us it is, from 1; `seen_dead` whether the process that held it is known to be dead.
    """

    message: str = field(compare=False)
    avoid_s: float
    retry: int
    seen_dead: bool


@dataclass(frozen=True, kw_only=True)
class Fail:
    """End the fenced job for good."""

    reason: Reason
    message: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Lose:
    """Mark these jobs as a lost host's, each only if it runs still: nobody else gets them, nor their GPUs."""

    message: str = field(compare=False)
    jobs: tuple[HeldJob, ...]


@dataclass(frozen=True, kw_only=True)
class Return:
    """Have these jobs of a host that is back run again, for as long as a lease, each only if it is still lost."""

    message: str = field(compare=False)
    jobs: tuple[HeldJob, ...]


@dataclass(frozen=True, kw_only=True)
class LockWorker:
    """Keep the worker from claiming, take its job of the run from it, and have what it failed tried again."""

    host: str
    worker: str
    message: str = field(compare=False)
    tell: Literal["administrator"] = "administrator"

    @property
    def deed(self) -> str:
        """What is to be done, in words: the same words are the same to whoever is asked for a yes."""
        return f"lock {self.worker} on {self.host}"


@dataclass(frozen=True, kw_only=True)
class Migrate:
    """Take the run from the one worker that runs it, to one that has not had it."""

    host: str
    worker: str
    message: str = field(compare=False)
    tell: None = None

    @property
    def deed(self) -> str:
        """As of `LockWorker`."""
        return f"move it from {self.worker} on {self.host}"


@dataclass(frozen=True, kw_only=True)
class BlockRun:
    """Let nobody claim the run's jobs, and take those that run from their workers."""

    message: str = field(compare=False)
    tell: Literal["submitter"] = "submitter"

    @property
    def deed(self) -> str:
        """As of `LockWorker`."""
        return "block it"


Wrangle = LockWorker | Migrate | BlockRun
"""What is done about a run whose items fail, or about a worker that fails them; only the queue is changed.

`tell` is who is to be told (B8).
"""


@dataclass(frozen=True, kw_only=True)
class Advance:
    """Record that an intent has come to a stage by itself, or is given up.

    `unspent` is for one that is given up without anything having come of it: its target may be promised the same again.
    """

    kind: Kind
    stage: Stage
    reason: Reason
    message: str = field(compare=False)
    unspent: bool = False


Step = (
    Wait
    | Close
    | WouldAct
    | Begin
    | Withdraw
    | Warn
    | Fence
    | Stop
    | Start
    | Quarantine
    | Requeue
    | Fail
    | Lose
    | Return
    | LockWorker
    | Migrate
    | BlockRun
    | Advance
)
