"""Curves from a real Prometheus which scrapes the series that a test sets."""

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from remediator.clients.prometheus_range import Curves, Found
from tests.remediator import builders as build
from tests.remediator import prometheus as real
from tests.remediator.prometheus import Scraped
from tests.waiting import eventually

pytestmark = pytest.mark.needs_parts


@pytest.fixture(scope="module")
def scraped() -> Iterator[Scraped]:
    with Scraped() as host:
        yield host


@pytest.fixture(scope="module")
def running(scraped: Scraped, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real.prometheus(tmp_path_factory.mktemp("prometheus") / "its", scraped.address) as url:
        yield url


@pytest.fixture
def host(scraped: Scraped) -> Scraped:
    """The scraped host. Each test uses its own containers."""
    scraped.series = None
    return scraped


@pytest.fixture
def curves(running: str) -> Iterator[Curves]:
    with closing(Curves([running], around_s=60.0)) as its:
        yield its


BEAT = "gpuwarden_job_step_beat_age_seconds"
USE = "gpuwarden_container_gpu_utilization_ratio"
RAM = "gpuwarden_container_memory_bytes"


def around_now(curves: Curves, container: str) -> Found:
    now = time.time()
    episode, place = build.episode(opened_at=now), build.evidence(container=container)
    return curves.begin(episode, place, now=now, within_s=4.5).result(10.0)  # as a capture of 5 s asks


def values(curves: Curves, metric: str, container: str) -> list[float | None]:
    """The points of one series in the last minute, one per second."""
    return [value for each in around_now(curves, container)[0] if each.metric == metric for value in each.values]


def known(curves: Curves, metric: str, container: str) -> list[float]:
    return [value for value in values(curves, metric, container) if value is not None]


def test_step_beat_that_stops_and_missed_scrape_are_in_the_curve(host: Scraped, curves: Curves, running: str) -> None:
    other_series = {(USE, 'container="its",gpu="GPU-0"'): 0.0, (RAM, 'container="its"'): 2.0**30}
    host.series = {
        (BEAT, 'container="its",worker="w1"'): 1.0,
        (BEAT, 'container="its",worker="w2"'): 999.0,
        **other_series,
    }
    eventually(lambda: known(curves, BEAT, "its")[-1:] == [1.0], "the step beat is recent")
    host.series = {(BEAT, 'container="its",worker="w1"'): 130.0, **other_series}
    eventually(lambda: known(curves, BEAT, "its")[-1:] == [130.0], "the step beat is old")
    host.series = None
    eventually(lambda: values(curves, BEAT, "its")[-1] is None, "the scrape is missed")

    found, notes = around_now(curves, "its")

    assert [(each.metric, each.gpu) for each in found] == [(BEAT, None), (USE, "GPU-0"), (RAM, None)]
    beat, use, ram = (each.values for each in found)
    assert sorted({value for value in beat if value is not None}) == [1.0, 130.0]
    assert beat.index(1.0) < beat.index(130.0)
    assert (beat[0], beat[-1]) == (None, None)
    assert (set(use), set(ram)) == ({None, 0.0}, {None, round(2**30, -4)})
    assert notes == [f"no curve of heartbeat age, GPU memory: {running} has no samples"]


def test_hostile_name_matches_only_its_own_series(host: Scraped, curves: Curves) -> None:
    hostile = 'c1"} or {container="other"} #\\'
    on_the_page = hostile.replace("\\", "\\\\").replace('"', '\\"')
    host.series = {(RAM, f'container="{on_the_page}"'): 7.0, (RAM, 'container="other"'): 9.0}

    eventually(lambda: known(curves, RAM, "other"), "it is scraped")
    assert set(known(curves, RAM, hostile)) == {7.0}
    assert known(curves, RAM, hostile + "\n\ud800") == []
