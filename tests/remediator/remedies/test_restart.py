"""The stages of a restart as truth tables, by the remedy `restart_worker`: warn, stop, exit, start, abandon."""

from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.procfs import ProcessId
from remediator.plan import (
    Advance,
    Facts,
    Fence,
    Kind,
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
    "planned: no quarantine yet": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), evidence=evidence(**ON_A_LOST_GPU)), Fence,
    ),
    "its container runs: it is stopped first, since it may lock the queue": (
        facts(free(Stage.STOPPING, tries=1), settle(Stage.PLANNED), queue_stuck_for_s=QUEUE_TIMEOUT_S,
              evidence=evidence(**ON_A_LOST_GPU)),
        Stop(message=""),
    ),
    "a process is left: it is stopped first": (
        facts(free(Stage.STOPPING, tries=1), settle(Stage.FENCED), job=FENCED_JOB,
              container=stopped(pids=frozenset({4001})), evidence=evidence(**ON_A_LOST_GPU)),
        Stop(message=""),
    ),
    "it is seen dead first": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(),
              evidence=evidence(**ON_A_LOST_GPU)),
        Advance(kind=Kind.FREE, stage=Stage.DEAD,
                reason=Reason.SEEN_DEAD, message=""),
    ),
    "dead: before its job is settled": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(),
              evidence=evidence(**ON_A_LOST_GPU)),
        TAKEN,
    ),
    "settle timeout without an exit: before its job is settled": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=60.0,
              limits=replace(LIMITS, unconfirmed=Unconfirmed.REQUEUE), evidence=evidence(**ON_A_LOST_GPU)),
        TAKEN,
    ),
    "settled: before its worker starts": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(), evidence=evidence(**ON_A_LOST_GPU)), TAKEN,
    ),
    "quarantined: the exit does not need that GPU": (
        facts(free(Stage.STOPPING, lost=["GPU-0"]), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(),
              evidence=evidence(**ON_A_LOST_GPU)),
        Advance(kind=Kind.FREE, stage=Stage.DEAD,
                reason=Reason.SEEN_DEAD, message=""),
    ),
    "quarantined, but another of its GPUs is unknown": (
        facts(free(Stage.STOPPING, lost=["GPU-0"], gpus=["GPU-0", "GPU-1"]), settle(Stage.FENCED), job=FENCED_JOB,
              container=stopped(), evidence=evidence(gpu_pids={"GPU-1": None}, lost_gpus_s={"GPU-0": 60.0})),
        Wait(reason=Reason.DRIVER_UNREACHABLE, message=""),
    ),
    "its processes are unknown without a cgroup": (
        facts(free(Stage.STOPPING, cgroup=None), settle(Stage.FENCED), job=FENCED_JOB, container=None,
              evidence=evidence(**ON_A_LOST_GPU)),
        Wait(reason=Reason.DRIVER_UNREACHABLE, message=""),
    ),
    "its processes are unknown without a cgroup of the engine": (
        facts(free(Stage.STOPPING, cgroup=None), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(cgroup=None),
              evidence=evidence(**ON_A_LOST_GPU)),
        Wait(reason=Reason.DRIVER_UNREACHABLE, message=""),
    ),
    "its processes are known by its session": (
        facts(free(Stage.STOPPING, cgroup=None), settle(Stage.FENCED), job=FENCED_JOB,
              container=stopped(cgroup=None, process_group=4001), evidence=evidence(**ON_A_LOST_GPU)),
        Advance(kind=Kind.FREE, stage=Stage.DEAD,
                reason=Reason.SEEN_DEAD, message=""),
    ),
    "its processes are known by the cgroup of a removed container": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, container=None,
              evidence=evidence(**ON_A_LOST_GPU)),
        Advance(kind=Kind.FREE, stage=Stage.DEAD,
                reason=Reason.SEEN_DEAD, message=""),
    ),
    "a process is left, also one started after the stop": (
        facts(free(Stage.STOPPING, tries=1), settle(Stage.FENCED), job=FENCED_JOB,
              container=stopped(incarnation="", pids=frozenset({4999})), evidence=evidence(**ON_A_LOST_GPU)),
        Wait(reason=Reason.STOPPING, message=""),
    ),
    "only the lost GPU of two": (
        facts(free(Stage.DEAD, gpus=["GPU-1", "GPU-0"]), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(),
              evidence=evidence(**ON_A_LOST_GPU)),
        TAKEN,
    ),
    "a lost GPU of another container": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(),
              evidence=evidence(lost_gpus_s={"GPU-9": 60.0})),
        Start,
    ),
    "lost for a moment only": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(), evidence=evidence(**JUST_LOST)),
        Start,
    ),
    "lost for a moment: the exit is not confirmed either": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(),
              evidence=evidence(**JUST_LOST)),
        Wait(reason=Reason.DRIVER_UNREACHABLE, message=""),
    ),
    "stale sample": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(),
              evidence=evidence(**ON_A_LOST_GPU, sample_age_s=60.0)),
        Start,
    ),
    "disarmed": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(), armed=False,
              evidence=evidence(**ON_A_LOST_GPU)),
        Requeue,
    ),
    "unkillable: its other GPUs are quarantined too": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX, lost=["GPU-0"]), settle(Stage.DONE), free_for_s=120,
              evidence=evidence(**ON_A_LOST_GPU)),
        Quarantine(reason=Reason.STOP_FAILED, message=""),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "expected"), WITH_LOST.values(), ids=WITH_LOST)
