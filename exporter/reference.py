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
from gpuwarden.docs_pages import by_heading, unit_of
from gpuwarden.settings import tables, write_pages

DOCS: Final = Path(__file__).resolve().parent.parent / "docs" / "reference"

METRICS: Final = {
    "Thresholds": r"_threshold_|_page_after_ratio|_xid_fatal_",
    "Workers": r"^gpuwarden_(workers?|statefiles)_",
    "Inactivity and limits of jobs": r"^gpuwarden_job_(inactive|stall|stuck|health|budget)",
    "Jobs": r"^gpuwarden_job_",
    "Gangs": r"^gpuwarden_gang_",
    "Tasks of other runners": r"^gpuwarden_task",
    "Activity of containers": r"^gpuwarden_container_(\w+_idle|gpu_lost|gpu_saturated|gpu_last_busy|no_progress)_",
    "GPU use of containers": r"^gpuwarden_container_(gpu|recyclable)",
    "Containers": r"^gpuwarden_container_",
    "Servers": r"^gpuwarden_server_",
    "Tenants on demand": r"^gpuwarden_on_demand_",
    "GPU drivers": r"^gpuwarden_driver_",
    "Health of GPUs": r"^gpuwarden_gpu_(xid|temperature|power|\w+_clock|throttled|ecc|remapped|row|pcie)",
    "GPUs": r"^gpuwarden_(gpu|node)_",
    "Exporter": r"^gpuwarden_(exporter|build|collector|sample)_",
}
"""Headings of the metrics, and which belong there: the first that matches."""

SETTINGS: Final = {
    "runtime_dir": "Exporter and web server",
    "docker": "Containers",
    "pods": "Kubernetes",
    "nvml": "GPUs",
    "gpu_idle_ratio": "Idle and saturated",
    "dead_after_s": "Conditions of jobs and workers",
    "vram_floor_mib": "VRAM budgets",
    "probe_interval_s": "Probes of servers",
    "not_ready_s": "Alerts for operators",
}
"""The first setting under each heading."""


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
            "The metrics at `/metrics` of the exporter. The scrape configuration sets the label `host`.",
            "",
            "An unknown value is an absent series, never 0. Some metrics are NaN instead: after a missed scrape,",
            "Prometheus would repeat an absent series for five minutes. The second table of each section says when a",
            "metric is absent or NaN, and where it comes from.",
            "",
            "- While a source or collector fails (`gpuwarden_collector_success`), its metrics are absent.",
            f"- While the last sample is older than {SNAPSHOT_FRESH_S:g} s, only the metrics of [Exporter](#exporter)",
            "  and [Thresholds](#thresholds) are present.",
            "- With `--simulate-gpu`, all GPU metrics come from its file.",
            "- The Prometheus client library adds `process_*`, `python_gc_*` and `python_info`.",
            "",
            *_metrics(),
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
            "`gpuwarden exporter` takes each setting as an option or from the environment. An option wins.",
            *tables(Settings, SETTINGS),
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


def _metrics() -> Iterator[str]:
    found = {_checked(family).sample_name: family for family in published()}
    headings = by_heading(found, METRICS)
    for heading in sorted(headings, key=_ORDER.index):
        families = [found[name] for name in headings[heading]]
        yield from (f"## {heading}", "")
        yield from ("| series | type | labels | unit | meaning |", "|---|---|---|---|---|")
        yield from (_row(family) for family in families)
        yield from ("", "| series | source | absent when, or NaN |", "|---|---|---|")
        yield from (_source_row(family) for family in families)
        yield ""


_ORDER: Final = (
    "Workers", "Jobs", "Inactivity and limits of jobs", "Gangs", "Tasks of other runners", "Containers",
    "Activity of containers", "GPU use of containers", "Servers", "Tenants on demand", "GPUs", "Health of GPUs",
    "GPU drivers", "Exporter", "Thresholds",
)  # fmt: skip


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    unit = family.values or unit_of(family.sample_name, family.documentation)
    return f"| `{family.sample_name}` | {family.type} | {labels} | {unit} | {_cell(family.documentation)} |"


def _source_row(family: Family) -> str:
    return f"| `{family.sample_name}` | {_cell(family.source)} | {family.absent} |"


def _checked(family: Family) -> Family:
    name = family.sample_name
    if not family.source.strip():
        raise ValueError(f"{name} has no source: add `source`")
    if not family.absent.strip():
        raise ValueError(f"{name} has no text when it is absent or NaN: add `absent`")
    return family


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
