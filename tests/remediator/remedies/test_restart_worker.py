"""The remedy as truth tables: what it decides from which facts, with a sentence a row."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import State, Trip
from gpuwarden.procfs import ProcessId
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
    Unconfirmed,
    Wait,
    Warn,
    Withdraw,
    WouldAct,
)
from remediator.reasons import Doubt, Reason
from remediator.remedies import REMEDIES, lose_node, recycle_container, restart_container, restart_worker, wrangle
from remediator.remedies.restart import RETRY_S, TRIES_MAX
from remediator.remedies.restart_worker import QUEUE_PATIENCE_S, confirm, decide
from tests.remediator.builders import (
    KEY,
    LIMITS,
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

pytestmark = pytest.mark.pure


FENCED_JOB = job(state=State.FENCING)


def test_the_remedy_is_found_by_the_name_that_rules_use() -> None:
    assert REMEDIES["restart_worker"].decide is decide


# --- what counts as wedged (A2 to A6, and invariant 4)

CONFIRM: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "wedged: silent, every GPU idle, RAM still": ({}, None),
    "exactly at the timeout is wedged": (
        {"beat_age_s": 120.0, "gpu_idle_s": 120.0, "ram_still_s": 120.0},
        None,
    ),
    "a hair under the timeout is not": ({"beat_age_s": 119.999}, Doubt.UNDER_BOUND),
    "its owner allows more silence": ({"stall_timeout_s": 600.0}, Doubt.UNDER_BOUND),
    "its owner allows less silence": (
        {"stall_timeout_s": 5.0, "beat_age_s": 6.0, "gpu_idle_s": 6.0, "ram_still_s": 6.0},
        None,
    ),
    "loading, GPU idle, RAM climbing: it is not armed": (
        {"beat_age_s": None, "phase": "load", "ram_still_s": 0.0},
        Doubt.NOT_ARMED,
    ),
    "loading, GPU idle, RAM still (a warm cache): it is not armed": (
        {"beat_age_s": None, "phase": "load"},
        Doubt.NOT_ARMED,
    ),
    "a slow real step: GPU busy, RAM still": ({"gpu_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "a slow real step: GPU busy, RAM moving": ({"gpu_idle_s": 0.0, "ram_still_s": 2.0}, Doubt.UNDER_BOUND),
    "the GPU was busy within the silence": ({"gpu_idle_s": 119.0}, Doubt.UNDER_BOUND),
    "a slow decode or staging: GPU idle, RAM moving": ({"ram_still_s": 3.0}, Doubt.UNDER_BOUND),
    "it beat within the silence": ({"beat_age_s": 1.0}, Doubt.UNDER_BOUND),
    "its only GPU is unknown": (
        {"gpu_idle_s": None, "gpu_unknown": "GPU-0 is not measured"},
        Doubt.GPU_UNKNOWN,
    ),
    "one of its two GPUs is unknown": (
        {"gpus": ["GPU-0", "GPU-1"], "gpu_idle_s": None, "gpu_unknown": "GPU-1 is not measured"},
        Doubt.GPU_UNKNOWN,
    ),
    "the GPU is unknown and nobody says why": ({"gpu_idle_s": None}, Doubt.GPU_UNKNOWN),
    "its RAM is unknown": ({"ram_still_s": None, "ram_unknown": "cgroup gone"}, Doubt.RAM_UNKNOWN),
    "its RAM is unknown and nobody says why": ({"ram_still_s": None}, Doubt.RAM_UNKNOWN),
    "its process holds no lock: it is dead, not stalled": ({"alive": False}, Doubt.NO_LOCK),
    "whether it lives cannot be told": ({"alive": None}, Doubt.NO_LOCK),
    "it runs no job": ({"job_id": None, "attempt": None}, Doubt.NO_JOB),
    "a video model is not policed": ({"stall_timeout_s": 0.0}, Doubt.NOT_POLICED),
    "the timeout is not known": ({"stall_timeout_s": None}, Doubt.NOT_POLICED),
    "a simulated GPU says so": ({"gpu_simulated": True}, None),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM.values(), ids=CONFIRM)
def test_what_confirms_a_stall(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**seen), Trip.STALL).doubt is doubt


FIGURES: dict[Trip, tuple[dict[str, Any], tuple[str, ...]]] = {
    Trip.STALL: (
        {"beat_age_s": 131.0, "gpu_idle_s": 132.0, "ram_still_s": 133.0},
        ("131.0", "132.0", "133.0", "120.0"),
    ),
    Trip.DEAD_WORKER: ({"heartbeat_age_s": 31.0, "cpu_still_s": 32.0, "dead_after_s": 30.0}, ("31.0", "32.0", "30.0")),
    Trip.BUDGET: ({"elapsed_s": 8101.0, "budget_s": 8100.0}, ("8101.0", "8100.0")),
    Trip.HEALTH: (
        {"elapsed_s": 661.0, "gpu_idle_s": 302.0, "ram_still_s": 303.0},
        ("661.0", "302.0", "303.0", "300.0"),
    ),
}


@pytest.mark.parametrize("trip", FIGURES)
def test_the_sentence_names_every_figure_and_its_bound(trip: Trip) -> None:
    seen, figures = FIGURES[trip]
    message = confirm(evidence(**seen), trip).message

    assert [each for each in figures if each not in message] == []
    assert "simulated GPU" not in message
    assert trip is Trip.DEAD_WORKER or "simulated GPU" in confirm(evidence(**seen, gpu_simulated=True), trip).message


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "the GPU": ({"gpu_idle_s": None, "gpu_unknown": "GPU-1 is lost"}, "GPU-1 is lost"),
    "RAM": ({"ram_still_s": None, "ram_unknown": "cgroup gone"}, "cgroup gone"),
}


@pytest.mark.parametrize(("seen", "why"), UNKNOWN.values(), ids=UNKNOWN)
def test_the_sentence_says_why_a_figure_is_unknown(seen: dict[str, Any], why: str) -> None:
    assert why in confirm(evidence(**seen), Trip.STALL).message


DEAD = {"heartbeat_age_s": 31.0, "cpu_still_s": 31.0, "dead_after_s": 30.0}

CONFIRM_DEAD: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "dead: no heartbeat, and no CPU time used": (
        {},
        None,
    ),
    "exactly at the bound is dead": ({"heartbeat_age_s": 30.0, "cpu_still_s": 30.0}, None),
    "a hair under the bound is not": ({"heartbeat_age_s": 29.999}, Doubt.UNDER_BOUND),
    "it has a heartbeat": ({"heartbeat_age_s": 1.0}, Doubt.UNDER_BOUND),
    "a long call starves its heartbeat, and uses the CPU": ({"cpu_still_s": 0.0}, Doubt.UNDER_BOUND),
    "it used the CPU within the bound": ({"cpu_still_s": 29.9}, Doubt.UNDER_BOUND),
    "its heartbeat is unknown": ({"heartbeat_age_s": None}, Doubt.TIME_UNKNOWN),
    "its CPU time is unknown": ({"cpu_still_s": None}, Doubt.TIME_UNKNOWN),
    "the exporter allows more": ({"dead_after_s": 60.0}, Doubt.UNDER_BOUND),
    "the exporter allows nothing: that is no bound": ({"dead_after_s": 0.0}, Doubt.NO_BOUND),
    "its job need not be policed for stalls": ({"stall_timeout_s": 0.0, "beat_age_s": None}, None),
    "its GPU and RAM need not be known": ({"gpu_idle_s": None, "ram_still_s": None}, None),
    "its GPU is busy with what was queued on it": ({"gpu_idle_s": 0.0}, None),
    "its process is gone, for how long is not told": ({"alive": False}, Doubt.TIME_UNKNOWN),
    "its process has been gone for as long as is allowed": (
        {"alive": False, "dead_s": 30.0, "heartbeat_age_s": None, "cpu_still_s": None},
        None,
    ),
    "its lock is free and its heartbeat as old as is allowed": (
        {"alive": False, "dead_s": 31.0, "heartbeat_age_s": 30.0},
        None,
    ),
    "it lost its lock and beats": (
        {"alive": False, "dead_s": 900.0, "heartbeat_age_s": 29.9},
        Doubt.UNDER_BOUND,
    ),
    "it may come back by itself yet": ({"alive": False, "dead_s": 29.9}, Doubt.UNDER_BOUND),
    "it came back": ({"alive": True, "dead_s": 900.0, "heartbeat_age_s": 1.0}, Doubt.UNDER_BOUND),
    "it is gone, and ran no job": ({"alive": False, "dead_s": 99.0, "job_id": None}, Doubt.NO_JOB),
    "whether it lives cannot be told": ({"alive": None}, Doubt.NO_LOCK),
    "it runs no job": ({"job_id": None, "attempt": None}, Doubt.NO_JOB),
}


@pytest.mark.behaviour("A19")
@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_DEAD.values(), ids=CONFIRM_DEAD)
def test_what_confirms_a_dead_worker(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**DEAD, **seen}), Trip.DEAD_WORKER).doubt is doubt


OVER = {"elapsed_s": 8100.0, "budget_s": 8100.0}

CONFIRM_BUDGET: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "at its budget": ({}, None),
    "a hair under it": ({"elapsed_s": 8099.999}, Doubt.UNDER_BOUND),
    "busy, beating and loading all the same": (
        {"gpu_idle_s": 0.0, "beat_age_s": 0.1, "phase": "load", "ram_still_s": 0.0},
        None,
    ),
    "its GPU and RAM need not be known": ({"gpu_idle_s": None, "ram_still_s": None}, None),
    "it has no budget": ({"budget_s": 0.0}, Doubt.NO_BUDGET),
    "its budget is not known": ({"budget_s": None}, Doubt.NO_BUDGET),
    "it was started before a reboot": ({"elapsed_s": None}, Doubt.TIME_UNKNOWN),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
    "it runs no job": ({"job_id": None, "attempt": None}, Doubt.NO_JOB),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_BUDGET.values(), ids=CONFIRM_BUDGET)
def test_what_confirms_that_a_budget_is_spent(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**OVER, **seen}), Trip.BUDGET).doubt is doubt


IDLE = {"elapsed_s": 660.0, "phase_age_s": 300.0, "gpu_idle_s": 300.0, "ram_still_s": 300.0, "beat_age_s": 300.0}
STILL = {"io_still_s": 300.0, "fault_still_s": 300.0, "container_cpu_still_s": 300.0}
WORKING = {"io_still_s": 0.0, "fault_still_s": 0.0, "container_cpu_still_s": 0.0}

STEPLESS = {
    "beat_age_s": 600.0,
    "stuck_after_s": 600.0,
    "stuck_still_s": 580.0,
    "ram_still_s": 580.0,
    "gpu_idle_s": 0.0,
}
NO_INPUT = {"io_still_s": 580.0, "fault_still_s": 580.0, "container_cpu_still_s": 0.0}
PEGGED = {**STEPLESS, **NO_INPUT, "gpu_pegged_s": 580.0, "gpu_not_seen_busy_s": 0.0}
UNSEEN = {
    **STEPLESS, **NO_INPUT, "container_cpu_still_s": 580.0, "gpu_idle_s": None, "gpu_unknown": "a MIG slice",
    "gpu_pegged_s": None, "gpu_not_seen_busy_s": 580.0,
}  # fmt: skip

CONFIRM_STUCK: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "its GPU is pegged": (
        PEGGED,
        None,
    ),
    "it evaluates": ({**PEGGED, "phase": "eval"}, None),
    "its GPU is unknown": (
        UNSEEN,
        None,
    ),
    "by what is set": ({**PEGGED, "stuck_after_s": 601.0}, Doubt.UNDER_BOUND),
    "a step in time": ({**PEGGED, "beat_age_s": 599.9}, Doubt.UNDER_BOUND),
    "it is not armed": ({**PEGGED, "beat_age_s": None}, Doubt.NOT_ARMED),
    "nothing is said of it": ({**PEGGED, "stuck_after_s": None}, Doubt.UNDER_BOUND),
    "an exporter that tells half": ({**PEGGED, "stuck_still_s": None}, Doubt.SIGNS_UNKNOWN),
    "the GPU pauses": ({**PEGGED, "gpu_pegged_s": 579.9}, Doubt.UNDER_BOUND),
    "the RAM moves": ({**PEGGED, "ram_still_s": 579.9}, Doubt.UNDER_BOUND),
    "it reads": ({**PEGGED, "io_still_s": 579.9}, Doubt.UNDER_BOUND),
    "it touches memory": ({**PEGGED, "fault_still_s": 579.9}, Doubt.UNDER_BOUND),
    "RAM unknown": ({**PEGGED, "ram_still_s": None}, Doubt.SIGNS_UNKNOWN),
    "I/O unknown": ({**PEGGED, "io_still_s": None}, Doubt.SIGNS_UNKNOWN),
    "faults unknown": ({**PEGGED, "fault_still_s": None}, Doubt.SIGNS_UNKNOWN),
    "an exporter that does not tell of its GPU": (
        {**PEGGED, "gpu_pegged_s": None, "gpu_not_seen_busy_s": None, "container_cpu_still_s": 9000.0},
        Doubt.GPU_UNKNOWN,
    ),
    "unknown, and was busy": ({**UNSEEN, "gpu_not_seen_busy_s": 579.9}, Doubt.UNDER_BOUND),
    "unknown, and its processes compute": ({**UNSEEN, "container_cpu_still_s": 1.0}, Doubt.UNDER_BOUND),
    "unknown, and so is their CPU": ({**UNSEEN, "container_cpu_still_s": None}, Doubt.GPU_UNKNOWN),
    "a slow step": ({**PEGGED, "gpu_pegged_s": 0.0, "container_cpu_still_s": 9000.0}, Doubt.UNDER_BOUND),
    "its silence is not policed": ({**PEGGED, "stall_timeout_s": 0.0, "stuck_after_s": None}, Doubt.NOT_POLICED),
    "its process holds no lock": ({**PEGGED, "alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_STUCK.values(), ids=CONFIRM_STUCK)
def test_what_confirms_that_a_job_is_busy_but_stuck(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**seen), Trip.STALL).doubt is doubt


SPINS = {
    **PEGGED,
    "stuck_after_s": None,
    "stuck_still_s": None,
    "gang_stuck_after_s": 600.0,
    "gang_stuck_still_s": 580.0,
}

CONFIRM_GANG: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "its GPU is pegged": (
        {},
        None,
    ),
    "by what is set": ({"gang_stuck_after_s": 601.0}, Doubt.UNDER_BOUND),
    "by what is set for its stillness": ({"gang_stuck_still_s": 581.0}, Doubt.UNDER_BOUND),
    "a step in time": ({"beat_age_s": 599.9}, Doubt.UNDER_BOUND),
    "it is not armed": ({"beat_age_s": None}, Doubt.NOT_ARMED),
    "it is alone": ({"gang_stuck_after_s": None, "stuck_after_s": 600.0}, Doubt.NO_GANG),
    "an exporter that tells half": ({"gang_stuck_still_s": None}, Doubt.SIGNS_UNKNOWN),
    "the GPU pauses": ({"gpu_pegged_s": 579.9}, Doubt.UNDER_BOUND),
    "the RAM moves": ({"ram_still_s": 579.9}, Doubt.UNDER_BOUND),
    "it reads": ({"io_still_s": 579.9}, Doubt.UNDER_BOUND),
    "it touches memory": ({"fault_still_s": 579.9}, Doubt.UNDER_BOUND),
    "its GPU is unknown": ({"gpu_pegged_s": None, "gpu_not_seen_busy_s": 900.0}, Doubt.SIGNS_UNKNOWN),
    "RAM unknown": ({"ram_still_s": None}, Doubt.SIGNS_UNKNOWN),
    "I/O unknown": ({"io_still_s": None}, Doubt.SIGNS_UNKNOWN),
    "faults unknown": ({"fault_still_s": None}, Doubt.SIGNS_UNKNOWN),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_GANG.values(), ids=CONFIRM_GANG)
def test_what_confirms_that_a_rank_spins_as_its_gang_is_said_to(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**SPINS, **seen}), Trip.GANG).doubt is doubt


def test_a_rank_that_spins_is_no_stall_of_its_own() -> None:
    assert not confirm(evidence(**SPINS), Trip.STALL).confirmed


@pytest.mark.parametrize(
    ("trips", "begins"),
    [
        pytest.param(frozenset({Trip.GANG}), True, id="while the gang is said to be stuck"),
        pytest.param(frozenset(), False, id="not once nobody says so any more"),
        pytest.param(frozenset({Trip.STALL}), False, id="nor for what else is said of it"),
    ],
)
def test_a_rank_is_freed_for_its_gang(trips: frozenset[Trip], begins: bool) -> None:
    """That the other ranks spin too, local evidence cannot tell."""
    step = decide(facts(episode=episode(trip=Trip.GANG, trips=trips), evidence=evidence(**SPINS)))

    assert isinstance(step, Begin) is begins
    assert begins or (isinstance(step, Wait) and step.reason is Reason.UNCONFIRMED)


@pytest.mark.parametrize("trips", [frozenset({Trip.GANG}), frozenset()], ids=["while its gang is", "or nobody says so"])
def test_a_rank_that_was_fenced_is_stopped_while_it_spins(trips: frozenset[Trip]) -> None:
    """Its attempt is over, whatever the others do: one scrape that fails must not let its process live on."""
    owed = episode(free(Stage.PLANNED), settle(Stage.FENCED), trip=Trip.GANG, trips=trips)

    spins = decide(facts(episode=owed, job=FENCED_JOB, evidence=evidence(**SPINS)))
    steps = decide(facts(episode=owed, job=FENCED_JOB, evidence=evidence(**SPINS | {"beat_age_s": 1.0})))

    assert isinstance(spins, Stop)
    assert not isinstance(steps, Stop)


@pytest.mark.parametrize(
    ("trips", "fences"), [(frozenset({Trip.GANG}), True), (frozenset(), False)], ids=["on", "over"]
)
def test_a_rank_is_fenced_only_while_its_gang_is_stuck(trips: frozenset[Trip], fences: bool) -> None:
    owed = episode(free(Stage.PLANNED), settle(Stage.PLANNED), trip=Trip.GANG, trips=trips)

    step = decide(facts(episode=owed, evidence=evidence(**SPINS)))

    assert isinstance(step, Fence) is fences


CONFIRM_HEALTH: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "idle and still for the window, after the grace": (
        {},
        None,
    ),
    "it never beat": ({"beat_age_s": None, "stall_timeout_s": 0.0}, None),
    "it beats": ({"beat_age_s": 0.1}, Doubt.UNDER_BOUND),
    "it beat within the window": ({"beat_age_s": 299.9}, Doubt.UNDER_BOUND),
    "within the grace and a window": ({"elapsed_s": 659.9}, Doubt.UNDER_BOUND),
    "without a grace": ({"elapsed_s": 300.0, "health_grace_s": 0.0}, None),
    "not for the whole window in this phase": ({"phase_age_s": 299.9}, Doubt.UNDER_BOUND),
    "the GPU was busy within the window": ({"gpu_idle_s": 299.9}, Doubt.UNDER_BOUND),
    "the RAM moved within the window": ({"ram_still_s": 299.9}, Doubt.UNDER_BOUND),
    "the GPU is unknown": ({"gpu_idle_s": None, "gpu_unknown": "GPU-1 is lost"}, Doubt.GPU_UNKNOWN),
    "the RAM is unknown": ({"ram_still_s": None}, Doubt.RAM_UNKNOWN),
    "another window is set": ({"health_window_s": 600.0}, Doubt.UNDER_BOUND),
    "a job without a GPU": ({"health_window_s": None, "health_grace_s": None}, Doubt.NOT_POLICED),
    "a job that says it is idle": ({"phase": "idle", "health_window_s": None}, Doubt.NOT_POLICED),
    "no grace is told": ({"health_grace_s": None}, Doubt.NOT_POLICED),
    "its run time is unknown": ({"elapsed_s": None}, Doubt.TIME_UNKNOWN),
    "its phase's age is unknown": ({"phase_age_s": None}, Doubt.TIME_UNKNOWN),
    "a load that hangs": ({"phase": "load", **STILL}, None),
    "a warm load: I/O alone": ({"phase": "load", **STILL, "io_still_s": 0.0}, Doubt.UNDER_BOUND),
    "a mapped load: faults alone": ({"phase": "load", **STILL, "fault_still_s": 5.0}, Doubt.UNDER_BOUND),
    "a load that unpacks: CPU alone": (
        {"phase": "load", **STILL, "container_cpu_still_s": 299.9},
        Doubt.UNDER_BOUND,
    ),
    "a save whose I/O is unknown": (
        {"phase": "save", **STILL, "io_still_s": None, "work_unknown": "not told"},
        Doubt.WORK_UNKNOWN,
    ),
    "a checkpoint whose CPU is unknown": (
        {"phase": "checkpoint", **STILL, "container_cpu_still_s": None},
        Doubt.WORK_UNKNOWN,
    ),
    "in its steps work is no sign of life: a driver may spin": (WORKING, None),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_HEALTH.values(), ids=CONFIRM_HEALTH)
def test_what_confirms_that_a_gpu_job_does_nothing(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**IDLE, **seen}), Trip.HEALTH).doubt is doubt


OFF_BUS = {**IDLE, "gpu_idle_s": None, "gpu_unknown": "GPU-0: GPU is lost", "gpu_lost_s": 300.0, "beat_age_s": 300.0}

CONFIRM_LOST: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "silent for the window on a GPU that is lost": (
        {},
        None,
    ),
    "within the grace for a load: there is nothing to load": ({"elapsed_s": 300.0}, None),
    "it never beat": ({"beat_age_s": None}, None),
    "lost for less than the window, or busy on another GPU within it": ({"gpu_lost_s": 299.9}, Doubt.UNDER_BOUND),
    "the RAM moved within the window": ({"ram_still_s": 299.9}, Doubt.UNDER_BOUND),
    "it beat within the window": ({"beat_age_s": 299.9}, Doubt.UNDER_BOUND),
    "not for the whole window in this phase": ({"phase_age_s": 299.9}, Doubt.UNDER_BOUND),
    "its phase's age is unknown": ({"phase_age_s": None}, Doubt.TIME_UNKNOWN),
    "another window is set": ({"health_window_s": 600.0}, Doubt.UNDER_BOUND),
    "a job without a GPU": ({"health_window_s": None, "health_grace_s": None}, Doubt.NOT_POLICED),
    "another GPU is unknown": ({"gpu_lost_s": None}, Doubt.GPU_UNKNOWN),
    "the RAM is unknown": ({"ram_still_s": None}, Doubt.RAM_UNKNOWN),
    "a load that hangs": ({"phase": "load", **STILL}, None),
    "a checkpoint that is written": ({"phase": "checkpoint", **STILL, "io_still_s": 0.0}, Doubt.UNDER_BOUND),
    "what is told as lost and as measured idle is judged as idle": (
        {"gpu_idle_s": 300.0, "elapsed_s": 659.9},
        Doubt.UNDER_BOUND,
    ),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_LOST.values(), ids=CONFIRM_LOST)
def test_what_confirms_that_a_job_hangs_on_a_lost_gpu(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**OFF_BUS, **seen}), Trip.HEALTH).doubt is doubt


def test_a_lost_gpu_is_no_idle_one_to_a_stall() -> None:
    assert confirm(evidence(**OFF_BUS), Trip.STALL).doubt is Doubt.GPU_UNKNOWN


ON_A_LOST_GPU: dict[str, Any] = {"gpu_pids": {"GPU-0": None, "GPU-1": []}, "lost_gpus_s": {"GPU-0": 60.0}}
JUST_LOST = ON_A_LOST_GPU | {"lost_gpus_s": {"GPU-0": 59.9}}
TAKEN = Quarantine(reason=Reason.GPU_LOST, message="", lost=("GPU-0",))
WITH_LOST: dict[str, tuple[Facts, type[Step] | Step]] = {
    "only promised: nothing is taken from anybody yet": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), evidence=evidence(**ON_A_LOST_GPU)), Fence,
    ),
    "not while its container runs still: it is stopped first, for it may hold the queue's lock": (
        facts(free(Stage.STOPPING, tries=1), settle(Stage.PLANNED), queue_stuck_for_s=QUEUE_PATIENCE_S,
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


@pytest.mark.parametrize("phase", ["load", "eval", "save", "checkpoint"])
@pytest.mark.parametrize("working", [False, True])
def test_a_stall_where_work_counts_is_one_without_work_alone(phase: str, working: bool) -> None:
    confirmed = confirm(evidence(phase=phase, **(WORKING if working else STILL)), Trip.STALL).confirmed

    assert confirmed is not working


# --- a worker whose process is gone (A14)

GONE = evidence(alive=False, dead_s=31.0, container_workers=0, heartbeat_age_s=40.0, cpu_still_s=None)
DEAD_WORKER = episode(trip=Trip.DEAD_WORKER, trips=frozenset({Trip.DEAD_WORKER}))
DOWN_WITH_IT = stopped(cgroup=None)


@pytest.mark.parametrize("place", [container(), DOWN_WITH_IT], ids=["its container is up", "its container is down"])
def test_a_worker_that_is_gone_has_its_container_freed_up_or_down(place: ContainerState) -> None:
    step = decide(facts(episode=DEAD_WORKER, evidence=GONE, container=place))

    assert isinstance(step, Begin)
    assert (step.trip, step.free_key, step.settle_key) == (Trip.DEAD_WORKER, KEY, "7/1")


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


BOTH = frozenset({Trip.STALL, Trip.DEAD_WORKER})
BEATS = {"heartbeat_age_s": 1.0, "cpu_still_s": 0.0}
STEPS = {"beat_age_s": 0.2}

REPORTED: dict[str, tuple[frozenset[Trip], Trip, dict[str, Any], Trip | None]] = {
    "both are so: the one that opened it": (BOTH, Trip.STALL, DEAD, Trip.STALL),
    "both are so, and the other opened it": (BOTH, Trip.DEAD_WORKER, DEAD, Trip.DEAD_WORKER),
    "only the later one is so": (BOTH, Trip.STALL, {**DEAD, **STEPS}, Trip.DEAD_WORKER),
    "only the first one is so": (BOTH, Trip.STALL, BEATS, Trip.STALL),
    "only the first one is so, and the second opened it": (BOTH, Trip.DEAD_WORKER, BEATS, Trip.STALL),
    "neither is so": (BOTH, Trip.STALL, {**BEATS, **STEPS}, None),
    "what nobody reported is not looked for": (frozenset({Trip.STALL}), Trip.STALL, {**DEAD, **STEPS}, None),
    "what was reported counts still when its alert has ended": (frozenset(), Trip.STALL, BEATS, Trip.STALL),
}


@pytest.mark.parametrize(("trips", "first", "seen", "by"), REPORTED.values(), ids=REPORTED)
def test_any_reported_condition_may_confirm_and_gives_the_episode_its_name(
    trips: frozenset[Trip], first: Trip, seen: dict[str, Any], by: Trip | None
) -> None:
    step = decide(facts(episode=episode(trips=trips, trip=first), evidence=evidence(**seen)))

    assert (step.trip if isinstance(step, Begin) else None) == by
    assert isinstance(step, Begin | Wait)


def test_where_several_were_reported_each_doubt_is_told() -> None:
    seen = evidence(**BEATS, **STEPS)

    step = decide(facts(episode=episode(trips=BOTH), evidence=seen))

    assert isinstance(step, Wait)
    assert step.reason is Reason.UNCONFIRMED
    for trip in (Trip.STALL, Trip.DEAD_WORKER):
        assert f"{trip}: {confirm(seen, trip).message}" in step.message


@pytest.mark.parametrize("promised", [settle(Stage.PLANNED), settle(Stage.FENCED)], ids=["fence", "stop"])
def test_once_promised_either_condition_still_confirms(promised: Intent) -> None:
    """What was a stall when it began may be a dead worker by now."""
    job_now = job() if promised.stage is Stage.PLANNED else FENCED_JOB
    owed = episode(free(Stage.PLANNED), promised, trips=BOTH)

    step = decide(facts(episode=owed, job=job_now, evidence=evidence(**DEAD, **STEPS)))

    assert isinstance(step, Fence | Stop)


def test_every_trip_has_local_evidence_of_its_own_and_what_has_none_confirms_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = restart_container.TRIPS | recycle_container.TRIPS | lose_node.TRIPS | wrangle.TRIPS
    assert set(Trip) - others == restart_worker.TRIPS
    monkeypatch.setattr(restart_worker, "_CONDITIONS", {})

    assert confirm(evidence(), Trip.STALL).doubt is Doubt.NO_CONDITION


# --- before anything is promised

HELD_UP: dict[str, tuple[Facts, str]] = {
    "the exporter does not answer": (facts(evidence=None, unknown="no answer"), Reason.NO_EVIDENCE),
    "the exporter's look is stale": (facts(evidence=evidence(sample_age_s=5.1)), Reason.STALE_EVIDENCE),
    "the GPU is busy": (facts(evidence=evidence(gpu_idle_s=0.0)), Reason.UNCONFIRMED),
    "the job is not armed": (facts(evidence=evidence(beat_age_s=None)), Reason.UNCONFIRMED),
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
    "it is dead, and its host was lost": facts(episode=DEAD_WORKER, evidence=GONE, job=job(state=State.NODE_LOST)),
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
    worker_incarnation="i2", job_id=None, attempt=None, beat_age_s=None, gpu_idle_s=0.0, gpu_pids={"GPU-0": [4003]}
)

SUCCEEDED: dict[str, tuple[dict[str, Any], Stage, Stage | type[Step]]] = {
    "another one holds the lock": ({}, Stage.FENCED, Stage.DEAD),
    "it has a job already": ({"job_id": 8, "attempt": 1, "beat_age_s": 0.1}, Stage.FENCED, Stage.DEAD),
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
    assert step.message == confirm(evidence(), Trip.STALL).message


def test_a_resolved_alert_does_not_undo_what_local_evidence_still_shows() -> None:
    assert isinstance(decide(facts(episode=episode(firing=False))), Begin)


def test_a_dry_run_records_once_what_it_would_do_and_then_waits() -> None:
    first = decide(facts(armed=False))
    then = decide(facts(armed=False, episode=episode(would_act=True)))

    assert isinstance(first, WouldAct)
    assert confirm(evidence(), Trip.STALL).message in first.message
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
        Close(outcome=Outcome.MENDED, reason=Reason.DONE, message=""),
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
    assert step.reason == Reason.UNCONFIRMED


def test_what_stays_unconfirmed_is_taken_back_after_the_bound_or_given_up_once_it_was_fenced() -> None:
    alive: dict[str, Any] = {"evidence": evidence(beat_age_s=0.2)}

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
    alive = {"evidence": evidence(beat_age_s=0.2)}

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
    step = decide(facts(free(Stage.PLANNED), settle(Stage.ABANDONED), evidence=evidence(attempt=2, beat_age_s=0.1)))

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
    assert isinstance(decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), job=job(state=State.NODE_LOST))), Fence)


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
            evidence=evidence(beat_age_s=1.0),
            warned_for_s=60.0,
            **PROMISED,
        ),
        Reason.UNCONFIRMED,
    ),
    "warned, and it beat all the while: the promise is taken back": (
        facts(
            free(Stage.PLANNED, warned=WARNED),
            settle(Stage.PLANNED),
            evidence=evidence(beat_age_s=1.0),
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
        facts(free(Stage.PLANNED), settle(Stage.FENCED), evidence=evidence(beat_age_s=0.2), **SILENT_QUEUE),
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
            free(Stage.PLANNED), settle(Stage.PLANNED), queue_stuck_for_s=10.0, evidence=evidence(beat_age_s=0.1)
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
            free(Stage.PLANNED), settle(Stage.FENCED), refused_s_ago=0.0, evidence=evidence(beat_age_s=0.1),
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
    "both done": (facts(free(Stage.DONE), settle(Stage.DONE)), Outcome.MENDED),
    "freed, and there was no job": (facts(free(Stage.DONE), None), Outcome.MENDED),
    "freed, and the job was settled by somebody else": (
        facts(free(Stage.DONE), settle(Stage.ABANDONED)),
        Outcome.MENDED,
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
    heartbeat_age_s=st.sampled_from([None, 1.0, 30.0]),
    cpu_still_s=st.sampled_from([None, 0.0, 30.0]),
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
    lambda stage, tries, quarantined: free(stage, tries=tries, quarantined=quarantined),
    st.sampled_from([stage for stage in Stage if stage is not Stage.FENCED]),
    st.sampled_from([0, 1, TRIES_MAX]),
    st.booleans(),
)
SETTLE = st.builds(settle, st.sampled_from([Stage.PLANNED, Stage.FENCED, Stage.DONE, Stage.ABANDONED]))
JOB = st.builds(
    job,
    attempt=st.sampled_from([1, 1, 2]),
    claimed_by=st.sampled_from(["i1", "i1", "i2", None]),
    state=st.sampled_from([State.FENCING, *State]),
    watchdog_retries=st.integers(0, 5),
    attempts_max=st.sampled_from([1, 2, 20]),
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
            trips=frozenset(draw(st.sets(st.sampled_from(list(Trip)), max_size=2))),
        ),
        armed=draw(st.booleans()),
        evidence=draw(st.none() | EVIDENCE | WEDGED),
        container=draw(st.none() | CONTAINER),
        container_known=draw(st.booleans()),
        job=draw(st.none() | JOB),
        job_known=draw(st.booleans()),
        worker_ended=draw(st.booleans()),
        free_for_s=draw(st.sampled_from([0.0, 59.0, 119.9, 120.0])),
        settle_for_s=draw(st.sampled_from([0.0, 59.9, 60.0, 120.0])),
        quiet_for_s=draw(st.sampled_from([0.0, 3600.0])),
        refused_s_ago=draw(st.sampled_from([None, 0.0, 3600.0])),
        stopped_s_ago=draw(st.sampled_from([None, 0.0, 3600.0])),
    )


def confirmed(known: Facts) -> bool:
    """By another road than the remedy's: what must hold of the evidence for anything to be touched."""
    seen: WorkerFacts | None = known.evidence
    if seen is None or seen.sample_age_s > LIMITS.evidence_fresh_s:
        return False
    silence = (seen.beat_age_s, seen.gpu_idle_s, seen.ram_still_s)
    stalled = bool(seen.stall_timeout_s) and all(
        age is not None and age >= (seen.stall_timeout_s or 0) for age in silence
    )
    dead = all(age is not None and age >= seen.dead_after_s for age in (seen.heartbeat_age_s, seen.cpu_still_s))
    reported = known.episode.trips | {known.episode.trip}
    return (
        seen.alive is True
        and seen.container_incarnation == KEY
        and (seen.job_id, seen.attempt) == (7, 1)
        and ((stalled and Trip.STALL in reported) or (dead and Trip.DEAD_WORKER in reported))
    )


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
        assert dead or known.settle_for_s >= LIMITS.settle_bound_s
        capped = known.job.watchdog_retries >= LIMITS.retries_max or known.job.attempt >= known.job.attempts_max
        assert isinstance(step, Fail) or not capped


