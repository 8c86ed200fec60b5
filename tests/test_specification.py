"""tests/behaviours.toml, its page and the marks of the tests agree."""

import pytest

from tools import behaviours
from tools.behaviours import marks, rows

WORDS_MAX = 25


def test_every_row_is_listed_once_in_order() -> None:
    wanted = [f"A{n}" for n in range(1, 15)] + ["A14b"] + [f"A{n}" for n in range(15, 20)]
    wanted += [f"{part}{n}" for part in "BCD" for n in range(1, 10)]

    assert list(rows()) == wanted


def test_page_is_generated_from_the_rows_and_marks() -> None:
    assert behaviours.PAGE.read_text(encoding="utf-8") == behaviours.page()


def test_row_is_tested_unless_it_is_lacking() -> None:
    untested = {row for row, its in rows().items() if its.get("lacking") == "all"}

    assert {mark.row for mark in marks()} == rows().keys() - untested


def test_every_tested_row_has_a_daily_test() -> None:
    nightly = {mark.row for mark in marks() if mark.nightly}
    daily = {mark.row for mark in marks() if not mark.nightly}

    assert nightly - daily == set()


@pytest.mark.parametrize("row", rows())
def test_behaviour_is_short(row: str) -> None:
    assert len(rows()[row]["does"].split()) <= WORDS_MAX
