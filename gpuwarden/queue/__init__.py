"""The SQL queue. Each change of a job is one transaction and one compare-and-set.

The queue refuses a move whose attempt or incarnation has changed. `gpuwarden.job.MOVES` defines the moves.
`now` is Unix seconds from `JobStore.now`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


_ELSEWHERE = {"JobStore": "store", "keep_result": "outcomes.results"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: commands start faster without the store."""
    if name not in __all__:
        raise AttributeError(f"module 'gpuwarden.queue' has no attribute {name!r}")
    return getattr(importlib.import_module(f"gpuwarden.queue.{_ELSEWHERE.get(name, 'models')}"), name)
