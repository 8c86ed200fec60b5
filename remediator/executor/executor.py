"""The executor: the only loop that acts. Open episodes, facts, decide, record, act, record; again on a timer.

One per host, in a process of its own, under a lock. It holds nothing in memory that matters but its patience: killed
anywhere, the next one reads the ledger and the world, and goes on. On a shared ledger it also holds the jobs of a host
that is lost. A run whose items fail on one of this host's workers it judges by what the queue has counted.
"""

import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from gpuwarden import clock
from gpuwarden.db.changes import Changes
from gpuwarden.db.engine import DatabaseError
from gpuwarden.db.migrate import NewerTablesError
from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence import ContainerFacts, ServerFacts, WorkerFacts
from gpuwarden.job import HEARTBEAT_S, State
from gpuwarden.procfs import ProcessId
from gpuwarden.queue import Slot
from remediator import plan
from remediator.actuators import ENGINES, Actuator
from remediator.capture.capture import Captor
from remediator.clients.alertmanager import Silences
from remediator.clients.exporter import Witness, WorkerUnseenError
from remediator.clients.job_queue import Queue
from remediator.executor import signal_worker
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.hosts import HostLiveness
from remediator.executor.limits import RemedyLimits
from remediator.executor.lock import ExecutorLock
from remediator.executor.timers import Timers
from remediator.ledger.ledger import Ledger
from remediator.ledger.recent import WRANGLING
from remediator.plan import (
    ContainerState,
    Episode,
    Facts,
    HostFacts,
    Intent,
    JobFacts,
    Kind,
    Limits,
    RunFacts,
    Stage,
    Subject,
)
from remediator.reasons import Reason
from remediator.remedies import REMEDIES, guards, restart, wrangle
from remediator.remedies.guards import Orders, Safeguards
from remediator.settings.policy_file import PolicyFile

log: Final = structlog.get_logger("executor")

POLL_S: Final = 0.1
"""How often the loop looks whether the ledger has changed, seconds."""

AT_ONCE: Final = 8
"""Episodes worked on at the same time."""

STEPS_MAX: Final = 20
"""Steps of one episode before the others get their turn."""

ANNOUNCED_S: Final = 10.0
"""How long another host leaves a silent host's jobs to the executor that has announced to move them, seconds."""

FORGET_S: Final = 0.1
"""How much of each `tend_s` goes to forgetting what has been over for long, seconds, and a transaction more."""

FACTS_S: Final = 30.0
"""Facts that are older, suspended time included, are read again before anything is done on their account, seconds."""


CLOCK_STEP_S: Final = 3600.0
CLOCK_BELIEVED_S: Final = 600.0
"""A clock that was set, or that was just come upon, makes nothing old before it has gone on for so long, seconds."""

LOOK_FOR_S: Final = 10.0
"""How often an executor looks at the hosts that are said to be silent, seconds: each does, for as long as they are.

And how often it counts how the items of a run went that is to be judged.
"""

_LOSE: Final = "lose"
"""What the account calls it that a host's jobs are taken for lost."""

