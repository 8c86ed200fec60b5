"""A job that wedges at every attempt: three requeues, and the fourth trip fails it and its run.

Beside it an ingest job that goes over its budget, which is not tried again.
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
        sibling_id = scene.submit(SCRIPT, now=time.time(), stall_timeout_s=3, run_id="doomed", queue="served-by-nobody")
        sweep = Submission(queue="fetch", payload=SWEEP.payload(), model="denoiser", budget_s=BUDGET_S)
        scene.draw(SWEEP)
        ingest_id = scene.store.runs.submit(sweep, now=time.time())
        scene.start_workers()
        eventually(
            lambda: (
                # The sibling is cancelled by the next sweep, which may come when all else is over.
                all(scene.store.job(each).state in FINAL for each in (job_id, sibling_id, ingest_id))
                and not scene.ledger.episodes.list_open()
            ),
            within_s=180,
            what="the job ended",
            log=lambda: scene.chain.log_tail("execute"),
        )
        yield scene


@pytest.mark.behaviour("A8")
def test_three_trips_requeue_and_the_fourth_fails(ended: Stage) -> None:
    job = ended.store.job(1)

    assert (job.state, job.attempt, job.watchdog_retries) == (State.FAILED, 4, 3)
    settles = [
        entry.step
        for story in ended.ledger.reports.newest()
        if story.worker == WORKER
        for entry in ended.ledger.reports.get(story.episode_id).entries  # type: ignore[union-attr]
        if entry.act == "did" and entry.step in ("requeue", "fail")
    ]
    assert settles == ["requeue", "requeue", "requeue", "fail"]


@pytest.mark.behaviour("A10")
def test_the_failed_event_is_written_once_and_its_consumer_fails_the_run_and_cancels_the_siblings(ended: Stage) -> None:
    assert ended.store.outbox.dispatch_events(1) == ["failed", "run_failed"]
    assert ended.store.runs.state("doomed") == "failed"
    assert ended.store.job(2).state is State.CANCELLED
    assert ended.store.outbox.dispatch_events(2) == ["cancelled"]


@pytest.mark.behaviour("A17")
def test_an_ingest_job_that_is_tripped_is_marked_failed_and_not_tried_again(ended: Stage) -> None:
    (job,) = [job for job in ended.store.jobs() if job.queue == "fetch"]

    assert (job.job_class, job.state, job.attempt, job.watchdog_retries) == (JobClass.INGEST_FETCH, State.FAILED, 1, 0)
    assert job.because is not None
    assert "jobs of its class are not retried" in job.because
    (story,) = [story for story in with_action(ended.ledger.reports.newest()) if story.worker == INGESTER]
    assert (story.condition, story.outcome) == (Condition.BUDGET, "mended")


def test_each_wedge_of_the_same_container_is_an_episode_of_its_own_and_all_are_mended(ended: Stage) -> None:
    stories = [story for story in with_action(ended.ledger.reports.newest()) if story.worker == WORKER]

    assert [story.attempt for story in stories] == [1, 2, 3, 4]
    assert {story.outcome for story in stories} == {"mended"}


def test_the_container_is_free_for_other_work_after_the_job_failed(ended: Stage) -> None:
    job_id = ended.submit(
        Script(picture="fine", load_s=0.2, load_mib=4, steps=2, step_s=0.1), now=time.time(), stall_timeout_s=30
    )

    eventually(lambda: ended.store.job(job_id).state is State.COMPLETED, within_s=60, what="another job completed")
