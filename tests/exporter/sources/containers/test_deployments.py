"""Deployments on demand. tests/e2e/kubernetes/test_demand_gate.py lists those of a real cluster."""

import pytest

from exporter.sources.containers.deployments import deployment_of

OWNER = {"kind": "ReplicaSet", "name": "painter-5d4f", "controller": True}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"ownerReferences": [OWNER], "labels": {"pod-template-hash": "5d4f"}}, "painter"),
        ({"ownerReferences": [OWNER], "labels": {"pod-template-hash": "other"}}, None),
        ({"ownerReferences": [OWNER]}, None),
        ({"ownerReferences": [{**OWNER, "kind": "StatefulSet"}], "labels": {"pod-template-hash": "5d4f"}}, None),
        ({}, None),
    ],
)
def test_deployment_of_a_pod(metadata: dict[str, object], expected: str | None) -> None:
    assert deployment_of(metadata) == expected
