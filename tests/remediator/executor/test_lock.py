"""The executor lock of a ledger in a file."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from remediator.executor.lock import AlreadyExecutingError, ExecutorLock
from remediator.ledger.ledger import Ledger
from tests.remediator.builders import HOST
from tests.remediator.executor.builders import lock


@pytest.mark.parametrize("spelling", ["sqlite:///{folder}/ledger.db", "sqlite:///{link}/ledger.db"])
def test_second_executor_is_refused_with_the_pid_of_the_first(ledger: Ledger, tmp_path: Path, spelling: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    url = spelling.format(folder=tmp_path, link=link)
    with (
        closing(ExecutorLock(ledger, host=HOST)),
        pytest.raises(AlreadyExecutingError, match=rf"pid {os.getpid()} holds"),
    ):
        lock(url)

    lock(url)
