"""The rules at every scrape interval: a wedge is found at the first scrape that shows it, and let go likewise."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deploy import parts
from deploy.check import CHECKOUT
from tools.mutation.judging import run
from tools.mutation.rules import ALERTS

LIMIT_S: Final = 130
"""How long everything is allowed: at no interval that is looked at does a scrape fall on it, but at 1 s."""
MENDED_S: Final = 247
END_S: Final = 300

SLOT: Final = 'instance="a:9", host="a", worker="w", container="c"'
TENANT: Final = 'instance="a:9", host="a", container="c"'
JOB: Final = ("gpuwarden_job_overdue_id", SLOT + ', attempt="1", incarnation="i"', 7.0)


@dataclass(frozen=True, kw_only=True)
class Wedge:
    """Durations that grow from the start until it is mended, and what stays as it is; each a name, labels, a value."""

    grow: tuple[tuple[str, str], ...]
    stay: tuple[tuple[str, str, float], ...] = field(default=())


WEDGES: Final[Mapping[str, Wedge]] = {
    "GpuwardenJobOverBudget": Wedge(
        grow=(("gpuwarden_job_elapsed_seconds", SLOT),), stay=(JOB, ("gpuwarden_job_budget_seconds", SLOT, LIMIT_S))
    ),
    "GpuwardenJobStalled": Wedge(
        grow=(
            ("gpuwarden_job_beat_age_seconds", SLOT),
            ("gpuwarden_job_quiet_seconds", SLOT),
        ),
        stay=(JOB, ("gpuwarden_job_stall_timeout_seconds", SLOT, LIMIT_S)),
    ),
    "GpuwardenSharedJobStalled": Wedge(
        grow=(
            ("gpuwarden_job_beat_age_seconds", SLOT),
            ("gpuwarden_job_quiet_apart_seconds", SLOT),
        ),
        stay=(JOB, ("gpuwarden_job_stall_timeout_seconds", SLOT, LIMIT_S)),
    ),
    "GpuwardenJobUnhealthy": Wedge(
        grow=(
            ("gpuwarden_job_elapsed_seconds", SLOT),
            ("gpuwarden_job_quiet_seconds", SLOT),
        ),
        stay=(
            JOB,
            ("gpuwarden_job_health_window_seconds", SLOT, LIMIT_S),
            ("gpuwarden_job_health_grace_seconds", SLOT, 0),
        ),
    ),
    "GpuwardenJobStuck": Wedge(
        grow=(
            ("gpuwarden_job_beat_age_seconds", SLOT),
            ("gpuwarden_container_unmoved_seconds", TENANT),
        ),
        stay=(
            JOB,
            ("gpuwarden_job_stuck_after_seconds", SLOT, LIMIT_S),
            ("gpuwarden_job_stuck_still_seconds", SLOT, LIMIT_S),
        ),
    ),
    "GpuwardenGangStuck": Wedge(
        grow=(("gpuwarden_gang_rank_spinning_seconds", SLOT),),
        stay=(
            (
                "gpuwarden_gang_rank_overdue_attempt",
                SLOT + ', gang="7", rank="0", job_id="7", attempt="1", incarnation="i"',
                1,
            ),
            ("gpuwarden_gang_rank_attempt", SLOT + ', gang="7", rank="0"', 1),
            ("gpuwarden_gang_overdue_ranks", SLOT + ', gang="7"', 1),
            ("gpuwarden_gang_rank_stuck_after_seconds", SLOT, LIMIT_S),
        ),
    ),
    "GpuwardenJobGpuLost": Wedge(
        grow=(("gpuwarden_job_quiet_gpu_lost_seconds", SLOT),),
        stay=(JOB, ("gpuwarden_job_health_window_seconds", SLOT, LIMIT_S)),
    ),
    "GpuwardenWorkerDead": Wedge(
        grow=(("gpuwarden_worker_heartbeat_age_seconds", SLOT), ("gpuwarden_worker_cpu_still_seconds", SLOT)),
        stay=(JOB, ("gpuwarden_worker_dead_after_seconds", SLOT, LIMIT_S), ("gpuwarden_worker_alive", SLOT, 1)),
    ),
    "GpuwardenWorkerGone": Wedge(
        grow=(("gpuwarden_worker_dead_seconds", SLOT), ("gpuwarden_worker_heartbeat_age_seconds", SLOT)),
        stay=(JOB, ("gpuwarden_worker_dead_after_seconds", SLOT, LIMIT_S), ("gpuwarden_worker_alive", SLOT, 0)),
    ),
    "GpuwardenServerUnanswering": Wedge(
        grow=(
            ("gpuwarden_server_unanswered_seconds", TENANT),
            ("gpuwarden_container_gpu_idle_seconds", TENANT),
            ("gpuwarden_container_ram_still_seconds", TENANT),
            ("gpuwarden_container_io_still_seconds", TENANT),
        ),
        stay=(
            ("gpuwarden_server_info", TENANT + ', incarnation="i"', 1),
            ("gpuwarden_server_answered", TENANT, 1),
            ("gpuwarden_server_silence_allowed_seconds", TENANT, LIMIT_S),
        ),
    ),
}


def history(wedge: Wedge, *, scrape_s: int) -> list[dict[str, str]]:
    """The series as a Prometheus that scrapes so often has them."""
    at = range(0, END_S + 1, scrape_s)
    grown = " ".join(str(each if each < MENDED_S else each - MENDED_S) for each in at)
    return [
        *({"series": f"{name}{{{labels}}}", "values": grown} for name, labels in wedge.grow),
        *(
            {"series": f"{name}{{{labels}}}", "values": f"{value:g}x{len(at) - 1}"}
            for name, labels, value in wedge.stay
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What acts and compares no duration of a job: series, each a name, labels and its value at a second of the scene.

    `None` is where nothing is told of it, as when a scrape fails. `seen` says who is accused, by which second of it.
    """

    by: str
    series: tuple[tuple[str, str, Callable[[int], float | None]], ...]
    seen: Callable[[int], tuple[tuple[int, str | None], ...]]
    lasts_s: int = END_S


