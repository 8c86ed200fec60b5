"""List containers from a thread per engine, so that one that hangs does not delay the others."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from exporter.model.container import Container
from exporter.model.on_demand import OnDemandTenant
from exporter.model.snapshot import SourceHealth

START_S: Final = 1.0

CLOSE_S: Final = 5.0

MESSAGE_MAX: Final = 300


class NoListingError(OSError):
    """No recent listing. `took_s` is the duration of the last or present call, seconds."""

    def __init__(self, says: str, *, took_s: float) -> None:
        super().__init__(says)
        self.took_s = took_s


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Running containers, and stopped ones with workers' folders, by full id.

    Attributes:
        taken_s: when they were listed, before any inspection.
        ids: all that were listed.
        lag_s: how long a container may run before it is listed, seconds.
        unseen: names of running containers with a VRAM budget that could not be inspected.
        whole: whether no running container is missing.
        other_sources: results of further sources.
        advertised_bytes: GPU memory that the Kubernetes node advertises.
        declared_bytes: what its pods declare of it.
        on_demand: Deployments and containers, running or not, that opted in to the demand gate.
    """

    containers: dict[str, Container]
    taken_s: float
    duration_s: float
    down: Mapping[str, Container] = field(default_factory=dict)
    ids: frozenset[str] = frozenset()
    lag_s: float = 0.0
    unseen: tuple[str, ...] = ()
    whole: bool = True
    other_sources: tuple[SourceHealth, ...] = ()
    advertised_bytes: int | None = None
    declared_bytes: int | None = None
    on_demand: tuple[OnDemandTenant, ...] = ()


class Listener(ABC):
    """Keeps a listing at most `fresh_s` seconds old; `failure_prefix` begins the reason of a failure."""

    def __init__(self, name: str, *, failure_prefix: str, refresh_s: float, fresh_s: float) -> None:
        self._failure_prefix = failure_prefix
        self._refresh_s = refresh_s
        self._fresh_s = fresh_s
        self._listing: Listing | None = None
        self._message = "not asked yet"
        self._took_s = 0.0
        self._asking_since_s: float | None = None
        self._answered = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._refresh_on, name=name, daemon=True)

    @abstractmethod
    def list_now(self) -> Listing:
        """List once.

        Raises:
            OSError: no answer from a source.
            Exception: an invalid answer.
        """

    def pause(self) -> None:
        """Wait until the next listing is due."""
        self._closing.wait(self._refresh_s)

    def start(self) -> None:
        """Start, and wait for the first answer."""
        self._thread.start()
        self._answered.wait(START_S)

    def close(self) -> None:
        """Stop listing."""
        self._closing.set()
        self._thread.join(timeout=CLOSE_S)

    def latest(self) -> Listing:
        """The newest listing.

        Raises:
            NoListingError: it is missing or too old.
        """
        listing, now_s, since_s = self._listing, time.monotonic(), self._asking_since_s
        if listing is None or now_s - listing.taken_s > self._fresh_s:
            took_s = self._took_s if since_s is None else max(self._took_s, now_s - since_s)
            raise NoListingError(f"{self._failure_prefix}: {self._message}", took_s=took_s)
        return listing

    def _refresh_on(self) -> None:
        while not self._closing.is_set():
            self._asking_since_s = since_s = time.monotonic()
            try:
                self._listing = self.list_now()
                self._message = "no answer since the last one"
            except Exception as error:  # noqa: BLE001 - an invalid answer must not end the thread
                self._message = f"{type(error).__name__}: {error}"[:MESSAGE_MAX]
            self._asking_since_s, self._took_s = None, time.monotonic() - since_s
            self._answered.set()
            self.pause()
