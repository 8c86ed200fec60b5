"""Nodes and budgets of pods, as the Kubernetes API has them."""

from typing import Any

import pytest

from remediator.clients.nodes import parse_budget, parse_node
from remediator.seats import RESOURCE, Node

pytestmark = pytest.mark.behaviour("C1")


def container(mib: str | None = None, **more: Any) -> dict[str, Any]:
    resources = {} if mib is None else {"limits": {RESOURCE: mib}, "requests": {RESOURCE: mib}}
    return {"name": "c", "resources": resources, **more}


@pytest.mark.parametrize(
    ("spec", "mib"),
    [
        ({"containers": [container()]}, 0),
        ({"containers": [{"name": "c"}]}, 0),
        ({"containers": [container("3k")]}, 3000),
        ({"containers": [container("3000"), container("2000"), container()]}, 5000),
        ({"containers": [container("3000")], "initContainers": [container("5000"), container("100")]}, 5000),
        ({"containers": [container("3000")], "initContainers": [container("500", restartPolicy="Always")]}, 3500),
        (
            {
                "containers": [container("1000")],
                "initContainers": [container("500", restartPolicy="Always"), container("2000")],
            },
            2500,
        ),
        ({"containers": [{"name": "c", "resources": {"limits": {RESOURCE: "700"}}}]}, 700),
    ],
    ids=["none", "no-resources", "canonical", "sum", "init", "sidecar", "init-after-sidecar", "limit-only"],
)
def test_budget_is_counted_as_the_scheduler_counts_it(spec: dict[str, Any], mib: int) -> None:
    assert parse_budget(spec, RESOURCE) == mib


def test_quantities_of_a_node_are_canonical() -> None:
    status = {"capacity": {"cpu": "2", RESOURCE: "14k"}, "allocatable": {"cpu": "2"}}
    metadata = {"name": "node-1", "labels": {"a": "b"}, "resourceVersion": "7"}

    found = parse_node({"metadata": metadata, "status": status}, RESOURCE)

    assert found == Node(name="node-1", labels={"a": "b"}, capacity_mib=14000, allocatable_mib=None, version="7")


def test_node_that_just_registered_shows_nothing() -> None:
    assert parse_node({"metadata": {"name": "node-1"}}, RESOURCE) == Node(name="node-1")
