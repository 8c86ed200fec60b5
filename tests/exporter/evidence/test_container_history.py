"""From samples to durations: what is idle, what is still, and for how long that is known."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.evidence import container_history, gpu_attribution, signs_of_life, windows, work_history, worker_liveness
from exporter.evidence.container_history import PAUSES_MAX, ContainerHistory, RamUse, without_figures
from exporter.evidence.gpu_attribution import HUNG, NO_GPU, REQUESTS_MAX, GpuUse, gpu_use
from exporter.evidence.gpu_history import GpuHistory
from exporter.evidence.gpu_trackers import OUTAGE_S
from exporter.evidence.work_history import WorkUse
from exporter.evidence.worker_liveness import CpuHistory, DeathHistory
from exporter.model.container import Container, ContainerEvidence, GpuShare
from exporter.model.gpu import NUMBERED, WITH_NODES, Gpu, GpuFigures, GpuProcess, GpuReadings, GpuTotals, MigInstance
from exporter.model.thresholds import Thresholds
from exporter.model.timeouts import Patience
from exporter.model.unknown import Unknown
from exporter.model.worker import CpuUse, ProcessWork, WorkerReadings, WorkerSighting
from gpuwarden.job import Phase
from gpuwarden.state_file import Stamp
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

THRESHOLDS = Thresholds(idle_ratio=0.05, ram_delta_bytes=100, gap_max_s=5.0)
OWN = frozenset({4001, 4002})
OTHER_PID = 9999

Sample = tuple[float, float | None, int | None]
"""Seconds since the sample before, GPU utilisation, RAM."""


def use(utilization_ratio: float | None) -> GpuUse:
    share = GpuShare(gpu="GPU-0", utilization_ratio=utilization_ratio, memory_bytes=0)
    unknown = Unknown(reason="not_listed", because="said so") if utilization_ratio is None else None
    return GpuUse(gpus=("GPU-0",), shares=(share,), utilization_ratio=utilization_ratio, unknown=unknown)


def ram(usage_bytes: int | None) -> RamUse:
    return RamUse(usage_bytes=usage_bytes)


def observed(*samples: Sample, thresholds: Thresholds = THRESHOLDS) -> ContainerEvidence:
    """The evidence after the last of these samples."""
    history, now_s = ContainerHistory(thresholds), 1000.0
    for gap_s, utilization_ratio, usage_bytes in samples:
        now_s += gap_s
        last = history.observe(build.container(), use(utilization_ratio), ram(usage_bytes), now_s=now_s)
    return last


# Idle durations


@pytest.mark.parametrize(
    ("samples", "idle_s"),
    [
        pytest.param([(0, 0.0, 1)], 0.0, id="the first idle sample starts it: nothing is known of the time before"),
        pytest.param([(0, 0.0, 1), (1, 0.0, 1), (2, 0.05, 1)], 3.0, id="at the idle ratio is idle"),
        pytest.param([(0, 0.0, 1), (1, 0.051, 1)], 0.0, id="over the idle ratio is busy"),
        pytest.param([(0, 0.9, 1), (1, 0.0, 1), (1, 0.0, 1)], 1.0, id="it starts at the first idle sample after busy"),
        pytest.param([(0, 0.0, 1), (9 / 2, 0.0, 1), (1, 0.9, 1), (1, 0.0, 1)], 0.0, id="one busy sample resets it"),
        pytest.param([(0, 0.0, 1), (1, None, 1)], None, id="while unknown it does not exist"),
        pytest.param([(0, 0.0, 1), (1, None, 1), (1, 0.0, 1), (1, 0.0, 1)], 1.0, id="after unknown it starts anew"),
        pytest.param([(0, 0.0, 1), (5, 0.0, 1)], 5.0, id="a gap of the greatest length is no gap"),
        pytest.param([(0, 0.0, 1), (5.01, 0.0, 1), (1, 0.0, 1)], 1.0, id="a longer gap starts it anew"),
        pytest.param([(0, 0.0, 1), (1, 0.0, 1), (8 * 3600, 0.0, 1)], 0.0, id="a night's suspension is no idleness"),
        pytest.param([(0, 0.0, 1), (-1, 0.0, 1)], 0.0, id="a clock that runs backwards proves nothing"),
    ],
)
def test_a_gpu_is_idle_for_as_long_as_it_was_seen_idle(samples: list[Sample], idle_s: float | None) -> None:
    assert observed(*samples).gpu_idle_s == idle_s


samples_of_a_life = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 1.0, 1.0, 5.0, 5.25, 3600.0]),
        st.sampled_from([0.0, 0.0, 0.0, 0.05, 0.5, None]),
        st.one_of(st.none(), st.integers(0, 300)),
    ),
    min_size=1,
    max_size=60,
)


def continuous_tail(samples: list[Sample]) -> int:
    """Index of the first sample after the last gap."""
    return max((i for i in range(1, len(samples)) if samples[i][0] > THRESHOLDS.gap_max_s), default=0)


@given(samples_of_a_life)
def test_the_idle_duration_is_the_time_back_to_the_first_of_the_unbroken_idle_samples(samples: list[Sample]) -> None:
    first = len(samples)
    while first > continuous_tail(samples) and (ratio := samples[first - 1][1]) is not None and ratio <= 0.05:
        first -= 1
    span_s = sum(gap_s for gap_s, _, _ in samples[first + 1 :])
    expected = None if samples[-1][1] is None else span_s

    assert observed(*samples).gpu_idle_s == expected


@given(samples_of_a_life)
def test_the_still_duration_is_the_longest_window_up_to_now_within_the_delta(samples: list[Sample]) -> None:
    values = [value for _, _, value in samples]
    first = len(samples)
    while first > continuous_tail(samples) and (value := values[first - 1]) is not None:
        window = [each for each in (value, *values[first:]) if each is not None]
        if max(window) - min(window) > THRESHOLDS.ram_delta_bytes:
            break
        first -= 1
    expected = None if values[-1] is None else sum(gap_s for gap_s, _, _ in samples[first + 1 :])

    assert observed(*samples).ram_still_s == expected


# RAM


@pytest.mark.parametrize(
    ("values", "still_s"),
    [
        pytest.param([0, 0, 0, 0], 3, id="static"),
        pytest.param([0, 100, 0, 100], 3, id="moving by the delta exactly is still"),
        pytest.param([0, 50, 101], 1, id="greatest less least over the whole window, not from one look to the next"),
        pytest.param([300, 250, 200, 150], 2, id="falling counts as moving"),
        pytest.param([0, 0, 500, 500, 500], 2, id="a jump starts it anew"),
        pytest.param([0, 500, 0], 0, id="a peak that has gone still moved it"),
        pytest.param([0, 500, 0, 0, 0], 2, id="once the peak is out of the window it is still again"),
    ],
)
def test_ram_is_still_for_as_long_as_greatest_less_least_is_within_the_delta(values: list[int], still_s: int) -> None:
    assert observed(*((1.0, 0.0, value) for value in values)).ram_still_s == still_s


def test_ram_that_creeps_for_ever_costs_bounded_memory_and_tells_too_short_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "EXTREMES_MAX", 10)
    rising = [(1.0, 0.0, value) for value in range(100)]
    falling = [(1.0, 0.0, value) for value in reversed(range(100))]

    assert observed(*rising).ram_still_s == observed(*falling).ram_still_s == 9.0


def test_an_unknown_ram_figure_starts_the_stillness_anew() -> None:
    samples: list[Sample] = [(0, 0.0, 1), (1, 0.0, 1), (1, 0.0, None), (1, 0.0, 1), (1, 0.0, 1)]

    assert observed(*samples[:3]).ram_still_s is None
    assert observed(*samples).ram_still_s == 1.0


# From look to look


BUSY = build.gpus(build.gpu(0, build.process(4001, 0.5)), build.gpu(1))
REST = build.gpus(build.gpu(0, build.process(4001, 0.0)), build.gpu(1))


@pytest.mark.parametrize(
    ("container", "pids", "readings", "told"),
    [
        pytest.param(build.container(), OWN, REST, 0.0, id="its GPU does nothing any more"),
        pytest.param(build.container(), frozenset({OTHER_PID}), BUSY, 0.0, id="its processes are others"),
        pytest.param(build.container(), None, BUSY, None, id="its processes are unknown"),
        pytest.param(build.container(gpu_request=("2",)), OWN, BUSY, None, id="it is another container"),
        pytest.param(build.container(), OWN, None, None, id="no GPU is read"),
    ],
)
def test_what_a_container_uses_is_told_anew_once(
    container: Container, pids: frozenset[int] | None, readings: GpuReadings | None, told: float | None
) -> None:
    history, first = ContainerHistory(THRESHOLDS), build.container()
    before = history.use(first, OWN, BUSY)

    found = history.use(container, pids, readings)

    assert (before.utilization_ratio, found.utilization_ratio) == (0.5, told)
    assert found == gpu_use(container, pids, readings, THRESHOLDS)


@pytest.mark.parametrize("there", [frozenset({"GPU-1"}), frozenset[str]()], ids=["seen there", "never there"])
def test_a_gpu_that_a_container_had_counts_in_what_it_uses_of_the_same_readings(there: frozenset[str]) -> None:
    history, given = ContainerHistory(THRESHOLDS), build.container(gpu_request=("0",))
    lost = replace(REST, gpus=REST.gpus[:1], dropped=("GPU-1",))
    before = history.use(given, OWN, lost)
    history.gpus, history.there = ("GPU-0", "GPU-1"), there

    found = history.use(given, OWN, lost)

    assert before.unknown is None
    assert found.unknown
    assert found.unknown.reason == "gpu_missing"
    assert found == gpu_use(given, OWN, lost, THRESHOLDS, ("GPU-0", "GPU-1"), there)


def test_what_a_container_uses_of_the_same_readings_is_worked_out_once() -> None:
    history, given = ContainerHistory(THRESHOLDS), build.container()
    history.observe(given, history.use(given, OWN, BUSY), ram(1), now_s=1000.0)
    found = history.use(given, OWN, BUSY)
    history.observe(given, found, ram(1), now_s=1001.0)

    assert history.use(given, OWN, BUSY) is found


def test_readings_that_stay_remember_a_bounded_number_of_requests() -> None:
    readings = build.gpus(build.gpu(0))
    for number in range(3 * REQUESTS_MAX):
        gpu_use(build.container(gpu_request=("0", f"GPU-never-{number}")), OWN, readings, THRESHOLDS)

    assert len(readings.asked) <= REQUESTS_MAX
    assert gpu_use(build.container(gpu_request=("0",)), OWN, readings, THRESHOLDS).gpus == ("GPU-0",)


# Busy counters


def test_busy_time_adds_up_measured_samples_from_an_explicit_zero() -> None:
    assert observed((0, 0.9, 1)).busy_s == {"GPU-0": 0.0}
    assert observed((0, 0.9, 1), (1, 0.5, 1), (2, 0.25, 1)).busy_s == {"GPU-0": 1.0}


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([(0, 0.5, 1), (1, 0.5, 1), (1, None, 1)], id="an unknown sample"),
        pytest.param([(0, 0.5, 1), (1, 0.5, 1), (3600, 0.5, 1)], id="a gap"),
    ],
)
def test_busy_time_does_not_grow_over(samples: list[Sample]) -> None:
    assert observed(*samples).busy_s == {"GPU-0": 0.5}


@given(samples_of_a_life)
def test_a_busy_counter_never_falls_and_never_outruns_the_clock(samples: list[Sample]) -> None:
    before = 0.0
    for count in range(1, len(samples) + 1):
        busy_s = observed(*samples[:count]).busy_s.get("GPU-0", 0.0)
        assert before <= busy_s <= sum(gap_s for gap_s, _, _ in samples[1:count]) + 1e-9
        before = busy_s


# Attribution


def attributed(
    *found: Gpu, request: tuple[str, ...] | None = ("all",), pids: frozenset[int] | None = OWN
) -> tuple[float | None, str | None]:
    """The container's utilisation, or the reason why it is unknown."""
    result = gpu_use(build.container(gpu_request=request), pids, GpuReadings(source="test", gpus=found), THRESHOLDS)
    return result.utilization_ratio, result.unknown.reason if result.unknown else None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([build.gpu(0)], (0.0, None), id="a container on no list is a measured 0"),
        pytest.param([build.gpu(0, build.process(OTHER_PID, 0.9))], (0.0, None), id="another's work is not its own"),
        pytest.param(
            [build.gpu(0, build.process(4001, 0.2), build.process(4002, 0.3), build.process(OTHER_PID, 0.4))],
            (0.5, None),
            id="its processes are summed",
        ),
        pytest.param(
            [build.gpu(0, build.process(4001, 0.8), build.process(4002, 0.9), utilization_ratio=1.0)],
            (1.0, None),
            id="a sum over 1 is 1",
        ),
        pytest.param(
            [build.gpu(0), build.gpu(1, build.process(4001, 0.7))], (0.7, None), id="the greatest of its GPUs counts"
        ),
        pytest.param(
            [build.gpu(0), build.gpu(1, processes=None)],
            (None, "not_listed"),
            id="one of two GPUs unlisted is unknown",
        ),
        pytest.param(
            [build.gpu(0), build.gpu(1, build.process(4001, None))],
            (None, "not_measured"),
            id="an unmeasured process of its own is unknown",
        ),
        pytest.param(
            [build.gpu(0, build.process(OTHER_PID, None))],
            (None, "not_measured"),
            id="an unmeasured process of another could hide its own child",
        ),
        pytest.param([build.gpu(0, utilization_ratio=None)], (None, "not_measured"), id="an unmeasured GPU is unknown"),
        pytest.param(
            [build.gpu(0, utilization_ratio=0.06)], (None, "unattributed"), id="unattributed over idle could be its"
        ),
        pytest.param([build.gpu(0, utilization_ratio=0.05)], (0.0, None), id="unattributed at idle does not veto"),
        pytest.param(
            [build.gpu(0, build.process(OTHER_PID, 0.85), utilization_ratio=0.9)],
            (0.0, None),
            id="0.90 - 0.85 is not over 0.05",
        ),
        pytest.param([], (None, "gpu_missing"), id="a host without GPUs measures none"),
    ],
)
def test_utilisation_of_a_container_with_all_gpus(found: list[Gpu], expected: tuple[float | None, str | None]) -> None:
    assert attributed(*found) == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(("all",), (0.25, None), id="all"),
        pytest.param(("0",), (0.25, None), id="by index"),
        pytest.param(("GPU-0",), (0.25, None), id="by UUID"),
        pytest.param(("0", "GPU-0", "0"), (0.25, None), id="one GPU named three times is one GPU"),
        pytest.param(("0", "7"), (None, "gpu_missing"), id="one that is not reported"),
        pytest.param(("GPU-0", "MIG-1"), (None, "gpu_missing"), id="a partition that is not reported"),
        pytest.param(None, (None, "no_gpu"), id="none"),
    ],
)
def test_the_gpus_of_a_container_are_those_it_asked_for(
    request_: tuple[str, ...] | None, expected: tuple[float | None, str | None]
) -> None:
    mine, another = build.process(4001, 0.25), build.process(OTHER_PID, 0.9)

    assert attributed(build.gpu(0, mine), build.gpu(1, another), request=request_) == expected


NVIDIA = build.gpu(0, build.process(4001, 0.25))
AMD = build.gpu(0, uuid="GPU-amd", node="renderD128", attribution="device")
INTEL = build.gpu(1, uuid="pci-0000:00:02.0", node="renderD129")


