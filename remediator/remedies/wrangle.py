"""Remedy `wrangle`: decide whether a worker or a job is faulty, by the results of a run's items. Pure.

1. A worker must have failed more than `activation` items of the run and finished none.
2. If other workers finish items, the worker is faulty.
3. If no worker finishes any, the other workers that run the job now decide.
4. If no other worker runs the job, it is moved to a worker that has not had it.

Each host's executor acts on its own workers and on the run.
"""

from dataclasses import dataclass
from typing import Final

from gpuwarden.job import Condition
from gpuwarden.queue.items.tally import RunTally, WorkerTally
from remediator.plan import (
    BlockRun,
    Close,
    Facts,
    Limits,
    LockWorker,
    Migrate,
    Outcome,
    RunFacts,
    Step,
    Wait,
    WouldAct,
    Wrangle,
)
from remediator.reasons import Reason

CONFIRMABLE: Final = frozenset({Condition.ITEMS})
"""The condition of its alerts; the queue is the evidence."""

ACTIVATION: Final = 5
"""A worker may fail this many items of a run before it is judged (B1)."""

MIGRATIONS_MAX: Final = 3
"""Moves of a run before the run itself is faulty (B5). Four workers have tried it then."""

TIMEOUT_S: Final = 1800.0
"""After this time without a finished or failed item a worker is not failing, seconds (B4)."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The limits that decide."""

    activation: int = ACTIVATION
    migrations_max: int = MIGRATIONS_MAX
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class NoAction:
    """No worker and no run is faulty."""

    message: str
    about: str = ""


Verdict = NoAction | Wait | Wrangle


def decide(facts: Facts) -> Step:
    """Return the next step of one episode; the host's executor calls it."""
    found = facts.run
    if found is None:
        return Wait(reason=Reason.QUEUE_UNREACHABLE, message=f"its item results are unknown: {facts.unknown}")
    if found.tally is None:
        return _wait_or_close(
            facts, found, Wait(reason=Reason.NO_RUN, message=f"the queue has no run {facts.episode.worker!r}")
        )
    verdict = classify(found.tally, rules(facts.limits), host=facts.episode.host)
    if isinstance(verdict, Wait):
        return verdict
    if isinstance(verdict, NoAction):
        return _wait_or_close(
            facts, found, Wait(reason=Reason.NO_FAULT_FOUND, message=verdict.message, about=verdict.about)
        )
    if not isinstance(verdict, BlockRun) and verdict.host != facts.episode.host:
        message = f"{verdict.worker} on {verdict.host} comes first; the executor there acts on it: {verdict.message}"
        return _wait_or_close(
            facts, found, Wait(reason=Reason.OTHER_WORKER_FAULTY, message=message, about=verdict.deed)
        )
    if facts.armed:
        return verdict
    if facts.episode.dry_run_recorded:
        message = f"dry run: would {verdict.deed}"
        return Wait(reason=Reason.DRY_RUN, message=message, about=verdict.deed)
    return WouldAct(message=f"would {verdict.deed}: {verdict.message}")


def _wait_or_close(facts: Facts, found: RunFacts, wait: Wait) -> Step:
    """Wait while the alert fires, close when it ends."""
    if facts.episode.firing:
        return wait
    if found.done:
        return Close(outcome=Outcome.FIXED, reason=Reason.DONE, message=f"the alert ended: {wait.message}")
    if found.decided:
        message = "the verdict may have been carried out: check `gpuwarden worker list` and `gpuwarden job list`"
        return Close(outcome=Outcome.PARTLY, reason=Reason.NOT_RECORDED, message=f"the alert ended; {message}")
    message = f"the alert ended; nothing was done: {wait.message}"
    return Close(outcome=Outcome.UNCONFIRMED, reason=wait.reason, message=message)


def rules(limits: Limits) -> Rules:
    """Return the limits of the settings."""
    return Rules(
        activation=limits.wrangle_activation,
        migrations_max=limits.wrangle_migrations_max,
        timeout_s=limits.wrangle_timeout_s,
    )


