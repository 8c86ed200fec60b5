"""Records what an episode waits for."""

from typing import Final

import structlog

from remediator import plan
from remediator.executor.timers import Timers
from remediator.ledger.ledger import Ledger
from remediator.plan import Episode, Subject
from remediator.reasons import Reason

log: Final = structlog.get_logger("executor")

_HELD: Final = frozenset(
    {
        *(Reason.APPROVAL, Reason.CIRCUIT_BREAKER, Reason.DECLINED, Reason.DRY_RUN),
        *(Reason.PAUSED, Reason.SILENCED, Reason.SILENCES_UNKNOWN, Reason.GRACE_PERIOD),
    }
)
"""Waits that do not show whether the fault is still confirmed."""


class WaitRecorder:
    """Records each wait once, and not at each look."""

    def __init__(self, ledger: Ledger, timers: Timers) -> None:
        self._ledger = ledger
        self._timers = timers

    def record(self, episode: Episode, step: plan.Wait) -> None:
        """Record a wait once for each reason; a person is asked once about each incarnation.

        For a run it is recorded once for each worker or run that it waits for; for a silent host once in all, whichever
        executor sees it. The bound of a free that is only promised does not run while the promise is held.
        """
        timers = self._timers.of(episode.episode_id)
        if step.reason in _HELD:
            timers.forget_promises()
        recorded = f"{step.reason} {step.asks or ''} {step.about}"
        if timers.waits_for != recorded:
            timers.waits_for = timers.waited = recorded
            log.info("waiting", episode=episode.episode_id, worker=episode.worker, because=step.message)
            once = episode.subject is Subject.HOST
            self._ledger.journal.wait(episode.episode_id, step, now=self._ledger.now(), once=once)
