"""VRAM budgets of containers (C2, C8). Pure.

    gpuwarden.vram-budget-mib   whole MiB, on each of its GPUs
    gpuwarden.vram-protected    any value but `false`: never recycled for its memory
    gpuwarden.managed           `true`: may be restarted

A pod's container has a limit of an extended resource instead.
"""

import re
from collections.abc import Mapping
from typing import Final

from exporter.model.container import ContainerEvidence, VramBudget
from exporter.model.gpu import Gpu
from exporter.model.snapshot import Snapshot
from exporter.model.unknown import Unknown
from gpuwarden.evidence import GpuMemoryFacts, VramShareFacts

BUDGET_LABEL: Final = "gpuwarden.vram-budget-mib"
PROTECTED_LABEL: Final = "gpuwarden.vram-protected"
MANAGED_LABEL: Final = "gpuwarden.managed"

_QUANTITY = re.compile(r"([0-9]{1,8})(|k|M|Ki|Mi|e[0-9])")
_FACTORS: Final = {"": 1, "k": 1000, "M": 10**6, "Ki": 2**10, "Mi": 2**20}

_MIB = re.compile(r"[1-9][0-9]{0,7}")

MIB_MAX: Final = 99_999_999


def is_managed(labels: Mapping[str, str]) -> bool:
    """Whether a container opted in to restarts."""
    return labels.get(MANAGED_LABEL) == "true"


def parse_budget(labels: Mapping[str, str], *, vanishes: bool = False) -> VramBudget:
    """Parse a container's labels. One that `vanishes` when it stops cannot be recycled."""
    protected = labels.get(PROTECTED_LABEL, "false") != "false"
    recyclable = is_managed(labels) and not protected and not vanishes
    said = labels.get(BUDGET_LABEL)
    if said is None:
        return VramBudget(recyclable=recyclable)
    if not _MIB.fullmatch(said):
        message = f"{BUDGET_LABEL} is {ascii(said)[:40]}; expected whole MiB, 1 to {MIB_MAX}"
        return VramBudget(recyclable=recyclable, invalid=Unknown(reason="bad_budget", message=message))
    return VramBudget(recyclable=recyclable, budget_bytes=int(said) * 2**20)


def is_recycle_candidate(its: VramBudget) -> bool:
    """Whether a container's labels allow to recycle it for its use over budget."""
    return its.recyclable and its.budget_bytes is not None


def may_recycle(place: ContainerEvidence, snapshot: Snapshot) -> bool:
    """Whether a container may be recycled now. If it has workers, their jobs decide."""
    workers = () if snapshot.workers is None else snapshot.workers.workers
    holds_workers = any(each.container_id == place.container.id for each in workers)
    return place.container.vram_budget.recyclable and not place.container.paused and not holds_workers


def parse_pod_limit(said: str | None, resource: str) -> VramBudget:
    """Parse the limit of a pod's container (a Kubernetes resource.Quantity)."""
    if said is None:
        return VramBudget()
    found = _QUANTITY.fullmatch(said)
    if found:
        number, suffix = found.groups()
        mib = int(number) * (_FACTORS[suffix] if suffix in _FACTORS else 10 ** int(suffix[1:]))
        if 0 < mib <= MIB_MAX:
            return VramBudget(budget_bytes=mib * 2**20)
    message = f"the limit of {resource} is {ascii(said)[:40]}; expected whole MiB, 1 to {MIB_MAX}"
    return VramBudget(invalid=Unknown(reason="bad_budget", message=message))


def has_floor(gpu: Gpu, floor_bytes: int) -> bool:
    """Whether a GPU may ever have the floor free."""
    return gpu.memory_size_bytes is None or gpu.memory_size_bytes > floor_bytes


def gpu_memory(snapshot: Snapshot, container: str) -> list[GpuMemoryFacts] | None:
    """The memory of a container's GPUs, or of every GPU if it does not run."""
    if snapshot.gpus is None:
        return None
    every = [_gpu_memory_facts(gpu, snapshot) for gpu in snapshot.gpus.gpus]
    if all(place.container.name != container for place in snapshot.containers):
        return every
    return [card for card in every if any(tenant.container == container for tenant in card.tenants)]


def _gpu_memory_facts(gpu: Gpu, snapshot: Snapshot) -> GpuMemoryFacts:
    # MIG instances with shared memory would each lose a container for one shortage.
    shared = gpu.mig is not None and gpu.mig.shares_memory
    counts = has_floor(gpu, snapshot.thresholds.vram_floor_bytes) and not shared
    tenants = (_vram_share(place, gpu, may_recycle=may_recycle(place, snapshot)) for place in snapshot.containers)
    return GpuMemoryFacts(
        gpu=gpu.uuid,
        size_bytes=gpu.memory_size_bytes,
        free_bytes=gpu.memory_free_bytes if counts else None,
        reclaiming_bytes=snapshot.reclaiming_bytes.get(gpu.uuid),
        floor_bytes=snapshot.thresholds.vram_floor_bytes,
        tie_bytes=snapshot.thresholds.vram_tie_bytes,
        tenants=[each for each in tenants if each is not None],
    )


def _vram_share(place: ContainerEvidence, gpu: Gpu, *, may_recycle: bool) -> VramShareFacts | None:
    # A container with a budget may be on a GPU without a process list.
    container = place.container
    budget_bytes = container.vram_budget.budget_bytes
    share = next((each for each in place.shares if each.gpu == gpu.uuid), None)
    may_be_on_it = gpu.uuid in place.gpus or (gpu.processes is None and budget_bytes is not None)
    if share is None and not may_be_on_it:
        return None
    used_bytes = None if share is None else share.memory_bytes
    if used_bytes == 0 and budget_bytes is None:
        return None
    return VramShareFacts(
        container=container.name,
        incarnation=container.incarnation,
        used_bytes=used_bytes,
        budget_bytes=budget_bytes,
        recyclable=may_recycle,
    )
