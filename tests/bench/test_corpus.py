"""The corpus: what the rules that ship make of it, and that it would tell if they made something else of it."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import starmap
from pathlib import Path
from typing import Final

import pytest
import yaml

from bench.corpus import __main__ as judging
from bench.corpus import host, judge, scenario_file
from bench.corpus.judge import Fired, Played
from bench.corpus.scenario import (
    DECIDED,
    DOINGS,
    GPU_STATES,
    HOST_STATES,
    INSTANCE_STATES,
    PROMETHEUS_STATES,
    REMEDIES,
    TELLING,
    Condition,
    Doing,
    Scenario,
    Told,
    Verdict,
)
from bench.corpus.scenario_file import ScenarioError
from deploy.standalone import debian_packages
from exporter.collectors import COLLECTORS
from exporter.evidence import signs_of_life
from exporter.model.container import ContainerEvidence
from gpuwarden.job import Phase, Trip
from testbed.check_release import CHECKOUT
from tools.mutation.rules import ALERTS, files

PAGE: Final = (CHECKOUT / "docs" / "corpus.md").read_text(encoding="utf-8")
SCENARIOS: Final = scenario_file.read()
LEAST: Final = 60
"""How many scenarios there are at least that the rules judge right."""

SHARED: Final = "GpuwardenSharedJobStalled"

FIRST: Final = {"job_id": "1", "attempt": "1", "incarnation": "w-0"}
"""By what an alert names the first attempt of worker w."""

SLOT: Final = "(host, worker, container)"
NOT_QUIET: Final = f"<= min by {SLOT} (gpuwarden_job_quiet_seconds)"
NEWEST: Final = "(1, timestamp(gpuwarden_job_overdue_id))"
BLIND_TOO: Final = (
    "unless on () ( time() - gpuwarden:nobody_heard:timestamp_seconds < on () "
    "(max(gpuwarden_remediator_node_lost_after_seconds) + 10) )"
)
BLIND_WHERE_REPEATED: Final = "or absent_over_time(gpuwarden_exporter_info[75s])"
NONE_DONE: Final = (
    "and on (run, worker_host, worker) ( max by (run, worker_host, worker) (gpuwarden_queue_run_items_done) == 0 ),"
)
CAUGHT: Final = (
    ("shared", "<= min by", ">= min by", "hangs while another worker of its container takes"),
    ("stall", NOT_QUIET, "", "takes twenty minutes for one step, its"),
    ("health", f"min by {SLOT} (gpuwarden_job_quiet_seconds) >=", "", "takes twenty minutes for one step, its"),
    ("stall", "labels: severity", "for: 1m\n        labels:\n          severity", "is alone on its host and wedges"),
    ("worker", f"<= min by {SLOT} (gpuwarden_worker_cpu_still_seconds)", "", "holds Python's lock for ten minutes"),
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
    "io_still_s": "evaluates for a quarter of an hour at 100 % without a word",
    "fault_still_s": "tunes its kernels anew",
    "ram_still_s": "stages 6 GiB up and down",
    "cpu_still_s": "takes ten minutes for a step on a GPU that is not measured",
    "gpu_not_seen_busy_s": "waits twelve minutes for a step without a spin",
    "gpu_pegged_s": "computes a step for a quarter of an hour at 100 %, with a pause",
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


class Everything:
    """Every name there is."""

    def __contains__(self, _: object) -> bool:
        return True


def named(begins: str) -> Scenario:
    (found,) = [each for each in SCENARIOS if each.name.startswith(begins)]
    return found


def without_promtool() -> str | None:
    try:
        debian_packages.find("promtool")
    except debian_packages.PartMissing as missing:
        return str(missing)
    return None


@pytest.fixture(scope="module")
def played() -> Mapping[str, Played]:
    """Every scenario as it went, by its name: one run of promtool for all of them."""
    if missing := without_promtool():
        pytest.skip(missing)
    return {each.scenario.name: each for each in judge.play(SCENARIOS)}


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
    assert {verdict.trip for each in settled for verdict in each.verdicts} == set(Trip)


def test_whoever_is_slower_has_time_to_act_before_he_has_missed_it() -> None:
    left_s = [each.plays_s - verdict.due_s for each in SCENARIOS for verdict in each.verdicts]

    assert min(left_s) >= scenario_file.AFTERWARDS_S


def test_the_page_has_every_word_that_a_scenario_may_use() -> None:
    parts_of = [*fields(Doing), *fields(Condition)]
    states = (*GPU_STATES, *INSTANCE_STATES, *HOST_STATES, *PROMETHEUS_STATES)
    words = [*DOINGS, *(part.name for part in parts_of), *states, *Trip, *REMEDIES, *DECIDED, *TELLING]

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
            "gpuwarden_remediator_brake_latched",
            "gpuwarden_remediator_executor_beat_age_seconds",
            "gpuwarden_remediator_executor_silent_after_seconds",
            "gpuwarden_remediator_intent_age_seconds",
            "gpuwarden_remediator_intent_overdue_after_seconds",
            "gpuwarden_remediator_maintenance",
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


Series = Mapping[host.Key, Sequence[float | str | None]]
Always = Callable[[Scenario, frozenset[str]], Series]


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> Always:
    """A scenario's series where its hosts are looked at each second."""

    def always(one: Scenario, wanted: frozenset[str]) -> Series:
        with monkeypatch.context() as each_second:
            each_second.setattr(host.Host, "finds_more", lambda *_: True)
            return host.series(one, wanted=wanted)

    return always


def unlike(one: Scenario, every: Always) -> Mapping[host.Key, list[tuple[object, object]]]:
    """What a scenario's series have, and what they have where it is looked each second: where that is not the same."""
    wanted = judge.metrics(ALERTS.glob("*.rules.yaml"))
    found, always = host.series(one, wanted=wanted), every(one, wanted)
    assert found.keys() == always.keys()
    pairs = {key: list(zip(found[key], always[key], strict=True)) for key in found}
    return {
        key: [(a, b) for a, b in each if not same(a, b)] for key, each in pairs.items() if not all(starmap(same, each))
    }


