"""The executor: the only loop that acts. Open episodes, facts, decide, record, act, record; again on a timer.

One per host, in a process of its own, under a lock. It holds nothing in memory that matters but its patience: killed
anywhere, the next one reads the ledger and the world, and goes on. On a shared ledger it also holds the jobs of a host
that is lost. A run whose items fail on one of this host's workers it judges by what the queue has counted.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import structlog

from gpuwarden.db.changes import Changes
from gpuwarden.db.engine import DatabaseError
from gpuwarden.db.migrate import NewerTablesError
from remediator.actuators import Actuator
from remediator.capture.capture import Captor
from remediator.clients.alertmanager import Silences
from remediator.clients.exporter import Witness
from remediator.clients.job_queue import Queue
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.gather_facts import FactsReader
from remediator.executor.hosts import HostLiveness
from remediator.executor.housekeeping import Housekeeping
from remediator.executor.limits import RemedyLimits
from remediator.executor.lock import ExecutorLock
from remediator.executor.perform import Performer
from remediator.executor.process_episode import EpisodeProcessor
from remediator.executor.stages import Capture, CheckSilences, Hold, RecordWait
from remediator.executor.timers import Timers
from remediator.executor.waits import WaitRecorder
from remediator.ledger.ledger import Ledger
from remediator.plan import Episode, Limits, Subject
from remediator.remedies.guards import Safeguards
from remediator.settings.policy_file import PolicyFile

log: Final = structlog.get_logger("executor")

POLL_S: Final = 0.1
"""How often the loop looks whether the ledger has changed, seconds."""

AT_ONCE: Final = 8
"""Episodes worked on at the same time."""

LOOK_FOR_S: Final = 10.0
"""How often an executor looks at the hosts that are said to be silent, seconds: each does, for as long as they are.

And how often it counts how the items of a run went that is to be judged.
"""


@dataclass(frozen=True, kw_only=True)
class Hands:
    """What the executor works with."""

    witness: Witness
    queue: Queue
    actuators: Mapping[str, Actuator]
    captor: Captor | None = None
    """`None`: nothing is captured before a stop."""

    silences: Silences | None = None
    """`None`: no Alertmanager is asked what it silences."""

    policy: PolicyFile | None = None
    """`None`: every remedy is as the pace has it."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How it goes about it; seconds."""

    limits: Limits
    safeguards: Safeguards
    look_again_s: float
    tend_s: float
    stop_grace_s: float
    keep_s: float = 0.0
    """For how long what is over is kept; 0 is for ever."""


