"""The conditions of jobs and workers as truth tables: the local evidence that confirms each."""

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
    scale_tenant,
    taint_node,
    wrangle,
)
from remediator.remedies.job_conditions import confirm
from tests.remediator.builders import (
    evidence,
)

pytestmark = pytest.mark.pure


# --- stall (A2 to A6, and invariant 4)

CONFIRM: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "a health window that raises an alert only": ({"health_acts": False}, None),
    "stalled: no step beat, GPUs idle, RAM idle": ({}, None),
    "exactly at the timeout": (
        {"step_beat_age_s": 120.0, "gpu_idle_s": 120.0, "ram_idle_s": 120.0},
        None,
    ),
    "just under the timeout": ({"step_beat_age_s": 119.999}, Doubt.UNDER_BOUND),
    "longer timeout by its owner": ({"stall_timeout_s": 600.0}, Doubt.UNDER_BOUND),
    "shorter timeout by its owner": (
        {"stall_timeout_s": 5.0, "step_beat_age_s": 6.0, "gpu_idle_s": 6.0, "ram_idle_s": 6.0},
        None,
    ),
    "loading, GPU idle, RAM growing: not monitored yet": (
        {"step_beat_age_s": None, "phase": "load", "ram_idle_s": 0.0},
        Doubt.NOT_ARMED,
    ),
    "loading from a warm cache, GPU idle, RAM idle: not monitored yet": (
        {"step_beat_age_s": None, "phase": "load"},
        Doubt.NOT_ARMED,
    ),
    "slow step: GPU busy, RAM idle": ({"gpu_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "slow step: GPU busy, RAM active": ({"gpu_idle_s": 0.0, "ram_idle_s": 2.0}, Doubt.UNDER_BOUND),
    "GPU busy within the timeout": ({"gpu_idle_s": 119.0}, Doubt.UNDER_BOUND),
    "slow decoding: GPU idle, RAM active": ({"ram_idle_s": 3.0}, Doubt.UNDER_BOUND),
    "step beat within the timeout": ({"step_beat_age_s": 1.0}, Doubt.UNDER_BOUND),
    "its only GPU is unknown": (
        {"gpu_idle_s": None, "gpu_unknown": "GPU-0 is not measured"},
        Doubt.GPU_UNKNOWN,
    ),
    "one of its two GPUs is unknown": (
        {"gpus": ["GPU-0", "GPU-1"], "gpu_idle_s": None, "gpu_unknown": "GPU-1 is not measured"},
        Doubt.GPU_UNKNOWN,
    ),
    "the GPU is unknown without a reason": ({"gpu_idle_s": None}, Doubt.GPU_UNKNOWN),
    "its RAM is unknown": ({"ram_idle_s": None, "ram_unknown": "cgroup gone"}, Doubt.RAM_UNKNOWN),
    "its RAM is unknown without a reason": ({"ram_idle_s": None}, Doubt.RAM_UNKNOWN),
    "its process has no lock: dead, not stalled": ({"alive": False}, Doubt.NO_LOCK),
    "its lock is unknown": ({"alive": None}, Doubt.NO_LOCK),
    "it runs no job": ({"job_id": None, "attempt": None}, Doubt.NO_JOB),
    "it compiles within the busy timeout": ({"heavy_work_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "its heavy work is unknown": ({"heavy_work_idle_s": None}, Doubt.WORK_UNKNOWN),
    "it computes after the busy timeout": ({"heavy_work_idle_s": 0.0, "busy_timeout_s": 60.0}, None),
    "a job without a stall timeout": ({"stall_timeout_s": 0.0}, Doubt.NOT_POLICED),
    "the timeout is unknown": ({"stall_timeout_s": None}, Doubt.NOT_POLICED),
    "a simulated GPU": ({"gpu_simulated": True}, None),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM.values(), ids=CONFIRM)
def test_stall_is_confirmed_or_doubted(seen: dict[str, Any], doubt: Doubt | None) -> None:
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
def test_message_names_every_figure_and_its_limit(condition: Condition) -> None:
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
def test_message_gives_the_reason_of_an_unknown_figure(seen: dict[str, Any], why: str) -> None:
    assert why in confirm(evidence(**seen), Condition.STALL).message


DEAD = {"heartbeat_age_s": 31.0, "cpu_idle_s": 31.0, "dead_after_s": 30.0}

CONFIRM_DEAD: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "dead: no heartbeat and no CPU time": (
        {},
        None,
    ),
    "exactly at the limit": ({"heartbeat_age_s": 30.0, "cpu_idle_s": 30.0}, None),
    "just under the limit": ({"heartbeat_age_s": 29.999}, Doubt.UNDER_BOUND),
    "it has a heartbeat": ({"heartbeat_age_s": 1.0}, Doubt.UNDER_BOUND),
    "no heartbeat during a long call that uses the CPU": ({"cpu_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "CPU used within the limit": ({"cpu_idle_s": 29.9}, Doubt.UNDER_BOUND),
    "its heartbeat is unknown": ({"heartbeat_age_s": None}, Doubt.TIME_UNKNOWN),
    "its CPU time is unknown": ({"cpu_idle_s": None}, Doubt.TIME_UNKNOWN),
    "longer limit of the exporter": ({"dead_after_s": 60.0}, Doubt.UNDER_BOUND),
    "limit 0: unlimited": ({"dead_after_s": 0.0}, Doubt.NO_BOUND),
    "a job without a stall timeout": ({"stall_timeout_s": 0.0, "step_beat_age_s": None}, None),
    "GPU and RAM unknown": ({"gpu_idle_s": None, "ram_idle_s": None}, None),
    "GPU busy with queued work": ({"gpu_idle_s": 0.0}, None),
    "its process is gone for an unknown time": ({"alive": False}, Doubt.TIME_UNKNOWN),
    "its process is gone for the limit": (
        {"alive": False, "dead_s": 30.0, "heartbeat_age_s": None, "cpu_idle_s": None},
        None,
    ),
    "its lock is free and its heartbeat at the limit": (
        {"alive": False, "dead_s": 31.0, "heartbeat_age_s": 30.0},
        None,
    ),
    "its lock is free and it has a heartbeat": (
        {"alive": False, "dead_s": 900.0, "heartbeat_age_s": 29.9},
        Doubt.UNDER_BOUND,
    ),
    "gone for less than the limit": ({"alive": False, "dead_s": 29.9}, Doubt.UNDER_BOUND),
    "it came back": ({"alive": True, "dead_s": 900.0, "heartbeat_age_s": 1.0}, Doubt.UNDER_BOUND),
    "gone without a job": ({"alive": False, "dead_s": 99.0, "job_id": None}, Doubt.NO_JOB),
    "its lock is unknown": ({"alive": None}, Doubt.NO_LOCK),
    "it runs no job": ({"job_id": None, "attempt": None}, Doubt.NO_JOB),
}


@pytest.mark.behaviour("A19")
@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_DEAD.values(), ids=CONFIRM_DEAD)
def test_dead_worker_is_confirmed_or_doubted(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**DEAD, **seen}), Condition.DEAD_WORKER).doubt is doubt


OVER = {"elapsed_s": 8100.0, "budget_s": 8100.0}

CONFIRM_BUDGET: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "at its budget": ({}, None),
    "just under it": ({"elapsed_s": 8099.999}, Doubt.UNDER_BOUND),
    "busy, with step beats, and loading": (
        {"gpu_idle_s": 0.0, "step_beat_age_s": 0.1, "phase": "load", "ram_idle_s": 0.0},
        None,
    ),
    "GPU and RAM unknown": ({"gpu_idle_s": None, "ram_idle_s": None}, None),
    "without a budget": ({"budget_s": 0.0}, Doubt.NO_BUDGET),
    "its budget is unknown": ({"budget_s": None}, Doubt.NO_BUDGET),
    "it was started before a reboot": ({"elapsed_s": None}, Doubt.TIME_UNKNOWN),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
    "it runs no job": ({"job_id": None, "attempt": None}, Doubt.NO_JOB),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_BUDGET.values(), ids=CONFIRM_BUDGET)
