"""The manifests of deploy/kubernetes in a real cluster, with this checkout in their containers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml
from kubernetes.client import CoreV1Api

import deploy
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from testbed.kubernetes.images import BASE

MANIFESTS: Final = Path(deploy.__file__).parent / "kubernetes"
KUBECTL: Final = Path(sys.executable).with_name("kubectl")
SPACE: Final = "gpuwarden"
GPU_LABEL: Final = "nvidia.com/gpu.present"
STATE: Final = "/run/gpuwarden"
DATA: Final = "/var/lib/gpuwarden"
KINDS: Final = "namespaces,clusterroles,clusterrolebindings"
"""The kinds of the manifests that are in no namespace."""

SETTINGS: Final = MappingProxyType(
    {
        "GPUWARDEN_EXPORTER_SIMULATE_GPU": "/gpus/gpus.json",
        "GPUWARDEN_REMEDIATOR_SEATS": "on",
    }
)
"""Settings of workloads with `patch`."""

WEB: Final = "bearer_token_file: token\n"
TOKEN: Final = "the-token-of-alertmanager"
AS_ALERTMANAGER: Final = {"Authorization": f"Bearer {TOKEN}"}


def kustomize(folder: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization."""
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def runnable(name: str, folder: Path, literals: Sequence[str] = ()) -> Path:
    """An overlay in a new folder, whose containers run this checkout, with the GPUs of its file `gpus.json`."""
    folder.mkdir()
    workloads = [each for each in kustomize(MANIFESTS / name) if each["kind"] in ("DaemonSet", "Deployment")]
    patches = [{"patch": json.dumps(patch(each, folder))} for each in workloads]
    settings = {
        "name": "gpuwarden-settings",
        "namespace": SPACE,
        "behavior": "merge",
        "literals": [*(f"{name}={value}" for name, value in SETTINGS.items()), *literals],
    }
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    resources = [os.path.relpath(MANIFESTS / name, folder)]
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump({**kind, "resources": resources, "patches": patches, "configMapGenerator": [settings]})
    )
    write_gpus(folder, [{}])
    return folder


