"""A folder for state files, and the runs in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpuwarden.supervisor.guarded import Guarded


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    (tmp_path / "host").write_text("host1\n")
    found = Guarded(tmp_path)
    yield found
    found.close()
