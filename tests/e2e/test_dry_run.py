"""Dry run, which is how it ships: the same path to the last step, a record of it, and nothing done."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.job import State
from remediator.ledger.captures import SavedCapture
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, of_consequence, stage
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

WORKER = "gpuwarden-dry-a"


@pytest.fixture(scope="module")
def scene(work: Path, engine: Engine) -> Iterator[Stage]:
    with stage(work, engine, [Slot(worker=WORKER, gpus=("GPU-sim-dry",))], armed=False, stop_grace_s=1.0) as scene:
        yield scene


def test_a_dry_run_records_and_does_nothing_and_arming_acts(
    scene: Stage,
) -> None:
    script = Script(picture="dry", load_s=0.5, load_mib=8, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2)
    job_id = scene.submit(script, now=time.time(), stall_timeout_s=4)
    before = scene.start_workers()

    eventually(lambda: "would act" in _acts(scene), within_s=90, what="it recorded what it would do")
    eventually(
        lambda: bool(scene.chain.query("gpuwarden_remediator_armed == 0")), within_s=30, what="dry run is a metric"
    )
    assert "did" not in {act.split()[0] for act in _acts(scene)}
    assert scene.fleet.incarnation(WORKER) == before[WORKER]
    (story,) = of_consequence(scene.ledger.reports.newest())
    (capture,) = scene.ledger.captures.of_episode(story.episode_id)
    assert next(each["python"]["name"] for each in _seen(capture) if "python" in each) == "MainThread"
    assert not any("native" in each for each in _seen(capture))
    assert (scene.store.job(job_id).state, scene.store.job(job_id).watchdog_retries) == (State.RUNNING, 0)

    scene.chain.stop("execute")
    scene.chain.start_executor(armed=True)

    eventually(lambda: scene.store.job(job_id).state is State.COMPLETED, within_s=90, what="armed, it was mended")
    assert scene.store.job(job_id).attempt == 2
    assert [each.episode_id for each in of_consequence(scene.ledger.reports.newest())] == [story.episode_id]
    assert [each.document["armed"] for each in scene.ledger.captures.of_episode(story.episode_id)] == [False, True]


def _seen(capture: SavedCapture) -> list[dict[str, Any]]:
    return [thread for process in capture.document["processes"] for thread in process["seen"]]


def _acts(scene: Stage) -> list[str]:
    stories = [scene.ledger.reports.get(story.episode_id) for story in scene.ledger.reports.newest()]
    return [f"{entry.act} {entry.what}" for story in stories if story for entry in story.entries]
