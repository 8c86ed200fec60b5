"""Free a container as truth tables: warn, stop, see it dead, start, give up; by the remedy `restart_worker`."""

from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.procfs import ProcessId
from remediator.plan import (
    Advance,
    Close,
    Facts,
    Fence,
    Kind,
    Outcome,
    Quarantine,
    Requeue,
    Stage,
    Start,
    Step,
    Stop,
    Unconfirmed,
    Wait,
    Warn,
    Withdraw,
)
from remediator.reasons import Reason
from remediator.remedies.restart import RETRY_S, TRIES_MAX
from remediator.remedies.restart_worker import QUEUE_TIMEOUT_S, decide
from tests.remediator.builders import (
    FENCED_JOB,
    LIMITS,
    REBORN,
    container,
    evidence,
    facts,
    free,
    settle,
    stopped,
)

pytestmark = pytest.mark.pure

DOWN: dict[str, Any] = {"evidence": None, "unknown": "404", "worker_ended": True}


ON_A_LOST_GPU: dict[str, Any] = {"gpu_pids": {"GPU-0": None, "GPU-1": []}, "lost_gpus_s": {"GPU-0": 60.0}}
JUST_LOST = ON_A_LOST_GPU | {"lost_gpus_s": {"GPU-0": 59.9}}
TAKEN = Quarantine(reason=Reason.GPU_LOST, message="", lost=("GPU-0",))
WITH_LOST: dict[str, tuple[Facts, type[Step] | Step]] = {
    "only promised: nothing is taken from anybody yet": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), evidence=evidence(**ON_A_LOST_GPU)), Fence,
    ),
    "not while its container runs still: it is stopped first, for it may hold the queue's lock": (
        facts(free(Stage.STOPPING, tries=1), settle(Stage.PLANNED), queue_stuck_for_s=QUEUE_TIMEOUT_S,
              evidence=evidence(**ON_A_LOST_GPU)),
        Stop(message=""),
    ),
    "nor while a process of it is left": (
        facts(free(Stage.STOPPING, tries=1), settle(Stage.FENCED), job=FENCED_JOB,
              container=stopped(pids=frozenset({4001})), evidence=evidence(**ON_A_LOST_GPU)),
        Stop(message=""),
    ),
    "nor instead of seeing it dead": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(),
              evidence=evidence(**ON_A_LOST_GPU)),
        Advance(kind=Kind.FREE, stage=Stage.DEAD,
                reason=Reason.SEEN_DEAD, message=""),
    ),
    "once it is seen dead, before its job is settled": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(),
              evidence=evidence(**ON_A_LOST_GPU)),
        TAKEN,
    ),
    "and where its job is settled though it is not seen dead": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=60.0,
              limits=replace(LIMITS, unconfirmed=Unconfirmed.REQUEUE), evidence=evidence(**ON_A_LOST_GPU)),
        TAKEN,
    ),
    "before its worker starts": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(), evidence=evidence(**ON_A_LOST_GPU)), TAKEN,
    ),
    "once: then it is seen dead without that GPU's list": (
        facts(free(Stage.STOPPING, lost=["GPU-0"]), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(),
              evidence=evidence(**ON_A_LOST_GPU)),
        Advance(kind=Kind.FREE, stage=Stage.DEAD,
                reason=Reason.SEEN_DEAD, message=""),
    ),
    "not while another of its GPUs may list one of its pids": (
        facts(free(Stage.STOPPING, lost=["GPU-0"], gpus=["GPU-0", "GPU-1"]), settle(Stage.FENCED), job=FENCED_JOB,
              container=stopped(), evidence=evidence(gpu_pids={"GPU-1": None}, lost_gpus_s={"GPU-0": 60.0})),
        Wait(reason=Reason.DRIVER_UNREACHABLE, message=""),
    ),
    "nor where nobody has looked for its processes": (
        facts(free(Stage.STOPPING, cgroup=None), settle(Stage.FENCED), job=FENCED_JOB, container=None,
              evidence=evidence(**ON_A_LOST_GPU)),
        Wait(reason=Reason.DRIVER_UNREACHABLE, message=""),
    ),
    "nor its engine has told where they were": (
        facts(free(Stage.STOPPING, cgroup=None), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(cgroup=None),
              evidence=evidence(**ON_A_LOST_GPU)),
        Wait(reason=Reason.DRIVER_UNREACHABLE, message=""),
    ),
    "though they were looked for in the session of one that no cgroup holds": (
        facts(free(Stage.STOPPING, cgroup=None), settle(Stage.FENCED), job=FENCED_JOB,
              container=stopped(cgroup=None, session=4001), evidence=evidence(**ON_A_LOST_GPU)),
        Advance(kind=Kind.FREE, stage=Stage.DEAD,
                reason=Reason.SEEN_DEAD, message=""),
    ),
    "and in the cgroup of one that its engine has no more": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, container=None,
              evidence=evidence(**ON_A_LOST_GPU)),
        Advance(kind=Kind.FREE, stage=Stage.DEAD,
                reason=Reason.SEEN_DEAD, message=""),
    ),
    "not while a process is left there, also one that came after the stop": (
        facts(free(Stage.STOPPING, tries=1), settle(Stage.FENCED), job=FENCED_JOB,
              container=stopped(incarnation="", pids=frozenset({4999})), evidence=evidence(**ON_A_LOST_GPU)),
        Wait(reason=Reason.STOPPING, message=""),
    ),
    "only the lost one of its two": (
        facts(free(Stage.DEAD, gpus=["GPU-1", "GPU-0"]), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(),
              evidence=evidence(**ON_A_LOST_GPU)),
        TAKEN,
    ),
    "a GPU that another container lost is none of its own": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(),
              evidence=evidence(lost_gpus_s={"GPU-9": 60.0})),
        Start,
    ),
    "not for a moment's loss": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(), evidence=evidence(**JUST_LOST)),
        Start,
    ),
    "for which nothing is seen dead either": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(),
              evidence=evidence(**JUST_LOST)),
        Wait(reason=Reason.DRIVER_UNREACHABLE, message=""),
    ),
    "not by an old look": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(),
              evidence=evidence(**ON_A_LOST_GPU, sample_age_s=60.0)),
        Start,
    ),
    "not disarmed": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(), armed=False,
              evidence=evidence(**ON_A_LOST_GPU)),
        Requeue,
    ),
    "what cannot be killed has the rest of its GPUs taken out of use too": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX, lost=["GPU-0"]), settle(Stage.DONE), free_for_s=120,
              evidence=evidence(**ON_A_LOST_GPU)),
        Quarantine(reason=Reason.STOP_FAILED, message=""),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "wanted"), WITH_LOST.values(), ids=WITH_LOST)
