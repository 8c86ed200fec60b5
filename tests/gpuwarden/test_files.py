"""Files that are replaced whole: old content or new, never a part."""

import os
import stat
from pathlib import Path

import pytest

from gpuwarden.files import atomic_open, atomic_write


@pytest.mark.parametrize("content", ["größer\r\n", b"\x00\xff\n"], ids=["text", "bytes"])
@pytest.mark.parametrize("before", [None, "longer than what comes next"], ids=["new", "there before"])
@pytest.mark.parametrize("many_writers", [False, True], ids=["one writer", "many writers"])
def test_the_file_holds_exactly_what_was_written(
    content: str | bytes, before: str | None, many_writers: bool, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_text(before)

    atomic_write(path, content, many_writers=many_writers, sync=True)

    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert names(tmp_path) == ["file"]


def test_a_reader_keeps_the_old_content_until_the_write_is_done(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with atomic_open(path) as file:
        file.write("new")
        file.flush()
        during = path.read_text()

    assert (during, path.read_text()) == ("old", "new")


def test_a_block_that_raises_leaves_the_old_file_and_no_scratch_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with pytest.raises(KeyboardInterrupt), atomic_open(path):
        raise KeyboardInterrupt

    assert (path.read_text(), names(tmp_path)) == ("old", ["file"])


def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with pytest.raises(OSError, match="No space left") as raised, atomic_open(path):
        raise OSError(28, "No space left on device")

    assert raised.value.filename == str(path)
    assert (path.read_text(), names(tmp_path)) == ("old", ["file"])


def test_the_scratch_file_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("untouched")
    (tmp_path / ".file.new").symlink_to(target)

    atomic_write(tmp_path / "file", "new")

    assert names(tmp_path) == ["elsewhere", "file"]
    assert (target.read_text(), (tmp_path / "file").read_text()) == ("untouched", "new")


def test_a_write_inside_a_write_wins_and_the_outer_one_fails(tmp_path: Path) -> None:
    """A signal handler of a job may write the file that the job is writing."""
    path = tmp_path / "file"

    outer = atomic_open(path)
    outer.__enter__().write("outer")
    atomic_write(path, "inner")
    with pytest.raises(FileNotFoundError):
        outer.__exit__(None, None, None)

    assert (path.read_text(), names(tmp_path)) == ("inner", ["file"])


def test_the_mode_is_the_files_from_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)

    with atomic_open(path, mode=0o600) as file:
        during = stat.S_IMODE(os.fstat(file.fileno()).st_mode)

    assert (during, stat.S_IMODE(path.stat().st_mode)) == (0o600, 0o600)


def names(folder: Path) -> list[str]:
    """What lies in a folder, sorted."""
    return sorted(each.name for each in folder.iterdir())
