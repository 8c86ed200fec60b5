"""One job that hangs, with exactly the delivered settings: intervals, silence of 120 s, captures and every rule."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.standalone import package_data
from deploy.standalone.config_files import Intervals
from deploy.standalone.stack import Plan
from gpuwarden.job import HEARTBEAT_S, STALL_TIMEOUT_S, State
from testbed.changed_settings import changed
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import DELIVERED, Stage, stage, with_action
from testbed.workers import WorkerOptions
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.nightly]

WORKER = "gpuwarden-delivered"
OPTIONS = WorkerOptions(heartbeat_s=HEARTBEAT_S)
SCRIPT = Script(picture="delivered", load_s=2.0, load_mib=64, steps=6, step_s=1.0, wedge_attempts=1, wedge_after_step=3)


@pytest.fixture(scope="module")
def scene(work: Path, engine: Engine) -> Iterator[Stage]:
    """The stage after the job was restarted and has completed."""
    slots = [Slot(worker=WORKER, gpus=("GPU-sim-delivered",))]
    with stage(
        work,
        engine,
        slots,
        armed=True,
        intervals=Intervals(),
        dead_after_s=Plan.dead_after_s,
        ram_idle_mib=Plan.ram_idle_mib,
        options=OPTIONS,
        **DELIVERED,
    ) as set_up:
        set_up.start_workers()
        job_id = set_up.submit(SCRIPT, now=time.time(), stall_timeout_s=STALL_TIMEOUT_S)
        eventually(
            lambda: set_up.store.job(job_id).state is State.COMPLETED and not set_up.ledger.episodes.list_open(),
            "the job is restarted and completes",
            within_s=STALL_TIMEOUT_S + 120,
            log=lambda: set_up.chain.log_tail("execute"),
        )
        yield set_up


def test_no_setting_is_changed(scene: Stage) -> None:
    assert changed(scene.chain.plan, OPTIONS, os.environ) == set()


def test_job_is_restarted_once_after_the_whole_silence(scene: Stage) -> None:
    (episode,) = with_action(scene.ledger.reports.newest())
    history = scene.ledger.reports.get(episode.episode_id)
    assert history is not None
    begin = next(entry.message for entry in history.entries if entry.step == "begin")

    assert (episode.condition, episode.outcome) == ("stall", "fixed")
    assert scene.store.job(1).attempt == 2
    assert float(begin.partition("silent ")[2].partition(" s")[0]) >= STALL_TIMEOUT_S
    assert {each["metric"]["alertname"] for each in scene.chain.query(FIRED)} == {
        "GpuwardenJobStalled",
        "GpuwardenWatchdog",
    }


def test_capture_has_stacks_logs_and_history(scene: Stage) -> None:
    (episode,) = with_action(scene.ledger.reports.newest())
    (capture,) = scene.ledger.captures.of_episode(episode.episode_id)

    assert (capture.document["cut_short"], capture.document["notes"]) == (None, [])
    assert capture.document["processes"]
    assert capture.document["logs"]
    values = {each["metric"]: each["values"] for each in capture.document["curves"]}
    beats = [value for value in values["gpuwarden_job_step_beat_age_seconds"] if value is not None]
    assert max(beats) > STALL_TIMEOUT_S - 60


def test_rules_have_the_shipped_durations(scene: Stage) -> None:
    shipped = {
        rule["alert"]: (_seconds(rule.get("for", "0s")), _seconds(rule.get("keep_firing_for", "0s")))
        for file in package_data.rules()
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    groups = scene.chain.http.get(f"{scene.chain.prometheus_url}/api/v1/rules").json()["data"]["groups"]
    loaded = {
        rule["name"]: (rule["duration"], rule["keepFiringFor"])
        for group in groups
        for rule in group["rules"]
        if rule["type"] == "alerting"
    }

    assert loaded == shipped
    assert {group["interval"] for group in groups if group["name"] == "gpuwarden_stall"} == {Intervals().evaluate_s}


FIRED = 'max_over_time(ALERTS{alertstate="firing", alertname=~"Gpuwarden.+"}[10m])'


def _seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]
