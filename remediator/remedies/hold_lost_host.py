"""Remedy `hold_lost_host`: mark the jobs of a silent host as lost. No other worker runs them then. Pure.

The jobs may still run. A job is lost if its worker was heard once, and not since the limit. A central gateway must have
marked its host as lost; without one its executor must be silent. A remediator that sees most hosts silent marks
nothing. A job runs again with the first sign of life.
"""

from collections.abc import Sequence
from typing import Final

from gpuwarden.job import Condition, State
from remediator.plan import Close, Facts, HeldJob, HostFacts, Lose, Outcome, Return, Step, Wait, WouldAct
from remediator.reasons import Reason

CONFIRMABLE: Final = frozenset({Condition.HOST_LOST})
"""The condition of its alerts."""


def decide(facts: Facts) -> Step:
    """Return the next step of one episode; any host's remediator may do so."""
    host = facts.host
    if host is None:
        return Wait(reason=Reason.QUEUE_UNREACHABLE, message=f"its jobs are unknown: {facts.unknown}")
    if not facts.episode.firing:
        return _after_alert(facts, host)
    bound_s = facts.limits.host_lost_after_s
    lost = _jobs_in(host, State.HOST_LOST)
    if host.shows_life and lost:  # the end of the alert may never arrive
        return _mark_returned(facts, lost)
    if host.shows_life:
        return Wait(
            reason=Reason.EXECUTOR_ALIVE,
            message="its own remediator or the gateway hears it: only its exporter or the network is silent",
        )
    doubt = _doubt(host, bound_s)
    if doubt is not None:
        return doubt
    due = tuple(each for each in _jobs_in(host, State.RUNNING) if _is_due(each, bound_s))
    if not due:
        return _wait_for_due(host)
    message = f"no sign of {facts.episode.host} for {bound_s:.0f} s or longer: {_describe_jobs(due)}"
    if facts.armed:
        return Lose(jobs=due, message=f"{message}; marked lost, not requeued: they may still run")
    if facts.episode.dry_run_recorded:
        return Wait(reason=Reason.DRY_RUN, message="dry run: would hold its jobs")
    return WouldAct(message=f"would hold its jobs as those of a lost host: {message}")


def _doubt(host: HostFacts, bound_s: float) -> Wait | None:
    """Why it is not certain that the host is silent. A central gateway decides, or without one the ledger."""
    if host.lost:
        return None
    if host.lost is not None:
        message = "the central gateway has not marked the host as lost: see `gpuwarden host list`"
        return Wait(reason=Reason.OBSERVATION_TOO_SHORT, message=message)
    if host.silent_for_s < bound_s:
        message = f"its own remediator must be silent for {bound_s:.0f} s too, while this one runs"
        return Wait(reason=Reason.OBSERVATION_TOO_SHORT, message=message)
    if host.accused > host.alive:
        message = (
            f"{host.accused} hosts are reported silent and {host.alive} are alive: this remediator may be cut off; "
            "check the network. The leases of the jobs continue"
        )
        return Wait(reason=Reason.MAJORITY_SILENT, message=message)
    return None


def _after_alert(facts: Facts, host: HostFacts) -> Step:
    """The alert has ended. That alone proves nothing: a Prometheus that restarts or is gone ends it too."""
    lost = _jobs_in(host, State.HOST_LOST)
    if not lost:
        if host.taken:
            return Close(outcome=Outcome.FIXED, reason=Reason.DONE, message="no job of the host is lost now")
        message = "the alert ended, and no job of the host was marked lost"
        return Close(outcome=Outcome.UNCONFIRMED, reason=Reason.NO_JOBS, message=message)
    return _mark_returned(facts, lost) if host.shows_life else _wait_for_lost(lost)


def _mark_returned(facts: Facts, lost: Sequence[HeldJob]) -> Step:
    if not facts.armed:
        message = f"it is back; arm the remedy to mark its jobs running: {_describe_jobs(lost)}"
        return Wait(reason=Reason.DRY_RUN, message=message)
    message = f"{facts.episode.host} is back: {_describe_jobs(lost)}; each has one lease to be heard of"
    return Return(jobs=tuple(lost), message=message)


def _wait_for_due(host: HostFacts) -> Step:
    lost, running = _jobs_in(host, State.HOST_LOST), _jobs_in(host, State.RUNNING)
    if running:
        message = f"not marked lost, because they were heard of lately or never: {_describe_jobs(running)}"
        return Wait(reason=Reason.WORKERS_ALIVE, message=message)
    return _wait_for_lost(lost) if lost else Wait(reason=Reason.NO_JOBS, message="it has no job that could be lost")


def _wait_for_lost(lost: Sequence[HeldJob]) -> Step:
    message = (
        f"held until they are heard of, or until the lease for lost jobs ends: {_describe_jobs(lost)}; "
        "`gpuwarden job cancel` gives one up; its process may still run"
    )
    return Wait(reason=Reason.JOBS_HELD, message=message)


def _jobs_in(host: HostFacts, state: State) -> tuple[HeldJob, ...]:
    return tuple(each for each in host.jobs if each.state is state)


def _is_due(job: HeldJob, bound_s: float) -> bool:
    """Whether its worker was heard of, and not since the limit."""
    return job.heard_s_ago is not None and job.heard_s_ago >= bound_s


def _describe_jobs(jobs: Sequence[HeldJob]) -> str:
    return ", ".join(f"job {each.job_id} (attempt {each.attempt}, {_describe_age(each)})" for each in jobs)


def _describe_age(job: HeldJob) -> str:
    return "never heard of" if job.heard_s_ago is None else f"heard of {job.heard_s_ago:.0f} s ago"
