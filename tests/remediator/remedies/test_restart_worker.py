"""The remedy `restart_worker` as truth tables."""

from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.job import Condition, State
from remediator.plan import (
    Advance,
    Begin,
    Close,
    ContainerState,
    Episode,
    Facts,
    Fail,
    Fence,
    Intent,
    Kind,
    Outcome,
    Quarantine,
    Requeue,
    Stage,
    Start,
    Step,
    Stop,
    Wait,
    Withdraw,
    WouldAct,
)
from remediator.reasons import Reason
from remediator.remedies import REMEDIES
from remediator.remedies.job_conditions import confirm
from remediator.remedies.restart_worker import decide
from tests.remediator.builders import (
    FENCED_JOB,
    KEY,
    LIMITS,
    REBORN,
    container,
    episode,
    evidence,
    facts,
    free,
    job,
    settle,
    stopped,
)
from tests.remediator.remedies.test_job_conditions import DEAD, SPINS

pytestmark = pytest.mark.pure


def test_remedy_has_the_name_of_the_rules() -> None:
    assert REMEDIES["restart_worker"].decide is decide


@pytest.mark.parametrize(
    ("conditions", "begins"),
    [
        pytest.param(frozenset({Condition.GANG}), True, id="gang reported as stuck"),
        pytest.param(frozenset(), False, id="report ended"),
        pytest.param(frozenset({Condition.STALL}), False, id="another condition reported"),
    ],
)
def test_spinning_rank_is_restarted_while_its_gang_is_reported(conditions: frozenset[Condition], begins: bool) -> None:
    """Local evidence does not show whether the other ranks spin."""
    step = decide(facts(episode=episode(condition=Condition.GANG, conditions=conditions), evidence=evidence(**SPINS)))

    assert isinstance(step, Begin) is begins
    assert begins or (isinstance(step, Wait) and step.reason is Reason.UNCONFIRMED)


@pytest.mark.parametrize(
    "conditions", [frozenset({Condition.GANG}), frozenset()], ids=["gang reported", "report ended"]
)
def test_fenced_rank_is_stopped_while_it_spins(conditions: frozenset[Condition]) -> None:
    """Its attempt is over, so one failed scrape must not keep its process alive."""
    owed = episode(free(Stage.PLANNED), settle(Stage.FENCED), condition=Condition.GANG, conditions=conditions)

    spins = decide(facts(episode=owed, job=FENCED_JOB, evidence=evidence(**SPINS)))
    steps = decide(facts(episode=owed, job=FENCED_JOB, evidence=evidence(**SPINS | {"step_beat_age_s": 1.0})))

    assert isinstance(spins, Stop)
    assert not isinstance(steps, Stop)


@pytest.mark.parametrize(
    ("conditions", "fences"),
    [(frozenset({Condition.GANG}), True), (frozenset(), False)],
    ids=["gang reported", "report ended"],
)
def test_rank_is_fenced_only_while_its_gang_is_reported(conditions: frozenset[Condition], fences: bool) -> None:
    owed = episode(free(Stage.PLANNED), settle(Stage.PLANNED), condition=Condition.GANG, conditions=conditions)

    step = decide(facts(episode=owed, evidence=evidence(**SPINS)))

    assert isinstance(step, Fence) is fences


# --- a dead worker (A14)

GONE = evidence(alive=False, dead_s=31.0, container_workers=0, heartbeat_age_s=40.0, cpu_idle_s=None)
DEAD_WORKER = episode(condition=Condition.DEAD_WORKER, conditions=frozenset({Condition.DEAD_WORKER}))
DOWN_WITH_IT = stopped(cgroup=None)


@pytest.mark.parametrize(
    ("place", "gone"),
    [
        pytest.param(container(), False, id="container up"),
        pytest.param(container(pids=frozenset()), True, id="container up without a process"),
        pytest.param(DOWN_WITH_IT, True, id="container down"),
    ],
)
def test_container_of_a_dead_worker_is_restarted(place: ContainerState, gone: bool) -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=GONE, container=place))

    assert isinstance(step, Begin)
    assert (step.condition, step.free_key, step.settle_key) == (Condition.DEAD_WORKER, KEY, "7/1")
    assert step.gone is gone


def test_dead_worker_in_a_shared_container_is_refused() -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=replace(GONE, container_workers=1)))

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (Outcome.REFUSED, Reason.SHARED_CONTAINER)


def test_dead_worker_in_a_restarted_container_waits() -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=GONE, container=container(incarnation=REBORN)))

    assert isinstance(step, Wait)
    assert step.reason == Reason.RESTARTED


def test_dead_worker_in_a_container_left_down_is_settled_and_not_started() -> None:
    left = replace(DOWN_WITH_IT, left_down=True)
    would = decide(facts(episode=DEAD_WORKER, evidence=GONE, container=left, armed=False))
    owed = replace(DEAD_WORKER, free=free(Stage.DEAD, pids=[], gpus=[]), settle=settle(Stage.FENCED))
    settles = decide(facts(episode=owed, evidence=GONE, container=left, job=FENCED_JOB))
    then = decide(facts(episode=replace(owed, settle=settle(Stage.DONE)), evidence=GONE, container=left))

    assert isinstance(would, WouldAct)
    assert isinstance(decide(facts(episode=DEAD_WORKER, evidence=GONE, container=left)), Begin)
    assert isinstance(settles, Requeue)
    assert isinstance(then, Advance)
    assert then.stage is Stage.DONE