def test_lost_gpu_is_quarantined_during_the_restart(known: Facts, expected: type[Step] | Step) -> None:
    step = decide(known)

    assert isinstance(step, expected) if isinstance(expected, type) else step == expected


# --- the warning

WARNING = replace(LIMITS, warn_signal="SIGUSR1", warn_grace_s=60.0)
LISTENER = ProcessId(pid=4001, start_ticks=7)
WARNED = {"signal": "SIGUSR1", "pid": 4001, "tries": 1, "done": True}
PROMISED: dict[str, Any] = {"limits": WARNING, "listener": LISTENER}

WARNINGS: dict[str, tuple[Facts, Step | str]] = {
    "warned before the fence": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), **PROMISED),
        Warn(message="", signal="SIGUSR1", listener=LISTENER),
    ),
    "warned, within the grace period": (
        facts(free(Stage.PLANNED, warned=WARNED), settle(Stage.PLANNED), warned_for_s=59.9, **PROMISED),
        Reason.GRACE_PERIOD,
    ),
    "warned, after the grace period": (
        facts(free(Stage.PLANNED, warned=WARNED), settle(Stage.PLANNED), warned_for_s=60.0, **PROMISED),
        Fence(message=""),
    ),
    "warned, with step beats: not touched": (
        facts(
            free(Stage.PLANNED, warned=WARNED),
            settle(Stage.PLANNED),
            evidence=evidence(step_beat_age_s=1.0),
            warned_for_s=60.0,
            **PROMISED,
        ),
        Reason.UNCONFIRMED,
    ),
    "warned, with step beats past the timeout: withdrawn": (
        facts(
            free(Stage.PLANNED, warned=WARNED),
            settle(Stage.PLANNED),
            evidence=evidence(step_beat_age_s=1.0),
            settle_for_s=120.0,
            **PROMISED,
        ),
        Withdraw(reason=Reason.UNCONFIRMED, message=""),
    ),
    "warned, exited: no wait": (
        facts(free(Stage.PLANNED, warned=WARNED), settle(Stage.PLANNED), container=stopped(), **PROMISED),
        Fence(message=""),
    ),
    "signal unknown: warned once more": (
        facts(free(Stage.PLANNED, warned={**WARNED, "done": False}), settle(Stage.PLANNED), **PROMISED),
        Warn(message="", signal="SIGUSR1", listener=LISTENER),
    ),
    "signal unknown twice: not warned again": (
        facts(free(Stage.PLANNED, warned={**WARNED, "done": False, "tries": 2}), settle(Stage.PLANNED), **PROMISED),
        Reason.GRACE_PERIOD,
    ),
    "signal unknown, no target now: grace period": (
        facts(free(Stage.PLANNED, warned={**WARNED, "done": False}), settle(Stage.PLANNED), limits=WARNING),
        Reason.GRACE_PERIOD,
    ),
    "no engine: not warned now": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), container=None, container_known=False, **PROMISED),
        Reason.ENGINE_UNREACHABLE,
    ),
    "warned, no engine: grace period": (
        facts(
            free(Stage.PLANNED, warned=WARNED), settle(Stage.PLANNED), container=None, container_known=False, **PROMISED
        ),
        Reason.GRACE_PERIOD,
    ),
    "warned under a withdrawn intent": (
        facts(free(Stage.PLANNED, warned={**WARNED, "before": True}), settle(Stage.PLANNED), **PROMISED),
        Fence(message=""),
    ),
    "it does not catch the signal": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), limits=WARNING, deaf="process 4001 does not catch SIGUSR1"),
        Fence(message=""),
    ),
    "its settle was abandoned": (
        facts(free(Stage.PLANNED), settle(Stage.ABANDONED), job=None, **PROMISED),
        Warn(message="", signal="SIGUSR1", listener=LISTENER),
    ),
    "fenced already: not warned": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, **PROMISED),
        Stop(message=""),
    ),
    "disarmed: not warned": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), armed=False, **PROMISED),
        Reason.DRY_RUN,
    ),
}


