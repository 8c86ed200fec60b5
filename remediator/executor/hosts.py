"""Which hosts are alive, by their executors' heartbeats in a shared ledger."""

import math
from collections.abc import Sequence
from typing import Final

from remediator.executor.clock import SuspendAwareClock
from remediator.ledger.ledger import Ledger
from remediator.plan import Episode

ALIVE_S: Final = 15.0
"""A host counts as alive for this long after its executor's last heartbeat, seconds. Executors write one a second."""


class HostLiveness:
    """When hosts were last seen alive."""

    def __init__(self, ledger: Ledger, *, host: str, clock: SuspendAwareClock) -> None:
        self._ledger = ledger
        self._host = host
        self._clock = clock
        self._heartbeats: dict[str, tuple[float, float]] = {}
        self._alive_at_s: dict[str, float] = {}
        self._silent_since_s: dict[int, float] = {}
        self._began_s: float | None = None
        self.silent_episodes: Sequence[Episode] = ()
        """The open episodes about silent hosts."""

    def set_silent(self, silent: Sequence[Episode]) -> None:
        """Store the open episodes about silent hosts, and since when each alert fires."""
        now_s = self._clock.now_s()
        self._silent_since_s = {
            each.episode_id: self._silent_since_s.get(each.episode_id, now_s) for each in silent if each.firing
        }
        self.silent_episodes = silent

    def observe(self) -> None:
        """Read all heartbeats and note when each one changed."""
        now_s = self._clock.now_s()
        if self._began_s is None:
            self._began_s = now_s
        for host, heartbeat_at in self._ledger.executors.last_beats().items():
            before = self._heartbeats.get(host)
            if before is None or before[0] != heartbeat_at:
                self._heartbeats[host] = (heartbeat_at, now_s)
            if before is not None and before[0] != heartbeat_at:  # the first heartbeat that is read may be old
                self._alive_at_s[host] = now_s

    def is_alive(self, host: str, now_s: float) -> bool:
        """Whether a host is this one, or a new heartbeat of its executor was seen within `ALIVE_S`."""
        return host == self._host or now_s - self._alive_at_s.get(host, -ALIVE_S) < ALIVE_S

    def silent_s(self, host: str, now_s: float) -> float:
        """Seconds without a new heartbeat of a host's executor, while the loop ran. The host may have no executor."""
        began_s = now_s if self._began_s is None else self._began_s
        return now_s - self._clock.since(self._heartbeats.get(host, (0.0, began_s))[1], now_s)

    def count_alive(self, now_s: float) -> int:
        """Count the hosts that are alive, including this one."""
        return sum(self.is_alive(each, now_s) for each in {*self._alive_at_s, self._host})

    def count_silent_with(self, episode: Episode) -> int:
        """Count the hosts that are silent together with the host of an episode, including that host.

        A host does not count if its alert fired before we last saw this host alive: one fault did not silence both.
        If we never saw this host alive, all count.
        """
        heard_s = self._alive_at_s.get(episode.host, -math.inf)
        since_s = self._silent_since_s  # another thread replaces it
        return sum(each == episode.episode_id or since_s[each] >= heard_s for each in since_s)
