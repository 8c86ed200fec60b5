"""The conditions of containers without a job, and whether local evidence shows one: the table `CONDITIONS`. Pure.

Any unknown is a no: an absent figure never counts as idle. To add a condition: a function here, its line in the table,
its rows in the test.
"""

from collections.abc import Callable, Mapping
from typing import Final

from gpuwarden import conditions
from gpuwarden.evidence import ServerFacts
from gpuwarden.job import Condition
from remediator.reasons import Doubt, Finding


def confirm(seen: ServerFacts, condition: Condition) -> Finding:
    """Whether fresh local evidence shows the condition by itself."""
    check = CONDITIONS.get(condition)
    if check is None:
        return Finding(doubt=Doubt.NO_CONDITION, message=f"no local evidence is defined for trip {condition}")
    return check(seen)


def _unanswering(seen: ServerFacts) -> Finding:
    """A server that is asked, does not answer, and does nothing.

    Asked without an answer, every GPU idle, RAM and I/O still, each for the whole silence that its owner allows; and it
    has answered before, in this incarnation. CPU time counts for nothing: what hangs in a driver may well spin.
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
    if seen.ram_idle_s is None:
        return Finding(doubt=Doubt.RAM_UNKNOWN, message=f"RAM unknown: {seen.ram_unknown or 'not measured'}")
    if seen.io_idle_s is None:
        return Finding(doubt=Doubt.WORK_UNKNOWN, message=f"I/O unknown: {seen.work_unknown or 'not measured'}")
    figures = (
        f"unanswered for {seen.unanswered_s:.1f} s by its {seen.probe} probe, GPU idle {seen.gpu_idle_s:.1f} s, "
        f"RAM still {seen.ram_idle_s:.1f} s, I/O still {seen.io_idle_s:.1f} s of {silence_s:.1f} s allowed"
    ) + (", simulated GPU" if seen.gpu_simulated else "")
    inactive_s = conditions.least(seen.unanswered_s, seen.gpu_idle_s, seen.ram_idle_s, seen.io_idle_s)
    return Finding.of(conditions.reached(inactive_s, silence_s), figures)


CONDITIONS: Final[Mapping[Condition, Callable[[ServerFacts], Finding]]] = {
    Condition.SERVER: _unanswering,
}
"""Each trip of an alert about a container without a job, and what its local evidence must show."""
