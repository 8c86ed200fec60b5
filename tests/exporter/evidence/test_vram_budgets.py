"""VRAM budgets: labels of containers, and each container's use of GPU memory."""

from dataclasses import replace
from typing import Any

import pytest

from exporter.collectors.gpus import families
from exporter.evidence.container_history import ContainerHistory
from exporter.evidence.gpu_attribution import NO_GPU, attribute_gpus
from exporter.evidence.vram_budgets import (
    BUDGET_LABEL,
    MANAGED_LABEL,
    PROTECTED_LABEL,
    gpu_memory,
    is_recycle_candidate,
    may_recycle,
    parse_budget,
    pod_budget,
    tenants,
)
from exporter.http import evidence
from exporter.model.container import KUBERNETES, ContainerEvidence, GpuShare, RamUse, VramBudget
from exporter.model.gpu import Gpu, GpuReadings, MigInstance
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from gpuwarden.evidence import GpuMemoryFacts, ServerFacts, VramShareFacts
from gpuwarden.kube.budget import RESOURCE, BudgetSources
from remediator.actuators.docker import LABEL
from remediator.reasons import Doubt
from remediator.remedies.recycle_container import choose, confirm
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

MIB = build.MIB

TERMS: dict[str, tuple[dict[str, str], VramBudget]] = {
    "nothing is said": ({}, VramBudget()),
    "it opted in": ({MANAGED_LABEL: "true"}, VramBudget(recyclable=True)),
    "a budget": ({BUDGET_LABEL: "3000", MANAGED_LABEL: "true"}, VramBudget(budget_bytes=3000 * MIB, recyclable=True)),
    "budget without opting in": ({BUDGET_LABEL: "3000"}, VramBudget(budget_bytes=3000 * MIB)),
    "other value of the opt-in label": ({BUDGET_LABEL: "1", MANAGED_LABEL: "yes"}, VramBudget(budget_bytes=MIB)),
    "protected": (
        {BUDGET_LABEL: "1", MANAGED_LABEL: "true", PROTECTED_LABEL: "true"},
        VramBudget(budget_bytes=MIB),
    ),
    "other value of the protection label": ({MANAGED_LABEL: "true", PROTECTED_LABEL: "ja"}, VramBudget()),
    "plainly not protected": ({MANAGED_LABEL: "true", PROTECTED_LABEL: "false"}, VramBudget(recyclable=True)),
}


@pytest.mark.parametrize(("labels", "says"), TERMS.values(), ids=TERMS)
def test_labels_set_the_budget(labels: dict[str, str], says: VramBudget) -> None:
    assert parse_budget(labels) == says


@pytest.mark.parametrize("said", ["", "0", "-1", "3000MiB", "3e3", "1.5", " 3000", "3000\n", "٣", "123456789"])
def test_unreadable_budget_is_reported_and_not_applied(said: str) -> None:
    found = parse_budget({BUDGET_LABEL: said, MANAGED_LABEL: "true"})

    assert (found.budget_bytes, found.recyclable) == (None, True)
    assert found.invalid is not None
    assert found.invalid.reason == "bad_budget"
    assert found.invalid.message.endswith("expected whole MiB, 1 to 99999999")


@pytest.mark.parametrize(
    ("labels", "may"),
    [
        ({MANAGED_LABEL: "true", BUDGET_LABEL: "2048"}, True),
        ({MANAGED_LABEL: "true"}, False),
        ({MANAGED_LABEL: "true", BUDGET_LABEL: "much"}, False),
        ({MANAGED_LABEL: "true", BUDGET_LABEL: "2048", PROTECTED_LABEL: "true"}, False),
        ({BUDGET_LABEL: "2048"}, False),
    ],
    ids=["budget and opted in", "no budget", "unreadable budget", "protected", "not opted in"],
)
def test_recycle_candidate_by_labels(labels: dict[str, str], *, may: bool) -> None:
    assert is_recycle_candidate(parse_budget(labels)) is may


def test_auto_removed_container_is_not_recyclable() -> None:
    assert not parse_budget({MANAGED_LABEL: "true", BUDGET_LABEL: "1"}, vanishes=True).recyclable


