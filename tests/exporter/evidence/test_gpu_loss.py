"""Which GPUs count as lost, for how long, and what that makes of the containers that were given them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from exporter.evidence.container_history import ContainerHistory
from exporter.evidence.gpu_attribution import attribute_gpus
from exporter.evidence.gpu_loss import KNOWN_MAX, NOT_LISTED, GpuLossState, GpuLossTracker
from exporter.model.container import ContainerEvidence, RamUse
from exporter.model.gpu import WITH_NODES, Gpu, GpuReadings, MigInstance
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

Look = tuple[Gpu, ...] | GpuReadings | None


def play(looks: Sequence[Look], *, every_s: float = 1.0) -> list[tuple[GpuLossState, GpuReadings | None]]:
    """What is told at each look; `None` is one in which no source answered."""
    history = GpuLossTracker(gap_max_s=5.0)
    return [
        history.observe(build.gpus(*look) if isinstance(look, tuple) else look, now_s=number * every_s)
        for number, look in enumerate(looks)
    ]


def last(*looks: Look, every_s: float = 1.0) -> dict[str, float]:
    """For how long each GPU has been lost by the last look."""
    return dict(play(looks, every_s=every_s)[-1][0].seconds)


BOTH = (FIRST, SECOND)


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        pytest.param([BOTH, BOTH], {"GPU-0": 0.0, "GPU-1": 0.0}, id="both are there"),
        pytest.param([BOTH, (FIRST, LOST)], {"GPU-0": 0.0, "GPU-1": 0.0}, id="just seen lost"),
        pytest.param([BOTH, *[(FIRST, LOST)] * 4], {"GPU-0": 0.0, "GPU-1": 3.0}, id="called lost"),
        pytest.param([BOTH, *[(FIRST,)] * 4], {"GPU-0": 0.0, "GPU-1": 3.0}, id="listed no more"),
        pytest.param([BOTH, *[()] * 3], {"GPU-0": 2.0, "GPU-1": 2.0}, id="an answer without any GPU"),
        pytest.param([(FIRST,), (FIRST,)], {"GPU-0": 0.0}, id="never seen"),
        pytest.param([(FIRST, LOST), (FIRST, LOST)], {"GPU-0": 0.0, "GPU-1": 1.0}, id="lost from the first look on"),
        pytest.param([BOTH, (FIRST, LOST), BOTH], {"GPU-0": 0.0, "GPU-1": 0.0}, id="back"),
        pytest.param(
            [BOTH, (FIRST, LOST), BOTH, (FIRST, LOST), (FIRST, LOST)], {"GPU-0": 0.0, "GPU-1": 1.0}, id="lost again"
        ),
        pytest.param([BOTH, (FIRST, REFUSED)], {"GPU-0": 0.0}, id="not answering for another reason is unknown"),
        pytest.param([BOTH, None], {}, id="no source answers"),
        pytest.param(
            [BOTH, GpuReadings(source="drm", gpus=(AMD,), failed=("gpu",))], {"GPU-amd": 0.0}, id="its source fails"
        ),
        pytest.param(
            [BOTH, (FIRST, LOST), (FIRST, REFUSED), None, (FIRST, LOST)],
            {"GPU-0": 0.0, "GPU-1": 3.0},
            id="looks that cannot tell break nothing off",
        ),
        pytest.param(
            [BOTH, (FIRST, LOST), *[None] * 4, (FIRST, LOST)],
            {"GPU-0": 0.0, "GPU-1": 5.0},
            id="nor do they for as long as a gap",
        ),
        pytest.param(
            [BOTH, (FIRST, LOST), *[None] * 5, (FIRST, LOST)],
            {"GPU-0": 0.0, "GPU-1": 0.0},
            id="for longer they do",
        ),
        pytest.param(
            [(AMD,), GpuReadings(source="drm", gpus=(), gone={"renderD128": "GPU-amd"})],
            {"GPU-amd": 0.0},
            id="a render node that went",
        ),
        pytest.param(
            [(AMD,), GpuReadings(source="gpu", gpus=(), failed=("drm",))], {}, id="the source of its node fails"
        ),
        pytest.param(
            [(AMD,), (replace(AMD, uuid="GPU-amd-otherwise"),)], {"GPU-amd-otherwise": 0.0}, id="its node is another's"
        ),
    ],
)
def test_it_is_told_for_how_long_a_gpu_is_lost(looks: list[Look], told: dict[str, float]) -> None:
    assert last(*looks) == told


def test_samples_further_apart_than_a_gap_prove_no_loss_in_between() -> None:
    assert last(BOTH, (FIRST, LOST), (FIRST, LOST), every_s=6.0)["GPU-1"] == 0.0
    assert last(BOTH, (FIRST, LOST), (FIRST, LOST), every_s=5.0)["GPU-1"] == 5.0


def test_a_lost_gpu_that_has_not_told_its_uuid_is_lost_to_people_alone_and_not_once_it_is_back() -> None:
    first, back = (found for found, _ in play([(FIRST, NAMELESS), BOTH]))

    assert (first.seconds, first.named) == ({"GPU-0": 0.0, "unidentified-1": 0.0}, ())
    assert back.seconds == {"GPU-0": 0.0, "GPU-1": 0.0}


def test_one_that_stands_without_its_name_where_a_known_one_stood_is_that_one() -> None:
    (*_, (found, readings)) = play([BOTH, (FIRST, NAMELESS), (FIRST, NAMELESS)])

    assert found.seconds == {"GPU-0": 0.0, "GPU-1": 1.0}
    assert found.named == ("GPU-1",)
    assert readings is not None
    assert [gpu.uuid for gpu in readings.gpus] == ["GPU-0", "GPU-1"]


def test_a_gpu_that_is_listed_without_its_name_and_not_lost_may_be_any_that_is_missed() -> None:
    assert last(BOTH, (FIRST, NAMELESS_REFUSED), (FIRST, NAMELESS_REFUSED)) == {"GPU-0": 0.0}


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        pytest.param([(CARD, INSTANCE), (LOST,), (LOST,)], {"GPU-1": 1.0, "MIG-a": 1.0}, id="called lost"),
        pytest.param([(CARD, INSTANCE), (), ()], {"GPU-1": 1.0, "MIG-a": 1.0}, id="listed no more"),
        pytest.param([(CARD, INSTANCE), (CARD,), (LOST,)], {"GPU-1": 0.0}, id="unmade before, and no loss"),
        pytest.param([(CARD, INSTANCE), (REFUSED,)], {}, id="not told"),
    ],
)
def test_a_lost_gpu_takes_the_instances_along_that_it_was_cut_into(looks: list[Look], told: dict[str, float]) -> None:
    assert last(*looks) == told


PART = build.gpu(1, uuid="GPU-amd/renderD129", node="renderD129")


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        pytest.param([(AMD, PART), (AMD,), (AMD,)], {"GPU-amd": 0.0, PART.uuid: 1.0}, id="unmade counts as lost"),
        pytest.param([(AMD, PART), (), ()], {"GPU-amd": 1.0, PART.uuid: 1.0}, id="lost with its GPU"),
        pytest.param(
            [(AMD,), (replace(AMD, uuid="GPU-amd/renderD128"), PART)],
            {"GPU-amd/renderD128": 0.0, PART.uuid: 0.0},
            id="a GPU that is cut into partitions is not lost",
        ),
    ],
)
def test_a_partition_that_is_not_listed_any_more_is_lost(looks: list[Look], told: dict[str, float]) -> None:
    assert last(*looks) == told


def test_what_the_driver_does_not_list_any_more_stays_on_the_list_without_a_figure() -> None:
    (*_, (_, readings)) = play([BOTH, (FIRST,)])

    assert readings is not None
    assert readings.gpus == (FIRST, replace(SECOND, **NO_FIGURE, unknown=NOT_LISTED, lost=True))


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([BOTH, (replace(SECOND, index=0),)], id="its index is another's now"),
        pytest.param([(FIRST, AMD), (FIRST,)], id="it went by a render node"),
    ],
)
def test_but_not_where_another_is_meant_by_its_name_or_the_readings_say_it_themselves(looks: list[Look]) -> None:
    (*_, (found, readings)) = play(looks)

    assert len(found.named) == 1
    assert readings is not None
    assert (readings.gpus, readings.dropped) == (looks[-1], found.named)


def test_no_more_gpus_are_remembered_than_there_can_be() -> None:
    many = tuple(build.gpu(index) for index in range(KNOWN_MAX + 1))

    (*_, (found, _)) = play([many, ()])

    assert len(found.named) == KNOWN_MAX
    assert "GPU-0" not in found.named


# --- what that makes of a container


def told(
    *looks: tuple[tuple[Gpu, ...] | GpuReadings, float], request: tuple[str, ...] = ("0", "1"), **container: Any
) -> list[ContainerEvidence]:
    """What is told of a container with processes 1 and 2 at each look and its time."""
    place, losses = build.container(gpu_request=request, **container), GpuLossTracker(gap_max_s=5.0)
    history = ContainerHistory(THRESHOLDS)
    found = []
    for look, now_s in looks:
        lost, readings = losses.observe(build.gpus(*look) if isinstance(look, tuple) else look, now_s=now_s)
        use = attribute_gpus(place, frozenset({1, 2}), readings, THRESHOLDS, history.gpus, history.seen_present)
        found.append(history.observe(place, use, RamUse(usage_bytes=1), now_s=now_s, lost=lost.named))
    return found


def seen(*looks: tuple[tuple[Gpu, ...], float], **container: Any) -> list[Any]:
    """For how long it counts as one that has lost a GPU, and which."""
    return [(evidence.gpu_lost_s, evidence.lost_gpus) for evidence in told(*looks, **container)]


BUSY = replace(FIRST, utilization_ratio=0.5, processes=(build.process(1, 0.5),))
UNLISTED = replace(FIRST, processes=None, unknown="not listed")


def test_a_container_with_a_lost_gpu_and_an_idle_one_counts_from_when_both_are_seen_so() -> None:
    found = seen((BOTH, 0), ((BUSY, LOST), 1), ((FIRST, LOST), 2), ((FIRST, LOST), 5))

    assert found == [(None, ()), (0.0, ("GPU-1",)), (0.0, ("GPU-1",)), (3.0, ("GPU-1",))]


@pytest.mark.parametrize("request_", [("all",), ("0", "1"), ("GPU-0", "GPU-1")], ids=lambda names: names[-1])
def test_a_loss_goes_on_where_the_driver_is_asked_anew_and_does_not_tell_its_uuid(request_: tuple[str, ...]) -> None:
    looks = [((FIRST, LOST), 1.0), ((FIRST, NAMELESS), 2.0), ((FIRST, NAMELESS), 4.0)]

    assert seen((BOTH, 0.0), *looks, request=request_)[-1] == (3.0, ("GPU-1",))


def test_it_counts_with_nothing_but_lost_gpus_whether_listed_or_not() -> None:
    assert seen(((SECOND,), 0), ((LOST,), 1), ((LOST,), 3), request=("1",))[-1] == (2.0, ("GPU-1",))
    assert seen((BOTH, 0), ((FIRST,), 1), ((FIRST,), 3), request=("1",))[-1] == (2.0, ("GPU-1",))


@pytest.mark.parametrize("request_", [("all",), ("0", "1")], ids=["all", "by their indexes"])
def test_it_counts_where_the_others_are_counted_anew_without_the_one_that_is_lost(request_: tuple[str, ...]) -> None:
    second = replace(SECOND, index=0)

    found = seen((BOTH, 0), ((second,), 1), ((second,), 3), request=request_)

    assert found == [(None, ()), (0.0, ("GPU-0",)), (2.0, ("GPU-0",))]


def test_a_loss_of_another_containers_gpu_is_none_of_its_own() -> None:
    others = build.gpu(1, build.process(9)), replace(LOST, processes=None)

    assert seen(((FIRST, others[0]), 0), ((FIRST, others[1]), 1), request=("0",))[-1] == (None, ())


@pytest.mark.parametrize(
    ("between", "lasts_s"),
    [
        pytest.param([((UNLISTED, LOST), 2)], 4.0, id="a look that cannot tell of the other does not"),
        pytest.param([((BUSY, LOST), 2)], 0.0, id="work on the other does"),
        pytest.param([(BOTH, 2)], 0.0, id="its coming back does"),
    ],
)
def test_what_breaks_a_loss_off(between: list[tuple[tuple[Gpu, ...], float]], lasts_s: float) -> None:
    found = seen((BOTH, 0), ((FIRST, LOST), 1), *between, ((FIRST, LOST), 5))

    assert found[-1][0] == lasts_s


def test_a_gap_between_two_looks_breaks_a_loss_off() -> None:
    looks = [((FIRST, LOST), 1.0), ((FIRST, LOST), 6.0), ((FIRST, LOST), 11.5)]

    assert [found for found, _ in seen((BOTH, 0), *looks)] == [None, 0.0, 5.0, 0.0]


FULL = replace(FIRST, utilization_ratio=1.0, processes=(build.process(1, 1.0),))
FULL_TOO = replace(SECOND, utilization_ratio=1.0, processes=(build.process(2, 1.0),))


@pytest.mark.parametrize(
    ("looks", "saturated_s"),
    [
        pytest.param([BOTH, (FULL, LOST), (FULL, LOST), (FULL, LOST)], [0.0, 0.0, 1.0, 2.0], id="called lost"),
        pytest.param([BOTH, (FULL,), (FULL,)], [0.0, 0.0, 1.0], id="listed no more"),
        pytest.param([(FULL, SECOND), (FULL, LOST), (FULL, LOST)], [0.0, 1.0, 2.0], id="idle before it was lost"),
        pytest.param([(FULL, FULL_TOO), (FULL, LOST), (FULL, LOST)], [0.0, 0.0, 1.0], id="pegged before it was lost"),
        pytest.param([BOTH, (FULL, LOST), (BUSY, LOST), (FULL, LOST)], [0.0, 0.0, 0.0, 0.0], id="the other pauses"),
        pytest.param([BOTH, (FIRST, LOST), (FIRST, LOST)], [0.0, 0.0, 0.0], id="the other idles"),
        pytest.param([BOTH, (LOST,), (LOST,)], [0.0, None, None], id="both are lost"),
        pytest.param([BOTH, (FULL, REFUSED), (FULL, REFUSED)], [0.0, None, None], id="not lost but unknown"),
        pytest.param([BOTH, (UNLISTED, LOST), (FULL, LOST)], [0.0, None, 0.0], id="the other is unknown"),
    ],
)
def test_spinning_counts_the_gpus_that_are_left(looks: list[tuple[Gpu, ...]], saturated_s: list[float | None]) -> None:
    found = told(*((look, float(now_s)) for now_s, look in enumerate(looks)))

    assert [evidence.gpu_saturated_s for evidence in found] == saturated_s


@pytest.mark.parametrize(
    ("third", "request_"),
    [
        pytest.param((build.gpu(2, processes=None),), ("0", "1", "2"), id="cannot be listed"),
        pytest.param((build.gpu(2, utilization_ratio=0.4),), ("0", "1", "2"), id="is used by somebody on no list"),
        pytest.param((), ("0", "1", "7"), id="was never seen"),
    ],
)
def test_but_not_where_a_third_of_its_gpus(third: tuple[Gpu, ...], request_: tuple[str, ...]) -> None:
    looks = [((FIRST, SECOND, *third), 0.0), ((FULL, LOST, *third), 1.0), ((FULL, LOST, *third), 2.0)]
    idle = (replace(each, utilization_ratio=0.0, processes=()) for each in third or (build.gpu(2),))
    known = (FULL, LOST, *idle)

    found = told(*looks, request=request_)
    control = told(((FIRST, SECOND, *known[2:]), 0.0), (known, 1.0), (known, 2.0), request=("0", "1", "2"))

    assert (found[-1].gpu_saturated_s, control[-1].gpu_saturated_s) == (None, 1.0)


AMD_UNLISTED = replace(AMD, index=2, processes=None, unknown="not listed")
AMD_IDLE = replace(AMD, index=2)
FULL_TOO_FIRST = replace(FULL_TOO, index=0)
"""Where the driver counts the others anew without the one that is lost."""


@pytest.mark.parametrize("kind", ["process", "systemd"])
@pytest.mark.parametrize(
    ("left", "idle_left"),
    [
        pytest.param((FULL, LOST), (FIRST, LOST), id="called lost"),
        pytest.param((FULL,), (FIRST,), id="listed no more"),
        pytest.param((FULL_TOO_FIRST,), (replace(SECOND, index=0),), id="counted anew"),
    ],
)
@pytest.mark.parametrize(
    ("others", "failed"),
    [
        pytest.param((), (WITH_NODES,), id="source fails"),
        pytest.param((AMD_UNLISTED,), (), id="processes are not listed"),
    ],
)
def test_nor_where_it_was_given_no_gpu_by_name_and_may_be_on_one_of_another_vendor_whose(
    kind: str, left: tuple[Gpu, ...], idle_left: tuple[Gpu, ...], others: tuple[Gpu, ...], failed: tuple[str, ...]
) -> None:
    def last_of(look: tuple[Gpu, ...], kind: str, *others: Gpu, failed: tuple[str, ...] = ()) -> ContainerEvidence:
        now = replace(build.gpus(*look, *others), failed=failed)
        return told((BOTH, 0.0), (now, 1.0), (now, 2.0), request=("all",), kind=kind)[-1]

    found = [last_of(look, kind, *others, failed=failed) for look in (left, idle_left)]
    by_engine = [last_of(look, "docker", *others, failed=failed) for look in (left, idle_left)]
    listed = [last_of(look, kind, AMD_IDLE) for look in (left, idle_left)]

    assert [(each.gpu_saturated_s, each.gpu_lost_s) for each in found] == [(None, None)] * 2
    assert all(each.shares for each in found), "what is known of NVIDIA's is told all the same"
    for control in (by_engine, listed):
        assert [(each.gpu_saturated_s, each.gpu_lost_s) for each in control] == [(1.0, 0.0), (0.0, 1.0)]


def test_who_was_on_nothing_but_lost_gpus_has_not_lost_all_where_it_may_be_on_another() -> None:
    def lost_s(pids_known: bool, *others: Gpu) -> float | None:
        place, losses = build.container(gpu_request=("all",), kind="process"), GpuLossTracker(gap_max_s=5.0)
        history = ContainerHistory(THRESHOLDS)
        for now_s, look in enumerate(((SECOND,), (LOST,), (LOST,))):
            lost, readings = losses.observe(build.gpus(*look, *others), now_s=float(now_s))
            pids = frozenset({2}) if pids_known or not now_s else None
            use = attribute_gpus(place, pids, readings, THRESHOLDS, history.gpus, history.seen_present)
            evidence = history.observe(place, use, RamUse(usage_bytes=1), now_s=float(now_s), lost=lost.named)
        return evidence.gpu_lost_s

    assert (lost_s(True), lost_s(True, AMD_IDLE), lost_s(False)) == (1.0, 1.0, 1.0)
    assert (lost_s(True, AMD_UNLISTED), lost_s(False, AMD_IDLE)) == (None, None)


def after(
    before: tuple[Gpu, ...], *looks: Look, request: tuple[str, ...], found: bool = False, **container: Any
) -> ContainerEvidence:
    """What is told of a container whose exporter has seen these GPUs before it started, after a look a second.

    Or before the exporter saw it, where it was `found` running.
    """
    place, losses = build.container(gpu_request=request, **container), GpuLossTracker(gap_max_s=5.0)
    losses.observe(build.gpus(*before), now_s=0.0)
    history = ContainerHistory(THRESHOLDS, ran_before=found)
    for now_s, look in enumerate(looks, start=1):
        lost, readings = losses.observe(build.gpus(*look) if isinstance(look, tuple) else look, now_s=float(now_s))
        use = attribute_gpus(place, frozenset({1}), readings, THRESHOLDS, history.gpus, history.seen_present)
        evidence = history.observe(place, use, RamUse(usage_bytes=1), now_s=float(now_s), lost=lost.named)
    return evidence


@pytest.mark.parametrize("kind", ["docker", "process", "systemd"])
@pytest.mark.parametrize("look", [(FIRST, LOST), (FIRST, NAMELESS), (FIRST,)], ids=["called so", "nameless", "gone"])
def test_all_gpus_do_not_include_one_that_was_lost_before(kind: str, look: tuple[Gpu, ...]) -> None:
    found = after(BOTH, look, look, look, request=("all",), kind=kind)

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0",), (), None)
    assert (found.gpu_idle_s, found.gpu_unknown) == (2.0, None), "judged by the rest"


def test_but_one_that_it_was_seen_with_it_has_lost() -> None:
    found = after(BOTH, BOTH, (FIRST, LOST), (FIRST, LOST), request=("all",))

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0", "GPU-1"), ("GPU-1",), 1.0)
    assert found.gpu_idle_s is None


@pytest.mark.parametrize("name", ["1", "GPU-1"])
def test_a_lost_gpu_that_it_was_given_by_name_and_never_seen_with_is_unknown_and_no_loss_of_its_own(name: str) -> None:
    found = after(BOTH, (FIRST, LOST), (FIRST, LOST), request=("0", name))

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0", "GPU-1"), (), None)
    assert found.gpu_unknown is not None
    assert found.gpu_unknown.reason == "not_listed"


@pytest.mark.parametrize("name", ["1", "GPU-1"])
def test_but_who_was_found_running_has_lost_what_it_was_given_by_name(name: str) -> None:
    found = after(BOTH, (FIRST, LOST), (FIRST, LOST), (FIRST, LOST), request=("0", name), found=True)

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0", "GPU-1"), ("GPU-1",), 2.0)
    assert found.gpu_idle_s is None, "unknown, and not idle"


@pytest.mark.parametrize("look", [(FIRST, LOST), (FIRST,)], ids=["called so", "gone"])
def test_who_was_found_running_with_every_gpu_is_judged_by_the_rest(look: tuple[Gpu, ...]) -> None:
    found = after(BOTH, look, look, request=("all",), found=True)

    assert (found.gpus, found.lost_gpus, found.gpu_lost_s) == (("GPU-0",), (), None)


def test_who_was_given_every_gpu_where_each_was_lost_before_has_nothing_to_be_judged_by() -> None:
    found = after(BOTH, (), (), request=("all",))

    assert (found.gpus, found.gpu_lost_s, found.gpu_idle_s) == ((), None, None)
    assert found.gpu_unknown is not None
    assert found.gpu_unknown.reason == "gpu_missing"


@pytest.mark.parametrize(
    ("left", "told"),
    [
        pytest.param(
            (build.gpu(1, build.process(1), uuid="GPU-amd-1", node="renderD129"),), (1.0, None), id="one is left"
        ),
        pytest.param((), (None, "gpu_missing"), id="none is left"),
    ],
)
def test_so_it_is_with_every_render_node(left: tuple[Gpu, ...], told: tuple[float | None, str | None]) -> None:
    look = GpuReadings(source="drm", gpus=left, gone={"renderD128": "GPU-amd"})

    found = after((AMD, *left), look, look, request=("dri",))

    assert (found.gpu_idle_s, found.gpu_unknown and found.gpu_unknown.reason) == told
    assert (found.gpus, found.gpu_lost_s) == (tuple(gpu.uuid for gpu in left), None)


def test_a_paused_container_owes_no_sign_of_life() -> None:
    assert seen((BOTH, 0), ((FIRST, LOST), 1), paused=True)[-1][0] is None