def test_container_that_is_down_is_settled_and_started_without_a_stop() -> None:
    def owed(stage: Stage, settled: Stage) -> Episode:
        return replace(DEAD_WORKER, free=free(stage, pids=[], gpus=[]), settle=settle(settled))

    def step(stage: Stage, settled: Stage, **changed: Any) -> Step:
        return decide(facts(episode=owed(stage, settled), evidence=GONE, container=DOWN_WITH_IT, **changed))

    assert isinstance(step(Stage.PLANNED, Stage.PLANNED), Fence)
    dead = step(Stage.PLANNED, Stage.FENCED, job=FENCED_JOB)
    assert isinstance(dead, Advance)
    assert (dead.kind, dead.stage) == (Kind.FREE, Stage.DEAD)
    assert isinstance(step(Stage.DEAD, Stage.FENCED, job=FENCED_JOB), Requeue)
    assert isinstance(step(Stage.DEAD, Stage.DONE), Start)


def test_running_container_is_stopped_while_its_worker_is_dead() -> None:
    owed = replace(DEAD_WORKER, free=free(Stage.PLANNED), settle=settle(Stage.FENCED))

    assert isinstance(decide(facts(episode=owed, evidence=GONE, job=FENCED_JOB)), Stop)
    back = replace(GONE, alive=True, heartbeat_age_s=0.1, worker_incarnation="i2", dead_s=None, container_workers=1)
    assert isinstance(decide(facts(episode=owed, evidence=back, job=FENCED_JOB)), Wait)


BOTH = frozenset({Condition.STALL, Condition.DEAD_WORKER})
BEATS = {"heartbeat_age_s": 1.0, "cpu_idle_s": 0.0}
STEPS = {"step_beat_age_s": 0.2}

REPORTED: dict[str, tuple[frozenset[Condition], Condition, dict[str, Any], Condition | None]] = {
    "both are met: the first of the episode": (BOTH, Condition.STALL, DEAD, Condition.STALL),
    "both are met, the other opened the episode": (BOTH, Condition.DEAD_WORKER, DEAD, Condition.DEAD_WORKER),
    "only the later one is met": (BOTH, Condition.STALL, {**DEAD, **STEPS}, Condition.DEAD_WORKER),
    "only the first one is met": (BOTH, Condition.STALL, BEATS, Condition.STALL),
    "only the first one is met, the second opened the episode": (BOTH, Condition.DEAD_WORKER, BEATS, Condition.STALL),
    "neither is met": (BOTH, Condition.STALL, {**BEATS, **STEPS}, None),
    "an unreported condition does not count": (frozenset({Condition.STALL}), Condition.STALL, {**DEAD, **STEPS}, None),
    "a reported condition counts after its alert ended": (frozenset(), Condition.STALL, BEATS, Condition.STALL),
}


@pytest.mark.parametrize(("conditions", "first", "seen", "by"), REPORTED.values(), ids=REPORTED)
def test_any_reported_condition_confirms_and_becomes_that_of_the_episode(
    conditions: frozenset[Condition], first: Condition, seen: dict[str, Any], by: Condition | None
) -> None:
    step = decide(facts(episode=episode(conditions=conditions, condition=first), evidence=evidence(**seen)))

    assert (step.condition if isinstance(step, Begin) else None) == by
    assert isinstance(step, Begin | Wait)


def test_message_has_the_doubt_of_each_reported_condition() -> None:
    seen = evidence(**BEATS, **STEPS)

    step = decide(facts(episode=episode(conditions=BOTH), evidence=seen))

    assert isinstance(step, Wait)
    assert step.reason is Reason.UNCONFIRMED
    for condition in (Condition.STALL, Condition.DEAD_WORKER):
        assert f"{condition}: {confirm(seen, condition).message}" in step.message


@pytest.mark.parametrize("planned", [settle(Stage.PLANNED), settle(Stage.FENCED)], ids=["fence", "stop"])
def test_any_reported_condition_confirms_after_the_intent(planned: Intent) -> None:
    """A stall may become a dead worker."""
    job_now = job() if planned.stage is Stage.PLANNED else FENCED_JOB
    owed = episode(free(Stage.PLANNED), planned, conditions=BOTH)

    step = decide(facts(episode=owed, job=job_now, evidence=evidence(**DEAD, **STEPS)))

    assert isinstance(step, Fence | Stop)


# --- before the intent