class Executor:
    """Works the ledger's open episodes on one host.

    Args:
        ledger: what is owed.
        host: this host's key.
        hands: what to look and act with.
        pace: how to go about it.
        lock: what says that this is the host's one executor; `None` where there can be no other.
    """

    def __init__(
        self, ledger: Ledger, *, host: str, hands: Hands, pace: Pace, lock: ExecutorLock | None = None
    ) -> None:
        self._ledger = ledger
        self._host = host
        self._pace = pace
        self._lock = lock
        self._closing = threading.Event()
        self._timers = Timers()
        self.clock = SuspendAwareClock()
        self.liveness = HostLiveness(ledger, host=host, clock=self.clock)
        self.housekeeping = Housekeeping(
            ledger,
            host=host,
            witness=hands.witness,
            queue=hands.queue,
            suspend_aware=self.clock,
            keep_s=pace.keep_s,
            is_closing=self._closing.is_set,
        )
        self.processor = self._processor(hands)
        self._at_work: dict[int, Future[None]] = {}
        self._next_look_s = self._next_tend_s = self._next_look_for_s = 0.0

    def _processor(self, hands: Hands) -> EpisodeProcessor:
        ledger, host, pace, timers = self._ledger, self._host, self._pace, self._timers
        limits = RemedyLimits(hands.policy, limits=pace.limits, safeguards=pace.safeguards)
        waits = WaitRecorder(ledger, timers)
        facts = FactsReader(
            ledger,
            host=host,
            witness=hands.witness,
            queue=hands.queue,
            actuators=hands.actuators,
            limits=limits,
            timers=timers,
            liveness=self.liveness,
            clock=self.clock,
        )
        performer = Performer(
            ledger,
            host=host,
            queue=hands.queue,
            actuators=hands.actuators,
            limits=limits,
            timers=timers,
            waits=waits,
            clock=self.clock,
            stop_grace_s=pace.stop_grace_s,
            pause=self._pause,
        )
        hold = Hold(ledger, host=host, limits=limits)
        silences = CheckSilences(hands.silences, limits=limits)
        return EpisodeProcessor(
            ledger,
            lock=self._lock,
            facts=facts,
            performer=performer,
            waits=waits,
            hold=hold,
            stages=(hold, silences, RecordWait(waits, timers), Capture(ledger, hands.captor, timers)),
            is_closing=self._closing.is_set,
            pause=self._pause,
        )

    def _pause(self) -> None:
        self._closing.wait(self._pace.look_again_s)

    def close(self) -> None:
        """End the loop after the step at hand."""
        self._closing.set()

    def run(self) -> None:
        """Go on until `close`.

        Raises:
            DatabaseError: the ledger cannot be watched; once it is, it may come and go.
            NewerTablesError: a newer gpuwarden has taken the ledger over; what is at work is done, and nothing begun.
        """
        with (
            closing(self._ledger.changes()) as changes,
            ThreadPoolExecutor(AT_ONCE, thread_name_prefix="episode") as pool,
            # What is wedged waits for no run's items, and no sweep of the queue does.
            ThreadPoolExecutor(1, thread_name_prefix="run") as counting,
            ThreadPoolExecutor(1, thread_name_prefix="sweep") as tending,
        ):
            while not self._closing.is_set():
                try:
                    self._go_round(changes, pool, counting, tending)
                except NewerTablesError:
                    self._closing.set()
                    raise
                except DatabaseError as error:
                    log.warning("the ledger does not answer; nothing is done until it does", because=str(error))
                    self._pause()
                except Exception:  # the loop outlives a defect in one round; it is counted, and published
                    self.housekeeping.errors += 1
                    log.exception("unexpected error")
                    self._pause()

    def _go_round(
        self, changes: Changes, pool: ThreadPoolExecutor, counting: ThreadPoolExecutor, tending: ThreadPoolExecutor
    ) -> None:
        if changes.wait(POLL_S):
            self._next_look_s = 0.0
        now_s = self.clock.now_s()
        if now_s >= self._next_look_s:
            if self._lock is not None and not self._lock.held():
                self._pause()
                return
            self._next_look_s = now_s + self._pace.look_again_s
            self.housekeeping.beat()
            changes.any()  # our own beat is no news; whatever came before it is read now
            self.look(pool, counting)
        else:
            self.clock.tick()
        if now_s >= self._next_tend_s:
            self._next_tend_s = now_s + self._pace.tend_s
            self.housekeeping.tend_beside(tending)
            self.housekeeping.forget()

    def look(self, pool: ThreadPoolExecutor, counting: ThreadPoolExecutor) -> None:
        """Take the new alerts, and give every open episode that is not at work its turn; runs in `counting`.

        A container that is slow to stop holds up its own episode only.
        """
        self.clock.tick()
        self._collect()
        while self._ledger.inbox.take_new(self._host, now=self._ledger.now()):
            pass
        episodes = [each for each in self._ledger.episodes.list_open(self._host) if each.subject is not Subject.HOST]
        looks_for = self.clock.now_s() >= self._next_look_for_s
        if looks_for:
            self.liveness.accuse(self._ledger.episodes.about_silent_hosts())
            self._next_look_for_s = self.clock.now_s() + LOOK_FOR_S
        if self._ledger.shared:
            self.liveness.observe()
        self.housekeeping.keep_fences(episodes)
        known = {each.episode_id for each in (*episodes, *self.liveness.accused)}
        self._timers.forget(known)
        for episode in episodes:
            if episode.episode_id not in self._at_work and self._is_due(episode):
                threads = counting if episode.subject is Subject.RUN else pool
                self._at_work[episode.episode_id] = threads.submit(self.process_episode, episode)
        for episode in self.liveness.accused:
            if looks_for and episode.episode_id not in self._at_work:
                self._at_work[episode.episode_id] = pool.submit(self.process_episode, episode)

    def process_episode(self, episode: Episode) -> None:
        """Give one episode its turn; several threads do, each with another one."""
        self.processor.process(episode)

    def _is_due(self, episode: Episode) -> bool:
        """Whether an episode has its turn at this look; what a run costs to count grows with its items."""
        if episode.subject is not Subject.RUN:
            return True
        now_s, timers = self.clock.now_s(), self._timers.of(episode.episode_id)
        if timers.counted_at_s is not None and now_s - timers.counted_at_s < LOOK_FOR_S:
            return False
        timers.counted_at_s = now_s
        return True

    def _collect(self) -> None:
        """Let go of what has finished, before the ledger is read: an episode read earlier may be out of date."""
        for episode_id, work in list(self._at_work.items()):
            if work.done():
                del self._at_work[episode_id]
                if (error := work.exception()) is not None:
                    self.housekeeping.errors += 1
                    log.error("unexpected error", episode=episode_id, exc_info=error)
