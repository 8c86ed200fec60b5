"""One executor for each ledger, where the ledger is a file."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from remediator.executor.lock import AlreadyExecutingError, ExecutorLock
from remediator.ledger.ledger import Ledger
from tests.remediator.builders import HOST
from tests.remediator.executor.builders import lock


@pytest.mark.parametrize("spelling", ["sqlite:///{folder}/ledger.db", "sqlite:///{link}/ledger.db"])
def test_a_second_executor_is_refused_and_names_the_first(ledger: Ledger, tmp_path: Path, spelling: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    url = spelling.format(folder=tmp_path, link=link)
    with (
        closing(ExecutorLock(ledger, host=HOST)),
        pytest.raises(AlreadyExecutingError, match=rf"pid {os.getpid()} holds"),
    ):
        lock(url)

    lock(url)