@given(any_facts())
def test_gpus_are_taken_out_of_use_once_and_only_for_what_outlived_a_stop_or_its_container(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Quarantine):
        free = known.episode.free
        assert known.armed
        assert free is not None
        up = known.container is not None and known.container.incarnation == free.key and known.container.running
        assert free.stage is Stage.STOPPING or (free.stage is Stage.PLANNED and not up)
        assert known.free_for_s >= LIMITS.free_bound_s
        assert not free.data["quarantined"]
        assert known.container_known


@given(any_facts())
def test_while_it_is_not_armed_and_nothing_was_begun_it_only_waits_closes_or_records(known: Facts) -> None:
    assume(known.episode.free is None)

    step = decide(replace(known, armed=False))

    assert isinstance(step, Wait | Close | WouldAct)
    assert not isinstance(step, WouldAct) or not known.episode.would_act


@given(any_facts())
def test_nothing_begins_but_on_confirmed_evidence_about_a_container_that_opted_in(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Begin | WouldAct):
        assert confirmed(known)
        assert known.container is not None
        assert known.container.managed
        assert known.container.running
        assert known.episode.free is None


@given(any_facts())
def test_nothing_starts_before_its_job_is_settled(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Start):
        assert known.episode.settle is None or known.episode.settle.over
        assert known.container is not None
        assert not known.container.running


@given(any_facts())
def test_an_episode_closes_only_when_nothing_is_owed_any_more(known: Facts) -> None:
    step = decide(known)

    if isinstance(step, Close):
        assert all(intent is None or intent.over for intent in (known.episode.free, known.episode.settle))


@given(any_facts())
def test_every_step_says_why(known: Facts) -> None:
    assert decide(known).message


def test_a_container_that_somebody_paused_is_left_to_them() -> None:
    before = decide(facts(container=container(paused=True)))
    begun = decide(facts(free(Stage.PLANNED), settle(Stage.PLANNED), container=container(paused=True)))

    assert (isinstance(before, Wait) and before.reason) == Reason.CONTAINER_PAUSED
    assert (isinstance(begun, Wait) and begun.reason) == Reason.UNCONFIRMED
    assert isinstance(decide(facts()), Begin)
