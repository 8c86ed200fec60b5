"""How long the steps of one attempt take, and its stays in other phases, in seconds. Pure: times are arguments.

What is no step counts as none: the time in other phases is taken out of the step that it falls into, and the first
steps, which compile and fill caches, count only as long as too few others are known. For by the longest step it is told
whether a job is stuck (A14b), and by the mean whether it slowed down. In a phase that owes no steps it is told by the
longest of its earlier stays there.
"""

from operator import itemgetter
from typing import Final

from gpuwarden.job import Phase

EARLY: Final = 20
"""The first steps, which are no measure; and as many after them make one."""

KEPT: Final = 4
"""So many of the longest steps, and of the longest stays in a phase, are known one by one: who knows that its container
was paused in one of them goes by the others."""

TIMED: Final = (Phase.LOAD, Phase.EVAL, Phase.CHECKPOINT, Phase.SAVE)
"""The phases whose stays are told: in `step` a job owes steps, in `idle` nothing."""

Steps = tuple[tuple[float, float | None], ...]
"""Steps, the longest first: how long each took, and since when; `None` where other phases are taken out of it."""


class Pace:
    """The times between the steps of one attempt, which begins in another phase than `step`."""

    __slots__ = (
        "_away_s",
        "_count",
        "_cut_s",
        "_early",
        "_early_least_s",
        "_early_s",
        "_last_s",
        "_later",
        "_later_least_s",
        "_later_s",
    )

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._away_s: float | None = 0.0
        self._cut_s: float | None = None
        self._count = 0
        self._early_s = self._later_s = 0.0
        self._early: Steps = ()
        self._later: Steps = ()
        self._early_least_s = self._later_least_s = -1.0

    def step(self, now_s: float) -> None:
        """One step is done."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None:
            return
        took_s = now_s - last_s if now_s > last_s else 0.0  # two threads may step at once
        self._count += 1
        # Hardly any step is among the longest: what keeps them costs the others a comparison.
        if self._count > EARLY:
            self._later_s += took_s
            if took_s > self._later_least_s:
                self._later, self._later_least_s = self._with(self._later, took_s, last_s)
        else:
            self._early_s += took_s
            if took_s > self._early_least_s:
                self._early, self._early_least_s = self._with(self._early, took_s, last_s)

    def _with(self, steps: Steps, took_s: float, began_s: float) -> tuple[Steps, float]:
        """The longest with one more, and how long a step must be at least to be one of them."""
        kept = _longest((*steps, (took_s, None if began_s == self._cut_s else began_s)))
        return kept, kept[-1][0] if len(kept) == KEPT else -1.0

    def goes_on(self, now_s: float, *, steps: bool) -> None:
        """The attempt goes on to a phase: to its steps, or to another one."""
        if not steps:
            self._away_s = now_s if self._away_s is None else self._away_s
        elif self._away_s is not None:
            if self._last_s is not None:
                self._last_s += max(0.0, now_s - max(self._away_s, self._last_s))
                self._cut_s = self._last_s
            self._away_s = None

    def begins_anew(self) -> None:
        """The attempt is in its steps, and nobody said since when: the next one done has taken no known time."""
        self._last_s = self._away_s = None

    @property
    def mean_s(self) -> float | None:
        """The mean time of a step; `None` before the second."""
        if self._known:
            return self._later_s / (self._count - EARLY)
        return (self._early_s + self._later_s) / self._count if self._count else None

    @property
    def max_s(self) -> float | None:
        """The longest; `None` before the second step."""
        return next((took_s for took_s, _ in self.longest), None)

    @property
    def longest(self) -> Steps:
        """The longest ones."""
        return self._later if self._known else _longest((*self._early, *self._later))

    @property
    def _known(self) -> bool:
        return self._count >= 2 * EARLY


class Stays:
    """How long one attempt stayed in each phase each time; it begins in `load`.

    A stay begins as the phase is entered and ends as another one is: who says the same phase again, or steps in it, is
    in the same stay. That makes none too short.
    """

    __slots__ = ("_ended", "_phase", "_since_s")

    def __init__(self, now_s: float) -> None:
        self._phase, self._since_s = Phase.LOAD, now_s
        self._ended: dict[Phase, Steps] = {}

    def goes_on(self, now_s: float, phase: Phase) -> None:
        """The attempt is in this phase from now on."""
        if phase is self._phase:
            return
        if self._phase in TIMED:
            ended = now_s - self._since_s, self._since_s
            self._ended[self._phase] = _longest((*self._ended.get(self._phase, ()), ended))
        self._phase, self._since_s = phase, now_s

    def longest(self, phase: Phase) -> Steps:
        """The longest that have ended in a phase, the longest first; none where its stays are not told."""
        return self._ended.get(phase, ())


def _longest(steps: Steps) -> Steps:
    return tuple(sorted(steps, key=itemgetter(0), reverse=True)[:KEPT])