_HELD: Final = frozenset(
    {
        *(Reason.APPROVAL, Reason.CIRCUIT_BREAKER, Reason.DECLINED, Reason.DRY_RUN, Reason.MAINTENANCE),
        *(Reason.PAUSED, Reason.SILENCED, Reason.SILENCES_UNKNOWN, Reason.GRACE_PERIOD),
    }
)
"""Waits that tell nothing of whether a wedge is confirmed still."""


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
        self._timers = Timers()
        self.clock = SuspendAwareClock()
        self.limits = RemedyLimits(hands.policy, limits=pace.limits, safeguards=pace.safeguards)
        self.liveness = HostLiveness(ledger, host=host, clock=self.clock)
        self._at_work: dict[int, Future[None]] = {}
        self._tending: Future[None] | None = None
        self._errors = 0
        self._workers: int | None = None
        self._acts: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._started_at = self.clock.unix_s()
        self._judged_s: dict[int, float] = {}
        self._next_look_s = self._next_tend_s = self._next_fences_s = self._next_look_for_s = 0.0
        self._clock_s = self._forgets_from_s = 0.0
        self._closing = threading.Event()

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
                    self._errors += 1
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
            self._beat()
            changes.any()  # our own beat is no news; whatever came before it is read now
            self.look(pool, counting)
        else:
            self.clock.tick()
        if now_s >= self._next_tend_s:
            self._next_tend_s = now_s + self._pace.tend_s
            self._tend_beside(tending)
            self._forget()

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
        self._keep_fences(episodes)
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

    def _keep_fences(self, episodes: list[Episode]) -> None:
        """Lengthen the fences of the jobs that this host is about to settle, so that no sweep gives them away.

        As often as a worker renews its lease, so that a clock that is set takes neither. The first failure ends it: a
        queue that does not answer must not keep the loop from going round.
        """
        now_s = self.clock.now_s()
        if now_s < self._next_fences_s:
            return
        self._next_fences_s = now_s + HEARTBEAT_S
        queue = self._hands.queue
        for episode in episodes:
            settle, job_id, attempt = episode.settle, episode.job_id, episode.attempt
            if settle is None or settle.stage is not Stage.FENCED or job_id is None or attempt is None:
                continue
            try:
                queue.hold_fence(job_id, attempt=attempt, now=queue.now())
            except GpuwardenError as error:
                log.warning("the fence could not be lengthened", job_id=job_id, because=str(error))
                return

    def _collect(self) -> None:
        """Let go of what has finished, before the ledger is read: an episode read earlier may be out of date."""
        for episode_id, work in list(self._at_work.items()):
            if work.done():
                del self._at_work[episode_id]
                if (error := work.exception()) is not None:
                    self._errors += 1
                    log.error("unexpected error", episode=episode_id, exc_info=error)

    def _beat(self) -> None:
        orders = self._ledger.orders.current()
        acts = tuple(remedy for remedy in REMEDIES if orders.armed(host=self._host, remedy=remedy))
        asks = tuple(remedy for remedy in acts if orders.asks(host=self._host, remedy=remedy))
        if (acts, asks) != self._acts:
            self._acts = (acts, asks)
            self._say_what_acts(orders)
        self._ledger.executors.beat(
            host=self._host,
            pid=os.getpid(),
            armed=bool(acts),
            started_at=self._started_at,
            errors=self._errors,
            workers=self._workers,
            now=self._ledger.now(),
        )

    def _say_what_acts(self, orders: Orders) -> None:
        for remedy in REMEDIES:
            order = orders.arming(host=self._host, remedy=remedy)
            by = {} if order is None else {"by": order.who, "because": order.because}
            if orders.asks(host=self._host, remedy=remedy):
                log.warning("armed with approval: it acts on what a person approves", remedy=remedy, **by)
            elif orders.armed(host=self._host, remedy=remedy):
                log.warning("armed: it acts", remedy=remedy, **by)
            else:
                hint = "`gpuwarden arm` makes it act"
                log.warning("dry run: all is recorded and nothing is done", remedy=remedy, hint=hint, **by)

    def _tend_beside(self, tending: ThreadPoolExecutor) -> None:
        """Tend beside the loop, once at a time.

        Each sweep waits for a queue that is locked, perhaps by the very process that is to be stopped: a loop that
        waited with it would be taken for one that stood still, and patience would never come to an end.
        """
        if self._tending is not None:
            if not self._tending.done():
                return
            if (error := self._tending.exception()) is not None:
                self._errors += 1
                log.error("unexpected error", exc_info=error)
        self._tending = tending.submit(self._tend)

    def _tend(self) -> None:
        if self._closing.is_set():
            return  # a sweep that waits for a locked queue would hold up the end
        try:
            self._hands.queue.tend(now=self._hands.queue.now())
        except GpuwardenError as error:
            log.warning("the queue does not answer", because=str(error))
        try:
            self._workers = self._hands.witness.workers()
        except GpuwardenError as error:
            self._workers = None
            log.debug("the host's workers cannot be counted", because=str(error))

    def _forget(self) -> None:
        """Let go of what has been over for long, a little at a time: alerts and episodes come first.

        Not by a clock that is ahead because nobody has set it yet: what is forgotten cannot be had back.
        """
        if not self._pace.keep_s:
            return
        now, boot_s = self._ledger.now(), clock.boottime_s()
        if abs(now - boot_s - self._clock_s) > CLOCK_STEP_S:  # at the start too
            self._clock_s, self._forgets_from_s = now - boot_s, boot_s + CLOCK_BELIEVED_S
        if boot_s < self._forgets_from_s:
            return
        until_s, before = self.clock.now_s() + FORGET_S, now - self._pace.keep_s
        for host, count in self._ledger.inbox.abandon(before=before, now=now).items():
            message = "its executor has not taken them up for --keep-days: `gpuwarden ledger refused` tells them"
            log.error("accepted alerts abandoned", host=host, count=count, because=message)
        while self._ledger.episodes.forget(before=before) and self.clock.now_s() < until_s:
            pass

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
                facts = self._facts(episode)
                step = self._held(facts, REMEDIES[episode.remedy].decide(facts))
                if isinstance(step, plan.Wait):
                    self._wait(episode, step)
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
                    self._perform(episode, step)
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

    def _armed(self, remedy: str) -> bool:
        """Whether a remedy acts on this host, as the ledger has it now: no order waits for a restart."""
        return self._ledger.orders.current().armed(host=self._host, remedy=remedy)

    def _look_for(self, episode: Episode, accused: int) -> None:
        """Decide about a host that is said to be silent, as every host's executor does. Only its jobs are moved."""
        read_at_s = clock.boottime_s()
        try:
            facts = self._facts_of_host(episode, accused)
            step = self._held_for_host(facts, REMEDIES[episode.remedy].decide(facts))
            if isinstance(step, plan.Wait):
                self._wait(episode, step, once=True)
            elif self._may_act(read_at_s):
                self._timers.of(episode.episode_id).waits_for = ""
                if isinstance(step, plan.Lose | plan.Return):
                    self._move_jobs(episode, step)
                else:
                    self._perform(episode, step)
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
                facts = self._facts_of_run(episode)
                step = self._held_for_run(facts, REMEDIES[episode.remedy].decide(facts))
            if isinstance(step, plan.Wait):
                self._wait(episode, step)
            elif self._may_act(read_at_s):
                self._timers.of(episode.episode_id).waits_for = ""
                if isinstance(step, plan.Wrangle):
                    self._carry_out(episode, step)
                else:
                    self._perform(episode, step)
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

    def _facts_of_run(self, episode: Episode) -> Facts:
        queue, unknown, run = self._hands.queue, "", None
        try:
            decided, done = self._ledger.run_decisions.state_of(episode)
            run = RunFacts(tally=queue.tally(episode.worker, now=queue.now()), decided=decided, done=done)
        except GpuwardenError as error:
            unknown = str(error)
        return self._facts_of_no_container(episode, armed=self._armed(episode.remedy), unknown=unknown, run=run)

    def _facts_of_no_container(
        self,
        episode: Episode,
        *,
        armed: bool,
        unknown: str,
        run: RunFacts | None = None,
        host: HostFacts | None = None,
    ) -> Facts:
        """Facts of what only the queue knows: a run, or a host's jobs."""
        return Facts(
            armed=armed,
            limits=self.limits.limits,
            episode=episode,
            evidence=None,
            container=None,
            container_known=False,
            job=None,
            job_known=(run or host) is not None,
            run=run,
            host=host,
            unknown=unknown,
        )

    def _held_for_host(self, facts: Facts, step: plan.Step) -> plan.Step:
        """The step, or the wait that an order or a silence puts before it; what is given back is not held."""
        if not isinstance(step, plan.Lose):
            return step
        safeguards, now = self.limits.safeguards, self._ledger.now()
        wanted = guards.wish(facts.episode, step)
        orders, recent = self._ledger.orders.standing(wanted, safeguards, now=now)
        held = guards.may_hold(wanted, orders, recent, by=self._host, now=now)
        return held or self._silenced(facts) or step

    def _facts_of_host(self, episode: Episode, accused: int) -> Facts:
        """A host acts for another where both are armed for it: whoever disarmed either wants nothing moved."""
        orders, queue, unknown, host = self._ledger.orders.current(), self._hands.queue, "", None
        now_s = self.clock.now_s()
        try:
            host = HostFacts(
                jobs=queue.jobs_on(episode.host, now=queue.now()),
                shows_life=self.liveness.shows_life(episode.host, now_s),
                silent_for_s=self.liveness.silent_s(episode.host, now_s),
                accused=accused,
                alive=self.liveness.alive(now_s),
                taken=self._ledger.journal.has_decided(episode.episode_id, _LOSE),
            )
        except GpuwardenError as error:
            unknown = str(error)
        armed = all(orders.armed(host=each, remedy=episode.remedy) for each in (self._host, episode.host))
        return self._facts_of_no_container(episode, armed=armed, unknown=unknown, host=host)

    def _wait(self, episode: Episode, step: plan.Wait, *, once: bool = False) -> None:
        """Waiting is told once for each reason, not once a second; a person is asked once about each incarnation.

        For a run it is told once for whom or what it waits for.

        What is only promised and held, by whatever it is, loses none of the patience with its confirmation by that.
        """
        timers = self._timers.of(episode.episode_id)
        if step.reason in _HELD:
            timers.forget_promises()
        recorded = f"{step.reason} {step.asks or ''} {step.about}"
        if timers.waits_for != recorded:
            timers.waits_for = timers.waited = recorded
            log.info("waiting", episode=episode.episode_id, worker=episode.worker, because=step.message)
            self._ledger.journal.wait(episode.episode_id, step, now=self._ledger.now(), once=once)

    # --- facts

    def _facts(self, episode: Episode) -> Facts:
        unknown: list[str] = []
        evidence, worker_ended = self._evidence(episode, unknown)
        server = self._server(episode, unknown)
        container, container_known = self._container(episode, evidence or server, unknown)
        job, job_known = self._job(episode, unknown)
        now_s = self.clock.now_s()
        watch = self._timers.of(episode.episode_id)
        if len(unknown) > worker_ended or watch.quiet_since_s is None:
            watch.quiet_since_s = now_s  # somebody was silent: a worker that is not seen is an answer
        refused_s_ago = None if watch.refused_at_s is None else now_s - watch.refused_at_s
        # Where nothing is stopped yet, what was refused long ago is asked for again: the queue may be well since.
        untouched = episode.free is None or episode.free.stage is Stage.PLANNED
        if job_known and (refused_s_ago is None or (untouched and refused_s_ago > FACTS_S)):
            watch.stuck_since_s = None
        elif watch.stuck_since_s is None:
            watch.stuck_since_s = now_s
        stuck_since_s = now_s if watch.stuck_since_s is None else watch.stuck_since_s
        free_since_s = watch.stage_since_s(episode.free, now_s)
        settle_since_s = watch.stage_since_s(episode.settle, now_s)
        up_since_s = watch.up_since_s(container, now_s)
        warned_since_s = watch.knows_warned_since_s(episode.free, now_s)
        limits = self.limits.limits_of(episode.remedy)
        listener, deaf = _listener(limits, episode, evidence, container)
        return Facts(
            armed=self._armed(episode.remedy),
            limits=limits,
            episode=episode,
            evidence=evidence,
            container=container,
            container_known=container_known,
            job=job,
            job_known=job_known,
            server=server,
            worker_ended=worker_ended,
            free_for_s=now_s - self.clock.since(free_since_s, now_s),
            settle_for_s=now_s - self.clock.since(settle_since_s, now_s),
            quiet_for_s=now_s - self.clock.since(watch.quiet_since_s, now_s),
            runs_for_s=now_s - self.clock.since(up_since_s, now_s),
            queue_stuck_for_s=now_s - self.clock.since(stuck_since_s, now_s),
            refused_s_ago=refused_s_ago,
            stopped_s_ago=None if watch.stopped_at_s is None else now_s - watch.stopped_at_s,
            warned_for_s=now_s - self.clock.since(warned_since_s, now_s),
            listener=listener,
            deaf=deaf,
            unknown="; ".join(unknown),
        )

    def _evidence(self, episode: Episode, unknown: list[str]) -> tuple[WorkerFacts | None, bool]:
        if episode.subject is not Subject.WORKER:
            return None, False
        try:
            return self._hands.witness.about(episode.worker, host=self._host), False
        except WorkerUnseenError as error:
            unknown.append(str(error))
            return None, True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False

    def _server(self, episode: Episode, unknown: list[str]) -> ServerFacts | None:
        if episode.subject is Subject.WORKER:
            return None
        try:
            return self._hands.witness.about_server(episode.worker, host=self._host)
        except GpuwardenError as error:
            unknown.append(str(error))
            return None

    def _container(
        self, episode: Episode, evidence: ContainerFacts | None, unknown: list[str]
    ) -> tuple[ContainerState | None, bool]:
        """The container promised to, once an intent names it; before that the one the evidence points at.

        A container that the exporter does not list may only be missing from one listing: its engine is asked about the
        container that was accused.
        """
        if episode.free is not None:
            kind, handle = episode.free.data["kind"], episode.free.data["handle"]
            group = episode.free.data.get("cgroup")
        elif evidence is not None and evidence.container_kind and evidence.container_id and evidence.container:
            kind, group = evidence.container_kind, None
            handle = evidence.container if kind == "process" else evidence.container_id
        elif evidence is not None and (accused := _accused(episode)) is not None:
            return self._accused_container(accused, unknown)
        else:
            return None, False
        actuator = self._hands.actuators.get(kind)
        if actuator is None:
            unknown.append(f"this remediator has no hands for containers of kind {kind}")
            return None, False
        try:
            return actuator.look(handle, cgroup=group), True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False

    def _accused_container(self, handle: str, unknown: list[str]) -> tuple[ContainerState | None, bool]:
        """A container by its id alone, from whichever engine has it; gone is only what every engine says is gone."""
        known = False
        for kind in ENGINES:
            actuator = self._hands.actuators.get(kind)
            if actuator is None:
                continue
            try:
                found = actuator.look(handle)
            except GpuwardenError as error:
                unknown.append(str(error))
                return None, False
            if found is not None:
                return found, True
            known = True
        if not known:
            unknown.append("this remediator has no hands for containers")
        return None, known

    def _job(self, episode: Episode, unknown: list[str]) -> tuple[JobFacts | None, bool]:
        if episode.job_id is None:
            return None, True
        try:
            return self._hands.queue.job(episode.job_id), True
        except GpuwardenError as error:
            unknown.append(str(error))
            return None, False

    # --- acts

    def _perform(self, episode: Episode, step: plan.Step) -> None:
        """Do one step. No policy here: what to do was decided, and facts are read anew after it."""
        name = type(step).__name__.lower()
        log.info("step", episode=episode.episode_id, worker=episode.worker, step=name, because=step.message)
        match step:
            case plan.Close(outcome=outcome, reason=reason, message=message):
                self._ledger.episodes.close(episode.episode_id, outcome, reason, message, now=self._ledger.now())
            case plan.WouldAct(message=message):
                self._ledger.journal.would_act(episode.episode_id, message, now=self._ledger.now())
            case plan.Begin():
                self._begin(episode, step)
            case plan.Withdraw(reason=reason, message=message):
                self._ledger.intents.withdraw(episode.episode_id, reason, message, now=self._ledger.now())
            case plan.Advance(kind=kind, stage=stage, reason=reason, message=message, unspent=unspent):
                intent = episode.free if kind is Kind.FREE else episode.settle
                if intent is not None:
                    saw: dict[str, Any] = {"act": "saw", "state": stage, "reason": reason, "unspent": unspent}
                    self._advance(episode, intent, stage, kind, message, **saw)
            case plan.Warn():
                self._warn(episode, step)
            case plan.Fence() | plan.Requeue() | plan.Fail():
                self._settle(episode, step)
            case plan.Stop() | plan.Start():
                self._free(episode, step)
            case plan.Quarantine():
                self._quarantine(episode, step)
            case plan.Wait() | plan.Lose() | plan.Return() | plan.LockWorker() | plan.Migrate() | plan.BlockRun():
                raise AssertionError("it is not performed here")

    def _begin(self, episode: Episode, step: plan.Begin) -> None:
        safeguards = self.limits.safeguards_of(episode.remedy)
        self._instead(episode, self._ledger.intents.begin(episode, step, safeguards=safeguards, now=self._ledger.now()))

    def _instead(self, episode: Episode, instead: plan.Wait | plan.Close | None) -> None:
        """What is done instead of what may not be begun."""
        if isinstance(instead, plan.Close):
            self._perform(episode, instead)
        elif isinstance(instead, plan.Wait):
            if instead.reason is Reason.CIRCUIT_BREAKER:
                log.error("the brake is latched: nothing is begun until a person releases it", because=instead.message)
            self._wait(episode, instead)

    def _settle(self, episode: Episode, step: plan.Fence | plan.Requeue | plan.Fail) -> None:
        intent, job_id, attempt = episode.settle, episode.job_id, episode.attempt
        if intent is None or job_id is None or attempt is None:
            raise AssertionError("a settle without a job was decided")
        queue = self._hands.queue
        its: dict[str, Any] = {"attempt": attempt, "trip": episode.trip}
        if isinstance(step, plan.Fence):
            its |= {"incarnation": intent.data["incarnation"]}
            fenced = self._taken(episode, "fence", lambda: queue.fence(job_id, now=queue.now(), **its))
            if fenced is None:
                return
            if not fenced:
                job = queue.job(job_id)
                if job is None or job.state is not State.FENCING or job.attempt != attempt:
                    return  # the job moved meanwhile; the next look decides anew
            self._advance(episode, intent, Stage.FENCED, "fence", step.message)
        elif isinstance(step, plan.Requeue):
            gpus = () if episode.free is None else tuple(episode.free.data.get("gpus", ()))
            avoid = Slot(host=episode.host, worker=episode.worker, gpus=gpus)
            its |= {"avoid": avoid, "avoid_s": step.avoid_s}
            if self._taken(episode, "requeue", lambda: queue.requeue(job_id, now=queue.now(), **its)):
                self._advance(episode, intent, Stage.DONE, "requeue", step.message)
        else:
            its = {"attempt": attempt, "because": step.message}
            if self._taken(episode, "fail", lambda: queue.fail(job_id, now=queue.now(), **its)):
                self._advance(episode, intent, Stage.DONE, "fail", step.message, reason=step.reason)
                queue.tend(now=queue.now())

    def _taken(self, episode: Episode, step: str, write: Callable[[], bool | None]) -> bool | None:
        """Have the queue write what becomes of a job or of GPUs; what it says to it, `None` where it refused.

        Each refusal is on record once, of a quarantine once a stage: the step is tried again for as long as it takes,
        and the free has its turn.
        """
        watch = self._timers.of(episode.episode_id)
        watch.refused_at_s = self.clock.now_s()  # also where a defect ends it: no stop waits for that for ever
        try:
            taken = write()
        except GpuwardenError as error:
            watch.refused_at_s = self.clock.now_s()
            log.warning("the queue refused", episode=episode.episode_id, step=step, because=str(error))
            if step not in watch.refusals:
                message = f"the queue takes nothing, and it is tried again: {error}"
                self._ledger.journal.record(episode.episode_id, "failed", step, message, now=self._ledger.now())
                watch.refusals.add(step)
            else:
                watch.waits_for = watch.waited  # nothing is on record that it would be told again after
            return None
        watch.refused_at_s = None
        watch.refusals.clear()
        return taken is not False

    def _free(self, episode: Episode, step: plan.Stop | plan.Start) -> None:
        intent = episode.free
        if intent is None:
            raise AssertionError("a free without an intent was decided")
        actuator = self._hands.actuators[intent.data["kind"]]
        handle: str = intent.data["handle"]
        stage = Stage.STARTING if isinstance(step, plan.Start) else Stage.STOPPING
        tries = 1 + (int(intent.data.get("tries", 0)) if intent.stage is stage else 0)
        if isinstance(step, plan.Start):
            if self._advance(episode, intent, stage, "start", step.message, act="decided", data={"tries": tries}):
                self._tell(episode, "start", *self._try(lambda: actuator.start(handle)))
            return
        before = actuator.look(handle)
        if before is None or before.incarnation != intent.key:
            return  # it ended or was restarted since the facts were read: that incarnation is over
        # What it had at the first try counts too: a process may leave its cgroup before the driver lets go of it.
        had = intent.data.get("pids", [])
        data = {
            "pids": sorted(before.pids.union(had)),
            "cgroup": before.cgroup or intent.data.get("cgroup"),
            "tries": tries,
        }
        if self._advance(episode, intent, stage, "stop", step.message, act="decided", data=data):
            # The commit may have taken its time, and an engine stops whatever bears the handle by now.
            still = actuator.look(handle)
            if still is None or still.incarnation != intent.key:
                return
            how = self._try(lambda: actuator.stop(handle, grace_s=self._pace.stop_grace_s))
            self._timers.of(episode.episode_id).stopped_at_s = self.clock.now_s()
            self._retire(episode)
            self._tell(episode, "stop", *how)

    def _warn(self, episode: Episode, step: plan.Warn) -> None:
        """Warn a worker, on record before and after: whoever comes after a death in between warns once more."""
        intent = episode.free
        if intent is None:
            raise AssertionError("a warning without a free was decided")
        tries = 1 + int(intent.data.get("warned", {}).get("tries", 0))
        decided = {"warned": {"signal": step.signal, "pid": step.listener.pid, "tries": tries, "done": False}}
        if not self._advance(episode, intent, intent.stage, "warn", step.message, act="decided", data=decided):
            return
        act, message = self._try(lambda: signal_worker.send(step.listener, step.signal))
        intent = replace(intent, data={**intent.data, **decided})
        # Whom no signal reached has no grace to wait for.
        done = {"warned": {**decided["warned"], "done": True, "before": act == "failed"}}
        self._advance(episode, intent, intent.stage, "warn", message, act=act, data=done)

    def _quarantine(self, episode: Episode, step: plan.Quarantine) -> None:
        intent, message = episode.free, step.message
        if intent is None:
            raise AssertionError("a quarantine without a free was decided")
        gpus: list[str] = list(step.lost) or intent.data["gpus"]
        queue = self._hands.queue
        slot = episode.worker if episode.subject is Subject.WORKER else ""
        its = {"host": self._host, "worker": slot, "because": message}
        if not self._taken(episode, "quarantine", lambda: queue.quarantine(gpus, now=queue.now(), **its)):
            return
        log.error("GPUs in quarantine: a person must look", gpus=gpus, worker=episode.worker, because=message)
        data = {"lost": [*intent.data.get("lost", []), *step.lost]} if step.lost else {"quarantined": True}
        self._advance(episode, intent, intent.stage, "quarantine", message, data=data, reason=step.reason)

    def _move_jobs(self, episode: Episode, step: plan.Lose | plan.Return) -> None:
        """Move a silent host's jobs, on record before; each is a compare-and-set that one host alone gets done."""
        losing, queue = isinstance(step, plan.Lose), self._hands.queue
        name, move = (_LOSE, queue.lose) if losing else ("return", queue.find)
        if not self._ledger.journal.announce(
            episode.episode_id, name, step.message, now=self._ledger.now(), for_s=ANNOUNCED_S
        ):
            return  # another host is at it
        for job in step.jobs:
            if move(job.job_id, attempt=job.attempt, now=queue.now()):
                message = f"job {job.job_id}, attempt {job.attempt}, of {episode.host}"
                self._ledger.journal.record(episode.episode_id, "did", name, message, now=self._ledger.now())
                if losing:
                    log.error("node lost: a person must look", host=episode.host, job_id=job.job_id)

    def _carry_out(self, episode: Episode, step: plan.Wrangle) -> None:
        """Do it, on record before. Decided anew in the transaction that does it: what is so no more is not done."""
        instead = self._ledger.run_decisions.begin(
            episode, step, safeguards=self.limits.safeguards, now=self._ledger.now()
        )
        if instead is not None:
            self._instead(episode, instead)
            return
        queue, name, rules = self._hands.queue, WRANGLING[type(step)], wrangle.rules(self.limits.limits)
        who = f"the executor of {self._host}, episode {episode.episode_id}"
        if queue.wrangle(episode.worker, step, rules=rules, who=who, now=queue.now()):
            tell = f"; the {step.tell} is to be told" if step.tell else ""
            self._ledger.run_decisions.finish(episode, step, f"{step.deed}{tell}", now=self._ledger.now())
            log.warning("wrangled", episode=episode.episode_id, run=episode.worker, step=name, because=step.message)

    def _advance(
        self,
        episode: Episode,
        intent: Intent,
        stage: Stage,
        step: str,
        message: str,
        *,
        act: str = "did",
        data: Mapping[str, object] | None = None,
        unspent: bool = False,
        state: str | None = None,
        reason: Reason | None = None,
    ) -> bool:
        if stage is not intent.stage:
            # One that is wanted at this stage too is recorded for it.
            self._timers.of(episode.episode_id).refusals.discard("quarantine")
        return self._ledger.intents.advance(
            intent,
            stage,
            episode_id=episode.episode_id,
            act=act,
            step=step,
            message=message,
            now=self._ledger.now(),
            data=data,
            unspent=unspent,
            state=state,
            reason=reason,
        )

    def _try(self, act: Callable[[], None]) -> tuple[str, str]:
        """Act after the decision is on record; how it went, in the ledger's words."""
        started_s = self.clock.now_s()
        try:
            act()
        except GpuwardenError as error:
            return "failed", str(error)
        return "did", f"took {self.clock.now_s() - started_s:.1f} s"

    def _tell(self, episode: Episode, step: str, act: str, message: str) -> None:
        self._ledger.journal.record(episode.episode_id, act, step, message, now=self._ledger.now())
        if act == "failed":
            log.warning("act failed", episode=episode.episode_id, step=step, because=message)
            self._closing.wait(self._pace.look_again_s)

    def _retire(self, episode: Episode) -> None:
        """Best effort: it never holds up the stop."""
        if episode.incarnation is None or episode.subject is not Subject.WORKER:
            return
        queue = self._hands.queue
        try:
            queue.retire_worker(
                host=self._host, worker=episode.worker, incarnation=episode.incarnation, now=queue.now()
            )
        except GpuwardenError as error:
            log.warning("the worker's row could not be aged", worker=episode.worker, because=str(error))


