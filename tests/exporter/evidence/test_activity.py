"""Which activity a job without step beats shows, and since when it shows none."""

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.evidence import activity
from exporter.model.container import ContainerEvidence
from exporter.model.timeouts import PhaseTimeouts
from exporter.model.unknown import Unknown
from gpuwarden.job import Phase
from gpuwarden.state_file import Stamp
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

# A5, 120 s after the last step beat

UNKNOWN = Unknown(reason="not_listed", message="GPU is lost")
NO_RAM = Unknown(reason="no_controller", message="no memory controller")


def not_stalled_reason(seen: ContainerEvidence | None, timeouts: PhaseTimeouts | None = None, **job: Any) -> str | None:
    """The reason for a job whose last step beat is 120 s old by default."""
    given = build.job_file(**{"step_beat": build.ago(120.0), **job})
    return activity.not_stalled_reason(given, seen, timeouts or PhaseTimeouts(), now=build.ago(0))


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        pytest.param(build.evidence(gpu_idle_s=120.0, ram_idle_s=120.0), None, id="GPU idle, RAM static: stalled"),
        pytest.param(
            build.evidence(gpu_idle_s=500.0, ram_idle_s=2.0),
            "RAM changed or was unknown 2 s ago",
            id="GPU idle, RAM changes: loads, decodes or stages",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=0.0, ram_idle_s=500.0),
            "GPU was busy or unknown 0 s ago",
            id="GPU busy, RAM static: slow step",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=0.0, ram_idle_s=0.0),
            "GPU was busy or unknown 0 s ago",
            id="GPU busy, RAM changes: slow step",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=119.9, ram_idle_s=500.0),
            "GPU was busy or unknown 120 s ago",
            id="GPU not idle long enough",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=500.0, ram_idle_s=119.9),
            "RAM changed or was unknown 120 s ago",
            id="RAM not idle long enough",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=None, gpu_unknown=UNKNOWN),
            "GPU unknown: GPU is lost",
            id="GPU unknown is not idle",
        ),
        pytest.param(build.evidence(gpu_idle_s=None), "GPU unknown: not measured", id="GPU unknown, no reason given"),
        pytest.param(
            build.evidence(ram_idle_s=None, ram_unknown=NO_RAM), "RAM unknown: no memory controller", id="RAM unknown"
        ),
        pytest.param(build.evidence(ram_idle_s=None), "RAM unknown: not measured", id="RAM unknown, no reason given"),
        pytest.param(None, "its container is unknown", id="container unknown"),
    ],
)
def test_activity_keeps_a_job_from_being_stalled(seen: ContainerEvidence | None, message: str | None) -> None:
    assert not_stalled_reason(seen) == message


@pytest.mark.parametrize(
    ("phase_started", "message"),
    [
        (build.ago(119.6), "the phase changed 120 s ago"),
        (build.ago(900.0, boot_id="before"), "phase unknown: not measured"),
    ],
)
def test_recent_phase_change_keeps_a_job_from_being_stalled(phase_started: Stamp, message: str) -> None:
    assert not_stalled_reason(build.evidence(), phase_started=phase_started) == message


@pytest.mark.parametrize(
    ("stall_timeout_s", "step_beat"),
    [
        pytest.param(120.0, build.ago(119.9), id="step beat in time"),
        pytest.param(120.0, None, id="no step beat yet"),
        pytest.param(120.0, build.ago(9999.0, boot_id="before"), id="step beat before a reboot"),
        pytest.param(0.0, build.ago(9999.0), id="stall timeout 0"),
    ],
)
def test_no_reason_for_a_job_that_cannot_stall(stall_timeout_s: float, step_beat: Stamp | None) -> None:
    assert not_stalled_reason(None, stall_timeout_s=stall_timeout_s, step_beat=step_beat) is None


# Time without activity: A2 to A5 and A7

IDLE_S: dict[str, Any] = {
    "gpu_idle_s": 500.0, "gpu_lost_s": 501.0, "ram_idle_s": 510.0,
    "io_idle_s": 520.0, "page_fault_idle_s": 530.0, "cpu_idle_s": 540.0,
    "heavy_work_idle_s": 550.0,
}  # fmt: skip
"""Seconds since each kind of activity of a container."""

WORK = ("io_idle_s", "page_fault_idle_s", "cpu_idle_s")
IN_WORK = (Phase.LOAD, Phase.EVAL, Phase.SAVE, Phase.CHECKPOINT)


SITUATIONS: Final[dict[str, dict[str, bool]]] = {
    "idle": {},
    "lost": {"gpu_lost": True},
    "shared_container": {"shared_container": True},
}
"""The job alone in its container with its GPU idle or lost, or one job of a shared container."""


