"""Who is asked for containers: whoever the settings name, and of the others those that are found on the host."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from exporter.sources.listener import Listener

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


class Engines(Mapping[str, Listener]):
    """Who lists containers, by kind; each time that they are gone through it is looked who of the `sought` has come.

    One that was there is asked for good: as it goes, its source fails, for its containers may run on.
    """

    def __init__(self, asked: Mapping[str, Listener], sought: Mapping[str, Sought] | None = None) -> None:
        self._asked = dict(asked)
        self._sought = dict(sought or {})

    def __getitem__(self, kind: str) -> Listener:
        """Who lists those of a kind, where that is asked."""
        return self._asked[kind]

    def __len__(self) -> int:
        """How many are asked."""
        return len(self._asked)

    def __iter__(self) -> Iterator[str]:
        """The kinds that are asked."""
        for kind in self._arrived():
            self._asked[kind] = listener = self._sought.pop(kind).make()
            listener.start()
            log.info("an engine is there, and asked from now on", kind=kind)
        return iter(tuple(self._asked))

    def start(self) -> None:
        """Begin to ask those that the settings name, and those that are there."""
        for listener in self._asked.values():
            listener.start()
        for kind in self._sought.keys() - set(self):
            log.info("no such containers unless this comes to be there", kind=kind, mark=str(self._sought[kind].mark))

    def close(self) -> None:
        """Stop asking."""
        self._sought.clear()
        for listener in self._asked.values():
            listener.close()

    def _arrived(self) -> Sequence[str]:
        return [kind for kind, sought in self._sought.items() if sought.is_there()]