@pytest.mark.parametrize(("known", "expected"), WARNINGS.values(), ids=WARNINGS)
def test_warned_worker_has_its_grace_period_before_the_fence(known: Facts, expected: Step | str) -> None:
    step = decide(known)

    assert (step.reason if isinstance(step, Wait) else step) == expected


HOLDING = replace(LIMITS, unconfirmed=Unconfirmed.HOLD)


def test_held_job_is_settled_only_after_a_confirmed_exit() -> None:
    known: dict[str, Any] = {"job": FENCED_JOB, "settle_for_s": 6000.0, "limits": HOLDING}
    still_up = facts(free(Stage.STOPPING), settle(Stage.FENCED), **known)
    abandoned = facts(free(Stage.ABANDONED), settle(Stage.FENCED), **known)
    seen_dead = facts(free(Stage.DEAD), settle(Stage.FENCED), container=stopped(), **known)

    held = decide(abandoned)

    assert isinstance(decide(still_up), Stop)
    assert isinstance(held, Wait)
    assert held.reason == Reason.EXIT_UNCONFIRMED
    assert decide(seen_dead) == Requeue(retry=1, seen_dead=True, message="", avoid_s=600.0)


SILENT_QUEUE: dict[str, Any] = {"job": None, "job_known": False, "unknown": "locked"}

QUEUE_SILENT: dict[str, tuple[Facts, type[Step]]] = {
    "not fenced: waits": (facts(free(Stage.PLANNED), settle(Stage.PLANNED), **SILENT_QUEUE), Wait),
    "fenced: stopped": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), **SILENT_QUEUE),
        Stop,
    ),
    "fenced, with step beats: not stopped": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), evidence=evidence(step_beat_age_s=0.2), **SILENT_QUEUE),
        Wait,
    ),
    "stopping: stopped again": (facts(free(Stage.STOPPING), settle(Stage.FENCED), **SILENT_QUEUE), Stop),
    "stopped: dead": (
        facts(
            free(Stage.STOPPING),
            settle(Stage.FENCED),
            container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": []}),
            **SILENT_QUEUE,
        ),
        Advance,
    ),
    "dead: waits for the settle": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), container=stopped(), **SILENT_QUEUE),
        Wait,
    ),
    "abandoned: the settle waits past its timeout": (
        facts(free(Stage.ABANDONED), settle(Stage.FENCED), settle_for_s=600.0, **SILENT_QUEUE),
        Wait,
    ),
    "settled: starts": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(), **SILENT_QUEUE),
        Start,
    ),
}


