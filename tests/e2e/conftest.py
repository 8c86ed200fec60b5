"""Rooms for the end-to-end tests: a folder short enough for sockets."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for everything one stage writes."""
    return tmp_path_factory.mktemp("stage")
