"""Generated mutants that no test can tell from the rule, and why: they are not counted."""

from typing import Final

_OVERDUE: Final = "gpuwarden_job_overdue_id"
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
_OVER_BUDGET: Final = "gpuwarden_container_gpu_memory_over_budget_bytes"
_AND_TAKES_SEVERAL: Final = "`and` takes several series of one worker"
EQUIVALENT: Final[dict[str, str]] = {
    **{
        f"{its}: by (host, worker, container) -> by (host, worker, container, instance), at its place {place}": (
            _AND_TAKES_SEVERAL
        )
        for its, places in (("gone: GpuwardenWorkerGone", (5, 6)), ("worker: GpuwardenWorkerDead", (4,)))
        for place in places
    },
    "server: GpuwardenServerUnanswering: by (host, container) -> by (host, container, instance), at its place 3": (
        _AND_TAKES_SEVERAL
    ),
    "vram: GpuwardenVramVictim: by (host, container) -> by (host, container, instance)": _AND_TAKES_SEVERAL,
    **{
        f"vram: GpuwardenVramVictim: {change}": "both sides of the join name it, and one suffices"
        for change in (
            f"{_OVER_BUDGET} -> last_over_time({_OVER_BUDGET}[5m])",
            f"{_OVER_BUDGET} -> last_over_time({_OVER_BUDGET}[5m]), at its place 2",
            "on (host, container) -> on (container), at its place 3",
            "on (host, container) -> on (host), at its place 3",
        )
    },
    "gang: GpuwardenGangStuck: max -> min": "every rank of a gang has the same number of ranks",
    **dict.fromkeys(
        (
            "gpu: GpuwardenJobGpuLost: 0 -> (-1)",
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
            ("stall: GpuwardenJobStalled", _OVERDUE),
            ("shared: GpuwardenSharedJobStalled", _OVERDUE),
            ("health: GpuwardenJobUnhealthy", _OVERDUE),
            ("budget: GpuwardenJobOverBudget", _OVERDUE),
            ("worker: GpuwardenWorkerDead", _OVERDUE),
            ("gone: GpuwardenWorkerGone", _OVERDUE),
            ("gpu: GpuwardenJobGpuLost", _OVERDUE),
            ("stuck: GpuwardenJobStuck", _OVERDUE),
            ("steps: GpuwardenJobSlowed", "gpuwarden_job_id"),
        )
    },
    **{
        f"{file}: {rule}: {record} -> last_over_time({record}[5m])": "where it ends, the target is named no more"
        for file, rule, record in (
            ("telemetry", "GpuwardenExporterDown", "gpuwarden:exporter_target:info"),
            ("remediator", "GpuwardenRemediatorDown", "gpuwarden:remediator_target:info"),
        )
    },
    'remediator: GpuwardenIntentOverdue: gpuwarden_remediator_intent_age_seconds{stage="planned"} -> '
    'last_over_time(gpuwarden_remediator_intent_age_seconds{stage="planned"}[5m])': "it is there now, or nothing is",
    "remediator: GpuwardenRemediatorUnreached: count -> sum": _INFO_IS_1,
    "remediator: GpuwardenRemediatorUnreached: max -> min, at its place 2": _ONLY_THERE,
    **{
        f"remediator: GpuwardenUnmended: {change}": "an alert that fires is 1, and of no instance"
        for change in (
            "by ({0}) -> by ({0}, instance)".format("host, worker, container, gpu, trip, wedge"),
            "max_over_time -> min_over_time",
        )
    },
    **{
        f"{topic}: gpuwarden:{whose}_target:info: last_over_time -> {other}": "whatever it was, it is a target"
        for topic, whose in (("remediator", "remediator"), ("telemetry", "exporter"))
        for other in ("min_over_time", "max_over_time")
    },
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
            ("by (host) -> by (host, instance)", _NO_INSTANCE),
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
    "node: GpuwardenNodeLost: count -> sum, at its place 4": _INFO_IS_1,
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
    **{
        f"faults: {its}: {change}, at its place {place}": _ONLY_THERE
        for its, by, places in (
            ("GpuwardenGpuXid", "host, gpu, xid", (6,)),
            ("GpuwardenGpuEccUncorrected", "host, gpu", (6, 7, 8, 9, 10)),
            ("GpuwardenDriverCallKilled", "host, collector", (6,)),
        )
        for change in (f"by ({by}) -> by ({by}, instance)",)
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
    "telemetry: GpuwardenScrapeTooSparse: count_over_time -> sum_over_time, at its place 2": _ONLY_THERE,
    "telemetry: GpuwardenWorkerUnseen: by (host) -> by (host, instance)": _ONLY_THERE,
    "telemetry: GpuwardenHostMisnamed: max -> min": _INFO_IS_1,
    "telemetry: GpuwardenHostMisnamed: by (nodename) -> by (nodename, instance)": _ONLY_THERE,
    f"telemetry: GpuwardenHostMisnamed: {_INFOS} -> last_over_time({_INFOS}[5m])": (
        "who is told of lately and not now is on neither side, and it names each by one name alone"
    ),
    **{
        f"steps: GpuwardenJobSlowed: {change}": why
        for change, why in (
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
