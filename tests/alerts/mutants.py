"""Deliberate breakages of the alert rules: each must be caught by the tests beside the rule that it breaks."""

from dataclasses import dataclass
from typing import Final

from deploy import check

ALERTS: Final = check.CHECKOUT / "alerts"
STALL: Final = "stall.rules.yaml"
WORKER: Final = "worker.rules.yaml"
RULES: Final = {name: (ALERTS / name).read_text() for name in (STALL, WORKER)}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One deliberate breakage: within `part` of the rule file, every `old` is replaced by `new`."""

    rules: str
    sentence: str
    part: str
    old: str
    new: str

    @property
    def name(self) -> str:
        """The topic of the rule file and the sentence."""
        return f"{self.rules.partition('.')[0]}: {self.sentence}"

    @property
    def applies(self) -> bool:
        """Whether the rule file still holds what this one breaks."""
        return RULES[self.rules].count(self.part) == 1 and self.old in self.part

    def text(self) -> str:
        """The broken rule file."""
        return RULES[self.rules].replace(self.part, self.part.replace(self.old, self.new))


def of(rules: str, part: str, *breakages: tuple[str, str, str]) -> list[Mutant]:
    """Mutants of one part, from (sentence, old, new)."""
    return [Mutant(rules=rules, sentence=sentence, part=part, old=old, new=new) for sentence, old, new in breakages]


# What the rules have in common, letter for letter.

IDENTITY = """\
          * on (host, worker, container) group_left (job_id, attempt, incarnation)
          topk by (host, worker, container) (1, gpuwarden_job_info)
"""
PATIENCE = "        labels:\n"


def of_identity(rules: str, measure: str) -> list[Mutant]:
    """The mutants of the join that names the attempt. `measure` is what the alert's value is."""
    by = "topk by (host, worker, container)"
    return of(
        rules,
        IDENTITY,
        ("no identity is joined", IDENTITY, ""),
        (f"the value is not {measure}", "*", "+"),
        ("the identity has no job", "job_id, ", ""),
        ("the identity has no attempt", "attempt, ", ""),
        ("the identity has no incarnation", ", incarnation", ""),
        ("the identity is joined without the host", "* on (host, worker, container)", "* on (worker, container)"),
        ("the identity is joined without the worker", "* on (host, worker, container)", "* on (host, container)"),
        ("the identity is joined without the container", "* on (host, worker, container)", "* on (host, worker)"),
        ("a doubled identity fails the rule", f"{by} (1, gpuwarden_job_info)", "gpuwarden_job_info"),
        ("two identities are let through", "(1,", "(2,"),
        ("identities are merged to nobody's", f"{by} (1, gpuwarden_job_info)",
         "max by (host, worker, container) (gpuwarden_job_info)"),
        ("one identity is kept of all", by, "topk"),
        ("one identity is kept of all hosts", by, "topk by (worker, container)"),
        ("one identity is kept of a container", by, "topk by (host, container)"),
        ("one identity is kept of a worker's containers", by, "topk by (host, worker)"),
        ("the attempt before is still named", "gpuwarden_job_info", "last_over_time(gpuwarden_job_info[5m])"),
    )  # fmt: skip


def of_file(rules: str, threshold: str) -> list[Mutant]:
    """The mutants of everything the rule says in several places at once. `threshold` is the series of its limit."""
    return of(
        rules,
        RULES[rules],
        ("a limit is believed after it has vanished", threshold, f"last_over_time({threshold}[5m])"),
        ("hosts are not told apart anywhere", "host, ", ""),
        ("containers are not told apart anywhere", ", container)", ")"),
        ("workers are not told apart anywhere", "worker, ", ""),
    )


