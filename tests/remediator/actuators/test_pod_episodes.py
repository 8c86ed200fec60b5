"""Episodes about pods: a real ledger, a real cluster, and evidence that the server in a pod hangs."""

import time
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.evidence import ServerFacts
from gpuwarden.queue import JobStore
from remediator.actuators.kubernetes import KubernetesActuator
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor.executor import Clients, Executor, LoopSettings
from remediator.ledger.ledger import Ledger
from remediator.plan import ContainerState
from testbed.kubernetes.cluster import Cluster
from tests.remediator import builders as build
from tests.remediator.builders import HOST, server_alert
from tests.remediator.executor.builders import PACE, arm, history, journal, turn
from tests.remediator.world import World
from tests.tenants import READS, Tenants
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.behaviour("C3")]


class Witness(World):
    """An exporter in whose evidence the server of a pod hangs while its pod runs."""

    def __init__(self, state: ContainerState) -> None:
        super().__init__()
        self.state = state

    def container_evidence(self, container: str, *, host: str) -> ServerFacts:
        container_id = self.state.incarnation.split("@")[1]
        return build.server(
            host=host, container=container, container_kind="kubernetes", container_id=container_id,
            container_incarnation=self.state.incarnation, gpus=["GPU-0"], gpu_pids={"GPU-0": []},
        )  # fmt: skip


def executor(
    ledger: Ledger,
    store: JobStore,
    state: ContainerState,
    actuator: KubernetesActuator,
    *,
    settings: LoopSettings = PACE,
) -> Executor:
    """An armed executor with an alert about the pod in its inbox."""
    arm(ledger)
    alert = server_alert(container=state.name, incarnation=state.incarnation)
    ledger.inbox.accept([alert], [], now=time.time())
    clients: Any = Clients(exporter=Witness(state), queue=BuiltinQueue(store), actuators={"kubernetes": actuator})  # type: ignore[arg-type]
    return Executor(ledger, host=HOST, clients=clients, settings=settings)


@pytest.fixture
def tenants(cluster: Cluster, namespace: str) -> Tenants:
    return Tenants(cluster, namespace)


@pytest.mark.behaviour("C9")
def test_namespace_that_was_not_listed_is_refused_in_the_ledger(
    ledger: Ledger, store: JobStore, tenants: Tenants
) -> None:
    tenants.workload("Deployment", "web")
    state = tenants.running("web")

    turn(executor(ledger, store, state, tenants.actuator(namespaces=["elsewhere"])), ledger)

    found = history(ledger)
    assert (found.outcome, found.reason) == ("refused", "not_managed")
    assert f"--pod-namespaces does not list its namespace {tenants.namespace}" in (found.message or "")


@pytest.mark.behaviour("C9")
def test_account_without_the_right_waits_and_evicts_once_it_has_the_right(
    ledger: Ledger, store: JobStore, tenants: Tenants, tmp_path: Path
) -> None:
    tenants.workload("Deployment", "web")
    state = tenants.running("web")
    forbidden = executor(ledger, store, state, tenants.actuator(connection=tenants.limited(tmp_path, READS)))

    turn(forbidden, ledger)

    assert history(ledger).wait_reason == "eviction_forbidden"
    assert "pods/eviction" in history(ledger).entries[-1].message
    assert len(tenants.named("web")) == 1
    granted = executor(ledger, store, state, tenants.actuator())

    def is_over() -> bool:
        turn(granted, ledger)
        return history(ledger).outcome is not None

    eventually(is_over, "the pod is replaced", within_s=60, log=lambda: str(journal(ledger)))
    assert history(ledger).outcome == "fixed"
    assert [each.metadata.uid for each in tenants.named("web")] != [state.incarnation.partition("@")[0]]
