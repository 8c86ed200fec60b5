"""The remedy `restart_worker` for a dead worker in no container or in a removed one: only the job is left to settle."""

from dataclasses import replace
from typing import Any

import pytest

from remediator.plan import (
    Advance,
    Begin,
    Close,
    ContainerState,
    Kind,
    Outcome,
    Requeue,
    Stage,
    Step,
    Stop,
    Wait,
    WouldAct,
)
from remediator.reasons import Reason
from remediator.remedies.restart_worker import decide
from tests.remediator.builders import FENCED_JOB, facts, free, settle, stopped
from tests.remediator.remedies.test_restart_worker import DEAD_WORKER, GONE

pytestmark = pytest.mark.pure

BARE = replace(
    GONE, container_kind="process", container="w1", container_id="process:9:1", container_incarnation="process:9:1@b",
    container_workers=0, process_ended=True, worker_uid=1000, gpus=[],
)  # fmt: skip
NO_ORPHANS = stopped(
    kind="orphans", handle="w1 process:9:1@b 1000", name="w1", incarnation="process:9:1@b", cgroup=None,
    startable=False,
)  # fmt: skip
ORPHANS = replace(NO_ORPHANS, running=True, pids=frozenset({11, 12}))


@pytest.mark.parametrize(
    ("left", "workers", "gone"),
    [
        pytest.param(NO_ORPHANS, 0, True, id="left nothing"),
        pytest.param(NO_ORPHANS, None, True, id="left nothing, another lock cannot be read"),
        pytest.param(ORPHANS, 0, False, id="left processes"),
    ],
)
def test_job_of_a_dead_worker_in_no_container_is_settled(left: ContainerState, workers: int | None, gone: bool) -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=replace(BARE, container_workers=workers), container=left))

    assert isinstance(step, Begin)
    assert (step.free_key, step.settle_key, step.gone) == ("process:9:1@b", "7/1", gone)
    assert (step.container_kind, step.container_handle) == ("orphans", "w1 process:9:1@b 1000")


@pytest.mark.parametrize(
    ("changed", "workers", "reason"),
    [
        pytest.param(
            {"container": None, "container_known": False, "unknown": "u"}, 0, Reason.NO_CONTAINER, id="unknown"
        ),
        pytest.param({"container": ORPHANS}, None, Reason.UNCONFIRMED, id="a live worker may be among them"),
        pytest.param({"container": NO_ORPHANS, "job_known": False}, 0, Reason.QUEUE_UNREACHABLE, id="queue unknown"),
    ],
)
def test_job_of_a_worker_that_may_live_waits(changed: dict[str, Any], workers: int | None, reason: Reason) -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=replace(BARE, container_workers=workers), **changed))

    assert isinstance(step, Wait)
    assert step.reason is reason


def test_orphans_with_a_live_worker_are_left_alone() -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=replace(BARE, container_workers=1), container=ORPHANS))

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (Outcome.REFUSED, Reason.SHARED_CONTAINER)


@pytest.mark.parametrize(
    ("changed", "begins"),
    [
        pytest.param({}, True, id="removed"),
        pytest.param({"container_workers": None}, True, id="removed, another lock cannot be read"),
        pytest.param({"process_ended": None}, False, id="its process may run"),
        pytest.param({"alive": True, "heartbeat_age_s": 31.0, "cpu_idle_s": 31.0}, False, id="its lock is held"),
        pytest.param({"container_kind": None, "container_id": None}, False, id="its container is unknown"),
    ],
)
def test_job_of_a_worker_that_died_with_its_removed_container_is_settled(changed: dict[str, Any], begins: bool) -> None:
    seen = replace(GONE, **{"process_ended": True, **changed})

    step = decide(facts(episode=DEAD_WORKER, evidence=seen, container=None))

    assert isinstance(step, Begin) is begins
    assert begins or isinstance(step, Wait)


def test_job_of_a_worker_with_a_removed_container_waits_while_its_engine_is_silent() -> None:
    seen = replace(GONE, process_ended=True)

    step = decide(facts(episode=DEAD_WORKER, evidence=seen, container=None, container_known=False))

    assert isinstance(step, Wait)


@pytest.mark.parametrize(
    ("left", "would"),
    [(NO_ORPHANS, "fence job 7, settle:"), (ORPHANS, "end the processes [11, 12] that it left, and settle:")],
)
def test_dry_run_says_what_is_done_about_orphans(left: ContainerState, would: str) -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=BARE, container=left, armed=False))

    assert isinstance(step, WouldAct)
    assert would in step.message


def test_orphans_are_ended_before_the_job_is_settled_and_nothing_is_started() -> None:
    def step(stage: Stage, settled: Stage, left: ContainerState) -> Step:
        intent = replace(free(stage, gpus=[], pids=[]), key="process:9:1@b")
        owed = replace(DEAD_WORKER, free=intent, settle=settle(settled))
        return decide(facts(episode=owed, evidence=BARE, container=left, job=FENCED_JOB))

    stop = step(Stage.PLANNED, Stage.FENCED, ORPHANS)
    assert isinstance(stop, Stop)
    assert "it left the processes [11, 12]" in stop.message
    for stage in (Stage.PLANNED, Stage.STOPPING):
        dead = step(stage, Stage.FENCED, NO_ORPHANS)
        assert isinstance(dead, Advance)
        assert (dead.kind, dead.stage) == (Kind.FREE, Stage.DEAD)
    assert isinstance(step(Stage.DEAD, Stage.FENCED, NO_ORPHANS), Requeue)
    done = step(Stage.DEAD, Stage.DONE, NO_ORPHANS)
    assert isinstance(done, Advance)
    assert (done.stage, done.reason) == (Stage.DONE, Reason.ENDED_ELSEWHERE)
