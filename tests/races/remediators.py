"""One remediator for each host: the real executor, ledger and queue, run one round at a time."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Final

from gpuwarden.db.errors import DatabaseError
from gpuwarden.queue import JobStore
from remediator import plan
from remediator.actuators import ActuatorError
from remediator.alert import Alert, admit
from remediator.clients.exporter import Targets
from remediator.clients.exporter_access import ExporterError
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor.executor import Clients, Executor, LoopSettings, Pools
from remediator.ledger.ledger import Ledger
from remediator.plan import ContainerState, Episode, Limits
from remediator.remedies import REMEDIES
from remediator.remedies.guards import Act, Order, SafetyLimits
from tests.races.databases import Databases
from tests.races.judge import Judge, RemediatorState
from tests.races.points import Killed, Points, Trouble
from tests.races.world import World

LIMITS: Final = Limits(
    evidence_fresh_s=5.0, settle_timeout_s=4.0, restart_timeout_s=12.0, retries_max=2, start_seen_s=0.0
)
"""Timeouts of a few rounds, and a retry limit that an example can reach."""

NEVER_HELD: Final = SafetyLimits(cooldown_s=0.0, breaker_targets=1000, breaker_restarts=1000)
"""No cool-down and no circuit breaker: the examples need many restarts in a short time."""


class Watched(Executor):
    """The executor, which gives the judge its current episode and step."""

    def __init__(self, *arguments: Any, acting: RemediatorState, **named: Any) -> None:
        super().__init__(*arguments, **named)
        perform, sweep = self.processor.performer.perform, self.housekeeping.sweep

        def watched_perform(episode: Episode, step: plan.Step) -> None:
            acting.step, acting.episode_id = step, episode.episode_id
            perform(episode, step)

        def watched_sweep() -> None:
            acting.is_sweeping = True
            sweep()

        self.processor.performer.perform = watched_perform  # type: ignore[method-assign]
        self.housekeeping.sweep = watched_sweep  # type: ignore[method-assign]


class ImmediatePool:
    """A pool that does its work in `submit`."""

    def submit(self, work: Any, *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        work(*arguments)
        done.set_result(None)
        return done


class AlwaysChanged:
    """A watch on a ledger that always has changes, so rounds do not wait."""

    def wait(self, _: float) -> bool:
        return True

    def any(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Host:
    """The simulated exporter and engine of a host, which also inform the judge."""

    def __init__(self, world: World, judge: Judge, points: Points, acting: RemediatorState) -> None:
        self._world = world
        self._judge = judge
        self._points = points
        self._acting = acting

    def worker_evidence(self, worker: str, *, host: str) -> Any:
        def ask() -> Any:
            self._judge.record_evidence(worker, host)
            return self._world.read_evidence(worker, host=host)

        return self._points.around("about", ask, ExporterError("played: no answer"))

    def list_targets(self) -> Targets:
        host = self._acting.host
        found: int = self._points.around(
            "about", lambda: self._world.count_workers(host), ExporterError("played: no answer about all of them")
        )
        names = frozenset(each.worker for each in self._world.slots if each.host == host)
        return Targets(containers=found, names=names)

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState:
        def ask() -> ContainerState:
            self._judge.record_inspection(self._world.by_handle(handle))
            return self._world.inspect(handle)

        found: ContainerState = self._points.around("look", ask, ActuatorError(f"played: no answer about {cgroup}"))
        return found

    def stop(self, handle: str, *, grace_s: float) -> None:
        def act() -> None:
            slot = self._world.by_handle(handle)
            self._judge.check_stop(slot, self._acting)
            self._world.stop(slot)
            self._judge.record_stop(slot)

        self._points.around("stop", act, ActuatorError(f"played: no answer within {grace_s} s"))

    def start(self, handle: str) -> None:
        def act() -> None:
            slot = self._world.by_handle(handle)
            self._judge.check_start(slot, self._acting)
            self._world.start(slot)

        self._points.around("start", act, ActuatorError("played: no answer"))


class Remediator:
    """The executor of one host, if it runs. It is armed at first."""

    def __init__(self, host: str, *, world: World, databases: Databases, judge: Judge, points: Points) -> None:
        self.acting = RemediatorState(host=host)
        self.executor: Watched | None = None
        self.shared = True
        """Whether remediators of other hosts use the same ledger."""

        self._world = world
        self._databases = databases
        self._judge = judge
        self._points = points
        self._busy = False
        self._order(armed=self.acting.armed)

    def round(self, trouble: Trouble | None = None) -> None:
        """Run one round of the loop. Starts the executor if it does not run."""
        if self._busy:
            return  # the call comes from inside a round
        self._busy = True
        try:
            with self._points.program(self.acting, trouble), self._world.clocks.of(self.acting.host):
                if self.executor is None:
                    self.executor = self._start()
                self.executor._tick(AlwaysChanged(), Pools(*[ImmediatePool()] * 4))  # type: ignore[arg-type]  # the methods that the executor uses
        except DatabaseError:
            pass  # the next round tries again
        except Killed:
            self.end()
        finally:
            self.acting.is_sweeping = self._busy = False
            self.acting.step = self.acting.episode_id = None

    def end(self) -> None:
        """End the executor. The next round starts another one."""
        self.executor = None

    def arm(self, *, armed: bool) -> None:
        """Give an order to arm or disarm, if it changes the state. The executor reads it in its next round."""
        if not self._busy and armed is not self.acting.armed:
            self.acting.armed = armed
            self._order(armed=armed)

    def _order(self, *, armed: bool) -> None:
        host = self.acting.host
        act, now = Act.ARM if armed else Act.DISARM, self._world.clocks.wall(host)
        with self._points.program("operator"):
            Ledger(self._databases.ledger).orders.give(
                Order(act=act, at=now, who="an operator", reason="drawn by hypothesis", host=host)
            )

    def _start(self) -> Watched:
        host = self.acting.host
        ledger, store = Ledger(self._databases.ledger, host=host), JobStore(self._databases.queue)
        ledger.shared = self.shared
        host_clients: Any = Host(self._world, self._judge, self._points, self.acting)
        settings = LoopSettings(
            limits=LIMITS, safety_limits=NEVER_HELD, interval_s=0.0, sweep_interval_s=5.0, stop_grace_s=0.0
        )
        clients = Clients(exporter=host_clients, queue=BuiltinQueue(store), actuators={"docker": host_clients})
        return Watched(ledger, host=host, clients=clients, settings=settings, acting=self.acting)


def deliver(ledger: Ledger, alerts: list[Alert], *, hosts: tuple[str, ...], now: float) -> None:
    """Admit the alerts and write them to the inbox, as the webhook does."""
    admitted = [(each, admit(each, hosts=hosts, remedies=REMEDIES)) for each in alerts]
    refusals = [refusal for _, refusal in admitted if refusal is not None]
    ledger.inbox.accept([each for each, refusal in admitted if refusal is None], refusals, now=now)


def fake_time(clocks: Any) -> SimpleNamespace:
    """A replacement for the module `time`."""
    return SimpleNamespace(time=clocks.time, monotonic=clocks.monotonic)
