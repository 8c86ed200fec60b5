"""Families of series in Prometheus' text format 0.0.4: gauges and counters, which is all that is published here.

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
    """One page.

    Raises:
        TypeError: a family is neither gauge nor counter.
    """
    lines: list[str] = []
    for family in families:
        if family.type not in ("gauge", "counter"):
            raise TypeError(f"{family.name} is a {family.type}: only gauges and counters are rendered here")
        name = family.name if family.type == "gauge" else f"{family.name}_total"
        lines.append(f"# HELP {name} {_escaped(family.documentation)}\n# TYPE {name} {family.type}\n")
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
    return f"{name}{_braced(labels, values)} {number if isfinite(value) else _NOT_FINITE[number]}\n"


def _braced(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    pairs = sorted(zip(names, values, strict=True))
    return "{" + ",".join(f'{name}="{_quoted(value)}"' for name, value in pairs) + "}"


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
