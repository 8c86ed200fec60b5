"""Families of series as the text that Prometheus reads: its text format 0.0.4, or OpenMetrics 1.0.0.

Gauges and counters only, which is all that is published here. The two formats differ in the name of a counter's family
and in the last line. From one scrape to the next nearly every label stays as it was: its text is kept, as long as some
series has it.

Formats: https://prometheus.io/docs/instrumenting/exposition_formats/ and
https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client.core import Metric

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_OPENMETRICS_VERSIONS: Final = ("", "0.0.1", "1.0.0")
"""Those that what is rendered here is good for; without one, any is."""

_NOT_FINITE: Final = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


class Renderer:
    """Renders scrape after scrape. Safe to ask from several threads: each leaves the labels that it has used."""

    def __init__(self) -> None:
        self._labels: Mapping[tuple[str, ...], str] = {}

    def render(self, families: Iterable[Metric], *, openmetrics: bool) -> bytes:
        """One page.

        Raises:
            TypeError: a family is neither gauge nor counter.
        """
        known, used = self._labels, dict[tuple[str, ...], str]()
        lines: list[str] = []
        for family in families:
            if family.type not in ("gauge", "counter"):
                raise TypeError(f"{family.name} is a {family.type}: only gauges and counters are rendered here")
            name = family.name if openmetrics or family.type == "gauge" else f"{family.name}_total"
            lines.append(
                f"# HELP {name} {_escaped(family.documentation, quotes=openmetrics)}\n# TYPE {name} {family.type}\n"
            )
            for sample in family.samples:
                labels = sample.labels
                text = ""
                if labels:
                    key = (*labels, *labels.values())
                    found = used.get(key)
                    if found is None:
                        found = used[key] = known.get(key) or _braced(labels)
                    text = found
                value = repr(float(sample.value))
                lines.append(f"{sample.name}{text} {_NOT_FINITE.get(value, value)}\n")
        self._labels = used
        if openmetrics:
            lines.append("# EOF\n")
        return "".join(lines).encode()


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


def _braced(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in sorted(labels.items())) + "}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
