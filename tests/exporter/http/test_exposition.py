"""Pages hold the same series as those of the Prometheus client library, in either format."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.registry import Collector

from exporter.collectors.family import counter as family_counter
from exporter.collectors.family import gauge
from exporter.collectors.registry import SnapshotCollector
from exporter.http.exposition import render
from exporter.model.thresholds import Thresholds
from gpuwarden import clock
from tests.exporter import builders as build
from tests.exporter import golden

Read = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]


def read(families: Iterable[Metric]) -> Read:
    """Each family of a page: name, type, help and samples. One NaN is like another."""
    return [
        (
            each.name,
            each.type,
            each.documentation,
            [(one.name, one.labels, math.nan if math.isnan(one.value) else one.value) for one in each.samples],
        )
        for each in families
    ]


class Given(Collector):
    """Publishes these families."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def registry(*families: Metric) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(Given(*families))
    return found


def test_golden_scrape_equals_the_page_of_the_client_library() -> None:
    taken = clock.stamp()
    whole = CollectorRegistry()
    whole.register(SnapshotCollector(lambda: golden.SNAPSHOT, host="box-1", thresholds=Thresholds()))
    families = list(whole.collect()) + list(
        SnapshotCollector(lambda: build.snapshot(taken=taken), host="box-1", thresholds=Thresholds()).collect()
    )
    once = registry(*{each.name: each for each in families}.values())

    text = render(once.collect()).decode()

    assert read(read_text(text)) == read(read_text(generate_latest(once).decode()))


anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.floats(allow_nan=False) | st.integers(-(2**53), 2**53)


@given(st.lists(st.tuples(anything, anything, values), max_size=5, unique_by=lambda row: row[:2]), anything)
def test_any_label_help_and_value_is_read_back(rows: list[tuple[str, str, float]], about: str) -> None:
    gauge = GaugeMetricFamily("a_gauge", about, labels=("zebra", "ape"))
    for zebra, ape, value in rows:
        gauge.add_metric((zebra, ape), value)

    text, generated = render([gauge]).decode(), generate_latest(registry(gauge)).decode()
    assert unnumbered(text) == unnumbered(generated)
    assert numbers(text) == numbers(generated)


def unnumbered(page: str) -> list[str]:
    """The lines of a page, without the values of samples: a number has several notations."""
    return [line if line.startswith("#") else line.rpartition(" ")[0] for line in page.split("\n")]


def numbers(page: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in page.split("\n") if line and not line.startswith("#")]


def test_nan_and_infinities_are_written_as_by_prometheus() -> None:
    gauge = GaugeMetricFamily("g", "", labels=("l",))
    for name, value in (("a", math.nan), ("b", math.inf), ("c", -math.inf)):
        gauge.add_metric((name,), value)

    text = render([gauge]).decode()

    assert [line.split()[1] for line in text.splitlines() if line.startswith("g{")] == ["NaN", "+Inf", "-Inf"]


def test_other_types_than_gauge_and_counter_are_rejected() -> None:
    with pytest.raises(TypeError, match="h is a histogram"):
        render([HistogramMetricFamily("h", "")])


def counter(count: int) -> CounterMetricFamily:
    found = CounterMetricFamily("c", "A counter.", labels=("container",))
    for number in range(count):
        found.add_metric((f"container-{number}",), 1.0)
    return found


def test_families_with_the_same_values_and_other_names_stay_separate() -> None:
    other = GaugeMetricFamily("g", "A gauge.", labels=("worker",))
    other.add_metric(("container-0",), 2.0)

    assert render([counter(1), other]).decode() == (
        "# HELP c_total A counter.\n# TYPE c_total counter\n"
        'c_total{container="container-0"} 1.0\n'
        "# HELP g A gauge.\n# TYPE g gauge\n"
        'g{worker="container-0"} 2.0\n'
    )


@given(st.lists(st.tuples(anything, anything, values | st.none()), max_size=5, unique_by=lambda row: row[:2]), anything)
def test_own_families_render_as_their_samples(rows: list[tuple[str, str, float | None]], about: str) -> None:
    for make in (gauge, family_counter):
        ours = make(
            "a_name", about, ("zebra", "ape"), ((row[:2], row[2]) for row in rows), source="none", absent="never"
        )
        plain = Metric(ours.name, ours.documentation, ours.type)
        plain.samples = ours.samples

        assert render([ours]) == render([plain])
        assert len(ours.samples) == sum(value is not None for _, _, value in rows)


def test_family_with_a_wrong_number_of_labels_is_rejected() -> None:
    with pytest.raises(ValueError, match="argument"):
        render([gauge("a", "", ("one",), [(("x", "y"), 1.0)], source="none", absent="never")])