def test_container_that_cannot_be_stopped_does_not_protect_others() -> None:
    found, paused = place("a", holds(1), vram_budget=BUDGET), place("b", holds(1), vram_budget=BUDGET)
    paused = paused._replace(container=replace(paused.container, paused=True))
    snapshot = build.snapshot(build.sighting(container_id="c"), containers=(found, paused))

    assert [may_recycle(each, snapshot) for each in (found, paused)] == [True, False]
    assert not may_recycle(found, build.snapshot(build.sighting(container_id="a"), containers=(found,)))
    assert not may_recycle(place("a", vram_budget=VramBudget(budget_bytes=MIB)), snapshot)
    assert may_recycle(found, build.snapshot(workers=None, containers=(found,)))
    found_cards = gpu_memory(snapshot, "a") or []
    assert {each.container: each.recyclable for each in found_cards[0].tenants} == {"a": True, "b": False}


def test_invalid_budget_of_a_pod_is_reported_and_not_applied() -> None:
    def said(limit: str) -> VramBudget:
        container = {"resources": {"limits": {RESOURCE: limit}}}
        return pod_budget({"metadata": {}, "spec": {"containers": [container]}}, BudgetSources())

    assert said("3k") == VramBudget(budget_bytes=3000 * MIB)
    wrong = said("1.5")
    assert (wrong.budget_bytes, wrong.recyclable) == (None, False)
    assert wrong.invalid is not None
    assert wrong.invalid.reason == "bad_budget"
    assert wrong.invalid.message == f"the limit of {RESOURCE} is '1.5'; expected whole MiB, 1 to 99999999"


def test_opt_in_label_is_that_of_the_remediator() -> None:
    assert MANAGED_LABEL == LABEL


def place(
    name: str, *shares: GpuShare, vram_budget: VramBudget | None = None, gpus: tuple[str, ...] = ("GPU-0",)
) -> Any:
    container = build.container(name=name, id=name, incarnation=f"{name}@1", vram_budget=vram_budget or VramBudget())
    return build.evidence(container=container, shares=shares, gpus=gpus)


def holds_unknown(gpu: str) -> GpuShare:
    return GpuShare(gpu=gpu, utilization_ratio=None, memory_bytes=None)


def holds(memory_bytes: int | None, gpu: str = "GPU-0") -> GpuShare:
    return GpuShare(gpu=gpu, utilization_ratio=0.0, memory_bytes=memory_bytes)


BUDGET = VramBudget(budget_bytes=10 * MIB, recyclable=True)


def test_gpu_memory_lists_every_container_on_it() -> None:
    snapshot = build.snapshot(
        gpus=build.gpus(build.gpu(0, memory_free_bytes=7 * MIB)),
        containers=(place("a", holds(30 * MIB), vram_budget=BUDGET), place("b", holds(5))),
        thresholds=Thresholds(vram_floor_bytes=9, vram_tie_bytes=2),
        reclaiming_bytes={"GPU-0": 3},
    )

    assert gpu_memory(snapshot, "a") == [
        GpuMemoryFacts(
            gpu="GPU-0", size_bytes=16384 * MIB, free_bytes=7 * MIB, floor_bytes=9, tie_bytes=2, reclaiming_bytes=3,
            tenants=[
                VramShareFacts(
                    container="a", incarnation="a@1", used_bytes=30 * MIB, budget_bytes=10 * MIB, recyclable=True
                ),
                VramShareFacts(container="b", incarnation="b@1", used_bytes=5, budget_bytes=None, recyclable=False),
            ],
        )
    ]  # fmt: skip


def in_pod(name: str, *shares: GpuShare, vram_budget: VramBudget | None = None, **changes: Any) -> ContainerEvidence:
    """A container of the pod with uid `u`."""
    found: ContainerEvidence = place(name, *shares, vram_budget=vram_budget, **changes)
    return found._replace(container=replace(found.container, kind=KUBERNETES, incarnation=f"u@{name}@0"))


