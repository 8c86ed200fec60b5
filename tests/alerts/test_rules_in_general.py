"""What holds for every rule: the rules are read from alerts/, the scene of an acting one from scenes.py."""

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
from testbed.check_release import CHECKOUT
from tests.alerts.scenes import END_S, FIXED_S, LIMIT_S, SCENES, WEDGES, Scene, Wedge, wedged
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
"""The series that are NaN while they are unknown."""

REPEATS_ARE_NO_LONGER: Final = {
    "gpuwarden_job_elapsed_seconds",
    "gpuwarden_worker_heartbeat_age_seconds",
    "gpuwarden_worker_dead_seconds",
}
"""Durations that are left out while unknown: a sample that Prometheus repeats for five minutes does not grow."""

SIGN_OF_LIFE: Final = re.compile(
    r"gpuwarden_(?:container|worker)_(?:gpu_lost|\w+_idle)_seconds"
    r"|gpuwarden_job_(?:step_beat_age_seconds|phase_age_seconds|phase)\b"
)
ASKED_BESIDES: Final = {
    ("GpuwardenJobStalled", "gpuwarden_job_step_beat_age_seconds"): "a job is armed by its first beat",
    ("GpuwardenSharedJobStalled", "gpuwarden_job_step_beat_age_seconds"): "likewise",
    (
        "GpuwardenJobGpuLost",
        "gpuwarden_container_gpu_idle_seconds",
    ): "Prometheus repeats after it was down that a GPU is lost",
}
"""The signs of life that a rule asks for besides how quiet the job is, and why."""


def acting() -> list[str]:
    """The alerts that a remediator acts on."""
    return sorted(rule["alert"] for rule in rules() if "remedy" in rule.get("labels", {}))


def scened() -> list[str]:
    """The alerts with a scene."""
    return [*WEDGES, *SCENES]


def fires(alert: str, at_s: int, by: str = "", who: str | None = "") -> dict[str, Any]:
    """An assertion: at this second one of the alert fires, for `who` where it is told apart; `None` for none."""
    grouping = f" by ({by})" if by else ""
    labels = {"labels": f'{{{by}="{who}"}}'} if by else {}
    return {
        "expr": f'count{grouping} (ALERTS{{alertname="{alert}", alertstate="firing"}})',
        "eval_time": f"{at_s}s",
        "exp_samples": [] if who is None else [{**labels, "value": 1}],
    }


def judged(folder: Path, *tests: dict[str, Any], evaluate: str = "1s") -> str:
    """What promtool says of these tests of alerts, each named by its alert; nothing where all pass."""
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
    without = set(acting()) - set(scened())

    assert len(acting()) > 1
    assert without == set(), "add a scene to tests/alerts/scenes.py"


def test_no_scene_is_of_an_alert_that_does_not_exist() -> None:
    assert set(scened()) - {rule["alert"] for rule in rules() if "alert" in rule} == set()


def of_wedge(alert: str, wedge: Wedge, scrape_s: int) -> dict[str, Any]:
    """A wedge as a Prometheus that scrapes so often has it: found at the first scrape that shows it, ended likewise."""
    at = range(0, END_S + 1, scrape_s)
    grown = " ".join(str(each if each < FIXED_S else each - FIXED_S) for each in at)
    found_s, ends_s = (math.ceil(moment / scrape_s) * scrape_s for moment in (LIMIT_S, FIXED_S))
    moments = ((found_s - 1, None), (found_s, ""), (ends_s - 1, ""), (ends_s, None))
    return {
        "name": alert,
        "interval": f"{scrape_s}s",
        "input_series": [
            *({"series": f"{name}{{{labels}}}", "values": grown} for name, labels in wedge.grow),
            *(
                {"series": f"{name}{{{labels}}}", "values": f"{value:g}x{len(at) - 1}"}
                for name, labels, value in wedge.stay
            ),
        ],
        "promql_expr_test": [fires(alert, at_s, who=who) for at_s, who in moments],
    }


def of_scene(alert: str, scene: Scene, scrape_s: int) -> dict[str, Any]:
    """A scene as a Prometheus that scrapes so often has it."""
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
        "promql_expr_test": [fires(alert, at_s, scene.by, who) for at_s, who in scene.seen(scrape_s)],
    }


@pytest.mark.needs_parts
@pytest.mark.parametrize("scrape_s", SCRAPES_S)
@pytest.mark.slow
def test_each_wedge_fires_from_its_first_scrape_to_the_first_without_it(scrape_s: int, tmp_path: Path) -> None:
    tests = [of_wedge(alert, wedge, scrape_s) for alert, wedge in WEDGES.items()]
    tests += [of_scene(alert, scene, scrape_s) for alert, scene in SCENES.items()]

    assert judged(tmp_path, *tests) == ""


