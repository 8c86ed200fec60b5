"""Evictions through an API that refuses, delays or cuts its answers: each is a wait with a reason, and nothing is lost.

The API server, the pods and the ledger are real. A proxy in front of the API server makes the faults.
"""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from gpuwarden.errors import GpuwardenError
from gpuwarden.kube import api as kube_api
from gpuwarden.queue import JobStore
from remediator.executor import stages
from remediator.executor.executor import Executor
from remediator.ledger.ledger import Ledger
from testbed.kubernetes.cluster import Cluster
from tests.api_proxy import Fault, Proxy, api_proxy
from tests.remediator.actuators.test_pod_episodes import executor
from tests.remediator.executor.builders import PACE, history, journal, turn
from tests.tenants import READS, Tenants
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.behaviour("C3")]

REQUEST_S: Final = 1.0
READ: Final = "^GET "
DRY_RUN: Final = r"/eviction\?dryRun"
EVICTION: Final = "/eviction$"
FAULTS: Final = {
    "401": (Fault(status=401), "HTTP 401: as the test says; the token or certificate is not valid or has expired"),
    "403": (Fault(status=403), "HTTP 403: as the test says; grant the account this verb"),
    "409": (Fault(status=409), "HTTP 409: as the test says"),
    "410": (Fault(status=410), "HTTP 410: as the test says"),
    "429": (Fault(status=429, headers={"Retry-After": "1"}), "HTTP 429: as the test says; try again later"),
    "500": (Fault(status=500), "HTTP 500: as the test says"),
    "503": (Fault(status=503, body="<html>"), "HTTP 503: Service Unavailable"),
    "slow": (Fault(hangs=True), "no answer from the Kubernetes API"),
    "lost": (Fault(after="lost"), "no answer from the Kubernetes API"),
    "half": (Fault(after="half"), "the Kubernetes API answers without valid JSON"),
}
FORBIDDEN: Final = frozenset({"401", "403"})


@pytest.fixture
def tenants(cluster: Cluster, namespace: str) -> Tenants:
    return Tenants(cluster, namespace)


@pytest.fixture
def proxy(cluster: Cluster, tmp_path: Path) -> Iterator[Proxy]:
    with api_proxy(cluster, tmp_path) as found:
        yield found


@pytest.fixture
def works(ledger: Ledger, store: JobStore, tenants: Tenants, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Executor:
    """An executor behind the proxy, with an alert about the pod of a Deployment."""
    monkeypatch.setattr(stages, "CHECK_STOP_S", 0.0)
    tenants.workload("Deployment", "web")
    connection = kube_api.connect(proxy.kubeconfig, timeout_s=REQUEST_S)
    return executor(ledger, store, tenants.running("web"), tenants.actuator(connection=connection))


def until_fixed(works: Executor, ledger: Ledger) -> None:
    def is_over() -> bool:
        turn(works, ledger)
        return history(ledger).outcome is not None

    eventually(is_over, "the pod is replaced", within_s=60, log=lambda: str(journal(ledger)))
    assert history(ledger).outcome == "fixed"
    assert history(ledger).message == "it was restarted, and it had no job to settle"


def test_faults_before_an_eviction_are_waits_and_the_pod_is_evicted_once_afterwards(
    works: Executor, ledger: Ledger, tenants: Tenants, proxy: Proxy
) -> None:
    before = tenants.running("web")
    asks = tenants.actuator(connection=kube_api.connect(proxy.kubeconfig, timeout_s=REQUEST_S))
    for where, ask in ((READ, asks.look), (DRY_RUN, asks.check_stop)):
        for name, (fault, message) in FAULTS.items():
            proxy.faults = [Fault(**{**vars(fault), "to": where})]
            with pytest.raises(GpuwardenError, match=re.escape(message)):
                ask(before.handle)
            turn(works, ledger)
            reason = "no_container" if where == READ else "engine_unreachable"
            if where == DRY_RUN and name in FORBIDDEN:
                reason = "eviction_forbidden"
            assert (history(ledger).wait_reason, history(ledger).outcome) == (reason, None), (where, name)
    assert proxy.evictions() == 0
    assert tenants.running("web") == before

    proxy.faults = []
    until_fixed(works, ledger)

    assert proxy.evictions() == 1


@pytest.mark.parametrize("fault", ["500", "lost", "half"])
def test_eviction_whose_answer_is_lost_is_done_once(
    works: Executor, ledger: Ledger, tenants: Tenants, proxy: Proxy, fault: str
) -> None:
    proxy.faults = [Fault(**{**vars(FAULTS[fault][0]), "to": EVICTION})]

    def is_tried() -> bool:
        turn(works, ledger)
        return "decided stop" in journal(ledger)

    eventually(is_tried, "it is evicted")
    proxy.faults = []
    until_fixed(works, ledger)

    assert "failed stop" in journal(ledger)
    assert proxy.evictions() == 1
    assert len(tenants.named("web")) == 1


@pytest.mark.behaviour("C9")
def test_token_that_expires_is_a_wait_and_nothing_is_lost(
    ledger: Ledger, store: JobStore, tenants: Tenants, tmp_path: Path
) -> None:
    tenants.workload("Deployment", "web")
    state = tenants.running("web")
    works = executor(ledger, store, state, tenants.actuator(connection=tenants.limited(tmp_path, READS)))
    turn(works, ledger)
    assert history(ledger).wait_reason == "eviction_forbidden"
    # The API server refuses the tokens of an account that is gone, as it refuses expired ones.
    tenants.core.delete_namespaced_service_account("default", tenants.namespace)

    def waits_for_the_api() -> bool:
        turn(works, ledger)
        return history(ledger).wait_reason == "engine_unreachable"

    eventually(waits_for_the_api, "the token is refused", log=lambda: str(journal(ledger)))
    assert "HTTP 401: Unauthorized; the token or certificate is not valid or has expired" in str(history(ledger))
    assert tenants.running("web") == state

    until_fixed(executor(ledger, store, state, tenants.actuator()), ledger)


STUBBORN: Final = ("sh", "-c", "trap '' TERM; while :; do sleep 0.2; done")


@pytest.mark.slow
def test_api_server_that_restarts_during_an_eviction_delays_it(
    ledger: Ledger, store: JobStore, tenants: Tenants
) -> None:
    tenants.workload("Deployment", "web", STUBBORN, grace_s=6)
    state = tenants.running("web")
    works = executor(ledger, store, state, tenants.actuator(), settings=replace(PACE, stop_grace_s=6.0))
    (pod,) = tenants.named("web")
    restarts = threading.Thread(target=restart_while_it_ends, args=(tenants, pod.metadata.name))
    restarts.start()

    until_fixed(works, ledger)
    restarts.join()

    assert "failed stop" in journal(ledger)
    assert len(tenants.named("web")) == 1


def restart_while_it_ends(tenants: Tenants, name: str) -> None:
    """Restart the API server once the pod is being deleted."""
    tenants.cluster.wait(
        lambda: name not in {each.metadata.name for each in tenants.named(name)}, "eviction of the pod"
    )
    tenants.cluster.restart("kube-apiserver")