STUCK: dict[str, tuple[Facts, type[Step]]] = {
    "for a moment: fenced first": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=9.9),
        Fence,
    ),
    "locked: stopped, since the worker may hold the lock": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=10.0),
        Stop,
    ),
    "unreachable: stopped": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=10.0, **SILENT_QUEUE),
        Stop,
    ),
    "dry run": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=10.0, armed=False),
        Wait,
    ),
    "not stalled now": (
        facts(
            free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=10.0, evidence=evidence(step_beat_age_s=0.1)
        ),
        Wait,
    ),
    "stopped: dead": (
        facts(
            free(Stage.STOPPING), settle(Stage.PLANNED), queue_stuck_for_s=20.0, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": []}),
        ),
        Advance,
    ),
    "dead: fenced": (
        facts(free(Stage.DEAD), settle(Stage.PLANNED), queue_stuck_for_s=20.0, container=stopped()),
        Fence,
    ),
    "unkillable: fenced once the queue accepts it": (
        facts(free(Stage.ABANDONED), settle(Stage.PLANNED), queue_stuck_for_s=20.0, container=stopped()),
        Fence,
    ),
}  # fmt: skip


AT_THE_TIMEOUT: dict[str, Any] = {"job": FENCED_JOB, "settle_for_s": 60.0}
AFTER_BOTH_TIMEOUTS: dict[str, Any] = {**AT_THE_TIMEOUT, "free_for_s": 120.0}

REFUSED: dict[str, tuple[Facts, type[Step]]] = {
    "a moment ago: stopped again": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=9.9, **AT_THE_TIMEOUT),
        Stop,
    ),
    "its GPU is lost: stopped again": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=0.0, evidence=evidence(**ON_A_LOST_GPU),
            **AT_THE_TIMEOUT,
        ),
        Stop,
    ),
    "stopped: dead": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=0.0, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": []}), **AT_THE_TIMEOUT,
        ),
        Advance,
    ),
    "not stopped yet, confirmed: stopped": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), refused_s_ago=0.0, **AT_THE_TIMEOUT),
        Stop,
    ),
    "not stopped yet, with step beats: waits": (
        facts(
            free(Stage.PLANNED), settle(Stage.FENCED), refused_s_ago=0.0, evidence=evidence(step_beat_age_s=0.1),
            **AT_THE_TIMEOUT,
        ),
        Wait,
    ),
    "unkillable, after both timeouts: stopped again, since it may lock the queue": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=9.9, **AFTER_BOTH_TIMEOUTS),
        Stop,
    ),
    "processes left, after both timeouts: stopped again": (
        facts(
            free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=9.9,
            container=stopped(pids=frozenset({4002})), **AFTER_BOTH_TIMEOUTS,
        ),
        Stop,
    ),
    "after both timeouts, stopped recently: waits": (
        facts(
            free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=9.9, stopped_s_ago=299.9,
            **AFTER_BOTH_TIMEOUTS,
        ),
        Wait,
    ),
    "after both timeouts, not stopped recently: stopped again": (
        facts(
            free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=9.9, stopped_s_ago=300.0,
            **AFTER_BOTH_TIMEOUTS,
        ),
        Stop,
    ),
    "after both timeouts, listed by its GPU: waits": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=9.9, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": [4001]}), **AFTER_BOTH_TIMEOUTS,
        ),
        Wait,
    ),
    "after both timeouts and the retry interval: requeued": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=10.0, **AFTER_BOTH_TIMEOUTS),
        Requeue,
    ),
    "a refused quarantine is retried": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.DONE), refused_s_ago=10.0, **AFTER_BOTH_TIMEOUTS),
        Quarantine,
    ),
    "longer ago, just stopped: dead": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=20.0, stopped_s_ago=9.9, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": []}), **AT_THE_TIMEOUT,
        ),
        Advance,
    ),
    "longer ago, just stopped, listed by its GPU: waits": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=20.0, stopped_s_ago=9.9, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": [4001]}), **AT_THE_TIMEOUT,
        ),
        Wait,
    ),
    "longer ago, listed for the retry interval: requeued": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=20.0, stopped_s_ago=10.0, container=stopped(),
            evidence=evidence(gpu_pids={"GPU-0": [4001]}), **AT_THE_TIMEOUT,
        ),
        Requeue,
    ),
    "longer ago, the stop failed: requeued": (
        facts(
            free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), refused_s_ago=20.0, stopped_s_ago=0.0,
            **AT_THE_TIMEOUT,
        ),
        Requeue,
    ),
    "the retry interval ago: requeued": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), refused_s_ago=10.0, **AT_THE_TIMEOUT),
        Requeue,
    ),
    "dead since: requeued": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), refused_s_ago=0.0, container=stopped(), **AT_THE_TIMEOUT),
        Requeue,
    ),
    "abandoned since: requeued": (
        facts(free(Stage.ABANDONED), settle(Stage.FENCED), refused_s_ago=0.0, **AT_THE_TIMEOUT),
        Requeue,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "expected"), REFUSED.values(), ids=REFUSED)
