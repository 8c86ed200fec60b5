"""The verdicts of the rules that ship, on every scenario of the corpus, and what the scenarios cover."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

import pytest
import yaml

from bench.corpus import host, judge, scenario_file
from bench.corpus.judge import Played
from bench.corpus.scenario import (
    DECIDED,
    DOINGS,
    GPU_STATES,
    HOST_STATES,
    INSTANCE_STATES,
    NOTICES,
    PROMETHEUS_STATES,
    REMEDIES,
    Doing,
    GpuHealth,
)
from deploy.standalone import debian_packages
from exporter.evidence import activity
from exporter.model.container import ContainerEvidence
from gpuwarden.job import Condition, Phase
from testbed.check_release import CHECKOUT
from tests.bench.corpus.scenes import PAGE, SCENARIOS, Everything, named, without_promtool
from tools.mutation.rules import ALERTS, files

LEAST: Final = 60
"""How many scenarios there are at least that the rules judge right."""

SLOT: Final = "(host, worker, container)"
NOT_QUIET: Final = f"<= min by {SLOT} (gpuwarden_job_inactive_seconds)"
NEWEST: Final = "(1, timestamp(gpuwarden_job_overdue_id))"
BLIND_TOO: Final = (
    "unless on () ( time() - gpuwarden:no_host_scraped:timestamp_seconds < on () "
    "(max(gpuwarden_remediator_host_lost_after_seconds) + 10) )"
)
BLIND_WHERE_REPEATED: Final = "or absent_over_time(gpuwarden_exporter_info[75s])"
NONE_DONE: Final = (
    "and on (run, worker_host, worker) ( max by (run, worker_host, worker) (gpuwarden_queue_run_items_done) == 0 ),"
)
CAUGHT: Final = (
    ("shared", "<= min by", ">= min by", "hangs while another worker of its container takes"),
    ("stall", NOT_QUIET, "", "takes twenty minutes for one step, its"),
    ("health", f"min by {SLOT} (gpuwarden_job_inactive_seconds) >=", "", "takes twenty minutes for one step, its"),
    ("stall", "labels: severity", "for: 1m\n        labels:\n          severity", "is alone on its host and wedges"),
    ("worker", f"<= min by {SLOT} (gpuwarden_worker_cpu_idle_seconds)", "", "holds Python's lock for ten minutes"),
    ("gone", ">= max by", ">= 0 * max by", "is killed, started again after 25 s"),
    ("node", BLIND_TOO, "", "falls silent while Prometheus is down"),
    ("node", BLIND_WHERE_REPEATED, "", "was cut off for a minute just before Prometheus was down"),
    ("vram", "== 1", "== 0", "leaks for ten minutes until the card is short"),
    ("stall", NEWEST, f"{NEWEST[:4]}-{NEWEST[4:]}", "is on its next job, having been silent in the one before"),
    (
        "server",
        "timestamp(gpuwarden_server_info)",
        "gpuwarden_server_info",
        "was started anew while Prometheus was down",
    ),
    ("wrangling", NONE_DONE, ",", "fails twenty items of a run and has finished one"),
)
"""Broken rules: the topic, what is replaced in it and by what, and how the name of the scenario begins that tells."""

BLIND: Final = {
    "io_idle_s": "evaluates for a quarter of an hour at 100 % without a word",
    "page_fault_idle_s": "tunes its kernels anew",
    "ram_idle_s": "stages 6 GiB up and down",
    "cpu_idle_s": "takes ten minutes for a step on a GPU that is not measured",
    "gpu_last_busy_age_s": "waits twelve minutes for a step without a spin",
    "gpu_saturated_s": "computes a step for a quarter of an hour at 100 %, with a pause",
}
"""Signs of life of which what tells that nothing moved might be made without, each with a scenario that tells."""


OVERLOOKED: Final = (
    ("BEAT", "steps for twenty minutes at 4 %"),
    ("GPU", "takes twenty minutes for one step, its"),
    ("RAM", "prepares with its GPU idle while RAM climbs"),
    ("WORK", "writes a checkpoint to slow storage"),
    ("WORK", "evaluates on the CPU alone for twelve minutes"),
    ("WORK", "saves its result over a slow network"),
    ("WORK", "loads for twelve minutes from a warm page cache"),
    ("GPU", "takes twenty minutes for one step in a child of it while another"),
    ("RAM", "decodes for ten minutes while another worker"),
    ("WORK", "evaluates on the CPU for ten minutes while another worker"),
)
"""Signs of life without which a job might be taken for quiet, each with a scenario that tells."""


@pytest.mark.needs_parts
@pytest.mark.parametrize("name", [each.name for each in SCENARIOS if not each.not_yet])
@pytest.mark.slow
def test_the_verdict_is_right_on_whoever(name: str, played: Mapping[str, Played]) -> None:
    assert played[name].wrong() == []


@pytest.mark.needs_parts
@pytest.mark.slow
def test_what_is_marked_not_yet_is_not_right_yet(played: Mapping[str, Played]) -> None:
    right = [each.name for each in SCENARIOS if each.not_yet and not played[each.name].wrong()]

    assert right == [], "take their `not_yet` away"


def test_there_are_enough_scenarios_and_many_of_both_kinds() -> None:
    settled = [each for each in SCENARIOS if not each.not_yet]

    assert len(settled) >= LEAST
    assert min(sum(bool(each.verdicts) for each in settled), sum(not each.verdicts for each in settled)) >= LEAST // 3
    assert {verdict.condition for each in settled for verdict in each.verdicts} == set(Condition)


def test_whoever_is_slower_has_time_to_act_before_he_has_missed_it() -> None:
    left_s = [each.plays_s - verdict.due_s for each in SCENARIOS for verdict in each.verdicts]

    assert min(left_s) >= scenario_file.AFTERWARDS_S


def test_the_page_has_every_word_that_a_scenario_may_use() -> None:
    parts_of = [*fields(Doing), *fields(GpuHealth)]
    states = (*GPU_STATES, *INSTANCE_STATES, *HOST_STATES, *PROMETHEUS_STATES)
    words = [*DOINGS, *(part.name for part in parts_of), *states, *Condition, *REMEDIES, *DECIDED, *NOTICES]

    assert [word for word in words if f"`{word}`" not in PAGE] == []


@pytest.mark.needs_parts
@pytest.mark.slow
def test_every_policy_finds_something_and_none_but_ours_is_without_a_fault(played: Mapping[str, Played]) -> None:
    every = list(played.values())
    scores = {policy: judge.score(every, policy) for policy in judge.POLICY_NAMES}

    assert all(any(each.policy == policy for one in every for each in one.fired) for policy in scores)
    assert all(found.false and found.missed for found in scores.values())


@pytest.mark.parametrize(
    "begins",
    [
        "wedges as one of ten",
        "fails every item of a run as",
        "fills two cards",
        "is allowed ten minutes",
        "is killed for want of memory and its",
        "wedges while another worker of its container loads",
        "falls off the bus with two instances",
        "ends by a memory error that ECC cannot correct",
        "is held down by its power cap",
    ],
)
def test_every_series_of_a_scenario_is_one_that_the_programs_export_with_its_labels(begins: str) -> None:
    exported = {
        name: frozenset(re.findall(r"`(\w+)`", labels))
        for file in ("metrics.md", "metrics-remediator.md", "metrics-queue.md")
        for name, labels in re.findall(
            r"^\| `(gpuwarden_\w+)` \| \w+ \| ([^|]*) \|", (CHECKOUT / "docs" / file).read_text(), re.MULTILINE
        )
    }

    found = host.series(replace(named(begins), plays_s=60), wanted=Everything())

    assert len({name for name, _ in found}) > 20
    told = {(name, frozenset(dict(labels)) - {"host"}) for name, labels in found}
    assert told - set(exported.items()) == {("up", frozenset())}, "which Prometheus writes"


UNPLAYED: Final = {
    **dict.fromkeys(
        (
            "gpuwarden_gpu_row_remap_failed",
            "gpuwarden_gpu_row_remap_pending",
            "gpuwarden_gpu_unknown_samples_total",
        ),
        "what a driver tells of its GPU beside who uses it: people are told, whatever runs there",
    ),
    "gpuwarden_container_gpu_memory_budget_invalid": "a label that cannot be read: whoever has it has no budget here",
    "gpuwarden_statefiles_invalid": "files that no worker of ours writes",
    "gpuwarden_queue_host_worker_info": "a worker whose files cannot be read, of which nothing here is known",
    **dict.fromkeys(
        (
            "gpuwarden_remediator_circuit_breaker_open",
            "gpuwarden_remediator_executor_heartbeat_age_seconds",
            "gpuwarden_remediator_executor_down_after_seconds",
            "gpuwarden_remediator_intent_age_seconds",
            "gpuwarden_remediator_intent_overdue_after_seconds",
            "gpuwarden_remediator_paused",
            "gpuwarden_remediator_quarantines_refused",
            "gpuwarden_remediator_info",
            "gpuwarden_remediator_watchdog_timestamp_seconds",
        ),
        "the remediator at its work: here nobody is acted on, and people are told of it alone",
    ),
}
"""What rules read and no scenario has, and why the verdicts are right without it."""


def test_every_series_that_a_rule_reads_is_in_some_scenario_or_not_for_a_reason() -> None:
    rules = [
        rule for file in files() for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]
    ]
    read = {name for rule in rules for name in re.findall(r"\bgpuwarden_[a-z0-9_]+", rule["expr"])}
    acting = [rule["expr"] for rule in rules if "remedy" in rule.get("labels", {}) or "record" in rule]
    telling = (
        "fills two cards",
        "is allowed ten minutes",
        "is killed for want of memory and its",
        "wedges after a hundred",
        "fails every item of a run as",
        "hangs because its GPU fell off",
        "deadlocks at 100 % as a gang of two ranks on one host",
        "hangs while another worker of its container takes",
        "falls off the bus with two instances",
        "ends by a memory error that ECC cannot correct",
        "is held down by heat and steps half",
    )

    found = {name for begins in telling for name, _ in host.series(named(begins), wanted=read)}

    assert len(read) > 50
    assert read - found == set(UNPLAYED)
    assert [name for name in UNPLAYED if any(re.search(rf"\b{name}\b", expr) for expr in acting)] == []


@pytest.mark.needs_parts
@pytest.mark.slow
def test_ours_is_never_an_evaluation_late_and_misses_nothing_of_whatever_kind(played: Mapping[str, Played]) -> None:
    found = judge.score([each for each in played.values() if not each.scenario.not_yet], judge.OURS)

    assert (found.missed, found.missed_others, max(found.late_evaluations)) == (0, 0, 0)
    assert found.others > 50
    assert len(found.late_s) == found.jobs + found.others


@pytest.mark.needs_parts
@pytest.mark.nightly
@pytest.mark.parametrize(("topic", "old", "new", "begins"), CAUGHT)
def test_the_corpus_tells_of_a_broken_rule(
    topic: str, old: str, new: str, begins: str, played: Mapping[str, Played], tmp_path: Path
) -> None:
    sound = (ALERTS / f"{topic}.rules.yaml").read_text()
    broken = re.sub(r"\s+".join(map(re.escape, old.split())), lambda _: new, sound)
    assert broken != sound
    (tmp_path / "broken.rules.yaml").write_text(broken)
    one = named(begins)

    (found,) = judge.play([one], [tmp_path / "broken.rules.yaml"])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.nightly
@pytest.mark.parametrize("sign", BLIND)
def test_each_sign_of_life_is_needed(sign: str, played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch) -> None:
    one, whole = named(BLIND[sign]), vars(ContainerEvidence)["no_progress_s"].fget
    monkeypatch.setattr(
        ContainerEvidence, "no_progress_s", property(lambda seen: whole(seen._replace(**{sign: math.inf})))
    )

    (found,) = judge.play([one])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.nightly
@pytest.mark.parametrize(("sign", "begins"), OVERLOOKED)
def test_the_corpus_tells_when_a_job_is_quiet_in_spite_of_a_sign_of_life(
    sign: str, begins: str, played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, whole = named(begins), activity._seconds_without
    monkeypatch.setattr(
        activity,
        "_seconds_without",
        lambda *of, **how: {each: age_s for each, age_s in whole(*of, **how).items() if each.name != sign},
    )

    (found,) = judge.play([one])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.nightly
def test_work_is_life_only_in_some_phases(played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch) -> None:
    one = named("wedges in a driver call that spins, having loaded")
    monkeypatch.setattr(Phase, "counts_work", True)

    (found,) = judge.play([one])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.nightly
def test_a_busy_gpu_alone_is_no_sign_of_life(played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch) -> None:
    one, whole = named("deadlocks in a collective, its GPU at 100 %"), vars(ContainerEvidence)["no_progress_s"].fget
    monkeypatch.setattr(
        ContainerEvidence, "no_progress_s", property(lambda seen: whole(seen._replace(gpu_saturated_s=None)))
    )

    (found,) = judge.play([one])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("gpuwarden_job_info * on () gpuwarden_job_phase", "a rule fails in the corpus: rule: Broken"),
        ("gpuwarden_job_info *", "promtool printed no result for 'wedges on two hosts at once"),
    ],
)
def test_rules_that_fail_are_no_silence(expr: str, complaint: str, tmp_path: Path) -> None:
    if missing := without_promtool():
        pytest.skip(missing)
    rules = tmp_path / "broken.rules.yaml"
    rules.write_text(f'groups: [{{name: g, rules: [{{alert: Broken, expr: "{expr}"}}]}}]')

    with pytest.raises(judge.JudgeError, match=re.escape(complaint)):
        judge.play([named("wedges on two hosts at once")], [rules])


def test_a_promtool_that_comes_to_no_end_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = tmp_path / "promtool"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(debian_packages, "find", lambda _: hangs)
    monkeypatch.setattr(judge, "TIMEOUT_S", 0.2)

    with pytest.raises(judge.JudgeError, match=re.escape(f"{hangs} was killed after 0.2 s")):
        judge.play([replace(named("wedges on two hosts at once"), plays_s=60)])


@pytest.mark.parametrize(
    ("found", "written"),
    [
        ([1.0, 1.0, 1.0], "1+0x2"),
        ([0.0, 15.0, 30.0, 31.0], "0+15x2 31"),
        ([30.0, 15.0, 0.5, 0.5], "30-15x1 0.5 0.5"),
        ([None, None, 2.0, "stale", None], "_x2 2 stale _x1"),
    ],
)
def test_samples_are_written_as_promtool_reads_them(found: Sequence[float | str | None], written: str) -> None:
    assert judge.values(found) == written
