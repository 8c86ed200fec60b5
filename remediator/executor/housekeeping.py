"""What the executor does besides episodes: signs of life, sweeps of the queue, fences, retention."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import structlog

from gpuwarden import clock
from gpuwarden.errors import GpuwardenError
from gpuwarden.job import HEARTBEAT_S
from remediator.clients.exporter import Witness
from remediator.clients.job_queue import Queue
from remediator.executor.clock import SuspendAwareClock
from remediator.ledger.ledger import Ledger
from remediator.plan import Episode, Stage
from remediator.remedies import REMEDIES
from remediator.remedies.guards import Orders

log: Final = structlog.get_logger("executor")

FORGET_S: Final = 0.1
"""How much of each `tend_s` goes to forgetting what has been over for long, seconds, and a transaction more."""

CLOCK_STEP_S: Final = 3600.0
CLOCK_BELIEVED_S: Final = 600.0
"""A clock that was set, or that was just come upon, makes nothing old before it has gone on for so long, seconds."""


class Housekeeping:
    """Keeps the ledger and the queue in order, and counts unexpected errors.

    Args:
        ledger: where signs of life go.
        host: this host's key.
        witness: what counts the host's workers.
        queue: the job queue.
        suspend_aware: the executor's clock.
        keep_s: for how long what is over is kept, seconds; 0 is for ever.
        is_closing: whether the loop is to end.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        host: str,
        witness: Witness,
        queue: Queue,
        suspend_aware: SuspendAwareClock,
        keep_s: float,
        is_closing: Callable[[], bool],
    ) -> None:
        self._ledger = ledger
        self._host = host
        self._witness = witness
        self._queue = queue
        self._clock = suspend_aware
        self._keep_s = keep_s
        self._is_closing = is_closing
        self.errors = 0
        """Unexpected errors since the start."""

        self._tending: Future[None] | None = None
        self._workers: int | None = None
        self._acts: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._started_at = suspend_aware.unix_s()
        self._next_fences_s = self._clock_s = self._forgets_from_s = 0.0

    def beat(self) -> None:
        """Give the sign of life of this host's executor, and log what acts where that changed."""
        orders = self._ledger.orders.current()
        acts = tuple(remedy for remedy in REMEDIES if orders.armed(host=self._host, remedy=remedy))
        asks = tuple(remedy for remedy in acts if orders.asks(host=self._host, remedy=remedy))
        if (acts, asks) != self._acts:
            self._acts = (acts, asks)
            self._say_what_acts(orders)
        self._ledger.executors.beat(
            host=self._host,
            pid=os.getpid(),
            armed=bool(acts),
            started_at=self._started_at,
            errors=self.errors,
            workers=self._workers,
            now=self._ledger.now(),
        )

    def _say_what_acts(self, orders: Orders) -> None:
        for remedy in REMEDIES:
            order = orders.arming(host=self._host, remedy=remedy)
            by = {} if order is None else {"by": order.who, "because": order.because}
            if orders.asks(host=self._host, remedy=remedy):
                log.warning("armed with approval: it acts on what a person approves", remedy=remedy, **by)
            elif orders.armed(host=self._host, remedy=remedy):
                log.warning("armed: it acts", remedy=remedy, **by)
            else:
                hint = "`gpuwarden arm` makes it act"
                log.warning("dry run: all is recorded and nothing is done", remedy=remedy, hint=hint, **by)

    def tend_beside(self, tending: ThreadPoolExecutor) -> None:
        """Tend beside the loop, once at a time.

        Each sweep waits for a queue that is locked, perhaps by the very process that is to be stopped: a loop that
        waited with it would be taken for one that stood still, and patience would never come to an end.
        """
        if self._tending is not None:
            if not self._tending.done():
                return
            if (error := self._tending.exception()) is not None:
                self.errors += 1
                log.error("unexpected error", exc_info=error)
        self._tending = tending.submit(self.tend)

    def tend(self) -> None:
        """Sweep the queue, and count the host's workers."""
        if self._is_closing():
            return  # a sweep that waits for a locked queue would hold up the end
        try:
            self._queue.tend(now=self._queue.now())
        except GpuwardenError as error:
            log.warning("the queue does not answer", because=str(error))
        try:
            self._workers = self._witness.workers()
        except GpuwardenError as error:
            self._workers = None
            log.debug("the host's workers cannot be counted", because=str(error))

    def forget(self) -> None:
        """Let go of what has been over for long, a little at a time: alerts and episodes come first.

        Not by a clock that is ahead because nobody has set it yet: what is forgotten cannot be had back.
        """
        if not self._keep_s:
            return
        now, boot_s = self._ledger.now(), clock.boottime_s()
        if abs(now - boot_s - self._clock_s) > CLOCK_STEP_S:  # at the start too
            self._clock_s, self._forgets_from_s = now - boot_s, boot_s + CLOCK_BELIEVED_S
        if boot_s < self._forgets_from_s:
            return
        until_s, before = self._clock.now_s() + FORGET_S, now - self._keep_s
        for host, count in self._ledger.inbox.abandon(before=before, now=now).items():
            message = "its executor has not taken them up for --keep-days: `gpuwarden ledger refused` tells them"
            log.error("accepted alerts abandoned", host=host, count=count, because=message)
        while self._ledger.episodes.forget(before=before) and self._clock.now_s() < until_s:
            pass

    def keep_fences(self, episodes: list[Episode]) -> None:
        """Lengthen the fences of the jobs that this host is about to settle, so that no sweep gives them away.

        As often as a worker renews its lease, so that a clock that is set takes neither. The first failure ends it: a
        queue that does not answer must not keep the loop from going round.
        """
        now_s = self._clock.now_s()
        if now_s < self._next_fences_s:
            return
        self._next_fences_s = now_s + HEARTBEAT_S
        queue = self._queue
        for episode in episodes:
            settle, job_id, attempt = episode.settle, episode.job_id, episode.attempt
            if settle is None or settle.stage is not Stage.FENCED or job_id is None or attempt is None:
                continue
            try:
                queue.hold_fence(job_id, attempt=attempt, now=queue.now())
            except GpuwardenError as error:
                log.warning("the fence could not be lengthened", job_id=job_id, because=str(error))
                return
