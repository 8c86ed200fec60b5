"""Logs are bounded while a program has them open."""

from pathlib import Path

import pytest

from deploy.standalone.log_rotation import rotate


def test_small_or_missing_log_is_not_rotated(tmp_path: Path) -> None:
    (tmp_path / "part.log").write_text("a line\n")

    assert not rotate(tmp_path / "part.log", size_max_bytes=100)
    assert not rotate(tmp_path / "none.log", size_max_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["part.log"]


def test_open_log_is_rotated_and_the_oldest_is_removed(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    with log.open("a") as part:
        for number in range(4):
            part.write(f"{number}" * 50)
            part.flush()
            assert rotate(log, size_max_bytes=10, kept=2)
        part.write("last")

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "part.log": "last", "part.log.1": "3" * 50, "part.log.2": "2" * 50
    }  # fmt: skip


def test_full_disk_leaves_all_logs_unchanged(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    log.write_text("b" * 50)
    (tmp_path / "part.log.1").write_text("a" * 50)
    (tmp_path / "part.log.new").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left on device"):
        rotate(log, size_max_bytes=10)

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "part.log": "b" * 50, "part.log.1": "a" * 50
    }  # fmt: skip
    assert rotate(log, size_max_bytes=10)
    assert (tmp_path / "part.log.2").read_text() == "a" * 50
