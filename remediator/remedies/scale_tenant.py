"""Remedy `scale_tenant`: start a tenant on demand when its GPU has room, and stop it when memory is short. Pure.

The engine says whether the tenant is on; the exporter says for how long its GPU has had room or been short. It keeps
its state for the minimum time, also after a person scaled it. Unknown memory is not room, unknown use is not idle.
"""

from collections.abc import Mapping
from typing import Final

from gpuwarden import conditions
from gpuwarden.evidence import OnDemandFacts, OnDemandGpuFacts
from gpuwarden.job import Condition
from remediator.plan import Close, ContainerState, Facts, Outcome, Scale, Step, Wait, WouldAct
from remediator.reasons import Doubt, Finding, Reason

CONFIRMABLE: Final = frozenset({Condition.DEMAND_UP, Condition.DEMAND_DOWN})
"""The conditions of its alerts."""

RETRY_S: Final = 300.0
"""Time between two tries, seconds."""

MIB: Final = 2**20

_ACT: Final[Mapping[bool, str]] = {True: "start", False: "stop"}


def decide(facts: Facts) -> Step:
    """Return the next step of one episode."""
    container, seen = facts.container, facts.on_demand
    if facts.forbidden:
        return _wait(facts, Reason.SCALE_FORBIDDEN, facts.forbidden)
    if seen is None:
        return _wait(facts, Reason.NO_EVIDENCE, f"no local evidence: {facts.unknown}")
    if not facts.container_known:
        return _wait(facts, Reason.ENGINE_UNREACHABLE, f"unknown whether it is on: {facts.unknown}")
    if container is None:
        return Close(outcome=Outcome.SUPERSEDED, reason=Reason.CONTAINER_GONE, message="it does not exist any more")
    if facts.scaled_on is container.running:
        message = f"{container.name} is {_state(container.running)}"
        return Close(outcome=Outcome.FIXED, reason=Reason.DONE, message=message)
    if (Condition.DEMAND_DOWN if container.running else Condition.DEMAND_UP) not in _reported(facts):
        message = f"{container.name} is {_state(container.running)} already: someone else scaled it"
        return Close(outcome=Outcome.SUPERSEDED, reason=Reason.SCALED_ELSEWHERE, message=message)
    if seen.sample_age_s > facts.limits.evidence_fresh_s:
        message = f"the exporter's newest sample is {seen.sample_age_s:.1f} s old"
        return _wait(facts, Reason.STALE_EVIDENCE, message)
    found = confirm(seen, on=not container.running)
    if not found.confirmed:
        return _wait(facts, Reason.UNCONFIRMED, f"not confirmed on this host: {found.message}")
    return _refuse(facts, container) or _act(facts, container, seen, found.message)


def _reported(facts: Facts) -> frozenset[Condition]:
    return facts.episode.conditions or frozenset({facts.episode.condition})


def _refuse(facts: Facts, container: ContainerState) -> Step | None:
    if not container.managed:
        message = f"{container.name} is not managed: {container.refusal or 'set its label gpuwarden.managed=true'}"
        return Close(outcome=Outcome.REFUSED, reason=Reason.NOT_MANAGED, message=message)
    if container.paused:
        return _wait(facts, Reason.CONTAINER_PAUSED, f"a person paused {container.name}")
    if container.vanishes:
        message = f"container {container.name} is removed when it ends (--rm): it cannot be started again"
        return Close(outcome=Outcome.REFUSED, reason=Reason.NOT_RESTARTABLE, message=message)
    return None


def _act(facts: Facts, container: ContainerState, seen: OnDemandFacts, figures: str) -> Step:
    on = not container.running
    if facts.stopped_s_ago is not None and facts.stopped_s_ago < RETRY_S:
        message = f"the last try {facts.stopped_s_ago:.0f} s ago did not last; the next one is {RETRY_S:.0f} s after it"
        return _wait(facts, Reason.SCALE_FAILED, message)
    if on and facts.quarantined:
        return _wait(facts, Reason.GPU_QUARANTINED, facts.quarantined)
    if facts.armed:
        gpus = frozenset(card.gpu for card in seen.cards)
        return Scale(
            on=on, container_kind=container.kind, container_handle=container.handle, gpus=gpus, message=figures
        )
    if facts.episode.dry_run_recorded:
        return _wait(facts, Reason.DRY_RUN, f"dry run: would {_ACT[on]} it")
    return WouldAct(message=f"would {_ACT[on]} {container.name}: {figures}")


def _wait(facts: Facts, reason: Reason, message: str) -> Step:
    """Wait while the alert fires, close when it ends."""
    if facts.episode.firing:
        return Wait(reason=reason, message=message)
    return Close(outcome=Outcome.UNCONFIRMED, reason=reason, message=f"the alert ended; {message}")


def confirm(seen: OnDemandFacts, *, on: bool) -> Finding:
    """Check whether local evidence says to start it (`on`), or to stop it."""
    if seen.on is on:
        message = f"the exporter still shows it {_state(on)}: it was scaled a moment ago"
        return Finding(doubt=Doubt.OTHER_CONTAINER, message=message)
    if seen.needed_bytes is None:
        return Finding(doubt=Doubt.NO_BUDGET, message=f"its label or annotation is invalid: {seen.invalid}")
    figures = f"it is {_state(seen.on)} for {seen.state_s:.0f} s of at least {seen.min_s:.0f} s"
    if seen.state_s < seen.min_s:
        return Finding(doubt=Doubt.UNDER_BOUND, message=figures)
    rooms = "; ".join(_describe(card, on=on) for card in seen.cards) or "it has no GPU here"
    lasts_s = seen.room_s if on else seen.short_s
    if lasts_s is None:
        return Finding(doubt=Doubt.MEMORY_UNKNOWN, message=f"the free memory is unknown: {rooms}")
    if on:
        needs = f"it needs {_mib(seen.needed_bytes)}, and has had room for {lasts_s:.0f} s of {seen.after_s:.0f} s"
        return Finding.of(conditions.reached(lasts_s, seen.after_s), f"{needs}: {rooms}; {figures}")
    short = f"memory has been short for {lasts_s:.0f} s of {seen.after_s:.0f} s: {rooms}"
    if seen.idle_s is None:
        return Finding(doubt=Doubt.GPU_UNKNOWN, message=f"its GPU use is unknown; {short}")
    met = conditions.reached(lasts_s, seen.after_s) and conditions.reached(seen.idle_s, seen.idle_after_s)
    return Finding.of(met, f"idle for {seen.idle_s:.0f} s of {seen.idle_after_s:.0f} s; {short}; {figures}")


def _describe(card: OnDemandGpuFacts, *, on: bool) -> str:
    floor = f"the floor is {_mib(card.floor_bytes)}"
    if card.free_bytes is None or card.reclaiming_bytes is None:
        return f"{card.gpu} unknown, {floor}"
    free = f"{_mib(card.free_bytes)} free on {card.gpu}, {_mib(card.reclaiming_bytes)} returning"
    reserved = f", {_mib(card.reserved_bytes)} for other tenants" if on and card.reserved_bytes else ""
    return f"{free}{reserved}, {floor}"


def _state(on: bool) -> str:
    return "on" if on else "off"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"
