"""What Prometheus's answers mean for one target, and what a second opinion holds back."""

import json
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.job import State
from remediator.opinion import (
    RULES_MAX,
    Answer,
    Opinion,
    OpinionError,
    Policy,
    Verdict,
    age_of,
    expressions,
    hold,
    judge,
    value_of,
)
from remediator.plan import Advance, Begin, Close, Facts, Fence, Kind, Outcome, Stage, Stop, Wait, Withdraw
from tests.remediator import builders as build

EPISODE = build.episode(rules=frozenset({"GpuwardenJobStalled"}))
SERVER = build.server_episode(rules=frozenset({"GpuwardenServerUnanswering"}))
SERIES = {"host": "box1", "worker": "w1", "container": "c1", "job_id": "7", "attempt": "1", "incarnation": "i1"}
OF_SERVER = {"host": "box1", "container": "c1", "incarnation": build.KEY}


def answer(data: Any, **more: Any) -> bytes:
    return json.dumps({"status": "success", "data": data, **more}).encode()


def vector(*series: dict[str, str], value: str = "130", **more: Any) -> bytes:
    result = [{"metric": each, "value": [1_800_000_000.1, value]} for each in series]
    return answer({"resultType": "vector", "result": result}, **more)


def rules(*found: tuple[str, str, str | None]) -> bytes:
    listed = [
        {"type": "alerting", "name": name, "query": query, "labels": {} if remedy is None else {"remedy": remedy}}
        for name, query, remedy in found
    ]
    return answer({"groups": [{"name": "g", "file": "f", "rules": listed}]})


# --- the answers


def test_the_rule_that_accused_it_is_taken_as_prometheus_has_loaded_it() -> None:
    loaded = rules(
        ("GpuwardenJobStalled", "a >= b", "restart_worker"), ("GpuwardenJobOverBudget", "c", "restart_worker")
    )

    assert expressions(loaded, EPISODE) == [("GpuwardenJobStalled", "a >= b")]


def test_a_rule_of_that_name_for_another_remedy_is_none_of_its() -> None:
    loaded = rules(("GpuwardenJobStalled", "vector(1)", None), ("GpuwardenJobStalled", "b", "restart_container"))

    with pytest.raises(OpinionError, match="no rule that accused the target: GpuwardenJobStalled"):
        expressions(loaded, EPISODE)


def test_two_rules_of_one_name_are_both_asked_for_and_a_repeat_of_one_is_not() -> None:
    same = ("GpuwardenJobStalled", "a", "restart_worker")
    loaded = rules(same, ("GpuwardenJobStalled", "b", "restart_worker"), same)

    assert expressions(loaded, EPISODE) == [("GpuwardenJobStalled", "a"), ("GpuwardenJobStalled", "b")]


def test_more_rules_than_are_asked_for_are_no_answer_rather_than_half_of_one() -> None:
    loaded = rules(*(("GpuwardenJobStalled", f"a > {number}", "restart_worker") for number in range(RULES_MAX + 1)))

    with pytest.raises(OpinionError, match="11 rules"):
        expressions(loaded, EPISODE)


@pytest.mark.parametrize(
    ("episode", "series", "value"),
    [
        pytest.param(EPISODE, [SERIES], 130.0, id="this attempt of this worker"),
        pytest.param(EPISODE, [], None, id="nobody"),
        pytest.param(EPISODE, [SERIES | {"worker": "w2"}, SERIES], 130.0, id="among others"),
        pytest.param(EPISODE, [SERIES | {"worker": "w2"}], None, id="another worker"),
        pytest.param(EPISODE, [SERIES | {"host": "box2"}], None, id="a worker of that name on another host"),
        pytest.param(EPISODE, [SERIES | {"incarnation": "i2"}], None, id="another incarnation of it"),
        pytest.param(EPISODE, [SERIES | {"attempt": "2"}], None, id="another attempt"),
        pytest.param(replace(EPISODE, incarnation=None), [SERIES], 130.0, id="an alert that named no incarnation"),
        pytest.param(SERVER, [OF_SERVER], 130.0, id="a server"),
        pytest.param(SERVER, [OF_SERVER | {"incarnation": build.REBORN}], None, id="a server that was restarted"),
    ],
)
def test_the_targets_own_series_is_picked_from_all_of_the_rules(episode: Any, series: Any, value: float | None) -> None:
    assert value_of(vector(*series), episode) == value


def test_a_rule_whose_series_do_not_tell_whom_they_speak_of_says_nothing_of_anybody() -> None:
    nameless = {name: value for name, value in SERIES.items() if name not in ("host", "incarnation")}

    with pytest.raises(OpinionError, match="no label host, incarnation"):
        value_of(vector(nameless), EPISODE)


@pytest.mark.parametrize(
    ("found", "because"),
    [
        pytest.param(b"<html>", "cannot be read: it: Invalid JSON", id="no JSON"),
        pytest.param(b'{"status": "error", "error": "x"}', "cannot be read: status", id="an error"),
        pytest.param(answer({"resultType": "matrix", "result": []}), "resultType", id="another kind of value"),
        pytest.param(vector(SERIES, value="many"), "value", id="no number"),
        pytest.param(vector(warnings=["store 2 did not answer"]), "store 2 did not answer", id="half an answer"),
    ],
)
def test_what_cannot_be_read_or_may_not_be_whole_is_no_answer(found: bytes, because: str) -> None:
    with pytest.raises(OpinionError, match=because):
        value_of(found, EPISODE)


def test_the_age_of_its_newest_sample_is_told_whatever_its_incarnation_and_of_no_other_target() -> None:
    assert age_of(vector(SERIES | {"incarnation": "i2"}, value="4.2"), EPISODE) == 4.2
    assert age_of(vector(SERIES | {"worker": "w2"}, SERIES | {"host": "box2"}), EPISODE) is None
    assert age_of(vector(OF_SERVER | {"probe": "http"}, value="4.2"), SERVER) == 4.2