def inactive_s(
    phase: Phase = Phase.STEP, *, of: str = "idle", place: dict[str, Any] | None = None, **job: Any
) -> float | None:
    """Seconds without activity; by default the step beat is 600 s old and the phase 700 s."""
    given = build.job_file(**{"phase": phase, "step_beat": build.ago(600.0), "phase_started": build.ago(700.0), **job})
    evidence = build.evidence(**IDLE_S | (place or {}))
    return activity.inactive_s(given, evidence, PhaseTimeouts(), now=build.ago(0), **SITUATIONS[of])


@pytest.mark.behaviour("A5")
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("of", SITUATIONS)
def test_inactive_time_starts_at_the_latest_activity(phase: Phase, of: str) -> None:
    gpu, other = ("gpu_lost_s", "gpu_idle_s") if of == "lost" else ("gpu_idle_s", "gpu_lost_s")
    # The page cache belongs to the whole container. For one worker of several, its I/O counts instead.
    always = ("io_idle_s",) if of == "shared_container" else ()
    heavy = ("heavy_work_idle_s",) if phase is Phase.STEP else ()
    counts = (gpu, "ram_idle_s", *(WORK if phase in IN_WORK else always), *heavy)

    whole_s = inactive_s(phase, of=of)

    assert whole_s == IDLE_S[gpu]
    assert [inactive_s(phase, of=of, place={each: 119.9}) for each in counts] == [119.9] * len(counts)
    assert [inactive_s(phase, of=of, place={each: None}) for each in counts] == [None] * len(counts)
    assert inactive_s(phase, of=of, step_beat=build.ago(119.5)) == 119.5
    assert inactive_s(phase, of=of, phase_started=build.ago(119.5)) == 119.5
    for each in {other, *WORK, "heavy_work_idle_s"} - {*counts}:
        assert [inactive_s(phase, of=of, place={each: for_s}) for for_s in (0.0, None)] == [whole_s] * 2


@pytest.mark.parametrize("of", SITUATIONS)
def test_step_beat_before_a_reboot_has_unknown_age(of: str) -> None:
    before = build.ago(600.0, boot_id="before")

    assert inactive_s(of=of, step_beat=None) == inactive_s(of=of)
    assert inactive_s(of=of, step_beat=before) is None
    assert inactive_s(of=of, step_beat=None, phase_started=before) is None


@pytest.mark.parametrize("of", SITUATIONS)
def test_unknown_container_has_unknown_inactive_time(of: str) -> None:
    job = build.job_file(step_beat=None, phase_started=build.ago(700.0))

    assert activity.inactive_s(job, None, PhaseTimeouts(), now=build.ago(0), **SITUATIONS[of]) is None


@given(
    seen=st.fixed_dictionaries({each: st.none() | st.sampled_from((0.0, 119.0, 120.0, 500.0)) for each in IDLE_S}),
    phase=st.sampled_from(Phase),
    step_beat_age_s=st.none() | st.sampled_from((119.0, 120.0, 500.0)),
    phase_age_s=st.sampled_from((119.0, 120.0, 500.0)),
)
def test_reason_is_given_until_the_job_is_known_inactive_for_its_timeout(
    seen: dict[str, float | None], phase: Phase, step_beat_age_s: float | None, phase_age_s: float
) -> None:
    timeouts = PhaseTimeouts(load_s=0.0, eval_s=0.0, checkpoint_s=0.0, save_s=0.0)
    step_beat = None if step_beat_age_s is None else build.ago(step_beat_age_s)
    job: dict[str, Any] = {"phase": phase, "step_beat": step_beat, "phase_started": build.ago(phase_age_s)}
    silent = step_beat_age_s is not None and step_beat_age_s >= 120.0 and phase is not Phase.IDLE

    found_s = inactive_s(place=seen, **job)

    suspected = not_stalled_reason(build.evidence(**seen), timeouts, **job) is not None
    assert suspected == (silent and (found_s is None or found_s < 120.0))


# Work of processes: A5


NO_IO = Unknown(reason="io_unreadable", message="the kernel does not say")


