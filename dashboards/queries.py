"""Read the PromQL of a rendered dashboard, with Grafana's variables replaced."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|([A-Za-z_]\w*))")


@dataclass(frozen=True, kw_only=True)
class PanelQuery:
    """One query of one panel, ready for Prometheus."""

    panel_title: str
    expr: str


def queries(
    dashboard: Mapping[str, Any], *, host: str = ".*", worker: str = ".*", rate_interval: str = "1m"
) -> list[PanelQuery]:
    """All queries of all panels, in page order.

    Args:
        dashboard: content of `overview.json`.
        host: regular expression.
        worker: regular expression.
        rate_interval: PromQL duration, at least four scrape intervals.

    Raises:
        ValueError: a query uses a variable without a value here.
    """
    values = {"host": host, "worker": worker, "__rate_interval": rate_interval}
    return [
        PanelQuery(panel_title=panel["title"], expr=fill_in(target["expr"], values))
        for panel in panels(dashboard)
        for target in panel.get("targets", ())
    ]


def panels(dashboard: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All panels except rows, including panels in collapsed rows."""
    for panel in dashboard.get("panels", ()):
        if panel["type"] == "row":
            yield from panels(panel)
        else:
            yield panel


def fill_in(expr: str, values: Mapping[str, str]) -> str:
    """Replace Grafana's variables by their values. Raises ValueError if one has no value."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in values:
            raise ValueError(f"variable ${name} has no value (known: {', '.join(values)}): {expr}")
        return values[name]

    return _VARIABLE.sub(value, expr)
