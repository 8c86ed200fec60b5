"""Rooms for the tests of `deploy`: a PATH without the parts, an engine, a place that only root may use."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from deploy.standalone import debian_packages
from testbed.docker_engine import Engine, NoEngine, docker_engine, reachable_engine


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PATH is one folder with apt-get, dpkg-deb and what they call, so that no part is found on it."""
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
    """An empty `.parts` whose package lists are fetched already."""
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "apt").symlink_to(package_lists)
    return folder


@pytest.fixture(scope="session")
def package_lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian's package lists, fetched once for all tests."""
    folder = tmp_path_factory.mktemp("package-lists")
    try:
        debian_packages.unpack("probe", ["busybox-static"], parts_dir=folder)
    except debian_packages.PartMissing as missing:
        pytest.skip(f"Debian's packages cannot be fetched here: {missing}")
    return folder / "apt"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The Docker engine of this host, or a private one."""
    with docker_engine(tmp_path_factory.mktemp("engine")) as found:
        if isinstance(found, NoEngine):
            pytest.skip(found.because)
        yield found


@pytest.fixture
def client(engine: Engine) -> Iterator[docker.DockerClient]:
    """A client of `engine`, closed afterwards."""
    client = docker.DockerClient(base_url=engine.base_url)
    yield client
    client.close()


@pytest.fixture
def no_reachable_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root, and no engine to be reached, so that `docker_engine` has to start a private one."""
    if os.geteuid() != 0:
        pytest.skip("only root may start a private Docker engine")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody-listens-here")
    assert isinstance(reachable_engine(os.environ), NoEngine)
