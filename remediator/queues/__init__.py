"""Where jobs are settled: fence, requeue, fail. One file a kind of queue."""

from typing import Protocol

from gpuwarden.job import Trip
from remediator.plan import JobFacts


class Queue(Protocol):
    """A queue of jobs, as the remediator needs it. Each change is a compare-and-set on the attempt.

    Every method raises `gpuwarden.errors.GpuwardenError` when the queue does not answer; nothing was changed then.
    """

    def job(self, job_id: int) -> JobFacts | None:
        """The job as it is now; `None` when the queue has none of that id."""

    def fence(self, job_id: int, *, attempt: int, incarnation: str, trip: Trip, now: float) -> bool:
        """Take the job from the attempt; false when it was not, or no longer, that attempt's and incarnation's."""

    def requeue(self, job_id: int, *, attempt: int, trip: Trip) -> bool:
        """Queue the fenced job again; false when it was no longer fenced."""

    def fail(self, job_id: int, *, attempt: int, because: str, now: float) -> bool:
        """End the fenced job; false when it was no longer fenced."""

    def clear_busy_ghost(self, *, host: str, worker: str, incarnation: str, now: float) -> None:
        """The killed worker stops being counted as busy (A12). Best effort."""

    def tend(self, *, now: float) -> None:
        """What runs on a timer: expired leases, unread events."""
