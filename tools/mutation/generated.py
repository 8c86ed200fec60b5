"""Generate mutants of the alert rules: one token changed at a time.

Changed are comparisons, operators, set operators, aggregations, numbers, durations, labels of groupings and selectors,
`for`, labels and annotation names. Removed are operands of `and` and `unless`, compared aggregations and templates of
annotations. Series that vanished are kept by `last_over_time`.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from tools.mutation.rules import Mutant, rules_of, topic

SWAPPED: Final = {
    ">=": (">", "<="),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    "<": ("<=", ">"),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "and": ("unless", "or"),
    "unless": ("and", "or"),
    "or": ("and",),
    "min": ("max",),
    "max": ("min",),
    "sum": ("max",),
    "count": ("sum",),
    "topk": ("bottomk",),
    "bool": ("",),
    "max_over_time": ("min_over_time",),
    "min_over_time": ("max_over_time",),
    "avg_over_time": ("min_over_time", "max_over_time"),
    "last_over_time": ("min_over_time", "max_over_time"),
    "count_over_time": ("sum_over_time",),
    "increase": ("delta",),
    "changes": ("resets",),
    "resets": ("changes",),
    "timestamp": ("",),
    "absent": ("",),
    "clamp_min": ("clamp_max",),
    "floor": ("ceil",),
}
"""Replacements of tokens."""

SHOWN_MAX: Final = 160
"""Length of a change in its name."""

TOKEN: Final = re.compile(
    r"""(?P<comment>\#[^\n]*)
      | (?P<grouping>\b(?:by|on|ignoring|without|group_left|group_right)\b\s*\([^()]*\))
      | (?P<selector>[a-zA-Z_:][a-zA-Z0-9_:]*\{[^}]*\}|\{[^}]*\})
      | (?P<string>"[^"]*")
      | (?P<duration>\b\d+(?:ms|s|m|h|d)\b)
      | (?P<number>\b\d+(?:\.\d+)?\b)
      | (?P<word>[a-zA-Z_][a-zA-Z0-9_:]*)
      | (?P<sign>>=|<=|==|!=|[-+*/<>])
      | (?P<bracket>[()\[\]])
    """,
    re.VERBOSE,
)
"""Tokens of an expression."""
_TEMPLATE: Final = re.compile(r"\{\{[^}]*\}\}")
_MATCHER: Final = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_OPPOSITE: Final = {"=": "!=", "!=": "=", "=~": "!~", "!~": "=~"}
_METRIC: Final = re.compile(r"^(gpuwarden[_:]|prometheus_|up\b)")
_JOINED: Final = r"\s*(?:(?:on|ignoring)\s*\([^()]*\)\s*)?(?:group_left\s*\([^()]*\)\s*)?"
_IN_PARENTHESES: Final = re.compile(rf"{_JOINED}\(")
_AGGREGATED: Final = re.compile(rf"{_JOINED}(?:min|max) by \([^()]*\) \(")
_BY_HOST: Final = re.compile(r"\s+by \([^()]*\bhost\b")  # one series per exporter: min equals max
_RANGED: Final = re.compile(r"\s*(\[|offset\b)")


_Change = tuple[int, int, str]
"""Start and end of the replaced text, and the new text."""


def generate_mutants(file: Path) -> list[Mutant]:
    """All mutants of one rule file, in file order. Some do not parse."""
    text, found = file.read_text(), []
    seen: Counter[str] = Counter()
    for rule in rules_of(text):
        for start, end, new in dict.fromkeys(_changes(text, rule.nodes)):
            name = f"{topic(file)}: {rule.name}: {_describe(text[start:end], new)}"
            seen[name] += 1
            again = f", at its place {seen[name]}" if seen[name] > 1 else ""
            found.append(Mutant(rules=file.name, name=f"{name}{again}", text=text[:start] + new + text[end:]))
    return found


def _changes(text: str, its: dict[str, yaml.Node]) -> Iterator[_Change]:
    expr = its["expr"]
    yield from _of_expression(text, expr.start_mark.index, expr.end_mark.index)
    for key in ("for", "keep_firing_for"):
        if key in its:
            start, end = its[key].start_mark.index, its[key].end_mark.index
            yield from ((start, end, changed) for changed in _durations(text[start:end]))
    for key, value in its["labels"].value if "labels" in its else ():
        yield key.start_mark.index, value.end_mark.index, f"not_{key.value}: {value.value}"
        yield value.start_mark.index, value.end_mark.index, f"not_{value.value}"
    for key, value in its["annotations"].value if "annotations" in its else ():
        yield key.start_mark.index, key.end_mark.index, f"not_{key.value}"
        for template in _TEMPLATE.finditer(text, value.start_mark.index, value.end_mark.index):
            yield *template.span(), ""


def _of_expression(text: str, start: int, end: int) -> Iterator[_Change]:
    for token in TOKEN.finditer(text, start, end):
        kind, word, (begins, ends) = token.lastgroup, token.group(), token.span()
        if kind in ("comment", "string", "bracket"):
            continue
        if kind == "grouping":
            yield from _of_grouping(word, begins)
        elif kind == "selector":
            yield from _of_selector(word, begins)
            if not _RANGED.match(text, ends, end):
                yield begins, ends, f"last_over_time({word}[5m])"
        elif kind == "duration":
            yield from ((begins, ends, changed) for changed in _durations(word))
        elif kind == "number":
            yield from ((begins, ends, changed) for changed in _numbers(word))
        elif kind == "word" and _METRIC.match(word):
            if not _RANGED.match(text, ends, end):
                yield begins, ends, f"last_over_time({word}[5m])"
        else:
            by_host = word in ("min", "max") and _BY_HOST.match(text, ends, end)
            yield from ((begins, ends, changed) for changed in (() if by_host else SWAPPED.get(word, ())))
        if word in ("and", "unless") and (over := _operand(text, ends, end)):
            yield begins, over, ""
        if word in (">=", "<=", ">", "<") and (over := _operand(text, ends, end, aggregated=True)):
            yield begins, over, ""


def _of_grouping(word: str, at: int) -> Iterator[_Change]:
    """Remove each name of a list, and all names of `by`."""
    head, _, listed = word.partition("(")
    names = [name.strip() for name in listed.rstrip(")").split(",") if name.strip()]
    for left_out in names:
        rest = ", ".join(name for name in names if name != left_out)
        yield at, at + len(word), f"{head}({rest})"
    if head.strip() == "by" and "instance" not in names:
        yield at, at + len(word), f"{head}({', '.join([*names, 'instance'])})"


def _of_selector(word: str, at: int) -> Iterator[_Change]:
    """Remove and invert each matcher, and remove each of several names."""
    name, _, inside = word.partition("{")
    matchers = list(_MATCHER.finditer(inside))
    for matcher in matchers:
        rest = ", ".join(each.group() for each in matchers if each is not matcher)
        if name or rest:
            yield at, at + len(word), f"{name}{{{rest}}}"
        label, sign, value = matcher.groups()
        turned = matcher.group().replace(f"{label}{sign}", f"{label}{_OPPOSITE[sign]}", 1)
        if label != "__name__":
            yield at, at + len(word), word.replace(matcher.group(), turned)
        for listed in re.findall(r"\w+(?:\|\w+)+", value):
            for left_out in listed.split("|"):
                fewer = "|".join(each for each in listed.split("|") if each != left_out)
                yield at, at + len(word), word.replace(listed, fewer)


def _operand(text: str, at: int, end: int, *, aggregated: bool = False) -> int | None:
    """End of the right operand of an operator, if it is in parentheses or an aggregation."""
    begun = (_AGGREGATED if aggregated else _IN_PARENTHESES).match(text, at, end)
    if begun is None:
        return None
    depth = 1
    for token in TOKEN.finditer(text, begun.end(), end):
        depth += {"(": 1, ")": -1}.get(token.group(), 0)
        if depth == 0:
            return token.end()
    return None


def _numbers(word: str) -> Iterator[str]:
    value = float(word)
    for changed in (value + 1, value - 1, value * 2 if value > 1 else None, value / 2 if value > 1 else None):
        if changed is not None:
            yield f"{changed:g}" if changed >= 0 else f"({changed:g})"


def _durations(word: str) -> Iterator[str]:
    unit = word.lstrip("0123456789")
    seconds = int(int(word.removesuffix(unit)) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit])
    yield f"{seconds * 2}s"
    if seconds:
        yield f"{max(1, seconds // 2)}s"


def _describe(old: str, new: str) -> str:
    texts = [" ".join(text.split()) for text in (old, new or "nothing")]
    return " -> ".join(each if len(each) <= SHOWN_MAX else f"{each[:SHOWN_MAX]}…" for each in texts)
