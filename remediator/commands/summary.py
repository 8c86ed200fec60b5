"""A time in figures, for `gpuwarden ledger summary`: what was done, what a dry run would have done, what is held."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from remediator.ledger.reports import EpisodeHistory


@dataclass(frozen=True, kw_only=True)
class Would:
    """One thing that a dry run would have done, when it first said so, and what became of it."""

    episode_id: int
    at: float
    host: str
    worker: str
    message: str
    outcome: str | None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What happened between two times, Unix seconds. `waiting` are the open episodes by what they wait for."""

    since: float
    until: float
    episodes: int
    would: Sequence[Would]
    outcomes: Mapping[str, int] = field(default_factory=dict)
    did: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """The whole of it, as JSON."""
        return asdict(self)


def summarize(stories: Sequence[EpisodeHistory], *, since: float, now: float) -> Summary:
    """The summary of the episodes that were open since then, each with its whole account."""
    did, failed, waiting = Counter[str](), Counter[str](), Counter[str]()
    would: list[Would] = []
    for story in stories:
        lately = [entry for entry in story.entries if entry.at >= since]
        did.update(entry.step for entry in lately if entry.act == "did")
        failed.update(entry.step for entry in lately if entry.act == "failed")
        wished = [entry for entry in story.entries if entry.act == "would"]
        # One that was wished for before and is open still is what a person has yet to decide on.
        if wished and (wished[0].at >= since or story.closed_at is None):
            would.append(
                Would(
                    episode_id=story.episode_id,
                    at=wished[0].at,
                    host=story.host,
                    worker=story.worker,
                    message=wished[0].message,
                    outcome=story.outcome,
                )
            )
        if story.closed_at is None:
            waiting[story.wait_reason or "at work"] += 1
    return Summary(
        since=since,
        until=now,
        episodes=len(stories),
        would=would,
        outcomes=dict(Counter(story.outcome for story in stories if story.outcome is not None)),
        did=dict(did),
        failed=dict(failed),
        waiting=dict(waiting),
    )
