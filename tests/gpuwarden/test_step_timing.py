"""Durations of steps and phase visits."""

import pytest

from gpuwarden.job import Phase
from gpuwarden.step_timing import EARLY_STEPS, LONGEST_KEPT, PhaseTiming, StepTiming

pytestmark = pytest.mark.pure


def stepping(pace: StepTiming, *, from_s: float, every_s: float, count: int) -> float:
    """Report steps; returns the time of the last one."""
    for number in range(count):
        pace.step(from_s + number * every_s)
    return from_s + (count - 1) * every_s


def test_single_step_has_no_duration() -> None:
    pace = StepTiming()

    pace.step(100.0)

    assert (pace.mean_s, pace.max_s) == (None, None)


def test_first_steps_count_until_as_many_later_ones_are_known() -> None:
    pace = StepTiming()
    pace.step(0.0)
    after_s = stepping(pace, from_s=300.0, every_s=2.0, count=EARLY_STEPS)
    early = pace.max_s

    after_s = stepping(pace, from_s=after_s + 4.0, every_s=2.0, count=EARLY_STEPS - 1)
    too_few = pace.max_s, pace.mean_s
    pace.step(after_s + 2.0)

    assert early == 300.0
    assert too_few[0] == 300.0
    assert too_few[1] is not None
    assert too_few[1] > 9.0
    assert (pace.max_s, pace.mean_s) == (4.0, (4.0 + 2.0 * (EARLY_STEPS - 1)) / EARLY_STEPS)


def test_step_excludes_the_time_in_other_phases() -> None:
    pace = StepTiming()
    pace.enter(0.0, steps=True)
    pace.step(10.0)

    pace.enter(13.0, steps=False)  # 3 s into the next step
    pace.enter(200.0, steps=False)
    pace.enter(313.0, steps=True)
    pace.step(315.0)

    assert (pace.max_s, pace.mean_s) == (5.0, 5.0)


def test_repeated_step_phase_does_not_shorten_steps() -> None:
    pace = StepTiming()
    pace.enter(0.0, steps=True)
    pace.step(0.0)

    pace.enter(60.0, steps=True)
    pace.step(60.0)

    assert pace.max_s == 60.0


def test_steps_in_another_phase_are_steps() -> None:
    pace = StepTiming()
    pace.step(10.0)  # during the load
    pace.step(17.0)

    pace.enter(300.0, steps=True)
    pace.step(302.0)

    assert (pace.max_s, pace.mean_s) == (7.0, 4.5)


def test_step_with_an_unknown_start_is_not_measured() -> None:
    pace = StepTiming()
    pace.step(0.0)
    pace.step(5.0)
    pace.enter(6.0, steps=False)

    pace.reset_start()
    pace.step(300.0)
    pace.step(307.0)

    assert (pace.max_s, pace.mean_s) == (7.0, 6.0)


def test_phase_ends_before_a_step_with_an_unknown_start() -> None:
    pace = StepTiming()
    pace.enter(0.0, steps=False)

    pace.reset_start()
    pace.step(300.0)
    pace.enter(304.0, steps=True)
    pace.step(307.0)

    assert pace.max_s == 7.0


def test_concurrent_steps_never_have_a_negative_duration() -> None:
    pace = StepTiming()
    pace.step(10.0)

    pace.step(9.9)

    assert (pace.max_s, pace.mean_s) == (0.0, 0.0)


def test_longest_steps_are_listed_with_their_starts() -> None:
    pace = StepTiming()
    for now_s in (0.0, 3.0, 4.0, 9.0, 11.0, 18.0):
        pace.step(now_s)

    assert pace.longest == ((7.0, 11.0), (5.0, 4.0), (3.0, 0.0), (2.0, 9.0))
    assert len(pace.longest) == LONGEST_KEPT


