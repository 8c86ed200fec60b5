"""One turn of one episode: read facts, decide, pass the stages, perform. The same way for every subject."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from gpuwarden import clock
from gpuwarden.errors import GpuwardenError
from remediator import plan
from remediator.executor.gather_facts import FACTS_S, FactsReader
from remediator.executor.lock import ExecutorLock
from remediator.executor.perform import Performer
from remediator.executor.stages import Again, Gate, Hold
from remediator.executor.waits import WaitRecorder
from remediator.ledger.ledger import Ledger
from remediator.plan import Episode, Facts, Subject
from remediator.remedies import REMEDIES

log: Final = structlog.get_logger("executor")

STEPS_MAX: Final = 20
"""Steps of one episode before the others get their turn."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How episodes about one subject are processed."""

    read: Callable[[Episode], Facts]
    stages: Sequence[Gate]
    steps_max: int = STEPS_MAX
    holds: Callable[[Episode], plan.Wait | None] = lambda _: None
    """What holds it whatever its facts are, so that they are not read."""

    reread: bool = False
    """Whether the episode may be out of date by its turn, and is read again."""


class EpisodeProcessor:
    """Gives single episodes their turn. Threads process different episodes at the same time.

    Args:
        ledger: what is owed.
        lock: what says that this is the host's one executor; `None` where there can be no other.
        facts: what reads facts.
        performer: what does steps.
        waits: what records waits.
        hold: the stage of orders and safeguards.
        stages: the stages that a step of any subject passes, in this order.
        is_closing: whether the loop is to end.
        pause: waits for a moment.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        lock: ExecutorLock | None,
        facts: FactsReader,
        performer: Performer,
        waits: WaitRecorder,
        hold: Hold,
        stages: Sequence[Gate],
        is_closing: Callable[[], bool],
        pause: Callable[[], object],
    ) -> None:
        self._ledger = ledger
        self._lock = lock
        self.facts = facts
        self.performer = performer
        self._waits = waits
        self._is_closing = is_closing
        self._pause = pause
        container = Way(read=facts.of_container, stages=stages)
        self._ways: Mapping[Subject, Way] = {
            Subject.WORKER: container,
            Subject.SERVER: container,
            Subject.TENANT: container,
            Subject.HOST: Way(read=facts.of_host, stages=stages, steps_max=1),
            Subject.RUN: Way(read=facts.of_run, stages=stages, steps_max=1, holds=hold.before_counting, reread=True),
        }

    def process(self, episode: Episode) -> None:
        """Step one episode until it waits, closes, or has had its share."""
        try:
            self._step(episode, self._ways[episode.subject])
        except GpuwardenError as error:
            log.warning("step failed; looking again", episode=episode.episode_id, because=str(error))

    def _step(self, begun: Episode, way: Way) -> None:
        """An act that is decided twice in a row had no effect: it is tried again at the loop's pace, not at once."""
        episode: Episode | None = begun
        acted: type[plan.Step] | None = None
        for number in range(way.steps_max):
            if number or way.reread:
                episode = self._ledger.episodes.get_open(begun.episode_id)
            if episode is None or self._is_closing():
                return
            read_at_s = clock.boottime_s()
            step = self._decide(episode, way)
            if isinstance(step, plan.Wait):
                return
            if isinstance(step, Again):
                continue
            if not isinstance(step, plan.Advance):
                if acted is type(step):
                    self._pause()
                    return
                acted = type(step)
            if self._may_act(read_at_s):
                self.performer.perform(episode, step)

    def _decide(self, episode: Episode, way: Way) -> plan.Step | Again:
        """The step that passed every stage, or the wait or `Again` of one of them."""
        held = way.holds(episode)
        if held is not None:
            self._waits.record(episode, held)
            return held
        facts = way.read(episode)
        step: plan.Step | Again = REMEDIES[episode.remedy].decide(facts)
        for stage in way.stages:
            if isinstance(step, Again):
                break
            step = stage(facts, step)
        return step

    def _may_act(self, read_at_s: float) -> bool:
        """Whether facts are fresh enough to act on, and no other executor of this host may act on the same target."""
        lost = self._lock is not None and self._lock.lost
        return clock.boottime_s() - read_at_s <= FACTS_S and not lost
