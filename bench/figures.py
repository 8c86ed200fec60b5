"""A figure, the table of them, and how a measurement waits, times and says how far it is."""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05


class BenchError(Exception):
    """Something that is measured did not work at all; the message says what."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where files are written: a folder of ours on the disk or in memory, and which of the two it is."""

    name: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table: `count` measurements of one thing, and the median's ratio to another's."""

    part: str
    what: str
    unit: str
    median: float
    worst: float
    count: int
    p99: float | None = None
    ratio: float | None = None
    against: str = ""


def figure(
    part: str, what: str, unit: str, found: Sequence[float], *, base: float | None = None, against: str = ""
) -> Figure:
    """Sum up measurements of which more is worse; a p99 is told from 100 of them on. `base` is what 1 would be."""
    ordered, median = sorted(found), statistics.median(found)
    return Figure(
        part=part,
        what=what,
        unit=unit,
        median=median,
        worst=ordered[-1],
        count=len(ordered),
        p99=ordered[math.ceil(len(ordered) * 0.99) - 1] if len(ordered) >= 100 else None,
        ratio=median / base if base else None,
        against=against if base else "",
    )


def table(figures: Iterable[Figure]) -> str:
    """Every figure, a line each."""
    rows = [("part", "what", "median", "p99", "worst", "n", "ratio")]
    for each in figures:
        p99 = "" if each.p99 is None else _shown(each.p99, each.unit)
        ratio = "" if each.ratio is None else f"{each.ratio:.2f} x {each.against}"
        worst = _shown(each.worst, each.unit) if each.count > 1 else ""
        rows.append((each.part, each.what, _shown(each.median, each.unit), p99, worst, str(each.count), ratio))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 2 <= place <= 5 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def took_ms(act: Callable[[], object], *, count: int) -> list[float]:
    """How long each of `count` calls took, milliseconds."""
    found = []
    for _ in range(count):
        started_s = time.perf_counter()
        act()
        found.append((time.perf_counter() - started_s) * 1000)
    return found


def until(holds: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Wait for a condition.

    Raises:
        BenchError: it did not hold in time.
    """
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise BenchError(f"not within {within_s:.0f} s: {what}")
        time.sleep(POLL_S)


def progress(text: str) -> None:
    """Say on stderr how far we are."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print to whoever reads; one that has gone, as `head` does, is told no more, and nothing ends by it."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What could not be written is tried again as the program ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _shown(value: float, unit: str) -> str:
    digits = 0 if value >= 100 or not unit else 2  # a count has no unit
    return f"{value:,.{digits}f} {unit}".rstrip()
