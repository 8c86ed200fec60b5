"""Rooms for the end-to-end tests: an engine and a folder short enough for sockets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.docker_engine import Engine, NoEngine, docker_engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The Docker engine of this host, or a private one."""
    with docker_engine(tmp_path_factory.mktemp("engine")) as found:
        if isinstance(found, NoEngine):
            pytest.skip(found.because)
        yield found


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for everything one stage writes."""
    return tmp_path_factory.mktemp("stage")
