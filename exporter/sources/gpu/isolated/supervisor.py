"""GPUs of a driver, asked by a process of its own that can be killed, or abandoned, when a call hangs.

A look waits for its answer no longer than the others can wait for the look. One that is late costs that look, and no
other waits until an answer has come. As it comes, the process is asked anew, and it stands for looks to which nothing
newer has come as long as it is young enough: then it tells of a time that is past. One that is later than the deadline
costs the process. A process that cannot even be killed (the kernel itself hangs in the driver) is left behind; with too
many of those none is started any more, until one ends.

Where the process says which GPU it asks about, the one in which it hung is left out by the next one, as hung, and is
asked about by a process of its own, again and again, less and less often: once that has its answer the GPU is one of
all again. So a GPU that hangs costs the others one deadline. process.py is such a process.
"""

import contextlib
import queue
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from exporter.model.readings import UNIDENTIFIED, DriverHealth, GpuReadings, Timing
from exporter.sources.gpu.isolated.process import Answer, Child, Driver, Ended
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


@dataclass(frozen=True, kw_only=True)
class _Look:
    """One look that is waited for, until a monotonic time, seconds; `late` where a question of before is still open."""

    child: Child
    late: bool
    until_s: float


@dataclass(kw_only=True)
class _Hung:
    """A GPU in which a process hung: who it is, and how often in a row it has been so; monotonic times, seconds.

    `child` asks about it alone just now, and `left` is the last process that hung in it.
    """

    uuid: str
    name: str
    times: int = 0
    ask_s: float = 0.0
    well_s: float | None = None
    child: Child | None = None
    left: Child | None = None

    def hangs(self, left: Child | None) -> None:
        """It does, or does so still."""
        lately = self.well_s is None or time.monotonic() - self.well_s < HUNG_LONGEST_S
        self.times = self.times + 1 if lately else 1
        self.ask_s = time.monotonic() + hung_for_s(self.times)
        self.child, self.left, self.well_s = None, left, None


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
        self._child: Child | None = None
        self._look: _Look | None = None
        self._late: Answer | None = None
        self._timing: Timing | None = None
        self._error: Exception | None = None
        self._abandoned: list[Child] = []
        self._in_time = True
        self._heard: GpuReadings | None = None
        self._told: GpuReadings | None = None
        self._hung: dict[int, _Hung] = {}
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
            self._time_silence(child)
            raise self._silent(child)
        self._timing = answer.timing or self._timing
        told = answer.told
        if isinstance(told, Ended):
            raise self._ended(child, f"the process that asks {self._driver.who} {told.how}")
        if isinstance(told, Failed):
            if told.anew:  # it may number its GPUs otherwise
                self._forget_hung()
            if told.over:
                raise self._ended(child, told.because)
            raise DriverError(told.because)
        self._failures = 0
        if self._told is None or told is not self._heard:  # else it is what it was, so that all can tell
            self._heard = told
            self._told = self._with_names(told)
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
        for child in (self._child, *(hung.child for hung in self._hung.values())):
            if child is not None:
                child.end()

    def _waited_for(self, look: _Look) -> Answer | None:
        """The answer to a look, or the newest one that was late and stands for it; `None` where there is neither."""
        if self._late is not None and self._late.last:
            return self._late
        answer = look.child.answer(look.until_s - time.monotonic())
        if answer is not None and (answer.last or not look.late):
            self._late = None
            return answer
        if answer is not None:
            self._late, self._in_time = answer, True
        else:
            look.child.missed = True
            self._in_time = self._in_time and look.late
        stands = self._late is not None and self._late.stands and self._silent_s(look.child) < self._answer_s
        return self._late if stands else None

    def _begun(self) -> _Look:
        self._ask_hung()
        child = self._asked()
        came = child.newest()
        if came is not None:
            self._late, self._in_time = came, True
        late = child.asked_s is not None
        question = Question(without=frozenset(self._left_out()))
        if late:
            child.asks_next(question)
        elif came is None or not came.last:
            child.ask(question)
        patience_s = 0.0 if late or not self._in_time else self._patience_s()
        return _Look(child=child, late=late, until_s=time.monotonic() + patience_s)

    def _left_out(self) -> list[int]:
        return [index for index, hung in self._hung.items() if hung.well_s is None]

    def _asked(self) -> Child:
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
            self._child = Child(self._driver, self._reported)
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
    def _silent_s(child: Child) -> float:
        asked_s = child.asked_s
        return 0.0 if asked_s is None else time.monotonic() - asked_s

    def _time_silence(self, child: Child) -> None:
        """Note how long no answer has come; or how long the newest took, where the next was just asked for."""
        newest = self._timing if self._late is None else self._late.timing
        silent_s = self._silent_s(child)
        took_s = silent_s if newest is None else max(silent_s, newest.took_s)
        self._timing = Timing(asked_s=time.monotonic() - silent_s, took_s=took_s)

    def _silent(self, child: Child) -> DriverError:
        if self._silent_s(child) < self._answer_s:
            return DriverError(f"there is no answer yet from {self._driver.who}")
        self._killed += 1
        self._in_time = False
        index = child.asks_about()
        about = "" if index is None else f" about {self._driver.gpu.format(index)}"
        left_out = "" if index is None else ", and that GPU is left out until it answers a process of its own"
        error = self._ended(
            child,
            f"a call into {self._driver.who}{about} did not return within {self._answer_s:g} s, and its process was "
            f"killed{left_out}: see what the kernel's log (dmesg) says of the driver",
        )
        if index is not None:
            self._leave_out(index, child)
        return error

    def _leave_out(self, index: int, child: Child) -> None:
        """Have the others asked about at once: what hung is known, and each GPU can do so only once in a while."""
        hung = self._hung.get(index) or _Hung(uuid=f"{UNIDENTIFIED}{index}", name="")
        for gpu in () if self._told is None else self._told.gpus:
            if gpu.place == index and gpu.mig is None:
                hung.uuid, hung.name = gpu.uuid, gpu.name
        self._hung[index] = hung
        hung.hangs(child)
        self._failures -= 1  # that is the GPU's
        self._next_start_s = 0.0
        with contextlib.suppress(DriverError):  # which the next look tells
            self._asked().ask(Question(without=frozenset(self._left_out())))

    def _ask_hung(self) -> None:
        """Ask about a GPU that hung, where it is time, and see what has come of that."""
        for index, hung in self._hung.items():
            if hung.child is not None:
                self._see(hung, hung.child)
            elif hung.well_s is None and time.monotonic() >= hung.ask_s and self._may_hang(hung):
                with contextlib.suppress(OSError, RuntimeError):  # no process, or no thread more may be started
                    hung.child = Child(self._driver, self._reported)
                    hung.child.ask(Question(only=index))

    def _may_hang(self, hung: _Hung) -> bool:
        """Whether another process may be risked: one at a time, and of those that no signal ends one for a GPU."""
        self._abandoned = [each for each in self._abandoned if not each.is_over(within_s=0)]
        asks = any(each.child is not None for each in self._hung.values())
        return not asks and hung.left not in self._abandoned and len(self._abandoned) < ABANDONED_MAX

    def _see(self, hung: _Hung, child: Child) -> None:
        answer = child.newest()
        if answer is None and self._silent_s(child) < self._answer_s:
            return
        self._killed += answer is None
        if not child.end():
            self._abandoned.append(child)
        if answer is not None and isinstance(answer.told, GpuReadings):
            hung.child, hung.well_s = None, time.monotonic()
        else:
            hung.hangs(child)

    def _forget_hung(self) -> None:
        """Have all of them asked about, under whatever names; one that hangs at once does so once more in a row."""
        for index, hung in self._hung.items():
            if hung.child is not None and not hung.child.end():
                self._abandoned.append(hung.child)
            hung.uuid, hung.name, hung.child = f"{UNIDENTIFIED}{index}", "", None
            hung.well_s = time.monotonic() if hung.well_s is None else hung.well_s
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

    def _ended(self, child: Child, because: str) -> DriverError:
        self._child = self._late = None
        if not child.end():
            self._abandoned.append(child)
        return self._failed(because)

    def _failed(self, because: str) -> DriverError:
        self._failures += 1
        self._because = because
        self._next_start_s = time.monotonic() + restart_after_s(self._failures)
        return DriverError(because)
