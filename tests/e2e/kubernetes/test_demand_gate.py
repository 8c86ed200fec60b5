"""The demand gate on a real cluster, through the whole chain: one Deployment is scaled, another is refused by RBAC."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from kubernetes.client import AppsV1Api, CoreV1Api, RbacAuthorizationV1Api

import deploy
from exporter.evidence.demand_gate import ANNOTATION, NODE_ANNOTATION
from gpuwarden import cgroup
from remediator.actuators.deployments import DeploymentActuator
from remediator.remedies.guards import Act, Order
from testbed.docker_engine import NoEngine
from testbed.gpu_simulator import Slot
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from testbed.stage import Stage, stage
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.needs_parts, pytest.mark.slow]

GPU: Final = "GPU-sim-shared"
GIB: Final = 2**30
NEEDED_MIB: Final = 9 * 1024
MANIFESTS: Final = Path(deploy.__file__).parent / "kubernetes"
GROUP: Final = "rbac.authorization.k8s.io"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The stage of the cluster's node, a process that holds GPU memory, and two Deployments that are off."""

    stage: Stage
    hog: int
    core: CoreV1Api
    apps: AppsV1Api
    namespace: str

    def hold(self, pid: int, gib: float) -> None:
        gpus = self.stage.gpus
        gpus.held = {GPU: {**gpus.held.get(GPU, {}), pid: int(gib * GIB)}}

    def replicas(self, name: str) -> int:
        return int(self.apps.read_namespaced_deployment(name, self.namespace).spec.replicas)

    def pid(self) -> int | None:
        """A process of the only pod, if it runs."""
        found = self.core.list_namespaced_pod(self.namespace).items
        ids = [each.container_id for pod in found for each in pod.status.container_statuses or () if each.container_id]
        groups = cgroup.containers(cgroup.ROOT)
        running = [groups[each] for name in ids if (each := name.rpartition("/")[2]) in groups]
        return min(cgroup.processes(running[0]), default=None) if running else None

    def journal(self, name: str) -> str:
        entries = self.stage.journal(f"{self.namespace}/{name}")
        return "\n".join(f"{each.act} {each.what}: {each.message}" for each in entries)

    def until(self, holds: Callable[[], object], what: str, within_s: float = 90) -> None:
        eventually(holds, what, within_s=within_s, log=self.tail)

    def tail(self) -> str:
        logs = [self.stage.chain.log_tail(each) for each in ("exporter", "execute")]
        return "\n".join([self.journal("painter"), self.journal("stranger"), *logs])


