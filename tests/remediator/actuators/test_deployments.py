"""The actuator of Deployments on a real cluster, where another writer is faster."""

from typing import Any

import pytest
from kubernetes.client import AppsV1Api

from remediator.actuators import ActuatorError
from remediator.actuators.deployments import DeploymentActuator
from remediator.plan import ContainerState
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster

pytestmark = [pytest.mark.kube, pytest.mark.behaviour("C7")]

NAME = "painter"


class Overtaken(DeploymentActuator):
    """Another writer patches the Deployment after each of the first reads."""

    def __init__(self, cluster: Cluster, namespace: str, *patches: dict[str, Any]) -> None:
        super().__init__(cluster.api(), namespaces=[namespace])
        self.apps, self.namespace, self.patches = AppsV1Api(cluster.api()), namespace, list(patches)
        self.apps.create_namespaced_deployment(namespace, pods.deployment(NAME))

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:
        found = super().look(handle, cgroup=cgroup)
        if self.patches:
            self.apps.patch_namespaced_deployment(NAME, self.namespace, self.patches.pop(0))
        return found

    def replicas(self) -> int:
        return int(self.apps.read_namespaced_deployment(NAME, self.namespace).spec.replicas)


def test_deployment_that_another_writer_changed_is_scaled(cluster: Cluster, namespace: str) -> None:
    notes = [{"metadata": {"annotations": {"note": str(number)}}} for number in range(2)]
    gate = Overtaken(cluster, namespace, *notes)

    gate.start(f"{namespace}/{NAME}")

    assert (gate.replicas(), gate.patches) == (1, [])


def test_replicas_that_a_person_set_meanwhile_stay(cluster: Cluster, namespace: str) -> None:
    gate = Overtaken(cluster, namespace, {"spec": {"replicas": 3}})

    with pytest.raises(ActuatorError, match="is not scaled: it wants 3 replicas"):
        gate.start(f"{namespace}/{NAME}")

    assert gate.replicas() == 3
