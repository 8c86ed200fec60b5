"""Which of the conditions that were reported of one subject is the case. Pure."""

from collections.abc import Callable
from dataclasses import replace

from gpuwarden.job import Trip
from remediator.plan import Episode
from remediator.reasons import Finding


def first_confirmed(episode: Episode, confirm: Callable[[Trip], Finding]) -> tuple[Trip | None, Finding]:
    """The first of the reported conditions that `confirm` confirms; else `None`, and why each is not.

    The condition that the episode is known by comes first, and where none is confirmed the doubt is about that one.
    """
    trips = [episode.trip, *sorted(episode.trips - {episode.trip})]
    doubts: list[Finding] = []
    for trip in trips:
        found = confirm(trip)
        if found.confirmed:
            return trip, found
        doubts.append(found if len(trips) == 1 else replace(found, message=f"{trip}: {found.message}"))
    return None, replace(doubts[0], message="; ".join(each.message for each in doubts))