@pytest.mark.parametrize(
    ("values", "age_s", "verdict", "because"),
    [
        pytest.param([("R", 130.0)], 4.0, "confirms", "R holds still, at 130, by samples 4 s old", id="holds"),
        pytest.param([("R", None), ("S", 0.0)], 4.0, "confirms", "S holds", id="one of two holds, at 0"),
        pytest.param([("R", None), ("S", None)], 4.0, "denies", "R, S does not hold any more", id="none holds"),
        pytest.param([("R", None)], None, "silent", "no sample of the target", id="a target it does not see"),
        pytest.param([("R", None)], 130.1, "silent", "130 s old", id="a target it saw long ago"),
        pytest.param([("R", 130.0)], 130.1, "silent", "130 s old", id="what held long ago"),
        pytest.param([("R", None)], 130.0, "denies", "130 s old", id="old, and just fresh enough"),
    ],
)  # fmt: skip
def test_only_fresh_samples_of_the_target_confirm_or_deny(
    values: Any, age_s: float | None, verdict: str, because: str
) -> None:
    found, said = judge(values, age_s, fresh_s=130.0)

    assert found == verdict
    assert because in said


# --- what follows


def opinion(*verdicts: Verdict) -> Opinion:
    return Opinion(
        answers=[Answer(source=f"p{number}", verdict=each, because="x") for number, each in enumerate(verdicts)]
    )


CONFIRMS, DENIES, SILENT = opinion(Verdict.CONFIRMS), opinion(Verdict.DENIES), opinion(Verdict.SILENT)


@pytest.mark.parametrize(
    ("verdicts", "counts"),
    [
        (["denies", "confirms"], "confirms"),
        (["silent", "confirms"], "confirms"),
        (["silent", "denies"], "denies"),
        (["silent", "silent"], "silent"),
        ([], "silent"),
    ],
)
def test_one_of_several_that_confirms_is_enough_and_one_that_denies_outweighs_silence(
    verdicts: list[str], counts: str
) -> None:
    assert opinion(*map(Verdict, verdicts)).verdict == counts


def test_an_opinion_tells_who_was_asked_and_what_each_said() -> None:
    said = opinion(Verdict.CONFIRMS, Verdict.DENIES, Verdict.SILENT).because

    assert said == "p0 confirms: x; p1 denies: x; p2 does not tell: x"


BEGIN = Begin(
    trip=EPISODE.trip, free_key="k", container_kind="docker", container_handle="h", container_name="c1",
    settle_key=None, worker_incarnation="i1", because="wedged",
)  # fmt: skip
STOP, FENCE = Stop(because="wedged"), Fence(because="wedged")


@pytest.mark.parametrize(
    ("policy", "said", "held"),
    [
        (Policy.HEED, None, None),
        (Policy.IGNORE, DENIES, None),
        (Policy.ADVISE, DENIES, None),
        (Policy.ADVISE, SILENT, None),
        (Policy.HEED, CONFIRMS, None),
        (Policy.HEED, DENIES, "prometheus_denies"),
        (Policy.HEED, SILENT, None),
        (Policy.REQUIRE, CONFIRMS, None),
        (Policy.REQUIRE, DENIES, "prometheus_denies"),
        (Policy.REQUIRE, SILENT, "prometheus_silent"),
    ],
    ids=lambda each: each.verdict if isinstance(each, Opinion) else str(each),
)
@pytest.mark.parametrize(
    ("step", "facts"),
    [
        pytest.param(BEGIN, build.facts(), id="begin"),
        pytest.param(FENCE, build.facts(build.free(Stage.PLANNED), build.settle(Stage.PLANNED)), id="fence"),
        pytest.param(STOP, build.server_facts(build.free(Stage.PLANNED)), id="stop"),
    ],
)
def test_the_policy_says_what_holds_what_nothing_was_done_for(
    step: Any, facts: Facts, policy: Policy, said: Opinion | None, held: str | None
) -> None:
    found = hold(step, facts, said, policy)

    if held is None:
        assert found is step
    else:
        assert isinstance(found, Wait)
        assert found.reason == held
        assert "p0" in found.because


FENCED = build.facts(
    build.free(Stage.PLANNED), build.settle(Stage.FENCED), job=build.job(state=State.FENCING), free_for_s=1.0
)


def test_a_job_that_was_fenced_is_not_left_half_taken_by_silence_and_is_by_a_denial() -> None:
    assert hold(STOP, FENCED, SILENT, Policy.REQUIRE) is STOP
    assert isinstance(hold(STOP, FENCED, DENIES, Policy.REQUIRE), Wait)


def test_what_is_denied_and_no_longer_fires_is_let_go() -> None:
    facts = build.facts(episode=replace(EPISODE, firing=False))

    found = hold(BEGIN, facts, DENIES, Policy.HEED)

    assert isinstance(found, Close)
    assert found.outcome is Outcome.UNCONFIRMED


def test_what_is_denied_for_too_long_is_withdrawn_or_given_up_where_a_job_was_taken() -> None:
    promised = build.facts(build.free(Stage.PLANNED), build.settle(Stage.PLANNED), free_for_s=120.0)

    withdrawn = hold(FENCE, promised, DENIES, Policy.HEED)
    given_up = hold(STOP, replace(FENCED, free_for_s=120.0), DENIES, Policy.HEED)

    assert isinstance(withdrawn, Withdraw)
    assert isinstance(given_up, Advance)
    assert (given_up.kind, given_up.stage) == (Kind.FREE, Stage.ABANDONED)
