"""Who comes while another writes is written with all who wait by then, in one transaction, and told once it is durable.

A sync to the disk takes as long for one payload as for many, and SQLite has one writer at a time: several threads of
one process would poll its lock, sleep longer each time, and overtake one another. So one thread writes for all.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from gpuwarden.db.engine import DatabaseError, NoAnswerError

AT_ONCE: Final = 40
"""Payloads written in one transaction, at most."""

WAITING_MAX: Final = 25 * AT_ONCE
"""So many wait at most; who comes then is told at once that the database does not answer, and sends it again."""

IDLE_S: Final = 2.0
"""The thread ends where nothing was to be written for so long, seconds; the next payload begins another."""

T = TypeVar("T")
R = TypeVar("R")


class Joined(Generic[T, R]):
    """Safe to call from many threads.

    Args:
        write: makes all of them durable and answers for each, or raises and none is.
    """

    def __init__(self, write: Callable[[Sequence[T]], Sequence[R]]) -> None:
        self._write = write
        self._waiting: deque[tuple[T, Future[R]]] = deque()
        self._changed = threading.Condition()
        self._writes = False

    def __call__(self, what: T) -> "Future[R]":
        """Have it written: the future is done once it is durable, or raises what `write` did.

        Who cancels the future before its turn comes has it written never.
        """
        answer: Future[R] = Future()
        with self._changed:
            if len(self._waiting) >= WAITING_MAX:
                answer.set_exception(NoAnswerError(f"{WAITING_MAX} others wait for the database already"))
                return answer
            self._waiting.append((what, answer))
            if self._writes:
                self._changed.notify()
            else:
                # Of a process that ends nothing is waited for: who was not told that it is durable sends it again.
                threading.Thread(target=self._work, name="joined", daemon=True).start()
                self._writes = True
        return answer

    def _work(self) -> None:
        while some := self._next():
            self._try([(what, answer) for what, answer in some if answer.set_running_or_notify_cancel()])

    def _next(self) -> list[tuple[T, "Future[R]"]]:
        """Those whose turn it is; none when the thread is to end."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(IDLE_S)
            some = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
            self._writes = bool(some)
            return some

    def _try(self, some: Sequence[tuple[T, "Future[R]"]]) -> None:
        if not some:
            return
        try:
            answers = self._write([what for what, _ in some])
        except DatabaseError as error:
            if len(some) > 1 and not isinstance(error, NoAnswerError):
                for each in some:  # what is wrong with one is no fault of the others
                    self._try([each])
            else:
                for _, answer in some:
                    answer.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - it is raised to each of those who wait for it
            for _, answer in some:
                answer.set_exception(error)
        else:
            for (_, answer), told in zip(some, answers, strict=True):
                answer.set_result(told)
