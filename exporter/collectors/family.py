"""Metric families. Samples with the value `None` are left out: unknown is absent.

A gauge that remedies compare, and that is always present, is `or_nan` while it is unknown. Prometheus marks a series as
gone at the next scrape; if it misses that scrape, it repeats the old value for five minutes. NaN replaces the old value
and compares with nothing; `min` and `max` skip it next to a number.

docs/reference/metrics.md lists the source of each family and when it is absent. Families keep plain rows, which the
renderer reads; `Sample` objects are slow and made on demand.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

Row = tuple[Sequence[str], float | None]


class Family(Metric):
    """A gauge, or a counter named without `_total`: label names, and rows of label values and a value.

    `source` is where the values come from, `absent` when a series is missing or NaN, `values` the unit if the name has
    none.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        help_text: str,
        labels: Sequence[str],
        rows: Iterable[Row],
        *,
        source: str,
        absent: str,
        values: str = "",
    ) -> None:
        super().__init__(name, help_text, kind)
        del self.samples  # made on demand by `__getattr__`
        self.sample_name = f"{name}_total" if kind == "counter" else name
        self.labels = tuple(labels)
        self.rows = [(tuple(values), value) for values, value in rows if value is not None]
        self.source = source
        self.absent = absent
        self.values = values

    def __getattr__(self, name: str) -> Any:
        """Make the samples of the Prometheus library."""
        if name != "samples":
            raise AttributeError(name)
        self.samples = [
            Sample(self.sample_name, dict(zip(self.labels, values, strict=True)), value) for values, value in self.rows
        ]
        return self.samples


def or_nan(value: float | None) -> float:
    """Return the value, or NaN if it is unknown."""
    return math.nan if value is None else value


gauge: Final = partial(Family, "gauge")
counter: Final = partial(Family, "counter")
"""A family of the rows with a known value; a counter is named without `_total`."""