def test_a_lost_gpu_is_taken_out_of_use_once_its_container_is_being_freed(
    known: Facts, wanted: type[Step] | Step
) -> None:
    step = decide(known)

    assert isinstance(step, wanted) if isinstance(wanted, type) else step == wanted


# --- the warning before the first act

WARNING = replace(LIMITS, warn_signal="SIGUSR1", warn_grace_s=60.0)
LISTENER = ProcessId(pid=4001, start_ticks=7)
WARNED = {"signal": "SIGUSR1", "pid": 4001, "tries": 1, "done": True}
PROMISED: dict[str, Any] = {"limits": WARNING, "listener": LISTENER}

WARNINGS: dict[str, tuple[Facts, Step | str]] = {
    "it is warned before its job is fenced": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), **PROMISED),
        Warn(message="", signal="SIGUSR1", listener=LISTENER),
    ),
    "warned, and in its grace": (
        facts(free(Stage.PLANNED, warned=WARNED), settle(Stage.PLANNED), warned_for_s=59.9, **PROMISED),
        Reason.GRACE_PERIOD,
    ),
    "warned, and its grace is over": (
        facts(free(Stage.PLANNED, warned=WARNED), settle(Stage.PLANNED), warned_for_s=60.0, **PROMISED),
        Fence(message=""),
    ),
    "warned, and it beats again: it is left alone": (
        facts(
            free(Stage.PLANNED, warned=WARNED),
            settle(Stage.PLANNED),
            evidence=evidence(step_beat_age_s=1.0),
            warned_for_s=60.0,
            **PROMISED,
        ),
        Reason.UNCONFIRMED,
    ),
    "warned, and it beat all the while: the promise is taken back": (
        facts(
            free(Stage.PLANNED, warned=WARNED),
            settle(Stage.PLANNED),
            evidence=evidence(step_beat_age_s=1.0),
            settle_for_s=120.0,
            **PROMISED,
        ),
        Withdraw(reason=Reason.UNCONFIRMED, message=""),
    ),
    "warned, and it has ended by itself: nothing is waited for": (
        facts(free(Stage.PLANNED, warned=WARNED), settle(Stage.PLANNED), container=stopped(), **PROMISED),
        Fence(message=""),
    ),
    "nobody knows whether the signal was sent: it is warned once more": (
        facts(free(Stage.PLANNED, warned={**WARNED, "done": False}), settle(Stage.PLANNED), **PROMISED),
        Warn(message="", signal="SIGUSR1", listener=LISTENER),
    ),
    "nobody knows that twice: it is not warned again": (
        facts(free(Stage.PLANNED, warned={**WARNED, "done": False, "tries": 2}), settle(Stage.PLANNED), **PROMISED),
        Reason.GRACE_PERIOD,
    ),
    "nobody knows whether the signal was sent, and now it is seen by nobody: it has its grace": (
        facts(free(Stage.PLANNED, warned={**WARNED, "done": False}), settle(Stage.PLANNED), limits=WARNING),
        Reason.GRACE_PERIOD,
    ),
    "its engine does not answer: it is warned before its job is fenced, and not now": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), container=None, container_known=False, **PROMISED),
        Reason.ENGINE_UNREACHABLE,
    ),
    "its engine does not answer in its grace": (
        facts(
            free(Stage.PLANNED, warned=WARNED), settle(Stage.PLANNED), container=None, container_known=False, **PROMISED
        ),
        Reason.GRACE_PERIOD,
    ),
    "it was warned under a promise that was taken back": (
        facts(free(Stage.PLANNED, warned={**WARNED, "before": True}), settle(Stage.PLANNED), **PROMISED),
        Fence(message=""),
    ),
    "it does not listen": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), limits=WARNING, deaf="process 4001 does not catch SIGUSR1"),
        Fence(message=""),
    ),
    "its job is not its own any more, and its container is stopped all the same": (
        facts(free(Stage.PLANNED), settle(Stage.ABANDONED), job=None, **PROMISED),
        Warn(message="", signal="SIGUSR1", listener=LISTENER),
    ),
    "fenced already: it ends itself, and no time is left for it": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, **PROMISED),
        Stop(message=""),
    ),
    "disarmed since: it is not warned either": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), armed=False, **PROMISED),
        Reason.DRY_RUN,
    ),
}


