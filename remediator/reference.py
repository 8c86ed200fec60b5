"""Writes the remediator's reference: its settings, its metrics and the queue's, and its reasons.

`python -m remediator.reference` writes them; `--check` writes nothing and exits 1 when a page lags behind the code.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic_settings import BaseSettings

from gpuwarden.docs_pages import unit_of
from gpuwarden.settings import table, write_pages
from remediator.metrics.ledger import SERIES
from remediator.metrics.queue import ANSWER_S, COUNT_WAIT_S
from remediator.metrics.queue import SERIES as QUEUE_SERIES
from remediator.metrics.series import Catalogue
from remediator.reasons import Reason
from remediator.settings.settings import ExecuteSettings, ServeSettings

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or with `--check` compare them; 1 when one lags."""
    pages = {
        "settings-remediator.md": settings_page,
        "metrics-remediator.md": metrics_page,
        "metrics-queue.md": queue_page,
        "reasons.md": reasons_page,
    }
    about = (__doc__ or "").partition("\n")[0]
    return write_pages(pages, module="remediator.reference", about=about, docs=DOCS, argv=argv)


def settings_page() -> str:
    """docs/settings-remediator.md."""
    return "\n".join(
        [
            "# Settings of the remediator",
            "",
            "<!-- Written by `python -m remediator.reference`; change remediator/settings, not this page. -->",
            "",
            "Two processes share one ledger: `gpuwarden remediator serve` receives alerts, and",
            "`gpuwarden remediator execute` acts on them. Each takes its settings as options or from the environment;",
            "an option wins.",
            "",
            *_section("serve", ServeSettings),
            *_section("execute", ExecuteSettings),
        ]
    )


def metrics_page() -> str:
    """docs/metrics-remediator.md."""
    return "\n".join(
        [
            "# Metrics of the remediator",
            "",
            "<!-- Written by `python -m remediator.reference`; change remediator/metrics/ledger.py, not this page. -->",
            "",
            "What `/metrics` of `gpuwarden remediator serve` publishes, of this host's share of the ledger and of",
            "itself. Unknown is an absent series, never a zero. What comes from the ledger goes on through",
            "restarts, and does not fall when old episodes are forgotten. Label `host` is not among these: the",
            "scrape configuration sets it.",
            "With `--queue` the page tells of the queue too: [metrics-queue.md](metrics-queue.md).",
            "",
            *_rows(SERIES),
            "",
        ]
    )


def queue_page() -> str:
    """docs/metrics-queue.md."""
    return "\n".join(
        [
            "# Metrics of the queue",
            "",
            "<!-- Written by `python -m remediator.reference`; change remediator/metrics/queue.py, not this page. -->",
            "",
            "What `/metrics` of `gpuwarden remediator serve` publishes where it is given `--queue`. Unknown is an",
            "absent series, never a zero; what was counted and is none is a 0. Hosts may share a queue, and each then",
            "tells of the whole of it: take the greatest of them (`max by (queue)`), never the sum.",
            "",
            "A scrape reads what is small, and the events that are new; it costs the same however many jobs are done.",
            "Counting the claimable jobs, and the items that failed, takes longer the more there are, and is done",
            f"beside the scrapes: each starts a count, waits {COUNT_WAIT_S * 1000:g} ms for it, and shows the one",
            "before where that is not enough.",
            f"A queue that does not answer within {ANSWER_S:g} s cannot be read.",
            "",
            *_rows(QUEUE_SERIES),
            "",
        ]
    )


def reasons_page() -> str:
    """docs/reasons.md."""
    return "\n".join(
        [
            "# Reasons",
            "",
            "<!-- Written by `python -m remediator.reference`; change remediator/reasons.py, not this page. -->",
            "",
            "Why an episode waits, why it was closed or a part of it given up, and why an alert was refused. They",
            "are in `gpuwarden status`, in `gpuwarden ledger`, and in the label `reason` of",
            "`gpuwarden_remediator_episodes_held` and `gpuwarden_remediator_alerts_total`.",
            "",
            "| reason | meaning |",
            "|---|---|",
            *(f"| `{reason}` | {reason.text} |" for reason in Reason),
            "",
        ]
    )


def _rows(series: Catalogue) -> Iterator[str]:
    yield "| series | type | labels | unit | meaning | absent when |"
    yield "|---|---|---|---|---|---|"
    for name, its in series.items():
        labels = ", ".join(f"`{label}`" for label in its.labels)
        yield f"| `{name}` | {its.kind} | {labels} | {unit_of(name, its.meaning)} | {its.meaning} | {its.absent} |"


def _section(role: str, settings: type[BaseSettings]) -> Iterator[str]:
    yield f"## `gpuwarden remediator {role}`"
    yield ""
    yield (settings.__doc__ or "").strip()
    yield ""
    yield from table(settings)
    yield ""


if __name__ == "__main__":
    sys.exit(main())
