"""Containers of pods on this node, ended by an eviction of their pod. A controller creates the next pod.

The pod opts in by a label, and its namespace by a setting: see `gpuwarden.kube.pods`. An eviction names the uid, so a
new pod of the same name is never evicted. Requests of the API:

    GET    namespaces/NAMESPACE/pods/POD             its state
    POST   namespaces/NAMESPACE/pods/POD/eviction    with dryRun=All first: a PodDisruptionBudget answers 429
    DELETE namespaces/NAMESPACE/pods/POD             instead, with `by="delete"`
    GET    namespaces/NAMESPACE/pods                 the other pods of the controller

Source: Kubernetes API, Pod v1 and Eviction; policy/v1 exists since 1.22, policy/v1beta1 until 1.25.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from kubernetes.client import CoreV1Api

from gpuwarden import cgroup as cgroups
from gpuwarden.kube import api, pods
from gpuwarden.kube.api import KubeError
from gpuwarden.kube.pods import Handle
from remediator.actuators import ActuatorError, NotAllowedError
from remediator.plan import ContainerState
from remediator.reasons import Reason

END_MARGIN_S: Final = 10.0
"""Time that the kubelet may need after the grace period of a pod, seconds."""

POLL_S: Final = 0.5
PAGE: Final = 500
"""Pods in one answer."""

LISTS_MAX: Final = 3
"""Tries to list pods: the API may forget a list between two pages (410)."""

_ID = re.compile(r"[a-z0-9.-]+://([0-9a-f]{64})")
_STATUSES: Final = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")
_OVER: Final = frozenset({"Succeeded", "Failed"})

_Pod = Mapping[str, Any]
_T = TypeVar("_T")


class KubernetesActuator:
    """Inspects and evicts pods of one node.

    Args:
        connection: an `ApiClient` of `gpuwarden.kube.api.connect`.
        node: only pods of this node are touched.
        namespaces: only pods of these namespaces are touched.
        by: evict pods, or delete them, which ignores PodDisruptionBudgets.
        root: the host's cgroups.
    """

    def __init__(
        self,
        connection: Any,
        *,
        node: str,
        namespaces: Collection[str],
        by: Literal["evict", "delete"] = "evict",
        root: Path = cgroups.ROOT,
    ) -> None:
        self._api = CoreV1Api(connection)
        self._node = node
        self._namespaces = frozenset(namespaces)
        self._by = by
        self._root = root

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:
        """See `Actuator.look`. A pod that is being deleted runs until all its containers have ended."""
        its = _parse(handle)
        pod = self._read(its)
        if pod is None:
            return _left(its, cgroup)
        return _read_answer(lambda: self._state(its, pod, cgroup))

    def stop(self, handle: str, *, grace_s: float) -> None:
        """See `Actuator.stop`. The grace period is that of the pod, if it is shorter."""
        its = _parse(handle)
        pod = self._managed(its)
        if pod is None:
            return
        own_s = pod["spec"].get("terminationGracePeriodSeconds")
        # A grace of 0 removes the object before its processes end.
        grace = max(1, round(min(grace_s, grace_s if own_s is None else own_s)))
        about = pod["metadata"]
        # `kubectl drain` may have given it longer; the API accepts a shorter grace of a pod that is ending.
        if "deletionTimestamp" not in about or (about.get("deletionGracePeriodSeconds") or 0) > grace:
            self._end(its, pod, grace_s=grace)
        deadline_s = time.monotonic() + grace + END_MARGIN_S
        while self._still_runs(its):
            if time.monotonic() >= deadline_s:
                raise ActuatorError(f"pod {its.namespace}/{its.pod} still runs {END_MARGIN_S:g} s after its grace")
            time.sleep(POLL_S)

    def start(self, handle: str) -> None:
        """See `Actuator.start`. The kubelet restarts the containers of a pod."""
        if self._read(_parse(handle)) is None:
            raise ActuatorError("the pod is gone; only its controller can create another one")

    def check_stop(self, handle: str) -> None:
        """See `Evicts.check_stop`: a dry run of the request."""
        its = _parse(handle)
        pod = self._managed(its)
        if pod is None:
            return
        try:
            self._end(its, pod, grace_s=1, dry_run=True)
        except KubeError as error:
            if error.status == 429 and (error.cause == "DisruptionBudget" or "disruption budget" in str(error)):
                raise NotAllowedError(Reason.DISRUPTION_BUDGET, str(error)) from None
            if error.status in (401, 403):
                needs = "; --evict delete needs the verb delete of pods: see docs/how-to/evict-pods.md"
                why = f"{error}{needs if self._by == 'delete' else ''}"
                raise NotAllowedError(Reason.EVICTION_FORBIDDEN, why) from None
            if error.status != 400:  # an admission webhook may not support dry runs
                raise

    def list_others(self, handle: str) -> frozenset[str] | None:
        """See `Evicts.list_others`. Returns uids."""
        its = _parse(handle)
        if its.is_alone:
            return None
        return frozenset(each["metadata"]["uid"] for each in self._siblings(its)) - {its.uid}

    def list_pids(self, handle: str) -> frozenset[int]:
        """See `Evicts.list_pids`: the processes of all containers of the pod."""
        its = _parse(handle)
        pod, groups = self._read(its), cgroups.containers(self._root)
        found = (_ID.fullmatch(each.get("containerID") or "") for each in _statuses(pod or {}))
        running = (groups.get(named[1]) for named in found if named)
        return frozenset().union(*(_processes(its, group) for group in running))

    def find_successor(self, handle: str, *, others: Collection[str]) -> ContainerState | None:
        """See `Evicts.find_successor`. The newest ready pod, else the newest; it runs if it is ready."""
        its = _parse(handle)
        new = [each for each in self._siblings(its) if each["metadata"]["uid"] not in {its.uid, *others}]
        if not new:
            return None
        pod = max(new, key=lambda each: (_is_ready(each), each["metadata"]["creationTimestamp"]))
        about = pod["metadata"]
        successor = its._replace(pod=about["name"], uid=about["uid"])
        return ContainerState(
            kind=pods.KIND,
            handle=str(successor),
            name=f"{its.namespace}/{about['name']}",
            incarnation=about["uid"],
            running=_is_ready(pod),
            managed=not pods.refusal(about, self._namespaces),
            pids=frozenset(),
            cgroup=None,
            unstartable=_why_not_ready(pod),
            starting=not _is_ready(pod),
        )

    def _state(self, its: Handle, pod: _Pod, cgroup: str | None) -> ContainerState | None:
        about, status = pod["metadata"], _container_status(pod, its.container)
        owner = pods.controller(about)
        if owner is not None:
            its = its._replace(kind=owner[0], owner=owner[1])
        deleted = "deletionTimestamp" in about
        running = _any_runs(pod) if deleted else "running" in (status.get("state") or {})
        named = _ID.fullmatch(status.get("containerID") or "")
        container_id = named[1] if named else ""
        group = Path(cgroup) if cgroup else None
        if group is None and running:
            group = cgroups.containers(self._root).get(container_id)
        pids = _processes(its, group)
        if running and not deleted and not pids:
            raise ActuatorError(
                f"the processes of container {its.name} are not visible: it is ending, or the executor lacks the "
                "host's /sys/fs/cgroup"
            )
        if deleted and not running and not pids:
            return None
        refusal = pods.refusal(about, self._namespaces)
        if pod["spec"].get("nodeName") != self._node:
            refusal = f"its pod is on node {pod['spec'].get('nodeName')}, not on {self._node}"
        return ContainerState(
            kind=pods.KIND,
            handle=str(its),
            name=its.name,
            incarnation=pods.incarnation(its.uid, container_id, status.get("restartCount", 0)),
            running=running,
            managed=not refusal,
            pids=pids,
            cgroup=None if group is None else str(group),
            refusal=refusal,
        )

    def _read(self, its: Handle) -> dict[str, Any] | None:
        """The pod; `None` if it is gone, over, or replaced by another pod of its name."""
        try:
            pod = _ask(f"read pod {its.namespace}/{its.pod}", self._api.read_namespaced_pod, its.pod, its.namespace)
        except KubeError as error:
            if error.status == 404 and f'"{its.pod}"' in str(error):  # and not of a proxy
                return None
            raise
        about = _read_answer(lambda: pod["metadata"]["uid"])
        over = (pod.get("status") or {}).get("phase") in _OVER
        return pod if about == its.uid and not over else None

    def _managed(self, its: Handle) -> dict[str, Any] | None:
        """The pod, if it may be evicted; `None` if it is gone."""
        pod = self._read(its)
        if pod is None:
            return None
        refusal = _read_answer(lambda: pods.refusal(pod["metadata"], self._namespaces))
        if refusal or pod["spec"].get("nodeName") != self._node:
            why = refusal or "it is on another node"
            raise ActuatorError(f"pod {its.namespace}/{its.pod} may not be evicted: {why}")
        return pod

    def _end(self, its: Handle, pod: _Pod, *, grace_s: int, dry_run: bool = False) -> None:
        """Evict or delete exactly this pod."""
        options: dict[str, Any] = {"gracePeriodSeconds": grace_s, "preconditions": {"uid": its.uid}}
        query = {"dry_run": "All"} if dry_run else {}
        action = f"{self._by} pod {its.namespace}/{its.pod}"
        if self._by == "delete":
            options["preconditions"]["resourceVersion"] = pod["metadata"]["resourceVersion"]
            if dry_run:  # with a body, the API ignores the query
                options["dryRun"] = ["All"]
            _ask(action, self._api.delete_namespaced_pod, its.pod, its.namespace, body=options, **query)
            return
        body = {
            "apiVersion": f"policy/{self._eviction_version()}",
            "kind": "Eviction",
            "metadata": {"name": its.pod, "namespace": its.namespace},
            "deleteOptions": options,
        }
        _ask(action, self._api.create_namespaced_pod_eviction, its.pod, its.namespace, body, **query)

    def _eviction_version(self) -> str:
        listed = _ask("list the resources of the API", self._api.get_api_resources).get("resources") or ()
        versions = [each.get("version") for each in listed if each.get("name") == "pods/eviction"]
        return str((versions and versions[0]) or "v1")

    def _still_runs(self, its: Handle) -> bool:
        pod = self._read(its)
        return pod is not None and _any_runs(pod)

    def _siblings(self, its: Handle) -> list[dict[str, Any]]:
        """All pods of the controller, on any node."""
        for _ in range(LISTS_MAX):
            try:
                found = self._list(its.namespace)
            except KubeError as error:
                if error.status != 410:
                    raise
                continue
            return [each for each in found if pods.controller(each["metadata"]) == (its.kind, its.owner)]
        raise ActuatorError(f"the Kubernetes API lost the list of pods in {its.namespace} {LISTS_MAX} times")

    def _list(self, namespace: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        page: dict[str, str] = {}
        while True:
            answer = _ask(f"list the pods of {namespace}", self._api.list_namespaced_pod, namespace, limit=PAGE, **page)
            found += answer.get("items") or ()
            more = (answer.get("metadata") or {}).get("continue")
            if not more:
                return found
            page = {"_continue": more}


def _parse(handle: str) -> Handle:
    found = Handle.parse(handle)
    if found is None:
        raise ActuatorError(f"{ascii(handle)[:200]} names no container of a pod")
    return found


def _ask(action: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Send a request and parse its answer.

    Raises:
        KubeError: the API does not answer, or answers with an HTTP error.
        ActuatorError: the answer is invalid.
    """
    try:
        with api.request(action):
            found = api.read_json(call(*arguments, _preload_content=False, **options))
    except ValueError as error:
        raise ActuatorError(f"cannot {action}: the Kubernetes API answers without valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ActuatorError(f"cannot {action}: the Kubernetes API answers without an object")
    return found


def _read_answer(read: Callable[[], _T]) -> _T:
    try:
        return read()
    except (KeyError, TypeError, AttributeError) as error:
        raise ActuatorError(f"the Kubernetes API answers with an invalid pod: {error!r}") from None


def _container_status(pod: _Pod, name: str) -> dict[str, Any]:
    return next((each for each in _statuses(pod) if each["name"] == name), {})


def _any_runs(pod: _Pod) -> bool:
    return any("running" in (each.get("state") or {}) for each in _statuses(pod))


def _statuses(pod: _Pod) -> Iterator[dict[str, Any]]:
    """The statuses of all containers of a pod."""
    status = pod.get("status") or {}
    for kind in _STATUSES:
        yield from status.get(kind) or ()


def _left(its: Handle, cgroup: str | None) -> ContainerState | None:
    """What a pod that is gone left in its cgroup."""
    group = Path(cgroup) if cgroup else None
    pids = _processes(its, group)
    if not pids:
        return None
    return ContainerState(
        kind=pods.KIND, handle=str(its), name=its.name, incarnation="", running=False, managed=False, pids=pids,
        cgroup=cgroup,
    )  # fmt: skip


def _processes(its: Handle, group: Path | None) -> frozenset[int]:
    try:
        pids = frozenset[int]() if group is None else cgroups.processes(group)
    except OSError as error:
        raise ActuatorError(f"the processes of container {its.name} cannot be listed: {error}") from error
    if 0 in pids:
        raise ActuatorError(f"the pids of container {its.name} are not visible: set hostPID: true for the executor")
    return pids


def _is_ready(pod: _Pod) -> bool:
    if "deletionTimestamp" in pod["metadata"]:
        return False
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _why_not_ready(pod: _Pod) -> str:
    """Say what a pod waits for; "" if it is ready."""
    if _is_ready(pod):
        return ""
    status = pod.get("status") or {}
    for each in _statuses(pod):
        waiting = (each.get("state") or {}).get("waiting")
        if waiting:
            return f"{each['name']}: {waiting.get('reason')} {waiting.get('message') or ''}".strip()[:300]
    for each in status.get("conditions") or ():
        if each["status"] == "False" and each.get("message"):
            return f"{each.get('reason')}: {each['message']}"[:300]
    return str(status.get("phase") or "no status")
