"""Atomic writes and reloading files."""

import os
import stat
from pathlib import Path

import pytest

from gpuwarden.errors import GpuwardenError
from gpuwarden.files import ReloadingFile, atomic_open, atomic_write


@pytest.mark.parametrize("content", ["größer\r\n", b"\x00\xff\n"], ids=["text", "bytes"])
@pytest.mark.parametrize("before", [None, "longer than what comes next"], ids=["new", "there before"])
@pytest.mark.parametrize("many_writers", [False, True], ids=["one writer", "many writers"])
def test_atomic_write_stores_the_text(
    content: str | bytes, before: str | None, many_writers: bool, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_text(before)

    atomic_write(path, content, many_writers=many_writers, sync=True)

    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert names(tmp_path) == ["file"]


def test_reader_sees_the_old_content_until_the_write_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with atomic_open(path) as file:
        file.write("new")
        file.flush()
        during = path.read_text()

    assert (during, path.read_text()) == ("old", "new")


def test_failed_write_leaves_the_old_file_and_no_scratch_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with pytest.raises(KeyboardInterrupt), atomic_open(path):
        raise KeyboardInterrupt

    assert (path.read_text(), names(tmp_path)) == ("old", ["file"])


def test_full_disk_leaves_the_old_file_and_is_reported_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with pytest.raises(OSError, match="No space left") as raised, atomic_open(path):
        raise OSError(28, "No space left on device")

    assert raised.value.filename == str(path)
    assert (path.read_text(), names(tmp_path)) == ("old", ["file"])


def test_scratch_file_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("untouched")
    (tmp_path / ".file.new").symlink_to(target)

    atomic_write(tmp_path / "file", "new")

    assert names(tmp_path) == ["elsewhere", "file"]
    assert (target.read_text(), (tmp_path / "file").read_text()) == ("untouched", "new")


def test_nested_write_wins_and_the_outer_one_fails(tmp_path: Path) -> None:
    """A signal handler may write the file that its job is writing."""
    path = tmp_path / "file"

    outer = atomic_open(path)
    outer.__enter__().write("outer")
    atomic_write(path, "inner")
    with pytest.raises(FileNotFoundError):
        outer.__exit__(None, None, None)

    assert (path.read_text(), names(tmp_path)) == ("inner", ["file"])


def test_file_has_its_mode_from_the_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)

    with atomic_open(path, mode=0o600) as file:
        during = stat.S_IMODE(os.fstat(file.fileno()).st_mode)

    assert (during, stat.S_IMODE(path.stat().st_mode)) == (0o600, 0o600)


# --- reloading files


def number_in(path: Path) -> ReloadingFile[int]:
    return ReloadingFile([path], lambda: int(path.read_text()))


def test_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    number = number_in(path)

    assert (number.reload(), number.value) == (False, 1)


def test_changed_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    number = number_in(path)

    atomic_write(path, "2")

    assert (number.reload(), number.value, number.reload()) == (True, 2, False)


@pytest.mark.parametrize("bad", ["x", None], ids=["not a number", "missing"])
def test_invalid_file_keeps_the_value_and_is_read_each_time(bad: str | None, tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    number = number_in(path)

    path.unlink() if bad is None else atomic_write(path, bad)

    for _ in range(2):
        with pytest.raises((ValueError, FileNotFoundError)):
            number.reload()
    assert number.value == 1
    atomic_write(path, "2")
    assert (number.reload(), number.value) == (True, 2)


def test_unreadable_file_raises_at_first(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        number_in(tmp_path / "missing")


def test_change_of_a_named_file_is_noticed(tmp_path: Path) -> None:
    path, one, two = (tmp_path / name for name in ("config", "one", "two"))
    path.write_text("one")
    one.write_text("1")
    two.write_text("2")
    config = ReloadingFile(
        [path],
        lambda: (path.read_text(), (tmp_path / path.read_text()).read_text()),
        named=lambda value: [tmp_path / value[0]],
    )

    atomic_write(two, "not named yet")
    unnamed = config.reload()
    atomic_write(one, "11")
    named = config.reload()
    atomic_write(path, "two")
    config.reload()
    atomic_write(one, "not named any more")

    assert (unnamed, named, config.value, config.reload()) == (False, True, ("two", "not named yet"), False)


def test_files_that_change_during_each_read_raise(tmp_path: Path) -> None:
    reads = iter(range(100))

    with pytest.raises(GpuwardenError, match="files change faster than they can be read"):
        ReloadingFile([tmp_path], lambda: next(reads), named=lambda value: [tmp_path / str(value)])


def names(folder: Path) -> list[str]:
    """Names in a folder, sorted."""
    return sorted(each.name for each in folder.iterdir())
