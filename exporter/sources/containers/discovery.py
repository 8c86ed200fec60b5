"""Who is asked for containers: whoever the settings name, and of the others those that are found on the host."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from exporter.sources.containers.poller import BECAUSE_MAX, Listener, Listing, NoListingError

log: Final = structlog.get_logger("exporter")


@dataclass(frozen=True, kw_only=True)
class Sought:
    """One that is asked from when its `mark` is there; `make` makes who listens to it.

    `is_it` judges the mark's mode (inode(7)): in a socket's place Docker makes a folder of a mount without a source.
    """

    mark: Path
    is_it: Callable[[int], bool]
    make: Callable[[], Listener]

    def is_there(self) -> bool:
        """Whether it is there, for all that we may look at."""
        try:
            return self.is_it(self.mark.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True


@dataclass(frozen=True)
class Unheard:
    """One that is there, and whom nobody could begin to ask: that is tried again with each look."""

    because: str

    def latest(self) -> Listing:
        """Nothing so far.

        Raises:
            NoListingError: always.
        """
        raise NoListingError(self.because, took_s=0.0)


class Engines(Mapping[str, Listener | Unheard]):
    """Who lists containers, by kind; each time that they are gone through it is looked who of the `sought` has come.

    One that was there is asked for good: as it goes, its source fails, for its containers may run on. It fails too for
    as long as we cannot begin to ask it, short of files or in the middle of an upgrade.
    """

    def __init__(self, asked: Mapping[str, Listener], sought: Mapping[str, Sought] | None = None) -> None:
        self._asked = dict(asked)
        self._sought = dict(sought or {})
        self._unheard: dict[str, Unheard] = {}
        self._met: frozenset[str] = frozenset()

    def __getitem__(self, kind: str) -> Listener | Unheard:
        """Who lists those of a kind, where that is asked."""
        return self._unheard[kind] if kind in self._unheard else self._asked[kind]

    def __len__(self) -> int:
        """How many are asked."""
        return len(self._asked) + len(self._unheard)

    def __iter__(self) -> Iterator[str]:
        """The kinds that are asked."""
        for kind in self._arrived():
            self._begin(kind)
        return iter((*self._asked, *self._unheard))

    def start(self) -> None:
        """Begin to ask those that the settings name, and those that are there."""
        for listener in self._asked.values():
            listener.start()
        for kind in self._sought.keys() - set(self):
            log.info("no such containers unless this comes to be there", kind=kind, mark=str(self._sought[kind].mark))

    def met(self, kinds: Collection[str]) -> None:
        """A container runs of these, so that whoever is sought of them is to be asked, there or not."""
        self._met = frozenset(kinds)

    def close(self) -> None:
        """Stop asking."""
        self._sought.clear()
        self._unheard.clear()
        for listener in self._asked.values():
            listener.close()

    def _arrived(self) -> Sequence[str]:
        certain = self._met | self._unheard.keys()
        return [kind for kind, sought in self._sought.items() if kind in certain or sought.is_there()]

    def _begin(self, kind: str) -> None:
        try:
            listener = self._sought[kind].make()
            listener.start()
        except Exception as error:  # noqa: BLE001 - it loads a client: whatever that raises, the look goes on and tells
            because = f"nobody listens to {kind} yet: {type(error).__name__}: {error}"[:BECAUSE_MAX]
            self._unheard[kind] = Unheard(because)
            return
        self._asked[kind] = listener
        del self._sought[kind]
        self._unheard.pop(kind, None)
        log.info("an engine is there, or a container of its, and asked from now on", kind=kind)
