"""kill -9 of both remediator processes at random while it restarts workers: each worker is restarted exactly once.

`test_killed_executor` kills at every commit. Here the alerts come through the real pipeline, all workers share one
ledger, and a killed process is started again at once.
"""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuwarden.job import JobId, State
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage
from testbed.workers import DockerFleet
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.nightly]

WORKERS = tuple(f"gpuwarden-night-{number}" for number in range(8))
STALL = Script(picture="night", load_s=0.2, load_mib=1, steps=3, step_s=0.2, wedge_attempts=1, wedge_after_step=1)
SILENCE_S = 3.0
KILLED_FOR_S = 25.0
"""How long a process is killed every second or so."""

RUN_S = (0.3, 2.5)
"""Shortest and longest run between two kills. A start takes over a second of it."""


@dataclass(frozen=True, kw_only=True)
class Night:
    """The stage once every job is fixed."""

    scene: Stage
    fleet: DockerFleet
    jobs: dict[str, JobId]
    kills: list[str]
    """The processes that were killed while an episode was open, in order."""


@pytest.fixture(scope="module")
def night(work: Path, engine: Engine) -> Iterator[Night]:
    slots = [Slot(worker=worker, gpus=(f"GPU-{worker}",)) for worker in WORKERS]
    queues = {worker: worker for worker in WORKERS}
    with stage(work, engine, slots, armed=True, stop_grace_s=1.0, queues=queues) as scene:
        assert isinstance(scene.fleet, DockerFleet)
        scene.start_workers()
        now = time.time()
        jobs = {worker: scene.submit(STALL, now=now, stall_timeout_s=SILENCE_S, queue=worker) for worker in WORKERS}
        eventually(lambda: bool(scene.ledger.reports.newest()), "the first episode is open", within_s=60)
        kills = _kill_at_random(scene, random.Random(0))  # noqa: S311 - moments, no secret
        eventually(
            lambda: (
                all(scene.store.job(job_id).state is State.COMPLETED for job_id in jobs.values())
                and not scene.ledger.episodes.list_open()
            ),
            "all jobs are fixed",
            within_s=150,
            log=lambda: scene.chain.log_tail("execute"),
        )
        yield Night(scene=scene, fleet=scene.fleet, jobs=jobs, kills=kills)


def _kill_at_random(scene: Stage, draw: random.Random) -> list[str]:
    kills: list[str] = []
    until_s = time.monotonic() + KILLED_FOR_S
    while time.monotonic() < until_s:
        part = draw.choice(("execute", "execute", "serve"))
        if scene.ledger.episodes.list_open():
            kills.append(part)
        scene.chain.kill(part)
        scene.chain.start(part)
        threading.Event().wait(draw.uniform(*RUN_S))
    return kills


def test_both_processes_are_killed_while_an_episode_is_open(night: Night) -> None:
    assert len(night.kills) >= 5
    assert set(night.kills) == {"execute", "serve"}


@pytest.mark.parametrize("worker", WORKERS)
def test_container_stops_once_and_is_started_once(night: Night, worker: str) -> None:
    history = night.fleet.history(worker)

    assert [event for event in history if event in ("start", "die", "restart")] == ["start", "die", "start"], history


@pytest.mark.parametrize("worker", WORKERS)
def test_job_is_requeued_once_and_finished(night: Night, worker: str) -> None:
    job = night.scene.store.job(night.jobs[worker])

    assert (job.state, job.attempt, job.watchdog_retries, job.reclaims) == (State.COMPLETED, 2, 1, 0)


def test_each_worker_is_fixed_by_one_episode(night: Night) -> None:
    workers = [each.worker for each in night.scene.ledger.reports.newest(last=1000) if each.outcome == "fixed"]

    assert sorted(workers) == sorted(WORKERS)
