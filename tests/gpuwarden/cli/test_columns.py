"""Tables that fit a terminal."""

import pytest

from gpuwarden.cli.columns import Column, Line, Row, cut, shares, shortened, table, wrapped

COLUMNS = (Column("HOST"), Column("UUID", 2), Column("AGE", right=True), Column("NOTE", 1))
ROW = Row(cells=("box1", "GPU-1234567890", "7s", "a note"), below=[Line("    tenant-with-a-long-name: 7 GiB")])


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (None, "box1  GPU-1234567890   7s  a note"),
        (33, "box1  GPU-1234567890   7s  a note"),
        (32, "box1   7s  a note"),
        (16, "box1   7s"),
        (5, "box1   7s"),
    ],
)
def test_less_important_columns_are_left_out_first(width: int | None, line: str) -> None:
    assert [block[0] for block in table(COLUMNS, [ROW], width)][1] == line


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, ["fix: run `gpuwarden gpu release A`, then go-on"]),
        (46, ["fix: run `gpuwarden gpu release A`, then go-on"]),
        (40, ["fix: run `gpuwarden gpu release A`, then", "    go-on"]),
        (20, ["fix: run", "    `gpuwarden gpu release A`,", "    then go-on"]),
        (8, ["fix: run `gpuwarden gpu release A`, then go-on"]),
    ],
)
def test_long_line_is_broken_between_words_and_not_in_a_command(width: int | None, lines: list[str]) -> None:
    assert wrapped("fix: run `gpuwarden gpu release A`, then go-on", width, 4) == lines


def test_longest_cells_are_cut_once_no_column_can_be_left_out() -> None:
    rows = [Row(cells=("a-host-with-a-long-name", "gpu"))]

    (head, *_), (line, *_) = table((Column("HOST"), Column("GPU")), rows, 20)

    assert (head, line) == ("HOST             GPU", "a-host-with-a-…  gpu")


def test_control_characters_are_escaped() -> None:
    assert table((Column("HOST"),), [Row(cells=("a\x1b[2J",))], None)[1][0] == "a\\x1b[2J"


def test_table_without_rows_is_empty() -> None:
    assert table(COLUMNS, [], 80) == []


def blocks(*sizes: int) -> list[list[Line]]:
    return [[Line(f"{at}.{line}") for line in range(size)] for at, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("room", "lines"),
    [
        (None, ["0.0", "1.0", "1.1", "1.2", "2.0", "2.1"]),
        (6, ["0.0", "1.0", "1.1", "1.2", "2.0", "2.1"]),
        (5, ["0.0", "1.0", "1.1", "1.2", "2.0"]),
        (4, ["0.0", "1.0", "2.0", "2.1"]),
        (3, ["0.0", "1.0", "2.0"]),
        (2, ["0.0", "  … and 2 more"]),
        (0, ["  … and 3 more"]),
    ],
)
def test_long_list_loses_details_then_rows(room: int | None, lines: list[str]) -> None:
    assert shortened(blocks(1, 3, 2), room) == lines


@pytest.mark.parametrize(
    ("wanted", "room", "given"),
    [([2, 30, 3, 0, 9], 44, [2, 30, 3, 0, 9]), ([2, 30, 3, 0, 9], 20, [2, 8, 3, 0, 7]), ([50, 50], 0, [0, 0])],
)
def test_rows_are_shared_out(wanted: list[int], room: int, given: list[int]) -> None:
    assert shares(wanted, room) == given


def test_text_is_cut_with_an_ellipsis() -> None:
    assert [cut("abcdef", width) for width in (None, 6, 5, 1)] == ["abcdef", "abcdef", "abcd…", "…"]
