"""The published series: the golden scrape, absent values, and failing collectors."""

import math
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, get_type_hints

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
from exporter.model.container import ContainerEvidence, GpuShare, RamUse, VramBudget
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
    """Every sample by its name and labels. A duplicate fails."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} is duplicated"
            found[key] = sample.value
    return found


def values(text: str, name: str, **labels: str) -> list[float]:
    """The values of a series with these labels."""
    return [
        value
        for (found, given), value in series(text).items()
        if found == name and labels.items() <= dict(given).items()
    ]


def values_or_none(text: str, name: str, **labels: str) -> list[float | None]:
    """The same values; NaN becomes `None`."""
    return [None if math.isnan(value) else value for value in values(text, name, **labels)]


FATAL: Final = Thresholds().xids_fatal


def hot(text: str) -> set[str]:
    """The names of the series about workers, jobs, containers and GPUs, without settings."""
    about = ("gpuwarden_worker", "gpuwarden_job", "gpuwarden_container", "gpuwarden_gpu_")
    named = {name for name, _ in series(text) if name.startswith(about) and "threshold" not in name}
    return named - {"gpuwarden_gpu_xid_fatal_info"}


# Golden


def test_scrape_equals_the_golden_one() -> None:
    """After an intended change run `python -m tests.exporter.golden` and read the difference."""
    assert golden.scraped(golden.SNAPSHOT) == golden.PATH.read_text(encoding="utf-8")


def test_golden_scrape_has_a_sample_of_every_family() -> None:
    families = {family.name: family for family in text_string_to_metric_families(golden.PATH.read_text())}
    published = {family.name for collect in COLLECTORS.values() for family in collect(golden.SNAPSHOT)}

    assert published <= families.keys()
    assert [name for name, family in families.items() if not family.samples] == []


def test_every_fatal_xid_is_published_from_the_first_sample() -> None:
    text = golden.PATH.read_text(encoding="utf-8")

    published = {xid: values(text, "gpuwarden_gpu_xid_errors_total", gpu="GPU-0", xid=str(xid)) for xid in FATAL}

    assert published == {xid: [0.0] for xid in FATAL}
    assert len(FATAL) > 1


@pytest.mark.needs_parts
def test_promtool_accepts_the_golden_scrape() -> None:
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
def test_promtool_rejects_a_wrong_counter_name() -> None:
    checked = subprocess.run(
        [debian_packages.find("promtool"), "check", "metrics"],
        input="# HELP wrong_things A counter.\n# TYPE wrong_things counter\nwrong_things 1\n",
        env=debian_packages.env_for_parts(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode != 0


def test_no_sample_has_a_timestamp() -> None:
    for line in golden.PATH.read_text().splitlines():
        assert line.startswith("#") or len(line.rpartition("}")[2].split()) <= 2


# Absent, zero, present


def test_unknown_is_absent_and_measured_zero_is_zero() -> None:
    text = golden.scraped(golden.SNAPSHOT)

    assert values(text, "gpuwarden_container_gpu_idle_seconds", container="worker-0") == [0.0]
    assert values(text, "gpuwarden_container_gpu_utilization_ratio", container="worker-1", gpu="GPU-0") == [0.0]
    assert values(text, "gpuwarden_container_gpu_utilization_ratio", container="worker-1", gpu="GPU-1") == []
    assert values(text, "gpuwarden_container_gpu_busy_seconds_total", container="worker-1") == [0.0]
    assert values(text, "gpuwarden_container_memory_bytes", container="w3") == []
    assert values(text, "gpuwarden_gpu_utilization_ratio", gpu="GPU-1") == []
    assert values(text, "gpuwarden_worker_alive", worker="w3") == []
    assert values(text, "gpuwarden_worker_heartbeat_age_seconds", worker="w3") == []


DURATIONS: Final = [name for name, kind in get_type_hints(ContainerEvidence).items() if kind == float | None]
"""Each value of a container that may be unknown. A new one is tested at once."""


def not_numbers(snapshot: Snapshot) -> set[str]:
    """The names of the series with NaN."""
    return {name for (name, _), value in series(golden.scraped(snapshot)).items() if math.isnan(value)}


def test_unknown_inputs_of_rules_are_nan_as_the_reference_says() -> None:
    unknown = build.evidence(
        gpu_unknown=Unknown(reason="not_measured", message=""), ram=RamUse(usage_bytes=None),
        **dict.fromkeys(DURATIONS, None),
    )  # fmt: skip
    gpus = build.gpus(build.gpu(0, memory_free_bytes=None))
    server = build.server_evidence(answered=None, probe_failing_s=None)
    jobs = [
        build.job_file(**each)
        for each in ({"phase": Phase.IDLE, "budget_s": 0.0}, RANK | {"step_beat": None, "step": 0})
    ]
    found = set[str]().union(
        *(
            not_numbers(
                build.snapshot(
                    build.sighting(pid=None, job=each), containers=(unknown,), worker_evidence={"w0": unknown},
                    gpus=gpus, servers=(server,), reclaiming_bytes={},
                    on_demand=(build.on_demand(
                        room_s=None, short_s=None, cards=[build.on_demand_gpu(free_bytes=None)],
                    ),),
                )
            )
            for each in jobs
        )
    )  # fmt: skip

    assert found == {name for name, when in reference.absent().items() if "NaN" in when}
    share = GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=0)
    known = build.evidence(shares=(share,), ram=golden.with_all_figures(build.RAM), **dict.fromkeys(DURATIONS, 1.0))
    well = build.snapshot(
        build.sighting(job=build.job_file(step=100, step_max_s=1.0)),
        containers=(known,), worker_evidence={"w0": known}, gpus=build.gpus(build.gpu(0, memory_free_bytes=1)),
        servers=(build.server_evidence(probe_failing_s=0.0),), reclaiming_bytes={"GPU-0": 0},
        on_demand=(build.on_demand(on=True, idle_s=0.0),),
    )  # fmt: skip
    assert not_numbers(well) == set()


@pytest.mark.parametrize(
    ("place", "idle", "lost"),
    [
        pytest.param({}, [500.0], [], id="each GPU measured"),
        pytest.param(
            {"gpu_idle_s": None, "gpu_unknown": "gpu_missing", "gpu_lost_s": 7.0}, [None], [7.0], id="one GPU lost"
        ),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": "source_failed"}, [None], [None], id="source failed"),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": NO_GPU}, [], [], id="no GPU assigned"),
    ],
)
def test_gpu_durations_are_absent_or_nan(
    place: dict[str, Any], idle: list[float | None], lost: list[float | None]
) -> None:
    reason = place.pop("gpu_unknown", None)
    unknown = Unknown(reason=reason, message="") if reason else None
    text = golden.scraped(build.snapshot(containers=(build.evidence(gpu_unknown=unknown, **place),)))

    found = [values_or_none(text, f"gpuwarden_container_gpu_{name}_seconds") for name in ("idle", "lost")]

    assert found == [idle, lost]


@pytest.mark.parametrize(
    ("held_bytes", "budget_bytes", "over"),
    [(1001, 1000, [1.0]), (1000, 1000, []), (0, 1000, []), (None, 1000, []), (1001, None, [])],
    ids=["over", "equal", "within", "memory unknown", "no budget"],
)
def test_memory_over_budget(held_bytes: int | None, budget_bytes: int | None, over: list[float]) -> None:
    shares = tuple(
        GpuShare(gpu=gpu, utilization_ratio=None, memory_bytes=size)
        for gpu, size in (("GPU-0", held_bytes), ("GPU-1", 7))
    )
    place = build.evidence(container=build.container(vram_budget=VramBudget(budget_bytes=budget_bytes)), shares=shares)

    text = golden.scraped(build.snapshot(containers=(place,)))

    assert values(text, "gpuwarden_container_gpu_memory_over_budget_bytes", gpu="GPU-0") == over
    assert values(text, "gpuwarden_container_gpu_memory_over_budget_bytes", gpu="GPU-1") == []


def test_step_beat_has_no_age_and_no_time_before_the_first() -> None:
    def beats(sighting: WorkerReading) -> list[list[float | None]]:
        text = golden.scraped(build.snapshot(sighting))
        return [values_or_none(text, f"gpuwarden_job_step_beat_{name}_seconds") for name in ("age", "timestamp")]

    armed = build.ago(3)

    assert beats(build.sighting(job=build.job_file(step_beat=None))) == [[None], []]
    assert beats(build.sighting(job=build.job_file(step_beat=armed))) == [[3.0], [armed.unix_s]]


def test_step_beat_from_before_a_reboot_has_a_time_and_no_age() -> None:
    beaten = build.sighting(job=build.job_file(step_beat=build.ago(3, boot_id="before")))

    text = golden.scraped(build.snapshot(beaten))

    assert values_or_none(text, "gpuwarden_job_step_beat_age_seconds") == [None]
    assert len(values(text, "gpuwarden_job_step_beat_timestamp_seconds")) == 1


def test_job_without_stall_checks_has_no_timeout_and_no_suspicion() -> None:
    text = golden.scraped(golden.SNAPSHOT)

    assert values(text, "gpuwarden_job_budget_seconds", worker="w1") == [1800.0]
    assert values_or_none(text, "gpuwarden_job_stall_timeout_seconds", worker="w1") == [None]
    assert values(text, "gpuwarden_job_stall_suspected", worker="w1") == []


@pytest.mark.parametrize(
    ("changes", "silence_s", "window_s"),
    [
        pytest.param({"phase": Phase.EVAL, "timeout_s": 900.0}, [900.0], [900.0], id="timeout of the phase"),
        pytest.param({"stall_timeout_s": 700.0}, [700.0], [700.0], id="the job's stall timeout"),
        pytest.param({"phase": Phase.IDLE}, [None], [None], id="idle: not checked"),
    ],
)
def test_job_limits_are_published(
    changes: dict[str, Any], silence_s: list[float | None], window_s: list[float | None]
) -> None:
    job = build.job_file(step_beat=build.ago(9999), **changes)

    text = golden.scraped(build.snapshot(build.sighting(job=job)))

    assert values_or_none(text, "gpuwarden_job_stall_timeout_seconds") == silence_s
    assert values_or_none(text, "gpuwarden_job_health_window_seconds") == window_s
    assert values(text, "gpuwarden_job_stall_suspected") == [1.0 for each in silence_s if each]


def test_pauses_do_not_count_in_stuck_limits() -> None:
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
RANK: dict[str, Any] = {"ranks": 4, "gang": "7/night", "rank": 2, "step": 100, "step_beat": build.ago(700)}
SPINS: dict[str, Any] = {
    "gpu_saturated_s": 690.0,
    "ram_idle_s": 695.0,
    "io_idle_s": 685.0,
    "page_fault_idle_s": 695.0,
    "cpu_idle_s": 0.0,
}


def rank_series(place: dict[str, Any], alive: bool | None = True, **job: Any) -> dict[str, list[float | None]]:
    """The series of a spinning rank."""
    seen = build.sighting(job=build.job_file(**(RANK | job)), alive=alive)
    text = golden.scraped(build.snapshot(seen, containers=(build.evidence(**(SPINS | place)),)))
    return {name.removeprefix("gpuwarden_gang_"): values_or_none(text, name) for name in GANG_SERIES}


def test_rank_publishes_its_spinning_time_and_limit() -> None:
    assert rank_series({}, attempt=3) == {
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
    assert values_or_none(text, "gpuwarden_job_stuck_after_seconds") == [None]


@pytest.mark.parametrize(
    ("place", "job", "spinning_s"),
    [
        pytest.param({"io_idle_s": 300.0}, {}, [320.0], id="the least of its parts plus the lag"),
        pytest.param({"ram_idle_s": 300.0}, {}, [320.0], id="RAM"),
        pytest.param({"page_fault_idle_s": 300.0}, {}, [320.0], id="page faults"),
        pytest.param({"gpu_saturated_s": 300.0}, {}, [320.0], id="GPU"),
        pytest.param({}, {"step_beat": build.ago(100)}, [100.0], id="at most the time since its step beat"),
        pytest.param({"gpu_saturated_s": 0.0}, {}, [0.0], id="GPU not saturated"),
        pytest.param({"gpu_saturated_s": 0.0, "gpu_last_busy_age_s": 900.0}, {}, [0.0], id="GPU idle"),
        pytest.param({"gpu_saturated_s": None, "gpu_last_busy_age_s": 900.0}, {}, [None], id="GPU unknown"),
        pytest.param({"ram_idle_s": None}, {}, [None], id="RAM unknown"),
        pytest.param({"io_idle_s": None}, {}, [None], id="I/O unknown"),
        pytest.param({"page_fault_idle_s": None}, {}, [None], id="page faults unknown"),
        pytest.param({}, {"step_beat": None}, [None], id="no step beat"),
    ],
)
def test_spinning_time_of_a_rank(place: dict[str, Any], job: dict[str, Any], spinning_s: list[float | None]) -> None:
    found = rank_series(place, **job)

    assert found["rank_spinning_seconds"] == spinning_s
    assert found["rank_attempt"] == [1.0], "the rank is known"
    assert (found["rank_overdue_attempt"], found["overdue_ranks"]) == ([], [])


@pytest.mark.parametrize(
    ("floor_s", "spinning_s"), [(600.0, 120.0), (30.0, 115.0)], ids=["by 20 s", "by half of its limit"]
)
def test_spinning_time_allows_for_the_activity_lag(floor_s: float, spinning_s: float) -> None:
    """As late as for a single job, whose inactive time is at least half of its limit."""
    seen = build.sighting(job=build.job_file(**RANK | {"stall_timeout_s": 5.0, "step_max_s": 0.1}))
    place = build.evidence(**SPINS | {"gpu_saturated_s": 100.0})
    timeouts = PhaseTimeouts(stuck_min_s=floor_s)

    text = golden.scraped(build.snapshot(seen, containers=(place,), thresholds=Thresholds(timeouts=timeouts)))

    assert values(text, "gpuwarden_gang_rank_stuck_after_seconds") == [floor_s]
    assert values(text, "gpuwarden_gang_rank_spinning_seconds") == [spinning_s]


def test_rank_of_a_dead_worker_is_absent() -> None:
    published = rank_series({}, alive=False)

    assert set(map(tuple, published.values())) == {()}
    assert rank_series({}, alive=None)["rank_attempt"] == [1.0], "an unknown worker counts as alive"


@pytest.mark.parametrize("job", [{"ranks": 1, "gang": None}, {"gang": None}], ids=["alone", "older worker"])
def test_job_without_a_gang_has_no_rank_series(job: dict[str, Any]) -> None:
    assert set(map(tuple, rank_series({}, **job).values())) == {()}


def test_silent_job_with_activity_is_suspected_and_a_stalled_one_is_not() -> None:
    silent = build.sighting(job=build.job_file(step_beat=build.ago(130)))

    def suspected(idle_s: float) -> list[float]:
        text = golden.scraped(build.snapshot(silent, containers=(build.evidence(gpu_idle_s=idle_s),)))
        return values(text, "gpuwarden_job_stall_suspected")

    assert (suspected(5.0), suspected(500.0)) == ([1.0], [0.0])


INACTIVE_JOB = {"step_beat": build.ago(600), "phase_started": build.ago(700)}


def inactive_times(place: dict[str, Any], its: dict[str, Any] | None = None, **worker: Any) -> list[list[float | None]]:
    """Seconds without activity of the job of w0, and with a GPU lost; an empty list is absent."""
    seen = build.sighting(**{"job": build.job_file(**INACTIVE_JOB | (its or {})), **worker})
    text = golden.scraped(build.snapshot(seen, containers=(build.evidence(**place),)))
    return [
        values_or_none(text, f"gpuwarden_job_inactive{what}_seconds", worker="w0", container="worker-0")
        for what in ("", "_gpu_lost")
    ]


UNREAD = Unknown(reason="not_listed", message="GPU is lost")


@pytest.mark.parametrize(
    ("place", "found"),
    [
        pytest.param({"gpu_idle_s": 400.0}, [[400.0], []], id="GPU measured: no loss"),
        pytest.param({"gpu_idle_s": 0.0}, [[0.0], []], id="measured 0"),
        pytest.param({"gpu_idle_s": 900.0, "ram_idle_s": 900.0}, [[600.0], []],
                     id="at most the time since its step beat"),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 400.0}, [[None], [400.0]],
                     id="GPU lost"),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": UNREAD}, [[None], [None]], id="GPU unknown"),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 400.0, "ram_idle_s": None},
                     [[None], [None]], id="GPU lost, RAM unknown"),
        pytest.param({"gpu_idle_s": None, "gpu_unknown": Unknown(reason=NO_GPU, message="")}, [[None], [None]],
                     id="no GPU now, it may have lost one"),
    ],
)  # fmt: skip
def test_inactive_time_is_published_or_nan(place: dict[str, Any], found: list[list[float | None]]) -> None:
    assert inactive_times({"ram_idle_s": 500.0, **place}) == found


def test_job_without_a_gpu_has_no_gpu_lost_time() -> None:
    lost = {"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 400.0}

    assert inactive_times(lost, {"job_class": JobClass.CPU}) == [[None], []]


def test_dead_or_jobless_worker_has_no_old_inactive_time() -> None:
    lost = {"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 400.0}

    assert [inactive_times({}, alive=alive) for alive in (True, None, False)] == [
        [[500.0], []],
        [[500.0], []],
        [[None], []],
    ]
    assert inactive_times(lost, alive=False) == [[None], [None]]
    assert inactive_times({}, job=None) == [[None], []]


def test_each_worker_of_a_container_has_its_own_step_beat_and_phase() -> None:
    one = build.sighting(job=build.job_file(**INACTIVE_JOB))
    two = build.sighting(
        worker=build.worker_file(worker="w1"),
        job=build.job_file(**INACTIVE_JOB | {"worker": "w1", "step_beat": build.ago(5)}),
    )
    text = golden.scraped(build.snapshot(one, two, containers=(build.evidence(gpu_idle_s=400.0),)))

    assert values(text, "gpuwarden_job_inactive_seconds", worker="w0") == [400.0]
    assert values(text, "gpuwarden_job_inactive_seconds", worker="w1") == [5.0]


def own_inactive_times(
    own: dict[str, Any] | None, its: dict[str, Any] | None = None, **worker: Any
) -> list[float | None]:
    """Seconds without own activity of the job of w0, in an active container; an empty list is absent.

    `own` is the work of its worker alone; `None` if no other worker shares its container.
    """
    seen = build.sighting(**{"job": build.job_file(**INACTIVE_JOB | (its or {})), **worker})
    busy = build.evidence(gpu_idle_s=0.0, ram_idle_s=0.0, io_idle_s=0.0, page_fault_idle_s=0.0, cpu_idle_s=0.0)
    own_series = {} if own is None else {"w0": build.evidence(**OWN_IDLE | own)}
    text = golden.scraped(build.snapshot(seen, containers=(busy,), worker_evidence=own_series))
    return values_or_none(text, "gpuwarden_job_inactive_in_shared_container_seconds", worker="w0", container="worker-0")


OWN_IDLE = {
    "gpu_idle_s": 400.0,
    "ram_idle_s": 510.0,
    "io_idle_s": 520.0,
    "page_fault_idle_s": 530.0,
    "cpu_idle_s": 540.0,
}


@pytest.mark.parametrize(
    ("own", "its", "found"),
    [
        pytest.param({}, {}, [400.0], id="active container"),
        pytest.param({"gpu_idle_s": 0.0}, {}, [0.0], id="measured 0"),
        pytest.param({"io_idle_s": 5.0}, {}, [5.0], id="reads or writes"),
        pytest.param({"cpu_idle_s": 5.0}, {}, [400.0], id="computes in a step"),
        pytest.param({"cpu_idle_s": 5.0}, {"phase": Phase.EVAL}, [5.0], id="computes in eval"),
        pytest.param({}, {"step_beat": build.ago(7)}, [7.0], id="step beat"),
        pytest.param({"io_idle_s": None}, {}, [None], id="I/O unknown"),
        pytest.param(
            {"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 400.0}, {}, [None],
            id="lost GPU does not count as idle",
        ),
        pytest.param(None, {}, [], id="no shared container"),
    ],
)  # fmt: skip
def test_own_inactive_time_of_a_worker(
    own: dict[str, Any] | None, its: dict[str, Any], found: list[float | None]
) -> None:
    assert own_inactive_times(own, its) == found


@pytest.mark.parametrize(
    ("its", "own", "worker", "quiet"),
    [
        pytest.param({"step_beat": build.ago(7)}, {}, {}, 7.0, id="has a step beat"),
        pytest.param({}, {"io_idle_s": 9.0}, {}, 9.0, id="reads or writes"),
        pytest.param({}, {"io_idle_s": None}, {}, None, id="has unknown I/O"),
        pytest.param({}, {}, {}, 300.0, id="is inactive for longer"),
        pytest.param({}, {"io_idle_s": 9.0}, {"job": None}, 300.0, id="waits for a job"),
        pytest.param({"step_beat": build.ago(7)}, {}, {"alive": False}, 300.0, id="is dead"),
    ],
)
@pytest.mark.parametrize("lost", [False, True], ids=["GPUs idle", "one GPU lost"])
def test_inactive_time_is_limited_by_another_worker_that(
    its: dict[str, Any], own: dict[str, Any], worker: dict[str, Any], quiet: float | None, lost: bool
) -> None:
    """A restart of the container would end the other worker's job."""
    one = build.sighting(job=build.job_file(**INACTIVE_JOB))
    other = build.sighting(
        **{
            "worker": build.worker_file(worker="w1"),
            "job": build.job_file(**INACTIVE_JOB | {"worker": "w1"} | its),
            **worker,
        }
    )
    gpu = {"gpu_idle_s": None, "gpu_unknown": UNREAD, "gpu_lost_s": 300.0} if lost else {"gpu_idle_s": 300.0}
    own_series = {"w0": build.evidence(**OWN_IDLE), "w1": build.evidence(**OWN_IDLE | own)}
    text = golden.scraped(
        build.snapshot(one, other, containers=(build.evidence(ram_idle_s=510.0, **gpu),), worker_evidence=own_series)
    )

    series_of = f"gpuwarden_job_inactive{'_gpu_lost' if lost else ''}_seconds"
    assert values_or_none(text, series_of, worker="w0", container="worker-0") == [quiet]