def test_stop_and_refused_settle_alternate(known: Facts, expected: type[Step]) -> None:
    assert isinstance(decide(known), expected)


@pytest.mark.parametrize(("known", "expected"), STUCK.values(), ids=STUCK)
def test_locked_queue_delays_a_stop_for_a_limited_time(known: Facts, expected: type[Step]) -> None:
    assert isinstance(decide(known), expected)


@pytest.mark.parametrize(("known", "expected"), QUEUE_SILENT.values(), ids=QUEUE_SILENT)
def test_unreachable_queue_delays_only_steps_that_need_it(known: Facts, expected: type[Step]) -> None:
    assert isinstance(decide(known), expected)


def test_waits_for_an_unreachable_queue() -> None:
    step = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), **SILENT_QUEUE))

    assert step == Wait(reason=Reason.QUEUE_UNREACHABLE, message="")


# --- the restart


def test_waits_for_an_unreachable_engine() -> None:
    for stage in (Stage.PLANNED, Stage.STOPPING, Stage.DEAD, Stage.STARTING):
        known = facts(free(stage), settle(Stage.DONE), container=None, container_known=False, unknown="no daemon")

        assert decide(known) == Wait(reason=Reason.ENGINE_UNREACHABLE, message="")


ENDED: dict[str, Any] = {
    "removed": None,
    "restarted by another program": container(incarnation=REBORN, pids=frozenset({5001})),
    "exited": stopped(),
}


@pytest.mark.parametrize("now", ENDED.values(), ids=ENDED)
def test_ended_incarnation_is_not_stopped(now: Any) -> None:
    gone = evidence(gpu_pids={"GPU-0": []})
    known = facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, container=now, evidence=gone)

    assert decide(known) == Advance(kind=Kind.FREE, stage=Stage.DEAD, reason=Reason.SEEN_DEAD, message="")


def test_exited_container_with_a_process_on_its_gpu_is_not_dead() -> None:
    known = facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, container=stopped())

    assert decide(known) == Wait(reason=Reason.STOPPING, message="")
    assert isinstance(decide(replace(known, free_for_s=120.0, quiet_for_s=120.0)), Quarantine)


DISARMED: dict[str, tuple[Facts, type[Step]]] = {
    "runs": (facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB), Wait),
    "a process is left": (
        facts(
            free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, container=stopped(pids=frozenset({4002})),
        ),
        Wait,
    ),
    "unkillable": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), settle(Stage.FENCED), job=FENCED_JOB, free_for_s=120),
        Wait,
    ),
    "settle timeout": (
        facts(free(Stage.STOPPING), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=600.0),
        Wait,
    ),
    "abandoned, settle timeout": (
        facts(free(Stage.ABANDONED), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=600.0),
        Wait,
    ),
    "dead: requeued": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=FENCED_JOB, container=stopped()),
        Requeue,
    ),
    "stopped and requeued: started": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=stopped()),
        Start,
    ),
    "exited after the fence and requeued: started": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped()),
        Start,
    ),
    "not stopped by the executor: not started": (
        facts(free(Stage.DEAD), settle(Stage.ABANDONED), container=stopped()),
        Wait,
    ),
    "no job, not stopped by the executor: not started": (
        facts(free(Stage.DEAD), None, container=stopped()),
        Wait,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "expected"), DISARMED.values(), ids=DISARMED)
def test_disarmed_restart_stops_nothing_more_but_requeues_and_starts(known: Facts, expected: type[Step]) -> None:
    step = decide(replace(known, armed=False))

    assert isinstance(step, expected)
    assert not isinstance(step, Wait) or step.reason == Reason.DRY_RUN
    assert not isinstance(decide(known), Wait)


