"""How long a measured figure has been still: extremes and rates over a window. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Final

EXTREMES_MAX: Final = 14_400
"""Samples kept to tell for how long RAM is still; past them the oldest go, and the time told is too short."""

WORK_WINDOW_S: Final = 10.0
"""Rates of work are averages over this long, seconds: what a worker does beside its job, such as its heartbeat and a
look at the queue, comes in bursts."""

STARTS_OFTEN: Final = 0.5
"""In which share of the looks of `WORK_WINDOW_S` processes may start of whose start nothing counts. A health check
makes two at most each time, of its shell and of what that runs, and is asked every 10 s (Kubernetes) or 30 s (Docker)
unless told otherwise; who has each item done by a process of its own, and does not wait for them, starts some in most.
Sources: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#Probe,
https://docs.docker.com/reference/dockerfile/#healthcheck"""


@dataclass(slots=True)
class Extreme:
    """A sample that is the greatest or least from its time on, and when the sample after it was taken."""

    at_s: float
    value: int
    next_s: float


class StillWindow:
    """The longest time up to now within which the values lie at most `delta` apart: greatest less least.

    Two monotonic queues hold the window's greatest and least, so that a sample costs constant time on average and a
    still container costs a handful of entries, whatever the window's length.
    """

    def __init__(self, delta: int) -> None:
        self._delta = delta
        self.forget()

    def forget(self) -> None:
        """Start over, as at the first sample."""
        self._start_s: float | None = None
        self._value: int | None = None
        self._greatest: deque[Extreme] = deque()
        self._least: deque[Extreme] = deque()

    def add(self, now_s: float, value: int) -> float:
        """Take in one value; returns the window's length, seconds."""
        if self._start_s is not None and value == self._value:
            # The same as the sample before, which stands for both.
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
            if len(queue) > EXTREMES_MAX:  # RAM that creeps the same way at every sample
                start_s = max(start_s, queue.popleft().next_s)
        self._start_s = start_s
        return now_s - start_s


class StillRate:
    """Since when something has been done at no more than a rate, on average over any `WORK_WINDOW_S`.

    Once the average is within the rate again, it has been kept since the last look that was over it, and not only since
    that is known.
    """

    def __init__(self, rate_max: float) -> None:
        self._rate_max = rate_max
        self.forget()

    def forget(self) -> None:
        """Start over, as at the first sample."""
        self._totals: deque[tuple[float, float]] = deque()
        self._since_s = self._over_s = 0.0
        self._exceeded = False

    def add(self, now_s: float, amount: float) -> float:
        """Take in what was done since the last sample; returns for how long the rate has been kept, seconds."""
        if not self._totals:
            self._totals.append((now_s, 0.0))
            self._since_s = self._over_s = now_s
            return 0.0
        before_s, before = self._totals[-1]
        total = before + amount
        if amount > self._rate_max * (now_s - before_s):
            self._over_s = now_s
        if len(self._totals) > 1 and total == self._totals[-2][1]:
            self._totals[-1] = now_s, total  # as long as nothing is done its begin and its end say all
        else:
            self._totals.append((now_s, total))
        while now_s - self._totals[1][0] >= WORK_WINDOW_S:
            self._totals.popleft()
        first_s, first = self._totals[0]
        # Looks that are seconds apart make it longer than that, in which a greater burst would be none.
        if total - first > self._rate_max * min(now_s - first_s, WORK_WINDOW_S):
            self._since_s, self._exceeded = now_s, True
            if self._over_s <= first_s:
                self._over_s = now_s  # no look of these was over it, and all were together
        elif self._exceeded:
            self._since_s, self._exceeded = self._over_s, False  # each look since then was within the rate
        return now_s - self._since_s


class ProcessStarts:
    """Which processes of one container start, up to the second look at each: nothing that they do until then counts.

    A container's health check is none of its job's work, and to link and import what it asks with costs it 600 page
    faults (curl) to thousands (Python). Its engine starts it and waits for it, from outside. Whoever starts processes
    for the job itself waits for them, and then all that they did is in his own figures (proc_pid_stat(5): cutime).
    Where some start in a greater share of the looks than `STARTS_OFTEN` nobody may wait for them, and all counts.
    """

    def __init__(self) -> None:
        self._new: frozenset[int] = frozenset()
        self._looks: deque[tuple[float, bool]] = deque()

    def left_out(self, new: frozenset[int], now_s: float) -> frozenset[int]:
        """Those of whom nothing counts that they have done by this look, of which some are `new`."""
        starting, self._new = (self._new | new if new else self._new), new
        self._looks.append((now_s, bool(new)))
        while now_s - self._looks[0][0] >= WORK_WINDOW_S:
            self._looks.popleft()
        often = sum(some for _, some in self._looks) > STARTS_OFTEN * max(len(self._looks), LOOKS_MIN)
        return frozenset() if often else starting


LOOKS_MIN: Final = 3
"""Where there were fewer, the share is that of so many: one look with a start, of two, may be a health check's."""