def step(before: float, after: float, moment: int = LIMIT_S) -> Callable[[int], float]:
    """One value until a moment, and another from then on."""
    return lambda at: before if at < moment else after


def first_scrape(moment: int, scrape_s: int) -> int:
    """The second of the first scrape at a moment, or after it."""
    return math.ceil(moment / scrape_s) * scrape_s


GPU: Final = 'host="a", gpu="G"'
LEVEL_S: Final = 190
"""When the other one of two is ahead, by less than a tie."""


def tenant(
    name: str, over: Callable[[int], float | None]
) -> tuple[tuple[str, str, Callable[[int], float | None]], ...]:
    """A container that may be recycled, and by how much it is over its budget; `None` while it is not."""
    its = f'host="a", container="{name}"'
    return (
        ("gpuwarden_container_gpu_memory_over_budget_bytes", f'{its}, gpu="G"', over),
        ("gpuwarden_container_recyclable", its, lambda _: 1),
        ("gpuwarden_container_info", f'{its}, incarnation="{name}@1"', lambda _: 1),
    )


def while_it_is(over: Callable[[int], float]) -> Callable[[int], float | None]:
    """From the limit until it is mended."""
    return lambda at: over(at) if LIMIT_S <= at < MENDED_S else None


def found_and_let_go(scrape_s: int, who: str) -> tuple[tuple[int, str | None], ...]:
    """At the first scrape that shows it, and at the first after it is mended."""
    found_s, let_go_s = first_scrape(LIMIT_S, scrape_s), first_scrape(MENDED_S, scrape_s)
    return (found_s - 1, None), (found_s, who), (let_go_s - 1, who), (let_go_s, None)


FELL_SILENT_S: Final = 395
HEARD_AGAIN_S: Final = 660
LOST_AFTER_S: Final = 180