@pytest.mark.parametrize(("known", "wanted"), WARNINGS.values(), ids=WARNINGS)
def test_what_asked_for_a_warning_has_its_grace_before_anything_is_taken_from_it(
    known: Facts, wanted: Step | str
) -> None:
    step = decide(known)

    assert (step.reason if isinstance(step, Wait) else step) == wanted


HOLDING = replace(LIMITS, unconfirmed=Unconfirmed.HOLD)


def test_a_fenced_job_that_is_to_be_held_is_settled_only_when_its_process_was_seen_dead() -> None:
    known: dict[str, Any] = {"job": FENCED_JOB, "settle_for_s": 6000.0, "limits": HOLDING}
    still_up = facts(free(Stage.STOPPING), settle(Stage.FENCED), **known)
    given_up = facts(free(Stage.ABANDONED), settle(Stage.FENCED), **known)
    seen_dead = facts(free(Stage.DEAD), settle(Stage.FENCED), container=stopped(), **known)

    held = decide(given_up)

    assert isinstance(decide(still_up), Stop)
    assert isinstance(held, Wait)
    assert held.reason == Reason.EXIT_UNCONFIRMED
    assert decide(seen_dead) == Requeue(retry=1, seen_dead=True, message="", avoid_s=600.0)


SILENT_QUEUE: dict[str, Any] = {"job": None, "job_known": False, "unknown": "locked"}

