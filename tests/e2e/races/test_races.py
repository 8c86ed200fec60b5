"""Races round one episode: two rules, two executors, Docker's own restarts, people's, and the next wedge.

One stage with Docker's restart policy on every container, and a worker and a queue for each race. Where a race needs a
moment of its own, a part is suspended or a database kept busy meanwhile, as happens to machines under load.

Whoever wedges is suspended besides. Another of its threads would see the fence within a heartbeat and end the worker,
and Docker would start it before the race has begun.
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
"""So much longer than from one rule's alert to the other's that both fire before the container is down."""

WEDGE = Script(
    picture="wedge", load_s=0.5, load_mib=8, steps=4, step_s=0.2, wedge_attempts=1, wedge_after_step=2,
    wedge_with_gil=False,
)  # fmt: skip
FINE = Script(picture="fine", load_s=0.2, load_mib=4, steps=2, step_s=0.1)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The stage, and its containers as the engine sees them."""

    stage: Stage
    fleet: DockerFleet

    def submit(self, race: str, script: Script = WEDGE) -> JobId:
        return self.stage.submit(script, now=time.time(), stall_timeout_s=SILENCE_S, queue=race)

    def stories(self, race: str) -> list[EpisodeHistory]:
        told = self.stage.ledger.reports.newest()
        return with_action([story for story in told if story.worker == worker_of(race)])

    def acts(self, race: str) -> list[str]:
        return [f"{entry.act} {entry.what}" for entry in self.stage.journal(worker_of(race))]

    def happened(self, race: str) -> list[str]:
        """The stops, deaths and starts of a container."""
        return [what for what in self.fleet.history(worker_of(race)) if what in ("start", "stop", "die")]

    def incarnation(self, race: str) -> str:
        return self.fleet.incarnation(worker_of(race))

    def completed(self, job_id: JobId, *, within_s: float = 120) -> None:
        self.until(lambda: self.stage.store.job(job_id).state is State.COMPLETED, f"job {job_id} completed", within_s)

    def closed(self, race: str, *, episodes: int) -> None:
        def over() -> bool:
            stories = self.stories(race)
            return len(stories) == episodes and all(story.closed_at for story in stories)

        self.until(over, f"{episodes} episodes are over")

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
def test_a_wedge_that_two_rules_report_is_one_episode_one_free_and_one_requeue(scene: Scene) -> None:
    before = scene.incarnation("rules")

    job_id = wedge(scene, "rules")

    scene.closed("rules", episodes=1)
    scene.completed(job_id)
    seen = [entry.message for entry in scene.stage.journal(worker_of("rules")) if entry.what == "alert: firing"]
    assert [text for text in seen if "is dead" in text]
    assert [text for text in seen if "is stalled" in text]
    assert [(story.outcome, story.attempt) for story in scene.stories("rules")] == [("mended", 1)]
    acts = scene.acts("rules")
    assert [acts.count(act) for act in ("did fence", "did stop", "did requeue", "did start")] == [1, 1, 1, 1]
    assert scene.happened("rules") == ["start", "die", "stop", "start"]
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)
    assert scene.incarnation("rules") != before
    told = [json.loads(line) for line in scene.stage.chain.log("exporter").splitlines() if line.startswith("{")]
    deaths = [line for line in told if line["event"].startswith("worker dead")]
    its = [line for line in deaths if line["worker"] == worker_of("rules")]
    assert [(line["level"], line["job_id"]) for line in its] == [("error", job_id)]


def test_a_container_that_docker_restarts_after_the_fence_is_not_stopped(scene: Scene) -> None:
    job_id = wedge(scene, "after-fence")
    with busy(queue(scene)):
        scene.until(lambda: _fence_in_hand(scene), "the executor waits for the queue to fence")
        # No evidence, no stop: what was confirmed for the fence is not confirmed for the stop.
        scene.stage.chain.signal("exporter", signal.SIGSTOP)
    scene.until(lambda: scene.stage.store.job(job_id).state is State.FENCING, "the job is fenced")

    reborn = restarted_by_docker(scene, "after-fence")
    scene.stage.chain.signal("exporter", signal.SIGCONT)

    scene.closed("after-fence", episodes=1)
    scene.completed(job_id)
    assert scene.incarnation("after-fence") == reborn
    assert scene.happened("after-fence") == ["start", "die", "start"]
    acts = scene.acts("after-fence")
    assert [acts.count(act) for act in ("did fence", "did requeue", "decided stop", "decided start")] == [1, 1, 0, 0]
    assert scene.stories("after-fence")[0].outcome == "mended"
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)


