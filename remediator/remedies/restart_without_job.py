"""What every remedy does that restarts a container without a job. Pure.

It confirms before each stop. If a restart policy or an operator ends the incarnation first, nothing is stopped or
started. A container with workers is judged by their jobs.
"""

from collections.abc import Callable

from gpuwarden.evidence import ServerFacts
from gpuwarden.job import Condition
from gpuwarden.kube import pods
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
"""Checks whether local evidence alone shows a condition. Unknown values do not confirm."""


def decide(facts: Facts, *, confirm: Confirm) -> Step:
    """Return the next step of one episode."""
    free = facts.episode.free
    if free is None:
        return _consider(facts, confirm)
    if not free.over:
        return restart.next_step(
            facts,
            free,
            stop=lambda: _confirm_and_stop(facts, free, confirm),
            ended=lambda: _withdraw_close_ended(facts),
            doubted=lambda: _decide_unconfirmed(facts, free, confirm),
        )
    return restart.close(facts, free)


def _consider(facts: Facts, confirm: Confirm) -> Step:
    """Nothing is planned yet: check that it is the same incarnation, and confirm."""
    seen, accused = facts.server, facts.episode.incarnation
    if seen is None:
        return restart.wait_for_evidence(facts, Reason.NO_EVIDENCE, f"no local evidence: {facts.unknown}")
    if seen.sample_age_s > facts.limits.evidence_fresh_s:
        return restart.wait_for_evidence(
            facts, Reason.STALE_EVIDENCE, f"the exporter's newest sample is {seen.sample_age_s:.1f} s old"
        )
    if seen.container_incarnation is None:
        return _check_engine(facts)
    if seen.container_incarnation != accused:
        return Close(
            outcome=Outcome.SUPERSEDED,
            reason=Reason.REPLACED,
            message="the reported incarnation was replaced",
        )
    if seen.workers is None:
        return restart.wait_for_evidence(facts, Reason.UNCONFIRMED, "unknown whether it has workers")
    if seen.workers:
        message = f"container {seen.container} holds {seen.workers} workers: it is judged by their jobs"
        return Close(outcome=Outcome.REFUSED, reason=Reason.HAS_WORKERS, message=message)
    condition, found = reported.first_confirmed(facts.episode, lambda condition: confirm(seen, condition))
    if condition is None:
        return restart.wait_for_evidence(facts, Reason.UNCONFIRMED, f"not confirmed on this host: {found.message}")
    if not facts.container_known:
        return restart.wait_for_evidence(
            facts, Reason.NO_CONTAINER, f"the container engine does not answer: {facts.unknown}"
        )
    container = facts.container
    if container is None or _is_over(facts):
        return _close_ended(facts)
    return _begin(facts, condition, container, seen, found.message)


def _check_engine(facts: Facts) -> Step:
    """The exporter does not list the container. A listing may miss one, so the engine decides."""
    if not facts.container_known:
        message = f"the exporter does not list it and its engine does not answer: {facts.unknown or 'no engine'}"
        return restart.wait_for_evidence(facts, Reason.NO_CONTAINER, message)
    if _is_over(facts):
        return _close_ended(facts)
    return restart.wait_for_evidence(
        facts, Reason.NO_CONTAINER, "the exporter does not list it, but its engine runs it"
    )


def _is_over(facts: Facts) -> bool:
    """Whether the reported incarnation has ended, by its engine."""
    container = facts.container
    return container is None or container.incarnation != facts.episode.incarnation or not container.running


def _close_ended(facts: Facts) -> Close:
    message = f"{restart.describe_exit(facts)}: its incarnation was ended by others"
    return Close(outcome=Outcome.SUPERSEDED, reason=Reason.ENDED_ELSEWHERE, message=message)


