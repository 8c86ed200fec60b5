"""Write the remediator's reference pages: settings, metrics and reasons.

`--check` writes nothing and exits 1 if a page is outdated.
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

DOCS: Final = Path(__file__).resolve().parent.parent / "docs" / "reference"


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
            "Two processes share one ledger: `gpuwarden remediator serve` receives alerts, and",
            "`gpuwarden remediator execute` acts on them. Each takes its settings as options or from the environment;",
            "an option wins.",
            "",
            *_section("serve", ServeSettings),
            *_section("execute", ExecuteSettings),
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
            "What `/metrics` of `gpuwarden remediator serve` publishes about this host's part of the ledger",
            "and itself. Unknown is an absent series, never zero. Counters from the ledger survive restarts and",
            "deletions of old episodes. The scrape configuration sets the label `host`.",
            "With `--queue` there are also metrics of the queue: [metrics-queue.md](metrics-queue.md).",
            "",
            *_rows(SERIES),
            "",
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
            "What `/metrics` of `gpuwarden remediator serve` publishes with `--queue`. Unknown is an absent series,",
            "never zero; a count of none is 0. Hosts that share a queue each publish all of it: use the maximum",
            "(`max by (queue)`), never the sum.",
            "",
            "A scrape reads small indexes and new events, so its cost does not grow with finished jobs. Claimable jobs",
            "and failed items are counted in the background: each scrape starts a count, waits",
            f"{COUNT_WAIT_S * 1000:g} ms for it, and otherwise shows the last one. A queue that does not answer within",
            f"{ANSWER_S:g} s counts as unreachable.",
            "",
            *_rows(QUEUE_SERIES),
            "",
        ]
    )


def reasons_page() -> str:
    """docs/reference/reasons.md."""
    return "\n".join(
        [
            "# Reasons",
            "",
            "<!-- Written by `python -m remediator.reference`; change remediator/reasons.py, not this page. -->",
            "",
            "Why an episode waits or was closed, and why an alert was refused. They are in `gpuwarden status`, in",
            "`gpuwarden ledger`, and in the label `reason` of `gpuwarden_remediator_episodes_held` and",
            "`gpuwarden_remediator_alerts_total`.",
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
