"""The watcher itself: whether the exporters, which would see a wedge, are well."""

from typing import Final

from dashboards.expressions import (
    EXPORTER_KNOWN,
    HOST,
    WORKERS_KNOWN,
    answering,
    each,
    gone,
    or_none,
    or_zero,
)
from dashboards.panels import Meaning, Panel, Query

_SUCCESS: Final = each("min", ("host", "collector"), "gpuwarden_collector_success", where=HOST)
_EXPORTERS: Final = "gpuwarden_exporter_info"

PANELS: Final = (
    Panel(
        title="Exporters up",
        reads="Exporters that Prometheus reaches now.",
        unit="short",
        queries=(Query(expr=answering(_EXPORTERS), legend="up"),),
        kind="number",
        width=5,
    ),
    Panel(
        title="Exporters down",
        reads="Hosts whose exporter answered within a day and does not now, down or no longer scraped. Nobody watches "
        "them; their alerts resolve without anything having recovered.",
        unit="short",
        queries=(Query(expr=gone(_EXPORTERS), legend="hosts"),),
        kind="number",
        width=5,
        levels={1: "red"},
    ),
    Panel(
        title="Collectors failing",
        reads="Sources and collectors that fail now. The series of a failing one are absent, and what it would "
        "have told is unknown: nothing trips on it.",
        unit="short",
        queries=(Query(expr=or_zero(f"count({_SUCCESS} == 0)", EXPORTER_KNOWN), legend="failing"),),
        kind="number",
        width=5,
        levels={1: "red"},
    ),
    Panel(
        title="Duplicate worker files",
        reads="Worker files left out because another claims the same name. Two workers share a name: rename one.",
        unit="short",
        queries=(
            Query(
                expr=f"sum({each('max', ('host',), 'gpuwarden_workers_duplicate', where=HOST)})", legend="duplicates"
            ),
        ),
        kind="number",
        width=5,
        levels={1: "orange"},
    ),
    Panel(
        title="Exporter versions",
        reads="How many hosts run each version of the exporter. More than one is an upgrade under way, or forgotten.",
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
        reads="Whether each source and collector did its work at each scrape. `sampler` is the look at the host "
        "itself: while it fails, nothing of the host is published.",
        unit="short",
        queries=(Query(expr=_SUCCESS, legend="{{host}} {{collector}}"),),
        kind="states",
        meanings={"0": Meaning(text="failed", color="red"), "1": Meaning(text="ok", color="green")},
    ),
    Panel(
        title="Collector duration",
        reads="How long each source and collector took; the slowest of the chosen hosts. The samples are a "
        "second apart, so a look, sampler, over 1 s delays them; engines and drivers are asked beside it.",
        unit="s",
        queries=(
            Query(
                expr=each("max", ("collector",), "gpuwarden_collector_duration_seconds", where=HOST),
                legend="{{collector}}",
            ),
        ),
        levels={1: "orange"},
    ),
    Panel(
        title="Sample age",
        reads="Age of the newest look at each host when it was scraped: about a second at most. Over 5 s the "
        "exporter publishes nothing of the host rather than the past.",
        unit="s",
        queries=(Query(expr=each("max", ("host",), "gpuwarden_sample_age_seconds", where=HOST), legend="{{host}}"),),
        levels={5: "red"},
    ),
    Panel(
        title="Unknown samples",
        reads="Samples in each second that left something of a container unknown, by what and why; there is one "
        "sample a second for each container. `none` is well. Steady values blind the stall condition for "
        "those containers.",
        unit="cps",
        queries=(
            Query(
                # max before sum: a host scraped twice counts once.
                expr=or_none(
                    "sum by (what, reason) (max by (host, container, what, reason) "
                    f"(rate(gpuwarden_unknown_samples_total{{{HOST}}}[$__rate_interval])))",
                    EXPORTER_KNOWN,
                    "what",
                    "reason",
                ),
                legend="{{what}}: {{reason}}",
            ),
        ),
        width=12,
    ),
    Panel(
        title="Invalid state files",
        reads="State files that cannot be trusted now, by reason. Each costs its own worker's series only. "
        "`none` is well.",
        unit="short",
        queries=(
            Query(
                expr=or_none(
                    f"sum by (reason) ({each('max', ('host', 'reason'), 'gpuwarden_statefiles_invalid', where=HOST)})",
                    WORKERS_KNOWN,
                    "reason",
                ),
                legend="{{reason}}",
            ),
        ),
        width=12,
    ),
)
