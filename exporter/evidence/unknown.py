"""How often something was unknown. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping


class UnknownCounter:
    """How many looks so far left something unknown, by (container or worker, what, reason)."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, name: str, what: str, reason: str) -> None:
        """Count one look."""
        self._counts[name, what, reason] += 1

    def keep(self, names: Collection[str]) -> None:
        """Drop the counts of all others: containers come and go under new names for ever."""
        for key in [key for key in self._counts if key[0] not in names]:
            del self._counts[key]

    @property
    def counts(self) -> Mapping[tuple[str, str, str], int]:
        """The counts as they stand now."""
        return dict(self._counts)