HELD_UP: dict[str, tuple[Facts, str]] = {
    "the exporter does not answer": (facts(evidence=None, unknown="no answer"), Reason.NO_EVIDENCE),
    "the sample is stale": (facts(evidence=evidence(sample_age_s=5.1)), Reason.STALE_EVIDENCE),
    "the GPU is busy": (facts(evidence=evidence(gpu_idle_s=0.0)), Reason.UNCONFIRMED),
    "the job is not monitored yet": (facts(evidence=evidence(step_beat_age_s=None)), Reason.UNCONFIRMED),
    "the lock is free": (facts(evidence=evidence(alive=False)), Reason.UNCONFIRMED),
    "the engine does not answer": (facts(container=None, container_known=False), Reason.NO_CONTAINER),
    "the container is unknown": (facts(container=None), Reason.NO_CONTAINER),
    "the worker's container is unknown": (facts(evidence=evidence(container_incarnation=None)), Reason.NO_CONTAINER),
    "the container was restarted since the evidence": (
        facts(container=container(incarnation=REBORN)),
        Reason.RESTARTED,
    ),
    "the container has stopped since the evidence": (facts(container=stopped()), Reason.RESTARTED),
}


@pytest.mark.parametrize(("doubtful", "reason"), HELD_UP.values(), ids=HELD_UP)
def test_unconfirmed_episode_waits_while_the_alert_fires(doubtful: Facts, reason: str) -> None:
    step = decide(doubtful)

    assert isinstance(step, Wait)
    assert step.reason == reason


@pytest.mark.parametrize(("doubtful", "reason"), HELD_UP.values(), ids=HELD_UP)
def test_unconfirmed_episode_closes_when_the_alert_is_resolved(doubtful: Facts, reason: str) -> None:
    ended = replace(doubtful, episode=replace(doubtful.episode, firing=False))

    step = decide(ended)

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (Outcome.UNCONFIRMED, reason)


SUPERSEDED: dict[str, Facts] = {
    "the worker was replaced": facts(evidence=evidence(worker_incarnation="i2")),
    "the job is at its next attempt": facts(evidence=evidence(attempt=2)),
    "the worker runs another job": facts(evidence=evidence(job_id=8)),
    "the worker runs no job": facts(
        evidence=evidence(job_id=None, attempt=None), job=job(state=State.FAILED, claimed_by=None)
    ),
    "the worker runs no job, another has its attempt": facts(
        evidence=evidence(job_id=None, attempt=None), job=job(claimed_by="i9")
    ),
    "the worker runs no job, unknown to the queue": facts(evidence=evidence(job_id=None, attempt=None), job=None),
    "the worker runs no job, which is at its next attempt": facts(
        evidence=evidence(job_id=None, attempt=None), job=job(attempt=2)
    ),
    "its attempt completed after the sample": facts(job=job(state=State.COMPLETED, claimed_by=None)),
    "its attempt completed, and the worker is dead": facts(
        episode=DEAD_WORKER, evidence=GONE, job=job(state=State.COMPLETED, claimed_by=None)
    ),
    "dead, and its lease expired": facts(
        episode=DEAD_WORKER, evidence=GONE, job=job(state=State.QUEUED, claimed_by=None)
    ),
    "dead, and its job was cancelled": facts(episode=DEAD_WORKER, evidence=GONE, job=job(state=State.CANCELLED)),
    "dead, and its job is at its next attempt": facts(episode=DEAD_WORKER, evidence=GONE, job=job(attempt=2)),
    "dead, and another worker has its attempt": facts(episode=DEAD_WORKER, evidence=GONE, job=job(claimed_by="i9")),
    "dead, and its job is unknown to the queue": facts(episode=DEAD_WORKER, evidence=GONE, job=None),
    "the alert named no attempt, and one runs": facts(episode=episode(job_id=None, attempt=None), evidence=evidence()),
}


@pytest.mark.parametrize("gone", SUPERSEDED.values(), ids=SUPERSEDED)
def test_alert_about_an_ended_attempt_is_superseded(gone: Facts) -> None:
    step = decide(gone)

    assert isinstance(step, Close)
    assert step.outcome is Outcome.SUPERSEDED


HELD_STILL: dict[str, Facts] = {
    "its lease expired": facts(job=job(state=State.QUEUED, claimed_by=None)),
    "its job was cancelled": facts(job=job(state=State.CANCELLED, claimed_by=None)),
    "its job was failed by an operator": facts(job=job(state=State.FAILED, claimed_by=None)),
    "a later attempt of its job has completed": facts(job=job(state=State.COMPLETED, attempt=2, claimed_by=None)),
    "the queue is silent": facts(job=None, job_known=False),
    "dead, and has its attempt": facts(episode=DEAD_WORKER, evidence=GONE),
    "dead, and its host was lost": facts(episode=DEAD_WORKER, evidence=GONE, job=job(state=State.HOST_LOST)),
    "dead, and fenced": facts(episode=DEAD_WORKER, evidence=GONE, job=FENCED_JOB),
}


@pytest.mark.parametrize("known", HELD_STILL.values(), ids=HELD_STILL)
def test_hung_container_is_restarted_although_its_job_ended(
    known: Facts,
) -> None:
    assert isinstance(decide(known), Begin)


