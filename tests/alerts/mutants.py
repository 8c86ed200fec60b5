"""Deliberate breakages of the alert rules: each must be caught by the tests beside the rule that it breaks."""

from dataclasses import dataclass
from typing import Final

from deploy import check
from tests.alerts.generated import Planted, planted

ALERTS: Final = check.CHECKOUT / "alerts"
STALL: Final = "stall.rules.yaml"
WORKER: Final = "worker.rules.yaml"
GONE: Final = "gone.rules.yaml"
BUDGET: Final = "budget.rules.yaml"
HEALTH: Final = "health.rules.yaml"
STUCK: Final = "stuck.rules.yaml"
SERVER: Final = "server.rules.yaml"
CHAIN: Final = "chain.rules.yaml"
REMEDIATOR: Final = "remediator.rules.yaml"
NODE: Final = "node.rules.yaml"
ATTRIBUTION: Final = "attribution.rules.yaml"
VRAM: Final = "vram.rules.yaml"
WRANGLING: Final = "wrangling.rules.yaml"
GPU_LOST: Final = "gpu.rules.yaml"
FAULTS: Final = "faults.rules.yaml"
TELEMETRY: Final = "telemetry.rules.yaml"
EVALUATION: Final = "evaluation.rules.yaml"
STEPS: Final = "steps.rules.yaml"
SHARED: Final = "shared.rules.yaml"
GANG: Final = "gang.rules.yaml"
BY_WORD: Final = (TELEMETRY, EVALUATION, STEPS, SHARED, GANG)
"""The files whose mutants are the generated ones alone."""
RULES: Final = {
    name: (ALERTS / name).read_text()
    for name in (
        *(STALL, STUCK, WORKER, GONE, BUDGET, HEALTH, SERVER, CHAIN, REMEDIATOR, NODE, VRAM, ATTRIBUTION, WRANGLING),
        *(GPU_LOST, FAULTS),
        *BY_WORD,
    )
}

FIRST: Final = {
    STALL: (
        "fires when one leg after another",
        "fires when two exporters watch one host and agree",
        "fires in spite of what a namesake does",
    ),
    STUCK: (
        "fires when one limit after the other",
        "does not fire when one of two exporters is in doubt",
        "fires for namesakes on other hosts",
    ),
    GANG: (
        "fires on one host, and with three ranks",
        "does not fire where a rank is missing",
        "fires when two exporters watch one host",
        "does not look at who has lost its rank",
    ),
    WORKER: (
        "fires when a second exporter cannot tell",
        "does not fire when two exporters disagree",
        "fires when a worker is dead on two hosts",
    ),
    GONE: (
        "fires when the lock has been free",
        "does not fire when one of two exporters is in doubt",
        "fires for nobody else when a namesake's",
    ),
    BUDGET: (
        "does not fire when one of two exporters is in doubt",
        "fires for each of several",
        "does not fire when the exporter has vanished",
    ),
    HEALTH: (
        "does not fire within the grace",
        "does not fire when one of two exporters is in doubt",
        "fires for each of several",
    ),
    SERVER: (
        "goes by the stricter of two series",
        "fires once all of it has lasted",
        "does not fire when a figure is absent",
    ),
    CHAIN: ("fires with no series at all",),
    REMEDIATOR: ("fires while the brake is latched",),
    NODE: (
        "fires for the host that is silent",
        "does not fire while more hosts are missed",
        "a Prometheus that was down for long",
    ),
    VRAM: ("goes by the stricter of two series", "fires for one container of each GPU", "never flips between two"),
    ATTRIBUTION: ("fires for each container and GPU", "fires for the container, the GPU", "does not fire while one of"),
    GPU_LOST: (
        "fires once it has lasted for the window",
        "does not fire where a second exporter",
        "does not fire when a figure is absent",
    ),
    FAULTS: ("fires for each number", "fires for a series that is born", "fires for every way"),
    WRANGLING: ("fires at the sixth", "hosts that share a queue", "fires for each worker"),
    TELEMETRY: ("each kind of patience", "a scrape a minute is too sparse", "telemetry is stale where the first look"),
    EVALUATION: ("fires with a scrape a minute, for each", "tells of late groups with a scrape a minute"),
    STEPS: (
        "fires once the last ten minutes",
        "goes by the more that two exporters tell",
        "does not fire beside another container",
    ),
    SHARED: (
        "goes by the least silence that two exporters saw",
        "fires for nobody for the silence of a namesake",
        "fires when one leg after another",
    ),
}
"""The groups of each file's tests that are shown the mutants first, by how their names begin: they catch the most for
their time. For speed alone: whatever stands here, a mutant that no group catches has been through all of them."""


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

