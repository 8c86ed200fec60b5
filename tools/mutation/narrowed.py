"""Reduce a rule file and its tests to the part that a mutation can affect.

A rule affects the rules and assertions that name it. A reduced group ends with the last assertion about the rule, and
keeps the rules that its assertions need.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import yaml

Document = Mapping[str, Any]
"""A rule file as YAML with text values."""

_ASSERTIONS: Final = ("alert_rule_test", "promql_expr_test")
_ALERTS: Final = re.compile(r"\bALERTS\w*(?:\{([^}]*)\})?")
_NAMED: Final = re.compile(r'\balertname=~?"([\w|]+)"')


def read(text: str) -> Document:
    """Parse a rule file."""
    document: Document = yaml.load(text, yaml.CBaseLoader)  # noqa: S506 - creates only text
    return document


def affected_rules(sound: Document, broken: Document) -> set[str]:
    """Names of the rules that the mutation can affect."""
    if _group_settings(sound) != _group_settings(broken):
        return {_name(rule) for rule in _rules(sound)}
    pairs = zip(_rules(sound), _rules(broken), strict=True)
    return _connected_rules({_name(rule) for rule, other in pairs if rule != other}, _expressions(sound, broken))


def group_for(affected: Collection[str], group: Mapping[str, Any], sound: Document) -> dict[str, Any] | None:
    """A group of tests with only the assertions about these rules, or None."""
    every = {_name(rule) for rule in _rules(sound)}
    left = {
        kind: [each for each in group.get(kind, []) if not _rules_of(each, every).isdisjoint(affected)]
        for kind in _ASSERTIONS
    }
    return {**group, **left} if any(left.values()) else None


def rules_for(group: Mapping[str, Any], broken: Document, sound: Document) -> str:
    """The mutated rule file with only the rules that a group needs."""
    expressions = _expressions(sound, broken)
    asked = {name for kind in _ASSERTIONS for each in group.get(kind, []) for name in _rules_of(each, expressions)}
    stays = _connected_rules(asked, expressions)
    groups = [
        {
            **theirs,
            "rules": [rule for rule, its in zip(theirs["rules"], ours["rules"], strict=True) if _name(its) in stays],
        }
        for theirs, ours in zip(broken["groups"], sound["groups"], strict=True)
    ]
    return yaml.dump({**broken, "groups": [each for each in groups if each["rules"]]}, Dumper=yaml.CSafeDumper)


def _rules_of(assertion: Mapping[str, Any], every: Collection[str]) -> set[str]:
    """Rules that an assertion is about; all of them if it names none."""
    if "alertname" in assertion:
        return {assertion["alertname"]}
    expr = assertion["expr"]
    if any(_NAMED.search(matchers) is None for matchers in _ALERTS.findall(expr)):
        return set(every)
    return {name for name in every if name in re.findall(r"[\w:]+", expr)}


def _connected_rules(names: Collection[str], expressions: Mapping[str, str]) -> set[str]:
    """These rules and all rules connected to them by name."""
    found = set(names)
    while True:
        naming = {name for name, expr in expressions.items() if any(each in expr for each in found)}
        named = {name for name in expressions if any(name in expressions.get(each, "") for each in found)}
        if naming | named <= found:
            return found
        found |= naming | named


def _expressions(*documents: Document) -> dict[str, str]:
    """Expressions of each rule in all documents together."""
    expressions: defaultdict[str, str] = defaultdict(str)
    for rules in zip(*map(_rules, documents), strict=True):
        expressions[_name(rules[0])] += "\n".join(rule["expr"] for rule in rules)
    return expressions


def _rules(document: Document) -> Iterator[Mapping[str, Any]]:
    return (rule for group in document["groups"] for rule in group["rules"])


def _group_settings(document: Document) -> list[dict[str, Any]]:
    """Groups without their rules."""
    return [{**group, "rules": len(group["rules"])} for group in document["groups"]]


def _name(rule: Mapping[str, Any]) -> str:
    name: str = rule.get("alert") or rule["record"]
    return name
