"""How long the steps of an attempt take: what counts as one."""

from gpuwarden.pace import EARLY, Pace


def stepping(pace: Pace, *, from_s: float, every_s: float, count: int) -> float:
    """Step so often; returns when the last step was done."""
    for number in range(count):
        pace.step(from_s + number * every_s)
    return from_s + (count - 1) * every_s


def test_one_step_has_taken_no_known_time() -> None:
    pace = Pace()

    pace.step(100.0)

    assert (pace.mean_s, pace.max_s) == (None, None)


def test_the_first_steps_count_until_as_many_others_are_known() -> None:
    pace = Pace()
    pace.step(0.0)
    after_s = stepping(pace, from_s=300.0, every_s=2.0, count=EARLY)
    early = pace.max_s

    after_s = stepping(pace, from_s=after_s + 4.0, every_s=2.0, count=EARLY - 1)
    too_few = pace.max_s, pace.mean_s
    pace.step(after_s + 2.0)

    assert early == 300.0
    assert too_few[0] == 300.0
    assert too_few[1] is not None
    assert too_few[1] > 9.0
    assert (pace.max_s, pace.mean_s) == (4.0, (4.0 + 2.0 * (EARLY - 1)) / EARLY)


def test_the_time_in_other_phases_is_taken_out_of_the_step_that_it_falls_into() -> None:
    pace = Pace()
    pace.goes_on(0.0, steps=True)
    pace.step(10.0)

    pace.goes_on(13.0, steps=False)  # 3 s of the next step are over
    pace.goes_on(200.0, steps=False)
    pace.goes_on(313.0, steps=True)
    pace.step(315.0)

    assert (pace.max_s, pace.mean_s) == (5.0, 5.0)


def test_who_says_step_before_every_step_has_steps_no_shorter_for_it() -> None:
    pace = Pace()
    pace.goes_on(0.0, steps=True)
    pace.step(0.0)

    pace.goes_on(60.0, steps=True)
    pace.step(60.0)

    assert pace.max_s == 60.0


def test_the_steps_of_another_phase_are_steps_too() -> None:
    pace = Pace()
    pace.step(10.0)  # while it loads
    pace.step(17.0)

    pace.goes_on(300.0, steps=True)
    pace.step(302.0)

    assert (pace.max_s, pace.mean_s) == (7.0, 4.5)


def test_a_step_of_which_nobody_knows_when_it_began_is_no_measure() -> None:
    pace = Pace()
    pace.step(0.0)
    pace.step(5.0)
    pace.goes_on(6.0, steps=False)

    pace.begins_anew()
    pace.step(300.0)
    pace.step(307.0)

    assert (pace.max_s, pace.mean_s) == (7.0, 6.0)


def test_the_phase_before_such_a_step_is_over() -> None:
    pace = Pace()
    pace.goes_on(0.0, steps=False)

    pace.begins_anew()
    pace.step(300.0)
    pace.goes_on(304.0, steps=True)
    pace.step(307.0)

    assert pace.max_s == 7.0


def test_two_threads_that_step_at_once_take_no_time_and_not_less() -> None:
    pace = Pace()
    pace.step(10.0)

    pace.step(9.9)

    assert (pace.max_s, pace.mean_s) == (0.0, 0.0)


def test_a_phase_before_the_first_step_is_none_of_its_time() -> None:
    pace = Pace()
    pace.goes_on(300.0, steps=True)

    pace.step(301.0)
    pace.step(303.0)

    assert pace.max_s == 2.0
