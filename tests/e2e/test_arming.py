"""A person's hand on the chain, through real parts: arming without a restart, a pause, and the storm brake."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.job import JobId, State
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

FIRST, PAUSED = "gpuwarden-arming-first", "gpuwarden-arming-paused"
CROWD = tuple(f"gpuwarden-arming-{number}" for number in range(1, 5))
WORKERS = (FIRST, PAUSED, *CROWD)
STORM_ABOVE = 3
"""Distinct containers that may wedge; the two stories before the storm are among them."""

PAUSE_S = 12
"""Longer than it takes to mend a wedge that nothing holds."""

SCRIPT = Script(picture="arming", load_s=0.5, load_mib=4, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2)


@pytest.fixture(scope="module")
def scene(work: Path, engine: Engine) -> Iterator[Stage]:
    """Each worker has a queue of its own, so that each wedge is that worker's."""
    with stage(
        work,
        engine,
        [Slot(worker=worker, gpus=(f"GPU-sim-{worker}",)) for worker in WORKERS],
        armed=False,
        stop_grace_s=1.0,
        breaker_targets=STORM_ABOVE,
        queues={worker: worker for worker in WORKERS},
    ) as scene:
        scene.start_workers()
        yield scene


@pytest.fixture(scope="module")
def mended_after_arming(scene: Stage) -> JobId:
    """The first wedge: recorded by a dry run, then armed."""
    job_id = wedge(scene, FIRST)
    until(scene, lambda: "would act" in acts(scene, FIRST), "a dry run has recorded what it would do")
    assert scene.store.job(job_id).state is State.RUNNING

    shown = gpuwarden(scene, "arm", "--yes", "--reason", "the end-to-end test agrees")

    assert "would fence job" in shown, "it shows what it will act on"
    until(scene, lambda: scene.store.job(job_id).state is State.COMPLETED, "armed, it is mended")
    return job_id


@pytest.mark.behaviour("C5")
def test_arming_acts_on_a_recorded_wedge_without_a_restart(scene: Stage, mended_after_arming: JobId) -> None:
    assert scene.store.job(mended_after_arming).attempt == 2
    told = acts(scene, FIRST)
    assert told.index("would act") < told.index("ordered arm") < told.index("decided begin")
    assert scene.chain.log("execute").count("executor ready") == 1
    until(
        scene,
        lambda: bool(scene.chain.query('gpuwarden_remediator_armed{remedy="restart_worker"} == 1')),
        "it is published as armed",
    )


@pytest.mark.usefixtures("mended_after_arming")
def test_a_pause_holds_a_wedge_ends_by_itself_and_the_wedge_is_mended(scene: Stage) -> None:
    gpuwarden(scene, "pause", "--for", "1h", "--reason", "somebody looks at it")
    life = scene.fleet.incarnation(PAUSED)
    job_id = wedge(scene, PAUSED)

    until(scene, lambda: "decided wait: paused" in acts(scene, PAUSED), "it is held")
    assert scene.fleet.incarnation(PAUSED) == life
    assert scene.store.job(job_id).state is State.RUNNING

    began_s = time.monotonic()
    (first,) = scene.ledger.orders.current().pauses(host=None, now=scene.ledger.now())
    gpuwarden(scene, "pause", "--for", f"{PAUSE_S}s")  # counted from now, however late the first held it
    gpuwarden(scene, "resume", str(first.order_id))
    until(scene, lambda: scene.store.job(job_id).state is State.COMPLETED, "the pause has ended and it is mended")
    assert time.monotonic() - began_s >= PAUSE_S
    assert scene.store.job(job_id).watchdog_retries == 1


@pytest.mark.usefixtures("mended_after_arming")
def test_a_storm_latches_the_brake_nothing_more_is_stopped_and_its_release_mends_the_rest(scene: Stage) -> None:
    gpuwarden(scene, "pause", "--for", "1h")  # so that all have wedged before the first is freed
    lives = {worker: scene.fleet.incarnation(worker) for worker in CROWD}
    jobs = {worker: wedge(scene, worker) for worker in CROWD}
    until(scene, lambda: all("decided wait: paused" in acts(scene, each) for each in CROWD), "all of them have wedged")
    gpuwarden(scene, "resume")

    until(
        scene, lambda: bool(scene.chain.query("gpuwarden_remediator_circuit_breaker_open == 1")), "the brake is latched"
    )
    until(scene, lambda: held(scene) | closed(scene) == set(CROWD), "each is mended, or held by the brake")
    # One that had begun and fenced nothing yet when the brake latched is held as well.
    assert len(closed(scene)) <= STORM_ABOVE - len(freed_before(scene))
    for worker in held(scene):
        assert scene.fleet.incarnation(worker) == lives[worker]
        assert scene.store.job(jobs[worker]).state is State.RUNNING
    until(scene, lambda: '"event": "circuit breaker open' in scene.chain.log("execute"), "it is said")
    code, status = run(scene, "status")
    assert (code, "circuit breaker open since" in status) == (1, True), status

    gpuwarden(scene, "breaker", "reset", "--reason", "a person has looked")

    until(scene, lambda: all(scene.store.job(job).state is State.COMPLETED for job in jobs.values()), "all are mended")
    until(scene, lambda: not scene.ledger.episodes.list_open(), "every episode is closed")
    assert {scene.store.job(job).watchdog_retries for job in jobs.values()} == {1}

    def nothing_is_left() -> bool:
        code, status = run(scene, "status")
        return (code, status.splitlines()[-1]) == (0, "nothing needs an operator")

    until(scene, nothing_is_left, "status says that nothing needs an operator")


def wedge(scene: Stage, worker: str) -> JobId:
    """Give a worker a job that wedges at its first attempt."""
    return scene.submit(SCRIPT, now=time.time(), stall_timeout_s=3, queue=worker)


def acts(scene: Stage, worker: str) -> list[str]:
    return [f"{entry.act} {entry.what}" for entry in scene.journal(worker)]


def held(scene: Stage) -> set[str]:
    return {each.worker for each in scene.ledger.reports.list_held() if each.reason == "circuit_breaker"}


def closed(scene: Stage) -> set[str]:
    mine = (story for story in with_action(scene.ledger.reports.newest()) if story.worker in CROWD)
    return {story.worker for story in mine if story.closed_at is not None}


def freed_before(scene: Stage) -> set[str]:
    """The containers that were freed before the storm, which count into its window."""
    return {worker for worker in (FIRST, PAUSED) if "did stop" in acts(scene, worker)}


def until(scene: Stage, holds: object, what: str) -> None:
    assert callable(holds)
    eventually(holds, what, within_s=90, log=lambda: scene.chain.log_tail("execute"))


def gpuwarden(scene: Stage, *arguments: str) -> str:
    code, said = run(scene, *arguments)
    assert code == 0, said
    return said


def run(scene: Stage, *arguments: str) -> tuple[int, str]:
    """A command as a person gives it, and what it says."""
    chain = scene.chain
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", *arguments],
        env={
            **os.environ,
            "GPUWARDEN_REMEDIATOR_LEDGER": chain.ledger_url,
            "GPUWARDEN_QUEUE_DB": chain.queue_url,
            "GPUWARDEN_REMEDIATOR_URL": chain.remediator_url,
            "GPUWARDEN_EXPORTER_URL": chain.exporter_url,
            "GPUWARDEN_PROMETHEUS_URL": chain.prometheus_url,
            "GPUWARDEN_ALERTMANAGER_URL": chain.alertmanager_url,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
