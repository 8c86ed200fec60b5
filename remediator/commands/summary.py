"""Counts for `gpuwarden ledger summary`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from remediator.ledger.reports import Activity, Would


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Counts between two times, Unix seconds. `waiting` counts open episodes by reason."""

    since: float
    until: float
    episodes: int
    would: Sequence[Would]
    outcomes: Mapping[str, int] = field(default_factory=dict)
    did: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def summarize(found: Activity, *, since: float, now: float) -> Summary:
    """Summarize what happened since a time."""
    return Summary(
        since=since,
        until=now,
        episodes=sum(found.outcomes.values()) + sum(found.waiting.values()),
        would=found.would,
        outcomes=found.outcomes,
        did={step: count for (act, step), count in found.steps.items() if act == "did"},
        failed={step: count for (act, step), count in found.steps.items() if act == "failed"},
        waiting={reason or "at work": count for reason, count in found.waiting.items()},
    )
