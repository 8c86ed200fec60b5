"""Logs are bounded, while the part that writes one has it open."""

from pathlib import Path

import pytest

from deploy.standalone.log_rotation import rotate


def test_a_small_log_and_none_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "part.log").write_text("a line\n")

    assert not rotate(tmp_path / "part.log", size_max_bytes=100)
    assert not rotate(tmp_path / "none.log", size_max_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["part.log"]


def test_a_log_that_is_written_moves_up_and_the_oldest_goes(tmp_path: Path) -> None:
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


def test_without_room_for_a_copy_everything_stays_as_it_was(tmp_path: Path) -> None:
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
