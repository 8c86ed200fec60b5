"""Nodes and budgets of pods, as the Kubernetes API has them."""

import pytest

from remediator.clients.nodes import parse_node
from remediator.seats import RESOURCE, Node

pytestmark = pytest.mark.behaviour("C1")


def test_quantities_of_a_node_are_canonical() -> None:
    status = {"capacity": {"cpu": "2", RESOURCE: "14k"}, "allocatable": {"cpu": "2"}}
    metadata = {"name": "node-1", "labels": {"a": "b"}, "resourceVersion": "7"}

    found = parse_node({"metadata": metadata, "status": status}, RESOURCE)

    assert found == Node(name="node-1", labels={"a": "b"}, capacity_mib=14000, allocatable_mib=None, version="7")


def test_node_that_just_registered_shows_nothing() -> None:
    assert parse_node({"metadata": {"name": "node-1"}}, RESOURCE) == Node(name="node-1")
