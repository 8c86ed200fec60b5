"""GPUs of a driver, read by a child process that can be killed when a call hangs.

A sample waits at most `WAIT_S` for its answer; a later answer serves a later sample. After a timeout the process is
killed, or abandoned if the kernel hangs in it. The next process skips the GPU of the hanging call, and a separate
process retries that GPU. So a GPU that hangs costs the others one timeout.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Final

from exporter.model.gpu import GpuReadings
from exporter.model.snapshot import DriverHealth, Timing
from exporter.sources.gpu.isolated.hung_gpus import HungGpus
from exporter.sources.gpu.isolated.process import Driver, DriverProcess, ProcessExit
from exporter.sources.gpu.isolated.processes import Process, Processes, Start
from exporter.sources.gpu.isolated.protocol import DriverError, Failed, Question

WAIT_S: Final = 2.0
"""Seconds that one sample waits: a longer wait would make a gap between samples."""


class IsolatedDriver:
    """Reads a driver in another process, which is killed after `answer_s`. `read` waits `wait_s`; seconds."""

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
        self._readings: GpuReadings | None = None

    def ask(self) -> None:
        """Start a read, so that several drivers work at the same time."""
        try:
            self._look = self._begin()
        except Exception as error:  # noqa: BLE001 - `read` raises it, where it is counted
            self._error = error

    def read(self) -> GpuReadings:
        """Return every GPU: the answer to `ask`, or to a new question.

        Raises:
            DriverError: no answer; later calls try again.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
        (process, until_s), self._look = self._look or self._begin(), None
        answer = process.answer(until_s - self._now())
        if answer is None:
            raise self._no_answer(process)
        self._was_looked_at, self._late = True, False
        self._timing = answer.timing or self._timing
        message = answer.message
        if isinstance(message, ProcessExit):
            raise self._processes.end_main(f"the process for {self._processes.driver.who} {message.how}")
        if isinstance(message, Failed):
            if message.reloaded:  # its GPUs may have other numbers
                self._hung.forget()
                self._readings = None
            if message.over:
                raise self._processes.end_main(message.message)
            raise DriverError(message.message)
        self._processes.failures = 0
        self._readings = self._hung.with_names(message)
        return self._readings

    def health(self) -> DriverHealth:
        """The state of the processes, and the driver's XIDs."""
        return self._processes.health()

    def timing(self) -> Timing | None:
        """Timing of the last answer or the present wait."""
        return self._timing

    def close(self) -> None:
        """End the processes; the kernel ends the others after this one."""
        if self._processes.main is not None:
            self._processes.main.end()
        self._hung.close()

    def _begin(self) -> tuple[Process, float]:
        self._hung.ask()
        process = self._processes.get_main()
        if process.asked_s is None:
            process.ask(Question(without=self._hung.skipped()))
        return process, self._now() + self._wait_limit_s()

    def _wait_limit_s(self) -> float:
        # The first sample waits for the whole answer, because no data can become stale yet.
        if self._late:
            return 0.0
        return min(self._answer_s, self._wait_s) if self._was_looked_at else self._answer_s

    def _no_answer(self, process: Process) -> DriverError:
        # After the first missed answer no sample waits until one has come.
        now_s, driver = self._now(), self._processes.driver
        asked_s = now_s if process.asked_s is None else process.asked_s
        self._timing = Timing(asked_s=asked_s, took_s=now_s - asked_s)
        self._was_looked_at, self._late = True, True
        if now_s - asked_s < self._answer_s:
            return DriverError(f"no answer yet from {driver.who}")
        self._processes.killed += 1
        index = process.asks_about
        about = "" if index is None else f" about {driver.gpu.format(index)}"
        left_out = "" if index is None else ", and that GPU is skipped until it answers a separate process"
        error = self._processes.end_main(
            f"a call into {driver.who}{about} did not return within {self._answer_s:g} s, and its process was "
            f"killed{left_out}: check dmesg for the driver",
        )
        if index is not None:
            self._skip_gpu(index, process)
        return error

    def _skip_gpu(self, index: int, process: Process) -> None:
        self._hung.add(index, process, () if self._readings is None else self._readings.gpus)
        self._processes.allow_restart()
        with contextlib.suppress(DriverError):  # the next sample reports it
            self._processes.get_main().ask(Question(without=self._hung.skipped()))
