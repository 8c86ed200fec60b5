"""How long a value or a rate has been idle, over a window. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Final

EXTREMES_MAX: Final = 14_400

MOVED_WITHIN_S: Final = 120.0
MOVED_SHARE: Final = 0.4
"""As fast as by the whole delta in 300 s (A4, A5)."""

WORK_WINDOW_S: Final = 10.0
"""Work rates are averages over this time: heartbeats come in bursts."""

STARTS_OFTEN: Final = 0.5
"""Share of samples with process starts up to which these are not work. A health check starts two per 10 s."""


@dataclass(slots=True)
class Extreme:
    """A greatest or least sample, and the next sample's time."""

    at_s: float
    value: int
    next_s: float


class IdleWindow:
    """The longest time up to now in which all values lie within `delta`."""

    def __init__(self, delta: int) -> None:
        self._delta = delta
        self.forget()

    def forget(self) -> None:
        """Restart."""
        self._start_s: float | None = None
        self._value: int | None = None
        self._greatest: deque[Extreme] = deque()
        self._least: deque[Extreme] = deque()

    def add(self, now_s: float, value: int) -> float:
        """Add one value; returns seconds."""
        if self._start_s is not None and value == self._value:
            return now_s - self._start_s
        self._value = value
        for queue in (self._greatest, self._least):
            if queue:
                queue[-1].next_s = now_s
        start_s = now_s if self._start_s is None else self._start_s
        while self._greatest and self._greatest[-1].value <= value:
            self._greatest.pop()
        while self._least and self._least[-1].value >= value:
            self._least.pop()
        self._greatest.append(Extreme(now_s, value, now_s))
        self._least.append(Extreme(now_s, value, now_s))
        while self._greatest[0].value - self._least[0].value > self._delta:
            older = self._greatest if self._greatest[0].at_s < self._least[0].at_s else self._least
            start_s = max(start_s, older.popleft().next_s)
        for queue in (self._greatest, self._least):
            if len(queue) > EXTREMES_MAX:  # RAM that creeps steadily
                start_s = max(start_s, queue.popleft().next_s)
        self._start_s = start_s
        return now_s - start_s


class Movement:
    """Time since the newest extreme of a value that moved by more than `delta`."""

    def __init__(self, delta: int) -> None:
        self._delta = delta
        self._grain = max(1, delta // 16)
        self.forget()

    def forget(self) -> None:
        """Restart."""
        self._moved_s: float | None = None
        self._coarse: int | None = None
        self._greatest: deque[tuple[float, int]] = deque()
        self._least: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, value: int) -> float | None:
        """Add one value; returns seconds, `None` before any movement."""
        coarse = value // self._grain  # ignores small changes after a movement
        if coarse != self._coarse:
            self._coarse = coarse
            self._observe(now_s, value)
        return None if self._moved_s is None else now_s - self._moved_s

    def _observe(self, now_s: float, value: int) -> None:
        for queue, is_beyond in ((self._greatest, int.__le__), (self._least, int.__ge__)):
            while queue and is_beyond(queue[-1][1], value):
                queue.pop()
            queue.append((now_s, value))
            while now_s - queue[0][0] > MOVED_WITHIN_S:
                queue.popleft()
        (greatest_s, greatest), (least_s, least) = self._greatest[0], self._least[0]
        if greatest - least > self._delta:
            self._moved_s = max(greatest_s, least_s)


class IdleRate:
    """Since when a rate has been within a limit, as an average over `WORK_WINDOW_S`.

    Once it is within the limit again, the time counts from the last sample over it.
    """

    def __init__(self, rate_max: float) -> None:
        self._rate_max = rate_max
        self.forget()

    def forget(self) -> None:
        """Restart."""
        self._totals: deque[tuple[float, float]] = deque()
        self._since_s = self._over_s = 0.0
        self._exceeded = False

    def add(self, now_s: float, amount: float) -> float:
        """Add the amount since the last sample; returns seconds."""
        if not self._totals:
            self._totals.append((now_s, 0.0))
            self._since_s = self._over_s = now_s
            return 0.0
        before_s, before = self._totals[-1]
        total = before + amount
        if amount > self._rate_max * (now_s - before_s):
            self._over_s = now_s
        if len(self._totals) > 1 and total == self._totals[-2][1]:
            self._totals[-1] = now_s, total
        else:
            self._totals.append((now_s, total))
        while now_s - self._totals[1][0] >= WORK_WINDOW_S:
            self._totals.popleft()
        first_s, first = self._totals[0]
        # Sparse samples make the window longer, and a burst would average out.
        if total - first > self._rate_max * min(now_s - first_s, WORK_WINDOW_S):
            self._since_s, self._exceeded = now_s, True
            if self._over_s <= first_s:
                self._over_s = now_s  # only together over the limit
        elif self._exceeded:
            self._since_s, self._exceeded = self._over_s, False
        return now_s - self._since_s


class ProcessStarts:
    """Leave out what a starting process does, up to its second sample.

    A health check costs 600 (curl) to thousands (Python) of page faults.
    """

    def __init__(self) -> None:
        self._new: frozenset[int] = frozenset()
        self._samples: deque[tuple[float, bool]] = deque()

    def skip_starting(self, new: frozenset[int], now_s: float) -> frozenset[int]:
        """Return the pids whose work does not count in this sample."""
        starting, self._new = (self._new | new if new else self._new), new
        self._samples.append((now_s, bool(new)))
        while now_s - self._samples[0][0] >= WORK_WINDOW_S:
            self._samples.popleft()
        often = sum(some for _, some in self._samples) > STARTS_OFTEN * max(len(self._samples), SAMPLES_MIN)
        return frozenset() if often else starting


SAMPLES_MIN: Final = 3
