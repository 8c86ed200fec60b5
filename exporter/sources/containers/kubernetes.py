"""The containers of the pods on this node: who they are, their GPUs and budgets.

Who they are is told by the Kubernetes API where it is asked, else by the links to their logs that the kubelet makes on
its host:

    /var/log/containers/POD_NAMESPACE_CONTAINER-ID.log -> /var/log/pods/NAMESPACE_POD_UID/CONTAINER/RESTARTS.log

Which GPUs they were given is told by the kubelet's pod-resources socket where there is one. Without it, by the API only
whether they were given any; and without either, by NVIDIA_VISIBLE_DEVICES of their first process. Where their processes
are, by the cgroup that bears their id. Budgets are told by the API alone.
"""

import http.client
import json
import re
import ssl
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from exporter.evidence import gpu_attribution, vram_budgets
from exporter.model.container import Container, VramBudget
from exporter.model.gpu import ALL_NODES
from exporter.model.snapshot import SourceHealth
from exporter.sources import processes
from exporter.sources.containers import kubelet
from exporter.sources.containers.poller import Listener, Listing
from gpuwarden import cgroup, procfs
from gpuwarden.errors import GpuwardenError

LOGS: Final = Path("/var/log/containers")

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts a pod's own token and the authority that signed its API's certificate."""

REFRESH_S: Final = 5.0
"""How often pods are listed anew, seconds."""

FRESH_S: Final = 20.0
"""A listing older than this is no longer believed, seconds."""

LAG_S: Final = 30.0
"""How long the API may take to know of a container that runs, seconds."""

TIMEOUT_S: Final = 5.0
"""How long the API may leave the connection silent, seconds."""

ANSWER_MAX: Final = 64 * 2**20
"""Bytes of the API's answer: a node has 110 pods or so, of some 10 KB each."""

ABSENT_S: Final = 60.0
"""How often groups are looked for again of containers that had none, such as those whose logs outlive them, seconds."""

GPU_RESOURCE: Final = re.compile(
    r"nvidia\.com/(?:gpu|mig-).*|amd\.com/(?:gpu|[a-z]+_nps[0-9]+)|gpu\.intel\.com/(?!.*_monitoring$).*"
)
"""Whose devices are GPUs, as the vendors' device plugins name them.

nvidia.com/gpu, nvidia.com/gpu.shared and nvidia.com/mig-1g.10gb (NVIDIA/k8s-device-plugin, README.md): other devices of
NVIDIA's, such as network cards, have other names. amd.com/gpu, and amd.com/cpx_nps4 of parts of GPUs
(ROCm/k8s-device-plugin, internal/pkg/plugin/plugin.go). gpu.intel.com/i915 and gpu.intel.com/xe, of which
gpu.intel.com/i915_monitoring is no GPU but a look at all of them (intel/intel-device-plugins-for-kubernetes,
cmd/gpu_plugin/README.md).
"""

