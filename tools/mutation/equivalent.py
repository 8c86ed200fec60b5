"""Generated mutants that no test can distinguish from the rule, with the reason. They are not counted."""

from typing import Final

_OVERDUE: Final = "gpuwarden_job_overdue_id"
_INFO_IS_1: Final = "an info series is always 1"
_ONLY_PRESENCE: Final = "only the presence of a value matters"
_UNKNOWN: Final = "gpuwarden_gpu_unknown_samples_total{%s}"
_WATCHED: Final = 'field=~"gpu|utilization|memory|processes|process_utilization", '
_READABLE: Final = 'reason!~"not_supported|not_told|asleep|hung"'
_REASONS: Final = ("not_supported|", "not_told|", "asleep|", "|hung")
_NO_INSTANCE: Final = "the label instance was removed before, or is removed next"
_NO_TIMESTAMP: Final = "a vanished series has no timestamp"
_SINGLE: Final = "each group has one series"
_ONE_ERROR: Final = "the other operand selects one error, matched by all labels"
_SPINNING: Final = "gpuwarden_gang_rank_spinning_seconds"
_INFOS: Final = '{__name__=~"gpuwarden_(exporter|remediator)_info"}'
_UNCORRECTED: Final = 'gpuwarden_gpu_ecc_errors_total{error="uncorrected"}'
_ANY_ERROR: Final = "gpuwarden_gpu_ecc_errors_total{}"
_OVER_BUDGET: Final = "gpuwarden_container_gpu_memory_over_budget_bytes"
_AND_ACCEPTS_SEVERAL: Final = "`and` accepts several series of one worker"
EQUIVALENT: Final[dict[str, str]] = {
    **{
        f"{its}: by (host, worker, container) -> by (host, worker, container, instance), at its place {place}": (
            _AND_ACCEPTS_SEVERAL
        )
        for its, places in (("gone: GpuwardenWorkerGone", (5, 6)), ("worker: GpuwardenWorkerDead", (4,)))
        for place in places
    },
    "server: GpuwardenServerHung: by (host, container) -> by (host, container, instance), at its place 3": (
        _AND_ACCEPTS_SEVERAL
    ),
    "vram: GpuwardenVramRecycleDue: by (host, container) -> by (host, container, instance)": _AND_ACCEPTS_SEVERAL,
    **{
        f"vram: GpuwardenVramRecycleDue: {change}": "one side of the join is enough"
        for change in (
            f"{_OVER_BUDGET} -> last_over_time({_OVER_BUDGET}[5m])",
            f"{_OVER_BUDGET} -> last_over_time({_OVER_BUDGET}[5m]), at its place 2",
            "on (host, container) -> on (container), at its place 3",
            "on (host, container) -> on (host), at its place 3",
        )
    },
    **dict.fromkeys(
        (
            "faults: GpuwardenDriverCallKilled: resets -> changes",
            "faults: GpuwardenGpuEccUncorrected: resets -> changes",
            "faults: GpuwardenGpuXid: resets -> changes",
        ),
        "each group has one counter: with the value of an hour ago, it changed since then only by a reset",
    ),
    "telemetry: GpuwardenScrapedTwice: count -> sum": _INFO_IS_1,
    "gang: GpuwardenGangStuck: max -> min": "all ranks of a gang publish the same number",
    **dict.fromkeys(
        (
            "gpu: GpuwardenJobGpuLost: 0 -> (-1)",
            "steps: GpuwardenJobSlow: 0 -> (-1), at its place 9",
        ),
        "the comparison only excludes NaN; no value is below 0",
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
            "server: GpuwardenServerHung",
            "vram: GpuwardenVramRecycleDue",
            "gpu: GpuwardenJobGpuLost",
            "stuck: GpuwardenJobStuck",
            "gang: GpuwardenGangStuck",
        )
    },
    **{
        f"{its}: {name} -> last_over_time({name}[5m])": _NO_TIMESTAMP
        for its, name in (
            ("stall: GpuwardenJobStalled", _OVERDUE),
            ("shared: GpuwardenSharedJobStalled", _OVERDUE),
            ("health: GpuwardenJobUnhealthy", _OVERDUE),
            ("budget: GpuwardenJobOverBudget", _OVERDUE),
            ("worker: GpuwardenWorkerDead", _OVERDUE),
            ("gone: GpuwardenWorkerGone", _OVERDUE),
            ("gpu: GpuwardenJobGpuLost", _OVERDUE),
            ("stuck: GpuwardenJobStuck", _OVERDUE),
            ("steps: GpuwardenJobSlow", "gpuwarden_job_id"),
        )
    },
    **{
        f"{file}: {rule}: {record} -> last_over_time({record}[5m])": "the record ends when the target is removed"
        for file, rule, record in (
            ("telemetry", "GpuwardenExporterDown", "gpuwarden:exporter_target:info"),
            ("remediator", "GpuwardenRemediatorDown", "gpuwarden:remediator_target:info"),
        )
    },
    'remediator: GpuwardenIntentOverdue: gpuwarden_remediator_intent_age_seconds{stage="planned"} -> '
    'last_over_time(gpuwarden_remediator_intent_age_seconds{stage="planned"}[5m])': "present now, or absent",
    "remediator: GpuwardenWebhookNotReceiving: count -> sum": _INFO_IS_1,
    "remediator: GpuwardenWebhookNotReceiving: max -> min, at its place 2": _ONLY_PRESENCE,
    **{
        f"remediator: GpuwardenRemediationOverdue: {change}": "a firing alert is 1 and has no instance"
        for change in (
            "by ({0}) -> by ({0}, instance)".format("host, worker, container, gpu, condition, alert"),
            "max_over_time -> min_over_time",
        )
    },
    **{
        f"{topic}: gpuwarden:{whose}_target:info: last_over_time -> {other}": "any earlier value means a target"
        for topic, whose in (("remediator", "remediator"), ("telemetry", "exporter"))
        for other in ("min_over_time", "max_over_time")
    },
    "steps: GpuwardenJobSlow: bool -> nothing": "an unknown value counts as shared, and so does 0",
    **{
        f"telemetry: GpuwardenScrapeIntervalTooLong: {change}": why
        for change, why in (
            *(
                (each, "600 s over a whole number of scrapes is 75 s, or 86 s")
                for each in ("75 -> 76", "75 -> 76, at its place 2", "< -> <=", "0 -> 1")
            ),
            *(
                (each, "only the presence matters; without samples in ten minutes nothing is compared")
                for each in (
                    "count_over_time -> sum_over_time, at its place 3",
                    "599999ms -> 1198s, at its place 2",
                )
            ),
        )
    },
    **{
        f"faults: {its}: {change}, at its place {place}": _ONLY_PRESENCE
        for its, by, places in (
            ("GpuwardenGpuXid", "host, gpu, xid", (6,)),
            ("GpuwardenGpuEccUncorrected", "host, gpu", (6, 7, 8, 9, 10)),
            ("GpuwardenDriverCallKilled", "host, collector", (6,)),
        )
        for change in (f"by ({by}) -> by ({by}, instance)",)
        for place in places
    },
    **{
        f"faults: GpuwardenGpuEccUncorrected: {_UNCORRECTED} -> {_ANY_ERROR}, at its place {place}": _ONE_ERROR
        for place in (6, 7, 11, 12)
    },
    **{
        f"faults: GpuwardenGpuMetricsMissing: {_UNKNOWN % (_WATCHED + _READABLE)} -> {_UNKNOWN % wider}{place}": "a "
        "series of one operand alone gives no result"
        for wider in (
            _WATCHED.rstrip(", "),
            _READABLE,
            *(_WATCHED + _READABLE.replace(each, "") for each in _REASONS),
        )
        for place in ("", ", at its place 2")
    },
    **{
        f"gang: GpuwardenGangStuck: {change}": why
        for change, why in (
            ("by (gang) -> by (gang, instance), at its place 2", _NO_INSTANCE),
            ("count -> sum", "`group` gives 1"),
            (
                f"{_SPINNING} -> last_over_time({_SPINNING}[5m])",
                "the last operand excludes ranks without a current value",
            ),
            (
                f"{_SPINNING} -> last_over_time({_SPINNING}[5m]), at its place 2",
                _NO_TIMESTAMP,
            ),
        )
    },
    "wrangling: GpuwardenItemsFailing: max -> min": _SINGLE,
    "wrangling: GpuwardenItemsFailing: by (host, worker, run) -> by (host, worker, run, instance)": _NO_INSTANCE,
    "chain: GpuwardenDrill: by (host, drill) -> by (host, drill, instance)": _NO_INSTANCE,
    "chain: GpuwardenDrill: by (nodename, drill) -> by (nodename, drill, instance)": _NO_INSTANCE,
    "chain: GpuwardenDrill: max -> min": _SINGLE,
    "chain: GpuwardenWatchdog: 1 -> 2": "the value is not published",
    "chain: GpuwardenWatchdog: 1 -> 0": "the value is not published",
    "evaluation: GpuwardenRuleFailures: sum -> max": "a sum of increases is positive if one is",
    "evaluation: GpuwardenRuleEvaluationsMissed: sum -> max": "a sum of increases is positive if one is",
    'telemetry: GpuwardenTelemetryStale: gpuwarden_collector_success{collector="sampler"} -> '
    "gpuwarden_collector_success{}": "an exporter with an old sample publishes no other collector",
    "telemetry: GpuwardenScrapeIntervalTooLong: count_over_time -> sum_over_time, at its place 2": _ONLY_PRESENCE,
    "telemetry: GpuwardenWorkerNotMonitored: by (host) -> by (host, instance)": _ONLY_PRESENCE,
    "telemetry: GpuwardenHostLabelMismatch: max -> min": _INFO_IS_1,
    "telemetry: GpuwardenHostLabelMismatch: by (nodename) -> by (nodename, instance)": _ONLY_PRESENCE,
    f"telemetry: GpuwardenHostLabelMismatch: {_INFOS} -> last_over_time({_INFOS}[5m])": (
        "a vanished series is on neither side, and each target has one name"
    ),
    **{
        f"steps: GpuwardenJobSlow: {change}": why
        for change, why in (
            ("by (host, container) -> by (host, container, instance)", _NO_INSTANCE),
            ("by (host, container) -> by (host, container, instance), at its place 2", _NO_INSTANCE),
            ("by (host, container, gpu) -> by (host, container, gpu, instance)", _NO_INSTANCE),
            ("by (host, gpu) -> by (host, gpu, instance)", _NO_INSTANCE),
            ("* -> /, at its place 4", _INFO_IS_1),
            ("0 -> (-1), at its place 7", "the comparison is with 1; 0 and -1 differ from it alike"),
            (
                "by (host, worker, container) -> by (host, container), at its place 8",
                "a container with two jobs was excluded before",
            ),
        )
    },
}
