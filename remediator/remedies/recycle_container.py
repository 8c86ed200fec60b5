"""Remedy `recycle_container`: restart the container most over its VRAM budget while its GPU is short of VRAM. Pure.

A container may exceed its budget while the GPU has room. The budgets alone decide which one is restarted (C3, C4). A
container without a budget, without opt-in or with protection never is, and unknown values restart nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpuwarden.evidence import GpuMemoryFacts, ServerFacts, VramShareFacts
from gpuwarden.job import Condition
from remediator.plan import Advance, Facts, Stage, Step
from remediator.reasons import Doubt, Finding
from remediator.remedies import restart_without_job

CONFIRMABLE: Final = frozenset({Condition.VRAM})
"""The conditions that `confirm` can confirm; the webhook refuses others."""

RANKED_MAX: Final = 24
"""Containers of one GPU that a reason lists; it counts the others."""

MIB: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The container of one GPU to restart, by incarnation, or why there is none."""

    victim: str | None
    message: str = field(compare=False)
    doubt: Doubt | None = None


def decide(facts: Facts) -> Step:
    """Return the next step of one episode."""
    accused = facts.episode.incarnation
    step = restart_without_job.decide(facts, confirm=lambda seen, _: confirm(seen, accused))
    free, seen = facts.episode.free, facts.server
    if isinstance(step, Advance) and step.stage is Stage.DEAD and free is not None and seen is not None:
        rooms = [_describe_room(card) for card in seen.cards or () if card.gpu in free.data.get("gpus", ())]
        return replace(step, message="; ".join([step.message, *rooms]))
    return step


def confirm(seen: ServerFacts, accused: str | None) -> Finding:
    """Check whether local evidence chooses the reported container on any GPU."""
    if seen.cards is None:
        return Finding(doubt=Doubt.MEMORY_UNKNOWN, message="the exporter reports no GPU memory")
    held = [card for card in seen.cards if any(tenant.incarnation == accused for tenant in card.tenants)]
    choices = [choose(card) for card in held]
    confirmed = [choice.message for choice in choices if choice.victim == accused]
    unlisted = [gpu for gpu in restart_without_job.gpus_of(seen) if (seen.gpu_pids or {}).get(gpu) is None]
    unlisted += seen.nameless_gpus or []
    if confirmed and seen.unseen:
        message = f"{_describe_unseen(seen.unseen)}; {'; '.join(confirmed)}"
        return Finding(doubt=Doubt.RANKING_UNKNOWN, message=message)
    if confirmed and unlisted:
        message = f"the driver lists no processes of {', '.join(unlisted)}: its end could not be verified there"
        return Finding(doubt=Doubt.PROCESSES_UNKNOWN, message=f"{message}; {'; '.join(confirmed)}")
    if confirmed:
        simulated = ", simulated GPU" if seen.gpu_simulated else ""
        return Finding(doubt=None, message="; ".join(confirmed) + simulated)
    if not choices:
        return Finding(doubt=Doubt.NO_MEMORY_HELD, message="it holds no GPU memory")
    doubt = choices[0].doubt or Doubt.OTHER_VICTIM
    return Finding(doubt=doubt, message="; ".join(choice.message for choice in choices))


def _describe_unseen(names: Sequence[str]) -> str:
    listed = ", ".join(sorted(names)[:RANKED_MAX])
    return f"the memory of {listed} is unknown, since the engine does not report it: the ranking is unknown"


def choose(card: GpuMemoryFacts) -> Choice:
    """Choose the container of a GPU to restart now, or say why there is none.

    The greatest used − budget is chosen. Of those within `tie_bytes` of it the first by name is, so that small changes
    do not change the choice.
    """
    if card.free_bytes is None:
        return _choose_none(Doubt.MEMORY_UNKNOWN, f"free memory of {card.gpu} unknown: nothing is done")
    short = f"{_describe_room(card)}; {_ranking(card.tenants)}"
    if card.free_bytes >= card.floor_bytes:
        return _choose_none(Doubt.ROOM, f"enough memory is free: {short}")
    if card.reclaiming_bytes is None:
        message = "memory of ended processes unknown: nothing is done"
        return _choose_none(Doubt.MEMORY_UNKNOWN, f"{message}: {short}")
    if card.free_bytes + card.reclaiming_bytes >= card.floor_bytes:
        message = f"enough memory once the driver frees {_mib(card.reclaiming_bytes)} of ended processes"
        return _choose_none(Doubt.ROOM, f"{message}: {short}")
    unknown = [each.container for each in _candidates(card.tenants) if each.used_bytes is None]
    if unknown:
        message = f"memory of {', '.join(sorted(unknown)[:RANKED_MAX])} unknown: the ranking is unknown"
        return _choose_none(Doubt.RANKING_UNKNOWN, f"{message}: {short}")
    over = {each.incarnation: (_bytes_over(each) or 0, each) for each in _candidates(card.tenants)}
    most = max((by for by, _ in over.values()), default=0)
    if most <= 0:
        return _choose_none(Doubt.NONE_OVER, f"no container that may be recycled is over budget: {short}")
    level = sorted(
        (each.container, each.incarnation, by) for by, each in over.values() if by > 0 and by >= most - card.tie_bytes
    )
    name, victim, over_by = level[0]
    why = "is most over its budget" if len(level) == 1 else f"is one of {len(level)} equally over their budgets"
    return Choice(victim=victim, message=f"{name} {why}, by {_mib(over_by)}: {short}")


def _choose_none(doubt: Doubt, message: str) -> Choice:
    return Choice(victim=None, doubt=doubt, message=message)


def _candidates(tenants: Sequence[VramShareFacts]) -> list[VramShareFacts]:
    return [each for each in tenants if each.recyclable and each.budget_bytes is not None]


def _bytes_over(tenant: VramShareFacts) -> int | None:
    if tenant.used_bytes is None or tenant.budget_bytes is None:
        return None
    return tenant.used_bytes - tenant.budget_bytes


def _describe_room(card: GpuMemoryFacts) -> str:
    free = "an unknown amount" if card.free_bytes is None else _mib(card.free_bytes)
    return f"{free} free on {card.gpu}, the floor is {_mib(card.floor_bytes)}"


def _ranking(tenants: Sequence[VramShareFacts]) -> str:
    """All containers of the GPU, most over budget first; those without a budget last, by memory."""

    def order(tenant: VramShareFacts) -> tuple[bool, int, int, str]:
        over = _bytes_over(tenant)
        return over is None, -(over or 0), -(tenant.used_bytes or 0), tenant.container

    ranked = sorted(tenants, key=order)
    shown = [_describe_tenant(each) for each in ranked[:RANKED_MAX]]
    if len(ranked) > RANKED_MAX:
        shown.append(f"and {len(ranked) - RANKED_MAX} more")
    return ", ".join(shown) or "no container is on it"


def _describe_tenant(tenant: VramShareFacts) -> str:
    used = "an unknown amount" if tenant.used_bytes is None else _mib(tenant.used_bytes)
    if tenant.budget_bytes is None:
        return f"{tenant.container} {used} without a budget"
    over = _bytes_over(tenant)
    by = "" if over is None else f" ({over / MIB:+.0f})"
    return f"{tenant.container} {used} of {_mib(tenant.budget_bytes)}{by}" + (
        "" if tenant.recyclable else " not recyclable"
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"