UNTOUCHED: dict[str, Facts] = {
    "completed, and its settle was abandoned": facts(
        free(Stage.PLANNED), settle(Stage.ABANDONED), job=job(state=State.COMPLETED, claimed_by=None)
    ),
    "completed, settled by another episode": facts(
        free(Stage.PLANNED), None, job=job(state=State.COMPLETED, claimed_by=None)
    ),
    "completed while the queue was locked": facts(
        free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.COMPLETED), queue_stuck_for_s=10.0
    ),
    "dead, and its lease expired": facts(
        episode=replace(DEAD_WORKER, free=free(Stage.PLANNED), settle=settle(Stage.ABANDONED)),
        evidence=GONE,
        job=job(state=State.QUEUED, claimed_by=None),
    ),
}


@pytest.mark.parametrize("known", UNTOUCHED.values(), ids=UNTOUCHED)
def test_planned_restart_is_withdrawn_when_its_attempt_is_over(known: Facts) -> None:
    step = decide(known)
    again = decide(replace(known, episode=replace(known.episode, free=None, settle=None)))

    assert isinstance(step, Withdraw)
    assert step.reason in (Reason.ATTEMPT_OVER, Reason.JOB_NOT_HELD)
    assert isinstance(again, Close)
    assert again.outcome is Outcome.SUPERSEDED


def test_dead_worker_whose_job_an_operator_settled_is_restarted() -> None:
    owed = replace(DEAD_WORKER, free=free(Stage.PLANNED), settle=settle(Stage.DONE))

    assert isinstance(decide(facts(episode=owed, evidence=GONE, job=job(state=State.CANCELLED))), Stop)


UNREAD = evidence(job_id=None, attempt=None)

UNSURE: dict[str, tuple[Facts, str]] = {
    "its job file is unreadable, and it has its attempt": (
        facts(evidence=UNREAD),
        Reason.UNCONFIRMED,
    ),
    "its job file is unreadable, and its attempt is fenced": (
        facts(evidence=UNREAD, job=FENCED_JOB),
        Reason.UNCONFIRMED,
    ),
    "its job file is unreadable, and the queue is silent": (
        facts(evidence=UNREAD, job=None, job_known=False),
        Reason.QUEUE_UNREACHABLE,
    ),
    "dead, and the queue is silent": (
        facts(episode=DEAD_WORKER, evidence=GONE, job=None, job_known=False),
        Reason.QUEUE_UNREACHABLE,
    ),
    "the workers of its container are unknown": (
        facts(evidence=evidence(container_workers=None)),
        Reason.UNCONFIRMED,
    ),
    "dead, and the workers of its container are unknown": (
        facts(episode=DEAD_WORKER, evidence=replace(GONE, container_workers=None)),
        Reason.UNCONFIRMED,
    ),
}


@pytest.mark.parametrize(("known", "reason"), UNSURE.values(), ids=UNSURE)
def test_unknown_facts_wait(known: Facts, reason: str) -> None:
    step = decide(known)
    ended = decide(replace(known, episode=replace(known.episode, firing=False)))

    assert isinstance(step, Wait)
    assert step.reason == reason
    assert isinstance(ended, Close)
    assert ended.outcome is Outcome.UNCONFIRMED


def test_unreadable_job_file_does_not_abandon_a_restart() -> None:
    unread = facts(free(Stage.PLANNED), settle(Stage.FENCED), evidence=UNREAD, job=FENCED_JOB)
    silent = facts(free(Stage.PLANNED), settle(Stage.FENCED), evidence=UNREAD, job=None, job_known=False)
    over = facts(free(Stage.PLANNED), settle(Stage.ABANDONED), evidence=UNREAD, job=job(state=State.QUEUED))

    assert isinstance(decide(unread), Wait)
    assert isinstance(decide(silent), Wait)
    assert isinstance(decide(over), Advance)


SUCCESSOR = evidence(
    worker_incarnation="i2", job_id=None, attempt=None, step_beat_age_s=None, gpu_idle_s=0.0, gpu_pids={"GPU-0": [4003]}
)

SUCCEEDED: dict[str, tuple[dict[str, Any], Stage, Stage | type[Step]]] = {
    "another worker has the lock": ({}, Stage.FENCED, Stage.DEAD),
    "another worker has a job": ({"job_id": 8, "attempt": 1, "step_beat_age_s": 0.1}, Stage.FENCED, Stage.DEAD),
    "its job was settled at the timeout": ({}, Stage.DONE, Stage.DEAD),
    "the driver lists an old process": ({"gpu_pids": {"GPU-0": [4001]}}, Stage.FENCED, Wait),
    "GPU processes unknown": ({"gpu_pids": None}, Stage.FENCED, Wait),
    "the lock is free": ({"alive": False}, Stage.FENCED, Wait),
    "the lock is unknown": ({"alive": None}, Stage.FENCED, Wait),
    "stale sample": ({"sample_age_s": 5.1}, Stage.FENCED, Wait),
    "another incarnation of the container": ({"container_incarnation": REBORN}, Stage.FENCED, Wait),
    "the same worker": ({"worker_incarnation": "i1"}, Stage.FENCED, Wait),
    "not fenced": ({}, Stage.ABANDONED, Stage.ABANDONED),
}


