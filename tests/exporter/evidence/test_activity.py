"""Which signs of life a silent job shows, and for how long it has shown none."""

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

# Suspicion: A5, with 120 s of silence

UNKNOWN = Unknown(reason="not_listed", because="GPU is lost")
NO_RAM = Unknown(reason="no_controller", because="no memory controller")


def not_stalled_reason(seen: ContainerEvidence | None, timeouts: PhaseTimeouts | None = None, **job: Any) -> str | None:
    """Why a job is suspected that beat 120 s ago, where nothing else is said."""
    given = build.job_file(**{"beat": build.ago(120.0), **job})
    return activity.not_stalled_reason(given, seen, timeouts or PhaseTimeouts(), now=build.ago(0))


@pytest.mark.parametrize(
    ("seen", "because"),
    [
        pytest.param(build.evidence(gpu_idle_s=120.0, ram_idle_s=120.0), None, id="GPU idle and RAM static is wedged"),
        pytest.param(
            build.evidence(gpu_idle_s=500.0, ram_idle_s=2.0),
            "RAM changed or was unknown 2 s ago",
            id="GPU idle and RAM moving is loading, decoding or staging",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=0.0, ram_idle_s=500.0),
            "GPU was busy or unknown 0 s ago",
            id="GPU busy and RAM static is a slow step",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=0.0, ram_idle_s=0.0),
            "GPU was busy or unknown 0 s ago",
            id="GPU busy and RAM moving is a slow step",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=119.9, ram_idle_s=500.0),
            "GPU was busy or unknown 120 s ago",
            id="GPU idle not for long enough",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=500.0, ram_idle_s=119.9),
            "RAM changed or was unknown 120 s ago",
            id="RAM still not for long enough",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=None, gpu_unknown=UNKNOWN),
            "GPU unknown: GPU is lost",
            id="GPU unknown is not idle",
        ),
        pytest.param(build.evidence(gpu_idle_s=None), "GPU unknown: not measured", id="GPU unknown without a word"),
        pytest.param(
            build.evidence(ram_idle_s=None, ram_unknown=NO_RAM), "RAM unknown: no memory controller", id="RAM unknown"
        ),
        pytest.param(build.evidence(ram_idle_s=None), "RAM unknown: not measured", id="RAM unknown without a word"),
        pytest.param(None, "its container is unknown", id="container unknown"),
    ],
)
def test_a_sign_of_life_makes_a_silent_job_suspected(seen: ContainerEvidence | None, because: str | None) -> None:
    assert not_stalled_reason(seen) == because


@pytest.mark.parametrize(
    ("phase_started", "because"),
    [
        (build.ago(119.6), "the phase changed 120 s ago"),
        (build.ago(900.0, boot_id="before"), "phase unknown: not measured"),
    ],
)
def test_a_job_with_a_phase_younger_than_its_beat_is_suspected(phase_started: Stamp, because: str) -> None:
    assert not_stalled_reason(build.evidence(), phase_started=phase_started) == because


@pytest.mark.parametrize(
    ("stall_timeout_s", "beat"),
    [
        pytest.param(120.0, build.ago(119.9), id="it beat in time"),
        pytest.param(120.0, None, id="it is not armed"),
        pytest.param(120.0, build.ago(9999.0, boot_id="before"), id="it beat before a reboot"),
        pytest.param(0.0, build.ago(9999.0), id="the stall condition does not police it"),
    ],
)
def test_a_job_is_not_suspected_when(stall_timeout_s: float, beat: Stamp | None) -> None:
    assert not_stalled_reason(None, stall_timeout_s=stall_timeout_s, beat=beat) is None


# Quiet: A2 to A5 and A7, for how long

QUIET: dict[str, Any] = {
    "gpu_idle_s": 500.0, "gpu_lost_s": 501.0, "ram_idle_s": 510.0,
    "io_idle_s": 520.0, "page_fault_idle_s": 530.0, "cpu_idle_s": 540.0,
}  # fmt: skip
"""Signs of life that a container has not shown, by the time since."""

WORK = ("io_idle_s", "page_fault_idle_s", "cpu_idle_s")
IN_WORK = (Phase.LOAD, Phase.EVAL, Phase.SAVE, Phase.CHECKPOINT)


QUIET_OF: Final[dict[str, dict[str, bool]]] = {
    "idle": {},
    "lost": {"gpu_lost": True},
    "shared_container": {"shared_container": True},
}
"""Of whom it is asked: of a job with its GPU idle or lost, or of one alone of those that share a container."""


def quiet(
    phase: Phase = Phase.STEP, *, of: str = "idle", place: dict[str, Any] | None = None, **job: Any
) -> float | None:
    """For how long it was quiet that beat 600 s ago and entered its phase 700 s ago, but for what is said."""
    given = build.job_file(**{"phase": phase, "beat": build.ago(600.0), "phase_started": build.ago(700.0), **job})
    return activity.inactive_s(given, build.evidence(**QUIET | (place or {})), now=build.ago(0), **QUIET_OF[of])


