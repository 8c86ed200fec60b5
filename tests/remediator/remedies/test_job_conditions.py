"""The conditions of jobs and workers as truth tables: which local evidence confirms each, with a sentence a row."""

from typing import Any

import pytest

from gpuwarden.job import Condition
from remediator.reasons import Doubt
from remediator.remedies import (
    hold_lost_host,
    job_conditions,
    recycle_container,
    restart_container,
    restart_worker,
    wrangle,
)
from remediator.remedies.job_conditions import confirm
from tests.remediator.builders import (
    evidence,
)

pytestmark = pytest.mark.pure


# --- what counts as wedged (A2 to A6, and invariant 4)

CONFIRM: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "wedged: silent, every GPU idle, RAM still": ({}, None),
    "exactly at the timeout is wedged": (
        {"step_beat_age_s": 120.0, "gpu_idle_s": 120.0, "ram_idle_s": 120.0},
        None,
    ),
    "a hair under the timeout is not": ({"step_beat_age_s": 119.999}, Doubt.UNDER_BOUND),
    "its owner allows more silence": ({"stall_timeout_s": 600.0}, Doubt.UNDER_BOUND),
    "its owner allows less silence": (
        {"stall_timeout_s": 5.0, "step_beat_age_s": 6.0, "gpu_idle_s": 6.0, "ram_idle_s": 6.0},
        None,
    ),
    "loading, GPU idle, RAM climbing: it is not armed": (
        {"step_beat_age_s": None, "phase": "load", "ram_idle_s": 0.0},
        Doubt.NOT_ARMED,
    ),
    "loading, GPU idle, RAM still (a warm cache): it is not armed": (
        {"step_beat_age_s": None, "phase": "load"},
        Doubt.NOT_ARMED,
    ),
    "a slow real step: GPU busy, RAM still": ({"gpu_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "a slow real step: GPU busy, RAM moving": ({"gpu_idle_s": 0.0, "ram_idle_s": 2.0}, Doubt.UNDER_BOUND),
    "the GPU was busy within the silence": ({"gpu_idle_s": 119.0}, Doubt.UNDER_BOUND),
    "a slow decode or staging: GPU idle, RAM moving": ({"ram_idle_s": 3.0}, Doubt.UNDER_BOUND),
    "it beat within the silence": ({"step_beat_age_s": 1.0}, Doubt.UNDER_BOUND),
    "its only GPU is unknown": (
        {"gpu_idle_s": None, "gpu_unknown": "GPU-0 is not measured"},
        Doubt.GPU_UNKNOWN,
    ),
    "one of its two GPUs is unknown": (
        {"gpus": ["GPU-0", "GPU-1"], "gpu_idle_s": None, "gpu_unknown": "GPU-1 is not measured"},
        Doubt.GPU_UNKNOWN,
    ),
    "the GPU is unknown and nobody says why": ({"gpu_idle_s": None}, Doubt.GPU_UNKNOWN),
    "its RAM is unknown": ({"ram_idle_s": None, "ram_unknown": "cgroup gone"}, Doubt.RAM_UNKNOWN),
    "its RAM is unknown and nobody says why": ({"ram_idle_s": None}, Doubt.RAM_UNKNOWN),
    "its process holds no lock: it is dead, not stalled": ({"alive": False}, Doubt.NO_LOCK),
    "whether it lives cannot be told": ({"alive": None}, Doubt.NO_LOCK),
    "it runs no job": ({"job_id": None, "attempt": None}, Doubt.NO_JOB),
    "a video model is not policed": ({"stall_timeout_s": 0.0}, Doubt.NOT_POLICED),
    "the timeout is not known": ({"stall_timeout_s": None}, Doubt.NOT_POLICED),
    "a simulated GPU says so": ({"gpu_simulated": True}, None),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM.values(), ids=CONFIRM)
def test_what_confirms_a_stall(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**seen), Condition.STALL).doubt is doubt


