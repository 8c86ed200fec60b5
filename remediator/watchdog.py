"""When the always-firing alert last came: the one proof that Prometheus, Alertmanager and the way to us are alive."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from remediator.ledger_metrics import gauge


class Watchdog(Collector):
    """Remembers the last beat, for as long as the process runs."""

    def __init__(self) -> None:
        self._beat_at: float | None = None

    def beat(self, *, now: float) -> None:
        """It came, at this Unix time."""
        self._beat_at = now

    def collect(self) -> Iterator[Metric]:
        """When it came; nothing before it has."""
        if self._beat_at is not None:
            yield gauge("gpuwarden_remediator_watchdog_timestamp_seconds", self._beat_at)
