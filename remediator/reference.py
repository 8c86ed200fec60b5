"""Write the remediator's reference pages: settings, metrics, reasons and outcomes.

`--check` writes nothing and exits 1 if a page is outdated.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from gpuwarden.docs_pages import by_heading, unit_of
from gpuwarden.settings import tables, write_pages
from remediator.metrics.ledger import SERIES
from remediator.metrics.pending_pods import SERIES as PENDING_SERIES
from remediator.metrics.queue import ANSWER_S, COUNT_WAIT_S
from remediator.metrics.queue import SERIES as QUEUE_SERIES
from remediator.metrics.series import Catalogue
from remediator.plan import Outcome
from remediator.reasons import Code, Reason
from remediator.settings.settings import CommonSettings, ExecuteSettings, ServeSettings

DOCS: Final = Path(__file__).resolve().parent.parent / "docs" / "reference"

SERVE: Final = {
    "listen": "Web server",
    "body_max_bytes": "Alerts",
    "executor_down_s": "Thresholds of rules",
    "alertmanager": "Addresses",
    "pending_pods": "Kubernetes",
}
EXECUTE: Final = {
    "armed": "Remedies",
    "queue_db": "Addresses",
    "docker": "Container engines",
    "node_name": "Kubernetes",
    "interval_s": "Times",
    "retries_max": "Retries of jobs",
    "cooldown_s": "Cooldowns and circuit breaker",
    "wrangle_migrations_max": "Runs with failing items",
    "capture_s": "Captures",
}
"""The first setting under each heading."""

REASONS: Final = {
    Reason.DRY_RUN: "Holds",
    Reason.UNCONFIRMED: "Evidence and target",
    Reason.QUEUE_UNREACHABLE: "Restart",
    Reason.EXECUTOR_ALIVE: "Lost hosts",
    Reason.NODE_TAINTED: "Faulty GPUs of a Kubernetes node",
    Reason.NO_RUN: "Failing items of a run",
    Reason.MALFORMED: "Refused alerts",
}
"""The first reason under each heading."""

REASONS_ABOUT: Final = {
    "Holds": "The episode waits.",
    "Evidence and target": "The episode waits with `unconfirmed`, `no_evidence`, `stale_evidence`, `no_container`,\n"
    "`container_paused`, `unstartable` and `restarted`, and ends with the alert. With the others it is closed at once.",
    "Restart": "The episode stays open until the action is complete, its target runs, or an operator acknowledges it.\n"
    "`queue_unreachable`, `ended_elsewhere` and `restarted_already` also occur before an action.",
    "Refused alerts": "No episode opens.",
}

METRICS: Final = {
    "Alerts and webhook": r"_(alerts|backlog|watchdog|webhook|reconciliations)_",
    "Thresholds": r"_(down_after|overdue_after|lost_after)_seconds$|_activation_items$",
    "Kubernetes": r"_pods?_pending_|_pending_pods",
    "Episodes and actions": r"_(episodes?|intents?|intent_age|given_up|quarantines|steps)(_|$)",
    "Remediator and executor": r"^gpuwarden_remediator_",
}
QUEUE: Final = {
    "Runs": r"_runs?_",
    "Workers and GPUs": r"_(workers|worker_info|worker_locked_info|workers_busy|gpus_quarantined|quarantined_info)$",
    "Jobs": r"^gpuwarden_queue_(jobs?_|jobs$|oldest|retries|wait)",
    "Queue": r"^gpuwarden_queue_",
}
"""Headings of the metrics, and which belong there: the first that matches."""


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or with `--check` compare them."""
    pages = {
        "settings-remediator.md": settings_page,
        "metrics-remediator.md": metrics_page,
        "metrics-queue.md": queue_page,
        "reasons.md": reasons_page,
    }
    about = (__doc__ or "").partition("\n")[0]
    return write_pages(pages, module="remediator.reference", about=about, docs=DOCS, argv=argv)


def settings_page() -> str:
    """docs/reference/settings-remediator.md."""
    return "\n".join(
        [
            "# Settings of the remediator",
            "",
            "<!-- Written by `python -m remediator.reference`; change remediator/settings, not this page. -->",
            "",
            "`gpuwarden remediator serve` receives alerts, and `gpuwarden remediator execute` acts on them. They share",
            "one ledger. Each takes its settings as options or from the environment. An option wins.",
            "",
            "## Both processes",
            "",
            "Set the same values for both. Of `--wrangle-activation` the larger one applies.",
            *tables(CommonSettings, {"runtime_dir": "Common settings"}, level="###"),
            "## serve",
            *tables(ServeSettings, SERVE, level="###", but=CommonSettings.model_fields),
            "## execute",
            *tables(ExecuteSettings, EXECUTE, level="###", but=CommonSettings.model_fields),
        ]
    )


