"""The limits that rules compare with, as they are set."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from prometheus_client.core import Metric

from exporter.collectors.family import gauge
from exporter.model.thresholds import Thresholds


class Limit(NamedTuple):
    """The gauge of one field of `Thresholds`, and the option that sets it."""

    name: str
    help_text: str
    field: str
    option: str
    values: str = ""


GAUGES: Final = (
    Limit(
        "gpuwarden_gpu_idle_threshold_ratio",
        "A GPU at or under this share of its time is idle.",
        "idle_ratio",
        "--idle-ratio",
    ),
    Limit(
        "gpuwarden_ram_still_threshold_bytes",
        "RAM that moved by no more than this is still.",
        "ram_delta_bytes",
        "--ram-delta-mib",
    ),
    Limit(
        "gpuwarden_io_still_threshold_bytes_per_second",
        "A container whose processes read and write no more than this does no I/O.",
        "io_still_bytes_per_s",
        "--io-still-kib-per-s",
    ),
    Limit(
        "gpuwarden_fault_still_threshold_per_second",
        "A container with no more page faults than this touches no new memory.",
        "faults_still_per_s",
        "--faults-still-per-s",
    ),
    Limit(
        "gpuwarden_cpu_still_threshold_ratio",
        "A container that uses no more than this share of one CPU is still.",
        "cpu_still_ratio",
        "--cpu-still-ratio",
    ),
    Limit(
        "gpuwarden_gpu_lost_threshold_seconds",
        "People are told of a GPU that has been lost for this long.",
        "gpu_lost_s",
        "--gpu-lost-s",
    ),
    Limit(
        "gpuwarden_server_never_answered_threshold_seconds",
        "People are told of a server that has been asked for this long, and has never answered.",
        "never_answered_s",
        "--never-answered-s",
    ),
    Limit(
        "gpuwarden_server_silent_threshold_ratio",
        "People are told of a server that has not answered for so many times the silence that its owner allows.",
        "server_silent_times",
        "--server-silent-times",
        "ratio, 1 or more",
    ),
    Limit(
        "gpuwarden_job_slowed_threshold_ratio",
        "People are told of a job each step of which takes so many times as long as its own mean.",
        "slowed_ratio",
        "--slowed-ratio",
        "ratio, more than 1",
    ),
)


def families(thresholds: Thresholds) -> Iterable[Metric]:
    """One gauge a row, and an info series for each fatal XID."""
    for row in GAUGES:
        value = float(getattr(thresholds, row.field))
        rows = [((), value)]
        yield gauge(row.name, row.help_text, (), rows, source=f"`{row.option}`", absent="never", values=row.values)
    yield gauge(
        "gpuwarden_gpu_xid_fatal_info",
        "People are told of an error of a GPU that has this number; always 1.",
        ("xid",),
        [((str(xid),), 1.0) for xid in thresholds.xids_fatal],
        source="`--xids-fatal`",
        absent="of numbers that are not named there",
    )
