"""A GPU is lost while a job runs on it: through a fake NVML library and the whole pipeline.

The jobs write their GPU activity for the simulated driver. A relay passes it on to the fake NVML library, which the
exporter reads.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from deploy.standalone import debian_packages
from gpuwarden.job import State
from testbed.demo.job_body import Script
from testbed.docker_engine import NoEngine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from tests.nvml.driver import Driver, build
from tests.nvml.relay import Relay
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_compiler, pytest.mark.needs_parts, pytest.mark.slow]

LOST_GPU_WORKER, OTHER = "gpuwarden-lost-a", "gpuwarden-lost-b"
LOST, PRESENT = "GPU-0a0a0a0a-0000-0000-0000-000000000001", "GPU-0b0b0b0b-0000-0000-0000-000000000002"
WINDOW_S: Final = 8.0
HANGS: Final = Script(
    picture="hangs", load_s=0.3, load_mib=4, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2,
    wedge_with_gil=False,
)  # fmt: skip
STEADY: Final = Script(picture="steady", load_s=0.3, load_mib=4, steps=120, step_s=0.2)


@pytest.fixture
def relay(tmp_path: Path) -> Relay:
    try:
        library = build(tmp_path)
    except debian_packages.PartMissing as missing:
        pytest.skip(str(missing))
    return Relay(tmp_path / "stage" / "gpus.json", Driver(library, tmp_path / "nvml.script"))


@pytest.fixture
def scene(tmp_path: Path, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("GPUWARDEN_EXPORTER_HEALTH_WINDOW_S", str(WINDOW_S))
    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_GPU_LOST_S", "2")
    slots = [Slot(worker=LOST_GPU_WORKER, gpus=(LOST,)), Slot(worker=OTHER, gpus=(PRESENT,))]
    work = tmp_path / "stage"
    work.mkdir()
    with stage(work, NoEngine(reason="a test"), slots, armed=True, stop_grace_s=1.0) as scene, relay.going_on():
        relay.stands_in(scene.chain)
        eventually(lambda: gpus_read(scene) == {LOST, PRESENT}, "the exporter reads the fake library", within_s=60)
        yield scene


def gpus_read(scene: Stage) -> set[str]:
    return {each["metric"]["gpu"] for each in scene.chain.query('gpuwarden_gpu_info{source="nvml"}')}


@pytest.mark.behaviour("A7")
def test_job_of_a_lost_gpu_is_requeued_and_the_other_worker_is_not_touched(scene: Stage, relay: Relay) -> None:
    def until(holds: Any, what: str) -> None:
        eventually(holds, what, within_s=90, log=lambda: scene.chain.log_tail("execute"))

    lost_job = scene.submit(HANGS, now=time.time(), stall_timeout_s=0.0)
    scene.fleet.start(LOST_GPU_WORKER)
    until(
        lambda: scene.store.job(lost_job).state is State.RUNNING and scene.armed(LOST_GPU_WORKER), "the first job steps"
    )
    other_job = scene.submit(STEADY, now=time.time(), stall_timeout_s=0.0)
    scene.fleet.start(OTHER)
    until(lambda: scene.armed(OTHER), "the other job steps")
    first_lost, first_other = scene.fleet.incarnation(LOST_GPU_WORKER), scene.fleet.incarnation(OTHER)

    relay.lost = frozenset({LOST})

    until(lambda: scene.store.job(lost_job).state is State.COMPLETED, "the job is done")
    until(lambda: not scene.ledger.episodes.list_open(), "every episode is closed")
    alerts = scene.chain.query('max_over_time(ALERTS{alertstate="firing", remedy!=""}[10m])')
    assert {(each["metric"]["alertname"], each["metric"]["worker"]) for each in alerts} == {
        ("GpuwardenJobGpuLost", LOST_GPU_WORKER)
    }
    (episode,) = with_action(scene.ledger.reports.newest())
    assert (episode.worker, episode.outcome) == (LOST_GPU_WORKER, "fixed")
    messages = {entry.step: entry.message for entry in scene.journal(LOST_GPU_WORKER)}
    assert messages["begin"].startswith("GPU lost ")
    assert messages["quarantine"] == f"{LOST} is lost and quarantined: release it by hand"
    assert [each.gpu for each in scene.store.gpu_quarantine.quarantined()] == [LOST]
    assert (scene.store.job(lost_job).attempt, scene.store.job(other_job).attempt) == (2, 1)
    assert scene.store.job(other_job).state is State.COMPLETED
    assert scene.fleet.incarnation(LOST_GPU_WORKER) != first_lost
    assert scene.fleet.incarnation(OTHER) == first_other
