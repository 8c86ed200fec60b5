"""The interface of a job queue."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuwarden.job import Condition
from gpuwarden.queue import Slot
from gpuwarden.queue.hosts.silence import SeenHost
from gpuwarden.queue.items.tally import RunTally
from remediator.plan import HeldJob, JobFacts, Wrangle
from remediator.remedies.wrangle import Rules


@dataclass(frozen=True, kw_only=True)
class KnownNames:
    """Names that a queue has seen."""

    workers: Collection[str]
    runs: Collection[str]


class Queue(Protocol):
    """What the remediator needs of a job queue. Each change is a compare-and-set on the attempt.

    Every method raises `GpuwardenError` if the queue is unreachable; then nothing was changed.
    """

    def now(self) -> float:
        """The queue's time, Unix seconds."""

    def job(self, job_id: int) -> JobFacts | None:
        """Read a job; `None` if unknown."""

    def fence(self, job_id: int, *, attempt: int, incarnation: str, condition: Condition, now: float) -> bool:
        """Fence a running job; false if another attempt or incarnation runs."""

    def renew_fence(self, job_id: int, *, attempt: int, now: float) -> bool:
        """Renew the fence of a job; false if not fenced."""

    def requeue(
        self, job_id: int, *, attempt: int, condition: Condition, now: float, avoid: Slot, avoid_s: float
    ) -> bool:
        """Requeue a fenced job, for `avoid_s` seconds not at `avoid`; false if not fenced."""

    def fail(self, job_id: int, *, attempt: int, reason: str, now: float) -> bool:
        """Fail a fenced job; false if not fenced."""

    def retire_worker(self, *, host: str, worker: str, incarnation: str, now: float) -> None:
        """End a killed worker's incarnation (A12)."""

    def quarantine(self, gpus: Sequence[str], *, host: str, worker: str, reason: str, now: float) -> None:
        """Quarantine GPUs and their worker."""

    def quarantine_reason(self, gpu: str, *, host: str) -> str | None:
        """Why a GPU of a host is in quarantine; `None` if it is not."""

    def jobs_on(self, host: str, *, now: float) -> tuple[HeldJob, ...]:
        """List the running and lost jobs of a host."""

    def seen_host(self, host: str, *, now: float) -> SeenHost | None:
        """When a host was last heard; `None` if unknown."""

    def mark_lost(self, job_id: int, *, attempt: int, now: float) -> bool:
        """Mark a running job lost."""

    def mark_returned(self, job_id: int, *, attempt: int, now: float) -> bool:
        """Mark a lost job running."""

    def known(self, host: str, *, workers: Sequence[str], runs: Sequence[str]) -> KnownNames:
        """Those of the workers of a host, and of the runs, that the queue has seen."""

    def tally(self, run_id: str, *, now: float) -> RunTally | None:
        """Count item outcomes by worker."""

    def wrangle(self, run_id: str, verdict: Wrangle, *, rules: Rules, who: str, now: float) -> bool:
        """Apply a verdict, if it still holds."""

    def sweep(self, *, now: float) -> None:
        """Reclaim expired leases and consume events."""

    def delete_old(self, *, now: float) -> bool:
        """Delete a batch of old jobs; false if it has none."""
