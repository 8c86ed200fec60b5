"""Rules compare with series: literals.yaml lists every number in a rule with its reason."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testbed.check_release import CHECKOUT, RULES_GLOB
from tools.mutation.generated import TOKEN

LISTED = Path(__file__).with_name("literals.yaml")
TRUTHS = {"0", "1"}
"""These are booleans or counts of one."""
NUMBERED = re.compile(r'[=!~]"(\d+(?:\|\d+)*)"')
"""A selector of numbers, which are text there."""


def rules() -> Iterator[dict[str, Any]]:
    for file in sorted(CHECKOUT.glob(RULES_GLOB)):
        for group in yaml.safe_load(file.read_text())["groups"]:
            yield from group["rules"]


def numbers_of(rule: dict[str, Any]) -> set[str]:
    """Numbers and durations of a rule, as written."""
    tokens = list(TOKEN.finditer(str(rule["expr"])))
    found = {token.group() for token in tokens if token.lastgroup in ("number", "duration")}
    selectors = (token.group() for token in tokens if token.lastgroup == "selector")
    found |= {each for selector in selectors for listed in NUMBERED.findall(selector) for each in listed.split("|")}
    found -= TRUTHS
    return found | {f"{key}: {rule[key]}" for key in ("for", "keep_firing_for") if key in rule}


def test_numbers_of_rules_are_listed_with_a_reason() -> None:
    written = {rule.get("alert") or rule["record"]: numbers_of(rule) for rule in rules()}
    listed = yaml.safe_load(LISTED.read_text())

    assert {name: found for name, found in written.items() if found} == {
        name: set(its["numbers"]) for name, its in listed.items()
    }
    assert [name for name, its in listed.items() if not its["reason"]] == []


def test_acting_rules_have_no_numbers_except_ages() -> None:
    """They are the time without a scrape, a majority, and the age of samples of other hosts."""
    acting = {rule["alert"]: numbers_of(rule) for rule in rules() if "remedy" in rule.get("labels", {})}

    assert len(acting) > 1
    assert {name: found for name, found in acting.items() if found} == {
        "GpuwardenHostLost": {"3m", "0.5"},
        "GpuwardenGangStuck": {"90"},
    }


@pytest.mark.parametrize(
    ("expr", "found"),
    [
        ("gpuwarden_gpu_lost_seconds >= 60", {"60"}),
        ("min by (host) (gpuwarden_x_seconds) > 0.5", {"0.5"}),
        ("max_over_time(gpuwarden_x[90s]) == 1", {"90s"}),
        ("gpuwarden_x offset 1h or gpuwarden_x[2m:10s]", {"1h", "2m", "10s"}),
        ('gpuwarden_x{xid=~"46|48", le="7"} == 0', {"46", "48", "7"}),
        ('gpuwarden_x{gpu!~"unidentified-.*", rank="0"} == 0', set()),
        ("topk by (host) (1, gpuwarden_x2_total)  # for 30 s", set()),
    ],
)
def test_numbers_are_found(expr: str, found: set[str]) -> None:
    assert numbers_of({"expr": expr}) == found
    assert numbers_of({"expr": expr, "for": "3m"}) == {*found, "for: 3m"}
