"""Which open episodes to process in a round.

New ones, started acts and those with a new alert or order come first. Waits that only a person ends are read every
`RARELY_S`, with at most `SHARE` of a core.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from remediator.executor.clock import SuspendAwareClock
from remediator.ledger.episodes import OpenEpisode
from remediator.plan import Subject
from remediator.reasons import Reason
from remediator.remedies.guards import Orders

RARELY: Final = frozenset(
    {
        *(Reason.DRY_RUN, Reason.PAUSED, Reason.APPROVAL, Reason.DECLINED, Reason.CIRCUIT_BREAKER),
        *(Reason.SILENCED, Reason.SILENCES_UNKNOWN),
        *(Reason.NO_EVIDENCE, Reason.NO_CONTAINER, Reason.CONTAINER_PAUSED, Reason.UNSTARTABLE, Reason.GIVEN_UP),
        *(Reason.SCALE_FORBIDDEN, Reason.SCALE_FAILED, Reason.GPU_QUARANTINED),
        *(Reason.NODE_TAINTED, Reason.TAINT_REMOVED, Reason.TAINTED_ALREADY),
    }
)
"""Waits that end with an order, an alert or the work of a person."""

RARELY_S: Final = 10.0
"""Interval between reads of such an episode, seconds."""

SHARE: Final = 0.05
"""Share of a core for these reads."""

COST_S: Final = 0.01
"""CPU time of a read, before one was measured, seconds."""

FIRST_AT_ONCE: Final = 32
WAITING_AT_ONCE: Final = 100
"""Maximum episodes that run or wait for a thread."""


@dataclass(kw_only=True)
class _Read:
    """When an episode was last read, with its newest alert and order. `due`: the orders changed since."""

    at_s: float
    listed: bool
    alert_id: int | None
    order_id: int | None
    due: bool = False


@dataclass(frozen=True, kw_only=True)
class Due:
    """The episodes to process now. `left`: others are due too."""

    first: Sequence[int]
    waiting: Sequence[int]
    left: bool


class Pace:
    """Decides in each round which open episodes to read."""

    def __init__(self, clock: SuspendAwareClock) -> None:
        self._clock = clock
        self._reads: dict[int, _Read] = {}
        self._first: set[int] = set()
        self._orders: Orders | None = None
        self._cost_s = COST_S
        self._budget_s = SHARE
        self._round_at_s = clock.now_s()
        self._is_listed: Callable[[str], bool] = lambda _: True

    def due(
        self,
        found: Sequence[OpenEpisode],
        *,
        running: Collection[int],
        orders: Orders,
        is_listed: Callable[[str], bool] = lambda _: True,
    ) -> Due:
        """Choose from the open episodes about workers and containers. Those that the exporter lists come first."""
        self._is_listed = is_listed
        now_s = self._clock.now_s()
        self._budget_s = min(SHARE, self._budget_s + SHARE * (now_s - self._round_at_s))
        self._round_at_s = now_s
        self._reads = {each.episode_id: its for each in found if (its := self._reads.get(each.episode_id))}
        if orders != self._orders:
            self._orders = orders
            for each in self._reads.values():
                each.due = True
        idle = [
            each for each in found if each.episode_id not in running and each.subject not in (Subject.HOST, Subject.RUN)
        ]
        first = sorted((each for each in idle if self._is_first(each)), key=self._urgency)
        chosen = {each.episode_id for each in first}
        waiting = [each for each in idle if each.episode_id not in chosen and self._is_due(each, now_s)]
        waiting.sort(key=lambda each: (each.wait_reason in RARELY, not self._is_listed(each.worker), self._at_s(each)))
        self._first &= set(running)
        room = FIRST_AT_ONCE - len(self._first)
        rest = WAITING_AT_ONCE - (len(running) - len(self._first))
        taken = self._within_budget(waiting)[: max(0, rest)]
        due = Due(
            first=self._submit(first[: max(0, room)], now_s),
            waiting=self._submit(taken, now_s),
            left=len(first) > room,
        )
        self._first.update(due.first)
        return due

    def spend(self, cpu_s: float) -> None:
        """Learn what a read of a waiting episode costs."""
        self._cost_s += (cpu_s - self._cost_s) / 8

    def _is_first(self, each: OpenEpisode) -> bool:
        if each.acting or each.wait_reason is None:
            return True
        read = self._reads.get(each.episode_id)
        if read is None:
            return False
        news = (read.alert_id, read.order_id) != (each.alert_id, each.order_id)
        return news or (self._is_listed(each.worker) and not read.listed)

    def _urgency(self, each: OpenEpisode) -> tuple[bool, bool, bool]:
        return not each.acting, not self._is_listed(each.worker), each.wait_reason is not None

    def _is_due(self, each: OpenEpisode, now_s: float) -> bool:
        return each.wait_reason not in RARELY or self._at_once(each) or now_s - self._at_s(each) >= RARELY_S

    def _at_once(self, each: OpenEpisode) -> bool:
        """Whether the orders changed, or this process never read it."""
        read = self._reads.get(each.episode_id)
        return read is None or read.due

    def _at_s(self, each: OpenEpisode) -> float:
        read = self._reads.get(each.episode_id)
        return 0.0 if read is None else read.at_s

    def _within_budget(self, waiting: Sequence[OpenEpisode]) -> list[OpenEpisode]:
        """Leave out what exceeds the share."""
        count = max(int(self._budget_s / self._cost_s), self._budget_s >= SHARE)
        chosen = []
        for each in waiting:
            if each.wait_reason in RARELY and not self._at_once(each):
                if not count:
                    continue
                count -= 1
                self._budget_s -= self._cost_s
            chosen.append(each)
        return chosen

    def _submit(self, chosen: Sequence[OpenEpisode], now_s: float) -> list[int]:
        for each in chosen:
            self._reads[each.episode_id] = _Read(
                at_s=now_s,
                listed=self._is_listed(each.worker),
                alert_id=each.alert_id,
                order_id=each.order_id,
            )
        return [each.episode_id for each in chosen]
