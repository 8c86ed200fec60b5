"""Step and phase durations of one attempt, seconds. Pure.

A step excludes the time in other phases. The first steps compile and fill caches: later steps replace them.
"""

from operator import itemgetter
from typing import Final

from gpuwarden.job import Phase

EARLY_STEPS: Final = 20
"""Number of first steps, and of later steps that replace them."""

LONGEST_KEPT: Final = 4
"""Longest steps and visits to keep, since some may be paused."""

TIMED_PHASES: Final = (Phase.LOAD, Phase.EVAL, Phase.CHECKPOINT, Phase.SAVE)
"""Phases with timed visits."""

Steps = tuple[tuple[float, float | None], ...]
"""Steps, longest first: duration, and start if known."""


class StepTiming:
    """Step durations of one attempt."""

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
        """Record a step."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None:
            return
        took_s = now_s - last_s if now_s > last_s else 0.0  # two threads may step at once
        self._count += 1
        # Most steps cost one comparison.
        if self._count > EARLY_STEPS:
            self._later_s += took_s
            if took_s > self._later_least_s:
                self._later, self._later_least_s = self._with(self._later, took_s, last_s)
        else:
            self._early_s += took_s
            if took_s > self._early_least_s:
                self._early, self._early_least_s = self._with(self._early, took_s, last_s)

    def _with(self, steps: Steps, took_s: float, began_s: float) -> tuple[Steps, float]:
        """The longest steps with one more, and the shortest duration that enters them."""
        kept = _longest((*steps, (took_s, None if began_s == self._cut_s else began_s)))
        return kept, kept[-1][0] if len(kept) == LONGEST_KEPT else -1.0

    def enter(self, now_s: float, *, steps: bool) -> None:
        """Enter the steps, or another phase."""
        if not steps:
            self._away_s = now_s if self._away_s is None else self._away_s
        elif self._away_s is not None:
            if self._last_s is not None:
                self._last_s += max(0.0, now_s - max(self._away_s, self._last_s))
                self._cut_s = self._last_s
            self._away_s = None

    def reset_start(self) -> None:
        """Forget the start of the current step."""
        self._last_s = self._away_s = None

    @property
    def mean_s(self) -> float | None:
        """Mean step duration; `None` before the second step."""
        if self._known:
            return self._later_s / (self._count - EARLY_STEPS)
        return (self._early_s + self._later_s) / self._count if self._count else None

    @property
    def max_s(self) -> float | None:
        """The longest; `None` before the second step."""
        return next((took_s for took_s, _ in self.longest), None)

    @property
    def longest(self) -> Steps:
        """The longest steps."""
        return self._later if self._known else _longest((*self._early, *self._later))

    @property
    def _known(self) -> bool:
        return self._count >= 2 * EARLY_STEPS


class PhaseTiming:
    """Durations of an attempt's phase visits."""

    __slots__ = ("_ended", "_phase", "_since_s")

    def __init__(self, now_s: float) -> None:
        self._phase, self._since_s = Phase.LOAD, now_s
        self._ended: dict[Phase, Steps] = {}

    def enter(self, now_s: float, phase: Phase) -> None:
        """Enter a phase."""
        if phase is self._phase:
            return
        if self._phase in TIMED_PHASES:
            ended = now_s - self._since_s, self._since_s
            self._ended[self._phase] = _longest((*self._ended.get(self._phase, ()), ended))
        self._phase, self._since_s = phase, now_s

    def longest(self, phase: Phase) -> Steps:
        """The longest ended visits to a phase, longest first."""
        return self._ended.get(phase, ())


def _longest(steps: Steps) -> Steps:
    return tuple(sorted(steps, key=itemgetter(0), reverse=True)[:LONGEST_KEPT])
