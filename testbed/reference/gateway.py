"""docs/reference/metrics-gateway.md: the metrics of gateways."""

from collections.abc import Mapping

from gpuwarden.docs_pages import unit_of
from gpuwarden.gateway.metrics import METRICS, OUTCOMES, REASONS, REPORTED, Metric

_INTRO = """# Metrics of the gateway

<!-- Written by `python -m testbed.reference`; change gpuwarden/gateway/metrics.py, not this page. -->

`/metrics` of `gpuwarden gateway host` and `gpuwarden gateway central` publishes these metrics
([gateway](../how-to/gateway.md)). The scrape configuration sets the label `host`. Counters start at 0 with the program.
`/reports` has the series of [other hosts](../how-to/unscraped-hosts.md), and `gpuwarden_gateway_host_*` of each host.

| series | type | labels | unit | meaning |
|---|---|---|---|---|
"""


def page() -> str:
    """Render the page."""
    every = (*METRICS, *REPORTED)
    absent = [f"| `{each.name}` | {each.absent} |" for each in every]
    rows = [*map(_row, every), "", "| series | absent when |", "|---|---|", *absent, ""]
    rows += ["## Outcomes", "", "`operation` is a path of the gateway's `/openapi.json`, such as `claim`.", ""]
    rows += [*_table("outcome", OUTCOMES), ""]
    rows += ["## Reasons", "", "`caller` is a worker's folder, a host, or `unknown`.", "", *_table("reason", REASONS)]
    return _INTRO + "\n".join([*rows, ""])


def _row(its: Metric) -> str:
    labels, kind = ", ".join(f"`{label}`" for label in its.labels), "counter" if its.labels else "gauge"
    return f"| `{its.name}` | {kind} | {labels} | {unit_of(its.name, its.meaning)} | {its.meaning} |"


def _table(name: str, meanings: Mapping[str, str]) -> list[str]:
    return [f"| {name} | meaning |", "|---|---|", *(f"| `{each}` | {text} |" for each, text in meanings.items())]