FIGURES: dict[Condition, tuple[dict[str, Any], tuple[str, ...]]] = {
    Condition.STALL: (
        {"step_beat_age_s": 131.0, "gpu_idle_s": 132.0, "ram_idle_s": 133.0},
        ("131.0", "132.0", "133.0", "120.0"),
    ),
    Condition.DEAD_WORKER: (
        {"heartbeat_age_s": 31.0, "cpu_idle_s": 32.0, "dead_after_s": 30.0},
        ("31.0", "32.0", "30.0"),
    ),
    Condition.BUDGET: ({"elapsed_s": 8101.0, "budget_s": 8100.0}, ("8101.0", "8100.0")),
    Condition.HEALTH: (
        {"elapsed_s": 661.0, "gpu_idle_s": 302.0, "ram_idle_s": 303.0},
        ("661.0", "302.0", "303.0", "300.0"),
    ),
}


@pytest.mark.parametrize("condition", FIGURES)
def test_the_sentence_names_every_figure_and_its_bound(condition: Condition) -> None:
    seen, figures = FIGURES[condition]
    message = confirm(evidence(**seen), condition).message

    assert [each for each in figures if each not in message] == []
    assert "simulated GPU" not in message
    assert (
        condition is Condition.DEAD_WORKER
        or "simulated GPU" in confirm(evidence(**seen, gpu_simulated=True), condition).message
    )


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "the GPU": ({"gpu_idle_s": None, "gpu_unknown": "GPU-1 is lost"}, "GPU-1 is lost"),
    "RAM": ({"ram_idle_s": None, "ram_unknown": "cgroup gone"}, "cgroup gone"),
}


@pytest.mark.parametrize(("seen", "why"), UNKNOWN.values(), ids=UNKNOWN)
def test_the_sentence_says_why_a_figure_is_unknown(seen: dict[str, Any], why: str) -> None:
    assert why in confirm(evidence(**seen), Condition.STALL).message


DEAD = {"heartbeat_age_s": 31.0, "cpu_idle_s": 31.0, "dead_after_s": 30.0}

CONFIRM_DEAD: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "dead: no heartbeat, and no CPU time used": (
        {},
        None,
    ),
    "exactly at the bound is dead": ({"heartbeat_age_s": 30.0, "cpu_idle_s": 30.0}, None),
    "a hair under the bound is not": ({"heartbeat_age_s": 29.999}, Doubt.UNDER_BOUND),
    "it has a heartbeat": ({"heartbeat_age_s": 1.0}, Doubt.UNDER_BOUND),
    "a long call starves its heartbeat, and uses the CPU": ({"cpu_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "it used the CPU within the bound": ({"cpu_idle_s": 29.9}, Doubt.UNDER_BOUND),
    "its heartbeat is unknown": ({"heartbeat_age_s": None}, Doubt.TIME_UNKNOWN),
    "its CPU time is unknown": ({"cpu_idle_s": None}, Doubt.TIME_UNKNOWN),
    "the exporter allows more": ({"dead_after_s": 60.0}, Doubt.UNDER_BOUND),
    "the exporter allows nothing: that is no bound": ({"dead_after_s": 0.0}, Doubt.NO_BOUND),
    "its job need not be policed for stalls": ({"stall_timeout_s": 0.0, "step_beat_age_s": None}, None),
    "its GPU and RAM need not be known": ({"gpu_idle_s": None, "ram_idle_s": None}, None),
    "its GPU is busy with what was queued on it": ({"gpu_idle_s": 0.0}, None),
    "its process is gone, for how long is not told": ({"alive": False}, Doubt.TIME_UNKNOWN),
    "its process has been gone for as long as is allowed": (
        {"alive": False, "dead_s": 30.0, "heartbeat_age_s": None, "cpu_idle_s": None},
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
    assert confirm(evidence(**{**DEAD, **seen}), Condition.DEAD_WORKER).doubt is doubt


OVER = {"elapsed_s": 8100.0, "budget_s": 8100.0}

CONFIRM_BUDGET: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "at its budget": ({}, None),
    "a hair under it": ({"elapsed_s": 8099.999}, Doubt.UNDER_BOUND),
    "busy, beating and loading all the same": (
        {"gpu_idle_s": 0.0, "step_beat_age_s": 0.1, "phase": "load", "ram_idle_s": 0.0},
        None,
    ),
    "its GPU and RAM need not be known": ({"gpu_idle_s": None, "ram_idle_s": None}, None),
    "it has no budget": ({"budget_s": 0.0}, Doubt.NO_BUDGET),
    "its budget is not known": ({"budget_s": None}, Doubt.NO_BUDGET),
    "it was started before a reboot": ({"elapsed_s": None}, Doubt.TIME_UNKNOWN),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
    "it runs no job": ({"job_id": None, "attempt": None}, Doubt.NO_JOB),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_BUDGET.values(), ids=CONFIRM_BUDGET)
def test_what_confirms_that_a_budget_is_spent(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**OVER, **seen}), Condition.BUDGET).doubt is doubt