QUEUE_SILENT: dict[str, tuple[Facts, type[Step]]] = {
    "nothing is fenced yet: all of it waits": (facts(free(Stage.PLANNED), settle(Stage.PLANNED), **SILENT_QUEUE), Wait),
    "fenced and not stopped: the stop goes on": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), **SILENT_QUEUE),
        Stop,
    ),
    "fenced, and it shows life: it is not stopped": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), evidence=evidence(step_beat_age_s=0.2), **SILENT_QUEUE),
        Wait,
    ),
    "stopping: it is stopped again": (facts(free(Stage.STOPPING), settle(Stage.FENCED), **SILENT_QUEUE), Stop),
    "stopped: it is seen dead": (
        facts(
            free(Stage.STOPPING),
            settle(Stage.FENCED),
            container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": []}),
            **SILENT_QUEUE,
        ),
        Advance,
    ),
    "dead: the start waits for the settle": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), container=stopped(), **SILENT_QUEUE),
        Wait,
    ),
    "given up: the settle waits for the queue, past its bound": (
        facts(free(Stage.ABANDONED), settle(Stage.FENCED), settle_for_s=600.0, **SILENT_QUEUE),
        Wait,
    ),
    "settled: the start goes on": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(), **SILENT_QUEUE),
        Start,
    ),
}


STUCK: dict[str, tuple[Facts, type[Step]]] = {
    "for a moment only: it is fenced first": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=9.9),
        Fence,
    ),
    "it can be read and takes nothing: the wedge may hold its lock": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=10.0),
        Stop,
    ),
    "it is away altogether": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=10.0, **SILENT_QUEUE),
        Stop,
    ),
    "in a dry run": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=10.0, armed=False),
        Wait,
    ),
    "it is wedged no more": (
        facts(
            free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=10.0, evidence=evidence(step_beat_age_s=0.1)
        ),
        Wait,
    ),
    "stopped: its death is looked for": (
        facts(
            free(Stage.STOPPING), settle(Stage.PLANNED), queue_stuck_for_s=20.0, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": []}),
        ),
        Advance,
    ),
    "dead: now it is fenced": (
        facts(free(Stage.DEAD), settle(Stage.PLANNED), queue_stuck_for_s=20.0, container=stopped()),
        Fence,
    ),
    "it cannot be killed: fenced as soon as the queue takes it": (
        facts(free(Stage.ABANDONED), settle(Stage.PLANNED), queue_stuck_for_s=20.0, container=stopped()),
        Fence,
    ),
}  # fmt: skip


AT_THE_BOUND: dict[str, Any] = {"job": FENCED_JOB, "settle_for_s": 60.0}
WITHOUT_PATIENCE: dict[str, Any] = {**AT_THE_BOUND, "free_for_s": 120.0}

REFUSED: dict[str, tuple[Facts, type[Step]]] = {
    "a moment ago: it is stopped again meanwhile": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=9.9, **AT_THE_BOUND),
        Stop,
    ),
    "its GPU is lost: it is stopped again all the same": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=0.0, evidence=evidence(**ON_A_LOST_GPU),
            **AT_THE_BOUND,
        ),
        Stop,
    ),
    "its death is looked for": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=0.0, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": []}), **AT_THE_BOUND,
        ),
        Advance,
    ),
    "it was not stopped yet, and is confirmed anew": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), refused_s_ago=0.0, **AT_THE_BOUND),
        Stop,
    ),
    "it was not stopped yet, and shows life": (
        facts(
            free(Stage.PLANNED), settle(Stage.FENCED), refused_s_ago=0.0, evidence=evidence(step_beat_age_s=0.1),
            **AT_THE_BOUND,
        ),
        Wait,
    ),
    "it cannot be stopped, and patience is over: only its end may free the queue": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=9.9, **WITHOUT_PATIENCE),
        Stop,
    ),
    "as is what its stop left in its cgroup": (
        facts(
            free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=9.9,
            container=stopped(pids=frozenset({4002})), **WITHOUT_PATIENCE,
        ),
        Stop,
    ),
    "patience is over, and it was stopped not long ago": (
        facts(
            free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=9.9, stopped_s_ago=299.9,
            **WITHOUT_PATIENCE,
        ),
        Wait,
    ),
    "and it was not": (
        facts(
            free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=9.9, stopped_s_ago=300.0,
            **WITHOUT_PATIENCE,
        ),
        Stop,
    ),
    "patience is over with a process that its GPU lists: it is waited for": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=9.9, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": [4001]}), **WITHOUT_PATIENCE,
        ),
        Wait,
    ),
    "patience is over, and the queue has its turn": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=10.0, **WITHOUT_PATIENCE),
        Requeue,
    ),
    "what it refused was a quarantine: that is tried again": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.DONE), refused_s_ago=10.0, **WITHOUT_PATIENCE),
        Quarantine,
    ),
    "longer ago, and a stop has ended it just now: its death is looked for": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=20.0, stopped_s_ago=9.9, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": []}), **AT_THE_BOUND,
        ),
        Advance,
    ),
    "and its GPU lists it for a moment still": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=20.0, stopped_s_ago=9.9, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": [4001]}), **AT_THE_BOUND,
        ),
        Wait,
    ),
    "and it is listed as long as a stop is tried again": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=20.0, stopped_s_ago=10.0, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": [4001]}), **AT_THE_BOUND,
        ),
        Requeue,
    ),
    "and the stop did not end it: the queue has its turn": (
        facts(
            free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=20.0, stopped_s_ago=0.0,
            **AT_THE_BOUND,
        ),
        Requeue,
    ),
    "as long ago as a stop is tried again": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=10.0, **AT_THE_BOUND),
        Requeue,
    ),
    "it was seen dead since": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), refused_s_ago=0.0, container=stopped(), **AT_THE_BOUND),
        Requeue,
    ),
    "its free was given up since": (
        facts(free(Stage.ABANDONED), settle(Stage.FENCED), refused_s_ago=0.0, **AT_THE_BOUND),
        Requeue,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "wanted"), REFUSED.values(), ids=REFUSED)
