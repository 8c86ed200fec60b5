"""Mutants are tested by the rules and assertions that they affect, and the lists of mutants fit the rules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.standalone import debian_packages
from tools.mutation import __main__ as mutation
from tools.mutation import judging, narrowed, notification_bugs, product, queue_bugs, race_bugs, rules
from tools.mutation.equivalent import EQUIVALENT
from tools.mutation.generated import generate_mutants
from tools.mutation.rules import ALERTS, Mutant

FILES = rules.files()
FAULTS = "faults.rules.yaml"

SOUND = narrowed.read("""\
groups:
  - name: recorded
    rules:
      - record: gpuwarden:still:seconds
        expr: gpuwarden_still_seconds
      - record: gpuwarden:still_gpus:count
        expr: count(gpuwarden_still_gpus)
  - name: alerts
    interval: 5s
    rules:
      - alert: GpuwardenStill
        expr: gpuwarden:still:seconds > 60
      - alert: GpuwardenHot
        expr: gpuwarden_heat_celsius > 90
""")
EVERY = {"gpuwarden:still:seconds", "gpuwarden:still_gpus:count", "GpuwardenStill", "GpuwardenHot"}
FIRES: dict[str, Any] = {"eval_time": "1m", "alertname": "GpuwardenStill", "exp_alerts": []}
BURNS: dict[str, Any] = {"eval_time": "9m", "alertname": "GpuwardenHot", "exp_alerts": []}


def broken(old: str, new: str) -> narrowed.Document:
    """The rules with one change."""
    text = yaml.dump(dict(SOUND))
    assert text.count(old) == 1
    return narrowed.read(text.replace(old, new))


def asks(expr: str) -> dict[str, Any]:
    return {"eval_time": "1m", "expr": expr, "exp_samples": []}


@pytest.mark.parametrize(
    ("old", "new", "touched"),
    [
        pytest.param("> 90", "> 91", {"GpuwardenHot"}, id="a rule without references"),
        pytest.param("> 60", "> 61", {"GpuwardenStill", "gpuwarden:still:seconds"}, id="a rule with a record"),
        pytest.param("expr: gpuwarden_still_seconds", "expr: gpuwarden_seconds",
                     {"GpuwardenStill", "gpuwarden:still:seconds"}, id="a record with a reference"),
        pytest.param("gpuwarden_heat_celsius", "gpuwarden:still_gpus:count",
                     {"GpuwardenHot", "gpuwarden:still_gpus:count"}, id="a rule with a new record"),
        pytest.param("alert: GpuwardenHot", "alert: GpuwardenCold", {"GpuwardenHot"}, id="a renamed rule"),
        pytest.param("interval: 5s", "interval: 6s", EVERY, id="the interval of a group"),
        pytest.param("name: alerts", "name: other", EVERY, id="the name of a group"),
        pytest.param("groups:", "groups:", set(), id="no change"),
    ],
)  # fmt: skip
def test_mutation_affects_its_rule_and_related_rules(old: str, new: str, touched: set[str]) -> None:
    assert narrowed.affected_rules(SOUND, broken(old, new)) == touched


@pytest.mark.parametrize(
    ("expr", "stays"),
    [
        ('ALERTS{alertname="GpuwardenStill", alertstate="firing"}', True),
        ('count(ALERTS{alertname=~"GpuwardenHot|GpuwardenStill"})', True),
        ('ALERTS{alertname="GpuwardenHot"}', False),
        ('ALERTS{alertname="GpuwardenHot"} or ALERTS{severity="critical"}', True),
        ("ALERTS", True),
        ('ALERTS_FOR_STATE{alertname="GpuwardenHot"}', False),
        ("gpuwarden:still:seconds", False),
        ('ALERTS{alertname=~"Gpuwarden.*"}', True),
    ],
)
def test_assertions_of_the_rule_are_kept(expr: str, stays: bool) -> None:
    group = {"name": "fires", "promql_expr_test": [asks(expr)], "alert_rule_test": [BURNS]}

    left = narrowed.group_for({"GpuwardenStill"}, group, SOUND)

    assert (left is not None) is stays
    if left is not None:
        assert left == {"name": "fires", "promql_expr_test": [asks(expr)], "alert_rule_test": []}


def test_rules_of_assertions_and_their_records_are_kept() -> None:
    change = broken("> 60", "> 61")

    (alert,) = narrowed.read(narrowed.rules_for({"alert_rule_test": [BURNS]}, change, SOUND))["groups"]
    record, still = narrowed.read(narrowed.rules_for({"alert_rule_test": [FIRES]}, change, SOUND))["groups"]

    assert (alert["name"], alert["interval"], [rule["alert"] for rule in alert["rules"]]) == (
        "alerts",
        "5s",
        ["GpuwardenHot"],
    )
    assert [rule["record"] for rule in record["rules"]] == ["gpuwarden:still:seconds"]
    assert [rule["expr"] for rule in still["rules"]] == ["gpuwarden:still:seconds > 61"]


def test_renamed_rule_is_kept_by_its_old_name() -> None:
    change = broken("alert: GpuwardenHot", "alert: GpuwardenCold")

    (left,) = narrowed.read(narrowed.rules_for({"alert_rule_test": [BURNS]}, change, SOUND))["groups"]

    assert [rule["alert"] for rule in left["rules"]] == ["GpuwardenCold"]


@pytest.fixture
def promtool() -> Path:
    try:
        return debian_packages.find("promtool")
    except debian_packages.PartMissing as missing:
        pytest.skip(str(missing))


def planted(file: str, old: str, new: str) -> Mutant:
    text = (ALERTS / file).read_text()
    assert old in text
    return Mutant(rules=file, name=f"{old} -> {new}", text=text.replace(old, new))


@pytest.mark.needs_parts
def test_mutant_is_caught_and_equivalent_mutant_survives(promtool: Path, tmp_path: Path) -> None:
    loud = planted("chain.rules.yaml", "severity: none", "severity: critical")
    idle = planted("chain.rules.yaml", "expr: vector(1)", "expr: vector(2)")

    judged = judging.judge([loud, idle], promtool, tmp_path)

    assert (list(judged.caught), judged.survived) == ([loud.name], [idle.name])
    assert "FAILED" in judged.caught[loud.name]


@pytest.mark.needs_parts
def test_broken_record_is_caught_by_its_alert(promtool: Path, tmp_path: Path) -> None:
    record = "gpuwarden:exporter_target:info"
    mutant = planted("telemetry.rules.yaml", f"record: {record}", "record: gpuwarden:exporter_targets:info")

    assert list(judging.judge([mutant], promtool, tmp_path).caught) == [mutant.name]


@pytest.mark.needs_parts
def test_failing_tests_catch_nothing(promtool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = planted(FAULTS, "gpuwarden_gpu_row_remap_failed) == 1", "gpuwarden_gpu_row_remap_failed) == 2")
    assert list(judging.judge([mutant], promtool, tmp_path / "sound").caught) == [mutant.name]
    (tmp_path / FAULTS).write_text(mutant.text)
    monkeypatch.setattr(judging, "ALERTS", tmp_path)

    other = planted(FAULTS, "gpuwarden_gpu_row_remap_failed) == 1", "gpuwarden_gpu_row_remap_failed) == 3")
    with pytest.raises(judging.UnsoundError, match=r"^faults\.rules\.yaml: .* fails on the unchanged rules"):
        judging.judge([other], promtool, tmp_path / "unsound")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_single_group_of_tests_is_read_back_unchanged(file: Path) -> None:
    alone = judging.read_tests(file.name)

    assert alone
    assert [judging.parse(judging.dump(test)) for test in alone] == alone


def test_groups_of_all_test_files_are_read_with_the_interval_of_their_file() -> None:
    found = [(len(test["tests"]), test["evaluation_interval"]) for test in judging.read_tests(FAULTS)]

    assert set(found) == {(1, "15s"), (1, "60s")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_rule_file_has_mutants_with_unique_names(file: Path) -> None:
    names = [each.name for each in (*generate_mutants(file), *rules.by_hand(file))]

    assert names
    assert len(set(names)) == len(names)


def test_listed_faults_are_of_existing_rules() -> None:
    assert rules.unknown_rules() == set()


def test_equivalent_mutants_are_generated_from_the_current_rules() -> None:
    assert EQUIVALENT.keys() - {each.name for file in FILES for each in generate_mutants(file)} == set()


def test_listed_fault_without_effect_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "by_hand.yaml"
    listed.write_text(f"{rules.EVERY_RULE}: {{}}\nGpuwardenWatchdog: {{it moved: [no such text, '']}}\n")
    monkeypatch.setattr(rules, "BY_HAND", listed)

    with pytest.raises(rules.StaleError, match="GpuwardenWatchdog: 'it moved' changes nothing"):
        rules.by_hand(ALERTS / "chain.rules.yaml")


@pytest.mark.needs_parts
@pytest.mark.usefixtures("promtool")
def test_surviving_mutant_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutation.main(["--rules", "alerts/chain.rules.yaml"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("chain.rules.yaml ")
    assert line.endswith(" caught")

    monkeypatch.setattr(mutation, "EQUIVALENT", {})

    assert mutation.main(["--rules", "chain.rules.yaml"]) == 1
    assert "  survived: chain: GpuwardenWatchdog: 1 -> 2\n" in capsys.readouterr().out


def test_unknown_rule_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        mutation.main(["--rules", "alerts/stal.rules.yaml"])

    assert "unknown rule file alerts/stal.rules.yaml; known: attribution.rules.yaml, " in capsys.readouterr().err


@pytest.mark.parametrize("caught", [True, False])
def test_surviving_product_bug_is_named(
    caught: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "MACHINES", {"queue": lambda: iter([("ignore_lock", caught)])})

    assert mutation.main(["--product", "queue"]) == (0 if caught else 1)
    assert ("survived: ignore_lock" in capsys.readouterr().out) is not caught


@pytest.mark.parametrize(
    "plant",
    [
        *(pytest.param(plant, id=name) for name, plant in queue_bugs.MUTANTS.items()),
        *(
            pytest.param(bug.plant, id=name)
            for name, bug in (*race_bugs.MUTANTS.items(), *notification_bugs.MUTANTS.items())
        ),
    ],
)
def test_a_planted_bug_patches_what_exists(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
