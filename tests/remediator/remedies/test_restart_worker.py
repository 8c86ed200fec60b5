"""The remedy as truth tables: what it decides from which facts, with a sentence a row."""

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


def test_the_remedy_is_found_by_the_name_that_rules_use() -> None:
    assert REMEDIES["restart_worker"].decide is decide


@pytest.mark.parametrize(
    ("conditions", "begins"),
    [
        pytest.param(frozenset({Condition.GANG}), True, id="while the gang is said to be stuck"),
        pytest.param(frozenset(), False, id="not once nobody says so any more"),
        pytest.param(frozenset({Condition.STALL}), False, id="nor for what else is said of it"),
    ],
)
def test_a_rank_is_freed_for_its_gang(conditions: frozenset[Condition], begins: bool) -> None:
    """That the other ranks spin too, local evidence cannot tell."""
    step = decide(facts(episode=episode(condition=Condition.GANG, conditions=conditions), evidence=evidence(**SPINS)))

    assert isinstance(step, Begin) is begins
    assert begins or (isinstance(step, Wait) and step.reason is Reason.UNCONFIRMED)


@pytest.mark.parametrize(
    "conditions", [frozenset({Condition.GANG}), frozenset()], ids=["while its gang is", "or nobody says so"]
)
def test_a_rank_that_was_fenced_is_stopped_while_it_spins(conditions: frozenset[Condition]) -> None:
    """Its attempt is over, whatever the others do: one scrape that fails must not let its process live on."""
    owed = episode(free(Stage.PLANNED), settle(Stage.FENCED), condition=Condition.GANG, conditions=conditions)

    spins = decide(facts(episode=owed, job=FENCED_JOB, evidence=evidence(**SPINS)))
    steps = decide(facts(episode=owed, job=FENCED_JOB, evidence=evidence(**SPINS | {"step_beat_age_s": 1.0})))

    assert isinstance(spins, Stop)
    assert not isinstance(steps, Stop)


@pytest.mark.parametrize(
    ("conditions", "fences"), [(frozenset({Condition.GANG}), True), (frozenset(), False)], ids=["on", "over"]
)
def test_a_rank_is_fenced_only_while_its_gang_is_stuck(conditions: frozenset[Condition], fences: bool) -> None:
    owed = episode(free(Stage.PLANNED), settle(Stage.PLANNED), condition=Condition.GANG, conditions=conditions)

    step = decide(facts(episode=owed, evidence=evidence(**SPINS)))

    assert isinstance(step, Fence) is fences


# --- a worker whose process is gone (A14)

GONE = evidence(alive=False, dead_s=31.0, container_workers=0, heartbeat_age_s=40.0, cpu_idle_s=None)
DEAD_WORKER = episode(condition=Condition.DEAD_WORKER, conditions=frozenset({Condition.DEAD_WORKER}))
DOWN_WITH_IT = stopped(cgroup=None)


@pytest.mark.parametrize("place", [container(), DOWN_WITH_IT], ids=["its container is up", "its container is down"])
def test_a_worker_that_is_gone_has_its_container_freed_up_or_down(place: ContainerState) -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=GONE, container=place))

    assert isinstance(step, Begin)
    assert (step.condition, step.free_key, step.settle_key) == (Condition.DEAD_WORKER, KEY, "7/1")


def test_a_worker_that_is_gone_from_a_container_with_another_live_one_is_refused() -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=replace(GONE, container_workers=1)))

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (Outcome.REFUSED, Reason.SHARED_CONTAINER)


def test_a_worker_that_is_gone_from_a_container_that_was_started_since_is_waited_for() -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=GONE, container=container(incarnation=REBORN)))

    assert isinstance(step, Wait)
    assert step.reason == Reason.RESTARTED


def test_a_worker_that_is_gone_from_a_container_that_a_person_stopped_has_its_job_settled_and_is_left_down() -> None:
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


def test_a_container_that_is_down_is_fenced_seen_dead_settled_and_started_and_never_stopped() -> None:
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