@pytest.mark.behaviour("A5")
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("of", QUIET_OF)
def test_quiet_lasts_for_as_long_as_the_sign_of_life_that_was_there_last(phase: Phase, of: str) -> None:
    gpu, other = ("gpu_lost_s", "gpu_idle_s") if of == "lost" else ("gpu_idle_s", "gpu_lost_s")
    # The page cache is its container's as a whole: of one worker of several its I/O stands for it.
    always = ("io_idle_s",) if of == "shared_container" else ()
    counts = (gpu, "ram_idle_s", *(WORK if phase in IN_WORK else always))

    whole_s = quiet(phase, of=of)

    assert whole_s == QUIET[gpu]
    assert [quiet(phase, of=of, place={each: 119.9}) for each in counts] == [119.9] * len(counts)
    assert [quiet(phase, of=of, place={each: None}) for each in counts] == [None] * len(counts)
    assert quiet(phase, of=of, beat=build.ago(119.5)) == 119.5
    assert quiet(phase, of=of, phase_started=build.ago(119.5)) == 119.5
    for each in {other, *WORK} - {*counts}:
        assert [quiet(phase, of=of, place={each: for_s}) for for_s in (0.0, None)] == [whole_s] * 2


@pytest.mark.parametrize("of", QUIET_OF)
def test_a_beat_counts_once_there_was_one_and_one_before_a_reboot_is_of_no_known_age(of: str) -> None:
    before = build.ago(600.0, boot_id="before")

    assert quiet(of=of, beat=None) == quiet(of=of)
    assert quiet(of=of, beat=before) is None
    assert quiet(of=of, beat=None, phase_started=before) is None


@pytest.mark.parametrize("of", QUIET_OF)
def test_of_who_is_in_no_known_container_it_is_not_known_whether_it_is_quiet(of: str) -> None:
    job = build.job_file(beat=None, phase_started=build.ago(700.0))

    assert activity.inactive_s(job, None, now=build.ago(0), **QUIET_OF[of]) is None


@given(
    seen=st.fixed_dictionaries({each: st.none() | st.sampled_from((0.0, 119.0, 120.0, 500.0)) for each in QUIET}),
    phase=st.sampled_from(Phase),
    step_beat_age_s=st.none() | st.sampled_from((119.0, 120.0, 500.0)),
    phase_age_s=st.sampled_from((119.0, 120.0, 500.0)),
)
def test_a_silent_job_is_suspected_where_it_is_not_known_to_have_been_quiet_for_as_long_as_it_may(
    seen: dict[str, float | None], phase: Phase, step_beat_age_s: float | None, phase_age_s: float
) -> None:
    timeouts = PhaseTimeouts(load_s=0.0, eval_s=0.0, checkpoint_s=0.0, save_s=0.0)
    beat = None if step_beat_age_s is None else build.ago(step_beat_age_s)
    job: dict[str, Any] = {"phase": phase, "beat": beat, "phase_started": build.ago(phase_age_s)}
    silent = step_beat_age_s is not None and step_beat_age_s >= 120.0 and phase is not Phase.IDLE

    found_s = quiet(place=seen, **job)

    suspected = not_stalled_reason(build.evidence(**seen), timeouts, **job) is not None
    assert suspected == (silent and (found_s is None or found_s < 120.0))


# Work: A5, where GPU and RAM tell too little


NO_IO = Unknown(reason="io_unreadable", because="the kernel does not say")


@pytest.mark.parametrize("phase", [Phase.LOAD, Phase.EVAL, Phase.SAVE, Phase.CHECKPOINT])
@pytest.mark.parametrize(
    ("changes", "because"),
    [
        pytest.param({}, None, id="no work either is wedged"),
        pytest.param({"io_idle_s": 3.0}, "its processes worked or were unknown 3 s ago", id="I/O: a warm load"),
        pytest.param({"page_fault_idle_s": 4.0}, "its processes worked or were unknown 4 s ago", id="mapped file"),
        pytest.param({"cpu_idle_s": 119.9}, "its processes worked or were unknown 120 s ago", id="CPU: it unpacks"),
        pytest.param({"io_idle_s": None, "work_unknown": NO_IO}, "work unknown: the kernel does not say",
                     id="unknown is not still"),
        pytest.param({"cpu_idle_s": None}, "work unknown: not measured", id="unknown without a word"),
        pytest.param({"ram_idle_s": 2.0}, "RAM changed or was unknown 2 s ago", id="RAM is named first"),
    ],
)  # fmt: skip
def test_work_is_a_sign_of_life_in_other_phases(phase: Phase, changes: dict[str, object], because: str | None) -> None:
    seen = build.evidence(**changes)

    timeouts = PhaseTimeouts(load_s=0.0, eval_s=0.0, checkpoint_s=0.0, save_s=0.0)

    assert not_stalled_reason(seen, timeouts, phase=phase) == because


