"""Rule files and their mutants: generated ones, and those listed in by_hand.yaml."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from testbed import check_release

ALERTS: Final = check_release.CHECKOUT / "alerts"
BY_HAND: Final = Path(__file__).with_name("by_hand.yaml")
EVERY_RULE: Final = "every rule that holds it"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A rule file with one fault. `name` starts with topic and rule."""

    rules: str
    name: str
    text: str


class StaleError(Exception):
    """A fault in by_hand.yaml does not change its rule. The message names both."""


def files() -> list[Path]:
    """All rule files."""
    return sorted(check_release.CHECKOUT.glob(check_release.RULES_GLOB))


def topic(file: Path) -> str:
    """Topic of a rule file: `stall` for `stall.rules.yaml`."""
    return file.name.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule: start and end in the text, and its YAML nodes."""

    name: str
    start: int
    end: int
    nodes: dict[str, yaml.Node]


def rules_of(text: str) -> Iterator[Rule]:
    """Rules of a file, in order."""
    for group in children(yaml.compose(text), "groups"):
        for rule in children(group, "rules"):
            nodes = {key.value: value for key, value in rule.value}
            name = (nodes.get("alert") or nodes["record"]).value
            yield Rule(name=name, start=rule.start_mark.index, end=rule.end_mark.index, nodes=nodes)


def children(node: yaml.Node | None, key: str) -> list[yaml.Node]:
    """Nodes below a key of a mapping; empty without the mapping."""
    (found,) = [value for name, value in node.value if name.value == key] if node else [yaml.SequenceNode("", [])]
    listed: list[yaml.Node] = found.value
    return listed


def by_hand(file: Path) -> list[Mutant]:
    """Listed faults of a rule file.

    Raises:
        StaleError: a fault does not change its rule.
    """
    text = file.read_text()
    listed: dict[str, dict[str, list[str]]] = yaml.safe_load(BY_HAND.read_text())
    everywhere, found = listed.pop(EVERY_RULE), []
    for rule in rules_of(text):
        own = listed.get(rule.name, {})
        for sentence, (old, new) in {**everywhere, **own}.items():
            sound = text[rule.start : rule.end]
            broken = re.sub(r"\s+".join(map(re.escape, old.split())), new.replace("\\", r"\\"), sound)
            if broken != sound:
                whole = text[: rule.start] + broken + text[rule.end :]
                found.append(Mutant(rules=file.name, name=f"{topic(file)}: {rule.name}: {sentence}", text=whole))
            elif sentence in own:
                raise StaleError(
                    f"{BY_HAND.name}: {rule.name}: {sentence!r} changes nothing; {old!r} is not in the rule"
                )
    return found


def unknown_rules() -> set[str]:
    """Names in by_hand.yaml without a rule."""
    known = {rule.name for file in files() for rule in rules_of(file.read_text())}
    return set(yaml.safe_load(BY_HAND.read_text())) - known - {EVERY_RULE}
