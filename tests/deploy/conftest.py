"""Fixtures for the tests of `deploy`: a PATH without programs, and Debian's package lists."""

import shutil
from pathlib import Path

import pytest

from deploy.standalone import debian_packages


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PATH is one folder with apt-get, dpkg-deb and their helpers, so that it has no other program."""
    folder = tmp_path / "bare-path"
    folder.mkdir()
    for tool in ("apt-get", "dpkg-deb", "tar"):
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"{tool} is needed to unpack Debian's packages and is not on PATH")
        (folder / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def parts_dir(tmp_path: Path, package_lists: Path) -> Path:
    """An empty `.parts` with package lists."""
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "apt").symlink_to(package_lists)
    return folder


@pytest.fixture(scope="session")
def package_lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian's package lists, downloaded once for all tests."""
    folder = tmp_path_factory.mktemp("package-lists")
    try:
        debian_packages.unpack("probe", ["busybox-static"], parts_dir=folder)
    except debian_packages.PartMissing as missing:
        pytest.skip(f"Debian's packages cannot be fetched here: {missing}")
    return folder / "apt"
