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
        *(Reason.DISRUPTION_BUDGET, Reason.EVICTION_FORBIDDEN),
    }
)
"""Waits during which the fault may be unconfirmed."""


class WaitRecorder:
    """Records each wait once."""

    def __init__(self, ledger: Ledger, timers: Timers) -> None:
        self._ledger = ledger
        self._timers = timers

    def record(self, episode: Episode, step: plan.Wait) -> None:
        """Record a wait once for each reason, and a request for approval once for each incarnation.

        A run records one wait for each cause, a silent host one for all executors.
        The timeout of a planned intent does not run while it is held.
        """
        timers = self._timers.of(episode.episode_id)
        if step.reason in _HELD:
            timers.restart_planned()
        recorded = f"{step.reason} {step.asks or ''} {step.about}"
        if timers.current_wait != recorded:
            timers.current_wait = timers.last_wait = recorded
            log.info("waiting", episode=episode.episode_id, worker=episode.worker, reason=step.message)
            once = episode.subject is Subject.HOST
            self._ledger.journal.wait(episode.episode_id, step, now=self._ledger.now(), once=once)