def test_pod_is_one_tenant_with_the_memory_of_all_its_containers() -> None:
    found = (
        in_pod("ml/p/a", holds(6 * MIB)),
        in_pod("ml/p/b", holds(5 * MIB), holds(9 * MIB, "GPU-1"), vram_budget=BUDGET),
        in_pod("ml/p/c", gpus=()),
        place("other", holds(7 * MIB)),
    )
    snapshot = build.snapshot(gpus=build.gpus(build.gpu(0), build.gpu(1)), containers=found)

    on_first, on_second = gpu_memory(snapshot, "ml/p/b") or []

    assert [(each.container, each.incarnation, each.used_bytes, each.budget_bytes) for each in on_first.tenants] == [
        ("ml/p/b", "u@ml/p/b@0", 11 * MIB, 10 * MIB),
        ("other", "other@1", 7 * MIB, None),
    ]
    assert [(each.container, each.used_bytes) for each in on_second.tenants] == [("ml/p/b", 9 * MIB)]


def test_unknown_memory_of_one_container_is_that_of_its_pod() -> None:
    found = (in_pod("ml/p/a", holds(None)), in_pod("ml/p/b", holds(30 * MIB), vram_budget=BUDGET))
    (card,) = gpu_memory(build.snapshot(gpus=build.gpus(build.gpu(0)), containers=found), "ml/p/b") or []

    assert [each.used_bytes for each in card.tenants] == [None]


def test_containers_of_a_pod_without_a_budget_are_tenants_of_their_own() -> None:
    found = (in_pod("ml/p/a", holds(6 * MIB)), in_pod("ml/p/b", holds(5 * MIB)))
    (card,) = gpu_memory(build.snapshot(gpus=build.gpus(build.gpu(0)), containers=found), "ml/p/b") or []

    assert [(each.container, each.used_bytes) for each in card.tenants] == [("ml/p/a", 6 * MIB), ("ml/p/b", 5 * MIB)]


NOTHING = Unknown(reason=NO_GPU, message="no GPU is assigned")
PODS: dict[str, tuple[int, tuple[str, ...], bool, str | None]] = {
    "within": (20, ("GPU-0",), False, None),
    "above its GPU": (2000, ("GPU-0",), False, "above_gpu"),
    "above one of its GPUs": (2000, ("GPU-0", "GPU-1"), False, None),
    "above a GPU of unknown size": (2000, ("GPU-2",), False, None),
    "above every GPU of the node": (5000, (), False, None),
    "without a GPU": (20, (), True, "no_gpu"),
}


@pytest.mark.parametrize(("mib", "gpus", "none", "reason"), PODS.values(), ids=PODS)
def test_budget_that_no_gpu_can_hold_is_not_used(
    mib: int, gpus: tuple[str, ...], *, none: bool, reason: str | None
) -> None:
    sizes = (1000, 3000, None)
    cards = (build.gpu(n, memory_size_bytes=mib and mib * MIB) for n, mib in enumerate(sizes))
    found = in_pod("ml/p/a", vram_budget=VramBudget(budget_bytes=mib * MIB), gpus=gpus)
    snapshot = build.snapshot(
        gpus=build.gpus(*cards), containers=(found._replace(gpu_unknown=NOTHING if none else None),)
    )

    (tenant,) = tenants(snapshot)

    assert (tenant.budget.invalid and tenant.budget.invalid.reason) == reason
    assert (tenant.budget.budget_bytes is None) is (reason is not None)


def test_budget_is_used_while_no_gpu_can_be_read() -> None:
    (tenant,) = tenants(build.snapshot(gpus=None, containers=(in_pod("ml/p/a", vram_budget=BUDGET),)))

    assert tenant.budget == BUDGET


def test_unknown_returning_memory_recycles_no_container() -> None:
    gpu = build.gpu(0, build.process(4001, 0.5, 20 * MIB), memory_free_bytes=0)
    found = place("a", holds(30 * MIB), vram_budget=BUDGET)

    def card(**changes: Any) -> GpuMemoryFacts:
        (found_cards,) = gpu_memory(build.snapshot(gpus=build.gpus(gpu), containers=(found,), **changes), "a") or []
        return found_cards

    assert (card().reclaiming_bytes, choose(card()).victim) == (0, "a@1")
    unknown = card(reclaiming_bytes={"GPU-1": 0})
    assert (unknown.reclaiming_bytes, choose(unknown).victim) == (None, None)


