"""docs/behaviours.md and the tests agree on which rows are shown, and where."""

import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "behaviours.md"

_ROW = re.compile(r"^\| ([A-D]\d+b?) \|.*\| ([^|]*) \|$", re.MULTILINE)
_LINK = re.compile(r"\(\.\./(tests/[\w/]+\.py)\)")
_MARK = re.compile(r'behaviour\("([A-D]\d+b?)"\)')


def test_every_row_of_the_specification_is_there_once() -> None:
    rows = [row for row, _ in _ROW.findall(PAGE.read_text(encoding="utf-8"))]

    wanted = [f"A{n}" for n in range(1, 20)] + ["A14b"]
    wanted += [f"{part}{n}" for part in "BCD" for n in range(1, 10)]
    assert sorted(rows) == sorted(wanted)


def test_the_page_names_exactly_the_tests_that_are_marked() -> None:
    page = {
        row: set(_LINK.findall(shown))
        for row, shown in _ROW.findall(PAGE.read_text(encoding="utf-8"))
        if _LINK.search(shown)
    }

    marked: dict[str, set[str]] = defaultdict(set)
    for file in TESTS.rglob("test_*.py"):
        for row in _MARK.findall(file.read_text(encoding="utf-8")):
            marked[row].add(str(file.relative_to(TESTS.parent)))
    assert page == dict(marked)