def test_a_container_that_stays_up_is_stopped_while_its_worker_is_gone_still() -> None:
    owed = replace(DEAD_WORKER, free=free(Stage.PLANNED), settle=settle(Stage.FENCED))

    assert isinstance(decide(facts(episode=owed, evidence=GONE, job=FENCED_JOB)), Stop)
    back = replace(GONE, alive=True, heartbeat_age_s=0.1, worker_incarnation="i2", dead_s=None, container_workers=1)
    assert isinstance(decide(facts(episode=owed, evidence=back, job=FENCED_JOB)), Wait)


BOTH = frozenset({Condition.STALL, Condition.DEAD_WORKER})
BEATS = {"heartbeat_age_s": 1.0, "cpu_idle_s": 0.0}
STEPS = {"step_beat_age_s": 0.2}

REPORTED: dict[str, tuple[frozenset[Condition], Condition, dict[str, Any], Condition | None]] = {
    "both are so: the one that opened it": (BOTH, Condition.STALL, DEAD, Condition.STALL),
    "both are so, and the other opened it": (BOTH, Condition.DEAD_WORKER, DEAD, Condition.DEAD_WORKER),
    "only the later one is so": (BOTH, Condition.STALL, {**DEAD, **STEPS}, Condition.DEAD_WORKER),
    "only the first one is so": (BOTH, Condition.STALL, BEATS, Condition.STALL),
    "only the first one is so, and the second opened it": (BOTH, Condition.DEAD_WORKER, BEATS, Condition.STALL),
    "neither is so": (BOTH, Condition.STALL, {**BEATS, **STEPS}, None),
    "what nobody reported is not looked for": (frozenset({Condition.STALL}), Condition.STALL, {**DEAD, **STEPS}, None),
    "what was reported counts still when its alert has ended": (frozenset(), Condition.STALL, BEATS, Condition.STALL),
}


@pytest.mark.parametrize(("conditions", "first", "seen", "by"), REPORTED.values(), ids=REPORTED)
def test_any_reported_condition_may_confirm_and_gives_the_episode_its_name(
    conditions: frozenset[Condition], first: Condition, seen: dict[str, Any], by: Condition | None
) -> None:
    step = decide(facts(episode=episode(conditions=conditions, condition=first), evidence=evidence(**seen)))

    assert (step.condition if isinstance(step, Begin) else None) == by
    assert isinstance(step, Begin | Wait)


def test_where_several_were_reported_each_doubt_is_told() -> None:
    seen = evidence(**BEATS, **STEPS)

    step = decide(facts(episode=episode(conditions=BOTH), evidence=seen))

    assert isinstance(step, Wait)
    assert step.reason is Reason.UNCONFIRMED
    for condition in (Condition.STALL, Condition.DEAD_WORKER):
        assert f"{condition}: {confirm(seen, condition).message}" in step.message


@pytest.mark.parametrize("promised", [settle(Stage.PLANNED), settle(Stage.FENCED)], ids=["fence", "stop"])
def test_once_promised_either_condition_still_confirms(promised: Intent) -> None:
    """What was a stall when it began may be a dead worker by now."""
    job_now = job() if promised.stage is Stage.PLANNED else FENCED_JOB
    owed = episode(free(Stage.PLANNED), promised, conditions=BOTH)

    step = decide(facts(episode=owed, job=job_now, evidence=evidence(**DEAD, **STEPS)))

    assert isinstance(step, Fence | Stop)


# --- before anything is promised