def operands() -> Iterator[tuple[str, str]]:
    """Each alert with a scene, with each series of it that is NaN while it is unknown."""
    for alert in scened():
        yield from ((alert, name) for name in dict.fromkeys(name for name, *_ in wedged(alert)) if name in NAN)


def while_down(alert: str, unknown: str, afterwards: str) -> dict[str, Any]:
    """Prometheus misses two scrapes; then `afterwards` are the samples of one series, and the identity is new.

    A series that is left out meanwhile is repeated for five minutes, which is why what is unknown has to be NaN.
    """
    series = []
    for name, labels, value in wedged(alert):
        before = "_x4" if name in IDENTITIES else f"{value:g}x3"
        after = afterwards if name == unknown else f"{value:g}x9"
        series.append({"series": f"{name}{{{labels}}}", "values": f"{before} _x2 {after}"})
    return {
        "name": alert,
        "interval": "15s",
        "input_series": series,
        "promql_expr_test": [fires(alert, 90, who=None if afterwards.startswith("NaN") else "")],
    }


@pytest.mark.needs_parts
def test_a_series_that_became_unknown_while_prometheus_was_down_makes_nothing_fire(tmp_path: Path) -> None:
    pairs = list(operands())
    tests = [while_down(alert, name, after) for alert, name in pairs for after in ("NaN+0x9", "_x10")]

    assert len(pairs) > 10
    assert judged(tmp_path, *tests, evaluate="15s") == ""


def test_every_duration_that_a_wedge_is_found_by_is_nan_while_unknown_or_does_not_grow_in_a_repeat() -> None:
    grow = {name for wedge in WEDGES.values() for name, _ in wedge.grow}

    assert grow - NAN == REPEATS_ARE_NO_LONGER


def expression(rule: dict[str, Any]) -> str:
    return re.sub(r"#[^\n]*", "", rule["expr"])


def test_a_rule_that_asks_how_quiet_a_job_is_asks_for_no_sign_of_life_besides() -> None:
    quiet = [rule for rule in rules() if "gpuwarden_job_inactive" in expression(rule)]

    asked = {(rule["alert"], sign) for rule in quiet for sign in SIGN_OF_LIFE.findall(expression(rule))}

    assert len(quiet) > 1
    assert asked == ASKED_BESIDES.keys()
    assert [rule["alert"] for rule in quiet if expression(rule).count("gpuwarden_job_inactive") != 1] == []


def test_no_rule_says_in_which_phases_work_is_a_sign_of_life() -> None:
    by_phase = {
        rule["alert"]: found
        for rule in rules()
        if (found := re.findall(r"gpuwarden_job_phase\{.*?\}", expression(rule)))
    }

    assert by_phase == {"GpuwardenJobSlow": ['gpuwarden_job_phase{phase="step"}']}, "which compares steps alone"


def groups() -> list[dict[str, Any]]:
    return [group for file in files() for group in yaml.safe_load(file.read_text())["groups"]]


def with_interval() -> Sequence[dict[str, Any]]:
    """The rules of the groups with an interval of their own."""
    return [rule for group in groups() if "interval" in group for rule in group["rules"]]


def test_a_group_with_an_interval_of_its_own_does_not_act_and_is_no_slower_than_a_minute() -> None:
    assert {group["interval"] for group in groups() if "interval" in group} == {"1m"}, (
        "after 5 minutes a query finds nothing of an alert that fires"
    )
    assert [rule["alert"] for rule in with_interval() if "remedy" in rule.get("labels", {})] == []


def test_nothing_that_acts_asks_what_is_recorded_at_an_interval_of_its_own() -> None:
    recorded = [rule["record"] for rule in with_interval() if "record" in rule]

    asking = [rule for rule in rules() if any(name in rule["expr"] for name in recorded)]

    # Nor does another record ask for one, since an acting alert may ask for that.
    assert {rule["alert"] for rule in asking if rule.get("record") not in recorded} == {
        "GpuwardenExporterDown",
        "GpuwardenRemediatorDown",
    }
    assert [rule["alert"] for rule in asking if "remedy" in rule.get("labels", {})] == []


def test_the_page_of_the_rules_lists_what_is_asked_once_a_minute() -> None:
    _, _, section = (CHECKOUT / "docs" / "rules.md").read_text().partition("## What is asked once a minute")
    listed = re.findall(r"`(Gpuwarden\w+|gpuwarden:[\w:]+)`", section)

    assert sorted(listed) == sorted(rule.get("alert") or rule["record"] for rule in with_interval())


BROKEN: Final = 'group(up) * on () {__name__=~"up|scrape_duration_seconds"}'


@pytest.mark.needs_parts
def test_a_real_prometheus_names_the_group_of_a_rule_that_cannot_be_evaluated_and_no_other(tmp_path: Path) -> None:
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
