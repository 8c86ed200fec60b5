"""A machine that was suspended, and clocks that were set: neither is a worker's fault, and nobody is accused.

Everything is suspended as a hypervisor does it, all at once and for longer than every threshold. Beside it run jobs
whose own wall clock is set by ten minutes, ahead and back, after their first step.
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
"""Longer than a busy machine keeps one from its work, or us from waking all of them."""

SUSPENDED_S = 14.0
STEP_S = 600.0

HEALTHY = Script(picture="steady", load_s=0.5, load_mib=8, steps=80, step_s=0.25)
WEDGE = Script(picture="wedge", load_s=0.5, load_mib=8, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2)
SCRIPTS = {
    "steady": HEALTHY,
    "ahead": replace(HEALTHY, picture="ahead", clock_step_s=STEP_S),
    "back": replace(HEALTHY, picture="back", clock_step_s=-STEP_S),
}


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The stage after a suspend, once the jobs that ran meanwhile have ended."""

    stage: Stage
    fleet: DockerFleet
    before: dict[str, str]
    jobs: dict[str, JobId]
    clocks_off_s: dict[str, float]
    slept_s: float

    def accused(self, name: str) -> list[str]:
        """The episodes and alerts about a worker, and what became of its container and its job's attempt.

        What has a remedy counts as soon as it is pending; what people are told, once they are.
        """
        found = [
            f"episode {story.outcome}"
            for story in self.stage.ledger.reports.newest()
            if story.worker == worker_of(name)
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
        # Long leases: with a queue in SQLite they go by the clock that is set back.
        options=WorkerOptions(heartbeat_s=1.0, lease_s=10 * STEP_S),
    ) as scene:
        fleet = scene.fleet
        assert isinstance(fleet, DockerFleet)
        jobs = {
            name: scene.submit(script, now=time.time(), stall_timeout_s=SILENCE_S, queue=name)
            for name, script in SCRIPTS.items()
        }
        before = scene.start_workers()
        until(scene, lambda: all(scene.armed(worker_of(name)) for name in SCRIPTS), "every job is armed")
        until(scene, lambda: all(clock_off_s(scene, name) for name in ("ahead", "back")), "both clocks were set")
        clocks_off_s = {name: clock_off_s(scene, name) for name in SCRIPTS}
        slept_s = suspend(scene, fleet)
        until(
            scene, lambda: all(scene.store.job(job_id).state is State.COMPLETED for job_id in jobs.values()), "all ran"
        )
        yield Resumed(stage=scene, fleet=fleet, before=before, jobs=jobs, clocks_off_s=clocks_off_s, slept_s=slept_s)


def suspend(scene: Stage, fleet: DockerFleet) -> float:
    """Stop everything for a while, and let it go on; for how long nobody ran, seconds."""
    pids = [fleet.pid(slot.worker) for slot in scene.slots]
    for part in PARTS:
        scene.chain.signal(part, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    eventually(lambda: time.monotonic() - began_s > SUSPENDED_S, "the suspend is over", within_s=2 * SUSPENDED_S)
    slept_s = time.monotonic() - began_s
    # What observes and decides wakes first, and finds everybody silent.
    for part in reversed(PARTS):
        scene.chain.signal(part, signal.SIGCONT)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return slept_s


def clock_off_s(scene: Stage, name: str) -> float:
    """How far a worker's clock is ahead of ours by its heartbeats, in whole minutes, seconds."""
    found = scene.chain.query(f'gpuwarden_worker_heartbeat_timestamp_seconds{{worker="{worker_of(name)}"}}')
    return 60.0 * round((float(found[0]["value"][1]) - time.time()) / 60) if found else 0.0


def until(scene: Stage, holds: Callable[[], bool], what: str) -> None:
    eventually(holds, what, within_s=120, log=lambda: scene.chain.log_tail("execute"))


def test_after_a_suspend_nobody_is_accused_and_what_ran_runs_on_to_its_end(resumed: Resumed) -> None:
    assert resumed.slept_s > max(SILENCE_S, DEAD_AFTER_S)
    assert resumed.accused("steady") == []


@pytest.mark.parametrize(("name", "off_s"), [("ahead", STEP_S), ("back", -STEP_S)])
def test_a_clock_that_was_set_by_ten_minutes_accuses_nobody(resumed: Resumed, name: str, off_s: float) -> None:
    assert resumed.clocks_off_s[name] == off_s
    assert resumed.accused(name) == []


def test_wedges_in_the_same_set_up_are_mended(resumed: Resumed) -> None:  # the positive control
    scene = resumed.stage
    wedges = {
        name: scene.submit(
            replace(WEDGE, picture=f"wedge-{name}", clock_step_s=script.clock_step_s),
            now=time.time(),
            stall_timeout_s=SILENCE_S,
            queue=name,
        )
        for name, script in SCRIPTS.items()
    }

    until(scene, lambda: all(scene.store.job(each).state is State.COMPLETED for each in wedges.values()), "mended")
    assert {name: scene.store.job(each).attempt for name, each in wedges.items()} == dict.fromkeys(SCRIPTS, 2)
    assert all(resumed.fleet.incarnation(worker) != before for worker, before in resumed.before.items())