def test_dead_or_jobless_worker_has_no_old_own_inactive_time() -> None:
    assert [own_inactive_times({}, alive=alive) for alive in (True, None, False)] == [[400.0], [400.0], [None]]
    assert (own_inactive_times({}, job=None), own_inactive_times(None, job=None)) == ([None], [])


UNBEATEN = {"step_beat": None, "started": build.ago(900), "phase_started": build.ago(900)}
LOST = {"gpu_idle_s": None, "gpu_unknown": UNREAD}


def overdue(
    *,
    its: dict[str, Any] | None = None,
    worker: dict[str, Any] | None = None,
    place: dict[str, Any] | None = None,
    **snapshot: Any,
) -> list[float]:
    """The job of w0, number 7, if it is published as overdue."""
    seen = build.sighting(job=build.job_file(**its or {}), worker=build.worker_file(**worker or {}))
    text = golden.scraped(build.snapshot(seen, containers=(build.evidence(**place or {}),), **snapshot))
    named = {"worker": "w0", "container": "worker-0", "attempt": "1", "incarnation": "inc-w0"}
    return values(text, "gpuwarden_job_overdue_id", **named)


@pytest.mark.parametrize(
    ("at", "before"),
    [
        pytest.param({"its": {"budget_s": 300.0}}, {"its": {"budget_s": 300.5}}, id="over its budget"),
        pytest.param({"its": {"step_beat": build.ago(120)}}, {"its": {"step_beat": build.ago(119.5)}}, id="silent"),
        pytest.param(
            {"its": UNBEATEN, "place": {"gpu_idle_s": 300.0}}, {"its": UNBEATEN, "place": {"gpu_idle_s": 299.5}},
            id="inactive without a step beat",
        ),
        pytest.param(
            {"its": UNBEATEN, "place": LOST | {"gpu_lost_s": 300.0}},
            {"its": UNBEATEN, "place": LOST | {"gpu_lost_s": 299.5}},
            id="inactive with a GPU lost",
        ),
        pytest.param(
            {"worker": {"heartbeat": build.ago(30)}}, {"worker": {"heartbeat": build.ago(29.5)}},
            id="without a heartbeat",
        ),
        pytest.param({"dead_s": {"w0": 30.0}}, {"dead_s": {"w0": 29.5}}, id="without its process"),
    ],
)  # fmt: skip
def test_job_is_overdue_at_its_limit(at: dict[str, Any], before: dict[str, Any]) -> None:
    assert (overdue(**at), overdue(**before)) == ([7.0], [])


