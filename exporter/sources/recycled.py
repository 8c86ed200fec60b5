"""Which entries on the drivers' lists are of processes that have ended, and whose pids others have by now.

A driver lists pids, and can go on with one after its process has ended. Who has the pid then would be charged with the
memory of the dead. So it is remembered when the process of each entry started, as the entry was first seen, and looked
up again as soon as its pid is seen anew in a container: by another start the entry is of somebody else, for as long as
it stays. A look at which nobody comes and no list changes reads nothing.

A list that cannot be read may have lost the entry meanwhile, and have the pid's new owner by now. The dead take no more
memory and do not go on working: an entry that does is the living's.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from exporter.readings import Gpu, GpuProcess, GpuReadings
from gpuwarden import cgroup

WORKING_LOOKS: Final = 10
"""Looks in a row at which an entry works, until that cannot be what the dead did: a figure is of the last seconds."""


@dataclass(kw_only=True)
class _Life:
    """What a recycled entry has shown since: the least memory, bytes, and at how many looks in a row it has worked."""

    least_bytes: int | None = None
    working_looks: int = 0

    def shows(self, entries: Sequence[GpuProcess]) -> bool:
        """Whether these entries of one pid can only be of a process that lives."""
        held = [each.memory_bytes for each in entries if each.memory_bytes is not None]
        before, now = self.least_bytes, sum(held) if len(held) == len(entries) else None
        if now is not None:
            self.least_bytes = now if before is None else min(before, now)
        self.working_looks = self.working_looks + 1 if any(each.utilization_ratio for each in entries) else 0
        grown = before is not None and now is not None and now > before
        return grown or self.working_looks >= WORKING_LOOKS


class Recycled:
    """Follows every entry of every list, from the look that saw it first to the one that sees it no more."""

    def __init__(self, *, proc: Path = cgroup.PROC) -> None:
        self._proc = proc
        self._started: dict[str, dict[int, int | None]] = {}
        self._recycled: dict[str, dict[int, _Life]] = {}
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
                    self._recycled.setdefault(uuid, {}).setdefault(pid, _Life())
            except OSError:  # we are short of files: nobody's for now
                self._unsure.add(pid)

    def _marked(self, gpu: Gpu) -> Gpu:
        found = self._recycled.get(gpu.uuid, {}).keys() | (self._unsure & gpu.by_pid.keys())
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
            if gpu.processes is None:
                continue
            if gpu.uuid in self._recycled:
                self._recycled[gpu.uuid] = self._still(gpu, self._recycled[gpu.uuid])
                if not self._recycled[gpu.uuid]:
                    del self._recycled[gpu.uuid]
            known = self._started.get(gpu.uuid)
            if known is None or known.keys() != gpu.by_pid.keys():
                self._started[gpu.uuid] = self._noted(known or {}, gpu.by_pid)

    def _still(self, gpu: Gpu, recycled: Mapping[int, _Life]) -> dict[int, _Life]:
        """Those that are listed still and show no life; of the others it is noted anew when their process started."""
        still: dict[int, _Life] = {}
        for pid, life in recycled.items():
            entries = gpu.by_pid.get(pid)
            if entries is None:
                continue
            if life.shows(entries):
                self._started[gpu.uuid].pop(pid, None)
            else:
                still[pid] = life
        return still

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