@pytest.mark.parametrize(
    ("request_", "gpus"),
    [
        pytest.param(("all",), ("GPU-0",), id="all is all of NVIDIA's"),
        pytest.param(("0",), ("GPU-0",), id="an index is one of NVIDIA's"),
        pytest.param(("renderD129",), ("GPU-0", "pci-0000:00:02.0"), id="a node, and the GPU that it is seen on"),
        pytest.param(("GPU-amd",), ("GPU-0", "GPU-amd"), id="a UUID is anybody's"),
        pytest.param(("dri",), ("GPU-0", "GPU-amd", "pci-0000:00:02.0"), id="the folder of all nodes"),
        pytest.param(("0", "dri"), ("GPU-0", "GPU-amd", "pci-0000:00:02.0"), id="an index and all nodes"),
        pytest.param(("all", "dri"), ("GPU-0", "GPU-amd", "pci-0000:00:02.0"), id="every GPU of either kind"),
        pytest.param(("all", "renderD130"), ("GPU-0",), id="all, and a node of a GPU of NVIDIA's"),
        pytest.param(("0", "renderD130"), ("GPU-0",), id="an index, and the node of that GPU"),
    ],
)
def test_gpus_with_a_render_node_go_by_it(request_: tuple[str, ...], gpus: tuple[str, ...]) -> None:
    found = gpu_use(build.container(gpu_request=request_), OWN, build.gpus(NVIDIA, AMD, INTEL), THRESHOLDS)

    assert (found.gpus, found.unknown) == (gpus, None)


@pytest.mark.parametrize(
    ("request_", "missing"),
    [
        pytest.param(("renderD130",), "renderD130", id="a node"),
        pytest.param(("1", "dri"), "1", id="an index, which is none of AMD's or Intel's"),
    ],
)
def test_a_gpu_that_is_not_reported_is_missed(request_: tuple[str, ...], missing: str) -> None:
    found = gpu_use(build.container(gpu_request=request_), OWN, build.gpus(NVIDIA, AMD, INTEL), THRESHOLDS)

    because = f"assigned GPU {missing} is not reported"
    assert found.unknown == Unknown(reason="gpu_missing", because=because)


