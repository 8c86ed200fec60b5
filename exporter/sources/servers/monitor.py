"""The host's servers: their probe labels and their probe results."""

from collections.abc import Iterable
from typing import Final

import structlog

from exporter.evidence.container_history import PAUSED
from exporter.evidence.server_health import HealthCheckTracker
from exporter.evidence.worker_liveness import count_workers
from exporter.model.container import Container, Probe, Server, ServerEvidence
from exporter.model.unknown import Unknown
from exporter.model.worker import WorkerReadings
from exporter.sources.servers.http_probe import Prober
from exporter.state.answered_servers import ANSWERED_MAX, AnsweredFile
from gpuwarden.errors import GpuwardenError

log: Final = structlog.get_logger("exporter")

HOLDS_WORKERS: Final = Unknown(
    reason="holds_workers", message="a worker runs in it, so its jobs are checked and not the server"
)
MAY_HOLD_WORKERS: Final = Unknown(
    reason="workers_unknown", message="the worker files and locks do not show whether a worker runs in it"
)


class Servers:
    """Probe results of each server, by its container's incarnation.

    Args:
        prober: sends HTTP probes.
        kept: a file of the servers that have answered. Without it, a server that hangs during a restart of the
            exporter would look as if it still loads.
    """

    def __init__(self, prober: Prober, kept: AnsweredFile | None = None) -> None:
        self._prober = prober
        self._watches: dict[str, HealthCheckTracker] = {}
        self._reported: dict[str, str] = {}
        self._kept = kept
        # The newest last: ended incarnations are dropped first.
        self._answered: dict[str, None] = {}
        self._written: frozenset[str] = frozenset()
        if kept is not None:
            try:
                self._answered = dict.fromkeys(kept.read())
            except (GpuwardenError, OSError) as error:
                log.warning("file of answered servers not read", reason=str(error))
            self._written = frozenset(self._answered)

    def close(self) -> None:
        """Stop all probes."""
        self._prober.close()

    def observe(
        self, running: Iterable[Container], workers: WorkerReadings | None, *, now_s: float
    ) -> tuple[ServerEvidence, ...]:
        """Add one sample of the running containers."""
        running = tuple(running)
        servers = [(each, each.server) for each in running if each.server is not None]
        self._prober.set_servers(each for each, _ in servers if _kind(each) == "http")
        found = tuple(
            self._evidence(each, server, None if workers is None else count_workers(each, workers, running), now_s)
            for each, server in servers
        )
        incarnations = [each.incarnation for each, _ in servers]
        self._remember(found)
        self._watches = {each: self._watches[each] for each in incarnations if each in self._watches}
        self._log_changes(found)
        return found

    @property
    def keeps(self) -> bool:
        """Whether answered servers are saved to a file."""
        return self._kept is not None

    def keep(self) -> None:
        """Save the answered servers if they changed.

        Raises:
            OSError: the file cannot be written; the next call tries again.
        """
        if self._kept is not None and self._answered.keys() != self._written:
            self._kept.write(self._answered)
            self._written = frozenset(self._answered)

    def _remember(self, found: Iterable[ServerEvidence]) -> None:
        for each in found:
            incarnation = each.container.incarnation
            if each.answered or incarnation in self._answered:
                self._answered.pop(incarnation, None)
                self._answered[incarnation] = None
        for incarnation in list(self._answered)[:-ANSWERED_MAX]:
            del self._answered[incarnation]

    def _evidence(self, container: Container, server: Server, count: int | None, now_s: float) -> ServerEvidence:
        if count:
            return ServerEvidence(container=container, probe=HOLDS_WORKERS, workers=count)
        if isinstance(server.probe, Unknown):
            return ServerEvidence(container=container, probe=server.probe, workers=count)
        if server.probe.kind == "docker":
            watch = self._watches.setdefault(container.incarnation, HealthCheckTracker())
            asking, fresh_s = watch.state, 0.0
            if server.health is not None:
                asking = watch.observe(server.health, paused=container.paused, now_s=now_s)
                fresh_s = server.health.fresh_s
        else:
            asking, fresh_s = self._prober.state(container.incarnation), self._prober.fresh_s
        silent_s = asking.probe_failing_s(now_s=now_s, fresh_s=fresh_s)
        unknown = None
        if container.paused:
            unknown = PAUSED
        elif count is None:
            unknown = MAY_HOLD_WORKERS
        elif silent_s is None:
            unknown = Unknown(reason="not_asked", message="no recent probe")
        return ServerEvidence(
            container=container,
            probe=server.probe,
            workers=count,
            answered=asking.answered or container.incarnation in self._answered,
            probe_failing_s=silent_s if unknown is None else None,
            unknown=unknown,
            message=asking.message,
        )

    def _log_changes(self, found: Iterable[ServerEvidence]) -> None:
        """Log invalid labels, servers that stopped answering, and servers that answer again."""
        reported: dict[str, str] = {}
        for each in found:
            name = each.container.name
            if isinstance(each.probe, Unknown):
                reported[name] = each.probe.message
                if self._reported.get(name) != each.probe.message:
                    log.warning("server cannot be probed", container=name, reason=each.probe.message)
            elif each.probe_failing_s:
                reported[name] = ""
                if name not in self._reported:
                    log.info("server does not answer", container=name, reason=each.message, armed=each.answered)
        for name in self._reported.keys() - reported.keys():
            log.info("server answers again or has stopped", container=name)
        self._reported = reported


def _kind(container: Container) -> str | None:
    server = container.server
    return server.probe.kind if server is not None and isinstance(server.probe, Probe) else None
