"""Limits that rules compare with."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from exporter.collectors.family import gauge
from exporter.model.thresholds import GAUGES, Thresholds


def families(thresholds: Thresholds) -> Iterable[Metric]:
    """Yield one gauge per row, and an info series for each fatal XID."""
    for row in GAUGES:
        value = float(getattr(thresholds, row.field))
        rows = [((), value)]
        yield gauge(row.name, row.help_text, (), rows, source=f"`{row.option}`", absent="never", values=row.values)
    yield gauge(
        "gpuwarden_gpu_xid_fatal_info",
        "GPU errors with this XID raise an alert; always 1.",
        ("xid",),
        [((str(xid),), 1.0) for xid in thresholds.xids_fatal],
        source="`--xids-fatal`",
        absent="for other numbers",
    )
