"""GPUs of a driver, asked by a process of its own that can be killed, or abandoned, when a call hangs.

A look waits for its answer no longer than the others can wait for the look. One that is late costs that look. Once it
has come, the process is asked anew, and it stands for looks to which nothing newer comes in time as long as it is young
enough: then it tells of a time that is past. One that is later than the deadline costs the process. A process that
cannot even be killed (the kernel itself hangs in the driver) is left behind; with too many of those none is started any
more, until one ends. What such a process does is in exporter/sources/driver_child.py.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import IO, Final, cast

from exporter.readings import DriverHealth, GpuReadings
from exporter.sources import driver_wire
from exporter.sources.driver_wire import DriverError, Failed, Xid

WAIT_S: Final = 2.0
"""How long one look waits for an answer, seconds: a busy host is slow, and an answer that was missed breaks off what is
known of idle GPUs. But with the rest of a look it has to stay well under what counts as a gap between two looks."""

AGE_MAX_S: Final = 5.0
"""How long ago a late answer may have been asked for, seconds, to stand for a look: as long as a gap between two."""

KILL_S: Final = 0.5
"""How long a killed process may take to end, seconds, before it counts as abandoned."""

ABANDONED_MAX: Final = 3
"""How many processes may hang in the driver, beyond any signal, before no other is started."""

COMPLAINT_BYTES: Final = 1024
"""How much is kept of what a process says of why it cannot start, or go on."""

ENDED: Final = frozenset({0, -signal.SIGKILL, -signal.SIGTERM})
"""How a process ends that did nothing wrong: by itself, or by somebody."""

RESTART_FIRST_S: Final = 1.0
RESTART_LONGEST_S: Final = 60.0
"""How long the next process is not started after one failed, seconds: doubled with each that fails in a row."""


def restart_after_s(failures: int) -> float:
    """How long to wait before the next process is started, seconds, after so many that failed in a row."""
    return min(RESTART_LONGEST_S, RESTART_FIRST_S * 2.0 ** min(failures - 1, 30))


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Who is asked, in words for people, and how Python is told what to run for it: before, and after, our own pid."""

    who: str
    program: tuple[str, ...]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What was told, and the monotonic time at which it was asked for, seconds."""

    told: "GpuReadings | Failed | _Ended"
    asked_s: float

    @property
    def last(self) -> bool:
        """Whether its process answers no more."""
        return isinstance(self.told, _Ended) or (isinstance(self.told, Failed) and self.told.over)

    @property
    def stands(self) -> bool:
        """Whether it is young enough to be told."""
        return self.last or time.monotonic() - self.asked_s < AGE_MAX_S


@dataclass(frozen=True, kw_only=True)
class _Look:
    """One look that is waited for, until a monotonic time, seconds; `late` where the question before is still open."""

    child: "_Child"
    late: bool
    until_s: float


class Apart:
    """Asks a driver in another process; for one thread.

    Args:
        driver: which.
        answer_s: how long a look may take before the process is killed, seconds.
        wait_s: how long `read` waits for an answer, seconds.
    """

    def __init__(self, driver: Driver, *, answer_s: float, wait_s: float = WAIT_S) -> None:
        self._driver = driver
        self._answer_s = answer_s
        self._wait_s = wait_s
        self._child: _Child | None = None
        self._look: _Look | None = None
        self._late: _Answer | None = None
        self._error: Exception | None = None
        self._abandoned: list[_Child] = []
        self._because = ""
        self._failures = 0
        self._killed = 0
        self._next_start_s = 0.0
        self._started = False
        self._reported: queue.SimpleQueue[Xid] = queue.SimpleQueue()
        self._xids: Counter[tuple[str, int]] = Counter()

    def ask(self) -> None:
        """Begin a look, so that several drivers are waited for at the same time; `read` tells what came of it."""
        try:
            self._look = self._begun()
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
        look, self._look = self._look or self._begun(), None
        child = look.child
        answer = self._waited_for(look)
        if answer is None:
            raise self._silent(child)
        told = answer.told
        if isinstance(told, _Ended):
            raise self._ended(child, f"the process that asks {self._driver.who} {told.how}")
        if isinstance(told, Failed):
            if told.over:
                raise self._ended(child, told.because)
            raise DriverError(told.because)
        self._failures = 0
        return told

    def health(self) -> DriverHealth:
        """What became of the processes that asked, and the errors that the driver has reported."""
        with contextlib.suppress(queue.Empty):
            while True:
                told = self._reported.get_nowait()
                self._xids[told.gpu, told.code] += 1
        return DriverHealth(killed=self._killed, abandoned=len(self._abandoned), xids=dict(self._xids))

    def close(self) -> None:
        """End the process; one that cannot be ended now is ended by the kernel, after this one."""
        if self._child is not None:
            self._child.end()

    def _waited_for(self, look: _Look) -> _Answer | None:
        """The answer to a look, or the newest one that was late and stands for it; `None` where there is neither."""
        if self._late is not None and self._late.last:
            return self._late
        answer = look.child.answer(look.until_s - time.monotonic())
        if look.late and answer is not None and not answer.last:
            self._late = answer
            look.child.ask()
            answer = None if answer.stands else look.child.answer(look.until_s - time.monotonic())
        if answer is not None:
            self._late = None
            return answer
        stands = self._late is not None and self._late.stands and self._silent_s(look.child) < self._answer_s
        return self._late if stands else None

    def _begun(self) -> _Look:
        child = self._asked()
        late = child.asked_s is not None
        came = child.answer(0) if late else None
        if came is not None:
            self._late, late = came, False
        if not late and (came is None or not came.last):
            child.ask()
        return _Look(child=child, late=late, until_s=time.monotonic() + self._patience_s())

    def _asked(self) -> "_Child":
        """The process that is to be asked, a new one where there is none."""
        self._abandoned = [each for each in self._abandoned if not each.is_over(within_s=0)]
        if self._child is not None:
            return self._child
        if len(self._abandoned) >= ABANDONED_MAX:
            raise DriverError(
                f"{len(self._abandoned)} processes hang in {self._driver.who} and cannot be killed, so no other is "
                "started: see what the kernel's log (dmesg) says of the driver, and reboot the host"
            )
        if time.monotonic() < self._next_start_s:
            raise DriverError(self._because)
        try:
            self._child = _Child(self._driver, self._reported)
        except (OSError, RuntimeError) as error:  # no process, or no thread more may be started
            raise self._failed(f"the process that asks {self._driver.who} cannot be started: {error}") from None
        return self._child

    def _patience_s(self) -> float:
        if self._started:
            return min(self._answer_s, self._wait_s)
        # The very first answer: there is nothing yet that waits for this look.
        self._started = True
        return self._answer_s

    @staticmethod
    def _silent_s(child: "_Child") -> float:
        return time.monotonic() - (child.asked_s or 0.0)

    def _silent(self, child: "_Child") -> DriverError:
        if self._silent_s(child) < self._answer_s:
            return DriverError(f"there is no answer yet from {self._driver.who}")
        self._killed += 1
        return self._ended(
            child,
            f"a call into {self._driver.who} did not return within {self._answer_s:g} s, and its process was killed: "
            "see what the kernel's log (dmesg) says of the driver",
        )

    def _ended(self, child: "_Child", because: str) -> DriverError:
        self._child = self._late = None
        if not child.end():
            self._abandoned.append(child)
        return self._failed(because)

    def _failed(self, because: str) -> DriverError:
        self._failures += 1
        self._because = because
        self._next_start_s = time.monotonic() + restart_after_s(self._failures)
        return DriverError(because)


class _Ended:
    """Nothing more comes from a process; `how` it ended, as far as it did."""

    def __init__(self, how: str) -> None:
        self.how = how


class _Child:
    """One process that asks a driver, a thread that reads what it tells, and one for its complaints."""

    def __init__(self, driver: Driver, reported: "queue.SimpleQueue[Xid]") -> None:
        self.asked_s: float | None = None
        self._reported = reported
        self._answers: queue.SimpleQueue[GpuReadings | Failed | _Ended] = queue.SimpleQueue()
        command = [sys.executable, "-P", *driver.program, str(os.getpid()), *driver.arguments]
        # It may outlive us, where it hangs: it holds nothing of ours then, such as a log that is read to its end.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
        )
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

    def ask(self) -> None:
        """Ask for a look; one at a time."""
        self.asked_s = time.monotonic()
        with contextlib.suppress(OSError):  # it has ended, which `answer` tells
            self._questions.write(b"look\n")
            self._questions.flush()

    def answer(self, within_s: float) -> _Answer | None:
        """The answer to the last `ask`; `None` when there is none yet."""
        try:
            found = self._answers.get(timeout=max(0.0, within_s))
        except queue.Empty:
            return None
        asked_s, self.asked_s = self.asked_s, None
        return _Answer(told=found, asked_s=asked_s or 0.0)

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
        said, told = b"", None
        with answers:
            while text := answers.readline(driver_wire.LINE_BYTES_MAX):
                try:
                    if told is None or text != said:  # what a line says it says for ever: GPUs at rest repeat theirs
                        said, told = text, driver_wire.parse(text)
                except ValueError as error:
                    self._answers.put(_Ended(f"answered in no known form ({error})"))
                    return
                if isinstance(told, Xid):
                    self._reported.put(told)
                else:
                    self._works = True
                    self._answers.put(told)
        self._answers.put(_Ended(_how(self.process) + self._why()))

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
