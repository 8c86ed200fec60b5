"""The series of the remediator's pages: as they are published, and as they are documented."""

from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


@dataclass(frozen=True)
class Series:
    """A metric family: its name, meaning, and when it is absent."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    absent: str = "never"
    is_histogram: bool = False

    @property
    def kind(self) -> str:
        """Its Prometheus type."""
        return "histogram" if self.is_histogram else "counter" if self.name.endswith("_total") else "gauge"


class Catalogue(dict[str, Series]):
    """Series by name. Makes an empty family of each, with a value if it has no labels."""

    def __init__(self, *rows: Series) -> None:
        super().__init__({row.name: row for row in rows})

    def gauge(self, name: str, value: float | None = None) -> GaugeMetricFamily:
        """The family of a gauge."""
        its = self[name]
        return GaugeMetricFamily(name, its.meaning, value=value, labels=its.labels if value is None else None)

    def counter(self, name: str, value: float | None = None) -> CounterMetricFamily:
        """The family of a counter."""
        its = self[name]
        return CounterMetricFamily(name, its.meaning, value=value, labels=its.labels if value is None else None)

    def histogram(self, name: str) -> HistogramMetricFamily:
        """The family of a histogram."""
        return HistogramMetricFamily(name, self[name].meaning, labels=self[name].labels)