@pytest.mark.parametrize(
    ("kind", "request_", "changes", "gpus"),
    [
        pytest.param("process", ("all",), {}, ("GPU-amd", "pci-0000:00:02.0"), id="a process that names none"),
        pytest.param("systemd", ("all",), {}, ("GPU-amd", "pci-0000:00:02.0"), id="a service"),
        pytest.param("kubernetes", ("all", "dri"), {}, ("GPU-amd", "pci-0000:00:02.0"), id="a pod that was given some"),
        pytest.param("docker", ("all",), {}, None, id="--gpus all is NVIDIA's, which nobody reads"),
        pytest.param("process", ("all",), {"nvidia_unread": True}, None, id="a process that may be on NVIDIA's"),
        pytest.param("process", ("all",), {"failed": ("gpu",)}, None, id="a process, and the driver does not answer"),
        pytest.param("kubernetes", ("all", "dri"), {"nvidia_unread": True}, None, id="a pod that may be on NVIDIA's"),
    ],
)
def test_the_gpus_of_others_are_every_gpu_only_where_nothing_is_nvidias(
    kind: str, request_: tuple[str, ...], changes: dict[str, Any], gpus: tuple[str, ...] | None
) -> None:
    readings = replace(build.gpus(AMD, INTEL), **changes)

    found = gpu_use(build.container(kind=kind, gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (found.unknown and found.unknown.reason) == (None if gpus else "gpu_missing")
    assert found.utilization_ratio == (0.0 if gpus else None)
    if gpus:
        assert found.gpus == gpus


@pytest.mark.parametrize(
    ("request_", "readings", "because"),
    [
        pytest.param(
            ("all",), build.gpus(INTEL), "every GPU of NVIDIA's is assigned, and none is reported", id="none is read"
        ),
        pytest.param(
            ("all",),
            replace(build.gpus(INTEL), nvidia_unread=True),
            "every GPU of NVIDIA's is assigned, and none is reported, though its hardware or its driver is there",
            id="none is read, and there are some",
        ),
        pytest.param(
            ("dri",),
            GpuReadings(source="test", gpus=(NVIDIA,), failed=("drm",)),
            "every GPU with a render node is assigned, and their source fails",
            id="a source that fails",
        ),
    ],
)
def test_which_gpus_are_missing_is_said(request_: tuple[str, ...], readings: GpuReadings, because: str) -> None:
    found = gpu_use(build.container(gpu_request=request_), OWN, readings, THRESHOLDS)

    assert found.unknown == Unknown(reason="gpu_missing", because=because)


FULL = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("request_", "gpus", "nameless"),
    [
        pytest.param(("all",), (), ("all",), id="a word"),
        pytest.param(("0", "renderD128"), (), ("0", "renderD128"), id="an index and a node"),
        pytest.param((FULL,), (FULL,), (), id="a UUID"),
        pytest.param((FULL[:12],), (), (FULL[:12],), id="a part of one"),
        pytest.param((f"MIG-{FULL}/7/0",), (), (f"MIG-{FULL}/7/0",), id="an older name of an instance"),
        pytest.param(("renderD130",), ("GPU-gone",), (), id="a node of a GPU that was read before"),
        pytest.param(("renderD130", "7", FULL), (FULL, "GPU-gone"), ("7",), id="one of each"),
    ],
)
def test_of_what_is_missing_only_uuids_are_names_of_gpus(
    request_: tuple[str, ...], gpus: tuple[str, ...], nameless: tuple[str, ...]
) -> None:
    readings = GpuReadings(source="test", gpus=(INTEL,), failed=("gpu", "drm"), gone={"renderD130": "GPU-gone"})

    found = gpu_use(build.container(gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (found.gpus, found.nameless) == (gpus, nameless)
    assert (found.unknown and found.unknown.reason) == "gpu_missing"


def test_what_it_had_and_is_not_read_is_its_own_while_one_that_it_asked_for_is_missing() -> None:
    container = build.container(gpu_request=("0", FULL[:12]))

    found = gpu_use(container, OWN, build.gpus(NVIDIA), THRESHOLDS, ("GPU-0", FULL))

    assert (found.gpus, found.nameless) == (("GPU-0", FULL), (FULL[:12],))


@pytest.mark.parametrize("request_", [("all",), ("0",)], ids=["all", "its index, which is another's now"])
@pytest.mark.parametrize(
    ("dropped", "reason"),
    [
        pytest.param(("GPU-7",), "gpu_missing", id="its driver lists it no more"),
        pytest.param(("GPU-8",), None, id="that is another"),
        pytest.param((), None, id="it was unmade, or goes by another name"),
    ],
)
def test_a_gpu_that_a_container_had_and_that_is_lost_is_missing_and_not_idle_by_the_others(
    request_: tuple[str, ...], dropped: tuple[str, ...], reason: str | None
) -> None:
    readings = GpuReadings(source="test", gpus=(build.gpu(0),), dropped=dropped)

    found = gpu_use(build.container(gpu_request=request_), OWN, readings, THRESHOLDS, ("GPU-0", "GPU-7"))

    assert (found.unknown and found.unknown.reason, found.nameless) == (reason, ())
    assert (found.gpus, found.utilization_ratio) == ((("GPU-0", "GPU-7"), None) if reason else (("GPU-0",), 0.0))


@pytest.mark.parametrize(
    ("request_", "uuids", "found"),
    [
        pytest.param(FULL[:12], [FULL, "GPU-8932f938"], FULL, id="its first digits"),
        pytest.param(FULL[:-1], [FULL], FULL, id="nearly all of it"),
        pytest.param(FULL[:11], [FULL], None, id="too few to be sure of"),
        pytest.param(FULL[:12], [FULL, f"{FULL[:12]}-another"], None, id="those of two"),
        pytest.param(FULL[:12], [FULL, FULL[:12]], FULL[:12], id="a whole one, and the first digits of another"),
        pytest.param(FULL[:12], ["GPU-8932f938"], None, id="those of none"),
    ],
)
def test_a_gpu_is_given_by_the_first_digits_of_its_uuid(request_: str, uuids: list[str], found: str | None) -> None:
    gpus = [build.gpu(number, uuid=uuid) for number, uuid in enumerate(uuids)]

    use = gpu_use(build.container(gpu_request=(request_,)), OWN, build.gpus(*gpus), THRESHOLDS)

    assert use.gpus == ((found,) if found else ())
    assert (use.utilization_ratio, use.unknown and use.unknown.reason) == (
        (0.0, None) if found else (None, "gpu_missing")
    )


def test_the_first_digits_of_an_amd_gpus_uuid_are_no_name_of_it() -> None:
    gpu = build.gpu(0, uuid="GPU-18b70c33a1b2c3d4", node="renderD128")

    use = gpu_use(build.container(gpu_request=("GPU-18b70c33",)), OWN, build.gpus(gpu), THRESHOLDS)

    assert (use.gpus, use.unknown and use.unknown.reason) == ((), "gpu_missing")


@pytest.mark.parametrize(
    ("request_", "found", "reason"),
    [
        pytest.param(("0", "renderD131"), (NVIDIA, INTEL), "gpu_missing", id="a node of a GPU that is gone"),
        pytest.param(("all", "renderD131"), (NVIDIA,), "gpu_missing", id="beside all of NVIDIA's"),
        pytest.param(("renderD131",), (NVIDIA,), "gpu_missing", id="the only one that had a node"),
        pytest.param(("dri",), (NVIDIA, INTEL), "gpu_missing", id="one of all nodes"),
        pytest.param(("0", "renderD130"), (NVIDIA, INTEL), None, id="a node that never was a GPU that is read"),
        pytest.param(
            ("dri",), (build.gpu(0, uuid="GPU-gone", node="renderD132"),), None, id="it has another node by now"
        ),
    ],
)
def test_a_gpu_that_was_read_and_is_gone_is_not_passed_over(
    request_: tuple[str, ...], found: tuple[Gpu, ...], reason: str | None
) -> None:
    readings = GpuReadings(source="test", gpus=found, gone={"renderD131": "GPU-gone"})

    use = gpu_use(build.container(gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (use.unknown and use.unknown.reason) == reason


@pytest.mark.parametrize(
    ("request_", "found", "shares"),
    [
        pytest.param(
            ("GPU-elsewhere",),
            [build.gpu(0, build.process(4001, 0.25, 7), build.process(OTHER_PID, 0.5, 9)), build.gpu(1)],
            [GpuShare(gpu="GPU-0", utilization_ratio=0.25, memory_bytes=7, attributed=True)],
            id="a name that fits no GPU, and processes on another",
        ),
        pytest.param(
            ("0", "7"),
            [build.gpu(0), build.gpu(1, build.process(4002, 0.5, 9))],
            [
                GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=0, attributed=True),
                GpuShare(gpu="GPU-1", utilization_ratio=0.5, memory_bytes=9, attributed=True),
            ],
            id="one of two names, and processes on a third GPU",
        ),
        pytest.param(
            ("0", "7"),
            [build.gpu(0, build.process(4001, None, None))],
            [GpuShare(gpu="GPU-0", utilization_ratio=None, memory_bytes=None, attributed=False)],
            id="and what its process does is unknown",
        ),
        pytest.param(
            ("0", "7"),
            [build.gpu(0, utilization_ratio=0.9, memory_used_bytes=9 * 2**30)],
            [GpuShare(gpu="GPU-0", utilization_ratio=None, memory_bytes=None, attributed=False, busiest_ratio=0.0)],
            id="and work that is nobody's",
        ),
        pytest.param(("7",), [build.gpu(0)], [], id="and nothing anywhere"),
    ],
)
def test_a_missing_gpu_costs_nothing_of_what_its_processes_hold_and_do_on_others(
    request_: tuple[str, ...], found: list[Gpu], shares: list[GpuShare]
) -> None:
    use = gpu_use(build.container(gpu_request=request_), OWN, build.gpus(*found), THRESHOLDS)

    assert list(use.shares) == shares
    assert (use.utilization_ratio, use.unknown and use.unknown.reason) == (None, "gpu_missing")


def test_of_a_container_whose_processes_are_unknown_a_missing_gpu_leaves_no_share() -> None:
    use = gpu_use(build.container(gpu_request=("0", "7")), None, build.gpus(build.gpu(0)), THRESHOLDS)

    assert (use.shares, use.unknown and use.unknown.reason) == ((), "gpu_missing")


def test_all_nodes_of_a_host_where_no_gpu_that_is_read_has_one_are_no_gpus() -> None:
    container = build.container(gpu_request=("dri",))

    found = gpu_use(container, OWN, build.gpus(build.gpu(0, build.process(OTHER_PID, 0.9))), THRESHOLDS)

    assert (found.gpus, found.unknown) == ((), Unknown(reason="no_gpu", because="no GPU is assigned"))


@pytest.mark.parametrize(
    ("request_", "missing"),
    [
        pytest.param(("renderD129",), "renderD129", id="one"),
        pytest.param(("dri", "renderD129"), "renderD129", id="beside all nodes"),
        pytest.param(("renderD130", "renderD129"), "renderD129", id="two"),
        pytest.param(("0", "renderD129"), None, id="beside a GPU of NVIDIA's, whose node it may be"),
        pytest.param(("all", "renderD129"), None, id="beside all of NVIDIA's"),
    ],
)
def test_a_gpu_that_was_gone_before_the_exporter_began_is_missed_by_who_was_given_its_node(
    request_: tuple[str, ...], missing: str | None
) -> None:
    found = gpu_use(build.container(gpu_request=request_), OWN, build.gpus(build.gpu(0)), THRESHOLDS)

    because = f"assigned GPU {missing} is not reported"
    assert found.unknown == (Unknown(reason="gpu_missing", because=because) if missing else None)
    assert found.utilization_ratio == (None if missing else 0.0)


def test_what_is_on_a_gpu_of_nvidias_by_its_node_has_its_memory_there_told() -> None:
    mine = build.gpu(0, build.process(4001, 0.5, 5 * 2**20))

    found = gpu_use(build.container(gpu_request=("renderD128",)), OWN, build.gpus(mine), THRESHOLDS)

    assert found.shares == (GpuShare(gpu="GPU-0", utilization_ratio=0.5, memory_bytes=5 * 2**20, attributed=True),)
    assert (found.gpus, found.utilization_ratio) == (("GPU-0",), None)


@pytest.mark.parametrize(
    ("request_", "had", "failed", "reason"),
    [
        pytest.param(("0",), ("GPU-0", "GPU-amd"), ("drm",), "source_failed", id="it was on another"),
        pytest.param(("0",), ("GPU-0",), ("drm",), None, id="it was on none of those"),
        pytest.param(("0",), ("GPU-0", "GPU-amd"), (), None, id="nothing fails, and it is on it no more"),
        pytest.param(("7",), ("GPU-0", "GPU-amd"), ("drm",), "gpu_missing", id="and misses one"),
    ],
)
def test_a_gpu_that_a_container_was_on_is_not_passed_over_while_its_source_fails(
    request_: tuple[str, ...], had: tuple[str, ...], failed: tuple[str, ...], reason: str | None
) -> None:
    readings = GpuReadings(source="test", gpus=(NVIDIA,), failed=failed)

    found = gpu_use(build.container(gpu_request=request_), OWN, readings, THRESHOLDS, had)

    assert (found.gpus, found.unknown and found.unknown.reason) == (had if failed else ("GPU-0",), reason)
    assert (found.utilization_ratio is None) == (reason is not None)


UNREAD = replace(AMD, processes=None, unknown="AMD's compute driver is there and cannot be read")


@pytest.mark.parametrize(
    ("pids", "gpus", "unlisted", "reason"),
    [
        pytest.param(OWN, (NVIDIA, UNREAD), (), "not_listed", id="its processes cannot be listed"),
        pytest.param(OWN, (NVIDIA, AMD), (4002,), "not_listed", id="the open files of one of its own cannot be"),
        pytest.param(OWN, (NVIDIA, AMD), None, "not_listed", id="those of too many cannot be"),
        pytest.param(None, (NVIDIA, AMD), (), "processes_unknown", id="its own processes are unknown"),
        pytest.param(OWN, (NVIDIA, replace(UNREAD, uuid="pci-0")), (), "not_listed", id="it goes by another name"),
        pytest.param(OWN, (NVIDIA, AMD), (OTHER_PID,), None, id="it is listed without it"),
        pytest.param(OWN, (NVIDIA,), None, None, id="it is gone"),
    ],
)
def test_a_gpu_that_a_container_was_on_counts_until_it_is_seen_without_it(
    pids: frozenset[int] | None, gpus: tuple[Gpu, ...], unlisted: tuple[int, ...] | None, reason: str | None
) -> None:
    readings = GpuReadings(source="test", gpus=gpus, unlisted=unlisted)

    found = gpu_use(build.container(gpu_request=("0",)), pids, readings, THRESHOLDS, ("GPU-0", "GPU-amd"))

    assert (found.gpus, found.unknown and found.unknown.reason) == (("GPU-0", "GPU-amd")[: 2 if reason else 1], reason)
    assert (found.utilization_ratio is None) == (reason is not None)
    assert [share.gpu for share in found.shares] == ([] if pids is None else ["GPU-0"])


def test_a_gpu_without_a_render_node_is_listed_whole_by_its_driver() -> None:
    readings = GpuReadings(source="test", gpus=(NVIDIA, build.gpu(1)), unlisted=None)

    found = gpu_use(build.container(gpu_request=("0",)), OWN, readings, THRESHOLDS, ("GPU-0", "GPU-1"))

    assert (found.gpus, found.utilization_ratio) == (("GPU-0",), 0.25)


ON_BOTH = (NVIDIA, replace(AMD, processes=(build.process(4001, 0.9),)))
FAILED = GpuReadings(source="test", gpus=(NVIDIA,), failed=("drm",), gone={"renderD128": "GPU-amd"})
BETWEEN = {
    "nothing": (),
    "its processes were unknown": ((None, build.gpus(*ON_BOTH)),),
    "its list could not be read": ((OWN, build.gpus(NVIDIA, UNREAD)),),
    "no source answered": ((OWN, None),),
    "another process of its reader had not found it yet": (
        (OWN, FAILED),
        (OWN, GpuReadings(source="test", gpus=(NVIDIA, AMD), unlisted=(4001,))),
    ),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_worked_on_a_gpu_is_not_idle_after_looks_that_could_not_see_it(
    between: tuple[tuple[frozenset[int] | None, GpuReadings | None], ...],
) -> None:
    history = ContainerHistory(THRESHOLDS)
    place = build.container(gpu_request=("0",))
    found = []

    for now_s, (pids, readings) in enumerate([(OWN, build.gpus(*ON_BOTH)), *between, (OWN, FAILED), (OWN, FAILED)]):
        seen = gpu_use(place, pids, readings, THRESHOLDS, history.gpus)
        found.append(history.observe(place, seen, ram(0), now_s=now_s))

    assert [each.gpu_idle_s for each in found] == [0.0] + [None] * (len(found) - 1)
    assert found[-1].busy_s["GPU-0"] - found[-2].busy_s["GPU-0"] == 0.25


@pytest.mark.parametrize(
    ("kind", "request_", "gpus", "unlisted", "reason"),
    [
        pytest.param("process", ("all",), (NVIDIA, UNREAD), (), "not_listed", id="a list that cannot be read"),
        pytest.param("systemd", ("all",), (NVIDIA, AMD), (4001,), "not_listed", id="its open files cannot be listed"),
        pytest.param("process", ("all",), (NVIDIA, AMD), (OTHER_PID,), None, id="another's cannot be"),
        pytest.param("process", ("all",), (NVIDIA,), None, None, id="there is no such GPU"),
        pytest.param("process", ("0",), (NVIDIA, UNREAD), (), None, id="it names a GPU of NVIDIA's"),
        pytest.param("docker", ("all",), (NVIDIA, UNREAD), (), None, id="--gpus all gives NVIDIA's alone"),
    ],
)
def test_what_sees_every_gpu_may_be_on_those_whose_processes_are_not_listed(
    kind: str, request_: tuple[str, ...], gpus: tuple[Gpu, ...], unlisted: tuple[int, ...] | None, reason: str | None
) -> None:
    readings = GpuReadings(source="test", gpus=gpus, unlisted=unlisted)

    found = gpu_use(build.container(kind=kind, gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (found.unknown and found.unknown.reason) == reason
    assert [share.gpu for share in found.shares] == ["GPU-0"]


@pytest.mark.parametrize(
    ("kind", "request_", "failed", "reason"),
    [
        pytest.param("process", ("all",), ("drm",), "source_failed", id="a process that names none"),
        pytest.param("systemd", ("all",), ("drm",), "source_failed", id="a service that names none"),
        pytest.param("process", ("0",), ("drm",), None, id="one that names a GPU of NVIDIA's"),
        pytest.param("docker", ("all",), ("drm",), None, id="--gpus all gives NVIDIA's alone"),
        pytest.param("process", ("all",), (), None, id="nothing fails"),
    ],
)
def test_what_sees_every_gpu_may_be_on_those_that_are_not_read(
    kind: str, request_: tuple[str, ...], failed: tuple[str, ...], reason: str | None
) -> None:
    readings = GpuReadings(source="test", gpus=(NVIDIA,), failed=failed)

    found = gpu_use(build.container(kind=kind, gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (found.unknown and found.unknown.reason) == reason


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        pytest.param(("all",), None, id="all of NVIDIA's, which are read"),
        pytest.param(("dri",), "gpu_missing", id="all nodes"),
        pytest.param(("0", "renderD128"), "gpu_missing", id="an index, and a node that may be of one that is missing"),
        pytest.param(("renderD128",), "gpu_missing", id="a node of a GPU that is missing"),
        pytest.param(("GPU-0",), None, id="a GPU of a source that answers"),
    ],
)
def test_where_one_of_several_sources_fails_its_gpus_are_missing(request_: tuple[str, ...], reason: str | None) -> None:
    readings = GpuReadings(source="test", gpus=(NVIDIA,), failed=("drm",))

    found = gpu_use(build.container(gpu_request=request_), OWN, readings, THRESHOLDS)

    assert (found.unknown and found.unknown.reason) == reason


@pytest.mark.parametrize(
    ("found", "attributed"),
    [
        pytest.param(build.gpu(0, build.process(4001, 0.9)), True, id="each process is measured"),
        pytest.param(build.gpu(0, build.process(4001, 0.0)), True, id="idle, and measured"),
        pytest.param(build.gpu(0, build.process(4001, None), utilization_ratio=0.9), False, id="its own is not"),
        pytest.param(build.gpu(0, build.process(OTHER_PID, None), utilization_ratio=0.9), False, id="another's is not"),
        pytest.param(build.gpu(0, utilization_ratio=0.9), False, id="nobody on the list does it"),
        pytest.param(build.gpu(0, processes=None, utilization_ratio=0.9), False, id="there is no list"),
        pytest.param(build.gpu(0, processes=None, utilization_ratio=None), None, id="a lost GPU does nothing known"),
    ],
)
@pytest.mark.behaviour("A19")
def test_where_only_the_whole_gpu_is_measured_that_is_told(found: Gpu, attributed: bool | None) -> None:
    use = gpu_use(build.container(), OWN, build.gpus(found), THRESHOLDS)

    assert [share.attributed for share in use.shares] == [attributed]
    assert (use.unknown is None) == (attributed is True)


def test_a_gpu_named_twice_has_one_share() -> None:
    found = gpu_use(build.container(gpu_request=("0", "GPU-0")), OWN, build.gpus(build.gpu(0)), THRESHOLDS)

    assert found.gpus == ("GPU-0",)
    assert len(found.shares) == 1


def test_work_seen_on_another_gpu_than_asked_for_is_no_idleness() -> None:
    elsewhere = build.gpu(1, build.process(4001, 0.9))

    assert attributed(build.gpu(0), elsewhere, request=("0",)) == (0.9, None)
    assert attributed(build.gpu(0), build.gpu(1, build.process(OTHER_PID, 0.9)), request=("0",)) == (0.0, None)


def test_unknown_processes_make_the_utilisation_unknown() -> None:
    assert attributed(build.gpu(0), pids=None) == (None, "processes_unknown")


def test_without_a_gpu_source_the_utilisation_is_unknown() -> None:
    found = gpu_use(build.container(), OWN, None, THRESHOLDS)

    assert found.utilization_ratio is None
    assert found.unknown == Unknown(reason="source_failed", because="no GPU source answers")


def test_an_unknown_says_which_gpu_and_why() -> None:
    lost = build.gpu(1, processes=None, utilization_ratio=None, unknown="GPU is lost")

    found = gpu_use(build.container(), OWN, build.gpus(build.gpu(0), lost), THRESHOLDS)

    assert found.gpus == ("GPU-0", "GPU-1")
    assert found.unknown == Unknown(reason="not_listed", because="GPU-1: GPU is lost")
    assert found.shares[1] == GpuShare(gpu="GPU-1", utilization_ratio=None, memory_bytes=None)


def test_memory_of_a_container_is_the_sum_of_its_processes_or_unknown() -> None:
    known = build.gpu(0, build.process(4001, 0.0, 10), build.process(4002, 0.0, 20), build.process(OTHER_PID, 0.0, 40))
    unknown = build.gpu(1, build.process(4001, 0.0, None))

    found = gpu_use(build.container(), OWN, build.gpus(known, unknown), THRESHOLDS)

    assert [share.memory_bytes for share in found.shares] == [30, None]


@pytest.mark.parametrize(
    ("found", "ratio", "size"),
    [
        pytest.param(
            build.gpu(0, build.process(1, 0.25, 10), utilization_ratio=0.75, memory_used_bytes=30), 0.5, 20, id="rest"
        ),
        pytest.param(
            build.gpu(0, build.process(1, 0.5, 30), utilization_ratio=0.25, memory_used_bytes=10),
            -0.25,
            -20,
            id="they are told to do and to hold more than it does and has in use",
        ),
        pytest.param(build.gpu(0, build.process(1, None, None)), None, None, id="a process unknown"),
        pytest.param(build.gpu(0, processes=None), None, None, id="no list"),
        pytest.param(build.gpu(0, utilization_ratio=None, memory_used_bytes=None), None, None, id="no figure"),
    ],
)
def test_what_no_listed_process_accounts_for(found: Gpu, ratio: float | None, size: int | None) -> None:
    assert found.unattributed_ratio == ratio
    assert gpu_attribution.unattributed_bytes(found) == size


percents = st.integers(0, 100).map(lambda percent: percent / 100)


@pytest.mark.parametrize(
    ("processes", "ratio", "size"),
    [
        pytest.param([build.process(7, 0.25, 10), build.process(8, 0.5, 20), build.process(4001, 0.1, 5)], 0.75, 30,
                     id="their sum"),
        pytest.param([build.process(4001, 0.1, 5)], 0.0, 0, id="nothing, where each is in a container"),
        pytest.param([build.process(4001, None, None)], 0.0, 0, id="nothing, whatever those in containers do"),
        pytest.param([build.process(7, None, 10), build.process(8, 0.5, None)], None, None, id="unknown by any"),
        pytest.param(None, None, None, id="unknown without a list"),
    ],
)  # fmt: skip
def test_what_processes_in_no_container_have_of_a_gpu(
    processes: list[GpuProcess] | None, ratio: float | None, size: int | None
) -> None:
    gpu = build.gpu(0, processes=None) if processes is None else build.gpu(0, *processes)

    found = gpu_attribution.unplaced(gpu, OWN)

    assert found == GpuShare(gpu="GPU-0", utilization_ratio=ratio, memory_bytes=size)


def test_a_job_that_decodes_is_busy_and_is_charged_with_its_part_of_the_gpus_own_time() -> None:
    decodes = GpuProcess(pid=4001, utilization_ratio=0.02, memory_bytes=9, busiest_ratio=0.9)
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("0",))

    def look(now_s: float) -> ContainerEvidence:
        use = gpu_use(container, OWN, build.gpus(build.gpu(0, decodes)), THRESHOLDS)
        return history.observe(container, use, RamUse(usage_bytes=1), now_s=now_s)

    look(1.0)
    found = look(2.0)

    assert (found.shares[0].utilization_ratio, found.shares[0].busiest_ratio) == (0.02, 0.9)
    assert (found.gpu_idle_s, found.gpu_not_seen_busy_s) == (0.0, 0.0)
    assert found.busy_s == {"GPU-0": pytest.approx(0.02)}


@pytest.mark.parametrize(
    ("neighbour", "total", "hidden", "idle_s"),
    [
        pytest.param(GpuProcess(OTHER_PID, 0.0, 9, busiest_ratio=0.9), 0.08, -0.82, 1.0, id="it decodes"),
        pytest.param(GpuProcess(OTHER_PID, 0.0, 9), 0.08, 0.08, None, id="it does nothing that could be that time"),
        pytest.param(GpuProcess(OTHER_PID, 0.1, 9, busiest_ratio=0.3), 0.35, 0.05, 1.0, id="as much as idle is left"),
        pytest.param(GpuProcess(OTHER_PID, 0.1, 9, busiest_ratio=0.3), 0.36, 0.06, None, id="more than that is left"),
    ],
)
def test_time_of_a_gpu_that_a_neighbours_copies_and_video_may_be_is_not_taken_for_hidden_work(
    neighbour: GpuProcess, total: float, hidden: float, idle_s: float | None
) -> None:
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("0",))
    gpu = build.gpu(0, build.process(4001), neighbour, utilization_ratio=total)

    def look(now_s: float) -> ContainerEvidence:
        return history.observe(
            container, gpu_use(container, OWN, build.gpus(gpu), THRESHOLDS), RamUse(usage_bytes=1), now_s=now_s
        )

    look(1.0)
    found = look(2.0)

    assert (gpu.hidden_ratio, found.gpu_idle_s) == (hidden, idle_s)
    assert gpu.unattributed_ratio == pytest.approx(total - (neighbour.utilization_ratio or 0.0))
    assert found.shares[0].attributed is (idle_s is not None)


work = st.lists(st.tuples(st.sampled_from([4001, 4002, 5001, 9999]), percents, st.none() | percents), max_size=6)


@given(work, percents)
def test_utilisation_adds_up_whatever_is_told_of_each(
    processes: list[tuple[int, float, float | None]], total: float
) -> None:
    listed = (GpuProcess(pid, own, 1, busiest_ratio=most) for pid, own, most in processes)
    gpu = build.gpu(0, *listed, utilization_ratio=total)
    a, b = OWN, frozenset({5001})

    uses = [gpu_use(build.container(gpu_request=("0",)), pids, build.gpus(gpu), THRESHOLDS) for pids in (a, b)]

    containers = sum(use.shares[0].utilization_ratio or 0.0 for use in uses)
    outside = gpu_attribution.unplaced(gpu, a | b).utilization_ratio
    assert containers + (outside or 0.0) + (gpu.unattributed_ratio or 0.0) == pytest.approx(total)


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        pytest.param(
            build.gpu(0, utilization_ratio=0.7, memory_used_bytes=9 * 2**30),
            (None, None),
            id="it may do what nobody listed does, and hold what nobody listed holds",
        ),
        pytest.param(
            build.gpu(0, utilization_ratio=0.7), (None, 0), id="it may do what nobody listed does, who holds nothing"
        ),
        pytest.param(build.gpu(0, utilization_ratio=0.05), (0.0, 0), id="nobody does anything: measured"),
        pytest.param(
            build.gpu(0, build.process(4001, 0.0, 9), utilization_ratio=0.7), (None, 9), id="it holds what it holds"
        ),
        pytest.param(
            build.gpu(0, build.process(4001, 0.1, 9), utilization_ratio=0.7), (0.1, 9), id="and does what it does"
        ),
        pytest.param(
            build.gpu(0, build.process(OTHER_PID, None, 9), utilization_ratio=0.7),
            (None, 0),
            id="another is not measured, and the list says who holds memory",
        ),
        pytest.param(
            build.gpu(0, build.process(OTHER_PID, None, 9), utilization_ratio=0.4, memory_used_bytes=2 * 2**30),
            (None, None),
            id="another is not measured, and somebody on no list holds memory",
        ),
        pytest.param(
            build.gpu(0, build.process(OTHER_PID, None, 9), utilization_ratio=0.05, memory_used_bytes=2 * 2**30),
            (None, 0),
            id="another is not measured, of a GPU at rest: the memory that nobody holds is its driver's",
        ),
        pytest.param(
            build.gpu(0, utilization_ratio=None, memory_used_bytes=2 * 2**30),
            (None, None),
            id="nobody knows whether the GPU works, and somebody on no list holds memory",
        ),
        pytest.param(
            build.gpu(0, attribution="none", utilization_ratio=None), (None, 0), id="nobody tells what is done on it"
        ),
    ],
)
def test_a_nothing_is_told_only_where_it_is_measured(gpu: Gpu, told: tuple[float | None, int | None]) -> None:
    use = gpu_use(build.container(gpu_request=("0",)), OWN, build.gpus(gpu), THRESHOLDS)

    (share,) = use.shares
    assert (share.utilization_ratio, share.memory_bytes) == told
    assert not (share.attributed is False and 0 in told[:1])


def test_a_look_that_cannot_compare_leaves_no_peak_of_nothing_behind() -> None:
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("0",))
    unmeasured = build.process(OTHER_PID, None, 9)

    def look(now_s: float, other: GpuProcess) -> ContainerEvidence:
        gpu = build.gpu(0, other, utilization_ratio=0.4, memory_used_bytes=2 * 2**30)
        use = gpu_use(container, OWN, build.gpus(gpu), THRESHOLDS)
        return history.observe(container, use, RamUse(usage_bytes=1), now_s=now_s)

    first = look(1.0, unmeasured)
    second = look(2.0, build.process(OTHER_PID, 0.0, 9))

    assert [each.shares[0].memory_bytes for each in (first, second)] == [None, None]
    assert (first.peak_bytes, second.peak_bytes) == ({}, {})


@pytest.mark.parametrize(
    ("attribution", "used_ratio", "told"),
    [
        pytest.param("none", 0.03, (None, 0.0, 0.0), id="a GPU at rest of which nobody tells who uses it: idle"),
        pytest.param("none", 0.7, (None, 0.0, None), id="at work for nobody listed: unknown"),
        pytest.param("process", 0.03, (0.0, None, 0.0), id="a measured 0 is the utilisation itself"),
    ],
)
def test_what_engines_did_is_told_apart_from_a_utilisation_that_cannot_be(
    attribution: str, used_ratio: float, told: tuple[float | None, float | None, float | None]
) -> None:
    gpu = build.gpu(0, build.process(4001), attribution=attribution, utilization_ratio=used_ratio)

    use = gpu_use(build.container(gpu_request=("0",)), OWN, build.gpus(gpu), THRESHOLDS)

    (share,) = use.shares
    assert (share.utilization_ratio, share.busiest_ratio, use.utilization_ratio) == told


def test_a_nothing_that_is_not_measured_is_no_peak_and_begins_no_counter() -> None:
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("0",))

    def look(now_s: float, gpu: Gpu) -> ContainerEvidence:
        use = gpu_use(container, OWN, build.gpus(gpu), THRESHOLDS)
        return history.observe(container, use, RamUse(usage_bytes=1), now_s=now_s)

    hidden = look(1.0, build.gpu(0, utilization_ratio=0.7, memory_used_bytes=9 * 2**30))
    shown = look(2.0, build.gpu(0))

    assert (hidden.peak_bytes, hidden.busy_s) == ({}, {})
    assert (shown.peak_bytes, shown.busy_s) == ({"GPU-0": 0}, {"GPU-0": 0.0})


@given(st.lists(st.tuples(st.sampled_from([4001, 4002, 9998, 9999]), percents), max_size=5), percents)
def test_a_known_utilisation_accounts_for_the_gpu_to_within_idle(
    processes: list[tuple[int, float]], total: float
) -> None:
    found = build.gpu(0, *(build.process(pid, ratio) for pid, ratio in processes), utilization_ratio=total)

    own, reason = attributed(found)

    listed = sum(ratio for _, ratio in processes)
    assert (own is None) == (reason == "unattributed") == (round(total - listed, 9) > THRESHOLDS.idle_ratio)
    if own is not None:
        assert own == pytest.approx(min(1.0, sum(ratio for pid, ratio in processes if pid in OWN)))


# Suspicion: A5, with 120 s of silence

UNKNOWN = Unknown(reason="not_listed", because="GPU is lost")
NO_RAM = Unknown(reason="no_controller", because="no memory controller")


def suspicion(seen: ContainerEvidence | None, patience: Patience | None = None, **job: Any) -> str | None:
    """Why a job is suspected that beat 120 s ago, where nothing else is said."""
    given = build.job_file(**{"beat": build.ago(120.0), **job})
    return signs_of_life.suspicion(given, seen, patience or Patience(), now=build.ago(0))


@pytest.mark.parametrize(
    ("seen", "because"),
    [
        pytest.param(build.evidence(gpu_idle_s=120.0, ram_still_s=120.0), None, id="GPU idle and RAM static is wedged"),
        pytest.param(
            build.evidence(gpu_idle_s=500.0, ram_still_s=2.0),
            "RAM moved or was unseen 2 s ago",
            id="GPU idle and RAM moving is loading, decoding or staging",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=0.0, ram_still_s=500.0),
            "GPU was busy or unseen 0 s ago",
            id="GPU busy and RAM static is a slow step",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=0.0, ram_still_s=0.0),
            "GPU was busy or unseen 0 s ago",
            id="GPU busy and RAM moving is a slow step",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=119.9, ram_still_s=500.0),
            "GPU was busy or unseen 120 s ago",
            id="GPU idle not for long enough",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=500.0, ram_still_s=119.9),
            "RAM moved or was unseen 120 s ago",
            id="RAM still not for long enough",
        ),
        pytest.param(
            build.evidence(gpu_idle_s=None, gpu_unknown=UNKNOWN),
            "GPU unknown: GPU is lost",
            id="GPU unknown is not idle",
        ),
        pytest.param(build.evidence(gpu_idle_s=None), "GPU unknown: not measured", id="GPU unknown without a word"),
        pytest.param(
            build.evidence(ram_still_s=None, ram_unknown=NO_RAM), "RAM unknown: no memory controller", id="RAM unknown"
        ),
        pytest.param(build.evidence(ram_still_s=None), "RAM unknown: not measured", id="RAM unknown without a word"),
        pytest.param(None, "its container is unknown", id="container unknown"),
    ],
)
def test_a_silent_job_is_suspected_with_the_sign_of_life_named(
    seen: ContainerEvidence | None, because: str | None
) -> None:
    assert suspicion(seen) == because