def test_omitted_step_is_never_longer_than_a_listed_one() -> None:
    pace = StepTiming()
    took_s = [float(3 + number * 7 % 19) for number in range(3 * EARLY_STEPS)]
    now_s = 0.0
    pace.step(now_s)
    for each in took_s:
        now_s += each
        pace.step(now_s)

    assert [each for each, _ in pace.longest] == sorted(took_s[EARLY_STEPS:], reverse=True)[:LONGEST_KEPT]


def test_early_steps_are_listed_until_enough_later_ones_are_known() -> None:
    pace = StepTiming()
    pace.step(0.0)
    after_s = stepping(pace, from_s=300.0, every_s=2.0, count=EARLY_STEPS + 3)
    early = pace.longest

    stepping(pace, from_s=after_s + 5.0, every_s=2.0, count=EARLY_STEPS)

    assert early == ((300.0, 0.0), (2.0, 300.0), (2.0, 302.0), (2.0, 304.0))
    assert pace.longest[0] == (5.0, after_s)


def test_step_that_contains_another_phase_has_no_start() -> None:
    pace = StepTiming()
    pace.enter(0.0, steps=True)
    pace.step(10.0)

    pace.enter(13.0, steps=False)
    pace.enter(313.0, steps=True)
    pace.step(315.0)
    pace.step(319.0)

    assert pace.longest == ((5.0, None), (4.0, 315.0))


def test_steps_of_no_duration_are_steps() -> None:
    pace = StepTiming()
    pace.step(10.0)
    pace.step(10.0)

    assert pace.longest == ((0.0, 10.0),)


def test_phase_before_the_first_step_is_not_counted() -> None:
    pace = StepTiming()
    pace.enter(300.0, steps=True)

    pace.step(301.0)
    pace.step(303.0)

    assert pace.max_s == 2.0


def stayed(*turns: tuple[float, Phase]) -> PhaseTiming:
    """An attempt that began at 0 s and entered each phase at its time."""
    stays = PhaseTiming(0.0)
    for now_s, phase in turns:
        stays.enter(now_s, phase)
    return stays


def test_phase_visits_are_listed_longest_first() -> None:
    stays = stayed(
        (5.0, Phase.STEP), (10.0, Phase.EVAL), (70.0, Phase.STEP), (80.0, Phase.EVAL), (170.0, Phase.CHECKPOINT),
        (172.0, Phase.EVAL), (180.0, Phase.STEP),
    )  # fmt: skip

    assert stays.longest(Phase.EVAL) == ((90.0, 80.0), (60.0, 10.0), (8.0, 172.0))
    assert stays.longest(Phase.CHECKPOINT) == ((2.0, 170.0),)
    assert stays.longest(Phase.LOAD) == ((5.0, 0.0),)
    assert stays.longest(Phase.SAVE) == ()


def test_current_phase_visit_is_not_listed() -> None:
    stays = stayed((5.0, Phase.STEP), (10.0, Phase.EVAL))

    assert stays.longest(Phase.EVAL) == ()


def test_repeated_phase_continues_the_visit() -> None:
    stays = stayed((5.0, Phase.EVAL), (30.0, Phase.EVAL), (65.0, Phase.STEP))

    assert stays.longest(Phase.EVAL) == ((60.0, 5.0),)


def test_omitted_visit_is_never_longer_than_a_listed_one() -> None:
    took_s = [float(3 + number * 7 % 19) for number in range(12)]
    stays, now_s = PhaseTiming(0.0), 0.0
    for each in took_s:
        stays.enter(now_s, Phase.SAVE)
        now_s += each
        stays.enter(now_s, Phase.STEP)

    assert [each for each, _ in stays.longest(Phase.SAVE)] == sorted(took_s, reverse=True)[:LONGEST_KEPT]


def test_step_and_idle_phases_have_no_visits() -> None:
    stays = stayed((5.0, Phase.STEP), (10.0, Phase.IDLE), (30.0, Phase.STEP), (40.0, Phase.EVAL))

    assert (stays.longest(Phase.STEP), stays.longest(Phase.IDLE)) == ((), ())