def same(one: float | str | None, other: float | str | None) -> bool:
    """Whether two samples are: sums of many parts may differ by what is lost of each."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return one == other


CLOSE: Final = """\
- name: changes as it wedges
  why: It spins for ever, and what it does beside that changes three times, seven seconds apart.
  workers:
    w: {0s: loads, 2m: steps, 4m2s: spins, 4m9s: {does: spins, faults_per_s: 30}, 4m16s: spins,
        4m23s: {does: spins, faults_per_s: 30}}
  verdict: &wedged {trip: stall, remedy: restart_worker, of: w, since: 4m2s, due: 14m2s}
  scrape: 5s
  evaluate: 5s
- name: wedges beside one that changes
  why: What another does on another GPU is not its life.
  workers:
    w: {0s: loads, 2m: steps, 4m2s: spins}
    v: {gpus: [1], 0s: loads, 2m: steps, 4m9s: evaluates, 4m16s: steps, 4m23s: evaluates, 4m30s: steps}
  verdict: *wedged
  scrape: 5s
  evaluate: 5s
- name: wedges
  why: The same wedge, and nothing changes.
  workers:
    w: {0s: loads, 2m: steps, 4m2s: spins}
  verdict: *wedged
  scrape: 5s
  evaluate: 5s
- name: moves in part
  why: It computes and spins by turns, and does by turns what shows that it does so.
  workers:
    w: {0s: maps, 2m: evaluates, 4m1s: {does: spins, io_mib_per_s: 3}, 4m4s: {does: computes, faults_per_s: 45},
        4m15s: {does: spins, faults_per_s: 200}, 6m: {does: spins, cpu_cores: 0.004}, 9m3s: computes}
  verdict: none
- name: moves little, in a container whose health check asks
  why: Each figure is of a rate that just counts as still.
  workers:
    w: {asked_every_s: 30, 0s: loads, 2m7s: steps, 4m: {does: hangs, faults_per_s: 45, io_mib_per_s: 0.24},
        6m3s: {does: evaluates, gpu_ratio: 1, cpu_cores: 0.049}}
  verdict: none
"""
"""Scenarios whose changes are close, or at odd seconds, or that move hardly."""


def close(folder: Path) -> list[Scenario]:
    (folder / "a.yaml").write_text(CLOSE)
    return scenario_file.read(folder)


@pytest.mark.needs_parts
def test_a_wedge_is_told_as_soon_however_close_the_changes_around_it_are(tmp_path: Path) -> None:
    played = judge.play(close(tmp_path)[:3])

    assert [each.wrong() for each in played] == [[], [], []]
    assert [each.fired[0].at_s for each in played] == [845, 845, 845]


@pytest.mark.parametrize("begins", ["changes", "wedges beside", "moves in part", "moves little"])
def test_where_changes_are_close_it_is_looked_as_closely(begins: str, tmp_path: Path, every: Always) -> None:
    (one,) = [each for each in close(tmp_path) if each.name.startswith(begins)]

    assert unlike(one, every) == {}


@pytest.mark.parametrize(
    "begins",
    [
        "decodes for ten minutes, its",
        "is stopped by a signal and stays so",
        "leaks for ten minutes",
        "wedges in its evaluation while another worker",
        "hangs in its checkpoint while its container's health check",
        "deadlocks at 100 % with a health check every 10 s",
    ],
)
def test_looking_seldom_where_nothing_changes_tells_what_looking_once_a_second_does(begins: str, every: Always) -> None:
    assert unlike(named(begins), every) == {}


def test_where_nothing_changes_it_is_looked_seldom() -> None:
    one = host.Host("a", replace(named("wedges after a hundred steps"), plays_s=3600))

    looks = [second for second in range(1800, 3600) if one.finds_more(second)]

    assert looks == list(range(1800, 3600, 5))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        pytest.param({}, "", id="nothing"),
        pytest.param({"due_s": 600}, "acts on w at 480s, which is due at 600s and not before", id="it is early"),
        pytest.param({"due_s": 400}, "Stalled acts on w at 480s, which is late: it is due at 400s, to be told by 420s",
                     id="it is late"),
        pytest.param({"trip": Trip.BUDGET}, "Stalled acts on w: restart_worker for stall; restart_worker for budget is",
                     id="it is for another reason"),
        pytest.param({"remedy": "lose_node"}, "Stalled acts on w: restart_worker for stall; lose_node for stall is",
                     id="another remedy is wanted"),
        pytest.param({"of": "v"}, "Stalled acts on w at 480s, with which nothing is wrong", id="another is wedged"),
    ],
)  # fmt: skip
def test_a_verdict_that_is_not_the_right_one_is_told_when(change: Mapping[str, object], complaint: str) -> None:
    one = named("wedges after a hundred steps")
    fired = Fired(
        policy=judge.OURS, alert="Stalled", remedy="restart_worker", trip="stall", of="w", at_s=480, named=FIRST
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
        (None, "nobody"),
    ],
)
def test_a_verdict_in_the_name_of_another_attempt_is_told(label: Mapping[str, str] | None, said: str) -> None:
    one = named("wedges after a hundred steps")
    wrong = {} if label is None else {**FIRST, **label}
    fired = Fired(
        policy=judge.OURS, alert="Stalled", remedy="restart_worker", trip="stall", of="w", at_s=480, named=wrong
    )

    found = Played(scenario=one, fired=(fired,)).wrong()

    assert found == [f"Stalled names {said} of w at 480s; it is job_id 1, attempt 1, incarnation w-0"]


def test_people_are_told_of_the_attempt_that_is_there() -> None:
    one = named("wedges while another worker of its container computes, and")
    fired = Fired(
        policy=judge.PEOPLE,
        alert=SHARED,
        remedy="",
        trip="",
        of="w",
        at_s=300,
        named=FIRST | {"job_id": "2"},
    )

    found = Played(scenario=one, fired=(fired,)).wrong()

    assert found == [
        f"{SHARED} names job_id 2, attempt 1, incarnation w-0 of w at 300s; it is job_id 1, attempt 1, incarnation w-0"
    ]


def test_who_is_there_is_told_by_the_second() -> None:
    worker = named("is on its next job, which wedges, when Prometheus")
    server = named("was started anew while Prometheus was down")

    found = [host.identities(worker, second).get("w") for second in (349, 350, 355)]

    assert found == [FIRST, {}, FIRST | {"job_id": "2", "attempt": "2"}]
    assert [host.identities(server, second)["s"] for second in (349, 350)] == [
        {"incarnation": "s@0"},
        {"incarnation": "s@1"},
    ]


STEPPING: Final = """\
- name: a
  why: b
  workers:
    w: {0s: loads, 2m: steps%s}
  hosts: {a: {%s}}
  plays: 10m
  verdict: none
