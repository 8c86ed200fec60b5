"""Which workers, containers and runs exist. An alert may name one that does not."""

import math
from collections.abc import Iterable
from typing import Final

import structlog

from gpuwarden.errors import GpuwardenError
from remediator.clients.exporter import ExporterClient
from remediator.clients.job_queue import Queue
from remediator.executor.clock import SuspendAwareClock
from remediator.ledger.inbox import Target
from remediator.plan import Subject

log: Final = structlog.get_logger("executor")

KNOWN_S: Final = 3600.0
"""A name that the exporter listed is known for this long, seconds."""

REFRESH_S: Final = 5.0
"""Minimum time between two questions about unlisted names, seconds."""


class KnownTargets:
    """What the host's exporter and the queue know."""

    def __init__(self, exporter: ExporterClient, queue: Queue, *, host: str, clock: SuspendAwareClock) -> None:
        self._exporter = exporter
        self._queue = queue
        self._host = host
        self._clock = clock
        self._listed: dict[str, float] = {}
        self._asked_s = self._answered_s = -math.inf

    def refresh(self) -> int:
        """Read the exporter's list. Returns its number of containers. Raises GpuwardenError."""
        now_s = self._asked_s = self._clock.now_s()
        found = self._exporter.list_targets()
        recent = {name: at_s for name, at_s in self._listed.items() if now_s - at_s < KNOWN_S}
        self._listed = recent | dict.fromkeys(found.names, now_s)
        self._answered_s = now_s
        return found.containers

    def is_listed(self, name: str) -> bool:
        """Whether the exporter listed this worker or container lately."""
        return name in self._listed

    def unknown(self, targets: Iterable[Target]) -> frozenset[Target]:
        """Return the targets that exporter and queue do not know. Without an answer none is unknown."""
        found = self._unlisted(targets)
        if found and self._clock.now_s() - self._asked_s >= REFRESH_S:
            try:
                self.refresh()
            except GpuwardenError as error:
                log.debug("the exporter lists nothing", reason=str(error))
            found = self._unlisted(found)
        if self._clock.now_s() - self._answered_s >= KNOWN_S:
            found = {each for each in found if each[0] == Subject.RUN}
        workers = [name for subject, name in found if subject == Subject.WORKER]
        runs = [name for subject, name in found if subject == Subject.RUN]
        if workers or runs:
            try:
                known = self._queue.known(self._host, workers=workers, runs=runs)
            except GpuwardenError:
                return frozenset(each for each in found if each[0] != Subject.RUN)
            found -= {(Subject.WORKER, name) for name in known.workers} | {(Subject.RUN, name) for name in known.runs}
        return frozenset(found)

    def _unlisted(self, targets: Iterable[Target]) -> set[Target]:
        """The targets that need a further question. A host is known by its executor, a run only by the queue."""
        return {
            (subject, name)
            for subject, name in targets
            if subject == Subject.RUN or (subject != Subject.HOST and name not in self._listed)
        }
