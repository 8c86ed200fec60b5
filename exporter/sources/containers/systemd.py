"""systemd services that were opted in, as containers, with or without a worker.

systemd links `/run/systemd/units/invocation:UNIT` to the id of a unit's invocation (InvocationID in systemd.exec(5)).
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
"""Seconds between two searches for a service outside of system.slice."""

UNITS_MAX: Final = 256
"""Services without a worker, the first by name."""

SLICES_MAX: Final = 1000
"""Slices that are searched for one service."""


@dataclass(frozen=True, kw_only=True)
class _Service:
    """A service's oldest process and its GPUs."""

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
        self._groups: dict[str, Path] = {}
        self._walk_at_s: dict[str, float] = {}
        self._services: dict[str, _Service] = {}

    def place(self, found: WorkerReadings) -> WorkerReadings:
        """Set the service of workers in no container."""
        if not self._patterns:
            return found
        return replace(found, workers=tuple(self._assign_service(each) for each in found.workers))

    def containers(self, workers: Iterable[WorkerReading]) -> Mapping[str, Container]:
        """Services with or without workers, by name.

        Left out are unreadable ones, and ones without a worker but with containers, which an engine lists. A service
        has the GPUs of all its workers, or of its first process.
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
        """Yield the services that run and are not in `found`."""
        services: dict[str, _Service] = {}
        for unit in self._running():
            if unit not in found and (group := self._group(unit)) is not None:
                with contextlib.suppress(OSError, ValueError, LookupError):  # it just ended
                    service = self._service(unit, group)
                    if service is not None:
                        services[unit] = service
        self._services = services
        yield from services.items()

    def _running(self) -> Sequence[str]:
        """Opted-in services with an invocation."""
        try:
            kept = os.listdir(self._invocations) if self._patterns else []  # noqa: PTH208 - names alone
        except OSError:
            return ()
        # The folder also has a link per unit for its log settings.
        names = (each.removeprefix(INVOCATION) for each in kept if each.startswith(INVOCATION))
        running = sorted(filter(self._is_opted_in, names))[:UNITS_MAX]
        self._groups = {each: group for each, group in self._groups.items() if each in running}
        self._walk_at_s = {each: at_s for each, at_s in self._walk_at_s.items() if each in running}
        return running

    def _is_opted_in(self, unit: str) -> bool:
        return bool(cgroup.UNIT.fullmatch(unit)) and any(fnmatchcase(unit, pattern) for pattern in self._patterns)

    def _group(self, unit: str) -> Path | None:
        """The cgroup of a service. The search outside of system.slice runs only now and then."""
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

    def refresh(self, last: Container) -> Container:
        """A service's present state: a restart makes another incarnation."""
        try:
            return replace(last, incarnation=f"{last.id}@{self._invocation(last.id)}", pid=0)
        except OSError:
            return replace(last, pid=0)

    def _assign_service(self, sighting: WorkerReading) -> WorkerReading:
        if sighting.pid is None or sighting.container_id is not None:
            return sighting
        try:
            unit = cgroup.unit(sighting.pid, proc=self._proc)
        except OSError:
            return sighting  # it just ended
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
    """Search the nested slices for a service's cgroup."""
    waiting = list(tops)
    for _ in range(SLICES_MAX):
        if not waiting:
            return None
        top = waiting.pop()
        if (top / unit).is_dir():
            return top / unit
        with contextlib.suppress(OSError):  # it just ended
            waiting.extend(each for each in top.iterdir() if each.name.endswith(".slice"))
    return None