@pytest.mark.parametrize(("seen", "settled", "expected"), SUCCEEDED.values(), ids=SUCCEEDED)
def test_fenced_worker_is_dead_once_another_has_its_lock(
    seen: dict[str, Any], settled: Stage, expected: Stage | type[Step]
) -> None:
    job_now = FENCED_JOB if settled is Stage.FENCED else job(state=State.QUEUED, claimed_by=None)
    known = facts(free(Stage.PLANNED), settle(settled), evidence=replace(SUCCESSOR, **seen), job=job_now)

    step = decide(known)

    if isinstance(expected, Stage):
        assert isinstance(step, Advance)
        assert (step.kind, step.stage) == (Kind.FREE, expected)
    else:
        assert isinstance(step, expected)


def test_replaced_worker_is_settled_and_its_container_not_restarted() -> None:
    dead = facts(free(Stage.DEAD), settle(Stage.FENCED), evidence=SUCCESSOR, job=FENCED_JOB)
    settled = facts(free(Stage.DEAD), settle(Stage.DONE), evidence=SUCCESSOR)

    assert decide(dead) == Requeue(retry=1, seen_dead=True, message="", avoid_s=600.0)
    assert decide(settled) == Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.REPLACED, message="")


def test_old_process_next_to_the_new_worker_is_abandoned_at_the_timeout() -> None:
    lingers = replace(SUCCESSOR, gpu_pids={"GPU-0": [4001]}, job_id=8, attempt=1)
    known = facts(free(Stage.PLANNED), settle(Stage.DONE), evidence=lingers, job=job(state=State.QUEUED))

    assert isinstance(decide(known), Wait)
    late = decide(replace(known, free_for_s=120.0))
    assert isinstance(late, Advance)
    assert late.stage is Stage.ABANDONED


def test_evidence_of_the_maximum_age_counts() -> None:
    assert isinstance(decide(facts(evidence=evidence(sample_age_s=LIMITS.evidence_fresh_s))), Begin)


def test_alert_without_an_incarnation_is_matched_by_the_attempt() -> None:
    assert isinstance(decide(facts(episode=episode(incarnation=None))), Begin)


@pytest.mark.parametrize("armed", [True, False])
def test_container_without_opt_in_is_refused(armed: bool) -> None:
    step = decide(facts(container=container(managed=False), armed=armed))

    assert step == Close(outcome=Outcome.REFUSED, reason=Reason.NOT_MANAGED, message="")


def test_confirmed_stall_begins_a_restart_and_a_settle() -> None:
    step = decide(facts())

    assert isinstance(step, Begin)
    assert (step.free_key, step.settle_key) == (KEY, "7/1")
    assert (step.container_kind, step.container_handle, step.container_name) == ("docker", KEY.partition("@")[0], "c1")
    assert (step.worker_incarnation, step.gpus) == ("i1", ("GPU-0",))
    assert step.message == confirm(evidence(), Condition.STALL).message


def test_resolved_alert_does_not_prevent_a_confirmed_restart() -> None:
    assert isinstance(decide(facts(episode=episode(firing=False))), Begin)


def test_dry_run_records_the_action_once_and_waits() -> None:
    first = decide(facts(armed=False))
    then = decide(facts(armed=False, episode=episode(dry_run_recorded=True)))

    assert isinstance(first, WouldAct)
    assert confirm(evidence(), Condition.STALL).message in first.message
    assert isinstance(then, Wait)
    assert then.reason == Reason.DRY_RUN


def test_armed_after_a_dry_run_it_acts() -> None:
    assert isinstance(decide(facts(armed=True, episode=episode(dry_run_recorded=True))), Begin)


# --- after the intent: fence, stop, exit, settle, start

DOWN: dict[str, Any] = {"evidence": None, "unknown": "404", "worker_ended": True}

ORDER: dict[str, tuple[Facts, Step | type[Step]]] = {
    "1: the attempt is fenced": (facts(free(Stage.PLANNED), settle(Stage.PLANNED)), Fence),
    "2: the container is stopped": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB),
        Stop,
    ),
    "3: while it runs it is stopped again": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB),
        Stop(message=""),
    ),
    "4: it is dead when it is down with an empty cgroup and off its GPUs": (
        facts(
            free(Stage.STOPPING),
            settle(Stage.FENCED),
            job=FENCED_JOB,
            container=stopped(),
            evidence=evidence(alive=False, gpu_pids={"GPU-0": [99]}),
        ),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            reason=Reason.SEEN_DEAD,
            message="",
        ),
    ),
    "5: the job is requeued": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped()),
        Requeue(retry=1, seen_dead=True, message="", avoid_s=600.0),
    ),
    "6: the container starts": (
        facts(free(Stage.DEAD), settle(Stage.DONE), job=job(state=State.QUEUED), container=stopped()),
        Start(message=""),
    ),
    "7: while it does not run it is started again": (
        facts(free(Stage.STARTING), settle(Stage.DONE), job=job(state=State.QUEUED), container=stopped()),
        Start(message=""),
    ),
    "8: until it runs": (
        facts(
            free(Stage.STARTING),
            settle(Stage.DONE),
            job=job(state=State.RUNNING, attempt=2),
            container=container(incarnation=REBORN),
        ),
        Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.DONE, message=""),
    ),
    "9: the episode closes": (
        facts(free(Stage.DONE), settle(Stage.DONE)),
        Close(outcome=Outcome.FIXED, reason=Reason.DONE, message=""),
    ),
}


