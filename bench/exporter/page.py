"""The tables of docs/performance.md about the exporter beside others and its soak, from the figures of a run.

python -m bench --only peers,soak --json FILE && python -m bench.exporter.page FILE
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bench.exporter.turns import WATCHED
from bench.figures import say

_PEERS: Final = (
    ("series", "series"),
    ("one scrape: median, p99", "one scrape"),
    ("a series of it", "one scrape, a series of it"),
    ("CPU of a scrape", "CPU of a scrape"),
    ("a series of it", "CPU of a scrape, a series of it"),
    ("CPU without a scrape", "CPU without a scrape"),
    (WATCHED, WATCHED),
    ("1000 series of it", f"{WATCHED}, 1000 series"),
    ("resident memory", "resident memory"),
    ("a series of it", "resident memory, a series"),
)
_SOAK: Final = ("resident memory", "open files", "threads", "size of a scrape")
_WHEN: Final = ("start", "middle", "end")

_Figures = Mapping[str, Mapping[str, Any]]


def peers(figures: _Figures) -> Iterator[str]:
    """A column for each exporter that was measured; ratios are to ours."""
    names = [what.removeprefix("series, ") for what in figures if what.startswith("series, ")]
    yield _row("median (ratio to ours)", *names)
    yield _row(*["---"] * (1 + len(names)))
    for told, what in _PEERS:
        found = [figures[f"{what}, {name}"] for name in names]
        yield _row(told, *(_cell(each, p99="p99" in told, ratio=what != "series") for each in found))


def soak(figures: _Figures) -> Iterator[str]:
    """A row for each that could grow, and the verdict."""
    yield _row("median of a tenth (ratio to the start)", *_WHEN)
    yield _row(*["---"] * (1 + len(_WHEN)))
    for what in _SOAK:
        yield _row(what, *(_cell(figures[f"{what}, {when}"], ratio=when != "start") for when in _WHEN))
    yield from ("", *(f"{what}: {each['median']:.3f}" for what, each in figures.items() if "what grew most" in what))


def _cell(found: Mapping[str, Any], *, ratio: bool, p99: bool = False) -> str:
    told = [_shown(found["median"], found["unit"])]
    if p99 and found["p99"] is not None:
        told.append(_shown(found["p99"], found["unit"]))
    times = f" ({found['ratio']:.2f})" if ratio and found["ratio"] is not None else ""
    return ", ".join(told) + times


def _shown(value: float, unit: str) -> str:
    digits = 0 if value >= 100 or not unit else 1 if value >= 1 else 2
    return f"{value:,.{digits}f} {unit.replace('% of a core', '%')}".rstrip()


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _main(file: str) -> None:
    found = json.loads(Path(file).read_text(encoding="utf-8"))
    say(str(found["conditions"]))
    for part, rendered in (("peers", peers), ("soak", soak)):
        figures = {each["what"]: each for each in found["figures"] if each["part"] == part}
        if figures:
            say("\n".join(["", *rendered(figures)]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