def lost_as_due(scrape_s: int) -> tuple[tuple[int, str | None], ...]:
    """The bound and a step of 10 s after the last such step at which it was heard of; let go with the next scrape."""
    failed_s = first_scrape(FELL_SILENT_S, scrape_s)
    due_s = (math.ceil(failed_s / 10) - 1) * 10 + 10 + LOST_AFTER_S
    assert FELL_SILENT_S + LOST_AFTER_S - scrape_s <= due_s <= failed_s + 10 + LOST_AFTER_S
    return (due_s - 1, None), (due_s, "b"), (HEARD_AGAIN_S - 1, "b"), (HEARD_AGAIN_S, None)


SCENES: Final[Mapping[str, Scene]] = {
    "GpuwardenVramVictim": Scene(
        by="container",
        series=(
            ("gpuwarden_gpu_memory_free_bytes", GPU, lambda _: 100),
            ("gpuwarden_gpu_memory_floor_bytes", GPU, lambda _: 1500),
            ("gpuwarden_gpu_memory_returning_bytes", GPU, lambda _: 0),
            ("gpuwarden_gpu_memory_tie_bytes", GPU, lambda _: 250),
            *tenant("first", while_it_is(lambda _: 2010)),
            *tenant("second", while_it_is(step(2000, 2100, LEVEL_S))),
        ),
        seen=lambda scrape_s: (
            *found_and_let_go(scrape_s, "first"),
            (first_scrape(LEVEL_S, scrape_s), "first"),
        ),
    ),
    "GpuwardenItemsFailing": Scene(
        by="worker",
        series=(
            ("gpuwarden_queue_run_items_failed", 'host="a", run="r", worker_host="a", worker="w"', step(5, 6)),
            ("gpuwarden_queue_run_items_done", 'host="a", run="r", worker_host="a", worker="w"', step(0, 1, MENDED_S)),
            ("gpuwarden_remediator_wrangle_activation_items", 'host="a"', lambda _: 5),
        ),
        seen=lambda scrape_s: found_and_let_go(scrape_s, "w"),
    ),
    "GpuwardenNodeLost": Scene(
        by="host",
        series=(
            ("up", 'host="a", instance="a:9"', lambda _: 1),
            ("up", 'host="b", instance="b:9"', lambda at: 0 if FELL_SILENT_S <= at < HEARD_AGAIN_S else 1),
            ("gpuwarden_exporter_info", 'host="a", instance="a:9"', lambda _: 1),
            (
                "gpuwarden_exporter_info",
                'host="b", instance="b:9"',
                lambda at: None if FELL_SILENT_S <= at < HEARD_AGAIN_S else 1,
            ),
            ("gpuwarden_remediator_node_lost_after_seconds", 'host="a"', lambda _: LOST_AFTER_S),
        ),
        seen=lost_as_due,
        lasts_s=720,
    ),
}


def played(scene: Scene, *, scrape_s: int) -> list[dict[str, str]]:
    """The series as a Prometheus that scrapes so often has them."""
    return [
        {
            "series": f"{name}{{{labels}}}",
            "values": " ".join(
                "stale" if value is None else f"{value:g}"
                for value in map(value_at, range(0, scene.lasts_s + 1, scrape_s))
            ),
        }
        for name, labels, value_at in scene.series
    ]


@pytest.mark.needs_parts
@pytest.mark.parametrize("scrape_s", [1, 15, 30, 60])
@pytest.mark.parametrize("alert", SCENES)
def test_what_acts_by_no_duration_of_a_job_accuses_as_due_at_every_scrape_interval(
    alert: str, scrape_s: int, tmp_path: Path
) -> None:
    try:
        promtool = parts.find("promtool")
    except parts.PartMissing as missing:
        pytest.skip(str(missing))
    scene = SCENES[alert]
    asked = [
        {
            "expr": f'count by ({scene.by}) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
            "eval_time": f"{at_s}s",
            "exp_samples": [{"labels": f'{{{scene.by}="{who}"}}', "value": 1}] if who else [],
        }
        for at_s, who in scene.seen(scrape_s)
    ]
    test = {
        "name": alert,
        "interval": f"{scrape_s}s",
        "input_series": played(scene, scrape_s=scrape_s),
        "promql_expr_test": asked,
    }
    (rules,) = (file for file in ALERTS.glob("*.rules.yaml") if f"alert: {alert}\n" in file.read_text())
    file = tmp_path / "scene.test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1s", "tests": [test]}))

    done = run(promtool, "test", "rules", file)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs_parts
