"""What is the same for every remedy that frees a container without a job, whatever it is accused of. Pure.

Order: confirm from the host's own exporter, write the intent, confirm and stop, see it dead, start. Where a stop did
not end it, it is confirmed again before the next. What it is about is
one incarnation of one container. Whoever else ends that incarnation first (Docker's restart policy, what restarts
unhealthy containers, a person) has settled it: nothing is stopped after them, and nothing is started. A container that
holds workers is theirs, and is judged by their jobs.
"""

from collections.abc import Callable

from gpuwarden.evidence import ServerFacts
from gpuwarden.job import Condition
from remediator.plan import (
    Advance,
    Begin,
    Close,
    ContainerState,
    Facts,
    Intent,
    Kind,
    Outcome,
    Stage,
    Step,
    Stop,
    Wait,
    Withdraw,
    WouldAct,
)
from remediator.reasons import Doubt, Finding, Reason
from remediator.remedies import reported, restart

Confirm = Callable[[ServerFacts, Condition], Finding]
"""Whether fresh local evidence shows a condition by itself. Any unknown is a no."""


def decide(facts: Facts, *, confirm: Confirm) -> Step:
    """The next step of one episode."""
    free = facts.episode.free
    if free is None:
        return _consider(facts, confirm)
    if not free.over:
        return restart.go_on(
            facts,
            free,
            stop=lambda: _stop_if_still_so(facts, free, confirm),
            ended=lambda: _ended_without_us(facts),
            doubted=lambda: _doubted(facts, free, confirm),
        )
    return restart.close(free, None)


def _consider(facts: Facts, confirm: Confirm) -> Step:
    """Nothing is promised yet: is it the same incarnation, and do we see ourselves what it is accused of?"""
    seen, accused = facts.server, facts.episode.incarnation
    if seen is None:
        return restart.doubt(facts, Reason.NO_EVIDENCE, f"no local evidence: {facts.unknown}")
    if seen.sample_age_s > facts.limits.evidence_fresh_s:
        return restart.doubt(
            facts, Reason.STALE_EVIDENCE, f"the exporter's newest look is {seen.sample_age_s:.1f} s old"
        )
    if seen.container_incarnation is None:
        return _unlisted(facts)
    if seen.container_incarnation != accused:
        return Close(
            outcome=Outcome.SUPERSEDED,
            reason=Reason.REPLACED,
            message="the incarnation that was accused has been replaced since",
        )
    if seen.workers is None:
        return restart.doubt(facts, Reason.UNCONFIRMED, "whether workers live in it is unknown")
    if seen.workers:
        message = f"container {seen.container} holds {seen.workers} workers: it is judged by their jobs"
        return Close(outcome=Outcome.REFUSED, reason=Reason.HAS_WORKERS, message=message)
    condition, found = reported.first_confirmed(facts.episode, lambda condition: confirm(seen, condition))
    if condition is None:
        return restart.doubt(facts, Reason.UNCONFIRMED, f"not confirmed on this host: {found.message}")
    if not facts.container_known:
        return restart.doubt(facts, Reason.NO_CONTAINER, f"the container engine does not answer: {facts.unknown}")
    container = facts.container
    if container is None or _is_over(facts):
        return _ended(facts)
    return _begin(facts, condition, container, seen, found.message)


def _unlisted(facts: Facts) -> Step:
    """The exporter does not list it: a listing may miss what is there, and its engine has the last word."""
    if not facts.container_known:
        message = (
            f"the exporter does not list it, and its engine does not tell: {facts.unknown or 'it cannot be asked'}"
        )
        return restart.doubt(facts, Reason.NO_CONTAINER, message)
    if _is_over(facts):
        return _ended(facts)
    return restart.doubt(facts, Reason.NO_CONTAINER, "the exporter does not list it, and its engine says that it runs")


def _is_over(facts: Facts) -> bool:
    """Whether the incarnation that was accused has ended, by its engine."""
    container = facts.container
    return container is None or container.incarnation != facts.episode.incarnation or not container.running


def _ended(facts: Facts) -> Close:
    message = f"{restart.down(facts)}: its incarnation ended without us"
    return Close(outcome=Outcome.SUPERSEDED, reason=Reason.ENDED_ELSEWHERE, message=message)


