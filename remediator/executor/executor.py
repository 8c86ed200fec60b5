"""The executor: the loop that acts. It reads facts of each open episode, decides, records and acts.

One process per host, under a lock. All state that matters is in the ledger: after a crash the next executor continues.
Only timers are lost, and they restart. With a shared ledger, executors also hold the jobs of a lost host.
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden.db.changes import Changes
from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.migrate import NewerTablesError
from remediator.actuators import Actuator
from remediator.capture.capture import CaptureRunner
from remediator.clients.alertmanager import Silences
from remediator.clients.exporter import ExporterClient
from remediator.clients.job_queue import Queue
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.gather_facts import FactsReader
from remediator.executor.hosts import HostLiveness
from remediator.executor.housekeeping import Housekeeping
from remediator.executor.known_targets import KnownTargets
from remediator.executor.limits import RemedyLimits
from remediator.executor.lock import ExecutorLock
from remediator.executor.node_taint import NodeTaint
from remediator.executor.pace import Pace
from remediator.executor.perform import Performer
from remediator.executor.process_episode import EpisodeProcessor
from remediator.executor.stages import CaptureBeforeStop, CheckSilences, CheckStop, Hold, RecordWait
from remediator.executor.timers import Timers
from remediator.executor.waits import WaitRecorder
from remediator.ledger.ledger import Ledger
from remediator.plan import Episode, Limits, Subject
from remediator.remedies.guards import SafetyLimits
from remediator.settings.policy_file import PolicyFile

if TYPE_CHECKING:
    from remediator.clients.nodes import Nodes
    from remediator.executor.seats import SeatKeeper

log: Final = structlog.get_logger("executor")

POLL_S: Final = 0.1
"""Interval between checks for a changed ledger, seconds."""

MAX_CONCURRENT: Final = 8
MAX_WAITING: Final = 2
"""Episodes processed at the same time: those that come first, and those that wait."""

TAKES_MAX: Final = 4
"""Transactions that take alerts in a round."""

SLOW_CHECK_S: Final = 10.0
"""Interval between checks of a silent host, and between counts of the items of a failing run, seconds."""


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Clients that the executor acts through."""

    exporter: ExporterClient
    queue: Queue
    actuators: Mapping[str, Actuator]
    capture_runner: CaptureRunner | None = None
    """`None`: no capture before a stop."""

    silences: Silences | None = None
    """`None`: silences are not checked."""

    node: "tuple[Nodes, str] | None" = None
    """The Kubernetes API and this host's node; `None` outside of Kubernetes."""

    seats: "SeatKeeper | None" = None
    """Keeps the seats of that node."""

    policy: PolicyFile | None = None
    """`None`: the settings apply to every remedy."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Intervals and limits of the loop, seconds."""

    limits: Limits
    safety_limits: SafetyLimits
    interval_s: float
    sweep_interval_s: float
    stop_grace_s: float
    keep_s: float = 0.0
    """Retention of closed episodes; 0 keeps all."""

    runtime_dir: Path | None = None
    """Where supervisors read whether this executor acts."""

    seats_on: bool = False
    """Whether this executor advertises the GPU memory of its node."""


@dataclass(frozen=True)
class Pools:
    """Threads of the executor. None waits for another."""

    first: ThreadPoolExecutor
    """New episodes and started acts."""

    waiting: ThreadPoolExecutor
    counting: ThreadPoolExecutor
    """Episodes about a run, which count its items."""

    sweeping: ThreadPoolExecutor


