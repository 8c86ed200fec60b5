"""GPUs of a driver, asked by a process of its own that can be killed, or abandoned, when a call hangs.

A look waits for its answer no longer than `WAIT_S`. An answer that comes later costs that look, and the look that finds
it takes it; until then no look waits. An answer later than the deadline costs the process. A process that cannot even
be killed (the kernel itself hangs in the driver) is left behind. With too many of those no other is started until one
ends.

Where the process says which GPU it asks about, the GPU in which it hung is left out by the next one, as hung. Another
process asks about that GPU alone, again and again, less and less often. Once it has its answer the GPU is one of all
again. So a GPU that hangs costs the others one deadline.

process.py is such a process, processes.py starts and ends them, hung_gpus.py keeps those GPUs.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Final

from exporter.model.gpu import GpuReadings
from exporter.model.snapshot import DriverHealth, Timing
from exporter.sources.gpu.isolated.hung_gpus import HungGpus
from exporter.sources.gpu.isolated.process import Driver, DriverProcess, Ended
from exporter.sources.gpu.isolated.processes import Process, Processes, Start
from exporter.sources.gpu.isolated.protocol import DriverError, Failed, Question

WAIT_S: Final = 2.0
"""How long one look waits for an answer, seconds: a busy host is slow, and an answer that was missed breaks off what is
known of idle GPUs. But with the rest of a look it has to stay well under what counts as a gap between two looks."""


class IsolatedDriver:
    """Asks a driver in another process; for one thread.

    Args:
        driver: which.
        answer_s: how long a look may take before the process is killed, seconds.
        wait_s: how long `read` waits for an answer, seconds.
        start: starts a process that asks.
        now: the monotonic clock, seconds.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        answer_s: float,
        wait_s: float = WAIT_S,
        start: Start = DriverProcess,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._answer_s, self._wait_s, self._now = answer_s, wait_s, now
        self._processes = Processes(driver, start=start, now=now)
        self._hung = HungGpus(self._processes, answer_s=answer_s, now=now)
        self._look: tuple[Process, float] | None = None
        self._error: Exception | None = None
        self._timing: Timing | None = None
        self._was_looked_at = False
        self._late = False
        self._told: GpuReadings | None = None

    def ask(self) -> None:
        """Begin a look, so that several drivers are waited for at the same time; `read` tells what came of it."""
        try:
            self._look = self._begin()
        except Exception as error:  # noqa: BLE001 - it costs this source alone: `read` raises it where that is counted
            self._error = error

    def read(self) -> GpuReadings:
        """Every GPU that the driver counts: the answer to `ask`, or to a question of its own.

        Raises:
            DriverError: there is no answer, and why; later calls go on asking.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        (process, until_s), self._look = self._look or self._begin(), None
        answer = process.answer(until_s - self._now())
        if answer is None:
            raise self._silent(process)
        self._was_looked_at, self._late = True, False
        self._timing = answer.timing or self._timing
        told = answer.told
        if isinstance(told, Ended):
            raise self._processes.end_main(f"the process that asks {self._processes.driver.who} {told.how}")
        if isinstance(told, Failed):
            if told.anew:  # it may number its GPUs otherwise
                self._hung.forget()
                self._told = None
            if told.over:
                raise self._processes.end_main(told.because)
            raise DriverError(told.because)
        self._processes.failures = 0
        named = self._hung.with_names(told)
        if named != self._told:  # else it is the same object, and what was worked out of it holds
            self._told = named
        return self._told

    def health(self) -> DriverHealth:
        """What became of the processes that asked, and the errors that the driver has reported."""
        return self._processes.health()

    def timing(self) -> Timing | None:
        """Of the answer that `read` has told last; where there is none, how long one has been waited for so far.

        `None` before a process was asked.
        """
        return self._timing

    def close(self) -> None:
        """End the process; one that cannot be ended now is ended by the kernel, after this one."""
        if self._processes.main is not None:
            self._processes.main.end()
        self._hung.close()

    def _begin(self) -> tuple[Process, float]:
        """The process that is asked, and until when this look waits for it, monotonic, seconds."""
        self._hung.ask()
        process = self._processes.running()
        if process.asked_s is None:
            process.ask(Question(without=self._hung.left_out()))
        return process, self._now() + self._patience_s()

    def _patience_s(self) -> float:
        """How long a look waits. The very first waits for all of the answer: nothing yet grows old meanwhile."""
        if self._late:
            return 0.0
        return min(self._answer_s, self._wait_s) if self._was_looked_at else self._answer_s

    def _silent(self, process: Process) -> DriverError:
        """Why there is no answer. After the first look that had to wait for it no other waits until one has come."""
        now_s, driver = self._now(), self._processes.driver
        asked_s = now_s if process.asked_s is None else process.asked_s
        self._timing = Timing(asked_s=asked_s, took_s=now_s - asked_s)
        self._was_looked_at, self._late = True, True
        if now_s - asked_s < self._answer_s:
            return DriverError(f"there is no answer yet from {driver.who}")
        self._processes.killed += 1
        index = process.asks_about
        about = "" if index is None else f" about {driver.gpu.format(index)}"
        left_out = "" if index is None else ", and that GPU is left out until it answers a process of its own"
        error = self._processes.end_main(
            f"a call into {driver.who}{about} did not return within {self._answer_s:g} s, and its process was "
            f"killed{left_out}: see what the kernel's log (dmesg) says of the driver",
        )
        if index is not None:
            self._leave_out(index, process)
        return error

    def _leave_out(self, index: int, process: Process) -> None:
        """Have the others asked about at once: what hung is known, and each GPU can do so only once in a while."""
        self._hung.add(index, process, () if self._told is None else self._told.gpus)
        self._processes.forgive()
        with contextlib.suppress(DriverError):  # which the next look tells
            self._processes.running().ask(Question(without=self._hung.left_out()))
