"""The remedy as truth tables: what it decides from which facts, with a sentence a row."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpuwarden.facts import WorkerFacts
from gpuwarden.job import State, Trip
from remediator.plan import (
    Advance,
    Begin,
    Close,
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
from remediator.remedies import REMEDIES
from remediator.remedies.restart_worker import TRIES_MAX, confirm, decide
from tests.remediator.builders import (
    KEY,
    LIMITS,
    NOW,
    PIDS,
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

FENCED_JOB = job(state=State.FENCING)


def test_the_remedy_is_found_by_the_name_that_rules_use() -> None:
    assert REMEDIES["restart_worker"].decide is decide


# --- what counts as wedged (A2 to A6, and invariant 4)

CONFIRM: dict[str, tuple[dict[str, Any], bool, str]] = {
    "wedged: silent, every GPU idle, RAM still": ({}, True, "silent 130.0 s, GPU idle 130.0 s, RAM still 130.0 s"),
    "exactly at the timeout is wedged": (
        {"beat_age_s": 120.0, "gpu_idle_s": 120.0, "ram_still_s": 120.0},
        True,
        "of 120.0 s allowed",
    ),
    "a hair under the timeout is not": ({"beat_age_s": 119.999}, False, "silent 120.0 s"),
    "its owner allows more silence": ({"stall_timeout_s": 600.0}, False, "of 600.0 s allowed"),
    "its owner allows less silence": (
        {"stall_timeout_s": 5.0, "beat_age_s": 6.0, "gpu_idle_s": 6.0, "ram_still_s": 6.0},
        True,
        "of 5.0 s allowed",
    ),
    "loading, GPU idle, RAM climbing: it is not armed": (
        {"beat_age_s": None, "phase": "load", "ram_still_s": 0.0},
        False,
        "not armed (phase load)",
    ),
    "loading, GPU idle, RAM still (a warm cache): it is not armed": (
        {"beat_age_s": None, "phase": "load"},
        False,
        "not armed",
    ),
    "a slow real step: GPU busy, RAM still": ({"gpu_idle_s": 0.0}, False, "GPU idle 0.0 s"),
    "a slow real step: GPU busy, RAM moving": ({"gpu_idle_s": 0.0, "ram_still_s": 2.0}, False, "GPU idle 0.0 s"),
    "the GPU was busy within the silence": ({"gpu_idle_s": 119.0}, False, "GPU idle 119.0 s"),
    "a slow decode or staging: GPU idle, RAM moving": ({"ram_still_s": 3.0}, False, "RAM still 3.0 s"),
    "it beat within the silence": ({"beat_age_s": 1.0}, False, "silent 1.0 s"),
    "its only GPU is unknown": (
        {"gpu_idle_s": None, "gpu_unknown": "GPU-0 is not measured"},
        False,
        "GPU unknown: GPU-0 is not measured",
    ),
    "one of its two GPUs is unknown": (
        {"gpus": ["GPU-0", "GPU-1"], "gpu_idle_s": None, "gpu_unknown": "GPU-1 is not measured"},
        False,
        "GPU unknown: GPU-1",
    ),
    "the GPU is unknown and nobody says why": ({"gpu_idle_s": None}, False, "GPU unknown: not measured"),
    "its RAM is unknown": ({"ram_still_s": None, "ram_unknown": "cgroup gone"}, False, "RAM unknown: cgroup gone"),
    "its RAM is unknown and nobody says why": ({"ram_still_s": None}, False, "RAM unknown: not measured"),
    "its process holds no lock: it is dead, not stalled": ({"alive": False}, False, "does not hold its lock"),
    "whether it lives cannot be told": ({"alive": None}, False, "does not hold its lock"),
    "it runs no job": ({"job_id": None, "attempt": None}, False, "no job that the stall condition polices"),
    "a video model is not policed": ({"stall_timeout_s": 0.0}, False, "no job that the stall condition polices"),
    "the timeout is not known": ({"stall_timeout_s": None}, False, "no job that the stall condition polices"),
    "a simulated GPU says so": ({"gpu_simulated": True}, True, "simulated GPU"),
}


@pytest.mark.parametrize(("seen", "wedged", "says"), CONFIRM.values(), ids=CONFIRM)
def test_what_confirms_a_stall(seen: dict[str, Any], wedged: bool, says: str) -> None:
    confirmed, because = confirm(evidence(**seen), Trip.STALL)

    assert confirmed is wedged
    assert says in because


@pytest.mark.parametrize("trip", sorted(set(Trip) - {Trip.STALL}))
def test_a_trip_without_local_evidence_of_its_own_confirms_nothing(trip: Trip) -> None:
    assert confirm(evidence(), trip) == (False, f"no local evidence is defined for trip {trip}")


# --- before anything is promised

HELD_UP: dict[str, tuple[Facts, str]] = {
    "the exporter does not answer": (facts(evidence=None, unknown="no answer"), "no_evidence"),
    "the exporter's look is stale": (facts(evidence=evidence(sample_age_s=5.1)), "stale_evidence"),
    "the GPU is busy": (facts(evidence=evidence(gpu_idle_s=0.0)), "unconfirmed"),
    "the job is not armed": (facts(evidence=evidence(beat_age_s=None)), "unconfirmed"),
    "the lock is dead": (facts(evidence=evidence(alive=False)), "unconfirmed"),
    "the engine does not answer": (facts(container=None, container_known=False), "no_container"),
    "the container is in no file of ours": (facts(container=None), "no_container"),
    "the worker's container is unknown": (facts(evidence=evidence(container_incarnation=None)), "no_container"),
    "the container was restarted since the evidence": (facts(container=container(incarnation=REBORN)), "restarted"),
    "the container has stopped since the evidence": (facts(container=stopped()), "restarted"),
}


@pytest.mark.parametrize(("doubtful", "reason"), HELD_UP.values(), ids=HELD_UP)
def test_what_is_not_confirmed_waits_while_the_alert_fires(doubtful: Facts, reason: str) -> None:
    step = decide(doubtful)

    assert isinstance(step, Wait)
    assert step.reason == reason


@pytest.mark.parametrize(("doubtful", "_reason"), HELD_UP.values(), ids=HELD_UP)
def test_what_is_not_confirmed_is_let_go_when_the_alert_ends(doubtful: Facts, _reason: str) -> None:
    ended = replace(doubtful, episode=replace(doubtful.episode, firing=False))

    step = decide(ended)

    assert isinstance(step, Close)
    assert step.outcome is Outcome.UNCONFIRMED
    assert step.because.startswith("the alert ended; ")


SUPERSEDED: dict[str, Facts] = {
    "the worker was replaced": facts(evidence=evidence(worker_incarnation="i2")),
    "the job is at its next attempt": facts(evidence=evidence(attempt=2)),
    "the worker runs another job": facts(evidence=evidence(job_id=8)),
    "the worker runs no job any more": facts(evidence=evidence(job_id=None, attempt=None)),
    "the alert named no attempt, and one runs": facts(episode=episode(job_id=None, attempt=None), evidence=evidence()),
}


@pytest.mark.parametrize("gone", SUPERSEDED.values(), ids=SUPERSEDED)
def test_an_accusation_of_what_is_over_is_closed(gone: Facts) -> None:
    step = decide(gone)

    assert isinstance(step, Close)
    assert step.outcome is Outcome.SUPERSEDED


def test_evidence_exactly_as_old_as_allowed_counts() -> None:
    assert isinstance(decide(facts(evidence=evidence(sample_age_s=LIMITS.evidence_fresh_s))), Begin)


def test_a_worker_whose_incarnation_the_alert_did_not_name_is_judged_by_its_attempt() -> None:
    assert isinstance(decide(facts(episode=episode(incarnation=None))), Begin)


@pytest.mark.parametrize("armed", [True, False])
def test_a_container_that_did_not_opt_in_is_refused(armed: bool) -> None:
    step = decide(facts(container=container(managed=False), armed=armed))

    assert step == Close(outcome=Outcome.REFUSED, because="container c1 did not opt in; nothing is done to it")


def test_a_confirmed_wedge_promises_a_free_of_its_incarnation_and_a_settle_of_its_attempt() -> None:
    step = decide(facts())

    assert isinstance(step, Begin)
    assert (step.free_key, step.settle_key) == (KEY, "7/1")
    assert (step.container_kind, step.container_handle, step.container_name) == ("docker", KEY.partition("@")[0], "c1")
    assert (step.worker_incarnation, step.gpus) == ("i1", ("GPU-0",))
    assert step.because.startswith("silent 130.0 s")


def test_a_resolved_alert_does_not_undo_what_local_evidence_still_shows() -> None:
    assert isinstance(decide(facts(episode=episode(firing=False))), Begin)


def test_a_dry_run_records_once_what_it_would_do_and_then_waits() -> None:
    first = decide(facts(armed=False))
    then = decide(facts(armed=False, episode=episode(would_act=True)))

    assert isinstance(first, WouldAct)
    assert "would fence job 7, stop c1, settle and start: silent 130.0 s" in first.because
    assert isinstance(then, Wait)
    assert then.reason == "dry_run"


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
        Stop(because="it still runs"),
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
            because="it does not run, its cgroup is empty, no GPU of its lists its pids",
        ),
    ),
    "5: then the job is queued again": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped()),
        Requeue(because="stall: retry 1 of 3 (seen dead)"),
    ),
    "6: and only then the container starts": (
        facts(free(Stage.DEAD), settle(Stage.DONE), job=job(state=State.QUEUED), container=stopped()),
        Start(because="it is seen dead and its job is settled"),
    ),
    "7: while it does not run it is started again": (
        facts(free(Stage.STARTING), settle(Stage.DONE), job=job(state=State.QUEUED), container=stopped()),
        Start(because="it does not run yet"),
    ),
    "8: until it runs": (
        facts(
            free(Stage.STARTING),
            settle(Stage.DONE),
            job=job(state=State.RUNNING, attempt=2),
            container=container(incarnation=REBORN),
        ),
        Advance(kind=Kind.FREE, stage=Stage.DONE, because="c1 runs again"),
    ),
    "9: and the episode is over": (
        facts(free(Stage.DONE), settle(Stage.DONE)),
        Close(outcome=Outcome.MENDED, because="the container is free and its job is settled"),
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
        {"evidence": evidence(beat_age_s=0.2)},
        {"evidence": evidence(gpu_idle_s=0.0)},
        {"evidence": evidence(ram_still_s=1.0)},
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
    assert step.reason == "unconfirmed"


def test_what_stays_unconfirmed_is_taken_back_after_the_bound_or_given_up_once_it_was_fenced() -> None:
    alive = {"evidence": evidence(beat_age_s=0.2)}

    planned = decide(facts(free(Stage.PLANNED, for_s=120), settle(Stage.PLANNED, for_s=120), **alive))
    alone = decide(facts(free(Stage.PLANNED, for_s=120), None, **alive))
    fenced = decide(facts(free(Stage.PLANNED, for_s=120), settle(Stage.ABANDONED), **alive))

    assert isinstance(planned, Withdraw)
    assert isinstance(alone, Withdraw)
    assert isinstance(fenced, Advance)
    assert (fenced.kind, fenced.stage) == (Kind.FREE, Stage.ABANDONED)
    assert "no longer confirmed" in fenced.because


def test_patience_is_not_used_up_by_downtime() -> None:
    """The stage was entered ten minutes ago, but nobody looked, or somebody was silent, until a second ago."""
    lately = {"looking_since": NOW - 1.0}
    lingers = {"container": stopped(), "evidence": evidence(gpu_pids={"GPU-0": [4001]})}
    alive = {"evidence": evidence(beat_age_s=0.2)}

    dying = decide(facts(free(Stage.STOPPING, for_s=600), settle(Stage.DONE), **lingers, **lately))
    unconfirmed = decide(facts(free(Stage.PLANNED, for_s=600), settle(Stage.PLANNED, for_s=600), **alive, **lately))

    assert isinstance(dying, Wait)
    assert isinstance(unconfirmed, Wait)


def test_after_downtime_a_fenced_job_is_not_settled_before_its_container_was_stopped() -> None:
    owed = settle(Stage.FENCED, for_s=600)

    back = decide(facts(free(Stage.PLANNED, for_s=600), owed, job=FENCED_JOB, executing_since=NOW - 1.0))
    bound = decide(facts(free(Stage.PLANNED, for_s=600), owed, job=FENCED_JOB, executing_since=NOW - 60.0))

    assert isinstance(back, Stop)
    assert isinstance(bound, Requeue)


@pytest.mark.parametrize("workers", [0, 2, None])
def test_a_container_is_not_freed_for_one_of_several_workers(workers: int | None) -> None:
    step = decide(facts(evidence=evidence(container_workers=workers)))

    assert isinstance(step, Close)
    assert step.outcome is Outcome.REFUSED
    assert "only for one that has it alone" in step.because


def test_an_attempt_whose_container_is_over_is_fenced_without_evidence_for_nothing_of_it_lives() -> None:
    for ended in (None, stopped(), container(incarnation=REBORN)):
        step = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), container=ended, **DOWN))

        assert isinstance(step, Fence)


def test_a_worker_that_has_gone_on_to_another_attempt_keeps_its_container() -> None:
    step = decide(facts(free(Stage.PLANNED), settle(Stage.ABANDONED), evidence=evidence(attempt=2, beat_age_s=0.1)))

    assert step == Advance(
        kind=Kind.FREE,
        stage=Stage.ABANDONED,
        because="the attempt that was accused is over and its worker goes on",
    )


@pytest.mark.parametrize("promised", [Stage.PLANNED, Stage.FENCED])
def test_disarming_stops_short_of_the_next_act_however_long_it_lasts(promised: Stage) -> None:
    job_now = job() if promised is Stage.PLANNED else FENCED_JOB
    known = facts(free(Stage.PLANNED, for_s=9999), settle(promised, for_s=1), job=job_now, armed=False)

    step = decide(known)

    assert isinstance(step, Wait)
    assert step.reason == "dry_run"
    assert isinstance(decide(replace(known, armed=True)), Fence | Stop)


def test_disarming_after_the_stop_still_settles_and_starts_what_was_stopped() -> None:
    settling = facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(), armed=False)
    starting = facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(), armed=False)

    assert isinstance(decide(settling), Requeue)
    assert isinstance(decide(starting), Start)


# --- the settle by itself

SETTLED: dict[str, tuple[Facts, Stage, str]] = {
    "its lease was reclaimed before the alert came": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.QUEUED)),
        Stage.ABANDONED,
        "the job is queued",
    ),
    "another worker runs its next attempt": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(attempt=2)),
        Stage.ABANDONED,
        "attempt 1 is over; the job is running at attempt 2",
    ),
    "it completed after all": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.COMPLETED)),
        Stage.ABANDONED,
        "the job is completed",
    ),
    "its state file claims a job that another worker holds": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(claimed_by="i9")),
        Stage.ABANDONED,
        "attempt 1 is held by another worker than the one that is wedged",
    ),
    "the queue knows no such job": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=None),
        Stage.ABANDONED,
        "the queue has no such job",
    ),
    "a crash came between the requeue and its record": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=job(state=State.QUEUED), container=stopped()),
        Stage.DONE,
        "found settled: the job is queued",
    ),
    "so late that the next attempt runs already": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=job(attempt=2), container=stopped()),
        Stage.DONE,
        "found settled: attempt 1 is over",
    ),
    "a person cancelled it while it was fenced": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=job(state=State.CANCELLED)),
        Stage.DONE,
        "found settled: the job is cancelled",
    ),
}


@pytest.mark.parametrize(("known", "stage", "says"), SETTLED.values(), ids=SETTLED)
def test_a_job_that_is_settled_already_is_not_settled_again(known: Facts, stage: Stage, says: str) -> None:
    step = decide(known)

    assert isinstance(step, Advance)
    assert (step.kind, step.stage) == (Kind.SETTLE, stage)
    assert says in step.because


def test_a_job_that_the_lease_reclaimed_does_not_excuse_its_container() -> None:
    step = decide(facts(free(Stage.PLANNED), settle(Stage.ABANDONED), job=job(state=State.QUEUED)))

    assert isinstance(step, Stop)


def test_a_crash_between_the_fence_and_its_record_records_it_whatever_is_seen_now() -> None:
    step = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=FENCED_JOB, evidence=None))

    assert isinstance(step, Fence)


def test_a_node_that_was_lost_may_be_fenced_too() -> None:
    assert isinstance(decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.NODE_LOST))), Fence)


CAP: dict[str, tuple[dict[str, Any], Step]] = {
    "never tripped before: first retry": ({"watchdog_retries": 0}, Requeue(because="stall: retry 1 of 3 (seen dead)")),
    "tripped once: second retry": ({"watchdog_retries": 1}, Requeue(because="stall: retry 2 of 3 (seen dead)")),
    "tripped twice: third and last retry": (
        {"watchdog_retries": 2},
        Requeue(because="stall: retry 3 of 3 (seen dead)"),
    ),
    "tripped three times: the fourth fails it": (
        {"watchdog_retries": 3},
        Fail(because="stall: all 3 retries are used (seen dead)"),
    ),
    "past a cap that was lowered since": (
        {"watchdog_retries": 9},
        Fail(because="stall: all 3 retries are used (seen dead)"),
    ),
    "an ingest job fails at its first trip": (
        {"watchdog_retries": 0, "retried": False},
        Fail(because="stall: jobs of its class are not retried (seen dead)"),
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
    just_under = facts(free(Stage.STOPPING), settle(Stage.FENCED, for_s=59.9), job=FENCED_JOB)
    at_the_bound = facts(free(Stage.STOPPING), settle(Stage.FENCED, for_s=60), job=FENCED_JOB)

    assert isinstance(decide(just_under), Stop)
    assert decide(at_the_bound) == Requeue(because="stall: retry 1 of 3 (not seen dead within 60 s)")


def test_a_queue_that_does_not_answer_is_waited_for() -> None:
    for promised in (settle(Stage.PLANNED), settle(Stage.FENCED)):
        step = decide(facts(free(Stage.PLANNED), promised, job=None, job_known=False, unknown="locked"))

        assert step == Wait(reason="queue_silent", because="the queue does not answer: locked")


# --- the free by itself


def test_an_engine_that_does_not_answer_is_waited_for() -> None:
    for stage in (Stage.PLANNED, Stage.STOPPING, Stage.DEAD, Stage.STARTING):
        known = facts(free(stage), settle(Stage.DONE), container=None, container_known=False, unknown="no daemon")

        assert decide(known) == Wait(reason="engine_silent", because="the container engine does not answer: no daemon")


ENDED: dict[str, tuple[Any, str]] = {
    "it is gone": (None, "the container is gone"),
    "somebody else restarted it": (container(incarnation=REBORN), "the container was restarted by someone else"),
    "it has stopped by itself": (stopped(), "the container has stopped by itself"),
}


@pytest.mark.parametrize(("now", "says"), ENDED.values(), ids=ENDED)
def test_an_incarnation_that_is_over_is_not_stopped(now: Any, says: str) -> None:
    known = facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, container=now, evidence=None)

    assert decide(known) == Advance(kind=Kind.FREE, stage=Stage.DEAD, because=says)


AFTER_STOP: dict[str, tuple[Facts, Step]] = {
    "its cgroup still holds a process: it is stopped once more": (
        facts(free(Stage.STOPPING), container=stopped(pids=frozenset({4002}))),
        Stop(because="it does not run, but processes [4002] are still in its cgroup"),
    ),
    "also one that came after the stop": (
        facts(free(Stage.STOPPING), container=stopped(pids=frozenset({5001}))),
        Stop(because="it does not run, but processes [5001] are still in its cgroup"),
    ),
    "a process that does not go is left to a person": (
        facts(free(Stage.STOPPING, for_s=120, tries=TRIES_MAX), container=stopped(pids=frozenset({4002}))),
        Advance(
            kind=Kind.FREE,
            stage=Stage.ABANDONED,
            because="processes [4002] are still in its cgroup: a person must look",
        ),
    ),
    "restarted by somebody else: the processes of the new one are not the old one's": (
        facts(
            free(Stage.STOPPING),
            container=container(incarnation=REBORN, pids=frozenset({5001})),
            evidence=evidence(gpu_pids={"GPU-0": [5001]}),
        ),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            because="it does not run, its cgroup is empty, no GPU of its lists its pids",
        ),
    ),
    "restarted by somebody else while a process of the old one lingers": (
        facts(free(Stage.STOPPING), container=container(incarnation=REBORN, pids=frozenset({4002, 5001}))),
        Wait(reason="dying", because="processes [4002] are still in its cgroup"),
    ),
    "the driver still lists one of its pids": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": [4001, 9]})),
        Wait(reason="dying", because="the driver still lists its processes [4001]"),
    ),
    "the driver never lets go of it": (
        facts(free(Stage.STOPPING, for_s=120), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": [4001]})),
        Advance(
            kind=Kind.FREE,
            stage=Stage.ABANDONED,
            because="the driver still lists its processes [4001]: a person must look",
        ),
    ),
    "no GPU could be asked": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids=None)),
        Wait(
            reason="driver_silent",
            because="the driver could not be asked whether its processes are gone: not listed",
        ),
    ),
    "its own GPU could not be asked": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": None, "GPU-1": []})),
        Wait(
            reason="driver_silent",
            because="the driver could not be asked whether its processes are gone: not listed",
        ),
    ),
    "its own GPU fell off the bus": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-1": []})),
        Wait(
            reason="driver_silent",
            because="the driver could not be asked whether its processes are gone: not listed",
        ),
    ),
    "a GPU that is not its own could not be asked, which says nothing of it": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": [], "GPU-1": None})),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            because="it does not run, its cgroup is empty, no GPU of its lists its pids",
        ),
    ),
    "the look is from before the stop": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(sample_age_s=60.0, gpu_pids={"GPU-0": []})),
        Wait(
            reason="driver_silent",
            because="the driver could not be asked whether its processes are gone: not listed",
        ),
    ),
    "the exporter is silent": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=None, unknown="no answer"),
        Wait(
            reason="driver_silent",
            because="the driver could not be asked whether its processes are gone: no answer",
        ),
    ),
    "its worker heeded SIGTERM, and took its files away: the exporter knows it no more": (
        facts(free(Stage.STOPPING), container=stopped(), **DOWN),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            because="it does not run, its cgroup is empty, its worker ended cleanly",
        ),
    ),
    "the container is gone, and its worker": (
        facts(free(Stage.STOPPING), container=None, **DOWN),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            because="it does not run, its cgroup is empty, its worker ended cleanly",
        ),
    ),
    "it is up still, however late it is: it is stopped once more": (
        facts(free(Stage.STOPPING, for_s=600, tries=TRIES_MAX - 1)),
        Stop(because="it still runs"),
    ),
    "it cannot be killed": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX)),
        Advance(
            kind=Kind.FREE,
            stage=Stage.ABANDONED,
            because=f"it cannot be stopped, after {TRIES_MAX} tries: a person must look",
        ),
    ),
    "the driver cannot be asked for ever so long: that is no ground to give it up": (
        facts(free(Stage.STOPPING, for_s=6000), container=stopped(), evidence=None, unknown="no answer"),
        Wait(
            reason="driver_silent",
            because="the driver could not be asked whether its processes are gone: no answer",
        ),
    ),
}


@pytest.mark.parametrize(("known", "wanted"), AFTER_STOP.values(), ids=AFTER_STOP)
def test_after_the_stop_it_is_seen_dead_stopped_again_or_given_up(known: Facts, wanted: Step) -> None:
    fenced = replace(known, episode=replace(known.episode, settle=settle(Stage.FENCED)), job=FENCED_JOB)

    assert decide(fenced) == wanted


def test_what_cannot_be_killed_gives_its_job_back_at_the_bound_and_is_closed_as_partly_mended() -> None:
    waits = decide(facts(free(Stage.ABANDONED), settle(Stage.FENCED, for_s=59), job=FENCED_JOB))
    settles = decide(facts(free(Stage.ABANDONED), settle(Stage.FENCED, for_s=60), job=FENCED_JOB))
    closes = decide(facts(free(Stage.ABANDONED), settle(Stage.DONE)))

    assert isinstance(waits, Wait)
    assert waits.reason == "bound"
    assert isinstance(settles, Requeue)
    assert closes == Close(outcome=Outcome.PARTLY, because="free abandoned, settle done")


BACK_UP: dict[str, tuple[Facts, Step]] = {
    "it does not start before its job is settled": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=None, job_known=False, container=stopped(), unknown="locked"),
        Wait(reason="queue_silent", because="the queue does not answer: locked"),
    ),
    "it was removed: there is nothing to start": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=None),
        Advance(kind=Kind.FREE, stage=Stage.DONE, because="the container is gone; there is nothing to start"),
    ),
    "somebody else has started it": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=container(incarnation=REBORN)),
        Advance(kind=Kind.FREE, stage=Stage.DONE, because="the container was started by someone else"),
    ),
    "a container without a job starts as soon as it is dead": (
        facts(free(Stage.DEAD), None, container=stopped()),
        Start(because="it is seen dead"),
    ),
    "its settle was abandoned: it starts all the same": (
        facts(free(Stage.DEAD), settle(Stage.ABANDONED), container=stopped()),
        Start(because="it is seen dead"),
    ),
    "it vanished while it was being started": (
        facts(free(Stage.STARTING), settle(Stage.DONE), container=None),
        Advance(kind=Kind.FREE, stage=Stage.ABANDONED, because="it did not start again: a person must look"),
    ),
    "it was started and has ended by itself: that is its own matter": (
        facts(free(Stage.STARTING), settle(Stage.DONE), container=stopped(incarnation=REBORN)),
        Advance(kind=Kind.FREE, stage=Stage.DONE, because="c1 was started, and has ended by itself since"),
    ),
    "the executor was killed before the start, and comes back late: it starts it": (
        facts(free(Stage.STARTING, for_s=600, tries=1), settle(Stage.DONE), container=stopped()),
        Start(because="it does not run yet"),
    ),
    "it does not start, try after try": (
        facts(free(Stage.STARTING, tries=TRIES_MAX), settle(Stage.DONE), container=stopped()),
        Advance(kind=Kind.FREE, stage=Stage.ABANDONED, because="it did not start again: a person must look"),
    ),
}


@pytest.mark.parametrize(("known", "wanted"), BACK_UP.values(), ids=BACK_UP)
def test_how_it_comes_back_up(known: Facts, wanted: Step) -> None:
    assert decide(known) == wanted


CLOSED: dict[str, tuple[Facts, Outcome]] = {
    "both done": (facts(free(Stage.DONE), settle(Stage.DONE)), Outcome.MENDED),
    "freed, and there was no job": (facts(free(Stage.DONE), None), Outcome.MENDED),
    "freed, and the job was settled by somebody else": (
        facts(free(Stage.DONE), settle(Stage.ABANDONED)),
        Outcome.PARTLY,
    ),
    "given up, and there was no job": (facts(free(Stage.ABANDONED), None), Outcome.PARTLY),
}


@pytest.mark.parametrize(("known", "outcome"), CLOSED.values(), ids=CLOSED)
def test_how_an_episode_closes(known: Facts, outcome: Outcome) -> None:
    step = decide(known)

    assert isinstance(step, Close)
    assert step.outcome is outcome


# --- whatever the facts

SECONDS = st.one_of(st.none(), st.sampled_from([0.0, 119.9, 120.0, 130.0]))
PID_SETS = st.sampled_from([frozenset[int](), PIDS, frozenset({5001})])

EVIDENCE = st.builds(
    evidence,
    sample_age_s=st.sampled_from([0.3, 5.0, 5.1, 60.0]),
    alive=st.sampled_from([True, True, False, None]),
    worker_incarnation=st.sampled_from(["i1", "i1", "i2"]),
    container_incarnation=st.sampled_from([KEY, KEY, REBORN, None]),
    job_id=st.sampled_from([7, 7, None]),
    attempt=st.sampled_from([1, 1, 2]),
    stall_timeout_s=st.sampled_from([120.0, 120.0, 0.0, None]),
    beat_age_s=SECONDS,
    gpu_idle_s=SECONDS,
    ram_still_s=SECONDS,
    gpu_pids=st.sampled_from([None, {}, {"GPU-0": None}, {"GPU-0": []}, {"GPU-0": [4001]}]),
)
WEDGED = st.builds(evidence)
CONTAINER = st.builds(
    container,
    incarnation=st.sampled_from([KEY, REBORN]),
    running=st.booleans(),
    managed=st.booleans(),
    pids=PID_SETS,
)
FREE = st.builds(
    lambda stage, for_s: free(stage, for_s=for_s),
    st.sampled_from([stage for stage in Stage if stage is not Stage.FENCED]),
    st.sampled_from([0.0, 59.0, 119.9, 120.0]),
)
SETTLE = st.builds(
    lambda stage, for_s: settle(stage, for_s=for_s),
    st.sampled_from([Stage.PLANNED, Stage.FENCED, Stage.DONE, Stage.ABANDONED]),
    st.sampled_from([0.0, 59.9, 60.0, 120.0]),
)
JOB = st.builds(
    job,
    attempt=st.sampled_from([1, 1, 2]),
    claimed_by=st.sampled_from(["i1", "i1", "i2", None]),
    state=st.sampled_from([State.FENCING, *State]),
    watchdog_retries=st.integers(0, 5),
    retried=st.booleans(),
)


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    promised = draw(st.none() | FREE)
    return facts(
        episode=episode(
            promised,
            None if promised is None else draw(st.none() | SETTLE),
            firing=draw(st.booleans()),
            would_act=draw(st.booleans()),
            incarnation=draw(st.sampled_from(["i1", None])),
            trip=draw(st.sampled_from([Trip.STALL, Trip.STALL, *Trip])),
        ),
        armed=draw(st.booleans()),
        evidence=draw(st.none() | EVIDENCE | WEDGED),
        container=draw(st.none() | CONTAINER),
        container_known=draw(st.booleans()),
        job=draw(st.none() | JOB),
        job_known=draw(st.booleans()),
        worker_ended=draw(st.booleans()),
    )


def confirmed(known: Facts) -> bool:
    """By another road than the remedy's: what must hold of the evidence for anything to be touched."""
    seen: WorkerFacts | None = known.evidence
    if seen is None or seen.sample_age_s > LIMITS.evidence_fresh_s or known.episode.trip is not Trip.STALL:
        return False
    ages = (seen.beat_age_s, seen.gpu_idle_s, seen.ram_still_s)
    return (
        seen.alive is True
        and seen.container_incarnation == KEY
        and (seen.job_id, seen.attempt) == (7, 1)
        and bool(seen.stall_timeout_s)
        and all(age is not None and age >= (seen.stall_timeout_s or 0) for age in ages)
    )


