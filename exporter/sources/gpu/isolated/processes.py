"""The processes that ask one driver: started, killed, and left behind where the kernel itself hangs in them."""

import contextlib
import queue
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from exporter.model.snapshot import DriverHealth
from exporter.sources.gpu.isolated.process import Answer, Driver
from exporter.sources.gpu.isolated.protocol import DriverError, Question, Xid

ABANDONED_MAX: Final = 3
"""How many processes may hang in the driver, beyond any signal, before no other is started."""

RESTART_FIRST_S: Final = 1.0
RESTART_LONGEST_S: Final = 60.0
"""How long the next process is not started after one failed, seconds: doubled with each that fails in a row."""


def restart_after_s(failures: int) -> float:
    """How long to wait before the next process is started, seconds, after so many that failed in a row."""
    return min(RESTART_LONGEST_S, RESTART_FIRST_S * 2.0 ** min(failures - 1, 30))


class Process(Protocol):
    """What is wanted of a process that asks the driver: see `DriverProcess`."""

    asked_s: float | None
    asks_about: int | None

    def ask(self, question: Question) -> None:
        """Ask for a look."""

    def answer(self, within_s: float) -> Answer | None:
        """The next answer."""

    def end(self) -> bool:
        """Kill it; whether it has ended."""

    def is_over(self, *, within_s: float) -> bool:
        """Whether it has ended."""


Start = Callable[[Driver, "queue.SimpleQueue[Xid]"], Process]


class Processes:
    """The main process, which is asked about every GPU, and what became of all processes.

    `failures` counts the main processes that failed in a row, and `killed` every process that was killed.
    """

    def __init__(self, driver: Driver, *, start: Start, now: Callable[[], float]) -> None:
        self.driver = driver
        self.main: Process | None = None
        self.failures = 0
        self.killed = 0
        self.abandoned: list[Process] = []
        self._start, self._now = start, now
        self._because = ""
        self._next_start_s = 0.0
        self._reported: queue.SimpleQueue[Xid] = queue.SimpleQueue()
        self._xids: Counter[tuple[str, int]] = Counter()

    def running(self) -> Process:
        """The main process, a new one where there is none.

        Raises:
            DriverError: none may be started now, or none can be.
        """
        crowded = self.are_crowded()
        if self.main is not None:
            return self.main
        if crowded:
            raise DriverError(
                f"{len(self.abandoned)} processes hang in {self.driver.who} and cannot be killed, so no other is "
                "started: see what the kernel's log (dmesg) says of the driver, and reboot the host"
            )
        if self._now() < self._next_start_s:
            raise DriverError(self._because)
        try:
            self.main = self.start()
        except (OSError, RuntimeError) as error:  # no process, or no thread more may be started
            raise self._failed(f"the process that asks {self.driver.who} cannot be started: {error}") from None
        return self.main

    def start(self) -> Process:
        """Start a process beside the main one.

        Raises:
            OSError: no process can be started.
            RuntimeError: no thread can be started.
        """
        return self._start(self.driver, self._reported)

    def are_crowded(self) -> bool:
        """Whether so many processes hang in the driver that no other is started."""
        self.abandoned = [each for each in self.abandoned if not each.is_over(within_s=0)]
        return len(self.abandoned) >= ABANDONED_MAX

    def end(self, process: Process) -> None:
        """Kill a process; one that does not end is abandoned."""
        if not process.end():
            self.abandoned.append(process)

    def end_main(self, because: str) -> DriverError:
        """Kill the main process, which failed, and wait before the next; the error to raise."""
        if self.main is not None:
            process, self.main = self.main, None
            self.end(process)
        return self._failed(because)

    def forgive(self) -> None:
        """Let the next main process start at once: one GPU made the last one hang."""
        self.failures -= 1
        self._next_start_s = 0.0

    def health(self) -> DriverHealth:
        """What became of the processes, and the errors that the driver has reported."""
        with contextlib.suppress(queue.Empty):
            while True:
                told = self._reported.get_nowait()
                self._xids[told.gpu, told.code] += 1
        return DriverHealth(killed=self.killed, abandoned=len(self.abandoned), xids=dict(self._xids))

    def _failed(self, because: str) -> DriverError:
        self.failures += 1
        self._because = because
        self._next_start_s = self._now() + restart_after_s(self.failures)
        return DriverError(because)
