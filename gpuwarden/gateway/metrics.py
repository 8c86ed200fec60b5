"""The metrics of a gateway, as they are published and documented."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric: its name, meaning, labels, and when it is absent."""

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    absent: str

    def counter(self, registry: CollectorRegistry) -> Counter:
        """Publish it as a counter."""
        return Counter(self.name, self.meaning, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry, value: Callable[[], float]) -> None:
        """Publish it as a gauge with this value."""
        Gauge(self.name, self.meaning, registry=registry).set_function(value)


REQUESTS: Final = Metric(
    name="gpuwarden_gateway_requests_total",
    meaning="Requests of workers, by operation and outcome.",
    labels=("operation", "outcome"),
    absent="no such request yet",
)
REFUSED: Final = Metric(
    name="gpuwarden_gateway_refused_requests_total",
    meaning="Refused requests, by caller and reason.",
    labels=("caller", "reason"),
    absent="no such request yet",
)
ORDERS: Final = Metric(
    name="gpuwarden_gateway_answered_orders_total",
    meaning="Orders to end a task that hosts answered, by outcome.",
    labels=("outcome",),
    absent="no such answer yet",
)
SOCKETS: Final = Metric(
    name="gpuwarden_gateway_sockets", meaning="Sockets of workers' folders.", absent="central gateway"
)
WAITING: Final = Metric(
    name="gpuwarden_gateway_waiting_workers",
    meaning="Workers that wait for a job. A host behind a central gateway counts as one.",
    absent="host's gateway with `--central`",
)
HOST_LOST: Final = Metric(
    name="gpuwarden_gateway_host_lost",
    meaning="Whether the host is lost: 1 or 0.",
    absent="host never heard, or forgotten",
)
HOST_SILENT: Final = Metric(
    name="gpuwarden_gateway_host_silent_seconds",
    meaning="Time since the host was last heard.",
    absent="host never heard, or forgotten",
)
REPORTED: Final = (HOST_LOST, HOST_SILENT)
"""Metrics at `/reports`, of each host."""

METRICS: Final = (REQUESTS, REFUSED, ORDERS, SOCKETS, WAITING)

OUTCOMES: Final[Mapping[str, str]] = {
    "done": "It was carried out.",
    "job": "The worker does not hold the job.",
    "queue": "The database or the central gateway did not answer, or met an error.",
    "refused": "The central gateway refused this host.",
    "gone": "The worker closed its connection.",
    "DrainedError": "The worker is drained.",
    "ReplacedError": "A newer process has the worker's name.",
    "ResultError": "The result is invalid.",
}
"""Outcomes of requests."""

REASONS: Final[Mapping[str, str]] = {
    "rate": "too many requests a second, or at once, or too many bytes at once",
    "size": "too large",
    "slow": "not sent within 10 s",
    "cut": "ended early",
    "invalid": "a wrong field or format",
    "unknown": "an unknown operation",
    "version": "a report of another version or format",
    "name": "a worker that may not use the folder",
    "job": "a job that the worker does not hold",
    "token": "no valid token",
    "host": "the token of another host",
    "queue": "a queue that the host or the folder may not use",
    "busy": "too many requests are handled",
    "database": "the database does not answer",
}
"""Reasons for refusals."""