@pytest.mark.parametrize(("known", "expected"), ORDER.values(), ids=ORDER)
def test_order_of_the_steps(known: Facts, expected: Step | type[Step]) -> None:
    step = decide(known)

    assert isinstance(step, expected) if isinstance(expected, type) else step == expected


@pytest.mark.parametrize(
    ("planned", "job_now"),
    [(settle(Stage.PLANNED), job()), (settle(Stage.FENCED), FENCED_JOB)],
    ids=["before the fence", "before the stop"],
)
@pytest.mark.parametrize(
    "changed",
    [
        {"evidence": evidence(step_beat_age_s=0.2)},
        {"evidence": evidence(gpu_idle_s=0.0)},
        {"evidence": evidence(ram_idle_s=1.0)},
        {"evidence": evidence(gpu_idle_s=None)},
        {"evidence": evidence(alive=False)},
        {"evidence": evidence(sample_age_s=6.0)},
        {"evidence": evidence(container_incarnation=REBORN)},
        {"evidence": evidence(container_incarnation=None)},
        {"evidence": None, "unknown": "no answer"},
    ],
    ids=[
        "recent step beat",
        "GPU busy",
        "RAM active",
        "GPU unknown",
        "lock free",
        "stale sample",
        "another incarnation",
        "no container",
        "no exporter",
    ],
)
def test_planned_restart_without_confirmation_waits(changed: dict[str, Any], planned: Intent, job_now: Any) -> None:
    step = decide(facts(free(Stage.PLANNED), planned, job=job_now, **changed))

    assert isinstance(step, Wait)
    assert step.reason == Reason.UNCONFIRMED


def test_unconfirmed_restart_is_withdrawn_or_abandoned_at_the_timeout() -> None:
    alive: dict[str, Any] = {"evidence": evidence(step_beat_age_s=0.2)}

    planned = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), free_for_s=120, settle_for_s=120, **alive))
    alone = decide(facts(free(Stage.PLANNED), None, free_for_s=120, **alive))
    fenced = decide(facts(free(Stage.PLANNED), settle(Stage.ABANDONED), free_for_s=120, **alive))

    assert isinstance(planned, Withdraw)
    assert isinstance(alone, Withdraw)
    assert isinstance(fenced, Advance)
    assert (fenced.kind, fenced.stage, fenced.reason) == (Kind.FREE, Stage.ABANDONED, Reason.UNCONFIRMED)


def test_timeouts_count_only_while_every_source_answers() -> None:
    """The stage began ten minutes ago, but one source was silent until a second ago."""
    lately: dict[str, Any] = {"free_for_s": 600.0, "settle_for_s": 600.0, "quiet_for_s": 1.0}
    lingers = {"container": stopped(), "evidence": evidence(gpu_pids={"GPU-0": [4001]})}
    alive = {"evidence": evidence(step_beat_age_s=0.2)}

    dying = decide(facts(free(Stage.STOPPING), settle(Stage.DONE), **lingers, **lately))
    unconfirmed = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), **alive, **lately))

    assert isinstance(dying, Wait)
    assert isinstance(unconfirmed, Wait)


def test_fenced_job_is_not_settled_before_the_stop_after_a_downtime() -> None:
    back = decide(facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=1.0))
    bound = decide(facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=60.0))

    assert isinstance(back, Stop)
    assert isinstance(bound, Requeue)


@pytest.mark.parametrize("workers", [0, 2])
def test_shared_container_is_refused(workers: int | None) -> None:
    step = decide(facts(evidence=evidence(container_workers=workers)))

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (Outcome.REFUSED, Reason.SHARED_CONTAINER)


def test_attempt_of_an_ended_container_is_fenced_without_evidence() -> None:
    for ended in (None, stopped(), container(incarnation=REBORN)):
        step = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), container=ended, **DOWN))

        assert isinstance(step, Fence)


def test_worker_at_another_attempt_keeps_its_container() -> None:
    step = decide(
        facts(free(Stage.PLANNED), settle(Stage.ABANDONED), evidence=evidence(attempt=2, step_beat_age_s=0.1))
    )

    assert step == Advance(
        kind=Kind.FREE,
        stage=Stage.ABANDONED,
        reason=Reason.ATTEMPT_OVER,
        message="",
    )


