"""Group commit: one thread writes all waiting payloads in one transaction, then completes their futures.

A disk sync costs the same for one payload as for many. Threads that poll for SQLite's lock would starve each other.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from gpuwarden.db.errors import DatabaseError, NoAnswerError

BATCH_MAX: Final = 40
"""Maximum payloads in one transaction."""

WAITING_MAX: Final = 25 * BATCH_MAX
"""Maximum waiting payloads. Further ones fail at once."""

IDLE_S: Final = 2.0
"""The thread ends after this time without payloads, seconds."""

T = TypeVar("T")
R = TypeVar("R")


class GroupCommit(Generic[T, R]):
    """Group commit. Safe to call from many threads.

    Args:
        write: stores all given payloads and returns a result for each, or raises and stores none.
    """

    def __init__(self, write: Callable[[Sequence[T]], Sequence[R]]) -> None:
        self._write = write
        self._waiting: deque[tuple[T, Future[R]]] = deque()
        self._changed = threading.Condition()
        self._writes = False

    def __call__(self, what: T) -> "Future[R]":
        """Write a payload. The future completes once it is stored, or raises what `write` raised.

        A future cancelled before its turn is not written.
        """
        answer: Future[R] = Future()
        with self._changed:
            if len(self._waiting) >= WAITING_MAX:
                answer.set_exception(NoAnswerError(f"{WAITING_MAX} payloads already wait for the database"))
                return answer
            self._waiting.append((what, answer))
            if self._writes:
                self._changed.notify()
            else:
                # A daemon thread: payloads not written at exit are dropped, and Alertmanager repeats calls without 202.
                threading.Thread(target=self._work, name="joined", daemon=True).start()
                self._writes = True
        return answer

    def _work(self) -> None:
        while some := self._next():
            self._try([(what, answer) for what, answer in some if answer.set_running_or_notify_cancel()])

    def _next(self) -> list[tuple[T, "Future[R]"]]:
        """The next payloads; empty if the thread must end."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(IDLE_S)
            some = [self._waiting.popleft() for _ in range(min(BATCH_MAX, len(self._waiting)))]
            self._writes = bool(some)
            return some

    def _try(self, some: Sequence[tuple[T, "Future[R]"]]) -> None:
        if not some:
            return
        try:
            answers = self._write([what for what, _ in some])
        except DatabaseError as error:
            if len(some) > 1 and not isinstance(error, NoAnswerError):
                for each in some:  # one bad payload must not fail the others
                    self._try([each])
            else:
                for _, answer in some:
                    answer.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - raised to every waiter
            for _, answer in some:
                answer.set_exception(error)
        else:
            for (_, answer), result in zip(some, answers, strict=True):
                answer.set_result(result)
