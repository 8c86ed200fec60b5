"""One remediator a host: the real executor, ledger and queue, driven a round at a time and thrown away when killed."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Final

from gpuwarden.db.engine import DatabaseError
from gpuwarden.queue import JobStore
from remediator import plan
from remediator.actuators import ActuatorError
from remediator.alert import Alert, admit
from remediator.clients.exporter import ExporterError
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor.executor import Clients, Executor, LoopSettings
from remediator.ledger.ledger import Ledger
from remediator.plan import ContainerState, Episode, Limits
from remediator.remedies import REMEDIES
from remediator.remedies.guards import Act, Order, SafetyLimits
from tests.races.databases import Databases
from tests.races.judge import Acting, Judge
from tests.races.points import Killed, Points, Trouble
from tests.races.world import World

LIMITS: Final = Limits(
    evidence_fresh_s=5.0, settle_timeout_s=4.0, restart_timeout_s=12.0, retries_max=2, start_seen_s=0.0
)
"""Bounds of a few rounds, shorter than an executor's hold on an intent, and a cap that an example can reach."""

NEVER_HELD: Final = SafetyLimits(cooldown_s=0.0, breaker_targets=1000, breaker_restarts=1000)
"""Nothing cools down and nothing is a storm: what comes of many frees in a short time is what is sought."""


class Watched(Executor):
    """The executor; the judge is told which step of which episode it is at."""

    def __init__(self, *arguments: Any, acting: Acting, **named: Any) -> None:
        super().__init__(*arguments, **named)
        perform, tend = self.processor.performer.perform, self.housekeeping.sweep

        def watched_perform(episode: Episode, step: plan.Step) -> None:
            acting.step, acting.episode_id = step, episode.episode_id
            perform(episode, step)

        def watched_tend() -> None:
            acting.tends = True
            tend()

        self.processor.performer.perform = watched_perform  # type: ignore[method-assign]
        self.housekeeping.sweep = watched_tend  # type: ignore[method-assign]


class AtOnce:
    """A pool whose work is done when it is handed in."""

    def submit(self, work: Any, *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        work(*arguments)
        done.set_result(None)
        return done


class AlwaysChanged:
    """A watch on a ledger that has always news, so that no round waits."""

    def wait(self, _: float) -> bool:
        return True

    def any(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Host:
    """The two seams of an executor to its host, and the judge beside them."""

    def __init__(self, world: World, judge: Judge, points: Points, acting: Acting) -> None:
        self._world = world
        self._judge = judge
        self._points = points
        self._acting = acting

    def worker_evidence(self, worker: str, *, host: str) -> Any:
        def ask() -> Any:
            self._judge.told(worker, host)
            return self._world.about(worker, host=host)

        return self._points.around("about", ask, ExporterError("played: no answer"))

    def count_containers(self) -> int:
        host = self._acting.host
        found: int = self._points.around(
            "about", lambda: self._world.workers(host), ExporterError("played: no answer about all of them")
        )
        return found

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState:
        def ask() -> ContainerState:
            self._judge.looked(self._world.by_handle(handle))
            return self._world.look(handle)

        found: ContainerState = self._points.around("look", ask, ActuatorError(f"played: no answer about {cgroup}"))
        return found

    def stop(self, handle: str, *, grace_s: float) -> None:
        def act() -> None:
            slot = self._world.by_handle(handle)
            self._judge.stops_now(slot, self._acting)
            self._world.stop(slot)
            self._judge.stopped(slot)

        self._points.around("stop", act, ActuatorError(f"played: no answer within {grace_s} s"))

    def start(self, handle: str) -> None:
        def act() -> None:
            slot = self._world.by_handle(handle)
            self._judge.starts_now(slot, self._acting)
            self._world.start(slot)

        self._points.around("start", act, ActuatorError("played: no answer"))


class Remediator:
    """One host's executor, if it runs. It is armed to begin with."""

    def __init__(self, host: str, *, world: World, databases: Databases, judge: Judge, points: Points) -> None:
        self.acting = Acting(host=host)
        self.works: Watched | None = None
        self.shared = True
        """Whether other hosts' remediators may work the same ledger."""

        self._world = world
        self._databases = databases
        self._judge = judge
        self._points = points
        self._busy = False
        self._order(armed=self.acting.armed)

    def round(self, trouble: Trouble | None = None) -> None:
        """Once round its loop, started anew if it does not run."""
        if self._busy:
            return  # it is in the middle of a round, and this happens meanwhile
        self._busy = True
        try:
            with self._points.program(self.acting, trouble), self._world.clocks.of(self.acting.host):
                if self.works is None:
                    self.works = self._started()
                self.works._tick(AlwaysChanged(), *[AtOnce()] * 3)  # type: ignore[arg-type]  # all it asks of a pool
        except DatabaseError:
            pass  # nothing is done until it answers
        except Killed:
            self.end()
        finally:
            self.acting.tends = self._busy = False
            self.acting.step = self.acting.episode_id = None

    def end(self) -> None:
        """The executor's process is over; the next round begins with another."""
        self.works = None

    def arm(self, *, armed: bool) -> None:
        """A person orders it, where it is not so yet: the executor that runs is to know of it at its next look."""
        if not self._busy and armed is not self.acting.armed:
            self.acting.armed = armed
            self._order(armed=armed)

    def _order(self, *, armed: bool) -> None:
        host = self.acting.host
        act, now = Act.ARM if armed else Act.DISARM, self._world.clocks.wall(host)
        with self._points.program("person"):
            Ledger(self._databases.ledger).orders.give(
                Order(act=act, at=now, who="a person", because="as the machine draws", host=host)
            )

    def _started(self) -> Watched:
        host = self.acting.host
        ledger, store = Ledger(self._databases.ledger, host=host), JobStore(self._databases.queue)
        ledger.shared = self.shared
        seams: Any = Host(self._world, self._judge, self._points, self.acting)
        settings = LoopSettings(
            limits=LIMITS, safety_limits=NEVER_HELD, interval_s=0.0, sweep_interval_s=5.0, stop_grace_s=0.0
        )
        clients = Clients(exporter=seams, queue=BuiltinQueue(store), actuators={"docker": seams})
        return Watched(ledger, host=host, clients=clients, settings=settings, acting=self.acting)


def deliver(ledger: Ledger, alerts: list[Alert], *, hosts: tuple[str, ...], now: float) -> None:
    """The webhook: admit, then make durable."""
    judged = [(each, admit(each, hosts=hosts, remedies=REMEDIES)) for each in alerts]
    refusals = [refusal for _, refusal in judged if refusal is not None]
    ledger.inbox.accept([each for each, refusal in judged if refusal is None], refusals, now=now)


def fake_time(clocks: Any) -> SimpleNamespace:
    """What stands where a module has imported `time`."""
    return SimpleNamespace(time=clocks.time, monotonic=clocks.monotonic)
