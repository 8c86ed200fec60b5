"""Generate docs/reference/metrics.md and docs/reference/settings-exporter.md.

`python -m exporter.reference` writes them; `--check` exits with 1 if one is outdated.
"""

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from exporter.collectors import COLLECTORS
from exporter.collectors.family import Family
from exporter.collectors.registry import SNAPSHOT_FRESH_S, SnapshotCollector
from exporter.model.gpu import GpuReadings
from exporter.model.snapshot import Snapshot
from exporter.model.thresholds import Thresholds
from exporter.model.worker import WorkerReadings
from exporter.settings import Settings
from gpuwarden import clock
from gpuwarden.docs_pages import unit_of
from gpuwarden.settings import table, write_pages

DOCS: Final = Path(__file__).resolve().parent.parent / "docs" / "reference"


def main(argv: list[str] | None = None) -> int:
    """Write both pages, or check them."""
    pages = {"metrics.md": metrics_page, "settings-exporter.md": settings_page}
    about = (__doc__ or "").partition("\n")[0]
    return write_pages(pages, module="exporter.reference", about=about, docs=DOCS, argv=argv)


def metrics_page() -> str:
    """Render docs/reference/metrics.md.

    Raises:
        TypeError: a metric has another class.
        ValueError: a metric has no source or no text when it is absent.
    """
    return "\n".join(
        [
            "# Metrics",
            "",
            "<!-- Written by `python -m exporter.reference`; change the collectors, not this page. -->",
            "",
            "The metrics at `/metrics` of the exporter. An unknown value is an absent series, never 0. Metrics that a",
            "rule compares are NaN instead, if the last column says so: [why](../contributing/architecture.md#rules).",
            "While a source or collector fails (`gpuwarden_collector_success`), its metrics are absent. While the last",
            f"sample is older than {SNAPSHOT_FRESH_S:g} s, only the exporter's own metrics (last rows) are present.",
            "The scrape configuration sets the label `host`.",
            "",
            "With `--simulate-gpu` all GPU metrics come from its file. The Prometheus client library adds `process_*`,",
            "`python_gc_*` and `python_info` of the exporter's process.",
            "",
            "| series | type | labels | unit | meaning | source | absent when, or NaN |",
            "|---|---|---|---|---|---|---|",
            *(_row(family) for family in published()),
            "",
        ]
    )


def settings_page() -> str:
    """Render docs/reference/settings-exporter.md."""
    return "\n".join(
        [
            "# Settings of the exporter",
            "",
            "<!-- Written by `python -m exporter.reference`; change exporter/settings.py, not this page. -->",
            "",
            "`gpuwarden exporter` takes each as an option or from the environment; an option wins.",
            "",
            *table(Settings),
            "",
        ]
    )


def published() -> Iterator[Family]:
    """Yield every metric, without samples.

    Raises:
        TypeError: a metric has another class.
    """
    own = SnapshotCollector(lambda: None, host="", thresholds=Thresholds())
    collected = (families(_empty_snapshot()) for families in COLLECTORS.values())
    for family in chain(*collected, own.collect()):
        if not isinstance(family, Family):
            raise TypeError(f"{family.name}: create it with gauge() or counter() of exporter/collectors/family.py")
        yield family


def absent() -> dict[str, str]:
    """When each metric is absent or NaN, by name."""
    return {family.sample_name: family.absent for family in published()}


def _row(family: Family) -> str:
    name = family.sample_name
    if not family.source.strip():
        raise ValueError(f"{name} has no source: add `source`")
    if not family.absent.strip():
        raise ValueError(f"{name} has no text when it is absent or NaN: add `absent`")
    labels = ", ".join(f"`{label}`" for label in family.labels)
    unit = family.values or unit_of(name, family.documentation)
    texts = _cell(family.documentation), _cell(family.source), family.absent
    return f"| `{name}` | {family.type} | {labels} | {unit} | {' | '.join(texts)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _empty_snapshot() -> Snapshot:
    """A host without anything, for all metrics without samples."""
    return Snapshot(
        host="",
        taken=clock.stamp(),
        gpus=GpuReadings(source="", gpus=()),
        workers=WorkerReadings(workers=()),
        containers=(),
        sources=(),
        thresholds=Thresholds(),
    )


if __name__ == "__main__":
    sys.exit(main())
