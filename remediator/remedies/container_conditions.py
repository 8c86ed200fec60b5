"""Conditions of containers without a job: the table `CONDITIONS`. Pure. An unknown value never confirms."""

from collections.abc import Callable, Mapping
from typing import Final

from gpuwarden import conditions
from gpuwarden.evidence import ServerFacts
from gpuwarden.job import Condition
from remediator.reasons import Doubt, Finding


def confirm(seen: ServerFacts, condition: Condition) -> Finding:
    """Check whether local evidence alone shows the condition."""
    check = CONDITIONS.get(condition)
    if check is None:
        return Finding(doubt=Doubt.NO_CONDITION, message=f"no local evidence is defined for condition {condition}")
    return check(seen)


def _check_server(seen: ServerFacts) -> Finding:
    """A server that answers no probe and does nothing.

    Its probe, its GPUs, RAM, I/O and page faults must all be inactive for the stall timeout of its owner, and it must
    have answered before in this incarnation. CPU time does not count: a process that hangs in a driver may spin.
    """
    silence_s = seen.restart_after_s
    if not seen.probe or not silence_s:
        message = f"no probe of the server: {seen.probe_unknown or 'its labels set none'}"
        return Finding(doubt=Doubt.NOT_PROBED, message=message)
    if not seen.answered:
        message = "it has not answered yet in this incarnation: it may still load, or its probe may be wrong"
        return Finding(doubt=Doubt.NEVER_ANSWERED, message=message)
    if seen.probe_failing_s is None:
        message = f"its probe result is unknown: {seen.probe_unknown or 'not probed'}"
        return Finding(doubt=Doubt.ANSWER_UNKNOWN, message=message)
    if seen.gpu_idle_s is None:
        return Finding(doubt=Doubt.GPU_UNKNOWN, message=f"GPU unknown: {seen.gpu_unknown or 'not measured'}")
    if seen.ram_idle_s is None:
        return Finding(doubt=Doubt.RAM_UNKNOWN, message=f"RAM unknown: {seen.ram_unknown or 'not measured'}")
    if seen.io_idle_s is None:
        return Finding(doubt=Doubt.WORK_UNKNOWN, message=f"I/O unknown: {seen.work_unknown or 'not measured'}")
    if seen.server_fault_idle_s is None:
        return Finding(doubt=Doubt.WORK_UNKNOWN, message=f"page faults unknown: {seen.work_unknown or 'not measured'}")
    figures = (
        f"unanswered for {seen.probe_failing_s:.1f} s by its {seen.probe} probe, GPU idle {seen.gpu_idle_s:.1f} s, "
        f"RAM still {seen.ram_idle_s:.1f} s, I/O still {seen.io_idle_s:.1f} s, page faults still "
        f"{seen.server_fault_idle_s:.1f} s of {silence_s:.1f} s allowed"
    ) + (", simulated GPU" if seen.gpu_simulated else "")
    inactive_s = conditions.least(
        seen.probe_failing_s, seen.gpu_idle_s, seen.ram_idle_s, seen.io_idle_s, seen.server_fault_idle_s
    )
    return Finding.of(conditions.reached(inactive_s, silence_s), figures)


CONDITIONS: Final[Mapping[Condition, Callable[[ServerFacts], Finding]]] = {
    Condition.SERVER: _check_server,
}
