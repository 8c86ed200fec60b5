"""GPUs in which a process hung: left out by the main process, and each asked about by a process of its own."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from exporter.model.gpu import UNIDENTIFIED, Gpu, GpuReadings
from exporter.sources.gpu.isolated.processes import Process, Processes
from exporter.sources.gpu.isolated.protocol import Question

HUNG_FIRST_S: Final = 10.0
HUNG_LONGEST_S: Final = 300.0
"""How long a GPU that hung is not asked about, seconds: doubled with each time in a row. After a longer time without
it counts as the first time."""


def hung_for_s(times: int) -> float:
    """How long a GPU is not asked about, seconds, that has hung so many times in a row."""
    return min(HUNG_LONGEST_S, HUNG_FIRST_S * 2.0 ** min(times - 1, 30))


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


class HungGpus:
    """The GPUs of one driver that hang or have hung, by the driver's number.

    Args:
        processes: those that ask the driver.
        answer_s: how long an answer may take before the process is killed, seconds.
        now: the monotonic clock, seconds.
    """

    def __init__(self, processes: Processes, *, answer_s: float, now: Callable[[], float]) -> None:
        self._processes, self._answer_s, self._now = processes, answer_s, now
        self._hung: dict[int, _Hung] = {}

    def left_out(self) -> frozenset[int]:
        """The GPUs about which the main process is not to ask."""
        return frozenset(index for index, hung in self._hung.items() if hung.well_s is None)

    def add(self, index: int, process: Process, known: Iterable[Gpu]) -> None:
        """Leave out a GPU in which this process hung; its names are those of the last readings."""
        hung = self._hung.get(index) or _Hung(uuid=f"{UNIDENTIFIED}{index}", name="")
        for gpu in known:
            if gpu.place == index and gpu.mig is None:
                hung.uuid, hung.name = gpu.uuid, gpu.name
        self._hung[index] = hung
        hung.hangs(process, now_s=self._now())

    def ask(self) -> None:
        """Ask about a GPU that hung, where it is time, and see what has come of that."""
        for index, hung in self._hung.items():
            if hung.process is not None:
                self._see(hung, hung.process)
            elif hung.well_s is None and self._now() >= hung.ask_s and self._may_hang(hung):
                with contextlib.suppress(OSError, RuntimeError):  # no process, or no thread more may be started
                    hung.process = self._processes.start()
                    hung.process.ask(Question(only=index))

    def forget(self) -> None:
        """Have all of them asked about, under whatever names; one that hangs at once does so once more in a row."""
        for index, hung in self._hung.items():
            if hung.process is not None:
                self._processes.end(hung.process)
            hung.uuid, hung.name, hung.process = f"{UNIDENTIFIED}{index}", "", None
            hung.well_s = self._now() if hung.well_s is None else hung.well_s

    def with_names(self, told: GpuReadings) -> GpuReadings:
        """The same, where the GPUs that a process was not to ask about have the names that they told another one.

        One that is well again is left out still by the answers that were asked for before.
        """
        names = {name: hung for index, hung in self._hung.items() for name in (f"{UNIDENTIFIED}{index}", hung.uuid)}
        if not any(gpu.is_hung and gpu.uuid in names for gpu in told.gpus):
            return told
        listed = {gpu.uuid for gpu in told.gpus}
        return replace(
            told,
            gpus=tuple(
                replace(gpu, uuid=names[gpu.uuid].uuid, name=names[gpu.uuid].name)
                if gpu.is_hung and gpu.uuid in names and names[gpu.uuid].uuid not in listed - {gpu.uuid}
                else gpu
                for gpu in told.gpus
            ),
        )

    def close(self) -> None:
        """End the processes that ask about one GPU."""
        for hung in self._hung.values():
            if hung.process is not None:
                hung.process.end()

    def _may_hang(self, hung: _Hung) -> bool:
        """Whether another process may be risked: one at a time, and of those that no signal ends one for a GPU."""
        crowded = self._processes.are_crowded()
        asks = any(each.process is not None for each in self._hung.values())
        return not asks and hung.left not in self._processes.abandoned and not crowded

    def _see(self, hung: _Hung, process: Process) -> None:
        asked_s = self._now() if process.asked_s is None else process.asked_s
        answer = process.answer(0)
        if answer is None and self._now() - asked_s < self._answer_s:
            return
        self._processes.killed += answer is None
        self._processes.end(process)
        if answer is not None and isinstance(answer.told, GpuReadings):
            hung.process, hung.well_s = None, self._now()
        else:
            hung.hangs(process, now_s=self._now())
