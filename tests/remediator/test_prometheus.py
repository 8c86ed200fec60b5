"""The curves of a real Prometheus that scrapes a host which publishes what a test sets."""

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from remediator import curves
from remediator.curves import Said
from remediator.prometheus import Prometheus
from tests.remediator import builders as build
from tests.remediator import prometheus as real
from tests.remediator.prometheus import Scraped
from tests.waiting import eventually

pytestmark = pytest.mark.needs_parts

NOBODY = "http://127.0.0.1:9"


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
    """The host that Prometheus scrapes. Each test has containers of its own."""
    scraped.series = None
    return scraped


@pytest.fixture
def asked(running: str) -> Iterator[Prometheus]:
    with closing(Prometheus([running])) as its:
        yield its


BEAT = "gpuwarden_job_beat_age_seconds"
USE = "gpuwarden_container_gpu_utilization_ratio"
RAM = "gpuwarden_container_memory_bytes"


def all_said(prometheus: Prometheus, **place: Any) -> tuple[list[Said], list[str]]:
    """What each of them says of the minute before now, and what is noted of it."""
    now = time.time()
    sought = curves.seek(build.episode(opened_at=now), build.evidence(**place), now=now, around_s=60.0)
    said = prometheus.curves(sought, within_s=5.0).result(10.0)
    return list(said), list(curves.choose(sought, said)[1])


def values(prometheus: Prometheus, metric: str, **place: Any) -> list[float | None]:
    """What the first that has it knows of one figure, a second from point to point."""
    found = [each for said in all_said(prometheus, **place)[0] for each in said.curves if each.metric == metric]
    return list(found[0].values) if found else []


def known(prometheus: Prometheus, metric: str, **place: Any) -> list[float]:
    return [value for value in values(prometheus, metric, **place) if value is not None]


def test_its_curves_show_a_beat_that_stopped_and_a_host_that_was_not_seen_is_a_gap_and_no_zero(
    host: Scraped, asked: Prometheus, running: str
) -> None:
    still = {(USE, 'container="its",gpu="GPU-0"'): 0.0, (RAM, 'container="its"'): 2.0**30}
    host.series = {(BEAT, 'container="its",worker="w1"'): 1.0, **still}
    eventually(lambda: known(asked, BEAT, container="its")[-1:] == [1.0], "it beats")
    host.series = {(BEAT, 'container="its",worker="w1"'): 130.0, **still}
    eventually(lambda: known(asked, BEAT, container="its")[-1:] == [130.0], "it is silent")
    host.series = None
    eventually(lambda: values(asked, BEAT, container="its")[-1] is None, "it is not seen")

    (said,), notes = all_said(asked, container="its")

    beat, use, ram = (next(each.values for each in said.curves if each.metric == metric) for metric in (BEAT, USE, RAM))
    assert sorted({value for value in beat if value is not None}) == [1.0, 130.0]
    assert beat.index(1.0) < beat.index(130.0)
    assert (beat[0], beat[-1]) == (None, None)
    assert (set(use), set(ram)) == ({None, 0.0}, {None, round(2**30, -4)})
    assert notes == [f"no curve of heartbeat age, GPU memory of GPU-0: {running} has no sample of it then"]


def test_a_sample_is_not_repeated_once_it_is_older_than_allowed(
    host: Scraped, asked: Prometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample with a time of its own is repeated for five minutes, as are the last before Prometheus is stopped."""
    monkeypatch.setattr(curves, "FRESH_S", 2.0)
    host.series = {(RAM, 'container="once"'): f"5 {int(time.time() * 1000)}"}
    eventually(lambda: known(asked, RAM, container="once"), "it is there")
    host.series = {}

    eventually(lambda: values(asked, RAM, container="once")[-1:] == [None], "it is too old")
    monkeypatch.setattr(curves, "FRESH_S", 60.0)
    assert values(asked, RAM, container="once")[-1] == 5.0


def test_a_hostile_name_finds_its_own_curve_and_nobody_elses(host: Scraped, asked: Prometheus) -> None:
    hostile = 'c1"} or {container="other"} #\\'
    on_the_page = hostile.replace("\\", "\\\\").replace('"', '\\"')
    host.series = {(RAM, f'container="{on_the_page}"'): 7.0, (RAM, 'container="other"'): 9.0}

    eventually(lambda: known(asked, RAM, container="other"), "it is scraped")
    assert set(known(asked, RAM, container=hostile)) == {7.0}
    assert known(asked, RAM, container=hostile + "\n\ud800") == []


def test_of_a_pair_of_which_one_is_stopped_the_other_tells(host: Scraped, running: str) -> None:
    host.series = {(RAM, 'container="c1"'): 7.0}
    with closing(Prometheus([NOBODY, running])) as both:
        eventually(lambda: known(both, RAM), "the other one tells")

        (dead, alive), notes = all_said(both)

    assert (dead.curves, dead.why[RAM], alive.why) == ([], "All connection attempts failed", {})
    assert not any("RAM" in note for note in notes)