@pytest.mark.parametrize("phase", [Phase.LOAD, Phase.EVAL, Phase.SAVE, Phase.CHECKPOINT])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({}, None, id="no work: stalled"),
        pytest.param({"io_idle_s": 3.0}, "its processes worked or were unknown 3 s ago", id="I/O: warm load"),
        pytest.param({"page_fault_idle_s": 4.0}, "its processes worked or were unknown 4 s ago", id="mapped file"),
        pytest.param({"cpu_idle_s": 119.9}, "its processes worked or were unknown 120 s ago", id="CPU: unpacks"),
        pytest.param({"io_idle_s": None, "work_unknown": NO_IO}, "work unknown: the kernel does not say",
                     id="unknown is not idle"),
        pytest.param({"cpu_idle_s": None}, "work unknown: not measured", id="unknown, no reason given"),
        pytest.param({"ram_idle_s": 2.0}, "RAM changed or was unknown 2 s ago", id="RAM is named first"),
    ],
)  # fmt: skip
def test_work_counts_as_activity_outside_of_steps(
    phase: Phase, changes: dict[str, object], message: str | None
) -> None:
    seen = build.evidence(**changes)

    timeouts = PhaseTimeouts(load_s=0.0, eval_s=0.0, checkpoint_s=0.0, save_s=0.0)

    assert not_stalled_reason(seen, timeouts, phase=phase) == message


def test_light_work_does_not_count_as_activity_in_steps() -> None:
    seen = build.evidence(io_idle_s=0.0, page_fault_idle_s=None, cpu_idle_s=0.0)

    assert not_stalled_reason(seen, phase=Phase.STEP) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"heavy_work_idle_s": 3.0}, "its processes worked hard or were unknown 3 s ago", id="compiles"),
        pytest.param({"heavy_work_idle_s": None, "work_unknown": NO_IO}, "heavy work unknown: the kernel does not say",
                     id="unknown is not idle"),
    ],
)  # fmt: skip
def test_heavy_work_counts_as_activity_in_steps_until_the_busy_timeout(
    changes: dict[str, object], message: str
) -> None:
    seen, timeouts = build.evidence(**changes), PhaseTimeouts(busy_s=500.0)

    job = {"phase": Phase.STEP, "phase_started": build.ago(5000.0)}

    assert not_stalled_reason(seen, timeouts, step_beat=build.ago(499.0), **job) == message
    assert not_stalled_reason(seen, timeouts, step_beat=build.ago(500.0), **job) is None
    assert not_stalled_reason(seen, timeouts, step_beat=build.ago(500.0), busy_timeout_s=600.0, **job) == message


# A saturated GPU with a spinning process; an unknown GPU with a sleeping process.
SPINNING = {
    "gpu_saturated_s": 600.0, "gpu_last_busy_age_s": 0.0, "cpu_idle_s": 0.0,
    "ram_idle_s": 900.0, "io_idle_s": 800.0, "page_fault_idle_s": 700.0,
}  # fmt: skip
SLEEPING = {**SPINNING, "gpu_saturated_s": None, "gpu_last_busy_age_s": 650.0, "cpu_idle_s": 640.0}


@pytest.mark.parametrize(
    ("seen", "no_progress_s"),
    [
        pytest.param(SPINNING, 600.0, id="GPU saturated, process spins"),
        pytest.param({**SPINNING, "gpu_last_busy_age_s": None}, 600.0, id="GPU saturated, last busy time unknown"),
        pytest.param({**SPINNING, "cpu_idle_s": None}, 600.0, id="GPU saturated, CPU time unknown"),
        pytest.param({**SPINNING, "gpu_saturated_s": 0.0}, 0.0, id="GPU pauses"),
        pytest.param({**SPINNING, "ram_idle_s": 4.0}, 4.0, id="RAM: it loads"),
        pytest.param({**SPINNING, "io_idle_s": 3.0}, 3.0, id="I/O: it reads"),
        pytest.param({**SPINNING, "page_fault_idle_s": 2.0}, 2.0, id="faults: it compiles"),
        pytest.param({**SPINNING, "ram_idle_s": None}, None, id="RAM unknown"),
        pytest.param({**SPINNING, "io_idle_s": None}, None, id="I/O unknown"),
        pytest.param({**SPINNING, "page_fault_idle_s": None}, None, id="faults unknown"),
        pytest.param({**SPINNING, "gpu_saturated_s": None}, 0.0, id="GPU busy until it became unknown"),
        pytest.param(SLEEPING, 640.0, id="GPU unknown, process sleeps"),
        pytest.param({**SLEEPING, "gpu_saturated_s": 0.0}, 640.0, id="GPU idle"),
        pytest.param({**SLEEPING, "gpu_last_busy_age_s": 5.0}, 5.0, id="GPU busy recently"),
        pytest.param({**SLEEPING, "cpu_idle_s": 1.0}, 1.0, id="GPU unknown, process may compute"),
        pytest.param({**SLEEPING, "cpu_idle_s": None}, None, id="GPU unknown, CPU time unknown"),
        pytest.param({**SLEEPING, "gpu_last_busy_age_s": None}, None, id="no GPU"),
    ],
)  # fmt: skip
def test_no_progress_time_is_the_least_of_its_parts(seen: dict[str, float | None], no_progress_s: float | None) -> None:
    assert build.evidence(**seen).no_progress_s == no_progress_s


