"""The pages that are written from the code, and never lag behind it."""

import shutil
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter import reference
from exporter.settings import Settings
from tests.exporter import golden


def test_the_pages_in_docs_are_those_of_this_code() -> None:
    """Where this fails: `python -m exporter.reference`."""
    assert reference.main(["--check"]) == 0


@pytest.mark.parametrize("page", ["metrics.md", "settings-exporter.md"])
@pytest.mark.parametrize("lag", ["changed", "missing"])
def test_a_page_that_lags_is_named_left_alone_by_a_check_and_mended_by_writing(
    page: str, lag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert capsys.readouterr().err == f"{tmp_path / page} lags behind the code: python -m exporter.reference\n"
    assert (tmp_path / page).read_text() == whole


def test_every_published_series_has_its_row_and_no_row_is_left_over() -> None:
    published = {
        sample.name for family in text_string_to_metric_families(golden.PATH.read_text()) for sample in family.samples
    }
    rows = {line.split("`")[1] for line in reference.metrics_page().splitlines() if line.startswith("| `")}

    assert published == rows == reference.ABSENT.keys()


def test_every_setting_has_its_row_with_the_variable_that_sets_it() -> None:
    page = reference.settings_page()

    for name in Settings.model_fields:
        assert f"| `--{name.replace('_', '-')}` | `GPUWARDEN_EXPORTER_{name.upper()}` |" in page
