"""What Prometheus is given: the golden scrape, what is absent, and collectors that fail alone."""

import math
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import LogCapture

from deploy.standalone import debian_packages
from exporter import reference
from exporter.collectors import COLLECTORS, jobs
from exporter.collectors import registry as scrape
from exporter.evidence.gpu_attribution import NO_GPU
from exporter.model.container import GpuShare, VramBudget
from exporter.model.snapshot import Snapshot, SourceHealth
from exporter.model.thresholds import Thresholds
from exporter.model.timeouts import PhaseTimeouts
from exporter.model.unknown import Unknown
from exporter.model.worker import WorkerReading, WorkerReadings
from gpuwarden import clock
from gpuwarden.job import JobClass, Phase
from gpuwarden.state_file import LongStep
from tests.exporter import builders as build
from tests.exporter import golden

Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def series(text: str) -> Series:
    """Every sample by its name and labels; a series that is there twice is a defect."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def values(text: str, name: str, **labels: str) -> list[float]:
    """The values of a series whose labels include these."""
    return [
        value
        for (found, given), value in series(text).items()
        if found == name and labels.items() <= dict(given).items()
    ]


def told(text: str, name: str, **labels: str) -> list[float | None]:
    """The same; `None` is one that is NaN."""
    return [None if math.isnan(value) else value for value in values(text, name, **labels)]


FATAL: Final = Thresholds().xids_fatal


def hot(text: str) -> set[str]:
    """The names of the series about workers, jobs, containers and GPUs, but for what is set."""
    about = ("gpuwarden_worker", "gpuwarden_job", "gpuwarden_container", "gpuwarden_gpu_")
    named = {name for name, _ in series(text) if name.startswith(about) and "threshold" not in name}
    return named - {"gpuwarden_gpu_xid_fatal_info"}


# Golden


def test_the_scrape_is_the_golden_one() -> None:
    """After a change that is meant: `python -m tests.exporter.golden`, and read the difference."""
    assert golden.scraped(golden.SNAPSHOT) == golden.PATH.read_text(encoding="utf-8")


def test_the_golden_scrape_holds_every_family_with_a_sample() -> None:
    families = {family.name: family for family in text_string_to_metric_families(golden.PATH.read_text())}
    published = {family.name for collect in COLLECTORS.values() for family in collect(golden.SNAPSHOT)}

    assert published <= families.keys()
    assert [name for name, family in families.items() if not family.samples] == []


def test_every_xid_that_is_fatal_unless_set_otherwise_is_told_from_the_first_look_on() -> None:
    text = golden.PATH.read_text(encoding="utf-8")

    told = {xid: values(text, "gpuwarden_gpu_xid_errors_total", gpu="GPU-0", xid=str(xid)) for xid in FATAL}

    assert told == {xid: [0.0] for xid in FATAL}
    assert len(FATAL) > 1


@pytest.mark.needs_parts
def test_promtool_finds_nothing_to_say_about_the_golden_scrape() -> None:
    promtool = debian_packages.find("promtool")

    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input=golden.PATH.read_text(),
        env=debian_packages.env_for_parts(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.needs_parts
def test_promtool_would_complain_of_a_counter_by_a_wrong_name() -> None:
    checked = subprocess.run(
        [debian_packages.find("promtool"), "check", "metrics"],
        input="# HELP wrong_things A counter.\n# TYPE wrong_things counter\nwrong_things 1\n",
        env=debian_packages.env_for_parts(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode != 0


def test_no_sample_carries_a_timestamp() -> None:
    for line in golden.PATH.read_text().splitlines():
        assert line.startswith("#") or len(line.rpartition("}")[2].split()) <= 2


# Absent, zero, there


def test_unknown_is_absent_and_a_measured_nothing_is_zero() -> None:
    text = golden.scraped(golden.SNAPSHOT)

    assert values(text, "gpuwarden_container_gpu_idle_seconds", container="worker-0") == [0.0]
    assert values(text, "gpuwarden_container_gpu_utilization_ratio", container="worker-1", gpu="GPU-0") == [0.0]
    assert values(text, "gpuwarden_container_gpu_utilization_ratio", container="worker-1", gpu="GPU-1") == []
    assert values(text, "gpuwarden_container_gpu_busy_seconds_total", container="worker-1") == [0.0]
    assert values(text, "gpuwarden_container_memory_bytes", container="w3") == []
    assert values(text, "gpuwarden_gpu_utilization_ratio", gpu="GPU-1") == []
    assert values(text, "gpuwarden_worker_alive", worker="w3") == []
    assert values(text, "gpuwarden_worker_heartbeat_age_seconds", worker="w3") == []


NOTHING: Final = dict.fromkeys(
    ("gpu_idle_s", "ram_idle_s", "io_idle_s", "page_fault_idle_s", "cpu_idle_s", "gpu_last_busy_age_s"), None
)
"""What is told of a container of which nothing is known."""


def not_numbers(snapshot: Snapshot) -> set[str]:
    """The names of the series that are NaN."""
    return {name for (name, _), value in series(golden.scraped(snapshot)).items() if math.isnan(value)}


def test_what_rules_compare_is_nan_while_it_is_unknown_and_the_reference_says_of_what() -> None:
    unknown = build.evidence(gpu_unknown=Unknown(reason="not_measured", because=""), **NOTHING)
    gpus = build.gpus(build.gpu(0, memory_free_bytes=None))
    server = build.server_evidence(answered=None, unanswered_s=None)
    jobs = [
        build.job_file(**each) for each in ({"phase": Phase.IDLE, "budget_s": 0.0}, RANK | {"beat": None, "step": 0})
    ]
    found = set[str]().union(
        *(
            not_numbers(
                build.snapshot(
                    build.sighting(pid=None, job=each), containers=(unknown,), worker_evidence={"w0": unknown},
                    gpus=gpus, servers=(server,), returning_bytes={},
                )
            )
            for each in jobs
        )
    )  # fmt: skip

    assert found == {name for name, when in reference.absent().items() if "NaN" in when}
    share = GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=0)
    known = build.evidence(gpu_last_busy_age_s=1.0, shares=(share,))
    well = build.snapshot(
        build.sighting(job=build.job_file(step=100, step_max_s=1.0)),
        containers=(known,), worker_evidence={"w0": known}, gpus=build.gpus(build.gpu(0, memory_free_bytes=1)),
        servers=(build.server_evidence(unanswered_s=0.0),), returning_bytes={"GPU-0": 0},
    )  # fmt: skip
    assert not_numbers(well) == set()


@pytest.mark.parametrize(
    ("place", "idle", "lost"),
    [
        pytest.param({}, [500.0], [], id="each GPU is measured: none is lost"),
        pytest.param(
            {"gpu_idle_s": None, "gpu_unknown": "gpu_missing", "gpu_lost_s": 7.0}, [None], [7.0], id="one is lost"
        ),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": "source_failed"}, [None], [None], id="nobody knows"),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": NO_GPU}, [], [], id="it was given none"),
    ],
)
def test_gpus_are_absent_or_nan(place: dict[str, Any], idle: list[float | None], lost: list[float | None]) -> None:
    reason = place.pop("gpu_unknown", None)
    unknown = Unknown(reason=reason, because="") if reason else None
    text = golden.scraped(build.snapshot(containers=(build.evidence(gpu_unknown=unknown, **place),)))

    found = [told(text, f"gpuwarden_container_gpu_{name}_seconds") for name in ("idle", "lost")]

    assert found == [idle, lost]


@pytest.mark.parametrize(
    ("held_bytes", "budget_bytes", "over"),
    [(1001, 1000, [1.0]), (1000, 1000, []), (0, 1000, []), (None, 1000, []), (1001, None, [])],
    ids=["over", "at it", "within it", "unknown what it holds", "no budget"],
)
def test_a_container_over_its_budget(held_bytes: int | None, budget_bytes: int | None, over: list[float]) -> None:
    shares = tuple(
        GpuShare(gpu=gpu, utilization_ratio=None, memory_bytes=size)
        for gpu, size in (("GPU-0", held_bytes), ("GPU-1", 7))
    )
    place = build.evidence(container=build.container(vram_budget=VramBudget(budget_bytes=budget_bytes)), shares=shares)

    text = golden.scraped(build.snapshot(containers=(place,)))

    assert values(text, "gpuwarden_container_gpu_memory_over_budget_bytes", gpu="GPU-0") == over
    assert values(text, "gpuwarden_container_gpu_memory_over_budget_bytes", gpu="GPU-1") == []


def test_a_beat_has_no_age_and_no_time_until_the_job_is_armed() -> None:
    def beats(sighting: WorkerReading) -> list[list[float | None]]:
        text = golden.scraped(build.snapshot(sighting))
        return [told(text, f"gpuwarden_job_step_beat_{name}_seconds") for name in ("age", "timestamp")]

    armed = build.ago(3)

    assert beats(build.sighting(job=build.job_file(beat=None))) == [[None], []]
    assert beats(build.sighting(job=build.job_file(beat=armed))) == [[3.0], [armed.unix_s]]


def test_a_beat_of_before_the_reboot_has_a_time_and_no_age() -> None:
    beaten = build.sighting(job=build.job_file(beat=build.ago(3, boot_id="before")))

    text = golden.scraped(build.snapshot(beaten))

    assert told(text, "gpuwarden_job_step_beat_age_seconds") == [None]
    assert len(values(text, "gpuwarden_job_step_beat_timestamp_seconds")) == 1


def test_a_job_that_is_not_policed_has_no_stall_timeout_and_is_never_suspected() -> None:
    text = golden.scraped(golden.SNAPSHOT)

    assert values(text, "gpuwarden_job_budget_seconds", worker="w1") == [1800.0]
    assert told(text, "gpuwarden_job_stall_timeout_seconds", worker="w1") == [None]
    assert values(text, "gpuwarden_job_stall_suspected", worker="w1") == []


@pytest.mark.parametrize(
    ("changes", "silence_s", "window_s"),
    [
        pytest.param({"phase": Phase.EVAL, "timeout_s": 900.0}, [900.0], [900.0], id="as it asks in its phase"),
        pytest.param({"stall_timeout_s": 700.0}, [700.0], [700.0], id="as its owner allows"),
        pytest.param({"phase": Phase.IDLE}, [None], [None], id="not at all while it is idle"),
    ],
)
def test_a_job_is_policed(changes: dict[str, Any], silence_s: list[float | None], window_s: list[float | None]) -> None:
    job = build.job_file(beat=build.ago(9999), **changes)

    text = golden.scraped(build.snapshot(build.sighting(job=job)))

    assert told(text, "gpuwarden_job_stall_timeout_seconds") == silence_s
    assert told(text, "gpuwarden_job_health_window_seconds") == window_s
    assert values(text, "gpuwarden_job_stall_suspected") == [1.0 for each in silence_s if each]


def test_the_time_for_which_its_container_was_paused_makes_no_job_stuck_later() -> None:
    longest = (LongStep(took_s=305.0, began_s=9000.0), LongStep(took_s=5.0, began_s=9310.0))
    seen = build.sighting(job=build.job_file(step=100, step_max_s=305.0, longest=longest))
    places = [build.evidence(pauses=pauses) for pauses in ((), ((9001.0, 9301.0),))]

    texts = [golden.scraped(build.snapshot(seen, containers=(each,))) for each in places]

    assert [values(each, "gpuwarden_job_stuck_after_seconds") for each in texts] == [[6100.0], [600.0]]
    assert [values(each, "gpuwarden_job_stuck_idle_seconds") for each in texts] == [[6080.0], [580.0]]


GANG_SERIES = (
    "gpuwarden_gang_rank_attempt",
    "gpuwarden_gang_rank_overdue_attempt",
    "gpuwarden_gang_overdue_ranks",
    "gpuwarden_gang_rank_spinning_seconds",
    "gpuwarden_gang_rank_stuck_after_seconds",
)
RANK: dict[str, Any] = {"ranks": 4, "gang": "7/night", "rank": 2, "step": 100, "beat": build.ago(700)}
SPINS: dict[str, Any] = {
    "gpu_saturated_s": 690.0,
    "ram_idle_s": 695.0,
    "io_idle_s": 685.0,
    "page_fault_idle_s": 695.0,
    "cpu_idle_s": 0.0,
}


def of_a_rank(place: dict[str, Any], alive: bool | None = True, **job: Any) -> dict[str, list[float | None]]:
    """What is told of a rank that spins, but for these."""
    seen = build.sighting(job=build.job_file(**(RANK | job)), alive=alive)
    text = golden.scraped(build.snapshot(seen, containers=(build.evidence(**(SPINS | place)),)))
    return {name.removeprefix("gpuwarden_gang_"): told(text, name) for name in GANG_SERIES}


def test_a_rank_is_told_with_its_gang_for_how_long_it_spins_and_how_long_that_may_be() -> None:
    assert of_a_rank({}, attempt=3) == {
        "rank_attempt": [3.0],
        "rank_overdue_attempt": [3.0],
        "overdue_ranks": [4.0],
        "rank_spinning_seconds": [700.0],
        "rank_stuck_after_seconds": [600.0],
    }
    seen = build.sighting(job=build.job_file(**RANK))
    text = golden.scraped(build.snapshot(seen, containers=(build.evidence(**SPINS),)))
    job = {"job_id": "7", "attempt": "1", "incarnation": "inc-w0"}
    assert values(text, "gpuwarden_gang_rank_overdue_attempt", gang="7/night", rank="2", **job) == [1.0]
    assert values(text, "gpuwarden_gang_overdue_ranks", gang="7/night") == [4.0]
    assert values(text, "gpuwarden_gang_rank_attempt", gang="7/night", rank="2") == [1.0]
    assert told(text, "gpuwarden_job_stuck_after_seconds") == [None]


@pytest.mark.parametrize(
    ("place", "job", "spinning_s"),
    [
        pytest.param({"io_idle_s": 300.0}, {}, [320.0], id="as long as the least, and as late as that may show"),
        pytest.param({"ram_idle_s": 300.0}, {}, [320.0], id="RAM"),
        pytest.param({"page_fault_idle_s": 300.0}, {}, [320.0], id="page faults"),
        pytest.param({"gpu_saturated_s": 300.0}, {}, [320.0], id="its GPU"),
        pytest.param({}, {"beat": build.ago(100)}, [100.0], id="no longer than since its beat"),
        pytest.param({"gpu_saturated_s": 0.0}, {}, [0.0], id="not at all while its GPU is not pegged"),
        pytest.param({"gpu_saturated_s": 0.0, "gpu_last_busy_age_s": 900.0}, {}, [0.0], id="nor while that idles"),
        pytest.param(
            {"gpu_saturated_s": None, "gpu_last_busy_age_s": 900.0}, {}, [None], id="unknown where its GPU is"
        ),
        pytest.param({"ram_idle_s": None}, {}, [None], id="or its RAM"),
        pytest.param({"io_idle_s": None}, {}, [None], id="or its I/O"),
        pytest.param({"page_fault_idle_s": None}, {}, [None], id="or its page faults"),
        pytest.param({}, {"beat": None}, [None], id="or it has never beaten"),
    ],
)
def test_a_rank_has_been_spinning(place: dict[str, Any], job: dict[str, Any], spinning_s: list[float | None]) -> None:
    found = of_a_rank(place, **job)

    assert found["rank_spinning_seconds"] == spinning_s
    assert found["rank_attempt"] == [1.0], "it is known all the same"
    assert (found["rank_overdue_attempt"], found["overdue_ranks"]) == ([], [])


@pytest.mark.parametrize(
    ("floor_s", "spinning_s"), [(600.0, 120.0), (30.0, 115.0)], ids=["by 20 s", "by half of what it is held to"]
)
def test_how_late_it_may_show_that_a_rank_spins(floor_s: float, spinning_s: float) -> None:
    """As late as of a job that is alone, which has to be still for half of its limit at least."""
    seen = build.sighting(job=build.job_file(**RANK | {"stall_timeout_s": 5.0, "step_max_s": 0.1}))
    place = build.evidence(**SPINS | {"gpu_saturated_s": 100.0})
    timeouts = PhaseTimeouts(stuck_min_s=floor_s)

    text = golden.scraped(build.snapshot(seen, containers=(place,), thresholds=Thresholds(timeouts=timeouts)))

    assert values(text, "gpuwarden_gang_rank_stuck_after_seconds") == [floor_s]
    assert values(text, "gpuwarden_gang_rank_spinning_seconds") == [spinning_s]


def test_of_the_rank_of_a_dead_worker_nothing_is_told_for_another_may_run_it_by_now() -> None:
    told = of_a_rank({}, alive=False)

    assert set(map(tuple, told.values())) == {()}
    assert of_a_rank({}, alive=None)["rank_attempt"] == [1.0], "one of which it is not known lives on"


@pytest.mark.parametrize("job", [{"ranks": 1, "gang": None}, {"gang": None}], ids=["alone", "an older worker's"])
def test_of_a_job_that_is_of_no_gang_nothing_is_told_as_of_a_rank(job: dict[str, Any]) -> None:
    assert set(map(tuple, of_a_rank({}, **job).values())) == {()}


def test_a_silent_job_with_a_sign_of_life_is_suspected_and_one_that_is_wedged_is_not() -> None:
    silent = build.sighting(job=build.job_file(beat=build.ago(130)))

    def suspected(idle_s: float) -> list[float]:
        text = golden.scraped(build.snapshot(silent, containers=(build.evidence(gpu_idle_s=idle_s),)))
        return values(text, "gpuwarden_job_stall_suspected")

    assert (suspected(5.0), suspected(500.0)) == ([1.0], [0.0])


QUIET_JOB = {"beat": build.ago(600), "phase_started": build.ago(700)}


def quiet_of(place: dict[str, Any], its: dict[str, Any] | None = None, **worker: Any) -> list[list[float | None]]:
    """For how long a job of w0 was quiet, and with a GPU lost; a list is empty where that is not told."""
    seen = build.sighting(**{"job": build.job_file(**QUIET_JOB | (its or {})), **worker})
    text = golden.scraped(build.snapshot(seen, containers=(build.evidence(**place),)))
    return [
        told(text, f"gpuwarden_job_inactive{what}_seconds", worker="w0", container="worker-0")
        for what in ("", "_gpu_lost")
    ]


UNREAD = Unknown(reason="not_listed", because="GPU is lost")


@pytest.mark.parametrize(
    ("place", "found"),
    [
        pytest.param({"gpu_idle_s": 400.0}, [[400.0], []], id="its GPU is measured, so that none is lost"),
        pytest.param({"gpu_idle_s": 0.0}, [[0.0], []], id="a measured nothing is 0"),
        pytest.param({"gpu_idle_s": 900.0, "ram_idle_s": 900.0}, [[600.0], []], id="no longer than since its beat"),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 400.0}, [[None], [400.0]],
                     id="its GPU is lost"),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": UNREAD}, [[None], [None]], id="it is unknown"),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 400.0, "ram_idle_s": None},
                     [[None], [None]], id="its GPU is lost and its RAM unknown"),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": Unknown(reason=NO_GPU, because="")}, [[None], [None]],
                     id="it has no GPU by now, though it may have lost one"),
    ],
)  # fmt: skip
def test_a_jobs_quiet_time_is_published_or_nan(place: dict[str, Any], found: list[list[float | None]]) -> None:
    assert quiet_of({"ram_idle_s": 500.0, **place}) == found


def test_of_a_job_that_needs_no_gpu_it_is_not_told_that_one_is_lost() -> None:
    lost = {"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 400.0}

    assert quiet_of(lost, {"job_class": JobClass.CPU}) == [[None], []]


def test_no_quiet_from_before_stands_for_a_worker_that_is_dead_or_waits_for_a_job() -> None:
    lost = {"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 400.0}

    assert [quiet_of({}, alive=alive) for alive in (True, None, False)] == [[[500.0], []], [[500.0], []], [[None], []]]
    assert quiet_of(lost, alive=False) == [[None], [None]]
    assert quiet_of({}, job=None) == [[None], []]


def test_each_worker_of_a_container_is_quiet_by_its_own_beat_and_phase() -> None:
    one = build.sighting(job=build.job_file(**QUIET_JOB))
    two = build.sighting(
        worker=build.worker_file(worker="w1"), job=build.job_file(**QUIET_JOB | {"worker": "w1", "beat": build.ago(5)})
    )
    text = golden.scraped(build.snapshot(one, two, containers=(build.evidence(gpu_idle_s=400.0),)))

    assert values(text, "gpuwarden_job_inactive_seconds", worker="w0") == [400.0]
    assert values(text, "gpuwarden_job_inactive_seconds", worker="w1") == [5.0]


def quiet_apart_of(own: dict[str, Any] | None, its: dict[str, Any] | None = None, **worker: Any) -> list[float | None]:
    """For how long a job of w0 was quiet itself, in a container that is not; empty where that is not told.

    `own` is what its worker alone has done; `None` where no other shares its container.
    """
    seen = build.sighting(**{"job": build.job_file(**QUIET_JOB | (its or {})), **worker})
    busy = build.evidence(gpu_idle_s=0.0, ram_idle_s=0.0, io_idle_s=0.0, page_fault_idle_s=0.0, cpu_idle_s=0.0)
    apart = {} if own is None else {"w0": build.evidence(**OWN_QUIET | own)}
    text = golden.scraped(build.snapshot(seen, containers=(busy,), worker_evidence=apart))
    return told(text, "gpuwarden_job_inactive_in_shared_container_seconds", worker="w0", container="worker-0")


OWN_QUIET = {
    "gpu_idle_s": 400.0,
    "ram_idle_s": 510.0,
    "io_idle_s": 520.0,
    "page_fault_idle_s": 530.0,
    "cpu_idle_s": 540.0,
}


@pytest.mark.parametrize(
    ("own", "its", "found"),
    [
        pytest.param({}, {}, [400.0], id="whatever its container does"),
        pytest.param({"gpu_idle_s": 0.0}, {}, [0.0], id="a measured nothing is 0"),
        pytest.param({"io_idle_s": 5.0}, {}, [5.0], id="it reads or writes"),
        pytest.param({"cpu_idle_s": 5.0}, {}, [400.0], id="it computes in its steps"),
        pytest.param({"cpu_idle_s": 5.0}, {"phase": Phase.EVAL}, [5.0], id="it computes in an evaluation"),
        pytest.param({}, {"beat": build.ago(7)}, [7.0], id="it beats"),
        pytest.param({"io_idle_s": None}, {}, [None], id="its I/O is unknown"),
        pytest.param(
            {"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 400.0}, {}, [None],
            id="a lost GPU is none that it has left idle",
        ),
        pytest.param(None, {}, [], id="it shares its container with nobody"),
    ],
)  # fmt: skip
def test_a_workers_own_quiet_time(own: dict[str, Any] | None, its: dict[str, Any], found: list[float | None]) -> None:
    assert quiet_apart_of(own, its) == found


@pytest.mark.parametrize(
    ("its", "own", "worker", "quiet"),
    [
        pytest.param({"beat": build.ago(7)}, {}, {}, 7.0, id="steps"),
        pytest.param({}, {"io_idle_s": 9.0}, {}, 9.0, id="reads or writes"),
        pytest.param({}, {"io_idle_s": None}, {}, None, id="does what nobody knows"),
        pytest.param({}, {}, {}, 300.0, id="has been quiet for longer"),
        pytest.param({}, {"io_idle_s": 9.0}, {"job": None}, 300.0, id="waits for a job"),
        pytest.param({"beat": build.ago(7)}, {}, {"alive": False}, 300.0, id="is dead"),
    ],
)
@pytest.mark.parametrize("lost", [False, True], ids=["its GPUs idle", "one of them lost"])
def test_nobody_is_quiet_while_another_worker_of_its_container(
    its: dict[str, Any], own: dict[str, Any], worker: dict[str, Any], quiet: float | None, lost: bool
) -> None:
    """What acts on quiet frees the container, and would end the other's work."""
    one = build.sighting(job=build.job_file(**QUIET_JOB))
    other = build.sighting(
        **{
            "worker": build.worker_file(worker="w1"),
            "job": build.job_file(**QUIET_JOB | {"worker": "w1"} | its),
            **worker,
        }
    )
    gpu = {"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 300.0} if lost else {"gpu_idle_s": 300.0}
    apart = {"w0": build.evidence(**OWN_QUIET), "w1": build.evidence(**OWN_QUIET | own)}
    text = golden.scraped(
        build.snapshot(one, other, containers=(build.evidence(ram_idle_s=510.0, **gpu),), worker_evidence=apart)
    )

    series_of = f"gpuwarden_job_inactive{'_gpu_lost' if lost else ''}_seconds"
    assert told(text, series_of, worker="w0", container="worker-0") == [quiet]


def test_no_quiet_of_its_own_from_before_stands_for_one_of_several_that_is_dead_or_waits_for_a_job() -> None:
    assert [quiet_apart_of({}, alive=alive) for alive in (True, None, False)] == [[400.0], [400.0], [None]]
    assert (quiet_apart_of({}, job=None), quiet_apart_of(None, job=None)) == ([None], [])


UNBEATEN = {"beat": None, "started": build.ago(900), "phase_started": build.ago(900)}
LOST = {"gpu_idle_s": None, "gpu_unknown": UNREAD}


def overdue(
    *,
    its: dict[str, Any] | None = None,
    worker: dict[str, Any] | None = None,
    place: dict[str, Any] | None = None,
    **snapshot: Any,
) -> list[float]:
    """The job of w0, number 7, where it is told as one of which a rule may say something."""
    seen = build.sighting(job=build.job_file(**its or {}), worker=build.worker_file(**worker or {}))
    text = golden.scraped(build.snapshot(seen, containers=(build.evidence(**place or {}),), **snapshot))
    named = {"worker": "w0", "container": "worker-0", "attempt": "1", "incarnation": "inc-w0"}
    return values(text, "gpuwarden_job_overdue_id", **named)


@pytest.mark.parametrize(
    ("at", "before"),
    [
        pytest.param({"its": {"budget_s": 300.0}}, {"its": {"budget_s": 300.5}}, id="over its budget"),
        pytest.param({"its": {"beat": build.ago(120)}}, {"its": {"beat": build.ago(119.5)}}, id="silent"),
        pytest.param(
            {"its": UNBEATEN, "place": {"gpu_idle_s": 300.0}}, {"its": UNBEATEN, "place": {"gpu_idle_s": 299.5}},
            id="quiet, having never beaten",
        ),
        pytest.param(
            {"its": UNBEATEN, "place": LOST | {"gpu_lost_s": 300.0}},
            {"its": UNBEATEN, "place": LOST | {"gpu_lost_s": 299.5}},
            id="quiet with a GPU lost",
        ),
        pytest.param(
            {"worker": {"heartbeat": build.ago(30)}}, {"worker": {"heartbeat": build.ago(29.5)}},
            id="without a heartbeat",
        ),
        pytest.param({"dead_s": {"w0": 30.0}}, {"dead_s": {"w0": 29.5}}, id="without its process"),
    ],
)  # fmt: skip
def test_a_job_is_overdue_at_its_bound(at: dict[str, Any], before: dict[str, Any]) -> None:
    assert (overdue(**at), overdue(**before)) == ([7.0], [])


def test_what_judges_nobody_makes_nobody_overdue() -> None:
    unpoliced = {"budget_s": None, "stall_timeout_s": 0.0, "beat": build.ago(7000), "job_class": JobClass.INGEST}
    other_boot = build.ago(7000, boot_id="another")

    assert overdue() == []
    assert overdue(its=unpoliced) == []
    assert overdue(its={"started": other_boot, "beat": other_boot}, worker={"heartbeat": other_boot}) == []


def test_a_dead_worker_is_published_with_its_job_and_where_it_was_and_without_the_limits_of_the_living() -> None:
    text = golden.scraped(golden.SNAPSHOT)

    assert values(text, "gpuwarden_worker_alive", worker="w2", container="worker-2") == [0.0]
    assert values(text, "gpuwarden_worker_dead_seconds", worker="w2", container="worker-2") == [12.5]
    assert values(text, "gpuwarden_job_id", worker="w2", container="worker-2") == [9.0]
    for limit in ("budget", "stall_timeout", "health_window", "health_grace"):
        assert not any(told(text, f"gpuwarden_job_{limit}_seconds", worker="w2"))
        assert any(told(text, f"gpuwarden_job_{limit}_seconds", worker="w0")) is True
    assert values(text, "gpuwarden_container_info", container="worker-2") == []


def test_a_dead_worker_whose_container_is_unknown_is_published_without_one() -> None:
    dead = build.sighting(alive=False, pid=None, container_id=None)

    text = golden.scraped(build.snapshot(dead, dead_s={"w0": 3.0}))

    assert values(text, "gpuwarden_worker_dead_seconds", worker="w0", container="") == [3.0]


@pytest.mark.parametrize(("job_class", "watched"), [(each, each.value.startswith("gpu")) for each in JobClass])
def test_gpu_health_watches_jobs_that_use_a_gpu(job_class: JobClass, watched: bool) -> None:
    text = golden.scraped(build.snapshot(build.sighting(job=build.job_file(job_class=job_class))))

    assert told(text, "gpuwarden_job_health_window_seconds") == [300.0 if watched else None]
    assert values(text, "gpuwarden_job_health_grace_seconds") == [60.0] * watched


def test_a_budget_of_nothing_is_none() -> None:
    text = golden.scraped(build.snapshot(build.sighting(job=build.job_file(budget_s=0.0))))

    assert told(text, "gpuwarden_job_budget_seconds") == [None]


def test_work_is_still_for_as_long_as_the_busiest_of_its_signs_and_unknown_with_any() -> None:
    def published(**changes: float | None) -> list[float | None]:
        text = golden.scraped(build.snapshot(containers=(build.evidence(**changes),)))
        return told(text, "gpuwarden_container_work_idle_seconds")

    assert published() == [200.0]
    assert published(io_idle_s=1.0) == [1.0]
    assert published(io_idle_s=None) == published(page_fault_idle_s=None) == published(cpu_idle_s=None) == [None]


def test_for_how_long_nothing_moved_is_told_and_nan_while_it_is_unknown() -> None:
    def published(**changes: float | None) -> list[float | None]:
        text = golden.scraped(build.snapshot(containers=(build.evidence(**changes),)))
        return told(text, "gpuwarden_container_no_progress_seconds")

    assert published(gpu_saturated_s=250.0) == [250.0]
    assert published() == [None]


def test_the_series_of_an_ended_job_and_container_vanish_at_once() -> None:
    running = build.snapshot(build.sighting(), unknown={("worker-0", "gpu", "not_listed"): 1})
    idle = build.snapshot(build.sighting(job=None))
    empty = build.snapshot(containers=())

    assert {"gpuwarden_job_id", "gpuwarden_job_info", "gpuwarden_container_info"} <= hot(golden.scraped(running))
    of_jobs = {
        name: value
        for (name, _), value in series(golden.scraped(idle)).items()
        if "gpuwarden_job_" in name and "_threshold_" not in name
    }
    assert all(math.isnan(value) for value in of_jobs.values()), "for which no older one is to be taken"
    assert {name.removeprefix("gpuwarden_job_") for name in of_jobs} == {
        "budget_seconds", "stall_timeout_seconds", "stuck_after_seconds", "stuck_idle_seconds",
        "health_window_seconds", "inactive_seconds",
    }  # fmt: skip
    assert hot(golden.scraped(idle)) >= {"gpuwarden_worker_info", "gpuwarden_container_info"}
    assert {name for name in hot(golden.scraped(empty)) if not name.startswith("gpuwarden_gpu_")} == {
        "gpuwarden_workers_duplicate"
    }


def test_what_changes_with_a_life_stands_on_info_series_and_with_ids_and_a_jobs_id_on_overdue_gangs_alone() -> None:
    churning = {"job_id", "attempt", "incarnation", "container_id", "container_incarnation"}
    ids = {"gpuwarden_job_id", "gpuwarden_job_overdue_id", "gpuwarden_gang_rank_overdue_attempt"}

    for name, labels in series(golden.PATH.read_text()):
        assert name.endswith("_info") or name in ids or not churning & dict(labels).keys()
        assert name == "gpuwarden_gang_rank_overdue_attempt" or "job_id" not in dict(labels)


def test_gpu_memory_adds_up_from_its_parts() -> None:
    text = golden.scraped(golden.SNAPSHOT)

    attributed = sum(values(text, "gpuwarden_container_gpu_memory_bytes", gpu="GPU-0"))
    rest = [
        *values(text, "gpuwarden_gpu_uncontained_memory_bytes", gpu="GPU-0"),
        *values(text, "gpuwarden_gpu_unlisted_memory_bytes", gpu="GPU-0"),
    ]
    assert len(rest) == 2
    assert [attributed + sum(rest)] == values(text, "gpuwarden_gpu_memory_used_bytes", gpu="GPU-0")


def test_what_is_in_no_container_is_absent_where_it_is_not_known() -> None:
    names = ("gpuwarden_gpu_uncontained_memory_bytes", "gpuwarden_gpu_uncontained_utilization_ratio")

    assert hot(golden.scraped(golden.SNAPSHOT)) >= set(names)
    assert hot(golden.scraped(replace(golden.SNAPSHOT, unplaced=()))).isdisjoint(names)


# Failing, stale


@pytest.fixture
def scrape_logged(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    """What a scrape logs."""
    capture = LogCapture()
    monkeypatch.setattr(scrape, "log", structlog.wrap_logger(None, processors=[capture]))
    return capture


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_failing_collector_fails_alone(name: str, monkeypatch: pytest.MonkeyPatch, scrape_logged: LogCapture) -> None:
    def fail(_: Snapshot) -> Iterable[Metric]:
        raise RuntimeError("a defect")
        yield

    whole = golden.scraped(golden.SNAPSHOT)
    own = {
        f"{family.name}{'_total' if family.type == 'counter' else ''}" for family in COLLECTORS[name](golden.SNAPSHOT)
    }
    monkeypatch.setattr(scrape, "COLLECTORS", {**COLLECTORS, name: fail})

    text = golden.scraped(golden.SNAPSHOT)

    assert hot(whole) - hot(text) == own & hot(whole)
    assert values(text, "gpuwarden_collector_success", collector=name) == [0.0]
    assert sum(values(text, "gpuwarden_collector_success")) == sum(values(whole, "gpuwarden_collector_success")) - 1
    assert [(each["event"], each["collector"]) for each in scrape_logged.entries] == [("collector failed", name)]


@pytest.mark.usefixtures("scrape_logged")
def test_a_collector_that_fails_half_way_publishes_no_half() -> None:
    sightings = (build.sighting(), build.sighting(worker=None))
    broken = replace(golden.SNAPSHOT, workers=WorkerReadings(workers=sightings))

    text = golden.scraped(broken)

    assert {name for name in hot(text) if name.startswith(("gpuwarden_worker_", "gpuwarden_job_"))} == set()
    assert values(text, "gpuwarden_collector_success", collector="workers") == [0.0]
    assert values(text, "gpuwarden_collector_success", collector="containers") == [1.0]


def test_a_failed_source_is_published_by_name() -> None:
    sources = (SourceHealth(source="docker", success=False, duration_s=5.0),)

    text = golden.scraped(build.snapshot(sources=sources))

    assert values(text, "gpuwarden_collector_success", collector="source_docker") == [0.0]
    assert values(text, "gpuwarden_collector_duration_seconds", collector="source_docker") == [5.0]


def test_how_long_the_newest_look_took_stands_beside_how_long_each_source_did() -> None:
    text = golden.scraped(build.snapshot(took_s=0.25))

    assert values(text, "gpuwarden_collector_duration_seconds", collector="sampler") == [0.25]


def last_success(text: str, collector: str) -> list[float]:
    return values(text, "gpuwarden_collector_last_success_timestamp_seconds", collector=collector)


@pytest.mark.usefixtures("scrape_logged")
def test_when_a_collector_last_did_its_work_outlives_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp, broken = clock.stamp(), False

    def families(_: Snapshot) -> Iterable[Metric]:
        if broken:
            raise RuntimeError("a defect")
        return ()

    monkeypatch.setattr(scrape, "COLLECTORS", {"fragile": families})
    registry = CollectorRegistry()
    registry.register(
        scrape.SnapshotCollector(
            lambda: build.snapshot(taken=stamp), host="box-1", thresholds=Thresholds(), now=lambda: stamp
        )
    )

    well_at, well = stamp.unix_s, generate_latest(registry).decode()
    stamp, broken = replace(stamp, unix_s=stamp.unix_s + 60), True
    failed = generate_latest(registry).decode()

    assert last_success(well, "fragile") == last_success(failed, "fragile") == [pytest.approx(well_at)]
    assert last_success(failed, "sampler") == [pytest.approx(well_at + 60)]


@pytest.mark.usefixtures("scrape_logged")
def test_a_collector_that_never_did_its_work_has_no_time_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "COLLECTORS", {"fragile": lambda _: 1 / 0})

    text = golden.scraped(golden.SNAPSHOT)

    assert (last_success(text, "fragile"), values(text, "gpuwarden_collector_success", collector="fragile")) == (
        [],
        [0.0],
    )


def test_without_workers_there_are_no_worker_and_job_series() -> None:
    text = golden.scraped(build.snapshot(workers=None))

    assert {name for name in hot(text) if not name.startswith(("gpuwarden_gpu_", "gpuwarden_container_"))} == set()
    assert list(jobs.families(build.snapshot(workers=None))) == []


def test_without_gpu_readings_there_are_no_gpu_series() -> None:
    text = golden.scraped(build.snapshot(gpus=None))

    assert {name for name in hot(text) if name.startswith("gpuwarden_gpu_")} == set()


@pytest.mark.parametrize(
    ("snapshot", "age_s", "published"),
    [
        pytest.param(golden.SNAPSHOT, 5.0, True, id="at the bound it is fresh"),
        pytest.param(golden.SNAPSHOT, 5.01, False, id="past it it is stale"),
        pytest.param(None, 0.0, False, id="before the first look"),
    ],
)
def test_only_a_fresh_snapshot_is_published(snapshot: Snapshot | None, age_s: float, published: bool) -> None:
    text = golden.scraped(snapshot, now=build.ago(-age_s))

    assert bool(hot(text)) == published
    assert values(text, "gpuwarden_collector_success", collector="sampler") == [float(published)]
    assert values(text, "gpuwarden_sample_age_seconds") == ([] if snapshot is None else [pytest.approx(age_s)])
    assert values(text, "gpuwarden_exporter_info", nodename="box-1") == [1.0]


def test_registering_takes_no_look() -> None:
    assert (
        list(scrape.SnapshotCollector(lambda: pytest.fail("asked"), host="", thresholds=Thresholds()).describe()) == []
    )