def still_valid(run: RunTally, verdict: Wrangle, rules: Rules) -> bool:
    """Whether the verdict is still the same; the counts may have grown."""
    host = None if isinstance(verdict, BlockRun) else verdict.host
    found = classify(run, rules, host=host)
    return not isinstance(found, NoAction | Wait) and found.deed == verdict.deed


def classify(run: RunTally, rules: Rules, *, host: str | None = None) -> Verdict:
    """Decide about a run and its workers.

    Faulty workers of `host` come first; `None` is for an operator.
    """
    if (skip_reason := _reason_to_skip(run)) is not None:
        return NoAction(message=skip_reason, about=skip_reason)
    accused = [each for each in run.workers if each.done == 0 and each.failed > rules.activation]
    if not accused:
        return NoAction(message=f"no worker has failed more than {rules.activation} of its items and finished none")
    done = sum(each.done for each in run.workers)
    if done:
        may_lock = [each for each in accused if each.spent is None and host in (None, each.host)]
        worst = max(may_lock or accused, key=_failure_rank)
        message = f"{worst} has failed {worst.failed} items and finished none, and others have finished {done}"
        return _unless_exhausted(worst, LockWorker(host=worst.host, worker=worst.worker, message=message))
    if run.unsettled:
        message = f"{run.unsettled} of its jobs are fenced or on lost hosts: their workers are unknown"
        return Wait(reason=Reason.JOBS_IN_DOUBT, message=message)
    running = [each for each in accused if each.runs_for_s is not None]
    if not running:
        worst = max(accused, key=_failure_rank)
        message = f"no worker has finished any, and {worst}, which failed {worst.failed}, no longer runs it"
        return NoAction(message=message, about=str(worst))
    worst = max(running, key=_failure_rank)
    others = [each for each in run.workers if each.runs_for_s is not None and each is not worst]
    return _compare_workers(worst, others, rules) if others else _move_or_block(run, worst, rules)


def _reason_to_skip(run: RunTally) -> str | None:
    if not run.asked:
        return f"wrangling is off: `gpuwarden wrangle enable {run.run_id}` starts it"
    if run.over:
        return "it has ended"
    if run.ranked:
        return "it has jobs of several ranks, which end together: decide by hand"
    return None


def _failure_rank(worker: WorkerTally) -> tuple[int, str, str]:
    """Sort key: most failures, then name, so that two executors agree."""
    return worker.failed, worker.host, worker.worker


def _compare_workers(worst: WorkerTally, others: list[WorkerTally], rules: Rules) -> Verdict:
    summary = f"no worker has finished any, and {worst} has failed {worst.failed} items"
    unfailed = [each for each in others if each.failed == 0]
    if not unfailed:
        message = f"{summary}; the {len(others)} others that run it fail too"
        return BlockRun(message=message)
    proven = [each for each in unfailed if (each.runs_for_s or 0.0) >= rules.timeout_s]
    if not proven:
        message = f"{summary}; {unfailed[0]} has no result yet, in less than {rules.timeout_s:.0f} s"
        return Wait(reason=Reason.INSUFFICIENT_DATA, message=message, about=str(worst))
    message = f"{summary}; {proven[0]}, which runs it as well, has failed none in {rules.timeout_s:.0f} s or more"
    return _unless_exhausted(worst, LockWorker(host=worst.host, worker=worst.worker, message=message))


def _move_or_block(run: RunTally, worst: WorkerTally, rules: Rules) -> Verdict:
    summary = f"no worker has finished any, and {worst}, the only one that runs it, has failed {worst.failed} items"
    if run.migrations < rules.migrations_max:
        message = f"{summary}; move {run.migrations + 1} of {rules.migrations_max}, to a worker that has not had it"
        return _unless_exhausted(worst, Migrate(host=worst.host, worker=worst.worker, message=message))
    message = f"{summary}, after {run.migrations} moves of at most {rules.migrations_max}: the job is faulty"
    return BlockRun(message=message)


def _unless_exhausted(worst: WorkerTally, verdict: LockWorker | Migrate) -> Verdict:
    """A job at a limit would fail if it were taken from its worker, and its run with it: wait."""
    if worst.spent is None:
        return verdict
    return Wait(reason=Reason.ATTEMPTS_EXHAUSTED, message=f"{verdict.message}; but {worst.spent}", about=verdict.deed)