class Executor:
    """Processes the open episodes of one host."""

    def __init__(
        self, ledger: Ledger, *, host: str, clients: Clients, settings: LoopSettings, lock: ExecutorLock | None = None
    ) -> None:
        self._ledger = ledger
        self._host = host
        self._settings = settings
        self._lock = lock
        self._closing = threading.Event()
        self._timers = Timers()
        self.clock = SuspendAwareClock()
        self.liveness = HostLiveness(ledger, host=host, clock=self.clock)
        self.housekeeping = Housekeeping(
            ledger,
            host=host,
            known=KnownTargets(clients.exporter, clients.queue, host=host, clock=self.clock),
            queue=clients.queue,
            suspend_aware=self.clock,
            keep_s=settings.keep_s,
            runtime_dir=settings.runtime_dir,
            seats_on=settings.seats_on,
            seats=clients.seats,
            is_closing=self._closing.is_set,
        )
        self.processor = self._processor(clients)
        self._pace = Pace(self.clock)
        self._running: dict[int, Future[None]] = {}
        self._next_tick_s = self._next_sweep_s = self._next_slow_check_s = 0.0

    def _processor(self, clients: Clients) -> EpisodeProcessor:
        ledger, host, settings, timers = self._ledger, self._host, self._settings, self._timers
        limits = RemedyLimits(clients.policy, limits=settings.limits, safety_limits=settings.safety_limits)
        waits = WaitRecorder(ledger, timers)
        facts = FactsReader(
            ledger,
            host=host,
            exporter=clients.exporter,
            queue=clients.queue,
            actuators=clients.actuators,
            limits=limits,
            timers=timers,
            liveness=self.liveness,
            clock=self.clock,
        )
        performer = Performer(
            ledger,
            host=host,
            queue=clients.queue,
            actuators=clients.actuators,
            limits=limits,
            timers=timers,
            waits=waits,
            clock=self.clock,
            stop_grace_s=settings.stop_grace_s,
            pause=self._pause,
        )
        facts.node_taint = performer.node_taint = NodeTaint(
            clients.node,
            ledger=ledger,
            exporter=clients.exporter,
            queue=clients.queue,
            limits=limits,
            timers=timers,
            pause=self._pause,
        )
        hold = Hold(ledger, host=host, limits=limits)
        silences = CheckSilences(clients.silences, limits=limits)
        check_stop = CheckStop(clients.actuators, timers, self.clock)
        capture = CaptureBeforeStop(ledger, clients.capture_runner, timers)
        return EpisodeProcessor(
            ledger,
            lock=self._lock,
            facts=facts,
            performer=performer,
            waits=waits,
            hold=hold,
            stages=(hold, silences, check_stop, RecordWait(waits, timers), capture),
            is_closing=self._closing.is_set,
            pause=self._pause,
        )

    def _pause(self) -> None:
        self._closing.wait(self._settings.interval_s)

    def close(self) -> None:
        """End the loop after the current step."""
        self._closing.set()

    def run(self) -> None:
        """Run until `close`.

        Raises:
            DatabaseError: the ledger cannot be watched at the start. Later outages are retried.
            NewerTablesError: a newer gpuwarden migrated the ledger. Running steps end and no new one begins.
        """
        with ExitStack() as stack:
            changes = stack.enter_context(closing(self._ledger.changes()))
            sizes = {"episode": MAX_CONCURRENT, "waiting": MAX_WAITING, "run": 1, "sweep": 1}
            threads = (ThreadPoolExecutor(count, thread_name_prefix=name) for name, count in sizes.items())
            pools = Pools(*(stack.enter_context(each) for each in threads))
            while not self._closing.is_set():
                try:
                    self._tick(changes, pools)
                except NewerTablesError:
                    self._closing.set()
                    raise
                except DatabaseError as error:
                    log.warning("ledger unreachable, no action until it answers", reason=str(error))
                    self._pause()
                except Exception:  # the loop survives a defect
                    self.housekeeping.errors += 1
                    log.exception("unexpected error")
                    self._pause()

    def _tick(self, changes: Changes, pools: Pools) -> None:
        if changes.wait(POLL_S):
            self._next_tick_s = 0.0
        now_s = self.clock.now_s()
        if now_s >= self._next_tick_s:
            if self._lock is not None and not self._lock.held():
                self._pause()
                return
            self._next_tick_s = now_s + self._settings.interval_s
            self.housekeeping.beat()
            changes.any()  # skip our own heartbeat
            self.reconcile(pools)
        else:
            self.clock.tick()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + self._settings.sweep_interval_s
            self.housekeeping.sweep_in_background(pools.sweeping)
            self.housekeeping.delete_old()

    def reconcile(self, pools: Pools) -> None:
        """Take new alerts, and submit the open episodes that are due. A slow stop delays only its own episode."""
        self.clock.tick()
        self._forget_finished()
        if self._take_alerts():
            self._next_tick_s = 0.0
        checks_slow = self.clock.now_s() >= self._next_slow_check_s
        if checks_slow:
            self.liveness.set_silent(self._ledger.episodes.about_silent_hosts())
            self._next_slow_check_s = self.clock.now_s() + SLOW_CHECK_S
        if self._ledger.shared:
            self.liveness.observe()
        found = self._ledger.episodes.survey(self._host)
        silent = self.liveness.silent_episodes
        self._timers.forget({*(each.episode_id for each in found), *(each.episode_id for each in silent)})
        orders = self.processor.facts.orders = self._ledger.orders.current()
        due = self._pace.due(found, running=self._running, orders=orders, is_listed=self.housekeeping.known.is_listed)
        if due.left:
            self._next_tick_s = 0.0
        runs = [each.episode_id for each in found if each.subject == Subject.RUN and self._is_due(each.episode_id)]
        acting = [each.episode_id for each in found if each.acting]
        episodes = {
            each.episode_id: each
            for each in self._ledger.episodes.read_open([*{*due.first, *due.waiting, *runs, *acting}])
        }
        self.housekeeping.renew_fences([episodes[each] for each in acting if each in episodes])
        for threads, process, its in (
            (pools.first, self.process_episode, due.first),
            (pools.waiting, self._process_waiting, due.waiting),
            (pools.counting, self.process_episode, runs),
        ):
            for each in its:
                if each in episodes:
                    self._running[each] = threads.submit(process, episodes[each])
        for episode in silent:
            if checks_slow and episode.episode_id not in self._running:
                self._running[episode.episode_id] = pools.first.submit(self.process_episode, episode)

    def _take_alerts(self) -> bool:
        """Take some new alerts. Returns whether more may be left."""
        inbox, known = self._ledger.inbox, self.housekeeping.known
        for _ in range(TAKES_MAX):
            named = inbox.new_targets(self._host)
            if not named:
                return False
            unknown = known.unknown(named)
            if unknown:
                opened = {(each.subject, each.worker) for each in self._ledger.episodes.survey(self._host)}
                unknown |= known.unknown(opened)
            if not inbox.take_new(self._host, now=self._ledger.now(), asked=set(named), unknown=unknown):
                return False
            self.clock.tick()
        return True

    def _process_waiting(self, episode: Episode) -> None:
        began_s = time.thread_time()
        self.process_episode(episode)
        self._pace.spend(time.thread_time() - began_s)

    def process_episode(self, episode: Episode) -> None:
        """Process one episode. Threads process different episodes at the same time."""
        self.processor.process(episode)

    def _is_due(self, episode_id: int) -> bool:
        """Whether to process an episode about a run. Counting many items is expensive, so it is due less often."""
        now_s, timers = self.clock.now_s(), self._timers.of(episode_id)
        if episode_id in self._running:
            return False
        if timers.counted_at_s is not None and now_s - timers.counted_at_s < SLOW_CHECK_S:
            return False
        timers.counted_at_s = now_s
        return True

    def _forget_finished(self) -> None:
        """Forget finished work. Call before reading the ledger: an episode read earlier may be stale."""
        for episode_id, work in list(self._running.items()):
            if work.done():
                del self._running[episode_id]
                if (error := work.exception()) is not None:
                    self.housekeeping.errors += 1
                    log.error("unexpected error", episode=episode_id, exc_info=error)
