"""What is rendered is what Prometheus' own library would: the same series, in either format."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from prometheus_client.registry import Collector

from exporter.collectors.family import counter as family_counter
from exporter.collectors.family import gauge
from exporter.collectors.registry import SnapshotCollector
from exporter.http.exposition import accepts_gzip, render, wants_openmetrics
from exporter.model.thresholds import Thresholds
from gpuwarden import clock
from tests.exporter import builders as build
from tests.exporter import golden

Read = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]


def read(families: Iterable[Metric]) -> Read:
    """What a page says: of each family its name, type, help, and its samples. One NaN is like another."""
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


def test_the_golden_scrape_reads_as_prometheus_own_library_would_have_it_read() -> None:
    taken = clock.stamp()
    whole = CollectorRegistry()
    whole.register(SnapshotCollector(lambda: golden.SNAPSHOT, host="box-1", thresholds=Thresholds()))
    families = list(whole.collect()) + list(
        SnapshotCollector(lambda: build.snapshot(taken=taken), host="box-1", thresholds=Thresholds()).collect()
    )
    once = registry(*{each.name: each for each in families}.values())

    text = render(once.collect(), openmetrics=False).decode()
    openmetrics = render(once.collect(), openmetrics=True).decode()

    assert read(read_text(text)) == read(read_text(generate_latest(once).decode()))
    theirs = read_openmetrics(generate_openmetrics(once).decode())  # type: ignore[no-untyped-call]
    assert read(read_openmetrics(openmetrics)) == read(theirs)  # type: ignore[no-untyped-call]


anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.floats(allow_nan=False) | st.integers(-(2**53), 2**53)


@given(st.lists(st.tuples(anything, anything, values), max_size=5, unique_by=lambda row: row[:2]), anything)
def test_whatever_labels_help_and_values_hold_is_read_back(rows: list[tuple[str, str, float]], about: str) -> None:
    gauge = GaugeMetricFamily("a_gauge", about, labels=("zebra", "ape"))
    for zebra, ape, value in rows:
        gauge.add_metric((zebra, ape), value)

    for text, generated in (
        (render([gauge], openmetrics=False), generate_latest(registry(gauge))),
        (render([gauge], openmetrics=True), generate_openmetrics(registry(gauge))),  # type: ignore[no-untyped-call]
    ):
        assert unnumbered(text.decode()) == unnumbered(generated.decode())
        assert numbers(text.decode()) == numbers(generated.decode())


def unnumbered(page: str) -> list[str]:
    """Its lines, those of samples without their values: one number may be written in several ways."""
    return [line if line.startswith("#") else line.rpartition(" ")[0] for line in page.split("\n")]


def numbers(page: str) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in page.split("\n") if line and not line.startswith("#")]


def test_a_number_that_is_none_and_those_past_all_are_written_as_prometheus_does() -> None:
    gauge = GaugeMetricFamily("g", "", labels=("l",))
    for name, value in (("a", math.nan), ("b", math.inf), ("c", -math.inf)):
        gauge.add_metric((name,), value)

    text = render([gauge], openmetrics=False).decode()

    assert [line.split()[1] for line in text.splitlines() if line.startswith("g{")] == ["NaN", "+Inf", "-Inf"]


def test_what_is_neither_gauge_nor_counter_is_refused() -> None:
    with pytest.raises(TypeError, match="h is a histogram"):
        render([HistogramMetricFamily("h", "")], openmetrics=False)


def counter(count: int) -> CounterMetricFamily:
    found = CounterMetricFamily("c", "A counter.", labels=("container",))
    for number in range(count):
        found.add_metric((f"container-{number}",), 1.0)
    return found


def test_families_with_the_same_values_and_other_names_are_told_apart() -> None:
    other = GaugeMetricFamily("g", "A gauge.", labels=("worker",))
    other.add_metric(("container-0",), 2.0)

    assert render([counter(1), other], openmetrics=False).decode() == (
        "# HELP c_total A counter.\n# TYPE c_total counter\n"
        'c_total{container="container-0"} 1.0\n'
        "# HELP g A gauge.\n# TYPE g gauge\n"
        'g{worker="container-0"} 2.0\n'
    )


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        pytest.param("", False, id="nothing is said"),
        pytest.param("*/*", False, id="anything"),
        pytest.param("text/html", False, id="a browser"),
        pytest.param(
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
            "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            True,
            id="Prometheus 2",
        ),
        pytest.param(
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
            True,
            id="Prometheus 3",
        ),
        pytest.param("text/plain;version=0.0.4;q=0.6, */*;q=0.1", False, id="Prometheus told to take text"),
        pytest.param("text/plain, application/openmetrics-text;q=0.5", False, id="text rather"),
        pytest.param("application/openmetrics-text", True, id="without a version"),
        pytest.param("application/openmetrics-text; version=2.0.0", False, id="a version that is to come"),
        pytest.param("application/openmetrics-text;q=0", False, id="anything but that"),
        pytest.param("application/openmetrics-text;q=x", False, id="no number"),
        pytest.param(";;,=;q", False, id="nonsense"),
    ],
)
def test_openmetrics_is_for_who_asks_for_it(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept) is wanted


@pytest.mark.parametrize(
    ("accept_encoding", "accepted"),
    [("gzip", True), ("deflate, gzip;q=0.5", True), ("", False), ("gzip;q=0", False), ("identity, br", False)],
)
def test_gzip_is_for_who_takes_it(accept_encoding: str, accepted: bool) -> None:
    assert accepts_gzip(accept_encoding) is accepted


@given(st.lists(st.tuples(anything, anything, values | st.none()), max_size=5, unique_by=lambda row: row[:2]), anything)
def test_our_families_are_rendered_as_their_samples(rows: list[tuple[str, str, float | None]], about: str) -> None:
    for make in (gauge, family_counter):
        ours = make("a_name", about, ("zebra", "ape"), ((row[:2], row[2]) for row in rows), source="nobody")
        plain = Metric(ours.name, ours.documentation, ours.type)
        plain.samples = ours.samples

        for openmetrics in (False, True):
            assert render([ours], openmetrics=openmetrics) == render([plain], openmetrics=openmetrics)
        assert len(ours.samples) == sum(value is not None for _, _, value in rows)


def test_a_family_with_another_number_of_values_than_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        render([gauge("a", "", ("one",), [(("x", "y"), 1.0)], source="nobody")], openmetrics=True)
