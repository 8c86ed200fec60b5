"""Remedy `wrangle`: is it the worker that is faulty, or the job? Decided from how a run's items went on each. Pure.

Nothing is judged before one worker that has finished none of the run's items has failed more than `activation` of them.
Whoever finishes items beside it proves that worker faulty; where nobody finishes any, those who run the job beside it
tell; and where nobody does, the job is moved to a worker that has not had it. One verdict at a time: it is carried out,
and the run is counted anew.

An episode is one run, on the host whose worker an alert accuses. That host's executor carries out what is decided about
its own workers and about the run; what is decided about another host's worker waits for that one's. Where others finish
items, no worker that is faulty waits for another one: each host's executor has its own for a first. The alert is what
has a run looked at, and its end alone is no recovery: the queue is asked.
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
"""The trip of its alerts; the queue is the evidence."""

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
    timeout_s: float = PATIENCE_S


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Nobody is accused, or nobody may be judged."""

    message: str
    about: str = ""


Verdict = Leave | Wait | Wrangle


def decide(facts: Facts) -> Step:
    """The next step of one episode, by the executor of the host that it is on."""
    found = facts.run
    if found is None:
        return Wait(reason=Reason.QUEUE_UNREACHABLE, message=f"how its items went is unknown: {facts.unknown}")
    if found.tally is None:
        return _nothing(
            facts, found, Wait(reason=Reason.NO_RUN, message=f"the queue has no run {facts.episode.worker!r}")
        )
    verdict = judge(found.tally, rules(facts.limits), host=facts.episode.host)
    if isinstance(verdict, Wait):
        return verdict
    if isinstance(verdict, Leave):
        return _nothing(facts, found, Wait(reason=Reason.NO_FAULT_FOUND, message=verdict.message, about=verdict.about))
    if not isinstance(verdict, BlockRun) and verdict.host != facts.episode.host:
        message = f"{verdict.worker} on {verdict.host} comes first, and is for the executor there: {verdict.message}"
        return _nothing(facts, found, Wait(reason=Reason.OTHER_WORKER_FAULTY, message=message, about=verdict.deed))
    if facts.armed:
        return verdict
    if facts.episode.would_act:
        message = f"dry run: would {verdict.deed}, and does nothing"
        return Wait(reason=Reason.DRY_RUN, message=message, about=verdict.deed)
    return WouldAct(message=f"would {verdict.deed}: {verdict.message}")


def _nothing(facts: Facts, found: RunFacts, wait: Wait) -> Step:
    """Nothing is to be done now. While the alert fires that may change; then it is over."""
    if facts.episode.firing:
        return wait
    if found.done:
        return Close(outcome=Outcome.MENDED, reason=Reason.DONE, message=f"the alert ended: {wait.message}")
    if found.decided:
        message = "what was decided may have been done: `gpuwarden worker list` and `gpuwarden job list` tell"
        return Close(outcome=Outcome.PARTLY, reason=Reason.NOT_RECORDED, message=f"the alert ended, and {message}")
    message = f"the alert ended, and nothing was done: {wait.message}"
    return Close(outcome=Outcome.UNCONFIRMED, reason=wait.reason, message=message)


def rules(limits: Limits) -> Rules:
    """The constants, from the settings."""
    return Rules(
        activation=limits.wrangle_activation,
        migrations_max=limits.wrangle_migrations_max,
        timeout_s=limits.wrangle_timeout_s,
    )


def stands(run: RunTally, verdict: Wrangle, rules: Rules) -> bool:
    """Whether the same is decided about the same; the figures may have grown."""
    host = None if isinstance(verdict, BlockRun) else verdict.host
    found = judge(run, rules, host=host)
    return not isinstance(found, Leave | Wait) and found.deed == verdict.deed


def judge(run: RunTally, rules: Rules, *, host: str | None = None) -> Verdict:
    """What is to become of a run and its workers now, for a host's executor or, with no host, for a person.

    Of workers that are faulty by themselves the worst of those that it may lock comes first; a run has one worst.
    """
    if (kept_from := _kept_from(run)) is not None:
        return Leave(message=kept_from, about=kept_from)
    accused = [each for each in run.workers if each.done == 0 and each.failed > rules.activation]
    if not accused:
        return Leave(message=f"no worker has failed more than {rules.activation} of its items and finished none")
    done = sum(each.done for each in run.workers)
    if done:
        may_lock = [each for each in accused if each.spent is None and host in (None, each.host)]
        worst = max(may_lock or accused, key=_guilt)
        message = f"{worst} has failed {worst.failed} items and finished none, and others have finished {done}"
        return _if_not_spent(worst, LockWorker(host=worst.host, worker=worst.worker, message=message))
    if run.unsettled:
        message = f"{run.unsettled} of its jobs are fenced or on hosts that seem lost: who runs them is not known"
        return Wait(reason=Reason.JOBS_IN_DOUBT, message=message)
    at_it = [each for each in accused if each.runs_for_s is not None]
    if not at_it:
        worst = max(accused, key=_guilt)
        message = f"nobody has finished any, and {worst}, which failed {worst.failed}, runs it no more"
        return Leave(message=message, about=str(worst))
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
        message = f"{told}; the {len(others)} that run it beside fail too"
        return BlockRun(message=message)
    patient = [each for each in silent if (each.runs_for_s or 0.0) >= rules.timeout_s]
    if not patient:
        message = f"{told}; {silent[0]} has neither finished nor failed one yet, in less than {rules.timeout_s:.0f} s"
        return Wait(reason=Reason.INSUFFICIENT_DATA, message=message, about=str(worst))
    message = f"{told}; {patient[0]}, which runs it as well, has failed none in {rules.timeout_s:.0f} s or more"
    return _if_not_spent(worst, LockWorker(host=worst.host, worker=worst.worker, message=message))


def _alone(run: RunTally, worst: WorkerTally, rules: Rules) -> Verdict:
    """Nobody else runs it now."""
    told = f"nobody has finished any, and {worst}, alone with it, has failed {worst.failed} items"
    if run.migrations < rules.migrations_max:
        message = f"{told}; move {run.migrations + 1} of {rules.migrations_max}, to a worker that has not had it"
        return _if_not_spent(worst, Migrate(host=worst.host, worker=worst.worker, message=message))
    message = f"{told}, after {run.migrations} moves of at most {rules.migrations_max}: it is the job"
    return BlockRun(message=message)


def _if_not_spent(worst: WorkerTally, verdict: LockWorker | Migrate) -> Verdict:
    """What is at a cap would fail for being taken from its worker, and its run with it."""
    if worst.spent is None:
        return verdict
    return Wait(reason=Reason.ATTEMPTS_EXHAUSTED, message=f"{verdict.message}; but {worst.spent}", about=verdict.deed)
