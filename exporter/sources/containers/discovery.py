"""Select the container engines to list: those in the settings, and others that appear on the host."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from exporter.sources.containers.poller import MESSAGE_MAX, Listener, Listing, NoListingError

log: Final = structlog.get_logger("exporter")


@dataclass(frozen=True, kw_only=True)
class PendingEngine:
    """An engine to connect to when its `mark` appears.

    `is_it` checks the mark's mode (inode(7)): Docker creates a folder for a mount without a source.
    """

    mark: Path
    is_it: Callable[[int], bool]
    make: Callable[[], Listener]

    def is_there(self) -> bool:
        """Whether it is present, or not readable."""
        try:
            return self.is_it(self.mark.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True


@dataclass(frozen=True)
class FailedEngine:
    """An engine whose client cannot start; every sample tries again."""

    message: str

    def latest(self) -> Listing:
        """Raise the reason.

        Raises:
            NoListingError: always.
        """
        raise NoListingError(self.message, took_s=0.0)


class EngineRegistry(Mapping[str, Listener | FailedEngine]):
    """The engines that are listed, by kind. Each iteration looks for the `pending` ones.

    An engine stays once it appeared: after it stops, its source fails, because its containers may still run.
    """

    def __init__(self, asked: Mapping[str, Listener], pending: Mapping[str, PendingEngine] | None = None) -> None:
        self._listeners = dict(asked)
        self._pending = dict(pending or {})
        self._failed: dict[str, FailedEngine] = {}
        self._expected: frozenset[str] = frozenset()

    def __getitem__(self, kind: str) -> Listener | FailedEngine:
        """The engine of a kind."""
        return self._failed[kind] if kind in self._failed else self._listeners[kind]

    def __len__(self) -> int:
        """The number of engines."""
        return len(self._listeners) + len(self._failed)

    def __iter__(self) -> Iterator[str]:
        """The kinds of engines."""
        for kind in self._find_arrived():
            self._connect(kind)
        return iter((*self._listeners, *self._failed))

    def start(self) -> None:
        """Start to list the configured engines and those that are present."""
        for listener in self._listeners.values():
            listener.start()
        for kind in self._pending.keys() - set(self):
            log.info("engine not found; will use it when it appears", kind=kind, mark=str(self._pending[kind].mark))

    def met(self, kinds: Collection[str]) -> None:
        """Connect to these engines even without a mark: a container of each runs."""
        self._expected = frozenset(kinds)

    def close(self) -> None:
        """Stop all engines."""
        self._pending.clear()
        self._failed.clear()
        for listener in self._listeners.values():
            listener.close()

    def _find_arrived(self) -> Sequence[str]:
        certain = self._expected | self._failed.keys()
        return [kind for kind, pending in self._pending.items() if kind in certain or pending.is_there()]

    def _connect(self, kind: str) -> None:
        try:
            listener = self._pending[kind].make()
            listener.start()
        except Exception as error:  # noqa: BLE001 - it loads a client, and a sample must not fail
            message = f"the {kind} client cannot start: {type(error).__name__}: {error}"[:MESSAGE_MAX]
            self._failed[kind] = FailedEngine(message)
            return
        self._listeners[kind] = listener
        del self._pending[kind]
        self._failed.pop(kind, None)
        log.info("engine found", kind=kind)
