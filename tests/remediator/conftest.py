"""Rooms for the tests of `remediator`: a ledger and a queue in real SQLite files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.jobstore import JobStore
from remediator.ledger import Ledger


@pytest.fixture
def ledger_file(tmp_path: Path) -> Path:
    """Where the ledger's database is, or will be."""
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger_url(ledger_file: Path) -> str:
    return f"sqlite:///{ledger_file}"


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """An empty ledger."""
    opened = Ledger.open(ledger_url)
    yield opened
    opened.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    """An empty queue."""
    opened = JobStore.open(f"sqlite:///{tmp_path}/queue.db")
    yield opened
    opened.close()
