"""The admission policies of deploy/kubernetes: their expressions, by an evaluator of CEL."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel

import deploy
from remediator import seats

POLICIES = Path(deploy.__file__).parent / "kubernetes" / "admission"
ACCOUNT = "system:serviceaccount:gpuwarden:gpuwarden-node"
FILES = ("node-status.yaml", "node-taint.yaml", "pods.yaml")
NODE: dict[str, Any] = {
    "metadata": {"name": "node-1", "uid": "u1", "resourceVersion": "7", "labels": {"nvidia.com/gpu.present": "true"}},
    "spec": {"providerID": "cloud://1", "taints": [{"key": "team", "value": "a", "effect": "NoExecute"}]},
    "status": {
        "capacity": {"cpu": "2", "gpuwarden/vram-mib": "14k"},
        "allocatable": {"cpu": "2"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}
POD: dict[str, Any] = {"metadata": {"name": "trainer-0"}, "spec": {"nodeName": "node-1"}}


class Policy:
    """A policy, as an API server evaluates it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        names = ("object", "oldObject", "request", "variables")
        env = cel.NewEnv(variables=dict.fromkeys(names, cel.Type.DYN))
        self._conditions = [env.compile(each["expression"]) for each in spec["matchConditions"]]
        self._variables = {each["name"]: env.compile(each["expression"]) for each in spec.get("variables", [])}
        self._validations = [(env.compile(each["expression"]), each["message"]) for each in spec["validations"]]

    def refusals(self, *, account: str = ACCOUNT, node: str | None = "node-1", **facts: Any) -> list[str]:
        """The messages of a request from a pod of this account on this node."""
        extra = {} if node is None else {"authentication.kubernetes.io/node-name": [node]}
        request = {"userInfo": {"username": account, "extra": extra}}
        known: dict[str, Any] = {"object": None, "oldObject": None, **facts, "request": request, "variables": {}}
        if not all(_value(condition, known) for condition in self._conditions):
            return []
        for name, variable in self._variables.items():
            known["variables"][name] = _value(variable, known)
        return [message for validation, message in self._validations if _value(validation, known) is not True]


def _value(expression: Any, facts: dict[str, Any]) -> Any:
    value = expression.eval(data=facts)
    assert value.type() != cel.Type.ERROR, value
    return value.plain_value()


def _policies() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in FILES:
        for each in yaml.safe_load_all((POLICIES / file).read_text()):
            if each["kind"] == "ValidatingAdmissionPolicy":
                yield each["metadata"]["name"], each["spec"]


SPECS = dict(_policies())
NODE_STATUS = Policy(SPECS["gpuwarden-node-status"])
NODE_TAINT = Policy(SPECS["gpuwarden-node-taint"])
EVICTION = Policy(SPECS["gpuwarden-eviction"])
DELETE = Policy(SPECS["gpuwarden-delete"])


def changed(*path: str, to: Any) -> dict[str, Any]:
    """The node with one value of its own; `None` removes it."""
    node = deepcopy(NODE)
    its = node
    for key in path[:-1]:
        its = its.setdefault(key, {})
    if to is None:
        del its[path[-1]]
    else:
        its[path[-1]] = to
    return node


def test_seats_check_asks_for_each_policy() -> None:
    assert set(SPECS) == set(seats.POLICIES)


@pytest.mark.behaviour("C9")
@pytest.mark.parametrize(
    "after",
    [
        changed("status", "capacity", "gpuwarden/vram-mib", to="13k"),
        changed("status", "capacity", "gpuwarden/vram-mib", to=None),
        changed("status", "allocatable", "gpuwarden/vram-mib", to="13k"),
        changed("metadata", "resourceVersion", to="8"),
        changed("metadata", "managedFields", to=[{"manager": "gpuwarden"}]),
    ],
)
def test_node_may_change_its_seats(after: dict[str, Any]) -> None:
    assert NODE_STATUS.refusals(object=after, oldObject=NODE) == []


@pytest.mark.behaviour("C9")
@pytest.mark.parametrize(
    ("after", "of"),
    [
        (changed("status", "capacity", "cpu", to="64"), "status.capacity"),
        (changed("status", "capacity", "cpu", to=None), "status.capacity"),
        (changed("status", "capacity", "nvidia.com/gpu", to="8"), "status.capacity"),
        (changed("status", "capacity", to=None), "status.capacity"),
        (changed("status", "allocatable", "cpu", to="0"), "status.allocatable"),
        (changed("status", "allocatable", "nvidia.com/gpu", to="8"), "status.allocatable"),
        (changed("status", "conditions", to=[]), "rest of the status"),
        (changed("status", "conditions", to=None), "rest of the status"),
        (changed("status", "addresses", to=[{"type": "InternalIP", "address": "10.0.0.9"}]), "rest of the status"),
        (changed("metadata", "labels", to={}), "metadata"),
        (changed("metadata", "annotations", to={"a": "b"}), "metadata"),
        (changed("metadata", "labels", to=None), "metadata"),
    ],
)
def test_node_may_change_nothing_else(after: dict[str, Any], of: str) -> None:
    (refusal,) = NODE_STATUS.refusals(object=after, oldObject=NODE)
    assert of in refusal


