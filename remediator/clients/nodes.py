"""Kubernetes nodes: the seats that they advertise, their taint for a faulty GPU, and the budgets of their pods."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from kubernetes import client, watch
from kubernetes.utils.quantity import parse_quantity

from gpuwarden.kube import api as kube_api
from gpuwarden.kube.api import KubeError, read_json
from gpuwarden.kube.budget import BudgetSources, declared_mib
from remediator.pending_pods import PendingPod, waiting
from remediator.seats import Node, PodBudget

ANSWER_S: Final = 10.0
"""Longest time without a byte from the API, seconds."""

_RAW: Final[Mapping[str, Any]] = {"_preload_content": False}

TAINT: Final[Mapping[str, str]] = {"key": "gpuwarden/gpu-faulty", "effect": "NoSchedule"}
"""The taint of a node with a faulty GPU."""

_ENDED: Final = "status.phase!=Succeeded,status.phase!=Failed"


class Nodes:
    """Reads nodes and pods, and patches the capacity of nodes.

    Raises:
        KubeError: the API does not answer within seconds, or refuses.
    """

    def __init__(self, api: Any, resource: str) -> None:
        self._api = api
        self._core = client.CoreV1Api(api)
        self._resource = resource

    def read(self, name: str) -> Node:
        """Read one node."""
        with _request(f"read node {name}"):
            return parse_node(read_json(self._core.read_node(name, **_RAW)), self._resource)

    def list_all(self) -> list[Node]:
        """List every node."""
        with _request("list nodes"):
            answer = self._core.list_node(resource_version="0", **_RAW)
            return [parse_node(each, self._resource) for each in read_json(answer)["items"]]

    def list_budgets(self, name: str = "", *, cached: bool = True) -> dict[str, list[PodBudget]]:
        """The budgets of all pods that have one, by node, or those on one node. `cached`: may be some seconds old."""
        where = f"spec.nodeName={name}" if name else "spec.nodeName!="
        with _request(f"list the pods of {name or 'all nodes'}"):
            answer = self._core.list_pod_for_all_namespaces(
                field_selector=f"{where},{_ENDED}", resource_version="0" if cached else None, **_RAW
            )
            found: dict[str, list[PodBudget]] = {}
            for pod in read_json(answer)["items"]:
                if budget := parse_budget(pod, self._resource):
                    found.setdefault(pod["spec"]["nodeName"], []).append(budget)
            return found

    def pending_pods(self) -> list[PendingPod]:
        """The pods of the cluster that wait for the resource, from the API server's cache."""
        where = "spec.nodeName=,status.phase=Pending"
        with _request("list the Pending pods"):
            answer = self._core.list_pod_for_all_namespaces(field_selector=where, resource_version="0", **_RAW)
            return waiting(read_json(answer)["items"], self._resource)

    def advertise(self, name: str, mib: int | None, *, version: str = "") -> Node:
        """Set or remove the seats of a node, with `version` only if it did not change since. Returns the node."""
        body: dict[str, Any] = {"status": {"capacity": {self._resource: None if mib is None else str(mib)}}}
        if version:
            body["metadata"] = {"resourceVersion": version}
        with _request(f"patch the status of node {name}"):
            answer = self._core.patch_node_status(name, body, _content_type="application/merge-patch+json", **_RAW)
            return parse_node(read_json(answer), self._resource)

    def is_tainted(self, name: str) -> bool:
        """Whether a node has the taint of faulty GPUs."""
        with _request(f"read node {name}"):
            return any(map(_is_ours, _taints(read_json(self._core.read_node(name, **_RAW)))))

    def set_taint(self, name: str, *, tainted: bool) -> bool:
        """Set or remove that taint; other taints stay. Returns whether the node had it before."""
        return kube_api.retry_conflicts(partial(self._set_taint, name, tainted=tainted))

    def _set_taint(self, name: str, *, tainted: bool) -> bool:
        """Read and patch once."""
        with _request(f"read node {name}"):
            found = read_json(self._core.read_node(name, **_RAW))
            before = _taints(found)
            version = found["metadata"]["resourceVersion"]
        others = [each for each in before if not _is_ours(each)]
        had = len(others) < len(before)
        if had != tainted:
            after = [*others, TAINT] if tainted else others or None
            body = {"metadata": {"resourceVersion": version}, "spec": {"taints": after}}
            with _request(f"patch the taints of node {name}"):
                read_json(self._core.patch_node(name, body, _content_type="application/merge-patch+json", **_RAW))
        return had

    def list_tainted(self) -> list[str]:
        """Names of the nodes with that taint."""
        with _request("list nodes"):
            items = read_json(self._core.list_node(**_RAW))["items"]
            return [each["metadata"]["name"] for each in items if any(map(_is_ours, _taints(each)))]

    def wait_for_change(self, node: Node, *, wait_s: int) -> None:
        """Return when the node shows other seats or labels, when it is gone or new, or after `wait_s`."""
        since = {"resource_version": node.version} if node.version else {}
        watching = watch.Watch(return_type="object")
        with _request(f"watch node {node.name}"):
            for event in watching.stream(
                self._core.list_node,
                field_selector=f"metadata.name={node.name}",
                timeout_seconds=wait_s,
                _request_timeout=(ANSWER_S, wait_s + ANSWER_S),
                **since,
            ):
                if event is None:
                    raise ValueError("half an event")
                now = parse_node(event["object"], self._resource)
                if event["type"] == "DELETED" or (now.capacity_mib, now.labels) != (node.capacity_mib, node.labels):
                    return

    def bound_policies(self) -> frozenset[str] | None:
        """Names of the ValidatingAdmissionPolicies that have a binding; `None` before Kubernetes 1.30."""
        admission = client.AdmissionregistrationV1Api(self._api)
        try:
            with _request("list the bindings of admission policies"):
                answer = read_json(admission.list_validating_admission_policy_binding(**_RAW))
                return frozenset(each["spec"]["policyName"] for each in answer["items"])
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise


def _taints(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((node.get("spec") or {}).get("taints") or ())


def _is_ours(taint: Mapping[str, Any]) -> bool:
    return (taint["key"], taint["effect"]) == (TAINT["key"], TAINT["effect"])


def parse_node(found: Mapping[str, Any], resource: str) -> Node:
    """Parse a node (Kubernetes API, Node v1)."""
    about, status = found["metadata"], found.get("status") or {}
    return Node(
        name=about["name"],
        labels=about.get("labels") or {},
        capacity_mib=_whole((status.get("capacity") or {}).get(resource)),
        allocatable_mib=_whole((status.get("allocatable") or {}).get(resource)),
        version=about.get("resourceVersion", ""),
    )


def parse_budget(pod: Mapping[str, Any], resource: str) -> PodBudget | None:
    """The budget of a pod (Kubernetes API, Pod v1), if it declares one."""
    about = pod["metadata"]
    name = f"{about['namespace']}/{about['name']}"
    try:
        mib = declared_mib(pod, BudgetSources(resources=(resource,)))
    except ValueError as error:
        return PodBudget(pod=name, invalid=str(error))
    if mib is None:
        return None
    return PodBudget(pod=name, mib=mib, runs=(pod.get("status") or {}).get("phase") == "Running")


def _whole(quantity: str | None) -> int | None:
    return None if quantity is None else int(parse_quantity(quantity))


@contextmanager
def _request(action: str) -> Iterator[None]:
    """Turn every failure into KubeError."""
    try:
        with kube_api.request(action):
            yield
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        said = f"{type(error).__name__}: {error}"[:200]
        raise KubeError(f"cannot {action}: invalid answer of the Kubernetes API: {said}") from None