_LINK = re.compile(r".*-([0-9a-f]{64})\.log")
_TARGET = re.compile(r"(?:.*/)?([^/_]+)_([^/_]+)_([^/_]+)/([^/_]+)/([0-9]+)\.log")
_SHARED_CARD = re.compile(r"(card[0-9]+)-[0-9]+")
_ID = re.compile(r"[a-z0-9.-]+://([0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class PodContainer:
    """A container of a pod, as the API or the kubelet's links tell of it. `gpu_wanted` is unknown to the links."""

    id: str
    namespace: str
    pod: str
    uid: str
    name: str
    restarts: int
    image: str | None = None
    gpu_wanted: bool | None = None
    vram_budget: VramBudget = field(default_factory=VramBudget)

    @property
    def key(self) -> tuple[str, str, str]:
        """As the kubelet's pod-resources name it."""
        return self.namespace, self.pod, self.name


class Api:
    """The Kubernetes API at a URL, asked for the pods of one node; in a cluster, by the pod's own account.

    Its token goes nowhere but over TLS.
    """

    def __init__(self, url: str, *, node: str, resource: str, account: Path = ACCOUNT) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GpuwardenError(f"{url} is no URL of a Kubernetes API: give https://HOST:PORT, or in-cluster")
        self.url = url
        self._tls = parts.scheme == "https"
        self._where = parts.hostname, parts.port
        self._path = f"/api/v1/pods?resourceVersion=0&fieldSelector=spec.nodeName%3D{quote(node, safe='')}"
        self._resource = resource
        self._account = account

    def containers(self) -> list[PodContainer]:
        """Those that run.

        Raises:
            OSError: it does not answer, or not with a list of pods; the message says what it said.
            Exception: its answer makes no sense, in whichever way.
        """
        headers = {"Accept": "application/json"}
        token = self._account / "token"
        if self._tls and token.exists():  # read each time: the kubelet replaces it before it runs out
            headers["Authorization"] = f"Bearer {token.read_text(encoding='ascii').strip()}"
        connection = self._connection()
        try:
            connection.request("GET", self._path, headers=headers)
            answer = connection.getresponse()
            text = answer.read(ANSWER_MAX + 1)
        except http.client.HTTPException as error:
            raise OSError(f"no answer in HTTP: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            hint = "; let its account list pods" if answer.status in (401, 403) else ""
            raise OSError(f"it answers {answer.status} {answer.reason}{hint}")
        if len(text) > ANSWER_MAX:
            raise OSError(f"its list of pods is over {ANSWER_MAX} bytes")
        return [each for pod in json.loads(text)["items"] for each in running(pod, self._resource)]

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._where
        if not self._tls:
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        authority = self._account / "ca.crt"
        context = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)


def running(pod: dict[str, Any], resource: str) -> list[PodContainer]:
    """The containers of a pod that run (Kubernetes API, Pod v1); `resource` is what budgets are declared in."""
    about, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    specs = {
        each["name"]: each
        for kind in ("initContainers", "containers", "ephemeralContainers")
        for each in spec.get(kind) or []
    }
    found = []
    for kind in ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"):
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
                    gpu_wanted=any(GPU_RESOURCE.fullmatch(name) for name in limits),
                    vram_budget=vram_budgets.parse_pod_limit(limits.get(resource), resource),
                )
            )
    return found


def linked(logs: Path = LOGS) -> list[PodContainer]:
    """Those whose logs the kubelet keeps, whether they run or not.

    Raises:
        OSError: there is no such folder.
    """
    found = []
    for link in logs.iterdir():
        named = _LINK.fullmatch(link.name)
        try:
            target = _TARGET.fullmatch(str(link.readlink())) if named else None
        except OSError:
            continue  # taken away since it was listed, or no link
        if named and target:
            namespace, pod, uid, name, restarts = target.groups()
            found.append(
                PodContainer(
                    id=named.group(1), namespace=namespace, pod=pod, uid=uid, name=name, restarts=int(restarts)
                )
            )
    return found