HELD_UP: dict[str, tuple[Facts, str]] = {
    "the exporter does not answer": (facts(evidence=None, unknown="no answer"), Reason.NO_EVIDENCE),
    "the exporter's look is stale": (facts(evidence=evidence(sample_age_s=5.1)), Reason.STALE_EVIDENCE),
    "the GPU is busy": (facts(evidence=evidence(gpu_idle_s=0.0)), Reason.UNCONFIRMED),
    "the job is not armed": (facts(evidence=evidence(step_beat_age_s=None)), Reason.UNCONFIRMED),
    "the lock is dead": (facts(evidence=evidence(alive=False)), Reason.UNCONFIRMED),
    "the engine does not answer": (facts(container=None, container_known=False), Reason.NO_CONTAINER),
    "the container is in no file of ours": (facts(container=None), Reason.NO_CONTAINER),
    "the worker's container is unknown": (facts(evidence=evidence(container_incarnation=None)), Reason.NO_CONTAINER),
    "the container was restarted since the evidence": (
        facts(container=container(incarnation=REBORN)),
        Reason.RESTARTED,
    ),
    "the container has stopped since the evidence": (facts(container=stopped()), Reason.RESTARTED),
}


@pytest.mark.parametrize(("doubtful", "reason"), HELD_UP.values(), ids=HELD_UP)
def test_what_is_not_confirmed_waits_while_the_alert_fires(doubtful: Facts, reason: str) -> None:
    step = decide(doubtful)

    assert isinstance(step, Wait)
    assert step.reason == reason


@pytest.mark.parametrize(("doubtful", "reason"), HELD_UP.values(), ids=HELD_UP)
def test_what_is_not_confirmed_is_let_go_when_the_alert_ends(doubtful: Facts, reason: str) -> None:
    ended = replace(doubtful, episode=replace(doubtful.episode, firing=False))

    step = decide(ended)

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (Outcome.UNCONFIRMED, reason)


SUPERSEDED: dict[str, Facts] = {
    "the worker was replaced": facts(evidence=evidence(worker_incarnation="i2")),
    "the job is at its next attempt": facts(evidence=evidence(attempt=2)),
    "the worker runs another job": facts(evidence=evidence(job_id=8)),
    "the worker runs no job any more": facts(
        evidence=evidence(job_id=None, attempt=None), job=job(state=State.FAILED, claimed_by=None)
    ),
    "the worker runs no job any more, and its attempt went to another": facts(
        evidence=evidence(job_id=None, attempt=None), job=job(claimed_by="i9")
    ),
    "the worker runs no job any more, and the queue knows none": facts(
        evidence=evidence(job_id=None, attempt=None), job=None
    ),
    "the worker runs no job any more, and it is at its next attempt": facts(
        evidence=evidence(job_id=None, attempt=None), job=job(attempt=2)
    ),
    "its attempt completed after the evidence was taken": facts(job=job(state=State.COMPLETED, claimed_by=None)),
    "its attempt completed, by the worker that is gone since": facts(
        episode=DEAD_WORKER, evidence=GONE, job=job(state=State.COMPLETED, claimed_by=None)
    ),
    "it is dead, and its lease ran out": facts(
        episode=DEAD_WORKER, evidence=GONE, job=job(state=State.QUEUED, claimed_by=None)
    ),
    "it is dead, and its job was cancelled": facts(episode=DEAD_WORKER, evidence=GONE, job=job(state=State.CANCELLED)),
    "it is dead, and its job is at its next attempt": facts(episode=DEAD_WORKER, evidence=GONE, job=job(attempt=2)),
    "it is dead, and another worker holds its attempt": facts(
        episode=DEAD_WORKER, evidence=GONE, job=job(claimed_by="i9")
    ),
    "it is dead, and the queue knows no such job": facts(episode=DEAD_WORKER, evidence=GONE, job=None),
    "the alert named no attempt, and one runs": facts(episode=episode(job_id=None, attempt=None), evidence=evidence()),
}


@pytest.mark.parametrize("gone", SUPERSEDED.values(), ids=SUPERSEDED)
def test_an_accusation_of_what_is_over_is_closed(gone: Facts) -> None:
    step = decide(gone)

    assert isinstance(step, Close)
    assert step.outcome is Outcome.SUPERSEDED


