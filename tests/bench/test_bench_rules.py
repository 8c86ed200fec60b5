"""The measurement of the rules in a short mode, with a real Prometheus."""

import math
import re
from pathlib import Path

import pytest
import yaml

from bench.figures import Place
from bench.rules import TENANTS, Load, measure
from bench.rules.fleet import LOAD_S, WORKERS, Fleet
from deploy.standalone.package_data import rules

SHORT = Load(
    hosts=(2,), interval_s=1, settles_s=2.0, largest_settles_s=2.0, watched_s=3.0, churn_turnover_s=3.0, churn_s=6.0
)


def test_nodename_is_the_scraped_host(fleet: Fleet) -> None:
    nodenames = re.findall(r'nodename="([^"]*)"', fleet.page(7, now_s=0.0).decode())

    assert nodenames == ["h7"], "else GpuwardenHostLabelMismatch fires for each host"


@pytest.mark.slow
def test_short_mode_measures_every_fleet_and_churn(tmp_path: Path) -> None:
    found = {each.what: each for each in measure(Place(name="disk", folder=tmp_path), SHORT)}

    assert found["16 workers: all groups, of the time there is"].median > 0
    assert found["16 workers: series a worker"].median > 50
    slowest = [what for what in found if what.startswith("16 workers: group ")]
    assert len(slowest) == 3
    assert all(found[what].against == "a fifth of its interval" for what in slowest)
    assert found["16 workers in gangs of 8: group gpuwarden_gang"].against == "a fifth of its interval"
    beside = "16 workers with tenants and servers"
    assert all(found[f"{beside}: group {each}"].median > 0 for each in TENANTS)
    for more in ("16 workers in gangs of 8", beside):
        assert found[f"{more}: series a worker"].median > found["16 workers: series a worker"].median
    (made,) = [each for what, each in found.items() if what.endswith("series made, a job")]
    assert made.median == pytest.approx(0, abs=0.3), "the next job of a worker has the same series"


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet(turnover_s=290.0)


def page(fleet: Fleet, now_s: float) -> dict[str, float]:
    lines = (line.rpartition(" ")[::2] for line in fleet.page(7, now_s=now_s).decode().splitlines())
    return {series: float(value) for series, value in lines}


def test_page_has_all_metrics_of_job_rules_except_overdue_jobs(fleet: Fleet) -> None:
    there = {series.partition("{")[0] for series in page(fleet, 1e9)}
    for topic in ("stall", "health", "budget", "worker"):
        (path,) = [path for path in rules() if path.name == f"{topic}.rules.yaml"]
        groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        expressions = "".join(rule["expr"] for group in groups for rule in group["rules"])
        named = set(re.findall(r"\bgpuwarden_[a-z_]+\b", expressions))
        of_gangs = {"gpuwarden_gang_rank_attempt", "gpuwarden_gang_rank_active_attempt"}
        assert named - there - of_gangs == {"gpuwarden_job_overdue_id"}, "a healthy fleet has none"


def test_next_job_has_its_own_ages(fleet: Fleet) -> None:
    begins_s = next(now_s for now_s in range(290) if job_id(fleet, now_s) != job_id(fleet, now_s + 1)) + 1.0
    slot = '{container="w3",worker="w3"}'
    early, late = page(fleet, begins_s + 5), page(fleet, begins_s + 200)

    assert math.isnan(early[f"gpuwarden_job_step_beat_age_seconds{slot}"]), "it loads for 30 s"
    assert early[f"gpuwarden_job_elapsed_seconds{slot}"] == pytest.approx(5.5, abs=1)
    assert late[f"gpuwarden_job_elapsed_seconds{slot}"] == pytest.approx(200.5, abs=1)
    assert late[f"gpuwarden_job_phase_age_seconds{slot}"] == pytest.approx(200.5 - LOAD_S, abs=1)
    assert late[f"gpuwarden_job_step_beat_age_seconds{slot}"] < 2
    assert job_id(fleet, begins_s) == job_id(fleet, begins_s + 288) != job_id(fleet, begins_s + 291)


def test_gang_fleet_has_all_metrics_of_its_rule() -> None:
    fleet = Fleet(turnover_s=290.0, kind="gangs")
    begins_s = next(now_s for now_s in range(290) if gangs(fleet, now_s) != gangs(fleet, now_s + 1)) + 1.0
    there = {series.partition("{")[0] for series in page(fleet, begins_s + 200)}
    (path,) = [path for path in rules() if path.name == "gang.rules.yaml"]

    named = set(re.findall(r"\bgpuwarden_gang_[a-z_]+\b", path.read_text(encoding="utf-8")))
    overdue = {"gpuwarden_gang_rank_overdue_attempt", "gpuwarden_gang_overdue_ranks"}
    assert named - there == overdue, "a healthy fleet has none"
    (gang,) = gangs(fleet, begins_s)
    assert gangs(fleet, begins_s + 288) == {gang} != gangs(fleet, begins_s + 291)
    assert {gang}.isdisjoint(re.findall(r'gang="([^"]+)"', fleet.page(8, now_s=begins_s).decode()))
    ranks = [series for series in page(fleet, begins_s + 200) if series.startswith("gpuwarden_gang_rank_attempt")]
    assert len({re.sub(r'.*rank="(\d)".*', r"\1", each) for each in ranks}) == WORKERS


def test_tenant_fleet_has_all_metrics_of_its_rules() -> None:
    there = {series.partition("{")[0] for series in page(Fleet(turnover_s=290.0, kind="tenants"), 1e9)}
    read = "".join(path.read_text() for path in rules() if path.name in ("vram.rules.yaml", "server.rules.yaml"))

    named = set(re.findall(r"\bgpuwarden_(?:container|gpu|server|exporter)_[a-z_]+\b", read))

    assert len(named) > 5
    unpublished = {f"gpuwarden_container_gpu_memory_{name}" for name in ("budget_invalid", "over_budget_bytes")}
    assert named - there == unpublished, "a healthy fleet has none"


def gangs(fleet: Fleet, now_s: float) -> set[str]:
    return {found for series in page(fleet, float(now_s)) for found in re.findall(r'gang="([^"]+)"', series)}


def job_id(fleet: Fleet, now_s: float) -> float:
    found = page(fleet, float(now_s)).items()
    (its,) = [value for series, value in found if series.startswith("gpuwarden_job_id") and "w3" in series]
    return its


def test_jobs_change_at_different_times(fleet: Fleet) -> None:
    ages = [value for series, value in page(fleet, 1e9).items() if series.startswith("gpuwarden_job_elapsed_seconds")]
    assert len(ages) == WORKERS
    assert max(ages) - min(ages) > 100


def test_fleet_is_healthy(fleet: Fleet) -> None:
    early, late = page(fleet, 1e9), page(fleet, 1e9 + 100)
    errors = [series for series in late if "_errors_total" in series or "_remapped_rows_total" in series]

    assert len(errors) > 3 * WORKERS
    assert [series for series in errors if late[series] != early[series]] == [], "no GPU has one error more"
    assert {value for series, value in late.items() if series.startswith("gpuwarden_collector_success{")} == {1.0}
    assert 'gpuwarden_collector_success{collector="sampler"}' in late