def test_job_without_limits_is_never_overdue() -> None:
    unpoliced = {"budget_s": None, "stall_timeout_s": 0.0, "step_beat": build.ago(7000), "job_class": JobClass.INGEST}
    other_boot = build.ago(7000, boot_id="another")

    assert overdue() == []
    assert overdue(its=unpoliced) == []
    assert overdue(its={"started": other_boot, "step_beat": other_boot}, worker={"heartbeat": other_boot}) == []


def test_dead_worker_keeps_its_job_and_container_and_has_no_limits() -> None:
    text = golden.scraped(golden.SNAPSHOT)

    assert values(text, "gpuwarden_worker_alive", worker="w2", container="worker-2") == [0.0]
    assert values(text, "gpuwarden_worker_dead_seconds", worker="w2", container="worker-2") == [12.5]
    assert values(text, "gpuwarden_job_id", worker="w2", container="worker-2") == [9.0]
    for limit in ("budget", "stall_timeout", "health_window", "health_grace"):
        assert not any(values_or_none(text, f"gpuwarden_job_{limit}_seconds", worker="w2"))
        assert any(values_or_none(text, f"gpuwarden_job_{limit}_seconds", worker="w0")) is True
    assert values(text, "gpuwarden_container_info", container="worker-2") == []


def test_dead_worker_in_an_unknown_container_is_published_without_one() -> None:
    dead = build.sighting(alive=False, pid=None, container_id=None)

    text = golden.scraped(build.snapshot(dead, dead_s={"w0": 3.0}))

    assert values(text, "gpuwarden_worker_dead_seconds", worker="w0", container="") == [3.0]


