"""Tests of every rule in alerts/, with the scenes of scenes.py for acting rules."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from deploy.standalone import debian_packages
from exporter import reference
from testbed.check_release import acts
from tests.alerts.scenes import END_S, FAULTS, FIXED_S, LIMIT_S, SCENES, Fault, Scene, firing_series
from tests.alerts.test_literals import rules
from tests.asking import PLAIN
from tests.remediator.listening import listening
from tests.waiting import eventually
from tools.mutation.judging import run
from tools.mutation.rules import ALERTS, files

SCRAPES_S: Final = (1, 15, 30, 60)
IDENTITIES: Final = (
    "gpuwarden_job_overdue_id",
    "gpuwarden_gang_rank_overdue_attempt",
    "gpuwarden_container_info",
    "gpuwarden_server_info",
)
NAN: Final = {name for name, when in reference.absent().items() if "NaN" in when}
"""Series that are NaN while unknown."""

CONSTANT_IN_REPEATS: Final = {
    "gpuwarden_job_elapsed_seconds",
    "gpuwarden_worker_heartbeat_age_seconds",
    "gpuwarden_worker_dead_seconds",
}
"""Durations that are absent while unknown: a sample that Prometheus repeats for five minutes does not grow."""

ACTIVITY: Final = re.compile(
    r"gpuwarden_(?:container|worker)_(?:gpu_lost|\w+_idle)_seconds"
    r"|gpuwarden_job_(?:step_beat_age_seconds|phase_age_seconds|phase)\b"
)
ALSO_READ: Final = {
    ("GpuwardenJobStalled", "gpuwarden_job_step_beat_age_seconds"): "the first beat makes a job monitored",
    ("GpuwardenSharedJobStalled", "gpuwarden_job_step_beat_age_seconds"): "the same",
    (
        "GpuwardenJobGpuLost",
        "gpuwarden_container_gpu_idle_seconds",
    ): "Prometheus repeats a lost GPU after an outage",
}
"""Activities that a rule reads in addition to the inactive seconds, and why."""


def acting_alerts() -> list[str]:
    """Alerts with a remedy."""
    return sorted(rule["alert"] for rule in rules() if acts(rule.get("labels", {})))


def alerts_with_scene() -> list[str]:
    """Alerts with a scene."""
    return [*FAULTS, *SCENES]


def firing(alert: str, at_s: int, by: str = "", target: str | None = "") -> dict[str, Any]:
    """Assert that the alert fires at this second, with label `by` = `target`; `None` asserts that it does not."""
    grouping = f" by ({by})" if by else ""
    labels = {"labels": f'{{{by}="{target}"}}'} if by else {}
    return {
        "expr": f'count{grouping} (ALERTS{{alertname="{alert}", alertstate="firing"}})',
        "eval_time": f"{at_s}s",
        "exp_samples": [] if target is None else [{**labels, "value": 1}],
    }


def run_promtool(folder: Path, *tests: dict[str, Any], evaluate: str = "1s") -> str:
    """Run tests, each named by its alert; returns the output if one fails, else nothing."""
    try:
        promtool = debian_packages.find("promtool")
    except debian_packages.PartMissing as missing:
        pytest.skip(str(missing))
    written = []
    for number, test in enumerate(tests):
        (its,) = (file for file in files() if f"alert: {test['name']}\n" in file.read_text())
        written.append(folder / f"{number}.test.yaml")
        whole = {"rule_files": [str(its)], "evaluation_interval": evaluate, "tests": [test]}
        written[-1].write_text(yaml.safe_dump(whole))
    done = run(promtool, "test", "rules", *written)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_every_acting_alert_has_a_scene() -> None:
    without = set(acting_alerts()) - set(alerts_with_scene())

    assert len(acting_alerts()) > 1
    assert without == set(), "add a scene to tests/alerts/scenes.py"


def test_every_scene_has_an_alert() -> None:
    assert set(alerts_with_scene()) - {rule["alert"] for rule in rules() if "alert" in rule} == set()


def fault_test(alert: str, fault: Fault, scrape_s: int) -> dict[str, Any]:
    """Test that a fault fires from the first scrape that shows it to the first that does not."""
    at = range(0, END_S + 1, scrape_s)
    grown = " ".join(str(each if each < FIXED_S else each - FIXED_S) for each in at)
    found_s, ends_s = (math.ceil(moment / scrape_s) * scrape_s for moment in (LIMIT_S, FIXED_S))
    moments = ((found_s - 1, None), (found_s, ""), (ends_s - 1, ""), (ends_s, None))
    return {
        "name": alert,
        "interval": f"{scrape_s}s",
        "input_series": [
            *({"series": f"{name}{{{labels}}}", "values": grown} for name, labels in fault.grow),
            *(
                {"series": f"{name}{{{labels}}}", "values": f"{value:g}x{len(at) - 1}"}
                for name, labels, value in fault.stay
            ),
        ],
        "promql_expr_test": [firing(alert, at_s, target=target) for at_s, target in moments],
    }


def scene_test(alert: str, scene: Scene, scrape_s: int) -> dict[str, Any]:
    """Test a scene with this scrape interval."""
    at = range(0, scene.lasts_s + 1, scrape_s)
    return {
        "name": alert,
        "interval": f"{scrape_s}s",
        "input_series": [
            {
                "series": f"{name}{{{labels}}}",
                "values": " ".join("stale" if value is None else f"{value:g}" for value in map(value_at, at)),
            }
            for name, labels, value_at in scene.series
        ],
        "promql_expr_test": [firing(alert, at_s, scene.by, target) for at_s, target in scene.seen(scrape_s)],
    }


@pytest.mark.needs_parts
@pytest.mark.parametrize("scrape_s", SCRAPES_S)
@pytest.mark.slow
def test_alert_fires_from_first_scrape_to_last_scrape_with_fault(scrape_s: int, tmp_path: Path) -> None:
    tests = [fault_test(alert, fault, scrape_s) for alert, fault in FAULTS.items()]
    tests += [scene_test(alert, scene, scrape_s) for alert, scene in SCENES.items()]

    assert run_promtool(tmp_path, *tests) == ""


def nan_series() -> Iterator[tuple[str, str]]:
    """Alerts with a scene, and their series that are NaN while unknown."""
    for alert in alerts_with_scene():
        yield from ((alert, name) for name in dict.fromkeys(name for name, *_ in firing_series(alert)) if name in NAN)


def outage_test(alert: str, unknown: str, afterwards: str) -> dict[str, Any]:
    """Prometheus misses two scrapes. Then the identity is new, and `afterwards` are the samples of one series.

    Prometheus repeats an absent series for five minutes, so unknown values must be NaN.
    """
    series = []
    for name, labels, value in firing_series(alert):
        before = "_x4" if name in IDENTITIES else f"{value:g}x3"
        after = afterwards if name == unknown else f"{value:g}x9"
        series.append({"series": f"{name}{{{labels}}}", "values": f"{before} _x2 {after}"})
    return {
        "name": alert,
        "interval": "15s",
        "input_series": series,
        "promql_expr_test": [firing(alert, 90, target=None if afterwards.startswith("NaN") else "")],
    }


@pytest.mark.needs_parts
def test_alert_with_series_unknown_since_an_outage_does_not_fire(tmp_path: Path) -> None:
    pairs = list(nan_series())
    tests = [outage_test(alert, name, after) for alert, name in pairs for after in ("NaN+0x9", "_x10")]

    assert len(pairs) > 10
    assert run_promtool(tmp_path, *tests, evaluate="15s") == ""


def test_durations_of_faults_are_nan_or_constant_while_unknown() -> None:
    grow = {name for fault in FAULTS.values() for name, _ in fault.grow}

    assert grow - NAN == CONSTANT_IN_REPEATS


def expression(rule: dict[str, Any]) -> str:
    return re.sub(r"#[^\n]*", "", rule["expr"])


def test_rules_with_inactive_seconds_read_no_other_activity() -> None:
    quiet = [rule for rule in rules() if "gpuwarden_job_inactive" in expression(rule)]

    asked = {(rule["alert"], sign) for rule in quiet for sign in ACTIVITY.findall(expression(rule))}

    assert len(quiet) > 1
    assert asked == ALSO_READ.keys()
    assert [rule["alert"] for rule in quiet if expression(rule).count("gpuwarden_job_inactive") != 1] == []


def test_rules_do_not_depend_on_the_phase() -> None:
    by_phase = {
        rule["alert"]: found
        for rule in rules()
        if (found := re.findall(r"gpuwarden_job_phase\{.*?\}", expression(rule)))
    }

    assert by_phase == {"GpuwardenJobSlow": ['gpuwarden_job_phase{phase="step"}']}, "it compares only steps"


def groups() -> list[dict[str, Any]]:
    return [group for file in files() for group in yaml.safe_load(file.read_text())["groups"]]


def rules_with_interval() -> Sequence[dict[str, Any]]:
    """Rules of the groups with an interval."""
    return [rule for group in groups() if "interval" in group for rule in group["rules"]]


def test_groups_with_an_interval_use_1m_and_have_no_remedy() -> None:
    assert {group["interval"] for group in groups() if "interval" in group} == {"1m"}, (
        "after 5 minutes a query finds nothing of an alert that firing"
    )
    assert [rule["alert"] for rule in rules_with_interval() if "remedy" in rule.get("labels", {})] == []


def test_acting_rules_read_no_records_with_an_interval() -> None:
    recorded = [rule["record"] for rule in rules_with_interval() if "record" in rule]

    asking = [rule for rule in rules() if any(name in rule["expr"] for name in recorded)]

    # Other records must not read them either, because an acting alert may read those.
    assert {rule["alert"] for rule in asking if rule.get("record") not in recorded} == {
        "GpuwardenExporterDown",
        "GpuwardenRemediatorDown",
    }
    assert [rule["alert"] for rule in asking if "remedy" in rule.get("labels", {})] == []


BROKEN: Final = 'group(up) * on () {__name__=~"up|scrape_duration_seconds"}'


@pytest.mark.needs_parts
def test_rule_failures_alert_names_only_the_failing_group(tmp_path: Path) -> None:
    broken, config = tmp_path / "broken.rules.yaml", tmp_path / "prometheus.yml"
    expressions = {"gpuwarden_broken": BROKEN, "gpuwarden_sound": "vector(1)", "theirs": BROKEN}
    its = [{"name": name, "rules": [{"record": f"{name}:one", "expr": expr}]} for name, expr in expressions.items()]
    broken.write_text(yaml.safe_dump({"groups": its}))
    command = [
        *(str(debian_packages.find("prometheus")), f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"),
        *("--web.listen-address=127.0.0.1:0", "--log.format=json", "--web.enable-lifecycle"),
    ]

    def configure(*targets: str) -> None:
        every = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "1s"}
        scrape = [{"job_name": "prometheus", "static_configs": [{"targets": list(targets)}]}]
        rule_files = [str(broken), str(ALERTS / "evaluation.rules.yaml")]
        config.write_text(yaml.safe_dump({"global": every, "rule_files": rule_files, "scrape_configs": scrape}))

    configure()
    with listening(command, tmp_path / "log") as url:

        def failing() -> list[str]:
            query = {"query": 'ALERTS{alertname="GpuwardenRuleFailures"}'}
            answer = httpx.get(f"{url}/api/v1/query", params=query, trust_env=False, verify=PLAIN)
            found = answer.raise_for_status().json()["data"]["result"]
            return sorted(each["metric"]["rule_group"].rpartition(";")[2] for each in found)

        configure(url.removeprefix("http://"))  # its address is known only now
        httpx.post(f"{url}/-/reload", trust_env=False, verify=PLAIN).raise_for_status()

        eventually(
            lambda: failing() == ["gpuwarden_broken"], "the group that fails", within_s=60, log=lambda: str(failing())
        )
