"""Remedy `restart_container`: free the container of a server that is asked and does not answer. Pure."""

from typing import Final

from gpuwarden import conditions
from gpuwarden.evidence import ServerFacts
from gpuwarden.job import Trip
from remediator.plan import Facts, Step
from remediator.reasons import Doubt, Finding
from remediator.remedies import restart_without_job

TRIPS: Final = frozenset({Trip.SERVER})
"""The trips that `confirm` can confirm; an alert with another is refused at the door."""


def decide(facts: Facts) -> Step:
    """The next step of one episode."""
    return restart_without_job.decide(facts, trip=Trip.SERVER, confirm=confirm)


def confirm(seen: ServerFacts) -> Finding:
    """Whether fresh local evidence shows a server that does nothing.

    Asked without an answer, every GPU idle, RAM and I/O still, each for the whole silence that its owner allows; and it
    has answered before, in this incarnation. Any unknown is a no. CPU time counts for nothing: what hangs in a driver
    may well spin.
    """
    silence_s = seen.silence_allowed_s
    if not seen.probe or not silence_s:
        message = f"it is not asked as a server: {seen.probe_unknown or 'its labels ask for nothing'}"
        return Finding(doubt=Doubt.NOT_PROBED, message=message)
    if not seen.answered:
        message = "it has not answered yet in this incarnation: it may still load, or its probe may be wrong"
        return Finding(doubt=Doubt.NEVER_ANSWERED, message=message)
    if seen.unanswered_s is None:
        message = f"whether it answers is unknown: {seen.probe_unknown or 'not asked'}"
        return Finding(doubt=Doubt.ANSWER_UNKNOWN, message=message)
    if seen.gpu_idle_s is None:
        return Finding(doubt=Doubt.GPU_UNKNOWN, message=f"GPU unknown: {seen.gpu_unknown or 'not measured'}")
    if seen.ram_still_s is None:
        return Finding(doubt=Doubt.RAM_UNKNOWN, message=f"RAM unknown: {seen.ram_unknown or 'not measured'}")
    if seen.io_still_s is None:
        return Finding(doubt=Doubt.WORK_UNKNOWN, message=f"I/O unknown: {seen.work_unknown or 'not measured'}")
    figures = (
        f"unanswered for {seen.unanswered_s:.1f} s by its {seen.probe} probe, GPU idle {seen.gpu_idle_s:.1f} s, "
        f"RAM still {seen.ram_still_s:.1f} s, I/O still {seen.io_still_s:.1f} s of {silence_s:.1f} s allowed"
    ) + (", simulated GPU" if seen.gpu_simulated else "")
    quiet_s = conditions.least(seen.unanswered_s, seen.gpu_idle_s, seen.ram_still_s, seen.io_still_s)
    return Finding.of(conditions.reached(quiet_s, silence_s), figures)
