"""Scenarios: what programs, their GPUs and those who watch them do over time, and the verdict that is right.

A file is a YAML list. Each scenario has a `name` that says what happens and what follows, a `why`, and:

    workers    those who run jobs, by name: settings, and what each does from when on, such as `4m: hangs`
    tenants    containers that hold GPU memory and run no job of ours, likewise
    servers    containers that are asked as servers, likewise
    gpus       by number, where one is not simply there: `5m: lost`; `0:1` is the second instance (MIG) of the first
    hosts      by name, where one is not simply watched: `5m: unscraped`
    prometheus where it does not simply run: `5m: down`
    verdict    `none`, or one or a list of {condition, remedy, of, since, due}: what went wrong at `since` is acted on
               at `due`, the earliest moment at which what is known allows it, and on nobody else; with `then`, what
               is decided then about who fails the items of a run: lock (the worker), block, move (the run) or wait
    told       one or a list of {alert, of, due}: what people are to be told where nobody may act, of whom and when,
               likewise; nothing where nothing is said
    scrape, evaluate   how far apart; 15s and 30s where nothing is said
    plays      when it ends; 6 minutes after the last thing that happens or is due, where nothing is said
    not_yet    why today's rules do otherwise. It goes with the mend

Times are whole: 90s, 4m, 1h30m. `docs/corpus.md` lists what each can do, from `DOINGS` and the dataclasses here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from gpuwarden.job import STALL_TIMEOUT_S, Condition, JobClass, Phase


class Process(StrEnum):
    """What has become of a program's process."""

    WORKS = "works"
    WAITS = "waits"
    STOPPED = "stopped"
    PAUSED = "paused"
    KILLED = "killed"
    UNREAPED = "unreaped"
    STARTING = "starting"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What a program does from one moment on.

    Args:
        process: works (on a job, which begins where it has none), waits (without a job), stopped, paused (its whole
            container is), killed (its files stay), unreaped (it has ended, its files stay and its container runs on:
            nobody has waited for it), starting (its container runs anew, its process does not yet), left (a clean end).
        phase: what its job says it is in; what it was in before, where nothing is said.
        timeout_s: for how long its job says, as it enters a phase, that it may show no sign of life there.
        step_every_s: how far apart the steps are that it reports; none without.
        gpu_ratio: what it uses of each of its GPUs, or one figure for each; `unknown` where the driver does not tell.
        ram_mib_per_s: by how much its RAM grows.
        ram_swings_mib: by how much its RAM goes up, and down again, every 30 s.
        io_mib_per_s: what it reads and writes.
        faults_per_s: page faults.
        cpu_cores: CPU time.
        waits_for_storage: whether its process waits in the kernel, in state D.
        heartbeat: whether its thread refreshes the worker file every 10 s.
        heartbeat_cpu: whether that takes as much CPU time as the kernel counts by, 10 ms.
        vram_mib: what it holds of each of its GPUs; what it held before, where nothing is said.
        vram_mib_per_s: by how much that grows.
        answers: whether it answers as a server.
        finishes_every_s: how far apart the items of its run are that it finishes; none without.
        fails_every_s: how far apart those are that it fails.
        unread: what of it its exporter cannot read, of `ram`, `work` and `cpu`: the memory of its container, what the
            processes there have done, and the CPU time of its worker.
    """

    process: Process = Process.WORKS
    phase: Phase | None = None
    timeout_s: float | None = None
    step_every_s: int | None = None
    gpu_ratio: tuple[float | None, ...] = (0.0,)
    ram_mib_per_s: float = 0.0
    ram_swings_mib: float = 0.0
    io_mib_per_s: float = 0.0
    faults_per_s: float = 0.0
    cpu_cores: float = 0.0
    waits_for_storage: bool = False
    heartbeat: bool = True
    heartbeat_cpu: bool = True
    vram_mib: float | None = None
    vram_mib_per_s: float = 0.0
    answers: bool = False
    finishes_every_s: int | None = None
    fails_every_s: int | None = None
    unread: tuple[str, ...] = ()


DOINGS: Final[Mapping[str, Doing]] = {
    "loads": Doing(phase=Phase.LOAD, ram_mib_per_s=60, io_mib_per_s=60, faults_per_s=4000, cpu_cores=0.6),
    "maps": Doing(phase=Phase.LOAD, faults_per_s=9000, cpu_cores=0.4),
    "downloads": Doing(phase=Phase.LOAD, io_mib_per_s=8, cpu_cores=0.1),
    "steps": Doing(phase=Phase.STEP, step_every_s=2, gpu_ratio=(0.95,), cpu_cores=1.0),
    "computes": Doing(phase=Phase.STEP, gpu_ratio=(0.95,), cpu_cores=1.0),
    "decodes": Doing(phase=Phase.STEP, ram_swings_mib=6144, cpu_cores=1.0),
    "evaluates": Doing(phase=Phase.EVAL, gpu_ratio=(0.6,), cpu_cores=1.0),
    "checkpoints": Doing(phase=Phase.CHECKPOINT, io_mib_per_s=20, cpu_cores=0.1),
    "saves": Doing(phase=Phase.SAVE, io_mib_per_s=20, cpu_cores=0.1),
    "hangs": Doing(),
    "spins": Doing(gpu_ratio=(1.0,), cpu_cores=1.0),
    "holds the GIL": Doing(heartbeat=False, cpu_cores=1.0),
    "waits for NFS": Doing(heartbeat=False, waits_for_storage=True),
    "is stopped": Doing(process=Process.STOPPED, heartbeat=False),
    "is paused": Doing(process=Process.PAUSED, heartbeat=False),
    "is killed": Doing(process=Process.KILLED, heartbeat=False),
    "ends unreaped": Doing(process=Process.UNREAPED, heartbeat=False),
    "starts again": Doing(process=Process.STARTING, heartbeat=False, io_mib_per_s=20, cpu_cores=0.5),
    "waits": Doing(process=Process.WAITS),
    "leaves": Doing(process=Process.LEFT, heartbeat=False),
    "answers": Doing(gpu_ratio=(0.5,), cpu_cores=0.2, answers=True),
    "holds": Doing(gpu_ratio=(0.1,)),
}
"""What a program can do, by the words of a scenario. Whatever else is said beside `does` replaces a part of it."""


UNREAD: Final = ("ram", "work", "cpu")
"""What of a program an exporter may not be able to read."""


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """How a GPU is from one moment on, and what its driver reports as that begins.

    Args:
        state: what has become of it.
        xid: the number of an error that its driver reports then.
        ecc_uncorrected: how many errors of its memory are found then that ECC cannot correct.
        throttled: what holds its clocks down.
    """

    state: str = "works"
    xid: int | None = None
    ecc_uncorrected: int | None = None
    throttled: tuple[str, ...] | None = None


GPU_STATES: Final = ("works", "lost", "vanished", "unanswered", "unlisted", "unmeasured", "shared", "holds on")
"""A GPU: works; lost, as its driver says; vanished from its driver's list; unanswered, as every GPU of its host; its
processes cannot be listed; or its use not measured; shared with somebody on no list, who uses 40 %
of it; or holds on to the memory of whoever ends from then on."""


INSTANCE_STATES: Final = ("works", "vanished", "unlisted", "holds on")
"""An instance of a GPU (MIG): works; is not made any more; its processes cannot be listed; or holds on to memory."""


HOST_STATES: Final = ("watched", "unscraped", "unwatched", "frozen", "asleep", "clock set", "rebooted")
"""A host: watched; its scrapes fail; its exporter is down; or is stopped, and goes on with what it knew; the machine
sleeps, and what programs were to do meanwhile they do as it wakes; watched, its clock an hour ahead, or after a reboot,
which starts its exporter anew."""


PROMETHEUS_STATES: Final = ("up", "down")


REMEDIES: Final = {
    "restart_worker": "worker",
    "restart_container": "container",
    "recycle_container": "container",
    "hold_lost_host": "host",
    "wrangle": "worker",
}
"""What can be done, and by which label each remedy knows on whom."""


DECIDED: Final = ("lock", "block", "move", "wait")
"""What can be decided about who fails the items of a run: the worker is locked, its run is blocked, or moves to another
worker; or nobody can tell yet."""


TELLING: Final = {
    "GpuwardenSharedJobStalled": "worker",
    "GpuwardenServerProbeFailing": "container",
    "GpuwardenJobSlow": "worker",
    "GpuwardenGpuXid": "gpu",
    "GpuwardenGpuEccUncorrected": "gpu",
    "GpuwardenGpuThrottled": "gpu",
}
"""The alerts that only tell people of a wedge, for to act on it would kill somebody who is sound, of a job that goes
on, but slowly, or of what is wrong with a GPU; and by which label each knows of whom."""


HELPERS: Final = ("", "child", "orphan")
"""In whom a worker does all its work: in its own process; in a child of it; or in one that was left by its parent."""


_T = TypeVar("_T")


Timeline = tuple[tuple[int, str], ...]
"""From which second on, what."""


GpuHealths = tuple[tuple[int, GpuHealth], ...]
"""From which second on a GPU is how; by its number, with its host before it where it is not that of each host."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A worker, a tenant or a server: its settings, and what it does from which second on."""

    kind: str
    name: str
    does: tuple[tuple[int, Doing], ...]
    host: str = "a"
    container: str = ""
    gpus: tuple[str, ...] = ("0",)
    job_class: JobClass = JobClass.GPU
    budget_s: float | None = None
    stall_timeout_s: float | None = None
    ran_s: int = 0
    ranks: int = 1
    gang: str | None = None
    rank: int = 0
    attempt: int = 1
    run: str = ""
    works_in: str = ""
    asked_every_s: int = 0
    budget_mib: int | None = None
    protected: bool = False
    managed: bool = True
    silence_s: float = 120.0

    @property
    def timeout_s(self) -> float:
        """The silence its jobs are allowed; 0 where the stall condition does not police them."""
        if self.stall_timeout_s is not None:
            return self.stall_timeout_s
        return STALL_TIMEOUT_S if self.job_class is JobClass.GPU else 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is to be acted on, why, from when on it is wrong and from when on it can be told, seconds.

    `or_of` are others of whom any one will do instead. `then` is what the remediator decides by the counts of that
    moment about who fails the items of a run; empty where nothing is said.
    """

    condition: Condition
    remedy: str
    of: str
    since_s: int
    due_s: int
    or_of: tuple[str, ...] = ()
    then: str = ""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What people are to be told, of whom, and from when on it can be, seconds."""

    alert: str
    of: str
    due_s: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One scenario, as the module says, and where it stands; `late_s` is by how much a verdict may come later."""

    place: str
    name: str
    why: str
    programs: tuple[Program, ...]
    gpus: Mapping[str, GpuHealths]
    hosts: Mapping[str, Timeline]
    prometheus: Timeline
    verdicts: tuple[Verdict, ...]
    told: tuple[Told, ...]
    scrape_s: int
    evaluate_s: int
    plays_s: int
    not_yet: str | None
    late_s: int = 0

    def deadline_s(self, verdict: Verdict | Told) -> int:
        """The last second for it: the first evaluation of the first scrape that shows what allows it, and `late_s`."""
        return self.evaluated_s(verdict.due_s) + self.late_s

    def evaluated_s(self, second: float) -> int:
        """When what is so from that second on is evaluated: first of the first scrape that shows it."""
        shown_s = math.ceil(second / self.scrape_s) * self.scrape_s
        return -(-shown_s // self.evaluate_s) * self.evaluate_s


def at(timeline: Sequence[tuple[int, _T]], second: int, default: _T) -> _T:
    """What a timeline says of a second."""
    return next((state for since_s, state in reversed(timeline) if since_s <= second), default)


def gpus_of(host: str, programs: Iterable[Program], gpus: Iterable[str]) -> set[str]:
    """The GPUs of a host and their instances, by number: those of its programs, and those of which anything is said."""
    named = {number for each in programs if each.host == host for number in each.gpus}
    for each in gpus:
        whose, slash, number = each.rpartition("/")
        if not slash or whose == host:
            named.add(number)
    return named | {each.partition(":")[0] for each in named}  # an instance is of a GPU