"""


def scraped(folder: Path, timeline: str, name: str, *, then: str = "") -> list[float | str | None]:
    """What each scrape has of the one series of that name, of a worker that steps from 2m on and does that then."""
    (folder / "a.yaml").write_text(STEPPING % (then, timeline))
    (found,) = host.series(*scenario_file.read(folder), wanted={name}).values()
    return found


def test_an_exporter_tells_of_its_sources_and_collectors_how_they_did(tmp_path: Path) -> None:
    unanswered = STEPPING.replace("  plays", "  gpus: {0: {5m: unanswered, 6m: works}}\n  plays")
    (tmp_path / "a.yaml").write_text(unanswered % ("", ""))
    (one,) = scenario_file.read(tmp_path)

    found = host.series(one, wanted={"gpuwarden_collector_success", "gpuwarden_sample_age_seconds"})
    told = {dict(labels).get("collector", name): values for (name, labels), values in found.items()}

    assert {"source_gpu", "source_workers", "source_docker", "sampler", *COLLECTORS} <= told.keys()
    assert [told["source_gpu"][minute * 4] for minute in (4, 5, 6)] == [1.0, 0.0, 1.0]
    assert {*told.pop("source_gpu"), *told.pop("gpuwarden_sample_age_seconds")} == {0.0, 1.0}
    assert {value for values in told.values() for value in values} == {1.0}


def test_a_collector_that_fails_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLLECTORS, "jobs", lambda _: 1 / 0)

    with pytest.raises(RuntimeError, match="collector jobs fails at 0s of host a"):
        scraped(tmp_path, "", "gpuwarden_job_steps")


ERRORS: Final = """\
- name: a
  why: b
  workers:
    w: {0s: loads, 2m: steps}
    v: {host: b, 0s: loads, 2m: steps}
  gpus:
    a/0: {3m: {xid: 79}, 4m: {xid: 79}, 5m: {ecc_uncorrected: 2}, 6m: {xid: 13, ecc_uncorrected: 1},
          7m: {throttled: hw_slowdown}, 8m: works}
  hosts: {a: {%s}}
  plays: 10m
  verdict: none
"""


def errors(folder: Path, timeline: str, name: str, **labels: str) -> Mapping[str, Sequence[float | str | None]]:
    """What each whole minute has of the series of that name and these labels, by host."""
    (folder / "a.yaml").write_text(ERRORS % timeline)
    found = host.series(*scenario_file.read(folder), wanted={name})
    return {
        dict(given)["host"]: values[::4]
        for (_, given), values in found.items()
        if labels.items() <= dict(given).items()
    }


def test_the_errors_of_a_gpu_are_counted_as_its_exporter_counts_them(tmp_path: Path) -> None:
    told = {
        "fallen off the bus": errors(tmp_path, "", "gpuwarden_gpu_xid_errors_total", xid="79"),
        "of a program": errors(tmp_path, "", "gpuwarden_gpu_xid_errors_total", xid="13"),
        "of its memory": errors(tmp_path, "", "gpuwarden_gpu_ecc_errors_total", error="uncorrected"),
        "by heat": errors(tmp_path, "", "gpuwarden_gpu_throttled", reason="hw_slowdown"),
    }

    assert told == {
        "fallen off the bus": {"a": [0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2]},
        "of a program": {"a": [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]},
        "of its memory": {"a": [0, 0, 0, 0, 0, 2, 3, 3, 3, 3, 3]},
        "by heat": {"a": [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]},
    }, "and of the GPU of the other host nothing is known"


def test_an_exporter_that_is_started_anew_counts_xids_anew_and_the_driver_goes_on(tmp_path: Path) -> None:
    anew = "3m40s: unwatched, 3m50s: watched"

    assert errors(tmp_path, anew, "gpuwarden_gpu_xid_errors_total", xid="79")["a"][3:6] == [1, 1, 1]
    anew = "5m40s: unwatched, 5m50s: watched"
    assert errors(tmp_path, anew, "gpuwarden_gpu_ecc_errors_total", error="uncorrected")["a"][5:8] == [2, 3, 3]
    boots = "5m40s: unwatched, 5m50s: rebooted"
    assert errors(tmp_path, boots, "gpuwarden_gpu_ecc_errors_total", error="uncorrected")["a"][5:8] == [2, 1, 1]


UNREAPED: Final = """\
- name: a
  why: b
  workers:
    w: {0s: loads, 2m: steps, 3m: ends unreaped, 5m: loads}
  plays: 6m
  verdict: none
"""


def test_a_process_that_ends_unreaped_leaves_its_container_as_it_was_and_its_lock_free(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(UNREAPED)
    (one,) = scenario_file.read(tmp_path)
    names = {f"gpuwarden_{name}" for name in ("worker_alive", "worker_dead_seconds", "container_gpu_idle_seconds")}

    found = {name: values[::4] for (name, _), values in host.series(one, wanted=names).items()}

    assert found["gpuwarden_worker_alive"] == [1, 1, 1, 0, 0, 1, 1]
    assert found["gpuwarden_worker_dead_seconds"][3:6] == [0, 60, "stale"]
    assert math.isnan(float(found["gpuwarden_container_gpu_idle_seconds"][4] or 0)), "of no process nothing is known"
    assert [host.identities(one, second)["w"]["incarnation"] for second in (240, 300)] == ["w-0", "w-300"]


CUT: Final = """\
- name: a
  why: b
  workers:
    w: {gpus: [1:0], 0s: {does: steps, vram_mib: 3000}}
    v: {gpus: [1:1], 0s: {does: hangs, vram_mib: 2000}}
  gpus: {1: {3m: lost}}
  plays: 5m
  verdict: none
