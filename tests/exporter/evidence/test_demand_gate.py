"""The demand gate: how long a tenant on demand has had room, or its GPU too little free memory."""

from collections.abc import Mapping
from typing import Final

import pytest

from exporter.evidence import demand_gate
from exporter.evidence.demand_gate import DemandWatch
from exporter.evidence.gpu_attribution import NO_GPU
from exporter.model.container import ContainerEvidence, GpuShare
from exporter.model.gpu import Gpu, GpuReadings, MigInstance
from exporter.model.on_demand import Demand, OnDemandTenant
from exporter.model.thresholds import Thresholds
from exporter.model.unknown import Unknown
from gpuwarden.evidence import OnDemandFacts
from tests.exporter import builders as build

pytestmark = pytest.mark.pure

MIB: Final = build.MIB
FLOOR: Final = Thresholds().vram_floor_bytes
NEEDED: Final = 3000 * MIB
SHARED: Final = MigInstance(parent="GPU-0", number=0, gpu_instance=1, compute_instance=0, shares_memory=True)


def tenant(name: str = "painter", **changes: object) -> OnDemandTenant:
    given: dict[str, object] = {
        "kind": "docker",
        "handle": name,
        "name": name,
        "on": False,
        "demand": Demand(needed_bytes=NEEDED),
        "members": frozenset({name}),
    }
    return OnDemandTenant(**(given | changes))  # type: ignore[arg-type]


def holding(name: str, held: int | None, *, idle_s: float | None = 500.0, **changes: object) -> ContainerEvidence:
    """A container that holds memory of GPU-0."""
    shares = (GpuShare(gpu="GPU-0", utilization_ratio=0.0, memory_bytes=held),)
    return build.evidence(container=build.container(id=name, name=name), shares=shares, gpu_idle_s=idle_s, **changes)


def card(free: int | None = FLOOR + NEEDED, index: int = 0, **changes: object) -> Gpu:
    return build.gpu(index, memory_free_bytes=free, **changes)


class Samples:
    """A sample is a second; no memory is being freed unless a test says so."""

    def __init__(self) -> None:
        self._watch = DemandWatch(Thresholds())
        self._now_s = 0.0

    def at(
        self,
        *tenants: OnDemandTenant,
        gpus: GpuReadings | None = None,
        holders: tuple[ContainerEvidence, ...] = (),
        reclaiming: Mapping[str, int] | None = None,
        after_s: float = 1.0,
    ) -> dict[str, OnDemandFacts]:
        self._now_s += after_s
        readings = build.gpus(card()) if gpus is None else gpus
        freed = {gpu.uuid: 0 for gpu in readings.gpus} if reclaiming is None else reclaiming
        found = self._watch.observe(tenants, holders, readings, freed, host="h", now_s=self._now_s)
        return {each.tenant: each for each in found}

    def one(self, its: OnDemandTenant, **given: object) -> OnDemandFacts:
        return self.at(its, **given)[its.name]  # type: ignore[arg-type]


def test_room_lasts_while_free_memory_covers_the_need_and_the_floor() -> None:
    samples = Samples()

    assert [samples.one(tenant()).room_s for _ in range(3)] == [0.0, 1.0, 2.0]
    assert samples.one(tenant(), gpus=build.gpus(card(FLOOR + NEEDED - 1))).room_s == 0.0
    assert [samples.one(tenant()).room_s for _ in range(2)] == [0.0, 1.0]


def test_flapping_memory_never_lasts() -> None:
    samples = Samples()
    free = [FLOOR + NEEDED, FLOOR + NEEDED, FLOOR - 1] * 100

    found = [samples.one(tenant(), gpus=build.gpus(card(each))) for each in free]

    assert max(each.room_s or 0.0 for each in found) == 1.0
    assert max(each.short_s or 0.0 for each in found) == 0.0


