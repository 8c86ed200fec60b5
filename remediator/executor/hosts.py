"""Which hosts show life, by the signs that their executors leave in a shared ledger."""

import math
from collections.abc import Sequence
from typing import Final

from remediator.executor.clock import SuspendAwareClock
from remediator.ledger.ledger import Ledger
from remediator.plan import Episode

ALIVE_S: Final = 15.0
"""A host whose executor gave its newest sign of life within this time shows life, seconds; one is given each second."""


class HostLiveness:
    """What this executor has seen of the other hosts, by its own clock.

    Args:
        ledger: where executors leave signs of life.
        host: this host's key.
        clock: what counts only while the loop goes round.
    """

    def __init__(self, ledger: Ledger, *, host: str, clock: SuspendAwareClock) -> None:
        self._ledger = ledger
        self._host = host
        self._clock = clock
        self._signs: dict[str, tuple[float, float]] = {}
        self._heard_s: dict[str, float] = {}
        self._accused_since_s: dict[int, float] = {}
        self.accused: Sequence[Episode] = ()
        """The open episodes about silent hosts."""

    def accuse(self, silent: Sequence[Episode]) -> None:
        """Take the open episodes about silent hosts, and note since when each alert fires."""
        now_s = self._clock.now_s()
        self._accused_since_s = {
            each.episode_id: self._accused_since_s.get(each.episode_id, now_s) for each in silent if each.firing
        }
        self.accused = silent

    def observe(self) -> None:
        """Note since when each host's executor has shown the same sign of life, by our clock and not by theirs."""
        now_s = self._clock.now_s()
        for host, beat_at in self._ledger.executors.last_beats().items():
            before = self._signs.get(host)
            if before is None or before[0] != beat_at:
                self._signs[host] = (beat_at, now_s)
            if before is not None and before[0] != beat_at:  # the first that is seen of it may be old
                self._heard_s[host] = now_s

    def shows_life(self, host: str, now_s: float) -> bool:
        """Whether a host is this one, or its executor gave a sign of life lately, while our loop went round."""
        return host == self._host or now_s - self._heard_s.get(host, -ALIVE_S) < ALIVE_S

    def silent_s(self, host: str, now_s: float) -> float:
        """For how long the loop has gone round while a host's executor showed no new sign of life."""
        return now_s - self._clock.since(self._signs.get(host, (0.0, now_s))[1], now_s)

    def alive(self, now_s: float) -> int:
        """How many hosts show life, with this one."""
        return sum(self.shows_life(each, now_s) for each in {*self._heard_s, self._host})

    def accused_with(self, episode: Episode) -> int:
        """How many hosts are accused of silence together, this one among them.

        A host that was accused before this one last showed life to us does not count, as in the rule that accuses
        them: one fault did not silence both. If we never saw this one alive, all count.
        """
        heard_s = self._heard_s.get(episode.host, -math.inf)
        since_s = self._accused_since_s  # another thread replaces it
        return sum(each == episode.episode_id or since_s[each] >= heard_s for each in since_s)