"""


def test_a_gpu_that_is_cut_is_told_of_as_its_driver_does(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CUT)
    (one,) = scenario_file.read(tmp_path)

    found = host.series(one, wanted=Everything())

    def told(name: str, label: str) -> set[tuple[str, object]]:
        return {(dict(labels)[label], values[4]) for (of, labels), values in found.items() if of == f"gpuwarden_{name}"}

    assert told("gpu_mig_info", "parent") == {("GPU-1", 1.0)}
    assert told("gpu_info", "index") == {("1", 1.0), ("1:0", 1.0), ("1:1", 1.0)}
    assert told("gpu_info", "attribution") == {("none", 1.0)}
    assert told("gpu_utilization_ratio", "gpu") == set()
    assert told("gpu_memory_used_bytes", "gpu") == {
        ("GPU-1", 5000.0 * host.MIB), ("MIG-1:0", 3000.0 * host.MIB), ("MIG-1:1", 2000.0 * host.MIB)
    }  # fmt: skip
    assert told("container_gpu_attribution_missing", "container") == {("w", 1.0), ("v", 1.0)}
    lost = {dict(labels)["gpu"]: values[-1] for (name, labels), values in found.items() if "gpu_lost_seconds" in name
            and "gpu" in dict(labels)}  # fmt: skip
    assert lost == {"GPU-1": 120.0, "MIG-1:0": 120.0, "MIG-1:1": 120.0}


def test_what_a_program_was_to_do_while_its_machine_slept_it_does_as_that_wakes(tmp_path: Path) -> None:
    then = ", 5m10s: {does: steps, step_every_s: 5}, 5m40s: {does: steps, step_every_s: 10}"

    steps = scraped(tmp_path, "5m: asleep, 6m: watched", "gpuwarden_job_steps", then=then)

    assert [steps[minute * 4] for minute in (6, 7)] == [90, 96], "one each ten seconds from when it woke"


@pytest.mark.parametrize(
    ("timeline", "busy_s"),
    [
        pytest.param("5m: frozen, 6m: watched", 0.95 * 420, id="one that was stopped goes on by what it knew"),
        pytest.param("5m: unwatched, 6m: watched", 0.95 * 240, id="one that was down begins anew"),
        pytest.param("5m: asleep, 6m: rebooted", 0.95 * 240, id="and so does that of a machine that boots anew"),
    ],
)
def test_an_exporter_knows_what_it_saw_in_its_own_life(timeline: str, busy_s: float, tmp_path: Path) -> None:
    busy = scraped(tmp_path, timeline, "gpuwarden_container_gpu_busy_seconds_total")

    assert busy[-1] == pytest.approx(busy_s, abs=1)


def test_what_vanishes_while_prometheus_is_down_is_not_marked() -> None:
    jobs = host.series(named("is on its next job, which wedges, when Prometheus"), wanted={"gpuwarden_job_id"})
    watched = host.series(named("waits for a job on a GPU that is lost"), wanted={"gpuwarden_job_id"})

    assert [found.count("stale") for found in jobs.values()] == [0, 0]
    assert "stale" in next(iter(watched.values())), "as while it is up"


def test_a_verdict_that_never_comes_and_one_on_the_sound_are_told() -> None:
    fired = Fired(policy=judge.OURS, alert="Stalled", remedy="restart_worker", trip="stall", of="w", at_s=480)

    missed = Played(scenario=named("wedges after a hundred steps"), fired=()).wrong()
    killed = Played(scenario=named("takes twenty minutes for one step, its"), fired=(fired,)).wrong()

    assert missed == ["nothing acts on w, which is due at 480s"]
    assert killed == ["Stalled acts on w at 480s, with which nothing is wrong"]


@pytest.mark.parametrize(
    ("fired", "said"),
    [
        pytest.param([("w", 300)], [], id="in time"),
        pytest.param([("w", 330), ("w", 300)], [], id="and on from there"),
        pytest.param([], [f"{SHARED} tells nobody of w, which is due at 300s"], id="never"),
        pytest.param([("w", 270)], [f"{SHARED} tells of w at 270s; it is due at 300s, to be told by 300s"], id="early"),
        pytest.param([("w", 330)], [f"{SHARED} tells of w at 330s; it is due at 300s, to be told by 300s"], id="late"),
        pytest.param([("w", 300), ("v", 60)], [f"{SHARED} tells of v at 60s, of which nothing is to be told"],
                     id="of another besides"),
    ],
)  # fmt: skip
def test_what_people_are_told_is_judged_and_acts_on_nobody(fired: list[tuple[str, int]], said: list[str]) -> None:
    one = named("wedges while another worker of its container computes, and")
    found = [
        Fired(policy=judge.PEOPLE, alert=SHARED, remedy="", trip="", of=of, at_s=at_s, named=FIRST)
        for of, at_s in fired
    ]

    played = Played(scenario=one, fired=tuple(found))

    assert one.told == (Told(alert="GpuwardenSharedJobStalled", of="w", due_s=300),)
    assert played.wrong() == said
    assert played.judgement(judge.OURS).false == ()


def test_people_are_told_by_the_alert_that_is_wanted() -> None:
    one = named("wedges while another worker of its container computes, and")
    fired = Fired(policy=judge.PEOPLE, alert="GpuwardenJobSlowed", remedy="", trip="", of="w", at_s=300, named=FIRST)

    assert Played(scenario=one, fired=(fired,)).wrong() == [
        "GpuwardenJobSlowed tells of w at 300s, of which nothing is to be told",
        "GpuwardenSharedJobStalled tells nobody of w, which is due at 300s",
    ]


def test_people_are_told_of_a_server_by_its_container() -> None:
    labels = {"alertname": "GpuwardenServerSilent", "host": "0-a", "container": "llm", "severity": "warning"}
    one = named("deadlocks at 100 % over two GPUs as a server")
    fired = judge.accuses(labels, at_s=1500)

    assert fired is not None
    assert (fired.policy, fired.of) == (judge.PEOPLE, "llm")
    assert Played(scenario=one, fired=(fired,)).wrong() == []
    assert Played(scenario=one, fired=()).wrong() == [
        "GpuwardenServerSilent tells nobody of llm, which is due at 1500s"
    ]


@pytest.mark.parametrize(
    ("later_s", "said"),
    [
        pytest.param(30, [], id="of the same wedge"),
        pytest.param(0, ["GpuwardenServerSilent tells of llm at 420s, of which nothing is to be told"], id="by then"),
    ],
)
def test_what_people_are_told_of_whom_was_acted_on_counts_no_more(later_s: int, said: list[str]) -> None:
    one = named("stops answering with its GPU idle")
    acts = Fired(
        policy=judge.OURS, alert="Server", remedy="restart_container", trip="server", of="llm", at_s=420,
        named={"incarnation": "llm@0"},
    )  # fmt: skip
    tells = Fired(policy=judge.PEOPLE, alert="GpuwardenServerSilent", remedy="", trip="", of="llm", at_s=420 + later_s)

    assert Played(scenario=one, fired=(acts, tells)).wrong() == said


def test_a_policy_is_held_to_when_it_went_wrong_and_acts_once() -> None:
    one = named("wedges on two hosts")

    def fired(of: str, at_s: int) -> Fired:
        return Fired(policy="idle", alert="Idle", remedy="", trip="", of=of, at_s=at_s)

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
def test_who_is_at_fault_is_what_the_remediator_decides_by_the_counts_of_that_moment(
    begins: str, decided: list[str]
) -> None:
    one = named(begins)
    fired = tuple(
        Fired(policy=judge.OURS, alert="A", remedy="wrangle", trip="items", of=each.of, at_s=each.due_s)
        for each in one.verdicts
    )
    other = tuple(replace(each, then="lock" if each.then == "move" else "move") for each in one.verdicts)

    assert [each.then for each in one.verdicts] == decided
    assert Played(scenario=one, fired=fired).wrong() == []
    assert Played(scenario=replace(one, verdicts=other), fired=fired).wrong() == [
        f"A acts on {each.of}, and then is decided: {each.then}; {wanted.then} is wanted"
        for each, wanted in zip(one.verdicts, other, strict=True)
    ]


def job(of: str, *, due_s: int, trip: Trip = Trip.STALL) -> Verdict:
    return Verdict(trip=trip, remedy="restart_worker", of=of, since_s=due_s - 120, due_s=due_s)


def by(policy: str, of: str, at_s: int) -> Fired:
    return Fired(policy=policy, alert="A", remedy="", trip="", of=of, at_s=at_s)


def test_of_all_that_is_wanted_it_is_counted_what_is_missed() -> None:
    wanted = (
        job("w", due_s=360),
        job("v", due_s=360),
        job("b", due_s=360, trip=Trip.VRAM),
        job("a", due_s=1, trip=Trip.ITEMS),
    )
    one = Played(
        scenario=replace(SCENARIOS[0], verdicts=wanted), fired=(by("gpuwarden", "w", 360), by("gpuwarden", "b", 360))
    )

    found = judge.score([one], judge.OURS)

    assert (found.missed, found.wedged, found.missed_others, found.others) == (1, 2, 1, 2)


@pytest.mark.parametrize(
    ("at_s", "late_s", "evaluations"),
    [(360, 0, 0), (390, 30, 0), (391, 31, 1), (420, 60, 1), (450, 90, 2)],
)
def test_lateness_is_from_the_earliest_moment_and_from_the_first_evaluation_that_can_tell(
    at_s: int, late_s: int, evaluations: int
) -> None:
    one = replace(SCENARIOS[0], verdicts=(job("b", due_s=360, trip=Trip.VRAM),), scrape_s=13, evaluate_s=30)

    found = judge.score([Played(scenario=one, fired=(by("gpuwarden", "b", at_s),))], judge.OURS)

    assert (found.late_s, found.late_evaluations) == ([late_s], [evaluations])
    assert found.took_s == [], "it is no job"


@pytest.mark.parametrize(
    ("began_s", "took_s", "missed"),
    [
        pytest.param({"w": 50.0}, [3660 - 240], 0, id="it began before it wedged and is there as the scenario ends"),
        pytest.param({}, [], 1, id="it has ended"),
        pytest.param({"w": 361.0}, [], 1, id="another one is there by then"),
        pytest.param({"w": -3590.0}, [300 - 240], 0, id="the limit came while it was played"),
    ],
)
def test_who_has_a_time_limit_ends_at_last_whom_it_does_not_find(
    began_s: Mapping[str, float], took_s: list[float], missed: int
) -> None:
    one = replace(SCENARIOS[0], verdicts=(job("w", due_s=360),), scrape_s=15, evaluate_s=30)
    fired = (by("timeout", "w", 300),) if began_s.get("w", 0) < 0 else ()

    limited = judge.score([Played(scenario=one, fired=fired, began_s=began_s)], "timeout")
    idle = judge.score([Played(scenario=one, fired=(), began_s=began_s)], "idle")

    assert (limited.took_s, limited.missed, limited.false) == (took_s, missed, 0)
    assert (idle.took_s, idle.missed) == ([], 1), "which has none"


@pytest.mark.needs_parts
@pytest.mark.slow
def test_ours_is_never_an_evaluation_late_and_misses_nothing_of_whatever_kind(played: Mapping[str, Played]) -> None:
    found = judge.score([each for each in played.values() if not each.scenario.not_yet], judge.OURS)

    assert (found.missed, found.missed_others, max(found.late_evaluations)) == (0, 0, 0)
    assert found.others > 50
    assert len(found.late_s) == found.wedged + found.others


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
def test_the_corpus_tells_when_a_sign_of_life_is_not_looked_at(
    sign: str, played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, whole = named(BLIND[sign]), vars(ContainerEvidence)["unmoved_s"].fget
    monkeypatch.setattr(ContainerEvidence, "unmoved_s", property(lambda seen: whole(seen._replace(**{sign: math.inf}))))

    (found,) = judge.play([one])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.nightly
@pytest.mark.parametrize(("sign", "begins"), OVERLOOKED)
def test_the_corpus_tells_when_a_job_is_quiet_in_spite_of_a_sign_of_life(
    sign: str, begins: str, played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, whole = named(begins), signs_of_life._signs
    monkeypatch.setattr(
        signs_of_life, "_signs", lambda *of, **how: [each for each in whole(*of, **how) if each[0].name != sign]
    )

    (found,) = judge.play([one])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.nightly
def test_the_corpus_tells_when_work_is_life_in_every_phase(
    played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = named("wedges in a driver call that spins, having loaded")
    monkeypatch.setattr(Phase, "counts_work", True)

    (found,) = judge.play([one])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.nightly
def test_the_corpus_tells_when_a_pegged_gpu_proves_nothing(
    played: Mapping[str, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, whole = named("deadlocks in a collective, its GPU at 100 %"), vars(ContainerEvidence)["unmoved_s"].fget
    monkeypatch.setattr(ContainerEvidence, "unmoved_s", property(lambda seen: whole(seen._replace(gpu_pegged_s=None))))

    (found,) = judge.play([one])

    assert played[one.name].wrong() == []
    assert found.wrong() != []


@pytest.mark.needs_parts
@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("gpuwarden_job_info * on () gpuwarden_job_phase", "a rule fails in the corpus: rule: Broken"),
        ("gpuwarden_job_info *", "promtool told nothing about 'wedges on two hosts at once"),
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

    with pytest.raises(judge.JudgeError, match=re.escape(f"{hangs} did not end within 0.2 s and was killed")):
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


@pytest.mark.parametrize(
    ("due_s", "scrape_s", "evaluate_s", "by_s"), [(480, 15, 30, 480), (481, 15, 30, 510), (481, 60, 5, 540)]
)
def test_a_verdict_is_to_come_with_the_first_evaluation_of_the_first_scrape_that_shows_it(
    due_s: int, scrape_s: int, evaluate_s: int, by_s: int
) -> None:
    one = replace(named("wedges after a hundred steps"), scrape_s=scrape_s, evaluate_s=evaluate_s)
    verdict = Verdict(trip=Trip.STALL, remedy="restart_worker", of="w", since_s=0, due_s=due_s)

    assert one.deadline_s(verdict) == by_s


SOUND: Final = """\
- name: a
  why: b
  workers:
    w: {0s: loads, 4m: hangs}
  verdict: {trip: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}