def test_what_the_queue_refused_leaves_the_free_its_turn(known: Facts, wanted: type[Step]) -> None:
    assert isinstance(decide(known), wanted)


@pytest.mark.parametrize(("known", "wanted"), STUCK.values(), ids=STUCK)
def test_a_queue_that_takes_nothing_holds_up_a_stop_for_a_while_and_no_longer(known: Facts, wanted: type[Step]) -> None:
    assert isinstance(decide(known), wanted)


@pytest.mark.parametrize(("known", "wanted"), QUEUE_SILENT.values(), ids=QUEUE_SILENT)
def test_a_silent_queue_holds_up_what_needs_it_only(known: Facts, wanted: type[Step]) -> None:
    assert isinstance(decide(known), wanted)


def test_a_queue_that_does_not_answer_is_waited_for() -> None:
    step = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), **SILENT_QUEUE))

    assert step == Wait(reason=Reason.QUEUE_UNREACHABLE, message="")


# --- the free by itself


def test_an_engine_that_does_not_answer_is_waited_for() -> None:
    for stage in (Stage.PLANNED, Stage.STOPPING, Stage.DEAD, Stage.STARTING):
        known = facts(free(stage), settle(Stage.DONE), container=None, container_known=False, unknown="no daemon")

        assert decide(known) == Wait(reason=Reason.ENGINE_UNREACHABLE, message="")


ENDED: dict[str, Any] = {
    "it is gone": None,
    "somebody else restarted it": container(incarnation=REBORN, pids=frozenset({5001})),
    "it has stopped by itself": stopped(),
}


@pytest.mark.parametrize("now", ENDED.values(), ids=ENDED)
def test_an_incarnation_that_is_over_is_not_stopped(now: Any) -> None:
    gone = evidence(gpu_pids={"GPU-0": []})
    known = facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, container=now, evidence=gone)

    assert decide(known) == Advance(kind=Kind.FREE, stage=Stage.DEAD, reason=Reason.SEEN_DEAD, message="")


def test_one_that_ended_by_itself_and_left_a_process_on_its_gpu_is_not_dead() -> None:
    known = facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, container=stopped())

    assert decide(known) == Wait(reason=Reason.STOPPING, message="")
    assert isinstance(decide(replace(known, free_for_s=120.0, quiet_for_s=120.0)), Quarantine)


