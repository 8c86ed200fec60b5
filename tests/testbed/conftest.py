"""Rooms for the tests of the test bed."""

import os
from pathlib import Path

import pytest

from testbed.docker_engine import NoEngine, reachable_engine


@pytest.fixture
def no_reachable_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root, and no engine to be reached, so that `docker_engine` has to start a private one."""
    if os.geteuid() != 0:
        pytest.skip("only root may start a private Docker engine")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody-listens-here")
    assert isinstance(reachable_engine(os.environ), NoEngine)