@pytest.mark.parametrize(
    ("phase_started", "because"),
    [
        (build.ago(119.6), "it went on to this phase 120 s ago"),
        (build.ago(900.0, boot_id="before"), "phase unknown: not measured"),
    ],
)
def test_a_job_whose_file_tells_of_a_phase_that_is_younger_than_its_beat_is_suspected(
    phase_started: Stamp, because: str
) -> None:
    assert suspicion(build.evidence(), phase_started=phase_started) == because


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
    assert suspicion(None, stall_timeout_s=stall_timeout_s, beat=beat) is None


# Quiet: A2 to A5 and A7, for how long

QUIET: dict[str, Any] = {
    "gpu_idle_s": 500.0, "gpu_lost_s": 501.0, "ram_still_s": 510.0,
    "io_still_s": 520.0, "fault_still_s": 530.0, "cpu_still_s": 540.0,
}  # fmt: skip
"""Signs of life that a container has not shown, by the time since."""

WORK = ("io_still_s", "fault_still_s", "cpu_still_s")
IN_WORK = (Phase.LOAD, Phase.EVAL, Phase.SAVE, Phase.CHECKPOINT)


QUIET_OF: Final[dict[str, dict[str, bool]]] = {"idle": {}, "lost": {"gpu_lost": True}, "apart": {"apart": True}}
"""Of whom it is asked: of a job with its GPU idle or lost, or of one alone of those that share a container."""


def quiet(
    phase: Phase = Phase.STEP, *, of: str = "idle", place: dict[str, Any] | None = None, **job: Any
) -> float | None:
    """For how long it was quiet that beat 600 s ago and entered its phase 700 s ago, but for what is said."""
    given = build.job_file(**{"phase": phase, "beat": build.ago(600.0), "phase_started": build.ago(700.0), **job})
    return signs_of_life.quiet_s(given, build.evidence(**QUIET | (place or {})), now=build.ago(0), **QUIET_OF[of])


@pytest.mark.behaviour("A5")
@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("of", QUIET_OF)
def test_quiet_lasts_for_as_long_as_the_sign_of_life_that_was_there_last(phase: Phase, of: str) -> None:
    gpu, other = ("gpu_lost_s", "gpu_idle_s") if of == "lost" else ("gpu_idle_s", "gpu_lost_s")
    # The page cache is its container's as a whole: of one worker of several its I/O stands for it.
    always = ("io_still_s",) if of == "apart" else ()
    counts = (gpu, "ram_still_s", *(WORK if phase in IN_WORK else always))

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

    assert signs_of_life.quiet_s(job, None, now=build.ago(0), **QUIET_OF[of]) is None


@given(
    seen=st.fixed_dictionaries({each: st.none() | st.sampled_from((0.0, 119.0, 120.0, 500.0)) for each in QUIET}),
    phase=st.sampled_from(Phase),
    beat_age_s=st.none() | st.sampled_from((119.0, 120.0, 500.0)),
    phase_age_s=st.sampled_from((119.0, 120.0, 500.0)),
)
def test_a_silent_job_is_suspected_where_it_is_not_known_to_have_been_quiet_for_as_long_as_it_may(
    seen: dict[str, float | None], phase: Phase, beat_age_s: float | None, phase_age_s: float
) -> None:
    patience = Patience(load_s=0.0, eval_s=0.0, checkpoint_s=0.0, save_s=0.0)
    beat = None if beat_age_s is None else build.ago(beat_age_s)
    job: dict[str, Any] = {"phase": phase, "beat": beat, "phase_started": build.ago(phase_age_s)}
    silent = beat_age_s is not None and beat_age_s >= 120.0 and phase is not Phase.IDLE

    found_s = quiet(place=seen, **job)

    suspected = suspicion(build.evidence(**seen), patience, **job) is not None
    assert suspected == (silent and (found_s is None or found_s < 120.0))


# Busy but stuck: A14b and A19, where the GPU is pegged or unknown


def gpus_at(*ratios: float | None, unknown: Unknown | None = None) -> GpuUse:
    """One moment of a container's GPUs: its share of each."""
    shares = tuple(
        GpuShare(gpu=f"GPU-{number}", utilization_ratio=ratio, memory_bytes=None) for number, ratio in enumerate(ratios)
    )
    known = [ratio for ratio in ratios if ratio is not None]
    return GpuUse(
        gpus=tuple(share.gpu for share in shares),
        shares=shares,
        utilization_ratio=None if unknown or None in ratios else max(known, default=None),
        unknown=unknown or (NOT_MEASURED if None in ratios else None),
    )


NOT_MEASURED = Unknown(reason="not_measured", because="the driver does not say")
NOBODY_ASKED = gpus_at(unknown=Unknown(reason="source_failed", because="no GPU source answers"))
ON_HUNG = gpus_at(None)._replace(left_out=True)
WITHOUT_GPU = Unknown(reason=NO_GPU, because="no GPU is assigned")
OUTAGE = int(OUTAGE_S)
ON_WHICH = gpus_at(unknown=WITHOUT_GPU)._replace(may_be_elsewhere=True)


def proved(*looks: tuple[float, GpuUse], paused_last: bool = False) -> tuple[float | None, float | None]:
    """For how long its GPUs were pegged, and not seen busy, after the last of some looks."""
    history, now_s = ContainerHistory(THRESHOLDS), 1000.0
    for number, (gap_s, found) in enumerate(looks, 1):
        now_s += gap_s
        container = build.container(paused=paused_last and number == len(looks))
        last = history.observe(container, found, ram(1), now_s=now_s)
    return last.gpu_pegged_s, last.gpu_not_seen_busy_s


