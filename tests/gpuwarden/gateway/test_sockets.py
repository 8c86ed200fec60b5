"""The sockets in the workers' folders, also where a worker is hostile."""

import os
import socket
import stat
from pathlib import Path

import pytest

from gpuwarden.gateway.sockets import Sockets
from gpuwarden.gateway.wire import SOCKET_NAME


class _Seen:
    def __init__(self, directory: Path) -> None:
        self.sockets = Sockets(directory)
        self.events: list[str] = []

    def look(self) -> list[str]:
        """What changed."""
        self.events.clear()
        self.sockets.look(
            opened=lambda name, _: self.events.append(f"+{name}"), closed=lambda name: self.events.append(f"-{name}")
        )
        return self.events


@pytest.fixture
def seen(host_dir: Path) -> _Seen:
    return _Seen(host_dir)


def test_sockets_come_and_go_with_their_folders(seen: _Seen, host_dir: Path) -> None:
    (host_dir / "w1").mkdir()
    assert seen.look() == ["+w1"]
    assert seen.look() == []

    (host_dir / "w1" / SOCKET_NAME).unlink()
    (host_dir / "w1").rmdir()
    assert seen.look() == ["-w1"]
    assert seen.sockets.bound == {}


def test_only_the_folders_owner_may_use_a_socket(seen: _Seen, host_dir: Path) -> None:
    (host_dir / "w1").mkdir()
    if os.geteuid() == 0:
        os.chown(host_dir / "w1", 12345, 12345)
    seen.look()

    its, folder = (host_dir / "w1" / SOCKET_NAME).lstat(), (host_dir / "w1").lstat()
    assert (its.st_uid, stat.S_IMODE(its.st_mode)) == (folder.st_uid, 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_socket_follows_the_owner_of_its_folder(seen: _Seen, host_dir: Path) -> None:
    """The kubelet creates a folder as root, and the worker's pod then gives it to the worker."""
    (host_dir / "w1").mkdir()
    seen.look()
    os.chown(host_dir / "w1", 12345, 12345)

    assert seen.look() == ["-w1", "+w1"]
    assert (host_dir / "w1" / SOCKET_NAME).lstat().st_uid == 12345
    assert seen.look() == []


def test_what_is_no_folder_gets_no_socket(seen: _Seen, host_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (host_dir / "link").symlink_to(tmp_path / "elsewhere")
    (host_dir / "file").write_text("")
    (host_dir / ".hidden").mkdir()

    assert seen.look() == []
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_socket_that_a_worker_replaces_is_made_again(seen: _Seen, host_dir: Path, tmp_path: Path) -> None:
    (host_dir / "w1").mkdir()
    (tmp_path / "secret").write_text("kept")
    seen.look()

    path = host_dir / "w1" / SOCKET_NAME
    path.unlink()
    path.symlink_to(tmp_path / "secret")

    assert seen.look() == ["-w1", "+w1"]
    assert path.is_socket()
    assert (tmp_path / "secret").read_text() == "kept"


def test_folder_that_cannot_have_a_socket_costs_itself_only(
    seen: _Seen, host_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (host_dir / "w1" / SOCKET_NAME).mkdir(parents=True)
    (host_dir / "w2").mkdir()

    assert seen.look() == ["+w2"]
    assert seen.look() == []
    assert capsys.readouterr().out.count("no socket in this folder") == 1


def test_long_path_can_have_a_socket(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 120)
    (directory / "w1").mkdir(parents=True)
    seen = _Seen(directory)

    assert seen.look() == ["+w1"]
    assert isinstance(seen.sockets.bound["w1"].listener, socket.socket)


@pytest.mark.parametrize(
    ("folder", "worker", "may"),
    [
        ("w1", "w1", True),
        ("w1", "w1-0", True),
        ("w1", "w1-12", True),
        ("w1", "w1-64", False),
        ("w1", "w1-01", False),
        ("w1", "w1-x", False),
        ("w1", "w1-", False),
        ("w1", "w2", False),
        ("w1", "w1-7", False),
        ("w1", "w10", False),
    ],
)
def test_worker_is_named_as_its_folder(seen: _Seen, host_dir: Path, folder: str, worker: str, may: bool) -> None:
    (host_dir / "w1-7").mkdir()

    assert seen.sockets.may_be(folder, worker) is may


def test_name_of_a_folder_that_was_removed_stays_its_own(seen: _Seen, host_dir: Path) -> None:
    (host_dir / "w1").mkdir()
    (host_dir / "w1-7").mkdir()
    seen.look()
    (host_dir / "w1-7" / SOCKET_NAME).unlink()
    (host_dir / "w1-7").rmdir()
    seen.look()

    assert not seen.sockets.may_be("w1", "w1-7")
    assert seen.sockets.may_be("w1", "w1-8")
