"""Decides which silent hosts are lost. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

QUIET_S: Final = 75.0
"""A host is silent after this time, seconds."""

KNOWN_S: Final = 3600.0
"""A silent host is known so long, seconds."""


@dataclass(frozen=True, kw_only=True)
class SeenHost:
    """A host that was heard once."""

    host: str
    heard_at: float
    lost_at: float | None = None

    def silent_s(self, now: float) -> float:
        """Seconds since it was last heard."""
        return max(0.0, now - self.heard_at)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Hosts that are lost, or would be if fewer were silent."""

    lost: tuple[SeenHost, ...] = ()
    spared: tuple[SeenHost, ...] = ()


def decide(
    hosts: Collection[SeenHost], *, at_work: Collection[str], now: float, since: float, after_s: float
) -> Verdict:
    """Decide which hosts `at_work` were not heard for `after_s` while a gateway listened (D4).

    None is lost while more of them are silent than hosts are heard: the gateway may be cut off.
    """
    quiet_s = min(QUIET_S, after_s)
    known = [each for each in hosts if each.lost_at is None]
    quiet = [each for each in known if each.silent_s(now) >= quiet_s]
    silent = [each for each in quiet if each.host in at_work]
    due = tuple(each for each in silent if now - max(each.heard_at, since) >= after_s)
    if len(silent) > len(known) - len(quiet):
        return Verdict(spared=due)
    return Verdict(lost=due)