HELD_STILL: dict[str, Facts] = {
    "its lease ran out": facts(job=job(state=State.QUEUED, claimed_by=None)),
    "a person cancelled its job": facts(job=job(state=State.CANCELLED, claimed_by=None)),
    "a person failed its job": facts(job=job(state=State.FAILED, claimed_by=None)),
    "a later attempt of its job has completed": facts(job=job(state=State.COMPLETED, attempt=2, claimed_by=None)),
    "the queue is silent": facts(job=None, job_known=False),
    "it is dead, and holds its attempt": facts(episode=DEAD_WORKER, evidence=GONE),
    "it is dead, and its host was lost": facts(episode=DEAD_WORKER, evidence=GONE, job=job(state=State.HOST_LOST)),
    "it is dead, and was fenced": facts(episode=DEAD_WORKER, evidence=GONE, job=FENCED_JOB),
}


@pytest.mark.parametrize("known", HELD_STILL.values(), ids=HELD_STILL)
def test_what_happened_to_the_job_does_not_excuse_a_wedged_container_nor_a_worker_that_died_with_it(
    known: Facts,
) -> None:
    assert isinstance(decide(known), Begin)


UNTOUCHED: dict[str, Facts] = {
    "it completed, and its settle was given up": facts(
        free(Stage.PLANNED), settle(Stage.ABANDONED), job=job(state=State.COMPLETED, claimed_by=None)
    ),
    "it completed, and its settle was another episode's": facts(
        free(Stage.PLANNED), None, job=job(state=State.COMPLETED, claimed_by=None)
    ),
    "it completed while the queue took nothing": facts(
        free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.COMPLETED), queue_stuck_for_s=10.0
    ),
    "it is dead, and its lease ran out": facts(
        episode=replace(DEAD_WORKER, free=free(Stage.PLANNED), settle=settle(Stage.ABANDONED)),
        evidence=GONE,
        job=job(state=State.QUEUED, claimed_by=None),
    ),
}


@pytest.mark.parametrize("known", UNTOUCHED.values(), ids=UNTOUCHED)
def test_a_free_that_touched_nothing_is_taken_back_when_nothing_is_owed_any_more(known: Facts) -> None:
    step = decide(known)
    again = decide(replace(known, episode=replace(known.episode, free=None, settle=None)))

    assert isinstance(step, Withdraw)
    assert step.reason in (Reason.ATTEMPT_OVER, Reason.JOB_NOT_HELD)
    assert isinstance(again, Close)
    assert again.outcome is Outcome.SUPERSEDED


def test_a_dead_worker_whose_fenced_job_a_person_settled_gets_its_container_back() -> None:
    owed = replace(DEAD_WORKER, free=free(Stage.PLANNED), settle=settle(Stage.DONE))

    assert isinstance(decide(facts(episode=owed, evidence=GONE, job=job(state=State.CANCELLED))), Stop)


UNREAD = evidence(job_id=None, attempt=None)

UNSURE: dict[str, tuple[Facts, str]] = {
    "its job file tells nothing, and the queue says that it holds the attempt": (
        facts(evidence=UNREAD),
        Reason.UNCONFIRMED,
    ),
    "its job file tells nothing, and the attempt is fenced": (
        facts(evidence=UNREAD, job=FENCED_JOB),
        Reason.UNCONFIRMED,
    ),
    "its job file tells nothing, and the queue is silent": (
        facts(evidence=UNREAD, job=None, job_known=False),
        Reason.QUEUE_UNREACHABLE,
    ),
    "it is dead, and the queue is silent": (
        facts(episode=DEAD_WORKER, evidence=GONE, job=None, job_known=False),
        Reason.QUEUE_UNREACHABLE,
    ),
    "how many workers live in its container is unknown": (
        facts(evidence=evidence(container_workers=None)),
        Reason.UNCONFIRMED,
    ),
    "it is dead, and how many live in its container is unknown": (
        facts(episode=DEAD_WORKER, evidence=replace(GONE, container_workers=None)),
        Reason.UNCONFIRMED,
    ),
}