def _ends_it(facts: Facts, step: plan.Step) -> bool:
    """Whether a step is the first of those that end what runs, or says in a dry run that it would be."""
    free = facts.episode.free
    if free is None:
        return isinstance(step, plan.WouldAct)
    first = isinstance(step, plan.Warn | plan.Fence | plan.Stop) and free.stage is Stage.PLANNED
    return first and (not facts.container_known or restart.is_up(facts, free))


def _listener(
    limits: Limits, episode: Episode, evidence: WorkerFacts | None, container: ContainerState | None
) -> tuple[ProcessId | None, str]:
    """Whom a warning would reach, or why it would reach nobody; read only while one may be wanted."""
    free, signal = episode.free, limits.warn_signal
    if signal is None or free is None or free.stage is not Stage.PLANNED or evidence is None or container is None:
        return None, "nothing is known of its process"
    try:
        seen_s_ago = evidence.sample_age_s
        return signal_worker.find(evidence.worker_pid, signal, among=container.pids, seen_s_ago=seen_s_ago), ""
    except signal_worker.WarningError as error:
        return None, str(error)


def _accused(episode: Episode) -> str | None:
    """The full id of the container that an episode without a worker is about, where its alert named one."""
    if episode.subject is Subject.WORKER:
        return None
    found = _FULL_ID.match(episode.incarnation or "")
    return None if found is None else found[1]


_FULL_ID: Final = re.compile(r"([0-9a-z]{64})@")
"""How a container's incarnation begins. An alert's label is data: nothing else of it reaches an engine."""
