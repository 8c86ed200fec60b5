"""Runs the sources of a look: each fails alone, is timed, and is logged as it begins to fail and answers again."""

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
    """What asks the drivers of one source in a process of its own."""

    def ask(self) -> None:
        """Begin a look; reading the source waits for what comes of it, and tells what went wrong."""

    def health(self) -> DriverHealth:
        """How asking went so far."""

    def timing(self) -> Timing | None:
        """Of what reading the source told last; `None` before it was asked."""


class SourceRunner:
    """Reads sources, one look after another, and keeps the health of each."""

    def __init__(self, drivers: Mapping[str, Driver]) -> None:
        self._drivers = drivers
        self._failing: dict[str, str] = {}
        self._succeeded_unix_s: dict[str, float] = {}
        self._taken_s: dict[str, float] = {}
        self._health: list[SourceHealth] = []

    def begin(self) -> None:
        """Begin a look, which knows the health of no source yet."""
        self._health = []

    def ask_drivers(self) -> None:
        """Begin to ask the drivers, all of them before one is waited for: two may hang."""
        for driver in self._drivers.values():
            driver.ask()

    @property
    def health(self) -> tuple[SourceHealth, ...]:
        """How each source was read in this look."""
        return tuple(self._health)

    @property
    def driver_health(self) -> Mapping[str, DriverHealth]:
        """How asking the drivers went so far, by source."""
        return {source: driver.health() for source, driver in self._drivers.items()}

    def read(self, source: str, read: Callable[[], T]) -> T | None:
        """What a source answers; `None` where it fails, in whichever way."""
        started_s = time.monotonic()
        result: T | None = None
        because = None
        took_s = None
        try:
            result = read()
        except (GpuwardenError, OSError) as error:
            because = str(error)
            took_s = error.took_s if isinstance(error, NoListingError) else None
        except Exception as error:  # noqa: BLE001 - one source failing never fails the sample; it is counted and logged
            because = f"{type(error).__name__}: {error}"
        taken_s = None
        driver = self._drivers.get(source)
        timing = None if driver is None else driver.timing()
        if isinstance(result, Listing):  # taken in a thread of its own, some time before it is read here
            took_s, taken_s = result.duration_s, result.taken_s
        elif timing is not None:  # asked for before it is waited for here, and a late one stands for some looks
            took_s, taken_s = timing.took_s, timing.asked_s
        duration_s = time.monotonic() - started_s if took_s is None else took_s
        if because is None:
            self._succeeded_unix_s[source] = self._answered_unix_s(source, taken_s)
        health = SourceHealth(
            source=source,
            success=because is None,
            duration_s=duration_s,
            because=because,
            succeeded_unix_s=self._succeeded_unix_s.get(source),
        )
        for each in (health, *(result.other_sources if isinstance(result, Listing) else ())):
            self._health.append(each)
            self._log_failing(each.source, each.because)
        return result

    def _log_failing(self, source: str, because: str | None) -> None:
        if because == self._failing.get(source):
            return
        if because is None:
            log.info("source answers again", source=source)
            self._failing.pop(source)
        else:
            log.warning("source failed", source=source, because=because)
            self._failing[source] = because

    def _answered_unix_s(self, source: str, taken_s: float | None) -> float:
        """When what a source tells was so, Unix seconds: now; or as it was taken, monotonic, where looks share it."""
        if taken_s is None:
            return time.time()
        if self._taken_s.get(source) == taken_s:
            return self._succeeded_unix_s[source]
        self._taken_s[source] = taken_s
        age_s = time.monotonic() - taken_s
        return time.time() - age_s