@pytest.mark.parametrize(("known", "reason"), UNSURE.values(), ids=UNSURE)
def test_what_is_unknown_closes_nothing_and_begins_nothing(known: Facts, reason: str) -> None:
    step = decide(known)
    ended = decide(replace(known, episode=replace(known.episode, firing=False)))

    assert isinstance(step, Wait)
    assert step.reason == reason
    assert isinstance(ended, Close)
    assert ended.outcome is Outcome.UNCONFIRMED


def test_a_job_file_that_cannot_be_read_for_one_look_gives_up_no_free() -> None:
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
    "another one holds the lock": ({}, Stage.FENCED, Stage.DEAD),
    "it has a job already": ({"job_id": 8, "attempt": 1, "step_beat_age_s": 0.1}, Stage.FENCED, Stage.DEAD),
    "its job was settled after the bound": ({}, Stage.DONE, Stage.DEAD),
    "the driver lists a process of the old one still": ({"gpu_pids": {"GPU-0": [4001]}}, Stage.FENCED, Wait),
    "the driver does not say": ({"gpu_pids": None}, Stage.FENCED, Wait),
    "nobody holds the lock": ({"alive": False}, Stage.FENCED, Wait),
    "who holds the lock is unknown": ({"alive": None}, Stage.FENCED, Wait),
    "the look is stale": ({"sample_age_s": 5.1}, Stage.FENCED, Wait),
    "it lives in another incarnation of the container": ({"container_incarnation": REBORN}, Stage.FENCED, Wait),
    "it is the same worker": ({"worker_incarnation": "i1"}, Stage.FENCED, Wait),
    "nothing was fenced": ({}, Stage.ABANDONED, Stage.ABANDONED),
}


@pytest.mark.parametrize(("seen", "settled", "wanted"), SUCCEEDED.values(), ids=SUCCEEDED)
def test_a_worker_that_ended_after_its_fence_is_dead_where_another_holds_its_lock_in_its_container(
    seen: dict[str, Any], settled: Stage, wanted: Stage | type[Step]
) -> None:
    job_now = FENCED_JOB if settled is Stage.FENCED else job(state=State.QUEUED, claimed_by=None)
    known = facts(free(Stage.PLANNED), settle(settled), evidence=replace(SUCCESSOR, **seen), job=job_now)

    step = decide(known)

    if isinstance(wanted, Stage):
        assert isinstance(step, Advance)
        assert (step.kind, step.stage) == (Kind.FREE, wanted)
    else:
        assert isinstance(step, wanted)


def test_a_worker_that_another_followed_is_settled_at_once_and_its_container_goes_on() -> None:
    dead = facts(free(Stage.DEAD), settle(Stage.FENCED), evidence=SUCCESSOR, job=FENCED_JOB)
    settled = facts(free(Stage.DEAD), settle(Stage.DONE), evidence=SUCCESSOR)

    assert decide(dead) == Requeue(retry=1, seen_dead=True, message="", avoid_s=600.0)
    assert decide(settled) == Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.REPLACED, message="")


def test_a_process_that_stays_on_the_gpu_beside_the_next_worker_is_given_up_after_the_bound() -> None:
    lingers = replace(SUCCESSOR, gpu_pids={"GPU-0": [4001]}, job_id=8, attempt=1)
    known = facts(free(Stage.PLANNED), settle(Stage.DONE), evidence=lingers, job=job(state=State.QUEUED))

    assert isinstance(decide(known), Wait)
    late = decide(replace(known, free_for_s=120.0))
    assert isinstance(late, Advance)
    assert late.stage is Stage.ABANDONED


def test_evidence_exactly_as_old_as_allowed_counts() -> None:
    assert isinstance(decide(facts(evidence=evidence(sample_age_s=LIMITS.evidence_fresh_s))), Begin)


def test_a_worker_whose_incarnation_the_alert_did_not_name_is_judged_by_its_attempt() -> None:
    assert isinstance(decide(facts(episode=episode(incarnation=None))), Begin)


