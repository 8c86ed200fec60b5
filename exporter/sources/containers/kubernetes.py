"""Containers of the pods on this node, with their GPUs and budgets.

They come from the Kubernetes API, or from the kubelet's links to their logs:

    /var/log/containers/POD_NAMESPACE_CONTAINER-ID.log -> /var/log/pods/NAMESPACE_POD_UID/CONTAINER/RESTARTS.log

GPUs come from the kubelet's pod-resources socket. Without it the API shows only whether there are any; without both,
NVIDIA_VISIBLE_DEVICES of the first process counts. Processes come from the cgroup with the id, budgets from the API.
"""

import contextlib
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from exporter.evidence import vram_budgets
from exporter.model.container import KUBERNETES, Container, VramBudget
from exporter.model.on_demand import OnDemandTenant
from exporter.model.snapshot import SourceHealth
from exporter.sources import processes
from exporter.sources.containers import kubelet
from exporter.sources.containers.deployments import Deployments, deployment_of
from exporter.sources.containers.poller import Listener, Listing
from gpuwarden import cgroup, gpu_names, procfs
from gpuwarden.kube import api as kube
from gpuwarden.kube import pods
from gpuwarden.kube.budget import RESOURCE, BudgetSources, scheduled_mib

LOGS: Final = Path("/var/log/containers")

REFRESH_S: Final = 5.0
"""Seconds between two listings."""

NODE_S: Final = 30.0
"""Seconds between two readings of the node."""

FRESH_S: Final = 20.0
"""Age up to which a listing counts, seconds."""

LAG_S: Final = 30.0
"""Seconds until the API lists a new container."""

TIMEOUT_S: Final = 5.0
"""Timeout of a listing, seconds."""

ABSENT_S: Final = 60.0
"""Seconds between two searches for missing cgroups: logs outlive their containers."""

GPU_RESOURCE: Final = re.compile(
    r"[^/]+/[^/]*gpu.*|nvidia\.com/mig-.*|amd\.com/[a-z]+_nps[0-9]+|gpu\.intel\.com/(?!.*_monitoring$).*|"
    r"tencent\.com/vcuda-.*|gpu\.(?:nvidia|amd|intel)\.com"
)
"""Resources whose devices are GPUs, and the DRA drivers of GPUs.

nvidia.com/mig-1g.10gb (NVIDIA/k8s-device-plugin, README.md); amd.com/cpx_nps4 for partitions (ROCm/k8s-device-plugin,
internal/pkg/plugin/plugin.go); gpu.intel.com/xe, but not i915_monitoring (intel/intel-device-plugins-for-kubernetes).
"""