@pytest.mark.parametrize("planned", [Stage.PLANNED, Stage.FENCED])
def test_disarm_holds_the_next_action_without_a_time_limit(planned: Stage) -> None:
    job_now = job() if planned is Stage.PLANNED else FENCED_JOB
    known = facts(free(Stage.PLANNED), settle(planned), job=job_now, armed=False, free_for_s=9999, settle_for_s=1)

    step = decide(known)

    assert isinstance(step, Wait)
    assert step.reason == Reason.DRY_RUN
    assert isinstance(decide(replace(known, armed=True)), Fence | Stop)


def test_disarm_after_the_stop_still_settles_and_starts() -> None:
    settling = facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(), armed=False)
    starting = facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=stopped(), armed=False)

    assert isinstance(decide(settling), Requeue)
    assert isinstance(decide(starting), Start)


# --- intents that this executor did not write: only the label and the evidence of this moment count

HEALTHY = evidence(step_beat_age_s=0.2)
SHARED = evidence(container_workers=2)
FORGED: dict[str, tuple[Facts, Reason]] = {
    "planned, healthy": (facts(free(Stage.PLANNED), evidence=HEALTHY), Reason.UNCONFIRMED),
    "planned, not managed": (facts(free(Stage.PLANNED), container=container(managed=False)), Reason.UNCONFIRMED),
    "planned, shared": (facts(free(Stage.PLANNED), evidence=SHARED), Reason.UNCONFIRMED),
    "stopping, healthy": (facts(free(Stage.STOPPING), evidence=HEALTHY), Reason.UNCONFIRMED),
    "stopping, not managed": (facts(free(Stage.STOPPING), container=container(managed=False)), Reason.UNCONFIRMED),
    "stopping, shared": (facts(free(Stage.STOPPING), evidence=SHARED), Reason.UNCONFIRMED),
    "stopping, fenced, healthy": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, evidence=HEALTHY),
        Reason.UNCONFIRMED,
    ),
    "stopping, no evidence": (facts(free(Stage.STOPPING), evidence=None, unknown="no answer"), Reason.UNCONFIRMED),
    "stopping, a worker that does not exist": (facts(free(Stage.STOPPING), **DOWN), Reason.UNCONFIRMED),
    "stopping, its worker ended a moment ago": (
        facts(free(Stage.STOPPING), evidence=replace(GONE, dead_s=29.9)), Reason.UNCONFIRMED,
    ),
    "stopping, processes left, its worker lives": (
        facts(free(Stage.STOPPING), container=stopped(pids=frozenset({4002})), evidence=HEALTHY), Reason.STOPPING,
    ),
    "of another container, fences no living worker": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), container=None, evidence=HEALTHY), Reason.UNCONFIRMED,
    ),
    "of another container, fences nothing without evidence": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), container=None, evidence=None, unknown="no answer"),
        Reason.UNCONFIRMED,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "reason"), FORGED.values(), ids=FORGED)
def test_intent_alone_acts_on_nothing(known: Facts, reason: Reason) -> None:
    assert decide(known) == Wait(reason=reason, message="")


@pytest.mark.parametrize("stage", [Stage.DEAD, Stage.STARTING])
def test_stopped_container_without_opt_in_is_not_started(stage: Stage) -> None:
    step = decide(facts(free(stage), container=stopped(managed=False)))

    assert step == Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.NOT_MANAGED, message="")
    assert isinstance(decide(facts(free(stage), container=stopped())), Start)


AGAIN: dict[str, tuple[Facts, type[Step]]] = {
    "still hangs": (facts(free(Stage.STOPPING)), Stop),
    "its worker ended by the stop": (
        facts(free(Stage.STOPPING), evidence=replace(GONE, dead_s=0.5), stopped_s_ago=1.0), Stop,
    ),
    "its worker ended cleanly by the stop": (facts(free(Stage.STOPPING), stopped_s_ago=1.0, **DOWN), Stop),
    "its worker is gone, by an earlier executor": (facts(free(Stage.STOPPING), evidence=GONE), Stop),
    "recovered, since the engine refused": (
        facts(free(Stage.STOPPING), evidence=HEALTHY, stopped_s_ago=1.0), Wait,
    ),
    "another worker lives in it": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, stopped_s_ago=1.0,
              evidence=evidence(worker_incarnation="i2", gpu_pids={"GPU-0": []})),
        Advance,
    ),
    "GPU unknown since": (
        facts(free(Stage.STOPPING), evidence=evidence(gpu_idle_s=None), stopped_s_ago=1.0), Wait,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "expected"), AGAIN.values(), ids=AGAIN)
def test_failed_stop_is_repeated_only_with_evidence(known: Facts, expected: type[Step]) -> None:
    assert isinstance(decide(known), expected)


def test_failed_stop_without_evidence_is_abandoned_at_the_timeout() -> None:
    def at_the_timeout(**changed: Any) -> Step:
        return decide(facts(free(Stage.STOPPING, tries=1), free_for_s=120.0, **changed))

    unknown = {"evidence": evidence(gpu_idle_s=None)}
    abandoned = Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.UNCONFIRMED, message="", unspent=True)

    assert at_the_timeout(evidence=HEALTHY, stopped_s_ago=1.0) == abandoned
    assert at_the_timeout(**unknown) == abandoned, "this executor stopped nothing"
    assert isinstance(at_the_timeout(**unknown, stopped_s_ago=1.0), Quarantine), "it may still hang on its GPU"