OVERDUE: Final = "gpuwarden_job_overdue_id"
IDENTITY = """\
          * on (host, worker, container) group_left (job_id, attempt, incarnation)
          count_values without () ("job_id",
            gpuwarden_job_overdue_id and topk by (host, worker, container) (1, timestamp(gpuwarden_job_overdue_id))
          )
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
        ("the identity has no job", "(job_id, ", "("),
        ("the job's id is called otherwise", '"job_id"', '"id"'),
        ("of two one is named", "without ()", "without (attempt)"),
        ("the identity has no attempt", "attempt, ", ""),
        ("the identity has no incarnation", ", incarnation", ""),
        ("the identity is joined without the host", "* on (host, worker, container)", "* on (worker, container)"),
        ("the identity is joined without the worker", "* on (host, worker, container)", "* on (host, container)"),
        ("the identity is joined without the container", "* on (host, worker, container)", "* on (host, worker)"),
        ("a doubled identity fails the rule", f" and {by} (1, timestamp({OVERDUE}))", ""),
        ("two identities are let through", "(1,", "(2,"),
        ("identities are merged to nobody's", f"{OVERDUE} and {by} (1, timestamp({OVERDUE}))",
         f"max by (host, worker, container) ({OVERDUE})"),
        ("the newest is the one of the greatest id", f"timestamp({OVERDUE})", OVERDUE),
        ("one identity is kept of all", by, "topk"),
        ("one identity is kept of all hosts", by, "topk by (worker, container)"),
        ("one identity is kept of a container", by, "topk by (host, container)"),
        ("one identity is kept of a worker's containers", by, "topk by (host, worker)"),
        ("the attempt before is still named", f"timestamp({OVERDUE})", f"-timestamp({OVERDUE})"),
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
            ("it names another trip", trip, "drill"),
            ("it names no remedy", "          remedy: restart_worker\n", ""),
        ),
        *of(
            rules,
            "Attempt {{ $labels.attempt }} of",
            ("its description names no attempt", " {{ $labels.attempt }}", ""),
        ),
        *of(rules, "          runbook_url:", ("its runbook goes by another name", "runbook_url", "runbook")),
    ]


# The stall rule, its parts letter for letter.

ARMED = """\
            min by (host, worker, container) (gpuwarden_job_beat_age_seconds)
              >=
            (
              max by (host, worker, container) (gpuwarden_job_stall_timeout_seconds)
"""
ARMED_BACKWARDS = """\
            (
              max by (host, worker, container) (gpuwarden_job_stall_timeout_seconds)
                <=
              min by (host, worker, container) (gpuwarden_job_beat_age_seconds)
"""
LABELS = """\
          severity: critical
          remedy: restart_worker
          trip: stall
"""

BEAT_AGE = "gpuwarden_job_beat_age_seconds"
TIMEOUT = "gpuwarden_job_stall_timeout_seconds"
GPU_IDLE = "gpuwarden_container_gpu_idle_seconds"
RAM_STILL = "gpuwarden_container_ram_still_seconds"


def link(series: str, indent: str = " " * 16) -> str:
    """One comparison of a chain with what a container has, letter for letter."""
    return f"""\
{indent}<= on (host, container) group_left ()
{indent[2:]}min by (host, container) ({series})
"""


def of_link(part: str, name: str, series: str, other: str, *, rules: str) -> list[Mutant]:
    """The mutants that such comparisons have in common. `other` is the series of another one."""
    return of(
        rules,
        part,
        (f"{name} is not looked at", part, ""),
        (f"{name} must be silent for longer than the limit", "<=", "<"),
        (f"{name} is compared the wrong way round", "<=", ">="),
        (f"{name} compares its longest duration", "min by", "max by"),
        (f"{name} compares its mean duration", "min by", "avg by"),
        (f"{name} is joined without aggregation", f"min by (host, container) ({series})", series),
        (f"{name} remembers its longest silence", series, f"max_over_time({series}[5m])"),
        (f"{name} is believed after it has become unknown", series, f"last_over_time({series}[5m])"),
        (f"{name} counts as silent where it is unknown", f"({series})", f"({series} or on (host, container) {other})"),
        (f"{name} is joined without the host", "(host, container) group_left", "(container) group_left"),
        (f"{name} is the least of all hosts", "(host, container)", "(container)"),
        (f"{name} is the least of its host", "(host, container)", "(host)"),
    )


JOB_QUIET = "gpuwarden_job_quiet_seconds"
SLOT = "(host, worker, container)"


def quiet(series: str = JOB_QUIET, indent: str = " " * 16) -> str:
    """The comparison with how quiet a job has been, letter for letter."""
    return f"""\
{indent}<=
{indent[2:]}min by {SLOT} ({series})
"""


def quiet_first(series: str = JOB_QUIET) -> str:
    """The same where the alert's value is how quiet it has been."""
    return f"""\
            min by {SLOT} ({series})
              >=
"""


def of_quiet(rules: str, part: str, series: str, *others: str) -> list[Mutant]:
    """The mutants of that comparison. `others` are series that might stand there instead."""
    sign, other = ("<=", ">=") if "<=" in part else (">=", "<=")
    return of(
        rules,
        part,
        ("quiet is not looked at", part, ""),
        ("it must be quiet for longer than the limit", sign, sign[0]),
        ("quiet is compared the wrong way round", sign, other),
        ("quiet compares its longest duration", "min by", "max by"),
        ("quiet compares its mean duration", "min by", "avg by"),
        ("quiet is joined without aggregation", f"min by {SLOT} ({series})", series),
        ("quiet remembers its longest", series, f"max_over_time({series}[5m])"),
        ("quiet is believed after it has become unknown", series, f"last_over_time({series}[5m])"),
        ("quiet counts where it is unknown", f"({series})",
         f"({series} >= 0 or on {SLOT} {OVERDUE} * 0 + 9000)"),
        ("quiet is the least of all hosts", SLOT, "(worker, container)"),
        ("quiet is the least of its container", SLOT, "(host, container)"),
        ("quiet is the least of its worker", SLOT, "(host, worker)"),
        *((f"{each} counts instead of quiet", series, each) for each in others),
    )  # fmt: skip


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
    *of_quiet(STALL, quiet(), JOB_QUIET, BEAT_AGE),
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
HEARTBEAT = f"""\
            min by {SLOT} ({HEARTBEAT_AGE}{{container!=""}})
              >=
            (
              max by {SLOT} ({DEAD_AFTER})
"""
HEARTBEAT_BACKWARDS = f"""\
            (
              max by {SLOT} ({DEAD_AFTER})
                <=
              min by {SLOT} ({HEARTBEAT_AGE}{{container!=""}})
"""
CPU = f"""\
                <=
              min by {SLOT} ({CPU_STILL})
"""
LOCK = f"""\
            and on {SLOT} (
              min by {SLOT} ({ALIVE}) == 1
            )
"""
DEAD_LABELS = LABELS.replace("stall", "dead_worker")


def _of_duration(name: str, selected: str) -> list[tuple[str, str, str]]:
    """The breakages that the heartbeat's age and the CPU's stillness have in common."""
    return [
        (f"{name} compares its longest silence", "min by", "max by"),
        (f"{name} compares its mean silence", "min by", "avg by"),
        (f"{name} is joined without aggregation", f"min by {SLOT} ({selected})", selected),
        (f"{name} remembers its longest silence", selected, f"max_over_time({selected}[5m])"),
        (f"{name} is believed after it has become unknown", selected, f"last_over_time({selected}[5m])"),
        (f"{name} counts as silent where it is unknown", f"({selected})",
         f"({selected} or on {SLOT} gpuwarden_worker_alive{{container!=''}} * 3600)"),
        (f"{name} is not told apart by host", SLOT, "(worker, container)"),
        (f"{name} is not told apart by worker", SLOT, "(host, container)"),
        (f"{name} is not told apart by container", SLOT, "(host, worker)"),
    ]  # fmt: skip


def of_join(part: str, name: str) -> list[Mutant]:
    """The mutants of a leg that is joined to the heartbeat."""
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


LOCK_HELD = "min by (host, worker, container) (gpuwarden_worker_alive) == 1\n            )"
WORKER_MUTANTS: Final = [
    *of(
        WORKER,
        RULES[WORKER],
        ("a GPU that reads busy holds it back", LOCK_HELD,
         f"{LOCK_HELD} unless on (host, container) gpuwarden_container_gpu_idle_seconds < 1"),
        ("a GPU that nobody can tell apart holds it back", LOCK_HELD,
         f"{LOCK_HELD} unless on (host, container) gpuwarden_container_gpu_attribution_missing == 1"),
    ),
    *of(
        WORKER,
        HEARTBEAT,
        ("the heartbeat must be silent for longer than is allowed", ">=", ">"),
        ("the heartbeat is compared the wrong way round", ">=", "<="),
        ("the heartbeat compares nothing", ">=", ">= 0 *"),
        ("30 s are allowed whatever is set", f"({DEAD_AFTER})", f"({DEAD_AFTER} * 0 + 30)"),
        ("the shortest limit counts", "max by", "min by"),
        ("a limit is joined without aggregation", f"max by {SLOT} ({DEAD_AFTER})", DEAD_AFTER),
        *_of_duration("the heartbeat", f'{HEARTBEAT_AGE}{{container!=""}}'),
        ("the main loop counts instead of the heartbeat", HEARTBEAT_AGE, "gpuwarden_worker_loop_age_seconds"),
        ("an unknown container is accused", '{container!=""}', ""),
        ("the value is the limit", HEARTBEAT, HEARTBEAT_BACKWARDS),
    ),
    *of(
        WORKER,
        CPU,
        ("the CPU is not looked at", CPU, ""),
        ("the CPU must be silent for longer than is allowed", "<=", "<"),
        ("the CPU is compared the wrong way round", "<=", ">="),
        *_of_duration("the CPU", CPU_STILL),
    ),
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
         f"({ALIVE} or on {SLOT} {OVERDUE} * 0 + 1)"),
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

# The rule of the worker that is gone, its parts letter for letter.

DEAD_FOR = "gpuwarden_worker_dead_seconds"
FREE = f"""\
              min by {SLOT} ({DEAD_FOR}{{container!=""}})
                >=
              max by {SLOT} ({DEAD_AFTER})
"""
FREE_BACKWARDS = f"""\
              max by {SLOT} ({DEAD_AFTER})
                <=
              min by {SLOT} ({DEAD_FOR}{{container!=""}})
"""
UNHELD = LOCK.replace("min by", "max by").replace("== 1", "== 0")
OTHER_BOOT = "gpuwarden_worker_heartbeat_other_boot"
QUIET = f"""\
                min by {SLOT} ({HEARTBEAT_AGE})
                  >=
                max by {SLOT} ({DEAD_AFTER})
"""
REBOOTED = f"""\
              or
              min by {SLOT} ({OTHER_BOOT}) == 1
"""
BEATLESS = f"""\
            and on {SLOT} (
              (
{QUIET}              )
{REBOOTED}            )
"""


def of_comparison(
    rules: str, part: str, name: str, series: str, limit: str, *, constant: str, backwards: str
) -> list[Mutant]:
    """The mutants of a part that compares a worker's duration with its limit, by slot. `backwards` has its value."""
    selected = series + '{container!=""}'
    return of(
        rules,
        part,
        (f"{name} must be longer than the limit", ">=", ">"),
        (f"{name} is compared the wrong way round", ">=", "<="),
        (f"{name} is not compared", ">=", ">= 0 *"),
        (f"{name} compares {constant} s whatever is set", f"({limit})", f"({limit} * 0 + {constant})"),
        (f"{name} compares the shortest limit", "max by", "min by"),
        (f"{name} is the longest of two", "min by", "max by"),
        (f"{name} is the mean of two", "min by", "avg by"),
        (f"{name} is joined without aggregation", f"min by {SLOT} ({selected})", selected),
        (f"{name} joins a limit without aggregation", f"max by {SLOT} ({limit})", limit),
        (f"{name} remembers its longest", selected, f"max_over_time({selected}[5m])"),
        (f"{name} is believed after it has vanished", selected, f"last_over_time({selected}[5m])"),
        (f"{name} is not told apart by host", SLOT, "(worker, container)"),
        (f"{name} is not told apart by worker", SLOT, "(host, container)"),
        (f"{name} is not told apart by container", SLOT, "(host, worker)"),
        ("an unknown container is accused", '{container!=""}', ""),
        ("the value is the limit", part, backwards),
    )


GONE_MUTANTS: Final = [
    *of_comparison(
        GONE, FREE, "the death", DEAD_FOR, DEAD_AFTER, constant="30", backwards=FREE_BACKWARDS
    ),
    *of(
        GONE,
        UNHELD,
        ("the lock is not looked at", UNHELD, ""),
        ("the lock accuses by itself", f"and on {SLOT}", f"or on {SLOT}"),
        ("the lock accuses when held", "== 0", "== 1"),
        ("the lock may be held", "== 0", ">= 0"),
        ("the lock is believed free when one of two says so", "max by", "min by"),
        ("the lock is joined without aggregation", f"max by {SLOT} ({ALIVE})", ALIVE),
        ("the lock is believed after it has become unknown", ALIVE, f"last_over_time({ALIVE}[5m])"),
        ("the lock remembers that it was free", ALIVE, f"min_over_time({ALIVE}[5m])"),
        ("the lock accuses the worker's namesakes on other hosts", f"and on {SLOT}", "and on (worker, container)"),
        ("the lock accuses the container's other workers", f"and on {SLOT}", "and on (host, container)"),
        ("the lock accuses the worker in its other containers", f"and on {SLOT}", "and on (host, worker)"),
    ),
    *of(
        GONE,
        BEATLESS,
        ("the heartbeat is not looked at", BEATLESS, ""),
        ("the heartbeat accuses by itself", f"and on {SLOT}", f"or on {SLOT}"),
        ("the heartbeat accuses by its life", f"and on {SLOT}", f"unless on {SLOT}"),
        ("the heartbeat accuses the worker's namesakes on other hosts", f"and on {SLOT}", "and on (worker, container)"),
        ("the heartbeat accuses the container's other workers", f"and on {SLOT}", "and on (host, container)"),
        ("the heartbeat accuses the worker in its other containers", f"and on {SLOT}", "and on (host, worker)"),
    ),
    *of(
        GONE,
        QUIET,
        ("the heartbeat must be older than is allowed", ">=", ">"),
        ("the heartbeat is compared the wrong way round", ">=", "<="),
        ("the heartbeat is not compared", ">=", ">= 0 *"),
        ("the heartbeat compares 30 s whatever is allowed", f"({DEAD_AFTER})", f"({DEAD_AFTER} * 0 + 30)"),
        ("the heartbeat compares the shortest limit", "max by", "min by"),
        ("the heartbeat is the oldest of two", "min by", "max by"),
        ("the heartbeat is the mean of two", "min by", "avg by"),
        ("the heartbeat is joined without aggregation", f"min by {SLOT} ({HEARTBEAT_AGE})", HEARTBEAT_AGE),
        ("the heartbeat joins a limit without aggregation", f"max by {SLOT} ({DEAD_AFTER})", DEAD_AFTER),
        ("the heartbeat remembers its oldest", HEARTBEAT_AGE, f"max_over_time({HEARTBEAT_AGE}[5m])"),
        ("the heartbeat is believed after it has vanished", HEARTBEAT_AGE, f"last_over_time({HEARTBEAT_AGE}[5m])"),
        ("the heartbeat counts as old where it is unknown", f"({HEARTBEAT_AGE})",
         f"({HEARTBEAT_AGE} or on {SLOT} {ALIVE} * 0 + 3600)"),
        ("the heartbeat is not told apart by host", SLOT, "(worker, container)"),
        ("the heartbeat is not told apart by worker", SLOT, "(host, container)"),
        ("the heartbeat is not told apart by container", SLOT, "(host, worker)"),
    ),
    *of(
        GONE,
        REBOOTED,
        ("after a reboot nobody is accused", REBOOTED, ""),
        ("the boot must be this one", "== 1", "== 0"),
        ("the boot may be this one", "== 1", ">= 0"),
        ("the boot is another when one of two says so", "min by", "max by"),
        ("the boot is joined without aggregation", f"min by {SLOT} ({OTHER_BOOT})", OTHER_BOOT),
        ("the boot is believed after it has vanished", OTHER_BOOT, f"last_over_time({OTHER_BOOT}[5m])"),
        ("the boot remembers that it was another", OTHER_BOOT, f"max_over_time({OTHER_BOOT}[5m])"),
        ("the boot is needed besides", "or\n", "and\n"),
        ("the boot is not told apart by host", SLOT, "(worker, container)"),
        ("the boot is not told apart by worker", SLOT, "(host, container)"),
        ("the boot is not told apart by container", SLOT, "(host, worker)"),
    ),
    *of_identity(GONE, "the time since it was seen dead"),
    *of_file(GONE, DEAD_AFTER),
    *of_outcome(GONE, DEAD_LABELS, "dead_worker"),
    *of(GONE, "      - alert: GpuwardenWorkerGone", ("it goes by another name", "Gone", "Dead")),
    *of(GONE, "worker {{ $labels.worker }} on", ("its summary names no worker", " {{ $labels.worker }}", "")),
    *of(GONE, "no process for {{ $value | humanizeDuration }} while",
        ("its summary has raw seconds", " | humanizeDuration", "")),
]  # fmt: skip

# The budget's rule, its parts letter for letter.

ELAPSED = "gpuwarden_job_elapsed_seconds"
BUDGET_S = "gpuwarden_job_budget_seconds"
SPENT = f"""\
            min by {SLOT} ({ELAPSED}{{container!=""}})
              >=
            max by {SLOT} ({BUDGET_S})
"""
SPENT_BACKWARDS = f"""\
            max by {SLOT} ({BUDGET_S})
              <=
            min by {SLOT} ({ELAPSED}{{container!=""}})
"""
BUDGET_MUTANTS: Final = [
    *of_comparison(BUDGET, SPENT, "the run time", ELAPSED, BUDGET_S, constant="300", backwards=SPENT_BACKWARDS),
    *of(
        BUDGET,
        SPENT,
        ("the phase's age counts instead of the run time", ELAPSED, "gpuwarden_job_phase_age_seconds"),
        ("the beat's age counts instead of the run time", ELAPSED, "gpuwarden_job_beat_age_seconds"),
        ("the silence allowed counts instead of the budget", BUDGET_S, TIMEOUT),
        ("a busy GPU excuses", SPENT, f"{SPENT}              unless on (host, container) {GPU_IDLE} == 0\n"),
    ),
    *of_identity(BUDGET, "the run time"),
    *of_file(BUDGET, BUDGET_S),
    *of_outcome(BUDGET, LABELS.replace("stall", "budget"), "budget"),
    *of(BUDGET, "      - alert: GpuwardenJobOverBudget", ("it goes by another name", "OverBudget", "TooLong")),
    *of(BUDGET, "/{{ $labels.worker }} is over", ("its summary names no worker", "/{{ $labels.worker }}", "")),
    *of(BUDGET, "it has run for {{ $value | humanizeDuration }}",
        ("its summary has raw seconds", " | humanizeDuration", "")),
]  # fmt: skip

# The rule of GPU health, its parts letter for letter.

WINDOW = "gpuwarden_job_health_window_seconds"
GRACE = "gpuwarden_job_health_grace_seconds"
WATCHED = f"""\
              max by {SLOT} ({WINDOW})
                <= on {SLOT}
              (
                min by {SLOT} ({ELAPSED})
                  - on {SLOT}
                max by {SLOT} ({GRACE})
              )
"""

# The rule of the stuck job, its parts letter for letter.

STUCK_AFTER = "gpuwarden_job_stuck_after_seconds"
STUCK_STILL = "gpuwarden_job_stuck_still_seconds"
UNMOVED = "gpuwarden_container_unmoved_seconds"
STUCK_BEAT = f"""\
              min by {SLOT} ({BEAT_AGE})
                >=
              max by {SLOT} ({STUCK_AFTER})
"""
STUCK_BEAT_BACKWARDS = f"""\
              max by {SLOT} ({STUCK_AFTER})
                <=
              min by {SLOT} ({BEAT_AGE})
"""
STUCK_STILLNESS = f"""\
            and on {SLOT} (
              max by {SLOT} ({STUCK_STILL})
{link(UNMOVED)}"""


STUCK_MUTANTS: Final = [
    *of(
        STUCK,
        STUCK_BEAT,
        ("the beat must be older than the limit", ">=", ">"),
        ("the beat is compared the wrong way round", ">=", "<="),
        ("the beat compares 600 s whatever is set", f"({STUCK_AFTER})", f"({STUCK_AFTER} * 0 + 600)"),
        ("the beat compares the shortest limit", "max by", "min by"),
        ("the beat compares its greatest age", "min by", "max by"),
        ("the beat is joined without aggregation", f"min by {SLOT} ({BEAT_AGE})", BEAT_AGE),
        ("the beat joins a limit without aggregation", f"max by {SLOT} ({STUCK_AFTER})", STUCK_AFTER),
        ("the beat remembers its greatest age", BEAT_AGE, f"max_over_time({BEAT_AGE}[5m])"),
        ("the beat is believed after it is gone", BEAT_AGE, f"last_over_time({BEAT_AGE}[5m])"),
        ("the time in the phase counts instead of the beat", BEAT_AGE, "gpuwarden_job_phase_age_seconds"),
        ("the stall's silence is the limit", STUCK_AFTER, TIMEOUT),
        ("the value is the limit", STUCK_BEAT, STUCK_BEAT_BACKWARDS),
        ("the beat is not told apart by host", SLOT, "(worker, container)"),
        ("the beat is not told apart by worker", SLOT, "(host, container)"),
        ("the beat is not told apart by container", SLOT, "(host, worker)"),
    ),
    *of_link(link(UNMOVED), "stillness", UNMOVED, BEAT_AGE, rules=STUCK),
    *of(
        STUCK,
        STUCK_STILLNESS,
        ("stillness accuses by itself", f"and on {SLOT}", f"or on {SLOT}"),
        ("stillness excuses", f"and on {SLOT}", f"unless on {SLOT}"),
        ("stillness compares the shortest limit", "max by", "min by"),
        ("stillness compares 580 s whatever is set", f"({STUCK_STILL})", f"({STUCK_STILL} * 0 + 580)"),
        ("stillness joins a limit without aggregation", f"max by {SLOT} ({STUCK_STILL})", STUCK_STILL),
        ("stillness accuses the worker's namesakes on other hosts", f"and on {SLOT}", "and on (worker, container)"),
        ("stillness accuses the container's other workers", f"and on {SLOT}", "and on (host, container)"),
        ("stillness accuses the worker in its other containers", f"and on {SLOT}", "and on (host, worker)"),
    ),
    *of_identity(STUCK, "the silence"),
    *of_file(STUCK, STUCK_STILL),
    *of(
        STUCK,
        RULES[STUCK],
        ("the limit of the beat is believed after it has vanished", STUCK_AFTER, f"last_over_time({STUCK_AFTER}[5m])"),
    ),
    *of_outcome(STUCK, LABELS, "stall"),
    *of(STUCK, "      - alert: GpuwardenJobStuck", ("it goes by another name", "Stuck", "Stalled")),
    *of(STUCK, "/{{ $labels.worker }} is stuck", ("its summary names no worker", "/{{ $labels.worker }}", "")),
    *of(STUCK, "step for {{ $value | humanizeDuration }}, far",
        ("its summary does not say since when", "{{ $value | humanizeDuration }}", "long")),
]  # fmt: skip


HEALTH_MUTANTS: Final = [
    *of(
        HEALTH,
        WATCHED,
        ("the run time must be longer than grace and window", "<=", "<"),
        ("the run time is compared the wrong way round", "<=", ">="),
        ("there is no grace", f"                  - on {SLOT}\n                max by {SLOT} ({GRACE})\n", ""),
        ("the window may lie in the grace", f"- on {SLOT}", f"and on {SLOT}"),
        ("the grace is added to the run time", f"- on {SLOT}", f"+ on {SLOT}"),
        ("the grace is 360 s whatever is set", f"({GRACE})", f"({GRACE} * 0 + 360)"),
        ("the run time compares the shortest limits", "max by", "min by"),
        ("the run time is the longest of two", "min by", "max by"),
        ("the run time is joined without aggregation", f"min by {SLOT} ({ELAPSED})", ELAPSED),
        ("the run time joins a grace without aggregation", f"max by {SLOT} ({GRACE})", GRACE),
        ("the run time joins a window without aggregation", f"max by {SLOT} ({WINDOW})", WINDOW),
        ("the run time remembers its longest", ELAPSED, f"max_over_time({ELAPSED}[5m])"),
        ("the run time is believed after it has vanished", ELAPSED, f"last_over_time({ELAPSED}[5m])"),
        ("the beat's age counts instead of the run time", ELAPSED, "gpuwarden_job_beat_age_seconds"),
        ("the run time is not told apart by host", SLOT, "(worker, container)"),
        ("the run time is not told apart by worker", SLOT, "(host, container)"),
        ("the run time is not told apart by container", SLOT, "(host, worker)"),
    ),
    *of_quiet(HEALTH, quiet_first(), JOB_QUIET, BEAT_AGE),
    *of_identity(HEALTH, "how long it has been quiet"),
    *of_file(HEALTH, WINDOW),
    *of_outcome(HEALTH, LABELS.replace("stall", "health"), "health"),
    *of(HEALTH, "      - alert: GpuwardenJobUnhealthy", ("it goes by another name", "Unhealthy", "Stalled")),
    *of(HEALTH, "/{{ $labels.worker }} does", ("its summary names no worker", "/{{ $labels.worker }}", "")),
    *of(HEALTH, 'sign of life for {{ $value | humanizeDuration }}"',
        ("its summary has raw seconds", " | humanizeDuration", "")),
]  # fmt: skip

# The rules about servers, their parts letter for letter.

ALLOWED = "gpuwarden_server_silence_allowed_seconds"
IO_STILL = "gpuwarden_container_io_still_seconds"
UNANSWERED_FOR = "gpuwarden_server_unanswered_seconds"
HAS_ANSWERED = "gpuwarden_server_answered"
SERVER_INFO = "gpuwarden_server_info"
PLACE = "(host, container)"
UNANSWERED = f"""\
              min by {PLACE} ({UNANSWERED_FOR})
                >=
              max by {PLACE} ({ALLOWED})
"""
UNANSWERED_BACKWARDS = f"""\
              max by {PLACE} ({ALLOWED})
                <=
              min by {PLACE} ({UNANSWERED_FOR})
"""
ANSWERED = f"""\
            and on {PLACE} (
              min by {PLACE} ({HAS_ANSWERED}) == 1
            )
"""
SERVER_GPU = f"""\
            and on {PLACE} (
              max by {PLACE} ({ALLOWED})
                <=
              min by {PLACE} ({GPU_IDLE})
            )
"""
SERVER_RAM = SERVER_GPU.replace(GPU_IDLE, RAM_STILL)
SERVER_IO = SERVER_GPU.replace(GPU_IDLE, IO_STILL)
SERVER_IDENTITY = f"""\
          * on {PLACE} group_left (incarnation)
          topk by {PLACE} (1, timestamp({SERVER_INFO})) ^ 0
"""
SERVER_LABELS = """\
          severity: critical
          remedy: restart_container
          trip: server
"""
NEVER_AFTER = "gpuwarden_server_never_answered_threshold_seconds"
NEVER = f"""\
          min by {PLACE} ({UNANSWERED_FOR})
            >= on (host) group_left ()
          max by (host) ({NEVER_AFTER})
            and on {PLACE}
          max by {PLACE} ({HAS_ANSWERED}) == 0
"""

SILENT_TIMES = "gpuwarden_server_silent_threshold_ratio"
SILENT = f"""\
          min by {PLACE} ({UNANSWERED_FOR})
            >= on {PLACE}
          (
            max by {PLACE} ({ALLOWED})
              * on (host) group_left ()
            max by (host) ({SILENT_TIMES})
          )
            and on {PLACE}
          min by {PLACE} ({HAS_ANSWERED}) == 1
"""
WARNING = """\
        labels:
          severity: warning
        annotations:
          summary: "server {{ $labels.container }} on {{ $labels.host }} has never
""".rstrip("\n")


def of_duration(part: str, name: str, series: str, comparison: str) -> list[Mutant]:
    """The mutants that the four durations of a server have in common. `comparison` is >= or <=."""
    strict, other = comparison[0], {">=": "<=", "<=": ">="}[comparison]
    return of(
        SERVER,
        part,
        (f"{name} must be longer than is allowed", comparison, strict),
        (f"{name} is compared the wrong way round", comparison, other),
        (f"{name} compares the shortest limit", "max by", "min by"),
        (f"{name} compares its longest duration", "min by", "max by"),
        (f"{name} compares its mean duration", "min by", "avg by"),
        (f"{name} compares 120 s whatever is allowed", f"({ALLOWED})", f"({ALLOWED} * 0 + 120)"),
        (f"{name} is joined without aggregation", f"min by {PLACE} ({series})", series),
        (f"{name} joins a limit without aggregation", f"max by {PLACE} ({ALLOWED})", ALLOWED),
        (f"{name} remembers its longest", series, f"max_over_time({series}[5m])"),
        (f"{name} is believed after it has become unknown", series, f"last_over_time({series}[5m])"),
        (f"{name} is the least of all hosts", f"min by {PLACE}", "min by (container)"),
        (f"{name} is the least of its host", f"min by {PLACE}", "min by (host)"),
    )


def of_server_leg(part: str, name: str) -> list[Mutant]:
    """The mutants that the legs joined to the silence have in common."""
    here = f"and on {PLACE}"
    return of(
        SERVER,
        part,
        (f"{name} is not looked at", part, ""),
        (f"{name} accuses by itself", here, f"or on {PLACE}"),
        (f"{name} accuses by its life", here, f"unless on {PLACE}"),
        (f"{name} accuses the container's namesakes on other hosts", here, "and on (container)"),
        (f"{name} accuses the host's other containers", here, "and on (host)"),
    )


SERVER_MUTANTS: Final = [
    *of_duration(UNANSWERED, "the silence", UNANSWERED_FOR, ">="),
    *of(
        SERVER,
        UNANSWERED,
        ("the silence is not compared", ">=", ">= 0 *"),
        ("the value is the limit", UNANSWERED, UNANSWERED_BACKWARDS),
        ("the silence is unknown, and the idle GPU counts", f"({UNANSWERED_FOR})",
         f"({UNANSWERED_FOR} or on {PLACE} {GPU_IDLE})"),
    ),
    *of_duration(SERVER_GPU, "the GPU", GPU_IDLE, "<="),
    *of_server_leg(SERVER_GPU, "the GPU"),
    *of(SERVER, SERVER_GPU, ("the GPU counts as idle where it is unknown", f"({GPU_IDLE})",
                             f"({GPU_IDLE} or on {PLACE} {RAM_STILL})")),
    *of_duration(SERVER_RAM, "the RAM", RAM_STILL, "<="),
    *of_server_leg(SERVER_RAM, "the RAM"),
    *of(SERVER, SERVER_RAM, ("the RAM counts as still where it is unknown", f"({RAM_STILL})",
                             f"({RAM_STILL} or on {PLACE} {GPU_IDLE})")),
    *of_duration(SERVER_IO, "the I/O", IO_STILL, "<="),
    *of_server_leg(SERVER_IO, "the I/O"),
    *of(
        SERVER,
        SERVER_IO,
        ("the I/O counts as still where it is unknown", f"({IO_STILL})", f"({IO_STILL} or on {PLACE} {RAM_STILL})"),
        ("CPU time counts as life", IO_STILL, "gpuwarden_container_work_still_seconds"),
    ),
    *of_server_leg(ANSWERED, "the first answer"),
    *of(
        SERVER,
        ANSWERED,
        ("the first answer is not asked for", "== 1", ">= 0"),
        ("the first answer must be missing", "== 1", "== 0"),
        ("the first answer is believed when one of two says so", "min by", "max by"),
        ("the first answer is joined without aggregation", f"min by {PLACE} ({HAS_ANSWERED})", HAS_ANSWERED),
        ("the first answer is believed after it has become unknown", HAS_ANSWERED,
         f"last_over_time({HAS_ANSWERED}[5m])"),
        ("the first answer of a life before counts", HAS_ANSWERED, f"max_over_time({HAS_ANSWERED}[5m])"),
        ("the first answer counts as given where it is unknown", f"({HAS_ANSWERED})",
         f"({HAS_ANSWERED} or on {PLACE} {SERVER_INFO} * 0 + 1)"),
        ("the first answer is that of any host", f"min by {PLACE}", "min by (container)"),
        ("the first answer is that of the host's others", f"min by {PLACE}", "min by (host)"),
    ),
    *of(
        SERVER,
        SERVER_IDENTITY,
        ("no identity is joined", SERVER_IDENTITY, ""),
        ("the value is not the silence", "*", "+"),
        ("the identity has no incarnation", "(incarnation)", "()"),
        ("the identity is joined without the host", f"* on {PLACE}", "* on (container)"),
        ("the identity is joined without the container", f"* on {PLACE}", "* on (host)"),
        ("a doubled identity fails the rule", f"topk by {PLACE} (1, timestamp({SERVER_INFO})) ^ 0", SERVER_INFO),
        ("two identities are let through", "(1,", "(2,"),
        ("identities are merged to nobody's", f"topk by {PLACE} (1, timestamp({SERVER_INFO}))",
         f"max by {PLACE} (timestamp({SERVER_INFO}))"),
        ("one incarnation is as new as another", f"timestamp({SERVER_INFO})", SERVER_INFO),
        ("one identity is kept of all", f"topk by {PLACE}", "topk"),
        ("one identity is kept of all hosts", f"topk by {PLACE}", "topk by (container)"),
        ("one identity is kept of a host", f"topk by {PLACE}", "topk by (host)"),
        ("the incarnation before is still named", SERVER_INFO, f"last_over_time({SERVER_INFO}[5m])"),
    ),
    *of(
        SERVER,
        RULES[SERVER],
        ("a limit is believed after it has vanished", ALLOWED, f"last_over_time({ALLOWED}[5m])"),
        ("hosts are not told apart anywhere", "host, ", ""),
        ("containers are not told apart anywhere", ", container)", ")"),
    ),
    *of(
        SERVER,
        PATIENCE + SERVER_LABELS,
        ("it waits a minute", "        labels:", "        for: 1m\n        labels:"),
        ("it waits a second", "        labels:", "        for: 1s\n        labels:"),
        ("it lingers a minute", "        labels:", "        keep_firing_for: 1m\n        labels:"),
        ("it lingers a second", "        labels:", "        keep_firing_for: 1s\n        labels:"),
        ("it names another severity", "critical", "warning"),
        ("it names another remedy", "restart_container", "restart_worker"),
        ("it names another trip", "server", "drill"),
        ("it names no remedy", "          remedy: restart_container\n", ""),
    ),
    *of(SERVER, '          runbook_url: "http://127.0.0.1:9836/docs/runbooks/GpuwardenServerUnanswering.md"',
        ("its runbook goes by another name", "runbook_url:", "runbook:")),
    *of(SERVER, ", incarnation {{ $labels.incarnation }},", ("its description names no incarnation",
        ", incarnation {{ $labels.incarnation }},", "")),
    *of(SERVER, "      - alert: GpuwardenServerUnanswering", ("it goes by another name", "Unanswering", "Mute")),
    *of(SERVER, RULES[SERVER].partition("trip: server\n")[2].partition("description:")[0],
        ("its summary names no container", " {{ $labels.container }}", "")),
    *of(SERVER, "probe for {{ $value | humanizeDuration }}, its",
        ("its summary has raw seconds", " | humanizeDuration", "")),
    *of(
        SERVER,
        NEVER,
        ("never: as long as that is not enough", ">=", ">"),
        ("never: any silence is enough", f"({NEVER_AFTER})", f"({NEVER_AFTER} * 0)"),
        ("never: half an hour whatever is set", f"({NEVER_AFTER})", f"({NEVER_AFTER} * 0 + 1800)"),
        ("never: the lesser of two limits counts", f"max by (host) ({NEVER_AFTER})", f"min by (host) ({NEVER_AFTER})"),
        ("never: a limit is believed after it has vanished", NEVER_AFTER, f"last_over_time({NEVER_AFTER}[5m])"),
        ("never: whether it has answered is not looked at", f"max by {PLACE} ({HAS_ANSWERED}) == 0",
         f"max by {PLACE} ({HAS_ANSWERED})"),
        ("never: one that answered is told", "== 0", "== 1"),
        ("never: the longer of two silences counts", "min by", "max by"),
        ("never: one of two that never answered is enough", f"max by {PLACE}", f"min by {PLACE}"),
        ("never: the silence is believed after it has become unknown", UNANSWERED_FOR,
         f"last_over_time({UNANSWERED_FOR}[5m])"),
        ("never: an answer is missed after it has become unknown", HAS_ANSWERED, f"last_over_time({HAS_ANSWERED}[5m])"),
        ("never: namesakes on other hosts are told", f"and on {PLACE}", "and on (container)"),
        ("never: neighbours are told", f"and on {PLACE}", "and on (host)"),
    ),
    *of(SERVER, WARNING, ("never: it is critical", "warning", "critical"),
        ("never: it has a remedy", "warning\n", "warning\n          remedy: restart_container\n")),
    *of(
        SERVER,
        SILENT,
        ("silent: any silence is enough", f"({SILENT_TIMES})", f"({SILENT_TIMES} * 0)"),
        ("silent: what is allowed is enough", f"({SILENT_TIMES})", f"({SILENT_TIMES} ^ 0)"),
        ("silent: ten times whatever is set", f"({SILENT_TIMES})", f"({SILENT_TIMES} * 0 + 10)"),
        ("silent: the lesser of two numbers counts", "max by (host)", "min by (host)"),
        ("silent: a number is believed after it has vanished", SILENT_TIMES, f"last_over_time({SILENT_TIMES}[5m])"),
        ("silent: twenty minutes whatever is allowed", f"({ALLOWED})", f"({ALLOWED} * 0 + 120)"),
        ("silent: the lesser of two limits counts", "max by", "min by"),
        ("silent: whether it has answered is not looked at", "== 1", ">= 0"),
        ("silent: namesakes on other hosts are told", f"and on {PLACE}", "and on (container)"),
        ("silent: neighbours are told", f"and on {PLACE}", "and on (host)"),
        ("silent: a busy GPU keeps it quiet", "== 1\n", f"== 1 and on {PLACE} {GPU_IDLE} >= 120\n"),
    ),
    *of(SERVER, WARNING.replace("has never", "has not"),
        ("silent: it is critical", "warning", "critical"),
        ("silent: it has a remedy", "warning\n", "warning\n          remedy: restart_container\n")),
]  # fmt: skip

CHAIN_MUTANTS: Final = of(
    CHAIN,
    RULES[CHAIN],
    ("it never fires", "vector(1)", "vector(1) == 0"),
    ("it depends on a target", "vector(1)", "up == 1"),
    ("it depends on there being no target", "vector(1)", "absent(up)"),
    ("it fires for each target", "vector(1)", "vector(1) or up"),
    ("it waits a second", "        labels:", "        for: 1s\n        labels:"),
    ("it goes by another name", "Watchdog\n", "Alive\n"),
    ("it names a severity that somebody is called for", "severity: none", "severity: critical"),
    ("it names a remedy", "severity: none\n", "severity: none\n          remedy: restart_worker\n"),
    ("its runbook goes by another name", "runbook_url:", "runbook:"),
    ("it has no summary", "summary:", "title:"),
)

BRAKE_OF: Final = "max by (host) (gpuwarden_remediator_brake_latched) == 1"
SILENT_AFTER: Final = "gpuwarden_remediator_executor_silent_after_seconds"
BEAT_OF: Final = f"""\
          max by (host) (gpuwarden_remediator_executor_beat_age_seconds)
            > on (host)
          max by (host) ({SILENT_AFTER})
"""
OVERDUE_AFTER: Final = "gpuwarden_remediator_intent_overdue_after_seconds"
AGE_OF: Final = f"""\
          max by (host, kind, stage) (gpuwarden_remediator_intent_age_seconds)
            > on (host) group_left ()
          max by (host) ({OVERDUE_AFTER})
"""
REFUSED_OF: Final = "max by (host) (gpuwarden_remediator_quarantines_refused) > 0\n        for: 1m\n"
LATE: Final = (
    "        # Longer than between two scrapes a minute apart, of which one comes late: "
    "a scrape that failed is no news.\n"
)
PAGE_OF: Final = """\
          min by (host) (
            up{job="gpuwarden-remediator"} == 0
              or
            {__name__=~"up|gpuwarden_remediator_ledger_up"} == 0
              and on (host, job, instance)
            gpuwarden:remediator_target:info == 1
          )
"""
TARGET_OF: Final = """\
          (
            group by (host, job, instance) (last_over_time(gpuwarden_remediator_ledger_up[10m]))
              or
            last_over_time(gpuwarden:remediator_target:info[1h])
              * on (host, job, instance)
            (min by (host, job, instance) (min_over_time(up[10m])) < bool 1)
          )
            and on (host, job, instance)
          up
"""

REMEDIATOR_MUTANTS: Final = [
    *of(
        REMEDIATOR,
        BRAKE_OF,
        ("the brake: it never fires", "== 1", "== 2"),
        ("the brake: one that is not latched is told", "== 1", ">= 0"),
        ("the brake: hosts are not told apart", "by (host) ", ""),
        ("the brake: the one of two that does not tell counts", "max", "min"),
        ("the brake: each webhook tells", "by (host)", "by (host, instance)"),
        ("the brake: what nobody tells any more is believed", "gpuwarden_remediator_brake_latched",
         "last_over_time(gpuwarden_remediator_brake_latched[5m])"),
    ),
    *of(
        REMEDIATOR,
        BEAT_OF,
        ("the executor: at the limit already", ">", ">="),
        ("the executor: 60 s whatever is set", f"({SILENT_AFTER})", f"({SILENT_AFTER} * 0 + 60)"),
        ("the executor: the lesser of two limits counts", f"max by (host) ({SILENT_AFTER})",
         f"min by (host) ({SILENT_AFTER})"),
        ("the executor: a limit is believed after it has vanished", SILENT_AFTER,
         f"last_over_time({SILENT_AFTER}[5m])"),
        ("the executor: hosts are not told apart", "by (host) ", ""),
        ("the executor: the younger of two signs of life counts", "max by (host) (gpuwarden_remediator_executor_beat",
         "min by (host) (gpuwarden_remediator_executor_beat"),
        ("the executor: each webhook tells", "by (host)", "by (host, instance)"),
        ("the executor: what nobody tells any more is believed", "gpuwarden_remediator_executor_beat_age_seconds",
         "last_over_time(gpuwarden_remediator_executor_beat_age_seconds[5m])"),
    ),
    *of(
        REMEDIATOR,
        PAGE_OF,
        ("the page: one that is there is told", 'remediator"} == 0', 'remediator"} == 1'),
        ("the page: one that is there is told, of another job", '_up"} == 0', '_up"} == 1'),
        ("the page: hosts are not told apart", "by (host) ", ""),
        ("the page: the ledger is not asked for", '"up|gpuwarden_remediator_ledger_up"}', '"up"}'),
        ("the page: one that never answered is not told", 'up{job="gpuwarden-remediator"} == 0',
         'gpuwarden_remediator_ledger_up{job="gpuwarden-remediator"} == 0'),
        ("the page: only the ledger is asked for, of another job", '"up|gpuwarden_remediator_ledger_up"}',
         '"gpuwarden_remediator_ledger_up"}'),
        ("the page: every target counts", '{job="gpuwarden-remediator"}', ""),
        ("the page: a job of another name does not count", "or\n", "unless\n"),
        ("the page: each target of a job counts that has one", "(host, job, instance)", "(host, job)"),
        ("the page: each job of a target counts that has one", "(host, job, instance)", "(host, instance)"),
        ("the page: another host's target counts", "(host, job, instance)", "(job, instance)"),
    ),
    *of(
        REMEDIATOR,
        TARGET_OF,
        ("whose target: only while it answers", "or\n", "unless\n"),
        ("whose target: it is forgotten early", "1h", "50m"),
        ("whose target: it is known for longer", "1h", "2h"),
        ("whose target: who left is not forgotten", ")\n            and on (host, job, instance)\n          up", ")"),
        ("whose target: another program's for ever", "min_over_time(up[10m])", "up * 0"),
        ("whose target: not a target that answers", "min by (host, job, instance) (min_over_time(up[10m]))", "up"),
        ("whose target: any that there is", "gpuwarden_remediator_ledger_up[", "up["),
    ),
    *of(
        REMEDIATOR,
        AGE_OF,
        ("an intent: at the limit already", ">", ">="),
        ("an intent: 900 s whatever is set", f"({OVERDUE_AFTER})", f"({OVERDUE_AFTER} * 0 + 900)"),
        ("an intent: the lesser of two limits counts", f"max by (host) ({OVERDUE_AFTER})",
         f"min by (host) ({OVERDUE_AFTER})"),
        ("an intent: a limit is believed after it has vanished", OVERDUE_AFTER, f"last_over_time({OVERDUE_AFTER}[5m])"),
        ("an intent: stages are not told apart", "(host, kind, stage)", "(host, kind)"),
        ("an intent: the younger of two counts", "max by (host, kind", "min by (host, kind"),
        ("an intent: each webhook tells", "(host, kind, stage)", "(host, kind, stage, instance)"),
        ("an intent: what is owed no more is believed", "gpuwarden_remediator_intent_age_seconds",
         "last_over_time(gpuwarden_remediator_intent_age_seconds[5m])"),
    ),
    *of(
        REMEDIATOR,
        REFUSED_OF,
        ("a quarantine: none that is refused is told", "> 0", ">= 0"),
        ("a quarantine: one that is refused is not enough", "> 0", "> 1"),
        ("a quarantine: hosts are not told apart", "by (host) ", ""),
        ("a quarantine: the less of two counts", "max", "min"),
        ("a quarantine: what nobody tells any more is believed", "gpuwarden_remediator_quarantines_refused",
         "last_over_time(gpuwarden_remediator_quarantines_refused[5m])"),
        ("a quarantine: at once", "        for: 1m\n", ""),
        ("a quarantine: a little early", "1m", "45s"),
        ("a quarantine: a little late", "1m", "75s"),
    ),
    *of(
        REMEDIATOR,
        f"{PAGE_OF}{LATE}        for: 150s\n",
        ("the page: at once", "        for: 150s\n", ""),
        ("the page: a little early", "150s", "135s"),
        ("the page: a little late", "150s", "165s"),
    ),
    *of(REMEDIATOR, RULES[REMEDIATOR], ("all: nobody is called", "severity: critical", "severity: warning")),
]  # fmt: skip

# The rule about silent hosts.

BOUND = "(max(gpuwarden_remediator_node_lost_after_seconds) + 10)"
HEARD = """\
          max by (host) (
            max_over_time(((max by (host) (timestamp(gpuwarden_exporter_info)) > time() - 150) * 0 + time())[2m:10s])
          )
          or
          last_over_time(gpuwarden:host_heard:timestamp_seconds[1h]) > time() - 3600
          or
          # Who is lost stays so until they are heard of, or until no target of them is named.
          last_over_time(gpuwarden:host_lost:timestamp_seconds[1h])
            and on (host)
          up{host!=""}
"""
NOBODY = """\
          max_over_time(
            ((absent(gpuwarden_exporter_info) or absent_over_time(gpuwarden_exporter_info[75s])) * 0 + time())[2m:10s]
          )
          or
          last_over_time(gpuwarden:nobody_heard:timestamp_seconds[1h]) > time() - 3600
"""
SILENCE = """\
            (time() - gpuwarden:host_heard:timestamp_seconds)
              >= on () group_left ()
            (max(gpuwarden_remediator_node_lost_after_seconds) + 10)
          )
"""
BLIND = """\
          unless on () (
            time() - gpuwarden:nobody_heard:timestamp_seconds
              < on ()
            (max(gpuwarden_remediator_node_lost_after_seconds) + 10)
          )
"""
FEWER = """\
          unless on () (
            count(gpuwarden:host_missed:timestamp_seconds unless on (host) gpuwarden:host_told:timestamp_seconds)
              > on ()
            count(max by (host) (gpuwarden_exporter_info))
          )
"""
MISSED = """\
          gpuwarden:host_heard:timestamp_seconds > time() - 3600
            unless on (host)
          gpuwarden_exporter_info
            unless on (host) (
              (time() - gpuwarden:host_heard:timestamp_seconds)
                >= on () group_left ()
              (max(gpuwarden_remediator_node_lost_after_seconds) + 10)
                unless on (host)
              up{host!=""}
            )
"""
TOLD = """\
          (
            gpuwarden:host_missed:timestamp_seconds
              == on (host)
            last_over_time(gpuwarden:host_lost:timestamp_seconds[1h])
          )
            <= on () group_left ()
          (
            min(
              gpuwarden:host_missed:timestamp_seconds
                unless on (host) (
                  gpuwarden:host_missed:timestamp_seconds
                    == on (host)
                  last_over_time(gpuwarden:host_lost:timestamp_seconds[1h])
                )
                or
              vector(time())
            )
              -
            clamp_min(max(gpuwarden_remediator_node_lost_after_seconds) + 10, 75)
          )
"""
UNNAMED = """\
          unless on (host) (
            gpuwarden:host_heard:timestamp_seconds
              unless on (host)
            up{host!=""}
              and on ()
            (
              count(gpuwarden:host_heard:timestamp_seconds unless on (host) gpuwarden_exporter_info)
                > on ()
              count(max by (host) (gpuwarden_exporter_info))
            )
          )
"""

NODE_MUTANTS: Final = [
    *of(
        NODE,
        SILENCE,
        ("a step early", "+ 10", "+ 0"),
        ("a step late", "+ 10", "+ 20"),
        ("only past the bound", ">= on", "> on"),
        ("the least bound counts", "max(gpuwarden_remediator", "min(gpuwarden_remediator"),
        (
            "the bound is believed after it has vanished",
            "(gpuwarden_remediator_node_lost_after_seconds)",
            "(last_over_time(gpuwarden_remediator_node_lost_after_seconds[5m]))",
        ),
        ("the bound is in the rule", BOUND, "vector(190)"),
    ),
    *of(
        NODE,
        HEARD,
        ("hosts are not told apart", "by (host) ", ""),
        ("each exporter of a host counts", "by (host)", "by (host, instance)"),
        ("a host is told of for hours", "3600", "7200"),
        ("a host is told of for minutes", "3600", "600"),
        ("hosts are looked up once a minute", "[2m:10s]", "[2m:1m]"),
        ("what is repeated of a host is heard of it", " > time() - 150", ""),
        ("a host is silent where a scrape was left out", "time() - 150", "time() - 105"),
        ("a host that is lost is forgotten", HEARD.split("          or\n")[2], "          vector(0) > 1\n"),
        ("a host that is lost stays so once it has left", '            and on (host)\n          up{host!=""}\n', ""),
        ("the record does not hold itself", HEARD.split("          or\n")[1], "          vector(0) > 1\n"),
    ),
    *of(
        NODE,
        NOBODY,
        ("it forgets when it was blind", "3600", "120"),
        ("what it repeats of others is seen", " or absent_over_time(gpuwarden_exporter_info[75s])", ""),
        ("it sees nobody where all fail, only later", "absent(gpuwarden_exporter_info) or ", ""),
        ("two minutes without a sample are none", "[75s]", "[5m]"),
        ("a minute between scrapes is a break", "[75s]", "[45s]"),
        ("that it was blind is not held", NOBODY.partition("          or\n")[2], "          vector(0) > 1\n"),
    ),
    *of(
        NODE,
        BLIND,
        ("blind or not", BLIND, ""),
        ("it waits less after it was blind", "+ 10", "- 10"),
        ("it waits longer after it was blind", "+ 10", "+ 30"),
    ),
    *of(
        NODE,
        FEWER,
        ("most of the fleet may be missed", FEWER, ""),
        ("as many seen as missed are too few", "> on", ">= on"),
        (
            "each exporter of a host counts as seen",
            "count(max by (host) (gpuwarden_exporter_info))",
            "count(gpuwarden_exporter_info)",
        ),
    ),
    *of(
        NODE,
        MISSED,
        ("all that ever were count as missed", "            unless on (host)\n          gpuwarden_exporter_info\n", ""),
        ("who is lost is missed for ever", " > time() - 3600", ""),
        ("who left is missed", MISSED[MISSED.index("            unless on (host) (") :], ""),
        ("who left is missed no more at once", "              (max(gpuwarden", "              0 * (max(gpuwarden"),
        ("who is named still is not missed", '                unless on (host)\n              up{host!=""}\n', ""),
    ),
    *of(
        NODE,
        FEWER,
        ("who was told lost hides who is lost later", " unless on (host) gpuwarden:host_told:timestamp_seconds", ""),
    ),
    *of(
        NODE,
        TOLD,
        (
            "who was told lost once is told for good",
            TOLD,
            TOLD.replace("== on (host)\n", "and on (host)\n"),
        ),
        (
            "who fell silent before another was told lost is told of with it",
            "clamp_min(max(gpuwarden_remediator_node_lost_after_seconds) + 10, 75)",
            "0",
        ),
        ("a bound may be shorter than scrapes are apart", "+ 10, 75)", "+ 10, 0)"),
        ("once all who are missed were told lost they count", "                or\n              vector(time())\n", ""),
    ),
    *of(
        NODE,
        UNNAMED,
        ("who left is lost while most left", UNNAMED, ""),
        (
            "who is named is lost only where all who are silent are few",
            '              unless on (host)\n            up{host!=""}\n',
            "",
        ),
        (
            "who left is never lost",
            UNNAMED[UNNAMED.index("              and on ()") : UNNAMED.rindex("          )")],
            "",
        ),
    ),
    *of(
        NODE,
        PATIENCE,
        ("it waits a minute", "        labels:", "        for: 1m\n        labels:"),
        ("it lingers a minute", "        labels:", "        keep_firing_for: 1m\n        labels:"),
    ),
    *of(
        NODE,
        """\
          severity: critical
          remedy: lose_node
          trip: node_lost
""",
        ("it names another severity", "critical", "warning"),
        ("it names another remedy", "lose_node", "restart_worker"),
        ("it names another trip", "trip: node_lost", "trip: drill"),
    ),
    *of(NODE, "          runbook_url:", ("its runbook goes by another name", "runbook_url", "runbook")),
]

# The rules about memory that is shared, their parts letter for letter.

BY_HOW_MUCH: Final = "gpuwarden_container_gpu_memory_over_budget_bytes"
MAY_GO: Final = "gpuwarden_container_recyclable"
FREE_NOW: Final = "gpuwarden_gpu_memory_free_bytes"
FLOOR: Final = "gpuwarden_gpu_memory_floor_bytes"
TIE: Final = "gpuwarden_gpu_memory_tie_bytes"
RETURNING: Final = "gpuwarden_gpu_memory_returning_bytes"
OVER: Final = "gpuwarden:vram_over_budget_while_short:bytes"
OF_EACH: Final = "gpuwarden:vram_victim:bytes"
WAS_NAMED: Final = "gpuwarden:vram_named:timestamp_seconds"
OVER_BUDGET: Final = RULES[VRAM].partition("record: gpuwarden:vram_over")[2].partition("# The one of each GPU")[0]
ONE_OF_EACH: Final = RULES[VRAM].partition("record: gpuwarden:vram_victim")[2].partition("# Who was named last")[0]
WHO_WAS: Final = RULES[VRAM].partition("record: gpuwarden:vram_named")[2].partition("- alert:")[0]
KNOWN_SHORT: Final = """\
            unless on (host, gpu) (
              gpuwarden_gpu_memory_free_bytes >= 0
              and on (host, gpu) gpuwarden_gpu_memory_returning_bytes >= 0
            )
"""
JUST_ONE: Final = """\
topk by (host, container) (
            1,
            timestamp(gpuwarden_container_info) and on (host, container) gpuwarden:vram_victim:bytes
          ) ^ 0
"""
VICTIM_ALERT: Final = RULES[VRAM].partition("alert: GpuwardenVramVictim")[2].partition("# For a person.")[0]
LOW_ALERT: Final = RULES[VRAM].partition("alert: GpuwardenVramLow")[2].partition("# For a person:")[0]
OVER_ALERT: Final = RULES[VRAM].partition("alert: GpuwardenVramOverBudget")[2].partition("- alert:")[0]
INVALID_ALERT: Final = RULES[VRAM].partition("alert: GpuwardenVramBudgetInvalid")[2]

VRAM_MUTANTS: Final = [
    *of(
        VRAM,
        OVER_BUDGET,
        ("over: the more of two figures counts", "min by (host, container, gpu) (\n", f"max by {PLACE[:-1]}, gpu) (\n"),
        ("over: who left while Prometheus was down is named", "unless on (host, job,", "and on (host, job,"),
        ("over: it is believed after it has vanished", BY_HOW_MUCH, f"last_over_time({BY_HOW_MUCH}[5m])"),
        ("over: the most that it was over counts", BY_HOW_MUCH, f"max_over_time({BY_HOW_MUCH}[5m])"),
        ("over: its GPUs are added up", "min by (host, container, gpu) (\n", f"sum by {PLACE} (\n"),
        ("over: whether it may go is not looked at", "== 1", ">= 0"),
        ("over: one of two that lets it go is enough", f"min by {PLACE} ({MAY_GO})", f"max by {PLACE} ({MAY_GO})"),
        ("over: whether it may go is believed after it has vanished", MAY_GO, f"last_over_time({MAY_GO}[5m])"),
        ("over: only those that may not go", "== 1", "== 0"),
        ("over: whether there is room is not looked at", "<\n", "< 1e18 +\n"),
        ("over: only while there is room", "<\n", ">=\n"),
        ("over: at the floor already", "<\n", "<=\n"),
        ("over: the less of two free counts", f"max by (host, gpu) ({FREE_NOW})", f"min by (host, gpu) ({FREE_NOW})"),
        ("over: the greater of two floors counts", f"min by (host, gpu) ({FLOOR})", f"max by (host, gpu) ({FLOOR})"),
        ("over: free memory is believed after it has vanished", FREE_NOW, f"last_over_time({FREE_NOW}[5m])"),
        ("over: the least that was free counts", FREE_NOW, f"min_over_time({FREE_NOW}[5m])"),
        ("over: a floor is believed after it has vanished", FLOOR, f"last_over_time({FLOOR}[5m])"),
        ("over: what is on its way back is not looked at", f"max by (host, gpu) ({RETURNING})",
         f"0 * max by (host, gpu) ({RETURNING})"),
        ("over: what is on its way back is had twice", "+ on (host, gpu)", "+ on (host, gpu) 2 *"),
        ("over: nothing is on its way back while that is unknown", f"max by (host, gpu) ({RETURNING})",
         f"(max by (host, gpu) ({RETURNING}) or max by (host, gpu) ({FREE_NOW}) * 0)"),
        ("over: the less of two on their way back counts", f"max by (host, gpu) ({RETURNING})",
         f"min by (host, gpu) ({RETURNING})"),
        ("over: what is on its way back is believed after it has vanished", RETURNING,
         f"last_over_time({RETURNING}[5m])"),
        ("over: the most that was on its way back counts", RETURNING, f"max_over_time({RETURNING}[5m])"),
        ("over: on any GPU of a host that is short on one", "and on (host, gpu)", "and on (host)"),
        ("over: on any host whose namesake GPU is short", "and on (host, gpu)", "and on (gpu)"),
    ),
    *of(
        VRAM,
        ONE_OF_EACH,
        ("victim: nobody stays picked", f"and on (host, container, gpu) topk by (host, gpu) (1, {WAS_NAMED})",
         f"unless on (host, container, gpu) {OVER}"),
        ("victim: whoever was picked stays so, whoever is ahead", "max by (host, gpu) (", "min by (host, gpu) ("),
        ("victim: a tie is no tie", f"min by (host, gpu) ({TIE})", f"0 * min by (host, gpu) ({TIE})"),
        ("victim: a tie is a hair less", ">= on", "> on"),
        ("victim: the wider of two ties counts", f"min by (host, gpu) ({TIE})", f"max by (host, gpu) ({TIE})"),
        ("victim: the one least over goes", "topk by (host, gpu) (\n", "bottomk by (host, gpu) (\n"),
        ("victim: two go", "1,\n", "2,\n"),
        ("victim: one of a host", "topk by (host, gpu) (\n", "topk by (host) (\n"),
        ("victim: one of all hosts' namesakes", "topk by (host, gpu) (\n", "topk by (gpu) (\n"),
        ("victim: who was named before who was named last stays", f"topk by (host, gpu) (1, {WAS_NAMED})", WAS_NAMED),
        ("victim: the picked and another", "or on (host, gpu)", "or on (host, container, gpu)"),
    ),
    *of(
        VRAM,
        WHO_WAS,
        ("named: a scrape that fails ends it", f"{WAS_NAMED} > time()", f"{WAS_NAMED} > 1e18 + time()"),
        ("named: room does not end it", KNOWN_SHORT, ""),
        ("named: free memory that is unknown is told, and ends it", f"{FREE_NOW} >= 0", FREE_NOW),
        ("named: a neighbour of the GPU ends it", "unless on (host, gpu)", "unless on (host)"),
        ("named: a namesake of the GPU ends it", "unless on (host, gpu)", "unless on (gpu)"),
        ("named: what was told of the GPU before ends it", FREE_NOW, f"last_over_time({FREE_NOW}[5m])"),
        ("named: for ever", " > time() - 300", ""),
        ("named: for a scrape less", "300", "285"),
        ("named: for a scrape more", "300", "315"),
    ),
    *of(
        VRAM,
        VICTIM_ALERT,
        ("no incarnation is joined", "(incarnation)", "()"),
        ("the value is not by how much", "* on", "* 0 + on"),
        ("a doubled identity fails the rule", JUST_ONE, "gpuwarden_container_info"),
        ("one incarnation is as new as another", "timestamp(gpuwarden_container_info)", "gpuwarden_container_info"),
        ("two identities are let through", "            1,\n", "            2,\n"),
        ("the incarnation before is still named", "gpuwarden_container_info",
         "last_over_time(gpuwarden_container_info[5m])"),
        ("it waits a minute", "        labels:", "        for: 1m\n        labels:"),
        ("it names another severity", "critical", "warning"),
        ("it names another remedy", "recycle_container", "restart_container"),
        ("it names another trip", "trip: vram", "trip: server"),
        ("its summary has raw bytes", " | humanize1024 }}B more", " }}B more"),
        ("its runbook goes by another name", "runbook_url:", "runbook:"),
    ),
    *of(
        VRAM,
        LOW_ALERT,
        ("low: at the floor already", "<\n", "<=\n"),
        ("low: at once", "        for: 1m\n", ""),
        ("low: a little late", "1m", "90s"),
        ("low: the less of two free counts", f"max by (host, gpu) ({FREE_NOW})", f"min by (host, gpu) ({FREE_NOW})"),
        ("low: the greater of two floors counts", f"min by (host, gpu) ({FLOOR})", f"max by (host, gpu) ({FLOOR})"),
        ("low: it has a remedy", "warning\n", "warning\n          remedy: recycle_container\n"),
    ),
    *of(
        VRAM,
        OVER_ALERT,
        ("over budget: at once", "        for: 10m\n", ""),
        ("over budget: a little early", "10m", "9m"),
        ("over budget: the more of two figures counts", "min by", "max by"),
        ("over budget: it is believed after it has vanished", BY_HOW_MUCH, f"last_over_time({BY_HOW_MUCH}[5m])"),
        ("over budget: it has a remedy", "warning\n", "warning\n          remedy: recycle_container\n"),
    ),
    *of(
        VRAM,
        INVALID_ALERT,
        ("invalid: it never fires", "== 1", "== 0"),
        ("invalid: it is believed after it was mended", "gpuwarden_container_gpu_memory_budget_invalid",
         "last_over_time(gpuwarden_container_gpu_memory_budget_invalid[5m])"),
        ("invalid: it has a remedy", "warning\n", "warning\n          remedy: recycle_container\n"),
    ),
]  # fmt: skip

MISSING = "gpuwarden_container_gpu_attribution_missing"
ATTRIBUTION_MUTANTS: Final = of(
    ATTRIBUTION,
    RULES[ATTRIBUTION],
    ("it fires for what can be told", "== 1", "== 0"),
    ("it fires at once", "        for: 10m\n", ""),
    ("it fires a little early", "for: 10m", "for: 9m30s"),
    ("it fires a little late", "for: 10m", "for: 10m30s"),
    ("it goes on after it can be told", "for: 10m\n", "for: 10m\n        keep_firing_for: 1m\n"),
    ("it remembers a moment in which it could not", MISSING, f"max_over_time({MISSING}[5m])"),
    ("it is believed after it has vanished", MISSING, f"last_over_time({MISSING}[5m])"),
    ("the worse of two exporters counts", "min by", "max by"),
    ("every exporter is told of", f"min by (host, container, gpu) ({MISSING})", MISSING),
    ("hosts are not told apart", "(host, container, gpu)", "(container, gpu)"),
    ("containers are not told apart", "(host, container, gpu)", "(host, gpu)"),
    ("GPUs are not told apart", "(host, container, gpu)", "(host, container)"),
    ("it names another severity", "severity: warning", "severity: critical"),
    ("it has a remedy", "warning\n", "warning\n          remedy: restart_container\n"),
    ("its runbook goes by another name", "runbook_url:", "runbook:"),
)
# The rule about items that fail.

FAILED: Final = "gpuwarden_queue_run_items_failed"
DONE: Final = "gpuwarden_queue_run_items_done"
ACTIVATION: Final = "max(gpuwarden_remediator_wrangle_activation_items)"
TOO_MANY: Final = """\
                min by (run, worker_host, worker) (gpuwarden_queue_run_items_failed)
                  > on () group_left ()
                max(gpuwarden_remediator_wrangle_activation_items)
"""
NONE_DONE: Final = """\
              and on (run, worker_host, worker) (
                max by (run, worker_host, worker) (gpuwarden_queue_run_items_done) == 0
              ),
"""
EACH_WORKER: Final = NONE_DONE.strip().partition(" (gpuwarden")[0]

WRANGLING_MUTANTS: Final = [
    *of(
        WRANGLING,
        TOO_MANY,
        ("the fifth is one too many", "> on", ">= on"),
        ("the count is in the rule", ACTIVATION, "vector(5)"),
        ("the least of two bounds counts", "max(gpuwarden_remediator", "min(gpuwarden_remediator"),
        ("a bound is believed after it has vanished", "(gpuwarden_remediator_wrangle_activation_items)",
         "(last_over_time(gpuwarden_remediator_wrangle_activation_items[5m]))"),
        ("whoever tells the most is believed", "min by", "max by"),
        ("hosts that tell of one queue are added up", "min by", "sum by"),
        ("what failed is believed after it has vanished", FAILED, f"last_over_time({FAILED}[5m])"),
        ("runs are not told apart", "(run, worker_host, worker)", "(worker_host, worker)"),
        ("hosts are not told apart", "(run, worker_host, worker)", "(run, worker)"),
        ("workers are not told apart", "(run, worker_host, worker)", "(run, worker_host)"),
    ),
    *of(
        WRANGLING,
        NONE_DONE,
        ("one that is done clears nobody", NONE_DONE, "              ,\n"),
        ("who is not known to have finished one has finished none", NONE_DONE,
         NONE_DONE.replace("and on", "unless on").replace("== 0", "> 0")),
        ("whoever tells the least that is done is believed", "max by", "min by"),
        ("what is done is believed after it has vanished", DONE, f"last_over_time({DONE}[5m])"),
        ("what others have done clears it", EACH_WORKER, f"and on (run) (\n{' ' * 16}max by (run)"),
        ("what it has done of another run clears it", EACH_WORKER,
         f"and on (worker_host, worker) (\n{' ' * 16}max by (worker_host, worker)"),
        ("what its namesake elsewhere has done counts", EACH_WORKER,
         f"and on (run, worker) (\n{' ' * 16}max by (run, worker)"),
    ),
    *of(
        WRANGLING,
        RULES[WRANGLING],
        ("it names the host that tells", '"worker_host", "(.+)"', '"instance", "(.+)"'),
        ("each series of it is an alert", "max by (host, worker, run)", "max by (host, worker, run, worker_host)"),
        ("it names no run", "max by (host, worker, run)", "max by (host, worker)"),
        ("it names no worker", "max by (host, worker, run)", "max by (host, run)"),
    ),
    *of(
        WRANGLING,
        PATIENCE,
        ("it waits a minute", "        labels:", "        for: 1m\n        labels:"),
        ("it lingers a minute", "        labels:", "        keep_firing_for: 1m\n        labels:"),
    ),
    *of(
        WRANGLING,
        """\
          severity: critical
          remedy: wrangle
          trip: items
""",
        ("it names another severity", "critical", "warning"),
        ("it names another remedy", "wrangle", "restart_worker"),
        ("it names another trip", "trip: items", "trip: drill"),
    ),
    *of(WRANGLING, "          runbook_url:", ("its runbook goes by another name", "runbook_url", "runbook")),
]  # fmt: skip

# The rule about jobs of which a GPU is lost. It is nearly made of the parts of the others.

LOST = "gpuwarden_job_quiet_gpu_lost_seconds"
LOST_WINDOW = f"            max by {SLOT} ({WINDOW})\n"
CONTRADICTED = f"            unless on (host, container) {GPU_IDLE} >= 0\n"

GPU_LOST_MUTANTS: Final = [
    *of(
        GPU_LOST,
        LOST_WINDOW,
        ("a loss is measured by the shortest window", "max by", "min by"),
        ("a loss is compared with 300 s whatever is set", f"({WINDOW})", f"({WINDOW} * 0 + 300)"),
        ("the window is joined without aggregation", f"max by {SLOT} ({WINDOW})", WINDOW),
        ("the window is not told apart by host", SLOT, "(worker, container)"),
        ("the window is not told apart by worker", SLOT, "(host, container)"),
        ("the window is not told apart by container", SLOT, "(host, worker)"),
        ("the silence that is allowed is the window", WINDOW, TIMEOUT),
    ),
    *of_quiet(GPU_LOST, quiet_first(LOST), LOST, JOB_QUIET),
    *of(
        GPU_LOST,
        CONTRADICTED,
        ("nobody may contradict", CONTRADICTED, ""),
        ("another host contradicts", "(host, container)", "(container)"),
        ("another container contradicts", "(host, container)", "(host)"),
        ("only a busy GPU contradicts", ">= 0", "== 0"),
        ("who does not know contradicts", " >= 0", ""),
        ("who measured contradicts for good", GPU_IDLE, f"last_over_time({GPU_IDLE}[5m])"),
    ),
    *of_identity(GPU_LOST, "how long it has been quiet"),
    *of_file(GPU_LOST, WINDOW),
    *of_outcome(GPU_LOST, LABELS.replace("stall", "health"), "health"),
    *of(GPU_LOST, "      - alert: GpuwardenJobGpuLost", ("it goes by another name", "JobGpuLost", "GpuLost")),
]

# The rules about GPUs and their driver, for people.


def _alert(name: str) -> str:
    """One alert of the rules for people, letter for letter."""
    text = RULES[FAULTS]
    begins = text.index(f"      - alert: Gpuwarden{name}\n")
    ends = text.find("      - alert:", begins + 1)
    return text[begins:] if ends == -1 else text[begins:ends]


NAMED = 'gpuwarden_gpu_info{gpu!~"unidentified-.*"}'
MISSING, THROTTLED, BLIND, REFUSED = (
    _alert(each) for each in ("GpuMissing", "GpuThrottled", "GpuTelemetryDown", "GpuUnmeasured")
)

LOST_AFTER: Final = "gpuwarden_gpu_lost_threshold_seconds"
_COUNTED: Final = """\
          unless on {by} (
            max by {by} ({series})
              ==
            (
              max by {by} ({series} offset 1h)
              or max by {by} ({series} offset 90m)
              or max by {by} ({series} offset 3h)
            )
            unless on {by} max by {by} ({series} > 0 and resets({series}[1h]) > 0)
          )
"""
_ECC: Final = 'gpuwarden_gpu_ecc_errors_total{error="uncorrected"}'
_SEEN_TO_RISE: Final = f"""\
          and on (host, gpu) (
            max by (host, gpu) ({_ECC} offset 1h)
            or max by (host, gpu) ({_ECC} offset 90m)
            or max by (host, gpu) ({_ECC} offset 3h)
            or max by (host, gpu) ({_ECC} > min_over_time({_ECC}[1h]))
          )
"""
FAULTS_MUTANTS: Final = [
    *of(
        FAULTS,
        f"""\
          min by (host, gpu) (gpuwarden_gpu_lost_seconds)
            >= on (host) group_left ()
          max by (host) ({LOST_AFTER})
""",
        ("lost: one of two exporters suffices", "min by", "max by"),
        ("lost: it must be lost for longer than a minute", ">=", ">"),
        ("lost: it is told at once", f"({LOST_AFTER})", f"({LOST_AFTER} * 0)"),
        ("lost: a minute whatever is set", f"({LOST_AFTER})", f"({LOST_AFTER} * 0 + 60)"),
        ("lost: the lesser of two limits counts", f"max by (host) ({LOST_AFTER})", f"min by (host) ({LOST_AFTER})"),
        ("lost: a limit is believed after it has vanished", LOST_AFTER, f"last_over_time({LOST_AFTER}[5m])"),
        ("lost: hosts are not told apart", "(host, gpu)", "(gpu)"),
        ("lost: GPUs are not told apart", "(host, gpu)", "(host)"),
        ("lost: it is believed after its target has vanished", "(gpuwarden_gpu_lost_seconds)",
         "(last_over_time(gpuwarden_gpu_lost_seconds[5m]))"),
    ),
    *of(
        FAULTS,
        MISSING,
        ("missing: ten minutes ago is not looked at", f"{NAMED} offset 10m\n            or ", ""),
        ("missing: an hour ago is not looked at", f"            or {NAMED} offset 1h\n", ""),
        ("missing: three hours ago are not looked at", f"            or {NAMED} offset 3h\n", ""),
        ("missing: what has no name is missed", NAMED, "gpuwarden_gpu_info"),
        ("missing: what is there is missed", "          unless on (host, gpu) gpuwarden_gpu_info\n", ""),
        ("missing: a vanished target is told", "          and on (host) gpuwarden_exporter_info\n", ""),
        ("missing: a source that fails is none", "== 0)", "== 2)"),
        ("missing: GPUs are not told apart", "unless on (host, gpu) gpuwarden_gpu_info\n",
         "unless on (host) gpuwarden_gpu_info\n"),
        ("missing: it is told at once", "        for: 5m\n", ""),
    ),
    *of(
        FAULTS,
        "          unless on (host, gpu) (gpuwarden_gpu_mig_info offset 10m",
        ("missing: instances are missed", "gpuwarden_gpu_mig_info offset 10m", "vector(0) > 1"),
    ),
    *[
        mutant
        for what, by, series in (
            ("XID", "(host, gpu, xid)", "gpuwarden_gpu_xid_errors_total"),
            ("ECC", "(host, gpu)", 'gpuwarden_gpu_ecc_errors_total{error="uncorrected"}'),
            ("calls", "(host, collector)", "gpuwarden_driver_processes_killed_total"),
        )
        for mutant in of(
            FAULTS,
            _COUNTED.format(by=by, series=series),
            (f"{what}: what was is told for ever", f"unless on {by} (\n", f"or on {by} (\n"),
            (f"{what}: it is told for another time", "offset 1h", "offset 11h"),
            (f"{what}: a restart of the exporter hides what follows", "              ==", "              <="),
            (f"{what}: what is old is told after a gap", f"              or max by {by} ({series} offset 90m)\n", ""),
            (f"{what}: what is old is told where many are missing", f"or max by {by} ({series} offset 3h)", ""),
            (f"{what}: as much as before a restart is not told", " > 0 and resets", " < 0 and resets"),
            (f"{what}: another exporter's restart tells what is old", f"{series} > 0 and resets", "resets"),
        )
    ],
    *of(
        FAULTS,
        _SEEN_TO_RISE,
        ("ECC: what it had when it was first seen is told", _SEEN_TO_RISE, ""),
        ("ECC: a first error is told an hour late", " > min_over_time", " < min_over_time"),
    ),
    *of(
        FAULTS,
        "max by (host, gpu, xid) (gpuwarden_gpu_xid_errors_total) > 0\n",
        ("XID: none at all is told", "> 0", ">= 0"),
        ("XID: GPUs are not told apart", "(host, gpu, xid)", "(host, xid)"),
    ),
    *of(
        FAULTS,
        "          and on (host, xid) gpuwarden_gpu_xid_fatal_info\n",
        ("XID: every number is told", "          and on (host, xid) gpuwarden_gpu_xid_fatal_info\n", ""),
        ("XID: what is fatal elsewhere is told", "(host, xid)", "(xid)"),
        ("XID: what is not fatal is told", "(host, xid)", "(host)"),
        ("XID: what is fatal is not told", "and on", "unless on"),
    ),
    *of(
        FAULTS,
        '          max by (host, gpu) (gpuwarden_gpu_ecc_errors_total{error="uncorrected"}) > 0\n',
        ("ECC: what was corrected is told", 'error="uncorrected"', 'error="corrected"'),
        ("ECC: none at all is told", "> 0", ">= 0"),
        ("ECC: the GPU's whole life counts", "ecc_errors", "ecc_lifetime_errors"),
        ("ECC: it is believed after its target has vanished", '{error="uncorrected"})',
         '{error="uncorrected"} or last_over_time(gpuwarden_gpu_ecc_errors_total{error="uncorrected"}[30m]))'),
    ),
    *of(
        FAULTS,
        "max by (host, gpu) (gpuwarden_gpu_row_remap_failed) == 1",
        ("rows: one that waits has failed", "failed", "pending"),
        ("rows: none has failed", "== 1", "== 0"),
        ("rows: hosts that failed are not told apart", "(host, gpu)", "(gpu)"),
    ),
    *of(
        FAULTS,
        "max by (host, gpu) (gpuwarden_gpu_row_remap_pending) == 1",
        ("rows: one that failed waits", "pending", "failed"),
        ("rows: none waits", "== 1", "== 0"),
        ("rows: hosts that wait are not told apart", "(host, gpu)", "(gpu)"),
    ),
    *of(
        FAULTS,
        THROTTLED,
        *((f"heat: {each} is left out", each, "none") for each in
          ("hw_slowdown|", "hw_thermal", "hw_power_brake", "sw_thermal")),
        *((f"heat: {each} counts too", '=~"', f'=~"{each}|') for each in
          ("gpu_idle", "sw_power_cap", "applications_clocks_setting", "sync_boost", "display_clock_setting")),
        ("heat: the newest sample decides", "avg_over_time", "last_over_time"),
        ("heat: any sample suffices", "avg_over_time", "max_over_time"),
        ("heat: it must be all of the time", ">= 0.5", ">= 0.99"),
        ("heat: a fifth of the time suffices", ">= 0.5", ">= 0.2"),
        ("heat: it is told at once", "        for: 5m\n", ""),
        ("heat: hosts are not told apart", "(host, gpu)", "(gpu)"),
    ),
    *of(
        FAULTS,
        BLIND,
        *((f"telemetry: {each} is left out", each, "none") for each in
          ("source_gpu", "source_drm|", "gpus")),
        ("telemetry: a look that does not come is a source of GPUs that fails, too", "|gpus", "|gpus|sampler"),
        ("telemetry: every source counts", '{collector=~"source_gpu|source_drm|gpus"}', ""),
        ("telemetry: the worse of two exporters counts", "max by", "min by"),
        ("telemetry: the newest sample decides", "avg_over_time", "last_over_time"),
        ("telemetry: one answer in ten minutes suffices", "avg_over_time", "max_over_time"),
        ("telemetry: one failure in ten minutes suffices", "< 0.5", "< 0.9"),
        ("telemetry: it is told at once", "        for: 5m\n", ""),
        ("telemetry: hosts are not told apart", "(host, collector)", "(collector)"),
        ("telemetry: it does not say what fails", "(host, collector)", "(host)"),
    ),
    *of(
        FAULTS,
        REFUSED,
        *((f"refused: {each} is left out", each, "none") for each in
          ('"gpu|', "|utilization|", "|memory|", "|processes|", "|process_utilization")),
        *((f"refused: {each} counts too", f"{each}{after}", f"none{after}") for each, after in
          (("not_supported", "|"), ("not_told", "|"), ("asleep", "|"), ("hung", '"'))),
        ("refused: a sensor counts too", 'figure=~"', 'figure=~"power_watts|'),
        ("refused: any refusal in ten minutes suffices", "> 0.5", "> 0"),
        ("refused: it must be all of the time", "> 0.5", "> 0.9"),
        ("refused: a refusal that is over counts on", ") > 0.5", ") >= 0"),
        ("refused: one of two exporters suffices", "unless on (host, gpu) (\n", "unless on (instance) (\n"),
        ("refused: who tells of another GPU suffices", "unless on (host, gpu) (\n", "unless on (host) (\n"),
        ("refused: an exporter that was refused before is refused", "> 0\n          )", ">= 0\n          )"),
        ("refused: exporters are not told apart", "(host, gpu, job, instance)", "(host, gpu)"),
        ("refused: it is told at once", "        for: 5m\n", ""),
        ("refused: hosts are not told apart", "(host, gpu, figure, reason)", "(gpu, figure, reason)"),
        ("refused: GPUs are not told apart", "(host, gpu, figure, reason)", "(host, figure, reason)"),
        ("refused: it does not say which figure", "(host, gpu, figure, reason)", "(host, gpu, reason)"),
        ("refused: it does not say why", "(host, gpu, figure, reason)", "(host, gpu, figure)"),
    ),
    *of(
        FAULTS,
        "        expr: max by (host, collector) (gpuwarden_driver_processes_abandoned) > 0\n        for: 1m\n",
        ("hangs: none is told", "> 0", ">= 0"),
        ("hangs: it takes two", "> 0", "> 1"),
        ("hangs: it is told at once", "        for: 1m\n", ""),
        ("hangs: hosts are not told apart", "(host, collector)", "(collector)"),
        ("hangs: sources are not told apart", "(host, collector)", "(host)"),
        ("hangs: what was killed hangs", "abandoned", "killed_total"),
    ),
    *of(FAULTS, "          max by (host, collector) (gpuwarden_driver_processes_killed_total) > 0\n",
        ("calls: none is told", "> 0", ">= 0"),
        ("calls: hosts are not told apart", "(host, collector)", "(collector)")),
    *[
        mutant
        for name, severity in (
            ("GpuLost", "critical"), ("GpuMissing", "warning"), ("GpuXid", "critical"),
            ("GpuEccUncorrected", "warning"), ("GpuRowRemapFailed", "critical"), ("GpuRowRemapPending", "warning"),
            ("GpuThrottled", "warning"), ("GpuTelemetryDown", "critical"), ("DriverHung", "critical"),
            ("GpuUnmeasured", "warning"),
            ("DriverCallKilled", "warning"),
        )
        for mutant in of(
            FAULTS,
            _alert(name),
            (f"{name} goes by another name", f"- alert: Gpuwarden{name}\n", f"- alert: Gpuwarden{name}s\n"),
            (f"{name} has another severity", f"severity: {severity}", "severity: none"),
            (f"{name} has no runbook", "runbook_url:", "page:"),
        )
    ],
]  # fmt: skip

_INFO_IS_1: Final = "the value of an info series is 1, so that neither the greatest nor the least of several is another"
_ONLY_THERE: Final = "only whether there is a value is asked, whichever it is"
_MISSED: Final = "gpuwarden:host_missed:timestamp_seconds"
_UNKNOWN: Final = "gpuwarden_gpu_unknown_samples_total{%s}"
_WATCHED: Final = 'figure=~"gpu|utilization|memory|processes|process_utilization", '
_TOLD: Final = 'reason!~"not_supported|not_told|asleep|hung"'
_NOT_ASKED: Final = ("not_supported|", "not_told|", "asleep|", "|hung")
_NO_INSTANCE: Final = "what is aggregated there has no instance any more, or what is made of it next has none"
_NO_TIMESTAMP: Final = "what has vanished has no timestamp either"
_SINGLE: Final = "each of its groups has one series"
_HOLDS_ITSELF: Final = (
    "the record tells itself anew at each evaluation: its ranges tell only where evaluations are more than a minute "
    "apart, or after a Prometheus that was down, and promtool's are neither"
)
_ON_THE_GRID: Final = "what is told is a step of 10 s, and these tests evaluate every 5 s: the second falls between"
_ALIKE: Final = "it is matched, by all labels, with what is of one error only"
_SPINNING: Final = "gpuwarden_gang_rank_spinning_seconds"
_INFOS: Final = '{__name__=~"gpuwarden_(exporter|remediator)_info"}'
_UNCORRECTED: Final = 'gpuwarden_gpu_ecc_errors_total{error="uncorrected"}'
_OF_EITHER: Final = "gpuwarden_gpu_ecc_errors_total{}"
_ONWARD: Final = "when somebody was last heard of never goes back"
_HEARD: Final = "gpuwarden:host_heard:timestamp_seconds"
EQUIVALENT: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            "vram: GpuwardenVramVictim: on (host, container) -> on (container), at its place 2",
            "vram: GpuwardenVramVictim: on (host, container) -> on (host), at its place 2",
            f"vram: GpuwardenVramVictim: {OF_EACH} -> last_over_time({OF_EACH}[5m]), at its place 3",
        ),
        "it spares the join those whom nobody names; of more of them it takes who is named all the same",
    ),
    **dict.fromkeys(
        (
            "gpu: GpuwardenJobGpuLost: 0 -> (-1)",
            "vram: gpuwarden:vram_named:timestamp_seconds: 0 -> (-1), at its place 2",
            "vram: gpuwarden:vram_named:timestamp_seconds: 0 -> (-1), at its place 3",
            "steps: GpuwardenJobSlowed: 0 -> (-1), at its place 8",
        ),
        "it is asked whether it is a number, and none of these is less than 0",
    ),
    **{
        f"{its}: * -> /": _INFO_IS_1
        for its in (
            "stall: GpuwardenJobStalled",
            "shared: GpuwardenSharedJobStalled",
            "health: GpuwardenJobUnhealthy",
            "budget: GpuwardenJobOverBudget",
            "worker: GpuwardenWorkerDead",
            "gone: GpuwardenWorkerGone",
            "server: GpuwardenServerUnanswering",
            "vram: GpuwardenVramVictim",
            "gpu: GpuwardenJobGpuLost",
            "stuck: GpuwardenJobStuck",
            "gang: GpuwardenGangStuck",
        )
    },
    **{
        f"{its}: {name} -> last_over_time({name}[5m])": _NO_TIMESTAMP
        for its, name in (
            ("stall: GpuwardenJobStalled", OVERDUE),
            ("shared: GpuwardenSharedJobStalled", OVERDUE),
            ("health: GpuwardenJobUnhealthy", OVERDUE),
            ("budget: GpuwardenJobOverBudget", OVERDUE),
            ("worker: GpuwardenWorkerDead", OVERDUE),
            ("gone: GpuwardenWorkerGone", OVERDUE),
            ("gpu: GpuwardenJobGpuLost", OVERDUE),
            ("stuck: GpuwardenJobStuck", OVERDUE),
            ("steps: GpuwardenJobSlowed", "gpuwarden_job_id"),
        )
    },
    **{
        f"vram: gpuwarden:vram_victim:bytes: by (host, gpu) -> by (host, gpu, instance){place}": _NO_INSTANCE
        for place in ("", ", at its place 2", ", at its place 4")
    },
    **{
        f"vram: {rule}: {record} -> last_over_time({record}[5m]){place}": "only what was recorded just now counts"
        for rule, record, places in (
            ("gpuwarden:vram_victim:bytes", "gpuwarden:vram_over_budget_while_short:bytes", ("", 3, 5)),
            ("gpuwarden:vram_named:timestamp_seconds", "gpuwarden:vram_victim:bytes", ("",)),
            ("GpuwardenVramVictim", "gpuwarden:vram_victim:bytes", ("",)),
            ("GpuwardenVramVictim", "gpuwarden:vram_looked:timestamp_seconds", ("",)),
        )
        for place in (f", at its place {each}" if each else "" for each in places)
    },
    **{
        f"{file}: {rule}: {record} -> last_over_time({record}[5m])": "where it ends, the target is named no more"
        for file, rule, record in (
            ("telemetry", "GpuwardenExporterDown", "gpuwarden:exporter_target:info"),
            ("remediator", "GpuwardenRemediatorDown", "gpuwarden:remediator_target:info"),
        )
    },
    "remediator: GpuwardenRemediatorDown: min -> max": "what is left is 0 each",
    'remediator: GpuwardenIntentOverdue: gpuwarden_remediator_intent_age_seconds{stage="planned"} -> '
    'last_over_time(gpuwarden_remediator_intent_age_seconds{stage="planned"}[5m])': "it is there now, or nothing is",
    "remediator: GpuwardenRemediatorUnreached: count -> sum": _INFO_IS_1,
    "remediator: GpuwardenRemediatorUnreached: max -> min, at its place 2": _ONLY_THERE,
    **{
        f"remediator: GpuwardenUnmended: {change}": "an alert that fires is 1, and of no instance"
        for change in (
            "max -> min",
            "by ({0}) -> by ({0}, instance)".format("host, worker, container, gpu, trip, wedge"),
            "max_over_time -> min_over_time",
        )
    },
    **{
        f"{topic}: gpuwarden:{whose}_target:info: last_over_time -> {other}": "whatever it was, it is a target"
        for topic, whose in (("remediator", "remediator"), ("telemetry", "exporter"))
        for other in ("min_over_time", "max_over_time")
    },
    "vram: gpuwarden:vram_named:timestamp_seconds: 300 -> 299": "these tests evaluate every 15 s: the second falls "
    "between",
    **{
        f"node: gpuwarden:{record}_heard:timestamp_seconds: {change}": why
        for record in ("host", "nobody")
        for change, why in (
            *((each, _HOLDS_ITSELF) for each in ("2m -> 240s", "2m -> 60s", "1h -> 7200s", "1h -> 1800s")),
            ("3600 -> 3599", _ON_THE_GRID),
        )
    },
    **{
        f"node: gpuwarden:host_heard:timestamp_seconds: {change}": why
        for change, why in (
            ("max -> min", _SINGLE),
            ("by (host) -> by (host, instance)", _NO_INSTANCE),
            ("max -> min, at its place 2", _INFO_IS_1),
            (
                "by (host) -> by (host, instance), at its place 2",
                "the newest of its exporters is taken of it, which is when any of them was there",
            ),
        )
    },
    **{
        f"node: gpuwarden:{record}: {change}": why
        for record, change, why in (
            *(
                (f"host_{each}:timestamp_seconds", 'up{host!=""} -> up{}', "there is no host without a name")
                for each in ("heard", "missed")
            ),
            ("host_missed:timestamp_seconds", "3600 -> 3599", _ON_THE_GRID),
            (
                "host_lost:timestamp_seconds",
                'ALERTS{alertname="GpuwardenNodeLost", alertstate="firing"} -> ALERTS{alertname="GpuwardenNodeLost"}',
                "it has no `for`, and so is never pending",
            ),
            (
                "host_lost:timestamp_seconds",
                f"{_HEARD} -> last_over_time({_HEARD}[5m])",
                "an alert that fires has that of the evaluation before",
            ),
            *(
                (
                    "host_missed:timestamp_seconds",
                    f"{_HEARD} -> last_over_time({_HEARD}[5m]){place}",
                    "it ends when it is an hour old, and who is so is not missed",
                )
                for place in ("", ", at its place 2")
            ),
        )
    },
    **{
        f"node: gpuwarden:{record}:timestamp_seconds: last_over_time -> {other}{place}": why
        for record, other, place, why in (
            ("host_heard", "max_over_time", "", _ONWARD),
            ("nobody_heard", "max_over_time", "", _ONWARD),
            *(
                (
                    "host_heard",
                    each,
                    ", at its place 2",
                    "what it had when it was lost before is over an hour old by then",
                )
                for each in ("min_over_time", "max_over_time")
            ),
            *(("host_told", "max_over_time", place, _ONWARD) for place in ("", ", at its place 2")),
        )
    },
    "steps: GpuwardenJobSlowed: bool -> nothing": "what is not told counts as shared, which is what 0 says",
    **{
        f"telemetry: GpuwardenScrapeTooSparse: {change}": why
        for change, why in (
            *(
                (each, "600 s over a whole number of scrapes is 75 s, or 86 s")
                for each in ("75 -> 76", "75 -> 76, at its place 2", "< -> <=", "0 -> 1")
            ),
            *(
                (each, "it is asked whether there is any, and of whoever has none in ten minutes nothing is compared")
                for each in (
                    "max -> min, at its place 2",
                    "count_over_time -> sum_over_time, at its place 3",
                    "599999ms -> 1198s, at its place 2",
                )
            ),
        )
    },
    "node: GpuwardenNodeLost: gpuwarden:nobody_heard:timestamp_seconds -> "
    "last_over_time(gpuwarden:nobody_heard:timestamp_seconds[5m])": "it ends when it is an hour old, and excuses for "
    "no longer than the bound, which is 490 s at most",
    "node: GpuwardenNodeLost: count -> sum, at its place 2": _INFO_IS_1,
    "node: GpuwardenNodeLost: max -> min, at its place 3": _INFO_IS_1,
    "node: GpuwardenNodeLost: count -> sum, at its place 4": _INFO_IS_1,
    "node: GpuwardenNodeLost: max -> min, at its place 4": _INFO_IS_1,
    'node: GpuwardenNodeLost: up{host!=""} -> up{}': "there is no host without a name",
    f"node: GpuwardenNodeLost: {_HEARD} -> last_over_time({_HEARD}[5m]), at its place 2": "who is not known any "
    "more is not lost",
    **{
        f"node: gpuwarden:host_told:timestamp_seconds: {change}": why
        for change, why in (
            (f"{_MISSED} -> last_over_time({_MISSED}[5m])", "who is missed no more is not counted anyway"),
            (f"{_MISSED} -> last_over_time({_MISSED}[5m]), at its place 3", "who is missed is so now"),
            *((f"1h -> 7200s{place}", "nobody is missed for longer") for place in ("", ", at its place 2")),
            *((f"75 -> {other}", _ON_THE_GRID) for other in (74, 76)),
        )
    },
    "faults: GpuwardenGpuMissing: max -> min": _INFO_IS_1,
    **{
        f"faults: {its}: {change}, at its place {place}": _ONLY_THERE
        for its, by, places in (
            ("GpuwardenGpuXid", "host, gpu, xid", (6,)),
            ("GpuwardenGpuEccUncorrected", "host, gpu", (6, 7, 8, 9, 10)),
            ("GpuwardenDriverCallKilled", "host, collector", (6,)),
        )
        for change in ("max -> min", f"by ({by}) -> by ({by}, instance)")
        for place in places
    },
    **{
        f"faults: GpuwardenGpuEccUncorrected: {_UNCORRECTED} -> {_OF_EITHER}, at its place {place}": _ALIKE
        for place in (6, 7, 11, 12)
    },
    **{
        f"faults: GpuwardenGpuUnmeasured: {_UNKNOWN % (_WATCHED + _TOLD)} -> {_UNKNOWN % wider}{place}": "what one "
        "of two operands has alone is divided by nothing, or divides nothing"
        for wider in (_WATCHED.rstrip(", "), _TOLD, *(_WATCHED + _TOLD.replace(each, "") for each in _NOT_ASKED))
        for place in ("", ", at its place 2")
    },
    **{
        f"gang: GpuwardenGangStuck: {change}": why
        for change, why in (
            ("by (gang) -> by (gang, instance), at its place 2", _NO_INSTANCE),
            ("count -> sum", "a group is worth 1"),
            (
                f"{_SPINNING} -> last_over_time({_SPINNING}[5m])",
                "who is not known to spin now is not let through by the last leg",
            ),
            (
                f"{_SPINNING} -> last_over_time({_SPINNING}[5m]), at its place 2",
                _NO_TIMESTAMP,
            ),
        )
    },
    "wrangling: GpuwardenItemsFailing: max -> min": _SINGLE,
    "wrangling: GpuwardenItemsFailing: by (host, worker, run) -> by (host, worker, run, instance)": _NO_INSTANCE,
    "chain: GpuwardenWatchdog: 1 -> 2": "what always fires does not tell its value",
    "chain: GpuwardenWatchdog: 1 -> 0": "what always fires does not tell its value",
    "evaluation: GpuwardenRuleFailing: sum -> max": "of what never falls, any is more than none",
    "evaluation: GpuwardenRulesLate: sum -> max": "likewise",
    'telemetry: GpuwardenTelemetryStale: gpuwarden_collector_success{collector="sampler"} -> '
    "gpuwarden_collector_success{}": "an exporter whose newest look is too old tells of nothing else",
    "telemetry: GpuwardenWorkerUnseen: max -> min": _INFO_IS_1,
    "telemetry: GpuwardenScrapeTooSparse: count_over_time -> sum_over_time, at its place 2": _ONLY_THERE,
    "telemetry: GpuwardenWorkerUnseen: by (host) -> by (host, instance)": _ONLY_THERE,
    "telemetry: GpuwardenHostMisnamed: max -> min": _INFO_IS_1,
    "telemetry: GpuwardenHostMisnamed: max -> min, at its place 2": _ONLY_THERE,
    "telemetry: GpuwardenHostMisnamed: by (nodename) -> by (nodename, instance)": _ONLY_THERE,
    f"telemetry: GpuwardenHostMisnamed: {_INFOS} -> last_over_time({_INFOS}[5m])": (
        "who is told of lately and not now is on neither side, and it names each by one name alone"
    ),
    **{
        f"steps: GpuwardenJobSlowed: {change}": why
        for change, why in (
            ("max -> min, at its place 4", _ONLY_THERE),
            ("max -> min, at its place 6", _ONLY_THERE),
            ("by (host, container) -> by (host, container, instance)", _NO_INSTANCE),
            ("by (host, container) -> by (host, container, instance), at its place 2", _NO_INSTANCE),
            ("by (host, container, gpu) -> by (host, container, gpu, instance)", _NO_INSTANCE),
            ("by (host, gpu) -> by (host, gpu, instance)", _NO_INSTANCE),
            ("* -> /, at its place 4", _INFO_IS_1),
            ("0 -> (-1), at its place 6", "of what is asked whether it is 1, neither 0 nor what is less is"),
            (
                "by (host, worker, container) -> by (host, container), at its place 7",
                "a container with two jobs is let go before",
            ),
        )
    },
}
"""Generated mutants that no test can tell from the rule, and why."""

MUTANTS: Final[list[Mutant | Planted]] = [
    *FAULTS_MUTANTS,
    *GPU_LOST_MUTANTS,
    *STALL_MUTANTS,
    *WORKER_MUTANTS,
    *GONE_MUTANTS,
    *BUDGET_MUTANTS,
    *HEALTH_MUTANTS,
    *STUCK_MUTANTS,
    *SERVER_MUTANTS,
    *CHAIN_MUTANTS,
    *REMEDIATOR_MUTANTS,
    *NODE_MUTANTS,
    *VRAM_MUTANTS,
    *ATTRIBUTION_MUTANTS,
    *WRANGLING_MUTANTS,
    *(each for rules in BY_WORD for each in planted(ALERTS / rules) if each.name not in EQUIVALENT),
]
