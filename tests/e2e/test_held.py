"""What holds an armed remediator, through real parts: a person's approval, a maintenance, a silence, and the rate."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.job import JobId, State
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage
from tests.e2e.test_arming import acts, gpuwarden, run, until, wedge
from tests.remediator.alertmanager import expire, silence

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

APPROVED, MAINTAINED, SILENCED, AGAIN = WORKERS = tuple(
    f"gpuwarden-held-{name}" for name in ("approved", "maintained", "silenced", "again")
)
FREES_MAX = 4
"""The mends of the first three stories, and one of the last."""

MAINTENANCE_S = 20
"""Longer than it takes to mend a wedge that nothing holds, and to see that one is held and that it is published."""


@pytest.fixture(scope="module")
def scene(work: Path, engine: Engine) -> Iterator[Stage]:
    """Each worker has a queue of its own, so that each wedge is that worker's."""
    with stage(
        work,
        engine,
        [Slot(worker=worker, gpus=(f"GPU-sim-{worker}",)) for worker in WORKERS],
        armed=False,
        stop_grace_s=1.0,
        storm_frees=FREES_MAX,
        queues={worker: worker for worker in WORKERS},
    ) as scene:
        scene.start_workers()
        yield scene


def test_what_is_armed_with_approval_is_confirmed_and_waits_for_a_persons_yes(scene: Stage) -> None:
    gpuwarden(scene, "arm", "--yes", "--approval")
    life = scene.fleet.incarnation(APPROVED)
    job_id = wedge(scene, APPROVED)
    until(scene, lambda: "decided wait: approval" in acts(scene, APPROVED), "it waits for an approval")
    assert_untouched(scene, APPROVED, life, job_id)
    code, status = run(scene, "status")
    (episode,) = scene.ledger.episodes.list_open()
    assert (code, f"`gpuwarden approve {episode.episode_id}` or" in status) == (1, True), status
    until(scene, lambda: held_by(scene, "approval"), "it is published as held")

    gpuwarden(scene, "approve", str(episode.episode_id), "--because", "the end-to-end test agrees")

    until(scene, lambda: mended(scene, job_id), "approved, it is mended")
    # The job can be done before the container has run for as long as it takes to believe in it.
    until(scene, lambda: not scene.ledger.episodes.list_open(), "its episode is over")
    code, said = run(scene, "approve", str(episode.episode_id))
    assert code == 1
    assert f"episode {episode.episode_id} is over (mended: " in said
    gpuwarden(scene, "arm", "--yes")


def test_inside_a_maintenance_a_wedge_is_held_and_after_it_mended(scene: Stage) -> None:
    gpuwarden(scene, "arm", "--yes")
    gpuwarden(scene, "pause", "--for", "1h")  # so that it has wedged before the maintenance begins
    life = scene.fleet.incarnation(MAINTAINED)
    job_id = wedge(scene, MAINTAINED)
    until(scene, lambda: "decided wait: paused" in acts(scene, MAINTAINED), "its alert was delivered")
    began_s = time.monotonic()
    gpuwarden(scene, "maintenance", "start", "--for", f"{MAINTENANCE_S}s", "--because", "a new driver")
    gpuwarden(scene, "resume")
    until(scene, lambda: "decided wait: maintenance" in acts(scene, MAINTAINED), "it is held")
    assert_untouched(scene, MAINTAINED, life, job_id)
    until(scene, lambda: bool(scene.chain.query("gpuwarden_remediator_maintenance == 1")), "it is published")

    until(scene, lambda: mended(scene, job_id), "the maintenance has ended and it is mended")
    assert time.monotonic() - began_s >= MAINTENANCE_S


def test_a_silence_made_after_the_alert_was_delivered_holds_it_and_its_end_mends_it(scene: Stage) -> None:
    gpuwarden(scene, "arm", "--yes")
    gpuwarden(scene, "pause", "--for", "1h")
    life = scene.fleet.incarnation(SILENCED)
    job_id = wedge(scene, SILENCED)
    until(scene, lambda: "decided wait: paused" in acts(scene, SILENCED), "its alert was delivered")
    made = silence(scene.chain.alertmanager_url, worker=SILENCED, comment="somebody looks at it")
    gpuwarden(scene, "resume")

    until(scene, lambda: "decided wait: silenced" in acts(scene, SILENCED), "it is held")
    assert_untouched(scene, SILENCED, life, job_id)
    (because, *_) = [each.message for each in scene.account(SILENCED) if each.what == "wait: silenced"]
    assert because.startswith(f"silenced in Alertmanager: {made} by ann: somebody looks at it")

    expire(scene.chain.alertmanager_url, made)
    until(scene, lambda: mended(scene, job_id), "the silence has ended and it is mended")


def test_one_container_that_is_freed_again_and_again_latches_the_brake(scene: Stage) -> None:
    gpuwarden(scene, "arm", "--yes")
    freed = 0
    while not scene.ledger.orders.current().brake():
        life = scene.fleet.incarnation(AGAIN)
        job_id = wedge(scene, AGAIN)
        until(
            scene,
            lambda job_id=job_id: mended(scene, job_id) or scene.ledger.orders.current().brake(),
            "it is mended, or the brake is latched",
        )
        freed += mended(scene, job_id)
        assert freed <= FREES_MAX
    assert_untouched(scene, AGAIN, life, job_id)
    begun = sum("decided begin" in act for worker in WORKERS for act in acts(scene, worker))
    assert begun == FREES_MAX
    code, status = run(scene, "status")
    assert code == 1
    assert f"{FREES_MAX + 1} frees within 3600 s, with 4 workers; above {FREES_MAX}" in status

    gpuwarden(scene, "brake", "release", "--because", "a person has looked")

    until(scene, lambda: mended(scene, job_id), "it is mended")


def mended(scene: Stage, job_id: JobId) -> bool:
    return scene.store.job(job_id).state is State.COMPLETED


def held_by(scene: Stage, reason: str) -> bool:
    return bool(scene.chain.query(f'gpuwarden_remediator_episodes_held{{reason="{reason}"}} == 1'))


def assert_untouched(scene: Stage, worker: str, life: str, job_id: JobId) -> None:
    assert scene.fleet.incarnation(worker) == life
    assert scene.store.job(job_id).state is State.RUNNING
