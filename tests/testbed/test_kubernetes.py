"""The cluster of the tests: pods run, programs restart, and nothing stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes.client import CoreV1Api

from deploy.standalone.stack import CHECKOUT
from gpuwarden.kube import api
from testbed.kubernetes import pods, programs
from testbed.kubernetes.cluster import Cluster
from testbed.kubernetes.node import hierarchies
from tests.waiting import eventually

CALL_API = """
from gpuwarden.kube import api
from kubernetes.client import CoreV1Api
with api.request("list pods"):
    CoreV1Api(api.connect()).list_namespaced_pod("default")
"""


@pytest.fixture
def core(cluster: Cluster) -> CoreV1Api:
    return CoreV1Api(cluster.api())


@pytest.mark.kube
def test_pod_runs_the_project_with_its_own_service_account(cluster: Cluster, core: CoreV1Api, namespace: str) -> None:
    core.create_namespaced_pod(namespace, pods.with_project(pods.pod("asks", [pods.python(), "-c", CALL_API])))

    cluster.wait(lambda: core.read_namespaced_pod("asks", namespace).status.phase in ("Failed", "Succeeded"), "its end")

    said = core.read_namespaced_pod_log("asks", namespace)
    assert f'cannot list pods: HTTP 403: pods is forbidden: User "system:serviceaccount:{namespace}:default"' in said


@pytest.mark.kube
@pytest.mark.slow
def test_restarted_programs_keep_the_pods(cluster: Cluster, core: CoreV1Api, namespace: str) -> None:
    core.create_namespaced_pod(namespace, pods.pod("stays"))
    cluster.wait(lambda: core.read_namespaced_pod("stays", namespace).status.phase == "Running", "running pod")
    before = {name: cluster.pid(name) for name in ("kube-apiserver", "kubelet")}

    for name in before:
        cluster.restart(name)
    cluster.wait_until_ready()

    assert all(cluster.pid(name) != pid for name, pid in before.items())
    (status,) = core.read_namespaced_pod("stays", namespace).status.container_statuses
    assert status.state.running
    assert status.restart_count == 0


@pytest.mark.kube
@pytest.mark.slow
def test_stopped_api_is_a_clear_error(cluster: Cluster) -> None:
    cluster.end("kube-apiserver")
    try:
        with pytest.raises(api.KubeError) as raised, api.request("list nodes"):
            CoreV1Api(cluster.api()).list_node()
    finally:
        cluster.begin("kube-apiserver")
        cluster.wait_until_ready()

    assert raised.value.is_temporary
    assert "cannot list nodes: no answer from the Kubernetes API" in str(raised.value)


@pytest.mark.kube
@pytest.mark.slow
def test_killed_start_leaves_no_process_and_the_next_start_no_group(tmp_path: Path) -> None:
    def start() -> "subprocess.Popen[str]":
        argv = [sys.executable, "-m", "testbed.kubernetes", "start", str(tmp_path / "cluster")]
        return subprocess.Popen(argv, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)

    def groups() -> list[Path]:
        every = (hierarchy / f"gpuwarden-kube-{killed.pid}" for hierarchy in hierarchies())
        return [group for group in every if group.exists()]

    with start() as killed:
        eventually((tmp_path / "cluster/programs/etcd.json").exists, "etcd is started", within_s=60)
        its = Cluster(tmp_path / "cluster")
        pid = its.pid("etcd")
        killed.kill()

    eventually(lambda: not Path(f"/proc/{pid}").exists(), "etcd is gone")
    assert groups()
    with start() as ended:
        eventually(lambda: not groups(), "the next start removed the groups", within_s=60)
        ended.terminate()
        assert ended.wait(timeout=60) == 0
    assert [each.name for each in (tmp_path / "cluster").iterdir()] == ["log"]


def test_tests_on_a_cluster_are_not_selected_without_its_programs() -> None:
    env = {name: value for name, value in os.environ.items() if name != programs.VARIABLE}
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", __file__]

    done = subprocess.run(argv, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False, timeout=60)

    assert "Kubernetes: none, its tests are not selected: KUBEBUILDER_ASSETS is not set" in done.stdout
    assert "test_variable_without_programs" in done.stdout
    assert "test_pod_runs" not in done.stdout


def test_variable_without_programs_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "etcd").touch(mode=0o755)

    with pytest.raises(programs.NoClusterError, match=r"KUBEBUILDER_ASSETS=\S+ has no kube-apiserver, kube-scheduler"):
        programs.find({"KUBEBUILDER_ASSETS": str(tmp_path)})
    with pytest.raises(programs.NoClusterError, match="KUBEBUILDER_ASSETS is not set"):
        programs.find({})
