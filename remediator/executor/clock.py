"""Clocks of the executor."""

import time
from typing import Final

import structlog

log: Final = structlog.get_logger("executor")

PAUSE_MAX_S: Final = 10.0
"""A longer gap between ticks means the loop was suspended or had no ledger, seconds."""


class SuspendAwareClock:
    """Counts time only while the loop ticks. Other threads read it."""

    def __init__(self) -> None:
        self._ticking_since_s = self._last_tick_s = self.now_s()

    @staticmethod
    def now_s() -> float:
        """The monotonic clock, seconds."""
        return time.monotonic()

    @staticmethod
    def unix_s() -> float:
        """This host's wall clock, seconds."""
        return time.time()

    def tick(self) -> None:
        """Count time until now: the loop runs, the ledger answers and this executor holds the lock.

        The order of the assignments matters to threads in `since`.
        """
        now_s = self.now_s()
        if now_s - self._last_tick_s > PAUSE_MAX_S:
            log.warning("executor was suspended, timers restarted", for_s=round(now_s - self._last_tick_s))
            self._ticking_since_s = now_s
        self._last_tick_s = now_s

    def since(self, since_s: float, now_s: float) -> float:
        """Since when a state has held while the loop ticked; `now_s` if the loop is suspended.

        A thread may wake before the loop does.
        """
        if now_s - self._last_tick_s > PAUSE_MAX_S:
            return now_s
        return max(since_s, self._ticking_since_s)
