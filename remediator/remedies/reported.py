"""Which of the conditions that were reported of one subject is the case. Pure."""

from collections.abc import Callable
from dataclasses import replace

from gpuwarden.job import Condition
from remediator.plan import Episode
from remediator.reasons import Finding


def first_confirmed(episode: Episode, confirm: Callable[[Condition], Finding]) -> tuple[Condition | None, Finding]:
    """The first of the reported conditions that `confirm` confirms; else `None`, and why each is not.

    The condition that the episode is known by comes first, and where none is confirmed the doubt is about that one.
    """
    conditions = [episode.condition, *sorted(episode.conditions - {episode.condition})]
    doubts: list[Finding] = []
    for condition in conditions:
        found = confirm(condition)
        if found.confirmed:
            return condition, found
        doubts.append(found if len(conditions) == 1 else replace(found, message=f"{condition}: {found.message}"))
    return None, replace(doubts[0], message="; ".join(each.message for each in doubts))