ANY = settings(max_examples=300, deadline=None)


@ANY
@given(any_facts())
def test_nothing_is_stopped_without_fresh_confirming_evidence_unless_its_stop_has_begun(known: Facts) -> None:
    step = decide(known)
    promised = known.episode.free

    if isinstance(step, Stop):
        assert promised is not None
        assert known.container_known
        assert known.container is not None
        assert known.container.incarnation == promised.key
        assert promised.stage is Stage.STOPPING or (promised.stage is Stage.PLANNED and confirmed(known))


@ANY
@given(any_facts())
def test_nothing_is_fenced_that_lives_and_is_not_confirmed(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Fence):
        assert known.job is not None
        ended = known.container_known and (
            known.container is None or known.container.incarnation != KEY or not known.container.running
        )
        held = known.job.claimed_by == "i1"
        assert known.job.state is State.FENCING or (known.armed and held and (ended or confirmed(known)))


@ANY
@given(any_facts())
def test_nothing_is_requeued_or_failed_before_it_is_dead_or_the_bound_has_passed(known: Facts) -> None:
    step = decide(known)
    promised, owed = known.episode.free, known.episode.settle

    if isinstance(step, Requeue | Fail):
        assert promised is not None
        assert owed is not None
        assert owed.stage is Stage.FENCED
        assert known.job is not None
        assert (known.job.state, known.job.attempt) == (State.FENCING, 1)
        dead = promised.stage in (Stage.DEAD, Stage.STARTING, Stage.DONE)
        assert dead or NOW - owed.entered_at >= LIMITS.settle_bound_s
        assert isinstance(step, Fail) or known.job.watchdog_retries < LIMITS.retries_max


@ANY
@given(any_facts())
def test_while_it_is_not_armed_and_nothing_was_begun_it_only_waits_closes_or_records(known: Facts) -> None:
    assume(known.episode.free is None)

    step = decide(replace(known, armed=False))

    assert isinstance(step, Wait | Close | WouldAct)
    assert not isinstance(step, WouldAct) or not known.episode.would_act


@ANY
@given(any_facts())
def test_nothing_begins_but_on_confirmed_evidence_about_a_container_that_opted_in(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Begin | WouldAct):
        assert confirmed(known)
        assert known.container is not None
        assert known.container.managed
        assert known.container.running
        assert known.episode.free is None


@ANY
@given(any_facts())
def test_nothing_starts_before_its_job_is_settled(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Start):
        assert known.episode.settle is None or known.episode.settle.over
        assert known.container is not None
        assert not known.container.running


@ANY
@given(any_facts())
def test_an_episode_closes_only_when_nothing_is_owed_any_more(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Close):
        assert all(intent is None or intent.over for intent in (known.episode.free, known.episode.settle))


@ANY
@given(any_facts())
def test_every_step_says_why(known: Facts) -> None:
    assert decide(known).because
