"""How the items of one run went, worker by worker: what a faulty worker is told from a faulty job by (B). Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WorkerTally:
    """One worker at the items of one run: how many it finished, and how many failed, each once, forgiven ones left out.

    `runs_for_s` is for how long it has been running a job of the run, seconds; `None` while it runs none. `spent` says
    of such a job that is at a cap why it cannot be taken from it, and what to do; `None` where all can be taken.
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
    """One run. `workers` are those that run a job of it, and those that ever finished or failed an item of it.

    `asked` is set where its owner asked for wrangling, `over` once it has ended, `ranked` where jobs of it have several
    ranks. `unsettled` jobs are fenced, or of a host that seems lost: who runs them, and whether anybody does, is not
    known. `migrations` is how often it was moved to other workers.
    """

    run_id: str
    asked: bool
    over: bool
    ranked: bool
    unsettled: int
    migrations: int
    workers: tuple[WorkerTally, ...]
