"""Remedy `recycle_container`: free the one container that is most over its VRAM budget, while its GPU is short of it.

Time slicing shares turns, not memory, so the teeth are soft: whoever bursts into real slack is left alone, and only
while a GPU's free memory is under its floor is one container stopped and started, so that what it held is had back.
Whose turn it is follows from the budgets alone (C3, C4). A container without a budget, one that did not opt in and one
that is protected is never recycled, and what is unknown is never guessed. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpuwarden.evidence import CardFacts, ServerFacts, TenantFacts
from gpuwarden.job import Condition
from remediator.plan import Advance, Facts, Stage, Step
from remediator.reasons import Doubt, Finding
from remediator.remedies import restart_without_job

CONFIRMABLE: Final = frozenset({Condition.VRAM})
"""The trips that `confirm` can confirm; an alert with another is refused at the door."""

RANKED_MAX: Final = 24
"""Containers of one GPU that a reason tells of; how many more there are, it says."""

MIB: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Whose container on one GPU is to be recycled, by incarnation, or why nobody's; `message` has the ranking."""

    victim: str | None
    message: str = field(compare=False)
    doubt: Doubt | None = None


def decide(facts: Facts) -> Step:
    """The next step of one episode."""
    accused = facts.episode.incarnation
    step = restart_without_job.decide(facts, confirm=lambda seen, _: confirm(seen, accused))
    free, seen = facts.episode.free, facts.server
    if isinstance(step, Advance) and step.stage is Stage.DEAD and free is not None and seen is not None:
        rooms = [_room(card) for card in seen.cards or () if card.gpu in free.data.get("gpus", ())]
        return replace(step, message="; ".join([step.message, *rooms]))
    return step


def confirm(seen: ServerFacts, accused: str | None) -> Finding:
    """Whether fresh local evidence makes the accused the one to be recycled on any GPU."""
    if seen.cards is None:
        return Finding(doubt=Doubt.MEMORY_UNKNOWN, message="the exporter tells of no GPU's memory")
    held = [card for card in seen.cards if any(tenant.incarnation == accused for tenant in card.tenants)]
    choices = [choose(card) for card in held]
    confirmed = [choice.message for choice in choices if choice.victim == accused]
    unlisted = [gpu for gpu in restart_without_job.gpus_of(seen) if (seen.gpu_pids or {}).get(gpu) is None]
    unlisted += seen.nameless_gpus or []
    if confirmed and seen.nameless_gpus is None:
        message = "the exporter does not tell whether it has other GPUs that are missing: it is of an older version"
        return Finding(doubt=Doubt.OLD_EXPORTER, message=f"{message}; {'; '.join(confirmed)}")
    if confirmed and seen.unseen != []:
        message = f"{_unseen(seen.unseen)}; {'; '.join(confirmed)}"
        return Finding(doubt=Doubt.RANKING_UNKNOWN, message=message)
    if confirmed and unlisted:
        message = f"the driver does not list the processes of {', '.join(unlisted)}: it could not be seen dead there"
        return Finding(doubt=Doubt.PROCESSES_UNKNOWN, message=f"{message}; {'; '.join(confirmed)}")
    if confirmed:
        simulated = ", simulated GPU" if seen.gpu_simulated else ""
        return Finding(doubt=None, message="; ".join(confirmed) + simulated)
    if not choices:
        return Finding(doubt=Doubt.NO_MEMORY_HELD, message="it holds no memory of any GPU")
    doubt = choices[0].doubt or Doubt.OTHER_VICTIM
    return Finding(doubt=doubt, message="; ".join(choice.message for choice in choices))


def _unseen(names: Sequence[str] | None) -> str:
    """Why nobody is known to be most over: somebody may be missing from the ranking."""
    if names is None:
        return "the exporter does not tell whether anybody is missing from the ranking: it is of an older version"
    told = ", ".join(sorted(names)[:RANKED_MAX])
    return f"what {told} holds is unknown, for the engine does not tell of it: nobody is known to be most over budget"