def of_outcome(rules: str, labels: str, trip: str) -> list[Mutant]:
    """The mutants of what the alert does and carries once its expression holds."""
    return [
        *of(
            rules,
            PATIENCE,
            ("it waits a minute", "        labels:", "        for: 1m\n        labels:"),
            ("it waits a second", "        labels:", "        for: 1s\n        labels:"),
            ("it lingers a minute", "        labels:", "        keep_firing_for: 1m\n        labels:"),
            ("it lingers a second", "        labels:", "        keep_firing_for: 1s\n        labels:"),
        ),
        *of(
            rules,
            labels,
            ("it names another severity", "critical", "warning"),
            ("it names another remedy", "restart_worker", "restart_node"),
            ("it names another trip", trip, "health"),
            ("it names no remedy", "          remedy: restart_worker\n", ""),
        ),
        *of(
            rules,
            "Attempt {{ $labels.attempt }} of",
            ("its description names no attempt", " {{ $labels.attempt }}", ""),
        ),
        *of(rules, "          runbook:", ("its runbook goes by another name", "runbook", "runbook_url")),
    ]


# The stall rule, its parts letter for letter.

ARMED = """\
              min by (host, worker, container) (gpuwarden_job_beat_age_seconds)
                >=
              max by (host, worker, container) (gpuwarden_job_stall_timeout_seconds)
"""
ARMED_BACKWARDS = """\
              max by (host, worker, container) (gpuwarden_job_stall_timeout_seconds)
                <=
              min by (host, worker, container) (gpuwarden_job_beat_age_seconds)
"""
GPU = """\
            and on (host, worker, container) (
              max by (host, worker, container) (gpuwarden_job_stall_timeout_seconds)
                <= on (host, container) group_left ()
              min by (host, container) (gpuwarden_container_gpu_idle_seconds)
            )
"""
RAM = GPU.replace("gpu_idle", "ram_still")
LABELS = """\
          severity: critical
          remedy: restart_worker
          trip: stall
"""

BEAT_AGE = "gpuwarden_job_beat_age_seconds"
TIMEOUT = "gpuwarden_job_stall_timeout_seconds"
GPU_IDLE = "gpuwarden_container_gpu_idle_seconds"
RAM_STILL = "gpuwarden_container_ram_still_seconds"


def of_leg(leg: str, name: str, series: str, other: str) -> list[Mutant]:
    """The mutants that the GPU's leg and the RAM's have in common. `other` is the other leg's series."""
    here = "and on (host, worker, container)"
    return of(
        STALL,
        leg,
        (f"{name} is not looked at", leg, ""),
        (f"{name} accuses by itself", here, "or on (host, worker, container)"),
        (f"{name} accuses by its life", here, "unless on (host, worker, container)"),
        (f"{name} must be silent for longer than the timeout", "<=", "<"),
        (f"{name} is compared the wrong way round", "<=", ">="),
        (f"{name} compares its longest duration", "min by", "max by"),
        (f"{name} compares its mean duration", "min by", "avg by"),
        (f"{name} compares the shortest timeout", "max by", "min by"),
        (f"{name} compares 120 s whatever the job says", f"({TIMEOUT})", f"({TIMEOUT} * 0 + 120)"),
        (f"{name} is joined without aggregation", f"min by (host, container) ({series})", series),
        (f"{name} joins a timeout without aggregation", f"max by (host, worker, container) ({TIMEOUT})", TIMEOUT),
        (f"{name} remembers its longest silence", series, f"max_over_time({series}[5m])"),
        (f"{name} is believed after it has become unknown", series, f"last_over_time({series}[5m])"),
        (f"{name} counts as silent where it is unknown", f"({series})", f"({series} or on (host, container) {other})"),
        (f"{name} is joined without the host", "(host, container) group_left", "(container) group_left"),
        (f"{name} is the least of all hosts", "(host, container)", "(container)"),
        (f"{name} is the least of its host", "(host, container)", "(host)"),
        (f"{name} accuses the worker's namesakes on other hosts", here, "and on (worker, container)"),
        (f"{name} accuses the container's other workers", here, "and on (host, container)"),
        (f"{name} accuses the worker in its other containers", here, "and on (host, worker)"),
    )


