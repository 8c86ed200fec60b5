"""The condition of one target that local evidence confirms. Pure."""

from collections.abc import Callable
from dataclasses import replace

from gpuwarden.job import Condition
from remediator.plan import Episode
from remediator.reasons import Finding


def first_confirmed(episode: Episode, confirm: Callable[[Condition], Finding]) -> tuple[Condition | None, Finding]:
    """Return the first reported condition that `confirm` confirms; `None` and the doubts of all if there is none.

    The episode's own condition comes first.
    """
    conditions = [episode.condition, *sorted(episode.conditions - {episode.condition})]
    doubts: list[Finding] = []
    for condition in conditions:
        found = confirm(condition)
        if found.confirmed:
            return condition, found
        doubts.append(found if len(conditions) == 1 else replace(found, message=f"{condition}: {found.message}"))
    return None, replace(doubts[0], message="; ".join(each.message for each in doubts))
