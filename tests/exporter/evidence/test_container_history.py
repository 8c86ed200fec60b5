"""From samples to durations: idle times, and since when they are known."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.evidence import container_history, windows, work_history
from exporter.evidence.container_history import PAUSES_MAX, ContainerHistory, stopped_container_evidence
from exporter.evidence.gpu_attribution import HUNG, NO_GPU, GpuAttribution, attribute_gpus
from exporter.evidence.gpu_trackers import OUTAGE_S
from exporter.evidence.work_history import ContainerWork
from exporter.model.container import ContainerEvidence, GpuShare
from exporter.model.gpu import DRM_SOURCE, NVIDIA_SOURCE, GpuFigures, GpuReadings
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import ProcessWork
from tests.exporter import builders as build
from tests.exporter.evidence.values import OTHER_PID, OWN, THRESHOLDS, ram, use

pytestmark = pytest.mark.pure

Sample = tuple[float, float | None, int | None]
"""Seconds since the previous sample, GPU utilisation, RAM."""


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
        pytest.param([(0, 0.0, 1)], 0.0, id="first idle sample starts it"),
        pytest.param([(0, 0.0, 1), (1, 0.0, 1), (2, 0.05, 1)], 3.0, id="at the idle ratio"),
        pytest.param([(0, 0.0, 1), (1, 0.051, 1)], 0.0, id="above the idle ratio"),
        pytest.param([(0, 0.9, 1), (1, 0.0, 1), (1, 0.0, 1)], 1.0, id="first idle sample after a busy one starts it"),
        pytest.param([(0, 0.0, 1), (9 / 2, 0.0, 1), (1, 0.9, 1), (1, 0.0, 1)], 0.0, id="one busy sample resets it"),
        pytest.param([(0, 0.0, 1), (1, None, 1)], None, id="unknown has no duration"),
        pytest.param([(0, 0.0, 1), (1, None, 1), (1, 0.0, 1), (1, 0.0, 1)], 1.0, id="unknown restarts it"),
        pytest.param([(0, 0.0, 1), (5, 0.0, 1)], 5.0, id="longest allowed gap"),
        pytest.param([(0, 0.0, 1), (5.01, 0.0, 1), (1, 0.0, 1)], 1.0, id="a longer gap restarts it"),
        pytest.param([(0, 0.0, 1), (1, 0.0, 1), (8 * 3600, 0.0, 1)], 0.0, id="suspended for a night"),
        pytest.param([(0, 0.0, 1), (-1, 0.0, 1)], 0.0, id="clock runs backwards"),
    ],
)
def test_gpu_idle_time_covers_the_idle_samples(samples: list[Sample], idle_s: float | None) -> None:
    assert observed(*samples).gpu_idle_s == idle_s


sample_lists = st.lists(
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


@given(sample_lists)
def test_gpu_idle_time_starts_at_the_first_of_the_unbroken_idle_samples(samples: list[Sample]) -> None:
    first = len(samples)
    while first > continuous_tail(samples) and (ratio := samples[first - 1][1]) is not None and ratio <= 0.05:
        first -= 1
    span_s = sum(gap_s for gap_s, _, _ in samples[first + 1 :])
    expected = None if samples[-1][1] is None else span_s

    assert observed(*samples).gpu_idle_s == expected


def first_still(samples: list[Sample], delta: float) -> int:
    """Index of the newest extreme of a movement by more than `delta` within 120 s; the first if nothing moved."""
    begin = max((i for i, (_, _, value) in enumerate(samples) if value is None), default=-1) + 1
    begin = max(begin, continuous_tail(samples))
    times = list(accumulate(gap_s for gap_s, _, _ in samples))
    coarse = [(value or 0) // max(1, int(delta) // 16) for _, _, value in samples]
    changes = [i for i in range(begin, len(samples)) if i == begin or coarse[i] != coarse[i - 1]]
    moved = begin
    for i in changes:
        recent = [each for each in changes if each <= i and times[i] - times[each] <= windows.MOVED_WITHIN_S]
        values = {each: samples[each][2] or 0 for each in recent}
        if max(values.values()) - min(values.values()) > delta:
            extremes = (max(values.values()), min(values.values()))
            moved = max(each for each in recent if values[each] in extremes)
    return moved


@given(sample_lists)
def test_ram_idle_time_is_the_longest_window_within_the_delta_after_a_movement(samples: list[Sample]) -> None:
    values = [value for _, _, value in samples]
    first = len(samples)
    while first > continuous_tail(samples) and (value := values[first - 1]) is not None:
        window = [each for each in (value, *values[first:]) if each is not None]
        if max(window) - min(window) > THRESHOLDS.ram_idle_bytes:
            break
        first -= 1
    first = max(first, first_still(samples, THRESHOLDS.ram_idle_bytes * windows.MOVED_SHARE))
    expected = None if values[-1] is None else sum(gap_s for gap_s, _, _ in samples[first + 1 :])

    assert observed(*samples).ram_idle_s == expected


# RAM


@pytest.mark.parametrize(
    ("values", "still_s"),
    [
        pytest.param([0, 0, 0, 0], 3, id="static"),
        pytest.param([0, 40, 0, 40], 3, id="changes by exactly the delta of a movement"),
        pytest.param([0, 41, 41, 41], 2, id="moves as fast as the delta within 300 s"),
        pytest.param([0, 50, 101], 0, id="range over the whole window, not between two samples"),
        pytest.param([300, 250, 200, 150], 0, id="falling counts as a change"),
        pytest.param([0, 0, 500, 500, 500], 2, id="a jump restarts it"),
        pytest.param([0, 500, 0], 0, id="a past peak in the window counts"),
        pytest.param([0, 500, 0, 0, 0], 2, id="a peak out of the window does not count"),
    ],
)
def test_ram_is_idle_while_its_range_is_within_the_delta(values: list[int], still_s: int) -> None:
    assert observed(*((1.0, 0.0, value) for value in values)).ram_idle_s == still_s


def test_movement_of_ram_is_a_sign_of_life_until_it_ends() -> None:
    moves: list[Sample] = [(4.0, 0.0, 2 * step) for step in range(60)]
    still: list[Sample] = [(4.0, 0.0, 118)] * 100

    assert observed(*moves).ram_idle_s == 0.0
    assert [observed(*moves, *still[:n]).ram_idle_s for n in (1, 30, 100)] == [4.0, 120.0, 400.0]


def test_ram_that_moves_too_slowly_is_idle() -> None:
    creeping: list[Sample] = [(5.0, 0.0, step) for step in range(200)]

    assert observed(*creeping).ram_idle_s == 500.0


def test_slowly_growing_ram_needs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "EXTREMES_MAX", 10)
    rising = [(5.0, 0.0, value) for value in range(100)]
    falling = [(5.0, 0.0, value) for value in reversed(range(100))]

    assert observed(*rising).ram_idle_s == observed(*falling).ram_idle_s == 45.0


def test_unknown_ram_restarts_its_idle_time() -> None:
    samples: list[Sample] = [(0, 0.0, 1), (1, 0.0, 1), (1, 0.0, None), (1, 0.0, 1), (1, 0.0, 1)]

    assert observed(*samples[:3]).ram_idle_s is None
    assert observed(*samples).ram_idle_s == 1.0


# From sample to sample


REST = build.gpus(build.gpu(0, build.process(4001, 0.0)), build.gpu(1))


@pytest.mark.parametrize("there", [frozenset({"GPU-1"}), frozenset[str]()], ids=["seen present", "never present"])
def test_earlier_gpu_that_is_lost_counts_in_attribution(there: frozenset[str]) -> None:
    history, given = ContainerHistory(THRESHOLDS), build.container(gpu_request=("0",))
    lost = replace(REST, gpus=REST.gpus[:1], dropped=("GPU-1",))
    before = history.attribute(given, OWN, lost)
    history.gpus, history.seen_present = ("GPU-0", "GPU-1"), there

    found = history.attribute(given, OWN, lost)

    assert before.unknown is None
    assert found.unknown
    assert found.unknown.reason == "gpu_missing"
    assert found == attribute_gpus(given, OWN, lost, THRESHOLDS, ("GPU-0", "GPU-1"), there)


# Busy counters


def test_busy_time_adds_up_measured_samples_from_zero() -> None:
    assert observed((0, 0.9, 1)).busy_s == {"GPU-0": 0.0}
    assert observed((0, 0.9, 1), (1, 0.5, 1), (2, 0.25, 1)).busy_s == {"GPU-0": 1.0}


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([(0, 0.5, 1), (1, 0.5, 1), (1, None, 1)], id="unknown sample"),
        pytest.param([(0, 0.5, 1), (1, 0.5, 1), (3600, 0.5, 1)], id="gap"),
    ],
)
def test_busy_time_does_not_grow(samples: list[Sample]) -> None:
    assert observed(*samples).busy_s == {"GPU-0": 0.5}


@given(sample_lists)
def test_busy_time_never_falls_and_never_exceeds_the_clock(samples: list[Sample]) -> None:
    before = 0.0
    for count in range(1, len(samples) + 1):
        busy_s = observed(*samples[:count]).busy_s.get("GPU-0", 0.0)
        assert before <= busy_s <= sum(gap_s for gap_s, _, _ in samples[1:count]) + 1e-9
        before = busy_s


# Busy but stuck, A14b and A19: the GPU is saturated or unknown


def gpus_at(*ratios: float | None, unknown: Unknown | None = None) -> GpuAttribution:
    """The GPU shares of a container in one sample."""
    shares = tuple(
        GpuShare(gpu=f"GPU-{number}", utilization_ratio=ratio, memory_bytes=None) for number, ratio in enumerate(ratios)
    )
    known = [ratio for ratio in ratios if ratio is not None]
    return GpuAttribution(
        gpus=tuple(share.gpu for share in shares),
        shares=shares,
        utilization_ratio=None if unknown or None in ratios else max(known, default=None),
        unknown=unknown or (NOT_MEASURED if None in ratios else None),
    )


NOT_MEASURED = Unknown(reason="not_measured", message="the driver does not say")
NO_SOURCE = gpus_at(unknown=Unknown(reason="source_failed", message="no GPU source answers"))
ON_HUNG = gpus_at(None)._replace(may_use_unread_gpu=True)
HUNG_AND_BUSY = gpus_at(None, 0.9)._replace(may_use_unread_gpu=True)
WITHOUT_GPU = Unknown(reason=NO_GPU, message="no GPU is assigned")
OUTAGE = int(OUTAGE_S)
MAY_USE_GPU = gpus_at(unknown=WITHOUT_GPU)._replace(may_be_elsewhere=True)


def gpu_times(*samples: tuple[float, GpuAttribution], paused_last: bool = False) -> tuple[float | None, float | None]:
    """Seconds for which its GPUs were saturated, and since they were seen busy, after the last sample."""
    history, now_s = ContainerHistory(THRESHOLDS), 1000.0
    for number, (gap_s, found) in enumerate(samples, 1):
        now_s += gap_s
        container = build.container(paused=paused_last and number == len(samples))
        last = history.observe(container, found, ram(1), now_s=now_s)
    return last.gpu_saturated_s, last.gpu_last_busy_age_s


@pytest.mark.parametrize(
    ("samples", "saturated_s", "last_busy_age_s"),
    [
        pytest.param([(0, gpus_at(1.0))], 0, 0, id="first sample"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(0.99)), (2, gpus_at(1.0))], 3, 0, id="saturated throughout"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(0.98)), (1, gpus_at(1.0))], 0, 0, id="a pause restarts it"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(0.0)), (1, gpus_at(1.0))], 0, 0, id="an idle sample restarts it"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(None)), (4, gpus_at(1.0))], 5, 0,
                     id="one unknown sample does not restart it"),
        pytest.param([(0, gpus_at(1.0)), (1, NO_SOURCE), (4, gpus_at(1.0))], 5, 0,
                     id="one sample without an answer does not restart it"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(None)), (4.1, gpus_at(1.0))], 0, 0,
                     id="unknown for longer than a gap restarts it"),
        pytest.param([(0, gpus_at(1.0)), (3, gpus_at(None)), (1, gpus_at(None)), (1, gpus_at(1.0)), (3, gpus_at(None)),
                      (2, gpus_at(1.0))], 10, 0, id="each saturated sample extends the limit"),
        pytest.param([(0, gpus_at(1.0)), *[(1, gpus_at(None)), (1, gpus_at(1.0))] * 20], 40, 0,
                     id="half of the samples unknown"),
        pytest.param([(0, gpus_at(1.0)), *[*[(1, gpus_at(None))] * 3, (1, gpus_at(1.0))] * 9], 4, 0,
                     id="most samples unknown"),
        pytest.param([(0, gpus_at(1.0)), (1, gpus_at(None))], None, 1, id="unknown is not saturated and not busy"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (1, gpus_at(None, 0.5)), (1, gpus_at(1.0, 0.0))], 0, 0,
                     id="another GPU works while the saturated one is unknown"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (1, gpus_at(0.0, None)), (1, gpus_at(1.0, 0.0))], 0, 0,
                     id="the saturated GPU idles while another is unknown"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (1, gpus_at(None, 1.0)), (1, gpus_at(1.0, 0.0))], 0, 0,
                     id="alternating GPUs, one unknown"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (1, gpus_at(1.0, None)), (1, gpus_at(1.0, 0.0))], 2, 0,
                     id="the idle GPU is unknown"),
        pytest.param([(0, gpus_at(1.0, 1.0)), (1, gpus_at(1.0))], 0, 0, id="another set of GPUs"),
        pytest.param([(0, gpus_at(1.0, 0.05)), (2, gpus_at(1.0, 0.0))], 2, 0, id="the others are idle"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (2, gpus_at(1.0, 0.06))], 0, 0, id="another GPU works"),
        pytest.param([(0, gpus_at(1.0, 0.5)), (2, gpus_at(1.0, 0.5))], 0, 0, id="another GPU works throughout"),
        pytest.param([(0, gpus_at(1.0, None)), (1, gpus_at(1.0, None)._replace(unknown=None))], None, 0,
                     id="unknown, no reason given"),
        pytest.param([(0, gpus_at(1.0, 0.0)), (2, gpus_at(0.0, 1.0))], 0, 0, id="alternating GPUs"),
        pytest.param([(0, gpus_at(1.0, 1.0)), (2, gpus_at(1.0, 1.0))], 2, 0, id="both saturated"),
        pytest.param([(0, gpus_at(1.0)), (5.1, gpus_at(1.0))], 0, 0, id="a gap restarts it"),
        pytest.param([(0, gpus_at(0.0)), (2, gpus_at(0.05))], 0, 2, id="idle is not saturated and not busy"),
        pytest.param([(0, gpus_at(None)), (3, gpus_at(None))], None, 3, id="unknown throughout"),
        pytest.param([(0, gpus_at(None)), (3, gpus_at(None, 0.06))], None, 0, id="one of two seen busy"),
        pytest.param([(0, gpus_at(None)), (5.1, gpus_at(None))], None, 0, id="a gap restarts the time since busy"),
        pytest.param([(0, gpus_at(0.0)), (1, NO_SOURCE)], None, None, id="no source answers"),
        pytest.param([(0, gpus_at(0.0)), (1, NO_SOURCE), (4.1, gpus_at(0.0))], 0, 0,
                     id="no answer for longer than a gap"),
        pytest.param([(0, gpus_at(0.0)), (1, NO_SOURCE), (4, gpus_at(0.0))], 0, 5, id="no answer for a few seconds"),
        pytest.param([(0, gpus_at(0.0)), (1, ON_HUNG)], None, None, id="GPU hangs"),
        pytest.param([(0, gpus_at(0.0)), (1, ON_HUNG), (4.1, gpus_at(0.0))], 0, 0,
                     id="GPU hangs for longer than a gap"),
        pytest.param([(0, gpus_at(0.0)), (1, ON_HUNG), (4, gpus_at(0.0))], 0, 5, id="GPU hangs for a few seconds"),
        pytest.param([(0, gpus_at(0.0)), (1, HUNG_AND_BUSY), (1, gpus_at(0.0))], 0, 0,
                     id="GPU hangs while another is busy"),
        pytest.param([(0, gpus_at(0.0)), *[(1, NO_SOURCE)] * 1200], None, None, id="short outage"),
        pytest.param([(0, gpus_at(0.0)), *[(1, NO_SOURCE)] * 1201], None, 1200, id="long outage counts from its start"),
        pytest.param([*[(1, NO_SOURCE)] * 1202], None, 1201, id="long outage from the first sample"),
        pytest.param([(0, gpus_at(0.0)), *[(1, ON_HUNG)] * 1201], None, 1200, id="long outage, GPU hangs"),
        pytest.param([*[(1, NO_SOURCE)] * 10, *[(1, ON_HUNG)] * 1191], None, 1200, id="outage with two causes"),
        pytest.param([*[(1, ON_HUNG)] * 700, (1, HUNG_AND_BUSY), *[(1, ON_HUNG)] * 700],
                     None, 700, id="outage counts from the last busy sample of another GPU"),
        pytest.param([*[(1, NO_SOURCE)] * 1300, (1, gpus_at(0.0))], 0, 0, id="an answer ends the outage"),
        pytest.param([*[(1, NO_SOURCE)] * 1300, (1, gpus_at(0.0)), *[(1, NO_SOURCE)] * 1200], None, None,
                     id="the next outage starts from zero"),
        pytest.param([*[(1, NO_SOURCE)] * 1300, (5.1, NO_SOURCE)], None, None, id="a gap ends the outage"),
        pytest.param([*[(1, MAY_USE_GPU)] * 1300], None, None, id="no GPU assigned, and it may use one"),
        pytest.param([(0, gpus_at(unknown=WITHOUT_GPU)), (1, gpus_at(unknown=WITHOUT_GPU))], None, 1, id="no GPU"),
        pytest.param([(0, MAY_USE_GPU), (1, MAY_USE_GPU)], None, None, id="no GPU assigned, may use one, for a second"),
        pytest.param([(0, gpus_at(unknown=WITHOUT_GPU)), (1, MAY_USE_GPU), (1, gpus_at(unknown=WITHOUT_GPU))], None, 0,
                     id="may use a GPU: restarts the time"),
        pytest.param([(0, gpus_at(0.0, unknown=WITHOUT_GPU)), (1, gpus_at(0.0, unknown=WITHOUT_GPU))], None, 1,
                     id="use of a GPU that was not assigned"),
    ],
)  # fmt: skip
def test_saturated_time_and_time_since_busy(
    samples: list[tuple[float, GpuAttribution]], saturated_s: float | None, last_busy_age_s: float | None
) -> None:
    assert gpu_times(*samples) == (saturated_s, last_busy_age_s)


LEFT_OUT = build.gpu(
    1, processes=None, utilization_ratio=None, unknown="left out", figures=GpuFigures(unknown={"gpu": HUNG}), lost=None
)


@pytest.mark.parametrize(
    ("request_", "had", "reason", "may_use_unread_gpu"),
    [
        pytest.param(("1",), (), HUNG, True, id="its only GPU"),
        pytest.param(("0", "1"), (), HUNG, True, id="one of two GPUs"),
        pytest.param(("all",), (), HUNG, True, id="one of all GPUs"),
        pytest.param(("0",), ("GPU-0", "GPU-1"), HUNG, True, id="an earlier GPU"),
        pytest.param(("0:1",), (), "gpu_missing", True, id="a removed instance"),
        pytest.param(("0",), ("GPU-0", "MIG-1"), "not_listed", True, id="an earlier instance"),
        pytest.param(None, (), NO_GPU, True, id="no GPU assigned, may be on it"),
        pytest.param(("0",), (), None, False, id="GPU of another container"),
    ],
)
def test_use_of_a_hung_gpu_is_unknown(
    request_: tuple[str, ...] | None, had: tuple[str, ...], reason: str | None, *, may_use_unread_gpu: bool
) -> None:
    container = build.container(gpu_request=request_)

    found = attribute_gpus(container, OWN, build.gpus(build.gpu(0), LEFT_OUT), THRESHOLDS, had)
    lost = attribute_gpus(
        container, OWN, build.gpus(build.gpu(0), replace(LEFT_OUT, figures=GpuFigures())), THRESHOLDS, had
    )

    assert (found.unknown and found.unknown.reason, found.may_use_unread_gpu) == (reason, may_use_unread_gpu)
    assert (lost.unknown and lost.unknown.reason) == ("not_listed" if reason == HUNG else reason)
    assert not lost.may_use_unread_gpu


@pytest.mark.parametrize(
    ("request_", "failed", "may_use_unread_gpu"),
    [
        pytest.param(("0",), NVIDIA_SOURCE, True, id="a GPU by its index"),
        pytest.param(("all",), NVIDIA_SOURCE, True, id="every NVIDIA GPU"),
        pytest.param(("renderD129",), DRM_SOURCE, True, id="render node"),
        pytest.param(("renderD128",), NVIDIA_SOURCE, False, id="GPU of a source that answers"),
    ],
)
def test_gpus_of_a_failed_source_have_unknown_use(
    request_: tuple[str, ...], failed: str, *, may_use_unread_gpu: bool
) -> None:
    container, other = build.container(gpu_request=request_), build.gpu(1, node="renderD128")
    history = ContainerHistory(THRESHOLDS)

    fails = replace(build.gpus(other), failed=(failed,), nvidia_unread=failed == NVIDIA_SOURCE)
    found_all = [
        history.observe(container, history.attribute(container, OWN, fails), ram(1), now_s=1000.0 + second)
        for second in range(OUTAGE + 1)
    ]

    assert attribute_gpus(container, OWN, fails, THRESHOLDS).may_use_unread_gpu is may_use_unread_gpu
    assert [each.gpu_last_busy_age_s for each in found_all[-2:]] == [
        None if may_use_unread_gpu else OUTAGE - 1.0,
        OUTAGE,
    ]


def test_hung_driver_does_not_make_its_containers_stuck() -> None:
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("1",))
    readings = build.gpus(build.gpu(0), LEFT_OUT)
    process = ProcessWork(start_ticks=1, io_bytes=0, faults=0, cpu_s=0.0)
    found_all = [
        history.observe(
            container,
            history.attribute(container, OWN, readings),
            ram(1),
            ContainerWork(processes={1: process}),
            now_s=1000.0 + s,
        )
        for s in range(30)
    ]

    assert {(each.gpu_last_busy_age_s, each.no_progress_s) for each in found_all} == {(None, None)}
    assert found_all[-1].work_idle_s == 29


NEIGHBOURS = build.gpus(build.gpu(0, build.process(OTHER_PID, 0.9)), build.gpu(1, node="renderD128"))


@pytest.mark.parametrize(
    ("readings", "may_be"),
    [
        pytest.param(NEIGHBOURS, False, id="full lists without its process"),
        pytest.param(build.gpus(), False, id="no GPU on the host"),
        pytest.param(build.gpus(build.gpu(0, build.process(OTHER_PID, None), utilization_ratio=1.0)), True,
                     id="process of another is unmeasured, GPU busy"),
        pytest.param(build.gpus(build.gpu(0, build.process(OTHER_PID, None), utilization_ratio=0.05)), False,
                     id="process of another is unmeasured, GPU idle"),
        pytest.param(build.gpus(build.gpu(0, utilization_ratio=None)), True, id="use of one GPU unknown"),
        pytest.param(build.gpus(build.gpu(0, utilization_ratio=None, lost=True)), True,
                     id="one GPU lost"),
        pytest.param(None, True, id="no source answers"),
        pytest.param(replace(NEIGHBOURS, failed=("nvml",)), True, id="one of two sources fails"),
        pytest.param(replace(NEIGHBOURS, nvidia_unread=True), True, id="NVIDIA GPUs present and unread"),
        pytest.param(replace(NEIGHBOURS, gone={"renderD129": "GPU-9"}), True, id="one GPU read before"),
        pytest.param(replace(NEIGHBOURS, unlisted=(4001,)), True, id="its open files unreadable"),
        pytest.param(replace(NEIGHBOURS, unlisted=None), True, id="open files of many unreadable"),
        pytest.param(build.gpus(build.gpu(0, processes=None)), True, id="processes of one GPU unlisted"),
        pytest.param(build.gpus(build.gpu(0, utilization_ratio=0.06)), True,
                     id="unattributed use above the idle ratio"),
        pytest.param(build.gpus(build.gpu(0, utilization_ratio=0.05)), False, id="unattributed use at the idle ratio"),
    ],
)  # fmt: skip
def test_container_without_an_assigned_gpu_may_use_one(readings: GpuReadings | None, *, may_be: bool) -> None:
    without = build.container(gpu_request=None)

    assert attribute_gpus(without, frozenset({4001}), readings, THRESHOLDS).may_be_elsewhere is may_be
    assert attribute_gpus(without, None, readings, THRESHOLDS).may_be_elsewhere


def test_paused_container_has_no_saturated_time() -> None:
    samples = [(0.0, gpus_at(1.0)), (1.0, gpus_at(1.0))]

    assert gpu_times(*samples, paused_last=True) == (None, None)


def test_pause_restarts_an_outage() -> None:
    history, found_all = ContainerHistory(THRESHOLDS), []
    for second in range(2501):
        container = build.container(paused=second == 1300)
        found = history.observe(container, NO_SOURCE, ram(1), now_s=1000.0 + second)
        found_all.append(found.gpu_last_busy_age_s)

    assert (found_all[1199], found_all[1200], found_all[1299]) == (None, 1200.0, 1299.0)
    assert set(found_all[1300:2501]) == {None}


def test_long_outage_makes_only_inactive_containers_stuck() -> None:
    def after(seconds: int, cpu_s: float) -> float | None:
        history = ContainerHistory(THRESHOLDS)
        for second in range(seconds + 1):
            work = ContainerWork(processes={1: ProcessWork(start_ticks=1, io_bytes=0, faults=0, cpu_s=cpu_s * second)})
            found = history.observe(build.container(), NO_SOURCE, ram(1), work, now_s=1000.0 + second)
        return found.no_progress_s

    assert (after(1199, 0.0), after(1200, 0.0)) == (None, 1200.0)
    assert after(1200, 0.5) == 0.0


def observe_pauses(*samples: tuple[float, float | None]) -> ContainerEvidence:
    """The evidence after these samples: seconds since the previous one, and when the kernel reported it frozen."""
    history, now_s = ContainerHistory(THRESHOLDS), 1000.0
    for gap_s, frozen_s in samples:
        now_s += gap_s
        container = build.container(paused=frozen_s is not None)
        last = history.observe(container, gpus_at(1.0), ram(1), now_s=now_s, frozen_s=frozen_s)
    return last


@pytest.mark.parametrize(
    ("samples", "pauses"),
    [
        pytest.param([(0, None), (1, None)], (), id="none"),
        pytest.param([(0, None), (1, 1001.1), (1, None)], (), id="one sample proves no duration"),
        pytest.param([(0, 1000.1), (1, 1001.3)], ((1000.1, 1001.3),), id="to the next sample, by the kernel's time"),
        pytest.param([(0, 1000.1), (1, 1001.3), (1, 1002.2), (1, None)], ((1000.1, 1002.2),),
                     id="extended by a third sample"),
        pytest.param([(0, 1000.0), (5, 1005.0)], ((1000.0, 1005.0),), id="longest allowed gap"),
        pytest.param([(0, 1000.0), (5.1, 1005.1)], (), id="a longer gap"),
        pytest.param([(0, 1000.0), (1, 1000.0)], (), id="no time passed"),
        pytest.param([(0, 1000.0), (1, 1001.0), (1, None), (1, 1003.0), (2, 1005.0)],
                     ((1000.0, 1001.0), (1003.0, 1005.0)), id="two pauses"),
        pytest.param([(0, 1000.0), (1, 1001.0), (6, 1007.0), (1, 1008.0)],
                     ((1000.0, 1001.0), (1007.0, 1008.0)), id="two pauses around a gap"),
    ],
)  # fmt: skip
def test_pause_lasts_from_its_first_to_its_last_sample(
    samples: list[tuple[float, float | None]], pauses: tuple[tuple[float, float], ...]
) -> None:
    found = observe_pauses(*samples)

    assert found.pauses == pauses
    assert found.paused_s == sum(to_s - from_s for from_s, to_s in pauses)


def test_oldest_pauses_are_dropped_first() -> None:
    samples = [(1.0, each) for number in range(PAUSES_MAX + 1) for each in (3.0 * number, 3.0 * number + 1.0, None)]

    found = observe_pauses(*samples)

    seen = found.pauses
    assert (len(seen), seen[0], seen[-1]) == (PAUSES_MAX, (3.0, 4.0), (3.0 * PAUSES_MAX, 3.0 * PAUSES_MAX + 1.0))
    assert found.paused_s == PAUSES_MAX + 1.0


def test_pause_restarts_saturated_time() -> None:
    history = ContainerHistory(THRESHOLDS)
    for now_s, paused in ((1000.0, False), (1001.0, False), (1002.0, True)):
        history.observe(build.container(paused=paused), gpus_at(1.0), ram(1), now_s=now_s)

    first = history.observe(build.container(), gpus_at(1.0), ram(1), now_s=1003.0)
    second = history.observe(build.container(), gpus_at(1.0), ram(1), now_s=1004.0)

    assert (first.gpu_saturated_s, second.gpu_saturated_s) == (0.0, 1.0)


RATES = Thresholds(io_idle_bytes_per_s=100.0, page_faults_idle_per_s=10.0, cpu_idle_ratio=0.1, gap_max_s=5.0)

WorkSample = tuple[float, dict[int, ProcessWork] | None]


def worked(io_bytes: int | None = 0, faults: int = 0, cpu_s: float = 0.0, *, start_ticks: int = 5) -> ProcessWork:
    return ProcessWork(start_ticks=start_ticks, io_bytes=io_bytes, faults=faults, cpu_s=cpu_s)


def idle_times(*samples: WorkSample) -> tuple[float | None, float | None, float | None]:
    """Seconds without I/O, page faults and CPU use after these samples."""
    history, now_s = ContainerHistory(RATES), 1000.0
    for gap_s, found in samples:
        now_s += gap_s
        last = history.observe(build.container(), use(0.0), ram(1), ContainerWork(processes=found), now_s=now_s)
    return last.io_idle_s, last.page_fault_idle_s, last.cpu_idle_s


@pytest.mark.parametrize(
    ("io_mib", "faults", "cpu_s", "heavy_s", "faults_s"),
    [
        pytest.param(0, 401, 0.91, 0.0, 0.0, id="compiles"),
        pytest.param(0, 0, 3.0, 30.0, 30.0, id="polls: no page faults"),
        pytest.param(0, 5000, 0.5, 30.0, 0.0, id="maps a file: little CPU time"),
        pytest.param(0, 400, 0.9, 30.0, 30.0, id="at the limits"),
        pytest.param(17, 0, 0.1, 0.0, 30.0, id="writes a checkpoint"),
        pytest.param(16, 0, 0.1, 30.0, 30.0, id="I/O at its limit"),
    ],
)
def test_heavy_work(io_mib: int, faults: int, cpu_s: float, heavy_s: float, faults_s: float) -> None:
    history = ContainerHistory(RATES)
    for second, (_, found) in enumerate(steady(30, io=io_mib * 2**20, faults=faults, cpu_s=cpu_s)):
        work = ContainerWork(processes=found)
        last = history.observe(build.container(), use(0.0), ram(1), work, now_s=1000.0 + second)

    assert (last.heavy_work_idle_s, last.heavy_page_fault_idle_s) == (heavy_s, faults_s)


def test_heavy_work_is_unknown_without_io() -> None:
    history = ContainerHistory(RATES)

    found = history.observe(
        build.container(), use(0.0), ram(1), ContainerWork(processes={1: worked(None)}), now_s=1000.0
    )

    assert found.heavy_work_idle_s is None
    assert found.heavy_page_fault_idle_s == 0.0


def steady(seconds: int, *, io: int = 0, faults: int = 0, cpu_s: float = 0.0, after: int = 0) -> list[WorkSample]:
    """One process with constant work per second; `after` is how many seconds it has run before."""
    return [
        (1.0, {1: worked(io * total, faults * total, cpu_s * total)}) for total in range(after, after + seconds + 1)
    ]


def probing(io: int | None, *, start_ticks: int = 9) -> WorkSample:
    """An inactive process, and a second one like a health check."""
    return 1.0, {1: worked(), 2: worked(io, start_ticks=start_ticks)}


STARTED = {1: worked(), 2: worked(start_ticks=9)}


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        pytest.param(steady(0, io=10**9), (0.0, 0.0, 0.0), id="the first sample starts them"),
        pytest.param(steady(30), (30.0, 30.0, 30.0), id="no work"),
        pytest.param(steady(30, io=100, faults=10), (30.0, 30.0, 30.0), id="at the rates"),
        pytest.param(steady(30, io=101), (0.0, 30.0, 30.0), id="I/O above its rate"),
        pytest.param(steady(30, faults=11), (30.0, 0.0, 30.0), id="faults above their rate"),
        pytest.param(steady(30, cpu_s=0.11), (30.0, 30.0, 0.0), id="CPU above its rate"),
        pytest.param([*steady(20), (1.0, {1: worked(1000)}), *[(1.0, {1: worked(1000)})] * 9], (30.0, 30.0, 30.0),
                     id="a burst within the 10 s average"),
        pytest.param([*steady(20), (1.0, {1: worked(1001)}), *[(1.0, {1: worked(1001)})] * 9], (0.0, 30.0, 30.0),
                     id="a larger burst counts for 10 s"),
        pytest.param([*steady(20), (1.0, {1: worked(1001)}), *[(1.0, {1: worked(1001)})] * 10], (10.0, 31.0, 31.0),
                     id="idle since that burst"),
        pytest.param([*steady(20, io=200), *[(1.0, {1: worked(4000)})] * 5, (1.0, {1: worked(4000)})],
                     (6.0, 26.0, 26.0), id="idle since the last sample above the rate"),
        pytest.param([(0.0, {1: worked()}), *[(3.0, {1: worked(0)})] * 4, (3.0, {1: worked(1001)})],
                     (0.0, 15.0, 15.0), id="no smaller burst counts at longer intervals"),
        pytest.param([*steady(20), probing(5000)], (21.0, 21.0, 21.0), id="work of a starting process does not count"),
        pytest.param([*steady(20), probing(5000), probing(10000)], (22.0, 22.0, 22.0),
                     id="a process starts until its second sample"),
        pytest.param([*steady(20), probing(5000), probing(10000), probing(11001)], (0.0, 23.0, 23.0),
                     id="later work counts"),
        pytest.param([*steady(20), *[(1.0, STARTED)] * 2, probing(1001)], (0.0, 23.0, 23.0),
                     id="later work counts after samples without work"),
        pytest.param([*steady(20), (1.0, {1: worked(5000, start_ticks=9)})], (21.0, 21.0, 21.0),
                     id="a reused pid is a starting process"),
        pytest.param([*steady(20), probing(None)], (None, 21.0, 21.0), id="its I/O unknown"),
        pytest.param([*steady(20), (1.0, {1: worked(5000), 2: worked(start_ticks=9)})], (0.0, 21.0, 21.0),
                     id="work of an earlier process counts"),
        pytest.param([*steady(20), *(probing(5000, start_ticks=9 + each // 2) for each in range(10))],
                     (30.0, 30.0, 30.0), id="a new process every 2 s may be health checks"),
        pytest.param([*steady(20), *(probing(5000, start_ticks=9 + each) for each in range(5))], (25.0, 25.0, 25.0),
                     id="5 new processes in 10 s may be health checks"),
        pytest.param([*steady(20), *(probing(5000, start_ticks=9 + each) for each in range(6))], (0.0, 26.0, 26.0),
                     id="6 new processes in 10 s are work"),
        *(pytest.param([*steady(20), *((gap_s, probing(5000, start_ticks=9 + each)[1]) for each in range(20))],
                       (0.0, 20 + 20 * gap_s, 20 + 20 * gap_s), id=f"a new process every {gap_s} s at each sample")
          for gap_s in (1.5, 2.5, 4.5)),
        *(pytest.param([*steady(20), *((gap_s, probing(5000, start_ticks=9 + each // often)[1]) for each in range(20))],
                       (20 + 20 * gap_s,) * 3, id=f"one each {often * gap_s} s may be health checks, samples {gap_s} s")
          for gap_s, often in ((2.5, 4), (4.5, 3))),
        pytest.param([*steady(20), *(probing(5000, start_ticks=9 + each) for each in range(5)), *steady(5),
                      probing(5000, start_ticks=20)], (32.0, 32.0, 32.0), id="new processes over 10 s ago"),
        pytest.param([(0.0, {1: worked(9000), 2: worked(9000)}), (1.0, {1: worked(9000)})], (1.0, 1.0, 1.0),
                     id="an ended process subtracts nothing"),
        pytest.param([(0.0, {1: worked(9000)}), (1.0, {1: worked(8000)})], (1.0, 1.0, 1.0),
                     id="a falling counter adds no work"),
        pytest.param([*steady(9), (1.0, {1: worked(None)})], (None, 10.0, 10.0), id="only I/O unknown"),
        pytest.param([*steady(9), (1.0, {1: worked(None)}), (1.0, {1: worked(0)}), (1.0, {1: worked(0)}),
                      (1.0, {1: worked(0)})], (1.0, 13.0, 13.0), id="I/O known again restarts its time"),
        pytest.param([*steady(9), (1.0, None)], (None, None, None), id="processes unknown"),
        pytest.param([*steady(9), (1.0, None), (1.0, {1: worked()}), (1.0, {1: worked()})], (1.0, 1.0, 1.0),
                     id="processes known again restart all times"),
        pytest.param([*steady(9), (5.01, {1: worked(10**9)}), (1.0, {1: worked(10**9)})], (1.0, 1.0, 1.0),
                     id="a gap restarts all times"),
    ],
)  # fmt: skip
def test_work_is_idle_at_or_below_its_rates(
    samples: list[WorkSample], found: tuple[float | None, float | None, float | None]
) -> None:
    assert idle_times(*samples) == found


burst_lists = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 1.0, 1.0, 3.0, 5.0]), st.sampled_from([0, 0, 0, 0, 90, 500, 1001])),
    max_size=60,
)


@pytest.mark.parametrize("same", [False, True], ids=["read again", "reported unchanged"])
@given(burst_lists)
@example(bursts=[(5.0, 500), (1.0, 90), (5.0, 500), (5.0, 0)])
def test_work_rate_covers_the_last_ten_seconds(same: bool, bursts: list[tuple[float, int]]) -> None:
    history, times, totals, since_s = ContainerHistory(RATES), [1000.0], [0], 1000.0
    exceeded, overs = False, [False]
    work = ContainerWork(processes={1: worked()})
    last = history.observe(build.container(), use(0.0), ram(1), work, now_s=1000.0)
    for gap_s, size in bursts:
        times.append(times[-1] + gap_s)
        totals.append(totals[-1] + size)
        overs.append(size > 100.0 * gap_s)
        work = work if same and size == 0 else ContainerWork(processes={1: worked(totals[-1])})
        last = history.observe(build.container(), use(0.0), ram(1), work, now_s=times[-1])
        first = max((each for each, at_s in enumerate(times) if times[-1] - at_s >= 10.0), default=0)
        before, exceeded = exceeded, totals[-1] - totals[first] > 100.0 * min(times[-1] - times[first], 10.0)
        if exceeded:
            since_s = times[-1]
            overs[-1] |= not any(overs[first + 1 :])
        elif before:
            since_s = max(at_s for at_s, over in zip(times, overs, strict=True) if over)

    assert last.io_idle_s == times[-1] - since_s


def test_later_samples_do_not_change_earlier_evidence() -> None:
    history, parts = ContainerHistory(THRESHOLDS), [GpuShare("GPU-0", 0.5, 100), GpuShare("GPU-0", 0.5, 200)]
    before, now = (
        history.observe(build.container(), use(0.5)._replace(shares=(part,)), ram(1), now_s=1000.0 + number)
        for number, part in enumerate(parts)
    )

    assert (before.busy_s, before.peak_bytes) == ({"GPU-0": 0.0}, {"GPU-0": 100})
    assert (now.busy_s, now.peak_bytes) == ({"GPU-0": 0.5}, {"GPU-0": 200})


def test_work_is_selected_by_process() -> None:
    whole = ContainerWork(processes={1: worked(), 2: worked(7)}, unknown=Unknown(reason="said", message="so"))

    assert work_history.select_work(whole, {2, 3}) == replace(whole, processes={2: worked(7)})
    assert work_history.select_work(ContainerWork(processes=None), {2}) == ContainerWork(processes=None)


def test_stopped_container_has_an_identity_and_no_values() -> None:
    down = stopped_container_evidence(build.container())

    assert down.container == build.container()
    assert (down.gpu_idle_s, down.ram_idle_s, down.work_idle_s) == (None, None, None)
    assert {each.reason for each in (down.gpu_unknown, down.ram_unknown, down.work_unknown) if each} == {"down"}


# A paused container


def test_paused_container_has_no_durations_and_restarts_them() -> None:
    history = ContainerHistory(THRESHOLDS)

    def observe(number: int, *, paused: bool) -> ContainerEvidence:
        work = ContainerWork(processes={1: ProcessWork(start_ticks=5, io_bytes=0, faults=0, cpu_s=0.0)})
        return history.observe(build.container(paused=paused), use(0.0), ram(7), work, now_s=1000.0 + number)

    def durations(found: ContainerEvidence) -> tuple[float | None, float | None, float | None]:
        return found.gpu_idle_s, found.ram_idle_s, found.work_idle_s

    before = [observe(number, paused=False) for number in range(4)][-1]
    asleep = [observe(number, paused=True) for number in range(4, 8)][-1]
    after = [durations(observe(number, paused=False)) for number in (8, 9)]

    assert durations(before) == (3.0, 3.0, 3.0)
    assert durations(asleep) == (None, None, None)
    assert (asleep.gpu_unknown, asleep.ram_unknown, asleep.work_unknown) == (container_history.PAUSED,) * 3
    assert asleep.ram_bytes == 7
    assert after == [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0)]