AFTER_STOP: dict[str, tuple[Facts, Step]] = {
    "a process in its cgroup: stopped again": (
        facts(free(Stage.STOPPING), container=stopped(pids=frozenset({4002}))),
        Stop(message=""),
    ),
    "a process started after the stop: stopped again": (
        facts(free(Stage.STOPPING), container=stopped(pids=frozenset({5001}))),
        Stop(message=""),
    ),
    "exited before the stop: waits for its processes": (
        facts(free(Stage.PLANNED), job=FENCED_JOB, container=stopped(pids=frozenset({4002}))),
        Wait(reason=Reason.STOPPING, message=""),
    ),
    "a process stays: quarantine": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), container=stopped(pids=frozenset({4002})), free_for_s=120),
        Quarantine(reason=Reason.STOPPING, message=""),
    ),
    "restarted by another program: its new processes do not count": (
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
    "restarted by another program: an old process is left": (
        facts(free(Stage.STOPPING), container=container(incarnation=REBORN, pids=frozenset({4002, 5001}))),
        Wait(reason=Reason.STOPPING, message=""),
    ),
    "listed by the driver: waits": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": [4001, 9]})),
        Wait(reason=Reason.STOPPING, message=""),
    ),
    "listed by the driver past the timeout: quarantine": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": [4001]}), free_for_s=120),
        Quarantine(reason=Reason.STOPPING, message=""),
    ),
    "all GPUs unknown": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids=None)),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "its GPU unknown": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": None, "GPU-1": []})),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "its GPU missing": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-1": []})),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "a GPU of another container unknown": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-0": [], "GPU-1": None})),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            reason=Reason.SEEN_DEAD,
            message="",
        ),
    ),
    "the sample is from before the stop": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(sample_age_s=60.0, gpu_pids={"GPU-0": []})),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "no exporter": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=None, unknown="no answer"),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "its worker exited and removed its files": (
        facts(free(Stage.STOPPING), container=stopped(), **DOWN),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            reason=Reason.SEEN_DEAD,
            message="",
        ),
    ),
    "container and worker are removed": (
        facts(free(Stage.STOPPING), container=None, **DOWN),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DEAD,
            reason=Reason.SEEN_DEAD,
            message="",
        ),
    ),
    "restarted by another program, its worker is unknown": (
        facts(free(Stage.STOPPING), container=container(incarnation=REBORN, pids=frozenset({5001})), **DOWN),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
    "restarted by another program, its worker is unknown past the timeout": (
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
    "runs past the timeout, tries left: stopped again": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX - 1), free_for_s=600),
        Stop(message=""),
    ),
    "unkillable": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), free_for_s=120),
        Quarantine(reason=Reason.STOP_FAILED, message=""),
    ),
    "its GPU missing past the timeout": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=evidence(gpu_pids={"GPU-1": []}), free_for_s=120),
        Quarantine(reason=Reason.DRIVER_UNREACHABLE, message=""),
    ),
    "no tries left before the timeout: the engine may be starting": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), free_for_s=RETRY_S - 0.1),
        Wait(reason=Reason.STOPPING, message=""),
    ),
    "no tries left: retried after the retry interval": (
        facts(free(Stage.STOPPING, tries=TRIES_MAX), free_for_s=RETRY_S),
        Stop(message=""),
    ),
    "no exporter past the timeout: not abandoned": (
        facts(free(Stage.STOPPING), container=stopped(), evidence=None, unknown="no answer", free_for_s=6000),
        Wait(
            reason=Reason.DRIVER_UNREACHABLE,
            message="",
        ),
    ),
}


@pytest.mark.parametrize(("known", "expected"), AFTER_STOP.values(), ids=AFTER_STOP)
def test_step_after_the_stop(known: Facts, expected: Step) -> None:
    fenced = replace(known, episode=replace(known.episode, settle=settle(Stage.FENCED)), job=FENCED_JOB)

    assert decide(fenced) == expected


