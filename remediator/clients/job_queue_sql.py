"""Client of gpuwarden's SQL queue."""

import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Self

from gpuwarden.db.errors import NoAnswerError
from gpuwarden.fields import made_from
from gpuwarden.format import format_utc_time
from gpuwarden.job import HEARTBEAT_S, Condition, JobId
from gpuwarden.queue import JobStore, Slot, UnknownJobError
from gpuwarden.queue.hosts.silence import SeenHost
from gpuwarden.queue.hosts.task_orders import TaskResult
from gpuwarden.queue.items.tally import RunTally
from remediator.clients.job_queue import KnownNames
from remediator.plan import BlockRun, HeldJob, JobFacts, LockWorker, Wrangle
from remediator.remedies.wrangle import Rules, still_valid

RENEWAL_S: Final = 2 * HEARTBEAT_S
"""Time that a lease must stay expired before its job is reclaimed, seconds."""


class BuiltinQueue:
    """Implements `remediator.clients.job_queue.Queue`. Without a `store`, each use tries to open `url`."""

    def __init__(self, store: JobStore | None, *, url: str = "") -> None:
        self._opened = store
        self._url = url
        self._opening = threading.Lock()
        self._expired: dict[tuple[JobId, int], float] = {}

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the queue. If it does not answer, open it later.

        Raises:
            DatabaseError: it cannot be used.
        """
        try:
            return cls(JobStore.open(url))
        except NoAnswerError:
            return cls(None, url=url)

    @property
    def _store(self) -> JobStore:
        if self._opened is not None:
            return self._opened
        # One thread waits; the others act without a queue.
        if not self._opening.acquire(blocking=False):
            raise NoAnswerError("the queue has not answered yet")
        try:
            self._opened = self._opened or JobStore.open(self._url)
        finally:
            self._opening.release()
        return self._opened

    def close(self) -> None:
        """Close every connection."""
        if self._opened is not None:
            self._opened.close()

    def now(self) -> float:
        """The queue's clock."""
        return self._store.now()

    def exchange_task_orders(self, host: str, results: Sequence[TaskResult]) -> list[int]:
        """Store what was done on orders to end tasks, and return the tasks to end."""
        return self._store.task_orders.exchange(host, results, now=self._store.now())

    def job(self, job_id: int) -> JobFacts | None:
        """See `Queue`."""
        try:
            found = self._store.job(job_id)
        except UnknownJobError:
            return None
        return made_from(found, JobFacts, retried=found.job_class.retried)

    def fence(self, job_id: int, *, attempt: int, incarnation: str, condition: Condition, now: float) -> bool:
        """See `Queue`."""
        return self._store.fencing.fence(job_id, attempt=attempt, incarnation=incarnation, condition=condition, now=now)

    def renew_fence(self, job_id: int, *, attempt: int, now: float) -> bool:
        """See `Queue`."""
        return self._store.fencing.hold_fence(job_id, attempt=attempt, now=now)

    def requeue(
        self, job_id: int, *, attempt: int, condition: Condition, now: float, avoid: Slot, avoid_s: float
    ) -> bool:
        """See `Queue`."""
        return self._store.fencing.requeue(
            job_id, attempt=attempt, condition=condition, now=now, avoid=avoid, avoid_s=avoid_s
        )

    def fail(self, job_id: int, *, attempt: int, reason: str, now: float) -> bool:
        """See `Queue`."""
        return self._store.fencing.fail(job_id, attempt=attempt, reason=reason, now=now)

    def retire_worker(self, *, host: str, worker: str, incarnation: str, now: float) -> None:
        """See `Queue`."""
        self._store.fencing.retire_worker(host=host, worker=worker, incarnation=incarnation, now=now)

    def quarantine(self, gpus: Sequence[str], *, host: str, worker: str, reason: str, now: float) -> None:
        """See `Queue`."""
        self._store.gpu_quarantine.quarantine(gpus, host=host, worker=worker, reason=reason, now=now)

    def quarantine_reason(self, gpu: str, *, host: str) -> str | None:
        """See `Queue`."""
        found = self._store.gpu_quarantine.quarantined()
        return next((each.reason for each in found if (each.gpu, each.host) == (gpu, host)), None)

    def jobs_on(self, host: str, *, now: float) -> tuple[HeldJob, ...]:
        """See `Queue`. A heartbeat in the future counts as now."""
        return tuple(
            HeldJob(
                job_id=each.job_id,
                attempt=each.attempt,
                state=each.state,
                heard_s_ago=None if each.heard_at is None else max(0.0, now - each.heard_at),
            )
            for each in self._store.lost_hosts.jobs_on(host)
        )

    def seen_host(self, host: str, *, now: float) -> SeenHost | None:
        """See `Queue`."""
        return self._store.seen_hosts.get(host, now=now)

    def mark_lost(self, job_id: int, *, attempt: int, now: float) -> bool:
        """See `Queue`."""
        return self._store.lost_hosts.mark_lost(job_id, attempt=attempt, now=now)

    def mark_returned(self, job_id: int, *, attempt: int, now: float) -> bool:
        """See `Queue`."""
        return self._store.lost_hosts.mark_returned(job_id, attempt=attempt, now=now)

    def known(self, host: str, *, workers: Sequence[str], runs: Sequence[str]) -> KnownNames:
        """See `Queue`."""
        registered, submitted = self._store.queries.known(host, workers=workers, runs=runs)
        return KnownNames(workers=registered, runs=submitted)

    def tally(self, run_id: str, *, now: float) -> RunTally | None:
        """See `Queue`."""
        return self._store.item_failures.tally(run_id, now=now)

    def wrangle(self, run_id: str, verdict: Wrangle, *, rules: Rules, who: str, now: float) -> bool:
        """Count and decide again in the transaction that acts."""

        def still(run: RunTally) -> bool:
            return still_valid(run, verdict, rules)

        reason = f"wrangled, run {run_id}: {verdict.message}"
        if isinstance(verdict, BlockRun):
            reason = f"{reason} (blocked by {who}, {format_utc_time(now)})"
            return bool(self._store.item_failures.block_run(run_id, still=still, reason=reason, now=now))
        slot: dict[str, Any] = {"host": verdict.host, "worker": verdict.worker}
        act = (
            self._store.item_failures.lock_faulty
            if isinstance(verdict, LockWorker)
            else self._store.item_failures.migrate_run
        )
        return act(run_id, **slot, still=still, who=who, reason=reason, now=now)

    def sweep(self, *, now: float) -> None:
        """Reclaim leases that stayed expired for `RENEWAL_S`, and consume events of failed jobs.

        After an outage all leases are expired until workers renew them. A locked SQLite file is an outage too: so each
        sweep that finds an expired lease writes, and a refusal restarts all timers.
        """
        now_s, before, self._expired = time.monotonic(), self._expired, {}  # forgotten if the queue fails now
        expired = {each: before.get(each, now_s) for each in self._store.sweeps.expired(now=now)}
        ripe = [job_id for (job_id, _), since_s in expired.items() if now_s - since_s >= RENEWAL_S]
        try:
            if expired:
                self._store.sweeps.reclaim_expired(now=now, among=ripe)
            self._expired = expired
        finally:  # also after an error
            self._store.sweeps.consume_events(now=now)

    def delete_old(self, *, now: float) -> bool:
        """See `Queue`."""
        return self._store.sweeps.delete_old(now=now)
