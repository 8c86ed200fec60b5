"""Orders of an operator, through the whole pipeline: arm without a restart, pause, and reset the circuit breaker.

The mail server accepts connections and does not answer until the first repair has begun.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpuwarden.job import JobId, State
from remediator.commands.notify import FILE_ENV
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from tests.mailbox import Mailbox, listening, new_mailbox
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

FIRST, PAUSED = "gpuwarden-arming-first", "gpuwarden-arming-paused"
CROWD = tuple(f"gpuwarden-arming-{number}" for number in range(1, 5))
WORKERS = (FIRST, PAUSED, *CROWD)
BREAKER_TARGETS = 3
"""Distinct containers that may be restarted, with the two before the storm."""

PAUSE_S = 12
"""Longer than a restart takes when nothing holds it."""

SCRIPT = Script(picture="arming", load_s=0.5, load_mib=4, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2)


@pytest.fixture(scope="module")
def box() -> Mailbox:
    """The mail of the administrator."""
    return new_mailbox()


@pytest.fixture(scope="module")
def scene(work: Path, engine: Engine, box: Mailbox) -> Iterator[Stage]:
    """Each worker has a separate queue, so that it gets the job that is meant for it."""
    addresses = work / "notify.toml"
    addresses.write_text(f'mail_server = "{box.url}"\nadministrators = ["ops@example.com"]\n')
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(FILE_ENV, str(addresses))
        with stage(
            work,
            engine,
            [Slot(worker=worker, gpus=(f"GPU-sim-{worker}",)) for worker in WORKERS],
            armed=False,
            stop_grace_s=1.0,
            breaker_targets=BREAKER_TARGETS,
            queues={worker: worker for worker in WORKERS},
        ) as scene:
            scene.start_workers()
            yield scene


@pytest.fixture(scope="module")
def job_fixed_after_arming(scene: Stage, box: Mailbox) -> Iterator[JobId]:
    """The first stall: recorded by a dry run, then fixed once armed, also while a mail is on its way."""
    job_id = submit_stalling_job(scene, FIRST)
    until(scene, lambda: "would act" in acts(scene, FIRST), "a dry run has recorded the restart")
    assert scene.store.job(job_id).state is State.RUNNING

    with closing(socket.create_server(("127.0.0.1", box.port))) as silent:
        silent.settimeout(60)
        scene.ledger.notices.notify_administrators(key="k", kind="chain", title="t", text="t", now=scene.ledger.now())
        mail, _ = silent.accept()
        with mail:
            shown = gpuwarden(scene, "arm", "--yes", "--reason", "the end-to-end test agrees")
            until(scene, lambda: "did stop" in acts(scene, FIRST), "the armed executor acts")
            with pytest.raises(BlockingIOError):  # open: the server still has not answered
                mail.recv(1, socket.MSG_DONTWAIT)

    assert "would fence job" in shown, "the command lists the episodes"
    with listening(box):
        until(scene, lambda: scene.store.job(job_id).state is State.COMPLETED, "the armed executor fixes it")
        yield job_id


@pytest.mark.behaviour("B8")
@pytest.mark.behaviour("C5")
def test_arm_acts_on_a_recorded_stall_without_a_restart(scene: Stage, job_fixed_after_arming: JobId) -> None:
    assert scene.store.job(job_fixed_after_arming).attempt == 2
    entries = acts(scene, FIRST)
    assert entries.index("would act") < entries.index("ordered arm") < entries.index("decided begin")
    assert scene.chain.log("execute").count("executor ready") == 1
    until(
        scene,
        lambda: bool(scene.chain.query('gpuwarden_remediator_armed{remedy="restart_worker"} == 1')),
        "the remedy is published as armed",
    )


@pytest.mark.usefixtures("job_fixed_after_arming")
def test_pause_holds_an_episode_until_it_expires(scene: Stage) -> None:
    gpuwarden(scene, "pause", "--for", "1h", "--reason", "under investigation")
    incarnation = scene.fleet.incarnation(PAUSED)
    job_id = submit_stalling_job(scene, PAUSED)

    until(scene, lambda: "decided wait: paused" in acts(scene, PAUSED), "the episode is held")
    assert scene.fleet.incarnation(PAUSED) == incarnation
    assert scene.store.job(job_id).state is State.RUNNING

    began_s = time.monotonic()
    (first,) = scene.ledger.orders.current().pauses(host=None, now=scene.ledger.now())
    gpuwarden(scene, "pause", "--for", f"{PAUSE_S}s")  # starts now, even if the first one took effect late
    gpuwarden(scene, "resume", str(first.order_id))
    until(scene, lambda: scene.store.job(job_id).state is State.COMPLETED, "the pause has ended and the job is fixed")
    assert time.monotonic() - began_s >= PAUSE_S
    assert scene.store.job(job_id).watchdog_retries == 1


@pytest.mark.usefixtures("job_fixed_after_arming")
def test_open_breaker_stops_all_restarts_until_it_is_reset(scene: Stage) -> None:
    gpuwarden(scene, "pause", "--for", "1h")  # so that all have stalled before the first restart
    first = {worker: scene.fleet.incarnation(worker) for worker in CROWD}
    jobs = {worker: submit_stalling_job(scene, worker) for worker in CROWD}
    until(scene, lambda: all("decided wait: paused" in acts(scene, each) for each in CROWD), "all workers have stalled")
    gpuwarden(scene, "resume")

    until(
        scene, lambda: bool(scene.chain.query("gpuwarden_remediator_circuit_breaker_open == 1")), "the breaker is open"
    )
    until(scene, lambda: held(scene) | closed(scene) == set(CROWD), "each is fixed, or held by the breaker")
    # An episode that has begun but fenced nothing when the breaker opens is held too.
    assert len(closed(scene)) <= BREAKER_TARGETS - len(restarted_before(scene))
    for worker in held(scene):
        assert scene.fleet.incarnation(worker) == first[worker]
        assert scene.store.job(jobs[worker]).state is State.RUNNING
    until(scene, lambda: '"event": "circuit breaker open' in scene.chain.log("execute"), "the open breaker is logged")
    code, status = run(scene, "status")
    assert (code, "circuit breaker open since" in status) == (1, True), status

    gpuwarden(scene, "breaker", "reset", "--reason", "an operator has checked")

    until(
        scene, lambda: all(scene.store.job(job).state is State.COMPLETED for job in jobs.values()), "all jobs are fixed"
    )
    until(scene, lambda: not scene.ledger.episodes.list_open(), "every episode is closed")
    assert {scene.store.job(job).watchdog_retries for job in jobs.values()} == {1}

    def is_healthy() -> bool:
        code, status = run(scene, "status")
        return (code, status.splitlines()[-1]) == (0, "nothing needs an operator")

    until(scene, is_healthy, "status says that nothing needs an operator")


def submit_stalling_job(scene: Stage, worker: str) -> JobId:
    """Submit a job that stalls at its first attempt."""
    return scene.submit(SCRIPT, now=time.time(), stall_timeout_s=3, queue=worker)


def acts(scene: Stage, worker: str) -> list[str]:
    return [f"{entry.act} {entry.what}" for entry in scene.journal(worker)]


def held(scene: Stage) -> set[str]:
    return {each.worker for each in scene.ledger.reports.list_held() if each.reason == "circuit_breaker"}


def closed(scene: Stage) -> set[str]:
    mine = (episode for episode in with_action(scene.ledger.reports.newest()) if episode.worker in CROWD)
    return {episode.worker for episode in mine if episode.closed_at is not None}


def restarted_before(scene: Stage) -> set[str]:
    """The containers that were restarted before the storm, inside the breaker's window."""
    return {worker for worker in (FIRST, PAUSED) if "did stop" in acts(scene, worker)}


def until(scene: Stage, holds: object, what: str) -> None:
    assert callable(holds)
    eventually(holds, what, within_s=90, log=lambda: scene.chain.log_tail("execute"))


def gpuwarden(scene: Stage, *arguments: str) -> str:
    code, output = run(scene, *arguments)
    assert code == 0, output
    return output


def run(scene: Stage, *arguments: str) -> tuple[int, str]:
    """Run a command as an operator does; its exit code and output."""
    chain = scene.chain
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", *arguments],
        env={
            **os.environ,
            "GPUWARDEN_REMEDIATOR_LEDGER": chain.ledger_url,
            "GPUWARDEN_QUEUE_DB": chain.queue_url,
            "GPUWARDEN_REMEDIATOR_PORT": chain.remediator_url.rpartition(":")[2],
            "GPUWARDEN_REMEDIATOR_EXPORTER": chain.exporter_url,
            "GPUWARDEN_REMEDIATOR_PROMETHEUS": chain.prometheus_url,
            "GPUWARDEN_REMEDIATOR_ALERTMANAGER": chain.alertmanager_url,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
