"""`python -m bench.plots`: draw the plots of docs/explanation/performance.md from bench/results.

A file there is the output of `python -m bench --json FILE`. If two files have the same figure, the last file by name
counts. `pip install -e '.[bench]'` installs matplotlib.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench.figures import BenchError, print_text
from deploy.standalone.stack import CHECKOUT

RESULTS: Final = Path(__file__).with_name("results")
IMAGES: Final = CHECKOUT / "docs" / "images"

WORKERS: Final = r"^([\d,]+) workers: "
FULL_HOST: Final = "64 containers"
TENANTS: Final = r"^([\d,]+) workers with tenants and servers: "


class Curve(NamedTuple):
    """Figures by number of workers. `pattern` finds them: its group is the number, or `at` is."""

    label: str
    pattern: str
    at: int | None = None


class Measured(NamedTuple):
    """A figure and the day of its measurement."""

    value: float
    date: str


class Panel(NamedTuple):
    """One diagram: its axes and curves."""

    y: str
    curves: tuple[Curve, ...]


PLOTS: Final = {
    "cost-of-a-host": (
        "workers, or containers, on one host",
        (
            Panel(
                "milliseconds",
                (
                    Curve("one sample of the host", WORKERS + r"one look, Sampler\.sample\(\)$"),
                    Curve("one scrape over HTTP", WORKERS + r"one scrape over HTTP$"),
                    Curve(f"one scrape, {FULL_HOST}", r"^full host: one scrape over HTTP$", 64),
                ),
            ),
            Panel(
                "% of one core",
                (
                    Curve("exporter, workers", WORKERS + r"CPU, sampling every second$"),
                    Curve(f"exporter, {FULL_HOST}, 8 GPUs", r"^full host, all compute: CPU, ", 64),
                ),
            ),
        ),
    ),
    "cost-of-a-fleet": (
        "workers of the fleet, 8 per host",
        (
            Panel(
                "rule evaluation, % of the interval",
                (
                    Curve("workers only", WORKERS + r"all groups, of the time there is$"),
                    Curve("with VRAM budgets and servers", TENANTS + r"all groups, of the time there is$"),
                ),
            ),
            Panel(
                "CPU of Prometheus, % of one core",
                (
                    Curve("workers only", WORKERS + r"CPU of Prometheus$"),
                    Curve("with VRAM budgets and servers", TENANTS + r"CPU of Prometheus$"),
                ),
            ),
        ),
    ),
}
"""The plots by file name: the axis that they share, and their panels."""


def main() -> int:
    """Draw every plot."""
    try:
        figures = read(sorted(RESULTS.glob("*.json")))
        for name, (x, panels) in PLOTS.items():
            _draw(IMAGES / f"{name}.svg", x, panels, figures)
            print_text(f"docs/images/{name}.svg")
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def read(files: Iterable[Path]) -> dict[str, Measured]:
    """Medians by name."""
    found = {}
    for file in files:
        run = json.loads(file.read_text(encoding="utf-8"))
        for each in run["figures"]:
            found[each["what"]] = Measured(float(each["median"]), run["conditions"]["date"])
    return found


def points(curve: Curve, figures: Mapping[str, Measured]) -> list[tuple[int, Measured]]:
    """Each number of workers with its figure, in ascending order.

    Raises:
        BenchError: there is none.
    """
    found = []
    for what, measured in figures.items():
        if match := re.search(curve.pattern, what):
            found.append((int(match[1].replace(",", "")) if curve.at is None else curve.at, measured))
    if not found:
        raise BenchError(f"no figure for {curve.label!r} in {RESULTS}: run `python -m bench --json FILE`")
    return sorted(found)


def _draw(file: Path, x: str, panels: Sequence[Panel], figures: Mapping[str, Measured]) -> None:
    try:
        from matplotlib import rc_context  # noqa: PLC0415 - of the extra `bench`
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise BenchError(f"{error}: pip install -e '.[bench]'") from error
    # Text stays text, and the same figures give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": file.name, "font.size": 9, "font.family": "sans-serif"}):
        drawing = Figure(figsize=(9, 3.4), layout="constrained")
        for axes, panel in zip(drawing.subplots(1, len(panels)), panels, strict=True):
            for number, curve in enumerate(panel.curves):
                found = points(curve, figures)
                counts, values = [count for count, _ in found], [measured.value for _, measured in found]
                label = f"{curve.label}, {max(measured.date for _, measured in found)}"
                axes.plot(counts, values, "o-" if len(found) > 1 else "D", color=f"C{number}", label=label)
                for at in zip(counts, values, strict=True):
                    above = (0, -12 if number % 2 else 6)
                    axes.annotate(
                        f"{at[1]:g}", at, textcoords="offset points", xytext=above, ha="center", color=f"C{number}"
                    )
            axes.set(xscale="log", yscale="log", xlabel=x, ylabel=panel.y)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.margins(0.12, 0.35)
            axes.grid(which="major", alpha=0.3)
            axes.legend(loc="upper left", frameon=False, fontsize=8)
        drawing.savefig(file, metadata={"Date": None, "Creator": "python -m bench.plots"})


if __name__ == "__main__":
    sys.exit(main())