def test_a_container_that_docker_restarts_before_the_fence_is_not_stopped(scene: Scene) -> None:
    """The reborn worker registers first, which queues the job that its predecessor held: there is nothing to fence."""
    job_id = wedge(scene, "before-fence")
    with busy(queue(scene)):
        scene.until(lambda: "decided begin" in scene.acts("before-fence"), "the episode began")
        scene.stage.chain.signal("execute", signal.SIGSTOP)
        reborn = restarted_by_docker(scene, "before-fence")
    scene.completed(job_id)

    scene.stage.chain.signal("execute", signal.SIGCONT)

    scene.closed("before-fence", episodes=1)
    assert scene.incarnation("before-fence") == reborn
    assert scene.happened("before-fence") == ["start", "die", "start"]
    acts = scene.acts("before-fence")
    assert [acts.count(act) for act in ("did fence", "did requeue", "decided stop", "decided start")] == [0, 0, 0, 0]
    job = scene.stage.store.job(job_id)
    assert (job.state, job.attempt, job.watchdog_retries, job.reclaims) == (State.COMPLETED, 2, 0, 1)


def test_a_worker_that_is_back_before_the_requeue_cannot_claim_the_fenced_job(scene: Scene) -> None:
    job_id = wedge(scene, "by-hand")
    scene.until(lambda: "kill" in scene.fleet.history(worker_of("by-hand")), "the engine was asked for the stop")
    scene.stage.chain.signal("execute", signal.SIGSTOP)
    scene.until(lambda: "stop" in scene.happened("by-hand"), "the container is down")
    assert scene.stage.store.job(job_id).state is State.FENCING

    scene.fleet.start(worker_of("by-hand"))
    reborn = scene.incarnation("by-hand")
    other = scene.submit("by-hand", FINE)
    scene.completed(other)  # so it is well, and claims what it may

    assert scene.stage.store.job(job_id).state is State.FENCING
    scene.stage.chain.signal("execute", signal.SIGCONT)
    scene.completed(job_id)
    scene.closed("by-hand", episodes=1)
    assert scene.incarnation("by-hand") == reborn
    assert scene.happened("by-hand") == ["start", "die", "stop", "start"]
    acts = scene.acts("by-hand")
    assert [acts.count(act) for act in ("did fence", "did stop", "did requeue", "decided start")] == [1, 1, 1, 0]
    job = scene.stage.store.job(job_id)
    assert (job.attempt, job.watchdog_retries, job.reclaims) == (2, 1, 0)


def wedge(scene: Scene, race: str) -> JobId:
    """Have a worker wedge, with every thread of it."""
    job_id = scene.submit(race)
    scene.until(lambda: scene.stage.armed(worker_of(race)), "the job is armed")
    with busy(queue(scene)):  # or it might be suspended while it writes, and keep everybody from the queue
        os.kill(scene.fleet.pid(worker_of(race)), signal.SIGSTOP)
    return job_id


def restarted_by_docker(scene: Scene, race: str) -> str:
    """Kill a worker's process from outside; the incarnation that Docker made by itself."""
    before = scene.incarnation(race)
    os.kill(scene.fleet.pid(worker_of(race)), signal.SIGKILL)
    scene.until(lambda: scene.incarnation(race) != before and bool(scene.fleet.pid(worker_of(race))), "it runs again")
    return scene.incarnation(race)


def queue(scene: Scene) -> Path:
    return scene.stage.chain.plan.work / "queue" / "queue.db"


def _fence_in_hand(scene: Scene) -> bool:
    """Whether the executor waits for the locked queue to fence: it promised a settle over a second ago."""
    ledger = scene.stage.chain.plan.work / "ledger" / "ledger.db"
    promised = "SELECT count(*) FROM intents WHERE kind = 'settle' AND stage = 'planned' AND entered_at < ?"
    with closing(sqlite3.connect(ledger, timeout=20)) as connection:
        return bool(connection.execute(promised, (time.time() - 1.0,)).fetchone()[0])
