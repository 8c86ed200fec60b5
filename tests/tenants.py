"""Pods of one namespace that opted in, for tests of evictions."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubernetes import client

from gpuwarden.kube import api
from gpuwarden.kube.api import KubeError
from gpuwarden.kube.pods import Handle
from remediator.actuators import ActuatorError
from remediator.actuators.kubernetes import KubernetesActuator
from remediator.plan import ContainerState
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from tests.waiting import eventually

MANAGED: Final = {"gpuwarden/managed": "true"}
BUDGETS: Final = "poddisruptionbudgets"
READS: Final = {"resources": ["pods"], "verbs": ["get", "list"]}
EVICTS: Final = {"resources": ["pods/eviction"], "verbs": ["create"]}


@dataclass
class Tenants:
    """The pods of one namespace."""

    cluster: Cluster
    namespace: str

    def __post_init__(self) -> None:
        self.api = self.cluster.api()
        self.core = client.CoreV1Api(self.api)
        self.policy = "v1" if self.cluster.version >= (1, 22) else "v1beta1"

    def actuator(self, **changed: Any) -> KubernetesActuator:
        options = {"node": self.cluster.node, "namespaces": [self.namespace], **changed}
        return KubernetesActuator(options.pop("connection", self.api), **options)

    def workload(
        self,
        kind: str,
        name: str,
        command: Sequence[str] = pods.FOREVER,
        *,
        replicas: int = 1,
        limits: Mapping[str, object] | None = None,
        grace_s: int = 0,
    ) -> None:
        """Create a Deployment or a StatefulSet, whose pods opted in."""
        its = pods.pod(name, command, limits=limits, labels={"app": name, **MANAGED})
        template = {"metadata": its["metadata"], "spec": its["spec"] | {"restartPolicy": "Always"}}
        template["spec"]["terminationGracePeriodSeconds"] = grace_s
        spec = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
        if kind == "StatefulSet":
            spec["serviceName"] = name
        apps = client.AppsV1Api(self.api)
        create = apps.create_namespaced_deployment if kind == "Deployment" else apps.create_namespaced_stateful_set
        create(self.namespace, {"metadata": {"name": name}, "spec": spec})

    def pod(self, name: str, *, labels: dict[str, str]) -> None:
        self.core.create_namespaced_pod(self.namespace, pods.pod(name, labels=labels))

    def named(self, name: str) -> list[Any]:
        """The pods whose names start so, which are not being deleted."""
        found = self.core.list_namespaced_pod(self.namespace).items
        return [each for each in found if each.metadata.name.startswith(name) and not each.metadata.deletion_timestamp]

    def running(self, name: str, container: str = "main") -> ContainerState:
        """Wait until a pod runs, and read its container."""
        works, found = self.actuator(), []

        def runs() -> bool:
            for each in self.named(name):
                handle = Handle.of(f"{self.namespace}/{each.metadata.name}/{container}", f"{each.metadata.uid}@")
                if each.status.phase == "Running" and (state := works.look(str(handle))) is not None:
                    found.append(state)
            return bool(found)

        eventually(patient(runs), f"{name} runs", within_s=60, log=self._events)
        return found[-1]

    def _events(self) -> str:
        """Why the pods do not run."""
        found = self.core.list_namespaced_event(self.namespace).items
        return "\n".join(f"{each.involved_object.name}: {each.message}" for each in found)

    def limited(self, folder: Path, *rules: dict[str, list[str]], token: str = "") -> Any:
        """A client of a service account that has only these rights in the namespace, or another token."""
        rbac = client.RbacAuthorizationV1Api(self.api)
        role = {"metadata": {"name": "evicts"}, "rules": [{"apiGroups": [""], **each} for each in rules]}
        rbac.create_namespaced_role(self.namespace, role)
        subject = {"kind": "ServiceAccount", "name": "default", "namespace": self.namespace}
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "evicts"}
        binding = {"metadata": {"name": "evicts"}, "subjects": [subject], "roleRef": ref}
        rbac.create_namespaced_role_binding(self.namespace, binding)
        request = {"spec": {"audiences": None, "expirationSeconds": 3600}}
        answer = self.core.create_namespaced_service_account_token("default", self.namespace, request)
        found = json.loads(self.cluster.kubeconfig.read_text())
        found["users"][0]["user"] = {"token": token or answer.status.token}
        (folder / "kubeconfig").write_text(json.dumps(found))
        return api.connect(folder / "kubeconfig")

    def protect(self, name: str, *, at_least: int = 1) -> None:
        """Set a PodDisruptionBudget, and wait until it counts."""
        budget = {
            "apiVersion": f"policy/{self.policy}",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": name},
            "spec": {"minAvailable": at_least, "selector": {"matchLabels": {"app": name}}},
        }
        custom, where = client.CustomObjectsApi(self.api), ("policy", self.policy, self.namespace, BUDGETS)
        custom.create_namespaced_custom_object(*where, budget)

        def counts() -> bool:
            status = custom.get_namespaced_custom_object(*where, name).get("status") or {}
            return status.get("currentHealthy") == at_least

        eventually(counts, "the budget counts", within_s=30)

    def unprotect(self, name: str) -> None:
        where = ("policy", self.policy, self.namespace, BUDGETS, name)
        client.CustomObjectsApi(self.api).delete_namespaced_custom_object(*where)


def patient(holds: Callable[[], bool]) -> Callable[[], bool]:
    """A check that is false while a pod starts or ends."""

    def check() -> bool:
        try:
            return holds()
        except (ActuatorError, KubeError):
            return False

    return check


def pod_settings(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Environment of an exporter and an executor that are responsible for the pods of a namespace."""
    both = {"NODE_NAME": cluster.node, "POD_NAMESPACES": namespace}
    return {
        "KUBECONFIG": str(cluster.kubeconfig),
        "GPUWARDEN_EXPORTER_PODS": "api",
        "GPUWARDEN_EXPORTER_POD_RESOURCES": "none",
        **{f"GPUWARDEN_EXPORTER_{name}": value for name, value in both.items()},
        **{f"GPUWARDEN_REMEDIATOR_{name}": value for name, value in both.items()},
    }
