"""How long a job may show no activity, by its phase and its settings."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.model.timeouts import ACTIVITY_LAG_S, MIN_STEPS, PhaseTimeouts
from gpuwarden.job import JobClass, Phase
from gpuwarden.state_file import LongStep
from gpuwarden.step_timing import StepTiming
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

TIMEOUTS = PhaseTimeouts(load_s=310.0, eval_s=320.0, checkpoint_s=330.0, save_s=340.0)


@pytest.mark.parametrize(
    ("job", "silence_s"),
    [
        pytest.param({"phase": Phase.STEP}, 120.0, id="step: the job's stall timeout"),
        pytest.param({"phase": Phase.LOAD}, 310.0, id="load: the host's minimum"),
        pytest.param({"phase": Phase.EVAL}, 320.0, id="eval: the host's minimum"),
        pytest.param({"phase": Phase.CHECKPOINT}, 330.0, id="checkpoint: the host's minimum"),
        pytest.param({"phase": Phase.SAVE}, 340.0, id="save: the host's minimum"),
        pytest.param(
            {"phase": Phase.EVAL, "stall_timeout_s": 900.0}, 900.0, id="eval: job's timeout above the host's minimum"
        ),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 1800.0}, 1800.0, id="eval: timeout of the phase"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 60.0}, 60.0, id="eval: shorter timeout of the phase"),
        pytest.param({"phase": Phase.STEP, "timeout_s": 700.0}, 700.0, id="step: timeout of the phase"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 1.0}, 30.0, id="eval: timeout of the phase is at least 30 s"),
        pytest.param({"phase": Phase.STEP, "timeout_s": 29.9}, 30.0, id="step: timeout of the phase is at least 30 s"),
        pytest.param({"phase": Phase.STEP, "timeout_s": 30.1}, 30.1, id="step: timeout of the phase above 30 s"),
        pytest.param(
            {"phase": Phase.STEP, "stall_timeout_s": 5.0}, 5.0, id="step: the job's stall timeout may be below 30 s"
        ),
        pytest.param({"phase": Phase.IDLE}, 0.0, id="idle: not checked"),
        pytest.param({"phase": Phase.IDLE, "timeout_s": 60.0}, 0.0, id="idle: not checked with a timeout of the phase"),
        pytest.param({"phase": Phase.EVAL, "stall_timeout_s": 0.0}, 0.0, id="stall timeout 0: not checked"),
        pytest.param(
            {"phase": Phase.EVAL, "stall_timeout_s": 0.0, "timeout_s": 60.0},
            0.0,
            id="stall timeout 0: not checked with a timeout of the phase",
        ),
    ],
)
def test_stall_timeout(job: dict[str, Any], silence_s: float) -> None:
    assert TIMEOUTS.stall_after_s(build.job_file(**job)) == silence_s


@pytest.mark.parametrize(
    ("job", "window_s"),
    [
        pytest.param({}, 300.0, id="step: the host's window"),
        pytest.param({"stall_timeout_s": 900.0}, 900.0, id="at least the stall timeout"),
        pytest.param({"phase": Phase.EVAL}, 320.0, id="at least the minimum of its phase"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 1800.0}, 1800.0, id="at least the timeout of the phase"),
        pytest.param(
            {"phase": Phase.EVAL, "timeout_s": 60.0}, 300.0, id="shorter timeout of the phase: the host's window"
        ),
        pytest.param(
            {"phase": Phase.EVAL, "timeout_s": 1.0}, 300.0, id="very short timeout of the phase: the host's window"
        ),
        pytest.param({"stall_timeout_s": 0.0}, 300.0, id="stall timeout 0: the host's window"),
        pytest.param(
            {"stall_timeout_s": 0.0, "phase": Phase.SAVE}, 340.0, id="stall timeout 0: the minimum of its phase"
        ),
        pytest.param({"job_class": JobClass.GPU_VIDEO, "stall_timeout_s": 0.0}, 300.0, id="video model"),
        pytest.param({"phase": Phase.IDLE}, None, id="idle: not checked"),
        pytest.param({"job_class": JobClass.CPU}, None, id="class without a GPU: not checked"),
        pytest.param({"health_window_s": 600.0}, 600.0, id="its own window"),
        pytest.param({"health_window_s": 200.0}, 200.0, id="its own shorter window"),
        pytest.param({"health_window_s": 60.0}, 120.0, id="its own window: at least the stall timeout"),
        pytest.param({"health_window_s": 1.0, "stall_timeout_s": 0.0}, 30.0, id="its own window: at least 30 s"),
        pytest.param(
            {"health_window_s": 60.0, "phase": Phase.LOAD, "after_gpu_use": True, "step_beat": None},
            60.0,
            id="a command without steps: what its owner gave",
        ),
        pytest.param(
            {
                "health_window_s": 60.0,
                "phase": Phase.LOAD,
                "after_gpu_use": True,
                "step_beat": None,
                "timeout_s": 900.0,
            },
            900.0,
            id="a command without steps: at least the timeout of its phase",
        ),
        pytest.param(
            {"health_window_s": 60.0, "after_gpu_use": True},
            120.0,
            id="a command with steps: at least the stall timeout",
        ),
        pytest.param(
            {"phase": Phase.LOAD, "after_gpu_use": True, "step_beat": None}, 310.0, id="a command: the host's minimum"
        ),
        pytest.param({"health_window_s": 600.0, "phase": Phase.IDLE}, None, id="its own window, idle: not checked"),
    ],
)
def test_gpu_health_window(job: dict[str, Any], window_s: float | None) -> None:
    assert TIMEOUTS.health_window_s(build.job_file(**job), 300.0) == window_s


@pytest.mark.parametrize(
    ("job", "grace_s"),
    [
        pytest.param({"phase": Phase.LOAD}, 360.0, id="load: the host's grace"),
        pytest.param(
            {"phase": Phase.LOAD, "timeout_s": 900.0}, 360.0, id="load: the host's grace with a timeout of the phase"
        ),
        pytest.param({}, 60.0, id="after steps: less by the window"),
        pytest.param({"step": 1}, 60.0, id="after one step"),
        pytest.param({"step": 0}, 360.0, id="first step: the host's grace"),
        pytest.param({"step": 0, "step_beat": build.ago(200)}, 360.0, id="first step, with a step beat"),
        pytest.param({"step": 3, "step_beat": build.ago(200)}, 360.0, id="steps only in the load"),
        pytest.param({"step": 3, "step_beat": None}, 360.0, id="no step beat"),
        pytest.param({"phase": Phase.EVAL, "step": 0}, 360.0, id="eval before the first step"),
        pytest.param({"phase": Phase.LOAD, "step": 3}, 360.0, id="load after steps"),
        pytest.param({"phase": Phase.EVAL}, 40.0, id="eval: less by its window"),
        pytest.param({"job_class": JobClass.GPU_VIDEO, "stall_timeout_s": 0.0}, 60.0, id="video model"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 1800.0}, 0.0, id="window longer than the grace"),
        pytest.param({"phase": Phase.IDLE}, 360.0, id="idle: the host's grace"),
        pytest.param(
            {"phase": Phase.LOAD, "step": 0, "step_beat": None, "after_gpu_use": True, "health_window_s": 60.0},
            0.0,
            id="a command with a window: it begins with the first use of a GPU",
        ),
        pytest.param({"phase": Phase.LOAD, "step": 0, "step_beat": None, "after_gpu_use": True}, 360.0, id="a command"),
        pytest.param({"phase": Phase.LOAD, "job_class": JobClass.CPU}, None, id="class without a GPU: not checked"),
    ],
)
def test_gpu_health_grace(job: dict[str, Any], grace_s: float | None) -> None:
    assert TIMEOUTS.health_grace_s(build.job_file(**job), grace_s=360.0, window_s=300.0) == grace_s


STEPPED: dict[str, Any] = {"step": MIN_STEPS, "step_max_s": 2.0}


@pytest.mark.parametrize(
    ("job", "after_s", "still_s"),
    [
        pytest.param({}, 600.0, 580.0, id="at least 600 s"),
        pytest.param({"step_max_s": 60.0}, 1200.0, 1180.0, id="20 times the longest step"),
        pytest.param({"stall_timeout_s": 1800.0}, 1800.0, 1800.0, id="at least the stall timeout"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 900.0}, 900.0, 900.0, id="eval: timeout of the phase"),
        pytest.param(
            {"phase": Phase.EVAL, "timeout_s": 60.0}, 600.0, 580.0, id="eval: timeout of the phase below the minimum"
        ),
        pytest.param({"timeout_s": 700.0}, 700.0, 700.0, id="step: timeout of the phase"),
        pytest.param({"timeout_s": 590.0}, 600.0, 590.0, id="step: timeout of the phase as the inactive time"),
        pytest.param({"step": MIN_STEPS - 1}, None, None, id="too few steps"),
        pytest.param({"step_max_s": None}, None, None, id="step times unknown"),
        pytest.param({"phase": Phase.EVAL}, None, None, id="eval: first visit"),
        pytest.param({"phase": Phase.LOAD}, None, None, id="load: first visit"),
        pytest.param({"phase": Phase.IDLE, "timeout_s": 900.0}, None, None, id="idle"),
        pytest.param({"ranks": 2}, None, None, id="rank of a gang, which may wait at a barrier"),
        pytest.param({"ranks": 2, "timeout_s": 900.0}, None, None, id="rank of a gang with a timeout of the phase"),
        pytest.param({"stall_timeout_s": 0.0}, None, None, id="stall timeout 0"),
        pytest.param(
            {"stall_timeout_s": 0.0, "timeout_s": 900.0}, None, None, id="stall timeout 0 with a timeout of the phase"
        ),
    ],
)
def test_stuck_time_in_steps(job: dict[str, Any], after_s: float | None, still_s: float | None) -> None:
    found = build.job_file(**(STEPPED | job))

    assert (TIMEOUTS.stuck_after_s(found), TIMEOUTS.stuck_inactive_s(found)) == (after_s, still_s)


def long_steps(*steps: tuple[float, float | None]) -> tuple[LongStep, ...]:
    return tuple(LongStep(took_s=took_s, began_s=began_s) for took_s, began_s in steps)


STAYED: dict[str, Any] = {
    "phase": Phase.EVAL,
    "phase_started": build.ago(20),
    "step_beat": build.ago(20),
    "stays": long_steps((60.0, 900.0), (50.0, 700.0), (40.0, 500.0)),
}


@pytest.mark.parametrize(
    ("job", "after_s"),
    [
        pytest.param({}, 1200.0, id="20 times the longest visit"),
        pytest.param({"phase": Phase.LOAD}, 1200.0, id="load"),
        pytest.param({"phase": Phase.CHECKPOINT}, 1200.0, id="checkpoint"),
        pytest.param({"phase": Phase.SAVE}, 1200.0, id="save"),
        pytest.param({"stays": long_steps(*[(0.5, None)] * 3)}, 600.0, id="at least 600 s"),
        pytest.param({"stall_timeout_s": 1800.0}, 1800.0, id="at least the stall timeout"),
        pytest.param({"stays": STAYED["stays"][:2]}, None, id="too few visits"),
        pytest.param({"stays": ()}, None, id="no visits published"),
        pytest.param({"step": MIN_STEPS - 1, "step_max_s": None}, 1200.0, id="unknown step times"),
        pytest.param({"step_max_s": 90.0}, 1200.0, id="long steps"),
        pytest.param({"step": MIN_STEPS, "timeout_s": 700.0}, 700.0, id="shorter timeout of the phase"),
        pytest.param({"step": MIN_STEPS, "timeout_s": 1900.0}, 1900.0, id="longer timeout of the phase"),
        pytest.param({"step": MIN_STEPS - 1, "timeout_s": 700.0}, None, id="timeout of the phase with too few steps"),
        pytest.param(
            {"step": MIN_STEPS, "step_max_s": 90.0, "step_beat": build.ago(19.5)}, 1800.0,
            id="steps in this phase: 20 times the longest step",
        ),
        pytest.param(
            {"step": MIN_STEPS, "step_max_s": 9.0, "step_beat": build.ago(19.5)}, 1200.0,
            id="steps in this phase: at least as for the visits",
        ),
        pytest.param({"step": MIN_STEPS - 1, "step_beat": build.ago(19.5)}, None,
                     id="steps in this phase, with too few steps"),
        pytest.param({"step_beat": None}, 1200.0, id="no step beat"),
        pytest.param({"phase": Phase.STEP, "step": MIN_STEPS - 1}, None, id="step phase with too few steps"),
        pytest.param({"phase": Phase.IDLE}, None, id="idle"),
        pytest.param({"ranks": 2}, None, id="rank of a gang"),
        pytest.param({"stall_timeout_s": 0.0}, None, id="stall timeout 0"),
    ],
)  # fmt: skip
def test_stuck_time_by_earlier_visits_to_the_phase(job: dict[str, Any], after_s: float | None) -> None:
    found = build.job_file(**(STAYED | job))

    assert TIMEOUTS.stuck_after_s(found) == after_s
    still_s = None if after_s is None else max(after_s - 20.0, TIMEOUTS.stall_after_s(found))
    assert TIMEOUTS.stuck_inactive_s(found) == still_s


@pytest.mark.parametrize(
    ("pauses", "longest_s"),
    [
        pytest.param([], 300.0, id="no pause"),
        pytest.param([(910.0, 1150.0)], 60.0, id="pause inside of the longest visit"),
        pytest.param([(910.0, 1010.0)], 200.0, id="pause of a part of it"),
        pytest.param([(700.0, 1200.0)], 50.0, id="never below the shortest visit"),
    ],
)
def test_pauses_do_not_count_in_visits(pauses: list[tuple[float, float]], longest_s: float) -> None:
    stays = long_steps((300.0, 900.0), (60.0, 700.0), (50.0, 500.0))
    job = build.job_file(**STAYED | {"stays": stays, "stall_timeout_s": 1.0})
    timeouts = PhaseTimeouts(eval_s=1.0, stuck_min_s=1.0, stuck_factor=10.0)

    assert timeouts.stuck_after_s(job, pauses) == 10.0 * longest_s


@pytest.mark.parametrize(
    ("longest", "pauses", "longest_s"),
    [
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [], 300.0, id="no pause"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(1010.0, 1290.0)], 60.0, id="pause inside of the longest step"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(1010.0, 1200.0)], 110.0, id="pause of a part of it"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(1100.0, 1150.0), (1200.0, 1290.0)], 160.0, id="two pauses"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(900.0, 1100.0)], 200.0, id="pause that began before it"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(1200.0, 1900.0)], 200.0, id="pause that ended after it"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(700.0, 1000.0), (1300.0, 1400.0)], 300.0,
                     id="pauses outside of it"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(500.0, 560.0), (1000.0, 1300.0)], 60.0,
                     id="never below the shortest step"),
        pytest.param([(300.0, 1000.0), (200.0, 1300.0), (60.0, 500.0)], [(1000.0, 1500.0)], 60.0,
                     id="pause over two steps"),
        pytest.param([(300.0, None), (60.0, 500.0)], [(0.0, 9999.0)], 300.0, id="unknown start"),
        pytest.param([(300.0, 1000.0)], [(1010.0, 1290.0)], 300.0, id="only one step published"),
        pytest.param([], [(0.0, 9999.0)], 300.0, id="no step published"),
        pytest.param([(299.0, 1000.0), (60.0, 500.0)], [(1000.0, 1290.0)], 300.0, id="longest step not published"),
    ],
)  # fmt: skip
def test_pauses_do_not_count_in_steps(
    longest: list[tuple[float, float | None]], pauses: list[tuple[float, float]], longest_s: float
) -> None:
    job = build.job_file(**STEPPED | {"step_max_s": 300.0}, longest=long_steps(*longest))
    timeouts = PhaseTimeouts(stuck_min_s=1.0, stuck_factor=10.0)

    assert timeouts.stuck_after_s(job, pauses) == max(120.0, 10.0 * longest_s)
    assert timeouts.stuck_inactive_s(job, pauses) == max(120.0, 10.0 * longest_s) - 20.0


@given(
    st.lists(st.integers(1, 50), min_size=6, max_size=12),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 100)), max_size=4),
)
def test_step_is_never_shorter_than_without_its_pauses(worked_s: list[int], paused: list[tuple[int, int]]) -> None:
    """`worked_s` are successive steps; `paused` has the start and the length of each pause."""
    pauses = [(float(since), float(since + length)) for since, length in paused]
    merged: list[tuple[float, float]] = []
    for since, until in sorted(pauses):
        if merged and since <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(until, merged[-1][1])
        else:
            merged.append((since, until))
    pace, now_s = StepTiming(), 0.0
    pace.step(now_s)
    for each in worked_s:
        left_s = float(each)
        while left_s > 0:
            now_s += 1.0
            left_s -= not any(since < now_s <= until for since, until in merged)
        pace.step(now_s)
    job = build.job_file(step=MIN_STEPS, step_max_s=pace.max_s, stall_timeout_s=0.5, longest=long_steps(*pace.longest))

    found_s = PhaseTimeouts(stuck_min_s=0.5, stuck_factor=1.0).stuck_after_s(job, merged)

    assert found_s is not None
    assert max(worked_s) <= found_s <= (pace.max_s or 0.0)


RANK: dict[str, Any] = {"ranks": 2, "gang": "7/night", "rank": 1}


@pytest.mark.parametrize(
    ("job", "late_s"),
    [
        pytest.param(STEPPED, ACTIVITY_LAG_S, id="step"),
        pytest.param(STEPPED | {"step_max_s": 60.0}, ACTIVITY_LAG_S, id="by its longest step"),
        pytest.param(STEPPED | {"phase": Phase.EVAL, "timeout_s": 900.0}, 0.0, id="eval with a timeout"),
        pytest.param(STAYED, ACTIVITY_LAG_S, id="by earlier visits"),
    ],
)
def test_rank_is_stuck_only_with_its_gang_after_the_same_time(job: dict[str, Any], late_s: float) -> None:
    alone, rank = build.job_file(**job), build.job_file(**(job | RANK))

    assert TIMEOUTS.stuck_after_s(alone) is not None
    assert TIMEOUTS.gang_stuck_after_s(rank) == TIMEOUTS.stuck_after_s(alone)
    assert TIMEOUTS.gang_stuck_inactive_s(rank) == TIMEOUTS.stuck_inactive_s(alone)
    assert TIMEOUTS.gang_activity_lag_s(rank) == late_s
    assert (TIMEOUTS.stuck_after_s(rank), TIMEOUTS.stuck_inactive_s(rank)) == (None, None)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(STEPPED, id="not a rank"),
        pytest.param(STEPPED | {"ranks": 2}, id="no gang name"),
        pytest.param(STEPPED | RANK | {"step": MIN_STEPS - 1}, id="too few steps"),
        pytest.param(STEPPED | RANK | {"phase": Phase.SAVE}, id="save: first visit"),
        pytest.param(STEPPED | RANK | {"phase": Phase.IDLE}, id="idle"),
        pytest.param(STEPPED | RANK | {"stall_timeout_s": 0.0}, id="stall timeout 0"),
    ],
)
def test_rank_without_a_known_limit_is_not_stuck_with_its_gang(job: dict[str, Any]) -> None:
    found = build.job_file(**job)

    assert (TIMEOUTS.gang_stuck_after_s(found), TIMEOUTS.gang_stuck_inactive_s(found)) == (None, None)


def test_gang_activity_lag_is_at_most_half_of_the_limit() -> None:
    rank, timeouts = (
        build.job_file(**STEPPED | RANK | {"step_max_s": 0.5, "stall_timeout_s": 5.0}),
        PhaseTimeouts(stuck_min_s=30.0),
    )

    assert (timeouts.gang_stuck_after_s(rank), timeouts.gang_activity_lag_s(rank)) == (30.0, 15.0)


def test_stuck_factor_0_turns_the_condition_off() -> None:
    job, timeouts = build.job_file(**STEPPED), PhaseTimeouts(stuck_factor=0.0)

    assert (timeouts.stuck_after_s(job), timeouts.stuck_inactive_s(job)) == (None, None)


def test_stuck_time_uses_the_settings() -> None:
    job = build.job_file(**STEPPED, stall_timeout_s=5.0)
    timeouts = PhaseTimeouts(stuck_min_s=30.0, stuck_factor=10.0)

    assert (timeouts.stuck_after_s(job), timeouts.stuck_inactive_s(job)) == (30.0, 15.0)