def test_returning_memory_is_subtracted_from_room_and_added_to_a_short_gpu() -> None:
    samples = Samples()
    gpus = build.gpus(card(FLOOR + NEEDED))

    (seen,) = samples.one(tenant(), gpus=gpus, reclaiming={"GPU-0": 1}).cards
    assert (seen.room_bytes, seen.is_short) == (FLOOR + NEEDED - 1, False)
    (seen,) = samples.one(tenant(), gpus=build.gpus(card(FLOOR - 2)), reclaiming={"GPU-0": 1}).cards
    assert seen.is_short is True
    (seen,) = samples.one(tenant(), gpus=build.gpus(card(FLOOR - 2)), reclaiming={"GPU-0": 2}).cards
    assert seen.is_short is False


@pytest.mark.parametrize(
    ("gpus", "reclaiming"),
    [
        (build.gpus(card(None)), {"GPU-0": 0}),
        (build.gpus(card()), {}),
        (build.gpus(card(), card(None, 1)), {"GPU-0": 0, "GPU-1": 0}),
        (build.gpus(card(mig=SHARED)), {"GPU-0": 0}),
        (build.gpus(card(memory_size_bytes=FLOOR)), {"GPU-0": 0}),
        (build.gpus(), {}),
    ],
    ids=["free memory", "returning memory", "one of two GPUs", "shared MIG memory", "no floor", "no GPU"],
)
def test_unknown_memory_is_never_free(gpus: GpuReadings, reclaiming: Mapping[str, int]) -> None:
    found = Samples().one(tenant(), gpus=gpus, reclaiming=reclaiming)

    assert (found.room_s, found.short_s) == (None, None)


def test_each_gpu_that_a_tenant_may_use_must_have_room() -> None:
    samples = Samples()
    two = build.gpus(card(), card(FLOOR, 1))

    assert samples.one(tenant(), gpus=two).room_s == 0.0
    assert [samples.one(tenant(), gpus=two).room_s for _ in range(2)] == [0.0, 0.0]
    named = tenant(demand=Demand(needed_bytes=NEEDED, gpu="GPU-0"))
    assert [samples.one(named, gpus=two).room_s for _ in range(2)] == [0.0, 1.0]


def test_tenant_of_a_gpu_of_another_host_or_of_a_lost_one_is_left_out() -> None:
    named = tenant(demand=Demand(needed_bytes=NEEDED, gpu="GPU-7"))

    assert Samples().at(named) == {}


def test_need_of_a_tenant_that_loads_is_reserved_until_it_holds_it() -> None:
    samples = Samples()
    other, loads = tenant("other"), tenant("loads", on=True)

    def reserved(*holders: ContainerEvidence) -> int:
        return samples.at(other, loads, holders=holders)["other"].cards[0].reserved_bytes

    assert reserved() == NEEDED
    assert reserved(holding("loads", None)) == NEEDED
    assert reserved(holding("loads", 1000 * MIB)) == 2000 * MIB
    assert reserved(holding("loads", NEEDED + 1)) == 0
    assert samples.at(other, tenant("off"))["other"].cards[0].reserved_bytes == 0
    elsewhere = tenant("loads", on=True, demand=Demand(needed_bytes=NEEDED, gpu="GPU-1"))
    two = build.gpus(card(), card(index=1))
    found = samples.at(other, elsewhere, gpus=two)["other"]
    assert [each.reserved_bytes for each in found.cards] == [0, NEEDED]
    invalid = tenant("loads", on=True, demand=Unknown(reason="bad_demand", message="bad"))
    assert samples.at(other, invalid)["other"].cards[0].reserved_bytes == 0


def test_tenant_that_is_on_is_judged_by_the_gpus_that_it_holds() -> None:
    two = build.gpus(card(), card(FLOOR - 1, 1))

    found = Samples().one(tenant(on=True), gpus=two, holders=(holding("painter", MIB),))

    assert [each.gpu for each in found.cards] == ["GPU-0"]
    assert found.short_s == 0.0
    assert Samples().one(tenant(on=True), gpus=two).cards[1].is_short is True