@pytest.mark.parametrize(("job_class", "watched"), [(each, each.value.startswith("gpu")) for each in JobClass])
def test_gpu_health_is_checked_for_jobs_with_a_gpu(job_class: JobClass, watched: bool) -> None:
    text = golden.scraped(build.snapshot(build.sighting(job=build.job_file(job_class=job_class))))

    assert values_or_none(text, "gpuwarden_job_health_window_seconds") == [300.0 if watched else None]
    assert values(text, "gpuwarden_job_health_grace_seconds") == [60.0] * watched


def test_budget_of_zero_is_absent() -> None:
    text = golden.scraped(build.snapshot(build.sighting(job=build.job_file(budget_s=0.0))))

    assert values_or_none(text, "gpuwarden_job_budget_seconds") == [None]


def test_work_idle_time_is_the_least_of_its_parts_or_unknown() -> None:
    def published(**changes: float | None) -> list[float | None]:
        text = golden.scraped(build.snapshot(containers=(build.evidence(**changes),)))
        return values_or_none(text, "gpuwarden_container_work_idle_seconds")

    assert published() == [200.0]
    assert published(io_idle_s=1.0) == [1.0]
    assert published(io_idle_s=None) == published(page_fault_idle_s=None) == published(cpu_idle_s=None) == [None]


