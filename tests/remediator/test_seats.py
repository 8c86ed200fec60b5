"""What a node advertises, and what is wrong about the seats of a node (C1)."""

from dataclasses import replace
from typing import Any

import pytest

from remediator.seats import (
    POLICIES,
    GpuSeats,
    Node,
    PodBudget,
    Rules,
    Seats,
    plan,
    policy_problem,
    problems,
    rebuild_warning,
)

pytestmark = [pytest.mark.pure, pytest.mark.behaviour("C1")]

MIB = 2**20
NODE = Node(name="node-1", labels={"nvidia.com/gpu.present": "true", "zone": "a"})
CARD = {"GPU-a": 15360 * MIB}


def test_node_advertises_the_memory_of_its_gpu_less_the_reserve() -> None:
    found = plan(NODE, CARD, [], rules=Rules())

    assert (found.mib, found.reason) == (14000, "")


@pytest.mark.parametrize(
    "label", ["nvidia.com/gpu.present", "feature.node.kubernetes.io/amd-gpu", "intel.feature.node.kubernetes.io/gpu"]
)
def test_node_of_each_vendor_is_known_by_its_label(label: str) -> None:
    found = plan(replace(NODE, labels={label: "true"}), CARD, [], rules=Rules())

    assert found.mib == 14000


def test_label_and_reserve_are_settings() -> None:
    rules = Rules(node_labels=("gpu=yes",), reserve_mib=360)

    assert plan(replace(NODE, labels={"gpu": "yes"}), CARD, [], rules=rules).mib == 15000
    assert plan(NODE, CARD, [], rules=rules).mib is None


@pytest.mark.parametrize(
    ("labels", "gpus", "reason"),
    [
        ({}, CARD, "none of the labels nvidia.com/gpu.present=true"),
        ({"nvidia.com/gpu.present": "false"}, CARD, "none of the labels"),
        (NODE.labels, {}, "lists no GPU"),
        (NODE.labels, {"GPU-a": None}, "the memory of GPU-a is unknown"),
        (NODE.labels, {"GPU-a": 15360 * MIB, "GPU-b": None}, "the memory of GPU-b is unknown"),
        (NODE.labels, {"GPU-a": 15360 * MIB, "GPU-b": 15360 * MIB}, "2 GPUs"),
        (NODE.labels, {"GPU-a": 1360 * MIB}, "no GPU has more than --seats-reserve-mib"),
    ],
)
@pytest.mark.parametrize("capacity_mib", [None, 14000])
def test_node_is_left_as_it_is(
    labels: dict[str, str], gpus: dict[str, int | None], reason: str, capacity_mib: int | None
) -> None:
    node = replace(NODE, labels=labels, capacity_mib=capacity_mib)

    found = plan(node, gpus, [], rules=Rules())

    assert found.mib is None
    assert reason in found.reason


def test_owner_may_advertise_the_sum_of_several_gpus() -> None:
    gpus: dict[str, int | None] = {"GPU-a": 15360 * MIB, "GPU-b": 1000 * MIB, "GPU-c": 8192 * MIB}

    found = plan(NODE, gpus, [], rules=Rules(several_gpus=True))

    assert found.mib == 14000 + 0 + 6832  # a GPU below the reserve takes nothing from the others


def pod(mib: int, *, runs: bool = True) -> PodBudget:
    return PodBudget(pod=f"n/{mib}", mib=mib, runs=runs)


@pytest.mark.parametrize("capacity_mib", [None, 0, 13300, 14000, 20000])
@pytest.mark.parametrize(("declared_mib", "advertised_mib"), [(13300, 14000), (14000, 14000), (14500, 14500)])
def test_node_never_advertises_less_than_its_running_pods_declare(
    capacity_mib: int | None, declared_mib: int, advertised_mib: int
) -> None:
    budgets = [pod(13000), pod(declared_mib - 13000)]

    found = plan(replace(NODE, capacity_mib=capacity_mib), CARD, budgets, rules=Rules())

    assert found.mib == advertised_mib
    assert ("its pods declare 14500" in found.reason) == (declared_mib > 14000)


