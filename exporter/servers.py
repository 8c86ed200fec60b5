"""The host's servers at one look: what their labels ask for, and what has come of asking them."""

from collections.abc import Iterable
from typing import Final

import structlog

from exporter.answering import HealthWatch
from exporter.readings import Container, Probe, ServerEvidence, Unknown, WorkerReadings
from exporter.sources.probes import SERVERS_MAX, Prober

log: Final = structlog.get_logger("exporter")

HOLDS_WORKERS: Final = Unknown(
    reason="holds_workers", because="a worker lives in it: what wedges in it is judged by its jobs, not as a server"
)


class Servers:
    """Keeps what was seen of each server, by its container's incarnation."""

    def __init__(self, prober: Prober) -> None:
        self._prober = prober
        self._watches: dict[str, HealthWatch] = {}
        self._told: dict[str, str] = {}

    def close(self) -> None:
        """Ask nobody any more."""
        self._prober.close()

    def look(
        self, running: Iterable[Container], workers: WorkerReadings | None, *, now_s: float
    ) -> tuple[ServerEvidence, ...]:
        """Take in one look at the containers that run."""
        servers = [each for each in running if each.server is not None]
        self._prober.tend(each for each in servers if _kind(each) == "http")
        found = tuple(self._evidence(each, workers, now_s) for each in servers)
        self._watches = {each.incarnation: watch for each in servers if (watch := self._watches.get(each.incarnation))}
        self._tell(found)
        return found

    def _evidence(self, container: Container, workers: WorkerReadings | None, now_s: float) -> ServerEvidence:
        server = container.server
        assert server is not None  # noqa: S101 - its caller chose it by that
        count = None if workers is None else _workers_of(container, workers)
        if count:
            return ServerEvidence(container=container, probe=HOLDS_WORKERS, workers=count)
        if isinstance(server.probe, Unknown):
            return ServerEvidence(container=container, probe=server.probe, workers=count)
        if server.probe.kind == "docker":
            watch = self._watches.setdefault(container.incarnation, HealthWatch())
            health = server.health
            assert health is not None  # noqa: S101 - without one the probe is unknown
            asking, fresh_s = watch.observe(health, paused=server.paused, now_s=now_s), health.fresh_s
        else:
            found, fresh_s = self._prober.asking(container.incarnation), self._prober.fresh_s
            if found is None:
                because = f"more than {SERVERS_MAX} servers are to be asked over HTTP"
                return ServerEvidence(
                    container=container, probe=Unknown(reason="too_many", because=because), workers=count
                )
            asking = found
        silent_s = None if server.paused else asking.unanswered_s(now_s=now_s, fresh_s=fresh_s)
        unknown = None
        if server.paused:
            unknown = Unknown(reason="paused", because="the container is paused")
        elif silent_s is None:
            unknown = Unknown(reason="not_asked", because="it was not asked lately")
        return ServerEvidence(
            container=container,
            probe=server.probe,
            workers=count,
            answered=asking.answered,
            unanswered_s=silent_s,
            unknown=unknown,
            because=asking.because,
        )

    def _tell(self, found: Iterable[ServerEvidence]) -> None:
        """Log what changed: labels that cannot be used, servers that stopped to answer, and that do again."""
        told: dict[str, str] = {}
        for each in found:
            name = each.container.name
            if isinstance(each.probe, Unknown):
                told[name] = each.probe.because
                if self._told.get(name) != each.probe.because:
                    log.warning("server cannot be asked", container=name, because=each.probe.because)
            elif each.unanswered_s:
                told[name] = ""
                if name not in self._told:
                    log.info("server does not answer", container=name, because=each.because, armed=each.answered)
        for name in self._told.keys() - told.keys():
            log.info("server answers, or is gone", container=name)
        self._told = told


def _kind(container: Container) -> str | None:
    server = container.server
    return server.probe.kind if server is not None and isinstance(server.probe, Probe) else None


def _workers_of(container: Container, workers: WorkerReadings) -> int:
    return sum(each.container_id == container.id for each in workers.workers)
