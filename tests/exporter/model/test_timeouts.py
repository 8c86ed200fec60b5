"""How long a job may show no sign of life, by its phase and its owner's word."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.model.timeouts import ACTIVITY_LAG_S, MIN_STEPS, PhaseTimeouts
from gpuwarden.job import JobClass, Phase
from gpuwarden.state_file import LongStep
from gpuwarden.step_timing import Pace
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

TIMEOUTS = PhaseTimeouts(load_s=310.0, eval_s=320.0, checkpoint_s=330.0, save_s=340.0)


@pytest.mark.parametrize(
    ("job", "silence_s"),
    [
        pytest.param({"phase": Phase.STEP}, 120.0, id="what its owner allows, in its steps"),
        pytest.param({"phase": Phase.LOAD}, 310.0, id="the load's own"),
        pytest.param({"phase": Phase.EVAL}, 320.0, id="the evaluation's own"),
        pytest.param({"phase": Phase.CHECKPOINT}, 330.0, id="the checkpoint's own"),
        pytest.param({"phase": Phase.SAVE}, 340.0, id="the save's own"),
        pytest.param({"phase": Phase.EVAL, "stall_timeout_s": 900.0}, 900.0, id="no less than its owner allows"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 1800.0}, 1800.0, id="what the job asks for"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 60.0}, 60.0, id="what the job asks for, though it is less"),
        pytest.param({"phase": Phase.STEP, "timeout_s": 700.0}, 700.0, id="what it asks for in its steps"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 1.0}, 30.0, id="what it asks for, of 30 s at least"),
        pytest.param({"phase": Phase.STEP, "timeout_s": 29.9}, 30.0, id="in its steps too"),
        pytest.param({"phase": Phase.STEP, "timeout_s": 30.1}, 30.1, id="and not a moment more"),
        pytest.param({"phase": Phase.STEP, "stall_timeout_s": 5.0}, 5.0, id="and its owner's word stands as it is"),
        pytest.param({"phase": Phase.IDLE}, 0.0, id="none is policed while it is idle"),
        pytest.param({"phase": Phase.IDLE, "timeout_s": 60.0}, 0.0, id="nor for its asking"),
        pytest.param({"phase": Phase.EVAL, "stall_timeout_s": 0.0}, 0.0, id="nor where its owner wants none policed"),
        pytest.param({"phase": Phase.EVAL, "stall_timeout_s": 0.0, "timeout_s": 60.0}, 0.0, id="whatever it asks for"),
    ],
)
def test_the_silence_that_a_job_is_allowed_is(job: dict[str, Any], silence_s: float) -> None:
    assert TIMEOUTS.stall_after_s(build.job_file(**job)) == silence_s


@pytest.mark.parametrize(
    ("job", "window_s"),
    [
        pytest.param({}, 300.0, id="the host's, in its steps"),
        pytest.param({"stall_timeout_s": 900.0}, 900.0, id="never less than the silence its owner allows"),
        pytest.param({"phase": Phase.EVAL}, 320.0, id="nor than its phase is allowed"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 1800.0}, 1800.0, id="nor than it asks for"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 60.0}, 300.0, id="and never less than the host's"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 1.0}, 300.0, id="however little it asks for"),
        pytest.param({"stall_timeout_s": 0.0}, 300.0, id="the host's where silence is not policed"),
        pytest.param({"stall_timeout_s": 0.0, "phase": Phase.SAVE}, 340.0, id="by its phase, there too"),
        pytest.param({"job_class": JobClass.GPU_VIDEO, "stall_timeout_s": 0.0}, 300.0, id="of a video model"),
        pytest.param({"phase": Phase.IDLE}, None, id="none while it is idle"),
        pytest.param({"job_class": JobClass.CPU}, None, id="none of a class without a GPU"),
    ],
)
def test_the_window_in_which_a_gpu_job_is_to_show_life_is(job: dict[str, Any], window_s: float | None) -> None:
    assert TIMEOUTS.health_window_s(build.job_file(**job), 300.0) == window_s


@pytest.mark.parametrize(
    ("job", "grace_s"),
    [
        pytest.param({"phase": Phase.LOAD}, 360.0, id="the host's, while it loads: no window that began in it counts"),
        pytest.param({"phase": Phase.LOAD, "timeout_s": 900.0}, 360.0, id="however long it says that takes"),
        pytest.param({}, 60.0, id="less by the window once it has stepped: none ends before the grace"),
        pytest.param({"step": 1}, 60.0, id="once is enough"),
        pytest.param({"step": 0}, 360.0, id="the host's in its first step, which may compile"),
        pytest.param({"step": 0, "beat": build.ago(200)}, 360.0, id="and armed by its worker"),
        pytest.param({"step": 3, "beat": build.ago(200)}, 360.0, id="or with steps of its load behind it"),
        pytest.param({"step": 3, "beat": None}, 360.0, id="or without a beat"),
        pytest.param({"phase": Phase.EVAL, "step": 0}, 360.0, id="the host's in another phase before its first step"),
        pytest.param({"phase": Phase.LOAD, "step": 3}, 360.0, id="or in a load that steps to warm up"),
        pytest.param({"phase": Phase.EVAL}, 40.0, id="by the window of its phase"),
        pytest.param({"job_class": JobClass.GPU_VIDEO, "stall_timeout_s": 0.0}, 60.0, id="of a video model"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 1800.0}, 0.0, id="nothing where the window is longer"),
        pytest.param({"phase": Phase.IDLE}, 360.0, id="the host's while it is idle, when nothing is watched"),
        pytest.param({"phase": Phase.LOAD, "job_class": JobClass.CPU}, None, id="none of a class without a GPU"),
    ],
)
def test_the_grace_before_a_gpu_jobs_first_window_is(job: dict[str, Any], grace_s: float | None) -> None:
    assert TIMEOUTS.health_grace_s(build.job_file(**job), grace_s=360.0, window_s=300.0) == grace_s


STEPPED: dict[str, Any] = {"step": MIN_STEPS, "step_max_s": 2.0}


@pytest.mark.parametrize(
    ("job", "after_s", "still_s"),
    [
        pytest.param({}, 600.0, 580.0, id="never before ten minutes"),
        pytest.param({"step_max_s": 60.0}, 1200.0, 1180.0, id="twenty times its longest step"),
        pytest.param({"stall_timeout_s": 1800.0}, 1800.0, 1800.0, id="nor before its owner's silence is over"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 900.0}, 900.0, 900.0, id="in a phase that says how long it is"),
        pytest.param({"phase": Phase.EVAL, "timeout_s": 60.0}, 600.0, 580.0, id="which is never too short"),
        pytest.param({"timeout_s": 700.0}, 700.0, 700.0, id="as long as it asks for in its steps"),
        pytest.param({"timeout_s": 590.0}, 600.0, 590.0, id="and without any sign of life for no less"),
        pytest.param({"step": MIN_STEPS - 1}, None, None, id="not with too few steps behind it"),
        pytest.param({"step_max_s": None}, None, None, id="not where the time of none is known"),
        pytest.param({"phase": Phase.EVAL}, None, None, id="not in a phase that owes no steps, its first time there"),
        pytest.param({"phase": Phase.LOAD}, None, None, id="not while it loads"),
        pytest.param({"phase": Phase.IDLE, "timeout_s": 900.0}, None, None, id="not while it is idle"),
        pytest.param({"ranks": 2}, None, None, id="not as a rank of a gang, which may wait for another at a barrier"),
        pytest.param({"ranks": 2, "timeout_s": 900.0}, None, None, id="nor for its asking"),
        pytest.param({"stall_timeout_s": 0.0}, None, None, id="not where silence is not policed"),
        pytest.param({"stall_timeout_s": 0.0, "timeout_s": 900.0}, None, None, id="whatever it asks for"),
    ],
)
def test_a_job_is_stuck(job: dict[str, Any], after_s: float | None, still_s: float | None) -> None:
    found = build.job_file(**(STEPPED | job))

    assert (TIMEOUTS.stuck_after_s(found), TIMEOUTS.stuck_inactive_s(found)) == (after_s, still_s)


def long_steps(*steps: tuple[float, float | None]) -> tuple[LongStep, ...]:
    return tuple(LongStep(took_s=took_s, began_s=began_s) for took_s, began_s in steps)


STAYED: dict[str, Any] = {
    "phase": Phase.EVAL,
    "phase_started": build.ago(20),
    "beat": build.ago(20),
    "stays": long_steps((60.0, 900.0), (50.0, 700.0), (40.0, 500.0)),
}


@pytest.mark.parametrize(
    ("job", "after_s"),
    [
        pytest.param({}, 1200.0, id="twenty times its longest stay there"),
        pytest.param({"phase": Phase.LOAD}, 1200.0, id="while it loads once more"),
        pytest.param({"phase": Phase.CHECKPOINT}, 1200.0, id="while it writes a checkpoint"),
        pytest.param({"phase": Phase.SAVE}, 1200.0, id="while it saves"),
        pytest.param({"stays": long_steps(*[(0.5, None)] * 3)}, 600.0, id="never before ten minutes"),
        pytest.param({"stall_timeout_s": 1800.0}, 1800.0, id="nor before its owner's silence is over"),
        pytest.param({"stays": STAYED["stays"][:2]}, None, id="not after too few stays there"),
        pytest.param({"stays": ()}, None, id="not where none is told"),
        pytest.param({"step": MIN_STEPS - 1, "step_max_s": None}, 1200.0, id="whatever steps it has behind it"),
        pytest.param({"step_max_s": 90.0}, 1200.0, id="and however long those took"),
        pytest.param({"step": MIN_STEPS, "timeout_s": 700.0}, 700.0, id="what it asks for is as ever, though less"),
        pytest.param({"step": MIN_STEPS, "timeout_s": 1900.0}, 1900.0, id="or more"),
        pytest.param({"step": MIN_STEPS - 1, "timeout_s": 700.0}, None, id="and still not with too few steps"),
        pytest.param(
            {"step": MIN_STEPS, "step_max_s": 90.0, "beat": build.ago(19.5)}, 1800.0,
            id="twenty times its longest step where it steps there, for it may not have said that it goes on",
        ),
        pytest.param(
            {"step": MIN_STEPS, "step_max_s": 9.0, "beat": build.ago(19.5)}, 1200.0, id="which makes it no shorter"
        ),
        pytest.param({"step": MIN_STEPS - 1, "beat": build.ago(19.5)}, None, id="and none while those are unknown"),
        pytest.param({"beat": None}, 1200.0, id="whether it is armed or not, which its beat tells"),
        pytest.param({"phase": Phase.STEP, "step": MIN_STEPS - 1}, None, id="not in its steps, of which it owes more"),
        pytest.param({"phase": Phase.IDLE}, None, id="not while it is idle"),
        pytest.param({"ranks": 2}, None, id="not as a rank of a gang"),
        pytest.param({"stall_timeout_s": 0.0}, None, id="not where silence is not policed"),
    ],
)  # fmt: skip
def test_a_job_is_stuck_in_a_phase_that_it_has_been_in_often_enough(job: dict[str, Any], after_s: float | None) -> None:
    found = build.job_file(**(STAYED | job))

    assert TIMEOUTS.stuck_after_s(found) == after_s
    still_s = None if after_s is None else max(after_s - 20.0, TIMEOUTS.stall_after_s(found))
    assert TIMEOUTS.stuck_inactive_s(found) == still_s


@pytest.mark.parametrize(
    ("pauses", "longest_s"),
    [
        pytest.param([], 300.0, id="as told without a pause"),
        pytest.param([(910.0, 1150.0)], 60.0, id="without the pause it fell into"),
        pytest.param([(910.0, 1010.0)], 200.0, id="what is left of it counts"),
        pytest.param([(700.0, 1200.0)], 50.0, id="never less than the shortest of them took"),
    ],
)
def test_a_pause_is_no_part_of_a_stay(pauses: list[tuple[float, float]], longest_s: float) -> None:
    stays = long_steps((300.0, 900.0), (60.0, 700.0), (50.0, 500.0))
    job = build.job_file(**STAYED | {"stays": stays, "stall_timeout_s": 1.0})
    timeouts = PhaseTimeouts(eval_s=1.0, stuck_min_s=1.0, stuck_factor=10.0)

    assert timeouts.stuck_after_s(job, pauses) == 10.0 * longest_s


@pytest.mark.parametrize(
    ("longest", "pauses", "longest_s"),
    [
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [], 300.0, id="as told without a pause"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(1010.0, 1290.0)], 60.0, id="without the pause it fell into"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(1010.0, 1200.0)], 110.0, id="what is left of it counts"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(1100.0, 1150.0), (1200.0, 1290.0)], 160.0, id="two pauses"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(900.0, 1100.0)], 200.0, id="one that began before it"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(1200.0, 1900.0)], 200.0, id="one that ended after it"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(700.0, 1000.0), (1300.0, 1400.0)], 300.0, id="beside it"),
        pytest.param([(300.0, 1000.0), (60.0, 500.0)], [(500.0, 560.0), (1000.0, 1300.0)], 60.0,
                     id="never less than the shortest of them took: others may be as long"),
        pytest.param([(300.0, 1000.0), (200.0, 1300.0), (60.0, 500.0)], [(1000.0, 1500.0)], 60.0, id="two of them"),
        pytest.param([(300.0, None), (60.0, 500.0)], [(0.0, 9999.0)], 300.0, id="nobody knows when it began"),
        pytest.param([(300.0, 1000.0)], [(1010.0, 1290.0)], 300.0, id="of one alone nothing is known of the others"),
        pytest.param([], [(0.0, 9999.0)], 300.0, id="none is told"),
        pytest.param([(299.0, 1000.0), (60.0, 500.0)], [(1000.0, 1290.0)], 300.0, id="the longest is not among them"),
    ],
)  # fmt: skip
def test_the_time_for_which_a_container_was_paused_is_no_part_of_a_step(
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
def test_a_step_is_never_shorter_than_without_its_pauses(worked_s: list[int], paused: list[tuple[int, int]]) -> None:
    """Steps that follow one another and worked for so long, and pauses of so long that began at those moments."""
    pauses = [(float(since), float(since + length)) for since, length in paused]
    merged: list[tuple[float, float]] = []
    for since, until in sorted(pauses):
        if merged and since <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(until, merged[-1][1])
        else:
            merged.append((since, until))
    pace, now_s = Pace(), 0.0
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
        pytest.param(STEPPED, ACTIVITY_LAG_S, id="in its steps"),
        pytest.param(STEPPED | {"step_max_s": 60.0}, ACTIVITY_LAG_S, id="by its longest step"),
        pytest.param(
            STEPPED | {"phase": Phase.EVAL, "timeout_s": 900.0}, 0.0, id="where it says how long its phase is"
        ),
        pytest.param(STAYED, ACTIVITY_LAG_S, id="where it has been there often enough"),
    ],
)
def test_a_rank_is_stuck_as_late_as_if_it_were_alone_and_only_with_its_gang(job: dict[str, Any], late_s: float) -> None:
    alone, rank = build.job_file(**job), build.job_file(**(job | RANK))

    assert TIMEOUTS.stuck_after_s(alone) is not None
    assert TIMEOUTS.gang_stuck_after_s(rank) == TIMEOUTS.stuck_after_s(alone)
    assert TIMEOUTS.gang_stuck_inactive_s(rank) == TIMEOUTS.stuck_inactive_s(alone)
    assert TIMEOUTS.gang_activity_lag_s(rank) == late_s
    assert (TIMEOUTS.stuck_after_s(rank), TIMEOUTS.stuck_inactive_s(rank)) == (None, None)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(STEPPED, id="as a job that is alone"),
        pytest.param(STEPPED | {"ranks": 2}, id="where it does not say of which gang it is"),
        pytest.param(STEPPED | RANK | {"step": MIN_STEPS - 1}, id="with too few steps behind it"),
        pytest.param(STEPPED | RANK | {"phase": Phase.SAVE}, id="in a phase that owes no steps, its first time there"),
        pytest.param(STEPPED | RANK | {"phase": Phase.IDLE}, id="while it is idle"),
        pytest.param(STEPPED | RANK | {"stall_timeout_s": 0.0}, id="where silence is not policed"),
    ],
)
def test_no_rank_is_stuck_with_its_gang(job: dict[str, Any]) -> None:
    found = build.job_file(**job)

    assert (TIMEOUTS.gang_stuck_after_s(found), TIMEOUTS.gang_stuck_inactive_s(found)) == (None, None)


def test_it_may_show_late_for_no_more_than_half_of_its_limit_that_a_rank_spins() -> None:
    rank, timeouts = (
        build.job_file(**STEPPED | RANK | {"step_max_s": 0.5, "stall_timeout_s": 5.0}),
        PhaseTimeouts(stuck_min_s=30.0),
    )

    assert (timeouts.gang_stuck_after_s(rank), timeouts.gang_activity_lag_s(rank)) == (30.0, 15.0)


def test_no_job_is_stuck_where_the_host_wants_none_to_be() -> None:
    job, timeouts = build.job_file(**STEPPED), PhaseTimeouts(stuck_factor=0.0)

    assert (timeouts.stuck_after_s(job), timeouts.stuck_inactive_s(job)) == (None, None)


def test_a_job_is_stuck_by_the_constants_that_are_set() -> None:
    job = build.job_file(**STEPPED, stall_timeout_s=5.0)
    timeouts = PhaseTimeouts(stuck_min_s=30.0, stuck_factor=10.0)

    assert (timeouts.stuck_after_s(job), timeouts.stuck_inactive_s(job)) == (30.0, 15.0)