@pytest.mark.parametrize("sign", ["gpu_saturated_s", "ram_idle_s", "io_idle_s", "page_fault_idle_s"])
def test_spinning_time_is_the_least_of_its_parts_or_unknown(sign: str) -> None:
    assert build.evidence(**SPINNING).spinning_s == 600.0
    assert build.evidence(**{**SPINNING, sign: 5.0}).spinning_s == 5.0
    assert build.evidence(**{**SPINNING, sign: None}).spinning_s is None
    assert build.evidence(**SLEEPING).spinning_s is None


@given(seen=st.fixed_dictionaries({each: st.none() | st.sampled_from((0.0, 1.0, 2.0)) for each in SPINNING}))
def test_no_progress_time_requires_each_part_for_that_time(seen: dict[str, float | None]) -> None:
    def lasted(*signs: str) -> bool:
        return all((figure := seen[each]) is not None and figure >= 1.0 for each in signs)

    found_s = build.evidence(**seen).no_progress_s

    of_its_gpu = lasted("gpu_saturated_s") or lasted("gpu_last_busy_age_s", "cpu_idle_s")
    assert (found_s is not None and found_s >= 1.0) == (
        lasted("ram_idle_s", "io_idle_s", "page_fault_idle_s") and of_its_gpu
    )


def test_stall_timeout_depends_on_the_phase() -> None:
    seen = build.evidence(gpu_idle_s=1.0)
    timeouts = PhaseTimeouts(eval_s=200.0)

    found = {
        age_s: not_stalled_reason(seen, timeouts, phase=Phase.EVAL, step_beat=build.ago(age_s))
        for age_s in (199.5, 200.0)
    }

    assert found == {199.5: None, 200.0: "GPU was busy or unknown 1 s ago"}


# Ranks that their gang may wait for


WAITS: dict[str, Any] = {
    "gpu_idle_s": 500.0, "ram_idle_s": 500.0, "io_idle_s": 500.0, "page_fault_idle_s": 500.0, "cpu_idle_s": 500.0,
    "heavy_work_idle_s": 500.0, "gpu_saturated_s": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "changes", "job", "active"),
    [
        pytest.param(Phase.STEP, {}, {}, False, id="nothing"),
        pytest.param(Phase.STEP, {}, {"phase_started": build.ago(1.0)}, False, id="a new phase alone"),
        pytest.param(Phase.STEP, {}, {"step_beat": build.ago(59.9)}, True, id="a step beat"),
        pytest.param(Phase.STEP, {}, {"step_beat": build.ago(60.0)}, False, id="a step beat a minute ago"),
        pytest.param(Phase.STEP, {"gpu_idle_s": 0.0}, {}, True, id="its GPU computes"),
        pytest.param(Phase.STEP, {"gpu_idle_s": 0.0, "gpu_saturated_s": 59.9}, {}, True, id="saturated for a moment"),
        pytest.param(Phase.STEP, {"gpu_idle_s": 0.0, "gpu_saturated_s": 60.0}, {}, False, id="spins in a collective"),
        pytest.param(Phase.STEP, {"ram_idle_s": 3.0, "gpu_saturated_s": 900.0}, {}, True, id="saturated, RAM moves"),
        pytest.param(Phase.STEP, {"heavy_work_idle_s": 3.0}, {}, True, id="heavy work in a step"),
        pytest.param(Phase.CHECKPOINT, {"io_idle_s": 3.0}, {}, True, id="writes a checkpoint"),
        pytest.param(Phase.LOAD, {"cpu_idle_s": None, "gpu_idle_s": None}, {}, False, id="unknown is not active"),
    ],
)
def test_rank_is_active_by_what_it_does_itself(
    phase: Phase, changes: dict[str, Any], job: dict[str, Any], active: bool
) -> None:
    given = build.job_file(
        **{"phase": phase, "step_beat": build.ago(600.0), "phase_started": build.ago(700.0), "ranks": 2, **job}
    )

    assert (
        activity.is_rank_active(given, build.evidence(**WAITS | changes), PhaseTimeouts(), now=build.ago(0)) is active
    )


def test_rank_in_an_unknown_container_is_active_by_its_step_beat() -> None:
    given = build.job_file(step_beat=build.ago(3.0), ranks=2)

    assert activity.is_rank_active(given, None, PhaseTimeouts(), now=build.ago(0))
