"""Curves around a tripped condition: the queries and the parsed answers."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from remediator.clients.prometheus_range import (
    NAMES,
    POINTS_MAX,
    Curve,
    CurvesError,
    Window,
    expression,
    metrics,
    quoted,
    read,
    window,
)
from remediator.plan import Subject
from tests.exporter import golden
from tests.remediator import builders as build

pytestmark = pytest.mark.pure

BEAT = "gpuwarden_job_step_beat_age_seconds"
HEARTBEAT = "gpuwarden_worker_heartbeat_age_seconds"
UNANSWERED = "gpuwarden_server_probe_failing_seconds"
USE = "gpuwarden_container_gpu_utilization_ratio"
GPU_MEMORY = "gpuwarden_container_gpu_memory_bytes"
RAM = "gpuwarden_container_memory_bytes"
OVER = Window(at=1000, step_s=10, points=4)


# --- queries


@pytest.mark.parametrize(
    ("subject", "wanted"),
    [
        (Subject.WORKER, [BEAT, HEARTBEAT, USE, GPU_MEMORY, RAM]),
        (Subject.SERVER, [UNANSWERED, USE, GPU_MEMORY, RAM]),
        (Subject.TENANT, [USE, GPU_MEMORY, RAM]),
    ],
)
def test_each_kind_of_target_has_its_metrics(subject: Subject, wanted: list[str]) -> None:
    assert metrics(subject) == wanted


def test_names_of_a_worker_are_quoted_in_the_query() -> None:
    hostile = 'c1"} or vector(1) #\\\n\x00☃\ud800'

    asked = expression([BEAT, RAM], host="box1", container=hostile, episode=build.episode(worker="w.1"))

    its = f'{{__name__=~"{BEAT}|{RAM}",host="box1",container="c1\\"}} or vector(1) #\\\\\\n\\u0000☃\\\\ud800"'
    assert asked == f'max by (__name__, gpu) ({its},worker=~"w\\\\.1|"}})'


def test_query_of_a_server_excludes_series_of_workers() -> None:
    asked = expression([RAM], host="box1", container="c1", episode=build.server_episode())

    assert asked == f'max by (__name__, gpu) ({{__name__=~"{RAM}",host="box1",container="c1",worker=~""}})'


@given(some.text())
def test_quoted_name_never_ends_its_string(name: str) -> None:
    assert re.fullmatch(r'"(?:[^"\\\n]|\\.)*"', quoted(name))


def test_exporter_publishes_the_series_and_labels_of_every_curve() -> None:
    published = dict(re.findall(r"^(\w+)\{(.*?)\} ", golden.PATH.read_text(encoding="utf-8"), re.MULTILINE))

    for metric in NAMES:
        labels = set(re.findall(r"(\w+)=", published[metric]))
        expected = {USE: {"container", "gpu"}, GPU_MEMORY: {"container", "gpu"}, BEAT: {"container", "worker"},
                    HEARTBEAT: {"container", "worker"}}  # fmt: skip
        assert labels == expected.get(metric, {"container"}), metric


# --- windows


@pytest.mark.parametrize(
    ("trip_at", "now", "begins", "ends"),
    [
        pytest.param(5000.0, 5000.0, 4100, 5000, id="now"),
        pytest.param(5000.0, 5060.7, 4100, 5060, id="a minute ago"),
        pytest.param(5000.0, 90_000.0, 4100, 5900, id="a day ago: as long after as before"),
        pytest.param(5000.0, 4000.0, 3100, 4000, id="clock set back"),
    ],
)
def test_window_covers_the_time_around_the_trip(trip_at: float, now: float, begins: int, ends: int) -> None:
    found = window(trip_at, now=now, around_s=900.0)

    assert found.until == ends
    assert begins - found.step_s <= found.at <= begins


@given(around_s=some.floats(0.1, 86_400.0), since_s=some.floats(-1e6, 1e6), at=some.floats(1e9, 2e9))
def test_number_and_step_of_points_are_within_limits(around_s: float, since_s: float, at: float) -> None:
    found = window(at, now=at + since_s, around_s=around_s)

    span_s = found.until - found.at
    assert 2 <= found.points <= POINTS_MAX
    assert around_s <= span_s <= 2 * around_s + found.step_s
    assert found.step_s <= 2 * around_s / (POINTS_MAX - 1) + 1


# --- answers


def answer(*lines: tuple[dict[str, str], list[Any]], **more: Any) -> bytes:
    result = [{"metric": metric, "values": values} for metric, values in lines]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}, **more}).encode()


def drawn(*values: Any, gpu: str | None = None, metric: str = BEAT) -> list[Curve]:
    line = {"__name__": metric} | ({} if gpu is None else {"gpu": gpu})
    return list(read(answer((line, list(values))), OVER, source="http://a"))


def test_sample_is_put_at_its_time_and_missing_samples_are_gaps() -> None:
    (curve,) = drawn([1000, "0.25"], [1030.0, "30.1234567"])

    assert curve == Curve(
        metric=BEAT, gpu=None, source="http://a", at=1000, step_s=10, values=[0.25, None, None, 30.1235]
    )


@pytest.mark.parametrize("odd", ["NaN", "+Inf", "-Inf"])
def test_value_that_is_not_finite_is_a_gap(odd: str) -> None:
    (curve,) = drawn([1000, odd], [1010, "0"])

    assert curve.values == [None, 0.0, None, None]


@pytest.mark.parametrize("at", [990, 1040, float("nan"), float("inf")])
def test_sample_outside_the_window_is_dropped(at: float) -> None:
    assert drawn([at, "1"]) == []


def test_curve_without_samples_is_dropped() -> None:
    assert drawn() == []
    assert drawn([1000, "NaN"]) == []


def test_curves_are_ordered_by_metric_and_gpu() -> None:
    lines = [({"__name__": metric, "gpu": gpu}, [[1000, "1"]]) for metric in (GPU_MEMORY, USE) for gpu in ("b", "a")]

    found = read(answer(*lines, ({"__name__": "another"}, [[1000, "1"]])), OVER, source="http://a")

    assert [(each.metric, each.gpu) for each in found] == [(USE, "a"), (USE, "b"), (GPU_MEMORY, "a"), (GPU_MEMORY, "b")]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        pytest.param(b"<html>", "invalid answer: it: Invalid JSON", id="not JSON"),
        pytest.param(answer(({}, [[1000, "many"]])), "values", id="not a number"),
        pytest.param(
            b'{"status": "success", "data": {"resultType": "vector", "result": []}}', "resultType", id="not a matrix"
        ),
        pytest.param(answer(warnings=["store 2 did not answer"]), "store 2 did not answer", id="partial answer"),
    ],
)
def test_invalid_or_partial_answer_is_an_error(found: bytes, reason: str) -> None:
    with pytest.raises(CurvesError, match=reason):
        read(found, OVER, source="http://a")