def test_in_its_steps_work_is_none_for_a_driver_that_hangs_may_spin() -> None:
    seen = build.evidence(io_idle_s=0.0, page_fault_idle_s=None, cpu_idle_s=0.0)

    assert not_stalled_reason(seen, phase=Phase.STEP) is None


# A GPU that is pegged while its process spins; and one of which nothing is known, whose process sleeps.
SPINS = {
    "gpu_saturated_s": 600.0, "gpu_last_busy_age_s": 0.0, "cpu_idle_s": 0.0,
    "ram_idle_s": 900.0, "io_idle_s": 800.0, "page_fault_idle_s": 700.0,
}  # fmt: skip
SLEEPS = {**SPINS, "gpu_saturated_s": None, "gpu_last_busy_age_s": 650.0, "cpu_idle_s": 640.0}


@pytest.mark.parametrize(
    ("seen", "no_progress_s"),
    [
        pytest.param(SPINS, 600.0, id="a pegged GPU, whatever its process does"),
        pytest.param({**SPINS, "gpu_last_busy_age_s": None}, 600.0, id="a pegged GPU alone"),
        pytest.param({**SPINS, "cpu_idle_s": None}, 600.0, id="a pegged GPU, and CPU time unknown"),
        pytest.param({**SPINS, "gpu_saturated_s": 0.0}, 0.0, id="a GPU that pauses"),
        pytest.param({**SPINS, "ram_idle_s": 4.0}, 4.0, id="RAM: it loads"),
        pytest.param({**SPINS, "io_idle_s": 3.0}, 3.0, id="I/O: it reads"),
        pytest.param({**SPINS, "page_fault_idle_s": 2.0}, 2.0, id="faults: it compiles"),
        pytest.param({**SPINS, "ram_idle_s": None}, None, id="RAM unknown"),
        pytest.param({**SPINS, "io_idle_s": None}, None, id="I/O unknown"),
        pytest.param({**SPINS, "page_fault_idle_s": None}, None, id="faults unknown"),
        pytest.param({**SPINS, "gpu_saturated_s": None}, 0.0, id="a GPU that was busy until it became unknown"),
        pytest.param(SLEEPS, 640.0, id="a GPU that is unknown, and a process that sleeps"),
        pytest.param({**SLEEPS, "gpu_saturated_s": 0.0}, 640.0, id="a GPU that is idle"),
        pytest.param({**SLEEPS, "gpu_last_busy_age_s": 5.0}, 5.0, id="a GPU that was busy of late"),
        pytest.param({**SLEEPS, "cpu_idle_s": 1.0}, 1.0, id="a GPU that is unknown, and a process that may compute"),
        pytest.param({**SLEEPS, "cpu_idle_s": None}, None, id="a GPU that is unknown, and CPU time too"),
        pytest.param({**SLEEPS, "gpu_last_busy_age_s": None}, None, id="no GPU"),
    ],
)  # fmt: skip
def test_unmoved_time_is_the_least_of_its_signs(seen: dict[str, float | None], no_progress_s: float | None) -> None:
    assert build.evidence(**seen).no_progress_s == no_progress_s


@pytest.mark.parametrize("sign", ["gpu_saturated_s", "ram_idle_s", "io_idle_s", "page_fault_idle_s"])
def test_it_spins_for_as_long_as_the_last_sign_of_it_lasts_and_not_where_one_is_unknown(sign: str) -> None:
    assert build.evidence(**SPINS).spinning_s == 600.0
    assert build.evidence(**{**SPINS, sign: 5.0}).spinning_s == 5.0
    assert build.evidence(**{**SPINS, sign: None}).spinning_s is None
    assert build.evidence(**SLEEPS).spinning_s is None


@given(seen=st.fixed_dictionaries({each: st.none() | st.sampled_from((0.0, 1.0, 2.0)) for each in SPINS}))
def test_who_is_unmoved_for_a_time_has_shown_each_sign_of_it_for_that_time(seen: dict[str, float | None]) -> None:
    def lasted(*signs: str) -> bool:
        return all((figure := seen[each]) is not None and figure >= 1.0 for each in signs)

    found_s = build.evidence(**seen).no_progress_s

    of_its_gpu = lasted("gpu_saturated_s") or lasted("gpu_last_busy_age_s", "cpu_idle_s")
    assert (found_s is not None and found_s >= 1.0) == (
        lasted("ram_idle_s", "io_idle_s", "page_fault_idle_s") and of_its_gpu
    )


def test_a_job_is_suspected_by_the_silence_that_it_is_allowed_in_its_phase() -> None:
    seen = build.evidence(gpu_idle_s=1.0)
    timeouts = PhaseTimeouts(eval_s=200.0)

    found = {
        age_s: not_stalled_reason(seen, timeouts, phase=Phase.EVAL, beat=build.ago(age_s)) for age_s in (199.5, 200.0)
    }

    assert found == {199.5: None, 200.0: "GPU was busy or unknown 1 s ago"}