STALL_MUTANTS: Final = [
    *of(
        STALL,
        ARMED,
        ("the beat must be older than the timeout", ">=", ">"),
        ("the beat is compared the wrong way round", ">=", "<="),
        ("the beat is not compared", ">=", ">= 0 *"),
        ("the beat compares 120 s whatever the job says", f"({TIMEOUT})", f"({TIMEOUT} * 0 + 120)"),
        ("the beat compares the job's budget", TIMEOUT, "gpuwarden_job_budget_seconds"),
        ("the beat compares the shortest timeout", "max by", "min by"),
        ("the oldest of two beats counts", "min by", "max by"),
        ("the mean of two beats counts", "min by", "avg by"),
        ("the beat is joined without aggregation", f"min by (host, worker, container) ({BEAT_AGE})", BEAT_AGE),
        ("the beat joins a timeout without aggregation", f"max by (host, worker, container) ({TIMEOUT})", TIMEOUT),
        ("the beat remembers its longest silence", BEAT_AGE, f"max_over_time({BEAT_AGE}[5m])"),
        ("the beat is believed after it has vanished", BEAT_AGE, f"last_over_time({BEAT_AGE}[5m])"),
        ("the run time counts instead of the beat", BEAT_AGE, "gpuwarden_job_elapsed_seconds"),
        ("the run time counts where there is no beat yet", f"({BEAT_AGE})",
         f"({BEAT_AGE} or on (host, worker) gpuwarden_job_elapsed_seconds)"),
        ("the beat is not told apart by host", "(host, worker, container)", "(worker, container)"),
        ("the beat is not told apart by worker", "(host, worker, container)", "(host, container)"),
        ("the beat is not told apart by container", "(host, worker, container)", "(host, worker)"),
        ("the value is the timeout", ARMED, ARMED_BACKWARDS),
    ),
    *of_leg(GPU, "the GPU", GPU_IDLE, RAM_STILL),
    *of_leg(RAM, "the RAM", RAM_STILL, GPU_IDLE),
    *of_identity(STALL, "the beat's age"),
    *of_file(STALL, TIMEOUT),
    *of_outcome(STALL, LABELS, "stall"),
    *of(STALL, "      - alert: GpuwardenJobStalled", ("it goes by another name", "Stalled", "Wedged")),
    *of(STALL, "/{{ $labels.worker }} is wedged", ("its summary names no worker", "/{{ $labels.worker }}", "")),
    *of(STALL, "wedged: no sign of life for {{ $value | humanizeDuration }}",
        ("its summary has raw seconds", " | humanizeDuration", "")),
]  # fmt: skip

# The rule of the dead worker, its parts letter for letter.

HEARTBEAT_AGE = "gpuwarden_worker_heartbeat_age_seconds"
CPU_STILL = "gpuwarden_worker_cpu_still_seconds"
DEAD_AFTER = "gpuwarden_worker_dead_after_seconds"
ALIVE = "gpuwarden_worker_alive"
SLOT = "(host, worker, container)"
HEARTBEAT = f"""\
              min by {SLOT} ({HEARTBEAT_AGE}{{container!=""}})
                >=
              max by {SLOT} ({DEAD_AFTER})
"""
HEARTBEAT_BACKWARDS = f"""\
              max by {SLOT} ({DEAD_AFTER})
                <=
              min by {SLOT} ({HEARTBEAT_AGE}{{container!=""}})
"""
CPU = f"""\
            and on {SLOT} (
              min by {SLOT} ({CPU_STILL})
                >=
              max by {SLOT} ({DEAD_AFTER})
            )
"""
LOCK = f"""\
            and on {SLOT} (
              min by {SLOT} ({ALIVE}) == 1
            )
"""
DEAD_LABELS = LABELS.replace("stall", "dead_worker")