def test_no_progress_time_is_published_or_nan() -> None:
    def published(**changes: float | None) -> list[float | None]:
        text = golden.scraped(build.snapshot(containers=(build.evidence(**changes),)))
        return values_or_none(text, "gpuwarden_container_no_progress_seconds")

    assert published(gpu_saturated_s=250.0) == [250.0]
    assert published() == [None]


def test_series_of_an_ended_job_and_container_are_removed_at_once() -> None:
    running = build.snapshot(build.sighting(), unknown={("worker-0", "gpu", "not_listed"): 1})
    idle = build.snapshot(build.sighting(job=None))
    empty = build.snapshot(containers=())

    assert {"gpuwarden_job_id", "gpuwarden_job_info", "gpuwarden_container_info"} <= hot(golden.scraped(running))
    of_jobs = {
        name: value
        for (name, _), value in series(golden.scraped(idle)).items()
        if "gpuwarden_job_" in name and "_threshold_" not in name
    }
    assert all(math.isnan(value) for value in of_jobs.values()), "so that Prometheus uses no older value"
    assert {name.removeprefix("gpuwarden_job_") for name in of_jobs} == {
        "budget_seconds", "stall_timeout_seconds", "stuck_after_seconds", "stuck_idle_seconds",
        "health_window_seconds", "inactive_seconds",
    }  # fmt: skip
    assert hot(golden.scraped(idle)) >= {"gpuwarden_worker_info", "gpuwarden_container_info"}
    assert {name for name in hot(golden.scraped(empty)) if not name.startswith("gpuwarden_gpu_")} == {
        "gpuwarden_workers_duplicate"
    }


