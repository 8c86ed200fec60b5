"""Writes docs/metrics.md and docs/settings-exporter.md from the collectors and the settings.

`python -m exporter.reference` writes them; `--check` writes nothing and exits 1 when a page lags behind the code.
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

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"


def main(argv: list[str] | None = None) -> int:
    """Write both pages, or with `--check` compare them; 1 when one lags."""
    pages = {"metrics.md": metrics_page, "settings-exporter.md": settings_page}
    about = (__doc__ or "").partition("\n")[0]
    return write_pages(pages, module="exporter.reference", about=about, docs=DOCS, argv=argv)


def metrics_page() -> str:
    """docs/metrics.md.

    Raises:
        TypeError: a family is not made as all others are.
        ValueError: one does not say where its figures come from, or when they are missing.
    """
    return "\n".join(
        [
            "# Metrics",
            "",
            "<!-- Written by `python -m exporter.reference`; change the collectors, not this page. -->",
            "",
            "What `/metrics` of the exporter publishes, for each host. Unknown is an absent series, never a zero; a",
            "measured nothing is a 0. What a rule compares that acts is NaN while it is unknown, where the last",
            "column says so: [why](rules.md#after-prometheus-was-down). What only a failed source or collector tells",
            "is absent meanwhile, which `gpuwarden_collector_success` tells; all but the exporter's own last rows are",
            f"absent while the newest look at the host is older than {SNAPSHOT_FRESH_S:g} s. Label `host` is not among",
            "these: the scrape configuration sets it.",
            "",
            "Of several sources each has GPUs or containers of its own; with `--simulate-gpu` all figures",
            "of GPUs are from its file. Beside these there are `process_*`, `python_gc_*` and `python_info` of the",
            "exporter's own process, as every Python program with Prometheus's client library has them.",
            "",
            "| series | type | labels | unit | meaning | source | absent when, or NaN |",
            "|---|---|---|---|---|---|---|",
            *(_row(family) for family in published()),
            "",
        ]
    )


def settings_page() -> str:
    """docs/settings-exporter.md."""
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
    """Every family that the exporter publishes, without samples.

    Raises:
        TypeError: one is not made as all others are.
    """
    own = SnapshotCollector(lambda: None, host="", thresholds=Thresholds())
    collected = (families(_empty_snapshot()) for families in COLLECTORS.values())
    for family in chain(*collected, own.collect()):
        if not isinstance(family, Family):
            raise TypeError(f"{family.name} is made by neither gauge() nor counter() of exporter/collectors/family.py")
        yield family


def absent() -> dict[str, str]:
    """When each series does not exist, or is NaN, by its name."""
    return {family.sample_name: family.absent for family in published()}


def _row(family: Family) -> str:
    name = family.sample_name
    if not family.source.strip():
        raise ValueError(f"{name} does not say where its figures come from: give it a source")
    if not family.absent.strip():
        raise ValueError(f"{name} does not say when it does not exist, or is NaN: say when it is absent")
    labels = ", ".join(f"`{label}`" for label in family.labels)
    unit = family.values or unit_of(name, family.documentation)
    texts = _cell(family.documentation), _cell(family.source), family.absent
    return f"| `{name}` | {family.type} | {labels} | {unit} | {' | '.join(texts)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _empty_snapshot() -> Snapshot:
    """A host where every source answers and nothing runs: each family is there, without samples."""
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
