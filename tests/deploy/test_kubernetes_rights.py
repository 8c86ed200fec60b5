"""The rights in deploy/kubernetes: each one has a use, and without it that use is refused."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from kubernetes.client import ApiClient, AppsV1Api, Configuration, CoreV1Api, RbacAuthorizationV1Api

import deploy
from exporter.sources.containers.deployments import Deployments
from gpuwarden.kube.api import KubeError
from gpuwarden.kube.pods import ALONE_LABEL, MANAGED_LABEL
from remediator.actuators import NotAllowedError
from remediator.actuators.deployments import DeploymentActuator
from remediator.actuators.kubernetes import KubernetesActuator
from remediator.clients.nodes import Nodes
from remediator.seats import Node
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from tests.waiting import eventually

MANIFESTS: Final = Path(deploy.__file__).parent / "kubernetes"
RESOURCE: Final = "gpuwarden/vram-mib"

Right = tuple[str, str]
Use = Callable[[Any, str, str, str], object]


def _rules(file: str, kind: str, name: str) -> list[dict[str, Any]]:
    every = yaml.safe_load_all((MANIFESTS / file).read_text())
    (rules,) = (each["rules"] for each in every if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return list(rules)


def _rights(rules: list[dict[str, Any]]) -> set[Right]:
    return {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


OF_CLUSTER: Final = [
    *_rules("base/account.yaml", "ClusterRole", "gpuwarden-node"),
    *_rules("taint/role.yaml", "ClusterRole", "gpuwarden-taint"),
]
OF_NAMESPACE: Final = [
    *_rules("evict/role.yaml", "Role", "gpuwarden-evict"),
    *_rules("demand-gate/role.yaml", "Role", "gpuwarden-demand-gate"),
]
ON_DEMAND: Final = "painter"
"""The Deployment that the role of the demand gate names."""

RIGHTS: Final = _rights([*OF_CLUSTER, *OF_NAMESPACE])
USES: Final[dict[Right, Use]] = {
    ("nodes", "get"): lambda api, node, _space, _handle: Nodes(api, RESOURCE).read(node),
    ("nodes", "watch"): lambda api, node, _space, _handle: watch(api, node),
    ("nodes", "patch"): lambda api, node, _space, _handle: taint(api, node),
    ("nodes/status", "patch"): lambda api, node, _space, _handle: Nodes(api, RESOURCE).advertise(node, None),
    ("pods", "list"): lambda api, node, _space, _handle: Nodes(api, RESOURCE).list_budgets(node),
    ("pods", "get"): lambda api, node, space, handle: actuator(api, node, space).look(handle),
    ("pods/eviction", "create"): lambda api, node, space, handle: actuator(api, node, space).check_stop(handle),
    ("deployments", "list"): lambda api, node, space, _handle: on_demand(api, node, space),
    ("deployments/scale", "get"): lambda api, _node, space, _handle: gate(api, space).look(f"{space}/{ON_DEMAND}"),
    ("deployments/scale", "patch"): lambda api, _node, space, _handle: scale(api, space),
}

NEEDED_FIRST: Final[dict[Right, Right]] = {
    ("pods/eviction", "create"): ("pods", "get"),
    ("nodes", "patch"): ("nodes", "get"),
    ("deployments/scale", "patch"): ("deployments/scale", "get"),
}


def taint(api: Any, node: str) -> None:
    """Taint a node, and remove the taint."""
    for tainted in (True, False):
        Nodes(api, RESOURCE).set_taint(node, tainted=tainted)


def watch(api: Any, node: str) -> None:
    """Watch a node for a second, from any state."""
    Nodes(api, RESOURCE).wait_for_change(Node(name=node), wait_s=1)


def on_demand(api: Any, node: str, namespace: str) -> None:
    """List Deployments as the exporter does."""
    _, health = Deployments(api, node=node, namespaces=[namespace]).read({})
    if health.message is not None:
        raise KubeError(health.message)


def gate(api: Any, namespace: str) -> DeploymentActuator:
    return DeploymentActuator(api, namespaces=[namespace])


def scale(api: Any, namespace: str) -> None:
    """Scale the Deployment up and down."""
    gate(api, namespace).start(f"{namespace}/{ON_DEMAND}")
    gate(api, namespace).stop(f"{namespace}/{ON_DEMAND}", grace_s=1)


def actuator(api: Any, node: str, namespace: str) -> KubernetesActuator:
    return KubernetesActuator(api, node=node, namespaces=[namespace])


@pytest.fixture
def core(cluster: Cluster) -> CoreV1Api:
    return CoreV1Api(cluster.api())


@pytest.fixture
def tenant(cluster: Cluster, core: CoreV1Api, namespace: str) -> str:
    """A running pod that may be evicted; returns the handle of its container."""
    manifest = pods.pod("tenant", labels={MANAGED_LABEL: "true", ALONE_LABEL: "true"})
    core.create_namespaced_pod(namespace, manifest)
    cluster.wait(lambda: core.read_namespaced_pod("tenant", namespace).status.phase == "Running", "running pod")
    uid = core.read_namespaced_pod("tenant", namespace).metadata.uid
    return f"{namespace}/Pod/tenant tenant {uid} main"


@pytest.fixture
def account(cluster: Cluster, core: CoreV1Api, namespace: str) -> Iterator[Callable[[set[Right]], Any]]:
    """Make an account with these rights; returns a client of the API."""
    rbac = RbacAuthorizationV1Api(cluster.api())
    made: list[str] = []

    def rules(of: list[dict[str, Any]], rights: set[Right]) -> list[dict[str, Any]]:
        return [
            {"apiGroups": rule["apiGroups"], "resources": [resource], "verbs": [verb],
             **({"resourceNames": [ON_DEMAND]} if "resourceNames" in rule else {})}
            for rule in of for resource in rule["resources"] for verb in rule["verbs"] if (resource, verb) in rights
        ]  # fmt: skip

    def make(rights: set[Right]) -> Any:
        name = f"{namespace}-{len(made)}"
        made.append(name)
        core.create_namespaced_service_account(namespace, {"metadata": {"name": name}})
        bound: dict[str, Any] = {
            "metadata": {"name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
        of = {"apiGroup": "rbac.authorization.k8s.io", "name": name}
        rbac.create_cluster_role({"metadata": {"name": name}, "rules": rules(OF_CLUSTER, rights)})
        rbac.create_cluster_role_binding({**bound, "roleRef": {**of, "kind": "ClusterRole"}})
        rbac.create_namespaced_role(namespace, {"metadata": {"name": name}, "rules": rules(OF_NAMESPACE, rights)})
        rbac.create_namespaced_role_binding(namespace, {**bound, "roleRef": {**of, "kind": "Role"}})
        token = core.create_namespaced_service_account_token(name, namespace, {"spec": {"expirationSeconds": 600}})
        configuration = Configuration(host=cluster.url)
        configuration.ssl_ca_cert = str(cluster.folder / "pki" / "ca.crt")
        configuration.api_key["authorization"] = f"Bearer {token.status.token}"
        return ApiClient(configuration)

    yield make
    for name in made:
        rbac.delete_cluster_role_binding(name)
        rbac.delete_cluster_role(name)


def test_each_right_of_the_manifests_has_a_use() -> None:
    assert USES.keys() == RIGHTS


def test_webhook_may_only_list_pods() -> None:
    assert _rights(_rules("base/account.yaml", "ClusterRole", "gpuwarden-remediator")) == {("pods", "list")}


@pytest.mark.kube
@pytest.mark.slow
@pytest.mark.behaviour("C9")
def test_pending_pods_need_the_right_of_the_webhook(
    cluster: Cluster, namespace: str, account: Callable[[set[Right]], Any]
) -> None:
    def pending(api: Any, *_: str) -> object:
        return Nodes(api, RESOURCE).pending_pods()

    eventually(partial(works, pending, account({("pods", "list")}), cluster.node, namespace, ""), "pods are listed")
    assert not works(pending, account(set()), cluster.node, namespace, "")


@pytest.mark.kube
@pytest.mark.slow
@pytest.mark.behaviour("C9")
def test_each_use_needs_its_right(
    cluster: Cluster, namespace: str, tenant: str, account: Callable[[set[Right]], Any]
) -> None:
    AppsV1Api(cluster.api()).create_namespaced_deployment(namespace, pods.deployment(ON_DEMAND))
    without = {right: account(RIGHTS - {right}) for right in RIGHTS}
    without["none", ""] = account(RIGHTS)

    for missing, api in without.items():
        needed = {right: {right, NEEDED_FIRST.get(right, right)} for right in USES}
        for right, use in USES.items():
            if missing not in needed[right]:
                eventually(partial(works, use, api, cluster.node, namespace, tenant), f"{right} without {missing}")
        if missing in USES:
            with pytest.raises((KubeError, NotAllowedError), match="403"):
                USES[missing](api, cluster.node, namespace, tenant)


def works(use: Use, api: Any, node: str, namespace: str, handle: str) -> bool:
    """Whether the account may do it; a new role is known to the API server a moment later."""
    try:
        use(api, node, namespace, handle)
    except (KubeError, NotAllowedError) as error:
        if "403" not in str(error):
            raise
        return False
    return True
