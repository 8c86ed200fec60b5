"""Who tells which containers there are, listened to by a thread of its own: whoever hangs holds up nothing else."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from exporter.model.container import Container
from exporter.model.snapshot import SourceHealth

START_S: Final = 1.0
"""How long to wait for the first answer, seconds: whoever gives none is asked on."""

CLOSE_S: Final = 5.0
"""How long an asking that is under way may take to end, seconds; its thread ends with the program at the latest."""

BECAUSE_MAX: Final = 300
"""Characters that are kept of why there is no listing."""


class NoListingError(OSError):
    """There is no listing to believe. `took_s` is how long the newest asking took, or has taken so far, seconds."""

    def __init__(self, says: str, *, took_s: float) -> None:
        super().__init__(says)
        self.took_s = took_s


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The containers at one moment, by full id: those that run, and those that are down and hold workers' folders.

    `taken_s` is when they were listed, before any of them was inspected; `ids` are those of all that were listed.
    `unseen` names those that run, could not be inspected and may be ranked by their VRAM budgets
    (`tenancy.is_recycle_candidate`).
    """

    containers: dict[str, Container]
    taken_s: float
    duration_s: float
    down: Mapping[str, Container] = field(default_factory=dict)
    ids: frozenset[str] = frozenset()
    lag_s: float = 0.0
    """For how long a container may have run that is not listed yet, seconds."""
    unseen: tuple[str, ...] = ()
    whole: bool = True
    """Whether every one that runs is among the containers: none was left out because it could not be inspected."""
    beside: tuple[SourceHealth, ...] = ()
    """How asking others went that were asked for what they add to the list."""


class Listener(ABC):
    """Keeps a recent listing.

    Args:
        name: whose thread it is.
        nothing: what to say before the reason why there is no listing.
        refresh_s: how long after one asking the next one begins, seconds.
        fresh_s: a listing older than this is no longer believed, seconds.
    """

    def __init__(self, name: str, *, nothing: str, refresh_s: float, fresh_s: float) -> None:
        self._nothing = nothing
        self._refresh_s = refresh_s
        self._fresh_s = fresh_s
        self._listing: Listing | None = None
        self._because = "not asked yet"
        self._took_s = 0.0
        self._asking_since_s: float | None = None
        self._asked = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._refresh_on, name=name, daemon=True)

    @abstractmethod
    def list_now(self) -> Listing:
        """Ask everyone once.

        Raises:
            OSError: who is asked does not answer; the message says who.
            Exception: an answer makes no sense, in whichever way.
        """

    def pause(self) -> None:
        """Wait until the next listing is due, or there is to be none."""
        self._closing.wait(self._refresh_s)

    def start(self) -> None:
        """Begin to ask; returns with the first answer, or after `START_S` without one."""
        self._thread.start()
        self._asked.wait(START_S)

    def close(self) -> None:
        """Stop asking."""
        self._closing.set()
        self._thread.join(timeout=CLOSE_S)

    def latest(self) -> Listing:
        """The newest listing.

        Raises:
            NoListingError: there is none, or it is too old to believe; the message says why.
        """
        listing, now_s, since_s = self._listing, time.monotonic(), self._asking_since_s
        if listing is None or now_s - listing.taken_s > self._fresh_s:
            took_s = self._took_s if since_s is None else max(self._took_s, now_s - since_s)
            raise NoListingError(f"{self._nothing}: {self._because}", took_s=took_s)
        return listing

    def _refresh_on(self) -> None:
        while not self._closing.is_set():
            self._asking_since_s = since_s = time.monotonic()
            try:
                self._listing = self.list_now()
                self._because = "it has not answered since"
            except Exception as error:  # noqa: BLE001 - an answer that makes no sense must not end the thread for good
                self._because = f"{type(error).__name__}: {error}"[:BECAUSE_MAX]
            self._asking_since_s, self._took_s = None, time.monotonic() - since_s
            self._asked.set()
            self.pause()