@pytest.mark.parametrize(
    ("looks", "pegged_s", "not_seen_busy_s"),
    [
        pytest.param([(0, gpus_at(1.0))], 0, 0, id="nothing at the first look"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(0.99)), (2, gpus_at(1.0))], 3, 0, id="pegged throughout"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(0.98)), (1, gpus_at(1.0))], 0, 0, id="a pause starts it anew"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(0.0)), (1, gpus_at(1.0))], 0, 0, id="so does one that is idle"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(None)), (4, gpus_at(1.0))], 5, 0, id="not one unknown look"),
        pytest.param([(0, gpus_at(1.0)), (1, NOBODY_ASKED), (4, gpus_at(1.0))], 5, 0, id="nor one nobody could ask"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(None)), (4.1, gpus_at(1.0))], 0, 0, id="but unknown past a gap"),
        pytest.param([(0, gpus_at(1.0)), (3, gpus_at(None)), (1, gpus_at(None)), (1, gpus_at(1.0)), (3, gpus_at(None)),
                      (2, gpus_at(1.0))], 10, 0, id="each time it is seen pegged it is told anew how long that holds"),
        pytest.param([(0, gpus_at(1.0)), *[(1, gpus_at(None)), (1, gpus_at(1.0))] * 20], 40, 0, id="known in half"),
        pytest.param([(0, gpus_at(1.0)), *[*[(1, gpus_at(None))] * 3, (1, gpus_at(1.0))] * 9], 4, 0,
                     id="of which most looks tell nothing is not pegged for long"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(None))], None, 1, id="unknown is not pegged, and not seen busy"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (1, gpus_at(None, 0.5)), (1, gpus_at(1.0, 0.0))], 0, 0,
                     id="another works where its own is unknown"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (1, gpus_at(0.0, None)), (1, gpus_at(1.0, 0.0))], 0, 0,
                     id="it idles where another is unknown"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (1, gpus_at(None, 1.0)), (1, gpus_at(1.0, 0.0))], 0, 0,
                     id="in turns, where its own is unknown"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (1, gpus_at(1.0, None)), (1, gpus_at(1.0, 0.0))], 2, 0,
                     id="as before where the idle one is unknown"),
        pytest.param([(0, gpus_at(1.0, 1.0)), (1, gpus_at(1.0))], 0, 0, id="another set of GPUs"),
        pytest.param([(0, gpus_at(1.0, 0.05)), (2, gpus_at(1.0, 0.0))], 2, 0, id="the others idle"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (2, gpus_at(1.0, 0.06))], 0, 0, id="another one works"),
        pytest.param([(0, gpus_at(1.0, 0.5)), (2, gpus_at(1.0, 0.5))], 0, 0, id="another one works throughout"),
        pytest.param([(0, gpus_at(1.0, None)), (1, gpus_at(1.0, None)._replace(unknown=None))], None, 0,
                     id="unknown without a word"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (2, gpus_at(0.0, 1.0))], 0, 0, id="in turns is no stillness"),
        pytest.param([(0, gpus_at(1.0, 1.0)), (2, gpus_at(1.0, 1.0))], 2, 0, id="both pegged"),
        pytest.param([(0, gpus_at(1.0)), (5.1, gpus_at(1.0))], 0, 0, id="a gap starts it anew"),
        pytest.param([(0, gpus_at(0.0)), (2, gpus_at(0.05))], 0, 2, id="idle is not pegged, and not seen busy"),
        pytest.param([(0, gpus_at(None)), (3, gpus_at(None))], None, 3, id="unknown throughout"),
        pytest.param([(0, gpus_at(None)), (3, gpus_at(None, 0.06))], None, 0, id="one of two seen busy"),
        pytest.param([(0, gpus_at(None)), (5.1, gpus_at(None))], None, 0, id="a gap starts that anew too"),
        pytest.param([(0, gpus_at(0.0)), (1, NOBODY_ASKED)], None, None, id="whom nobody could ask was not seen idle"),
        pytest.param([(0, gpus_at(0.0)), (1, NOBODY_ASKED), (4.1, gpus_at(0.0))], 0, 0, id="which starts it anew"),
        pytest.param([(0, gpus_at(0.0)), (1, NOBODY_ASKED), (4, gpus_at(0.0))], 0, 5, id="but for a few seconds"),
        pytest.param([(0, gpus_at(0.0)), (1, ON_HUNG)], None, None, id="nor at whom nobody looks, as its GPU hangs"),
        pytest.param([(0, gpus_at(0.0)), (1, ON_HUNG), (4.1, gpus_at(0.0))], 0, 0, id="which starts it anew, too"),
        pytest.param([(0, gpus_at(0.0)), (1, ON_HUNG), (4, gpus_at(0.0))], 0, 5, id="and for a few seconds does not"),
        pytest.param([(0, gpus_at(0.0)), (1, gpus_at(None, 0.9)._replace(left_out=True)), (1, gpus_at(0.0))], 0, 0,
                     id="unless another was busy meanwhile"),
        pytest.param([(0, gpus_at(0.0)), *[(1, NOBODY_ASKED)] * 1200], None, None, id="a short outage"),
        pytest.param([(0, gpus_at(0.0)), *[(1, NOBODY_ASKED)] * 1201], None, 1200, id="a long one, since it began"),
        pytest.param([*[(1, NOBODY_ASKED)] * 1202], None, 1201, id="and of who was never seen, likewise"),
        pytest.param([(0, gpus_at(0.0)), *[(1, ON_HUNG)] * 1201], None, 1200, id="and whose GPU hangs"),
        pytest.param([*[(1, NOBODY_ASKED)] * 10, *[(1, ON_HUNG)] * 1191], None, 1200, id="as one outage, as it begins"),
        pytest.param([*[(1, ON_HUNG)] * 700, (1, gpus_at(None, 0.9)._replace(left_out=True)), *[(1, ON_HUNG)] * 700],
                     None, 700, id="but from when another was seen busy in it"),
        pytest.param([*[(1, NOBODY_ASKED)] * 1300, (1, gpus_at(0.0))], 0, 0, id="and anew as somebody answers"),
        pytest.param([*[(1, NOBODY_ASKED)] * 1300, (1, gpus_at(0.0)), *[(1, NOBODY_ASKED)] * 1200], None, None,
                     id="which ends the outage"),
        pytest.param([*[(1, NOBODY_ASKED)] * 1300, (5.1, NOBODY_ASKED)], None, None, id="and so does a gap"),
        pytest.param([*[(1, ON_WHICH)] * 1300], None, None, id="not of who was given none: it may be on one"),
        pytest.param([(0, gpus_at(unknown=WITHOUT_GPU)), (1, gpus_at(unknown=WITHOUT_GPU))], None, 1, id="no GPU"),
        pytest.param([(0, ON_WHICH), (1, ON_WHICH)], None, None, id="no GPU, and it may be on one all the same"),
        pytest.param([(0, gpus_at(unknown=WITHOUT_GPU)), (1, ON_WHICH), (1, gpus_at(unknown=WITHOUT_GPU))], None, 0,
                     id="which starts that anew"),
        pytest.param([(0, gpus_at(0.0, unknown=WITHOUT_GPU)), (1, gpus_at(0.0, unknown=WITHOUT_GPU))], None, 1,
                     id="on a GPU that it was not given"),
    ],
)  # fmt: skip
def test_what_its_gpus_prove_of_a_container(
    looks: list[tuple[float, GpuUse]], pegged_s: float | None, not_seen_busy_s: float | None
) -> None:
    assert proved(*looks) == (pegged_s, not_seen_busy_s)


LEFT_OUT = build.gpu(
    1, processes=None, utilization_ratio=None, unknown="left out", figures=GpuFigures(unknown={"gpu": HUNG}), lost=None
)


@pytest.mark.parametrize(
    ("request_", "had", "reason", "left_out"),
    [
        pytest.param(("1",), (), HUNG, True, id="its only one"),
        pytest.param(("0", "1"), (), HUNG, True, id="one of two"),
        pytest.param(("all",), (), HUNG, True, id="one of all"),
        pytest.param(("0",), ("GPU-0", "GPU-1"), HUNG, True, id="one that it was on"),
        pytest.param(("0:1",), (), "gpu_missing", True, id="an instance, which is gone meanwhile"),
        pytest.param(("0",), ("GPU-0", "MIG-1"), "not_listed", True, id="an instance that it was on"),
        pytest.param(None, (), NO_GPU, True, id="none that it was given, and it may be there"),
        pytest.param(("0",), (), None, False, id="another's"),
    ],
)
def test_of_who_may_be_on_a_gpu_that_hangs_it_is_not_known_that_it_rests(
    request_: tuple[str, ...] | None, had: tuple[str, ...], reason: str | None, *, left_out: bool
) -> None:
    container = build.container(gpu_request=request_)

    found = gpu_use(container, OWN, build.gpus(build.gpu(0), LEFT_OUT), THRESHOLDS, had)
    lost = gpu_use(container, OWN, build.gpus(build.gpu(0), replace(LEFT_OUT, figures=GpuFigures())), THRESHOLDS, had)

    assert (found.unknown and found.unknown.reason, found.left_out) == (reason, left_out)
    assert (lost.unknown and lost.unknown.reason) == ("not_listed" if reason == HUNG else reason)
    assert not lost.left_out


@pytest.mark.parametrize(
    ("request_", "failed", "left_out"),
    [
        pytest.param(("0",), NUMBERED, True, id="a GPU by its index"),
        pytest.param(("all",), NUMBERED, True, id="every GPU of NVIDIA's"),
        pytest.param(("renderD129",), WITH_NODES, True, id="a render node"),
        pytest.param(("renderD128",), NUMBERED, False, id="one of the source that answers"),
    ],
)
def test_of_two_sources_one_that_fails_has_looked_at_nobody_on_its_gpus(
    request_: tuple[str, ...], failed: str, *, left_out: bool
) -> None:
    container, other = build.container(gpu_request=request_), build.gpu(1, node="renderD128")
    history = ContainerHistory(THRESHOLDS)

    fails = replace(build.gpus(other), failed=(failed,), nvidia_unread=failed == NUMBERED)
    told = [
        history.observe(container, history.use(container, OWN, fails), ram(1), now_s=1000.0 + second)
        for second in range(OUTAGE + 1)
    ]

    assert gpu_use(container, OWN, fails, THRESHOLDS).left_out is left_out
    assert [each.gpu_not_seen_busy_s for each in told[-2:]] == [None if left_out else OUTAGE - 1.0, OUTAGE]


def test_a_driver_that_hangs_about_a_gpu_moves_no_container_of_it_towards_being_stuck() -> None:
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("1",))
    readings = build.gpus(build.gpu(0), LEFT_OUT)
    process = ProcessWork(start_ticks=1, io_bytes=0, faults=0, cpu_s=0.0)
    told = [
        history.observe(
            container, history.use(container, OWN, readings), ram(1), WorkUse(processes={1: process}), now_s=1000.0 + s
        )
        for s in range(30)
    ]

    assert {(each.gpu_not_seen_busy_s, each.unmoved_s) for each in told} == {(None, None)}
    assert told[-1].work_still_s == 29


NEIGHBOURS = build.gpus(build.gpu(0, build.process(OTHER_PID, 0.9)), build.gpu(1, node="renderD128"))


@pytest.mark.parametrize(
    ("readings", "may_be"),
    [
        pytest.param(NEIGHBOURS, False, id="each lists whoever is on it, and it is not there"),
        pytest.param(build.gpus(), False, id="there is no GPU"),
        pytest.param(build.gpus(build.gpu(0, build.process(OTHER_PID, None), utilization_ratio=1.0)), True,
                     id="what another does is not measured, so that the rest may be its own"),
        pytest.param(build.gpus(build.gpu(0, build.process(OTHER_PID, None), utilization_ratio=0.05)), False,
                     id="another is not measured, on a GPU that is idle"),
        pytest.param(build.gpus(build.gpu(0, utilization_ratio=None)), True, id="the use of one is unknown"),
        pytest.param(build.gpus(build.gpu(0, utilization_ratio=None, lost=True)), True,
                     id="one is lost: until it is there again nobody knows"),
        pytest.param(None, True, id="no source answers"),
        pytest.param(replace(NEIGHBOURS, failed=("nvml",)), True, id="one of two sources fails"),
        pytest.param(replace(NEIGHBOURS, nvidia_unread=True), True, id="NVIDIA's are there, and are not read"),
        pytest.param(replace(NEIGHBOURS, gone={"renderD129": "GPU-9"}), True, id="one was read before"),
        pytest.param(replace(NEIGHBOURS, unlisted=(4001,)), True, id="its open files cannot be read"),
        pytest.param(replace(NEIGHBOURS, unlisted=None), True, id="those of many cannot"),
        pytest.param(build.gpus(build.gpu(0, processes=None)), True, id="the processes of one are not listed"),
        pytest.param(build.gpus(build.gpu(0, utilization_ratio=0.06)), True, id="one is used by nobody on its list"),
        pytest.param(build.gpus(build.gpu(0, utilization_ratio=0.05)), False, id="no more than idly"),
    ],
)  # fmt: skip
def test_whether_who_was_given_no_gpu_may_be_on_one(readings: GpuReadings | None, *, may_be: bool) -> None:
    without = build.container(gpu_request=None)

    assert gpu_use(without, frozenset({4001}), readings, THRESHOLDS).may_be_elsewhere is may_be
    assert gpu_use(without, None, readings, THRESHOLDS).may_be_elsewhere


def test_a_paused_container_proves_nothing_and_begins_anew() -> None:
    looks = [(0.0, gpus_at(1.0)), (1.0, gpus_at(1.0))]

    assert proved(*looks, paused_last=True) == (None, None)


def test_an_outage_that_a_container_was_paused_in_begins_anew_for_it() -> None:
    history, told = ContainerHistory(THRESHOLDS), []
    for second in range(2501):
        container = build.container(paused=second == 1300)
        found = history.observe(container, NOBODY_ASKED, ram(1), now_s=1000.0 + second)
        told.append(found.gpu_not_seen_busy_s)

    assert (told[1199], told[1200], told[1299]) == (None, 1200.0, 1299.0)
    assert set(told[1300:2501]) == {None}


def test_a_driver_that_is_dead_for_long_leaves_what_does_nothing_unmoved_and_not_what_works() -> None:
    def after(seconds: int, cpu_s: float) -> float | None:
        history = ContainerHistory(THRESHOLDS)
        for second in range(seconds + 1):
            work = WorkUse(processes={1: ProcessWork(start_ticks=1, io_bytes=0, faults=0, cpu_s=cpu_s * second)})
            found = history.observe(build.container(), NOBODY_ASKED, ram(1), work, now_s=1000.0 + second)
        return found.unmoved_s

    assert (after(1199, 0.0), after(1200, 0.0)) == (None, 1200.0)
    assert after(1200, 0.5) == 0.0


def pauses_seen(*looks: tuple[float, float | None]) -> tuple[tuple[float, float], ...]:
    """The pauses after looks so far apart, each with when the kernel said that all of it is frozen."""
    history, now_s = ContainerHistory(THRESHOLDS), 1000.0
    for gap_s, frozen_s in looks:
        now_s += gap_s
        container = build.container(paused=frozen_s is not None)
        last = history.observe(container, gpus_at(1.0), ram(1), now_s=now_s, frozen_s=frozen_s)
    return last.pauses


@pytest.mark.parametrize(
    ("looks", "pauses"),
    [
        pytest.param([(0, None), (1, None)], (), id="none"),
        pytest.param([(0, None), (1, 1001.1), (1, None)], (), id="one look proves no time"),
        pytest.param([(0, 1000.1), (1, 1001.3)], ((1000.1, 1001.3),), id="to the next look, by the kernel's time"),
        pytest.param([(0, 1000.1), (1, 1001.3), (1, 1002.2), (1, None)], ((1000.1, 1002.2),), id="and on to another"),
        pytest.param([(0, 1000.0), (5, 1005.0)], ((1000.0, 1005.0),), id="as far apart as samples may be"),
        pytest.param([(0, 1000.0), (5.1, 1005.1)], (), id="but no further"),
        pytest.param([(0, 1000.0), (1, 1000.0)], (), id="nor where no time has passed"),
        pytest.param([(0, 1000.0), (1, 1001.0), (1, None), (1, 1003.0), (2, 1005.0)],
                     ((1000.0, 1001.0), (1003.0, 1005.0)), id="two"),
        pytest.param([(0, 1000.0), (1, 1001.0), (6, 1007.0), (1, 1008.0)],
                     ((1000.0, 1001.0), (1007.0, 1008.0)), id="what nobody saw between is none"),
    ],
)  # fmt: skip
def test_a_pause_is_as_long_as_it_was_seen(
    looks: list[tuple[float, float | None]], pauses: tuple[tuple[float, float], ...]
) -> None:
    assert pauses_seen(*looks) == pauses


def test_the_oldest_pauses_are_forgotten_first() -> None:
    looks = [(1.0, each) for number in range(PAUSES_MAX + 1) for each in (3.0 * number, 3.0 * number + 1.0, None)]

    seen = pauses_seen(*looks)

    assert (len(seen), seen[0], seen[-1]) == (PAUSES_MAX, (3.0, 4.0), (3.0 * PAUSES_MAX, 3.0 * PAUSES_MAX + 1.0))


