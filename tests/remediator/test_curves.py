"""What Prometheus is asked for about the time around a trip, and what its answers show."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from remediator.curves import (
    NAMES,
    POINTS_MAX,
    Curve,
    CurvesError,
    Said,
    Sought,
    Window,
    choose,
    named,
    quoted,
    read,
    seek,
    window,
)
from remediator.plan import Subject
from tests.exporter import golden
from tests.remediator import builders as build
from tests.remediator.builders import NOW

pytestmark = pytest.mark.pure

BEAT = "gpuwarden_job_beat_age_seconds"
HEARTBEAT = "gpuwarden_worker_heartbeat_age_seconds"
UNANSWERED = "gpuwarden_server_unanswered_seconds"
USE = "gpuwarden_container_gpu_utilization_ratio"
GPU_MEMORY = "gpuwarden_container_gpu_memory_bytes"
RAM = "gpuwarden_container_memory_bytes"
OVER = Window(at=1000, step_s=10, points=4)


def sought(episode: Any = None, place: Any = None, **how: Any) -> Sought:
    asked = {"now": NOW + 3.0, "around_s": 900.0, **how}
    return seek(episode or build.episode(), place or build.evidence(), **asked)


def wanted(metric: str, **how: Any) -> Any:
    return next(each for each in sought(**how).wanted if each.metric == metric)


# --- what is asked for


@pytest.mark.parametrize(
    ("episode", "place", "metrics"),
    [
        pytest.param(build.episode(), build.evidence(), [BEAT, HEARTBEAT, USE, GPU_MEMORY, RAM], id="a worker"),
        pytest.param(build.episode(), build.evidence(gpus=[]), [BEAT, HEARTBEAT, RAM], id="a worker without a GPU"),
        pytest.param(build.episode(), build.evidence(gpus=None), [BEAT, HEARTBEAT, RAM], id="with unknown GPUs"),
        pytest.param(build.server_episode(), build.server(), [UNANSWERED, USE, GPU_MEMORY, RAM], id="a server"),
        pytest.param(
            build.server_episode(subject=Subject.TENANT), build.server(), [USE, GPU_MEMORY, RAM], id="a tenant"
        ),
    ],
)
def test_of_each_target_its_own_figures_are_asked_for(episode: Any, place: Any, metrics: list[str]) -> None:
    assert [each.metric for each in sought(episode, place).wanted] == metrics


def test_what_is_asked_is_narrowed_to_the_target_and_to_fresh_samples() -> None:
    beat, memory = wanted(BEAT), wanted(GPU_MEMORY, place=build.evidence(gpus=["GPU-1", "GPU-0"]))

    its = f'{BEAT}{{host="box1",container="c1",worker="w1"}}'
    assert beat.expression == f"max by (gpu) ({its} unless time() - timestamp({its}) > 130)"
    assert beat.gpus == (None,)
    assert (memory.selector, memory.gpus) == (f'{GPU_MEMORY}{{host="box1",container="c1"}}', ["GPU-0", "GPU-1"])


def test_without_the_names_of_its_series_nothing_is_asked() -> None:
    for place in (None, build.evidence(container=None)):
        with pytest.raises(CurvesError, match="does not tell which container it is"):
            seek(build.episode(), place, now=NOW, around_s=900.0)


def test_a_name_stands_in_an_expression_as_a_string_and_as_nothing_else() -> None:
    hostile = 'c1"} or vector(1) #\\\n\x00☃\ud800'

    (selector,) = {wanted(RAM, place=build.evidence(container=hostile)).selector}

    assert selector == f'{RAM}{{host="box1",container="c1\\"}} or vector(1) #\\\\\\n\\u0000☃\\\\ud800"}}'


@given(some.text())
def test_no_name_ends_the_string_that_it_stands_in(name: str) -> None:
    assert re.fullmatch(r'"(?:[^"\\\n]|\\.)*"', quoted(name))


def test_every_curve_is_of_a_series_that_the_exporter_publishes_with_those_labels() -> None:
    published = dict(re.findall(r"^(\w+)\{(.*?)\} ", golden.PATH.read_text(encoding="utf-8"), re.MULTILINE))

    for metric in NAMES:
        labels = set(re.findall(r"(\w+)=", published[metric]))
        expected = {USE: {"container", "gpu"}, GPU_MEMORY: {"container", "gpu"}, BEAT: {"container", "worker"},
                    HEARTBEAT: {"container", "worker"}}  # fmt: skip
        assert labels == expected.get(metric, {"container"}), metric


# --- when


@pytest.mark.parametrize(
    ("trip_at", "now", "begins", "ends"),
    [
        pytest.param(5000.0, 5000.0, 4100, 5000, id="it has just tripped"),
        pytest.param(5000.0, 5060.7, 4100, 5060, id="a minute ago"),
        pytest.param(5000.0, 90_000.0, 4100, 5900, id="it was held for a day: as long after as before"),
        pytest.param(5000.0, 4000.0, 3100, 4000, id="the clock was set back"),
    ],
)
def test_it_reaches_from_so_long_before_the_trip_until_now(trip_at: float, now: float, begins: int, ends: int) -> None:
    found = window(trip_at, now=now, around_s=900.0)

    assert found.until == ends
    assert begins - found.step_s <= found.at <= begins


@given(around_s=some.floats(0.1, 86_400.0), since_s=some.floats(-1e6, 1e6), at=some.floats(1e9, 2e9))
def test_its_points_are_bounded_and_no_further_apart_than_that_needs(
    around_s: float, since_s: float, at: float
) -> None:
    found = window(at, now=at + since_s, around_s=around_s)

    span_s = found.until - found.at
    assert 2 <= found.points <= POINTS_MAX
    assert around_s <= span_s <= 2 * around_s + found.step_s
    assert found.step_s <= 2 * around_s / (POINTS_MAX - 1) + 1


# --- what is answered


def answer(*lines: tuple[dict[str, str], list[Any]], **more: Any) -> bytes:
    result = [{"metric": metric, "values": values} for metric, values in lines]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}, **more}).encode()


def drawn(*values: Any, gpu: str | None = None, metric: str = BEAT) -> list[Curve]:
    line = ({} if gpu is None else {"gpu": gpu}, list(values))
    return list(read(answer(line), wanted(metric), OVER, source="http://a"))


def test_what_is_known_stands_at_its_time_and_the_rest_is_a_gap() -> None:
    (curve,) = drawn([1000, "0.25"], [1030.0, "30.1234567"])

    assert curve == Curve(
        metric=BEAT, gpu=None, source="http://a", at=1000, step_s=10, values=[0.25, None, None, 30.1235]
    )
    assert curve.known == 2


@pytest.mark.parametrize("odd", ["NaN", "+Inf", "-Inf"])
def test_what_is_no_number_is_a_gap_which_any_database_can_hold(odd: str) -> None:
    (curve,) = drawn([1000, odd], [1010, "0"])

    assert curve.values == [None, 0.0, None, None]


@pytest.mark.parametrize("at", [990, 1040, float("nan"), float("inf")])
def test_what_was_not_asked_for_by_its_time_is_left_out(at: float) -> None:
    assert drawn([at, "1"]) == []


def test_a_curve_of_which_nothing_is_known_is_none() -> None:
    assert drawn() == []
    assert drawn([1000, "NaN"]) == []


def test_of_other_gpus_than_the_targets_nothing_is_drawn() -> None:
    assert [each.gpu for each in drawn([1000, "1"], gpu="GPU-0", metric=USE)] == ["GPU-0"]
    assert drawn([1000, "1"], gpu="GPU-9", metric=USE) == []
    assert drawn([1000, "1"], metric=USE) == []
    assert drawn([1000, "1"], gpu="GPU-0") == []


@pytest.mark.parametrize(
    ("found", "because"),
    [
        pytest.param(b"<html>", "cannot be read: it: Invalid JSON", id="no JSON"),
        pytest.param(answer(({}, [[1000, "many"]])), "values", id="no number"),
        pytest.param(
            b'{"status": "success", "data": {"resultType": "vector", "result": []}}', "resultType", id="no curve"
        ),
        pytest.param(answer(warnings=["store 2 did not answer"]), "store 2 did not answer", id="half an answer"),
    ],
)
def test_what_cannot_be_read_or_may_not_be_whole_is_no_answer(found: bytes, because: str) -> None:
    with pytest.raises(CurvesError, match=because):
        list(read(found, wanted(BEAT), OVER, source="http://a"))


# --- what is kept of it


def curve(metric: str, *values: float | None, gpu: str | None = None, source: str = "a") -> Curve:
    return Curve(metric=metric, gpu=gpu, source=source, at=1000, step_s=10, values=values)


def test_of_several_that_have_a_curve_the_one_that_knows_most_is_kept_and_the_first_of_equals() -> None:
    asked = replace(sought(), wanted=[wanted(BEAT), wanted(RAM)])
    a = Said(source="a", curves=[curve(BEAT, 1.0, None), curve(RAM, 1.0, 2.0)], why={})
    b = Said(source="b", curves=[curve(BEAT, 1.0, 2.0, source="b"), curve(RAM, 1.0, 2.0, source="b")], why={})

    kept, notes = choose(asked, [a, b])

    assert [(each.metric, each.source) for each in kept] == [(BEAT, "b"), (RAM, "a")]
    assert notes == []


def test_what_one_of_them_has_is_not_missing() -> None:
    asked = replace(sought(), wanted=[wanted(RAM)])
    dead, alive = Said(source="a", curves=[], why={RAM: "x"}), Said(source="b", curves=[curve(RAM, 1.0)], why={})

    kept, notes = choose(asked, [dead, alive])

    assert (len(kept), notes) == (1, [])


def test_which_curves_nobody_has_is_told_with_what_each_said_of_them() -> None:
    asked = sought(place=build.evidence(gpus=["GPU-0", "GPU-1"]))
    a = Said(source="a", curves=[curve(USE, 0.0, gpu="GPU-1")], why={})
    b = Said(source="b", curves=[], why={each.metric: "no answer within 4.5 s" for each in asked.wanted[:-1]})

    kept, notes = choose(asked, [a, b])

    assert [(each.metric, each.gpu) for each in kept] == [(USE, "GPU-1")]
    names = "beat age, heartbeat age, GPU use of GPU-0, GPU memory of GPU-0, GPU memory of GPU-1"
    assert notes == [
        f"no curve of {names}: a has no sample of it then; b does not tell: no answer within 4.5 s",
        "no curve of RAM: a has no sample of it then; b has no sample of it then",
    ]


def test_each_curve_that_is_asked_for_has_a_name_in_words() -> None:
    assert sought().names == ["beat age", "heartbeat age", "GPU use of GPU-0", "GPU memory of GPU-0", "RAM"]
    assert named("gpuwarden_of_a_later_version") == "gpuwarden_of_a_later_version"