def of_silence(part: str, name: str, selected: str) -> list[Mutant]:
    """The mutants that the heartbeat's comparison and the CPU's have in common."""
    return of(
        WORKER,
        part,
        (f"{name} must be silent for longer than is allowed", ">=", ">"),
        (f"{name} is compared the wrong way round", ">=", "<="),
        (f"{name} compares nothing", ">=", ">= 0 *"),
        (f"{name} compares 30 s whatever is allowed", f"({DEAD_AFTER})", f"({DEAD_AFTER} * 0 + 30)"),
        (f"{name} compares the shortest limit", "max by", "min by"),
        (f"{name} compares its longest silence", "min by", "max by"),
        (f"{name} compares its mean silence", "min by", "avg by"),
        (f"{name} is joined without aggregation", f"min by {SLOT} ({selected})", selected),
        (f"{name} joins a limit without aggregation", f"max by {SLOT} ({DEAD_AFTER})", DEAD_AFTER),
        (f"{name} remembers its longest silence", selected, f"max_over_time({selected}[5m])"),
        (f"{name} is believed after it has become unknown", selected, f"last_over_time({selected}[5m])"),
        (f"{name} counts as silent where it is unknown", f"({selected})",
         f"({selected} or on {SLOT} gpuwarden_worker_alive{{container!=''}} * 3600)"),
        (f"{name} is not told apart by host", SLOT, "(worker, container)"),
        (f"{name} is not told apart by worker", SLOT, "(host, container)"),
        (f"{name} is not told apart by container", SLOT, "(host, worker)"),
    )  # fmt: skip


def of_join(part: str, name: str) -> list[Mutant]:
    """The mutants that the legs joined to the heartbeat have in common."""
    here = f"and on {SLOT}"
    return of(
        WORKER,
        part,
        (f"{name} is not looked at", part, ""),
        (f"{name} accuses by itself", here, f"or on {SLOT}"),
        (f"{name} accuses by its life", here, f"unless on {SLOT}"),
        (f"{name} accuses the worker's namesakes on other hosts", here, "and on (worker, container)"),
        (f"{name} accuses the container's other workers", here, "and on (host, container)"),
        (f"{name} accuses the worker in its other containers", here, "and on (host, worker)"),
    )


WORKER_MUTANTS: Final = [
    *of_silence(HEARTBEAT, "the heartbeat", f'{HEARTBEAT_AGE}{{container!=""}}'),
    *of(
        WORKER,
        HEARTBEAT,
        ("the main loop counts instead of the heartbeat", HEARTBEAT_AGE, "gpuwarden_worker_loop_age_seconds"),
        ("an unknown container is accused", '{container!=""}', ""),
        ("the value is the limit", HEARTBEAT, HEARTBEAT_BACKWARDS),
    ),
    *of_silence(CPU, "the CPU", CPU_STILL),
    *of_join(CPU, "the CPU"),
    *of_join(LOCK, "the lock"),
    *of(
        WORKER,
        LOCK,
        ("the lock must be free", "== 1", "== 0"),
        ("the lock may be free", "== 1", ">= 0"),
        ("the lock is believed held when one of two says so", "min by", "max by"),
        ("the lock is joined without aggregation", f"min by {SLOT} ({ALIVE})", ALIVE),
        ("the lock is believed after it has become unknown", ALIVE, f"last_over_time({ALIVE}[5m])"),
        ("the lock counts as held where it is unknown", f"({ALIVE})",
         f"({ALIVE} or on {SLOT} gpuwarden_job_info * 0 + 1)"),
        ("the lock remembers that it was held", ALIVE, f"max_over_time({ALIVE}[5m])"),
        ("the lock is not told apart by host", SLOT, "(worker, container)"),
        ("the lock is not told apart by worker", SLOT, "(host, container)"),
        ("the lock is not told apart by container", SLOT, "(host, worker)"),
    ),
    *of_identity(WORKER, "the heartbeat's age"),
    *of_file(WORKER, DEAD_AFTER),
    *of_outcome(WORKER, DEAD_LABELS, "dead_worker"),
    *of(WORKER, "      - alert: GpuwardenWorkerDead", ("it goes by another name", "Dead", "Gone")),
    *of(WORKER, "worker {{ $labels.worker }} on", ("its summary names no worker", " {{ $labels.worker }}", "")),
    *of(WORKER, "no heartbeat for {{ $value | humanizeDuration }} while",
        ("its summary has raw seconds", " | humanizeDuration", "")),
]  # fmt: skip

MUTANTS: Final = [*STALL_MUTANTS, *WORKER_MUTANTS]