def test_changing_ids_are_labels_of_info_series_and_overdue_gangs_only() -> None:
    churning = {"job_id", "attempt", "incarnation", "container_id", "container_incarnation"}
    ids = {"gpuwarden_job_id", "gpuwarden_job_overdue_id", "gpuwarden_gang_rank_overdue_attempt"}

    for name, labels in series(golden.PATH.read_text()):
        assert name.endswith("_info") or name in ids or not churning & dict(labels).keys()
        assert name == "gpuwarden_gang_rank_overdue_attempt" or "job_id" not in dict(labels)


def test_gpu_memory_is_the_sum_of_its_parts() -> None:
    text = golden.scraped(golden.SNAPSHOT)

    attributed = sum(values(text, "gpuwarden_container_gpu_memory_bytes", gpu="GPU-0"))
    rest = [
        *values(text, "gpuwarden_gpu_uncontained_memory_bytes", gpu="GPU-0"),
        *values(text, "gpuwarden_gpu_unlisted_memory_bytes", gpu="GPU-0"),
    ]
    assert len(rest) == 2
    assert [attributed + sum(rest)] == values(text, "gpuwarden_gpu_memory_used_bytes", gpu="GPU-0")


def test_unknown_use_outside_containers_is_absent() -> None:
    names = ("gpuwarden_gpu_uncontained_memory_bytes", "gpuwarden_gpu_uncontained_utilization_ratio")

    assert hot(golden.scraped(golden.SNAPSHOT)) >= set(names)
    assert hot(golden.scraped(replace(golden.SNAPSHOT, unplaced=()))).isdisjoint(names)


