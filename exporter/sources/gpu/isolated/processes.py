"""The child processes of one driver: started, killed, or abandoned if they hang in the kernel."""

import contextlib
import queue
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from exporter.model.snapshot import DriverHealth
from exporter.sources.gpu.isolated.process import Answer, Driver
from exporter.sources.gpu.isolated.protocol import DriverError, Question, Xid

ABANDONED_MAX: Final = 3
"""Abandoned processes before no other is started."""

RESTART_FIRST_S: Final = 1.0
RESTART_LONGEST_S: Final = 60.0
"""Seconds before the next start, doubled with each failure in a row."""


def restart_after_s(failures: int) -> float:
    """Seconds before the next start after so many failures in a row."""
    return min(RESTART_LONGEST_S, RESTART_FIRST_S * 2.0 ** min(failures - 1, 30))


class Process(Protocol):
    """See `DriverProcess`."""

    asked_s: float | None
    asks_about: int | None

    def ask(self, question: Question) -> None:
        """Send a question."""

    def answer(self, within_s: float) -> Answer | None:
        """The next answer."""

    def end(self) -> bool:
        """Kill it; returns whether it ended."""

    def is_over(self, *, within_s: float) -> bool:
        """Whether it ended."""


Start = Callable[[Driver, "queue.SimpleQueue[Xid]"], Process]


class Processes:
    """The main process, which reads every GPU, and the state of all.

    `failures` counts main processes that failed in a row, and `killed` all that were killed.
    """

    def __init__(self, driver: Driver, *, start: Start, now: Callable[[], float]) -> None:
        self.driver = driver
        self.main: Process | None = None
        self.failures = 0
        self.killed = 0
        self.abandoned: list[Process] = []
        self._start, self._now = start, now
        self._message = ""
        self._next_start_s = 0.0
        self._reported: queue.SimpleQueue[Xid] = queue.SimpleQueue()
        self._xids: Counter[tuple[str, int]] = Counter()

    def get_main(self) -> Process:
        """Return the main process; starts it if necessary.

        Raises:
            DriverError: none can be started now.
        """
        crowded = self.are_crowded()
        if self.main is not None:
            return self.main
        if crowded:
            raise DriverError(
                f"{len(self.abandoned)} processes hang in {self.driver.who} and cannot be killed, so no other is "
                "started: check dmesg for the driver, and reboot the host"
            )
        if self._now() < self._next_start_s:
            raise DriverError(self._message)
        try:
            self.main = self.start()
        except (OSError, RuntimeError) as error:
            raise self._note_failure(f"the process for {self.driver.who} cannot be started: {error}") from None
        return self.main

    def start(self) -> Process:
        """Start another process.

        Raises:
            OSError: no process can be started.
            RuntimeError: no thread can be started.
        """
        return self._start(self.driver, self._reported)

    def are_crowded(self) -> bool:
        """Whether too many processes are abandoned."""
        self.abandoned = [each for each in self.abandoned if not each.is_over(within_s=0)]
        return len(self.abandoned) >= ABANDONED_MAX

    def end(self, process: Process) -> None:
        """Kill a process, or abandon it."""
        if not process.end():
            self.abandoned.append(process)

    def end_main(self, message: str) -> DriverError:
        """Kill the main process after a failure; returns the error to raise."""
        if self.main is not None:
            process, self.main = self.main, None
            self.end(process)
        return self._note_failure(message)

    def allow_restart(self) -> None:
        """Allow the next start at once: one GPU caused the failure."""
        self.failures -= 1
        self._next_start_s = 0.0

    def health(self) -> DriverHealth:
        """The state of the processes, and the driver's XIDs."""
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._reported.get_nowait()
                self._xids[message.gpu, message.code] += 1
        return DriverHealth(killed=self.killed, abandoned=len(self.abandoned), xids=dict(self._xids))

    def _note_failure(self, message: str) -> DriverError:
        self.failures += 1
        self._message = message
        self._next_start_s = self._now() + restart_after_s(self.failures)
        return DriverError(message)
