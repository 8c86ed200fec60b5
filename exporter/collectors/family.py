"""One small way to build a family: samples that are `None` are left out, for unknown is absent."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Row = tuple[Sequence[str], float | None]


def gauge(name: str, help_text: str, labels: Sequence[str], rows: Iterable[Row]) -> GaugeMetricFamily:
    """A gauge family of the rows whose value is known."""
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family


def counter(name: str, help_text: str, labels: Sequence[str], rows: Iterable[Row]) -> CounterMetricFamily:
    """A counter family, its name without `_total`, of the rows whose value is known."""
    family = CounterMetricFamily(name, help_text, labels=labels)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family
