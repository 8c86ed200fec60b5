"""Fixtures of the end-to-end tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for one stage. Its path is short enough for sockets."""
    return tmp_path_factory.mktemp("stage")