def metrics_page() -> str:
    """docs/reference/metrics-remediator.md."""
    return "\n".join(
        [
            "# Metrics of the remediator",
            "",
            "<!-- Written by `python -m remediator.reference`; change remediator/metrics/ledger.py, not this page. -->",
            "",
            "`/metrics` of `gpuwarden remediator serve` publishes these metrics of its host and its ledger. The scrape",
            "configuration sets the label `host`. An unknown value is an absent series, never 0. Counters from the",
            "ledger survive restarts and the deletion of old episodes. With `--queue-db` there are also",
            "[metrics of the queue](metrics-queue.md).",
            "",
            *_metrics(Catalogue(*SERIES.values(), *PENDING_SERIES.values()), METRICS),
        ]
    )


def queue_page() -> str:
    """docs/reference/metrics-queue.md."""
    return "\n".join(
        [
            "# Metrics of the queue",
            "",
            "<!-- Written by `python -m remediator.reference`; change remediator/metrics/queue.py, not this page. -->",
            "",
            "`/metrics` of `gpuwarden remediator serve --queue-db …` publishes these metrics. An unknown value is an",
            "absent series, never 0. Each host that shares the queue publishes all of it. Use the maximum",
            "(`max by (queue)`), never the sum.",
            "",
            "Claimable jobs and failed items are counted in the background. Each scrape starts a count, waits",
            f"{COUNT_WAIT_S * 1000:g} ms for it, and otherwise publishes the last one. A queue without an answer",
            f"within {ANSWER_S:g} s is unreachable.",
            "",
            *_metrics(QUEUE_SERIES, QUEUE),
        ]
    )


def reasons_page() -> str:
    """docs/reference/reasons.md."""
    return "\n".join(
        [
            "# Reasons and outcomes",
            "",
            "<!-- Written by `python -m remediator.reference`; change remediator/reasons.py, not this page. -->",
            "",
            "A reason says why an episode waits or was closed, or why an alert was refused. `gpuwarden status` and",
            "`gpuwarden ledger` print it, with a message that names the facts. It is also the label `reason` of",
            "`gpuwarden_remediator_episodes_held` and `gpuwarden_remediator_alerts_total`.",
            "",
            "An episode that waits stays open. gpuwarden checks it every second, and acts when nothing holds it and",
            "the evidence still confirms the alert. See [go live](../how-to/go-live.md) for dry run, approval and",
            "pauses, and [containers](../how-to/containers.md) for engines and labels.",
            "",
            "## Outcomes",
            "",
            "The outcome of a closed episode, in `gpuwarden ledger list` and in the label `outcome` of",
            "`gpuwarden_remediator_episodes_total`.",
            "",
            *_codes("outcome", Outcome),
            "",
            *_reasons(),
        ]
    )


def _metrics(series: Catalogue, headings: Mapping[str, str]) -> Iterator[str]:
    found = by_heading(series, headings)
    for heading in reversed(found):
        yield from (f"## {heading}", "")
        yield from ("| series | type | labels | unit | meaning |", "|---|---|---|---|---|")
        for its in map(series.__getitem__, found[heading]):
            labels = ", ".join(f"`{label}`" for label in its.labels)
            yield f"| `{its.name}` | {its.kind} | {labels} | {unit_of(its.name, its.meaning)} | {its.meaning} |"
        yield ""
        if absent := {name: series[name].absent for name in found[heading] if series[name].absent != "never"}:
            yield from ("| series | absent when |", "|---|---|")
            yield from (f"| `{name}` | {when} |" for name, when in absent.items())
            yield ""


def _reasons() -> Iterator[str]:
    of_it: dict[str, list[Reason]] = {}
    for reason in Reason:
        heading = REASONS.get(reason, next(reversed(of_it), ""))
        of_it.setdefault(heading, []).append(reason)
    for heading, reasons in of_it.items():
        about = (REASONS_ABOUT[heading], "") if heading in REASONS_ABOUT else ()
        yield from (f"## {heading}", "", *about, *_codes("reason", reasons), "")


def _codes(name: str, codes: Iterable[Code]) -> Iterator[str]:
    yield from (f"| {name} | meaning | what to do |", "|---|---|---|")
    yield from (f"| `{code}` | {code.text} | {code.advice} |" for code in codes)


if __name__ == "__main__":
    sys.exit(main())