def test_spent_budget_is_confirmed_or_doubted(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**OVER, **seen}), Condition.BUDGET).doubt is doubt


IDLE = {
    "elapsed_s": 660.0, "phase_age_s": 300.0, "gpu_idle_s": 300.0, "ram_idle_s": 300.0, "step_beat_age_s": 300.0,
    "heavy_work_idle_s": 300.0,
}  # fmt: skip
NO_WORK = {"io_idle_s": 300.0, "page_fault_idle_s": 300.0, "container_cpu_idle_s": 300.0}
WORKING = {"io_idle_s": 0.0, "page_fault_idle_s": 0.0, "container_cpu_idle_s": 0.0}

STEPLESS = {
    "step_beat_age_s": 600.0,
    "stuck_after_s": 600.0,
    "stuck_idle_s": 580.0,
    "ram_idle_s": 580.0,
    "gpu_idle_s": 0.0,
}
NO_INPUT = {"io_idle_s": 580.0, "page_fault_idle_s": 580.0, "container_cpu_idle_s": 0.0}
SATURATED = {**STEPLESS, **NO_INPUT, "gpu_saturated_s": 580.0, "gpu_last_busy_age_s": 0.0}
UNKNOWN_GPU = {
    **STEPLESS, **NO_INPUT, "container_cpu_idle_s": 580.0, "gpu_idle_s": None, "gpu_unknown": "a MIG slice",
    "gpu_saturated_s": None, "gpu_last_busy_age_s": 580.0,
}  # fmt: skip

