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

from gpuwarden import clock
from gpuwarden.db.changes import Changes
from gpuwarden.db.engine import DatabaseError
from gpuwarden.db.migrate import NewerTablesError
from gpuwarden.errors import GpuwardenError
from remediator import plan
from remediator.actuators import Actuator
from remediator.capture.capture import Captor
from remediator.clients.alertmanager import Silences
from remediator.clients.exporter import Witness
from remediator.clients.job_queue import Queue
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.gather_facts import FACTS_S, FactsReader
from remediator.executor.hosts import HostLiveness
from remediator.executor.housekeeping import Housekeeping
from remediator.executor.limits import RemedyLimits
from remediator.executor.lock import ExecutorLock
from remediator.executor.perform import Performer
from remediator.executor.timers import Timers
from remediator.executor.waits import WaitRecorder
from remediator.ledger.ledger import Ledger
from remediator.plan import (
    Episode,
    Facts,
    Limits,
    Stage,
    Subject,
)
from remediator.remedies import REMEDIES, guards, restart
from remediator.remedies.guards import Safeguards
from remediator.settings.policy_file import PolicyFile

log: Final = structlog.get_logger("executor")

POLL_S: Final = 0.1
"""How often the loop looks whether the ledger has changed, seconds."""

AT_ONCE: Final = 8
"""Episodes worked on at the same time."""