"""


EITHER: Final = """\
- name: a
  why: b
  tenants:
    a: {budget_mib: 3000, 0s: {does: holds, vram_mib: 7000}}
    b: {budget_mib: 3000, 0s: {does: holds, vram_mib: 7000}}
  verdict: {trip: vram, remedy: recycle_container, of: [a, b], since: 0s}
"""


@pytest.mark.parametrize(
    ("fired", "said"),
    [
        ([("a", 0)], []),
        ([("b", 0)], []),
        ([("b", 0), ("a", 30)], ["Victim acts on a at 30s, with which nothing is wrong"]),
        ([("b", 60)], ["Victim acts on b at 60s, which is late: it is due at 0s, to be told by 0s"]),
        ([], ["nothing acts on a or b, which is due at 0s"]),
    ],
)
def test_where_either_may_go_one_does(fired: list[tuple[str, int]], said: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(EITHER)
    (one,) = scenario_file.read(tmp_path)
    found = tuple(
        Fired(policy=judge.OURS, alert="Victim", remedy="recycle_container", trip="vram", of=of, at_s=at_s,
              named={"incarnation": f"{of}@0"}) for of, at_s in fired
    )  # fmt: skip

    played = Played(scenario=one, fired=found)
    judged = played.judgement(judge.OURS)

    assert played.wrong() == said
    assert len(judged.false) == max(0, len(fired) - 1)
    assert (len(judged.found), len(judged.missed)) == ((1, 0) if fired else (0, 1))


def test_what_is_not_said_has_its_default(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SOUND)

    (one,) = scenario_file.read(tmp_path)

    assert (one.place, one.scrape_s, one.evaluate_s, one.plays_s) == (
        "a.yaml:1",
        15,
        30,
        360 + scenario_file.AFTERWARDS_S,
    )


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("- name: a", "- nam: a", "a.yaml:1: name: a sentence is wanted, and is missing"),
        ("  why: b\n", "", "a.yaml:1: why: a sentence is wanted"),
        ("  why: b", "  why: b\n  wy: c", "a.yaml:3: wy: is nothing that is known here; wanted is one of name, why"),
        ("4m: hangs", "4m: hang", "a.yaml:4: 4m: nobody knows how one 'hang'; known are: loads, maps"),
        ("4m: hangs", "4m: {does: hangs, cpu: 1}", "a.yaml:4: 4m: cpu is no part of what is done; wanted is one"),
        ("4m: hangs", "4m: {does: hangs, process: gone}", "process: 'gone' will not do (it is none of: works, waits"),
        ("4m: hangs", "4m: {does: hangs, phase: train}", "phase: 'train' will not do (it is none of: load, step"),
        ("4m: hangs", "4m: {does: hangs, step_every_s: 0.5}", "0.5 will not do (a whole number is wanted, 1 or more)"),
        ("4m: hangs", "4m: {does: hangs, cpu_cores: all}", "cpu_cores: 'all' will not do (a number is wanted)"),
        ("4m: hangs", "4m: {does: hangs, io_mib_per_s: -1}", "io_mib_per_s: -1 will not do (it is 0 or more)"),
        ("0s: loads", "gpus: 0, 0s: loads", "gpus: 0 will not do (a list of their numbers is wanted, such as [0, 1]"),
        ("0s: loads", "ran_s: 20m, 0s: loads", "ran_s: '20m' will not do (a whole number is wanted, 0 or more)"),
        ("0s: loads", "container: 1, 0s: loads", "container: 1 will not do (a name is wanted)"),
        ("4m: hangs", "4m: {does: hangs, gpu_ratio: 95}", "a.yaml:4: 4m: gpu_ratio: 95 will not do (it is a ratio"),
        ("4m: hangs", "4m: {does: hangs, gpu_ratio: [0, 1]}", "a.yaml:4: w at 240s: gpu_ratio has not one figure"),
        ("4m: hangs", "4m: {does: hangs, heartbeat: 1}", "heartbeat: 1 will not do (true or false is wanted)"),
        ("4m: hangs", "0m: hangs", "a.yaml:4: 0m: is not later than the one before; put the times in order"),
        ("0s: loads", "1s: loads", "a.yaml:4: w does nothing at 0s; say what"),
        ("0s: loads", "silence_s: 9, 0s: loads", "silence_s: is nothing that is known here; wanted is a time"),
        ("0s: loads", "job_class: gpus, 0s: loads", "a.yaml:4: job_class: 'gpus' will not do (it is none of:"),
        ("    w: {0s: loads, 4m: hangs}", "    w: loads", "a.yaml:4: `key: value` pairs are wanted here"),
        ("    w: {0s: loads, 4m: hangs}", "    w:", "are wanted here, and there is nothing"),
        ("4m: hangs", "240: hangs", "run, works_in, asked_every_s (a time has a unit: 240s, or 240m)"),
        ("verdict: {trip: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}", "verdict:",
         "a.yaml:5: verdict: there is none; write none, or {trip"),
        ("  workers:\n    w: {0s: loads, 4m: hangs}\n", "", "a.yaml:1: 'a' has nobody in it; give it workers"),
        ("  verdict:", "  servers: {w: {0s: answers}}\n  verdict:", "a.yaml:1: two are called 'w'; give each a name"),
        ("  verdict:", "  gpus: {0: {1m: gone}}\n  verdict:", "a.yaml:5: 1m: 'gone' is none of: works, lost"),
        ("  verdict:", "  gpus: {one: {1m: lost}}\n  verdict:", "a.yaml:5: one: is no number of a GPU; write 0, 1"),
        ("  verdict:", "  hosts: {a: {1: asleep}}\n  verdict:", "a.yaml:5: 1: is nothing that is known here"),
        ("  verdict:", "  scrape: 15\n  verdict:", "a.yaml:5: scrape: 15 is no time; write it like 90s, 4m or 1h30m"),
        ("  verdict:", "  scrape: 0s\n  verdict:", "a.yaml:1: scrape and evaluate are 1s or more"),
        ("  verdict:", "  plays: 5m\n  verdict:", "a.yaml:5: plays: it ends before all that happens has, which"),
        ("verdict: {trip: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}", "plays: 9m",
         "a.yaml:1: no verdict; write `verdict: none`, or what"),
        ("{trip: stall, remedy: restart_worker, of: w, since: 4m, due: 6m}", "never", "a.yaml:5: verdict: 'never'"),
        ("trip: stall", "trip: stalled", "a.yaml:5: trip: 'stalled' is none of: stall, budget"),
        ("restart_worker", "restart", "a.yaml:5: remedy: 'restart' is none of: restart_worker"),
        ("of: w", "of: v", "a.yaml:5: of: no worker is called 'v'; wanted is one of: w"),
        ("of: w", "of: a", "a.yaml:5: of: no worker is called 'a'; wanted is one of: w"),
        ("restart_worker", "lose_node", "a.yaml:5: of: no host is called 'w'; wanted is one of: a"),
        ("restart_worker", "restart_container", "a.yaml:5: of: no server is called 'w'; wanted is one of: none"),
        ("restart_worker", "recycle_container", "a.yaml:5: of: no tenant is called 'w'; wanted is one of: none"),
        ("of: w, ", "", "a.yaml:5: of: no worker is named; wanted is one of: w"),
        ("0s: loads", "run: 2020-13-45, 0s: loads", "a.yaml:4: run: what stands there cannot be read (month must"),
        ("0s: loads", "run: !r r, 0s: loads", "a.yaml:4: run: what stands there cannot be read (could not determine"),
        ("  why: b", "  why: \x02", "a.yaml:1: this is no YAML (control characters are not allowed)"),
        ("4m: hangs", "4m: {does: hangs, unread: [[ram]]}", "4m: unread: [['ram']] will not do (wanted is any of: ram"),
        ("  verdict:", "  gpus: {0: {1m: {throttled: {a: 1}}}}\n  verdict:", "{'a': 1} will not do (wanted is any of"),
        ("of: w", "of: [w, v]", "a.yaml:5: of: no worker is called 'v'; wanted is one of: w"),
        ("of: w", "of: []", "a.yaml:5: of: no worker is named; wanted is one of: w"),
        ("of: w", "of: [w, w]", "a.yaml:5: of: w has a verdict already; keep the first"),
        ("  verdict:", "  told: {alert: A, of: w, due: 6m}\n  verdict:", "a.yaml:5: alert: 'A' is none of: Gpuwarden"),
        ("  verdict:", "  told: {alert: GpuwardenSharedJobStalled, of: a, due: 6m}\n  verdict:",
         "a.yaml:5: of: no worker is called 'a'; wanted is one of: w"),
        ("  verdict:", "  told: {alert: GpuwardenSharedJobStalled, of: w, since: 6m}\n  verdict:",
         "a.yaml:5: due: None is no time"),
        ("0s: loads", "works_in: thread, 0s: loads", "works_in: 'thread' will not do (it is none of: child, orphan)"),
        ("due: 6m", "due: 6m, then: lock", "a.yaml:5: then: 'lock' will not do; wanted is, of who is to be wrangled"),
        ("due: 6m", "due: 3m", "a.yaml:5: due: it comes before what went wrong"),
        ("4m: hangs", "4m: {does: hangs, io_mib_per_s: 1, io_mib_per_s: 2}",
         "a.yaml:4: 'io_mib_per_s' stands here twice; keep one"),
        ("4m: hangs", "4m: hangs, 4m: steps", "a.yaml:4: '4m' stands here twice; keep one"),
        ("4m: hangs", "4m: {does: hangs,\n      does: steps}", "a.yaml:5: 'does' stands here twice; keep one"),
        ("of: w,", "of: w, of: w,", "a.yaml:5: 'of' stands here twice; keep one"),
        ("4m: hangs", "4m: {does: hangs, io_mib_per_s: {a: 1, a: 2}}", "a.yaml:4: 'a' stands here twice; keep one"),
        ("4m: hangs", "gpus: [{a: 1, a: 2}]", "a.yaml:4: 'a' stands here twice; keep one"),
        ("  verdict:", "  gpus: {0: {1m: lost}, 0: {2m: lost}}\n  verdict:", "a.yaml:5: '0' stands here twice"),
        ("  verdict:", "  gpus: {0: {1m: lost}, 00: {2m: lost}}\n  verdict:", "a.yaml:5: 00: is no number of a GPU"),
        ("0s: loads", "gpus: [0, 0], 0s: loads", "gpus: [0, 0] will not do (one is there twice)"),
        ("  why: b", "  why: b\n  why: c", "a.yaml:3: 'why' stands here twice; keep one"),
        ("  why: b", "  why: [b", "a.yaml:3: this is no YAML"),
        ("  why: b", "\twhy: b", "(found a tab character that violates indentation); indent by spaces"),
        ("  why: b", "  why: b: c", "this is no YAML (mapping values are not allowed in this context); put a sentence"),
        ("  why: b", "   why: b", "indent the keys of one scenario alike"),
        ("0s: loads", "gpus: [1:0:0], 0s: loads", "gpus: ['1:0:0'] will not do (a list of their numbers is wanted"),
        ("  verdict:", "  gpus: {b/0: {1m: lost}}\n  verdict:", "b/0: is no number of a GPU; write 0, 1 and so on"),
        ("  verdict:", "  gpus: {1:0: {1m: lost}}\n  verdict:", "1m: 'lost' is none of: works, vanished, unlisted"),
        ("  verdict:", "  gpus: {0: {1m: {is: lost}}}\n  verdict:", "1m: is is no part of how it is; wanted is one"),
        ("  verdict:", "  gpus: {0: {1m: {xid: all}}}\n  verdict:", "1m: xid: 'all' will not do (a whole number"),
        ("  verdict:", "  gpus: {0: {1m: {throttled: heat}}}\n  verdict:", "'heat' will not do (wanted is any of"),
        ("  verdict:", "  told: {alert: GpuwardenGpuXid, of: 0, due: 6m}\n  verdict:",
         "a.yaml:5: of: no GPU is called '0'; wanted is one of: a/0"),
        ("  verdict:", "  told: [&t {alert: GpuwardenGpuXid, of: a/0, due: 6m}, *t]\n  verdict:",
         "a.yaml:5: of: GpuwardenGpuXid tells of a/0 already; keep the first"),
        (SOUND, "name: a\n", "a.yaml:1: a list of scenarios is wanted; begin each with `- name:`"),
        (SOUND, "# nothing yet\n", "a.yaml:1: there is no scenario in it; begin each with `- name:`"),
        (SOUND, "[]", "no scenario; write one in a file *.yaml there"),
        (SOUND, SOUND + SOUND, "a.yaml:6: a.yaml:1 has the same name; say in it what is different"),
    ],
)  # fmt: skip
def test_a_scenario_that_cannot_be_understood_says_where_and_what_to_write(
    old: str, new: str, complaint: str, tmp_path: Path
) -> None:
    assert old in SOUND
    (tmp_path / "a.yaml").write_text(SOUND.replace(old, new, 1))

    with pytest.raises(ScenarioError, match=re.escape(complaint)):
        scenario_file.read(tmp_path)


def test_what_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"cannot be read \(No such file or directory\); name a file of scenarios"):
        scenario_file.read(tmp_path / "none.yaml")


def test_a_file_of_a_folder_may_end_in_yml(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(SOUND)

    (one,) = scenario_file.read(tmp_path)

    assert one.place == "a.yml:1"


@pytest.mark.needs_parts
@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        pytest.param(("", ""), 0, ["a.yaml:1: right: a", "    360s, gpuwarden: GpuwardenJobStalled of w"], id="right"),
        pytest.param(("due: 6m", "due: 7m"), 1, [
            "a.yaml:1: wrong: a",
            "    GpuwardenJobStalled acts on w at 360s, which is due at 420s and not before",
            "    360s, gpuwarden: GpuwardenJobStalled of w",
        ], id="wrong"),
        pytest.param(("due: 6m}", "due: 7m}\n  not_yet: c"), 0, ["a.yaml:1: wrong, and is marked not_yet: a"],
                     id="marked"),
    ],
)  # fmt: skip
def test_of_one_file_it_is_said_who_fired_when_and_what_of_that_is_wrong(
    change: tuple[str, str], status: int, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing := without_promtool():
        pytest.skip(missing)
    (tmp_path / "a.yaml").write_text(
        SOUND.replace("0s: loads, 4m: hangs", "0s: loads, 3m: steps, 4m: hangs").replace(*change)
    )

    code = judging.main([str(tmp_path / "a.yaml")])

    assert code == status
    assert capsys.readouterr().out.splitlines()[: len(said)] == said


@pytest.mark.needs_parts
def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    if missing := without_promtool():
        pytest.skip(missing)
    (tmp_path / "a.yaml").write_text(SOUND.replace("due: 6m", "due: 7m"))

    judged = unread("-m", "bench.corpus", str(tmp_path))
    table = unread("-c", "from bench.figures import say; say('figures'); say('more of them')")

    assert (judged.returncode, judged.stderr) == (1, b""), "it is wrong, as it is to who reads on"
    assert (table.returncode, table.stderr) == (0, b"")


def unread(*command: str) -> "subprocess.CompletedProcess[bytes]":
    """What becomes of a program whose reader has gone."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        return subprocess.run(
            [sys.executable, *command], cwd=CHECKOUT, stdout=write_end, stderr=subprocess.PIPE, timeout=120, check=False
        )
    finally:
        os.close(write_end)


