"""Remedy `taint_node`: keep new pods away from a Kubernetes node with a faulty GPU. Pure.

A GPU is faulty while it is lost, in quarantine, or had a fatal XID. The taint is removed when the GPU works again, or
by a person. After a person removed it, the same fault does not set it again. A taint that someone else set stays.
"""

from typing import Final

from gpuwarden.job import Condition
from remediator.plan import Close, Facts, NodeFacts, Outcome, Step, Taint, Untaint, Wait, WouldAct
from remediator.reasons import Reason

CONFIRMABLE: Final = frozenset({Condition.GPU_FAULTY})
"""The condition of its alerts."""


def decide(facts: Facts) -> Step:
    """Return the next step of one episode, which is about one GPU."""
    node = facts.node
    if node is None:
        return Wait(reason=Reason.NODE_UNKNOWN, message=f"the node or its GPU is unknown: {facts.unknown}")
    begun_here = node.begun and node.tainted  # an executor may have ended before it recorded the taint
    if node.set_here or (begun_here and not node.fault):
        return _after_taint(facts, node)
    if not facts.episode.firing and not begun_here:
        message = f"the alert ended, and the node was not tainted for {facts.episode.worker}"
        return Close(outcome=Outcome.UNCONFIRMED, reason=Reason.UNCONFIRMED, message=message)
    if not node.fault:
        return Wait(reason=Reason.UNCONFIRMED, message=f"{facts.episode.worker} shows no fault now")
    if node.tainted and not node.begun and not node.others:
        message = "the node has this taint already, and gpuwarden did not set it: it stays until a person removes it"
        return Wait(reason=Reason.TAINTED_ALREADY, message=message)
    if facts.armed:
        return Taint(message=node.fault, fatal=node.fatal)
    if facts.episode.dry_run_recorded:
        return Wait(reason=Reason.DRY_RUN, message="dry run: would taint the node")
    return WouldAct(message=f"would taint the node: {node.fault}")


def _after_taint(facts: Facts, node: NodeFacts) -> Step:
    gpu, works = facts.episode.worker, node.works_for_s >= facts.limits.gpu_lost_s
    if not node.tainted:
        # An alert also ends with a failed scrape. While the fault lasts, a new episode would set the taint again.
        if works or not (facts.episode.firing or node.fault):
            return Close(outcome=Outcome.FIXED, reason=Reason.DONE, message="the node has no taint any more")
        message = "a person removed the taint: it is not set again for this fault"
        return Wait(reason=Reason.TAINT_REMOVED, message=message)
    if not works:
        why = (
            node.fault
            or node.doubt
            or f"{gpu} has worked for {node.works_for_s:.0f} s of {facts.limits.gpu_lost_s:.0f}"
        )
        return Wait(reason=Reason.NODE_TAINTED, message=f"{why}; `gpuwarden seats untaint` removes the taint")
    if node.others:
        message = f"{gpu} works again; the taint stays for {', '.join(node.others)}"
        return Close(outcome=Outcome.FIXED, reason=Reason.DONE, message=message)
    if not facts.armed:
        message = f"{gpu} works again; arm the remedy, or `gpuwarden seats untaint`"
        return Wait(reason=Reason.DRY_RUN, message=message)
    return Untaint(message=f"{gpu} has worked for {node.works_for_s:.0f} s")
