"""Pods of a real cluster, as the exporter on its node lists them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kubernetes.client import CoreV1Api

from exporter.model.container import Container
from exporter.model.gpu import GpuReadings
from exporter.model.thresholds import Thresholds
from exporter.sampler import Sampler
from exporter.sources.containers import kubelet
from exporter.sources.containers.kubernetes import Api, Pods
from gpuwarden import cgroup, clock
from gpuwarden.kube import api as kube
from gpuwarden.kube.budget import BudgetSources
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from tests.exporter import builders as build
from tests.exporter.golden import scraped
from tests.waiting import eventually

VRAM = "gpuwarden/vram-mib"

pytestmark = pytest.mark.kube


@pytest.fixture
def core(cluster: Cluster) -> CoreV1Api:
    return CoreV1Api(cluster.api())


@contextmanager
def seats(core: CoreV1Api, cluster: Cluster, mib: int) -> Iterator[None]:
    """Let the node advertise GPU memory."""
    core.patch_node_status(cluster.node, {"status": {"capacity": {VRAM: str(mib)}}})
    cluster.wait(lambda: VRAM in core.read_node(cluster.node).status.allocatable, "seat of the node")
    try:
        yield
    finally:
        core.patch_node_status(cluster.node, [{"op": "remove", "path": "/status/capacity/gpuwarden~1vram-mib"}])
        cluster.wait(lambda: VRAM not in core.read_node(cluster.node).status.allocatable, "node without a seat")


def listed(source: Pods, namespace: str) -> list[Container]:
    return [each for each in source.list_now().containers.values() if each.namespace == namespace]


def commands(container: Container) -> set[str]:
    assert container.group
    lines = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in cgroup.processes(Path(container.group)))
    return {line.replace(b"\0", b" ").decode().strip() for line in lines}


def test_pod_with_a_seat_is_listed_with_its_budget_and_processes(
    cluster: Cluster, core: CoreV1Api, namespace: str
) -> None:
    api = Api(kube.connect(cluster.kubeconfig), node=cluster.node, budgets=BudgetSources())
    source = Pods(api=api, pod_resources=cluster.pod_resources)
    with seats(core, cluster, 5000):
        script = "sleep 1000 & exec sleep 1001"
        core.create_namespaced_pod(namespace, pods.pod("tenant", ["sh", "-c", script], limits={VRAM: 3000}))
        cluster.wait(lambda: core.read_namespaced_pod("tenant", namespace).status.phase == "Running", "running pod")
        uid = core.read_namespaced_pod("tenant", namespace).metadata.uid

        found = source.list_now()
        assert (found.advertised_bytes, found.declared_bytes) == (5000 * build.MIB, 3000 * build.MIB)
        (tenant,) = listed(source, namespace)
        assert (tenant.name, tenant.namespace, tenant.pod) == (f"{namespace}/tenant/main", namespace, "tenant")
        assert tenant.incarnation == f"{uid}@{tenant.id}@0"
        assert tenant.vram_budget.budget_bytes == 3000 * build.MIB
        assert tenant.gpu_request is None
        eventually(lambda: commands(tenant) == {"sleep 1000", "sleep 1001"}, "both processes are in its group")

        core.delete_namespaced_pod("tenant", namespace, grace_period_seconds=0)
        eventually(lambda: not listed(source, namespace), "the pod is not listed")


def sampled(source: Pods, gpus: GpuReadings, folder: Path) -> str:
    """The metrics of one sample."""
    source.start()
    try:
        source.latest()
        sampler = Sampler(
            host="box-1",
            directory=folder,
            containers={"kubernetes": source},
            gpus=lambda: gpus,
            thresholds=Thresholds(),
        )
        return scraped(sampler.sample(), now=clock.stamp())
    finally:
        source.close()


@pytest.mark.behaviour("C2")
def test_pod_is_over_budget_by_the_sum_of_its_containers(
    cluster: Cluster, core: CoreV1Api, namespace: str, tmp_path: Path
) -> None:
    budgets = BudgetSources(annotations=("gpu-memory",))
    source = Pods(api=Api(kube.connect(cluster.kubeconfig), node=cluster.node, budgets=budgets), pod_resources=None)
    tenant = pods.pod("tenant", limits={VRAM: 1000})
    tenant["spec"]["containers"].append(pods.container("second", limits={VRAM: 500}))
    annotated = {each: pods.pod(each) for each in ("kai", "much", "huge")}
    annotated["kai"]["metadata"]["annotations"] = {"gpu-memory": "2000"}
    annotated["much"]["metadata"]["annotations"] = {"gpu-memory": "much"}
    annotated["huge"]["metadata"]["annotations"] = {"gpu-memory": "99999"}
    with seats(core, cluster, 5000):
        for manifest in (tenant, *annotated.values(), pods.pod("free"), pods.pod("idle", limits={VRAM: 100})):
            core.create_namespaced_pod(namespace, manifest)
        eventually(lambda: len(listed(source, namespace)) == 7, "all containers run", within_s=30)
        pids = {each.name.removeprefix(f"{namespace}/"): each.pid for each in listed(source, namespace)}
        held_mib = {
            "tenant/main": 800,
            "tenant/second": 800,
            "free/main": 9000,
            "kai/main": 2500,
            "much/main": 1,
            "huge/main": 1,
        }
        held = (build.process(pids[name], 0.0, mib * build.MIB) for name, mib in held_mib.items())
        text = sampled(source, build.gpus(build.gpu(0, *held)), tmp_path)

    of_pods = rf'container="{namespace}/([^"]*)"'
    its = re.findall(rf"gpuwarden_container_gpu_memory_(budget|over_budget)_bytes{{{of_pods}.*}} (\S+)", text)
    assert {(what, name): float(value) / build.MIB for what, name, value in its} == {
        ("budget", "tenant/main"): 1500,
        ("over_budget", "tenant/main"): 100,
        ("budget", "kai/main"): 2000,
        ("over_budget", "kai/main"): 500,
    }
    assert set(re.findall(rf'budget_invalid{{{of_pods},reason="(\w+)"}} 1.0', text)) == {
        ("idle/main", "no_gpu"),
        ("much/main", "bad_budget"),
        ("huge/main", "above_gpu"),
    }


def test_kubelet_lists_containers_in_the_declared_messages(cluster: Cluster, core: CoreV1Api, namespace: str) -> None:
    core.create_namespaced_pod(namespace, pods.pod("plain"))

    eventually(
        lambda: kubelet.read_devices(cluster.pod_resources).get((namespace, "plain", "main")) == {},
        "the container without a device is listed",
        within_s=30,
    )
