"""Scenarios: what programs, GPUs, hosts and Prometheus do over time, and the right verdict.

A file is a YAML list. Each scenario has a `name`, a `why`, and:

    workers    by name: settings, and what each does from a time on, such as `4m: hangs`
    tenants    containers with GPU memory and without a job
    servers    containers with a probe
    gpus       by number, if one fails: `5m: lost`; `0:1` is the second MIG instance of the first GPU
    hosts      by name, if one fails: `5m: unscraped`
    prometheus if it fails: `5m: down`
    verdict    `none`, or one or several of {condition, remedy, of, since, due}: the fault begins at `since`, and
               `due` is the earliest possible action; `then` is the decision about items: lock, block, move or wait
    `told`     one or several of {alert, of, due}: alerts without a remedy
    scrape, evaluate   intervals; 15s and 30s by default
    plays      end; by default 6 minutes after the last event
    not_yet    why the rules judge it wrongly for now

Times are whole: 90s, 4m, 1h30m. `bench/corpus/README.md` lists all words; `python -m bench.corpus --page` writes it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from gpuwarden.job import STALL_TIMEOUT_S, Condition, JobClass, Phase


class Process(StrEnum):
    """State of a program's process."""

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
        process: works on a job, waits without one, is stopped, paused with its container, killed, unreaped (a zombie in
            a running container), starting (only its container runs) or left (a clean end).
        phase: of its job; unchanged by default.
        timeout_s: the job's own timeout of this phase.
        step_every_s: interval of its steps.
        gpu_ratio: use of each GPU, or one value for all; `unknown` without a reading.
        ram_mib_per_s: growth of its RAM.
        ram_swings_mib: amplitude of its RAM, which changes every 30 s.
        io_mib_per_s: I/O.
        faults_per_s: page faults.
        cpu_cores: CPU time.
        waits_for_storage: whether it is in state D.
        heartbeat: whether it writes the worker file every 10 s.
        heartbeat_cpu: whether a heartbeat takes 10 ms of CPU time, one tick of the kernel.
        vram_mib: memory on each GPU; unchanged by default.
        vram_mib_per_s: its growth.
        answers: whether it answers probes.
        finishes_every_s: interval of items that it completes.
        fails_every_s: interval of items that it fails.
        unread: what the exporter cannot read: `ram` or `work` of its container, `cpu` of its worker.
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
"""Activities by their words in scenarios. Other keys next to `does` replace parts of it."""


UNREAD: Final = ("ram", "work", "cpu")
"""Values of `Doing.unread`."""


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """State of a GPU from one moment on, and the errors of that moment.

    Args:
        state: one of `GPU_STATES`.
        xid: number of an error.
        ecc_uncorrected: number of uncorrected memory errors.
        throttled: throttle reasons.
        quarantined: whether it is in quarantine.
    """

    state: str = "works"
    xid: int | None = None
    ecc_uncorrected: int | None = None
    throttled: tuple[str, ...] | None = None
    quarantined: bool = False


GPU_STATES: Final[Mapping[str, str]] = {
    "works": "it works",
    "lost": "the driver reports it as lost",
    "vanished": "the driver does not list it",
    "unanswered": "the driver hangs, for all GPUs of the host",
    "unlisted": "its processes are unknown",
    "unmeasured": "its use is unknown",
    "shared": "a process of no container uses 40 % of it",
    "holds on": "memory of processes that end is not freed",
}
"""States of a GPU, and what each means."""


INSTANCE_STATES: Final = ("works", "vanished", "unlisted", "holds on")
"""States of a MIG instance."""


HOST_STATES: Final[Mapping[str, str]] = {
    "watched": "exporter and scrapes work",
    "node": "the same, and it is a node of Kubernetes",
    "unscraped": "scrapes fail",
    "unwatched": "the exporter is down",
    "frozen": "the exporter is stopped and takes no samples",
    "asleep": "the host sleeps; its programs continue when it wakes",
    "clock set": "its clock is an hour ahead",
    "rebooted": "its exporter starts; write `unwatched` before it",
}
"""States of a host, and what each means."""


PROMETHEUS_STATES: Final[Mapping[str, str]] = {"up": "it scrapes and evaluates", "down": "it is stopped"}
"""States of Prometheus, and what each means."""