def make_account(cluster: Cluster, namespace: str, folder: Path) -> Path:
    """An account with the rights of the manifests, which names one Deployment. Returns its kubeconfig."""
    core, rbac = CoreV1Api(cluster.api()), RbacAuthorizationV1Api(cluster.api())
    base = list(yaml.safe_load_all((MANIFESTS / "base/account.yaml").read_text()))
    (role,) = (each for each in yaml.safe_load_all((MANIFESTS / "demand-gate/role.yaml").read_text())
               if each["kind"] == "Role")  # fmt: skip
    role["rules"][0]["resourceNames"] = ["painter"]
    (rules,) = (
        each["rules"] for each in base if each["kind"] == "ClusterRole" and each["metadata"]["name"] == "gpuwarden-node"
    )
    name = f"{namespace}-gate"
    bound: dict[str, Any] = {
        "metadata": {"name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }
    core.create_namespaced_service_account(namespace, {"metadata": {"name": name}})
    rbac.create_cluster_role({"metadata": {"name": name}, "rules": rules})
    rbac.create_cluster_role_binding({**bound, "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": name}})
    rbac.create_namespaced_role(namespace, {"metadata": {"name": name}, "rules": role["rules"]})
    rbac.create_namespaced_role_binding(
        namespace, {**bound, "roleRef": {"apiGroup": GROUP, "kind": "Role", "name": name}}
    )
    token = core.create_namespaced_service_account_token(name, namespace, {"spec": {"expirationSeconds": 3600}})
    path = folder / "kubeconfig"
    server = {"server": cluster.url, "certificate-authority": str(cluster.folder / "pki" / "ca.crt")}
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "c", "cluster": server}],
                "users": [{"name": "u", "user": {"token": token.status.token}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    return path


@pytest.fixture
def scene(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Scene]:
    rbac, name = RbacAuthorizationV1Api(cluster.api()), f"{namespace}-gate"
    apps = AppsV1Api(cluster.api())
    for each in ("painter", "stranger"):
        annotations = {ANNOTATION: str(NEEDED_MIB), NODE_ANNOTATION: cluster.node}
        apps.create_namespaced_deployment(namespace, pods.deployment(each, annotations=annotations))
    with ExitStack() as stack:
        kubeconfig = make_account(cluster, namespace, tmp_path)
        stack.callback(rbac.delete_cluster_role, name)
        stack.callback(rbac.delete_cluster_role_binding, name)
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        for key, value in {
            "KUBECONFIG": kubeconfig,
            "GPUWARDEN_EXPORTER_PODS": "api",
            "GPUWARDEN_EXPORTER_NODE_NAME": cluster.node,
            "GPUWARDEN_EXPORTER_DEMAND_GATE_NAMESPACES": namespace,
            "GPUWARDEN_REMEDIATOR_DEMAND_GATE_NAMESPACES": namespace,
            "GPUWARDEN_EXPORTER_DEMAND_GATE_AFTER_S": 3,
            "GPUWARDEN_EXPORTER_DEMAND_GATE_IDLE_S": 3,
            "GPUWARDEN_EXPORTER_DEMAND_GATE_MIN_S": 8,
            "GPUWARDEN_EXPORTER_VRAM_RETURN_S": 2,
        }.items():
            patched.setenv(key, str(value))
        (tmp_path / "work").mkdir()
        slots = [Slot(worker="hog", gpus=(GPU,))]
        its = stack.enter_context(
            stage(tmp_path / "work", NoEngine(reason="pods"), slots, armed=False, vram_cooldown_s=1.0)
        )
        hog = stack.enter_context(subprocess.Popen(["sleep", "infinity"]))
        stack.callback(hog.kill)
        scene = Scene(stage=its, hog=hog.pid, core=CoreV1Api(cluster.api()), apps=apps, namespace=namespace)
        scene.hold(hog.pid, 12)
        yield scene


@pytest.mark.behaviour("C7")
@pytest.mark.behaviour("C9")
def test_named_deployment_is_scaled_up_and_down_and_another_is_refused(scene: Scene) -> None:
    order = Order(act=Act.ARM, at=time.time(), who="a test", reason="", remedy="scale_tenant")
    scene.stage.ledger.orders.give(order)
    off = "count(gpuwarden_on_demand_state_seconds >= 8) == 2"
    scene.until(lambda: scene.stage.chain.query(off), "both have been off for the minimum time")
    assert (scene.replicas("painter"), scene.replicas("stranger")) == (0, 0)

    scene.hold(scene.hog, 1)
    scene.until(lambda: scene.replicas("painter") == 1, "the named one is scaled up")
    scene.until(lambda: "scale_forbidden" in scene.journal("stranger"), "the ledger shows the refusal")
    assert 'deployments.apps "stranger" is forbidden' in scene.journal("stranger")
    assert "did" not in scene.journal("stranger")
    scene.until(scene.pid, "its pod runs")
    pid = scene.pid()
    assert pid is not None
    scene.hold(pid, 9)
    scene.until(lambda: "decided close: fixed" in scene.journal("painter"), "its episode is closed")

    scene.hold(scene.hog, 6)
    scene.until(lambda: scene.replicas("painter") == 0, "it is scaled down")
    scene.until(lambda: scene.journal("painter").count("decided close: fixed") == 2, "its second episode is closed")
    assert "idle for" in scene.journal("painter")
    assert scene.replicas("stranger") == 0


@pytest.mark.parametrize(("replicas", "may"), [(0, True), (1, True), (2, False)])
def test_deployment_with_several_replicas_is_not_managed(
    cluster: Cluster, namespace: str, replicas: int, may: bool
) -> None:
    apps = AppsV1Api(cluster.api())
    apps.create_namespaced_deployment(namespace, pods.deployment("painter"))
    apps.patch_namespaced_deployment_scale("painter", namespace, {"spec": {"replicas": replicas}})

    found = DeploymentActuator(cluster.api(), namespaces=[namespace]).look(f"{namespace}/painter")

    assert found is not None
    assert (found.managed, found.running) == (may, replicas > 0)