UNKILLABLE: dict[str, tuple[dict[str, Any], Reason]] = {
    "runs after every try": ({"free_for_s": 120}, Reason.STOP_FAILED),
    "a process stays in its cgroup": (
        {"container": stopped(pids=frozenset({4002})), "free_for_s": 120},
        Reason.STOPPING,
    ),
    "a process stays on its GPU": (
        {"container": stopped(), "evidence": evidence(gpu_pids={"GPU-0": [4001]}), "free_for_s": 120},
        Reason.STOPPING,
    ),
    "removed, and a process stays on its GPU": (
        {"container": None, "evidence": evidence(gpu_pids={"GPU-0": [4001]}), "free_for_s": 120},
        Reason.STOPPING,
    ),
    "restarted by another program, and an old process stays": (
        {"container": container(incarnation=REBORN, pids=frozenset({4002, 5001})), "free_for_s": 120},
        Reason.STOPPING,
    ),
}


@pytest.mark.parametrize(("seen", "reason"), UNKILLABLE.values(), ids=UNKILLABLE)
def test_gpus_of_an_unkillable_container_are_quarantined_and_it_is_abandoned(
    seen: dict[str, Any], reason: Reason
) -> None:
    def at(**more: Any) -> Step:
        return decide(facts(free(Stage.STOPPING, tries=TRIES_MAX, **more), settle(Stage.DONE), **seen))

    first, then, without_gpus = at(), at(quarantined=True), at(gpus=[])

    assert first == Quarantine(reason=reason, message="")
    abandoned = Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=reason, message="")
    assert then == abandoned
    if "evidence" not in seen:  # a container without a GPU is listed on none
        assert without_gpus == abandoned


def test_job_of_an_unkillable_container_is_requeued_at_the_settle_timeout() -> None:
    waits = decide(facts(free(Stage.ABANDONED), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=59))
    settles = decide(facts(free(Stage.ABANDONED), settle(Stage.FENCED), job=FENCED_JOB, settle_for_s=60))
    tells = decide(facts(free(Stage.ABANDONED), settle(Stage.DONE)))

    assert isinstance(waits, Wait)
    assert waits.reason == Reason.SETTLE_TIMEOUT
    assert isinstance(settles, Requeue)
    assert tells == Wait(reason=Reason.GIVEN_UP, message="")


COMING_UP = container(incarnation=REBORN, starting=True)
DIED = evidence(alive=False, container_incarnation=None)
SUCCESSOR = evidence(worker_incarnation="i2", container_incarnation=f"{'d' * 64}@1", job_id=None, attempt=None)