@pytest.mark.parametrize(
    ("capacity_mib", "running_mib", "advertised_mib"),
    [
        (None, 13300, 14000),
        (14000, 13300, 14000),
        (15000, 13300, 15000),
        (30000, 13300, 21300),
        (None, 14500, 14500),
        (14500, 14500, 14500),
        (30000, 14500, 22500),
    ],
)
def test_pod_that_does_not_run_prevents_a_lower_value_and_raises_none(
    capacity_mib: int | None, running_mib: int, advertised_mib: int
) -> None:
    budgets = [pod(running_mib), pod(8000, runs=False)]

    found = plan(replace(NODE, capacity_mib=capacity_mib), CARD, budgets, rules=Rules())

    assert found.mib == advertised_mib
    assert ("its GPUs have 14000" in found.reason) == (advertised_mib > 14000)


def test_invalid_budget_is_named_and_does_not_count() -> None:
    found = plan(NODE, CARD, [PodBudget(pod="n/p", invalid="as the test says", runs=True), pod(14500)], rules=Rules())

    assert found.mib == 14500
    assert found.reason.endswith("its GPUs have 14000; n/p does not count: as the test says")


def seats(**changes: Any) -> Seats:
    given: dict[str, Any] = {"node": "node-1", "is_gpu_node": True, "capacity_mib": 14000, "advertised_mib": 14000}
    return Seats(**(given | {"declared_mib": 13300, "pods": 5} | changes))


def test_free_is_what_the_scheduler_can_give() -> None:
    assert seats().free_mib == 700
    assert seats(advertised_mib=None).free_mib is None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"capacity_mib": None, "advertised_mib": None, "declared_mib": 0}, ["advertises no seats"]),
        ({"capacity_mib": 0, "advertised_mib": 0, "declared_mib": 0}, ["advertises 0 seats"]),
        ({"is_gpu_node": False, "capacity_mib": None, "advertised_mib": None, "declared_mib": 0}, []),
        ({"advertised_mib": None}, ["a capacity of 14000 MiB and no allocatable"]),
        ({"invalid": ("n/p on node-1: as the test says",)}, ["pod n/p on node-1: as the test says: correct"]),
        ({"declared_mib": 14500}, ["advertises 14000 MiB and its pods declare 14500"]),
        ({"capacity_mib": None, "advertised_mib": None}, ["no seats", "advertises 0 MiB and its pods declare 13300"]),
        ({"gpus": (GpuSeats(gpu="GPU-a", size_mib=15360, declared_mib=16000),)}, ["pods on GPU-a of node-1 declare"]),
        ({"gpus": (GpuSeats(gpu="GPU-a", size_mib=15360, declared_mib=8000),)}, []),
        ({"gpus": (GpuSeats(gpu="GPU-a", declared_mib=16000), GpuSeats(gpu="GPU-b", size_mib=15360))}, []),
    ],
)
def test_problems_of_a_node(changes: dict[str, Any], found: list[str]) -> None:
    found_problems = list(problems(seats(**changes)))

    assert len(found_problems) == len(found)
    assert all(part in problem for part, problem in zip(found, found_problems, strict=True))


def test_rebuild_of_a_node_ends_the_pods_that_hold_seats() -> None:
    assert "ends all 5 pods that declare 13300 MiB" in str(rebuild_warning(seats()))
    assert rebuild_warning(seats(pods=0)) is None


def test_missing_admission_policies_are_named() -> None:
    assert "before Kubernetes 1.30" in str(policy_problem(None))
    assert "kubectl apply -k" in str(policy_problem(frozenset({"other"})))
    assert "ValidatingAdmissionPolicy gpuwarden-eviction:" in str(policy_problem({*POLICIES} - {"gpuwarden-eviction"}))
    assert policy_problem(frozenset(POLICIES)) is None
