"""Simulated time: a steady clock, and settable wall clocks for each host and for the databases."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

EPOCH: Final = 1_800_000_000.0
DATABASE: Final = "database"


class Clocks:
    """Replaces the module `time`. `at` is the host of the program that reads the time."""

    def __init__(self) -> None:
        self.steady_s = 10_000.0
        self.at = DATABASE
        self._ahead_s: dict[str, float] = {}

    def monotonic(self) -> float:
        return self.steady_s

    def time(self) -> float:
        """The wall clock of the host `at`, Unix seconds."""
        return self.wall(self.at)

    def wall(self, host: str) -> float:
        return EPOCH + self.steady_s + self._ahead_s.get(host, 0.0)

    def database(self) -> float:
        """The clock of the databases, which leases use, Unix seconds."""
        return self.wall(DATABASE)

    def step(self, host: str, by_s: float) -> None:
        """Set a wall clock; the steady clock does not change."""
        self._ahead_s[host] = self._ahead_s.get(host, 0.0) + by_s

    @contextmanager
    def of(self, host: str) -> Iterator[None]:
        """Run a block as programs of `host`."""
        before, self.at = self.at, host
        try:
            yield
        finally:
            self.at = before
