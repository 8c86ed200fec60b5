"""How much GPU memory a node advertises to the Kubernetes scheduler, and what may be wrong with it (C1). Pure.

The resource is one number for a node, in whole MiB: its seats. Pods declare their budgets as limits of the resource.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from gpuwarden.kube import budget

RESOURCE: Final = budget.RESOURCE

RESERVE_MIB: Final = 1360
"""Memory of each GPU that no pod may declare: 15,360 MiB give 14,000."""

NODE_LABELS: Final = (
    "nvidia.com/gpu.present=true",
    "feature.node.kubernetes.io/amd-gpu=true",
    "intel.feature.node.kubernetes.io/gpu=true",
)
"""Labels of nodes with a GPU: those of NVIDIA's, AMD's and Intel's operators."""

POLICIES: Final = ("gpuwarden-delete", "gpuwarden-eviction", "gpuwarden-node-status", "gpuwarden-node-taint")
"""The ValidatingAdmissionPolicies of deploy/kubernetes/admission."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a node with a GPU advertises: the executor's settings."""

    resource: str = RESOURCE
    node_labels: tuple[str, ...] = NODE_LABELS
    reserve_mib: int = RESERVE_MIB
    several_gpus: bool = False
    """Whether a node with several GPUs advertises their sum."""

    def is_gpu_node(self, node: "Node") -> bool:
        """Whether the node has one of the labels."""
        return any(f"{key}={value}" in self.node_labels for key, value in node.labels.items())


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as the API shows it. Without the resource, or with an invalid amount, a figure is `None`."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    capacity_mib: int | None = None
    allocatable_mib: int | None = None
    """What the scheduler counts with. The kubelet copies it from the capacity."""

    version: str = ""
    """The resourceVersion."""


@dataclass(frozen=True, kw_only=True)
class PodBudget:
    """What a pod on a node declares: 0 if that is `invalid`. A Pending pod can name its node without a free seat."""

    pod: str
    mib: int = 0
    invalid: str = ""
    runs: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to advertise. Without `mib` the node stays as it is, and `reason` says why."""

    mib: int | None = None
    reason: str = ""
    """Also why a node advertises more than its GPUs have, and which pods do not count."""


def plan(node: Node, gpus: Mapping[str, int | None], budgets: Sequence[PodBudget], *, rules: Rules) -> Plan:
    """Decide what a node advertises.

    Args:
        node: the node.
        gpus: its GPUs by UUID with their memory in bytes, or `None` if that is unknown.
        budgets: those of its pods.
        rules: the settings.
    """
    if not rules.is_gpu_node(node):
        return Plan(reason=f"the node has none of the labels {', '.join(rules.node_labels)}: see --seats-node-labels")
    if not gpus:
        return Plan(reason="the exporter lists no GPU")
    unknown = [gpu for gpu, size in gpus.items() if size is None]
    if unknown:
        return Plan(reason=f"the memory of {', '.join(sorted(unknown))} is unknown")
    if len(gpus) > 1 and not rules.several_gpus:
        return Plan(
            reason=f"the node has {len(gpus)} GPUs and one number for all, so two pods may meet on one GPU that has "
            "not room for both: --seats-several-gpus accepts that"
        )
    usable_mib = sum(max(0, (size or 0) // 2**20 - rules.reserve_mib) for size in gpus.values())
    if not usable_mib:
        return Plan(reason=f"no GPU has more than --seats-reserve-mib ({rules.reserve_mib})")
    declared_mib = sum(each.mib for each in budgets)
    running_mib = sum(each.mib for each in budgets if each.runs)
    # Below the sum of running pods, the next restart of the kubelet ends some. With a higher value for a pod that does
    # not run yet, the kubelet would admit it beside the others.
    mib = max(usable_mib, running_mib, min(declared_mib, node.capacity_mib or 0))
    reasons = [f"{each.pod} does not count: {each.invalid}" for each in budgets if each.invalid]
    if mib > usable_mib:
        reasons.insert(0, f"its pods declare {declared_mib} MiB and its GPUs have {usable_mib}")
    return Plan(mib=mib, reason="; ".join(reasons))


@dataclass(frozen=True, kw_only=True)
class Seats:
    """The seats of one node, MiB. `used`, `peak` and `gpus` come from Prometheus and are unknown without it."""

    node: str
    is_gpu_node: bool
    capacity_mib: int | None
    advertised_mib: int | None
    declared_mib: int
    pods: int
    invalid: tuple[str, ...] = ()
    used_mib: int | None = None
    peak_mib: int | None = None
    gpus: tuple["GpuSeats", ...] = ()

    @property
    def free_mib(self) -> int | None:
        """What the scheduler can still give to pods."""
        return None if self.advertised_mib is None else self.advertised_mib - self.declared_mib


@dataclass(frozen=True, kw_only=True)
class GpuSeats:
    """The figures of one GPU, MiB."""

    gpu: str
    size_mib: int | None = None
    declared_mib: int | None = None
    used_mib: int | None = None
    peak_mib: int | None = None


def problems(seats: Seats) -> Iterator[str]:
    """Yield what is wrong on one node, as a sentence each."""
    if seats.is_gpu_node and not seats.capacity_mib:
        shows = "no seats" if seats.capacity_mib is None else "0 seats"
        yield f"{seats.node} advertises {shows}: see the log of its executor (`--seats on`)"
    elif seats.capacity_mib != seats.advertised_mib:
        yield (
            f"{seats.node} has a capacity of {_shown(seats.capacity_mib)} MiB and {_shown(seats.advertised_mib)} "
            "allocatable: the kubelet copies it within 10 s while it runs"
        )
    if seats.declared_mib > (seats.capacity_mib or 0):
        yield (
            f"{seats.node} advertises {seats.capacity_mib or 0} MiB and its pods declare {seats.declared_mib}: a "
            "restart of its kubelet may end them"
        )
    for pod in seats.invalid:
        yield f"pod {pod}: correct its limit"
    for each in seats.gpus:
        if each.size_mib is not None and (each.declared_mib or 0) > each.size_mib:
            yield (
                f"pods on {each.gpu} of {seats.node} declare {each.declared_mib} MiB and it has {each.size_mib}: "
                "move one to another GPU"
            )


def rebuild_warning(seats: Seats) -> str | None:
    """What the rebuild of a node would end; `None` if no pod holds a seat."""
    if not seats.pods:
        return None
    return (
        f"{seats.node}: drain it before it is rebuilt. A kubelet that starts with an empty device-plugins folder ends "
        f"all {seats.pods} pods that declare {seats.declared_mib} MiB"
    )


def policy_problem(bound: AbstractSet[str] | None) -> str | None:
    """What is missing of the policies that confine the account of a node.

    Args:
        bound: names of the ValidatingAdmissionPolicies with a binding, `None` if the server has no such policies.
    """
    if bound is None:
        return "no ValidatingAdmissionPolicies before Kubernetes 1.30: a node's account can patch every node's status"
    missing = ", ".join(each for each in POLICIES if each not in bound)
    if missing:
        return f"no binding of ValidatingAdmissionPolicy {missing}: kubectl apply -k deploy/kubernetes/admission"
    return None


def _shown(mib: int | None) -> str:
    return "no" if mib is None else str(mib)
