"""Fixtures for the tests of the test bed."""

import os
from pathlib import Path

import pytest

from testbed.docker_engine import NoEngine, reachable_engine


@pytest.fixture
def no_reachable_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No reachable engine, so that `docker_engine` starts a private one; needs root."""
    if os.geteuid() != 0:
        pytest.skip("only root may start a private Docker engine")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody-listens-here")
    assert isinstance(reachable_engine(os.environ), NoEngine)
