"""The manifests of deploy/kubernetes, applied by kubectl to a real cluster and deleted again."""

import os
from pathlib import Path

import httpx
import pytest
from kubernetes.client import CoreV1Api

from gpuwarden.gateway.operations import OPERATIONS
from gpuwarden.gateway.wire import PREFIX
from remediator.webhook.readiness import READY_S
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from tests.manifests import (
    AS_ALERTMANAGER,
    MANIFESTS,
    SPACE,
    TOKEN,
    WEB,
    Kubectl,
    gpu_node,
    kustomize,
    ready_pods,
    runnable,
    seats,
)


@pytest.mark.kube
@pytest.mark.slow
@pytest.mark.behaviour("C9")
def test_one_node_runs_the_chain_and_leaves_nothing(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    core, kubectl = CoreV1Api(cluster.api()), Kubectl(cluster)
    before = kubectl.names()
    core.create_namespaced_pod(namespace, pods.pod("tenant"))
    (tmp_path / "web.yml").write_text(WEB)

    def make_secret() -> None:
        kubectl.secret("gpuwarden-web", f"--from-file={tmp_path}/web.yml", f"--from-literal=token={TOKEN}")

    with gpu_node(cluster), kubectl.applied(runnable("overlays/one-node", tmp_path / "overlay"), make_secret):
        cluster.wait(lambda: ready_pods(core, "gpuwarden-node"), "ready pod of the node")
        (its,) = ready_pods(core, "gpuwarden-node")
        exporter, gateway, webhook = (f"http://{its.status.pod_ip}:{port}" for port in (29835, 29837, 9836))

        published = httpx.get(f"{exporter}/metrics").text
        assert f'container="{namespace}/tenant/main"' in published
        assert 'gpuwarden_collector_success{collector="source_pod_resources"} 1.0' in published  # the kubelet's socket
        page = httpx.get(f"{webhook}/metrics", headers=AS_ALERTMANAGER).text
        assert "gpuwarden_remediator_executor_heartbeat_age_seconds " in page  # of this node's executor
        assert httpx.get(f"{exporter}/evidence").status_code == 403
        assert "\ngpuwarden_gateway_sockets " in httpx.get(f"{gateway}/metrics").text
        assert {httpx.post(f"{gateway}{PREFIX}{name}", json={}).status_code for name in OPERATIONS} == {405}
        assert httpx.post(f"{webhook}/api/v1/alerts", json={}).status_code == 401
        cluster.wait(lambda: seats(core, cluster) == "14k", "seats of the node")
        core.create_namespaced_pod(namespace, pods.pod("waits", limits={"gpuwarden/vram-mib": 14001}))
        pending = f'pod_name="waits",pod_namespace="{namespace}"'
        cluster.wait(lambda: pending in httpx.get(f"{webhook}/metrics", headers=AS_ALERTMANAGER).text, "Pending pod")
        kubectl.gpuwarden(its.metadata.name, "status", "--alertmanager", "none", "--prometheus", "none")
        kubectl.gpuwarden(its.metadata.name, "queue", "set", "mine", "--budget-s", "60", container="remediator")
        logs = {each: core.read_namespaced_pod_log(its.metadata.name, SPACE, container=each)
                for each in ("exporter", "executor", "gateway", "remediator")}  # fmt: skip
        assert [line for log in logs.values() for line in log.splitlines() if '"level": "error"' in line] == []

    kubectl.remove_seats()
    assert seats(core, cluster) is None
    # Namespaces of earlier tests may still be ending.
    cluster.wait(lambda: kubectl.names() <= before, "removal of all")


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


@pytest.mark.parametrize("name", ["one-node", "postgres"])
def test_probes_wait_longer_than_the_page_that_they_read(name: str) -> None:
    workloads = [
        each for each in kustomize(MANIFESTS / "overlays" / name) if each["kind"] in ("DaemonSet", "Deployment")
    ]
    probes = [
        probe
        for each in workloads
        for container in each["spec"]["template"]["spec"]["containers"]
        for kind, probe in container.items()
        if kind.endswith("Probe")
    ]

    assert len(probes) >= 4
    assert {probe["timeoutSeconds"] > 2 * READY_S for probe in probes} == {True}


def test_key_of_nvidia_can_be_removed(tmp_path: Path) -> None:
    """As docs/how-to/kubernetes.md says."""
    (tmp_path / "kustomization.yaml").write_text(
        f"""resources: [{os.path.relpath(MANIFESTS / "overlays/one-node", tmp_path)}]
patches:
  - target: {{kind: DaemonSet}}
    patch: |
      apiVersion: apps/v1
      kind: DaemonSet
      metadata: {{name: gpuwarden-node}}
      spec:
        template: {{spec: {{nodeSelector: {{nvidia.com/gpu.present: null, gpu: amd}}}}}}
"""
    )

    (node,) = (each for each in kustomize(tmp_path) if each["kind"] == "DaemonSet")

    assert node["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "amd"}


@pytest.mark.kube
def test_webhook_gets_alerts_while_another_container_is_not_ready(cluster: Cluster, namespace: str) -> None:
    core = CoreV1Api(cluster.api())
    (service,) = (each for each in kustomize(MANIFESTS / "base") if each["kind"] == "Service")
    service["metadata"]["namespace"] = namespace
    core.create_namespaced_service(namespace, service)
    its = pods.pod("node", labels=service["spec"]["selector"])
    its["spec"]["containers"][0] |= {
        "ports": [{"name": "webhook", "containerPort": 9836}],
        "readinessProbe": {"exec": {"command": ["false"]}},
    }
    core.create_namespaced_pod(namespace, its)

    def addresses() -> bool:
        found = core.list_namespaced_endpoints(namespace, field_selector="metadata.name=gpuwarden-remediator").items
        return any(subset.addresses for each in found for subset in each.subsets or ())

    cluster.wait(addresses, "address of the pod")
    statuses = core.read_namespaced_pod("node", namespace).status.container_statuses
    assert not any(each.ready for each in statuses or ())
