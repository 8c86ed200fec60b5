"""GPUs of a driver, asked by a process of its own that can be killed, or abandoned, when a call hangs.

A look waits for its answer no longer than `WAIT_S`. An answer that comes later costs that look, and the look that finds
it takes it; until then no look waits. An answer later than the deadline costs the process. A process that cannot even
be killed (the kernel itself hangs in the driver) is left behind. With too many of those no other is started until one
ends.

Where the process says which GPU it asks about, the GPU in which it hung is left out by the next one, as hung. Another
process asks about that GPU alone, again and again, less and less often. Once it has its answer the GPU is one of all
again. So a GPU that hangs costs the others one deadline. process.py is such a process.
"""

import contextlib
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from exporter.model.gpu import UNIDENTIFIED, GpuReadings
from exporter.model.snapshot import DriverHealth, Timing
from exporter.sources.gpu.isolated.process import Answer, Driver, DriverProcess, Ended
from exporter.sources.gpu.isolated.protocol import DriverError, Failed, Question, Xid

WAIT_S: Final = 2.0
"""How long one look waits for an answer, seconds: a busy host is slow, and an answer that was missed breaks off what is
known of idle GPUs. But with the rest of a look it has to stay well under what counts as a gap between two looks."""

ABANDONED_MAX: Final = 3
"""How many processes may hang in the driver, beyond any signal, before no other is started."""

RESTART_FIRST_S: Final = 1.0
RESTART_LONGEST_S: Final = 60.0
"""How long the next process is not started after one failed, seconds: doubled with each that fails in a row."""

HUNG_FIRST_S: Final = 10.0
HUNG_LONGEST_S: Final = 300.0
"""How long a GPU that hung is not asked about, seconds: doubled with each time in a row. After a longer time without
it counts as the first time."""


def hung_for_s(times: int) -> float:
    """How long a GPU is not asked about, seconds, that has hung so many times in a row."""
    return min(HUNG_LONGEST_S, HUNG_FIRST_S * 2.0 ** min(times - 1, 30))


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


