"""The SQL queue. Each change of a job is one transaction and one compare-and-set.

The queue refuses a move whose attempt or incarnation has changed. `gpuwarden.job.MOVES` defines the moves.
`now` is Unix seconds from `JobStore.now`.
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
    is_gpu,
)
from gpuwarden.queue.outcomes.results import keep_result
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
    "is_gpu",
    "keep_result",
]
