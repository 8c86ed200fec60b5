"""The remediators: whether what would mend a wedge is well, what it was told, and what it did.

Its counts are those of its ledger. Hosts may share one, and each then shows the whole of it: they are never summed.
"""

from typing import Final

from dashboards.expressions import HOST, each, gone, or_none, or_zero
from dashboards.panels import Panel, Query

_HOST: Final = ("host",)
_INFO: Final = "gpuwarden_remediator_info"
_LEDGER_UP: Final = each("min", _HOST, "gpuwarden_remediator_ledger_up", where=HOST)
_KNOWN: Final = f"({_LEDGER_UP} == 1)"
_BEAT_AGE: Final = each("max", _HOST, "gpuwarden_remediator_executor_beat_age_seconds", where=HOST)

PANELS: Final = (
    Panel(
        title="Remediators down",
        reads="Hosts whose remediator answered within a day and does not now, down or no longer scraped. Their "
        "stalls are seen and nothing is done about them.",
        unit="short",
        queries=(Query(expr=gone(_INFO), legend="hosts"),),
        kind="number",
        width=8,
        levels={1: "red"},
    ),
    Panel(
        title="Ledgers unreadable",
        reads="Hosts whose remediator answers and cannot read its ledger: it accepts nothing and acts on nothing.",
        unit="short",
        queries=(
            Query(
                expr=or_zero(f"count({_LEDGER_UP} == 0)", f"count({_INFO}{{{HOST}}})"),
                legend="hosts",
            ),
        ),
        kind="number",
        width=8,
        levels={1: "red"},
    ),
    Panel(
        title="Open episodes now",
        reads="Episodes that are not closed, of all hosts together. Read with dry run in mind: what would have "
        "been done stays open while it is still true.",
        unit="short",
        queries=(Query(expr=f"sum(gpuwarden_remediator_episodes_open{{{HOST}}})", legend="open"),),
        kind="number",
        width=8,
        levels={1: "orange"},
    ),
    Panel(
        title="Remediations by outcome",
        reads="Episodes closed, by outcome and condition, since the ledger began. Totals, not a rate: the first "
        "of a kind is born at 1, and a rate would not show it. Each host tells its own, also of a shared ledger.",
        unit="short",
        queries=(
            Query(
                expr=or_none(
                    each("max", ("host", "outcome", "trip"), "gpuwarden_remediator_episodes_total", where=HOST),
                    _KNOWN,
                    "outcome",
                    "trip",
                ),
                legend="{{host}} {{outcome}} ({{trip}})",
            ),
        ),
    ),
    Panel(
        title="Steps of the remediators",
        reads="Steps done, failed, or that a dry run would have done, since the ledger began. A `failed` that "
        "climbs is a target that resists: the ledger says why.",
        unit="short",
        queries=(
            Query(
                expr=or_none(
                    each("max", ("host", "act", "step"), "gpuwarden_remediator_steps_total", where=HOST),
                    _KNOWN,
                    "act",
                    "step",
                ),
                legend="{{host}} {{act}}: {{step}}",
            ),
        ),
    ),
    Panel(
        title="Open episodes",
        reads="Episodes that are not closed. One that stays open waits: dry run, a cool-down, a brake, or a "
        "target that will not die.",
        unit="short",
        queries=(Query(expr=each("max", _HOST, "gpuwarden_remediator_episodes_open", where=HOST), legend="{{host}}"),),
    ),
    Panel(
        title="Alerts received",
        reads="Alerts in each second that were made durable, accepted or refused and why, and deliveries turned "
        "away before that. Alertmanager repeats, so more than one for one wedge is well. Refusals and "
        "rejections want a look.",
        unit="cps",
        queries=(
            Query(
                # The rate of the first alert of a kind is not seen: its counter is born at 1.
                expr=or_none(
                    "sum by (host) (max by (host, reason) "
                    f'(rate(gpuwarden_remediator_alerts_total{{outcome="accepted", {HOST}}}[$__rate_interval])))',
                    _KNOWN,
                ),
                legend="{{host}} accepted",
            ),
            Query(
                expr=or_none(
                    "max by (host, reason) "
                    f'(rate(gpuwarden_remediator_alerts_total{{outcome="refused", {HOST}}}[$__rate_interval]))',
                    _KNOWN,
                    "reason",
                ),
                legend="{{host}} refused: {{reason}}",
            ),
            Query(
                expr="sum by (host, reason) "
                f"(rate(gpuwarden_remediator_webhook_rejected_total{{{HOST}}}[$__rate_interval]))",
                legend="{{host}} rejected: {{reason}}",
            ),
        ),
    ),
    Panel(
        title="Executor beat age",
        reads="Time since each host's executor last went round its loop. A climb is an executor that is dead or "
        "held: alerts are still accepted, and nothing is done until it runs again.",
        unit="s",
        queries=(Query(expr=_BEAT_AGE, legend="{{host}}"),),
        levels={60: "red"},
    ),
    Panel(
        title="Oldest intent owed",
        reads="How long ago the oldest free and settle at each stage were promised, of those that are still owed. One "
        "that climbs comes to no end: people are told after `--intent-overdue-s`.",
        unit="s",
        queries=(
            Query(
                expr=or_none(
                    each("max", ("host", "kind", "stage"), "gpuwarden_remediator_intent_age_seconds", where=HOST),
                    _KNOWN,
                    "kind",
                    "stage",
                ),
                legend="{{host}} {{kind}}: {{stage}}",
            ),
        ),
        levels={900: "red"},
    ),
    Panel(
        title="Executor errors",
        reads="Unexpected errors in each second in the executor's loop; it goes on after each. Its log says "
        "what they are.",
        unit="cps",
        queries=(
            Query(
                expr=f"max by (host) (rate(gpuwarden_remediator_executor_errors_total{{{HOST}}}[$__rate_interval]))",
                legend="{{host}}",
            ),
        ),
    ),
)
