"""Health of the exporters."""

from typing import Final

from dashboards.expressions import (
    EXPORTER_KNOWN,
    HOST,
    WORKERS_KNOWN,
    aggregate,
    hosts_down,
    or_none,
    or_zero,
    targets_up,
)
from dashboards.panels import Panel, Query, ValueText

_SUCCESS: Final = aggregate("min", ("host", "collector"), "gpuwarden_collector_success", where=HOST)
_EXPORTERS: Final = "gpuwarden_exporter_info"

PANELS: Final = (
    Panel(
        title="Exporters up",
        description="Exporters that Prometheus can scrape now.",
        unit="short",
        queries=(Query(expr=targets_up(_EXPORTERS), legend="up"),),
        kind="number",
        width=5,
    ),
    Panel(
        title="Exporters down",
        description="Hosts whose exporter answered within a day but does not now: down, or not scraped. They are not "
        "monitored, and their alerts resolve without a recovery.",
        unit="short",
        queries=(Query(expr=hosts_down(_EXPORTERS), legend="hosts"),),
        kind="number",
        width=5,
        levels={1: "red"},
    ),
    Panel(
        title="Collectors failing",
        description="Sources and collectors that fail now. Their series are absent and their values unknown, so no "
        "condition that needs them is met.",
        unit="short",
        queries=(Query(expr=or_zero(f"count({_SUCCESS} == 0)", EXPORTER_KNOWN), legend="failing"),),
        kind="number",
        width=5,
        levels={1: "red"},
    ),
    Panel(
        title="Duplicate worker files",
        description="Worker files ignored because another worker has the same name. Rename one of the two workers.",
        unit="short",
        queries=(
            Query(
                expr=f"sum({aggregate('max', ('host',), 'gpuwarden_workers_duplicate', where=HOST)})",
                legend="duplicates",
            ),
        ),
        kind="number",
        width=5,
        levels={1: "orange"},
    ),
    Panel(
        title="Exporter versions",
        description="Hosts per exporter version. More than one means an upgrade in progress or forgotten.",
        unit="short",
        queries=(
            Query(
                expr=f"count by (version) (group by (host, version) (gpuwarden_exporter_info{{{HOST}}}))",
                legend="{{version}}",
            ),
        ),
        kind="number",
        width=4,
    ),
    Panel(
        title="Collectors",
        description="Result of each source and collector at each scrape. `sampler` samples the host itself: while it "
        "fails, the exporter publishes nothing of the host.",
        unit="short",
        queries=(Query(expr=_SUCCESS, legend="{{host}} {{collector}}"),),
        kind="states",
        meanings={"0": ValueText(text="failed", color="red"), "1": ValueText(text="ok", color="green")},
    ),
    Panel(
        title="Collector duration",
        description="Duration of each source and collector on the slowest selected host. The exporter samples once a "
        "second, so a `sampler` above 1 s delays samples. Container engines and drivers are read in "
        "separate threads.",
        unit="s",
        queries=(
            Query(
                expr=aggregate("max", ("collector",), "gpuwarden_collector_duration_seconds", where=HOST),
                legend="{{collector}}",
            ),
        ),
        levels={1: "orange"},
    ),
    Panel(
        title="Sample age",
        description="Age of each host's newest sample at the scrape: normally at most one second. Above 5 s the "
        "exporter publishes nothing of the host.",
        unit="s",
        queries=(
            Query(expr=aggregate("max", ("host",), "gpuwarden_sample_age_seconds", where=HOST), legend="{{host}}"),
        ),
        levels={5: "red"},
    ),
    Panel(
        title="Unknown samples",
        description="Samples per second with an unknown container value, by value and reason. Each container is "
        "sampled once a second. `none` is good. With a constant rate no stall is detected in those "
        "containers.",
        unit="cps",
        queries=(
            Query(
                # max before sum: a host scraped twice counts once.
                expr=or_none(
                    "sum by (field, reason) (max by (host, container, field, reason) "
                    f"(rate(gpuwarden_container_unknown_samples_total{{{HOST}}}[$__rate_interval])))",
                    EXPORTER_KNOWN,
                    "field",
                    "reason",
                ),
                legend="{{field}}: {{reason}}",
            ),
        ),
        width=12,
    ),
    Panel(
        title="Invalid state files",
        description="State files that the exporter cannot trust now, by reason. Each one hides only its own worker. "
        "`none` is good.",
        unit="short",
        queries=(
            Query(
                expr=or_none(
                    "sum by (reason) "
                    f"({aggregate('max', ('host', 'reason'), 'gpuwarden_statefiles_invalid', where=HOST)})",
                    WORKERS_KNOWN,
                    "reason",
                ),
                legend="{{reason}}",
            ),
        ),
        width=12,
    ),
)