def test_container_gets_only_its_gpus() -> None:
    found = (place("a", holds(1, "GPU-1"), gpus=("GPU-1",)), place("b", holds(1), vram_budget=BUDGET))
    snapshot = build.snapshot(gpus=build.gpus(build.gpu(0), build.gpu(1)), containers=found)

    assert [card.gpu for card in gpu_memory(snapshot, "a") or ()] == ["GPU-1"]
    assert [card.gpu for card in gpu_memory(snapshot, "b") or ()] == ["GPU-0"]


def test_removed_container_gets_every_gpu() -> None:
    snapshot = build.snapshot(gpus=build.gpus(build.gpu(0), build.gpu(1)), containers=(place("b", holds(1)),))

    assert [card.gpu for card in gpu_memory(snapshot, "a") or ()] == ["GPU-0", "GPU-1"]


def test_free_memory_of_a_shared_instance_is_unknown() -> None:
    mig = MigInstance(parent="GPU-0", number=0, gpu_instance=1, compute_instance=0)
    its_own = build.gpu(0, uuid="MIG-a", memory_free_bytes=7 * MIB, mig=mig)
    shared = replace(its_own, uuid="MIG-b", mig=replace(mig, gpu_instance=2, shares_memory=True))
    tenant = place("a", holds(30 * MIB, "MIG-a"), holds(30 * MIB, "MIG-b"), vram_budget=BUDGET)

    found_cards = gpu_memory(build.snapshot(gpus=build.gpus(its_own, shared), containers=(tenant,)), "a") or []

    assert {card.gpu: card.free_bytes for card in found_cards} == {"MIG-a": 7 * MIB, "MIG-b": None}


@pytest.mark.parametrize(
    ("size_mib", "free_mib"),
    [(512, None), (1536, None), (2048, 7), (None, 7)],
    ids=["less", "equal", "more", "unknown"],
)
def test_gpu_smaller_than_the_floor_is_never_short(size_mib: int | None, free_mib: int | None) -> None:
    gpu = build.gpu(0, memory_size_bytes=size_mib and size_mib * MIB, memory_free_bytes=7 * MIB)
    snapshot = build.snapshot(gpus=build.gpus(gpu), containers=(place("a", holds(30 * MIB), vram_budget=BUDGET),))

    card = (gpu_memory(snapshot, "a") or [])[0]
    floors = next(each for each in families(snapshot) if each.name == "gpuwarden_gpu_memory_floor_bytes")

    assert card.free_bytes == (free_mib and free_mib * MIB)
    assert bool(floors.samples) is (free_mib is not None)


@pytest.mark.parametrize(
    ("request_", "used_mib"),
    [
        pytest.param(("all",), 20, id="holds the most, measured"),
        pytest.param(("0", "renderD129"), 20, id="another of its GPUs missing"),
        pytest.param(("0", "renderD129"), None, id="its memory unmeasured"),
    ],
)
def test_failed_source_keeps_the_largest_in_the_ranking(request_: tuple[str, ...], used_mib: int | None) -> None:
    held = build.process(4001, 0.0, used_mib and used_mib * MIB)
    gpu = build.gpu(0, held, build.process(4002, 0.0, 11 * MIB), memory_free_bytes=0)
    readings = GpuReadings(source="test", gpus=(gpu,), failed=("drm",))
    found = []
    for name, pid, asked in (("a", 4001, request_), ("b", 4002, ("GPU-0",))):
        container = build.container(name=name, incarnation=name, gpu_request=asked, vram_budget=BUDGET)
        use = attribute_gpus(container, frozenset({pid}), readings, Thresholds())
        found.append(ContainerHistory(Thresholds()).observe(container, use, RamUse(usage_bytes=1), now_s=1.0))

    card = (gpu_memory(build.snapshot(gpus=readings, containers=tuple(found)), "b") or [])[0]

    assert [each.used_bytes for each in card.tenants] == [used_mib and used_mib * MIB, 11 * MIB]
    assert choose(card).victim == (None if used_mib is None else "a")


