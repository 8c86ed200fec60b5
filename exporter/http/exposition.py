"""Families of series as the text that Prometheus reads: its text format 0.0.4, or OpenMetrics 1.0.0.

Gauges and counters only, which is all that is published here. The two formats differ in the name of a counter's family
and in the last line.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ and
https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""

from collections.abc import Iterable
from math import isfinite
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import Family

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_OPENMETRICS_VERSIONS: Final = ("", "0.0.1", "1.0.0")
"""Those that what is rendered here is good for; without one, any is."""

_NOT_FINITE: Final = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


def render(families: Iterable[Metric], *, openmetrics: bool) -> bytes:
    """One page.

    Raises:
        TypeError: a family is neither gauge nor counter.
    """
    lines: list[str] = []
    for family in families:
        if family.type not in ("gauge", "counter"):
            raise TypeError(f"{family.name} is a {family.type}: only gauges and counters are rendered here")
        name = family.name if openmetrics or family.type == "gauge" else f"{family.name}_total"
        lines.append(
            f"# HELP {name} {_escaped(family.documentation, quotes=openmetrics)}\n# TYPE {name} {family.type}\n"
        )
        if isinstance(family, Family):
            lines += [_line(family.sample_name, family.labels, values, value) for values, value in family.rows]
        else:
            lines += [
                _line(sample.name, tuple(sample.labels), tuple(sample.labels.values()), sample.value)
                for sample in family.samples
            ]
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _line(name: str, labels: tuple[str, ...], values: tuple[str, ...], value: float) -> str:
    number = repr(float(value))
    return f"{name}{_braced(labels, values)} {number if isfinite(value) else _NOT_FINITE[number]}\n"


def wants_openmetrics(accept: str) -> bool:
    """Whether a header Accept asks for OpenMetrics, at least as much as for the text format."""
    wanted = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for each in accept.split(","):
        kind, *parameters = (part.strip() for part in each.split(";"))
        named = dict(parameter.partition("=")[::2] for parameter in parameters)
        if kind not in wanted:
            continue
        if kind != "text/plain" and named.get("version", "") not in _OPENMETRICS_VERSIONS:
            continue
        wanted[kind] = max(wanted[kind], _quality(named.get("q", "1")))
    return 0.0 < wanted["application/openmetrics-text"] >= wanted["text/plain"]


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether a header Accept-Encoding takes what gzip has packed."""
    for each in accept_encoding.split(","):
        coding, *parameters = (part.strip() for part in each.split(";"))
        named = dict(parameter.partition("=")[::2] for parameter in parameters)
        if coding == "gzip":
            return _quality(named.get("q", "1")) > 0
    return False


def _quality(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        return 0.0


def _braced(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in pairs) + "}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