def test_what_was_pegged_before_a_pause_begins_anew_after_it() -> None:
    history = ContainerHistory(THRESHOLDS)
    for now_s, paused in ((1000.0, False), (1001.0, False), (1002.0, True)):
        history.observe(build.container(paused=paused), gpus_at(1.0), ram(1), now_s=now_s)

    first = history.observe(build.container(), gpus_at(1.0), ram(1), now_s=1003.0)
    second = history.observe(build.container(), gpus_at(1.0), ram(1), now_s=1004.0)

    assert (first.gpu_pegged_s, second.gpu_pegged_s) == (0.0, 1.0)


# Work: A5, where GPU and RAM tell too little


NO_IO = Unknown(reason="io_unreadable", because="the kernel does not say")


@pytest.mark.parametrize("phase", [Phase.LOAD, Phase.EVAL, Phase.SAVE, Phase.CHECKPOINT])
@pytest.mark.parametrize(
    ("changes", "because"),
    [
        pytest.param({}, None, id="no work either is wedged"),
        pytest.param({"io_still_s": 3.0}, "its processes worked or were unseen 3 s ago", id="I/O: a warm load"),
        pytest.param({"fault_still_s": 4.0}, "its processes worked or were unseen 4 s ago", id="faults: a mapped file"),
        pytest.param({"cpu_still_s": 119.9}, "its processes worked or were unseen 120 s ago", id="CPU: it unpacks"),
        pytest.param({"io_still_s": None, "work_unknown": NO_IO}, "work unknown: the kernel does not say",
                     id="unknown is not still"),
        pytest.param({"cpu_still_s": None}, "work unknown: not measured", id="unknown without a word"),
        pytest.param({"ram_still_s": 2.0}, "RAM moved or was unseen 2 s ago", id="RAM is named first"),
    ],
)  # fmt: skip
def test_in_a_load_an_evaluation_a_save_and_a_checkpoint_work_is_a_sign_of_life(
    phase: Phase, changes: dict[str, object], because: str | None
) -> None:
    seen = build.evidence(**changes)

    patience = Patience(load_s=0.0, eval_s=0.0, checkpoint_s=0.0, save_s=0.0)

    assert suspicion(seen, patience, phase=phase) == because


def test_in_its_steps_work_is_none_for_a_driver_that_hangs_may_spin() -> None:
    seen = build.evidence(io_still_s=0.0, fault_still_s=None, cpu_still_s=0.0)

    assert suspicion(seen, phase=Phase.STEP) is None


# A GPU that is pegged while its process spins; and one of which nothing is known, whose process sleeps.
SPINS = {
    "gpu_pegged_s": 600.0, "gpu_not_seen_busy_s": 0.0, "cpu_still_s": 0.0,
    "ram_still_s": 900.0, "io_still_s": 800.0, "fault_still_s": 700.0,
}  # fmt: skip
SLEEPS = {**SPINS, "gpu_pegged_s": None, "gpu_not_seen_busy_s": 650.0, "cpu_still_s": 640.0}


@pytest.mark.parametrize(
    ("seen", "unmoved_s"),
    [
        pytest.param(SPINS, 600.0, id="a pegged GPU, whatever its process does"),
        pytest.param({**SPINS, "gpu_not_seen_busy_s": None}, 600.0, id="a pegged GPU alone"),
        pytest.param({**SPINS, "cpu_still_s": None}, 600.0, id="a pegged GPU, and CPU time unknown"),
        pytest.param({**SPINS, "gpu_pegged_s": 0.0}, 0.0, id="a GPU that pauses"),
        pytest.param({**SPINS, "ram_still_s": 4.0}, 4.0, id="RAM: it loads"),
        pytest.param({**SPINS, "io_still_s": 3.0}, 3.0, id="I/O: it reads"),
        pytest.param({**SPINS, "fault_still_s": 2.0}, 2.0, id="faults: it compiles"),
        pytest.param({**SPINS, "ram_still_s": None}, None, id="RAM unknown"),
        pytest.param({**SPINS, "io_still_s": None}, None, id="I/O unknown"),
        pytest.param({**SPINS, "fault_still_s": None}, None, id="faults unknown"),
        pytest.param({**SPINS, "gpu_pegged_s": None}, 0.0, id="a GPU that was busy until it became unknown"),
        pytest.param(SLEEPS, 640.0, id="a GPU that is unknown, and a process that sleeps"),
        pytest.param({**SLEEPS, "gpu_pegged_s": 0.0}, 640.0, id="a GPU that is idle"),
        pytest.param({**SLEEPS, "gpu_not_seen_busy_s": 5.0}, 5.0, id="a GPU that was busy of late"),
        pytest.param({**SLEEPS, "cpu_still_s": 1.0}, 1.0, id="a GPU that is unknown, and a process that may compute"),
        pytest.param({**SLEEPS, "cpu_still_s": None}, None, id="a GPU that is unknown, and CPU time too"),
        pytest.param({**SLEEPS, "gpu_not_seen_busy_s": None}, None, id="no GPU"),
    ],
)  # fmt: skip
def test_nothing_of_it_moved_for_as_long_as_its_gpu_spun_or_it_was_at_rest_and_all_else_was_still(
    seen: dict[str, float | None], unmoved_s: float | None
) -> None:
    assert build.evidence(**seen).unmoved_s == unmoved_s


@pytest.mark.parametrize("sign", ["gpu_pegged_s", "ram_still_s", "io_still_s", "fault_still_s"])
def test_it_spins_for_as_long_as_the_last_sign_of_it_lasts_and_not_where_one_is_unknown(sign: str) -> None:
    assert build.evidence(**SPINS).spinning_s == 600.0
    assert build.evidence(**{**SPINS, sign: 5.0}).spinning_s == 5.0
    assert build.evidence(**{**SPINS, sign: None}).spinning_s is None
    assert build.evidence(**SLEEPS).spinning_s is None


@given(seen=st.fixed_dictionaries({each: st.none() | st.sampled_from((0.0, 1.0, 2.0)) for each in SPINS}))
def test_who_is_unmoved_for_a_time_has_shown_each_sign_of_it_for_that_time(seen: dict[str, float | None]) -> None:
    def lasted(*signs: str) -> bool:
        return all((figure := seen[each]) is not None and figure >= 1.0 for each in signs)

    found_s = build.evidence(**seen).unmoved_s

    of_its_gpu = lasted("gpu_pegged_s") or lasted("gpu_not_seen_busy_s", "cpu_still_s")
    assert (found_s is not None and found_s >= 1.0) == (
        lasted("ram_still_s", "io_still_s", "fault_still_s") and of_its_gpu
    )


def test_a_job_is_suspected_by_the_silence_that_it_is_allowed_in_its_phase() -> None:
    seen = build.evidence(gpu_idle_s=1.0)
    patience = Patience(eval_s=200.0)

    found = {age_s: suspicion(seen, patience, phase=Phase.EVAL, beat=build.ago(age_s)) for age_s in (199.5, 200.0)}

    assert found == {199.5: None, 200.0: "GPU was busy or unseen 1 s ago"}


RATES = Thresholds(io_still_bytes_per_s=100.0, faults_still_per_s=10.0, cpu_still_ratio=0.1, gap_max_s=5.0)

Look = tuple[float, dict[int, ProcessWork] | None]


def worked(io_bytes: int | None = 0, faults: int = 0, cpu_s: float = 0.0, *, start_ticks: int = 5) -> ProcessWork:
    return ProcessWork(start_ticks=start_ticks, io_bytes=io_bytes, faults=faults, cpu_s=cpu_s)


def still(*looks: Look) -> tuple[float | None, float | None, float | None]:
    """For how long I/O, faults and CPU have been still after the last look: seconds since the one before, and work."""
    history, now_s = ContainerHistory(RATES), 1000.0
    for gap_s, found in looks:
        now_s += gap_s
        last = history.observe(build.container(), use(0.0), ram(1), WorkUse(processes=found), now_s=now_s)
    return last.io_still_s, last.fault_still_s, last.cpu_still_s


def steady(seconds: int, *, io: int = 0, faults: int = 0, cpu_s: float = 0.0, after: int = 0) -> list[Look]:
    """One process that does so much every second, for so long; `after` so many seconds of it already."""
    return [
        (1.0, {1: worked(io * total, faults * total, cpu_s * total)}) for total in range(after, after + seconds + 1)
    ]


def asked(io: int | None, *, start_ticks: int = 9) -> Look:
    """A process that does nothing, and another one beside it, as of a health check."""
    return 1.0, {1: worked(), 2: worked(io, start_ticks=start_ticks)}


