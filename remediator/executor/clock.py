"""Clocks of the executor. Time in which its loop stood still does not count."""

import time
from typing import Final

import structlog

log: Final = structlog.get_logger("executor")

PAUSE_MAX_S: Final = 10.0
"""A loop that has not gone round for longer was stopped, or had no ledger, and has seen nothing, seconds."""


class SuspendAwareClock:
    """Counts time only while the loop goes round. Other threads read it."""

    def __init__(self) -> None:
        self._looking_since_s = self._went_round_s = self.now_s()

    @staticmethod
    def now_s() -> float:
        """The monotonic clock, seconds."""
        return time.monotonic()

    @staticmethod
    def unix_s() -> float:
        """This host's wall clock, seconds."""
        return time.time()

    def tick(self) -> None:
        """The loop goes round, the ledger answers, and this is the host's only executor: time counts.

        The order matters to the threads that read both: see `since`.
        """
        now_s = self.now_s()
        if now_s - self._went_round_s > PAUSE_MAX_S:
            log.warning("the loop stood still: waiting times start again", for_s=round(now_s - self._went_round_s))
            self._looking_since_s = now_s
        self._went_round_s = now_s

    def since(self, since_s: float, now_s: float) -> float:
        """Since when a state has held while the loop went round; `now_s` where the loop has just stood still.

        A thread may wake before the loop does.
        """
        if now_s - self._went_round_s > PAUSE_MAX_S:
            return now_s
        return max(since_s, self._looking_since_s)