DISARMED: dict[str, tuple[Facts, type[Step]]] = {
    "it still runs": (facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB), Wait),
    "it left a process": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(pids=frozenset({4002})),
        ),
        Wait,
    ),
    "it cannot be killed": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), job=FENCED_JOB, free_for_s=120),
        Wait,
    ),
    "the bound has passed": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=600.0),
        Wait,
    ),
    "it was given up, and the bound has passed": (
        facts(free(Stage.ABANDONED), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=600.0),
        Wait,
    ),
    "it is seen dead: its job is given back": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped()),
        Requeue,
    ),
    "its job is given back: so is the container": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=stopped()),
        Start,
    ),
    "its fence ended it, and its job is given back: so is the container": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped()),
        Start,
    ),
    "nobody stopped it: nobody starts it": (
        facts(free(Stage.DEAD), settle(Stage.ABANDONED), container=stopped()),
        Wait,
    ),
    "it never had a job, and nobody stopped it: nobody starts it": (
        facts(free(Stage.DEAD), None, container=stopped()),
        Wait,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "wanted"), DISARMED.values(), ids=DISARMED)
def test_disarmed_in_the_middle_nothing_more_is_taken_and_what_was_taken_is_given_back(
    known: Facts, wanted: type[Step]
) -> None:
    step = decide(replace(known, armed=False))

    assert isinstance(step, wanted)
    assert not isinstance(step, Wait) or step.reason == Reason.DRY_RUN
    assert not isinstance(decide(known), Wait)


AFTER_STOP: dict[str, tuple[Facts, Step]] = {
    "its cgroup still holds a process: it is stopped once more": (
        facts(free(Stage.STOPPING), container=stopped(pids=frozenset({4002}))),
        Stop(message=""),
    ),
    "also one that came after the stop": (
        facts(free(Stage.STOPPING), container=stopped(pids=frozenset({5001}))),
        Stop(message=""),
    ),
    "it ended by itself before it was stopped: what is left of it is waited for": (
        facts(free(Stage.PLANNED), job=FENCED_JOB, container=stopped(pids=frozenset({4002}))),
        Wait(reason=Reason.STOPPING, message=""),
    ),
    "a process that does not go is left to a person": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), container=stopped(pids=frozenset({4002})), free_for_s=120),
        Quarantine(reason=Reason.STOPPING, message=""),
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
            reason=Reason.SEEN_DEAD,
            message="",
        ),
    ),
    "restarted by somebody else while a process of the old one lingers": (
        facts(free(Stage.STOPPING), container=container(incarnation=REBORN, pids=frozenset({4002, 5001}))),
        Wait(reason=Reason.STOPPING, message=""),
    ),
    "the driver still lists one of its pids": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": [4001, 9]})),
        Wait(reason=Reason.STOPPING, message=""),
    ),
    "the driver never lets go of it": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": [4001]}), free_for_s=120),
        Quarantine(reason=Reason.STOPPING, message=""),
    ),
    "no GPU could be asked": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids=None)),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "its own GPU could not be asked": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": None, "GPU-1": []})),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "its own GPU fell off the bus": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-1": []})),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "a GPU that is not its own could not be asked, which says nothing of it": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": [], "GPU-1": None})),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            reason=Reason.SEEN_DEAD,
            message="",
        ),
    ),
    "the look is from before the stop": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(sample_age_s=60.0, gpu_pids={"GPU-0": []})),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "the exporter is silent": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=None, unknown="no answer"),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "its worker heeded SIGTERM, and took its files away: the exporter knows it no more": (
        facts(free(Stage.STOPPING), container=stopped(), **DOWN),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            reason=Reason.SEEN_DEAD,
            message="",
        ),
    ),
    "the container is gone, and its worker": (
        facts(free(Stage.STOPPING), container=None, **DOWN),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            reason=Reason.SEEN_DEAD,
            message="",
        ),
    ),
    "somebody restarted it, and a worker that is not seen may as well be one whose file cannot be read": (
        facts(free(Stage.STOPPING), container=container(incarnation=REBORN, pids=frozenset({5001})), **DOWN),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "somebody restarted it, and its worker is never seen again": (
        facts(
            free(Stage.STOPPING),
            container=container(incarnation=REBORN, pids=frozenset({5001})),
            free_for_s=120,
            **DOWN,
        ),
        Advance(
            kind=Kind.FREE,
            stage=Stage.ABANDONED,
            reason=Reason.EXIT_UNCONFIRMED,
            message="",
        ),
    ),
    "it is up still, however late it is: it is stopped once more": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX - 1), free_for_s=600),
        Stop(message=""),
    ),
    "it cannot be killed": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), free_for_s=120),
        Quarantine(reason=Reason.STOP_FAILED, message=""),
    ),
    "its GPU is off the bus for good": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-1": []}), free_for_s=120),
        Quarantine(reason=Reason.DRIVER_UNREACHABLE, message=""),
    ),
    "tried often, but not for long: the engine may only be starting": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), free_for_s=RETRY_S - 0.1),
        Wait(reason=Reason.STOPPING, message=""),
    ),
    "then it is tried again from time to time": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), free_for_s=RETRY_S),
        Stop(message=""),
    ),
    "the exporter cannot be asked for ever so long: that is no ground to give it up": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=None, unknown="no answer", free_for_s=6000),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
}