STARTED = {1: worked(), 2: worked(start_ticks=9)}


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        pytest.param(steady(0, io=10**9), (0.0, 0.0, 0.0), id="the first look starts them: nothing is known before"),
        pytest.param(steady(30), (30.0, 30.0, 30.0), id="they count while nothing is done"),
        pytest.param(steady(30, io=100, faults=10), (30.0, 30.0, 30.0), id="at the rates is still"),
        pytest.param(steady(30, io=101), (0.0, 30.0, 30.0), id="I/O over its rate"),
        pytest.param(steady(30, faults=11), (30.0, 0.0, 30.0), id="faults over their rate"),
        pytest.param(steady(30, cpu_s=0.11), (30.0, 30.0, 0.0), id="CPU over its rate"),
        pytest.param([*steady(20), (1.0, {1: worked(1000)}), *[(1.0, {1: worked(1000)})] * 9], (30.0, 30.0, 30.0),
                     id="a burst within the average of ten seconds is none"),
        pytest.param([*steady(20), (1.0, {1: worked(1001)}), *[(1.0, {1: worked(1001)})] * 9], (0.0, 30.0, 30.0),
                     id="a greater one is life until the ten seconds are over"),
        pytest.param([*steady(20), (1.0, {1: worked(1001)}), *[(1.0, {1: worked(1001)})] * 10], (10.0, 31.0, 31.0),
                     id="and then it has been still since that one"),
        pytest.param([*steady(20, io=200), *[(1.0, {1: worked(4000)})] * 5, (1.0, {1: worked(4000)})],
                     (6.0, 26.0, 26.0), id="or since the last look that was over the rate itself"),
        pytest.param([(0.0, {1: worked()}), *[(3.0, {1: worked(0)})] * 4, (3.0, {1: worked(1001)})],
                     (0.0, 15.0, 15.0), id="and no smaller a one where looks are further apart"),
        pytest.param([*steady(20), asked(5000)], (21.0, 21.0, 21.0), id="what a process does as it starts is none"),
        pytest.param([*steady(20), asked(5000), asked(10000)], (22.0, 22.0, 22.0),
                     id="it starts until its second look"),
        pytest.param([*steady(20), asked(5000), asked(10000), asked(11001)], (0.0, 23.0, 23.0),
                     id="what it does from then on is work"),
        pytest.param([*steady(20), *[(1.0, STARTED)] * 2, asked(1001)], (0.0, 23.0, 23.0),
                     id="be that a look at which nobody had run"),
        pytest.param([*steady(20), (1.0, {1: worked(5000, start_ticks=9)})], (21.0, 21.0, 21.0),
                     id="so does one that took over a pid start"),
        pytest.param([*steady(20), asked(None)], (None, 21.0, 21.0), id="its I/O unknown is no stillness"),
        pytest.param([*steady(20), (1.0, {1: worked(5000), 2: worked(start_ticks=9)})], (0.0, 21.0, 21.0),
                     id="whoever was there works on beside it"),
        pytest.param([*steady(20), *(asked(5000, start_ticks=9 + each // 2) for each in range(10))],
                     (30.0, 30.0, 30.0), id="one every other second could be asking"),
        pytest.param([*steady(20), *(asked(5000, start_ticks=9 + each) for each in range(5))], (25.0, 25.0, 25.0),
                     id="five of them in ten seconds could be"),
        pytest.param([*steady(20), *(asked(5000, start_ticks=9 + each) for each in range(6))], (0.0, 26.0, 26.0),
                     id="who starts one in more looks than that works by them"),
        *(pytest.param([*steady(20), *((gap_s, asked(5000, start_ticks=9 + each)[1]) for each in range(20))],
                       (0.0, 20 + 20 * gap_s, 20 + 20 * gap_s), id=f"so it does where looks are {gap_s} s apart")
          for gap_s in (1.5, 2.5, 4.5)),
        *(pytest.param([*steady(20), *((gap_s, asked(5000, start_ticks=9 + each // often)[1]) for each in range(20))],
                       (20 + 20 * gap_s,) * 3, id=f"one each {often * gap_s} s could be asking, at looks {gap_s} s")
          for gap_s, often in ((2.5, 4), (4.5, 3))),
        pytest.param([*steady(20), *(asked(5000, start_ticks=9 + each) for each in range(5)), *steady(5),
                      asked(5000, start_ticks=20)], (32.0, 32.0, 32.0), id="and not in ten seconds any more"),
        pytest.param([(0.0, {1: worked(9000), 2: worked(9000)}), (1.0, {1: worked(9000)})], (1.0, 1.0, 1.0),
                     id="a process that ended takes nothing back"),
        pytest.param([(0.0, {1: worked(9000)}), (1.0, {1: worked(8000)})], (1.0, 1.0, 1.0),
                     id="a counter that falls is no work"),
        pytest.param([*steady(9), (1.0, {1: worked(None)})], (None, 10.0, 10.0), id="I/O unknown costs itself only"),
        pytest.param([*steady(9), (1.0, {1: worked(None)}), (1.0, {1: worked(0)}), (1.0, {1: worked(0)}),
                      (1.0, {1: worked(0)})], (1.0, 13.0, 13.0), id="and starts anew once it is known at both ends"),
        pytest.param([*steady(9), (1.0, None)], (None, None, None), id="processes unknown"),
        pytest.param([*steady(9), (1.0, None), (1.0, {1: worked()}), (1.0, {1: worked()})], (1.0, 1.0, 1.0),
                     id="after it they start anew"),
        pytest.param([*steady(9), (5.01, {1: worked(10**9)}), (1.0, {1: worked(10**9)})], (1.0, 1.0, 1.0),
                     id="so they do after a gap"),
    ],
)  # fmt: skip
def test_work_is_still_for_as_long_as_its_rate_was_seen_to_be_kept(
    looks: list[Look], found: tuple[float | None, float | None, float | None]
) -> None:
    assert still(*looks) == found


bursts_of_a_life = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 1.0, 1.0, 3.0, 5.0]), st.sampled_from([0, 0, 0, 0, 90, 500, 1001])),
    max_size=60,
)


@pytest.mark.parametrize("same", [False, True], ids=["read anew", "told to be as it was"])
@given(bursts_of_a_life)
@example(bursts=[(5.0, 500), (1.0, 90), (5.0, 500), (5.0, 0)])
def test_the_rate_of_work_is_that_of_the_last_ten_seconds_however_it_came_to_be_known(
    same: bool, bursts: list[tuple[float, int]]
) -> None:
    history, times, totals, since_s = ContainerHistory(RATES), [1000.0], [0], 1000.0
    exceeded, overs = False, [False]
    work = WorkUse(processes={1: worked()})
    last = history.observe(build.container(), use(0.0), ram(1), work, now_s=1000.0)
    for gap_s, size in bursts:
        times.append(times[-1] + gap_s)
        totals.append(totals[-1] + size)
        overs.append(size > 100.0 * gap_s)
        work = work if same and size == 0 else WorkUse(processes={1: worked(totals[-1])})
        last = history.observe(build.container(), use(0.0), ram(1), work, now_s=times[-1])
        first = max((each for each, at_s in enumerate(times) if times[-1] - at_s >= 10.0), default=0)
        before, exceeded = exceeded, totals[-1] - totals[first] > 100.0 * min(times[-1] - times[first], 10.0)
        if exceeded:
            since_s = times[-1]
            overs[-1] |= not any(overs[first + 1 :])
        elif before:
            since_s = max(at_s for at_s, over in zip(times, overs, strict=True) if over)

    assert last.io_still_s == times[-1] - since_s


def test_what_was_told_of_a_look_stays_as_it_was_told() -> None:
    history, parts = ContainerHistory(THRESHOLDS), [GpuShare("GPU-0", 0.5, 100), GpuShare("GPU-0", 0.5, 200)]
    before, now = (
        history.observe(build.container(), use(0.5)._replace(shares=(part,)), ram(1), now_s=1000.0 + number)
        for number, part in enumerate(parts)
    )

    assert (before.busy_s, before.peak_bytes) == ({"GPU-0": 0.0}, {"GPU-0": 100})
    assert (now.busy_s, now.peak_bytes) == ({"GPU-0": 0.5}, {"GPU-0": 200})


def test_of_the_work_of_a_container_each_part_is_told_by_its_processes() -> None:
    whole = WorkUse(processes={1: worked(), 2: worked(7)}, unknown=Unknown(reason="said", because="so"))

    assert work_history.work_of(whole, {2, 3}) == replace(whole, processes={2: worked(7)})
    assert work_history.work_of(work_history.AS_IT_WAS, {2}) is work_history.AS_IT_WAS


# Whose turn it is to have its work read


def wanted(*looks: tuple[float, GpuUse], paused: bool = False, lost: Collection[str] = ()) -> list[bool]:
    """Whether each look reads the work: seconds since the one before, and the GPU's use."""
    history, now_s, turns = ContainerHistory(RATES), 1000.0, []
    for gap_s, gpu in looks:
        now_s += gap_s
        turns.append(history.wants_work(gpu, now_s=now_s, lost=lost))
        work = WorkUse(processes={1: worked()}) if turns[-1] else work_history.AS_IT_WAS
        history.observe(build.container(paused=paused), gpu, ram(1), work, now_s=now_s)
    return turns


NO_GPU_USE = GpuUse(
    gpus=(), shares=(), utilization_ratio=None, unknown=Unknown(reason=gpu_attribution.NO_GPU, because="none")
)


@pytest.mark.parametrize(
    ("looks", "turns"),
    [
        pytest.param([(1.0, use(0.05))] * 5, [True] * 5, id="each look while the GPU is idle"),
        pytest.param([(1.0, NO_GPU_USE)] * 5, [True] * 5, id="or there is none"),
        pytest.param([(1.0, use(0.06))] * 12, [True] + [False] * 9 + [True, False], id="each tenth: busy in part"),
        pytest.param([(1.0, use(None))] * 5, [True, False, False, True, False], id="each third: nobody knows"),
        pytest.param([(1.0, use(0.9))] * 2 + [(1.0, use(0.0))] * 2, [True, False, True, True],
                     id="at once when it goes idle"),
        pytest.param([(1.0, use(0.99))] * 5, [True, False, False, True, False], id="or it is pegged"),
        pytest.param([(3.0, use(0.99))] * 11 + [(1.0, use(0.99))] * 3 + [(1.0, use(None))] * 2, [True] * 16,
                     id="each look of who has been still for a while: pegged, or nobody knows"),
        pytest.param([(3.0, use(0.98))] * 13 + [(1.0, use(0.98))] * 10,
                     [True, False, False, False] * 3 + [True] + [False] * 9 + [True],
                     id="and not of who takes its GPU with pauses"),
        pytest.param([(5.0, use(0.9))] * 5, [True, False, True, False, True],
                     id="each other look where looks are five seconds apart"),
        pytest.param([(1.0, use(0.9))] * 4 + [(1.0, use(None))] * 2, [True, False, False, False, True, False],
                     id="at once when nobody knows any more"),
        pytest.param([(1.0, use(0.9)), (-50.0, use(0.9))], [True, True], id="a clock that ran backwards"),
    ],
)  # fmt: skip
def test_work_is_read_at_each_look_while_it_counts(looks: list[tuple[float, GpuUse]], turns: list[bool]) -> None:
    assert wanted(*looks) == turns


def test_work_is_read_at_each_look_while_a_gpu_is_lost_of_the_container_itself() -> None:
    """For how long it has done nothing since is told to the second, and not by every third look."""
    looks = [(1.0, use(None))] * 5

    assert wanted(*looks, lost=("GPU-0",)) == [True] * 5
    assert wanted(*looks, lost=("GPU-1",)) == [True, False, False, True, False]


def test_what_could_not_be_read_is_tried_again_at_the_next_look() -> None:
    history = ContainerHistory(RATES)
    turns = []
    for number, work in enumerate([WorkUse(processes={1: worked()}), work_history.NOT_LOOKED_AT] * 2):
        turns.append(history.wants_work(use(0.99), now_s=1000.0 + 4 * number))
        history.observe(build.container(), use(0.99), ram(1), work, now_s=1000.0 + 4 * number)

    assert turns == [True] * 4
    assert history.wants_work(use(0.99), now_s=1013.0)


def test_between_two_looks_at_the_work_of_a_pegged_container_what_was_told_stands_and_does_not_grow() -> None:
    history, told = ContainerHistory(RATES), []
    for number in range(8):
        gpu = use(0.99) if number < 7 else use(0.0)
        turn = history.wants_work(gpu, now_s=1000.0 + number)
        work = WorkUse(processes={1: worked()}) if turn else work_history.AS_IT_WAS
        told.append(history.observe(build.container(), gpu, ram(1), work, now_s=1000.0 + number).work_still_s)

    assert told == [0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 7.0]


def test_what_was_done_between_two_looks_at_the_work_is_seen_at_the_later_one() -> None:
    history = ContainerHistory(RATES)
    for number in range(13):  # the whole of it within the seconds that nobody looked
        gpu, now_s = use(0.9 if number < 12 else 0.0), 1000.0 + number
        done = worked(10**6, faults=10**4, cpu_s=3.0) if number > 9 else worked()
        work = WorkUse(processes={1: done}) if history.wants_work(gpu, now_s=now_s) else work_history.AS_IT_WAS
        last = history.observe(build.container(), gpu, ram(1), work, now_s=now_s)

    assert (last.io_still_s, last.fault_still_s, last.cpu_still_s) == (0.0, 0.0, 0.0)


def test_what_began_and_ended_between_looks_that_are_far_apart_is_not_told_as_stillness() -> None:
    history, told = ContainerHistory(RATES), []
    for number in range(36):
        gpu, now_s = use(0.9 if number < 31 else 0.0), 1000.0 + number
        seen = {1: worked()} if number % 10 < 4 else {1: worked(), 100 + number: worked(10**9)}  # helpers come and go
        work = WorkUse(processes=seen) if history.wants_work(gpu, now_s=now_s) else work_history.AS_IT_WAS
        told.append(history.observe(build.container(), gpu, ram(1), work, now_s=now_s).io_still_s)

    assert told[:31] == [0.0] * 31
    assert told[31:34] == [1.0, 2.0, 3.0]


def test_what_was_not_seen_is_no_stillness_either_once_the_burst_before_it_is_ten_seconds_ago() -> None:
    history, told = ContainerHistory(RATES), []
    for second in range(13):
        seen = WorkUse(processes={1: worked(1001 if second else 0)})
        work = work_history.AS_IT_WAS if 1 < second < 7 else seen
        told.append(history.observe(build.container(), use(0.0), ram(1), work, now_s=1000.0 + second).io_still_s)

    assert told[-3:] == [0.0, 4.0, 5.0]


def test_why_work_is_unknown_stands_as_long_as_what_was_told() -> None:
    history, why = ContainerHistory(RATES), Unknown(reason="io_unreadable", because="not for us")
    history.observe(build.container(), use(0.9), ram(1), WorkUse(processes={1: worked(None)}, unknown=why), now_s=1.0)

    between = history.observe(build.container(), use(0.9), ram(1), work_history.AS_IT_WAS, now_s=2.0)
    paused = history.observe(build.container(paused=True), use(0.9), ram(1), work_history.AS_IT_WAS, now_s=3.0)

    assert (between.io_still_s, between.fault_still_s, between.work_unknown) == (None, 0.0, why)
    assert (paused.fault_still_s, paused.work_unknown) == (None, container_history.PAUSED)
    assert history.wants_work(use(0.9), now_s=3.5)


def test_a_container_that_does_not_run_has_an_identity_and_no_figures() -> None:
    down = without_figures(build.container())

    assert down.container == build.container()
    assert (down.gpu_idle_s, down.ram_still_s, down.work_still_s) == (None, None, None)
    assert {each.reason for each in (down.gpu_unknown, down.ram_unknown, down.work_unknown) if each} == {"down"}


# A worker that is gone: A14


@pytest.mark.parametrize(
    ("looks", "dead_s"),
    [
        pytest.param([(0, "c@1")], 0.0, id="the first look starts it: when it died nobody saw"),
        pytest.param([(0, "c@1"), (1, "c@1"), (5, "c@1")], 6.0, id="it counts while its container is the same"),
        pytest.param([(0, "c@1"), (1, "c@2")], 0.0, id="a container that was started anew may bring it back"),
        pytest.param([(0, None), (1, None)], 1.0, id="it counts where the container is unknown"),
        pytest.param([(0, None), (1, "c@1")], 0.0, id="and anew once it is known"),
        pytest.param([(0, "c@1"), (1, "c@1"), (5.01, "c@1"), (1, "c@1")], 1.0, id="a gap starts it anew"),
        pytest.param([(0, "c@1"), (-1, "c@1")], 0.0, id="a clock that runs backwards proves nothing"),
    ],
)
def test_a_worker_is_dead_for_as_long_as_its_lock_was_seen_free(
    looks: list[tuple[float, str | None]], dead_s: float
) -> None:
    history, now_s, found_s = DeathHistory(THRESHOLDS), 1000.0, 0.0
    for gap_s, place in looks:
        now_s += gap_s
        found_s = history.observe(place, build.ago(2), now_s=now_s)

    assert found_s == pytest.approx(dead_s)


@pytest.mark.parametrize("boot_id", [build.BOOT, "of a sandbox's own kernel"])
def test_a_worker_whose_lock_is_free_and_whose_heartbeat_moves_is_not_dead(boot_id: str) -> None:
    history = DeathHistory(THRESHOLDS)
    beats = [build.ago(age_s, boot_id=boot_id) for age_s in (9, 9, 4, 4, 4)]

    dead_s = [history.observe("c@1", beat, now_s=1000.0 + number) for number, beat in enumerate(beats)]

    assert dead_s == [0.0, 1.0, 0.0, 1.0, 2.0]


# Whether workers may live in a container beside those that are known to


HOLDS = build.container(folders=("f0",))
OTHER = build.container(id="cd" * 32, folders=("f1",))
BARE = build.container(kind="process", id="process:9:1", pid=9)


def unplaced(folder: str = "f0", **changes: object) -> WorkerSighting:
    """A worker that lives somewhere: nobody can tell in what."""
    return build.sighting(**{"folder": folder, "pid": None, "container_id": None, **changes})


@pytest.mark.parametrize(
    ("sighting", "place", "may"),
    [
        pytest.param(unplaced(), HOLDS, True, id="its holder's pid is unknown, and its folder is there"),
        pytest.param(unplaced(alive=None), HOLDS, True, id="its lock cannot be tested, and its folder is there"),
        pytest.param(unplaced(alive=None, container_id=HOLDS.id), HOLDS, True, id="the same where it once was"),
        pytest.param(unplaced("f1"), HOLDS, False, id="its folder is another container's"),
        pytest.param(unplaced("f9"), HOLDS, False, id="nothing has its folder, but this one has one of its own"),
        pytest.param(unplaced("f1"), BARE, False, id="its folder is a container's, and this one is none"),
        pytest.param(unplaced("f9"), BARE, True, id="nothing has its folder, and this one none of its own"),
        pytest.param(unplaced(pid=8), HOLDS, True, id="its process is in no tree that is known"),
        pytest.param(unplaced("f9", pid=9), BARE, False, id="its process is in a tree that is known"),
        pytest.param(unplaced(container_id=OTHER.id), HOLDS, False, id="it lives in another container"),
        pytest.param(unplaced(container_id="ef" * 32), HOLDS, False, id="it lives in one that nobody lists"),
        pytest.param(unplaced(alive=False), HOLDS, False, id="it is dead"),
    ],
)
def test_who_cannot_be_placed_or_tested_may_live_where_its_folder_is(
    sighting: WorkerSighting, place: Container, may: bool
) -> None:
    workers = WorkerReadings(workers=(sighting,))

    assert worker_liveness.may_hold_others(place, workers, [HOLDS, OTHER, BARE]) is may


def test_who_is_left_out_may_live_where_its_folder_is_and_nowhere_else() -> None:
    workers = WorkerReadings(workers=(), unread=frozenset({"f0", "f9"}))

    assert [worker_liveness.may_hold_others(each, workers, [HOLDS, OTHER, BARE]) for each in (HOLDS, OTHER, BARE)] == [
        True,
        False,
        False,
    ]


def test_a_service_has_no_folder_and_may_hold_whoever_cannot_be_read() -> None:
    service = build.container(kind="systemd", folders=())

    found = [
        worker_liveness.may_hold_others(service, WorkerReadings(workers=(), unread=frozenset(unread)), [HOLDS, service])
        for unread in ({"f9"}, {HOLDS.folders[0]}, set[str]())
    ]

    assert found == [True, False, False]


# A container that is paused


def test_what_is_paused_has_no_durations_and_they_start_anew_when_it_goes_on() -> None:
    history = ContainerHistory(THRESHOLDS)

    def observe(number: int, *, paused: bool) -> ContainerEvidence:
        work = WorkUse(processes={1: ProcessWork(start_ticks=5, io_bytes=0, faults=0, cpu_s=0.0)})
        return history.observe(build.container(paused=paused), use(0.0), ram(7), work, now_s=1000.0 + number)

    def durations(found: ContainerEvidence) -> tuple[float | None, float | None, float | None]:
        return found.gpu_idle_s, found.ram_still_s, found.work_still_s

    before = [observe(number, paused=False) for number in range(4)][-1]
    asleep = [observe(number, paused=True) for number in range(4, 8)][-1]
    after = [durations(observe(number, paused=False)) for number in (8, 9)]

    assert durations(before) == (3.0, 3.0, 3.0)
    assert durations(asleep) == (None, None, None)
    assert (asleep.gpu_unknown, asleep.ram_unknown, asleep.work_unknown) == (container_history.PAUSED,) * 3
    assert asleep.ram_bytes == 7
    assert after == [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0)]


# CPU time, and the worker that uses none: A14, with 30 s of silence


def cpu_still(*samples: tuple[float, int]) -> float:
    """The duration after the last of these samples: seconds since the one before, and CPU time used in all."""
    history, now_s, still_s = CpuHistory(THRESHOLDS), 1000.0, 0.0
    for gap_s, used_ticks in samples:
        now_s += gap_s
        still_s = history.observe(CpuUse(start_ticks=5, used_ticks=used_ticks), now_s=now_s)
    return still_s


