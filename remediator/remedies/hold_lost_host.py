"""Remedy `hold_lost_host`: hold the jobs of a silent host for it, since they may still run there. Pure.

A silent host cannot be asked, so nothing on it is touched. What is asked instead is everyone who may have heard of it:
its own remediator through the ledger, its workers through the queue. A job is taken for lost only where none of them
was heard for the whole bound, and only if it was ever heard of. It comes back with the first that is heard of it; the
lease that its queue sets for lost jobs, or a person, is what may give it away.

Whoever sees most of the fleet silent is blind itself, and takes nothing for lost.
"""

from collections.abc import Sequence
from typing import Final

from gpuwarden.job import Condition, State
from remediator.plan import Close, Facts, HeldJob, HostFacts, Lose, Outcome, Return, Step, Wait, WouldAct
from remediator.reasons import Reason

CONFIRMABLE: Final = frozenset({Condition.HOST_LOST})
"""The trip of its alerts; there is no local evidence to confirm another by."""


def decide(facts: Facts) -> Step:
    """The next step of one episode, by whichever host's remediator looks at it."""
    host = facts.host
    if host is None:
        return Wait(reason=Reason.QUEUE_UNREACHABLE, message=f"which jobs it has is unknown: {facts.unknown}")
    if not facts.episode.firing:
        return _over(facts, host)
    bound_s = facts.limits.host_lost_after_s
    lost = _in(host, State.HOST_LOST)
    if host.shows_life and lost:  # whatever its alert says: that it has ended may never arrive
        return _back(facts, lost)
    if host.shows_life:
        return Wait(
            reason=Reason.EXECUTOR_ALIVE,
            message="its own remediator shows life: what is silent is its exporter, or the way",
        )
    if host.silent_for_s < bound_s:
        message = f"its own remediator is to be silent for {bound_s:.0f} s as well, while this one looks on"
        return Wait(reason=Reason.OBSERVATION_TOO_SHORT, message=message)
    if host.accused > host.alive:
        message = (
            f"{host.accused} hosts are said to be silent and {host.alive} show life: whoever says so may be cut off, "
            "or a person must look; the leases of their jobs go on"
        )
        return Wait(reason=Reason.MAJORITY_SILENT, message=message)
    due = tuple(each for each in _in(host, State.RUNNING) if _is_due(each, bound_s))
    if not due:
        return _nothing_due(host)
    message = f"no word of {facts.episode.host} for {bound_s:.0f} s or longer: {_told(due)}"
    if facts.armed:
        return Lose(jobs=due, message=f"{message}; held for it, for they may run still")
    if facts.episode.would_act:
        return Wait(reason=Reason.DRY_RUN, message="dry run: would hold its jobs, and does nothing")
    return WouldAct(message=f"would hold its jobs as those of a lost node: {message}")


def _over(facts: Facts, host: HostFacts) -> Step:
    """The alert has ended. That alone brings nobody back: a Prometheus that forgets, or is gone, ends it as well."""
    lost = _in(host, State.HOST_LOST)
    if not lost:
        if host.taken:
            return Close(outcome=Outcome.MENDED, reason=Reason.DONE, message="none of its jobs is lost any more")
        message = "the alert ended, and none of its jobs was taken for lost"
        return Close(outcome=Outcome.UNCONFIRMED, reason=Reason.NO_JOBS, message=message)
    return _back(facts, lost) if host.shows_life else _held(lost)


def _back(facts: Facts, lost: Sequence[HeldJob]) -> Step:
    if not facts.armed:
        return Wait(reason=Reason.DRY_RUN, message=f"it is back, and once armed its jobs run again: {_told(lost)}")
    message = f"{facts.episode.host} is back: {_told(lost)}; each has the time of a lease to be heard of"
    return Return(jobs=tuple(lost), message=message)


def _nothing_due(host: HostFacts) -> Step:
    lost, running = _in(host, State.HOST_LOST), _in(host, State.RUNNING)
    if running:
        message = f"not taken for lost, for they were heard of, or never were: {_told(running)}"
        return Wait(reason=Reason.WORKERS_ALIVE, message=message)
    return _held(lost) if lost else Wait(reason=Reason.NO_JOBS, message="it has no job that could be lost")


def _held(lost: Sequence[HeldJob]) -> Step:
    message = (
        f"held until they are heard of, or their queue's time for lost jobs is over: {_told(lost)}; "
        "`gpuwarden job cancel` gives one up, whose process may run still"
    )
    return Wait(reason=Reason.JOBS_HELD, message=message)


def _in(host: HostFacts, state: State) -> tuple[HeldJob, ...]:
    return tuple(each for each in host.jobs if each.state is state)


def _is_due(job: HeldJob, bound_s: float) -> bool:
    """Whether its worker has been heard of, and not since the bound."""
    return job.heard_s_ago is not None and job.heard_s_ago >= bound_s


def _told(jobs: Sequence[HeldJob]) -> str:
    return ", ".join(f"job {each.job_id} (attempt {each.attempt}, {_heard(each)})" for each in jobs)


def _heard(job: HeldJob) -> str:
    return "never heard of" if job.heard_s_ago is None else f"heard of {job.heard_s_ago:.0f} s ago"
