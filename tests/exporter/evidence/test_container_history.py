"""From samples to durations: what is idle, what is still, and for how long that is known."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.evidence import container_history, windows, work_history
from exporter.evidence.container_history import PAUSES_MAX, ContainerHistory, stopped_container_evidence
from exporter.evidence.gpu_attribution import HUNG, NO_GPU, GpuAttribution, attribute_gpus
from exporter.evidence.gpu_trackers import OUTAGE_S
from exporter.evidence.work_history import ContainerWork
from exporter.model.container import ContainerEvidence, GpuShare
from exporter.model.gpu import NUMBERED, WITH_NODES, GpuFigures, GpuReadings
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from exporter.model.worker import ProcessWork
from tests.exporter import builders as build
from tests.exporter.evidence.values import OTHER_PID, OWN, THRESHOLDS, ram, use

pytestmark = pytest.mark.pure

Sample = tuple[float, float | None, int | None]
"""Seconds since the sample before, GPU utilisation, RAM."""


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
        if max(window) - min(window) > THRESHOLDS.ram_idle_bytes:
            break
        first -= 1
    expected = None if values[-1] is None else sum(gap_s for gap_s, _, _ in samples[first + 1 :])

    assert observed(*samples).ram_idle_s == expected


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
    assert observed(*((1.0, 0.0, value) for value in values)).ram_idle_s == still_s


def test_creeping_ram_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "EXTREMES_MAX", 10)
    rising = [(1.0, 0.0, value) for value in range(100)]
    falling = [(1.0, 0.0, value) for value in reversed(range(100))]

    assert observed(*rising).ram_idle_s == observed(*falling).ram_idle_s == 9.0


def test_an_unknown_ram_figure_starts_the_stillness_anew() -> None:
    samples: list[Sample] = [(0, 0.0, 1), (1, 0.0, 1), (1, 0.0, None), (1, 0.0, 1), (1, 0.0, 1)]

    assert observed(*samples[:3]).ram_idle_s is None
    assert observed(*samples).ram_idle_s == 1.0


# From look to look


REST = build.gpus(build.gpu(0, build.process(4001, 0.0)), build.gpu(1))


@pytest.mark.parametrize("there", [frozenset({"GPU-1"}), frozenset[str]()], ids=["seen there", "never there"])
def test_a_gpu_that_a_container_had_counts_in_what_it_uses_of_the_same_readings(there: frozenset[str]) -> None:
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


# Busy but stuck: A14b and A19, where the GPU is pegged or unknown


def gpus_at(*ratios: float | None, unknown: Unknown | None = None) -> GpuAttribution:
    """One moment of a container's GPUs: its share of each."""
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


NOT_MEASURED = Unknown(reason="not_measured", because="the driver does not say")
NOBODY_ASKED = gpus_at(unknown=Unknown(reason="source_failed", because="no GPU source answers"))
ON_HUNG = gpus_at(None)._replace(left_out=True)
WITHOUT_GPU = Unknown(reason=NO_GPU, because="no GPU is assigned")
OUTAGE = int(OUTAGE_S)
ON_WHICH = gpus_at(unknown=WITHOUT_GPU)._replace(may_be_elsewhere=True)


def proved(*looks: tuple[float, GpuAttribution], paused_last: bool = False) -> tuple[float | None, float | None]:
    """For how long its GPUs were pegged, and not seen busy, after the last of some looks."""
    history, now_s = ContainerHistory(THRESHOLDS), 1000.0
    for number, (gap_s, found) in enumerate(looks, 1):
        now_s += gap_s
        container = build.container(paused=paused_last and number == len(looks))
        last = history.observe(container, found, ram(1), now_s=now_s)
    return last.gpu_saturated_s, last.gpu_last_busy_age_s


@pytest.mark.parametrize(
    ("looks", "saturated_s", "last_busy_age_s"),
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
    looks: list[tuple[float, GpuAttribution]], saturated_s: float | None, last_busy_age_s: float | None
) -> None:
    assert proved(*looks) == (saturated_s, last_busy_age_s)


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

    found = attribute_gpus(container, OWN, build.gpus(build.gpu(0), LEFT_OUT), THRESHOLDS, had)
    lost = attribute_gpus(
        container, OWN, build.gpus(build.gpu(0), replace(LEFT_OUT, figures=GpuFigures())), THRESHOLDS, had
    )

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
def test_a_failed_source_saw_nothing_on_its_gpus(request_: tuple[str, ...], failed: str, *, left_out: bool) -> None:
    container, other = build.container(gpu_request=request_), build.gpu(1, node="renderD128")
    history = ContainerHistory(THRESHOLDS)

    fails = replace(build.gpus(other), failed=(failed,), nvidia_unread=failed == NUMBERED)
    told = [
        history.observe(container, history.attribute(container, OWN, fails), ram(1), now_s=1000.0 + second)
        for second in range(OUTAGE + 1)
    ]

    assert attribute_gpus(container, OWN, fails, THRESHOLDS).left_out is left_out
    assert [each.gpu_last_busy_age_s for each in told[-2:]] == [None if left_out else OUTAGE - 1.0, OUTAGE]


