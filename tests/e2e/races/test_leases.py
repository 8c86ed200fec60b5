"""Races with a lease: a late alert, a worker that resumes late, and a GPU that is still held.

Leases and timeouts take long, so all three races begin together on one stage.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.job import EXIT_DISOWNED, REQUEUE_PRIORITY, JobId, State
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage
from testbed.workers import DockerFleet, WorkerOptions
from tests.e2e.faulty import busy
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

SILENCE_S = 5.0
NEVER_S = 3600.0
TIMEOUT_S = 16.0
RACES = ("late-alert", "late-worker", "unkillable")

STEADY = Script(picture="steady", load_s=0.5, load_mib=8, steps=20, step_s=0.25)
STALL = Script(picture="wedge", load_s=0.5, load_mib=8, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2)
FINE = Script(picture="fine", load_s=0.2, load_mib=4, steps=2, step_s=0.1)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The stage, its containers, and the job that the first worker of each race holds."""

    stage: Stage
    fleet: DockerFleet
    jobs: dict[str, JobId]

    def until(self, holds: Callable[[], bool], what: str, within_s: float = 120) -> None:
        eventually(holds, what, within_s=within_s, log=lambda: self.stage.chain.log_tail("execute"))

    def completed(self, job_id: JobId) -> None:
        self.until(lambda: self.stage.store.job(job_id).state is State.COMPLETED, f"job {job_id} completed")

    def lifecycle(self, worker: str) -> list[str]:
        return [what for what in self.fleet.history(worker) if what in ("start", "stop", "die")]

    def acts(self, worker: str) -> list[str]:
        return [f"{entry.act} {entry.what}" for entry in self.stage.journal(worker)]


def first(race: str) -> str:
    return f"gpuwarden-lease-{race}-first"


def second(race: str) -> str:
    return f"gpuwarden-lease-{race}-second"


def gpu(worker: str) -> str:
    return f"GPU-{worker}"


@pytest.fixture(scope="module")
def scene(work: Path, engine: Engine) -> Iterator[Scene]:
    workers = [worker(race) for race in RACES for worker in (first, second)]
    with stage(
        work,
        engine,
        [Slot(worker=worker, gpus=(gpu(worker),)) for worker in workers],
        armed=True,
        dead_after_s=NEVER_S,
        stop_grace_s=1.0,
        settle_timeout_s=TIMEOUT_S,
        restart_timeout_s=TIMEOUT_S,
        sweep_interval_s=1.0,
        queues={worker(race): race for race in RACES for worker in (first, second)},
        options=WorkerOptions(heartbeat_s=1.0, lease_s=5.0),
    ) as set_up:
        fleet = set_up.fleet
        assert isinstance(fleet, DockerFleet)
        scene = Scene(stage=set_up, fleet=fleet, jobs={})
        begin(scene)
        yield scene


def begin(scene: Scene) -> None:
    """Let the first worker of each race claim its job and stall. The second worker starts only then."""
    silence(scene, first("late-alert"))
    silences = {"late-alert": SILENCE_S, "late-worker": NEVER_S, "unkillable": SILENCE_S}
    scripts = {"late-alert": STEADY, "late-worker": STEADY, "unkillable": STALL}
    for race in RACES:
        scene.jobs[race] = scene.stage.submit(
            replace(scripts[race], picture=race), now=time.time(), stall_timeout_s=silences[race], queue=race
        )
        scene.fleet.start(first(race))
    scene.until(lambda: all(scene.stage.armed(first(race)) for race in RACES), "every job is monitored")
    # Otherwise a worker could be suspended while it holds the write lock of the queue.
    with busy(scene.stage.chain.plan.work / "queue" / "queue.db"):
        for race in ("late-alert", "late-worker"):
            os.kill(scene.fleet.pid(first(race)), signal.SIGSTOP)
    scene.stage.gpus.stuck = {gpu(first("unkillable")): scene.fleet.pid(first("unkillable"))}
    for race in RACES:
        scene.fleet.start(second(race))


def test_late_alert_restarts_the_container_and_leaves_the_job(scene: Scene) -> None:
    job_id, worker = scene.jobs["late-alert"], first("late-alert")
    scene.completed(job_id)
    before, other = scene.fleet.incarnation(worker), scene.fleet.incarnation(second("late-alert"))
    assert scene.acts(worker) == []

    remove_silence(scene, worker)

    scene.until(lambda: "decided close: fixed" in scene.acts(worker), "the episode is closed")
    assert scene.lifecycle(worker) == ["start", "die", "stop", "start"]
    assert scene.fleet.incarnation(worker) != before
    assert not [act for act in scene.acts(worker) if act in ("did fence", "did requeue", "did fail")]
    job = scene.stage.store.job(job_id)
    assert (job.state, job.attempt, job.watchdog_retries, job.reclaims) == (State.COMPLETED, 2, 0, 1)
    assert scene.fleet.incarnation(second("late-alert")) == other
    again = scene.stage.submit(FINE, now=time.time(), stall_timeout_s=SILENCE_S, queue="late-alert")
    scene.completed(again)


