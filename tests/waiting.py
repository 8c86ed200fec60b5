"""Tests wait by polling with a timeout."""

import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import pytest

from gpuwarden.errors import GpuwardenError

POLL_S: Final = 0.02
POLL_MAX_S: Final = 0.1
"""Longest pause between two checks at first, seconds. The pause is four times the duration of a check."""
POLL_LATER_S: Final = 0.3
"""Longest pause of a long wait. A pause is at least a fortieth of the wait so far, to save CPU time."""
WITHIN_S: Final = 45.0

LATE_S: Final = 30.0
"""Timeout of an answer on a busy machine, seconds."""

T = TypeVar("T")


def eventually(
    holds: Callable[[], T | None],
    what: str = "it holds",
    *,
    within_s: float = WITHIN_S,
    log: Callable[[], str] = str,
) -> T:
    """Return the first true answer of `holds`. On timeout the test fails with `what` and `log`."""
    began_s = time.monotonic()
    started_s, deadline_s = began_s, began_s + within_s
    while not (answer := holds()):
        now_s = time.monotonic()
        if now_s > deadline_s:
            pytest.fail(f"not within {within_s:g} s: {what}\n{log()}")
        fortieth_s = min((now_s - started_s) / 40, POLL_LATER_S)
        time.sleep(max(min(max(POLL_S, 4 * (now_s - began_s)), POLL_MAX_S), fortieth_s))
        began_s = time.monotonic()
    return answer


def answered(ask: Callable[[], T]) -> T:
    """Return the answer of `ask`; retry on errors for `LATE_S`."""
    deadline_s = time.monotonic() + LATE_S
    while True:
        try:
            return ask()
        except GpuwardenError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(POLL_MAX_S)


def within(timeout_s: float, act: Callable[[], T]) -> T:
    """Return the result of `act`; the test fails if it hangs."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(act()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not answers:
        pytest.fail(f"no answer within {timeout_s:g} s")
    return answers[0]


def together(*acts: Callable[[], Any]) -> list[Any]:
    """Run these in concurrent threads; return the result or error of each."""
    start = threading.Barrier(len(acts))
    answers: list[Any] = [None] * len(acts)

    def run(number: int, act: Callable[[], Any]) -> None:
        start.wait()
        try:
            answers[number] = act()
        except Exception as error:  # noqa: BLE001 - shown by the test
            answers[number] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return answers