def _begin(facts: Facts, condition: Condition, container: ContainerState, seen: ServerFacts, figures: str) -> Step:
    if not container.managed:
        message = f"container {container.name} did not opt in; nothing is done to it"
        return Close(outcome=Outcome.REFUSED, reason=Reason.NOT_MANAGED, message=message)
    if container.vanishes:
        message = f"container {container.name} is removed when it ends (--rm), and could not be started again"
        return Close(outcome=Outcome.REFUSED, reason=Reason.NOT_RESTARTABLE, message=message)
    if container.paused:
        message = f"container {container.name} is paused: whoever did that goes on with it"
        return restart.doubt(facts, Reason.CONTAINER_PAUSED, message)
    if not facts.armed:
        if facts.episode.would_act:
            return Wait(reason=Reason.DRY_RUN, message="dry run: would act, and does nothing")
        return WouldAct(message=f"would stop {container.name} and start it: {figures}")
    return Begin(
        condition=condition,
        free_key=container.incarnation,
        container_kind=container.kind,
        container_handle=container.handle,
        container_name=container.name,
        settle_key=None,
        worker_incarnation="",
        message=figures,
        gpus=gpus_of(seen),
        pids=container.pids,
        cgroup=container.cgroup,
    )


def _stop_if_still_so(facts: Facts, free: Intent, confirm: Confirm) -> Step:
    """Facts are read again before the act: what is not so any more is left alone."""
    found = _still_so(facts, free, confirm)
    figures = found.message
    if found.confirmed and not facts.armed:
        return Wait(reason=Reason.DRY_RUN, message="disarmed since it began: nothing is stopped")
    if found.confirmed:
        return Stop(message=figures)
    if restart.late(facts, facts.free_for_s):
        return Withdraw(reason=Reason.UNCONFIRMED, message=f"no longer confirmed, and nothing was done: {figures}")
    return Wait(reason=Reason.UNCONFIRMED, message=f"not stopped, for it is not confirmed any more: {figures}")


def _doubted(facts: Facts, free: Intent, confirm: Confirm) -> Step | None:
    """What becomes of what a stop did not end and is not confirmed any more; `None` where it is.

    Nothing was taken from it before, as a fence takes a job: an engine that refused the stop has left a server that may
    be well by now.
    """
    found = _still_so(facts, free, confirm)
    figures = found.message
    if found.confirmed:
        return None
    if restart.late(facts, facts.free_for_s):
        message = f"a stop did not end it, and it is not confirmed any more: {figures}: a person must look"
        return Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.UNCONFIRMED, message=message, unspent=True)
    return Wait(reason=Reason.UNCONFIRMED, message=f"not stopped again, for it is not confirmed any more: {figures}")


def _still_so(facts: Facts, free: Intent, confirm: Confirm) -> Finding:
    seen = facts.server
    if seen is None:
        return Finding(doubt=Doubt.NO_EVIDENCE, message=f"no local evidence: {facts.unknown}")
    if seen.sample_age_s > facts.limits.evidence_fresh_s:
        message = f"the exporter's newest look is {seen.sample_age_s:.1f} s old"
        return Finding(doubt=Doubt.STALE_EVIDENCE, message=message)
    if seen.container_incarnation != free.key:
        message = "the evidence does not speak of the incarnation that was promised to"
        return Finding(doubt=Doubt.OTHER_CONTAINER, message=message)
    if seen.workers != 0:
        return Finding(doubt=Doubt.HAS_WORKERS, message="workers live in it, or may")
    if facts.container is not None and facts.container.paused:
        return Finding(doubt=Doubt.CONTAINER_PAUSED, message="the container is paused")
    return reported.first_confirmed(facts.episode, lambda condition: confirm(seen, condition))[1]


def _ended_without_us(facts: Facts) -> Step:
    """Nothing was done yet, and the incarnation is over: what became of it is its owner's, and is not started by us."""
    return Withdraw(reason=Reason.ENDED_ELSEWHERE, message=f"{restart.down(facts)}, before anything was done")


def gpus_of(seen: ServerFacts) -> tuple[str, ...]:
    """Those that it was given, and those on which it was seen to hold memory whatever it was given.

    Not those that it may be on for all that the driver tells: nobody could see it dead there.
    """
    held = (
        card.gpu
        for card in seen.cards or ()
        for tenant in card.tenants
        if tenant.incarnation == seen.container_incarnation and tenant.used_bytes
    )
    return tuple(sorted({*(seen.gpus or ()), *held}))