BACK_UP: dict[str, tuple[Facts, Step]] = {
    "queue unreachable: waits for the settle": (
        facts(free(Stage.DEAD), settle(Stage.FENCED), job=None, job_known=False, container=stopped(), unknown="locked"),
        Wait(reason=Reason.QUEUE_UNREACHABLE, message=""),
    ),
    "removed by its stop: waits for another container": (
        facts(free(Stage.DEAD, tries=1), None, container=None, evidence=DIED, free_for_s=119.9),
        Wait(reason=Reason.CONTAINER_GONE, message=""),
    ),
    "removed after its fenced worker exited: waits for another container": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=None, evidence=DIED),
        Wait(reason=Reason.CONTAINER_GONE, message=""),
    ),
    "removed, and no other container runs in time: an operator is called": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=None, evidence=DIED, free_for_s=120),
        Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.CONTAINER_GONE, message=""),
    ),
    "removed, and another container runs the worker": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=None, evidence=SUCCESSOR),
        Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.STARTED_ELSEWHERE, message=""),
    ),
    "removed, and the worker of another container is dead": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=None, evidence=replace(SUCCESSOR, alive=False)),
        Wait(reason=Reason.CONTAINER_GONE, message=""),
    ),
    "removed, and the sample with another container is stale": (
        facts(
            free(Stage.DEAD, tries=1), settle(Stage.DONE), container=None, evidence=replace(SUCCESSOR, sample_age_s=60)
        ),
        Wait(reason=Reason.CONTAINER_GONE, message=""),
    ),
    "removed with its dead worker before anything was done: done": (
        facts(free(Stage.DEAD, pids=[]), settle(Stage.DONE), container=None, evidence=DIED),
        Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.CONTAINER_GONE, message=""),
    ),
    "removed by others: done": (
        facts(free(Stage.DEAD), settle(Stage.ABANDONED), container=None, evidence=DIED),
        Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.CONTAINER_GONE, message=""),
    ),
    "started by another program": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=container(incarnation=REBORN)),
        Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.STARTED_ELSEWHERE, message=""),
    ),
    "no job: starts at once": (
        facts(free(Stage.DEAD), None, container=stopped()),
        Start(message=""),
    ),
    "settle abandoned: starts": (
        facts(free(Stage.DEAD), settle(Stage.ABANDONED), container=stopped()),
        Start(message=""),
    ),
    "removed during the start": (
        facts(free(Stage.STARTING), settle(Stage.DONE), container=None),
        Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.START_FAILED, message=""),
    ),
    "starting, incarnation unknown: systemd forgets it": (
        facts(free(Stage.STARTING, tries=1), settle(Stage.DONE), container=stopped(incarnation="")),
        Start(message=""),
    ),
    "exited after the start: not started again": (
        facts(free(Stage.STARTING), settle(Stage.DONE), container=stopped(incarnation=REBORN)),
        Advance(
            kind=Kind.FREE,
            stage=Stage.ABANDONED,
            reason=Reason.START_FAILED,
            message="",
        ),
    ),
    "started a moment ago: checked again": (
        facts(free(Stage.STARTING), settle(Stage.DONE), container=container(incarnation=REBORN), runs_for_s=1.9),
        Wait(reason=Reason.STABILIZING, message=""),
    ),
    "runs for a while after its start": (
        facts(free(Stage.STARTING), settle(Stage.DONE), container=container(incarnation=REBORN), runs_for_s=2.0),
        Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.DONE, message=""),
    ),
    "stopped by an operator and left down": (
        facts(free(Stage.DEAD), settle(Stage.DONE), container=stopped(left_down=True)),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DONE,
            reason=Reason.LEFT_DOWN,
            message="",
        ),
    ),
    "started and stopped by another program: not started": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=stopped(incarnation=REBORN)),
        Advance(
            kind=Kind.FREE,
            stage=Stage.DONE,
            reason=Reason.ENDED_ELSEWHERE,
            message="",
        ),
    ),
    "dead, incarnation unknown": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=stopped(incarnation="")),
        Start(message=""),
    ),
    "stopped by the executor and left down": (
        facts(free(Stage.DEAD, tries=1), settle(Stage.DONE), container=stopped(left_down=True)),
        Start(message=""),
    ),
    "executor killed before the start, and back late: starts": (
        facts(free(Stage.STARTING, tries=1), settle(Stage.DONE), container=stopped(), free_for_s=600),
        Start(message=""),
    ),
    "its engine waits for the start": (
        facts(free(Stage.STARTING, tries=1), settle(Stage.DONE), container=COMING_UP, runs_for_s=9.0, free_for_s=119.0),
        Wait(reason=Reason.STARTING, message=""),
    ),
    "its engine waits for the start past the timeout": (
        facts(free(Stage.STARTING, tries=1), settle(Stage.DONE), container=COMING_UP, runs_for_s=9.0, free_for_s=120.0),
        Advance(
            kind=Kind.FREE,
            stage=Stage.ABANDONED,
            reason=Reason.START_FAILED,
            message="",
        ),
    ),
    "the start fails at every try": (
        facts(free(Stage.STARTING, tries=TRIES_MAX), settle(Stage.DONE), container=stopped(), free_for_s=120),
        Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.START_FAILED, message=""),
    ),
    "no tries left before the timeout: the engine may be starting": (
        facts(free(Stage.STARTING, tries=TRIES_MAX), settle(Stage.DONE), container=stopped()),
        Wait(reason=Reason.STARTING, message=""),
    ),
    "no tries left: retried after the retry interval": (
        facts(free(Stage.STARTING, tries=TRIES_MAX), settle(Stage.DONE), container=stopped(), free_for_s=RETRY_S),
        Start(message=""),
    ),
}


@pytest.mark.parametrize(("known", "expected"), BACK_UP.values(), ids=BACK_UP)
def test_step_of_the_start(known: Facts, expected: Step) -> None:
    assert decide(known) == expected