def test_name_that_fits_no_gpu_misses_its_attribution() -> None:
    unknown = Unknown(reason="gpu_missing", message="assigned GPU 7 is not reported")
    share = GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=0, attributed=True)
    place = build.evidence(
        shares=(share,), gpus=("GPU-0", "GPU-1", "GPU-2"), gpu_unknown=unknown, nameless=("nvidia.com/gpu", "all")
    )

    text = golden.scraped(build.snapshot(containers=(place,), lost_gpus=("GPU-2",)))

    name = "gpuwarden_container_gpu_attribution_missing"
    assert [values(text, name, gpu=f"GPU-{number}") for number in range(3)] == [[0.0], [1.0], []]
    assert values(text, name, gpu="nvidia.com/gpu") == [1.0]
    assert values(text, name, gpu="all") == []


# Failing, stale


@pytest.fixture
def scrape_logged(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    """The log of a scrape."""
    capture = LogCapture()
    monkeypatch.setattr(scrape, "log", structlog.wrap_logger(None, processors=[capture]))
    return capture


@pytest.mark.parametrize("name", COLLECTORS)
def test_failing_collector_does_not_affect_others(
    name: str, monkeypatch: pytest.MonkeyPatch, scrape_logged: LogCapture
) -> None:
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
def test_collector_that_fails_half_way_publishes_nothing() -> None:
    sightings = (build.sighting(), build.sighting(worker=None))
    broken = replace(golden.SNAPSHOT, workers=WorkerReadings(workers=sightings))

    text = golden.scraped(broken)

    assert {name for name in hot(text) if name.startswith(("gpuwarden_worker_", "gpuwarden_job_"))} == set()
    assert values(text, "gpuwarden_collector_success", collector="workers") == [0.0]
    assert values(text, "gpuwarden_collector_success", collector="containers") == [1.0]


def test_failed_source_is_published_by_name() -> None:
    sources = (SourceHealth(source="docker", success=False, duration_s=5.0),)

    text = golden.scraped(build.snapshot(sources=sources))

    assert values(text, "gpuwarden_collector_success", collector="source_docker") == [0.0]
    assert values(text, "gpuwarden_collector_duration_seconds", collector="source_docker") == [5.0]


def test_duration_of_the_sample_is_published_with_those_of_sources() -> None:
    text = golden.scraped(build.snapshot(took_s=0.25))

    assert values(text, "gpuwarden_collector_duration_seconds", collector="sampler") == [0.25]


def last_success(text: str, collector: str) -> list[float]:
    return values(text, "gpuwarden_collector_last_success_timestamp_seconds", collector=collector)


@pytest.mark.usefixtures("scrape_logged")
def test_last_success_stays_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_collector_without_a_success_has_no_time_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "COLLECTORS", {"fragile": lambda _: 1 / 0})

    text = golden.scraped(golden.SNAPSHOT)

    assert (last_success(text, "fragile"), values(text, "gpuwarden_collector_success", collector="fragile")) == (
        [],
        [0.0],
    )


