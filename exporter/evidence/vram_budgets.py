"""Tenants: how much of a GPU's memory a container may hold, by its labels, and how much each of them holds (C2, C8).

    gpuwarden.vram-budget-mib   its VRAM budget, whole MiB, on each GPU that it has; none is no offence, and no claim
    gpuwarden.vram-protected    `true`: never stopped for its memory's sake. Whatever is not plainly `false` protects
    gpuwarden.managed           `true`: it may be stopped and started at all

A container of a pod says so by its limit of an extended resource, in whole MiB too. Kubernetes writes 3000 as 3k.

A budget that cannot be read is none, and is told with its reason. Pure.
"""

import re
from collections.abc import Mapping
from typing import Final

from exporter.model.container import ContainerEvidence, Tenancy
from exporter.model.gpu import Gpu
from exporter.model.snapshot import Snapshot
from exporter.model.unknown import Unknown
from gpuwarden.evidence import CardFacts, TenantFacts

BUDGET_LABEL: Final = "gpuwarden.vram-budget-mib"
PROTECTED_LABEL: Final = "gpuwarden.vram-protected"
MANAGED_LABEL: Final = "gpuwarden.managed"

_QUANTITY = re.compile(r"([0-9]{1,8})(|k|M|Ki|Mi|e[0-9])")
_FACTORS: Final = {"": 1, "k": 1000, "M": 10**6, "Ki": 2**10, "Mi": 2**20}

_MIB = re.compile(r"[1-9][0-9]{0,7}")

MIB_MAX: Final = 99_999_999
"""The greatest budget, MiB: what eight digits can say."""


def is_managed(labels: Mapping[str, str]) -> bool:
    """Whether a container opted in to being stopped and started."""
    return labels.get(MANAGED_LABEL) == "true"


def terms(labels: Mapping[str, str], *, vanishes: bool = False) -> Tenancy:
    """What a container's labels say of its part in a GPU's memory; one that `vanishes` is removed when it ends."""
    protected = labels.get(PROTECTED_LABEL, "false") != "false"
    recyclable = is_managed(labels) and not protected and not vanishes
    said = labels.get(BUDGET_LABEL)
    if said is None:
        return Tenancy(recyclable=recyclable)
    if not _MIB.fullmatch(said):
        because = f"{BUDGET_LABEL} is {ascii(said)[:40]}; wanted: whole MiB, 1 to {MIB_MAX}"
        return Tenancy(recyclable=recyclable, invalid=Unknown(reason="bad_budget", because=because))
    return Tenancy(recyclable=recyclable, budget_bytes=int(said) * 2**20)


def may_be_ranked(its: Tenancy) -> bool:
    """Whether by its labels alone a container may be the one that goes: who has the greatest used − budget."""
    return its.recyclable and its.budget_bytes is not None


def may_go(place: ContainerEvidence, snapshot: Snapshot) -> bool:
    """Whether a container may be stopped for its memory's sake as things are.

    What nobody will stop shields no other: a paused one, and one that holds workers, who are judged by their jobs.
    """
    workers = () if snapshot.workers is None else snapshot.workers.workers
    holds_workers = any(each.container_id == place.container.id for each in workers)
    return place.container.tenancy.recyclable and not place.container.paused and not holds_workers


def limit(said: str | None, resource: str) -> Tenancy:
    """What the limit of a pod's container says of its part in a GPU's memory (resource.Quantity of Kubernetes).

    Nobody here stops pods: it is never recyclable.
    """
    if said is None:
        return Tenancy()
    found = _QUANTITY.fullmatch(said)
    if found:
        number, suffix = found.groups()
        mib = int(number) * (_FACTORS[suffix] if suffix in _FACTORS else 10 ** int(suffix[1:]))
        if 0 < mib <= MIB_MAX:
            return Tenancy(budget_bytes=mib * 2**20)
    because = f"the limit of {resource} is {ascii(said)[:40]}; wanted: whole MiB, 1 to {MIB_MAX}"
    return Tenancy(invalid=Unknown(reason="bad_budget", because=because))


def has_floor(gpu: Gpu, floor_bytes: int) -> bool:
    """Whether a GPU could ever have as much free memory as the floor, or may: its size is unknown."""
    return gpu.memory_size_bytes is None or gpu.memory_size_bytes > floor_bytes


def cards(snapshot: Snapshot, container: str) -> list[CardFacts] | None:
    """The memory of every GPU that the container of a name has a part in; `None` where no GPU is read.

    Of one that does not run any more nobody knows which those were: every GPU's.
    """
    if snapshot.gpus is None:
        return None
    every = [_card(gpu, snapshot) for gpu in snapshot.gpus.gpus]
    if all(place.container.name != container for place in snapshot.containers):
        return every
    return [card for card in every if any(tenant.container == container for tenant in card.tenants)]


def _card(gpu: Gpu, snapshot: Snapshot) -> CardFacts:
    # What is free of memory that instances share (MIG) is told of each of them, and each would lose a tenant of its own
    # for the same want. So nothing is known to be free there, and nobody goes.
    # Nor is a GPU short of memory that never had so much as the floor.
    shared = gpu.mig is not None and gpu.mig.shares_memory
    told = has_floor(gpu, snapshot.thresholds.vram_floor_bytes) and not shared
    tenants = (_tenant(place, gpu, may_go=may_go(place, snapshot)) for place in snapshot.containers)
    return CardFacts(
        gpu=gpu.uuid,
        size_bytes=gpu.memory_size_bytes,
        free_bytes=gpu.memory_free_bytes if told else None,
        returning_bytes=snapshot.returning_bytes.get(gpu.uuid),
        floor_bytes=snapshot.thresholds.vram_floor_bytes,
        tie_bytes=snapshot.thresholds.vram_tie_bytes,
        tenants=[each for each in tenants if each is not None],
    )


def _tenant(place: ContainerEvidence, gpu: Gpu, *, may_go: bool) -> TenantFacts | None:
    """A container's part in a GPU's memory; `None` for one that has none.

    One with a budget may be on any GPU whose processes the driver does not list.
    """
    container = place.container
    budget_bytes = container.tenancy.budget_bytes
    share = next((each for each in place.shares if each.gpu == gpu.uuid), None)
    may_be_on_it = gpu.uuid in place.gpus or (gpu.processes is None and budget_bytes is not None)
    if share is None and not may_be_on_it:
        return None
    used_bytes = None if share is None else share.memory_bytes
    if used_bytes == 0 and budget_bytes is None:
        return None
    return TenantFacts(
        container=container.name,
        incarnation=container.incarnation,
        used_bytes=used_bytes,
        budget_bytes=budget_bytes,
        recyclable=may_go,
    )
