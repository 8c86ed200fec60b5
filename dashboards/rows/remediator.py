"""The remediators: health, alerts received and actions.

The counts come from the ledger. Hosts that share a ledger each publish all of it, so they are never summed.
"""

from typing import Final

from dashboards.expressions import HOST, aggregate, hosts_down, or_none, or_zero
from dashboards.panels import Panel, Query

_HOST: Final = ("host",)
_INFO: Final = "gpuwarden_remediator_info"
_LEDGER_UP: Final = aggregate("min", _HOST, "gpuwarden_remediator_ledger_up", where=HOST)
_KNOWN: Final = f"({_LEDGER_UP} == 1)"
_BEAT_AGE: Final = aggregate("max", _HOST, "gpuwarden_remediator_executor_heartbeat_age_seconds", where=HOST)

PANELS: Final = (
    Panel(
        title="Remediators down",
        description="Hosts whose remediator answered within a day but does not now: down, or not scraped. Their "
        "stalls are detected, but no action follows.",
        unit="short",
        queries=(Query(expr=hosts_down(_INFO), legend="hosts"),),
        kind="number",
        width=8,
        levels={1: "red"},
    ),
    Panel(
        title="Ledgers unreadable",
        description="Hosts whose remediator answers but cannot read its ledger. It accepts no alerts and takes no "
        "action.",
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
        description="Open episodes of all hosts. In a dry run an episode stays open while its condition lasts.",
        unit="short",
        queries=(Query(expr=f"sum(gpuwarden_remediator_episodes_open{{{HOST}}})", legend="open"),),
        kind="number",
        width=8,
        levels={1: "orange"},
    ),
    Panel(
        title="Remediations by outcome",
        description="Closed episodes by outcome and condition, since the ledger was created. Totals, because a "
        "counter that starts at 1 shows no rate. Each host publishes all values of a shared ledger.",
        unit="short",
        queries=(
            Query(
                expr=or_none(
                    aggregate(
                        "max", ("host", "outcome", "condition"), "gpuwarden_remediator_episodes_total", where=HOST
                    ),
                    _KNOWN,
                    "outcome",
                    "condition",
                ),
                legend="{{host}} {{outcome}} ({{condition}})",
            ),
        ),
    ),
    Panel(
        title="Remediator steps",
        description="Steps done, failed or skipped by a dry run, since the ledger was created. If `failed` rises, "
        "check the ledger.",
        unit="short",
        queries=(
            Query(
                expr=or_none(
                    aggregate("max", ("host", "act", "step"), "gpuwarden_remediator_steps_total", where=HOST),
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
        description="Open episodes. An episode that stays open waits: dry run, cool-down, circuit breaker, or a "
        "target that does not stop.",
        unit="short",
        queries=(
            Query(expr=aggregate("max", _HOST, "gpuwarden_remediator_episodes_open", where=HOST), legend="{{host}}"),
        ),
    ),
    Panel(
        title="Alerts received",
        description="Alerts stored per second: accepted, or refused with the reason; and calls rejected before that. "
        "Alertmanager repeats alerts, so several per failure are normal. Check refused and rejected ones.",
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
        title="Executor heartbeat age",
        description="Time since the last loop of each executor. If it rises, the executor is dead or blocked: alerts "
        "are accepted, but no action follows until it runs again.",
        unit="s",
        queries=(Query(expr=_BEAT_AGE, legend="{{host}}"),),
        levels={60: "red"},
    ),
    Panel(
        title="Oldest open intent",
        description="Age of the oldest open restart and settle intent per stage. If it rises, the intent makes no "
        "progress. An alert follows after `--intent-overdue-s`.",
        unit="s",
        queries=(
            Query(
                expr=or_none(
                    aggregate("max", ("host", "kind", "stage"), "gpuwarden_remediator_intent_age_seconds", where=HOST),
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
        description="Unexpected errors per second in the executor's loop. The executor continues after each. Check "
        "its log.",
        unit="cps",
        queries=(
            Query(
                expr=f"max by (host) (rate(gpuwarden_remediator_executor_errors_total{{{HOST}}}[$__rate_interval]))",
                legend="{{host}}",
            ),
        ),
    ),
)
