"""Our rules on every scenario of the corpus, and what the scenarios cover."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Final

import pytest
import yaml

from bench.corpus import host, judge, page, scenario_file
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
from gpuwarden import conditions
from gpuwarden.job import Condition, Phase
from remediator.remedies import scale_tenant
from testbed.check_release import CHECKOUT
from tests.bench.corpus.scenes import PAGE, SCENARIOS, Everything, named, without_promtool
from tools.mutation.rules import ALERTS, files

LEAST: Final = 60
"""Minimum of scenarios without `not_yet`."""

SLOT: Final = "(host, worker, container)"
NOT_QUIET: Final = f"<= min by {SLOT} (gpuwarden_job_inactive_seconds)"
NEWEST: Final = "(1, timestamp(gpuwarden_job_overdue_id))"
NO_GATEWAY: Final = "unless on () gpuwarden_gateway_host_lost"
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
    ("host", "(gpuwarden_gateway_host_lost) == 1", "(gpuwarden_gateway_host_lost) > 1", "is gone for an hour"),
    ("host", NO_GATEWAY, "", "was cut off for a minute just before Prometheus was down"),
    ("vram", "== 1", "== 0", "leaks for ten minutes until the card is short"),
    ("stall", NEWEST, f"{NEWEST[:4]}-{NEWEST[4:]}", "is on its next job, having been silent in the one before"),
    (
        "server",
        "timestamp(gpuwarden_server_info)",
        "gpuwarden_server_info",
        "was started",
    ),
    ("wrangling", NONE_DONE, ",", "fails twenty items of a run and has finished one"),
)
"""Broken rules: topic, old and new text, and the begin of the name of a scenario that detects it."""

NEEDED_ACTIVITIES: Final = {
    "io_idle_s": "evaluates for a quarter of an hour at 100 % without a word",
    "page_fault_idle_s": "tunes its kernels a",
    "ram_idle_s": "stages 6 GiB up and down",
    "cpu_idle_s": "takes ten minutes for a step on a GPU that is not measured",
    "gpu_last_busy_age_s": "waits twelve minutes for a step without a spin",
    "gpu_saturated_s": "computes a step for a quarter of an hour at 100 %, with a pause",
}
"""Parts of `no_progress_s`, each with a scenario that needs it."""


IGNORED_ACTIVITIES: Final = (
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
"""Activities, each with a scenario that needs it."""


@pytest.mark.needs_parts
@pytest.mark.parametrize("name", [each.name for each in SCENARIOS if not each.not_yet])
@pytest.mark.slow
def test_verdict_is_right(name: str, played: Mapping[str, Played]) -> None:
    assert played[name].wrong() == []


@pytest.mark.needs_parts
@pytest.mark.slow
def test_scenarios_marked_not_yet_are_wrong(played: Mapping[str, Played]) -> None:
    right = [each.name for each in SCENARIOS if each.not_yet and not played[each.name].wrong()]

    assert right == [], "remove their `not_yet`"


def test_corpus_has_many_scenarios_of_both_kinds() -> None:
    settled = [each for each in SCENARIOS if not each.not_yet]

    assert len(settled) >= LEAST
    assert min(sum(bool(each.verdicts) for each in settled), sum(not each.verdicts for each in settled)) >= LEAST // 3
    assert {verdict.condition for each in settled for verdict in each.verdicts} == OF_FAULTS


def test_scenarios_play_long_enough_for_slower_policies() -> None:
    left_s = [each.plays_s - verdict.due_s for each in SCENARIOS for verdict in each.verdicts]

    assert min(left_s) >= scenario_file.AFTERWARDS_S


def test_page_has_the_words_of_today() -> None:
    assert page.words() + page.results(PAGE) == PAGE, "run `python -m bench.corpus --page`"


def test_page_lists_every_word_of_scenarios() -> None:
    parts_of = [*fields(Doing), *fields(GpuHealth)]
    states = (*GPU_STATES, *INSTANCE_STATES, *HOST_STATES, *PROMETHEUS_STATES)
    words = [*DOINGS, *(part.name for part in parts_of), *states, *OF_FAULTS, *REMEDIES, *DECIDED, *NOTICES]

    assert [word for word in words if f"`{word}`" not in PAGE] == []


@pytest.mark.needs_parts
@pytest.mark.slow
def test_every_other_policy_has_hits_misses_and_false_kills(played: Mapping[str, Played]) -> None:
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
def test_series_of_scenarios_are_documented_with_their_labels(begins: str) -> None:
    exported = {
        name: frozenset(re.findall(r"`(\w+)`", labels))
        for file in ("metrics.md", "metrics-remediator.md", "metrics-queue.md")
        for name, labels in re.findall(
            r"^\| `(gpuwarden_\w+)` \| \w+ \| ([^|]*) \|",
            (CHECKOUT / "docs" / "reference" / file).read_text(),
            re.MULTILINE,
        )
    }

    found = host.series(replace(named(begins), plays_s=60), wanted=Everything())

    assert len({name for name, _ in found}) > 20
    played = {(name, frozenset(dict(labels)) - {"host"}) for name, labels in found}
    others = {("up", frozenset({"job"})), (host.LOST, frozenset())}
    assert played - set(exported.items()) == others, "of Prometheus and the gateway"


OF_FAULTS: Final = set(Condition) - scale_tenant.CONFIRMABLE
"""Conditions with verdicts: a tenant on demand that is off or idle is no fault."""

EXAMPLES: Final = (
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
    "is on a GPU of a node of Kubernetes that an operator takes out",
)
"""Scenarios with every series of a rule that any scenario has."""

UNPLAYED: Final = {
    **dict.fromkeys(
        (
            "gpuwarden_gpu_row_remap_failed",
            "gpuwarden_gpu_row_remap_pending",
            "gpuwarden_gpu_unknown_samples_total",
        ),
        "GPU health of the driver, which only notifies people",
    ),
    "gpuwarden_container_gpu_memory_budget_invalid": "an invalid label, which is the same as no budget",
    "gpuwarden_node_gpu_memory_declared_bytes": "what its pods declare, which only notifies people",
    **dict.fromkeys(
        (
            "gpuwarden_pending_pods_up",
            "gpuwarden_pod_pending_seconds",
            "gpuwarden_pod_pending_threshold_seconds",
            "gpuwarden_pod_pending_wanted_bytes",
        ),
        "pods that wait, which only notify people",
    ),
    "gpuwarden_remediator_drill": "a test alert, after which nothing is done",
    "gpuwarden_statefiles_invalid": "files of other programs",
    **dict.fromkeys(
        (
            "gpuwarden_on_demand_idle_seconds",
            "gpuwarden_on_demand_on",
            "gpuwarden_on_demand_room_seconds",
            "gpuwarden_on_demand_short_seconds",
            "gpuwarden_on_demand_state_seconds",
        ),
        "tenants on demand, whose remedy is for no fault",
    ),
    "gpuwarden_queue_host_worker_info": "a worker without readable files",
    "gpuwarden_queue_jobs_ended_total": "jobs that fail, which only notifies people",
    "gpuwarden_queue_worker_locked_info": "a locked worker, which only notifies people",
    **dict.fromkeys(
        (
            "gpuwarden_remediator_circuit_breaker_open",
            "gpuwarden_remediator_notifications_failing_seconds",
            "gpuwarden_remediator_executor_heartbeat_age_seconds",
            "gpuwarden_remediator_executor_down_after_seconds",
            "gpuwarden_remediator_intent_age_seconds",
            "gpuwarden_remediator_intent_overdue_after_seconds",
            "gpuwarden_remediator_paused",
            "gpuwarden_remediator_seats_on",
            "gpuwarden_remediator_given_up_seconds",
            "gpuwarden_remediator_quarantines_refused",
            "gpuwarden_remediator_info",
            "gpuwarden_remediator_watchdog_timestamp_seconds",
        ),
        "the remediator at work, which only notifies people",
    ),
}
"""Series of rules that no scenario has, and why the verdicts do not need them."""


def test_every_series_of_a_rule_is_in_a_scenario_or_listed_as_unplayed() -> None:
    rules = [
        rule for file in files() for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]
    ]
    read = {name for rule in rules for name in re.findall(r"\bgpuwarden_[a-z0-9_]+", rule["expr"])}
    of_faults = [rule for rule in rules if rule.get("labels", {}).get("remedy") not in ("scale_tenant", "drill")]
    acting = [rule["expr"] for rule in of_faults if "remedy" in rule.get("labels", {}) or "record" in rule]

    found = {name for begins in EXAMPLES for name, _ in host.series(named(begins), wanted=read)}

    assert len(read) > 50
    assert read - found == set(UNPLAYED)
    assert [name for name in UNPLAYED if any(re.search(rf"\b{name}\b", expr) for expr in acting)] == []


@pytest.mark.needs_parts
@pytest.mark.slow
def test_our_rules_are_never_late_and_miss_nothing(played: Mapping[str, Played]) -> None:
    found = judge.score([each for each in played.values() if not each.scenario.not_yet], judge.OURS)

    assert (found.missed, found.missed_others, max(found.late_evaluations)) == (0, 0, 0)
    assert found.others > 50
    assert len(found.late_s) == found.jobs + found.others


@pytest.mark.needs_parts
@pytest.mark.slow
@pytest.mark.parametrize("begins", [EXAMPLES, pytest.param(("",), marks=pytest.mark.nightly)], ids=["examples", "all"])
def test_no_rule_fails_and_all_rules_together_change_no_verdict(
    begins: tuple[str, ...], played: Mapping[str, Played]
) -> None:
    some = [each for each in SCENARIOS if each.name.startswith(begins)]

    assert judge.play(some) == [played[each.name] for each in some]


@pytest.mark.needs_parts
@pytest.mark.nightly
@pytest.mark.parametrize(("topic", "old", "new", "begins"), CAUGHT)
def test_corpus_detects_a_broken_rule(
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
@pytest.mark.parametrize("sign", NEEDED_ACTIVITIES)
def test_each_activity_is_needed_for_no_progress(
    sign: str, played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, whole = named(NEEDED_ACTIVITIES[sign]), vars(ContainerEvidence)["no_progress_s"].fget
    monkeypatch.setattr(
        ContainerEvidence, "no_progress_s", property(lambda seen: whole(seen._replace(**{sign: math.inf})))
    )

    (found,) = judge.play([one])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.nightly
@pytest.mark.parametrize(("sign", "begins"), IGNORED_ACTIVITIES)
def test_corpus_detects_an_ignored_activity(
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
def test_work_is_activity_only_in_some_phases(played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch) -> None:
    one = named("wedges in a driver call that spins, having loaded")
    monkeypatch.setattr(conditions, "_WORK_COUNTS", frozenset(Phase))

    (found,) = judge.play([one])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.nightly
def test_busy_gpu_alone_is_no_progress(played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_failing_rules_are_an_error(expr: str, complaint: str, tmp_path: Path) -> None:
    if missing := without_promtool():
        pytest.skip(missing)
    rules = tmp_path / "broken.rules.yaml"
    rules.write_text(f'groups: [{{name: g, rules: [{{alert: Broken, expr: "{expr}"}}]}}]')

    with pytest.raises(judge.JudgeError, match=re.escape(complaint)):
        judge.play([named("wedges on two hosts at once")], [rules])


def test_hung_promtool_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_samples_in_promtool_notation(found: Sequence[float | str | None], written: str) -> None:
    assert judge.values(found) == written
