"""Counts for `gpuwarden ledger summary`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from remediator.ledger.reports import EpisodeHistory


@dataclass(frozen=True, kw_only=True)
class Would:
    """An action that a dry run recorded: first time and outcome."""

    episode_id: int
    at: float
    host: str
    worker: str
    message: str
    outcome: str | None


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


def summarize(histories: Sequence[EpisodeHistory], *, since: float, now: float) -> Summary:
    """Summarize episodes with their journals."""
    did, failed, waiting = Counter[str](), Counter[str](), Counter[str]()
    would: list[Would] = []
    for history in histories:
        lately = [entry for entry in history.entries if entry.at >= since]
        did.update(entry.step for entry in lately if entry.act == "did")
        failed.update(entry.step for entry in lately if entry.act == "failed")
        dry = [entry for entry in history.entries if entry.act == "would"]
        # An older action of an open episode still needs a decision.
        if dry and (dry[0].at >= since or history.closed_at is None):
            would.append(
                Would(
                    episode_id=history.episode_id,
                    at=dry[0].at,
                    host=history.host,
                    worker=history.worker,
                    message=dry[0].message,
                    outcome=history.outcome,
                )
            )
        if history.closed_at is None:
            waiting[history.wait_reason or "at work"] += 1
    return Summary(
        since=since,
        until=now,
        episodes=len(histories),
        would=would,
        outcomes=dict(Counter(history.outcome for history in histories if history.outcome is not None)),
        did=dict(did),
        failed=dict(failed),
        waiting=dict(waiting),
    )