def patch(workload: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A strategic merge patch, by which the pods of a workload run this checkout with the GPUs of the folder."""
    spec = workload["spec"]["template"]["spec"]
    command = [pods.python(), "-m", "gpuwarden"]
    its: dict[str, Any] = {
        "initContainers": [{"name": of["name"], "image": BASE} for of in spec.get("initContainers", ())],
        "containers": [{"name": of["name"], "image": BASE, "command": command} for of in spec["containers"]],
    }
    named = {"name": workload["metadata"]["name"], "namespace": SPACE}
    kind = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "metadata": named}
    template = pods.with_project({"spec": its})
    its["volumes"].append({"name": "gpus", "hostPath": {"path": str(folder)}})
    for of in its["containers"]:
        of["volumeMounts"].append({"name": "gpus", "mountPath": "/gpus"})
    return {**kind, "spec": {"template": template}}


def gateway(folders: Mapping[str, Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap of `one-node`, and a pod of its host gateway alone, with other folders of the node."""
    objects = kustomize(MANIFESTS / "overlays/one-node")
    (settings,), (node,) = ([each for each in objects if each["kind"] == kind] for kind in ("ConfigMap", "DaemonSet"))
    del settings["metadata"]["namespace"]
    spec = node["spec"]["template"]["spec"]
    (container,) = (each for each in spec["containers"] if each["name"] == "gateway")
    container |= {"image": BASE, "command": [pods.python(), "-m", "gpuwarden"]}
    names = {each["name"] for each in container["volumeMounts"]}
    its = {
        **{name: spec[name] for name in ("automountServiceAccountToken", "hostPID", "securityContext")},
        "containers": [container],
        "volumes": [each for each in spec["volumes"] if each["name"] in names],
        "terminationGracePeriodSeconds": 0,
    }
    move_volumes(its, folders)
    return settings, pods.with_project({"metadata": {"name": "gateway"}, "spec": its})


def move_volumes(spec: Mapping[str, Any], folders: Mapping[str, Path]) -> None:
    """Replace folders of the node in a pod's volumes."""
    for each in spec["volumes"]:
        for folder, other in folders.items():
            if "hostPath" in each and Path(each["hostPath"]["path"]).is_relative_to(folder):
                each["hostPath"]["path"] = str(other / Path(each["hostPath"]["path"]).relative_to(folder))
                break


def write_gpus(folder: Path, held_mib: Sequence[Mapping[int, int]]) -> None:
    """Write the overlay's simulated GPUs of 15,360 MiB: for each, what processes hold by pid."""
    gpus = [
        {
            "uuid": f"GPU-{index}",
            "index": index,
            "utilization_ratio": 0.0,
            "memory_size_bytes": 15360 * 2**20,
            "memory_used_bytes": sum(held.values()) * 2**20,
            "processes": [
                {"pid": pid, "utilization_ratio": 0.0, "memory_bytes": mib * 2**20} for pid, mib in sorted(held.items())
            ],
        }
        for index, held in enumerate(held_mib)
    ]
    written = folder / "gpus.new"
    written.write_text(json.dumps({"gpus": gpus}))
    written.replace(folder / "gpus.json")


def _has_ended(pod: Mapping[str, Any]) -> bool:
    """Whether no container of a pod runs."""
    return all("running" not in each["state"] for each in pod["status"].get("containerStatuses", ()))


class Kubectl:
    """Runs kubectl as the administrator."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __call__(self, *arguments: str) -> str:
        command = [str(KUBECTL), f"--kubeconfig={self._cluster.kubeconfig}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def names(self) -> set[str]:
        """The objects of the manifests' kinds that are in no namespace."""
        return set(self("get", KINDS, "-o", "name").split())

    def secret(self, name: str, *sources: str) -> None:
        """Create a secret from `--from-…` options."""
        self("create", "secret", "generic", name, f"--namespace={SPACE}", *sources)

    @contextmanager
    def applied(self, folder: Path, make_secrets: Callable[[], None]) -> Iterator[None]:
        """The objects of a kustomization, and its secrets."""
        try:
            # Pods that lack a secret are tried again late.
            self("apply", "--server-side", "-f", str(MANIFESTS / "base/namespace.yaml"))
            make_secrets()
            self("apply", "--server-side", "-k", str(folder))
            yield
        finally:
            # A namespace with ending pods is looked at again after half of their grace period.
            self("delete", f"--namespace={SPACE}", "daemonsets,deployments", "--all")
            path = f"/api/v1/namespaces/{SPACE}/pods"
            self._cluster.wait(lambda: all(map(_has_ended, self._cluster.get(path)["items"])), "end of the programs")
            # The kubelet takes 10 s and more, on a busy machine, to remove pods whose programs have ended.
            self._cluster.wait(lambda: not self._cluster.get(path)["items"], "removal of the pods")
            self("delete", "--ignore-not-found", "-k", str(folder))

    def gpuwarden(self, pod: str, *arguments: str, container: str = "executor") -> str:
        """Run a command in a container of the pod."""
        inside = (f"--container={container}", "--", pods.python(), "-m", "gpuwarden")
        return self("exec", f"--namespace={SPACE}", pod, *inside, *arguments)

    def remove_seats(self) -> None:
        """Run `gpuwarden seats remove` as the administrator."""
        program, account = KUBECTL.with_name("gpuwarden"), f"--kubeconfig={self._cluster.kubeconfig}"
        subprocess.run([program, "seats", "remove", self._cluster.node, account], check=True, capture_output=True)


@contextmanager
def gpu_node(cluster: Cluster) -> Iterator[None]:
    """The cluster's node has the label of a node with GPUs."""
    core = CoreV1Api(cluster.api())
    core.patch_node(cluster.node, {"metadata": {"labels": {GPU_LABEL: "true"}}})
    yield
    core.patch_node(cluster.node, {"metadata": {"labels": {GPU_LABEL: None}}})


def ready_pods(core: CoreV1Api, name: str) -> list[Any]:
    """The pods of a program whose containers are all ready."""
    found = core.list_namespaced_pod(SPACE, label_selector=f"app.kubernetes.io/name={name}").items
    statuses = [(pod, pod.status.container_statuses) for pod in found]
    return [pod for pod, containers in statuses if containers and all(each.ready for each in containers)]


def seats(core: CoreV1Api, cluster: Cluster) -> str | None:
    """What the node advertises."""
    capacity: dict[str, str] = core.read_node(cluster.node).status.capacity
    return capacity.get("gpuwarden/vram-mib")
