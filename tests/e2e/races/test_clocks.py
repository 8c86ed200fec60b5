"""A suspended machine, and clocks that were set: no worker is restarted for either.

Everything is suspended at once, as by a hypervisor, for longer than every threshold. Other jobs have a wall clock that
is set ahead or back by ten minutes after their first step.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deploy.standalone.stack import PARTS
from gpuwarden.job import JobId, State
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage
from testbed.workers import DockerFleet, WorkerOptions
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

DEAD_AFTER_S = 6.0
SILENCE_S = 8.0
"""Longer than a busy machine delays a process, or delays the test that resumes all of them."""

SUSPENDED_S = 14.0
STEP_S = 600.0

HEALTHY = Script(picture="steady", load_s=0.5, load_mib=8, steps=80, step_s=0.25)
STALL = Script(picture="wedge", load_s=0.5, load_mib=8, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2)
SCRIPTS = {
    "steady": HEALTHY,
    "ahead": replace(HEALTHY, picture="ahead", clock_step_s=STEP_S),
    "back": replace(HEALTHY, picture="back", clock_step_s=-STEP_S),
}


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The stage after a suspend, once the jobs that ran during it have ended."""

    stage: Stage
    fleet: DockerFleet
    before: dict[str, str]
    jobs: dict[str, JobId]
    clocks_off_s: dict[str, float]
    slept_s: float

    def list_suspicions(self, name: str) -> list[str]:
        """Everything that shows that a worker was suspected: episodes, alerts, a restart or another attempt.

        An alert with a remedy counts as soon as it is pending, and a notification once it fires.
        """
        found = [
            f"episode {episode.outcome}"
            for episode in self.stage.ledger.reports.newest()
            if episode.worker == worker_of(name)
        ]
        for counts in ('remedy!=""', 'remedy="", alertstate="firing"'):
            query = f'last_over_time(ALERTS{{worker="{worker_of(name)}", {counts}}}[10m])'
            found += [row["metric"]["alertname"] for row in self.stage.chain.query(query)]
        if self.fleet.incarnation(worker_of(name)) != self.before[worker_of(name)]:
            found.append("another incarnation")
        job = self.stage.store.job(self.jobs[name])
        return found if (job.state, job.attempt) == (State.COMPLETED, 1) else [*found, f"{job.state} {job.attempt}"]


def worker_of(name: str) -> str:
    return f"gpuwarden-clock-{name}"


@pytest.fixture(scope="module")
def resumed(work: Path, engine: Engine) -> Iterator[Resumed]:
    with stage(
        work,
        engine,
        [Slot(worker=worker_of(name), gpus=(f"GPU-sim-{name}",)) for name in SCRIPTS],
        armed=True,
        dead_after_s=DEAD_AFTER_S,
        stop_grace_s=1.0,
        queues={worker_of(name): name for name in SCRIPTS},
        # Long leases: with SQLite a lease depends on the clock that is set back.
        options=WorkerOptions(heartbeat_s=1.0, lease_s=10 * STEP_S),
    ) as scene:
        fleet = scene.fleet
        assert isinstance(fleet, DockerFleet)
        jobs = {
            name: scene.submit(script, now=time.time(), stall_timeout_s=SILENCE_S, queue=name)
            for name, script in SCRIPTS.items()
        }
        before = scene.start_workers()
        until(scene, lambda: all(scene.armed(worker_of(name)) for name in SCRIPTS), "every job is monitored")
        until(scene, lambda: all(clock_off_s(scene, name) for name in ("ahead", "back")), "both clocks are set")
        clocks_off_s = {name: clock_off_s(scene, name) for name in SCRIPTS}
        slept_s = suspend(scene, fleet)
        until(
            scene,
            lambda: all(scene.store.job(job_id).state is State.COMPLETED for job_id in jobs.values()),
            "all jobs are done",
        )
        yield Resumed(stage=scene, fleet=fleet, before=before, jobs=jobs, clocks_off_s=clocks_off_s, slept_s=slept_s)


def suspend(scene: Stage, fleet: DockerFleet) -> float:
    """Suspend every process and resume it; return the length of the suspend, seconds."""
    pids = [fleet.pid(slot.worker) for slot in scene.slots]
    for part in PARTS:
        scene.chain.signal(part, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    eventually(lambda: time.monotonic() - began_s > SUSPENDED_S, "the suspend is over", within_s=2 * SUSPENDED_S)
    slept_s = time.monotonic() - began_s
    # The monitoring resumes first and finds every worker silent.
    for part in reversed(PARTS):
        scene.chain.signal(part, signal.SIGCONT)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return slept_s


def clock_off_s(scene: Stage, name: str) -> float:
    """How far a worker's clock is ahead, from its heartbeats, in seconds, rounded to minutes."""
    found = scene.chain.query(f'gpuwarden_worker_heartbeat_timestamp_seconds{{worker="{worker_of(name)}"}}')
    return 60.0 * round((float(found[0]["value"][1]) - time.time()) / 60) if found else 0.0


def until(scene: Stage, holds: Callable[[], bool], what: str) -> None:
    eventually(holds, what, within_s=120, log=lambda: scene.chain.log_tail("execute"))


def test_job_completes_after_a_suspend_without_a_restart(resumed: Resumed) -> None:
    assert resumed.slept_s > max(SILENCE_S, DEAD_AFTER_S)
    assert resumed.list_suspicions("steady") == []


@pytest.mark.parametrize(("name", "off_s"), [("ahead", STEP_S), ("back", -STEP_S)])
def test_job_with_a_changed_clock_is_not_restarted(resumed: Resumed, name: str, off_s: float) -> None:
    assert resumed.clocks_off_s[name] == off_s
    assert resumed.list_suspicions(name) == []


def test_stalled_jobs_in_the_same_setup_are_fixed(resumed: Resumed) -> None:  # the control
    scene = resumed.stage
    stalling_jobs = {
        name: scene.submit(
            replace(STALL, picture=f"wedge-{name}", clock_step_s=script.clock_step_s),
            now=time.time(),
            stall_timeout_s=SILENCE_S,
            queue=name,
        )
        for name, script in SCRIPTS.items()
    }

    until(
        scene,
        lambda: all(scene.store.job(each).state is State.COMPLETED for each in stalling_jobs.values()),
        "the stalled jobs are fixed",
    )
    assert {name: scene.store.job(each).attempt for name, each in stalling_jobs.items()} == dict.fromkeys(SCRIPTS, 2)
    assert all(resumed.fleet.incarnation(worker) != before for worker, before in resumed.before.items())
