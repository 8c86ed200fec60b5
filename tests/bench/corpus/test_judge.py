"""How the judge reports wrong, late and missing verdicts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from bench.corpus import host, judge, scenario_file
from bench.corpus.judge import Fired, Played
from bench.corpus.scenario import Notice, Verdict
from gpuwarden.job import Condition
from tests.bench.corpus.scenes import SCENARIOS, named

SHARED: Final = "GpuwardenSharedJobStalled"

FIRST: Final = {"job_id": "1", "attempt": "1", "incarnation": "w-0"}
"""Labels of the first attempt of worker w."""


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param({}, "", id="nothing"),
        pytest.param({"due_s": 600}, "acts on w at 480s, too early: due at 600s", id="too early"),
        pytest.param(
            {"due_s": 400},
            "Stalled acts on w at 480s, too late: due at 400s, at the latest at 420s",
            id="too late",
        ),
        pytest.param(
            {"condition": Condition.BUDGET},
            "Stalled acts on w: restart_worker for stall instead of restart_worker for budget",
            id="for another condition",
        ),
        pytest.param(
            {"remedy": "hold_lost_host"},
            "Stalled acts on w: restart_worker for stall instead of hold_lost_host for stall",
            id="with another remedy",
        ),
        pytest.param({"of": "v"}, "Stalled acts on w at 480s, but w has no fault", id="on another worker"),
    ],
)
def test_wrong_verdict_is_reported_when(change: Mapping[str, object], complaint: str) -> None:
    one = named("wedges after a hundred steps")
    fired = Fired(
        policy=judge.OURS, alert="Stalled", remedy="restart_worker", condition="stall", of="w", at_s=480, named=FIRST
    )
    (verdict,) = one.verdicts
    changed = replace(one, verdicts=(replace(verdict, **change),))  # type: ignore[arg-type]

    said = Played(scenario=changed, fired=(fired,)).wrong()

    assert len(said) == (0 if not change else 2 if "of" in change else 1)
    assert complaint in "".join(said[:1])


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ({"job_id": "2"}, "job_id 2, attempt 1, incarnation w-0"),
        ({"attempt": "2"}, "job_id 1, attempt 2, incarnation w-0"),
        ({"incarnation": "w-9"}, "job_id 1, attempt 1, incarnation w-9"),
        (None, "no attempt"),
    ],
)
def test_verdict_that_names_another_attempt_is_reported(label: Mapping[str, str] | None, said: str) -> None:
    one = named("wedges after a hundred steps")
    wrong = {} if label is None else {**FIRST, **label}
    fired = Fired(
        policy=judge.OURS, alert="Stalled", remedy="restart_worker", condition="stall", of="w", at_s=480, named=wrong
    )

    found = Played(scenario=one, fired=(fired,)).wrong()

    assert found == [f"Stalled names {said} for w at 480s instead of job_id 1, attempt 1, incarnation w-0"]


def test_notice_must_name_the_current_attempt() -> None:
    one = named("wedges while another worker of its container computes, and")
    fired = Fired(
        policy=judge.PEOPLE,
        alert=SHARED,
        remedy="",
        condition="",
        of="w",
        at_s=300,
        named=FIRST | {"job_id": "2"},
    )

    found = Played(scenario=one, fired=(fired,)).wrong()

    identity = "job_id {}, attempt 1, incarnation w-0"
    assert found == [f"{SHARED} names {identity.format(2)} for w at 300s instead of {identity.format(1)}"]


def test_identities_are_those_of_the_second() -> None:
    worker = named("is on its next job, which wedges, when Prometheus")
    server = named("was started")

    found = [host.identities(worker, second).get("w") for second in (349, 350, 355)]

    assert found == [FIRST, {}, FIRST | {"job_id": "2", "attempt": "2"}]
    assert [host.identities(server, second)["s"] for second in (349, 350)] == [
        {"incarnation": "s@0"},
        {"incarnation": "s@1"},
    ]


def test_missed_action_and_action_on_a_healthy_job_are_reported() -> None:
    fired = Fired(policy=judge.OURS, alert="Stalled", remedy="restart_worker", condition="stall", of="w", at_s=480)

    missed = Played(scenario=named("wedges after a hundred steps"), fired=()).wrong()
    killed = Played(scenario=named("takes twenty minutes for one step, its"), fired=(fired,)).wrong()

    assert missed == ["no action on w, due at 480s"]
    assert killed == ["Stalled acts on w at 480s, but w has no fault"]


@pytest.mark.parametrize(
    ("fired", "said"),
    [
        pytest.param([("w", 300)], [], id="in time"),
        pytest.param([("w", 330), ("w", 300)], [], id="in time, and again"),
        pytest.param([], [f"{SHARED} does not fire for w, due at 300s"], id="never"),
        pytest.param([("w", 270)], [f"{SHARED} fires for w at 270s, too early: due at 300s"], id="early"),
        pytest.param([("w", 330)], [f"{SHARED} fires for w at 330s, too late: due at 300s, at the latest at 300s"],
                     id="late"),
        pytest.param([("w", 300), ("v", 60)], [f"{SHARED} fires for v at 60s, which is not expected"],
                     id="also for another worker"),
    ],
)  # fmt: skip
def test_notices_are_judged_and_are_no_actions(fired: list[tuple[str, int]], said: list[str]) -> None:
    one = named("wedges while another worker of its container computes, and")
    found = [
        Fired(policy=judge.PEOPLE, alert=SHARED, remedy="", condition="", of=of, at_s=at_s, named=FIRST)
        for of, at_s in fired
    ]

    played = Played(scenario=one, fired=tuple(found))

    assert one.notices == (Notice(alert="GpuwardenSharedJobStalled", of="w", due_s=300),)
    assert played.wrong() == said
    assert played.judgement(judge.OURS).false == ()


def test_notice_must_be_the_expected_alert() -> None:
    one = named("wedges while another worker of its container computes, and")
    fired = Fired(policy=judge.PEOPLE, alert="GpuwardenJobSlow", remedy="", condition="", of="w", at_s=300, named=FIRST)

    assert Played(scenario=one, fired=(fired,)).wrong() == [
        "GpuwardenJobSlow fires for w at 300s, which is not expected",
        "GpuwardenSharedJobStalled does not fire for w, due at 300s",
    ]


def test_notice_of_a_server_names_its_container() -> None:
    labels = {"alertname": "GpuwardenServerProbeFailing", "host": "0-a", "container": "llm", "severity": "warning"}
    one = named("deadlocks at 100 % over two GPUs as a server")
    fired = judge.parse_alert(labels, at_s=1500)

    assert fired is not None
    assert (fired.policy, fired.of) == (judge.PEOPLE, "llm")
    assert Played(scenario=one, fired=(fired,)).wrong() == []
    assert Played(scenario=one, fired=()).wrong() == ["GpuwardenServerProbeFailing does not fire for llm, due at 1500s"]


@pytest.mark.parametrize(
    ("later_s", "said"),
    [
        pytest.param(30, [], id="after the action"),
        pytest.param(
            0, ["GpuwardenServerProbeFailing fires for llm at 420s, which is not expected"], id="at the action"
        ),
    ],
)
def test_notice_after_an_action_on_the_target_is_not_judged(later_s: int, said: list[str]) -> None:
    one = named("stops answering with its GPU idle")
    acts = Fired(
        policy=judge.OURS, alert="Server", remedy="restart_container", condition="server", of="llm", at_s=420,
        named={"incarnation": "llm@0"},
    )  # fmt: skip
    tells = Fired(
        policy=judge.PEOPLE, alert="GpuwardenServerProbeFailing", remedy="", condition="", of="llm", at_s=420 + later_s
    )

    assert Played(scenario=one, fired=(acts, tells)).wrong() == said


def test_policy_acts_once_and_not_before_the_fault() -> None:
    one = named("wedges on two hosts")

    def fired(of: str, at_s: int) -> Fired:
        return Fired(policy="idle", alert="Idle", remedy="", condition="", of=of, at_s=at_s)

    early = Played(scenario=one, fired=(fired("w", 100), fired("w", 500), fired("u", 500))).judgement("idle")
    late = Played(scenario=one, fired=(fired("w", 700), fired("w", 600))).judgement("idle")

    assert {(each.of, each.at_s) for each in early.false} == {("w", 100), ("u", 500)}
    assert [each.of for each in early.missed] == ["v"]
    assert {verdict.of: each.at_s for verdict, each in late.found.items()} == {"w": 600}


@pytest.mark.parametrize(
    ("begins", "decided"),
    [
        ("fails every item of a run that two others finish", ["lock"]),
        ("fails every item of a run as two others do", ["wait", "block", "block"]),
        ("is alone on a run and fails every item", ["move"]),
    ],
)
def test_decision_is_that_of_the_remediator_at_that_second(begins: str, decided: list[str]) -> None:
    one = named(begins)
    fired = tuple(
        Fired(policy=judge.OURS, alert="A", remedy="wrangle", condition="items", of=each.of, at_s=each.due_s)
        for each in one.verdicts
    )
    other = tuple(replace(each, then="lock" if each.then == "move" else "move") for each in one.verdicts)

    assert [each.then for each in one.verdicts] == decided
    assert Played(scenario=one, fired=fired).wrong() == []
    assert Played(scenario=replace(one, verdicts=other), fired=fired).wrong() == [
        f"A acts on {each.of}, and decides {each.then} instead of {wanted.then}"
        for each, wanted in zip(one.verdicts, other, strict=True)
    ]


def job(of: str, *, due_s: int, condition: Condition = Condition.STALL) -> Verdict:
    return Verdict(condition=condition, remedy="restart_worker", of=of, since_s=due_s - 120, due_s=due_s)


def alert_of(policy: str, of: str, at_s: int) -> Fired:
    return Fired(policy=policy, alert="A", remedy="", condition="", of=of, at_s=at_s)


def test_score_counts_missed_verdicts() -> None:
    wanted = (
        job("w", due_s=360),
        job("v", due_s=360),
        job("b", due_s=360, condition=Condition.VRAM),
        job("a", due_s=1, condition=Condition.ITEMS),
    )
    one = Played(
        scenario=replace(SCENARIOS[0], verdicts=wanted),
        fired=(alert_of("gpuwarden", "w", 360), alert_of("gpuwarden", "b", 360)),
    )

    found = judge.score([one], judge.OURS)

    assert (found.missed, found.jobs, found.missed_others, found.others) == (1, 2, 1, 2)


@pytest.mark.parametrize(
    ("at_s", "late_s", "evaluations"),
    [(360, 0, 0), (390, 30, 0), (391, 31, 1), (420, 60, 1), (450, 90, 2)],
)
def test_lateness_counts_from_earliest_moment_and_first_evaluation(at_s: int, late_s: int, evaluations: int) -> None:
    one = replace(SCENARIOS[0], verdicts=(job("b", due_s=360, condition=Condition.VRAM),), scrape_s=13, evaluate_s=30)

    found = judge.score([Played(scenario=one, fired=(alert_of("gpuwarden", "b", at_s),))], judge.OURS)

    assert (found.late_s, found.late_evaluations) == ([late_s], [evaluations])
    assert found.took_s == []


@pytest.mark.parametrize(
    ("began_s", "took_s", "missed"),
    [
        pytest.param({"w": 50.0}, [3660 - 240], 0, id="job of the fault is left at the end"),
        pytest.param({}, [], 1, id="job ended"),
        pytest.param({"w": 361.0}, [], 1, id="another job is left"),
        pytest.param({"w": -3590.0}, [300 - 240], 0, id="limit within the scenario"),
    ],
)
def test_time_limit_ends_stalled_jobs_after_the_scenario(
    began_s: Mapping[str, float], took_s: list[float], missed: int
) -> None:
    one = replace(SCENARIOS[0], verdicts=(job("w", due_s=360),), scrape_s=15, evaluate_s=30)
    fired = (alert_of("timeout", "w", 300),) if began_s.get("w", 0) < 0 else ()

    limited = judge.score([Played(scenario=one, fired=fired, began_s=began_s)], "timeout")
    idle = judge.score([Played(scenario=one, fired=(), began_s=began_s)], "idle")

    assert (limited.took_s, limited.missed, limited.false) == (took_s, missed, 0)
    assert (idle.took_s, idle.missed) == ([], 1)


@pytest.mark.parametrize(
    ("due_s", "scrape_s", "evaluate_s", "by_s"), [(480, 15, 30, 480), (481, 15, 30, 510), (481, 60, 5, 540)]
)
def test_deadline_is_first_evaluation_of_first_scrape(due_s: int, scrape_s: int, evaluate_s: int, by_s: int) -> None:
    one = replace(named("wedges after a hundred steps"), scrape_s=scrape_s, evaluate_s=evaluate_s)
    verdict = Verdict(condition=Condition.STALL, remedy="restart_worker", of="w", since_s=0, due_s=due_s)

    assert one.deadline_s(verdict) == by_s


EITHER: Final = """\
- name: a
  why: b
  tenants:
    a: {budget_mib: 3000, 0s: {does: holds, vram_mib: 7000}}
    b: {budget_mib: 3000, 0s: {does: holds, vram_mib: 7000}}
  verdict: {condition: vram, remedy: recycle_container, of: [a, b], since: 0s}
"""


@pytest.mark.parametrize(
    ("fired", "said"),
    [
        ([("a", 0)], []),
        ([("b", 0)], []),
        ([("b", 0), ("a", 30)], ["Victim acts on a at 30s, but a has no fault"]),
        ([("b", 60)], ["Victim acts on b at 60s, too late: due at 0s, at the latest at 0s"]),
        ([], ["no action on a or b, due at 0s"]),
    ],
)
def test_one_of_two_alternative_targets_is_enough(
    fired: list[tuple[str, int]], said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(EITHER)
    (one,) = scenario_file.read(tmp_path)
    found = tuple(
        Fired(policy=judge.OURS, alert="Victim", remedy="recycle_container", condition="vram", of=of, at_s=at_s,
              named={"incarnation": f"{of}@0"}) for of, at_s in fired
    )  # fmt: skip

    played = Played(scenario=one, fired=found)
    judged = played.judgement(judge.OURS)

    assert played.wrong() == said
    assert len(judged.false) == max(0, len(fired) - 1)
    assert (len(judged.found), len(judged.missed)) == ((1, 0) if fired else (0, 1))
