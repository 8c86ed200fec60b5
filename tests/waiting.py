"""How tests wait: they poll a condition within a bound, and never sleep to wait."""

import time
from collections.abc import Callable
from typing import Final

import pytest

POLL_S: Final = 0.2


def eventually(holds: Callable[[], bool], *, within_s: float, what: str, log: Callable[[], str] = str) -> None:
    """Fail the test when it does not hold in time, saying `what` was awaited and what `log` says by then."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {within_s:.0f} s: {what}\n{log()}")
        time.sleep(POLL_S)