# The kubelet cuts names at 255 characters (kubernetes 29526).
_LINK = re.compile(r".*-([0-9a-f]{64})\.log|(?=.{255}$).*-([0-9a-f]{12,63})\.log")
_WHOLE_ID = re.compile(r"[0-9a-f]{64}")
_TARGET = re.compile(r"(?:.*/)?([^/_]+)_([^/_]+)_([^/_]+)/([^/_]+)/([0-9]+)\.log")
_ID = re.compile(r"[a-z0-9.-]+://([0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class PodContainer:
    """A container of a pod; `gpu_resources` is unknown without the API."""

    id: str
    namespace: str
    pod: str
    uid: str
    name: str
    restarts: int
    image: str | None = None
    gpu_resources: tuple[str, ...] | None = None
    vram_budget: VramBudget = field(default_factory=VramBudget)
    declared_mib: Mapping[str, int] = field(default_factory=dict)
    """What the scheduler counts for its pod, by resource; on one container of the pod."""

    managed: bool | None = None
    deployment: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Its key in the kubelet's pod-resources."""
        return self.namespace, self.pod, self.name


class Api:
    """Lists the pods of one node. `client` is a `kubernetes.client.ApiClient`."""

    def __init__(self, client: Any, *, node: str, budgets: BudgetSources, namespaces: Collection[str] = ()) -> None:
        from kubernetes.client import CoreV1Api  # noqa: PLC0415 - slow, and only for this source

        self._core = CoreV1Api(client)
        self._node = node
        self._budgets = budgets
        self._namespaces = namespaces

    def containers(self) -> list[PodContainer]:
        """The running containers.

        Raises:
            KubeError: no answer, or an HTTP error.
            Exception: the answer is invalid.
        """
        with kube.request("list the pods of this node"):
            found = kube.read_json(
                # Version 0 is answered from the server's cache.
                self._core.list_pod_for_all_namespaces(
                    field_selector=f"spec.nodeName={self._node}",
                    resource_version="0",
                    _preload_content=False,
                    _request_timeout=TIMEOUT_S,
                )
            )
        items = found["items"]
        return [each for pod in items for each in running_containers(pod, self._budgets, self._namespaces)]

    def advertised(self) -> tuple[str, int]:
        """The resource by which the node advertises GPU memory to the scheduler, and how much, bytes.

        Without any of them the first configured one and 0.

        Raises:
            KubeError: no answer, or an HTTP error.
            Exception: the answer is invalid.
        """
        from kubernetes.utils.quantity import parse_quantity  # noqa: PLC0415 - slow, and only for this source

        with kube.request("read this node"):
            node = kube.read_json(self._core.read_node(self._node, _preload_content=False, _request_timeout=TIMEOUT_S))
        shown = node["status"].get("allocatable") or {}
        resources = self._budgets.resources or (RESOURCE,)
        resource = next((each for each in resources if each in shown), resources[0])
        return resource, int(parse_quantity(shown.get(resource, "0"))) * 2**20


class NodeReader:
    """Reads now and then what the node advertises. A failure costs only this figure."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._health: SourceHealth | None = None
        self._read_s = 0.0
        self._answered_unix_s: float | None = None
        self.resource = RESOURCE
        self.advertised_bytes: int | None = None

    def read(self, now_s: float) -> SourceHealth:
        """Read the node if that is due."""
        if self._health is None or now_s - self._read_s >= NODE_S:
            self._read_s, began_s, message = now_s, time.monotonic(), None
            try:
                self.resource, self.advertised_bytes = self._api.advertised()
                self._answered_unix_s = time.time()
            except Exception as error:  # noqa: BLE001 - an invalid answer must not cost the pods
                self.advertised_bytes, message = None, f"{type(error).__name__}: {error}"
            self._health = SourceHealth(
                source="node",
                success=message is None,
                duration_s=time.monotonic() - began_s,
                message=message,
                succeeded_unix_s=self._answered_unix_s,
            )
        return self._health


def running_containers(
    pod: dict[str, Any], budgets: BudgetSources, namespaces: Collection[str] = ()
) -> list[PodContainer]:
    """The running containers of a pod (Kubernetes API, Pod v1). One of them has the VRAM budget of the pod.

    Pods of `namespaces` may be evicted.
    """
    about, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    specs = {
        each["name"]: each
        for kind in ("initContainers", "containers", "ephemeralContainers")
        for each in spec.get(kind) or []
    }
    managed, deployment = not pods.refusal(about, namespaces), deployment_of(about)
    found = []
    for kind in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"):
        for each in status.get(kind) or []:
            named = _ID.fullmatch(each.get("containerID") or "")
            if named is None or "running" not in (each.get("state") or {}):
                continue
            its = specs.get(each["name"], {})
            limits = (its.get("resources") or {}).get("limits") or {}
            found.append(
                PodContainer(
                    id=named.group(1),
                    namespace=about["namespace"],
                    pod=about["name"],
                    uid=about["uid"],
                    name=each["name"],
                    restarts=int(each["restartCount"]),
                    image=its.get("image"),
                    gpu_resources=tuple(filter(GPU_RESOURCE.fullmatch, limits)),
                    managed=managed,
                    deployment=deployment,
                )
            )
    recyclable = managed and not pods.is_protected(about)
    budget = replace(vram_budgets.pod_budget(pod, budgets), recyclable=recyclable)
    holder = next((each for each in found if each.gpu_resources), found[0] if found else None)
    return [
        replace(each, vram_budget=budget, declared_mib=_declared_mib(spec, budgets)) if each is holder else each
        for each in found
    ]


def _declared_mib(spec: Mapping[str, Any], budgets: BudgetSources) -> dict[str, int]:
    """Without invalid limits, which the budget names."""
    declared = {}
    for resource in budgets.resources:
        with contextlib.suppress(ValueError):
            declared[resource] = scheduled_mib(spec, resource) or 0
    return declared


def _declared_bytes(known: Collection[PodContainer], resource: str) -> int:
    return sum(each.declared_mib.get(resource, 0) for each in known) * 2**20


def read_log_links(logs: Path = LOGS) -> list[PodContainer]:
    """Containers with a log, running or not.

    Raises:
        OSError: the folder is missing.
    """
    found = []
    for link in logs.iterdir():
        named = _LINK.fullmatch(link.name)
        try:
            target = _TARGET.fullmatch(str(link.readlink())) if named else None
        except OSError:
            continue  # just removed, or not a link
        if named and target:
            namespace, pod, uid, name, restarts = target.groups()
            found.append(
                PodContainer(
                    id=named.group(1) or named.group(2),
                    namespace=namespace,
                    pod=pod,
                    uid=uid,
                    name=name,
                    restarts=int(restarts),
                )
            )
    return found


class Pods(Listener):
    """Lists this node's pods.

    The kubelet's socket `pod_resources` may be missing unless it is `wanted` or was present before. While it fails,
    known pods keep their GPUs.
    """

    def __init__(
        self,
        *,
        api: Api | None,
        pod_resources: Path | None,
        pod_resources_wanted: bool = True,
        logs: Path = LOGS,
        proc: Path = procfs.PROC,
        root: Path = cgroup.ROOT,
        deployments: Deployments | None = None,
    ) -> None:
        super().__init__(
            "pods", failure_prefix="the pods of this node cannot be listed", refresh_s=REFRESH_S, fresh_s=FRESH_S
        )
        self._api = api
        self._pod_resources = pod_resources
        self._kubelet_wanted = pod_resources_wanted
        self._kubelet_answered_unix_s: float | None = None
        self._gpus_by_id: dict[str, tuple[str, ...] | None] = {}
        self._logs = logs
        self._proc = proc
        self._root = root
        self._groups: dict[str, Path] = {}
        self._whole: dict[str, str] = {}
        self._absent: frozenset[str] = frozenset()
        self._walked_s = -ABSENT_S
        self._node = None if api is None else NodeReader(api)
        self._deployments = deployments

    def latest(self) -> Listing:
        """The newest listing, without containers that ended since.

        Raises:
            NoListingError: it is missing or too old.
        """
        listing = super().latest()
        groups = self._groups
        alive = {
            full_id: each
            for full_id, each in listing.containers.items()
            if full_id in groups and (groups[full_id] / "cgroup.procs").exists()
        }
        return replace(listing, containers=alive)

    def list_now(self) -> Listing:
        """List once.

        Raises:
            OSError: no answer; the message names the source.
            Exception: an invalid answer.
        """
        taken_s = time.monotonic()
        try:
            known = read_log_links(self._logs) if self._api is None else self._api.containers()
        except OSError as error:
            raise OSError(f"the kubelet's logs in {self._logs}: {error}") from None
        whole = self._find_groups({each.id for each in known}, taken_s)
        known = [replace(each, id=whole.get(each.id, each.id)) for each in known]
        node = None if self._node is None else self._node.read(taken_s)
        on_demand, gate = self._read_deployments(known)
        other_sources = [each for each in (self._read_kubelet(known), node, gate) if each is not None]
        before = self._listing.containers if self._listing else {}
        containers = {}
        for each in known:
            found = self._container(each, before.get(each.id))
            if found is not None:
                containers[each.id] = found
        return Listing(
            containers=containers,
            taken_s=taken_s,
            duration_s=time.monotonic() - taken_s,
            ids=frozenset(each.id for each in known),
            lag_s=LAG_S,
            other_sources=tuple(other_sources),
            advertised_bytes=None if self._node is None else self._node.advertised_bytes,
            declared_bytes=None if self._node is None else _declared_bytes(known, self._node.resource),
            on_demand=on_demand,
        )

    def _read_deployments(
        self, known: Collection[PodContainer]
    ) -> tuple[tuple[OnDemandTenant, ...], SourceHealth | None]:
        if self._deployments is None:
            return (), None
        members: dict[str, set[str]] = {}
        for each in known:
            members.setdefault(f"{each.namespace}/{each.deployment}", set()).add(each.id)
        return self._deployments.read({name: frozenset(ids) for name, ids in members.items()})

    def _read_kubelet(self, known: Collection[PodContainer]) -> SourceHealth | None:
        """Read GPUs from the kubelet; `None` without a socket."""
        path, message = self._pod_resources, None
        if path is None or not (self._kubelet_wanted or _may_exist(path)):
            return None
        self._kubelet_wanted = True
        began_s = time.monotonic()
        try:
            given = kubelet.read_devices(path)
        except (OSError, ValueError) as error:
            message = f"the kubelet at {path}: {error}; or set --pod-resources none"
            ids = {each.id for each in known}
            self._gpus_by_id = {each: gpus for each, gpus in self._gpus_by_id.items() if each in ids}
        else:
            self._kubelet_answered_unix_s = time.time()
            self._gpus_by_id = {each.id: _select_gpus(given.get(each.key, {})) for each in known}
        return SourceHealth(
            source="pod_resources",
            success=message is None,
            duration_s=time.monotonic() - began_s,
            message=message,
            succeeded_unix_s=self._kubelet_answered_unix_s,
        )

    def _find_groups(self, wanted: set[str], now_s: float) -> dict[str, str]:
        """Search the cgroups of new containers, and now and then of those without one. Returns whole ids."""
        wanted = wanted | {self._whole[each] for each in wanted & self._whole.keys()}
        groups = {each: group for each, group in self._groups.items() if each in wanted and group.is_dir()}
        missing = wanted - groups.keys() - self._whole.keys()
        if missing - self._absent or (missing and now_s - self._walked_s >= ABSENT_S):
            self._walked_s = now_s
            every = cgroup.containers(self._root)
            for cut in (each for each in missing if not _WHOLE_ID.fullmatch(each)):
                found = [each for each in every if each.startswith(cut)]
                if len(found) == 1:
                    self._whole[cut] = found[0]
                    groups[found[0]] = every[found[0]]
            groups.update((each, every[each]) for each in missing & every.keys())
            missing -= every.keys()
        self._absent = frozenset(missing)
        self._groups = groups
        self._whole = {cut: each for cut, each in self._whole.items() if cut in wanted}
        return self._whole

    def _container(self, pod: PodContainer, before: Container | None) -> Container | None:
        group = self._groups.get(pod.id)
        if group is None:
            return None
        try:
            pids = cgroup.processes(group)
            if not pids:
                return None
            pid = before.pid if before is not None and before.pid in pids else self._first(pids)
            if pod.id in self._gpus_by_id:
                request = self._gpus_by_id[pod.id]
            elif pod.gpu_resources is not None:
                request = pod.gpu_resources or None  # which GPUs is unknown
            else:
                request = processes.gpus_of_container(pid, proc=self._proc)
        except OSError:
            return None  # it just ended
        return Container(
            kind=KUBERNETES,
            id=pod.id,
            name=pods.container_name(pod.namespace, pod.pod, pod.name),
            incarnation=pods.incarnation(pod.uid, pod.id, pod.restarts),
            pid=pid,
            gpu_request=request,
            image=pod.image,
            vram_budget=pod.vram_budget,
            managed=pod.managed,
            namespace=pod.namespace,
            pod=pod.pod,
            group=str(group),
        )

    def _first(self, pids: frozenset[int]) -> int:
        # The oldest process: the first one of the container, unless another joined from outside.
        return min(pids, key=lambda pid: (procfs.start_ticks(pid, proc=self._proc), pid))


def _may_exist(path: Path) -> bool:
    """Whether it is present, or not readable."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _select_gpus(devices: Mapping[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """The GPUs among a container's devices; a resource means devices with unknown names."""
    names = (
        (gpu_names.read(name), resource)
        for resource, ids in devices.items()
        if GPU_RESOURCE.fullmatch(resource)
        for name in ids
    )
    return tuple(dict.fromkeys(name if gpu_names.is_known(name) else resource for name, resource in names)) or None
