"""A process that asks a driver, as the exporter sees it: asked and answered by messages, and killed when it hangs.

supervisor.py decides when to ask it, how long to wait, and what to do if it does not answer. server.py runs in it.
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
from exporter.sources.gpu.isolated.protocol import Asking, Failed, Question, Xid

KILL_S: Final = 0.5
"""How long a killed process may take to end, seconds, before it counts as abandoned."""

COMPLAINT_BYTES: Final = 1024
"""How much is kept of what a process says of why it cannot start, or go on."""

ENDED: Final = frozenset({0, -signal.SIGKILL, -signal.SIGTERM})
"""How a process ends that did nothing wrong: by itself, or by somebody."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Which driver is asked, in words for people, and what Python runs for it: arguments before, and after, our pid.

    `gpu` is what people call the GPU of a number.
    """

    who: str
    program: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    gpu: str = "GPU {}"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Nothing more comes from a process; `how` it ended, as far as it did."""

    how: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was told, and when it was asked for; `None` where it was not: a process that ended at rest."""

    told: GpuReadings | Failed | Ended
    timing: Timing | None


class DriverProcess:
    """One process that asks a driver, a thread that reads what it tells, and one for its complaints.

    `asked_s` is when the question that has no answer yet was asked, monotonic, seconds. `asks_about` is the number of
    the GPU that the process asks about now; `None` where that is none.

    Raises:
        OSError: no process can be started.
        RuntimeError: no thread can be started.
    """

    def __init__(self, driver: Driver, reported: "queue.SimpleQueue[Xid]") -> None:
        self.asked_s: float | None = None
        self.asks_about: int | None = None
        self._reported = reported
        self._answers: queue.SimpleQueue[tuple[GpuReadings | Failed | Ended, float]] = queue.SimpleQueue()
        # It may outlive us, where it hangs: it holds nothing of ours then, such as a log that is read to its end.
        self.process = subprocess.Popen(
            [sys.executable, "-P", *driver.program, str(os.getpid()), *driver.arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
        )  # fmt: skip
        self._complaint = b""
        self._works = False
        self._questions = cast("IO[bytes]", self.process.stdin)
        answers, complaints = cast("IO[bytes]", self.process.stdout), cast("IO[bytes]", self.process.stderr)
        self._complaints = threading.Thread(target=self._note, args=(complaints,), name="driver-stderr", daemon=True)
        listening = threading.Thread(target=self._listen, args=(answers,), name="driver", daemon=True)
        try:
            self._complaints.start()
            listening.start()
        except RuntimeError:  # and nobody else knows of the process
            self.end()
            answers.close()
            if self._complaints.ident is None:
                complaints.close()
            raise

    def ask(self, question: Question) -> None:
        """Ask for a look; one at a time."""
        self.asked_s = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # it has ended, which `answer` tells
            protocol.send(self._questions, question)

    def answer(self, within_s: float) -> Answer | None:
        """The next answer; `None` when there is none yet."""
        try:
            told, came_s = self._answers.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None
        asked_s, self.asked_s = self.asked_s, None
        return Answer(told=told, timing=None if asked_s is None else Timing(asked_s=asked_s, took_s=came_s - asked_s))

    def end(self) -> bool:
        """Kill it. Whether it has ended: the kernel may itself hang in it."""
        self.process.kill()
        return self.is_over(within_s=KILL_S)

    def is_over(self, *, within_s: float) -> bool:
        """Whether it has ended."""
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
                while not isinstance(told := protocol.receive(answers), Question):
                    if isinstance(told, Xid):
                        self._reported.put(told)
                    elif isinstance(told, Asking):
                        self.asks_about = told.place
                    else:
                        self._works = True
                        self._came(told)
                self._came(Ended(how="answered in no known form (a question)"))
            except EOFError:
                self._came(Ended(how=_how(self.process) + self._why()))
            except ValueError as error:
                self._came(Ended(how=f"answered in no known form ({error})"))

    def _came(self, told: GpuReadings | Failed | Ended) -> None:
        self._answers.put((told, time.monotonic()))

    def _note(self, complaints: IO[bytes]) -> None:
        """Keep the end of what it complains of."""
        with complaints:
            while part := os.read(complaints.fileno(), COMPLAINT_BYTES):
                self._complaint = (self._complaint + part)[-COMPLAINT_BYTES:]

    def _why(self) -> str:
        """The last line of it, of a process that has never answered, or ended by an error of its own or of a library's.

        Of one that was ended, the last that a driver's library has printed has nothing to do with that.
        """
        self._complaints.join(KILL_S)
        lines = self._complaint.decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        erred = (self.process.returncode or 0) not in ENDED
        return f": {last}" if last and (erred or not self._works) else ""


def _how(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(timeout=KILL_S)
    except subprocess.TimeoutExpired:
        return "does not answer any more"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended by itself, with {code}"
