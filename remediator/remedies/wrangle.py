"""Wrangling: is it the worker that is faulty, or the job? Decided from how the items of a run went, worker by worker.

Nothing is judged before one worker that has finished none of the run's items has failed more than `activation` of them.
Whoever finishes items beside it proves that worker faulty; where nobody finishes any, those who run the job beside it
tell; and where nobody does, the job is moved to a worker that has not had it. One verdict at a time: it is carried out,
and the run is counted anew. Pure.
"""

from dataclasses import dataclass
from typing import Final, Literal

from gpuwarden.tally import RunTally, WorkerTally
from remediator.plan import Wait

ACTIVATION: Final = 5
"""So many items of one run may fail on a worker before anything is judged (B1): the next one is the sixth."""

MIGRATIONS_MAX: Final = 3
"""So often a run is moved before the run is the faulty one (B5): four workers have tried it then."""

PATIENCE_S: Final = 1800.0
"""A worker that has run a job for so long, seconds, and neither finished nor failed an item is not failing (B4)."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The constants that decide."""

    activation: int = ACTIVATION
    migrations_max: int = MIGRATIONS_MAX
    patience_s: float = PATIENCE_S


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Nobody is accused, or nobody may be judged."""

    because: str


@dataclass(frozen=True, kw_only=True)
class LockWorker:
    """Keep the worker from claiming, take its job of the run from it, and have what it failed tried again."""

    host: str
    worker: str
    because: str
    tell: Literal["administrator"] = "administrator"


@dataclass(frozen=True, kw_only=True)
class Migrate:
    """Take the run from the one worker that runs it, to one that has not had it."""

    host: str
    worker: str
    because: str


@dataclass(frozen=True, kw_only=True)
class BlockRun:
    """Let nobody claim the run's jobs, and take those that run from their workers."""

    because: str
    tell: Literal["submitter"] = "submitter"


Verdict = Leave | Wait | LockWorker | Migrate | BlockRun


def decide(run: RunTally, rules: Rules) -> Verdict:
    """What is to become of a run and its workers now. A job at a cap is not taken from its worker: it would fail."""
    verdict = _judge(run, rules)
    if isinstance(verdict, LockWorker | Migrate):
        for each in run.workers:
            if (each.host, each.worker) == (verdict.host, verdict.worker) and each.spent is not None:
                return Wait(reason="spent", because=f"{verdict.because}; but {each.spent}")
    return verdict


def _judge(run: RunTally, rules: Rules) -> Verdict:
    if (kept_from := _kept_from(run)) is not None:
        return Leave(because=kept_from)
    accused = [each for each in run.workers if each.done == 0 and each.failed > rules.activation]
    if not accused:
        return Leave(because=f"no worker has failed more than {rules.activation} of its items and finished none")
    worst = max(accused, key=_guilt)
    done = sum(each.done for each in run.workers)
    if done:
        because = f"{worst} has failed {worst.failed} items and finished none, and others have finished {done}"
        return LockWorker(host=worst.host, worker=worst.worker, because=because)
    if run.unsettled:
        because = f"{run.unsettled} of its jobs are fenced or on hosts that seem lost: who runs them is not known"
        return Wait(reason="unsettled", because=because)
    at_it = [each for each in accused if each.runs_for_s is not None]
    if not at_it:
        return Leave(because=f"nobody has finished any, and {worst}, which failed {worst.failed}, runs it no more")
    worst = max(at_it, key=_guilt)
    others = [each for each in run.workers if each.runs_for_s is not None and each is not worst]
    return _among_others(worst, others, rules) if others else _alone(run, worst, rules)


def _kept_from(run: RunTally) -> str | None:
    if not run.asked:
        return f"nobody asked for it: `gpuwarden wrangle on {run.run_id}` does"
    if run.over:
        return "it has ended"
    if run.ranked:
        return "it has jobs of several ranks, which end as one: a person has to judge"
    return None


def _guilt(worker: WorkerTally) -> tuple[int, str, str]:
    """The worst has failed the most; by name where that is equal, so that two who look agree."""
    return worker.failed, worker.host, worker.worker


def _among_others(worst: WorkerTally, others: list[WorkerTally], rules: Rules) -> Verdict:
    """Nobody has finished any: do all fail, or only this one?"""
    told = f"nobody has finished any, and {worst} has failed {worst.failed} items"
    silent = [each for each in others if each.failed == 0]
    if not silent:
        because = f"{told}; the {len(others)} that run it beside fail too"
        return BlockRun(because=because)
    patient = [each for each in silent if (each.runs_for_s or 0.0) >= rules.patience_s]
    if not patient:
        because = f"{told}; {silent[0]} has neither finished nor failed one yet, in less than {rules.patience_s:.0f} s"
        return Wait(reason="undecided", because=because)
    because = f"{told}; {patient[0]}, which runs it as well, has failed none in {rules.patience_s:.0f} s or more"
    return LockWorker(host=worst.host, worker=worst.worker, because=because)


def _alone(run: RunTally, worst: WorkerTally, rules: Rules) -> Verdict:
    """Nobody else runs it now."""
    told = f"nobody has finished any, and {worst}, alone with it, has failed {worst.failed} items"
    if run.migrations < rules.migrations_max:
        because = f"{told}; move {run.migrations + 1} of {rules.migrations_max}, to a worker that has not had it"
        return Migrate(host=worst.host, worker=worst.worker, because=because)
    because = f"{told}, after {run.migrations} moves of at most {rules.migrations_max}: it is the job"
    return BlockRun(because=because)