STEPS_MAX: Final = 20
"""Steps of one episode before the others get their turn."""


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
        self._hands = hands
        self._pace = pace
        self._lock = lock
        self._closing = threading.Event()
        self._timers = Timers()
        self.clock = SuspendAwareClock()
        self.limits = RemedyLimits(hands.policy, limits=pace.limits, safeguards=pace.safeguards)
        self.liveness = HostLiveness(ledger, host=host, clock=self.clock)
        self.waits = WaitRecorder(ledger, self._timers)
        self.facts = FactsReader(
            ledger,
            host=host,
            witness=hands.witness,
            queue=hands.queue,
            actuators=hands.actuators,
            limits=self.limits,
            timers=self._timers,
            liveness=self.liveness,
            clock=self.clock,
        )
        self.performer = Performer(
            ledger,
            host=host,
            queue=hands.queue,
            actuators=hands.actuators,
            limits=self.limits,
            timers=self._timers,
            waits=self.waits,
            clock=self.clock,
            stop_grace_s=pace.stop_grace_s,
            pause=lambda: self._closing.wait(pace.look_again_s),
        )
        self.housekeeping = Housekeeping(
            ledger,
            host=host,
            witness=hands.witness,
            queue=hands.queue,
            suspend_aware=self.clock,
            keep_s=pace.keep_s,
            is_closing=self._closing.is_set,
        )
        self._at_work: dict[int, Future[None]] = {}
        self._judged_s: dict[int, float] = {}
        self._next_look_s = self._next_tend_s = self._next_look_for_s = 0.0

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
                    self._closing.wait(self._pace.look_again_s)
                except Exception:  # the loop outlives a defect in one round; it is counted, and published
                    self.housekeeping.errors += 1
                    log.exception("unexpected error")
                    self._closing.wait(self._pace.look_again_s)

    def _go_round(
        self, changes: Changes, pool: ThreadPoolExecutor, counting: ThreadPoolExecutor, tending: ThreadPoolExecutor
    ) -> None:
        if changes.wait(POLL_S):
            self._next_look_s = 0.0
        now_s = self.clock.now_s()
        if now_s >= self._next_look_s:
            if self._lock is not None and not self._lock.held():
                self._closing.wait(self._pace.look_again_s)
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
        for closed in set(self._judged_s) - known:
            del self._judged_s[closed]
        for episode in episodes:
            if episode.episode_id not in self._at_work and self._is_due(episode):
                judged = episode.subject is Subject.RUN
                work = counting.submit(self._judge, episode) if judged else pool.submit(self._work, episode)
                self._at_work[episode.episode_id] = work
        for episode in self.liveness.accused:
            if looks_for and episode.episode_id not in self._at_work:
                accused = self.liveness.accused_with(episode)
                self._at_work[episode.episode_id] = pool.submit(self._look_for, episode, accused)

    def _is_due(self, episode: Episode) -> bool:
        """Whether an episode has its turn at this look; what a run costs to count grows with its items."""
        if episode.subject is not Subject.RUN:
            return True
        now_s = self.clock.now_s()
        if now_s - self._judged_s.get(episode.episode_id, -LOOK_FOR_S) < LOOK_FOR_S:
            return False
        self._judged_s[episode.episode_id] = now_s
        return True

    def _collect(self) -> None:
        """Let go of what has finished, before the ledger is read: an episode read earlier may be out of date."""
        for episode_id, work in list(self._at_work.items()):
            if work.done():
                del self._at_work[episode_id]
                if (error := work.exception()) is not None:
                    self.housekeeping.errors += 1
                    log.error("unexpected error", episode=episode_id, exc_info=error)

    def _work(self, episode: Episode | None) -> None:
        """Step one episode until it waits, closes, or has had its share.

        An act that is decided twice in a row did not take: it is tried again at the loop's pace, not at once.
        """
        acted: type[plan.Step] | None = None
        try:
            for _ in range(STEPS_MAX):
                if episode is None or self._closing.is_set():
                    return
                read_at_s = clock.boottime_s()
                facts = self.facts.of_container(episode)
                step = self._held(facts, REMEDIES[episode.remedy].decide(facts))
                if isinstance(step, plan.Wait):
                    self.waits.record(episode, step)
                    return
                self._timers.of(episode.episode_id).waits_for = ""
                if self._captured(facts, step):
                    episode = self._ledger.episodes.get_open(episode.episode_id)
                    continue  # that took its time: what was decided before it is decided anew
                if not isinstance(step, plan.Advance):
                    if acted is type(step):
                        self._closing.wait(self._pace.look_again_s)
                        return
                    acted = type(step)
                if self._may_act(read_at_s):
                    self.performer.perform(episode, step)
                episode = self._ledger.episodes.get_open(episode.episode_id)
        except GpuwardenError as error:
            log.warning("step failed; looking again", episode=episode and episode.episode_id, because=str(error))

    def _may_act(self, read_at_s: float) -> bool:
        """Whether facts are fresh enough to act on, and no other executor of this host may act on the same target."""
        lost = self._lock is not None and self._lock.lost
        return clock.boottime_s() - read_at_s <= FACTS_S and not lost

    def _held(self, facts: Facts, step: plan.Step) -> plan.Step:
        """The step, or the wait that an order, a safeguard or a silence puts before it.

        Nobody is asked to approve what is silenced.
        """
        if not (isinstance(step, plan.Begin) or guards.is_first(step)):
            return step
        safeguards, now = self.limits.safeguards_of(facts.episode.remedy), self._ledger.now()
        orders, recent = self._ledger.orders.standing(guards.wish(facts.episode, step), safeguards, now=now)
        held = guards.hold(step, facts, orders, recent, safeguards, now=now)
        begins = held is step and (isinstance(step, plan.Begin) or guards.is_untouched(facts))
        asks = isinstance(held, plan.Wait) and held.asks is not None
        if self._hands.silences is None or not (begins or asks):
            return held
        heard = self._hands.silences.of(facts.episode.fingerprints, host=facts.episode.host)
        silenced = guards.heed(heard.silences, heard.unknown, safeguards)
        if silenced is None and begins and heard.unknown:
            log.warning("whether it is silenced is unknown; it goes on", because=heard.unknown)
        return silenced or held

    def _captured(self, facts: Facts, step: plan.Step) -> bool:
        """Whether it was only now kept what the processes are doing that this step is about to end.

        Once for each free, before its fence or, where there is none to come, its stop: a worker that is fenced may end
        itself within the second. In a dry run once for each episode, and without so much as stopping a process.
        """
        captor, container, episode = self._hands.captor, facts.container, facts.episode
        if captor is None or container is None or not container.running or not _ends_it(facts, step):
            return False
        intent_id = None if episode.free is None else episode.free.intent_id
        tried = self._timers.of(episode.episode_id).captured
        if intent_id in tried or self._ledger.captures.has(episode):
            return False
        tried.add(intent_id)  # also where it cannot be kept: no stop waits for it twice
        armed = not isinstance(step, plan.WouldAct)
        captured = captor.capture(episode, container, facts.place, armed=armed, now=self._ledger.now())
        log.info("captured", episode=episode.episode_id, worker=episode.worker, because=captured.message)
        self._ledger.captures.save(episode, captured, now=self._ledger.now())
        return True

    def _look_for(self, episode: Episode, accused: int) -> None:
        """Decide about a host that is said to be silent, as every host's executor does. Only its jobs are moved."""
        read_at_s = clock.boottime_s()
        try:
            facts = self.facts.of_host(episode, accused)
            step = self._held_for_host(facts, REMEDIES[episode.remedy].decide(facts))
            if isinstance(step, plan.Wait):
                self.waits.record(episode, step)
            elif self._may_act(read_at_s):
                self._timers.of(episode.episode_id).waits_for = ""
                self.performer.perform(episode, step)
        except GpuwardenError as error:
            log.warning("step failed; looking again", episode=episode.episode_id, because=str(error))

    def _judge(self, before: Episode) -> None:
        """Decide about a run whose items fail on a worker of this host. Only the queue is changed."""
        read_at_s = clock.boottime_s()
        try:
            episode = self._ledger.episodes.get_open(
                before.episode_id
            )  # it may have waited for other runs to be counted
            if episode is None or self._closing.is_set():
                return
            step: plan.Step | None = self._held_uncounted(episode)
            if step is None:
                facts = self.facts.of_run(episode)
                step = self._held_for_run(facts, REMEDIES[episode.remedy].decide(facts))
            if isinstance(step, plan.Wait):
                self.waits.record(episode, step)
            elif self._may_act(read_at_s):
                self._timers.of(episode.episode_id).waits_for = ""
                self.performer.perform(episode, step)
        except GpuwardenError as error:
            log.warning("step failed; looking again", episode=before.episode_id, because=str(error))

    def _held_uncounted(self, episode: Episode) -> plan.Wait | None:
        """What holds whatever would be found, so that nothing is counted for it.

        Not in a dry run, which tells what it would do, nor where the alert has ended: then it may be over.
        """
        orders = self._ledger.orders.current()
        if not (episode.firing and orders.armed(host=self._host, remedy=episode.remedy)):
            return None
        return guards.may_go_on(orders, host=self._host, now=self._ledger.now())

    def _held_for_run(self, facts: Facts, step: plan.Step) -> plan.Step:
        """The step, or the wait that an order or a silence puts before it; what latches the brake passes.

        Nobody is asked to approve what is silenced.
        """
        if not isinstance(step, plan.Wrangle):
            return step
        safeguards, now = self.limits.safeguards, self._ledger.now()
        wanted = guards.wish(facts.episode, step)
        orders, recent = self._ledger.orders.standing(wanted, safeguards, now=now)
        held = guards.may_wrangle(wanted, orders, recent, safeguards, now=now)
        waits = held if isinstance(held, plan.Wait) else None
        if waits is not None and waits.asks is None:
            return waits
        return self._silenced(facts) or waits or step

    def _silenced(self, facts: Facts) -> plan.Wait | None:
        if self._hands.silences is None:
            return None
        heard = self._hands.silences.of(facts.episode.fingerprints, host=facts.episode.host)
        return guards.heed(heard.silences, heard.unknown, self.limits.safeguards)

    def _held_for_host(self, facts: Facts, step: plan.Step) -> plan.Step:
        """The step, or the wait that an order or a silence puts before it; what is given back is not held."""
        if not isinstance(step, plan.Lose):
            return step
        safeguards, now = self.limits.safeguards, self._ledger.now()
        wanted = guards.wish(facts.episode, step)
        orders, recent = self._ledger.orders.standing(wanted, safeguards, now=now)
        held = guards.may_hold(wanted, orders, recent, by=self._host, now=now)
        return held or self._silenced(facts) or step


def _ends_it(facts: Facts, step: plan.Step) -> bool:
    """Whether a step is the first of those that end what runs, or says in a dry run that it would be."""
    free = facts.episode.free
    if free is None:
        return isinstance(step, plan.WouldAct)
    first = isinstance(step, plan.Warn | plan.Fence | plan.Stop) and free.stage is Stage.PLANNED
    return first and (not facts.container_known or restart.is_up(facts, free))
