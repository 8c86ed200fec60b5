"""When a supervised command is started again. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpuwarden.job import WATCHDOG_RETRIES_MAX, Condition

BACKOFF_S: Final = 1.0
BACKOFF_MAX_S: Final = 60.0
STEADY_S: Final = 60.0
"""After a run of this length the back-off starts again, seconds."""

HANGS: Final = frozenset({Condition.STALL, Condition.HEALTH, Condition.GANG})


class Policy(StrEnum):
    """Option `--restart`."""

    NEVER = "never"
    ON_HANG = "on-hang"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"


@dataclass
class Restarts:
    """Counts the restarts of one command.

    Args:
        policy: when it is started again.
        hangs: restarts after a hang so far; at most three (A8).
        ends: ends in a row after less than `STEADY_S`.
    """

    policy: Policy
    hangs: int = 0
    ends: int = 0

    @property
    def after_hang(self) -> bool:
        """Whether it is started again after gpuwarden ended it for a hang."""
        return self.policy is not Policy.NEVER and self.hangs < WATCHDOG_RETRIES_MAX

    def delay_s(self, *, exit_code: int, condition: str | None, by_person: bool, ran_s: float) -> float | None:
        """Seconds until the next start; `None` if it is not started again.

        Args:
            exit_code: the end of the command.
            condition: why gpuwarden ended it, if it did.
            by_person: whether a person ended it.
            ran_s: how long it ran.
        """
        if by_person or self.policy is Policy.NEVER:
            return None
        if condition is not None and condition in HANGS:
            if not self.after_hang:
                return None
            self.hangs += 1
        elif not self._restarts_other_ends(exit_code, condition):
            return None
        self.ends = 1 if ran_s >= STEADY_S else self.ends + 1
        return float(min(BACKOFF_S * 2 ** min(self.ends - 1, 10), BACKOFF_MAX_S))

    def _restarts_other_ends(self, exit_code: int, condition: str | None) -> bool:
        if self.policy is Policy.ON_FAILURE:
            return exit_code != 0 and condition != Condition.BUDGET
        return self.policy is Policy.ALWAYS
