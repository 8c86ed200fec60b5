"""Time as the machine says it: a steady clock, a wall clock a host and the databases' own, which can be set."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

EPOCH: Final = 1_800_000_000.0
DATABASE: Final = "database"


class Clocks:
    """Stands where a program reads `time`. `at` is the host whose program reads."""

    def __init__(self) -> None:
        self.steady_s = 10_000.0
        self.at = DATABASE
        self._ahead_s: dict[str, float] = {}

    def monotonic(self) -> float:
        return self.steady_s

    def time(self) -> float:
        """The wall clock of the host whose program reads, Unix seconds."""
        return self.wall(self.at)

    def wall(self, host: str) -> float:
        return EPOCH + self.steady_s + self._ahead_s.get(host, 0.0)

    def database(self) -> float:
        """The clock that leases go by, Unix seconds."""
        return self.wall(DATABASE)

    def step(self, host: str, by_s: float) -> None:
        """A wall clock is set; the steady one goes on."""
        self._ahead_s[host] = self._ahead_s.get(host, 0.0) + by_s

    @contextmanager
    def of(self, host: str) -> Iterator[None]:
        """Inside, the programs that read the time run on `host`."""
        before, self.at = self.at, host
        try:
            yield
        finally:
            self.at = before
