"""How tests wait: they poll within a bound, and never sleep to wait."""

import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import pytest

from gpuwarden.errors import GpuwardenError

POLL_S: Final = 0.02
RESTS_S: Final = 0.1
"""How long to rest at most between two looks that take long themselves, seconds: four times as long as they take.

Else to look takes the processor from what is waited for.
"""
WITHIN_S: Final = 45.0

LATE_S: Final = 30.0
"""How late what is asked may answer on a busy machine, seconds."""

T = TypeVar("T")


def eventually(
    holds: Callable[[], T | None],
    what: str = "it holds",
    *,
    within_s: float = WITHIN_S,
    log: Callable[[], str] = str,
) -> T:
    """What `holds` answers once that is true; else the test fails with `what` was awaited and what `log` says."""
    began_s = time.monotonic()
    deadline_s = began_s + within_s
    while not (answer := holds()):
        now_s = time.monotonic()
        if now_s > deadline_s:
            pytest.fail(f"not within {within_s:g} s: {what}\n{log()}")
        time.sleep(min(max(POLL_S, 4 * (now_s - began_s)), RESTS_S))
        began_s = time.monotonic()
    return answer


def answered(ask: Callable[[], T]) -> T:
    """What is answered, however late; of what goes unanswered for all of `LATE_S` the newest error is raised."""
    deadline_s = time.monotonic() + LATE_S
    while True:
        try:
            return ask()
        except GpuwardenError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(RESTS_S)


def within(timeout_s: float, act: Callable[[], T]) -> T:
    """What `act` returns; the test fails where it hangs."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(act()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not answers:
        pytest.fail(f"no answer within {timeout_s:g} s")
    return answers[0]


def together(*acts: Callable[[], Any]) -> list[Any]:
    """Do these in threads that begin at once; what each returned, or raised."""
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
