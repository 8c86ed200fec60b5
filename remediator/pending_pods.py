"""Pods that wait because no node has enough of the resource free (C6). Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from gpuwarden.kube.budget import scheduled_mib

PUBLISHED_MAX: Final = 50
"""Pods with series of their own: those that have waited longest."""

PENDING_S: Final = 300.0
"""An alert fires for a pod that has waited this long, seconds."""


@dataclass(frozen=True, kw_only=True)
class PendingPod:
    """A pod that the scheduler could not place since `since`, Unix seconds. `wanted_mib` is `None` if invalid."""

    namespace: str
    name: str
    since: float
    wanted_mib: int | None


def waiting(pods: Iterable[Mapping[str, Any]], resource: str) -> list[PendingPod]:
    """The pods (Pod v1) that wait for the resource, those that have waited longest first.

    The scheduler names the resource in the condition PodScheduled. A pod that waits for another reason is left out.

    Raises:
        ValueError: the answer is not one of a Kubernetes API.
        KeyError: likewise.
    """
    found = []
    for pod in pods:
        about, spec, condition = pod["metadata"], pod["spec"], _unschedulable(pod)
        if condition is None or f"Insufficient {resource}" not in (condition.get("message") or ""):
            continue
        try:
            wanted_mib = scheduled_mib(spec, resource)
        except ValueError:
            wanted_mib = None
        else:
            if not wanted_mib:
                continue
        since = datetime.strptime(condition["lastTransitionTime"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        found.append(
            PendingPod(namespace=about["namespace"], name=about["name"], since=since.timestamp(), wanted_mib=wanted_mib)
        )
    return sorted(found, key=lambda each: (each.since, each.namespace, each.name))


def _unschedulable(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The condition of a pod that the scheduler tried to place."""
    for each in (pod.get("status") or {}).get("conditions") or ():
        if each["type"] == "PodScheduled" and each["status"] == "False" and each.get("reason") == "Unschedulable":
            found: Mapping[str, Any] = each
            return found
    return None
