"""Which GPUs count as lost, since when, and the effect on their containers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from exporter.evidence.container_history import ContainerHistory
from exporter.evidence.gpu_attribution import attribute_gpus
from exporter.evidence.gpu_loss import KNOWN_MAX, NOT_LISTED, GpuLossState, GpuLossTracker
from exporter.model.container import ContainerEvidence, RamUse
from exporter.model.gpu import DRM_SOURCE, Gpu, GpuReadings, MigInstance
from exporter.model.thresholds import Thresholds
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

THRESHOLDS = Thresholds()
FIRST, SECOND = build.gpu(0, build.process(1)), build.gpu(1, build.process(2))
NO_FIGURE: dict[str, Any] = {
    "utilization_ratio": None, "memory_used_bytes": None, "memory_size_bytes": None, "memory_free_bytes": None,
    "processes": None,
}  # fmt: skip
LOST = replace(SECOND, **NO_FIGURE, unknown="GPU is lost", lost=True)
REFUSED = replace(SECOND, **NO_FIGURE, unknown="Unknown Error", lost=None)
NAMELESS = replace(LOST, uuid="unidentified-1", name="")
NAMELESS_REFUSED = replace(REFUSED, uuid="unidentified-1", name="")
CARD = build.gpu(1)
INSTANCE = build.gpu(1, uuid="MIG-a", mig=MigInstance(parent=CARD.uuid, number=0, gpu_instance=1, compute_instance=0))
AMD = build.gpu(0, uuid="GPU-amd", node="renderD128")

Sample = tuple[Gpu, ...] | GpuReadings | None


def play(samples: Sequence[Sample], *, every_s: float = 1.0) -> list[tuple[GpuLossState, GpuReadings | None]]:
    """The result of each sample; `None` is a sample in which no source answered."""
    history = GpuLossTracker(gap_max_s=5.0)
    return [
        history.observe(build.gpus(*sample) if isinstance(sample, tuple) else sample, now_s=number * every_s)
        for number, sample in enumerate(samples)
    ]


def last(*samples: Sample, every_s: float = 1.0) -> dict[str, float]:
    """Seconds for which each GPU has been lost by the last sample."""
    return dict(play(samples, every_s=every_s)[-1][0].seconds)


BOTH = (FIRST, SECOND)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        pytest.param([BOTH, BOTH], {"GPU-0": 0.0, "GPU-1": 0.0}, id="both present"),
        pytest.param([BOTH, (FIRST, LOST)], {"GPU-0": 0.0, "GPU-1": 0.0}, id="first lost sample"),
        pytest.param([BOTH, *[(FIRST, LOST)] * 4], {"GPU-0": 0.0, "GPU-1": 3.0}, id="reported as lost"),
        pytest.param([BOTH, *[(FIRST,)] * 4], {"GPU-0": 0.0, "GPU-1": 3.0}, id="not listed any more"),
        pytest.param([BOTH, *[()] * 3], {"GPU-0": 2.0, "GPU-1": 2.0}, id="answer without any GPU"),
        pytest.param([(FIRST,), (FIRST,)], {"GPU-0": 0.0}, id="never seen"),
        pytest.param([(FIRST, LOST), (FIRST, LOST)], {"GPU-0": 0.0, "GPU-1": 1.0}, id="lost from the first sample"),
        pytest.param([BOTH, (FIRST, LOST), BOTH], {"GPU-0": 0.0, "GPU-1": 0.0}, id="back"),
        pytest.param(
            [BOTH, (FIRST, LOST), BOTH, (FIRST, LOST), (FIRST, LOST)], {"GPU-0": 0.0, "GPU-1": 1.0}, id="lost again"
        ),
        pytest.param([BOTH, (FIRST, REFUSED)], {"GPU-0": 0.0}, id="another error is unknown"),
        pytest.param([BOTH, None], {}, id="no source answers"),
        pytest.param(
            [BOTH, GpuReadings(source="drm", gpus=(AMD,), failed=("gpu",))], {"GPU-amd": 0.0}, id="its source fails"
        ),
        pytest.param(
            [BOTH, (FIRST, LOST), (FIRST, REFUSED), None, (FIRST, LOST)],
            {"GPU-0": 0.0, "GPU-1": 3.0},
            id="unknown samples do not interrupt",
        ),
        pytest.param(
            [BOTH, (FIRST, LOST), *[None] * 4, (FIRST, LOST)],
            {"GPU-0": 0.0, "GPU-1": 5.0},
            id="unknown for one gap",
        ),
        pytest.param(
            [BOTH, (FIRST, LOST), *[None] * 5, (FIRST, LOST)],
            {"GPU-0": 0.0, "GPU-1": 0.0},
            id="unknown for longer than a gap",
        ),
        pytest.param(
            [(AMD,), GpuReadings(source="drm", gpus=(), gone={"renderD128": "GPU-amd"})],
            {"GPU-amd": 0.0},
            id="render node removed",
        ),
        pytest.param([(AMD,), GpuReadings(source="gpu", gpus=(), failed=("drm",))], {}, id="source of its node fails"),
        pytest.param(
            [(AMD,), (replace(AMD, uuid="GPU-amd-otherwise"),)],
            {"GPU-amd-otherwise": 0.0},
            id="its node has another GPU",
        ),
    ],
)
def test_lost_time_of_each_gpu(samples: list[Sample], expected: dict[str, float]) -> None:
    assert last(*samples) == expected


def test_longer_gap_between_samples_restarts_lost_time() -> None:
    assert last(BOTH, (FIRST, LOST), (FIRST, LOST), every_s=6.0)["GPU-1"] == 0.0
    assert last(BOTH, (FIRST, LOST), (FIRST, LOST), every_s=5.0)["GPU-1"] == 5.0


def test_lost_gpu_without_uuid_names_no_gpu_and_ends_when_it_returns() -> None:
    first, back = (found for found, _ in play([(FIRST, NAMELESS), BOTH]))

    assert (first.seconds, first.named) == ({"GPU-0": 0.0, "unidentified-1": 0.0}, ())
    assert back.seconds == {"GPU-0": 0.0, "GPU-1": 0.0}


def test_lost_gpu_without_uuid_is_the_known_gpu_of_its_index() -> None:
    (*_, (found, readings)) = play([BOTH, (FIRST, NAMELESS), (FIRST, NAMELESS)])

    assert found.seconds == {"GPU-0": 0.0, "GPU-1": 1.0}
    assert found.named == ("GPU-1",)
    assert readings is not None
    assert [gpu.uuid for gpu in readings.gpus] == ["GPU-0", "GPU-1"]


def test_unidentified_gpu_that_is_not_lost_makes_missing_gpus_unknown() -> None:
    assert last(BOTH, (FIRST, NAMELESS_REFUSED), (FIRST, NAMELESS_REFUSED)) == {"GPU-0": 0.0}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        pytest.param([(CARD, INSTANCE), (LOST,), (LOST,)], {"GPU-1": 1.0, "MIG-a": 1.0}, id="reported as lost"),
        pytest.param([(CARD, INSTANCE), (), ()], {"GPU-1": 1.0, "MIG-a": 1.0}, id="not listed any more"),
        pytest.param([(CARD, INSTANCE), (CARD,), (LOST,)], {"GPU-1": 0.0}, id="removed before the loss"),
        pytest.param([(CARD, INSTANCE), (REFUSED,)], {}, id="unknown"),
    ],
)
def test_instances_are_lost_with_their_gpu(samples: list[Sample], expected: dict[str, float]) -> None:
    assert last(*samples) == expected


PART = build.gpu(1, uuid="GPU-amd/renderD129", node="renderD129")


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        pytest.param([(AMD, PART), (AMD,), (AMD,)], {"GPU-amd": 0.0, PART.uuid: 1.0}, id="removed counts as lost"),
        pytest.param([(AMD, PART), (), ()], {"GPU-amd": 1.0, PART.uuid: 1.0}, id="lost with its GPU"),
        pytest.param(
            [(AMD,), (replace(AMD, uuid="GPU-amd/renderD128"), PART)],
            {"GPU-amd/renderD128": 0.0, PART.uuid: 0.0},
            id="a newly partitioned GPU is not lost",
        ),
    ],
)
def test_unlisted_partition_is_lost(samples: list[Sample], expected: dict[str, float]) -> None:
    assert last(*samples) == expected


def test_unlisted_gpu_stays_in_the_readings_without_values() -> None:
    (*_, (_, readings)) = play([BOTH, (FIRST,)])

    assert readings is not None
    assert readings.gpus == (FIRST, replace(SECOND, **NO_FIGURE, unknown=NOT_LISTED, lost=True))


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([BOTH, (replace(SECOND, index=0),)], id="its index has another GPU"),
        pytest.param([(FIRST, AMD), (FIRST,)], id="it had a render node"),
    ],
)
def test_unlisted_gpu_is_dropped_if_its_index_is_reused_or_it_had_a_node(samples: list[Sample]) -> None:
    (*_, (found, readings)) = play(samples)

    assert len(found.named) == 1
    assert readings is not None
    assert (readings.gpus, readings.dropped) == (samples[-1], found.named)


def test_number_of_remembered_gpus_is_bounded() -> None:
    many = tuple(build.gpu(index) for index in range(KNOWN_MAX + 1))

    (*_, (found, _)) = play([many, ()])

    assert len(found.named) == KNOWN_MAX
    assert "GPU-0" not in found.named


# Effect on a container


def container_evidence(
    *samples: tuple[tuple[Gpu, ...] | GpuReadings, float], request: tuple[str, ...] = ("0", "1"), **container: Any
) -> list[ContainerEvidence]:
    """Evidence of a container with processes 1 and 2 at each sample and its time."""
    place, losses = build.container(gpu_request=request, **container), GpuLossTracker(gap_max_s=5.0)
    history = ContainerHistory(THRESHOLDS)
    found = []
    for sample, now_s in samples:
        lost, readings = losses.observe(build.gpus(*sample) if isinstance(sample, tuple) else sample, now_s=now_s)
        use = attribute_gpus(place, frozenset({1, 2}), readings, THRESHOLDS, history.gpus, history.seen_present)
        found.append(history.observe(place, use, RamUse(usage_bytes=1), now_s=now_s, lost=lost.named))
    return found


def seen(*samples: tuple[tuple[Gpu, ...], float], **container: Any) -> list[Any]:
    """Seconds since it lost a GPU, and which."""
    return [(evidence.gpu_lost_s, evidence.lost_gpus) for evidence in container_evidence(*samples, **container)]


BUSY = replace(FIRST, utilization_ratio=0.5, processes=(build.process(1, 0.5),))
UNLISTED = replace(FIRST, processes=None, unknown="not listed")


def test_lost_time_with_an_idle_gpu_starts_when_both_are_seen() -> None:
    found = seen((BOTH, 0), ((BUSY, LOST), 1), ((FIRST, LOST), 2), ((FIRST, LOST), 5))

    assert found == [(None, ()), (0.0, ("GPU-1",)), (0.0, ("GPU-1",)), (3.0, ("GPU-1",))]


@pytest.mark.parametrize("request_", [("all",), ("0", "1"), ("GPU-0", "GPU-1")], ids=lambda names: names[-1])
def test_loss_continues_if_the_driver_stops_reporting_the_uuid(request_: tuple[str, ...]) -> None:
    samples = [((FIRST, LOST), 1.0), ((FIRST, NAMELESS), 2.0), ((FIRST, NAMELESS), 4.0)]

    assert seen((BOTH, 0.0), *samples, request=request_)[-1] == (3.0, ("GPU-1",))


def test_loss_counts_if_all_gpus_are_lost_listed_or_not() -> None:
    assert seen(((SECOND,), 0), ((LOST,), 1), ((LOST,), 3), request=("1",))[-1] == (2.0, ("GPU-1",))
    assert seen((BOTH, 0), ((FIRST,), 1), ((FIRST,), 3), request=("1",))[-1] == (2.0, ("GPU-1",))


@pytest.mark.parametrize("request_", [("all",), ("0", "1")], ids=["all", "by their indexes"])
def test_loss_counts_if_the_driver_renumbers_the_other_gpus(request_: tuple[str, ...]) -> None:
    second = replace(SECOND, index=0)

    found = seen((BOTH, 0), ((second,), 1), ((second,), 3), request=request_)

    assert found == [(None, ()), (0.0, ("GPU-0",)), (2.0, ("GPU-0",))]


def test_loss_of_another_containers_gpu_does_not_count() -> None:
    others = build.gpu(1, build.process(9)), replace(LOST, processes=None)

    assert seen(((FIRST, others[0]), 0), ((FIRST, others[1]), 1), request=("0",))[-1] == (None, ())


@pytest.mark.parametrize(
    ("between", "lasts_s"),
    [
        pytest.param([((UNLISTED, LOST), 2)], 4.0, id="unknown use of the other GPU does not end it"),
        pytest.param([((BUSY, LOST), 2)], 0.0, id="work on the other GPU ends it"),
        pytest.param([(BOTH, 2)], 0.0, id="return of the GPU ends it"),
    ],
)
def test_end_of_a_loss(between: list[tuple[tuple[Gpu, ...], float]], lasts_s: float) -> None:
    found = seen((BOTH, 0), ((FIRST, LOST), 1), *between, ((FIRST, LOST), 5))

    assert found[-1][0] == lasts_s


def test_gap_between_two_samples_ends_a_loss() -> None:
    samples = [((FIRST, LOST), 1.0), ((FIRST, LOST), 6.0), ((FIRST, LOST), 11.5)]

    assert [found for found, _ in seen((BOTH, 0), *samples)] == [None, 0.0, 5.0, 0.0]


SATURATED = replace(FIRST, utilization_ratio=1.0, processes=(build.process(1, 1.0),))
SATURATED_SECOND = replace(SECOND, utilization_ratio=1.0, processes=(build.process(2, 1.0),))


@pytest.mark.parametrize(
    ("samples", "saturated_s"),
    [
        pytest.param(
            [BOTH, (SATURATED, LOST), (SATURATED, LOST), (SATURATED, LOST)], [0.0, 0.0, 1.0, 2.0], id="reported as lost"
        ),
        pytest.param([BOTH, (SATURATED,), (SATURATED,)], [0.0, 0.0, 1.0], id="not listed any more"),
        pytest.param(
            [(SATURATED, SECOND), (SATURATED, LOST), (SATURATED, LOST)], [0.0, 1.0, 2.0], id="idle before the loss"
        ),
        pytest.param(
            [(SATURATED, SATURATED_SECOND), (SATURATED, LOST), (SATURATED, LOST)],
            [0.0, 0.0, 1.0],
            id="saturated before the loss",
        ),
        pytest.param(
            [BOTH, (SATURATED, LOST), (BUSY, LOST), (SATURATED, LOST)], [0.0, 0.0, 0.0, 0.0], id="other GPU pauses"
        ),
        pytest.param([BOTH, (FIRST, LOST), (FIRST, LOST)], [0.0, 0.0, 0.0], id="other GPU idle"),
        pytest.param([BOTH, (LOST,), (LOST,)], [0.0, None, None], id="both lost"),
        pytest.param([BOTH, (SATURATED, REFUSED), (SATURATED, REFUSED)], [0.0, None, None], id="unknown, not lost"),
        pytest.param([BOTH, (UNLISTED, LOST), (SATURATED, LOST)], [0.0, None, 0.0], id="other GPU unknown"),
    ],
)
def test_saturated_time_counts_the_remaining_gpus(
    samples: list[tuple[Gpu, ...]], saturated_s: list[float | None]
) -> None:
    found = container_evidence(*((sample, float(now_s)) for now_s, sample in enumerate(samples)))

    assert [evidence.gpu_saturated_s for evidence in found] == saturated_s


@pytest.mark.parametrize(
    ("third", "request_"),
    [
        pytest.param((build.gpu(2, processes=None),), ("0", "1", "2"), id="cannot be listed"),
        pytest.param((build.gpu(2, utilization_ratio=0.4),), ("0", "1", "2"), id="has unattributed use"),
        pytest.param((), ("0", "1", "7"), id="never seen"),
    ],
)
def test_saturated_time_is_unknown_if_a_third_gpu(third: tuple[Gpu, ...], request_: tuple[str, ...]) -> None:
    samples = [((FIRST, SECOND, *third), 0.0), ((SATURATED, LOST, *third), 1.0), ((SATURATED, LOST, *third), 2.0)]
    idle = (replace(each, utilization_ratio=0.0, processes=()) for each in third or (build.gpu(2),))
    known = (SATURATED, LOST, *idle)

    found = container_evidence(*samples, request=request_)
    control = container_evidence(
        ((FIRST, SECOND, *known[2:]), 0.0), (known, 1.0), (known, 2.0), request=("0", "1", "2")
    )

    assert (found[-1].gpu_saturated_s, control[-1].gpu_saturated_s) == (None, 1.0)


AMD_UNLISTED = replace(AMD, index=2, processes=None, unknown="not listed")
AMD_IDLE = replace(AMD, index=2)
SATURATED_RENUMBERED = replace(SATURATED_SECOND, index=0)
"""The driver renumbers the other GPUs."""


@pytest.mark.parametrize("kind", ["process", "systemd"])
@pytest.mark.parametrize(
    ("left", "idle_left"),
    [
        pytest.param((SATURATED, LOST), (FIRST, LOST), id="reported as lost"),
        pytest.param((SATURATED,), (FIRST,), id="not listed any more"),
        pytest.param((SATURATED_RENUMBERED,), (replace(SECOND, index=0),), id="renumbered"),
    ],
)
@pytest.mark.parametrize(
    ("others", "failed"),
    [
        pytest.param((), (DRM_SOURCE,), id="source fails"),
        pytest.param((AMD_UNLISTED,), (), id="processes are not listed"),
    ],
)
def test_loss_is_unknown_if_it_may_use_another_vendors_gpu(
    kind: str, left: tuple[Gpu, ...], idle_left: tuple[Gpu, ...], others: tuple[Gpu, ...], failed: tuple[str, ...]
) -> None:
    def last_of(sample: tuple[Gpu, ...], kind: str, *others: Gpu, failed: tuple[str, ...] = ()) -> ContainerEvidence:
        now = replace(build.gpus(*sample, *others), failed=failed)
        return container_evidence((BOTH, 0.0), (now, 1.0), (now, 2.0), request=("all",), kind=kind)[-1]

    found = [last_of(sample, kind, *others, failed=failed) for sample in (left, idle_left)]
    by_engine = [last_of(sample, "docker", *others, failed=failed) for sample in (left, idle_left)]
    listed = [last_of(sample, kind, AMD_IDLE) for sample in (left, idle_left)]

    assert [(each.gpu_saturated_s, each.gpu_lost_s) for each in found] == [(None, None)] * 2
    assert all(each.shares for each in found), "NVIDIA shares are known"
    for control in (by_engine, listed):
        assert [(each.gpu_saturated_s, each.gpu_lost_s) for each in control] == [(1.0, 0.0), (0.0, 1.0)]


def test_loss_of_all_gpus_does_not_count_if_it_may_use_another() -> None:
    def lost_s(pids_known: bool, *others: Gpu) -> float | None:
        place, losses = build.container(gpu_request=("all",), kind="process"), GpuLossTracker(gap_max_s=5.0)
        history = ContainerHistory(THRESHOLDS)
        for now_s, sample in enumerate(((SECOND,), (LOST,), (LOST,))):
            lost, readings = losses.observe(build.gpus(*sample, *others), now_s=float(now_s))
            pids = frozenset({2}) if pids_known or not now_s else None
            use = attribute_gpus(place, pids, readings, THRESHOLDS, history.gpus, history.seen_present)
            evidence = history.observe(place, use, RamUse(usage_bytes=1), now_s=float(now_s), lost=lost.named)
        return evidence.gpu_lost_s

    assert (lost_s(True), lost_s(True, AMD_IDLE), lost_s(False)) == (1.0, 1.0, 1.0)
    assert (lost_s(True, AMD_UNLISTED), lost_s(False, AMD_IDLE)) == (None, None)


def after(
    before: tuple[Gpu, ...], *samples: Sample, request: tuple[str, ...], found: bool = False, **container: Any
) -> ContainerEvidence:
    """Evidence of a container which started after these GPUs were seen, or was `found` running; a sample a second."""
    place, losses = build.container(gpu_request=request, **container), GpuLossTracker(gap_max_s=5.0)
    losses.observe(build.gpus(*before), now_s=0.0)
    history = ContainerHistory(THRESHOLDS, ran_before=found)
    for now_s, sample in enumerate(samples, start=1):
        lost, readings = losses.observe(
            build.gpus(*sample) if isinstance(sample, tuple) else sample, now_s=float(now_s)
        )
        use = attribute_gpus(place, frozenset({1}), readings, THRESHOLDS, history.gpus, history.seen_present)
        evidence = history.observe(place, use, RamUse(usage_bytes=1), now_s=float(now_s), lost=lost.named)
    return evidence


@pytest.mark.parametrize("kind", ["docker", "process", "systemd"])
@pytest.mark.parametrize("sample", [(FIRST, LOST), (FIRST, NAMELESS), (FIRST,)], ids=["reported", "nameless", "gone"])
def test_all_gpus_do_not_include_one_that_was_lost_before(kind: str, sample: tuple[Gpu, ...]) -> None:
    found = after(BOTH, sample, sample, sample, request=("all",), kind=kind)

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0",), (), None)
    assert (found.gpu_idle_s, found.gpu_unknown) == (2.0, None), "depends on the remaining GPUs"


def test_gpu_that_was_seen_present_is_lost() -> None:
    found = after(BOTH, BOTH, (FIRST, LOST), (FIRST, LOST), request=("all",))

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0", "GPU-1"), ("GPU-1",), 1.0)
    assert found.gpu_idle_s is None


@pytest.mark.parametrize("name", ["1", "GPU-1"])
def test_requested_gpu_that_was_never_present_is_unknown_not_lost(name: str) -> None:
    found = after(BOTH, (FIRST, LOST), (FIRST, LOST), request=("0", name))

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0", "GPU-1"), (), None)
    assert found.gpu_unknown is not None
    assert found.gpu_unknown.reason == "not_listed"


@pytest.mark.parametrize("name", ["1", "GPU-1"])
def test_container_found_running_has_lost_a_gpu_requested_by_name(name: str) -> None:
    found = after(BOTH, (FIRST, LOST), (FIRST, LOST), (FIRST, LOST), request=("0", name), found=True)

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0", "GPU-1"), ("GPU-1",), 2.0)
    assert found.gpu_idle_s is None, "unknown, and not idle"


@pytest.mark.parametrize("sample", [(FIRST, LOST), (FIRST,)], ids=["reported", "gone"])
def test_container_found_running_with_all_gpus_depends_on_the_remaining_ones(sample: tuple[Gpu, ...]) -> None:
    found = after(BOTH, sample, sample, request=("all",), found=True)

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0",), (), None)


def test_all_gpus_lost_before_the_start_are_missing() -> None:
    found = after(BOTH, (), (), request=("all",))

    assert (found.gpus, found.gpu_lost_s, found.gpu_idle_s) == ((), None, None)
    assert found.gpu_unknown is not None
    assert found.gpu_unknown.reason == "gpu_missing"


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        pytest.param(
            (build.gpu(1, build.process(1), uuid="GPU-amd-1", node="renderD129"),), (1.0, None), id="one left"
        ),
        pytest.param((), (None, "gpu_missing"), id="none left"),
    ],
)
def test_all_render_nodes_do_not_include_a_removed_one(
    left: tuple[Gpu, ...], expected: tuple[float | None, str | None]
) -> None:
    sample = GpuReadings(source="drm", gpus=left, gone={"renderD128": "GPU-amd"})

    found = after((AMD, *left), sample, sample, request=("dri",))

    assert (found.gpu_idle_s, found.gpu_unknown and found.gpu_unknown.reason) == expected
    assert (found.gpus, found.gpu_lost_s) == (tuple(gpu.uuid for gpu in left), None)


def test_paused_container_has_no_loss() -> None:
    assert seen((BOTH, 0), ((FIRST, LOST), 1), paused=True)[-1][0] is None
