"""Facts that the executor reads before it decides."""

import time
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.job import State
from gpuwarden.queue import JobStore
from remediator import plan
from remediator.actuators import ActuatorError
from remediator.actuators.process import ORPHANS
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor.executor import Clients, Executor
from remediator.executor.gather_facts import FACTS_S
from remediator.executor.timers import EpisodeTimers
from remediator.ledger.ledger import Ledger
from remediator.plan import ContainerState, Facts, Step
from remediator.remedies import REMEDIES
from tests.remediator import builders as build
from tests.remediator.builders import HOST
from tests.remediator.executor.builders import PACE, executor, silent_server, stalled_job, take_up, turn


class Engine:
    """An engine that has the container, has no such container, or does not answer."""

    def __init__(self, kind: str, says: str) -> None:
        self._kind = kind
        self._says = says

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:  # noqa: ARG002
        if self._says == "silent":
            raise ActuatorError("it does not answer")
        return build.container(kind=self._kind, handle=handle) if self._says == "has it" else None


@pytest.mark.parametrize(
    ("docker", "podman", "found", "known"),
    [
        pytest.param("has it", None, "docker", True, id="the only engine has it"),
        pytest.param("has it", "silent", "docker", True, id="the first engine has it"),
        pytest.param("gone", "has it", "podman", True, id="the other engine has it"),
        pytest.param(None, "has it", "podman", True, id="only Podman"),
        pytest.param("gone", "gone", None, True, id="missing in both: gone"),
        pytest.param("gone", "silent", None, False, id="missing in one, the second is silent: unknown"),
        pytest.param("silent", "gone", None, False, id="missing in one, the first is silent: unknown"),
        pytest.param(None, None, None, False, id="no engine: unknown"),
    ],
)
def test_container_is_searched_in_every_engine(
    ledger: Ledger, store: JobStore, docker: str | None, podman: str | None, found: str | None, known: bool
) -> None:
    world = silent_server(ledger)
    says = {"docker": docker, "podman": podman}
    world.boxes["w1"].running = False  # the exporter does not list it
    clients = Clients(
        exporter=world,  # type: ignore[arg-type]
        queue=BuiltinQueue(store),
        actuators={kind: Engine(kind, each) for kind, each in says.items() if each},  # type: ignore[misc]
    )
    works = Executor(ledger, host=HOST, clients=clients, settings=PACE)
    episode = take_up(ledger)

    facts = works.processor.facts.of_container(episode)

    assert (facts.container and facts.container.kind, facts.container_known) == (found, known)
    assert bool(facts.unknown) is not known


class Orphans:
    """What a dead worker in no container left, or an error."""

    def __init__(self, says: str) -> None:
        self._says = says
        self.handles: list[str] = []

    def look(self, handle: str, *, cgroup: str | None = None) -> ContainerState | None:  # noqa: ARG002
        self.handles.append(handle)
        if self._says == "runs":
            raise ActuatorError("process 9 runs")
        return build.container(kind=ORPHANS, handle=handle, startable=False)


DIED: dict[str, Any] = {
    "alive": False, "container_kind": "process", "container": "w1", "container_id": "process:9:1",
    "container_incarnation": "process:9:1@b", "process_ended": True, "worker_uid": 1000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "listed", "orphans", "kind", "unknown"),
    [
        pytest.param({}, None, "left", ORPHANS, "", id="no file of supervised workers"),
        pytest.param({}, "gone", "left", ORPHANS, "", id="not listed"),
        pytest.param({}, "has it", "left", "process", "", id="listed: it is started again"),
        pytest.param({}, "silent", "left", None, "does not answer", id="the list cannot be read"),
        pytest.param({"alive": True}, "gone", "left", None, "", id="alive"),
        pytest.param({"process_ended": None}, None, "left", None, "does not know", id="unknown whether it ended"),
        pytest.param({"worker_uid": None}, None, "left", None, "does not know", id="unknown owner"),
        pytest.param({"process_ended": False}, None, "left", None, "its lock is free", id="runs without its lock"),
        pytest.param({}, None, "runs", None, "process 9 runs", id="runs by the executor"),
        pytest.param({}, None, None, None, "does not know", id="no actuator"),
    ],
)
def test_dead_worker_in_no_container_has_its_orphans(
    ledger: Ledger,
    store: JobStore,
    changed: dict[str, Any],
    listed: str | None,
    orphans: str | None,
    kind: str | None,
    unknown: str,
) -> None:
    world = stalled_job(ledger, store)
    world.worker_evidence = lambda worker, *, host: build.evidence(worker=worker, host=host, **{**DIED, **changed})  # type: ignore[method-assign]
    actuators: dict[str, Any] = {} if listed is None else {"process": Engine("process", listed)}
    actuators |= {} if orphans is None else {ORPHANS: Orphans(orphans)}
    clients = Clients(exporter=world, queue=BuiltinQueue(store), actuators=actuators)  # type: ignore[arg-type]
    works = Executor(ledger, host=HOST, clients=clients, settings=PACE)

    facts = works.processor.facts.of_container(take_up(ledger))

    assert (facts.container and facts.container.kind) == kind
    assert unknown in facts.unknown
    assert bool(facts.unknown) is bool(unknown)
    if kind == ORPHANS:
        assert actuators[ORPHANS].handles == ["w1 process:9:1@b 1000"]


def test_old_facts_are_read_again(ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor is suspended right after the decision, and the worker is active when it resumes."""
    world = stalled_job(ledger, store)
    remedy, decided = REMEDIES["restart_worker"], list[str]()

    def decide_and_sleep(facts: Facts) -> Step:
        step = remedy.decide(facts)
        decided.append(type(step).__name__)
        if isinstance(step, plan.Fence) and decided.count("Fence") == 1:
            slept_s = time.clock_gettime(time.CLOCK_BOOTTIME) + FACTS_S + 1
            monkeypatch.setattr("gpuwarden.clock.boottime_s", lambda: slept_s)
            world.boxes["w1"].hung = False
        return step

    sleepy = {"restart_worker": replace(remedy, decide=decide_and_sleep)}
    monkeypatch.setattr("remediator.executor.process_episode.REMEDIES", sleepy)

    turn(executor(ledger, store, world), ledger)

    assert decided == ["Begin", "Fence", "Wait"]
    assert store.job(1).state is State.RUNNING
    assert world.boxes["w1"].calls == []


def test_uptime_restarts_with_each_incarnation() -> None:
    timers = EpisodeTimers()

    def up_since_s(now_s: float, **changed: Any) -> float:
        return timers.up_since_s(build.container(**changed), now_s)

    assert up_since_s(1.0) == 1.0
    assert up_since_s(2.0) == 1.0
    assert up_since_s(3.0, incarnation=build.REBORN) == 3.0
    assert up_since_s(4.0, incarnation=build.REBORN, running=False) == 4.0
    assert up_since_s(5.0, incarnation=build.REBORN) == 5.0
    assert timers.up_since_s(None, 6.0) == 6.0
