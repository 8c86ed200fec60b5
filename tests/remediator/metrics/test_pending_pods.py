"""Metrics of Pending pods: which pods wait for the resource, and what an unknown list publishes."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gpuwarden.kube import api as kube_api
from remediator.clients.nodes import Nodes
from remediator.metrics import pending_pods
from remediator.metrics.pending_pods import SERIES, PendingPodsCollector
from remediator.pending_pods import PUBLISHED_MAX, PendingPod, waiting
from remediator.seats import RESOURCE
from tests.remediator.kubernetes_api import Failure, kubernetes_api

pytestmark = pytest.mark.behaviour("C6")

SINCE = 1_700_000_000.0
FULL = f"0/3 nodes are available: 1 Insufficient memory, 3 Insufficient {RESOURCE}."


def pod(
    name: str = "p", *, message: str = FULL, wanted: str | None = "1k", since: str = "2023-11-14T22:13:20Z"
) -> dict[str, Any]:
    limits = {} if wanted is None else {RESOURCE: wanted}
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
        "lastTransitionTime": since,
    }
    return {
        "metadata": {"namespace": "n", "name": name},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": "Pending", "conditions": [condition]},
    }


def waits(name: str = "p", *, since: float = SINCE) -> PendingPod:
    return PendingPod(namespace="n", name=name, since=since, wanted_mib=1000)


def test_pods_that_wait_for_the_resource_are_found_longest_first() -> None:
    found = waiting([pod("late", since="2023-11-14T22:13:21Z"), pod("b"), pod("a")], RESOURCE)

    assert found == [waits("a"), waits("b"), waits("late", since=SINCE + 1)]


@pytest.mark.parametrize(("wanted", "mib"), [("1e12", 10**12), ("9" * 20, 10**20 - 1), ("much", None)])
def test_pod_that_wants_too_much_hides_no_other(wanted: str, mib: int | None) -> None:
    found = waiting([pod("a", wanted=wanted), pod("b")], RESOURCE)

    assert found == [replace(waits("a"), wanted_mib=mib), waits("b")]


@pytest.mark.parametrize(
    "other",
    [
        pod(message="0/3 nodes are available: 3 Insufficient memory."),
        pod(wanted=None),
        {**pod(), "status": {"phase": "Pending"}},
        {**pod(), "status": {"conditions": [{"type": "PodScheduled", "status": "True"}]}},
        {**pod(), "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "Unschedulable"}]}},
        {**pod(), "status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}},
    ],
)
def test_other_pods_are_left_out(other: dict[str, Any]) -> None:
    assert waiting([other, pod("waits")], RESOURCE) == [waits("waits")]


def page(collector: PendingPodsCollector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def test_failed_list_is_unknown_and_never_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kubernetes_api(tmp_path / "config") as api:
        collector = PendingPodsCollector(Nodes(kube_api.connect(tmp_path / "config"), RESOURCE).pending_pods)
        registry = page(collector)
        assert registry.get_sample_value("gpuwarden_pending_pods_up") == 0
        assert registry.get_sample_value("gpuwarden_pending_pods") is None

        collector.look()
        assert registry.get_sample_value("gpuwarden_pending_pods") == 0
        api.pods = [pod()]
        collector.look()
        named = {"pod_namespace": "n", "pod_name": "p"}
        assert registry.get_sample_value("gpuwarden_pending_pods") == 1
        assert registry.get_sample_value("gpuwarden_pod_pending_wanted_bytes", named) == 1000 * 2**20
        waited_s = registry.get_sample_value("gpuwarden_pod_pending_seconds", named)
        assert waited_s == pytest.approx(time.time() - SINCE, abs=5)

        api.pods = [pod(wanted="much")]
        collector.look()
        assert registry.get_sample_value("gpuwarden_pod_pending_seconds", named) is not None
        assert registry.get_sample_value("gpuwarden_pod_pending_wanted_bytes", named) is None

        api.failures["list"] = [Failure(), Failure(body="", status=403), Failure(status=200, body='{"items": [{}]}')]
        for _ in range(3):
            collector.look()
        assert registry.get_sample_value("gpuwarden_pending_pods") == 1  # the last list is still fresh
        monkeypatch.setattr(pending_pods, "AGE_MAX_S", -1.0)
        assert registry.get_sample_value("gpuwarden_pending_pods_up") == 0
        for name in ("gpuwarden_pending_pods", "gpuwarden_pod_pending_seconds", "gpuwarden_pod_pending_wanted_bytes"):
            assert registry.get_sample_value(name) is None
            assert registry.get_sample_value(name, named) is None


def test_series_are_bounded_and_the_count_is_not() -> None:
    pods = [waits(f"p{number:03}") for number in range(PUBLISHED_MAX + 10)]
    collector = PendingPodsCollector(lambda: pods)
    collector.look()

    families = {family.name: family for family in page(collector).collect()}

    assert families["gpuwarden_pending_pods"].samples[0].value == PUBLISHED_MAX + 10
    assert len(families["gpuwarden_pod_pending_seconds"].samples) == PUBLISHED_MAX
    assert {name: frozenset(family.samples[0].labels) for name, family in families.items()} == {
        name: frozenset(its.labels) for name, its in SERIES.items()
    }