def test_largest_stays_in_the_ranking_while_an_earlier_gpu_is_unread() -> None:
    gpu = build.gpu(0, build.process(4001, 0.5, 20 * MIB), build.process(4002, 0.0, 11 * MIB), memory_free_bytes=0)
    other = build.gpu(0, build.process(4001, 0.0, 0), node="renderD128", uuid="pci-0000:00:02.0")
    failed = GpuReadings(source="test", gpus=(gpu,), failed=("drm",), gone={"renderD128": other.uuid})
    tenants = {
        pid: (ContainerHistory(Thresholds()), build.container(name=name, incarnation=name, vram_budget=BUDGET))
        for name, pid in (("a", 4001), ("b", 4002))
    }
    looks = []

    for now_s, readings in enumerate((build.gpus(gpu, other), failed, failed)):
        found = []
        for pid, (history, container) in tenants.items():
            use = attribute_gpus(container, frozenset({pid}), readings, Thresholds(), history.gpus)
            found.append(history.observe(container, use, RamUse(usage_bytes=1), now_s=float(now_s)))
        card = (gpu_memory(build.snapshot(gpus=readings, containers=tuple(found)), "b") or [])[0]
        looks.append((choose(card).victim, found[0].gpu_idle_s, found[0].busy_s["GPU-0"]))

    assert looks == [("a", 0.0, 0.0), ("a", None, 0.5), ("a", None, 1.0)]


FULL = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


@pytest.mark.parametrize(
    ("missing", "had", "names"),
    [
        pytest.param((), (), None, id="no missing GPU: recycled"),
        pytest.param((FULL,), (), FULL, id="UUID"),
        pytest.param((FULL[:12],), (), FULL[:12], id="first digits of a UUID"),
        pytest.param((FULL[:12],), (FULL,), f"{FULL}, {FULL[:12]}", id="first digits of an earlier GPU"),
        pytest.param(("7",), (), "7", id="index"),
        pytest.param((f"MIG-{FULL}/7/0",), (), f"MIG-{FULL}/7/0", id="older name of an instance"),
        pytest.param(("MIG-GPU-1/7/0",), (), "MIG-GPU-1/7/0", id="older name of an unknown instance"),
    ],
)
def test_missing_gpu_allows_ranking_and_no_recycling(
    missing: tuple[str, ...], had: tuple[str, ...], names: str | None
) -> None:
    facts = accused(build.gpu(0, build.process(4001, 0.5, 20 * MIB), memory_free_bytes=0), ("0", *missing), had)

    found = confirm(facts, "worker-0@1")

    assert choose((facts.cards or [])[0]).victim == "worker-0@1"
    assert found.doubt is (None if names is None else Doubt.PROCESSES_UNKNOWN)
    assert names is None or f"no processes of {names}: its end could not be verified there" in found.message


def test_node_that_is_missing_from_the_start_allows_no_recycling() -> None:
    gpu = build.gpu(0, build.process(4001, 0.5, 20 * MIB), node="renderD128", memory_free_bytes=0)

    assert confirm(accused(gpu, ("renderD128",)), "worker-0@1").confirmed
    found = confirm(accused(gpu, ("renderD128", "renderD129")), "worker-0@1")

    assert found.doubt is Doubt.PROCESSES_UNKNOWN


def accused(gpu: Gpu, request: tuple[str, ...], had: tuple[str, ...] = ()) -> ServerFacts:
    """Evidence of the one container that is over its budget, on a GPU without free memory."""
    container = build.container(incarnation="worker-0@1", gpu_request=request, vram_budget=BUDGET)
    use = attribute_gpus(container, frozenset({4001}), build.gpus(gpu), Thresholds(), had)
    seen = ContainerHistory(Thresholds()).observe(container, use, RamUse(usage_bytes=1), now_s=1.0)
    snapshot = build.snapshot(gpus=build.gpus(gpu), containers=(seen,), thresholds=Thresholds(vram_floor_bytes=1))
    facts = evidence.server_evidence("worker-0", snapshot, now=build.ago(0))
    assert facts is not None
    return facts


def test_no_gpu_memory_without_gpu_readings() -> None:
    assert gpu_memory(build.snapshot(gpus=None), "worker-0") is None