@pytest.mark.behaviour("A11")
@pytest.mark.behaviour("A13")
def test_worker_that_resumes_without_its_claim_exits_and_writes_nothing(scene: Scene) -> None:
    job_id, worker = scene.jobs["late-worker"], first("late-worker")
    scene.completed(job_id)
    record, output = scene.stage.store.job(job_id), scene.stage.data / "late-worker.clean.pgm"
    written = output.stat()

    os.kill(scene.fleet.pid(worker), signal.SIGCONT)

    scene.until(lambda: not scene.fleet.pid(worker), "the worker has exited")
    assert scene.fleet.container(worker).attrs["State"]["ExitCode"] == EXIT_DISOWNED
    assert "this worker no longer owns its job" in scene.fleet.logs(worker)
    assert (record.attempt, record.reclaims, record.watchdog_retries) == (2, 1, 0)
    assert record.priority == REQUEUE_PRIORITY
    assert scene.stage.store.job(job_id) == record
    assert output.stat() == written
    assert scene.acts(worker) == []


def test_gpu_of_an_unkillable_process_is_quarantined_until_released(scene: Scene) -> None:
    job_id, worker, other = scene.jobs["unkillable"], first("unkillable"), second("unkillable")
    scene.completed(job_id)
    scene.until(lambda: "did quarantine" in scene.acts(worker), "the GPU is in quarantine")
    scene.until(
        lambda: (
            [(each.worker, each.reason) for each in scene.stage.ledger.reports.list_held()] == [(worker, "given_up")]
        ),
        "the restart is given up",
    )
    assert [found["gpu"] for found in list_gpus(scene)] == [gpu(worker)]
    assert [entry.message for entry in scene.stage.journal(worker) if entry.step == "requeue"] == [
        f"stall: retry 1 of 3 (not seen dead within {TIMEOUT_S:.0f} s)"
    ]
    assert scene.lifecycle(worker) == ["start", "die", "stop"]

    scene.stage.gpus.stuck = {}
    busy = scene.stage.submit(replace(STEADY, steps=400), now=time.time(), stall_timeout_s=NEVER_S, queue="unkillable")
    scene.until(lambda: scene.stage.store.job(busy).worker == other, "the other worker has a job")
    scene.fleet.start(worker)
    scene.until(lambda: not scene.stage.ledger.episodes.list_open(), "the episode ends when its worker runs")
    waiting = scene.stage.submit(FINE, now=time.time(), stall_timeout_s=NEVER_S, queue="unkillable")
    scene.until(
        lambda: "is in quarantine: it claims nothing" in scene.fleet.logs(worker),
        "the quarantined worker claims nothing",
    )
    assert scene.stage.store.job(waiting).state is State.QUEUED

    assert gpuwarden("gpu", "release", gpu(worker), "--queue-db", scene.stage.chain.queue_url).returncode == 0
    assert list_gpus(scene) == []
    scene.completed(waiting)
    assert f'"job_id": {waiting},' in scene.fleet.logs(worker)
    assert scene.stage.store.job(busy).worker == other


def list_gpus(scene: Scene) -> list[dict[str, Any]]:
    """The rows of `gpuwarden gpu list`."""
    found = gpuwarden("gpu", "list", "--json", "--queue-db", scene.stage.chain.queue_url)
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def gpuwarden(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuwarden", *arguments], capture_output=True, text=True, timeout=180, check=False
    )


def silence(scene: Scene, worker: str) -> None:
    """Silence every alert about a worker in Alertmanager."""
    now = datetime.now(tz=UTC)
    scene.stage.chain.http.post(
        f"{scene.stage.chain.alertmanager_url}/api/v2/silences",
        json={
            "matchers": [{"name": "worker", "value": worker, "isRegex": False, "isEqual": True}],
            "startsAt": now.isoformat(),
            "endsAt": (now + timedelta(hours=1)).isoformat(),
            "createdBy": "an operator",
            "comment": "not now",
        },
    ).raise_for_status()


def remove_silence(scene: Scene, worker: str) -> None:
    """Remove the silence while the alert is active."""
    chain = scene.stage.chain

    def is_suppressed() -> bool:
        alerts = chain.http.get(
            f"{chain.alertmanager_url}/api/v2/alerts", params={"filter": f'worker="{worker}"'}
        ).json()
        return [alert["status"]["state"] for alert in alerts] == ["suppressed"]

    scene.until(is_suppressed, "Alertmanager suppresses the alert")
    for found in chain.http.get(f"{chain.alertmanager_url}/api/v2/silences").json():
        chain.http.delete(f"{chain.alertmanager_url}/api/v2/silence/{found['id']}").raise_for_status()
