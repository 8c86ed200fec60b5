"""Rooms for the tests of `remediator`: a ledger and a queue in real SQLite files, and a bounded wait."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwarden.jobstore import JobStore
from remediator.ledger import Ledger

WITHIN_S = 15.0
POLL_S = 0.01


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Call a condition until it holds; after a bound, fail with what was awaited."""

    def wait(condition: Callable[[], object], what: str, *, within_s: float = WITHIN_S) -> None:
        give_up_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() >= give_up_s:
                pytest.fail(f"not within {within_s:g} s: {what}")
            time.sleep(POLL_S)

    return wait


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
