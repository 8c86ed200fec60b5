"""Generated pages are up to date."""

import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from exporter import reference
from exporter.collectors.family import counter, gauge
from exporter.settings import Settings
from tests.exporter import golden


def test_pages_in_docs_match_the_code() -> None:
    """To fix it: `python -m exporter.reference`."""
    assert reference.main(["--check"]) == 0


@pytest.mark.parametrize("page", ["metrics.md", "settings-exporter.md"])
@pytest.mark.parametrize("lag", ["changed", "missing"])
def test_outdated_page_is_named(page: str, lag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics.md", "settings-exporter.md"):
        shutil.copy(reference.DOCS / name, tmp_path)
    whole = (tmp_path / page).read_text()
    (tmp_path / page).unlink()
    if lag == "changed":
        (tmp_path / page).write_text(whole.replace("absent", "there").replace("port", "door"))

    checked = reference.main(["--check", "--docs", str(tmp_path)])
    before = (tmp_path / page).exists()
    written = reference.main(["--docs", str(tmp_path)])

    assert (checked, before, written) == (1, lag == "changed", 0)
    assert capsys.readouterr().err == f"{tmp_path / page} is outdated: run python -m exporter.reference\n"
    assert (tmp_path / page).read_text() == whole


def rows(columns: int) -> dict[str, list[str]]:
    """Rows of the tables with so many columns, by metric: those with meanings have 5, those with sources 3."""
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in reference.metrics_page().splitlines() if line[:3] == "| `"]
    assert {len(cells) for cells in found} == {3, 5}
    wanted = [[cell.strip() for cell in cells] for cells in found if len(cells) == columns]
    assert len({cells[0] for cells in wanted}) == len(wanted)
    return {cells[0].strip("`"): cells for cells in wanted}


def test_every_published_series_has_its_rows_and_every_row_a_series() -> None:
    published = {
        sample.name for family in text_string_to_metric_families(golden.PATH.read_text()) for sample in family.samples
    }

    assert published == rows(5).keys() == rows(3).keys()


def test_texts_of_metrics_are_short() -> None:
    assert [name for name, cells in rows(5).items() if len(cells[-1].split()) > 25] == []
    assert [name for name, cells in rows(3).items() if len(cells[-1].split()) > 40] == []


def test_texts_of_settings_are_short() -> None:
    texts = {name: str(field.description) for name, field in Settings.model_fields.items()}

    assert [name for name, text in texts.items() if len(text.split()) > 20] == []


def test_metric_without_a_heading_is_refused() -> None:
    family = gauge("gpuwarden_other", "", (), (), source="here", absent="never")

    with (
        patch.object(reference, "COLLECTORS", {"gpus": lambda _: [family]}),
        pytest.raises(ValueError, match="gpuwarden_other is under no heading"),
    ):
        reference.metrics_page()


def test_every_series_has_its_source_on_the_page_and_not_in_the_scrape() -> None:
    sources = {name: cells[1] for name, cells in rows(3).items()}

    assert sources.keys() == reference.absent().keys()
    assert all(re.search("[a-z]{2}", source) for source in sources.values())
    assert sources["gpuwarden_container_oom_kills_total"].startswith("`oom_kill` in cgroup `memory.events`")
    assert "nvmlDeviceGetProcessUtilization" in sources["gpuwarden_container_gpu_utilization_ratio"]
    assert not [source for source in sources.values() if source in golden.PATH.read_text()]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        pytest.param(
            gauge("gpuwarden_exporter_info", "", (), (), source=" ", absent="never"),
            "gpuwarden_exporter_info",
            id="gauge without a source",
        ),
        pytest.param(
            counter("gpuwarden_container_unknown_samples", "", (), (), source="", absent="never"),
            "samples_total",
            id="counter without a source",
        ),
        pytest.param(
            gauge("gpuwarden_build_info", "", (), (), source="here", absent=""), "absent", id="no absent text"
        ),
        pytest.param(GaugeMetricFamily("gpuwarden_exporter_info", ""), "family.py", id="other class"),
    ],
)
def test_series_without_a_source_fails_the_page(family: Metric, message: str) -> None:
    with (
        patch.object(reference, "COLLECTORS", {"gpus": lambda _: [family]}),
        pytest.raises((TypeError, ValueError), match=message),
    ):
        reference.metrics_page()


def test_every_setting_has_a_row_with_its_variable() -> None:
    page = reference.settings_page()

    for name in Settings.model_fields:
        assert f"| `--{name.replace('_', '-')}` | `GPUWARDEN_EXPORTER_{name.upper()}` |" in page