@pytest.mark.parametrize("armed", [True, False])
def test_a_container_that_did_not_opt_in_is_refused(armed: bool) -> None:
    step = decide(facts(container=container(managed=False), armed=armed))

    assert step == Close(outcome=Outcome.REFUSED, reason=Reason.NOT_MANAGED, message="")


def test_a_confirmed_wedge_promises_a_free_of_its_incarnation_and_a_settle_of_its_attempt() -> None:
    step = decide(facts())

    assert isinstance(step, Begin)
    assert (step.free_key, step.settle_key) == (KEY, "7/1")
    assert (step.container_kind, step.container_handle, step.container_name) == ("docker", KEY.partition("@")[0], "c1")
    assert (step.worker_incarnation, step.gpus) == ("i1", ("GPU-0",))
    assert step.message == confirm(evidence(), Condition.STALL).message


def test_a_resolved_alert_does_not_undo_what_local_evidence_still_shows() -> None:
    assert isinstance(decide(facts(episode=episode(firing=False))), Begin)


def test_a_dry_run_records_once_what_it_would_do_and_then_waits() -> None:
    first = decide(facts(armed=False))
    then = decide(facts(armed=False, episode=episode(would_act=True)))

    assert isinstance(first, WouldAct)
    assert confirm(evidence(), Condition.STALL).message in first.message
    assert isinstance(then, Wait)
    assert then.reason == Reason.DRY_RUN


def test_arming_later_acts_on_what_a_dry_run_recorded_and_is_still_true() -> None:
    assert isinstance(decide(facts(armed=True, episode=episode(would_act=True))), Begin)


# --- once promised: fence, stop, dead, settle, start

DOWN: dict[str, Any] = {"evidence": None, "unknown": "404", "worker_ended": True}

ORDER: dict[str, tuple[Facts, Step | type[Step]]] = {
    "1: first the job is taken from its attempt": (facts(free(Stage.PLANNED), settle(Stage.PLANNED)), Fence),
    "2: then the container is stopped": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB),
        Stop,
    ),
    "3: while it still runs it is stopped again": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB),
        Stop(message=""),
    ),
    "4: it is dead when it is down, its cgroup empty, and none of its pids on its GPUs": (
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
    "5: then the job is queued again": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped()),
        Requeue(retry=1, seen_dead=True, message="", avoid_s=600.0),
    ),
    "6: and only then the container starts": (
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
    "9: and the episode is over": (
        facts(free(Stage.DONE), settle(Stage.DONE)),
        Close(outcome=Outcome.FIXED, reason=Reason.DONE, message=""),
    ),
}


@pytest.mark.parametrize(("known", "wanted"), ORDER.values(), ids=ORDER)
def test_the_steps_come_in_this_order(known: Facts, wanted: Step | type[Step]) -> None:
    step = decide(known)

    assert isinstance(step, wanted) if isinstance(wanted, type) else step == wanted


@pytest.mark.parametrize(
    ("promised", "job_now"),
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
        "it beat",
        "its GPU is busy",
        "its RAM moved",
        "its GPU is unknown",
        "its lock is free",
        "the look is stale",
        "the evidence is of another incarnation",
        "the evidence names no container",
        "the exporter is silent",
    ],
)
def test_what_is_not_confirmed_any_more_is_not_touched(changed: dict[str, Any], promised: Intent, job_now: Any) -> None:
    step = decide(facts(free(Stage.PLANNED), promised, job=job_now, **changed))

    assert isinstance(step, Wait)
    assert step.reason == Reason.UNCONFIRMED


def test_what_stays_unconfirmed_is_taken_back_after_the_bound_or_given_up_once_it_was_fenced() -> None:
    alive: dict[str, Any] = {"evidence": evidence(step_beat_age_s=0.2)}

    planned = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), free_for_s=120, settle_for_s=120, **alive))
    alone = decide(facts(free(Stage.PLANNED), None, free_for_s=120, **alive))
    fenced = decide(facts(free(Stage.PLANNED), settle(Stage.ABANDONED), free_for_s=120, **alive))

    assert isinstance(planned, Withdraw)
    assert isinstance(alone, Withdraw)
    assert isinstance(fenced, Advance)
    assert (fenced.kind, fenced.stage, fenced.reason) == (Kind.FREE, Stage.ABANDONED, Reason.UNCONFIRMED)


