"""Who comes while another writes is written with all who wait by then, in one transaction, and told once it is durable.

A sync to the disk takes as long for one payload as for many, and SQLite has one writer at a time: those who wait for it
in threads of one process would poll its lock, sleep longer each time, and overtake one another.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from gpuwarden.database import DatabaseError, NoAnswerError

AT_ONCE: Final = 40
"""Payloads written in one transaction, at most: as many as a webhook has threads."""

T = TypeVar("T")


class _Waiting(Generic[T]):
    def __init__(self, what: T) -> None:
        self.what = what
        self.is_over = False
        self.error: BaseException | None = None


class Joined(Generic[T]):
    """Safe to call from many threads.

    Args:
        write: makes all of them durable, or raises and none.
    """

    def __init__(self, write: Callable[[Sequence[T]], None]) -> None:
        self._write = write
        self._waiting: list[_Waiting[T]] = []
        self._line = threading.Lock()
        self._turn = threading.Lock()

    def __call__(self, what: T) -> None:
        """Return once it is durable.

        Raises:
            DatabaseError: it is not.
        """
        mine = _Waiting(what)
        with self._line:
            self._waiting.append(mine)
        while not mine.is_over:
            with self._turn:
                if not mine.is_over:
                    with self._line:
                        some, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
                    self._try(some)
        if mine.error is not None:
            raise mine.error

    def _try(self, some: Sequence[_Waiting[T]]) -> None:
        try:
            self._write([each.what for each in some])
        except DatabaseError as error:
            if len(some) > 1 and not isinstance(error, NoAnswerError):
                for each in some:  # what is wrong with one is no fault of the others
                    self._try([each])
            else:
                for each in some:
                    each.error = error
        except BaseException as error:  # noqa: BLE001 - it is raised by each of those who wait for it
            for each in some:
                each.error = error
        finally:
            for each in some:
                each.is_over = True
