"""A job that stalls at every attempt is requeued three times. The fourth stall fails the job and its run.

An ingest job that exceeds its budget is not retried.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.job import FINAL, Condition, JobClass, State
from gpuwarden.queue import Submission
from testbed.demo.job_body import Script
from testbed.docker_engine import Engine
from testbed.gpu_simulator import Slot
from testbed.stage import Stage, stage, with_action
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_docker, pytest.mark.needs_parts, pytest.mark.slow]

WORKER, INGESTER = "gpuwarden-cap-a", "gpuwarden-cap-ingest"
SCRIPT = Script(picture="hopeless", load_s=0.5, load_mib=8, steps=3, step_s=0.2, wedge_attempts=99, wedge_after_step=2)
SWEEP = Script(picture="sweep", load_s=0.2, load_mib=4, steps=1000, step_s=0.1)
BUDGET_S = 4.0


@pytest.fixture(scope="module")
def ended(work: Path, engine: Engine) -> Iterator[Stage]:
    with stage(
        work,
        engine,
        [Slot(worker=WORKER, gpus=("GPU-sim-cap",)), Slot(worker=INGESTER, gpus=("GPU-sim-ingest",))],
        armed=True,
        stop_grace_s=1.0,
        queues={INGESTER: "fetch"},
    ) as scene:
        job_id = scene.submit(SCRIPT, now=time.time(), stall_timeout_s=3, run_id="doomed")
        sibling_id = scene.submit(SCRIPT, now=time.time(), stall_timeout_s=3, run_id="doomed", queue="without-worker")
        sweep = Submission(queue="fetch", payload=SWEEP.payload(), model="denoiser", budget_s=BUDGET_S)
        scene.draw(SWEEP)
        ingest_id = scene.store.runs.submit(sweep, now=time.time())
        scene.start_workers()
        eventually(
            lambda: (
                # The next sweep cancels the sibling, maybe after the episodes are closed.
                all(scene.store.job(each).state in FINAL for each in (job_id, sibling_id, ingest_id))
                and not scene.ledger.episodes.list_open()
            ),
            within_s=180,
            what="the jobs ended",
            log=lambda: scene.chain.log_tail("execute"),
        )
        yield scene


@pytest.mark.behaviour("A8")
def test_three_stalls_requeue_the_job_and_the_fourth_fails_it(ended: Stage) -> None:
    job = ended.store.job(1)

    assert (job.state, job.attempt, job.watchdog_retries) == (State.FAILED, 4, 3)
    settles = [
        entry.step
        for episode in ended.ledger.reports.newest()
        if episode.worker == WORKER
        for entry in ended.ledger.reports.get(episode.episode_id).entries  # type: ignore[union-attr]
        if entry.act == "did" and entry.step in ("requeue", "fail")
    ]
    assert settles == ["requeue", "requeue", "requeue", "fail"]


@pytest.mark.behaviour("A10")
def test_failed_event_is_written_once_and_fails_the_run(ended: Stage) -> None:
    assert ended.store.outbox.events_of(1) == ["failed", "run_failed"]
    assert ended.store.runs.state("doomed") == "failed"
    assert ended.store.job(2).state is State.CANCELLED
    assert ended.store.outbox.events_of(2) == ["cancelled"]


@pytest.mark.behaviour("A17")
def test_ingest_job_over_its_budget_fails_without_a_retry(ended: Stage) -> None:
    (job,) = [job for job in ended.store.jobs() if job.queue == "fetch"]

    assert (job.job_class, job.state, job.attempt, job.watchdog_retries) == (JobClass.INGEST_FETCH, State.FAILED, 1, 0)
    assert job.reason is not None
    assert "jobs of its class are not retried" in job.reason
    (episode,) = [episode for episode in with_action(ended.ledger.reports.newest()) if episode.worker == INGESTER]
    assert (episode.condition, episode.outcome) == (Condition.BUDGET, "fixed")


def test_each_stall_of_one_container_is_a_separate_episode(ended: Stage) -> None:
    episodes = [episode for episode in with_action(ended.ledger.reports.newest()) if episode.worker == WORKER]

    assert [episode.attempt for episode in episodes] == [1, 2, 3, 4]
    assert {episode.outcome for episode in episodes} == {"fixed"}


def test_worker_completes_another_job_after_the_failed_one(ended: Stage) -> None:
    job_id = ended.submit(
        Script(picture="fine", load_s=0.2, load_mib=4, steps=2, step_s=0.1), now=time.time(), stall_timeout_s=30
    )

    eventually(lambda: ended.store.job(job_id).state is State.COMPLETED, within_s=60, what="another job completed")
