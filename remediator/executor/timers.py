"""Timers of each open episode: since when this process has seen its current state."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from remediator.plan import ContainerState, Intent, Kind, Stage, Wait


@dataclass(kw_only=True)
class EpisodeTimers:
    """Timers of one episode, monotonic clock seconds."""

    stages_since_s: dict[Kind, tuple[int, Stage, float]] = field(default_factory=dict)
    quiet_since_s: float | None = None
    works_since_s: float | None = None
    """Since when the GPU of the episode has been listed without a fault."""

    runs_since_s: tuple[str, float] | None = None
    """The running incarnation of the container, and when it was first seen running."""
    stuck_since_s: float | None = None
    """Since when the queue has not answered or has refused writes."""

    refused_at_s: float | None = None
    """When the queue last refused a write for this episode; `None` after a successful one."""

    refusals: set[str] = field(default_factory=set)
    """The steps refused since then and recorded."""

    stop_held: tuple[Wait, float] | None = None
    """Why a stop is not allowed, and until when that counts."""

    stopped_at_s: float | None = None
    counted_at_s: float | None = None
    last_wait: str = ""
    """The last recorded wait."""

    current_wait: str = ""
    """The current wait; empty after a step."""

    captured: set[int | None] = field(default_factory=set)
    """Intents with a capture tried; `None` is the dry run."""

    warned_since_s: tuple[int, float] | None = None
    """The intent whose worker was warned, and since when."""

    def warned_at_s(self, free: Intent | None, now_s: float) -> float:
        """When this process first saw that the worker was warned."""
        if free is None or not free.data.get("warned"):
            return now_s
        if self.warned_since_s is None or self.warned_since_s[0] != free.intent_id:
            self.warned_since_s = (free.intent_id, now_s)
        return self.warned_since_s[1]

    def stage_since_s(self, intent: Intent | None, now_s: float) -> float:
        """When this process first saw the intent at its stage. A new intent starts a new timer."""
        if intent is None:
            return now_s
        known = self.stages_since_s.get(intent.kind)
        if known is None or known[:2] != (intent.intent_id, intent.stage):
            known = self.stages_since_s[intent.kind] = (intent.intent_id, intent.stage, now_s)
        return known[2]

    def restart_planned(self) -> None:
        """Restart the stage timers of planned intents."""
        self.stages_since_s = {kind: known for kind, known in self.stages_since_s.items() if known[1] != Stage.PLANNED}

    def up_since_s(self, container: ContainerState | None, now_s: float) -> float:
        """When this incarnation was first seen running. The timer restarts if a read finds it not running."""
        if container is None or not container.running:
            self.runs_since_s = None
            return now_s
        if self.runs_since_s is None or self.runs_since_s[0] != container.incarnation:
            self.runs_since_s = (container.incarnation, now_s)
        return self.runs_since_s[1]


class Timers:
    """The timers of all open episodes. Threads use those of different episodes at the same time."""

    def __init__(self) -> None:
        self._by_episode: dict[int, EpisodeTimers] = {}

    def of(self, episode_id: int) -> EpisodeTimers:
        """The timers of one episode."""
        return self._by_episode.setdefault(episode_id, EpisodeTimers())

    def forget(self, known_ids: AbstractSet[int]) -> None:
        """Drop the timers of every other episode."""
        for closed in set(self._by_episode) - known_ids:
            self._by_episode.pop(closed, None)