PARTS: dict[str, tuple[Any, bool, str]] = {
    "holds nothing, budget": (place("a", holds(0), vram_budget=BUDGET), True, "0"),
    "holds nothing, no budget": (place("a", holds(0)), True, "absent"),
    "memory unmeasured": (place("a", holds(None), vram_budget=BUDGET), True, "None"),
    "processes unknown, GPU assigned": (place("a", vram_budget=BUDGET), True, "None"),
    "another GPU assigned": (place("a", vram_budget=BUDGET, gpus=("GPU-1",)), True, "absent"),
    "processes unlisted, budget": (place("a", vram_budget=BUDGET, gpus=()), False, "None"),
    "processes unlisted, no budget": (place("a", gpus=()), False, "absent"),
}


@pytest.mark.parametrize(("found", "listed", "used"), PARTS.values(), ids=PARTS)
def test_unknown_memory_is_never_zero(found: Any, listed: bool, used: str) -> None:
    gpu = build.gpu(0) if listed else build.gpu(0, processes=None, memory_used_bytes=None)
    found_cards = gpu_memory(build.snapshot(gpus=build.gpus(gpu), containers=(found,)), "a")

    assert ("absent" if not found_cards else str(found_cards[0].tenants[0].used_bytes)) == used


def test_memory_on_an_unassigned_gpu_counts() -> None:
    readings = build.gpus(build.gpu(0, build.process(4001, 0.2, 5 * MIB)), build.gpu(1, build.process(9, 0.1, MIB)))

    found = attribute_gpus(build.container(gpu_request=None), frozenset({4001}), readings, Thresholds())

    assert found.shares == (GpuShare(gpu="GPU-0", utilization_ratio=0.2, memory_bytes=5 * MIB, attributed=True),)
    assert (found.gpus, found.utilization_ratio) == (("GPU-0",), 0.2)
    assert attribute_gpus(build.container(gpu_request=None), frozenset({4001}), None, Thresholds()).shares == ()


def test_unknown_processes_may_hold_memory_of_any_gpu() -> None:
    readings = build.gpus(build.gpu(0), build.gpu(1))

    found = attribute_gpus(build.container(gpu_request=None), None, readings, Thresholds())

    assert found.shares == (holds_unknown("GPU-0"), holds_unknown("GPU-1"))


def test_peak_is_the_highest_known_value() -> None:
    history, container = ContainerHistory(Thresholds()), build.container()
    for now_s, used in enumerate((5, 9, None, 2)):
        process = build.process(4001, 0.0, used)
        use = attribute_gpus(container, frozenset({4001}), build.gpus(build.gpu(0, process)), Thresholds())
        found = history.observe(container, use, RamUse(usage_bytes=1), now_s=float(now_s))

    assert found.peak_bytes == {"GPU-0": 9}


@pytest.mark.parametrize(
    ("busy_ratio", "used_mib", "victim"),
    [
        pytest.param(0.0, 5000, "a", id="idle"),
        pytest.param(0.7, 5000, None, id="unattributed work and most memory unattributed"),
        pytest.param(0.06, 11, "a", id="unattributed work, all memory attributed"),
        pytest.param(0.06, 11 + 256, "a", id="all memory attributed within a tie"),
        pytest.param(0.06, 11 + 257, None, id="more than a tie unattributed"),
        pytest.param(0.06, None, None, id="memory in use unknown"),
    ],
)
def test_hidden_work_stops_the_ranking(busy_ratio: float, used_mib: int | None, victim: str | None) -> None:
    gpu = build.gpu(0, build.process(4001, 0.0, 11 * MIB), utilization_ratio=busy_ratio, memory_free_bytes=0)
    readings = build.gpus(replace(gpu, memory_used_bytes=None if used_mib is None else used_mib * MIB))
    found = []
    for name, pid in (("a", 4001), ("b", 4002)):
        container = build.container(name=name, incarnation=name, gpu_request=("0",), vram_budget=BUDGET)
        use = attribute_gpus(container, frozenset({pid}), readings, Thresholds())
        found.append(ContainerHistory(Thresholds()).observe(container, use, RamUse(usage_bytes=1), now_s=1.0))

    card = (gpu_memory(build.snapshot(gpus=readings, containers=tuple(found)), "a") or [])[0]

    assert choose(card).victim == victim