@pytest.mark.parametrize(
    ("samples", "still_s"),
    [
        pytest.param([(0, 0)], 0.0, id="the first sample starts it: nothing is known of the time before"),
        pytest.param([(0, 7), (1, 7), (2, 7)], 3.0, id="it counts while no CPU time is used"),
        pytest.param([(0, 7), (1, 7), (1, 8)], 0.0, id="one tick starts it anew"),
        pytest.param([(0, 7), (1, 8), (1, 8)], 1.0, id="it starts at the sample that first showed the last tick"),
        pytest.param([(0, 7), (5, 7)], 5.0, id="a gap of the greatest length is no gap"),
        pytest.param([(0, 7), (1, 7), (5.01, 7), (1, 7)], 1.0, id="a longer gap starts it anew"),
        pytest.param([(0, 7), (1, 7), (600, 7)], 0.0, id="a suspended machine used no CPU time, and proves nothing"),
        pytest.param([(0, 7), (-1, 7)], 0.0, id="a clock that runs backwards proves nothing"),
    ],
)
def test_a_process_is_still_for_as_long_as_it_was_seen_to_use_no_cpu_time(
    samples: list[tuple[float, int]], still_s: float
) -> None:
    assert cpu_still(*samples) == still_s


@pytest.mark.parametrize(
    ("stores", "uninterruptible", "still_s"),
    [
        pytest.param(True, True, 0.0, id="who waits in the kernel as its job saves waits for storage"),
        pytest.param(True, False, 2.0, id="who sleeps, or is stopped, does not"),
        pytest.param(False, True, 2.0, id="nor does a job in its steps"),
    ],
)
def test_a_wait_for_storage_is_no_silence_of_a_job_that_loads_or_saves(
    stores: bool, uninterruptible: bool, still_s: float
) -> None:
    history, use = CpuHistory(THRESHOLDS), CpuUse(start_ticks=5, used_ticks=7, uninterruptible=uninterruptible)
    for now_s in (1000.0, 1001.0, 1002.0):
        found = history.observe(use, now_s=now_s, stores=stores)

    assert found == still_s
    assert history.observe(replace(use, uninterruptible=False), now_s=1003.0, stores=stores) == still_s + 1.0


@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0, 1.0, 5.0, 5.25, 600.0]), st.integers(0, 1)), min_size=1))
def test_the_cpu_is_still_back_to_the_last_use_or_gap(steps: list[tuple[float, int]]) -> None:
    used = [sum(each for _, each in steps[: i + 1]) for i in range(len(steps))]
    broken = [i for i in range(1, len(steps)) if steps[i][0] > THRESHOLDS.gap_max_s or steps[i][1]]
    first = max(broken, default=0)

    assert cpu_still(*((gap_s, each) for (gap_s, _), each in zip(steps, used, strict=True))) == sum(
        gap_s for gap_s, _ in steps[first + 1 :]
    )


def silent(heartbeat_age_s: float, **changes: object) -> WorkerSighting:
    return build.sighting(worker=build.worker_file(heartbeat=build.ago(heartbeat_age_s)), **changes)


@pytest.mark.parametrize(
    ("sighting", "still_s", "dead"),
    [
        pytest.param(silent(30.0), 30.0, True, id="no heartbeat and no CPU time for all that is allowed"),
        pytest.param(silent(29.9), 900.0, False, id="the heartbeat is not old enough"),
        pytest.param(silent(900.0), 29.9, False, id="CPU time was used, or unseen, not long enough ago"),
        pytest.param(silent(900.0), 0.0, False, id="it computes: a native call starves the heartbeat"),
        pytest.param(silent(0.0), 900.0, False, id="it waits, and beats"),
        pytest.param(silent(900.0), None, False, id="CPU time unknown is not still"),
        pytest.param(silent(900.0, job=None), 900.0, False, id="it owns no job"),
        pytest.param(silent(900.0, alive=False), 900.0, False, id="its process is gone"),
        pytest.param(silent(900.0, alive=None), 900.0, False, id="its lock cannot be tested"),
        pytest.param(
            build.sighting(worker=build.worker_file(heartbeat=build.ago(900.0, boot_id="before"))),
            900.0,
            False,
            id="its heartbeat is of before the reboot",
        ),
    ],
)
def test_a_worker_is_dead_only_without_heartbeat_and_cpu_time(
    sighting: WorkerSighting, still_s: float | None, dead: bool
) -> None:
    assert worker_liveness.is_dead(sighting, still_s, now=build.ago(0), dead_after_s=30.0) is dead


@pytest.mark.parametrize(
    ("awake_s", "wedged", "dead"),
    [
        pytest.param(0, False, False, id="right after it: everything is old, and nothing of it was seen"),
        pytest.param(29, False, False, id="just under the one's silence"),
        pytest.param(30, False, True, id="the one's whole silence, seen"),
        pytest.param(119, False, True, id="just under the other's silence"),
        pytest.param(120, True, True, id="the other's whole silence, seen"),
    ],
)
def test_a_suspended_machine_accuses_nobody_before_a_whole_silence_was_seen(
    awake_s: int, wedged: bool, dead: bool
) -> None:
    container, cpu = ContainerHistory(THRESHOLDS), CpuHistory(THRESHOLDS)
    slept_s = 600
    times = [*range(200), *range(200 + slept_s, 200 + slept_s + awake_s + 1)]
    for now_s in times:
        seen = container.observe(build.container(), use(0.0), ram(1), now_s=now_s)
        still_s = cpu.observe(CpuUse(start_ticks=5, used_ticks=7), now_s=now_s)
    last_sign = build.ago(0, now_s=199.0)
    now = build.ago(0, now_s=times[-1])
    job = build.job_file(beat=last_sign, phase_started=build.ago(0, now_s=0.0))
    sighting = build.sighting(worker=build.worker_file(heartbeat=last_sign), job=job)

    beat_age_s = last_sign.age_s(now)

    assert beat_age_s is not None
    assert beat_age_s > slept_s
    assert (signs_of_life.suspicion(job, seen, Patience(), now=now) is None) is wedged
    assert worker_liveness.is_dead(sighting, still_s, now=now, dead_after_s=30.0) is dead


# Counters of a GPU


def counted(*looks: tuple[float, GpuReadings | None]) -> dict[str, GpuTotals]:
    """What has been counted after the last of these looks: seconds since the one before, and what was read."""
    history, now_s = GpuHistory(THRESHOLDS), 1000.0
    for gap_s, readings in looks:
        now_s += gap_s
        last = history.observe(readings, now_s=now_s)
    return dict(last)


def at(utilization_ratio: float | None, uuid: str = "GPU-0") -> GpuReadings:
    return build.gpus(build.gpu(0, uuid=uuid, utilization_ratio=utilization_ratio))


@pytest.mark.parametrize(
    ("looks", "busy_s"),
    [
        pytest.param([(0, at(0.9))], 0.0, id="from zero at the first look"),
        pytest.param([(0, at(0.9)), (1, at(0.5)), (2, at(1.0))], 2.5, id="each look stands for the time before it"),
        pytest.param([(0, at(None))], None, id="absent until something was measured"),
        pytest.param([(0, at(None)), (1, at(0.5))], 0.0, id="and from zero then"),
        pytest.param([(0, at(1.0)), (1, at(None)), (1, at(1.0))], 1.0, id="an unknown look adds nothing"),
        pytest.param([(0, at(1.0)), (1, None), (1, at(1.0))], 1.0, id="nor does one without a source"),
        pytest.param([(0, at(1.0)), (6, at(1.0)), (1, at(1.0))], 1.0, id="nor the time after a gap"),
        pytest.param([(0, at(1.0)), (-3, at(1.0)), (1, at(1.0))], 1.0, id="nor a time that runs backwards"),
    ],
)
def test_the_time_a_gpu_was_busy_is_counted_of_measured_looks_only(
    looks: list[tuple[float, GpuReadings | None]], busy_s: float | None
) -> None:
    assert counted(*looks)["GPU-0"].busy_s == busy_s


def test_each_gpu_is_counted_by_itself_and_told_while_it_is_there() -> None:
    both = build.gpus(build.gpu(0, utilization_ratio=1.0), build.gpu(1, utilization_ratio=0.5))
    first = build.gpus(build.gpu(0, utilization_ratio=1.0))

    assert {uuid: found.busy_s for uuid, found in counted((0, both), (1, both)).items()} == {"GPU-0": 1.0, "GPU-1": 0.5}
    assert list(counted((0, both), (1, first))) == ["GPU-0"]
    assert counted((0, both), (1, first), (1, both))["GPU-1"].busy_s == 0.0
    assert counted((0, both), (1, None)) == {}
    assert counted((0, both), (1, None), (1, both))["GPU-1"].busy_s == 0.5


def test_what_was_counted_of_a_gpu_stands_while_its_source_fails_and_others_do_not() -> None:
    both = build.gpus(build.gpu(0, utilization_ratio=1.0), build.gpu(1, utilization_ratio=1.0))
    first = build.gpus(build.gpu(0, utilization_ratio=1.0))

    assert counted((0, both), (1, both), (1, replace(first, failed=("drm",))), (1, both))["GPU-1"].busy_s == 2.0
    assert counted((0, both), (1, both), (1, first), (1, both))["GPU-1"].busy_s == 0.0


def test_looks_at_which_it_is_unknown_what_is_on_its_way_back_are_counted_by_their_reason() -> None:
    history, readings = GpuHistory(THRESHOLDS), build.gpus(build.gpu(0), build.gpu(1))

    history.observe(readings, now_s=1.0, returning_unknown={"GPU-0": "not_yet", "GPU-1": "not_yet"})
    history.observe(readings, now_s=2.0, returning_unknown={"GPU-0": "not_yet"})
    found = history.observe(readings, now_s=3.0, returning_unknown={})

    figure = "memory_returning_bytes", "not_yet"
    assert {uuid: each.unknown for uuid, each in found.items()} == {"GPU-0": {figure: 2}, "GPU-1": {figure: 1}}


def test_unknown_figures_of_a_gpu_are_counted_by_their_reason() -> None:
    refused = build.gpus(build.gpu(0, figures=GpuFigures(unknown={"power_watts": "timeout"})), build.gpu(1))
    other = build.gpus(build.gpu(0, figures=GpuFigures(unknown={"power_watts": "failed"})), build.gpu(1))

    found = counted((0, refused), (1, refused), (1, other))

    assert found["GPU-0"].unknown == {("power_watts", "timeout"): 2, ("power_watts", "failed"): 1}
    assert found["GPU-1"].unknown == {}


# Instances of a GPU


def instance(number: int, *processes: GpuProcess, **changes: Any) -> Gpu:
    """An instance of GPU-0, as the driver tells of it: its memory and its processes, and no utilisation."""
    mig = MigInstance(parent="GPU-0", number=number, gpu_instance=number + 1, compute_instance=0)
    given: dict[str, Any] = {
        "uuid": f"MIG-{number}",
        "mig": mig,
        "utilization_ratio": None,
        "attribution": "none",
    }
    return build.gpu(0, *processes, **(given | changes))


CUT = build.gpu(0, processes=None, utilization_ratio=None, unknown="it is in MIG mode", attribution="none")


@pytest.mark.parametrize("request_", ["MIG-1", "0:1", "MIG-GPU-0/2/0"], ids=["UUID", "number", "older name"])
def test_a_container_is_given_the_instance_that_it_names_and_no_other(request_: str) -> None:
    own = instance(1, build.process(4001, None, 700), memory_used_bytes=900)
    readings = build.gpus(CUT, instance(0, build.process(OTHER_PID, None, 5)), own)

    found = gpu_use(build.container(gpu_request=(request_,)), OWN, readings, THRESHOLDS)

    assert found.gpus == ("MIG-1",)
    assert found.shares == (GpuShare(gpu="MIG-1", utilization_ratio=None, memory_bytes=700, attributed=False),)
    assert found.utilization_ratio is None
    assert found.unknown is not None
    assert found.unknown.reason == "not_measured"


@pytest.mark.parametrize(
    ("request_", "parts", "missing"),
    [
        pytest.param(("MIG-0",), [instance(0, build.process(4001, None, 5))], {"MIG-0": False}, id="by its UUID"),
        pytest.param(("MIG-0",), [instance(0)], {"MIG-0": False}, id="while none of its processes is there"),
        pytest.param(("MIG-0",), [instance(0, processes=None)], {"MIG-0": False}, id="whose processes are not listed"),
        pytest.param(
            ("GPU-1",),
            [instance(0, build.process(4001, None, 5)), instance(1), build.gpu(1, uuid="GPU-1")],
            {"MIG-0": False, "GPU-1": True},
            id="that its processes are on, beside a GPU that can be told apart",
        ),
        pytest.param(
            None, [instance(0, build.process(4001, None, 5)), instance(1)], {"MIG-0": False}, id="that nobody gave it"
        ),
        pytest.param(
            ("all",),
            [instance(0), instance(1)],
            {"GPU-0": None, "MIG-0": None, "MIG-1": None},
            id="all, and it is on none",
        ),
        pytest.param(
            ("all",),
            [instance(0, build.process(4001, None, 5)), instance(1, build.process(OTHER_PID, None, 5))],
            {"GPU-0": None, "MIG-0": False, "MIG-1": None},
            id="all, and it is on one",
        ),
        pytest.param(
            ("all",), [instance(0, processes=None)], {"GPU-0": None, "MIG-0": False}, id="all, and it may be on one"
        ),
        pytest.param(
            ("all", "MIG-1"),
            [instance(0), instance(1)],
            {"GPU-0": None, "MIG-0": None, "MIG-1": False},
            id="all, and one by its name",
        ),
        pytest.param(("0",), [instance(0)], {"GPU-0": False}, id="the whole, whose instances nobody names"),
        pytest.param(
            ("0",),
            [instance(0, build.process(4001, None, 5)), instance(1)],
            {"GPU-0": None, "MIG-0": False},
            id="the whole, and it is seen on which",
        ),
    ],
)
@pytest.mark.behaviour("A19")
def test_of_a_gpu_that_is_cut_into_instances_it_is_told_that_nobody_can_tell(
    request_: tuple[str, ...] | None, parts: list[Gpu], missing: dict[str, bool | None]
) -> None:
    found = gpu_use(build.container(gpu_request=request_), OWN, build.gpus(CUT, *parts), THRESHOLDS)

    assert {share.gpu: share.attributed for share in found.shares} == missing
    assert found.utilization_ratio is None


def test_what_a_container_without_a_gpu_of_its_own_does_on_one_is_told_apart_as_any_others() -> None:
    busy = build.gpu(0, build.process(4001, None, 5), utilization_ratio=0.9)
    other = build.gpu(1, build.process(OTHER_PID, None, 5), utilization_ratio=0.9)

    found = gpu_use(build.container(gpu_request=None), OWN, build.gpus(busy, other), THRESHOLDS)

    assert found.shares == (GpuShare(gpu="GPU-0", utilization_ratio=None, memory_bytes=5, attributed=False),)


def test_an_instance_without_a_process_is_not_taken_for_idle() -> None:
    found = gpu_use(build.container(gpu_request=("MIG-0",)), OWN, build.gpus(CUT, instance(0)), THRESHOLDS)

    assert found.utilization_ratio is None
    assert found.unknown is not None


def test_an_instance_that_is_gone_with_its_gpu_is_missing_and_not_another() -> None:
    readings = build.gpus(CUT, instance(0))

    found = gpu_use(build.container(gpu_request=("MIG-1",)), OWN, readings, THRESHOLDS)

    assert found.unknown == Unknown(reason="gpu_missing", because="assigned GPU MIG-1 is not reported")


def test_memory_of_an_instance_adds_up_unless_others_share_it() -> None:
    own = instance(0, build.process(4001, None, 700), memory_used_bytes=900)
    assert own.mig
    shared = replace(own, mig=replace(own.mig, shares_memory=True))

    assert gpu_attribution.unattributed_bytes(own) == 200
    assert gpu_attribution.unattributed_bytes(shared) is None