def _begin(facts: Facts, condition: Condition, container: ContainerState, seen: ServerFacts, figures: str) -> Step:
    if not container.managed:
        message = f"container {container.name} is not managed: {container.refusal or 'nothing is done to it'}"
        return Close(outcome=Outcome.REFUSED, reason=Reason.NOT_MANAGED, message=message)
    if container.vanishes:
        message = f"container {container.name} is removed when it ends (--rm): it cannot be started again"
        return Close(outcome=Outcome.REFUSED, reason=Reason.NOT_RESTARTABLE, message=message)
    if container.paused:
        message = f"container {container.name} is paused: unpause it first"
        return restart.wait_for_evidence(facts, Reason.CONTAINER_PAUSED, message)
    if container.unstartable:
        return restart.wait_for_evidence(facts, Reason.UNSTARTABLE, restart.describe_unstartable(container))
    if not facts.armed:
        if facts.episode.dry_run_recorded:
            return Wait(reason=Reason.DRY_RUN, message="dry run: would act")
        act = f"stop {container.name} and start it"
        if container.kind == pods.KIND:
            act = f"evict the pod of {container.name}"
        return WouldAct(message=f"would {act}: {figures}")
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


def _confirm_and_stop(facts: Facts, free: Intent, confirm: Confirm) -> Step:
    found = _confirm_again(facts, free, confirm)
    figures = found.message
    if found.confirmed and not facts.armed:
        return Wait(reason=Reason.DRY_RUN, message="disarmed: nothing is stopped")
    if found.confirmed:
        return Stop(message=figures)
    if restart.timed_out(facts, facts.free_for_s):
        return Withdraw(reason=Reason.UNCONFIRMED, message=f"no longer confirmed, and nothing was done: {figures}")
    return Wait(reason=Reason.UNCONFIRMED, message=f"not stopped, because it is not confirmed now: {figures}")


def _decide_unconfirmed(facts: Facts, free: Intent, confirm: Confirm) -> Step | None:
    """Decide after a failed stop; `None` if the condition is still confirmed.

    If the engine refused the stop, the server may have recovered. Of one that is down, only processes are left.
    """
    if not restart.is_up(facts, free) and restart.doubt_container(facts) is None:
        return None
    found = _confirm_again(facts, free, confirm)
    figures = found.message
    if found.confirmed:
        return None
    if restart.timed_out(facts, facts.free_for_s):
        message = f"a stop did not end it, and it is not confirmed now: {figures}: check it by hand"
        return Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.UNCONFIRMED, message=message, unspent=True)
    return Wait(reason=Reason.UNCONFIRMED, message=f"not stopped again, because it is not confirmed now: {figures}")


def _confirm_again(facts: Facts, free: Intent, confirm: Confirm) -> Finding:
    seen = facts.server
    if seen is None:
        return Finding(doubt=Doubt.NO_EVIDENCE, message=f"no local evidence: {facts.unknown}")
    if seen.sample_age_s > facts.limits.evidence_fresh_s:
        message = f"the exporter's newest sample is {seen.sample_age_s:.1f} s old"
        return Finding(doubt=Doubt.STALE_EVIDENCE, message=message)
    if seen.container_incarnation != free.key:
        message = "the evidence is about another incarnation"
        return Finding(doubt=Doubt.OTHER_CONTAINER, message=message)
    if seen.workers != 0:
        return Finding(doubt=Doubt.HAS_WORKERS, message="it has workers, or may have")
    if (unfit := restart.doubt_container(facts)) is not None:
        return unfit
    return reported.first_confirmed(facts.episode, lambda condition: confirm(seen, condition))[1]


def _withdraw_close_ended(facts: Facts) -> Step:
    """The incarnation ended before the stop. Its owner may have meant that, so it is not started."""
    return Withdraw(reason=Reason.ENDED_ELSEWHERE, message=f"{restart.describe_exit(facts)}, before anything was done")


def gpus_of(seen: ServerFacts) -> tuple[str, ...]:
    """Return the GPUs assigned to a container and those on which it holds memory."""
    held = (
        card.gpu
        for card in seen.cards or ()
        for tenant in card.tenants
        if tenant.incarnation == seen.container_incarnation and tenant.used_bytes
    )
    return tuple(sorted({*(seen.gpus or ()), *held}))
