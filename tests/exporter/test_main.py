"""Start of the exporter."""

from pathlib import Path

import pytest

from exporter import main
from gpuwarden.errors import GpuwardenError


def test_second_exporter_with_the_same_state_dir_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "exporter"
    main._lock_state_dir(folder)

    with pytest.raises(GpuwardenError, match=f"another exporter runs with --state-dir {folder}"):
        main._lock_state_dir(folder)


def test_missing_state_dir_does_not_end_the_exporter(tmp_path: Path) -> None:
    main._lock_state_dir(tmp_path / "missing" / "exporter")

    assert list(tmp_path.iterdir()) == []