def test_no_worker_and_job_series_without_workers() -> None:
    text = golden.scraped(build.snapshot(workers=None))

    assert {name for name in hot(text) if not name.startswith(("gpuwarden_gpu_", "gpuwarden_container_"))} == set()
    assert list(jobs.families(build.snapshot(workers=None))) == []


def test_no_gpu_series_without_gpu_readings() -> None:
    text = golden.scraped(build.snapshot(gpus=None))

    assert {name for name in hot(text) if name.startswith("gpuwarden_gpu_")} == set()


@pytest.mark.parametrize(
    ("snapshot", "age_s", "published"),
    [
        pytest.param(golden.SNAPSHOT, 5.0, True, id="at the limit"),
        pytest.param(golden.SNAPSHOT, 5.01, False, id="past the limit"),
        pytest.param(None, 0.0, False, id="before the first sample"),
    ],
)
def test_only_a_recent_snapshot_is_published(snapshot: Snapshot | None, age_s: float, published: bool) -> None:
    text = golden.scraped(snapshot, now=build.ago(-age_s))

    assert bool(hot(text)) == published
    assert values(text, "gpuwarden_collector_success", collector="sampler") == [float(published)]
    assert values(text, "gpuwarden_sample_age_seconds") == ([] if snapshot is None else [pytest.approx(age_s)])
    assert values(text, "gpuwarden_exporter_info", nodename="box-1") == [1.0]


def test_registration_takes_no_sample() -> None:
    assert (
        list(scrape.SnapshotCollector(lambda: pytest.fail("asked"), host="", thresholds=Thresholds()).describe()) == []
    )
