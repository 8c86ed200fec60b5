"""The actuator of pods on a real cluster: uid, disruption budgets, rights, owners, and an API that stops."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.kube.api import KubeError
from gpuwarden.kube.pods import Handle
from remediator.actuators import ActuatorError, NotAllowedError
from remediator.actuators.kubernetes import KubernetesActuator
from remediator.plan import ContainerState
from remediator.reasons import Reason
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from tests.tenants import EVICTS, MANAGED, READS, Tenants, patient
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.behaviour("C3")]

GRACE_S = 10.0


@pytest.fixture
def tenants(cluster: Cluster, namespace: str) -> Tenants:
    return Tenants(cluster, namespace)


def ends(actuator: KubernetesActuator, state: ContainerState) -> None:
    eventually(
        patient(lambda: actuator.look(state.handle, cgroup=state.cgroup) is None), "the pod is gone", within_s=60
    )


@pytest.mark.parametrize("by", ["evict", "delete"])
def test_pod_is_ended_by_its_uid_and_its_controller_makes_the_next(tenants: Tenants, by: Any) -> None:
    tenants.workload("Deployment", "web", replicas=2)
    eventually(lambda: len(tenants.named("web")) == 2, "both pods")
    state, works = tenants.running("web"), tenants.actuator(by=by)
    others = works.list_others(state.handle)
    assert state.managed
    assert state.pids
    assert others is not None
    assert len(others) == 1

    works.check_stop(state.handle)
    works.stop(state.handle, grace_s=GRACE_S)

    ends(works, state)
    found: list[ContainerState] = []

    def is_ready() -> bool:
        new = works.find_successor(state.handle, others=others)
        found[:] = [] if new is None else [new]
        return new is not None and new.running

    eventually(is_ready, "the next pod is ready", within_s=60)
    assert found[0].incarnation not in {*others, state.incarnation.partition("@")[0]}
    assert state.handle.startswith(f"{tenants.namespace}/ReplicaSet/web-")


def test_pod_of_the_same_name_is_not_evicted_by_an_old_order(tenants: Tenants) -> None:
    tenants.workload("StatefulSet", "llm")
    old, works = tenants.running("llm-0"), tenants.actuator()
    works.stop(old.handle, grace_s=GRACE_S)
    ends(works, old)
    eventually(lambda: len(tenants.named("llm-0")) == 1, "the next pod", within_s=60)
    new = tenants.running("llm-0")
    assert new.name == old.name
    assert new.incarnation != old.incarnation

    works.check_stop(old.handle)
    works.stop(old.handle, grace_s=GRACE_S)

    assert works.look(old.handle, cgroup=old.cgroup) is None
    assert [each.metadata.uid for each in tenants.named("llm-0")] == [new.incarnation.partition("@")[0]]
    # The API itself refuses a wrong uid, also if the pod changed after it was read.
    pod = tenants.core.read_namespaced_pod("llm-0", tenants.namespace).to_dict() | {"spec": {}}
    handle = Handle.parse(old.handle)
    assert handle is not None
    with pytest.raises(KubeError) as refused:
        works._end(handle, pod, grace_s=1)
    assert refused.value.status == 409
    works.stop(new.handle, grace_s=GRACE_S)
    ends(works, new)


def test_disruption_budget_delays_an_eviction_with_its_reason_and_not_a_deletion(tenants: Tenants) -> None:
    tenants.workload("Deployment", "web")
    state, works = tenants.running("web"), tenants.actuator()
    tenants.protect("web")

    with pytest.raises(NotAllowedError) as held:
        works.check_stop(state.handle)
    with pytest.raises(KubeError, match="disruption budget"):
        works.stop(state.handle, grace_s=GRACE_S)

    assert held.value.reason is Reason.DISRUPTION_BUDGET
    assert "The disruption budget web needs 1 healthy pods and has 1 currently" in str(held.value)
    tenants.actuator(by="delete").check_stop(state.handle)
    assert [each.metadata.uid for each in tenants.named("web")] == [state.incarnation.partition("@")[0]]
    tenants.unprotect("web")

    def is_allowed() -> bool:
        try:
            works.check_stop(state.handle)
        except NotAllowedError:
            return False
        return True

    eventually(is_allowed, "the eviction is allowed", within_s=30)
    assert [each.metadata.uid for each in tenants.named("web")] == [state.incarnation.partition("@")[0]]


def test_pod_that_changed_since_it_was_read_is_not_deleted(tenants: Tenants) -> None:
    tenants.workload("Deployment", "web")
    state, works = tenants.running("web"), tenants.actuator(by="delete")
    handle = Handle.parse(state.handle)
    assert handle is not None
    pod = works._read(handle)
    assert pod is not None
    tenants.core.patch_namespaced_pod(handle.pod, tenants.namespace, {"metadata": {"annotations": {"a": "b"}}})

    with pytest.raises(KubeError) as refused:
        works._end(handle, pod, grace_s=1)

    assert refused.value.status == 409


@pytest.mark.behaviour("C9")
def test_pod_that_may_not_be_evicted_is_refused_with_a_reason(tenants: Tenants) -> None:
    alone = MANAGED | {"gpuwarden/without-controller": "true"}
    tenants.pod("bare", labels=MANAGED)
    tenants.pod("alone", labels=alone)
    tenants.pod("other", labels={})
    works = tenants.actuator()
    refused = {
        "no controller would replace it": (works, tenants.running("bare")),
        "its label gpuwarden/managed is not true": (works, tenants.running("other")),
        "does not list its namespace": (tenants.actuator(namespaces=["elsewhere"]), tenants.running("alone")),
        f"on node {tenants.cluster.node}, not on node-2": (tenants.actuator(node="node-2"), tenants.running("alone")),
    }
    for why, (actuator, state) in refused.items():
        seen = actuator.look(state.handle)
        assert seen is not None
        assert not seen.managed
        assert why in seen.refusal
        with pytest.raises(ActuatorError, match="may not be evicted"):
            actuator.stop(state.handle, grace_s=GRACE_S)
    state = tenants.running("alone")
    assert works.list_others(state.handle) is None

    works.stop(state.handle, grace_s=GRACE_S)

    ends(works, state)
    assert {each.metadata.name for each in tenants.named("")} == {"bare", "other"}


@pytest.mark.behaviour("C9")
def test_static_pod_is_refused(tenants: Tenants) -> None:
    manifest = pods.pod("static", labels=MANAGED | {"gpuwarden/without-controller": "true"})
    manifest["metadata"]["namespace"] = tenants.namespace
    path = tenants.cluster.manifests / "static.json"
    path.write_text(json.dumps(manifest))
    try:
        state = tenants.running("static")
        assert not state.managed
        assert "static pod" in state.refusal
        with pytest.raises(ActuatorError, match="static pod"):
            tenants.actuator().stop(state.handle, grace_s=GRACE_S)
    finally:
        path.unlink()
    assert len(tenants.named("static")) == 1


@pytest.fixture
def limited(tenants: Tenants, tmp_path: Path) -> Callable[..., Any]:
    """Return a client of a service account that has only these rights in the namespace, or another token."""
    return partial(tenants.limited, tmp_path)


@pytest.mark.behaviour("C9")
def test_account_without_the_right_to_evict_is_a_clear_reason(tenants: Tenants, limited: Callable[..., Any]) -> None:
    tenants.workload("Deployment", "web")
    state, account = tenants.running("web"), limited(READS)

    for by, needs in (("evict", 'resource "pods/eviction"'), ("delete", "needs the verb delete of pods")):
        with pytest.raises(NotAllowedError) as refused:
            tenants.actuator(connection=account, by=by).check_stop(state.handle)
        assert refused.value.reason is Reason.EVICTION_FORBIDDEN
        assert needs in str(refused.value)

    assert len(tenants.named("web")) == 1


@pytest.mark.behaviour("C9")
def test_rights_to_read_and_evict_are_enough_in_their_namespace_only(
    tenants: Tenants, limited: Callable[..., Any]
) -> None:
    tenants.workload("Deployment", "web")
    state = tenants.running("web")
    works = tenants.actuator(connection=limited(READS, EVICTS), namespaces=[tenants.namespace, "kube-system"])

    with pytest.raises(KubeError, match=r"HTTP 403: pods .* is forbidden"):
        works.look("kube-system/ReplicaSet/dns dns-1 u1 main")
    works.check_stop(state.handle)
    works.stop(state.handle, grace_s=GRACE_S)

    ends(works, state)


def test_invalid_token_is_a_clear_reason(tenants: Tenants, limited: Callable[..., Any]) -> None:
    tenants.workload("Deployment", "web")
    state = tenants.running("web")

    with pytest.raises(KubeError, match="HTTP 401: Unauthorized; the token or certificate is not valid"):
        tenants.actuator(connection=limited(READS, token="expired")).look(state.handle)


def test_api_that_stops_during_an_eviction_loses_nothing(tenants: Tenants) -> None:
    tenants.workload("Deployment", "web")
    state, works = tenants.running("web"), tenants.actuator()
    others = works.list_others(state.handle)
    tenants.cluster.end("kube-apiserver")
    try:
        with pytest.raises(KubeError, match="no answer"):
            works.stop(state.handle, grace_s=GRACE_S)
        with pytest.raises(KubeError, match="no answer"):
            works.look(state.handle, cgroup=state.cgroup)
    finally:
        tenants.cluster.begin("kube-apiserver")
        tenants.cluster.wait_until_ready()
    assert works.look(state.handle) == state

    def stopped() -> bool:
        """The executor repeats a stop: the kubelet may not have reached the server yet."""
        try:
            works.stop(state.handle, grace_s=GRACE_S)
        except ActuatorError:
            return False
        return True

    eventually(stopped, "the pod is stopped", within_s=120)

    ends(works, state)
    eventually(lambda: works.find_successor(state.handle, others=others or ()) is not None, "the next pod", within_s=60)


STUBBORN = "trap '' TERM; while :; do sleep 1; done"


def test_processes_of_a_pod_are_those_of_all_its_containers(tenants: Tenants) -> None:
    manifest = pods.pod("both", labels=MANAGED)
    manifest["spec"]["containers"].append(pods.container("side"))
    tenants.core.create_namespaced_pod(tenants.namespace, manifest)
    state, works = tenants.running("both"), tenants.actuator()
    handle = Handle.parse(state.handle)
    assert handle is not None

    def side() -> ContainerState | None:
        return works.look(str(handle._replace(container="side")))

    eventually(patient(lambda: side() is not None), "the other container runs", within_s=30)
    other = side()
    assert other is not None
    assert works.list_pids(state.handle) == state.pids | other.pids
    assert state.pids.isdisjoint(other.pids)


@pytest.mark.parametrize("drained", [False, True])
def test_process_that_ignores_the_end_is_killed_after_the_grace(tenants: Tenants, drained: bool) -> None:
    stubborn = pods.pod("web", ["sh", "-c", STUBBORN])
    stubborn["metadata"]["labels"] = MANAGED | {"gpuwarden/without-controller": "true"}
    stubborn["spec"]["terminationGracePeriodSeconds"] = 600
    tenants.core.create_namespaced_pod(tenants.namespace, stubborn)
    state, works = tenants.running("web"), tenants.actuator()
    if drained:
        tenants.core.delete_namespaced_pod("web", tenants.namespace, grace_period_seconds=600)
        works.check_stop(state.handle)
        pod = tenants.core.read_namespaced_pod("web", tenants.namespace)
        assert pod.metadata.deletion_grace_period_seconds == 600
    began_s = time.monotonic()

    works.stop(state.handle, grace_s=2.0)

    assert 2.0 <= time.monotonic() - began_s < 30
    ends(works, state)


def test_name_of_no_pod_is_refused_without_a_request() -> None:
    with pytest.raises(ActuatorError, match="names no container of a pod"):
        KubernetesActuator(None, node="node-1", namespaces=[]).look("../../x")
