"""docs/behaviours.md and the marks of the tests agree."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "behaviours.md"

_ROW = re.compile(r"^\| ([A-D]\d+b?) \|.*\| ([^|]*) \|$", re.MULTILINE)
_LINK = re.compile(r"\(\.\./(tests/[\w/]+\.py)\)")
_MARK = re.compile(r"behaviour\('([A-D]\d+b?)'\)")


def test_every_row_is_listed_once() -> None:
    rows = [row for row, _ in _ROW.findall(PAGE.read_text(encoding="utf-8"))]

    wanted = [f"A{n}" for n in range(1, 20)] + ["A14b"]
    wanted += [f"{part}{n}" for part in "BCD" for n in range(1, 10)]
    assert sorted(rows) == sorted(wanted)


def test_docs_list_exactly_the_marked_tests() -> None:
    page = {
        row: set(_LINK.findall(shown))
        for row, shown in _ROW.findall(PAGE.read_text(encoding="utf-8"))
        if _LINK.search(shown)
    }

    marked: dict[str, set[str]] = defaultdict(set)
    for row, file, _ in behaviours():
        marked[row].add(str(file.relative_to(TESTS.parent)))
    assert page == dict(marked)


def test_every_shown_row_has_a_daily_test() -> None:
    found = list(behaviours())
    nightly = {row for row, _, nightly in found if nightly}
    daily = {row for row, _, nightly in found if not nightly}

    assert nightly - daily == set()


def behaviours() -> Iterator[tuple[str, Path, bool]]:
    """Rows with their test files, and whether the test is nightly."""
    for file in TESTS.rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        if "mark.behaviour" not in text:
            continue
        module = ast.parse(text)
        assigned = [ast.unparse(node) for node in module.body if isinstance(node, ast.Assign)]
        of_all = [each for each in assigned if each.startswith("pytestmark ")]
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = [ast.unparse(each) for each in node.decorator_list]
                nightly = any("mark.nightly" in mark for mark in (*of_all, *marks))
                yield from ((row, file, nightly) for mark in marks for row in _MARK.findall(mark))
