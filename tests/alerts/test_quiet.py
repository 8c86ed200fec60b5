"""What quiet is stands in several rules, each with its own allowance: the copies say the same (docs/rules.md)."""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import yaml

from deploy.check import CHECKOUT, RULES_GLOB

_ASKED = re.compile(r"(timestamp\()?gpuwarden_job_phase{phase=~")
_ALLOWED = re.compile(r"gpuwarden_job_(stall_timeout|health_window)_seconds")


def nodes(node: Any) -> Iterator[Any]:
    """The expression, and each that it is made of."""
    yield node
    for name in ("lhs", "rhs", "expr"):
        if (part := getattr(node, name, None)) is not None:
            yield from nodes(part)


def exemptions() -> dict[str, list[str]]:
    """By alert, whom it leaves out by the phase of the job: with one word for what each is allowed."""
    found: dict[str, list[str]] = {}
    for file in sorted(CHECKOUT.glob(RULES_GLOB)):
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                told = [
                    _ALLOWED.sub("ALLOWED", str(node))
                    for node in nodes(promql.parse(rule["expr"]))
                    if isinstance(node, promql.BinaryExpr) and _ASKED.match(str(node.lhs))
                ]
                if told:
                    found[rule.get("alert") or rule["record"]] = told
    return found


def test_each_rule_that_asks_for_quiet_names_the_same_phases_in_which_work_is_life_too() -> None:
    asked = {name: [text.partition("}")[0] for text in told] for name, told in exemptions().items()}

    assert asked.keys() == {
        "GpuwardenJobStalled",
        "GpuwardenJobUnhealthy",
        "GpuwardenJobGpuLost",
        "GpuwardenSharedJobStalled",
    }
    assert len({tuple(phases) for phases in asked.values()}) == 1


def test_what_is_asked_of_a_container_in_those_phases_is_the_same_but_for_the_allowance() -> None:
    of_containers = {name: told for name, told in exemptions().items() if name != "GpuwardenSharedJobStalled"}

    assert len(of_containers) == 3
    assert len({tuple(told) for told in of_containers.values()}) == 1
