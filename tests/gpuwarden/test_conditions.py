"""Truth tables of the conditions."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden import conditions
from gpuwarden.conditions import Sign
from gpuwarden.job import Phase

pytestmark = pytest.mark.pure

FIGURE = st.none() | st.integers(0, 6).map(float)
"""An age or a limit; small, so that ages often reach their limits."""


@pytest.mark.parametrize(
    ("age_s", "limit_s", "met"),
    [
        pytest.param(120.0, 120.0, True, id="at its limit"),
        pytest.param(119.9, 120.0, False, id="under its limit"),
        pytest.param(None, 120.0, False, id="an unknown age"),
        pytest.param(120.0, None, False, id="an unknown limit"),
        pytest.param(120.0, 0.0, False, id="no limit"),
        pytest.param(0.0, 0.0, False, id="zero without a limit"),
    ],
)
def test_age_reaches_its_limit(age_s: float | None, limit_s: float | None, met: bool) -> None:
    assert conditions.reached(age_s, limit_s) is met


@pytest.mark.parametrize(
    ("ages_s", "least_s"),
    [
        pytest.param((3.0, 1.0, 2.0), 1.0, id="all known"),
        pytest.param((3.0, None), None, id="one unknown"),
        pytest.param((0.0, None), None, id="unknown and zero"),
    ],
)
def test_least_of_several_ages(ages_s: tuple[float | None, ...], least_s: float | None) -> None:
    assert conditions.least(*ages_s) == least_s


AGES: dict[str, Any] = {
    "step_beat_age_s": 1.0, "phase_age_s": 2.0, "gpu_s": 3.0, "ram_idle_s": 4.0, "work_idle_s": 5.0,
    "heavy_work_idle_s": 0.5, "busy_timeout_s": 1.5,
}  # fmt: skip
ALWAYS = {Sign.PHASE: 2.0, Sign.GPU: 3.0, Sign.RAM: 4.0}


@pytest.mark.parametrize(
    ("phase", "has_beaten", "more"),
    [
        pytest.param("step", True, {Sign.BEAT: 1.0, Sign.HEAVY_WORK: 0.5}, id="it steps"),
        pytest.param("step", False, {Sign.HEAVY_WORK: 0.5}, id="no beat yet"),
        pytest.param(None, False, {}, id="its phase is unknown"),
        *(
            pytest.param(phase.value, False, {Sign.WORK: 5.0} if phase.counts_work else {}, id=f"in {phase}")
            for phase in Phase
            if phase is not Phase.STEP
        ),
    ],
)
def test_activity_that_counts(phase: str | None, has_beaten: bool, more: dict[Sign, float]) -> None:
    signs = conditions.activity(phase, has_beaten=has_beaten, **AGES)

    assert signs == {**ALWAYS, **more}


def test_more_activity_counts_too() -> None:
    signs = conditions.activity(None, has_beaten=False, more={Sign.IO: 6.0}, **AGES)

    assert signs == {**ALWAYS, Sign.IO: 6.0}


@pytest.mark.parametrize(
    ("heavy_page_fault_idle_s", "probe_failing_s", "idle_s"),
    [
        pytest.param(3.0, 899.9, 3.0, id="they count before the limit"),
        pytest.param(3.0, 900.0, 900.0, id="they do not count after it"),
        pytest.param(None, 899.9, None, id="unknown"),
        pytest.param(None, 900.0, 900.0, id="unknown after the limit"),
        pytest.param(3.0, None, 3.0, id="without a probe"),
    ],
)
def test_page_faults_of_a_server_count_for_a_limited_time(
    heavy_page_fault_idle_s: float | None, probe_failing_s: float | None, idle_s: float | None
) -> None:
    assert conditions.server_fault_idle_s(heavy_page_fault_idle_s, probe_failing_s, 900.0) == idle_s


@pytest.mark.parametrize(
    ("step_beat_age_s", "phase_age_s", "limit_s", "counts"),
    [
        pytest.param(899.9, 2000.0, 900.0, True, id="before the limit"),
        pytest.param(900.0, 2000.0, 900.0, False, id="after the limit"),
        pytest.param(5000.0, 899.9, 900.0, True, id="no beat in this phase"),
        pytest.param(None, 900.0, 900.0, False, id="no beat at all"),
        pytest.param(None, None, 900.0, True, id="times are unknown"),
        pytest.param(5000.0, 5000.0, None, True, id="the limit is unknown"),
        pytest.param(0.0, 0.0, 0.0, False, id="turned off"),
    ],
)
def test_heavy_work_counts_for_a_limited_time(
    step_beat_age_s: float | None, phase_age_s: float | None, limit_s: float | None, counts: bool
) -> None:
    ages_s = {**AGES, "step_beat_age_s": step_beat_age_s, "phase_age_s": phase_age_s, "busy_timeout_s": limit_s}

    assert (Sign.HEAVY_WORK in conditions.activity("step", has_beaten=True, **ages_s)) is counts


NO_PROGRESS = {
    "gpu_saturated_s": 10.0, "gpu_last_busy_age_s": 0.0, "cpu_idle_s": 0.0,
    "ram_idle_s": 12.0, "io_idle_s": 13.0, "page_fault_idle_s": 14.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "no_progress_s"),
    [
        pytest.param({}, 10.0, id="its GPU is fully used"),
        pytest.param({"gpu_last_busy_age_s": 11.0, "cpu_idle_s": 11.5}, 11.0, id="its GPU was not busy for longer"),
        pytest.param({"gpu_saturated_s": None}, 0.0, id="its GPU was busy"),
        pytest.param({"gpu_saturated_s": None, "gpu_last_busy_age_s": 11.0}, 0.0, id="its processes compute"),
        pytest.param({"gpu_saturated_s": None, "cpu_idle_s": None}, None, id="GPU and CPU time are unknown"),
        pytest.param({"cpu_idle_s": None}, 10.0, id="CPU time is unknown, its GPU fully used"),
        pytest.param({"ram_idle_s": 1.0}, 1.0, id="its RAM moved"),
        pytest.param({"io_idle_s": None}, None, id="its I/O is unknown"),
    ],
)
def test_duration_without_progress_of_a_container(
    changed: dict[str, float | None], no_progress_s: float | None
) -> None:
    assert conditions.no_progress_s(**{**NO_PROGRESS, **changed}) == no_progress_s


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        pytest.param({}, True, id="no beat and no activity"),
        pytest.param({"step_beat_age_s": 119.9}, False, id="it beat"),
        pytest.param({"inactive_s": 119.9}, False, id="it showed another sign of life"),
        pytest.param({"inactive_s": None}, False, id="a sign of life is unknown"),
        pytest.param({"silence_s": 0.0}, False, id="without a stall timeout"),
    ],
)
def test_job_is_stalled(changed: dict[str, float | None], met: bool) -> None:
    assert (
        conditions.is_stalled(**{"step_beat_age_s": 120.0, "inactive_s": 120.0, "silence_s": 120.0, **changed}) is met
    )


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        pytest.param({}, True, id="a window after its grace"),
        pytest.param({"elapsed_s": 659.9}, False, id="the window began in its grace"),
        pytest.param({"inactive_s": 299.9}, False, id="it showed a sign of life"),
        pytest.param({"elapsed_s": None}, False, id="it began before a reboot"),
        pytest.param({"grace_s": None}, False, id="its grace is unknown"),
        pytest.param({"window_s": None}, False, id="it uses no GPU"),
    ],
)
def test_gpu_job_is_unhealthy(changed: dict[str, float | None], met: bool) -> None:
    figures = {"inactive_s": 300.0, "window_s": 300.0, "elapsed_s": 660.0, "grace_s": 360.0, **changed}
    assert conditions.is_unhealthy(**figures) is met


@pytest.mark.parametrize(
    ("step_beat_age_s", "rest_s", "spinning_s"),
    [
        pytest.param(50.0, 30.0, 40.0, id="its rest, which is measured late"),
        pytest.param(35.0, 30.0, 35.0, id="its step beat is younger"),
        pytest.param(50.0, 0.0, 0.0, id="it is active"),
        pytest.param(None, 0.0, None, id="no step beat yet, active"),
        pytest.param(None, 30.0, None, id="no step beat yet"),
        pytest.param(50.0, None, None, id="its activity is unknown"),
    ],
)
def test_duration_that_a_rank_spins(
    step_beat_age_s: float | None, rest_s: float | None, spinning_s: float | None
) -> None:
    assert conditions.rank_spinning_s(step_beat_age_s, rest_s, late_s=10.0) == spinning_s


@given(step_beat_age_s=FIGURE, rest_s=FIGURE, after_s=st.integers(1, 6), late_s=st.integers(0, 5))
def test_rank_is_stuck_when_its_one_value_reaches_the_limit(
    step_beat_age_s: float | None, rest_s: float | None, after_s: int, late_s: int
) -> None:
    still_s = max(after_s - late_s, 1)
    one_s = conditions.rank_spinning_s(step_beat_age_s, rest_s, after_s - still_s)

    assert conditions.reached(one_s, after_s) == conditions.is_stuck(step_beat_age_s, after_s, rest_s, still_s)


@given(st.fixed_dictionaries(dict.fromkeys(("pegged", "ram", "io", "fault"), FIGURE)))
def test_spinning_rank_has_no_progress(ages_s: dict[str, float | None]) -> None:
    rest = {"ram_idle_s": ages_s["ram"], "io_idle_s": ages_s["io"], "page_fault_idle_s": ages_s["fault"]}
    spinning_s = conditions.spinning_s(gpu_saturated_s=ages_s["pegged"], **rest)

    assert spinning_s == conditions.no_progress_s(
        gpu_saturated_s=ages_s["pegged"], gpu_last_busy_age_s=None, cpu_idle_s=None, **rest
    )


OVERDUE = (
    "elapsed_s",
    "budget_s",
    "step_beat_age_s",
    "silence_s",
    "inactive_s",
    "quiet_gpu_lost_s",
    "window_s",
    "heartbeat_age_s",
    "dead_s",
    "dead_after_s",
)


@given(st.fixed_dictionaries(dict.fromkeys((*OVERDUE, "grace_s", "no_progress_s", "cpu_idle_s", "longer_s"), FIGURE)))
def test_each_condition_makes_a_job_overdue(figures: dict[str, Any]) -> None:
    """The rules see a job only while it is overdue, so each condition must imply it."""
    known = {name: figures[name] for name in OVERDUE}
    step_beat_age_s, silence_s = known["step_beat_age_s"], known["silence_s"]
    after_s = silence_s + (figures["longer_s"] or 0.0) if silence_s else None
    met = (
        conditions.reached(known["elapsed_s"], known["budget_s"])
        or conditions.is_stalled(step_beat_age_s, known["inactive_s"], silence_s)
        or conditions.is_stuck(step_beat_age_s, after_s, figures["no_progress_s"], 1.0)
        or conditions.is_unhealthy(known["inactive_s"], known["window_s"], known["elapsed_s"], figures["grace_s"])
        or conditions.reached(known["quiet_gpu_lost_s"], known["window_s"])
        or conditions.reached(conditions.least(known["heartbeat_age_s"], figures["cpu_idle_s"]), known["dead_after_s"])
        or conditions.reached(known["dead_s"], known["dead_after_s"])
    )

    assert conditions.is_overdue(**known) or not met


def test_job_within_all_limits_is_not_overdue() -> None:
    limits = {"budget_s", "silence_s", "window_s", "dead_after_s"}
    figures = {name: 10.0 if name in limits else 9.9 for name in OVERDUE}

    assert not conditions.is_overdue(**figures)
    assert conditions.is_overdue(**{**figures, "dead_s": 10.0})