def test_of_a_file_that_cannot_be_understood_it_is_said_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(SOUND.replace("4m: hangs", "4m: hang"))

    code = judging.main([str(tmp_path)])

    assert code == 2
    assert capsys.readouterr().err.startswith("a.yaml:4: 4m: nobody knows how one 'hang'; known are: loads")


SAID: Final = re.findall(
    r"^\| ([^|]+) \| (`(?:workers|tenants|servers|gpus|hosts|prometheus): .*`) \|$", PAGE, re.MULTILINE
)
"""What the page says happens, and how that is written."""


@pytest.mark.parametrize("written", [written for _, written in SAID], ids=[happens for happens, _ in SAID])
def test_what_the_page_says_how_to_write_is_understood_and_can_be_played(written: str, tmp_path: Path) -> None:
    lines = re.findall("`([^`]+)`", written)
    if not any(each.startswith(("workers", "tenants", "servers")) for each in lines):
        lines.append("workers: {w: {0s: steps}}")
    (tmp_path / "a.yaml").write_text("\n  ".join(["- name: a", "why: b", "verdict: none", *lines]))

    (one,) = scenario_file.read(tmp_path)

    assert host.series(one, wanted={"gpuwarden_container_info"})


def test_the_page_says_how_to_write_many_things() -> None:
    assert len(SAID) > 20
