"""The plots of what gpuwarden costs: their figures, and their files."""

import json
from pathlib import Path

import pytest

from bench import plots
from bench.figures import BenchError
from bench.plots import Curve, Measured


@pytest.mark.parametrize("name", plots.PLOTS)
def test_plot_has_its_figures_and_its_file(name: str) -> None:
    figures = plots.read(sorted(plots.RESULTS.glob("*.json")))
    _, panels = plots.PLOTS[name]

    drawn = (plots.IMAGES / f"{name}.svg").read_text()

    values = [
        measured.value for panel in panels for each in panel.curves for _, measured in plots.points(each, figures)
    ]
    assert len(values) >= 8
    assert [value for value in values if f">{value:g}<" not in drawn] == [], "run `python -m bench.plots`"


def test_newest_file_counts(tmp_path: Path) -> None:
    for date, median in (("2026-01-01", 1.0), ("2026-01-02", 2.0)):
        run = {"conditions": {"date": date}, "figures": [{"what": "10 workers: a", "median": median}]}
        (tmp_path / f"{date}.json").write_text(json.dumps(run))

    found = plots.read(sorted(tmp_path.glob("*.json")))

    assert found == {"10 workers: a": Measured(2.0, "2026-01-02")}


def test_points_are_in_ascending_order() -> None:
    figures = {f"{count} workers: a": Measured(1.0, "") for count in ("1,000", "20")}

    assert [count for count, _ in plots.points(Curve("a", plots.WORKERS + "a$"), figures)] == [20, 1000]


def test_curve_without_figures_is_an_error() -> None:
    with pytest.raises(BenchError, match="no figure for 'a'"):
        plots.points(Curve("a", plots.WORKERS + "a$"), {})
