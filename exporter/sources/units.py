"""Workers that run in services of systemd's: the service stands in for a container, where its name was opted in.

systemd links `/run/systemd/units/invocation:UNIT` to the id of what runs of a unit (InvocationID in systemd.exec(5)),
for anybody to read, and takes the link away when it forgets the unit.
"""

import contextlib
import queue
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from exporter.readings import Container, WorkerReadings, WorkerSighting
from exporter.sources import processes
from gpuwarden import cgroup

INVOCATIONS: Final = Path("/run/systemd/units")

SYSTEMCTL_S: Final = 5.0
"""How long systemd may take to tell how often it has restarted a service, seconds; no look waits for it."""

AGAIN_S: Final = 60.0
"""How long systemd is not asked after it has not answered in time, seconds."""


class Units:
    """The services whose names match one of `patterns` (fnmatch)."""

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        proc: Path = cgroup.PROC,
        invocations: Path = INVOCATIONS,
        systemctl: Sequence[str] = ("systemctl",),
    ) -> None:
        self._patterns = tuple(patterns)
        self._proc = proc
        self._invocations = invocations
        self._systemctl = tuple(systemctl)
        self._restarts: dict[str, int | None] = {}
        self._answers: queue.SimpleQueue[tuple[str, int | None]] = queue.SimpleQueue()
        self._asking: threading.Thread | None = None
        self._ask_at_s = 0.0

    def place(self, found: WorkerReadings) -> WorkerReadings:
        """Give workers that are in no container the service they are in, as the id of one."""
        if not self._patterns:
            return found
        return replace(found, workers=tuple(self._placed(each) for each in found.workers))

    def containers(self, workers: Iterable[WorkerSighting]) -> Mapping[str, Container]:
        """The services that these workers are in, by name. One that cannot be read is left out.

        It has the GPUs of all its workers together, each known as a supervised process's are. How often it was
        restarted is unknown until systemd has told it, once in an invocation.
        """
        found: dict[str, Container] = {}
        with contextlib.suppress(queue.Empty):
            while True:
                self._restarts.update([self._answers.get_nowait()])
        known, self._restarts = self._restarts, {}
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
            incarnation = f"{unit}@{invocation}"
            if incarnation in known:
                self._restarts[incarnation] = known[incarnation]
            else:
                self._ask(unit, incarnation)
            found[unit] = Container(
                kind="systemd",
                id=unit,
                name=unit,
                incarnation=incarnation,
                pid=sighting.pid,
                gpu_request=asked,
                restarts=known.get(incarnation),
            )
        return found

    def renewed(self, last: Container) -> Container:
        """A service as systemd has it now: one that was started anew is another incarnation."""
        try:
            return replace(last, incarnation=f"{last.id}@{self._invocation(last.id)}", pid=0)
        except OSError:
            return replace(last, pid=0)

    def _placed(self, sighting: WorkerSighting) -> WorkerSighting:
        if sighting.pid is None or sighting.container_id is not None:
            return sighting
        try:
            unit = cgroup.unit(sighting.pid, proc=self._proc)
        except OSError:
            return sighting  # it died between the two looks
        if unit is None or not any(fnmatchcase(unit, pattern) for pattern in self._patterns):
            return sighting
        return replace(sighting, container_id=unit)

    def _ask(self, unit: str, incarnation: str) -> None:
        """Ask systemd about one service, in a thread of its own, unless it is asked about another."""
        if time.monotonic() >= self._ask_at_s and (self._asking is None or not self._asking.is_alive()):
            asking = threading.Thread(target=self._restarts_of, args=(unit, incarnation), name="systemctl", daemon=True)
            self._asking = asking
            asking.start()

    def _restarts_of(self, unit: str, incarnation: str) -> None:
        """How often systemd has started a service again by itself: NRestarts, which changes with its invocation.

        `None` where it does not tell: no such program, or no such property (before 235). With no answer in time it is
        asked again later.
        """
        restarts: int | None = None
        try:
            told = subprocess.run(
                [*self._systemctl, "show", "--property=NRestarts", "--value", "--", unit],
                capture_output=True, check=True, text=True, timeout=SYSTEMCTL_S,
            )  # fmt: skip
            restarts = int(told.stdout)
        except subprocess.TimeoutExpired:
            self._ask_at_s = time.monotonic() + AGAIN_S
            return
        except (OSError, subprocess.SubprocessError, ValueError):
            pass
        self._answers.put((incarnation, restarts))

    def _invocation(self, unit: str) -> str:
        return str((self._invocations / f"invocation:{unit}").readlink())
