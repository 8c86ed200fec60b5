"""VRAM budgets of containers (C2, C8). Pure.

    gpuwarden.vram-budget-mib   whole MiB, on each of its GPUs
    gpuwarden.vram-protected    any value but `false`: never recycled for its memory
    gpuwarden.managed           `true`: may be restarted

A pod declares its budget by `gpuwarden.kube.budget`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from exporter.evidence.gpu_attribution import NO_GPU
from exporter.model.container import KUBERNETES, Container, ContainerEvidence, VramBudget
from exporter.model.gpu import Gpu
from exporter.model.snapshot import Snapshot
from exporter.model.unknown import Unknown
from gpuwarden.evidence import GpuMemoryFacts, VramShareFacts
from gpuwarden.kube.budget import MIB_MAX, BudgetSources, declared_mib

BUDGET_LABEL: Final = "gpuwarden.vram-budget-mib"
PROTECTED_LABEL: Final = "gpuwarden.vram-protected"
MANAGED_LABEL: Final = "gpuwarden.managed"

_MIB = re.compile(r"[1-9][0-9]{0,7}")


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
    if not place.container.vram_budget.recyclable or place.container.paused:
        return False
    ends = {each.container.id for each in snapshot.containers if each.container.unit == place.container.unit}
    return all(each.container_id not in ends for each in workers)


def pod_budget(pod: Mapping[str, Any], sources: BudgetSources) -> VramBudget:
    """The budget that a pod declares (Kubernetes API, Pod v1)."""
    try:
        mib = declared_mib(pod, sources)
    except ValueError as error:
        return VramBudget(invalid=Unknown(reason="bad_budget", message=str(error)))
    return VramBudget(budget_bytes=None if mib is None else mib * 2**20)


class Tenant(NamedTuple):
    """A container, or a pod with a budget, named by its container that has the budget."""

    place: ContainerEvidence
    budget: VramBudget
    members: tuple[ContainerEvidence, ...]

    def memory_bytes(self) -> Mapping[str, int | None]:
        """Its memory on each GPU that it uses or may use; `None` is unknown."""
        held: dict[str, int | None] = {}
        for each in self.members:
            for gpu, memory_bytes in {**dict.fromkeys(each.gpus), **_memory_of(each)}.items():
                so_far = held.get(gpu, 0)
                held[gpu] = None if so_far is None or memory_bytes is None else so_far + memory_bytes
        return held


def _memory_of(place: ContainerEvidence) -> dict[str, int | None]:
    return {share.gpu: share.memory_bytes for share in place.shares}


def tenants(snapshot: Snapshot) -> Iterator[Tenant]:
    """All containers, and one for the containers of a pod with a valid budget."""
    units: dict[str, list[ContainerEvidence]] = {}
    for place in snapshot.containers:
        its = place.container
        units.setdefault(its.unit if its.kind == KUBERNETES else its.incarnation, []).append(place)
    for members in units.values():
        holder = next((each for each in members if each.container.vram_budget != VramBudget()), members[0])
        budget = _usable_budget(holder.container, members, snapshot)
        if budget.budget_bytes is not None:
            yield Tenant(holder, budget, tuple(members))
            continue
        for each in members:
            yield Tenant(each, budget if each is holder else each.container.vram_budget, (each,))


def _usable_budget(holder: Container, members: Sequence[ContainerEvidence], snapshot: Snapshot) -> VramBudget:
    """The budget, or why that of a pod is not used."""
    found = holder.vram_budget
    if holder.kind != KUBERNETES or found.budget_bytes is None or snapshot.gpus is None:
        return found
    if all(each.gpu_unknown is not None and each.gpu_unknown.reason == NO_GPU for each in members):
        message = "the pod has a VRAM budget but no GPU"
        return replace(found, budget_bytes=None, invalid=Unknown(reason="no_gpu", message=message))
    sizes = {gpu.uuid: gpu.memory_size_bytes for gpu in snapshot.gpus.gpus}
    own = [sizes.get(gpu) for gpu in {gpu for each in members for gpu in each.gpus} or sizes]
    if own and all(size is not None and found.budget_bytes > size for size in own):
        message = f"the VRAM budget of {found.budget_bytes >> 20} MiB is more than the memory of the GPU"
        return replace(found, budget_bytes=None, invalid=Unknown(reason="above_gpu", message=message))
    return found


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
    shares = (_vram_share(each, gpu, snapshot) for each in tenants(snapshot))
    return GpuMemoryFacts(
        gpu=gpu.uuid,
        size_bytes=gpu.memory_size_bytes,
        free_bytes=gpu.memory_free_bytes if counts else None,
        reclaiming_bytes=snapshot.reclaiming_bytes.get(gpu.uuid),
        floor_bytes=snapshot.thresholds.vram_floor_bytes,
        tie_bytes=snapshot.thresholds.vram_tie_bytes,
        tenants=[each for each in shares if each is not None],
    )


def _vram_share(tenant: Tenant, gpu: Gpu, snapshot: Snapshot) -> VramShareFacts | None:
    # A container with a budget may be on a GPU without a process list.
    container, budget_bytes = tenant.place.container, tenant.budget.budget_bytes
    held = tenant.memory_bytes()
    if gpu.uuid not in held and not (gpu.processes is None and budget_bytes is not None):
        return None
    used_bytes = held.get(gpu.uuid)
    if used_bytes == 0 and budget_bytes is None:
        return None
    return VramShareFacts(
        container=container.name,
        incarnation=container.incarnation,
        used_bytes=used_bytes,
        budget_bytes=budget_bytes,
        recyclable=may_recycle(tenant.place, snapshot),
    )
