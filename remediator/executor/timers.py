"""What this process has seen of each open episode, and since when."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from remediator.plan import ContainerState, Intent, Kind, Stage


@dataclass(kw_only=True)
class EpisodeTimers:
    """Since when this process has seen an episode as it is, by the monotonic clock."""

    stages_since_s: dict[Kind, tuple[int, Stage, float]] = field(default_factory=dict)
    quiet_since_s: float | None = None
    runs_since_s: tuple[str, float] | None = None
    """Which incarnation of the container runs, and since when it was seen to."""
    stuck_since_s: float | None = None
    """Since when the queue has answered nothing, or taken nothing."""

    refused_at_s: float | None = None
    """When the queue refused what was to be written there for this episode; `None`: it has taken something since."""

    refusals: set[str] = field(default_factory=set)
    """What it has refused since then, and is on record."""

    stopped_at_s: float | None = None
    """When the newest stop came to an end, however it went."""

    counted_at_s: float | None = None
    """When the items of its run were last counted."""

    waited: str = ""
    """What it was recorded to wait for last."""

    waits_for: str = ""
    """What it waits for, as recorded; empty once a step was taken."""

    captured: set[int | None] = field(default_factory=set)
    """The frees, and as `None` the dry run, for which a capture was made, whether it could be kept or not."""

    warned_since_s: tuple[int, float] | None = None
    """Which free's worker is known to have been warned, and since when."""

    def knows_warned_since_s(self, free: Intent | None, now_s: float) -> float:
        """Since when a free's worker is known to have been warned."""
        if free is None or not free.data.get("warned"):
            return now_s
        if self.warned_since_s is None or self.warned_since_s[0] != free.intent_id:
            self.warned_since_s = (free.intent_id, now_s)
        return self.warned_since_s[1]

    def stage_since_s(self, intent: Intent | None, now_s: float) -> float:
        """Since when an intent has been at its stage; one that was promised anew begins anew."""
        if intent is None:
            return now_s
        known = self.stages_since_s.get(intent.kind)
        if known is None or known[:2] != (intent.intent_id, intent.stage):
            known = self.stages_since_s[intent.kind] = (intent.intent_id, intent.stage, now_s)
        return known[2]

    def forget_promises(self) -> None:
        """Let the time at the stage of what is only promised begin anew."""
        self.stages_since_s = {kind: known for kind, known in self.stages_since_s.items() if known[1] != Stage.PLANNED}

    def up_since_s(self, container: ContainerState | None, now_s: float) -> float:
        """Since when the container has been seen to run as it is; a look that did not see it run begins anew."""
        if container is None or not container.running:
            self.runs_since_s = None
            return now_s
        if self.runs_since_s is None or self.runs_since_s[0] != container.incarnation:
            self.runs_since_s = (container.incarnation, now_s)
        return self.runs_since_s[1]


class Timers:
    """The timers of the open episodes. Threads ask for those of different episodes at the same time."""

    def __init__(self) -> None:
        self._by_episode: dict[int, EpisodeTimers] = {}

    def of(self, episode_id: int) -> EpisodeTimers:
        """The timers of one episode."""
        return self._by_episode.setdefault(episode_id, EpisodeTimers())

    def forget(self, known_ids: AbstractSet[int]) -> None:
        """Drop those of every other episode."""
        for closed in set(self._by_episode) - known_ids:
            self._by_episode.pop(closed, None)
