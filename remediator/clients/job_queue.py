"""Where jobs are settled: fence, requeue, fail; and where runs are judged. One file a kind of queue."""

from collections.abc import Sequence
from typing import Protocol

from gpuwarden.job import Trip
from gpuwarden.queue import Slot
from gpuwarden.queue.items.tally import RunTally
from remediator.plan import HeldJob, JobFacts, Wrangle
from remediator.remedies.wrangle import Rules


class Queue(Protocol):
    """A queue of jobs, as the remediator needs it. Each change is a compare-and-set on the attempt.

    Every method raises `gpuwarden.errors.GpuwardenError` when the queue does not answer; nothing was changed then.
    """

    def now(self) -> float:
        """The time that the queue goes by, Unix seconds."""

    def job(self, job_id: int) -> JobFacts | None:
        """The job as it is now; `None` when the queue has none of that id."""

    def fence(self, job_id: int, *, attempt: int, incarnation: str, trip: Trip, now: float) -> bool:
        """Take the job from the attempt; false when it was not, or no longer, that attempt's and incarnation's."""

    def hold_fence(self, job_id: int, *, attempt: int, now: float) -> bool:
        """The settle is still owed: no sweep gives the fenced job away; false when it is no longer fenced."""

    def requeue(self, job_id: int, *, attempt: int, trip: Trip, now: float, avoid: Slot, avoid_s: float) -> bool:
        """Queue the fenced job again, for `avoid_s` seconds elsewhere than at `avoid`; false when not fenced."""

    def fail(self, job_id: int, *, attempt: int, because: str, now: float) -> bool:
        """End the fenced job; false when it was no longer fenced."""

    def retire_worker(self, *, host: str, worker: str, incarnation: str, now: float) -> None:
        """The killed worker claims nothing and stops being counted as busy (A12). Best effort."""

    def quarantine(self, gpus: Sequence[str], *, host: str, worker: str, because: str, now: float) -> None:
        """Nothing is run on these GPUs, nor by that worker, until a person releases them."""

    def jobs_on(self, host: str, *, now: float) -> tuple[HeldJob, ...]:
        """What runs on a host or is lost with it, and how long ago its workers were heard of."""

    def lose(self, job_id: int, *, attempt: int, now: float) -> bool:
        """The job's host is lost: nobody else gets it, nor its GPU; false unless it runs, as this attempt."""

    def find(self, job_id: int, *, attempt: int, now: float) -> bool:
        """The job's host is back: it runs again, for a lease; false unless it is lost, as this attempt."""

    def tally(self, run_id: str, *, now: float) -> RunTally | None:
        """How the items of a run went, worker by worker; `None` when the queue has no such run."""

    def wrangle(self, run_id: str, verdict: Wrangle, *, rules: Rules, who: str, now: float) -> bool:
        """Do what was decided about a run, if that is what is decided now; false, and nothing done, where it is not."""

    def tend(self, *, now: float) -> None:
        """What runs on a timer: expired leases, unread events."""