REMEDIES: Final = {
    "restart_worker": "worker",
    "restart_container": "container",
    "recycle_container": "container",
    "hold_lost_host": "host",
    "taint_node": "gpu",
    "wrangle": "worker",
}
"""Remedies, with the label of their target."""


DECIDED: Final = ("lock", "block", "move", "wait")
"""Decisions about a run with failed items: lock the worker, block or move the run, or wait for more data."""


NOTICES: Final = {
    "GpuwardenSharedJobStalled": "worker",
    "GpuwardenServerProbeFailing": "container",
    "GpuwardenJobSlow": "worker",
    "GpuwardenGpuXid": "gpu",
    "GpuwardenGpuEccUncorrected": "gpu",
    "GpuwardenGpuThrottled": "gpu",
}
"""Alerts without a remedy, with the label of their target."""


HELPERS: Final = ("", "child", "orphan")
"""Where a worker works: in its own process, in a child, or in an orphan."""


_T = TypeVar("_T")


Timeline = tuple[tuple[int, str], ...]
"""States, each with its first second."""


GpuHealths = tuple[tuple[int, GpuHealth], ...]
"""States of a GPU, each with its first second."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A worker, a tenant or a server.

    Args:
        kind: `worker`, `tenant` or `server`.
        name: of the program.
        does: its activities, each with its first second.
        host: its host.
        container: its container; by default it has the program's name.
        gpus: numbers of its GPUs; `0:1` is the second MIG instance of the first GPU.
        job_class: class of its jobs.
        budget_s: time budget of its jobs; by default the one of the class.
        stall_timeout_s: stall timeout of its jobs; 120 s by default for the class `gpu`.
        ran_s: seconds that its attempt has run at the start.
        ranks: number of ranks of its gang.
        gang: its gang.
        rank: its rank.
        attempt: number of its first attempt.
        run: the run whose items it works on.
        works_in: which other process does its work: `child` or `orphan`.
        asked_every_s: interval of a health check in its container.
        budget_mib: its VRAM budget.
        protected: whether it is never evicted.
        managed: whether gpuwarden may restart it.
        silence_s: how long its probe may fail.
    """

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
        """Stall timeout of its jobs; 0 if not checked."""
        if self.stall_timeout_s is not None:
            return self.stall_timeout_s
        return STALL_TIMEOUT_S if self.job_class is JobClass.GPU else 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An expected action: its target, start of the fault and earliest action, seconds.

    `or_of` are alternative targets. `then` is the expected decision about failed items, or empty.
    """

    condition: Condition
    remedy: str
    of: str
    since_s: int
    due_s: int
    or_of: tuple[str, ...] = ()
    then: str = ""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An expected alert without a remedy: its target and earliest second."""

    alert: str
    of: str
    due_s: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One scenario and its place in a file; verdicts may be late by `late_s`."""

    place: str
    name: str
    why: str
    programs: tuple[Program, ...]
    gpus: Mapping[str, GpuHealths]
    hosts: Mapping[str, Timeline]
    prometheus: Timeline
    verdicts: tuple[Verdict, ...]
    notices: tuple[Notice, ...]
    scrape_s: int
    evaluate_s: int
    plays_s: int
    not_yet: str | None
    late_s: int = 0

    def deadline_s(self, verdict: Verdict | Notice) -> int:
        """Last second for it: the first evaluation of the first scrape that shows the fault, plus `late_s`."""
        return self.evaluated_s(verdict.due_s) + self.late_s

    def evaluated_s(self, second: float) -> int:
        """First evaluation of the first scrape from that second on."""
        shown_s = math.ceil(second / self.scrape_s) * self.scrape_s
        return -(-shown_s // self.evaluate_s) * self.evaluate_s


def at(timeline: Sequence[tuple[int, _T]], second: int, default: _T) -> _T:
    """State of a timeline at a second."""
    return next((state for since_s, state in reversed(timeline) if since_s <= second), default)


def gpus_of(host: str, programs: Iterable[Program], gpus: Iterable[str]) -> set[str]:
    """Numbers of a host's GPUs and instances: those of its programs, and those with states."""
    named = {number for each in programs if each.host == host for number in each.gpus}
    for each in gpus:
        of_host, slash, number = each.rpartition("/")
        if not slash or of_host == host:
            named.add(number)
    return named | {each.partition(":")[0] for each in named}  # with the GPUs of instances
