"""Metrics of this host's part of the ledger, and the list of all metrics of `serve`.

Series are absent while the ledger cannot be read: unknown is never zero.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gpuwarden import __version__
from gpuwarden.db.errors import DatabaseError
from remediator.ledger.counters import DURATION_BOUNDS_S, Totals
from remediator.ledger.ledger import Ledger
from remediator.metrics.series import Catalogue, Series
from remediator.plan import Kind, Stage, Subject
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
"""The stages of each kind of intent."""

_UNREAD: Final = "ledger unreachable"
_NONE_YET: Final = f"{_UNREAD}, or there is none yet"
_NO_EXECUTOR: Final = f"{_UNREAD}, or this host's executor never ran"

SERIES: Final = Catalogue(
    Series("gpuwarden_remediator_info", "This remediator and its host; always 1.", labels=("nodename", "version")),
    Series("gpuwarden_remediator_ledger_up", "1 while the ledger can be read."),
    Series(
        "gpuwarden_remediator_alerts_total",
        "Stored alerts, accepted or refused, by reason.",
        labels=("outcome", "reason"),
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_remediator_alerts_duplicate_total",
        "Firing alerts that arrived while the episode of their target was already open.",
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_remediator_backlog_age_seconds",
        "Age of the oldest accepted alert that the executor has not taken yet.",
        absent=f"{_UNREAD}, or no alert waits",
    ),
    Series("gpuwarden_remediator_episodes_open", "Open episodes.", absent=_UNREAD),
    Series(
        "gpuwarden_remediator_episodes_held",
        "Waiting episodes by reason.",
        labels=("reason",),
        absent=f"{_UNREAD}, or no episode has this reason",
    ),
    Series(
        "gpuwarden_remediator_episodes_total",
        "Closed episodes by outcome and condition.",
        labels=("outcome", "condition"),
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_remediator_episode_duration_seconds",
        "Duration of closed episodes, from the arrival of the first alert to the outcome.",
        labels=("outcome",),
        is_histogram=True,
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_remediator_intents",
        "Intents of this host's episodes by kind and stage. Those done, abandoned or withdrawn are closed.",
        labels=("kind", "stage"),
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_remediator_intent_age_seconds",
        "Age of the oldest open intent of that kind and stage.",
        labels=("kind", "stage"),
        absent=f"{_UNREAD}, or no intent is open",
    ),
    Series(
        "gpuwarden_remediator_given_up_seconds",
        "Time since the restart of a target was given up, until it runs or an operator acknowledges it.",
        labels=("worker", "container"),
        absent=f"{_UNREAD}, or no restart was given up",
    ),
    Series(
        "gpuwarden_remediator_quarantines_refused",
        "Open episodes whose GPU quarantine the queue refused last, if their remedy is armed.",
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_remediator_steps_total",
        "Steps done, failed, or recorded by a dry run.",
        labels=("act", "step"),
        absent=_NONE_YET,
    ),
    Series(
        "gpuwarden_remediator_circuit_breaker_open",
        "1 while the circuit breaker is open, until an operator releases it.",
        absent=_UNREAD,
    ),
    Series(
        "gpuwarden_remediator_paused", "1 while an operator's pause holds new actions on this host.", absent=_UNREAD
    ),
    Series(
        "gpuwarden_remediator_armed",
        "1 if the remedy is armed on this host, with or without approval; 0 in dry run.",
        labels=("remedy",),
        absent=_NO_EXECUTOR,
    ),
    Series(
        "gpuwarden_remediator_executor_heartbeat_age_seconds",
        "Time since the executor's last heartbeat.",
        absent=_NO_EXECUTOR,
    ),
    Series(
        "gpuwarden_remediator_executor_errors_total",
        "Unexpected errors in the executor since it started.",
        absent=_NO_EXECUTOR,
    ),
    Series(
        "gpuwarden_remediator_seats_on",
        "1 if the executor advertises the GPU memory of its Kubernetes node: `--seats on`.",
        absent=_NO_EXECUTOR,
    ),
    Series(
        "gpuwarden_remediator_seats_failures_total",
        "Failures to check or advertise the GPU memory of the node since the executor started. Its log has the reason.",
        absent=_NO_EXECUTOR,
    ),
    Series(
        "gpuwarden_remediator_executor_down_after_seconds",
        "An alert fires if an executor has no heartbeat for this long: the setting executor_down_s.",
    ),
    Series(
        "gpuwarden_remediator_intent_overdue_after_seconds",
        "An alert fires if an intent is open for this long: the setting intent_overdue_s.",
    ),
    Series(
        "gpuwarden_remediator_wrangle_activation_items",
        "Failed items of a run on one worker before it is judged: the setting wrangle_activation.",
    ),
    Series(
        "gpuwarden_remediator_watchdog_timestamp_seconds",
        "When the always-firing alert GpuwardenWatchdog last reached a webhook of the ledger.",
        absent="it never arrived",
    ),
    Series(
        "gpuwarden_remediator_drill",
        "1 while a drill of a host waits for its alert: `gpuwarden drill`.",
        labels=("nodename", "drill"),
        absent=f"{_UNREAD}, or no drill runs",
    ),
    Series(
        "gpuwarden_remediator_drill_timestamp_seconds",
        "When this host's executor last took the alert of a drill.",
        absent=f"{_UNREAD}, or no drill has passed",
    ),
    Series(
        "gpuwarden_remediator_notification_administrators",
        "Addresses of administrators in the notify file in use.",
        absent="no --notify-file",
    ),
    Series(
        "gpuwarden_remediator_notifications_total",
        "Messages that a server accepted (sent) or not (failed), and notices dropped after an hour of failures "
        "(dropped), since this process started.",
        labels=("outcome",),
        absent="no --notify-file",
    ),
    Series(
        "gpuwarden_remediator_notifications_waiting",
        "Notices of the ledger that are not sent yet.",
        absent=f"{_UNREAD}, or no --notify-file",
    ),
    Series(
        "gpuwarden_remediator_notifications_failing_seconds",
        "Time since the messages to an address began to fail; the longest.",
        absent=f"{_UNREAD}, no address fails, or no --notify-file",
    ),
    Series(
        "gpuwarden_remediator_webhook_rejected_total",
        "Rejected webhook calls by reason, since this process started.",
        labels=("reason",),
    ),
    Series(
        "gpuwarden_remediator_alerts_truncated_total",
        "Alerts that Alertmanager left out of its calls, since this process started.",
    ),
    Series(
        "gpuwarden_remediator_reconciliations_total",
        "Queries of Alertmanagers for left-out alerts: done or failed, since this process started.",
        labels=("outcome",),
    ),
)


class LedgerCollector(Collector):
    """The ledger's metrics; absent while the ledger cannot be read."""

    def __init__(self, ledger: Ledger, host: str) -> None:
        self._ledger = ledger
        self._host = host

    def describe(self) -> list[Metric]:
        """Nothing: it would read the ledger."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Collect every family."""
        info = SERIES.gauge("gpuwarden_remediator_info")
        info.add_metric((self._host, __version__), 1.0)
        yield info
        try:
            totals = self._ledger.reports.totals(self._host)
        except DatabaseError as error:
            log.warning("the ledger cannot be read", reason=str(error))
            yield SERIES.gauge("gpuwarden_remediator_ledger_up", 0.0)
            return
        yield SERIES.gauge("gpuwarden_remediator_ledger_up", 1.0)
        now = totals.now
        yield from self._alerts(totals, now)
        yield from self._episodes(totals)
        yield from self._orders(totals, now)
        yield from self._executor(totals, now)
        yield from self._chain(totals)

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
        took = SERIES.histogram("gpuwarden_remediator_episode_duration_seconds")
        for outcome, found in sorted(totals.took.items()):
            bounds = [*(f"{bound:.1f}" for bound in DURATION_BOUNDS_S), "+Inf"]
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
        given_up = SERIES.gauge("gpuwarden_remediator_given_up_seconds")
        for subject, target, since in totals.given_up:
            labels = (target, "") if subject is Subject.WORKER else ("", target)
            given_up.add_metric(labels, max(0.0, totals.now - since))
        yield given_up
        yield SERIES.gauge("gpuwarden_remediator_quarantines_refused", totals.quarantines_refused)
        yield _counted(SERIES.counter("gpuwarden_remediator_steps_total"), totals.steps)

    def _orders(self, totals: Totals, now: float) -> Iterator[Metric]:
        yield SERIES.gauge("gpuwarden_remediator_circuit_breaker_open", float(totals.orders.breaker() is not None))
        pause = totals.orders.pause(host=self._host, now=now)
        yield SERIES.gauge("gpuwarden_remediator_paused", float(pause is not None))

    def _chain(self, totals: Totals) -> Iterator[Metric]:
        drills = SERIES.gauge("gpuwarden_remediator_drill")
        for number, host in totals.drills:
            drills.add_metric((host, str(number)), 1.0)
        yield drills
        if totals.drill_passed_at is not None:
            yield SERIES.gauge("gpuwarden_remediator_drill_timestamp_seconds", totals.drill_passed_at)

    def _executor(self, totals: Totals, now: float) -> Iterator[Metric]:
        beat = totals.executor
        if beat is None:
            return
        armed = SERIES.gauge("gpuwarden_remediator_armed")
        for remedy in sorted(REMEDIES):
            armed.add_metric((remedy,), float(totals.orders.armed(host=self._host, remedy=remedy)))
        yield armed
        yield SERIES.gauge("gpuwarden_remediator_executor_heartbeat_age_seconds", max(0.0, now - beat.heartbeat_at))
        yield SERIES.counter("gpuwarden_remediator_executor_errors_total", beat.errors)
        yield SERIES.gauge("gpuwarden_remediator_seats_on", float(beat.seats_on))
        yield SERIES.counter("gpuwarden_remediator_seats_failures_total", beat.seats_failures)


def _counted(family: CounterMetricFamily, counts: Mapping[tuple[str, str], int]) -> CounterMetricFamily:
    for key, count in sorted(counts.items()):
        family.add_metric(key, count)
    return family


class Watchdog(Collector):
    """When the watchdog alert last arrived. It shows that Prometheus and Alertmanager reach the webhook."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._arrived_at: float | None = None

    def mark(self, *, now: float) -> None:
        """Note an arrival, Unix seconds. The ledger may be locked."""
        self._arrived_at = now

    def describe(self) -> list[Metric]:
        """Nothing: it would read the ledger."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Collect the last arrival, of this process or of an earlier one."""
        at = self._arrived_at
        if at is None:
            with suppress(DatabaseError):
                stored = self._ledger.chain.watchdog()
                at = None if stored is None else stored.at
        if at is not None:
            yield SERIES.gauge("gpuwarden_remediator_watchdog_timestamp_seconds", at)