@pytest.mark.parametrize("scrape_s", [1, 15, 30, 60])
def test_each_wedge_is_found_at_the_first_scrape_that_shows_it_and_let_go_at_the_first_after(
    scrape_s: int, tmp_path: Path
) -> None:
    try:
        promtool = parts.find("promtool")
    except parts.PartMissing as missing:
        pytest.skip(str(missing))
    found_s, let_go_s = (math.ceil(moment / scrape_s) * scrape_s for moment in (LIMIT_S, MENDED_S))
    files = []
    for alert, wedge in WEDGES.items():
        asked = [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                "eval_time": f"{at_s}s",
                "exp_samples": [{"value": 1}] if fires else [],
            }
            for at_s, fires in ((found_s - 1, False), (found_s, True), (let_go_s - 1, True), (let_go_s, False))
        ]
        series = history(wedge, scrape_s=scrape_s)
        test = {"name": alert, "interval": f"{scrape_s}s", "input_series": series, "promql_expr_test": asked}
        (rules,) = (file for file in ALERTS.glob("*.rules.yaml") if f"alert: {alert}\n" in file.read_text())
        files.append(tmp_path / f"{alert}.test.yaml")
        files[-1].write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1s", "tests": [test]}))

    done = run(promtool, "test", "rules", *files)

    assert done.returncode == 0, done.stdout + done.stderr


def groups() -> list[dict[str, Any]]:
    return [group for file in ALERTS.glob("*.rules.yaml") for group in yaml.safe_load(file.read_text())["groups"]]


def test_a_group_with_an_interval_of_its_own_only_tells_people_and_is_no_slower_than_a_minute() -> None:
    own = [group for group in groups() if "interval" in group]

    assert {group["interval"] for group in own} == {"1m"}, (
        "after 5 minutes a query finds nothing of an alert that fires"
    )
    acting = [rule["alert"] for group in own for rule in group["rules"] if "remedy" in rule.get("labels", {})]
    assert acting == []


def test_nothing_that_acts_asks_what_is_recorded_at_an_interval_of_its_own() -> None:
    recorded = [
        rule["record"] for group in groups() if "interval" in group for rule in group["rules"] if "record" in rule
    ]
    asking = [
        (rule, name) for group in groups() for rule in group["rules"] for name in recorded if name in rule["expr"]
    ]

    # Nor does another record, for what acts may ask that one.
    assert {rule["alert"] for rule, name in asking if rule.get("record") != name} == {
        "GpuwardenExporterDown",
        "GpuwardenRemediatorDown",
    }
    assert [rule["alert"] for rule, name in asking if "remedy" in rule.get("labels", {})] == []


def test_every_condition_that_compares_durations_is_among_them() -> None:
    comparing = {
        rule["alert"]
        for group in groups()
        for rule in group["rules"]
        if rule.get("labels", {}).get("remedy") in {"restart_worker", "restart_container"}
        or "gpuwarden_job_stall_timeout_seconds" in rule["expr"]
    }

    assert comparing == WEDGES.keys()


def test_every_condition_that_acts_is_looked_at_by_every_scrape_interval() -> None:
    acting = {rule["alert"] for group in groups() for rule in group["rules"] if "remedy" in rule.get("labels", {})}

    assert len(acting) > 1
    assert acting - WEDGES.keys() == SCENES.keys()


def test_the_page_of_the_rules_lists_what_is_asked_once_a_minute() -> None:
    _, _, section = (CHECKOUT / "docs" / "rules.md").read_text().partition("## What is asked once a minute")
    listed = re.findall(r"`(Gpuwarden\w+|gpuwarden:[\w:]+)`", section)

    assert sorted(listed) == sorted(
        rule.get("alert") or rule["record"] for group in groups() if "interval" in group for rule in group["rules"]
    )
