"""Tables that fit a terminal: less important columns are left out, long cells and long lists are cut. Pure."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from gpuwarden.format import printable

GAP: Final = 2
"""Spaces between two columns."""

CELL_MIN: Final = 8
"""A longer cell may be cut to this many characters."""

_COMMAND: Final = re.compile(r"`[^`]*`")


class Line(str):
    """A line with a style of rich, such as `bold red`."""

    __slots__ = ("style",)
    style: str

    def __new__(cls, text: str, style: str = "") -> Self:
        """Make a line."""
        self = super().__new__(cls, text)
        self.style = style
        return self


@dataclass(frozen=True)
class Column:
    """A heading. The column with the highest `leave` is left out first; 0 always stays."""

    head: str
    leave: int = 0
    right: bool = False


@dataclass(kw_only=True)
class Row:
    """Cells, and lines below them that belong to them."""

    cells: Sequence[str]
    style: str = ""
    below: list[Line] = field(default_factory=list)


def table(columns: Sequence[Column], rows: Sequence[Row], width: int | None) -> list[list[Line]]:
    """The heading, then each row, as blocks of lines of at most `width` characters; `None` means any width."""
    cells = [[printable(cell) for cell in row.cells] for row in rows]
    widths = [max([len(column.head), *(len(row[at]) for row in cells)]) for at, column in enumerate(columns)]
    shown = _fit(columns, widths, width)
    head = [column.head for column in columns]
    lines = [_line([line[at] for at in shown], [columns[at] for at in shown], [widths[at] for at in shown])
             for line in (head, *cells)]  # fmt: skip
    blocks = [[Line(lines[0], "dim")]] if rows else []
    for row, line in zip(rows, lines[1:], strict=True):
        blocks.append([Line(line, row.style), *(Line(cut(each, width), each.style) for each in row.below)])
    return blocks


def _fit(columns: Sequence[Column], widths: list[int], width: int | None) -> list[int]:
    """The columns that are shown. Changes `widths`."""
    shown = list(range(len(columns)))
    if width is None:
        return shown
    while (excess := sum(widths[at] for at in shown) + GAP * (len(shown) - 1) - width) > 0:
        leavable = [at for at in shown if columns[at].leave]
        widest = max(shown, key=lambda at: widths[at])
        if leavable:
            shown.remove(max(leavable, key=lambda at: columns[at].leave))
        elif widths[widest] > CELL_MIN:
            widths[widest] = max(CELL_MIN, widths[widest] - excess)
        else:
            break
    return shown


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    parts = (
        cut(cell, width).rjust(width) if column.right else cut(cell, width).ljust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    )
    return (" " * GAP).join(parts).rstrip()


def cut(text: str, width: int | None) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if width is None or len(text) <= width else text[: max(0, width - 1)] + "…"


def wrapped(text: str, width: int | None, indent: int) -> list[str]:
    """The text in lines of at most `width` characters, which begin after the first at `indent`.

    A command between backquotes stays in one line, so that it can be copied.
    """
    if width is None or len(text) <= width or width <= 2 * indent:
        return [text]
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", "\xa0"), text)
    lines = textwrap.wrap(whole, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def shortened(blocks: Sequence[Sequence[Line]], room: int | None) -> list[Line]:
    """The lines of the blocks. Without room for all, blocks are cut to their first line, then left out and counted."""
    if room is None or sum(map(len, blocks)) <= room:
        return [line for block in blocks for line in block]
    if len(blocks) > room:
        kept = max(0, room - 1)
        return [*(block[0] for block in blocks[:kept]), Line(f"  … and {len(blocks) - kept} more", "dim")]
    lines, spare = list[Line](), room - len(blocks)
    for block in blocks:
        whole = len(block) - 1 <= spare
        lines += block if whole else block[:1]
        spare -= len(block) - 1 if whole else 0
    return lines


def shares(wanted: Iterable[int], room: int) -> list[int]:
    """Divide `room` lines: each gets what it wants or an equal share of the rest."""
    needs = list(wanted)
    given = [0] * len(needs)
    for at in sorted(range(len(needs)), key=lambda at: needs[at]):
        left = room - sum(given)
        others = sum(1 for each in range(len(needs)) if not given[each] and needs[each])
        given[at] = min(needs[at], left // max(1, others))
    return given
