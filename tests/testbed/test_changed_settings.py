"""The stage of the end-to-end tests changes only listed settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.standalone.config_files import Intervals
from deploy.standalone.stack import CHECKOUT, Plan
from gpuwarden.job import HEARTBEAT_S
from testbed.changed_settings import CHANGED, changed
from testbed.docker_engine import NoEngine
from testbed.stage import DELIVERED, EXECUTE, FAST, stage
from testbed.workers import WorkerOptions

PLAN = Plan(work=Path("/nowhere"), host="h", docker=None, simulate_gpu=None)
OPTIONS = WorkerOptions(heartbeat_s=HEARTBEAT_S)


def test_delivered_settings_change_nothing() -> None:
    assert changed(replace(PLAN, execute=DELIVERED), OPTIONS, {}) == set()


@pytest.mark.parametrize(
    ("plan", "options", "environ", "name"),
    [
        (replace(PLAN, intervals=Intervals(evaluate_s=5)), OPTIONS, {}, "evaluate_s"),
        (replace(PLAN, intervals=FAST), OPTIONS, {}, "scrape_s"),
        (replace(PLAN, execute={"retries_max": 1}), OPTIONS, {}, "retries_max"),
        (replace(PLAN, host_lost_after_s=5.0), OPTIONS, {}, "host_lost_after_s"),
        (PLAN, replace(OPTIONS, lease_s=5.0), {}, "lease_s"),
        (PLAN, replace(OPTIONS, heartbeat_s=1.0), {}, "heartbeat_s"),
        (PLAN, OPTIONS, {"GPUWARDEN_EXPORTER_BUSY_TIMEOUT_S": "9"}, "busy_timeout_s"),
        (PLAN, OPTIONS, {"GPUWARDEN_REMEDIATOR_GPU_LOST_S": "2"}, "gpu_lost_s"),
    ],
)
def test_each_changed_setting_is_found(plan: Plan, options: Any, environ: dict[str, str], name: str) -> None:
    assert changed(plan, options, environ) == {name}


def test_stage_with_an_unlisted_setting_does_not_start(tmp_path: Path) -> None:
    scene = stage(tmp_path, NoEngine(reason="a test"), [], armed=True, retries_max=1)

    with pytest.raises(ValueError, match=r"the stage changes \['retries_max'\]"), scene:
        pytest.fail("it started")


def test_default_stage_changes_only_listed_settings() -> None:
    plan = replace(PLAN, intervals=FAST, execute=EXECUTE, ram_idle_mib=24)

    assert changed(plan, WorkerOptions(), {}) <= CHANGED.keys()


def test_no_listed_setting_is_obsolete() -> None:
    sources = [*(CHECKOUT / "tests" / "e2e").rglob("*.py"), CHECKOUT / "testbed" / "stage.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources).lower()

    assert [name for name in CHANGED if name not in text] == []