@pytest.mark.behaviour("C9")
@pytest.mark.parametrize("node", ["node-2", "", None])
def test_node_may_not_change_another_node(node: str | None) -> None:
    after = changed("status", "capacity", "gpuwarden/vram-mib", to="13k")
    (refusal,) = NODE_STATUS.refusals(object=after, oldObject=NODE, node=node)
    assert "its own node only" in refusal


TEAM = {"key": "team", "value": "a", "effect": "NoExecute"}
FAULTY = {"key": "gpuwarden/gpu-faulty", "effect": "NoSchedule"}


@pytest.mark.behaviour("C9")
@pytest.mark.parametrize("before", [None, [TEAM], [TEAM, FAULTY]], ids=["none", "another", "both"])
@pytest.mark.parametrize("sets", [True, False], ids=["set", "removed"])
def test_node_may_set_and_remove_the_taint_of_a_faulty_gpu(before: list[Any] | None, *, sets: bool) -> None:
    others = [each for each in before or [] if each != FAULTY]
    old = changed("spec", "taints", to=before)
    new = changed("spec", "taints", to=[*others, FAULTY] if sets else others or None)

    assert NODE_TAINT.refusals(object=new, oldObject=old) == []


@pytest.mark.behaviour("C9")
@pytest.mark.parametrize(
    ("after", "of"),
    [
        (changed("spec", "taints", to=[]), "the taint gpuwarden/gpu-faulty"),
        (changed("spec", "taints", to=None), "the taint gpuwarden/gpu-faulty"),
        (changed("spec", "taints", to=[{**TEAM, "effect": "NoSchedule"}]), "the taint gpuwarden/gpu-faulty"),
        (changed("spec", "taints", to=[TEAM, {**FAULTY, "effect": "NoExecute"}]), "the taint gpuwarden/gpu-faulty"),
        (changed("spec", "taints", to=[TEAM, {**FAULTY, "key": "a"}]), "the taint gpuwarden/gpu-faulty"),
        (changed("spec", "unschedulable", to=True), "rest of the spec"),
        (changed("spec", "providerID", to=None), "rest of the spec"),
        (changed("metadata", "labels", to={}), "metadata"),
        (changed("metadata", "annotations", to={"a": "b"}), "metadata"),
    ],
)
def test_node_may_change_nothing_else_of_its_spec(after: dict[str, Any], of: str) -> None:
    (refusal,) = NODE_TAINT.refusals(object=after, oldObject=NODE)
    assert of in refusal


@pytest.mark.behaviour("C9")
@pytest.mark.parametrize("node", ["node-2", "", None])
def test_node_may_not_taint_another_node(node: str | None) -> None:
    (refusal,) = NODE_TAINT.refusals(object=changed("spec", "taints", to=[TEAM, FAULTY]), oldObject=NODE, node=node)
    assert "its own node only" in refusal


def test_policies_are_for_the_account_of_the_node_alone() -> None:
    kubelet = "system:node:node-1"
    after = changed("status", "conditions", to=[])
    assert NODE_STATUS.refusals(object=after, oldObject=NODE, account=kubelet) == []
    assert NODE_TAINT.refusals(object=changed("spec", "taints", to=None), oldObject=NODE, account=kubelet) == []
    assert EVICTION.refusals(object={"metadata": {"name": "trainer-0"}}, account=kubelet) == []
    assert DELETE.refusals(oldObject=POD, account=kubelet, node="node-2") == []


@pytest.mark.behaviour("C9")
def test_eviction_needs_a_uid() -> None:
    by_uid = {"deleteOptions": {"preconditions": {"uid": "u1"}}}
    assert EVICTION.refusals(object=by_uid) == []
    others: list[dict[str, Any]] = [{}, {"deleteOptions": {}}, {"deleteOptions": {"preconditions": {"uid_": "u1"}}}]
    for without in others:
        assert EVICTION.refusals(object=without) == ["the account gpuwarden-node must evict by uid"]


@pytest.mark.behaviour("C9")
def test_node_deletes_pods_of_its_own_only() -> None:
    assert DELETE.refusals(oldObject=POD) == []
    assert DELETE.refusals(oldObject=POD, node="node-2") != []
    assert DELETE.refusals(oldObject=POD, node=None) != []
    assert DELETE.refusals(oldObject={**POD, "spec": {}}) != []


def test_policies_deny_what_they_refuse_or_cannot_evaluate() -> None:
    for spec in SPECS.values():
        assert spec["failurePolicy"] == "Fail"
    bindings = [
        each["spec"]
        for file in FILES
        for each in yaml.safe_load_all((POLICIES / file).read_text())
        if each["kind"] == "ValidatingAdmissionPolicyBinding"
    ]
    assert {each["policyName"] for each in bindings} == set(SPECS)
    assert all(each["validationActions"] == ["Deny"] for each in bindings)