def choose(card: CardFacts) -> Choice:
    """The one container of a GPU that is to be recycled now, or why there is none.

    The greatest used − budget goes. Of those within `tie_bytes` of it the first by name goes, so that small changes of
    what two hold do not change the choice.
    """
    if card.free_bytes is None:
        return _nobody(Doubt.MEMORY_UNKNOWN, f"how much memory of {card.gpu} is free is unknown: nothing is done")
    short = f"{_room(card)}; {_ranking(card.tenants)}"
    if card.free_bytes >= card.floor_bytes:
        return _nobody(Doubt.ROOM, f"there is room: {short}")
    if card.returning_bytes is None:
        message = "whether memory of processes that have ended is on its way back is unknown: nothing is done"
        return _nobody(Doubt.MEMORY_UNKNOWN, f"{message}: {short}")
    if card.free_bytes + card.returning_bytes >= card.floor_bytes:
        message = f"there is room once {_mib(card.returning_bytes)} are back that processes held which have ended"
        return _nobody(Doubt.ROOM, f"{message}: {short}")
    unknown = [each.container for each in _candidates(card.tenants) if each.used_bytes is None]
    if unknown:
        message = f"what {', '.join(sorted(unknown)[:RANKED_MAX])} holds is unknown, so nobody is known to hold most"
        return _nobody(Doubt.RANKING_UNKNOWN, f"{message}: {short}")
    over = {each.incarnation: (_over(each) or 0, each) for each in _candidates(card.tenants)}
    most = max((by for by, _ in over.values()), default=0)
    if most <= 0:
        return _nobody(Doubt.NONE_OVER, f"nobody that may be recycled is over budget: {short}")
    level = sorted(
        (each.container, each.incarnation, by) for by, each in over.values() if by > 0 and by >= most - card.tie_bytes
    )
    name, victim, over_by = level[0]
    why = "is most over its budget" if len(level) == 1 else f"is one of {len(level)} level at most over their budgets"
    return Choice(victim=victim, message=f"{name} {why}, by {_mib(over_by)}: {short}")


def _nobody(doubt: Doubt, message: str) -> Choice:
    return Choice(victim=None, doubt=doubt, message=message)


def _candidates(tenants: Sequence[TenantFacts]) -> list[TenantFacts]:
    return [each for each in tenants if each.recyclable and each.budget_bytes is not None]


def _over(tenant: TenantFacts) -> int | None:
    """By how much it is over its budget, bytes, negative where it is under; `None` where either is not known."""
    if tenant.used_bytes is None or tenant.budget_bytes is None:
        return None
    return tenant.used_bytes - tenant.budget_bytes


def _room(card: CardFacts) -> str:
    free = "an unknown amount" if card.free_bytes is None else _mib(card.free_bytes)
    return f"{free} free on {card.gpu}, the floor is {_mib(card.floor_bytes)}"


def _ranking(tenants: Sequence[TenantFacts]) -> str:
    """Everybody on the GPU, whoever is most over first; those without a budget last, by what they hold."""

    def order(tenant: TenantFacts) -> tuple[bool, int, int, str]:
        over = _over(tenant)
        return over is None, -(over or 0), -(tenant.used_bytes or 0), tenant.container

    ranked = sorted(tenants, key=order)
    told = [_standing(each) for each in ranked[:RANKED_MAX]]
    if len(ranked) > RANKED_MAX:
        told.append(f"and {len(ranked) - RANKED_MAX} more")
    return ", ".join(told) or "no container is on it"


def _standing(tenant: TenantFacts) -> str:
    used = "an unknown amount" if tenant.used_bytes is None else _mib(tenant.used_bytes)
    if tenant.budget_bytes is None:
        return f"{tenant.container} {used} without a budget"
    over = _over(tenant)
    by = "" if over is None else f" ({over / MIB:+.0f})"
    return f"{tenant.container} {used} of {_mib(tenant.budget_bytes)}{by}" + (
        "" if tenant.recyclable else " not to be recycled"
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"
