"""Which entries on the drivers' lists are of processes that have ended, and whose pids others have by now.

A driver lists pids, and can go on with one after its process has ended. Who has the pid then would be charged with the
memory of the dead. So it is remembered when the process of each entry started, as the entry was first seen, and looked
up again as soon as its pid is seen anew in a container: by another start the entry is of somebody else, for as long as
it stays. A look at which nobody comes and no list changes reads nothing.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from exporter.readings import Gpu, GpuReadings
from gpuwarden import cgroup


class Recycled:
    """Follows every entry of every list, from the look that saw it first to the one that sees it no more."""

    def __init__(self, *, proc: Path = cgroup.PROC) -> None:
        self._proc = proc
        self._started: dict[str, dict[int, int | None]] = {}
        self._recycled: dict[str, set[int]] = {}
        self._unsure: set[int] = set()
        self._within: Mapping[str, frozenset[int] | None] = {}

    def mark(self, readings: GpuReadings | None, within: Mapping[str, frozenset[int] | None]) -> GpuReadings | None:
        """The readings, with what is recycled on each list; `within` are the processes of each container's incarnation.

        A container of which they are unknown has each of them anew once they are known.
        """
        came, self._unsure = self._came(within) | self._unsure, set()
        self._within = within
        for pid in came:
            self._compare(pid)
        if readings is None:
            return None
        self._follow(readings)
        if not self._recycled and not self._unsure:
            return readings
        return replace(readings, gpus=tuple(self._marked(gpu) for gpu in readings.gpus))

    def _compare(self, pid: int) -> None:
        for uuid, started in self._started.items():
            if pid not in started:
                continue
            try:
                if started[pid] != self._start(pid):
                    self._recycled.setdefault(uuid, set()).add(pid)
            except OSError:  # we are short of files: nobody's for now
                self._unsure.add(pid)

    def _marked(self, gpu: Gpu) -> Gpu:
        found = self._recycled.get(gpu.uuid, set()) | (self._unsure & gpu.by_pid.keys())
        return replace(gpu, recycled=tuple(sorted(found))) if found else gpu

    def _came(self, within: Mapping[str, frozenset[int] | None]) -> set[int]:
        came: set[int] = set()
        for incarnation, pids in within.items():
            before = self._within.get(incarnation)
            if pids and pids is not before and pids != before:
                came |= pids - (before or frozenset())
        return came

    def _follow(self, readings: GpuReadings) -> None:
        """Note the entries that are new, and forget those that are gone; a list that cannot be read loses none."""
        if not readings.failed:  # otherwise those that are missing may be of a source that does not answer
            there = {gpu.uuid for gpu in readings.gpus}
            self._started = {uuid: each for uuid, each in self._started.items() if uuid in there}
            self._recycled = {uuid: each for uuid, each in self._recycled.items() if uuid in there}
        for gpu in readings.gpus:
            known = self._started.get(gpu.uuid)
            if gpu.processes is None or (known is not None and known.keys() == gpu.by_pid.keys()):
                continue
            self._started[gpu.uuid] = self._noted(known or {}, gpu.by_pid)
            if gpu.uuid in self._recycled:
                self._recycled[gpu.uuid] &= gpu.by_pid.keys()
                if not self._recycled[gpu.uuid]:
                    del self._recycled[gpu.uuid]

    def _noted(self, known: Mapping[int, int | None], pids: Iterable[int]) -> dict[int, int | None]:
        found: dict[int, int | None] = {}
        for pid in pids:
            with contextlib.suppress(OSError):  # we are short of files: at the next look
                found[pid] = known[pid] if pid in known else self._start(pid)
        return found

    def _start(self, pid: int) -> int | None:
        """When a process started, clock ticks since boot; `None` where it has ended, or is hidden from us.

        Raises:
            OSError: it cannot be told just now.
        """
        try:
            return cgroup.start_ticks(pid, proc=self._proc)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
