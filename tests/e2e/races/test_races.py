"""Races around one episode: two rules for one stall, and restarts by Docker or by an operator.

One stage with a Docker restart policy on every container, and a worker and a queue for each race. Where a race needs a
certain moment, a part is suspended or a database is locked, as on a machine under load.

A stalled worker is also suspended. Otherwise another of its threads would see the fence within a heartbeat and end the
worker, and Docker would start it before the race begins.
"""

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuwarden.job import JobId, State
from remediator.ledger.reports import EpisodeHistory
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from testbed.workers import DockerFleet, WorkerOptions
from tests.e2e.faulty import busy
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

DEAD_AFTER_S = 5.0
SILENCE_S = 5.0
GRACE_S = 8.0
"""Long enough for the alerts of both rules to fire before the container is down."""

STALL = Script(
    picture="wedge", load_s=0.5, load_mib=8, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2,
    wedge_with_gil=False,
)  # fmt: skip
FINE = Script(picture="fine", load_s=0.2, load_mib=4, steps=2, step_s=0.1)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The stage, and its containers as the engine sees them."""

    stage: Stage
    fleet: DockerFleet

    def submit(self, race: str, script: Script = STALL) -> JobId:
        return self.stage.submit(script, now=time.time(), stall_timeout_s=SILENCE_S, queue=race)

    def list_episodes(self, race: str) -> list[EpisodeHistory]:
        found = self.stage.ledger.reports.newest()
        return with_action([each for each in found if each.worker == worker_of(race)])

    def acts(self, race: str) -> list[str]:
        return [f"{entry.act} {entry.what}" for entry in self.stage.journal(worker_of(race))]

    def lifecycle(self, race: str) -> list[str]:
        """The stops, deaths and starts of a container."""
        return [what for what in self.fleet.history(worker_of(race)) if what in ("start", "stop", "die")]

    def incarnation(self, race: str) -> str:
        return self.fleet.incarnation(worker_of(race))

    def await_completed(self, job_id: JobId, *, within_s: float = 120) -> None:
        self.until(lambda: self.stage.store.job(job_id).state is State.COMPLETED, f"job {job_id} completed", within_s)

    def await_closed(self, race: str, *, episodes: int) -> None:
        def is_over() -> bool:
            found = self.list_episodes(race)
            return len(found) == episodes and all(each.closed_at for each in found)

        self.until(is_over, f"{episodes} episodes are closed")

    def until(self, holds: Callable[[], bool], what: str, within_s: float = 120) -> None:
        eventually(holds, what, within_s=within_s, log=lambda: self.stage.chain.log_tail("execute"))


def worker_of(race: str) -> str:
    return f"gpuwarden-race-{race}"


RACES = ("rules", "after-fence", "before-fence", "by-hand")


@pytest.fixture(scope="module")
def scene(work: Path, engine: Engine) -> Iterator[Scene]:
    with stage(
        work,
        engine,
        [Slot(worker=worker_of(race), gpus=(f"GPU-sim-{race}",)) for race in RACES],
        armed=True,
        dead_after_s=DEAD_AFTER_S,
        stop_grace_s=GRACE_S,
        queues={worker_of(race): race for race in RACES},
        options=WorkerOptions(heartbeat_s=1.0, restart="always"),
    ) as set_up:
        set_up.start_workers()
        fleet = set_up.fleet
        assert isinstance(fleet, DockerFleet)
        yield Scene(stage=set_up, fleet=fleet)


@pytest.mark.behaviour("A14")
@pytest.mark.behaviour("A14b")
def test_stall_that_two_rules_report_is_one_episode_and_one_restart(scene: Scene) -> None:
    before = scene.incarnation("rules")

    job_id = stall_worker(scene, "rules")

    scene.await_closed("rules", episodes=1)
    scene.await_completed(job_id)
    seen = [entry.message for entry in scene.stage.journal(worker_of("rules")) if entry.what == "alert: firing"]
    assert [text for text in seen if "is dead" in text]
    assert [text for text in seen if "is stalled" in text]
    assert [(episode.outcome, episode.attempt) for episode in scene.list_episodes("rules")] == [("fixed", 1)]
    acts = scene.acts("rules")
    assert [acts.count(act) for act in ("did fence", "did stop", "did requeue", "did start")] == [1, 1, 1, 1]
    assert scene.lifecycle("rules") == ["start", "die", "stop", "start"]
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)
    assert scene.incarnation("rules") != before
    events = [json.loads(line) for line in scene.stage.chain.log("exporter").splitlines() if line.startswith("{")]
    # A slow restart may also log that the stopped process ended.
    deaths = [line for line in events if line["event"] == "worker dead: no heartbeat, no CPU time"]
    its = [line for line in deaths if line["worker"] == worker_of("rules")]
    assert [(line["level"], line["job_id"]) for line in its] == [("error", job_id)]


def test_container_that_docker_restarts_after_the_fence_is_not_stopped(scene: Scene) -> None:
    job_id = stall_worker(scene, "after-fence")
    with busy(queue(scene)):
        scene.until(lambda: _waits_to_fence(scene), "the executor waits for the queue to fence")
        # Without evidence the executor does not stop: the confirmation of the fence is not enough.
        scene.stage.chain.signal("exporter", signal.SIGSTOP)
    scene.until(lambda: scene.stage.store.job(job_id).state is State.FENCING, "the job is fenced")

    restarted = kill_and_await_docker(scene, "after-fence")
    scene.stage.chain.signal("exporter", signal.SIGCONT)

    scene.await_closed("after-fence", episodes=1)
    scene.await_completed(job_id)
    assert scene.incarnation("after-fence") == restarted
    assert scene.lifecycle("after-fence") == ["start", "die", "start"]
    acts = scene.acts("after-fence")
    assert [acts.count(act) for act in ("did fence", "did requeue", "decided stop", "decided start")] == [1, 1, 0, 0]
    assert scene.list_episodes("after-fence")[0].outcome == "fixed"
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)


def test_container_that_docker_restarts_before_the_fence_is_not_stopped(scene: Scene) -> None:
    """The restarted worker registers first, which requeues the job of its predecessor. So no job can be fenced."""
    job_id = stall_worker(scene, "before-fence")
    with busy(queue(scene)):
        scene.until(lambda: "decided begin" in scene.acts("before-fence"), "the episode began")
        scene.stage.chain.signal("execute", signal.SIGSTOP)
        restarted = kill_and_await_docker(scene, "before-fence")
    scene.await_completed(job_id)

    scene.stage.chain.signal("execute", signal.SIGCONT)

    scene.await_closed("before-fence", episodes=1)
    assert scene.incarnation("before-fence") == restarted
    assert scene.lifecycle("before-fence") == ["start", "die", "start"]
    acts = scene.acts("before-fence")
    assert [acts.count(act) for act in ("did fence", "did requeue", "decided stop", "decided start")] == [0, 0, 0, 0]
    job = scene.stage.store.job(job_id)
    assert (job.state, job.attempt, job.watchdog_retries, job.reclaims) == (State.COMPLETED, 2, 0, 1)


def test_worker_that_returns_before_the_requeue_cannot_claim_its_job(scene: Scene) -> None:
    job_id = stall_worker(scene, "by-hand")
    scene.until(lambda: "kill" in scene.fleet.history(worker_of("by-hand")), "the engine has the stop request")
    scene.stage.chain.signal("execute", signal.SIGSTOP)
    scene.until(lambda: "stop" in scene.lifecycle("by-hand"), "the container is down")
    assert scene.stage.store.job(job_id).state is State.FENCING

    scene.fleet.start(worker_of("by-hand"))
    restarted = scene.incarnation("by-hand")
    other = scene.submit("by-hand", FINE)
    scene.await_completed(other)  # it works, and claims the jobs that it may

    assert scene.stage.store.job(job_id).state is State.FENCING
    scene.stage.chain.signal("execute", signal.SIGCONT)
    scene.await_completed(job_id)
    scene.await_closed("by-hand", episodes=1)
    assert scene.incarnation("by-hand") == restarted
    assert scene.lifecycle("by-hand") == ["start", "die", "stop", "start"]
    acts = scene.acts("by-hand")
    assert [acts.count(act) for act in ("did fence", "did stop", "did requeue", "decided start")] == [1, 1, 1, 0]
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)


def stall_worker(scene: Scene, race: str) -> JobId:
    """Stall a worker with all its threads."""
    job_id = scene.submit(race)
    scene.until(lambda: scene.stage.armed(worker_of(race)), "the job is monitored")
    with busy(queue(scene)):  # or the worker could be suspended while it holds the write lock
        os.kill(scene.fleet.pid(worker_of(race)), signal.SIGSTOP)
    return job_id


def kill_and_await_docker(scene: Scene, race: str) -> str:
    """Kill a worker's process; return the incarnation that Docker starts."""
    before = scene.incarnation(race)
    os.kill(scene.fleet.pid(worker_of(race)), signal.SIGKILL)
    scene.until(
        lambda: scene.incarnation(race) != before and bool(scene.fleet.pid(worker_of(race))), "the worker runs again"
    )
    return scene.incarnation(race)


def queue(scene: Scene) -> Path:
    return scene.stage.chain.plan.work / "queue" / "queue.db"


def _waits_to_fence(scene: Scene) -> bool:
    """Whether the executor waits for the locked queue: it wrote the intent to settle over a second ago."""
    ledger = scene.stage.chain.plan.work / "ledger" / "ledger.db"
    planned = "SELECT count(*) FROM intents WHERE kind = 'settle' AND stage = 'planned' AND entered_at < ?"
    with closing(sqlite3.connect(ledger, timeout=20)) as connection:
        return bool(connection.execute(planned, (time.time() - 1.0,)).fetchone()[0])
