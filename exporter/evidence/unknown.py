"""Counts of unknown values. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping


class UnknownCounter:
    """Samples with an unknown value, by (container or worker, field, reason)."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, name: str, what: str, reason: str) -> None:
        """Count one sample."""
        self._counts[name, what, reason] += 1

    def keep(self, names: Collection[str]) -> None:
        """Drop all other counts: container names are unbounded."""
        for key in [key for key in self._counts if key[0] not in names]:
            del self._counts[key]

    @property
    def counts(self) -> Mapping[tuple[str, str, str], int]:
        """The counts so far."""
        return dict(self._counts)
