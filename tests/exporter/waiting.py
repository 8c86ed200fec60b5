"""Waiting with a bound, never by sleeping and hoping."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(ask: Callable[[], T | None], *, timeout_s: float = 20.0) -> T:
    """What `ask` answers once it is true."""
    give_up = time.monotonic() + timeout_s
    while not (answer := ask()):
        assert time.monotonic() < give_up, f"not true within {timeout_s} s"
        time.sleep(0.01)
    return answer


def within(timeout_s: float, act: Callable[[], T]) -> T:
    """What `act` returns, or a failure where it hangs."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(act()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert answers, f"no answer within {timeout_s} s"
    return answers[0]