CONFIRM_STUCK: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "GPU saturated": (
        SATURATED,
        None,
    ),
    "GPU saturated in an evaluation": ({**SATURATED, "phase": "eval"}, None),
    "GPU unknown": (
        UNKNOWN_GPU,
        None,
    ),
    "longer limit": ({**SATURATED, "stuck_after_s": 601.0}, Doubt.UNDER_BOUND),
    "step beat within the limit": ({**SATURATED, "step_beat_age_s": 599.9}, Doubt.UNDER_BOUND),
    "not monitored yet": ({**SATURATED, "step_beat_age_s": None}, Doubt.NOT_ARMED),
    "no limit": ({**SATURATED, "stuck_after_s": None}, Doubt.UNDER_BOUND),
    "incomplete evidence": ({**SATURATED, "stuck_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "GPU pauses": ({**SATURATED, "gpu_saturated_s": 579.9}, Doubt.UNDER_BOUND),
    "RAM active": ({**SATURATED, "ram_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "I/O active": ({**SATURATED, "io_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "page faults": ({**SATURATED, "page_fault_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "RAM unknown": ({**SATURATED, "ram_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "I/O unknown": ({**SATURATED, "io_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "faults unknown": ({**SATURATED, "page_fault_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "evidence without the GPU": (
        {**SATURATED, "gpu_saturated_s": None, "gpu_last_busy_age_s": None, "container_cpu_idle_s": 9000.0},
        Doubt.GPU_UNKNOWN,
    ),
    "GPU unknown now, busy before": ({**UNKNOWN_GPU, "gpu_last_busy_age_s": 579.9}, Doubt.UNDER_BOUND),
    "GPU unknown, CPU active": ({**UNKNOWN_GPU, "container_cpu_idle_s": 1.0}, Doubt.UNDER_BOUND),
    "GPU and CPU unknown": ({**UNKNOWN_GPU, "container_cpu_idle_s": None}, Doubt.GPU_UNKNOWN),
    "slow step": ({**SATURATED, "gpu_saturated_s": 0.0, "container_cpu_idle_s": 9000.0}, Doubt.UNDER_BOUND),
    "without a stall timeout": ({**SATURATED, "stall_timeout_s": 0.0, "stuck_after_s": None}, Doubt.NOT_POLICED),
    "its process has no lock": ({**SATURATED, "alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_STUCK.values(), ids=CONFIRM_STUCK)
def test_busy_but_stuck_job_is_confirmed_or_doubted(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**seen), Condition.STALL).doubt is doubt


SPINS = {
    **SATURATED,
    "stuck_after_s": None,
    "stuck_idle_s": None,
    "gang_stuck_after_s": 600.0,
    "gang_stuck_idle_s": 580.0,
}

CONFIRM_GANG: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "GPU saturated": (
        {},
        None,
    ),
    "longer limit": ({"gang_stuck_after_s": 601.0}, Doubt.UNDER_BOUND),
    "longer limit of inactivity": ({"gang_stuck_idle_s": 581.0}, Doubt.UNDER_BOUND),
    "step beat within the limit": ({"step_beat_age_s": 599.9}, Doubt.UNDER_BOUND),
    "not monitored yet": ({"step_beat_age_s": None}, Doubt.NOT_ARMED),
    "not in a gang": ({"gang_stuck_after_s": None, "stuck_after_s": 600.0}, Doubt.NO_GANG),
    "incomplete evidence": ({"gang_stuck_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "GPU pauses": ({"gpu_saturated_s": 579.9}, Doubt.UNDER_BOUND),
    "RAM active": ({"ram_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "I/O active": ({"io_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "page faults": ({"page_fault_idle_s": 579.9}, Doubt.UNDER_BOUND),
    "GPU unknown": ({"gpu_saturated_s": None, "gpu_last_busy_age_s": 900.0}, Doubt.SIGNS_UNKNOWN),
    "RAM unknown": ({"ram_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "I/O unknown": ({"io_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "faults unknown": ({"page_fault_idle_s": None}, Doubt.SIGNS_UNKNOWN),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_GANG.values(), ids=CONFIRM_GANG)
def test_spinning_rank_of_a_gang_is_confirmed_or_doubted(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**SPINS, **seen}), Condition.GANG).doubt is doubt


def test_spinning_rank_is_not_a_stall() -> None:
    assert not confirm(evidence(**SPINS), Condition.STALL).confirmed


CONFIRM_HEALTH: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "an alert only, for a command without a health window": ({"health_acts": False}, Doubt.ALERT_ONLY),
    "idle for the window, after the grace period": (
        {},
        None,
    ),
    "no step beat yet": ({"step_beat_age_s": None, "stall_timeout_s": 0.0}, None),
    "recent step beat": ({"step_beat_age_s": 0.1}, Doubt.UNDER_BOUND),
    "step beat within the window": ({"step_beat_age_s": 299.9}, Doubt.UNDER_BOUND),
    "within the grace period and a window": ({"elapsed_s": 659.9}, Doubt.UNDER_BOUND),
    "without a grace period": ({"elapsed_s": 300.0, "health_grace_s": 0.0}, None),
    "phase shorter than the window": ({"phase_age_s": 299.9}, Doubt.UNDER_BOUND),
    "GPU busy within the window": ({"gpu_idle_s": 299.9}, Doubt.UNDER_BOUND),
    "RAM active within the window": ({"ram_idle_s": 299.9}, Doubt.UNDER_BOUND),
    "GPU unknown": ({"gpu_idle_s": None, "gpu_unknown": "GPU-1 is lost"}, Doubt.GPU_UNKNOWN),
    "the RAM is unknown": ({"ram_idle_s": None}, Doubt.RAM_UNKNOWN),
    "another window is set": ({"health_window_s": 600.0}, Doubt.UNDER_BOUND),
    "a job without a GPU": ({"health_window_s": None, "health_grace_s": None}, Doubt.NOT_POLICED),
    "a job in its idle phase": ({"phase": "idle", "health_window_s": None}, Doubt.NOT_POLICED),
    "grace period unknown": ({"health_grace_s": None}, Doubt.NOT_POLICED),
    "its run time is unknown": ({"elapsed_s": None}, Doubt.TIME_UNKNOWN),
    "its phase's age is unknown": ({"phase_age_s": None}, Doubt.TIME_UNKNOWN),
    "a load that hangs": ({"phase": "load", **NO_WORK}, None),
    "a load with I/O only": ({"phase": "load", **NO_WORK, "io_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "a load with page faults only": ({"phase": "load", **NO_WORK, "page_fault_idle_s": 5.0}, Doubt.UNDER_BOUND),
    "a load with CPU only": (
        {"phase": "load", **NO_WORK, "container_cpu_idle_s": 299.9},
        Doubt.UNDER_BOUND,
    ),
    "a save with unknown I/O": (
        {"phase": "save", **NO_WORK, "io_idle_s": None, "work_unknown": "not read"},
        Doubt.WORK_UNKNOWN,
    ),
    "a checkpoint with unknown CPU": (
        {"phase": "checkpoint", **NO_WORK, "container_cpu_idle_s": None},
        Doubt.WORK_UNKNOWN,
    ),
    "in steps, CPU and I/O do not count: a driver may spin": (WORKING, None),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_HEALTH.values(), ids=CONFIRM_HEALTH)
def test_idle_gpu_job_is_confirmed_or_doubted(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**IDLE, **seen}), Condition.HEALTH).doubt is doubt


OFF_BUS = {
    **IDLE,
    "gpu_idle_s": None,
    "gpu_unknown": "GPU-0: GPU is lost",
    "gpu_lost_s": 300.0,
    "step_beat_age_s": 300.0,
}

CONFIRM_LOST: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "an alert only, for a command without a health window": ({"health_acts": False}, Doubt.ALERT_ONLY),
    "inactive for the window on a lost GPU": (
        {},
        None,
    ),
    "within the grace period of a load": ({"elapsed_s": 300.0}, None),
    "no step beat yet": ({"step_beat_age_s": None}, None),
    "lost for less than the window": ({"gpu_lost_s": 299.9}, Doubt.UNDER_BOUND),
    "RAM active within the window": ({"ram_idle_s": 299.9}, Doubt.UNDER_BOUND),
    "step beat within the window": ({"step_beat_age_s": 299.9}, Doubt.UNDER_BOUND),
    "phase shorter than the window": ({"phase_age_s": 299.9}, Doubt.UNDER_BOUND),
    "its phase's age is unknown": ({"phase_age_s": None}, Doubt.TIME_UNKNOWN),
    "another window is set": ({"health_window_s": 600.0}, Doubt.UNDER_BOUND),
    "a job without a GPU": ({"health_window_s": None, "health_grace_s": None}, Doubt.NOT_POLICED),
    "another GPU is unknown": ({"gpu_lost_s": None}, Doubt.GPU_UNKNOWN),
    "the RAM is unknown": ({"ram_idle_s": None}, Doubt.RAM_UNKNOWN),
    "a load that hangs": ({"phase": "load", **NO_WORK}, None),
    "a checkpoint with I/O": ({"phase": "checkpoint", **NO_WORK, "io_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "a GPU reported as lost and as idle counts as idle": (
        {"gpu_idle_s": 300.0, "elapsed_s": 659.9},
        Doubt.UNDER_BOUND,
    ),
    "its process holds no lock": ({"alive": False, "dead_s": 900.0}, Doubt.NO_LOCK),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM_LOST.values(), ids=CONFIRM_LOST)
def test_job_on_a_lost_gpu_is_confirmed_or_doubted(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(evidence(**{**OFF_BUS, **seen}), Condition.HEALTH).doubt is doubt


def test_lost_gpu_does_not_confirm_a_stall() -> None:
    assert confirm(evidence(**OFF_BUS), Condition.STALL).doubt is Doubt.GPU_UNKNOWN


@pytest.mark.parametrize("phase", ["load", "eval", "save", "checkpoint"])
@pytest.mark.parametrize("working", [False, True])
def test_stall_in_a_working_phase_needs_no_work(phase: str, working: bool) -> None:
    confirmed = confirm(evidence(phase=phase, **(WORKING if working else NO_WORK)), Condition.STALL).confirmed

    assert confirmed is not working


def test_every_condition_has_a_check_and_one_without_is_never_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = (
        restart_container.CONFIRMABLE
        | recycle_container.CONFIRMABLE
        | hold_lost_host.CONFIRMABLE
        | taint_node.CONFIRMABLE
        | scale_tenant.CONFIRMABLE
        | wrangle.CONFIRMABLE
    )
    assert set(Condition) - others == restart_worker.CONFIRMABLE
    monkeypatch.setattr(job_conditions, "CONDITIONS", {})

    assert confirm(evidence(), Condition.STALL).doubt is Doubt.NO_CONDITION