class Pods(Listener):
    """Listens to who knows of this node's pods.

    The kubelet's socket `pod_resources` need not be there, unless it is `wanted` or was there before. One that does not
    answer costs no pod: whom it has told of has the GPUs that it told, and of others it is as without it.
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
    ) -> None:
        super().__init__("pods", nothing="the pods of this node cannot be listed", refresh_s=REFRESH_S, fresh_s=FRESH_S)
        self._api = api
        self._pod_resources = pod_resources
        self._kubelet_wanted = pod_resources_wanted
        self._kubelet_answered_unix_s: float | None = None
        self._given: dict[str, tuple[str, ...] | None] = {}
        self._logs = logs
        self._proc = proc
        self._root = root
        self._groups: dict[str, Path] = {}
        self._absent: frozenset[str] = frozenset()
        self._walked_s = -ABSENT_S

    def latest(self) -> Listing:
        """The newest listing, without those whose group has gone since.

        Raises:
            NoListingError: there is none, or it is too old to believe; the message says why.
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
        """Ask everyone once.

        Raises:
            OSError: who tells of pods does not answer; the message says who.
            Exception: an answer makes no sense, in whichever way.
        """
        taken_s = time.monotonic()
        try:
            known = linked(self._logs) if self._api is None else self._api.containers()
        except OSError as error:
            who = (
                f"the kubelet's logs in {self._logs}" if self._api is None else f"the Kubernetes API at {self._api.url}"
            )
            raise OSError(f"{who}: {error}") from None
        beside = self._ask_kubelet(known)
        self._find_groups({each.id for each in known}, taken_s)
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
            beside=() if beside is None else (beside,),
        )

    def _ask_kubelet(self, known: Collection[PodContainer]) -> SourceHealth | None:
        """Ask the kubelet which GPUs these have, and tell how that went; `None` where there is none to be asked."""
        path, because = self._pod_resources, None
        if path is None or not (self._kubelet_wanted or _may_be_there(path)):
            return None
        self._kubelet_wanted = True
        began_s = time.monotonic()
        try:
            given = kubelet.given(path)
        except (OSError, ValueError) as error:
            because = f"the kubelet at {path}: {error}; --pod-resources none goes without"
            ids = {each.id for each in known}
            self._given = {each: gpus for each, gpus in self._given.items() if each in ids}
        else:
            self._kubelet_answered_unix_s = time.time()
            self._given = {each.id: _given_gpus(given.get(each.key, {})) for each in known}
        return SourceHealth(
            source="pod_resources",
            success=because is None,
            duration_s=time.monotonic() - began_s,
            because=because,
            succeeded_unix_s=self._kubelet_answered_unix_s,
        )

    def _find_groups(self, wanted: set[str], now_s: float) -> None:
        """Look for the groups of those that are new, and for now and then of those that had none."""
        groups = {each: group for each, group in self._groups.items() if each in wanted and group.is_dir()}
        missing = wanted - groups.keys()
        if missing - self._absent or (missing and now_s - self._walked_s >= ABSENT_S):
            self._walked_s = now_s
            every = cgroup.containers(self._root)
            groups.update((each, every[each]) for each in missing & every.keys())
            missing -= every.keys()
        self._absent = frozenset(missing)
        self._groups = groups

    def _container(self, told: PodContainer, before: Container | None) -> Container | None:
        """One that runs, with one of its processes; `None` where it has none."""
        group = self._groups.get(told.id)
        if group is None:
            return None
        try:
            pids = cgroup.processes(group)
            if not pids:
                return None
            pid = before.pid if before is not None and before.pid in pids else self._first(pids)
            if told.id in self._given:
                request = self._given[told.id]
            elif told.gpu_wanted is not None:
                request = (
                    (gpu_attribution.ALL, ALL_NODES) if told.gpu_wanted else None
                )  # which is not told: all are looked at
            else:
                request = processes.gpus_of_container(pid, proc=self._proc)
        except OSError:
            return None  # it ended between the two looks
        return Container(
            kind="kubernetes",
            id=told.id,
            name=f"{told.namespace}/{told.pod}/{told.name}",
            incarnation=f"{told.uid}@{told.id}@{told.restarts}",
            pid=pid,
            gpu_request=request,
            image=told.image,
            vram_budget=told.vram_budget,
            namespace=told.namespace,
            pod=told.pod,
            group=str(group),
        )

    def _first(self, pids: frozenset[int]) -> int:
        """Whoever of them started first: the container's own first process, but for those that joined from outside."""
        return min(pids, key=lambda pid: (procfs.start_ticks(pid, proc=self._proc), pid))


def _may_be_there(path: Path) -> bool:
    """Whether something is there, for all that we may look at."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _given_gpus(devices: Mapping[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """The GPUs among the devices that a container was given, by one of their names (`Gpu.names`).

    NVIDIA's plugin calls a share of one by time UUID::NUMBER, Intel's (cmd/gpu_plugin/gpu_plugin.go) each share of one
    card0-NUMBER; AMD's (internal/pkg/amdgpu/amdgpu.go) calls one by its PCI address.
    """
    names = (_gpu(name) for resource, ids in devices.items() if GPU_RESOURCE.fullmatch(resource) for name in ids)
    return tuple(dict.fromkeys(names)) or None


def _gpu(device: str) -> str:
    shared = _SHARED_CARD.fullmatch(device)
    return shared[1] if shared else device.partition("::")[0]
