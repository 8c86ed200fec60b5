"""A process that asks a driver, as the exporter sees it: asked by lines, answered by lines, and killed when it hangs.

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

from exporter.model.readings import GpuReadings, Timing
from exporter.sources.gpu.isolated import protocol
from exporter.sources.gpu.isolated.protocol import Failed, Question, Xid

AGE_MAX_S: Final = 5.0
"""How long ago a late answer may have been asked for, seconds, to stand for a look: as long as a gap between two."""

KILL_S: Final = 0.5
"""How long a killed process may take to end, seconds, before it counts as abandoned."""

COMPLAINT_BYTES: Final = 1024
"""How much is kept of what a process says of why it cannot start, or go on."""

ENDED: Final = frozenset({0, -signal.SIGKILL, -signal.SIGTERM})
"""How a process ends that did nothing wrong: by itself, or by somebody."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Who is asked, in words for people, and how Python is told what to run for it: before, and after, our own pid.

    A process that `says_where` keeps in a file which GPU it asks about (`driver_wire.PLACE`), and can leave some out.
    After our pid it is told the number of that open file. `gpu` is what people call the GPU of a number.
    """

    who: str
    program: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    says_where: bool = False
    gpu: str = "GPU {}"


class Ended:
    """Nothing more comes from a process; `how` it ended, as far as it did."""

    def __init__(self, how: str) -> None:
        self.how = how


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was told, and when it was asked for; `None` where it was not: a process that ended at rest."""

    told: GpuReadings | Failed | Ended
    timing: Timing | None

    @property
    def last(self) -> bool:
        """Whether its process answers no more."""
        return isinstance(self.told, Ended) or (isinstance(self.told, Failed) and self.told.over)

    @property
    def stands(self) -> bool:
        """Whether it is young enough to be told."""
        return self.last or (self.timing is not None and time.monotonic() - self.timing.asked_s < AGE_MAX_S)


class Child:
    """One process that asks a driver, a thread that reads what it tells, and one for its complaints.

    `asked_s` is when the question that is open was asked, monotonic, seconds. Where a look has `missed` the answer
    to it the next is asked as soon as it comes: else a driver that is slow would be known now and then only.
    """

    def __init__(self, driver: Driver, reported: "queue.SimpleQueue[Xid]") -> None:
        self.asked_s: float | None = None
        self.missed = False
        self._question = Question()
        self._asking = threading.Lock()
        self._reported = reported
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._place = os.fdopen(os.memfd_create("place"), "rb", buffering=0)
        place = self._place.fileno()
        where = ((str(place),), (place,)) if driver.says_where else ((), ())
        command = [sys.executable, "-P", *driver.program, str(os.getpid()), *where[0], *driver.arguments]
        # It may outlive us, where it hangs: it holds nothing of ours then, such as a log that is read to its end.
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
                pass_fds=where[1],
            )  # fmt: skip
        except OSError:
            self._place.close()
            raise
        self._complaint = b""
        self._works = False
        self._questions = cast("IO[bytes]", self.process.stdin)
        answers, complaints = cast("IO[bytes]", self.process.stdout), cast("IO[bytes]", self.process.stderr)
        self._complaints = threading.Thread(target=self._note, args=(complaints,), name="driver-stderr", daemon=True)
        listening = threading.Thread(target=self._listen, args=(answers,), name="driver", daemon=True)
        try:
            self._complaints.start()
            listening.start()
        except RuntimeError:  # no thread more may be started, and nobody else knows of the process
            self.end()
            answers.close()
            if self._complaints.ident is None:
                complaints.close()
            raise

    def ask(self, question: Question) -> None:
        """Ask for a look; one at a time."""
        with self._asking:
            self._question = question
            self._ask()

    def asks_next(self, question: Question) -> None:
        """What is asked instead of the same, where a look has missed the answer to the question that is open."""
        with self._asking:
            self._question = question

    def _ask(self) -> None:
        self.asked_s = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # it has ended, which `answer` tells
            self._questions.write(self._question.line)
            self._questions.flush()

    def asks_about(self) -> int | None:
        """The number of the GPU that it asks about; `None` where that is none, or it does not say."""
        (number,) = protocol.PLACE.unpack(os.pread(self._place.fileno(), 4, 0).ljust(4, b"\0"))
        return int(number) - 1 if number else None

    def answer(self, within_s: float) -> Answer | None:
        """The next answer; `None` when there is none yet."""
        try:
            return self._answers.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None

    def newest(self) -> Answer | None:
        """The newest of the answers that have come."""
        newest = None
        while (answer := self.answer(0)) is not None:
            newest = answer
        return newest

    def _came(self, told: GpuReadings | Failed | Ended) -> None:
        with self._asking:
            asked_s, self.asked_s = self.asked_s, None
            timing = None if asked_s is None else Timing(asked_s=asked_s, took_s=time.monotonic() - asked_s)
            answer = Answer(told=told, timing=timing)
            again, self.missed = self.missed, False
            if again and not answer.last:
                self._ask()
            self._answers.put(answer)

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
        with self._asking, contextlib.suppress(OSError):
            self._questions.close()
        self._place.close()
        return True

    def _listen(self, answers: IO[bytes]) -> None:
        said, told = b"", None
        with answers:
            while text := answers.readline(protocol.LINE_BYTES_MAX):
                try:
                    if told is None or text != said:  # what a line says it says for ever: GPUs at rest repeat theirs
                        said, told = text, protocol.parse(text)
                except ValueError as error:
                    self._came(Ended(f"answered in no known form ({error})"))
                    return
                if isinstance(told, Xid):
                    self._reported.put(told)
                else:
                    self._works = True
                    self._came(told)
        self._came(Ended(_how(self.process) + self._why()))

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
