"""gpuwarden's own SQL queue, as the remediator sees it."""

import time
from typing import Final

from gpuwarden.job import HEARTBEAT_S, JobId, Trip
from gpuwarden.jobstore import JobStore, UnknownJobError
from remediator.plan import JobFacts

RENEWAL_S: Final = 2 * HEARTBEAT_S
"""How long a lease must have been seen expired before its job is reclaimed, seconds."""


class BuiltinQueue:
    """See `remediator.queues.Queue`."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._expired: dict[tuple[JobId, int], float] = {}

    def job(self, job_id: int) -> JobFacts | None:
        """The job as it is now."""
        try:
            found = self._store.job(job_id)
        except UnknownJobError:
            return None
        return JobFacts(
            job_id=found.job_id,
            attempt=found.attempt,
            state=found.state,
            claimed_by=found.claimed_by,
            watchdog_retries=found.watchdog_retries,
            retried=found.job_class.retried,
        )

    def fence(self, job_id: int, *, attempt: int, incarnation: str, trip: Trip, now: float) -> bool:
        """Running to fencing."""
        return self._store.fence(job_id, attempt=attempt, incarnation=incarnation, trip=trip, now=now)

    def requeue(self, job_id: int, *, attempt: int, trip: Trip) -> bool:
        """Fencing to queued."""
        return self._store.requeue(job_id, attempt=attempt, trip=trip)

    def fail(self, job_id: int, *, attempt: int, because: str, now: float) -> bool:
        """Fencing to failed."""
        return self._store.fail(job_id, attempt=attempt, because=because, now=now)

    def clear_busy_ghost(self, *, host: str, worker: str, incarnation: str, now: float) -> None:
        """The worker's row stops advertising a model."""
        self._store.clear_busy_ghost(host=host, worker=worker, incarnation=incarnation, now=now)

    def tend(self, *, now: float) -> None:
        """Reclaim leases that have stayed expired for longer than a renewal takes, consume failed events.

        A machine that was suspended, or a queue that was away, leaves every lease expired at once: its workers renew
        within a heartbeat, and only what is still expired then is given away.
        """
        now_s = time.monotonic()
        self._expired = {each: self._expired.get(each, now_s) for each in self._store.expired(now=now)}
        ripe = [job_id for (job_id, _), since_s in self._expired.items() if now_s - since_s >= RENEWAL_S]
        if ripe:
            self._store.reclaim_expired(now=now, among=ripe)
        self._store.consume_events(now=now)