IDLE = {"elapsed_s": 660.0, "phase_age_s": 300.0, "gpu_idle_s": 300.0, "ram_idle_s": 300.0, "step_beat_age_s": 300.0}
STILL = {"io_idle_s": 300.0, "page_fault_idle_s": 300.0, "container_cpu_idle_s": 300.0}
WORKING = {"io_idle_s": 0.0, "page_fault_idle_s": 0.0, "container_cpu_idle_s": 0.0}

STEPLESS = {
    "step_beat_age_s": 600.0,
    "stuck_after_s": 600.0,
    "stuck_idle_s": 580.0,
    "ram_idle_s": 580.0,
    "gpu_idle_s": 0.0,
}
NO_INPUT = {"io_idle_s": 580.0, "page_fault_idle_s": 580.0, "container_cpu_idle_s": 0.0}
PEGGED = {**STEPLESS, **NO_INPUT, "gpu_saturated_s": 580.0, "gpu_last_busy_age_s": 0.0}
UNSEEN = {
    **STEPLESS, **NO_INPUT, "container_cpu_idle_s": 580.0, "gpu_idle_s": None, "gpu_unknown": "a MIG slice",
    "gpu_saturated_s": None, "gpu_last_busy_age_s": 580.0,
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
    "a step in time": ({**PEGGED, "step_beat_age_s": 599.9}, Doubt.UNDER_BOUND),
    "it is not armed": ({**PEGGED, "step_beat_age_s": None}, Doubt.NOT_ARMED),
    "nothing is said of it": ({**PEGGED, "stuck_after_s": None}, Doubt.UNDER_BOUND),
    "an exporter that tells half": ({**PEGGED, "stuck_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "the GPU pauses": ({**PEGGED, "gpu_saturated_s": 579.9}, Doubt.UNDER_BOUND),
    "the RAM moves": ({**PEGGED, "ram_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "it reads": ({**PEGGED, "io_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "it touches memory": ({**PEGGED, "page_fault_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "RAM unknown": ({**PEGGED, "ram_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "I/O unknown": ({**PEGGED, "io_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "faults unknown": ({**PEGGED, "page_fault_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "an exporter that does not tell of its GPU": (
        {**PEGGED, "gpu_saturated_s": None, "gpu_last_busy_age_s": None, "container_cpu_idle_s": 9000.0},
        Doubt.GPU_UNKNOWN,
    ),
    "unknown, and was busy": ({**UNSEEN, "gpu_last_busy_age_s": 579.9}, Doubt.UNDER_BOUND),
    "unknown, and its processes compute": ({**UNSEEN, "container_cpu_idle_s": 1.0}, Doubt.UNDER_BOUND),
    "unknown, and so is their CPU": ({**UNSEEN, "container_cpu_idle_s": None}, Doubt.GPU_UNKNOWN),
    "a slow step": ({**PEGGED, "gpu_saturated_s": 0.0, "container_cpu_idle_s": 9000.0}, Doubt.UNDER_BOUND),
    "its silence is not policed": ({**PEGGED, "stall_timeout_s": 0.0, "stuck_after_s": None}, Doubt.NOT_POLICED),
    "its process holds no lock": ({**PEGGED, "alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_STUCK.values(), ids=CONFIRM_STUCK)
def test_what_confirms_that_a_job_is_busy_but_stuck(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**seen), Condition.STALL).doubt is doubt


SPINS = {
    **PEGGED,
    "stuck_after_s": None,
    "stuck_idle_s": None,
    "gang_stuck_after_s": 600.0,
    "gang_stuck_idle_s": 580.0,
}

CONFIRM_GANG: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "its GPU is pegged": (
        {},
        None,
    ),
    "by what is set": ({"gang_stuck_after_s": 601.0}, Doubt.UNDER_BOUND),
    "by what is set for its stillness": ({"gang_stuck_idle_s": 581.0}, Doubt.UNDER_BOUND),
    "a step in time": ({"step_beat_age_s": 599.9}, Doubt.UNDER_BOUND),
    "it is not armed": ({"step_beat_age_s": None}, Doubt.NOT_ARMED),
    "it is alone": ({"gang_stuck_after_s": None, "stuck_after_s": 600.0}, Doubt.NO_GANG),
    "an exporter that tells half": ({"gang_stuck_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "the GPU pauses": ({"gpu_saturated_s": 579.9}, Doubt.UNDER_BOUND),
    "the RAM moves": ({"ram_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "it reads": ({"io_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "it touches memory": ({"page_fault_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "its GPU is unknown": ({"gpu_saturated_s": None, "gpu_last_busy_age_s": 900.0}, Doubt.SIGNS_UNKNOWN),
    "RAM unknown": ({"ram_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "I/O unknown": ({"io_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "faults unknown": ({"page_fault_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_GANG.values(), ids=CONFIRM_GANG)
def test_what_confirms_that_a_rank_spins_as_its_gang_is_said_to(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**SPINS, **seen}), Condition.GANG).doubt is doubt


def test_a_rank_that_spins_is_no_stall_of_its_own() -> None:
    assert not confirm(evidence(**SPINS), Condition.STALL).confirmed


CONFIRM_HEALTH: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "idle and still for the window, after the grace": (
        {},
        None,
    ),
    "it never beat": ({"step_beat_age_s": None, "stall_timeout_s": 0.0}, None),
    "it beats": ({"step_beat_age_s": 0.1}, Doubt.UNDER_BOUND),
    "it beat within the window": ({"step_beat_age_s": 299.9}, Doubt.UNDER_BOUND),
    "within the grace and a window": ({"elapsed_s": 659.9}, Doubt.UNDER_BOUND),
    "without a grace": ({"elapsed_s": 300.0, "health_grace_s": 0.0}, None),
    "not for the whole window in this phase": ({"phase_age_s": 299.9}, Doubt.UNDER_BOUND),
    "the GPU was busy within the window": ({"gpu_idle_s": 299.9}, Doubt.UNDER_BOUND),
    "the RAM moved within the window": ({"ram_idle_s": 299.9}, Doubt.UNDER_BOUND),
    "the GPU is unknown": ({"gpu_idle_s": None, "gpu_unknown": "GPU-1 is lost"}, Doubt.GPU_UNKNOWN),
    "the RAM is unknown": ({"ram_idle_s": None}, Doubt.RAM_UNKNOWN),
    "another window is set": ({"health_window_s": 600.0}, Doubt.UNDER_BOUND),
    "a job without a GPU": ({"health_window_s": None, "health_grace_s": None}, Doubt.NOT_POLICED),
    "a job that says it is idle": ({"phase": "idle", "health_window_s": None}, Doubt.NOT_POLICED),
    "no grace is told": ({"health_grace_s": None}, Doubt.NOT_POLICED),
    "its run time is unknown": ({"elapsed_s": None}, Doubt.TIME_UNKNOWN),
    "its phase's age is unknown": ({"phase_age_s": None}, Doubt.TIME_UNKNOWN),
    "a load that hangs": ({"phase": "load", **STILL}, None),
    "a warm load: I/O alone": ({"phase": "load", **STILL, "io_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "a mapped load: faults alone": ({"phase": "load", **STILL, "page_fault_idle_s": 5.0}, Doubt.UNDER_BOUND),
    "a load that unpacks: CPU alone": (
        {"phase": "load", **STILL, "container_cpu_idle_s": 299.9},
        Doubt.UNDER_BOUND,
    ),
    "a save whose I/O is unknown": (
        {"phase": "save", **STILL, "io_idle_s": None, "work_unknown": "not told"},
        Doubt.WORK_UNKNOWN,
    ),
    "a checkpoint whose CPU is unknown": (
        {"phase": "checkpoint", **STILL, "container_cpu_idle_s": None},
        Doubt.WORK_UNKNOWN,
    ),
    "in its steps work is no sign of life: a driver may spin": (WORKING, None),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_HEALTH.values(), ids=CONFIRM_HEALTH)
def test_what_confirms_that_a_gpu_job_does_nothing(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**IDLE, **seen}), Condition.HEALTH).doubt is doubt


OFF_BUS = {
    **IDLE,
    "gpu_idle_s": None,
    "gpu_unknown": "GPU-0: GPU is lost",
    "gpu_lost_s": 300.0,
    "step_beat_age_s": 300.0,
}

CONFIRM_LOST: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "silent for the window on a GPU that is lost": (
        {},
        None,
    ),
    "within the grace for a load: there is nothing to load": ({"elapsed_s": 300.0}, None),
    "it never beat": ({"step_beat_age_s": None}, None),
    "lost for less than the window, or busy on another GPU within it": ({"gpu_lost_s": 299.9}, Doubt.UNDER_BOUND),
    "the RAM moved within the window": ({"ram_idle_s": 299.9}, Doubt.UNDER_BOUND),
    "it beat within the window": ({"step_beat_age_s": 299.9}, Doubt.UNDER_BOUND),
    "not for the whole window in this phase": ({"phase_age_s": 299.9}, Doubt.UNDER_BOUND),
    "its phase's age is unknown": ({"phase_age_s": None}, Doubt.TIME_UNKNOWN),
    "another window is set": ({"health_window_s": 600.0}, Doubt.UNDER_BOUND),
    "a job without a GPU": ({"health_window_s": None, "health_grace_s": None}, Doubt.NOT_POLICED),
    "another GPU is unknown": ({"gpu_lost_s": None}, Doubt.GPU_UNKNOWN),
    "the RAM is unknown": ({"ram_idle_s": None}, Doubt.RAM_UNKNOWN),
    "a load that hangs": ({"phase": "load", **STILL}, None),
    "a checkpoint that is written": ({"phase": "checkpoint", **STILL, "io_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "what is told as lost and as measured idle is judged as idle": (
        {"gpu_idle_s": 300.0, "elapsed_s": 659.9},
        Doubt.UNDER_BOUND,
    ),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_LOST.values(), ids=CONFIRM_LOST)
def test_what_confirms_that_a_job_hangs_on_a_lost_gpu(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**OFF_BUS, **seen}), Condition.HEALTH).doubt is doubt


def test_a_lost_gpu_is_no_idle_one_to_a_stall() -> None:
    assert confirm(evidence(**OFF_BUS), Condition.STALL).doubt is Doubt.GPU_UNKNOWN


@pytest.mark.parametrize("phase", ["load", "eval", "save", "checkpoint"])
@pytest.mark.parametrize("working", [False, True])
def test_a_stall_where_work_counts_is_one_without_work_alone(phase: str, working: bool) -> None:
    confirmed = confirm(evidence(phase=phase, **(WORKING if working else STILL)), Condition.STALL).confirmed

    assert confirmed is not working


def test_every_trip_has_local_evidence_of_its_own_and_what_has_none_confirms_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = (
        restart_container.CONFIRMABLE | recycle_container.CONFIRMABLE | hold_lost_host.CONFIRMABLE | wrangle.CONFIRMABLE
    )
    assert set(Condition) - others == restart_worker.CONFIRMABLE
    monkeypatch.setattr(job_conditions, "CONDITIONS", {})

    assert confirm(evidence(), Condition.STALL).doubt is Doubt.NO_CONDITION
