"""The SQL queue: every change of a job is one transaction and one compare-and-set.

A worker's moves name its attempt and its incarnation, and are refused once either has changed; a trip's moves name the
attempt. Which state each move starts from and ends in comes from `gpuwarden.job.MOVES` and from nowhere else. `now` is
Unix seconds by the queue's own clock, `JobStore.now`, passed in by the caller.
"""

from gpuwarden.queue.models import (
    PRIORITY,
    BlockedError,
    DeadWorker,
    DrainedError,
    Event,
    HostsJob,
    Item,
    Job,
    Quarantine,
    QueueSettings,
    ReplacedError,
    Result,
    ResultError,
    Run,
    Slot,
    SpentError,
    Submission,
    SubmissionError,
    UnknownJobError,
    WorkerRow,
    check_result,
    is_gpu,
)
from gpuwarden.queue.store import JobStore

__all__ = [
    "PRIORITY",
    "BlockedError",
    "DeadWorker",
    "DrainedError",
    "Event",
    "HostsJob",
    "Item",
    "Job",
    "JobStore",
    "Quarantine",
    "QueueSettings",
    "ReplacedError",
    "Result",
    "ResultError",
    "Run",
    "Slot",
    "SpentError",
    "Submission",
    "SubmissionError",
    "UnknownJobError",
    "WorkerRow",
    "check_result",
    "is_gpu",
]