def test_state_begins_again_when_someone_scales_it_and_after_a_gap() -> None:
    samples = Samples()

    assert [samples.one(tenant()).state_s for _ in range(3)] == [0.0, 1.0, 2.0]
    assert [samples.one(tenant(on=True)).state_s for _ in range(2)] == [0.0, 1.0]
    assert samples.one(tenant(on=True), after_s=Thresholds().gap_max_s + 1).state_s == 0.0
    assert samples.at() == {}
    assert samples.one(tenant(on=True)).state_s == 0.0


def test_short_gpu_is_timed() -> None:
    samples = Samples()
    gpus = build.gpus(card(FLOOR - 1))

    assert [samples.one(tenant(on=True), gpus=gpus).short_s for _ in range(3)] == [0.0, 1.0, 2.0]


def test_tenant_is_as_idle_as_its_busiest_container_and_unknown_is_not_idle() -> None:
    samples = Samples()
    pod = tenant(on=True, members=frozenset({"a", "b"}))

    def idle_s(*holders: ContainerEvidence) -> float | None:
        return samples.one(pod, holders=holders).idle_s

    assert idle_s(holding("a", MIB, idle_s=400.0), holding("b", MIB, idle_s=7.0)) == 7.0
    assert idle_s(holding("a", MIB, idle_s=400.0)) is None
    assert idle_s(holding("a", MIB, idle_s=400.0), holding("b", MIB, idle_s=None)) is None
    sidecar = holding("b", 0, idle_s=None, gpu_unknown=Unknown(reason=NO_GPU, message="none"))
    assert idle_s(holding("a", MIB, idle_s=400.0), sidecar) == 400.0
    assert idle_s() is None
    assert samples.one(tenant()).idle_s is None


def test_invalid_tenant_has_neither_need_nor_room() -> None:
    found = Samples().one(tenant(demand=Unknown(reason="bad_demand", message="bad")))

    assert (found.needed_bytes, found.room_s, found.invalid) == (None, None, "bad")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({}, None),
        ({"gpuwarden.demand-gate": "3000"}, "not_managed"),
        ({"gpuwarden.demand-gate": "3000", "gpuwarden.managed": "true"}, Demand(needed_bytes=NEEDED)),
        (
            {"gpuwarden.demand-gate": "3000", "gpuwarden.managed": "true", "gpuwarden.demand-gate-gpu": "GPU-1"},
            Demand(needed_bytes=NEEDED, gpu="GPU-1"),
        ),
        ({"gpuwarden.demand-gate": "3 GiB", "gpuwarden.managed": "true"}, "bad_demand"),
    ],
)
def test_labels_of_a_container(labels: Mapping[str, str], expected: object) -> None:
    found = demand_gate.parse_labels(labels)

    assert (found.reason if isinstance(found, Unknown) else found) == expected


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, None),
        ({"gpuwarden/demand-gate": "3000"}, "no_place"),
        ({"gpuwarden/demand-gate": "3000", "gpuwarden/demand-gate-node": "n1"}, Demand(needed_bytes=NEEDED)),
        ({"gpuwarden/demand-gate": "3000", "gpuwarden/demand-gate-node": "n2"}, None),
        ({"gpuwarden/demand-gate": "3000", "gpuwarden/demand-gate-gpu": "G"}, Demand(needed_bytes=NEEDED, gpu="G")),
        ({"gpuwarden/demand-gate": "-1", "gpuwarden/demand-gate-node": "n1"}, "bad_demand"),
    ],
)
def test_annotations_of_a_deployment(annotations: Mapping[str, str], expected: object) -> None:
    found = demand_gate.parse_annotations(annotations, node="n1")

    assert (found.reason if isinstance(found, Unknown) else found) == expected