@dataclass(kw_only=True)
class _Hung:
    """A GPU in which a process hung: who it is, and how often in a row it has been so; monotonic times, seconds.

    `process` asks about it alone just now, and `left` is the last process that hung in it.
    """

    uuid: str
    name: str
    times: int = 0
    ask_s: float = 0.0
    well_s: float | None = None
    process: Process | None = None
    left: Process | None = None

    def hangs(self, left: Process | None, *, now_s: float) -> None:
        """It does, or does so still."""
        lately = self.well_s is None or now_s - self.well_s < HUNG_LONGEST_S
        self.times = self.times + 1 if lately else 1
        self.ask_s = now_s + hung_for_s(self.times)
        self.process, self.left, self.well_s = None, left, None


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
        self._driver = driver
        self._answer_s, self._wait_s = answer_s, wait_s
        self._start, self._now = start, now
        self._process: Process | None = None
        self._look: tuple[Process, float] | None = None
        self._error: Exception | None = None
        self._timing: Timing | None = None
        self._abandoned: list[Process] = []
        self._was_looked_at = False
        self._late = False
        self._told: GpuReadings | None = None
        self._hung: dict[int, _Hung] = {}
        self._because = ""
        self._failures = 0
        self._killed = 0
        self._next_start_s = 0.0
        self._reported: queue.SimpleQueue[Xid] = queue.SimpleQueue()
        self._xids: Counter[tuple[str, int]] = Counter()

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
            raise self._ended(process, f"the process that asks {self._driver.who} {told.how}")
        if isinstance(told, Failed):
            if told.anew:  # it may number its GPUs otherwise
                self._forget_hung()
            if told.over:
                raise self._ended(process, told.because)
            raise DriverError(told.because)
        self._failures = 0
        named = self._with_names(told)
        if named != self._told:  # else it is the same object, and what was worked out of it holds
            self._told = named
        return self._told

    def health(self) -> DriverHealth:
        """What became of the processes that asked, and the errors that the driver has reported."""
        with contextlib.suppress(queue.Empty):
            while True:
                told = self._reported.get_nowait()
                self._xids[told.gpu, told.code] += 1
        return DriverHealth(killed=self._killed, abandoned=len(self._abandoned), xids=dict(self._xids))

    def timing(self) -> Timing | None:
        """Of the answer that `read` has told last; where there is none, how long one has been waited for so far.

        `None` before a process was asked.
        """
        return self._timing

    def close(self) -> None:
        """End the process; one that cannot be ended now is ended by the kernel, after this one."""
        for process in (self._process, *(hung.process for hung in self._hung.values())):
            if process is not None:
                process.end()

    def _begin(self) -> tuple[Process, float]:
        """The process that is asked, and until when this look waits for it, monotonic, seconds."""
        self._ask_hung()
        process = self._running()
        if process.asked_s is None:
            process.ask(Question(without=frozenset(self._left_out())))
        return process, self._now() + self._patience_s()

    def _patience_s(self) -> float:
        """How long a look waits. The very first waits for all of the answer: nothing yet grows old meanwhile."""
        if self._late:
            return 0.0
        return min(self._answer_s, self._wait_s) if self._was_looked_at else self._answer_s

    def _left_out(self) -> list[int]:
        return [index for index, hung in self._hung.items() if hung.well_s is None]

    def _running(self) -> Process:
        """The process that is to be asked, a new one where there is none."""
        self._abandoned = [each for each in self._abandoned if not each.is_over(within_s=0)]
        if self._process is not None:
            return self._process
        if len(self._abandoned) >= ABANDONED_MAX:
            raise DriverError(
                f"{len(self._abandoned)} processes hang in {self._driver.who} and cannot be killed, so no other is "
                "started: see what the kernel's log (dmesg) says of the driver, and reboot the host"
            )
        if self._now() < self._next_start_s:
            raise DriverError(self._because)
        try:
            self._process = self._start(self._driver, self._reported)
        except (OSError, RuntimeError) as error:  # no process, or no thread more may be started
            raise self._failed(f"the process that asks {self._driver.who} cannot be started: {error}") from None
        return self._process

    def _silent(self, process: Process) -> DriverError:
        """Why there is no answer. After the first look that had to wait for it no other waits until one has come."""
        now_s = self._now()
        asked_s = now_s if process.asked_s is None else process.asked_s
        self._timing = Timing(asked_s=asked_s, took_s=now_s - asked_s)
        self._was_looked_at, self._late = True, True
        if now_s - asked_s < self._answer_s:
            return DriverError(f"there is no answer yet from {self._driver.who}")
        self._killed += 1
        index = process.asks_about
        about = "" if index is None else f" about {self._driver.gpu.format(index)}"
        left_out = "" if index is None else ", and that GPU is left out until it answers a process of its own"
        error = self._ended(
            process,
            f"a call into {self._driver.who}{about} did not return within {self._answer_s:g} s, and its process was "
            f"killed{left_out}: see what the kernel's log (dmesg) says of the driver",
        )
        if index is not None:
            self._leave_out(index, process)
        return error

    def _leave_out(self, index: int, process: Process) -> None:
        """Have the others asked about at once: what hung is known, and each GPU can do so only once in a while."""
        hung = self._hung.get(index) or _Hung(uuid=f"{UNIDENTIFIED}{index}", name="")
        for gpu in () if self._told is None else self._told.gpus:
            if gpu.place == index and gpu.mig is None:
                hung.uuid, hung.name = gpu.uuid, gpu.name
        self._hung[index] = hung
        hung.hangs(process, now_s=self._now())
        self._failures -= 1  # that is the GPU's
        self._next_start_s = 0.0
        with contextlib.suppress(DriverError):  # which the next look tells
            self._running().ask(Question(without=frozenset(self._left_out())))

    def _ask_hung(self) -> None:
        """Ask about a GPU that hung, where it is time, and see what has come of that."""
        for index, hung in self._hung.items():
            if hung.process is not None:
                self._see(hung, hung.process)
            elif hung.well_s is None and self._now() >= hung.ask_s and self._may_hang(hung):
                with contextlib.suppress(OSError, RuntimeError):  # no process, or no thread more may be started
                    hung.process = self._start(self._driver, self._reported)
                    hung.process.ask(Question(only=index))

    def _may_hang(self, hung: _Hung) -> bool:
        """Whether another process may be risked: one at a time, and of those that no signal ends one for a GPU."""
        self._abandoned = [each for each in self._abandoned if not each.is_over(within_s=0)]
        asks = any(each.process is not None for each in self._hung.values())
        return not asks and hung.left not in self._abandoned and len(self._abandoned) < ABANDONED_MAX

    def _see(self, hung: _Hung, process: Process) -> None:
        asked_s = self._now() if process.asked_s is None else process.asked_s
        answer = process.answer(0)
        if answer is None and self._now() - asked_s < self._answer_s:
            return
        self._killed += answer is None
        if not process.end():
            self._abandoned.append(process)
        if answer is not None and isinstance(answer.told, GpuReadings):
            hung.process, hung.well_s = None, self._now()
        else:
            hung.hangs(process, now_s=self._now())

    def _forget_hung(self) -> None:
        """Have all of them asked about, under whatever names; one that hangs at once does so once more in a row."""
        for index, hung in self._hung.items():
            if hung.process is not None and not hung.process.end():
                self._abandoned.append(hung.process)
            hung.uuid, hung.name, hung.process = f"{UNIDENTIFIED}{index}", "", None
            hung.well_s = self._now() if hung.well_s is None else hung.well_s
        self._told = None

    def _with_names(self, told: GpuReadings) -> GpuReadings:
        """The same, where the GPUs that a process was not to ask about have the names that they told another one.

        One that is well again is left out still by the answers that were asked for before.
        """
        names = {name: hung for index, hung in self._hung.items() for name in (f"{UNIDENTIFIED}{index}", hung.uuid)}
        if not any(gpu.hangs and gpu.uuid in names for gpu in told.gpus):
            return told
        listed = {gpu.uuid for gpu in told.gpus}
        return replace(
            told,
            gpus=tuple(
                replace(gpu, uuid=names[gpu.uuid].uuid, name=names[gpu.uuid].name)
                if gpu.hangs and gpu.uuid in names and names[gpu.uuid].uuid not in listed - {gpu.uuid}
                else gpu
                for gpu in told.gpus
            ),
        )

    def _ended(self, process: Process, because: str) -> DriverError:
        self._process = None
        if not process.end():
            self._abandoned.append(process)
        return self._failed(because)

    def _failed(self, because: str) -> DriverError:
        self._failures += 1
        self._because = because
        self._next_start_s = self._now() + restart_after_s(self._failures)
        return DriverError(because)