def test_patience_counts_only_while_everybody_answered() -> None:
    """The stage was entered ten minutes ago, but somebody was silent until a second ago."""
    lately: dict[str, Any] = {"free_for_s": 600.0, "settle_for_s": 600.0, "quiet_for_s": 1.0}
    lingers = {"container": stopped(), "evidence": evidence(gpu_pids={"GPU-0": [4001]})}
    alive = {"evidence": evidence(step_beat_age_s=0.2)}

    dying = decide(facts(free(Stage.STOPPING), settle(Stage.DONE), **lingers, **lately))
    unconfirmed = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), **alive, **lately))

    assert isinstance(dying, Wait)
    assert isinstance(unconfirmed, Wait)


def test_after_downtime_a_fenced_job_is_not_settled_before_its_container_was_stopped() -> None:
    back = decide(facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=1.0))
    bound = decide(facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=60.0))

    assert isinstance(back, Stop)
    assert isinstance(bound, Requeue)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_container_is_not_freed_for_one_of_several_workers(workers: int | None) -> None:
    step = decide(facts(evidence=evidence(container_workers=workers)))

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (Outcome.REFUSED, Reason.SHARED_CONTAINER)


def test_an_attempt_whose_container_is_over_is_fenced_without_evidence_for_nothing_of_it_lives() -> None:
    for ended in (None, stopped(), container(incarnation=REBORN)):
        step = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), container=ended, **DOWN))

        assert isinstance(step, Fence)


def test_a_worker_that_has_gone_on_to_another_attempt_keeps_its_container() -> None:
    step = decide(
        facts(free(Stage.PLANNED), settle(Stage.ABANDONED), evidence=evidence(attempt=2, step_beat_age_s=0.1))
    )

    assert step == Advance(
        kind=Kind.FREE,
        stage=Stage.ABANDONED,
        reason=Reason.ATTEMPT_OVER,
        message="",
    )


@pytest.mark.parametrize("promised", [Stage.PLANNED, Stage.FENCED])
def test_disarming_stops_short_of_the_next_act_however_long_it_lasts(promised: Stage) -> None:
    job_now = job() if promised is Stage.PLANNED else FENCED_JOB
    known = facts(free(Stage.PLANNED), settle(promised), job=job_now, armed=False, free_for_s=9999, settle_for_s=1)

    step = decide(known)

    assert isinstance(step, Wait)
    assert step.reason == Reason.DRY_RUN
    assert isinstance(decide(replace(known, armed=True)), Fence | Stop)


def test_disarming_after_the_stop_still_settles_and_starts_what_was_stopped() -> None:
    settling = facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(), armed=False)
    starting = facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=stopped(), armed=False)

    assert isinstance(decide(settling), Requeue)
    assert isinstance(decide(starting), Start)


# --- the settle by itself

SETTLED: dict[str, tuple[Facts, Stage, Reason]] = {
    "its lease was reclaimed before the alert came": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.QUEUED)),
        Stage.ABANDONED,
        Reason.ATTEMPT_OVER,
    ),
    "another worker runs its next attempt": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(attempt=2)),
        Stage.ABANDONED,
        Reason.ATTEMPT_OVER,
    ),
    "it completed after all": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.COMPLETED)),
        Stage.ABANDONED,
        Reason.ATTEMPT_OVER,
    ),
    "its state file claims a job that another worker holds": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(claimed_by="i9")),
        Stage.ABANDONED,
        Reason.OTHER_WORKER,
    ),
    "the queue knows no such job": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=None),
        Stage.ABANDONED,
        Reason.NO_JOB,
    ),
    "a crash came between the requeue and its record": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=job(state=State.QUEUED), container=stopped()),
        Stage.DONE,
        Reason.DONE,
    ),
    "so late that the next attempt runs already": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=job(attempt=2), container=stopped()),
        Stage.DONE,
        Reason.DONE,
    ),
    "a person cancelled it while it was fenced": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=job(state=State.CANCELLED)),
        Stage.DONE,
        Reason.DONE,
    ),
}


