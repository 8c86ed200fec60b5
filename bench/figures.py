"""Figures and their table; waiting, timing and progress of a measurement."""

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
    """A measurement failed."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A private folder on the disk or in memory."""

    name: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row of the table: `count` measurements, and the ratio of their median to `against`."""

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
    """Summarise measurements; a greater value is worse.

    Args:
        part: of `python -m bench`.
        what: is measured.
        unit: of the values.
        found: the values; 100 or more have a p99.
        base: the value with ratio 1.
        against: its name.
    """
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
    """Format one row per figure."""
    rows = [("part", "what", "median", "p99", "worst", "n", "ratio")]
    for each in figures:
        p99 = "" if each.p99 is None else _format_value(each.p99, each.unit)
        ratio = "" if each.ratio is None else f"{each.ratio:.2f} x {each.against}"
        worst = _format_value(each.worst, each.unit) if each.count > 1 else ""
        rows.append((each.part, each.what, _format_value(each.median, each.unit), p99, worst, str(each.count), ratio))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 2 <= place <= 5 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def time_calls_ms(act: Callable[[], object], *, count: int) -> list[float]:
    """Durations of `count` calls, milliseconds."""
    found = []
    for _ in range(count):
        started_s = time.perf_counter()
        act()
        found.append((time.perf_counter() - started_s) * 1000)
    return found


def wait_until(holds: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Wait for a condition.

    Raises:
        BenchError: it does not hold in time.
    """
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise BenchError(f"timeout after {within_s:.0f} s: {what}")
        time.sleep(POLL_S)


def progress(text: str) -> None:
    """Print progress on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def print_text(text: str) -> None:
    """Print on stdout; ignore a reader that is gone, such as `head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _format_value(value: float, unit: str) -> str:
    digits = 0 if value >= 100 or not unit else 2  # a count has no unit
    return f"{value:,.{digits}f} {unit}".rstrip()