def test_a_driver_that_hangs_about_a_gpu_moves_no_container_of_it_towards_being_stuck() -> None:
    history, container = ContainerHistory(THRESHOLDS), build.container(gpu_request=("1",))
    readings = build.gpus(build.gpu(0), LEFT_OUT)
    process = ProcessWork(start_ticks=1, io_bytes=0, faults=0, cpu_s=0.0)
    told = [
        history.observe(
            container,
            history.attribute(container, OWN, readings),
            ram(1),
            ContainerWork(processes={1: process}),
            now_s=1000.0 + s,
        )
        for s in range(30)
    ]

    assert {(each.gpu_last_busy_age_s, each.no_progress_s) for each in told} == {(None, None)}
    assert told[-1].work_idle_s == 29


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

    assert attribute_gpus(without, frozenset({4001}), readings, THRESHOLDS).may_be_elsewhere is may_be
    assert attribute_gpus(without, None, readings, THRESHOLDS).may_be_elsewhere


def test_a_paused_container_proves_nothing_and_begins_anew() -> None:
    looks = [(0.0, gpus_at(1.0)), (1.0, gpus_at(1.0))]

    assert proved(*looks, paused_last=True) == (None, None)


def test_an_outage_that_a_container_was_paused_in_begins_anew_for_it() -> None:
    history, told = ContainerHistory(THRESHOLDS), []
    for second in range(2501):
        container = build.container(paused=second == 1300)
        found = history.observe(container, NOBODY_ASKED, ram(1), now_s=1000.0 + second)
        told.append(found.gpu_last_busy_age_s)

    assert (told[1199], told[1200], told[1299]) == (None, 1200.0, 1299.0)
    assert set(told[1300:2501]) == {None}


def test_a_driver_that_is_dead_for_long_leaves_what_does_nothing_unmoved_and_not_what_works() -> None:
    def after(seconds: int, cpu_s: float) -> float | None:
        history = ContainerHistory(THRESHOLDS)
        for second in range(seconds + 1):
            work = ContainerWork(processes={1: ProcessWork(start_ticks=1, io_bytes=0, faults=0, cpu_s=cpu_s * second)})
            found = history.observe(build.container(), NOBODY_ASKED, ram(1), work, now_s=1000.0 + second)
        return found.no_progress_s

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

    assert (first.gpu_saturated_s, second.gpu_saturated_s) == (0.0, 1.0)


RATES = Thresholds(io_idle_bytes_per_s=100.0, page_faults_idle_per_s=10.0, cpu_idle_ratio=0.1, gap_max_s=5.0)

Look = tuple[float, dict[int, ProcessWork] | None]


def worked(io_bytes: int | None = 0, faults: int = 0, cpu_s: float = 0.0, *, start_ticks: int = 5) -> ProcessWork:
    return ProcessWork(start_ticks=start_ticks, io_bytes=io_bytes, faults=faults, cpu_s=cpu_s)


def still(*looks: Look) -> tuple[float | None, float | None, float | None]:
    """For how long I/O, faults and CPU have been still after the last look: seconds since the one before, and work."""
    history, now_s = ContainerHistory(RATES), 1000.0
    for gap_s, found in looks:
        now_s += gap_s
        last = history.observe(build.container(), use(0.0), ram(1), ContainerWork(processes=found), now_s=now_s)
    return last.io_idle_s, last.page_fault_idle_s, last.cpu_idle_s


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
def test_kept_rates_keep_work_still(looks: list[Look], found: tuple[float | None, float | None, float | None]) -> None:
    assert still(*looks) == found


bursts_of_a_life = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 1.0, 1.0, 3.0, 5.0]), st.sampled_from([0, 0, 0, 0, 90, 500, 1001])),
    max_size=60,
)


@pytest.mark.parametrize("same", [False, True], ids=["read anew", "told to be as it was"])
@given(bursts_of_a_life)
@example(bursts=[(5.0, 500), (1.0, 90), (5.0, 500), (5.0, 0)])
def test_the_rate_of_work_covers_the_last_ten_seconds(same: bool, bursts: list[tuple[float, int]]) -> None:
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


def test_what_was_told_of_a_look_stays_as_it_was_told() -> None:
    history, parts = ContainerHistory(THRESHOLDS), [GpuShare("GPU-0", 0.5, 100), GpuShare("GPU-0", 0.5, 200)]
    before, now = (
        history.observe(build.container(), use(0.5)._replace(shares=(part,)), ram(1), now_s=1000.0 + number)
        for number, part in enumerate(parts)
    )

    assert (before.busy_s, before.peak_bytes) == ({"GPU-0": 0.0}, {"GPU-0": 100})
    assert (now.busy_s, now.peak_bytes) == ({"GPU-0": 0.5}, {"GPU-0": 200})


def test_of_the_work_of_a_container_each_part_is_told_by_its_processes() -> None:
    whole = ContainerWork(processes={1: worked(), 2: worked(7)}, unknown=Unknown(reason="said", because="so"))

    assert work_history.select_work(whole, {2, 3}) == replace(whole, processes={2: worked(7)})
    assert work_history.select_work(ContainerWork(processes=None), {2}) == ContainerWork(processes=None)


def test_a_container_that_does_not_run_has_an_identity_and_no_figures() -> None:
    down = stopped_container_evidence(build.container())

    assert down.container == build.container()
    assert (down.gpu_idle_s, down.ram_idle_s, down.work_idle_s) == (None, None, None)
    assert {each.reason for each in (down.gpu_unknown, down.ram_unknown, down.work_unknown) if each} == {"down"}


# A container that is paused


def test_what_is_paused_has_no_durations_and_they_start_anew_when_it_goes_on() -> None:
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