@pytest.mark.parametrize(("known", "stage", "reason"), SETTLED.values(), ids=SETTLED)
def test_a_job_that_is_settled_already_is_not_settled_again(known: Facts, stage: Stage, reason: Reason) -> None:
    step = decide(known)

    assert isinstance(step, Advance)
    assert (step.kind, step.stage, step.reason) == (Kind.SETTLE, stage, reason)


def test_a_job_that_the_lease_reclaimed_does_not_excuse_its_container() -> None:
    step = decide(facts(free(Stage.PLANNED), settle(Stage.ABANDONED), job=job(state=State.QUEUED)))

    assert isinstance(step, Stop)


def test_a_crash_between_the_fence_and_its_record_records_it_whatever_is_seen_now() -> None:
    step = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=FENCED_JOB, evidence=None))

    assert isinstance(step, Fence)


def test_a_node_that_was_lost_may_be_fenced_too() -> None:
    assert isinstance(decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.HOST_LOST))), Fence)


CAP: dict[str, tuple[dict[str, Any], Step]] = {
    "never tripped before: first retry": (
        {"watchdog_retries": 0},
        Requeue(retry=1, seen_dead=True, message="", avoid_s=600.0),
    ),
    "tripped once: second retry": (
        {"watchdog_retries": 1},
        Requeue(retry=2, seen_dead=True, message="", avoid_s=600.0),
    ),
    "tripped twice: third and last retry": (
        {"watchdog_retries": 2},
        Requeue(retry=3, seen_dead=True, message="", avoid_s=600.0),
    ),
    "tripped three times: the fourth fails it": (
        {"watchdog_retries": 3},
        Fail(reason=Reason.RETRIES_EXHAUSTED, message=""),
    ),
    "past a cap that was lowered since": (
        {"watchdog_retries": 9},
        Fail(reason=Reason.RETRIES_EXHAUSTED, message=""),
    ),
    "its last attempt but one: it has one left": (
        {"attempts_max": 2},
        Requeue(retry=1, seen_dead=True, message="", avoid_s=600.0),
    ),
    "its last attempt, though retries are left: nothing could claim it": (
        {"attempts_max": 1},
        Fail(reason=Reason.ATTEMPTS_EXHAUSTED, message=""),
    ),
    "both caps at once: the attempts are named": (
        {"attempts_max": 1, "watchdog_retries": 3},
        Fail(reason=Reason.ATTEMPTS_EXHAUSTED, message=""),
    ),
    "an ingest job fails at its first trip": (
        {"watchdog_retries": 0, "retried": False},
        Fail(reason=Reason.NOT_RETRIED, message=""),
    ),
}


@pytest.mark.parametrize(("counted", "wanted"), CAP.values(), ids=CAP)
def test_requeue_under_the_cap_and_fail_at_it(counted: dict[str, Any], wanted: Step) -> None:
    known = facts(free(Stage.DEAD), settle(Stage.FENCED), container=stopped(), job=job(state=State.FENCING, **counted))

    assert decide(known) == wanted


def test_a_cap_of_zero_fails_the_first_trip() -> None:
    known = facts(
        free(Stage.DEAD),
        settle(Stage.FENCED),
        container=stopped(),
        job=FENCED_JOB,
        limits=replace(LIMITS, retries_max=0),
    )

    assert isinstance(decide(known), Fail)


def test_a_fenced_job_is_settled_after_the_bound_even_if_its_process_was_never_seen_dead() -> None:
    just_under = facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=59.9)
    at_the_bound = facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=60)

    assert isinstance(decide(just_under), Stop)
    assert decide(at_the_bound) == Requeue(retry=1, seen_dead=False, message="", avoid_s=600.0)
