"""A GPU is lost under a running job: the driver's stand-in, a real exporter, Prometheus, Alertmanager and remediator.

What jobs launch is written for the simulated driver. Here it is handed on to the stand-in of NVIDIA's library, which is
what the exporter reads.
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

LOSER, OTHER = "gpuwarden-lost-a", "gpuwarden-lost-b"
LOST, THERE = "GPU-0a0a0a0a-0000-0000-0000-000000000001", "GPU-0b0b0b0b-0000-0000-0000-000000000002"
WINDOW_S: Final = 8.0
HANGS: Final = Script(
    picture="hangs", load_s=0.3, load_mib=4, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2,
    wedge_with_gil=False,
)  # fmt: skip
GOES_ON: Final = Script(picture="goes-on", load_s=0.3, load_mib=4, steps=120, step_s=0.2)


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
    slots = [Slot(worker=LOSER, gpus=(LOST,)), Slot(worker=OTHER, gpus=(THERE,))]
    work = tmp_path / "stage"
    work.mkdir()
    with stage(work, NoEngine(because="a test"), slots, armed=True, stop_grace_s=1.0) as scene, relay.going_on():
        relay.stands_in(scene.chain)
        eventually(lambda: gpus_read(scene) == {LOST, THERE}, "the stand-in is read", within_s=60)
        yield scene


def gpus_read(scene: Stage) -> set[str]:
    return {each["metric"]["gpu"] for each in scene.chain.query('gpuwarden_gpu_info{source="nvml"}')}


@pytest.mark.behaviour("A7")
def test_a_job_on_a_lost_gpu_goes_on_elsewhere_and_spares_the_other_worker(scene: Stage, relay: Relay) -> None:
    def until(holds: Any, what: str) -> None:
        eventually(holds, what, within_s=90, log=lambda: scene.chain.log_tail("execute"))

    lost_job = scene.submit(HANGS, now=time.time(), stall_timeout_s=0.0)
    scene.fleet.start(LOSER)
    until(lambda: scene.store.job(lost_job).state is State.RUNNING and scene.armed(LOSER), "it steps")
    other_job = scene.submit(GOES_ON, now=time.time(), stall_timeout_s=0.0)
    scene.fleet.start(OTHER)
    until(lambda: scene.armed(OTHER), "the other one steps")
    loser, other = scene.fleet.incarnation(LOSER), scene.fleet.incarnation(OTHER)

    relay.lost = frozenset({LOST})

    until(lambda: scene.store.job(lost_job).state is State.COMPLETED, "its job is done")
    until(lambda: not scene.ledger.episodes.list_open(), "all is settled")
    fired = scene.chain.query('max_over_time(ALERTS{alertstate="firing", remedy!=""}[10m])')
    assert {(each["metric"]["alertname"], each["metric"]["worker"]) for each in fired} == {
        ("GpuwardenJobGpuLost", LOSER)
    }
    (story,) = with_action(scene.ledger.reports.newest())
    assert (story.worker, story.outcome) == (LOSER, "mended")
    told = {entry.step: entry.message for entry in scene.journal(LOSER)}
    assert told["begin"].startswith("GPU lost ")
    assert told["quarantine"] == f"{LOST} is lost and quarantined: release it by hand"
    assert [each.gpu for each in scene.store.gpu_quarantine.quarantined()] == [LOST]
    assert (scene.store.job(lost_job).attempt, scene.store.job(other_job).attempt) == (2, 1)
    assert scene.store.job(other_job).state is State.COMPLETED
    assert scene.fleet.incarnation(LOSER) != loser
    assert scene.fleet.incarnation(OTHER) == other
