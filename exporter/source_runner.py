"""Run the sources of a sample. Each fails alone, is timed, and its failures are logged."""

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

import structlog

from exporter.model.snapshot import DriverHealth, SourceHealth, Timing
from exporter.sources.containers.poller import Listing, NoListingError
from gpuwarden.errors import GpuwardenError

log: Final = structlog.get_logger("exporter")

T = TypeVar("T")


class Driver(Protocol):
    """Calls the drivers of one source in another process."""

    def ask(self) -> None:
        """Start a read, whose result the source returns."""

    def health(self) -> DriverHealth:
        """The state of its processes."""

    def timing(self) -> Timing | None:
        """Timing of the source's last answer, if any."""


class SourceRunner:
    """Reads sources, and keeps the health of each."""

    def __init__(self, drivers: Mapping[str, Driver]) -> None:
        self._drivers = drivers
        self._failing: dict[str, str] = {}
        self._succeeded_unix_s: dict[str, float] = {}
        self._taken_s: dict[str, float] = {}
        self._health: list[SourceHealth] = []

    def begin(self) -> None:
        """Start a sample."""
        self._health = []

    def ask_drivers(self) -> None:
        """Start the reads of all drivers before waiting for one: two may hang."""
        for driver in self._drivers.values():
            driver.ask()

    @property
    def health(self) -> tuple[SourceHealth, ...]:
        """The health of each source in this sample."""
        return tuple(self._health)

    @property
    def driver_health(self) -> Mapping[str, DriverHealth]:
        """The health of the drivers, by source."""
        return {source: driver.health() for source, driver in self._drivers.items()}

    def read(self, source: str, read: Callable[[], T]) -> T | None:
        """Read a source; `None` if it fails."""
        started_s = time.monotonic()
        result: T | None = None
        message = None
        took_s = None
        try:
            result = read()
        except (GpuwardenError, OSError) as error:
            message = str(error)
            took_s = error.took_s if isinstance(error, NoListingError) else None
        except Exception as error:  # noqa: BLE001 - counted and logged; a source must not fail the sample
            message = f"{type(error).__name__}: {error}"
        taken_s = None
        driver = self._drivers.get(source)
        timing = None if driver is None else driver.timing()
        if isinstance(result, Listing):  # taken in another thread, some time ago
            took_s, taken_s = result.duration_s, result.taken_s
        elif timing is not None:  # started before, and shared by several samples if late
            took_s, taken_s = timing.took_s, timing.asked_s
        duration_s = time.monotonic() - started_s if took_s is None else took_s
        if message is None:
            self._succeeded_unix_s[source] = self._answered_unix_s(source, taken_s)
        health = SourceHealth(
            source=source,
            success=message is None,
            duration_s=duration_s,
            message=message,
            succeeded_unix_s=self._succeeded_unix_s.get(source),
        )
        for each in (health, *(result.other_sources if isinstance(result, Listing) else ())):
            self._health.append(each)
            self._log_failing(each.source, each.message)
        return result

    def _log_failing(self, source: str, message: str | None) -> None:
        if message == self._failing.get(source):
            return
        if message is None:
            log.info("source answers again", source=source)
            self._failing.pop(source)
        else:
            log.warning("source failed", source=source, reason=message)
            self._failing[source] = message

    def _answered_unix_s(self, source: str, taken_s: float | None) -> float:
        """When an answer was taken, Unix seconds; samples may share one."""
        if taken_s is None:
            return time.time()
        if self._taken_s.get(source) == taken_s:
            return self._succeeded_unix_s[source]
        self._taken_s[source] = taken_s
        age_s = time.monotonic() - taken_s
        return time.time() - age_s
