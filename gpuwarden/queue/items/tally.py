"""Item counts of one run by worker, for wrangling (B). Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerTally:
    """Items of one run at one worker. Repeated failures of an item count once.

    `runs_for_s` is how long it has run a job of the run, seconds. `spent` is why its job cannot be taken from it.
    """

    host: str
    worker: str
    done: int
    failed: int
    runs_for_s: float | None
    spent: str | None = None

    def __str__(self) -> str:
        return f"{self.worker} on {self.host}"


@dataclass(frozen=True, kw_only=True)
class RunTally:
    """Items of one run.

    `asked`: wrangling is on. `ranked`: a job has several ranks. `unsettled`: jobs that are fenced or lost.
    `migrations`: moves to other workers.
    """

    run_id: str
    asked: bool
    over: bool
    ranked: bool
    unsettled: int
    migrations: int
    workers: tuple[WorkerTally, ...]
