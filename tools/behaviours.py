"""`python -m tools.behaviours` writes docs/contributing/behaviours.md.

The page has the behaviours of tests/behaviours.toml and, for each, the tests that carry its mark.
"""

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

CHECKOUT: Final = Path(__file__).resolve().parent.parent
TESTS: Final = CHECKOUT / "tests"
DATA: Final = TESTS / "behaviours.toml"
PAGE: Final = CHECKOUT / "docs" / "contributing" / "behaviours.md"

PARTS: Final[Mapping[str, str]] = {
    "A": "A. A worker that runs one job at a time and hangs",
    "B": "B. Faulty workers and faulty jobs",
    "C": "C. Tenants that share a GPU's time but not its memory",
    "D": "D. Hosts that go silent while their tasks run on",
}

FIELDS: Final = frozenset({"does", "constants", "set_by", "lacking"})


class Mark(NamedTuple):
    """A test file that is marked with a row."""

    row: str
    file: str
    nightly: bool


def main() -> None:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


def rows() -> dict[str, dict[str, str]]:
    """The behaviours by row. ValueError for an unknown field or a row without `does`."""
    found: dict[str, dict[str, str]] = tomllib.loads(DATA.read_text(encoding="utf-8"))
    for row, its in found.items():
        if "does" not in its or not its.keys() <= FIELDS:
            raise ValueError(f"{DATA.name}: {row} has {', '.join(its)}; wanted does and any of {', '.join(FIELDS)}")
    return found


def marks() -> Iterator[Mark]:
    """Yield the mark `behaviour` of each test function."""
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "mark.behaviour" not in text:
            continue
        module = ast.parse(text)
        of_all = [ast.unparse(node) for node in module.body if isinstance(node, ast.Assign)]
        of_all = [each for each in of_all if each.startswith("pytestmark ")]
        for node in ast.walk(module):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            nightly = any("mark.nightly" in mark for mark in (*of_all, *map(ast.unparse, node.decorator_list)))
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and ast.unparse(each.func).endswith("mark.behaviour"):
                    row = ast.literal_eval(each.args[0])
                    yield Mark(row, str(file.relative_to(CHECKOUT)), nightly)


def page() -> str:
    """The page as Markdown."""
    tests: dict[str, set[str]] = defaultdict(set)
    for mark in marks():
        tests[mark.row].add(mark.file)
    lines = [
        "# What gpuwarden must do",
        "",
        "<!-- Written by `python -m tools.behaviours`; change tests/behaviours.toml, not this page. -->",
        "",
        "A behaviour counts when a test drives it through the real parts that it names. Such a test carries the mark",
        '`@pytest.mark.behaviour("A9")`, and this page lists its file.',
    ]
    for part, title in PARTS.items():
        lines += ["", f"## {title}", "", "| row | behaviour | constants | set by | tests |", "|---|---|---|---|---|"]
        for row, its in rows().items():
            if not row.startswith(part):
                continue
            shown = ", ".join(f"`{Path(file).name}`" for file in sorted(tests[row]))
            if lacking := its.get("lacking"):
                shown = "not yet" if lacking == "all" else f"{shown}; not yet: {lacking}"
            lines.append(f"| {row} | {its['does']} | {its.get('constants', '')} | {its.get('set_by', '')} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
