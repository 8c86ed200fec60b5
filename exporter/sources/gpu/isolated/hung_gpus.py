"""GPUs in which a process hung. The main process skips them, and a separate process retries each."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from exporter.model.gpu import UNIDENTIFIED, Gpu, GpuReadings
from exporter.sources.gpu.isolated.processes import Process, Processes
from exporter.sources.gpu.isolated.protocol import Question

HUNG_FIRST_S: Final = 10.0
HUNG_LONGEST_S: Final = 300.0
"""Seconds before a hung GPU is retried, doubled with each failure in a row."""


def hung_for_s(times: int) -> float:
    """Seconds before the retry of a GPU that hung so many times in a row."""
    return min(HUNG_LONGEST_S, HUNG_FIRST_S * 2.0 ** min(times - 1, 30))


@dataclass(kw_only=True)
class _HungGpu:
    """A GPU that hung. `process` retries it now; `left` is the last process that hung in it."""

    uuid: str
    name: str
    times: int = 0
    ask_s: float = 0.0
    well_s: float | None = None
    process: Process | None = None
    left: Process | None = None

    def note_hang(self, left: Process | None, *, now_s: float) -> None:
        """Note that it hung."""
        lately = self.well_s is None or now_s - self.well_s < HUNG_LONGEST_S
        self.times = self.times + 1 if lately else 1
        self.ask_s = now_s + hung_for_s(self.times)
        self.process, self.left, self.well_s = None, left, None


class HungGpus:
    """The GPUs of one driver that hang or have hung; an answer may take `answer_s` seconds."""

    def __init__(self, processes: Processes, *, answer_s: float, now: Callable[[], float]) -> None:
        self._processes, self._answer_s, self._now = processes, answer_s, now
        self._hung: dict[int, _HungGpu] = {}

    def skipped(self) -> frozenset[int]:
        """The GPUs that the main process skips."""
        return frozenset(index for index, hung in self._hung.items() if hung.well_s is None)

    def add(self, index: int, process: Process, known: Iterable[Gpu]) -> None:
        """Add a GPU in which this process hung, with its name in the last readings."""
        hung = self._hung.get(index) or _HungGpu(uuid=f"{UNIDENTIFIED}{index}", name="")
        for gpu in known:
            if gpu.place == index and gpu.mig is None:
                hung.uuid, hung.name = gpu.uuid, gpu.name
        self._hung[index] = hung
        hung.note_hang(process, now_s=self._now())

    def ask(self) -> None:
        """Start retries that are due, and check those that run."""
        for index, hung in self._hung.items():
            if hung.process is not None:
                self._check_retry(hung, hung.process)
            elif hung.well_s is None and self._now() >= hung.ask_s and self._may_hang(hung):
                with contextlib.suppress(OSError, RuntimeError):  # no process or thread can be started
                    hung.process = self._processes.start()
                    hung.process.ask(Question(only=index))

    def forget(self) -> None:
        """Retry all: the driver may have renumbered them."""
        for index, hung in self._hung.items():
            if hung.process is not None:
                self._processes.end(hung.process)
            hung.uuid, hung.name, hung.process = f"{UNIDENTIFIED}{index}", "", None
            hung.well_s = self._now() if hung.well_s is None else hung.well_s

    def with_names(self, readings: GpuReadings) -> GpuReadings:
        """Set the names of hung GPUs in readings of a process that skipped them."""
        names = {name: hung for index, hung in self._hung.items() for name in (f"{UNIDENTIFIED}{index}", hung.uuid)}
        if not any(gpu.is_hung and gpu.uuid in names for gpu in readings.gpus):
            return readings
        listed = {gpu.uuid for gpu in readings.gpus}
        return replace(
            readings,
            gpus=tuple(
                replace(gpu, uuid=names[gpu.uuid].uuid, name=names[gpu.uuid].name)
                if gpu.is_hung and gpu.uuid in names and names[gpu.uuid].uuid not in listed - {gpu.uuid}
                else gpu
                for gpu in readings.gpus
            ),
        )

    def close(self) -> None:
        """End the retries."""
        for hung in self._hung.values():
            if hung.process is not None:
                hung.process.end()

    def _may_hang(self, hung: _HungGpu) -> bool:
        """Whether another process may be risked: one at a time, and none in place of one that cannot be killed."""
        crowded = self._processes.are_crowded()
        asks = any(each.process is not None for each in self._hung.values())
        return not asks and hung.left not in self._processes.abandoned and not crowded

    def _check_retry(self, hung: _HungGpu, process: Process) -> None:
        asked_s = self._now() if process.asked_s is None else process.asked_s
        answer = process.answer(0)
        if answer is None and self._now() - asked_s < self._answer_s:
            return
        self._processes.killed += answer is None
        self._processes.end(process)
        if answer is not None and isinstance(answer.message, GpuReadings):
            hung.process, hung.well_s = None, self._now()
        else:
            hung.note_hang(process, now_s=self._now())