# --- the settle

SETTLED: dict[str, tuple[Facts, Stage, Reason]] = {
    "its lease was reclaimed before the alert": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.QUEUED)),
        Stage.ABANDONED,
        Reason.ATTEMPT_OVER,
    ),
    "another worker runs its next attempt": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(attempt=2)),
        Stage.ABANDONED,
        Reason.ATTEMPT_OVER,
    ),
    "completed": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.COMPLETED)),
        Stage.ABANDONED,
        Reason.ATTEMPT_OVER,
    ),
    "another worker has the attempt": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(claimed_by="i9")),
        Stage.ABANDONED,
        Reason.OTHER_WORKER,
    ),
    "unknown to the queue": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=None),
        Stage.ABANDONED,
        Reason.NO_JOB,
    ),
    "a crash came between the requeue and its record": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=job(state=State.QUEUED), container=stopped()),
        Stage.DONE,
        Reason.DONE,
    ),
    "a crash before the record, and the next attempt runs": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=job(attempt=2), container=stopped()),
        Stage.DONE,
        Reason.DONE,
    ),
    "cancelled while it was fenced": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=job(state=State.CANCELLED)),
        Stage.DONE,
        Reason.DONE,
    ),
}


@pytest.mark.parametrize(("known", "stage", "reason"), SETTLED.values(), ids=SETTLED)
def test_settled_job_is_not_settled_again(known: Facts, stage: Stage, reason: Reason) -> None:
    step = decide(known)

    assert isinstance(step, Advance)
    assert (step.kind, step.stage, step.reason) == (Kind.SETTLE, stage, reason)


def test_container_of_a_reclaimed_job_is_stopped() -> None:
    step = decide(facts(free(Stage.PLANNED), settle(Stage.ABANDONED), job=job(state=State.QUEUED)))

    assert isinstance(step, Stop)


def test_fence_whose_record_was_lost_is_recorded_without_evidence() -> None:
    step = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=FENCED_JOB, evidence=None))

    assert isinstance(step, Fence)


def test_job_of_a_lost_host_may_be_fenced() -> None:
    assert isinstance(decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.HOST_LOST))), Fence)


CAP: dict[str, tuple[dict[str, Any], Step]] = {
    "no retry before: first retry": (
        {"watchdog_retries": 0},
        Requeue(retry=1, seen_dead=True, message="", avoid_s=600.0),
    ),
    "one retry before: second retry": (
        {"watchdog_retries": 1},
        Requeue(retry=2, seen_dead=True, message="", avoid_s=600.0),
    ),
    "two retries before: third and last retry": (
        {"watchdog_retries": 2},
        Requeue(retry=3, seen_dead=True, message="", avoid_s=600.0),
    ),
    "three retries before: failed": (
        {"watchdog_retries": 3},
        Fail(reason=Reason.RETRIES_EXHAUSTED, message=""),
    ),
    "over a lowered cap": (
        {"watchdog_retries": 9},
        Fail(reason=Reason.RETRIES_EXHAUSTED, message=""),
    ),
    "one attempt left": (
        {"attempts_max": 2},
        Requeue(retry=1, seen_dead=True, message="", avoid_s=600.0),
    ),
    "no attempt left, retries left": (
        {"attempts_max": 1},
        Fail(reason=Reason.ATTEMPTS_EXHAUSTED, message=""),
    ),
    "both caps: the attempts are the reason": (
        {"attempts_max": 1, "watchdog_retries": 3},
        Fail(reason=Reason.ATTEMPTS_EXHAUSTED, message=""),
    ),
    "an ingest job fails at once": (
        {"watchdog_retries": 0, "retried": False},
        Fail(reason=Reason.NOT_RETRIED, message=""),
    ),
}


@pytest.mark.parametrize(("counted", "expected"), CAP.values(), ids=CAP)
def test_job_is_requeued_under_its_caps_and_failed_at_them(counted: dict[str, Any], expected: Step) -> None:
    known = facts(free(Stage.DEAD), settle(Stage.FENCED), container=stopped(), job=job(state=State.FENCING, **counted))

    assert decide(known) == expected


def test_cap_of_zero_fails_at_once() -> None:
    known = facts(
        free(Stage.DEAD),
        settle(Stage.FENCED),
        container=stopped(),
        job=FENCED_JOB,
        limits=replace(LIMITS, retries_max=0),
    )

    assert isinstance(decide(known), Fail)


def test_fenced_job_is_settled_at_the_timeout_without_an_exit() -> None:
    just_under = facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=59.9)
    at_the_bound = facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=60)

    assert isinstance(decide(just_under), Stop)
    assert decide(at_the_bound) == Requeue(retry=1, seen_dead=False, message="", avoid_s=600.0)
