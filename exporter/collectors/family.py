"""One small way to build a family: samples that are `None` are left out, for unknown is absent.

Each family says where its figures come from. That stands in docs/metrics.md and is not sent with every scrape.
"""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Row = tuple[Sequence[str], float | None]


class Gauge(GaugeMetricFamily):
    """A gauge family, and the `source` of its figures: who is asked, by which call or file."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], *, source: str) -> None:
        super().__init__(name, help_text, labels=labels)
        self.source = source


class Counter(CounterMetricFamily):
    """A counter family, and the `source` of its figures: who is asked, by which call or file."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], *, source: str) -> None:
        super().__init__(name, help_text, labels=labels)
        self.source = source


def gauge(name: str, help_text: str, labels: Sequence[str], rows: Iterable[Row], *, source: str) -> Gauge:
    """A gauge family of the rows whose value is known."""
    family = Gauge(name, help_text, labels, source=source)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family


def counter(name: str, help_text: str, labels: Sequence[str], rows: Iterable[Row], *, source: str) -> Counter:
    """A counter family, its name without `_total`, of the rows whose value is known."""
    family = Counter(name, help_text, labels, source=source)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family