@pytest.mark.parametrize(("known", "wanted"), AFTER_STOP.values(), ids=AFTER_STOP)
def test_after_the_stop_it_is_seen_dead_stopped_again_or_given_up(known: Facts, wanted: Step) -> None:
    fenced = replace(known, episode=replace(known.episode, settle=settle(Stage.FENCED)), job=FENCED_JOB)

    assert decide(fenced) == wanted


NOT_DYING: dict[str, tuple[dict[str, Any], Reason]] = {
    "it runs after every try": ({"free_for_s": 120}, Reason.STOP_FAILED),
    "a process stays in its cgroup": (
        {"container": stopped(pids=frozenset({4002})), "free_for_s": 120},
        Reason.STOPPING,
    ),
    "a process stays on its GPU": (
        {"container": stopped(), "evidence": evidence(gpu_pids={"GPU-0": [4001]}), "free_for_s": 120},
        Reason.STOPPING,
    ),
    "it is gone, and its process stays on its GPU": (
        {"container": None, "evidence": evidence(gpu_pids={"GPU-0": [4001]}), "free_for_s": 120},
        Reason.STOPPING,
    ),
    "somebody restarted it, and a process of the old one stays": (
        {"container": container(incarnation=REBORN, pids=frozenset({4002, 5001})), "free_for_s": 120},
        Reason.STOPPING,
    ),
}


@pytest.mark.parametrize(("seen", "reason"), NOT_DYING.values(), ids=NOT_DYING)
def test_what_does_not_die_has_its_gpus_taken_out_of_use_and_is_then_left_to_a_person(
    seen: dict[str, Any], reason: Reason
) -> None:
    def at(**more: Any) -> Step:
        return decide(facts(free(Stage.STOPPING, tries=TRIES_MAX, **more), settle(Stage.DONE), **seen))

    first, then, without_gpus = at(), at(quarantined=True), at(gpus=[])

    assert first == Quarantine(reason=reason, message="")
    given_up = Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=reason, message="")
    assert then == given_up
    if "evidence" not in seen:  # a container without a GPU is listed on none
        assert without_gpus == given_up


def test_what_cannot_be_killed_gives_its_job_back_at_the_bound_and_is_closed_as_partly_mended() -> None:
    waits = decide(facts(free(Stage.ABANDONED), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=59))
    settles = decide(facts(free(Stage.ABANDONED), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=60))
    closes = decide(facts(free(Stage.ABANDONED), settle(Stage.DONE)))

    assert isinstance(waits, Wait)
    assert waits.reason == Reason.SETTLE_TIMEOUT
    assert isinstance(settles, Requeue)
    assert closes == Close(outcome=Outcome.PARTLY, reason=Reason.GIVEN_UP, message="")


COMING_UP = container(incarnation=REBORN, starting=True)

