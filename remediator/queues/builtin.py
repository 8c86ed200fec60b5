"""gpuwarden's own SQL queue, as the remediator sees it."""

from gpuwarden.job import Trip
from gpuwarden.jobstore import JobStore, UnknownJobError
from remediator.plan import JobFacts


class BuiltinQueue:
    """See `remediator.queues.Queue`."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

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
        """Reclaim expired leases, consume failed events."""
        self._store.reclaim_expired(now=now)
        self._store.consume_events(now=now)
