"""Render gauges and counters in the Prometheus text format 0.0.4.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from collections.abc import Iterable
from math import isfinite
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import Family

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"

_NOT_FINITE: Final = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


def render(families: Iterable[Metric]) -> bytes:
    """Render one page.

    Raises:
        TypeError: a family has another type.
    """
    lines: list[str] = []
    for family in families:
        if family.type not in ("gauge", "counter"):
            raise TypeError(f"{family.name} is a {family.type}: only gauges and counters can be rendered")
        name = family.name if family.type == "gauge" else f"{family.name}_total"
        lines.append(f"# HELP {name} {_escape(family.documentation)}\n# TYPE {name} {family.type}\n")
        if isinstance(family, Family):
            lines += [_line(family.sample_name, family.labels, values, value) for values, value in family.rows]
        else:
            lines += [
                _line(sample.name, tuple(sample.labels), tuple(sample.labels.values()), sample.value)
                for sample in family.samples
            ]
    return "".join(lines).encode()


def _line(name: str, labels: tuple[str, ...], values: tuple[str, ...], value: float) -> str:
    number = repr(float(value))
    return f"{name}{_format_labels(labels, values)} {number if isfinite(value) else _NOT_FINITE[number]}\n"


def _format_labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join(f'{name}="{_quoted(value)}"' for name, value in pairs) + "}"


def _quoted(text: str) -> str:
    return _escape(text).replace('"', r"\"")


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
