"""What `serve` tells Prometheus of this host's share of the ledger, and the list of all that it tells of itself.

Absent while the ledger cannot be read, for unknown is never zero.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gpuwarden import __version__
from gpuwarden.db.engine import DatabaseError
from remediator.ledger.counters import TOOK_S, Totals
from remediator.ledger.ledger import Ledger
from remediator.metrics.series import Catalogue, Series
from remediator.plan import Kind, Stage
from remediator.remedies import REMEDIES

log: Final = structlog.get_logger("remediator")


STAGES: Final[Mapping[Kind, tuple[Stage, ...]]] = {
    Kind.FREE: (
        Stage.PLANNED,
        Stage.STOPPING,
        Stage.DEAD,
        Stage.STARTING,
        Stage.DONE,
        Stage.ABANDONED,
        Stage.WITHDRAWN,
    ),
    Kind.SETTLE: (Stage.PLANNED, Stage.FENCED, Stage.DONE, Stage.ABANDONED, Stage.WITHDRAWN),
}
"""The stages that an intent of each kind may be at."""

_UNREAD: Final = "the ledger cannot be read"
_NONE_YET: Final = f"{_UNREAD}, or there was none yet"
_NO_EXECUTOR: Final = f"{_UNREAD}, or no executor of this host has ever run"

SERIES: Final = Catalogue(
    Series("gpuwarden_remediator_info", "This remediator and its host; always 1.", labels=("nodename", "version")),
    Series("gpuwarden_remediator_ledger_up", "1 while the ledger can be read."),
    Series(
        "gpuwarden_remediator_alerts_total",
        "Alerts made durable, accepted or refused and why.",
        labels=("outcome", "reason"),
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_remediator_alerts_duplicate_total",
        "Firing alerts that came while the episode of their worker or server was open already: sent again, by "
        "another rule, or by another Alertmanager.",
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_remediator_backlog_age_seconds",
        "For how long the oldest of the accepted alerts that the executor has not taken yet has been waiting.",
        absent=f"{_UNREAD}, or none waits",
    ),
    Series("gpuwarden_remediator_episodes_open", "Episodes that are not closed.", absent=_UNREAD),
    Series(
        "gpuwarden_remediator_episodes_held",
        "Open episodes that wait, by what they wait for.",
        labels=("reason",),
        absent=f"{_UNREAD}, or none waits for it",
    ),
    Series(
        "gpuwarden_remediator_episodes_total",
        "Episodes closed, by outcome and trip.",
        labels=("outcome", "trip"),
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_remediator_received_to_outcome_seconds",
        "Of closed episodes: from the arrival of the first alert at the webhook to the outcome. What came "
        "before, from the wedge to the alert and from there to us, is not in it.",
        labels=("outcome",),
        is_histogram=True,
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_remediator_intents",
        "Intents of this host's episodes by kind, free or settle, and stage; of done, abandoned and withdrawn "
        "nothing is owed any more.",
        labels=("kind", "stage"),
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_remediator_intent_age_seconds",
        "How long ago the oldest of this host's intents of that kind and stage was promised, of those that are "
        "still owed.",
        labels=("kind", "stage"),
        absent=f"{_UNREAD}, or none is owed",
    ),
    Series(
        "gpuwarden_remediator_quarantines_refused",
        "Open episodes whose GPUs are to go out of use, which the queue has refused and not taken since; "
        "less those whose remedy is disarmed, for which it is not asked.",
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_remediator_steps_total",
        "Steps done, failed, or that a dry run would have done.",
        labels=("act", "step"),
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_remediator_brake_latched",
        "1 while the storm brake holds everything until a person releases it.",
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_remediator_paused", "1 while a person's pause holds everything new on this host.", absent=_UNREAD
    ),
    Series(
        "gpuwarden_remediator_armed",
        "1 when the remedy acts on this host, if only on what a person approves; 0 in dry run.",
        labels=("remedy",),
        absent=_NO_EXECUTOR,
    ),
    Series(
        "gpuwarden_remediator_executor_beat_age_seconds",
        "Time since the executor last went round its loop.",
        absent=_NO_EXECUTOR,
    ),
    Series(
        "gpuwarden_remediator_executor_errors_total",
        "Unexpected errors in the executor since it started.",
        absent=_NO_EXECUTOR,
    ),
    Series(
        "gpuwarden_remediator_executor_silent_after_seconds",
        "People are told of an executor that has shown no life for longer: the setting executor_silent_s.",
    ),
    Series(
        "gpuwarden_remediator_intent_overdue_after_seconds",
        "People are told of an intent that has been owed for longer: the setting intent_overdue_s.",
    ),
    Series(
        "gpuwarden_remediator_node_lost_after_seconds",
        "For how long nobody has heard of a host that is taken for lost: the setting node_lost_after_s.",
    ),
    Series(
        "gpuwarden_remediator_wrangle_activation_items",
        "So many items of a run may fail on one worker before anything is judged: the setting wrangle_activation.",
    ),
    Series(
        "gpuwarden_remediator_watchdog_timestamp_seconds",
        "When the always-firing alert GpuwardenWatchdog last reached the webhook, Unix time.",
        absent="it has not come since this process started",
    ),
    Series(
        "gpuwarden_remediator_webhook_rejected_total",
        "Webhook calls that were not made durable, by reason, since this process started.",
        labels=("reason",),
    ),
    Series(
        "gpuwarden_remediator_alerts_truncated_total",
        "Alerts that Alertmanager said it left out of its calls, since this process started.",
    ),
    Series(
        "gpuwarden_remediator_reconciliations_total",
        "Alertmanagers asked for the alerts that a call left out, done where all they told was taken in, else "
        "failed, since this process started.",
        labels=("outcome",),
    ),
)


class LedgerCollector(Collector):
    """The ledger's counts as metrics; absent while the ledger cannot be read."""

    def __init__(self, ledger: Ledger, host: str) -> None:
        self._ledger = ledger
        self._host = host

    def describe(self) -> list[Metric]:
        """Nothing beforehand: asking would read the ledger."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every family of this scrape."""
        info = SERIES.gauge("gpuwarden_remediator_info")
        info.add_metric((self._host, __version__), 1.0)
        yield info
        try:
            totals = self._ledger.reports.totals(self._host)
        except DatabaseError as error:
            log.warning("the ledger cannot be read", because=str(error))
            yield SERIES.gauge("gpuwarden_remediator_ledger_up", 0.0)
            return
        yield SERIES.gauge("gpuwarden_remediator_ledger_up", 1.0)
        now = totals.now
        yield from self._alerts(totals, now)
        yield from self._episodes(totals)
        yield from self._orders(totals, now)
        yield from self._executor(totals, now)

    def _alerts(self, totals: Totals, now: float) -> Iterator[Metric]:
        yield _counted(SERIES.counter("gpuwarden_remediator_alerts_total"), totals.alerts)
        yield SERIES.counter("gpuwarden_remediator_alerts_duplicate_total", totals.duplicates)
        if totals.oldest_new_at is not None:
            yield SERIES.gauge("gpuwarden_remediator_backlog_age_seconds", max(0.0, now - totals.oldest_new_at))

    def _episodes(self, totals: Totals) -> Iterator[Metric]:
        yield SERIES.gauge("gpuwarden_remediator_episodes_open", totals.episodes_open)
        held = SERIES.gauge("gpuwarden_remediator_episodes_held")
        for reason, count in sorted(totals.held.items()):
            held.add_metric((reason,), count)
        yield held
        yield _counted(SERIES.counter("gpuwarden_remediator_episodes_total"), totals.outcomes)
        took = SERIES.histogram("gpuwarden_remediator_received_to_outcome_seconds")
        for outcome, found in sorted(totals.took.items()):
            bounds = [*(f"{bound:.1f}" for bound in TOOK_S), "+Inf"]
            buckets = list(zip(bounds, (*found.within, found.count), strict=True))
            took.add_metric((outcome,), buckets=buckets, sum_value=found.sum_s)
        yield took
        intents = SERIES.gauge("gpuwarden_remediator_intents")
        for kind, stages in STAGES.items():
            for stage in stages:
                intents.add_metric((kind, stage), totals.intents.get((kind, stage), 0))
        yield intents
        owed = SERIES.gauge("gpuwarden_remediator_intent_age_seconds")
        for pair, since in sorted(totals.owed_since.items()):
            owed.add_metric(pair, max(0.0, totals.now - since))
        yield owed
        yield SERIES.gauge("gpuwarden_remediator_quarantines_refused", totals.quarantines_refused)
        yield _counted(SERIES.counter("gpuwarden_remediator_steps_total"), totals.steps)

    def _orders(self, totals: Totals, now: float) -> Iterator[Metric]:
        yield SERIES.gauge("gpuwarden_remediator_brake_latched", float(totals.orders.brake() is not None))
        pause = totals.orders.pause(host=self._host, now=now)
        yield SERIES.gauge("gpuwarden_remediator_paused", float(pause is not None))

    def _executor(self, totals: Totals, now: float) -> Iterator[Metric]:
        if totals.executor is None:
            return
        _, beat_at, errors = totals.executor
        armed = SERIES.gauge("gpuwarden_remediator_armed")
        for remedy in sorted(REMEDIES):
            armed.add_metric((remedy,), float(totals.orders.armed(host=self._host, remedy=remedy)))
        yield armed
        yield SERIES.gauge("gpuwarden_remediator_executor_beat_age_seconds", max(0.0, now - beat_at))
        yield SERIES.counter("gpuwarden_remediator_executor_errors_total", errors)


def _counted(family: CounterMetricFamily, counts: Mapping[tuple[str, str], int]) -> CounterMetricFamily:
    for key, count in sorted(counts.items()):
        family.add_metric(key, count)
    return family


class Watchdog(Collector):
    """When the always-firing alert last came: the one proof that Prometheus, Alertmanager and the way to us work."""

    def __init__(self) -> None:
        self._beat_at: float | None = None

    def beat(self, *, now: float) -> None:
        """It came, at this Unix time."""
        self._beat_at = now

    def collect(self) -> Iterator[Metric]:
        """When it came; nothing before it has."""
        if self._beat_at is not None:
            yield SERIES.gauge("gpuwarden_remediator_watchdog_timestamp_seconds", self._beat_at)
