"""Services of systemd's: one stands in for a container where its name was opted in, whether a worker is in it or not.

systemd links `/run/systemd/units/invocation:UNIT` to the id of what runs of a unit (InvocationID in systemd.exec(5)),
for anybody to read, and takes the link away when it forgets the unit.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from exporter.model.container import Container
from exporter.model.worker import WorkerReading, WorkerReadings
from exporter.sources import processes
from gpuwarden import cgroup, procfs
from gpuwarden.procfs import ProcessId

INVOCATIONS: Final = Path("/run/systemd/units")
INVOCATION: Final = "invocation:"

AGAIN_S: Final = 60.0
"""How often a service in another slice than system.slice is looked for, seconds."""

UNITS_MAX: Final = 256
"""Services without a worker that are looked at, the first by name."""

SLICES_MAX: Final = 1000
"""Slices of systemd's that are looked through for one service: it is hardly ever in another than system.slice."""

SETTLED_NS: Final = 1_000_000_000
"""A folder that changed less than this ago may change once more without another time of change, nanoseconds."""


@dataclass(frozen=True, kw_only=True)
class _Service:
    """What runs of a service, by whichever of its processes started first."""

    process: ProcessId
    gpu_request: tuple[str, ...] | None


class Units:
    """The services whose names match one of `patterns` (fnmatch)."""

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        proc: Path = procfs.PROC,
        root: Path = cgroup.ROOT,
        invocations: Path = INVOCATIONS,
    ) -> None:
        self._patterns = tuple(patterns)
        self._proc = proc
        self._root = root
        self._invocations = invocations
        self._opted_in: tuple[str, ...] = ()
        self._invocations_ns = 0
        self._groups: dict[str, Path] = {}
        self._walk_at_s: dict[str, float] = {}
        self._services: dict[str, _Service] = {}

    def place(self, found: WorkerReadings) -> WorkerReadings:
        """Give workers that are in no container the service they are in, as the id of one."""
        if not self._patterns:
            return found
        return replace(found, workers=tuple(self._placed(each) for each in found.workers))

    def containers(self, workers: Iterable[WorkerReading]) -> Mapping[str, Container]:
        """The services that these workers are in, and those that run without any, by name.

        One that cannot be read is left out; and of those without a worker, one with containers inside of it: whoever
        lists those tells of them. It has the GPUs of all its workers together, each known as a supervised process's
        are; without one, those of its first process.
        """
        found: dict[str, Container] = {}
        for sighting in workers:
            unit = sighting.container_id
            if sighting.pid is None or unit is None or not cgroup.UNIT.fullmatch(unit):
                continue
            try:
                invocation, asked = self._invocation(unit), processes.gpu_request(sighting.pid, proc=self._proc)
            except OSError:
                continue
            before = found.get(unit)
            if before is not None:
                both = tuple(dict.fromkeys([*(before.gpu_request or ()), *(asked or ())]))
                found[unit] = replace(before, gpu_request=("all",) if "all" in both else both or None)
                continue
            found[unit] = _container(unit, invocation, sighting.pid, asked)
        for unit, service in self._without_worker(found):
            try:
                invocation = self._invocation(unit)
            except OSError:
                continue
            found[unit] = _container(unit, invocation, service.process.pid, service.gpu_request)
        return found

    def _without_worker(self, found: Collection[str]) -> Iterator[tuple[str, _Service]]:
        """The services that were opted in and run, other than those that are found already."""
        services: dict[str, _Service] = {}
        for unit in self._running():
            if unit not in found and (group := self._group(unit)) is not None:
                with contextlib.suppress(OSError, ValueError, LookupError):  # it ended between two looks
                    service = self._service(unit, group)
                    if service is not None:
                        services[unit] = service
        self._services = services
        yield from services.items()

    def _running(self) -> Sequence[str]:
        """Those that were opted in and that systemd knows an invocation of; listed where that may have changed."""
        if not self._patterns:
            return ()
        try:
            changed_ns = self._invocations.stat().st_mtime_ns
            if changed_ns != self._invocations_ns or time.time_ns() - changed_ns < SETTLED_NS:
                kept = os.listdir(self._invocations)  # noqa: PTH208 - names alone
                # Beside a unit's invocation it keeps how that logs, each by a link of its own.
                names = (each.removeprefix(INVOCATION) for each in kept if each.startswith(INVOCATION))
                self._opted_in = tuple(sorted(filter(self._is_opted_in, names)))[:UNITS_MAX]
                self._invocations_ns = changed_ns
                self._groups = {each: group for each, group in self._groups.items() if each in self._opted_in}
                self._walk_at_s = {each: at_s for each, at_s in self._walk_at_s.items() if each in self._opted_in}
        except OSError:
            self._opted_in, self._invocations_ns = (), 0
        return self._opted_in

    def _is_opted_in(self, unit: str) -> bool:
        return bool(cgroup.UNIT.fullmatch(unit)) and any(fnmatchcase(unit, pattern) for pattern in self._patterns)

    def _group(self, unit: str) -> Path | None:
        """Where a service's processes are listed; one that has none, as after its end, is looked for now and then."""
        known = self._groups.get(unit)
        if known is not None and known.is_dir():
            return known
        tops = [top for each in ("systemd", "unified", "memory", "") if (top := self._root / each).is_dir()]
        found = next((each for top in tops if (each := top / "system.slice" / unit).is_dir()), None)
        if found is None and time.monotonic() >= self._walk_at_s.get(unit, 0.0):
            self._walk_at_s[unit] = time.monotonic() + AGAIN_S
            found = _in_slices(tops, unit)
        if found is None:
            self._groups.pop(unit, None)
        else:
            self._groups[unit] = found
        return found

    def _service(self, unit: str, group: Path) -> _Service | None:
        if cgroup.has_groups_below(group) and cgroup.containers(group):
            return None
        known = self._services.get(unit)
        with contextlib.suppress(OSError):
            if known is not None and ProcessId.of(known.process.pid, proc=self._proc) == known.process:
                return known
        running = [ProcessId.of(pid, proc=self._proc) for pid in cgroup.processes(group)]
        if not running:
            return None
        first = min(running, key=lambda process: (process.start_ticks, process.pid))
        return _Service(process=first, gpu_request=processes.gpu_request(first.pid, proc=self._proc))

    def renewed(self, last: Container) -> Container:
        """A service as systemd has it now: one that was started anew is another incarnation."""
        try:
            return replace(last, incarnation=f"{last.id}@{self._invocation(last.id)}", pid=0)
        except OSError:
            return replace(last, pid=0)

    def _placed(self, sighting: WorkerReading) -> WorkerReading:
        if sighting.pid is None or sighting.container_id is not None:
            return sighting
        try:
            unit = cgroup.unit(sighting.pid, proc=self._proc)
        except OSError:
            return sighting  # it died between the two looks
        if unit is None or not self._is_opted_in(unit):
            return sighting
        return replace(sighting, container_id=unit)

    def _invocation(self, unit: str) -> str:
        return str((self._invocations / f"{INVOCATION}{unit}").readlink())


def _container(unit: str, invocation: str, pid: int, gpu_request: tuple[str, ...] | None) -> Container:
    return Container(
        kind="systemd", id=unit, name=unit, incarnation=f"{unit}@{invocation}", pid=pid, gpu_request=gpu_request
    )


def _in_slices(tops: Iterable[Path], unit: str) -> Path | None:
    """A service's group in whichever slice it is, nested as systemd nests them."""
    waiting = list(tops)
    for _ in range(SLICES_MAX):
        if not waiting:
            return None
        top = waiting.pop()
        if (top / unit).is_dir():
            return top / unit
        with contextlib.suppress(OSError):  # gone meanwhile
            waiting.extend(each for each in top.iterdir() if each.name.endswith(".slice"))
    return None
