"""One small way to build a family: samples that are `None` are left out, for unknown is absent.

But a figure that a rule compares which acts, and that is there while all is well, is `or_nan` while it is unknown. What
is left out Prometheus notes at the next scrape; but one that was down meanwhile does not miss it, and repeats its last
value for five minutes: an idleness from before would accuse who is busy by now. NaN takes its place, compares with
nothing, and beside a number `min` and `max` do not see it.

A family says where its figures come from and when they are missing. docs/metrics.md lists both, and no scrape sends
them. It keeps its rows as they are: what renders a scrape reads these. The samples of Prometheus' own library, an
object and a dictionary each, are made only when they are asked for.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

Row = tuple[Sequence[str], float | None]


class Family(Metric):
    """A gauge, or a counter, whose name is without `_total`: label names, and rows of label values and a value.

    `source` is where its figures come from: who is asked, by which call or file. `absent` is when a series does not
    exist, or is NaN. `values` is the unit where the name does not tell it.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        kind: str,
        labels: Sequence[str],
        rows: Iterable[Row],
        *,
        source: str,
        absent: str,
        values: str = "",
    ) -> None:
        super().__init__(name, help_text, kind)
        del self.samples  # so that they are made, by `__getattr__`, once they are asked for
        self.sample_name = f"{name}_total" if kind == "counter" else name
        self.labels = tuple(labels)
        self.rows = [(tuple(values), value) for values, value in rows if value is not None]
        self.source = source
        self.absent = absent
        self.values = values

    def __getattr__(self, name: str) -> Any:
        """The rows as samples of Prometheus' library."""
        if name != "samples":
            raise AttributeError(name)
        self.samples = [
            Sample(self.sample_name, dict(zip(self.labels, values, strict=True)), value) for values, value in self.rows
        ]
        return self.samples


def or_nan(figure: float | None) -> float:
    """The figure, or NaN while it is unknown, so that no older one is taken for it."""
    return math.nan if figure is None else figure


def gauge(
    name: str,
    help_text: str,
    labels: Sequence[str],
    rows: Iterable[Row],
    *,
    source: str,
    absent: str,
    values: str = "",
) -> Family:
    """A gauge family of the rows whose value is known."""
    return Family(name, help_text, "gauge", labels, rows, source=source, absent=absent, values=values)


def counter(
    name: str,
    help_text: str,
    labels: Sequence[str],
    rows: Iterable[Row],
    *,
    source: str,
    absent: str,
    values: str = "",
) -> Family:
    """A counter family, its name without `_total`, of the rows whose value is known."""
    return Family(name, help_text, "counter", labels, rows, source=source, absent=absent, values=values)
