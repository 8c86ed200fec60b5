"""Periodic work: heartbeats, sweeps of the queue, fence renewal, retention."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden import clock
from gpuwarden.errors import GpuwardenError
from gpuwarden.job import HEARTBEAT_S
from gpuwarden.supervisor import files
from remediator.clients.job_queue import Queue
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.known_targets import KnownTargets
from remediator.ledger.ledger import Ledger
from remediator.plan import Episode, Stage
from remediator.remedies import REMEDIES
from remediator.remedies.guards import Orders

if TYPE_CHECKING:
    from remediator.executor.seats import SeatKeeper

log: Final = structlog.get_logger("executor")

DELETE_S: Final = 0.1
"""Time for deleting old episodes or jobs in each `sweep_interval_s`, seconds. The last transaction may exceed it."""

CLOCK_STEP_S: Final = 3600.0
CLOCK_BELIEVED_S: Final = 600.0
"""Nothing is deleted until the wall clock has run this long without a step of `CLOCK_STEP_S`, seconds."""


class ClockTrust:
    """Whether a clock can be trusted. One that is ahead after boot would delete recent rows."""

    def __init__(self) -> None:
        self._offset_s = self._from_s = 0.0

    def check(self, now: float) -> bool:
        """Whether it can be trusted now."""
        boot_s = clock.boottime_s()
        if abs(now - boot_s - self._offset_s) > CLOCK_STEP_S:  # at the start too
            self._offset_s, self._from_s = now - boot_s, boot_s + CLOCK_BELIEVED_S
        return boot_s >= self._from_s


class Arming:
    """Logs which remedies are armed if that changed, and informs supervisors whether any is."""

    def __init__(self, host: str, runtime_dir: Path | None) -> None:
        self._host = host
        self._runtime_dir = runtime_dir
        self._armed: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._next_s = 0.0

    def observe(self, orders: Orders, *, now_s: float) -> bool:
        """Whether any remedy is armed."""
        armed = tuple(remedy for remedy in REMEDIES if orders.armed(host=self._host, remedy=remedy))
        asking = tuple(remedy for remedy in armed if orders.needs_approval(host=self._host, remedy=remedy))
        if (armed, asking) != self._armed:
            self._armed, self._next_s = (armed, asking), 0.0
            self._log(orders)
        if self._runtime_dir is not None and now_s >= self._next_s:
            self._next_s = now_s + HEARTBEAT_S
            try:
                files.write_executor(self._runtime_dir, armed=bool(armed))
            except OSError as error:
                log.warning("supervisors not informed whether this host is armed", reason=str(error))
        return bool(armed)

    def _log(self, orders: Orders) -> None:
        for remedy in REMEDIES:
            order = orders.arming(host=self._host, remedy=remedy)
            by = {} if order is None else {"by": order.who, "reason": order.reason}
            if orders.needs_approval(host=self._host, remedy=remedy):
                log.warning("armed with approval: acts after an operator approves", remedy=remedy, **by)
            elif orders.armed(host=self._host, remedy=remedy):
                log.warning("armed: acts", remedy=remedy, **by)
            else:
                hint = "arm it with `gpuwarden arm`"
                log.warning("dry run: records actions and performs none", remedy=remedy, hint=hint, **by)


class Housekeeping:
    """Keeps the ledger and the queue in order, and counts unexpected errors."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        host: str,
        known: KnownTargets,
        queue: Queue,
        suspend_aware: SuspendAwareClock,
        keep_s: float,
        runtime_dir: Path | None,
        seats_on: bool,
        seats: "SeatKeeper | None",
        is_closing: Callable[[], bool],
    ) -> None:
        self._ledger = ledger
        self._seats = seats
        self.known = known
        self._queue = queue
        self._clock = suspend_aware
        self._keep_s = keep_s
        self._is_closing = is_closing
        self.errors = 0
        """Unexpected errors since the start."""

        self._sweep: Future[None] | None = None
        self._workers: int | None = None
        self._arming = Arming(host, runtime_dir)
        self._write_beat = partial(
            ledger.executors.beat, host=host, started_at=suspend_aware.unix_s(), seats_on=seats_on
        )
        self._next_fences_s = 0.0
        self._ledger_clock, self._queue_clock = ClockTrust(), ClockTrust()

    def beat(self) -> None:
        """Write this executor's heartbeat. Log which remedies are armed if that changed."""
        orders = self._ledger.orders.current()
        armed = self._arming.observe(orders, now_s=self._clock.now_s())
        self._write_beat(
            pid=os.getpid(),
            armed=armed,
            errors=self.errors,
            workers=self._workers,
            seats_failures=0 if self._seats is None else self._seats.failures,
            now=self._ledger.now(),
        )

    def sweep_in_background(self, sweeping: ThreadPoolExecutor) -> None:
        """Sweep in a separate thread, one sweep at a time.

        A locked queue blocks a sweep. If the loop waited for it, all timers would restart.
        """
        if self._sweep is not None:
            if not self._sweep.done():
                return
            if (error := self._sweep.exception()) is not None:
                self.errors += 1
                log.error("unexpected error", exc_info=error)
        self._sweep = sweeping.submit(self.sweep)

    def sweep(self) -> None:
        """Sweep the queue, delete its old jobs, and count the host's workers."""
        if self._is_closing():
            return  # a locked queue would delay the shutdown
        try:
            now = self._queue.now()
            self._queue.sweep(now=now)
            until_s = self._clock.now_s() + DELETE_S
            if self._queue_clock.check(now):
                while self._queue.delete_old(now=now) and self._clock.now_s() < until_s:
                    pass
        except GpuwardenError as error:
            log.warning("queue unreachable", reason=str(error))
        try:
            self._workers = self.known.refresh()
        except GpuwardenError as error:
            self._workers = None
            log.debug("worker count unavailable", reason=str(error))

    def delete_old(self) -> None:
        """Delete old alerts and episodes, a few at a time."""
        if not self._keep_s:
            return
        now = self._ledger.now()
        if not self._ledger_clock.check(now):
            return
        until_s, before = self._clock.now_s() + DELETE_S, now - self._keep_s
        for host, count in self._ledger.inbox.abandon(before=before, now=now).items():
            message = (
                "its executor did not process them within --retention-days; list them with `gpuwarden ledger refused`"
            )
            log.error("accepted alerts abandoned", host=host, count=count, reason=message)
        while self._ledger.episodes.delete_old(before=before) and self._clock.now_s() < until_s:
            pass

    def renew_fences(self, episodes: list[Episode]) -> None:
        """Renew the fences of jobs that this host is about to settle, so that a sweep does not requeue them.

        Runs every `HEARTBEAT_S`. Stops at the first error: an unreachable queue must not block the loop.
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
                queue.renew_fence(job_id, attempt=attempt, now=queue.now())
            except GpuwardenError as error:
                log.warning("fence not renewed", job_id=job_id, reason=str(error))
                return
