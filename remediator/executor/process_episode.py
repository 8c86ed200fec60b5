"""Process one episode: read facts, decide, pass the stages, perform. The same for every kind of target."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
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
"""Steps of one episode before other episodes are processed."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How to process episodes about one kind of target."""

    read: Callable[[Episode], Facts]
    stages: Sequence[Gate]
    steps_max: int = STEPS_MAX
    holds: Callable[[Episode], plan.Wait | None] = lambda _: None
    """A wait that applies before the facts are read."""

    reread: bool = False
    """Whether to read the episode again first: it may have waited in a queue."""

    turn: AbstractContextManager[object] = field(default_factory=nullcontext)
    """Held for the whole episode, if such episodes act on one thing."""


class EpisodeProcessor:
    """Processes single episodes. Threads process different episodes at the same time."""

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
        container = Pipeline(read=facts.of_container, stages=stages)
        self._pipelines: Mapping[Subject, Pipeline] = {
            Subject.WORKER: container,
            Subject.SERVER: container,
            Subject.TENANT: container,
            Subject.ON_DEMAND: Pipeline(read=facts.of_on_demand, stages=stages),
            Subject.HOST: Pipeline(read=facts.of_host, stages=stages, steps_max=1),
            Subject.GPU: Pipeline(read=facts.of_gpu, stages=stages, steps_max=2, reread=True, turn=threading.Lock()),
            Subject.RUN: Pipeline(
                read=facts.of_run, stages=stages, steps_max=1, holds=hold.before_counting, reread=True
            ),
        }

    def process(self, episode: Episode) -> None:
        """Process one episode until it waits, closes or reaches `STEPS_MAX`."""
        try:
            way = self._pipelines[episode.subject]
            with way.turn:
                self._step(episode, way)
        except GpuwardenError as error:
            log.warning("step failed, will retry", episode=episode.episode_id, reason=str(error))

    def _step(self, begun: Episode, way: Pipeline) -> None:
        """A step that is decided twice in a row had no effect. It is retried after a loop interval."""
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

    def _decide(self, episode: Episode, way: Pipeline) -> plan.Step | Again:
        """Return the decided step, or what a stage returned instead."""
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
        """Whether the facts are fresh and this process still holds the executor lock."""
        lost = self._lock is not None and self._lock.lost
        return clock.boottime_s() - read_at_s <= FACTS_S and not lost
