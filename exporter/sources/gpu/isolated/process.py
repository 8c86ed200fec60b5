"""A child process that calls a driver, as the exporter sees it. It is killed when it hangs.

supervisor.py decides when; server.py runs in the child.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, Final, cast

from exporter.model.gpu import GpuReadings
from exporter.model.snapshot import Timing
from exporter.sources.gpu.isolated import protocol
from exporter.sources.gpu.isolated.protocol import CurrentGpu, Failed, Question, Xid

KILL_S: Final = 0.5
"""Seconds for a killed process to end before it counts as abandoned."""

COMPLAINT_BYTES: Final = 1024
"""Bytes of a process's stderr that are kept."""

ENDED: Final = frozenset({0, -signal.SIGKILL, -signal.SIGTERM})
"""Exit codes without an error of the process."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """A driver: its name, and Python's arguments before and after our pid. `gpu` formats a GPU's number."""

    who: str
    program: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    gpu: str = "GPU {}"


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """A process ended, and how."""

    how: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer and its timing, which is `None` without a question: the process ended at rest."""

    message: GpuReadings | Failed | ProcessExit
    timing: Timing | None


class DriverProcess:
    """One child process, with threads that read its answers and its stderr.

    Attributes:
        asked_s: when the open question was sent, monotonic seconds.
        asks_about: number of the GPU in the present call.

    Raises:
        OSError: no process can be started.
        RuntimeError: no thread.
    """

    def __init__(self, driver: Driver, reported: "queue.SimpleQueue[Xid]") -> None:
        self.asked_s: float | None = None
        self.asks_about: int | None = None
        self._reported = reported
        self._answers: queue.SimpleQueue[tuple[GpuReadings | Failed | ProcessExit, float]] = queue.SimpleQueue()
        # A hung child may outlive us, so it must not hold our log open.
        self.process = subprocess.Popen(
            [sys.executable, "-P", *driver.program, str(os.getpid()), *driver.arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
        )  # fmt: skip
        self._complaint = b""
        self._works = False
        self._questions = cast("IO[bytes]", self.process.stdin)
        answers, complaints = cast("IO[bytes]", self.process.stdout), cast("IO[bytes]", self.process.stderr)
        self._complaints = threading.Thread(
            target=self._keep_stderr, args=(complaints,), name="driver-stderr", daemon=True
        )
        listening = threading.Thread(target=self._listen, args=(answers,), name="driver", daemon=True)
        try:
            self._complaints.start()
            listening.start()
        except RuntimeError:
            self.end()
            answers.close()
            if self._complaints.ident is None:
                complaints.close()
            raise

    def ask(self, question: Question) -> None:
        """Send a question; one at a time."""
        self.asked_s = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # it ended, which `answer` returns
            protocol.send(self._questions, question)

    def answer(self, within_s: float) -> Answer | None:
        """The next answer; `None` without one in time."""
        try:
            message, came_s = self._answers.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None
        asked_s, self.asked_s = self.asked_s, None
        return Answer(
            message=message, timing=None if asked_s is None else Timing(asked_s=asked_s, took_s=came_s - asked_s)
        )

    def end(self) -> bool:
        """Kill it; returns whether it ended. It may hang in the kernel."""
        self.process.kill()
        return self.is_over(within_s=KILL_S)

    def is_over(self, *, within_s: float) -> bool:
        """Whether it ended."""
        try:
            self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            return False
        with contextlib.suppress(OSError):
            self._questions.close()
        return True

    def _listen(self, answers: IO[bytes]) -> None:
        with answers:
            try:
                while not isinstance(message := protocol.receive(answers), Question):
                    if isinstance(message, Xid):
                        self._reported.put(message)
                    elif isinstance(message, CurrentGpu):
                        self.asks_about = message.place
                    else:
                        self._works = True
                        self._put_answer(message)
                self._put_answer(ProcessExit(how="sent a question as an answer"))
            except EOFError:
                self._put_answer(ProcessExit(how=_describe_exit(self.process) + self._last_stderr_line()))
            except ValueError as error:
                self._put_answer(ProcessExit(how=f"sent an invalid answer ({error})"))

    def _put_answer(self, message: GpuReadings | Failed | ProcessExit) -> None:
        self._answers.put((message, time.monotonic()))

    def _keep_stderr(self, complaints: IO[bytes]) -> None:
        # Keeps the end.
        with complaints:
            while part := os.read(complaints.fileno(), COMPLAINT_BYTES):
                self._complaint = (self._complaint + part)[-COMPLAINT_BYTES:]

    def _last_stderr_line(self) -> str:
        """The last line of stderr, if the process never answered or ended with an error.

        Otherwise the line is unrelated: driver libraries print too.
        """
        self._complaints.join(KILL_S)
        lines = self._complaint.decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        erred = (self.process.returncode or 0) not in ENDED
        return f": {last}" if last and (erred or not self._works) else ""


def _describe_exit(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(timeout=KILL_S)
    except subprocess.TimeoutExpired:
        return "does not answer"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