BACK_UP: dict[str, tuple[Facts, Step]] = {
    "it does not start before its job is settled": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=None, job_known=False, container=stopped(), unknown="locked"),
        Wait(reason=Reason.QUEUE_UNREACHABLE, message=""),
    ),
    "it was removed: there is nothing to start": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=None),
        Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.CONTAINER_GONE, message=""),
    ),
    "somebody else has started it": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=container(incarnation=REBORN)),
        Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.STARTED_ELSEWHERE, message=""),
    ),
    "a container without a job starts as soon as it is dead": (
        facts(free(Stage.DEAD), None, container=stopped()),
        Start(message=""),
    ),
    "its settle was abandoned: it starts all the same": (
        facts(free(Stage.DEAD), settle(Stage.ABANDONED), container=stopped()),
        Start(message=""),
    ),
    "it vanished while it was being started": (
        facts(free(Stage.STARTING), settle(Stage.DONE), container=None),
        Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.START_FAILED, message=""),
    ),
    "it is down and nobody knows any more what ran in it: systemd forgets": (
        facts(free(Stage.STARTING, tries=1), settle(Stage.DONE), container=stopped(incarnation="")),
        Start(message=""),
    ),
    "it was started and has ended by itself: it is not started again": (
        facts(free(Stage.STARTING), settle(Stage.DONE), container=stopped(incarnation=REBORN)),
        Advance(
            kind=Kind.FREE,
            stage=Stage.ABANDONED,
            reason=Reason.START_FAILED,
            message="",
        ),
    ),
    "it was started a moment ago: it is looked at once more": (
        facts(free(Stage.STARTING), settle(Stage.DONE), container=container(incarnation=REBORN), runs_for_s=1.9),
        Wait(reason=Reason.STABILIZING, message=""),
    ),
    "it still runs a while after its start": (
        facts(free(Stage.STARTING), settle(Stage.DONE), container=container(incarnation=REBORN), runs_for_s=2.0),
        Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.DONE, message=""),
    ),
    "a person stopped it, and its engine leaves it down": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(left_down=True)),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DONE,
            reason=Reason.LEFT_DOWN,
            message="",
        ),
    ),
    "somebody started it, and ended it again: what they ended is not started": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=stopped(incarnation=REBORN)),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DONE,
            reason=Reason.ENDED_ELSEWHERE,
            message="",
        ),
    ),
    "its engine forgets what ran in what is down": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=stopped(incarnation="")),
        Start(message=""),
    ),
    "we stopped it, and its engine leaves it down": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=stopped(left_down=True)),
        Start(message=""),
    ),
    "the executor was killed before the start, and comes back late: it starts it": (
        facts(free(Stage.STARTING, tries=1), settle(Stage.DONE), container=stopped(), free_for_s=600),
        Start(message=""),
    ),
    "its engine still waits for it to come up": (
        facts(free(Stage.STARTING, tries=1), settle(Stage.DONE), container=COMING_UP, runs_for_s=9.0, free_for_s=119.0),
        Wait(reason=Reason.STARTING, message=""),
    ),
    "its engine waits for ever for it to come up": (
        facts(free(Stage.STARTING, tries=1), settle(Stage.DONE), container=COMING_UP, runs_for_s=9.0, free_for_s=120.0),
        Advance(
            kind=Kind.FREE,
            stage=Stage.ABANDONED,
            reason=Reason.START_FAILED,
            message="",
        ),
    ),
    "it does not start, try after try": (
        facts(free(Stage.STARTING, tries=TRIES_MAX), settle(Stage.DONE), container=stopped(), free_for_s=120),
        Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.START_FAILED, message=""),
    ),
    "it did not start a few times: the engine may only be starting": (
        facts(free(Stage.STARTING, tries=TRIES_MAX), settle(Stage.DONE), container=stopped()),
        Wait(reason=Reason.STARTING, message=""),
    ),
    "then it is tried again from time to time": (
        facts(free(Stage.STARTING, tries=TRIES_MAX), settle(Stage.DONE), container=stopped(), free_for_s=RETRY_S),
        Start(message=""),
    ),
}


@pytest.mark.parametrize(("known", "wanted"), BACK_UP.values(), ids=BACK_UP)
def test_how_it_comes_back_up(known: Facts, wanted: Step) -> None:
    assert decide(known) == wanted


CLOSED: dict[str, tuple[Facts, Outcome]] = {
    "both done": (facts(free(Stage.DONE), settle(Stage.DONE)), Outcome.FIXED),
    "freed, and there was no job": (facts(free(Stage.DONE), None), Outcome.FIXED),
    "freed, and the job was settled by somebody else": (
        facts(free(Stage.DONE), settle(Stage.ABANDONED)),
        Outcome.FIXED,
    ),
    "given up, and there was no job": (facts(free(Stage.ABANDONED), None), Outcome.PARTLY),
}


@pytest.mark.parametrize(("known", "outcome"), CLOSED.values(), ids=CLOSED)
def test_how_an_episode_closes(known: Facts, outcome: Outcome) -> None:
    step = decide(known)

    assert isinstance(step, Close)
    assert step.outcome is outcome
