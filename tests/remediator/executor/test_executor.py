"""The executor with a real ledger and a real queue; only the host's containers and exporter are played: see `world`."""

import itertools
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, text

from gpuwarden.db import engine as db_engine
from gpuwarden.db import transactions as db_transactions
from gpuwarden.db.engine import DatabaseError
from gpuwarden.db.migrate import NewerTablesError
from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import JobClass, State, Trip
from gpuwarden.queue import JobStore, Submission
from gpuwarden.queue.schema import QUEUE
from remediator import plan
from remediator.actuators import ActuatorError
from remediator.clients.alertmanager import Silences
from remediator.clients.job_queue_sql import RENEWAL_S, BuiltinQueue
from remediator.executor.executor import (
    Executor,
    Hands,
    Pace,
)
from remediator.executor.gather_facts import FACTS_S
from remediator.executor.lock import AlreadyExecutingError, ExecutorLock
from remediator.executor.perform import Performer
from remediator.executor.process_episode import STEPS_MAX
from remediator.executor.timers import EpisodeTimers
from remediator.ledger.database import LedgerPart
from remediator.ledger.executors import Executors
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory
from remediator.ledger.schema import LEDGER
from remediator.plan import Begin, ContainerState, Facts, Kind, Limits, Outcome, Stage, Start, Step, WouldAct
from remediator.reasons import Finding, Reason
from remediator.remedies import REMEDIES
from remediator.remedies.guards import Act, Order, Safeguards
from remediator.settings.policy_file import PolicyFile
from tests.remediator import builders as build
from tests.remediator.builders import HOST, alert, server_alert
from tests.remediator.world import Box, World
from tests.waiting import eventually

LIMITS = Limits(evidence_fresh_s=5.0, settle_bound_s=60.0, free_bound_s=120.0, retries_max=3, start_seen_s=0.0)
BOUNDLESS = Safeguards(cooldown_s=0.0, storm_targets=1000, storm_frees=1000)
PACE = Pace(limits=LIMITS, safeguards=BOUNDLESS, look_again_s=0.02, tend_s=0.02, stop_grace_s=0.0)
ROUNDS_MAX = 60


def running(store: JobStore, *, worker: str = "w1", incarnation: str = "i1", **submission: Any) -> int:
    """A job that a worker has claimed; its id."""
    job_id = store.runs.submit(Submission(queue=worker, **submission), now=time.time())
    assert store.claims.claim(worker, host=HOST, worker=worker, incarnation=incarnation, now=time.time())
    return job_id


def executor(
    ledger: Any,
    store: Any,
    world: Any,
    *,
    pace: Pace = PACE,
    host: str = HOST,
    lock: ExecutorLock | None = None,
    armed: bool = True,
    policy: PolicyFile | None = None,
    silences: Silences | None = None,
) -> Executor:
    """An executor, after its host was armed or disarmed."""
    arm(next((part for part in vars(ledger).values() if isinstance(part, Ledger)), ledger), host=host, armed=armed)
    queue = BuiltinQueue(store) if isinstance(store, JobStore) else store
    hands = Hands(witness=world, queue=queue, actuators={"docker": world}, policy=policy, silences=silences)
    return Executor(ledger, host=host, hands=hands, pace=pace, lock=lock)


def arm(ledger: Ledger, *, host: str = HOST, armed: bool = True) -> None:
    """Arm or disarm a host that is not so already."""
    if ledger.orders.current().armed(host=host, remedy="restart_worker") is not armed:
        act = Act.ARM if armed else Act.DISARM
        ledger.orders.give(Order(act=act, at=time.time(), who="test", because="a test", host=host))


def turn(works: Executor, ledger: Ledger) -> None:
    """One look without the loop: take what is new and give every open episode its share."""
    works.clock.tick()
    while ledger.inbox.take_new(HOST, now=time.time()):
        pass
    for episode in ledger.episodes.list_open(HOST):
        works.process_episode(episode)


def sql(store: JobStore | Ledger, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement in its database; the rows that it returns."""
    with db_transactions.writing(store._engine) as connection:
        found = connection.exec_driver_sql(statement)
        return [tuple(row) for row in found] if found.returns_rows else []


def to_the_end(works: Executor, ledger: Ledger) -> None:
    for _ in range(ROUNDS_MAX):
        turn(works, ledger)
        if not ledger.episodes.list_open():
            return
    pytest.fail(f"still open after {ROUNDS_MAX} rounds: {told(ledger)}")


def told(ledger: Ledger, episode_id: int = 1) -> list[str]:
    """Its account as words: act and step."""
    return [f"{entry.act} {entry.what}" for entry in story(ledger, episode_id).entries]


def story(ledger: Ledger, episode_id: int = 1) -> EpisodeHistory:
    found = ledger.reports.get(episode_id)
    assert found is not None
    return found


def reason_of(ledger: Ledger, step: str) -> str | None:
    """Why a step of its account was taken."""
    (found,) = (entry.reason for entry in story(ledger).entries if entry.step == step)
    return found


def wedged(ledger: Ledger, store: JobStore, **submission: Any) -> World:
    """A job that runs on w1, wedged, and its alert in the inbox."""
    job_id = running(store, **submission)
    ledger.inbox.accept([alert(job_id=str(job_id))], [], now=time.time())
    return World(Box(worker="w1", job_id=job_id))


# --- a server


def silent_server(ledger: Ledger, **box: Any) -> World:
    """A server in a container, silent, and its alert in the inbox."""
    found = Box(worker="w1", job_id=None, attempt=None, **box)
    ledger.inbox.accept([server_alert(container="w1", incarnation=found.incarnation)], [], now=time.time())
    return World(found)


class Engine:
    """An engine that has the accused container, or none of that id, or does not answer."""

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
        pytest.param("has it", "silent", "docker", True, id="the first one asked has it"),
        pytest.param("gone", "has it", "podman", True, id="the other engine has it"),
        pytest.param(None, "has it", "podman", True, id="there is only Podman"),
        pytest.param("gone", "gone", None, True, id="gone from both is gone"),
        pytest.param("gone", "silent", None, False, id="gone from one alone is not known to be gone"),
        pytest.param("silent", "gone", None, False, id="nor when it is the other one"),
        pytest.param(None, None, None, False, id="no engine, no knowledge"),
    ],
)
def test_an_accused_container_is_looked_for_in_every_engine(
    ledger: Ledger, store: JobStore, docker: str | None, podman: str | None, found: str | None, known: bool
) -> None:
    world = silent_server(ledger)
    says = {"docker": docker, "podman": podman}
    world.boxes["w1"].running = False  # the exporter does not list it
    hands = Hands(
        witness=world,  # type: ignore[arg-type]
        queue=BuiltinQueue(store),
        actuators={kind: Engine(kind, each) for kind, each in says.items() if each},  # type: ignore[misc]
    )
    works = Executor(ledger, host=HOST, hands=hands, pace=PACE)
    ledger.inbox.take_new(HOST, now=time.time())
    (episode,) = ledger.episodes.list_open(HOST)

    facts = works.processor.facts.of_container(episode)

    assert (facts.container and facts.container.kind, facts.container_known) == (found, known)
    assert bool(facts.unknown) is not known


def test_a_silent_server_is_freed_and_every_step_of_it_told_in_order(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)

    to_the_end(executor(ledger, store, world), ledger)

    assert told(ledger) == [
        "saw alert: firing",
        "decided begin",
        "decided stop",
        "did stop",
        "saw free: dead",
        "decided start",
        "did start",
        "saw free: done",
        "decided close: mended",
    ]
    assert world.boxes["w1"].calls == ["stop", "start"]


def test_a_server_is_freed_by_its_own_remedy_alone(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    works = executor(ledger, store, world, armed=False)
    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="test", because="", remedy="restart_worker"))
    turn(works, ledger)
    assert told(ledger)[1:] == ["would act", "decided wait: dry_run"]

    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="test", because="", remedy="restart_container"))
    to_the_end(works, ledger)

    assert story(ledger).outcome == "mended"


def test_a_pause_a_cool_down_and_the_brake_hold_servers_too(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    guarded = replace(PACE, safeguards=Safeguards(cooldown_s=3600.0, storm_targets=1))
    works = executor(ledger, store, world, pace=guarded)
    ledger.orders.give(Order(act=Act.PAUSE, at=time.time(), who="test", because="", until=time.time() + 3600))
    turn(works, ledger)
    assert "decided wait: paused" in told(ledger)
    ledger.orders.give(Order(act=Act.RESUME, at=time.time(), who="test", because=""))
    to_the_end(works, ledger)
    box = world.boxes["w1"]
    box.wedged = True
    world.boxes["w2"] = other = Box(worker="w2", job_id=None, attempt=None)

    again = server_alert("s2", container="w1", incarnation=box.incarnation)
    ledger.inbox.accept([again, server_alert("s3", container="w2", incarnation=other.incarnation)], [], now=time.time())
    turn(works, ledger)

    assert "decided wait: cooldown" in told(ledger, 2)
    assert told(ledger, 3)[-1] == "decided wait: circuit_breaker"
    assert (box.calls, other.calls) == (["stop", "start"], [])


def test_a_server_that_a_person_stopped_is_left_down(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    world.boxes["w1"].running = False

    to_the_end(executor(ledger, store, world), ledger)

    assert world.boxes["w1"].calls == []
    assert story(ledger).outcome == "superseded"


def test_a_server_that_a_person_stops_between_the_promise_and_the_stop_is_left_down(
    ledger: Ledger, store: JobStore
) -> None:
    world = silent_server(ledger)
    works = executor(ledger, store, world)
    begin = ledger.intents.begin

    def begin_and_stop(*promised: Any, **how: Any) -> Any:
        done = begin(*promised, **how)
        world.boxes["w1"].running = False
        return done

    ledger.intents.begin = begin_and_stop  # type: ignore[method-assign]

    to_the_end(works, ledger)

    assert world.boxes["w1"].calls == []
    assert "decided withdraw" in told(ledger)
    assert story(ledger).outcome == "superseded"


def test_a_server_that_was_restarted_by_others_first_is_not_restarted_again(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    world.boxes["w1"].starts += 1

    to_the_end(executor(ledger, store, world), ledger)

    assert world.boxes["w1"].calls == []
    assert story(ledger).outcome == "superseded"


def test_a_server_that_answers_again_after_the_promise_is_not_stopped(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    works = executor(ledger, store, world)
    world.before_stop = lambda _: pytest.fail("it was stopped")
    begin = ledger.intents.begin

    def begin_and_mend(*promised: Any, **how: Any) -> Any:
        done = begin(*promised, **how)
        world.boxes["w1"].wedged = False
        return done

    ledger.intents.begin = begin_and_mend  # type: ignore[method-assign]

    turn(works, ledger)

    assert told(ledger)[-1] == "decided wait: unconfirmed"


def test_a_server_whose_exporter_is_silent_is_waited_for(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    world.silent = True

    turn(executor(ledger, store, world), ledger)

    assert told(ledger)[-1] == "decided wait: no_evidence"


def test_a_server_that_cannot_be_killed_puts_its_gpus_in_quarantine_and_no_slot_of_its_name(
    ledger: Ledger, store: JobStore
) -> None:
    world = silent_server(ledger, unkillable=True)
    hurried = replace(PACE, limits=replace(LIMITS, free_bound_s=0.0))

    to_the_end(executor(ledger, store, world, pace=hurried), ledger)

    assert [(each.gpu, each.worker) for each in store.gpu_quarantine.quarantined()] == [("GPU-0", None)]
    assert story(ledger).outcome == "partly_mended"


# --- one episode


def test_a_wedge_is_mended_and_every_step_of_it_told_in_order(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store, priority=100)

    to_the_end(executor(ledger, store, world), ledger)

    assert told(ledger) == [
        "saw alert: firing",
        "decided begin",
        "did fence",
        "decided stop",
        "did stop",
        "saw free: dead",
        "did requeue",
        "decided start",
        "did start",
        "saw free: done",
        "decided close: mended",
    ]
    assert world.boxes["w1"].calls == ["stop", "start"]
    job = store.job(1)
    assert (job.state, job.watchdog_retries, job.priority) == (State.QUEUED, 1, 10)


def test_a_worker_that_heeds_sigterm_is_mended_though_the_exporter_knows_it_no_more(
    ledger: Ledger, store: JobStore
) -> None:
    world = wedged(ledger, store)
    world.boxes["w1"].ends_cleanly = True

    to_the_end(executor(ledger, store, world), ledger)

    assert story(ledger).outcome == "mended"


def test_a_killed_workers_row_no_longer_counts_as_busy(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store, model="sdxl")

    to_the_end(executor(ledger, store, world), ledger)

    ((model, seen_at),) = sql(store, "SELECT current_model, last_seen_at FROM workers")
    assert model is None
    assert seen_at < time.time() - 90


def test_the_fourth_trip_fails_the_job_and_its_run(ledger: Ledger, store: JobStore) -> None:
    job_id = store.runs.submit(Submission(queue="w1", run_id="r1"), now=time.time())
    sibling = store.runs.submit(Submission(queue="other", run_id="r1"), now=time.time())
    for attempt in range(1, 5):
        incarnation = f"i{attempt}"
        store.claims.register("w1", host=HOST, worker="w1", incarnation=incarnation, now=time.time())
        assert store.claims.claim("w1", host=HOST, worker="w1", incarnation=incarnation, now=time.time())
        accused = alert(job_id=str(job_id), attempt=str(attempt), incarnation=incarnation)
        ledger.inbox.accept([accused], [], now=time.time())
        box = Box(worker="w1", job_id=job_id, attempt=attempt, worker_incarnation=incarnation)
        world = World(box)
        box.worker = f"w1-{attempt}"  # so that each incarnation differs
        world.boxes = {"w1": box}
        to_the_end(executor(ledger, store, world), ledger)

    assert [told(ledger, each)[6] for each in range(1, 5)] == ["did requeue"] * 3 + ["did fail"]
    assert store.job(job_id).state is State.FAILED
    assert store.outbox.dispatch_events(job_id) == ["failed", "run_failed"]
    assert store.runs.state("r1") == "failed"
    assert store.job(sibling).state is State.CANCELLED


def test_an_ingest_job_fails_at_its_first_trip(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store, job_class=JobClass.INGEST_FETCH)

    to_the_end(executor(ledger, store, world), ledger)

    assert "did fail" in told(ledger)
    assert store.job(1).state is State.FAILED


def test_a_job_that_the_lease_took_back_does_not_excuse_its_container(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    store.sweeps.reclaim_expired(now=time.time() + 10_000)

    to_the_end(executor(ledger, store, world), ledger)

    assert told(ledger)[2:5] == ["saw settle: abandoned", "decided stop", "did stop"]
    assert world.boxes["w1"].calls == ["stop", "start"]
    assert store.job(1).watchdog_retries == 0


def test_a_job_that_another_worker_holds_is_not_taken_from_it(ledger: Ledger, store: JobStore) -> None:
    """A worker's files may claim what they like; the queue knows who holds it."""
    job_id = running(store, worker="w2", incarnation="i9")
    ledger.inbox.accept([alert(job_id=str(job_id))], [], now=time.time())

    to_the_end(executor(ledger, store, World(Box(worker="w1", job_id=job_id))), ledger)

    assert store.job(job_id).state is State.RUNNING
    assert "saw settle: abandoned" in told(ledger)


def test_a_container_without_a_job_is_freed_alone(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No condition of that kind is defined yet: this one stands in for it, to drive the performer."""
    ledger.inbox.accept([alert(job_id=None, attempt=None)], [], now=time.time())
    world = World(Box(worker="w1", job_id=None, attempt=None))
    monkeypatch.setattr(
        "remediator.remedies.restart_worker.confirm",
        lambda seen, _: Finding.of(world.boxes["w1"].wedged, seen.worker),
    )

    to_the_end(executor(ledger, store, world), ledger)

    assert story(ledger).outcome == "mended"
    assert world.boxes["w1"].calls == ["stop", "start"]


def test_a_dry_run_touches_nothing_says_once_what_it_would_do_and_arming_does_it(
    ledger: Ledger, store: JobStore
) -> None:
    world = wedged(ledger, store)
    dry = executor(ledger, store, world, armed=False)
    for _ in range(5):
        turn(dry, ledger)
    before = store.job(1)

    assert told(ledger) == ["saw alert: firing", "would act", "decided wait: dry_run"]
    assert (before.state, before.attempt, before.because) == (State.RUNNING, 1, None)
    assert world.boxes["w1"].calls == []

    to_the_end(executor(ledger, store, world), ledger)
    assert world.boxes["w1"].calls == ["stop", "start"]


def test_disarmed_in_the_middle_it_does_not_stop_and_armed_again_it_goes_on(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    with pytest.raises(Crash):
        turn(executor(Crashing(ledger, after=1), store, world), ledger)
    assert told(ledger)[-1] == "decided begin"

    turn(executor(ledger, store, world, armed=False), ledger)
    assert told(ledger)[-1] == "decided wait: dry_run"
    assert store.job(1).state is State.RUNNING
    assert world.boxes["w1"].calls == []

    to_the_end(executor(ledger, store, world), ledger)
    assert story(ledger).outcome == "mended"


def test_what_is_not_confirmed_waits_once_for_each_reason_and_is_let_go_when_the_alert_ends(
    ledger: Ledger, store: JobStore
) -> None:
    world = wedged(ledger, store)
    world.boxes["w1"].wedged = False
    works = executor(ledger, store, world)
    for silent in (False, False, True, True):
        world.silent = silent
        turn(works, ledger)
        turn(works, ledger)
    world.silent = False
    ledger.inbox.accept([alert(job_id="1", firing=False)], [], now=time.time())
    turn(works, ledger)

    assert told(ledger) == [
        "saw alert: firing",
        "decided wait: unconfirmed",
        "decided wait: no_evidence",
        "saw alert: resolved",
        "decided close: unconfirmed",
    ]
    assert store.job(1).state is State.RUNNING


def test_what_did_not_opt_in_is_refused(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    world.boxes["w1"].managed = False

    to_the_end(executor(ledger, store, world), ledger)

    assert story(ledger).outcome == "refused"
    assert world.boxes["w1"].calls == []


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda world: setattr(world, "engine_down", True), Reason.NO_CONTAINER),
        (lambda world: world.boxes.clear(), Reason.NO_EVIDENCE),
    ],
    ids=["the engine is down", "no such worker"],
)
def test_what_cannot_be_seen_is_waited_for(
    ledger: Ledger, store: JobStore, broken: Callable[[World], None], reason: Reason
) -> None:
    world = wedged(ledger, store)
    broken(world)

    turn(executor(ledger, store, world), ledger)

    assert story(ledger).entries[-1].reason == reason
    assert store.job(1).state is State.RUNNING


def test_a_kind_of_container_it_has_no_hands_for_is_waited_for(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    works = Executor(ledger, host=HOST, hands=Hands(witness=world, queue=BuiltinQueue(store), actuators={}), pace=PACE)  # type: ignore[arg-type]  # the world stands at the witness's seam

    turn(works, ledger)

    assert story(ledger).entries[-1].reason == Reason.NO_CONTAINER


def test_a_queue_that_is_gone_is_waited_for(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    sql(store, "ALTER TABLE jobs RENAME TO lost")

    turn(executor(ledger, store, world), ledger)

    assert told(ledger)[-2:] == ["decided begin", "decided wait: queue_unreachable"]
    sql(store, "ALTER TABLE lost RENAME TO jobs")
    to_the_end(executor(ledger, store, world), ledger)
    assert store.job(1).state is State.QUEUED


def test_a_stop_that_fails_is_recorded_and_tried_again_at_the_loops_pace(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    world.boxes["w1"].unkillable = True
    works = executor(ledger, store, world)

    turn(works, ledger)
    assert told(ledger)[-2:] == ["decided stop", "failed stop"]
    assert story(ledger).entries[-1].message == "it does not die"
    assert world.boxes["w1"].calls == ["stop"]

    world.boxes["w1"].unkillable = False
    to_the_end(works, ledger)
    assert story(ledger).outcome == "mended"
    assert world.boxes["w1"].calls == ["stop", "stop", "start"]


def test_what_cannot_be_killed_has_its_gpu_taken_out_of_use_and_its_job_goes_elsewhere(
    ledger: Ledger, store: JobStore
) -> None:
    world = wedged(ledger, store)
    world.boxes["w1"].unkillable = True
    bounds = replace(LIMITS, settle_bound_s=0.05, free_bound_s=0.1)

    to_the_end(executor(ledger, store, world, pace=replace(PACE, limits=bounds)), ledger)

    account = told(ledger)
    assert account.index("did quarantine") < account.index("saw free: abandoned")
    assert account.count("did quarantine") == 1
    assert story(ledger).outcome == "partly_mended"
    assert "start" not in world.boxes["w1"].calls
    (out_of_use,) = store.gpu_quarantine.quarantined()
    assert (out_of_use.gpu, out_of_use.host, out_of_use.worker) == ("GPU-0", HOST, "w1")
    assert reason_of(ledger, "quarantine") == Reason.STOP_FAILED

    assert store.job(1).state is State.QUEUED
    assert claims(store, "w2", gpu="GPU-0") is None, "another worker of that GPU"
    assert claims(store, "w1", incarnation="i2") is None, "the slot itself, whatever GPU it says to have"
    assert claims(store, "w3", gpu="GPU-1") == 1


def test_a_lost_gpu_is_taken_out_of_use_its_job_goes_elsewhere_and_its_worker_is_started(
    ledger: Ledger, store: JobStore
) -> None:
    job_id = running(store)
    ledger.inbox.accept(
        [alert(job_id=str(job_id), alertname="GpuwardenJobGpuLost", trip="health")], [], now=time.time()
    )
    world = World(Box(worker="w1", job_id=job_id))
    world.gpu_lost = True

    to_the_end(executor(ledger, store, world), ledger)

    account = told(ledger)
    assert account.index("decided stop") < account.index("did quarantine") < account.index("did requeue")
    assert account.index("did requeue") < account.index("decided start")
    assert account.count("did quarantine") == 1
    assert story(ledger).outcome == "mended"
    (out_of_use,) = store.gpu_quarantine.quarantined()
    assert (out_of_use.gpu, out_of_use.host, out_of_use.worker) == ("GPU-0", HOST, "w1")
    assert reason_of(ledger, "quarantine") == Reason.GPU_LOST
    assert claims(store, "w1", incarnation="i2") is None, "the slot itself"
    assert claims(store, "w2", gpu="GPU-0") is None, "another worker of that GPU"
    assert claims(store, "w3", gpu="GPU-1") == 1


def test_a_gpu_that_is_lost_for_one_look_stays_in_use(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    world.gpu_lost_s, about = 0.0, world.about

    def lost_once(worker: str, *, host: str) -> WorkerFacts:
        box = world.boxes["w1"]
        world.gpu_lost = not world.gpu_lost and not box.running and not box.starts
        return about(worker, host=host)

    world.about = lost_once  # type: ignore[method-assign]

    to_the_end(executor(ledger, store, world), ledger)

    assert "decided wait: driver_unreachable" in told(ledger), "it was lost when it was to be seen dead"
    assert story(ledger).outcome == Outcome.MENDED
    assert store.gpu_quarantine.quarantined() == []


def claims(store: JobStore, worker: str, *, incarnation: str = "new", gpu: str = "", host: str = HOST) -> int | None:
    """The job that a worker of queue w1 gets, if any."""
    store.claims.register(
        "w1", host=host, worker=worker, incarnation=incarnation, now=store.now(), gpus=[gpu] if gpu else []
    )
    job = store.claims.claim("w1", host=host, worker=worker, incarnation=incarnation, now=store.now())
    return None if job is None else job.job_id


@pytest.mark.parametrize(("avoid_s", "gets_it"), [(600.0, None), (0.0, 1)], ids=["for a while", "not at all"])
def test_a_requeued_job_avoids_the_slot_it_was_taken_from(
    ledger: Ledger, store: JobStore, avoid_s: float, gets_it: int | None
) -> None:
    world = wedged(ledger, store)
    store.claims.register("w1", host="box2", worker="w2", incarnation="i9", now=store.now(), gpus=["GPU-1"])
    pace = replace(PACE, limits=replace(LIMITS, avoid_s=avoid_s))

    to_the_end(executor(ledger, store, world, pace=pace), ledger)

    assert claims(store, "w1", incarnation="i2") == gets_it
    assert claims(store, "w4", gpu="GPU-0") is None
    assert gets_it or claims(store, "w2", host="box2", gpu="GPU-1") == 1


class Losing:
    """A ledger whose database goes away right before it keeps one advance."""

    def __init__(self, ledger: Ledger, *, step: str) -> None:
        self._ledger = ledger
        self._step = step
        self.lost = 0
        self.intents = self

    def __getattr__(self, name: str) -> Any:
        intents = self._ledger.intents
        return getattr(intents if hasattr(intents, name) else self._ledger, name)

    def advance(self, *arguments: Any, **named: Any) -> bool:
        if named["step"] == self._step and not self.lost:
            self.lost += 1
            raise DatabaseError("the server closed the connection unexpectedly")
        return self._ledger.intents.advance(*arguments, **named)


@pytest.mark.parametrize("lost", ["fence", "stop", "requeue", "fail", "quarantine", "start"])
def test_an_act_whose_record_was_lost_is_repeated_without_harm(ledger: Ledger, store: JobStore, lost: str) -> None:
    world = wedged(ledger, store, job_class=JobClass.INGEST_LOAD if lost == "fail" else JobClass.GPU)
    world.boxes["w1"].unkillable = lost == "quarantine"
    losing = Losing(ledger, step=lost)
    bounds = replace(LIMITS, settle_bound_s=0.05, free_bound_s=0.1) if lost == "quarantine" else LIMITS

    to_the_end(executor(losing, store, world, pace=replace(PACE, limits=bounds)), ledger)

    assert losing.lost == 1
    if lost == "quarantine":
        assert [each.gpu for each in store.gpu_quarantine.quarantined()] == ["GPU-0"]
        assert store.job(1).watchdog_retries == 1
    else:
        assert_mended_once(ledger, store, world, failed=lost == "fail")


def test_facts_that_grew_old_before_the_act_are_read_again(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended right after the decision, it wakes to a worker that has long gone on."""
    world = wedged(ledger, store)
    remedy, decided = REMEDIES["restart_worker"], list[str]()

    def decide_and_sleep(facts: Facts) -> Step:
        step = remedy.decide(facts)
        decided.append(type(step).__name__)
        if isinstance(step, plan.Fence) and decided.count("Fence") == 1:
            slept_s = time.clock_gettime(time.CLOCK_BOOTTIME) + FACTS_S + 1
            monkeypatch.setattr("gpuwarden.clock.boottime_s", lambda: slept_s)
            world.boxes["w1"].wedged = False
        return step

    sleepy = {"restart_worker": replace(remedy, decide=decide_and_sleep)}
    monkeypatch.setattr("remediator.executor.process_episode.REMEDIES", sleepy)

    turn(executor(ledger, store, world), ledger)

    assert decided == ["Begin", "Fence", "Wait"]
    assert store.job(1).state is State.RUNNING
    assert world.boxes["w1"].calls == []


def test_a_container_that_ends_as_soon_as_it_starts_was_started_and_is_not_started_again(
    ledger: Ledger, store: JobStore
) -> None:
    world = wedged(ledger, store)
    start = world.start

    def start_and_end(handle: str) -> None:
        start(handle)
        world.boxes["w1"].running = False

    world.start = start_and_end  # type: ignore[method-assign]
    works = executor(ledger, store, world)

    turn(works, ledger)
    turn(works, ledger)

    assert world.boxes["w1"].calls == ["stop", "start"]
    assert story(ledger).outcome == "partly_mended"
    assert told(ledger)[-2:] == ["saw free: abandoned", "decided close: partly_mended"]


@pytest.mark.parametrize(("lasts", "outcome"), [(False, "partly_mended"), (True, "mended")])
def test_a_start_is_believed_when_the_container_runs_at_a_later_look(
    ledger: Ledger, store: JobStore, *, lasts: bool, outcome: str
) -> None:
    world = wedged(ledger, store)
    seen_s = 0.5
    works = executor(ledger, store, world, pace=replace(PACE, limits=replace(LIMITS, start_seen_s=seen_s)))

    started_s = time.monotonic()
    turn(works, ledger)
    assert told(ledger)[-2:] == ["did start", "decided wait: stabilizing"]
    world.boxes["w1"].running = lasts

    def is_over() -> bool:
        turn(works, ledger)
        return not ledger.episodes.list_open()

    eventually(is_over, "the episode is closed", within_s=10)

    assert story(ledger).outcome == outcome
    assert world.boxes["w1"].calls == ["stop", "start"]
    assert not lasts or time.monotonic() - started_s >= seen_s


def test_what_ends_and_starts_again_between_two_looks_is_looked_at_anew() -> None:
    timers = EpisodeTimers()

    def up_since_s(now_s: float, **changed: Any) -> float:
        return timers.up_since_s(build.container(**changed), now_s)

    assert up_since_s(1.0) == 1.0
    assert up_since_s(2.0) == 1.0
    assert up_since_s(3.0, incarnation=build.REBORN) == 3.0
    assert up_since_s(4.0, incarnation=build.REBORN, running=False) == 4.0
    assert up_since_s(5.0, incarnation=build.REBORN) == 5.0
    assert timers.up_since_s(None, 6.0) == 6.0


def test_an_incarnation_that_ends_between_the_decision_and_the_stop_is_not_stopped(
    ledger: Ledger, store: JobStore
) -> None:
    world = wedged(ledger, store)
    box, look, looks = world.boxes["w1"], world.look, itertools.count()

    def look_and_restart(handle: str, *, cgroup: str | None = None) -> Any:
        if next(looks) == 3:  # right before the stop: somebody restarts it
            box.starts, box.wedged = box.starts + 1, False
        return look(handle, cgroup=cgroup)

    world.look = look_and_restart  # type: ignore[method-assign]

    to_the_end(executor(ledger, store, world), ledger)

    assert box.calls == []
    assert "decided stop" not in told(ledger)
    assert story(ledger).outcome == "mended"
    assert store.job(1).watchdog_retries == 1


def test_a_job_that_completes_between_the_decision_and_the_fence_stays_completed(
    ledger: Ledger, store: JobStore
) -> None:
    world = wedged(ledger, store)

    class Finishing(BuiltinQueue):
        def fence(self, job_id: int, **how: Any) -> bool:
            assert store.claims.complete(job_id, attempt=1, incarnation="i1", now=time.time())
            world.boxes["w1"].wedged = False
            world.boxes["w1"].attempt = None
            world.boxes["w1"].job_id = None
            return super().fence(job_id, **how)

    arm(ledger)
    works = Executor(
        ledger,
        host=HOST,
        hands=Hands(witness=world, queue=Finishing(store), actuators={"docker": world}),  # type: ignore[arg-type]
        pace=PACE,
    )

    to_the_end(works, ledger)

    assert store.job(1).state is State.COMPLETED
    assert "did fence" not in told(ledger)
    assert world.boxes["w1"].calls == []
    assert story(ledger).outcome == "superseded"


def test_another_trip_of_the_same_incarnation_is_superseded_not_freed_twice(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    to_the_end(executor(ledger, store, world), ledger)
    box = world.boxes["w1"]
    box.starts, box.wedged = 0, True  # the very same incarnation, as no engine would ever show it again
    ledger.inbox.accept([alert("second", job_id="1")], [], now=time.time())

    to_the_end(executor(ledger, store, world), ledger)

    assert story(ledger, 2).outcome == "superseded"
    assert box.calls == ["stop", "start"]


def test_a_worker_that_cannot_be_retired_holds_nothing_up(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)

    class Sulking(BuiltinQueue):
        def retire_worker(self, **_: Any) -> None:
            raise DatabaseError("locked")

    arm(ledger)
    works = Executor(
        ledger,
        host=HOST,
        hands=Hands(witness=world, queue=Sulking(store), actuators={"docker": world}),  # type: ignore[arg-type]
        pace=PACE,
    )

    to_the_end(works, ledger)

    assert story(ledger).outcome == "mended"


def test_an_episode_that_never_settles_down_leaves_the_others_their_turn(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = wedged(ledger, store)
    asked = itertools.count()
    begin = Begin(
        trip=Trip.STALL, free_key="k", container_kind="docker", container_handle="h", container_name="n",
        settle_key=None, worker_incarnation="i1", message="b",
    )  # fmt: skip

    def restless(_: Facts) -> Step:
        return WouldAct(message="a") if next(asked) % 2 else begin

    monkeypatch.setattr(
        "remediator.executor.process_episode.REMEDIES",
        {"restart_worker": replace(REMEDIES["restart_worker"], decide=restless)},
    )
    monkeypatch.setattr(Performer, "perform", lambda *_: None)

    turn(executor(ledger, store, world), ledger)

    assert next(asked) == STEPS_MAX


def test_two_that_hold_the_same_decision_start_the_container_once(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    works = executor(ledger, store, world)
    for after in itertools.count(1):
        with suppress(Crash):
            turn(executor(Crashing(ledger, after=after), store, world), ledger)
        (held,) = ledger.episodes.list_open()
        if held.free and held.free.stage is Stage.DEAD:
            break

    works.processor.performer.perform(held, Start(message="first"))
    works.processor.performer.perform(held, Start(message="second, of the same reading"))

    assert world.boxes["w1"].calls.count("start") == 1


def test_a_decision_that_its_episode_cannot_have_is_a_defect_not_an_act(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    works = executor(ledger, store, world)
    ledger.inbox.take_new(HOST, now=time.time())
    (episode,) = ledger.episodes.list_open()

    for step in (
        plan.Fence(message="no settle"),
        plan.Stop(message="no free"),
        plan.Quarantine(reason=Reason.GPU_LOST, message="no free"),
        plan.Wait(reason=Reason.DONE, message="b"),
    ):
        with pytest.raises(AssertionError):
            works.processor.performer.perform(episode, step)
    works.processor.performer.perform(
        episode, plan.Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.DONE, message="no free either")
    )

    assert told(ledger) == ["saw alert: firing"]
    assert world.boxes["w1"].calls == []


def test_an_alert_that_named_no_incarnation_is_mended_too(ledger: Ledger, store: JobStore) -> None:
    job_id = running(store)
    ledger.inbox.accept([alert(job_id=str(job_id), incarnation=None)], [], now=time.time())
    world = World(Box(worker="w1", job_id=job_id))

    to_the_end(executor(ledger, store, world), ledger)

    assert story(ledger).outcome == Outcome.MENDED
    assert store.job(job_id).state is State.QUEUED


def test_a_wedge_that_holds_the_queues_lock_is_stopped_first_and_fenced_when_it_is_dead(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker does that stopped in the middle of a write; the kernel ends its transaction with it."""
    monkeypatch.setattr("remediator.remedies.restart_worker.QUEUE_PATIENCE_S", 0.1)
    world = wedged(ledger, store)
    with closing(store._engine.connect().execution_options(writes=True)) as its_own:
        transaction = its_own.begin()
        its_own.execute(text("UPDATE jobs SET priority = priority"))
        world.before_stop = lambda _: transaction.rollback()

        to_the_end(executor(ledger, store, world), ledger)

    account = told(ledger)
    assert account.index("did stop") < account.index("did fence") < account.index("did requeue")
    assert "not fenced yet" in next(entry.message for entry in story(ledger).entries if entry.step == "stop")
    assert world.boxes["w1"].calls == ["stop", "start"]
    assert (store.job(1).state, store.job(1).watchdog_retries) == (State.QUEUED, 1)


def test_and_so_is_a_wedge_the_fence_of_which_ends_in_a_defect(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remediator.remedies.restart_worker.QUEUE_PATIENCE_S", 0.1)
    world = wedged(ledger, store)

    class Defective(BuiltinQueue):
        def fence(self, job_id: int, **how: Any) -> bool:
            if world.boxes["w1"].running:
                raise ZeroDivisionError
            return super().fence(job_id, **how)

    with looping(executor(ledger, Defective(store), world)):
        eventually(lambda: story_outcome(ledger) == "mended", "it is stopped all the same, and then fenced")

    account = told(ledger)
    assert account.index("did stop") < account.index("did fence") < account.index("did requeue")


def test_a_refusal_of_long_ago_does_not_have_a_wedge_stopped_before_it_is_fenced(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused once, it shows life for longer than facts hold, with a queue that is well by then, and wedges again."""
    monkeypatch.setattr("remediator.remedies.restart_worker.QUEUE_PATIENCE_S", 0.1)
    monkeypatch.setattr("remediator.executor.gather_facts.FACTS_S", 1.0)
    world = wedged(ledger, store)
    box = world.boxes["w1"]

    class Moody(BuiltinQueue):
        def fence(self, job_id: int, **how: Any) -> bool:
            if "failed fence" not in told(ledger):
                box.wedged = False
                raise DatabaseError("database is locked")
            return super().fence(job_id, **how)

    works = executor(ledger, Moody(store), world)

    def is_refused() -> bool:
        turn(works, ledger)
        return "failed fence" in told(ledger)

    eventually(is_refused, "the fence is refused")
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        turn(works, ledger)
    assert told(ledger)[-1] == "decided wait: unconfirmed"
    box.wedged = True

    to_the_end(works, ledger)

    account = told(ledger)
    assert account.index("did fence") < account.index("did stop")
    assert story(ledger).outcome == "mended"


def test_what_the_queue_has_taken_since_counts_as_refused_no_more(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    works = executor(ledger, store, world)
    ledger.inbox.take_new(HOST, now=time.time())
    (episode,) = ledger.episodes.list_open(HOST)

    def refuse() -> bool:
        raise DatabaseError("database is locked")

    def refused() -> list[int]:
        return [
            works.processor.facts.of_container(episode).refused_s_ago is not None,
            told(ledger).count("failed fence"),
        ]

    works.processor.performer._taken(episode, "fence", refuse)
    works.processor.performer._taken(episode, "fence", refuse)
    assert refused() == [True, 1], "on record once"
    works.processor.performer._taken(episode, "fence", lambda: True)
    assert refused() == [False, 1]

    works.processor.performer._taken(episode, "fence", refuse)

    assert refused() == [True, 2], "and once more, for it had taken it meanwhile"


def test_and_is_stopped_again_after_a_stop_that_failed_where_it_hangs_on_a_lost_gpu(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Putting the GPU out of use needs the queue, so that it has to wait for the stop."""
    monkeypatch.setattr("remediator.remedies.restart_worker.QUEUE_PATIENCE_S", 0.1)
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.02)
    job_id = running(store)
    ledger.inbox.accept(
        [alert(job_id=str(job_id), alertname="GpuwardenJobGpuLost", trip="health")], [], now=time.time()
    )
    world = World(Box(worker="w1", job_id=job_id))
    world.gpu_lost = True
    with closing(sqlite3.connect(str(store._engine.url.database), isolation_level=None)) as its_own:
        its_own.execute("BEGIN IMMEDIATE")

        def fails_once(box: Box) -> None:
            box.unkillable = box.calls.count("stop") == 1
            if not box.unkillable:
                its_own.rollback()

        world.before_stop = fails_once
        patient = JobStore.open(store._engine.url.render_as_string(hide_password=False))

        to_the_end(executor(ledger, patient, world), ledger)

    patient.close()
    account = told(ledger)
    assert account.index("did stop") < account.index("did quarantine") < account.index("did requeue")
    assert world.boxes["w1"].calls == ["stop", "stop", "start"]


def refuse_all(queue: Connection) -> None:
    """Begin what keeps everybody else from writing to the queue until it ends."""
    queue.begin()
    if queue.dialect.name == "postgresql":  # the lock of an SQLite file is taken as it begins
        queue.execute(text(f"LOCK TABLE {', '.join(QUEUE.tables.tables)} IN SHARE ROW EXCLUSIVE MODE"))


SETTLES_LATE: dict[str, tuple[dict[str, Any], bool, str, str]] = {
    "requeued": ({}, False, "requeue", "did requeue"),
    "failed": ({"job_class": JobClass.INGEST_LOAD}, False, "fail", "did fail"),
    "its lost GPU put out of use": ({}, True, "quarantine", "did quarantine"),
}


@pytest.mark.parametrize(("submission", "lost", "refused", "done"), SETTLES_LATE.values(), ids=SETTLES_LATE)
def test_a_queue_that_refuses_what_is_due_at_the_bound_holds_up_no_further_stop(
    submission: dict[str, Any],
    lost: bool,
    refused: str,
    done: str,
    ledger: Ledger,
    store: JobStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine fails to stop a fenced worker until the bound is over; only its end frees the queue."""
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.02)
    job_id = running(store, **submission)
    reported: dict[str, Any] = {"alertname": "GpuwardenJobGpuLost", "trip": "health"} if lost else {}
    ledger.inbox.accept([alert(job_id=str(job_id), **reported)], [], now=time.time())
    world = World(Box(worker="w1", job_id=job_id))
    world.gpu_lost = lost
    patient = JobStore.open(store._engine.url.render_as_string(hide_password=False))
    pace = replace(PACE, limits=replace(LIMITS, settle_bound_s=0.3))
    with closing(store._engine.connect().execution_options(writes=True)) as its_own:

        def ends_after_the_bound(box: Box) -> None:
            box.unkillable = f"failed {refused}" not in told(ledger)
            if not box.unkillable:
                its_own.rollback()
            elif not its_own.in_transaction():
                refuse_all(its_own)
                time.sleep(pace.limits.settle_bound_s)

        world.before_stop = ends_after_the_bound

        to_the_end(executor(ledger, patient, world, pace=pace), ledger)

    patient.close()
    account = told(ledger)
    assert account.count(f"failed {refused}") == 1, account
    assert account.index("failed stop") < account.index(f"failed {refused}") < account.index("did stop")
    assert account.index("did stop") < account.index("saw free: dead") < account.index(done)
    assert (account.count(done), story(ledger).outcome) == (1, "mended"), account
    assert store.job(job_id).state == (State.FAILED if refused == "fail" else State.QUEUED)


def test_a_quarantine_that_is_refused_before_the_stop_and_after_it_is_on_record_for_each(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was refused at a stage that is over counts no more; here the queue refuses on."""
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.02)
    job_id = running(store)
    ledger.inbox.accept(
        [alert(job_id=str(job_id), alertname="GpuwardenJobGpuLost", trip="health")], [], now=time.time()
    )
    world = World(Box(worker="w1", job_id=job_id))
    world.gpu_lost = True
    patient = JobStore.open(store._engine.url.render_as_string(hide_password=False))
    pace = replace(PACE, limits=replace(LIMITS, settle_bound_s=0.3))
    with closing(store._engine.connect().execution_options(writes=True)) as its_own:

        def stops_at_the_second_try(box: Box) -> None:
            box.unkillable = "failed quarantine" not in told(ledger)
            if not its_own.in_transaction():
                refuse_all(its_own)
                time.sleep(pace.limits.settle_bound_s)

        world.before_stop = stops_at_the_second_try
        works = executor(ledger, patient, world, pace=pace)

        def refused_twice() -> bool:
            turn(works, ledger)
            return told(ledger).count("failed quarantine") == 2

        eventually(refused_twice, "it is refused at both stages", within_s=30, log=lambda: str(told(ledger)))
        for _ in range(5):
            turn(works, ledger)
        account = told(ledger)
        assert account.count("failed quarantine") == 2, "at each once"
        its_own.rollback()

        to_the_end(works, ledger)

    patient.close()
    first, second = (each for each, entry in enumerate(account) if entry == "failed quarantine")
    assert first < account.index("saw free: dead") < second
    assert told(ledger).count("did quarantine") == 1


def test_a_quarantine_that_was_refused_is_not_asked_for_again_while_disarmed_and_is_once_armed(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.02)
    job_id = running(store)
    ledger.inbox.accept(
        [alert(job_id=str(job_id), alertname="GpuwardenJobGpuLost", trip="health")], [], now=time.time()
    )
    world = World(Box(worker="w1", job_id=job_id, unkillable=True))
    world.gpu_lost = True
    patient = JobStore.open(store._engine.url.render_as_string(hide_password=False))
    pace = replace(PACE, limits=replace(LIMITS, settle_bound_s=0.3))
    with closing(store._engine.connect().execution_options(writes=True)) as its_own:

        def refuses(_: Box) -> None:
            if not its_own.in_transaction() and not told(ledger).count("failed quarantine"):
                refuse_all(its_own)
                time.sleep(pace.limits.settle_bound_s)

        world.before_stop = refuses
        works = executor(ledger, patient, world, pace=pace)

        def refused() -> bool:
            turn(works, ledger)
            return told(ledger).count("failed quarantine") == 1

        eventually(refused, "the queue refuses", within_s=30, log=lambda: str(told(ledger)))
        refused_while_armed = ledger.reports.totals(HOST).quarantines_refused
        arm(ledger, armed=False)
        its_own.rollback()
        for _ in range(10):
            turn(works, ledger)
        while_disarmed = told(ledger), ledger.reports.totals(HOST).quarantines_refused
        arm(ledger)
        armed_again = ledger.reports.totals(HOST).quarantines_refused

        def taken() -> bool:
            turn(works, ledger)
            return "did quarantine" in told(ledger)

        eventually(taken, "armed again it is taken", within_s=30, log=lambda: str(told(ledger)))
    patient.close()

    assert (refused_while_armed, while_disarmed[1], armed_again) == (1, 0, 1)
    assert "did quarantine" not in while_disarmed[0]
    assert ledger.reports.totals(HOST).quarantines_refused == 0


def test_patience_comes_to_an_end_while_the_queue_is_locked(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sweep waits for the lock, and all of them for longer than a loop may stand still; as times 0.2 here."""
    monkeypatch.setattr("remediator.executor.clock.PAUSE_MAX_S", 2.0)
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 1.0)
    monkeypatch.setattr("remediator.executor.housekeeping.HEARTBEAT_S", 0.0)
    monkeypatch.setattr("remediator.clients.job_queue_sql.RENEWAL_S", 0.0)
    world = wedged(ledger, store)
    world.boxes["w1"].unkillable = True
    store.claims.renew(running(store, worker="w2"), attempt=1, incarnation="i1", now=0.0)
    patient = JobStore.open(store._engine.url.render_as_string(hide_password=False))
    bound = replace(PACE, limits=replace(LIMITS, settle_bound_s=3.0))
    with closing(sqlite3.connect(str(store._engine.url.database), isolation_level=None)) as its_own:
        works = executor(ledger, patient, world, pace=bound)
        for _ in range(2):
            turn(works, ledger)
        its_own.execute("BEGIN IMMEDIATE")
        with looping(works):
            eventually(lambda: "failed requeue" in told(ledger), "the bound is reached", within_s=30)
            its_own.execute("ROLLBACK")

    patient.close()


# --- killed anywhere


class Crash(BaseException):
    """The process ended here."""


UNCOUNTED = frozenset({"now", "current", "standing"})
"""What is only read from the ledger before an act: to end there is to end before the act."""


class Crashing:
    """Stands before a part and ends the process after its n-th call, counted over every part that shares the count."""

    def __init__(self, part: Any, *, after: int, calls: Iterator[int] | None = None) -> None:
        self._part = part
        self._after = after
        self._calls = itertools.count(1) if calls is None else calls

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._part, name)
        if isinstance(attribute, LedgerPart):
            return Crashing(attribute, after=self._after, calls=self._calls)

        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return attribute(*arguments, **named)
            finally:
                if next(self._calls) == self._after:
                    raise Crash

        return call if callable(attribute) and name not in UNCOUNTED else attribute


Scenes = Callable[..., AbstractContextManager[tuple[Ledger, JobStore, World]]]


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """Makes a wedge in a ledger and a queue of its own, SQLite files both."""
    empty = tmp_path_factory.mktemp("empty")
    Ledger.open(f"sqlite:///{empty}/ledger.db").close()
    JobStore.open(f"sqlite:///{empty}/queue.db").close()

    @contextmanager
    def make(**submission: Any) -> Iterator[tuple[Ledger, JobStore, World]]:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(empty, folder, dirs_exist_ok=True)
            ledger = Ledger.open(f"sqlite:///{folder}/ledger.db", host=HOST)
            store = JobStore.open(f"sqlite:///{folder}/queue.db")
            try:
                yield ledger, store, wedged(ledger, store, **submission)
            finally:
                ledger.close()
                store.close()

    return make


@pytest.fixture
def scenes(backend: str, request: pytest.FixtureRequest, scene: Scenes) -> Scenes:
    """Makes a wedge in a ledger and a queue that are empty but for it."""
    if backend == "sqlite":
        return scene
    ledger, store = request.getfixturevalue("ledger"), request.getfixturevalue("store")
    tables = ", ".join([*LEDGER.tables.tables, *QUEUE.tables.tables])

    @contextmanager
    def emptied(**submission: Any) -> Iterator[tuple[Ledger, JobStore, World]]:
        sql(ledger, f"TRUNCATE {tables} RESTART IDENTITY")
        yield ledger, store, wedged(ledger, store, **submission)

    return emptied


def crashing(ledger: Ledger, store: JobStore, world: World, after: int) -> bool:
    """Work until the process ends after that many calls; false when all was done before."""
    calls = itertools.count(1)
    works = executor(
        Crashing(ledger, after=after, calls=calls),
        Crashing(BuiltinQueue(store), after=after, calls=calls),
        Crashing(world, after=after, calls=calls),
    )
    try:
        to_the_end(works, ledger)
    except Crash:
        return True
    return False


def assert_mended_once(ledger: Ledger, store: JobStore, world: World, *, failed: bool = False) -> None:
    box, job, account = world.boxes["w1"], store.job(1), told(ledger)
    assert box.stops == 1, account
    assert box.starts == 1, account
    assert box.running, account
    assert story(ledger).outcome == "mended", account
    assert account.count("did requeue") + account.count("did fail") + account.count("saw settle: done") == 1, account
    if failed:
        assert (job.state, job.attempt, job.watchdog_retries) == (State.FAILED, 1, 0), account
        assert store.outbox.dispatch_events(1) == ["failed"], account
    else:
        assert (job.state, job.attempt, job.watchdog_retries) == (State.QUEUED, 1, 1), account
        assert claims(store, "w9") == 1
        assert claims(store, "w8") is None


@pytest.mark.parametrize(
    ("backend", "job_class", "ends_cleanly"),
    [
        pytest.param("sqlite", JobClass.GPU, False, id="a job that is requeued, its worker killed"),
        pytest.param(
            "postgresql",
            JobClass.INGEST_LOAD,
            True,
            id="a job that is failed, its worker heeding SIGTERM",
            marks=pytest.mark.needs_postgres,
        ),
    ],
    indirect=["backend"],
)
def test_killed_after_any_call_the_next_executor_finishes_and_nothing_happens_twice(
    scenes: Scenes, job_class: JobClass, *, ends_cleanly: bool
) -> None:
    for after in itertools.count(1):
        with scenes(job_class=job_class) as (ledger, store, world):
            world.boxes["w1"].ends_cleanly = ends_cleanly
            crashed = crashing(ledger, store, world, after)
            to_the_end(executor(ledger, store, world), ledger)

            assert_mended_once(ledger, store, world, failed=job_class is JobClass.INGEST_LOAD)
        if not crashed:
            assert after > 40, "the calls were counted"
            return


@settings(max_examples=15, deadline=None)
@given(crashes=st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_killed_again_and_again_it_is_still_mended_once(scene: Scenes, crashes: list[int]) -> None:
    with scene() as (ledger, store, world):
        for after in crashes:
            crashing(ledger, store, world, after)
        to_the_end(executor(ledger, store, world), ledger)

        assert_mended_once(ledger, store, world)


def test_a_worker_that_recovers_while_no_executor_ran_is_not_fenced(ledger: Ledger, store: JobStore) -> None:
    """The promise was written and the executor ended; minutes later the step came through after all."""
    world = wedged(ledger, store)
    with pytest.raises(Crash):
        turn(executor(Crashing(ledger, after=1), store, world), ledger)
    assert told(ledger)[-1] == "decided begin"
    world.boxes["w1"].wedged = False

    turn(executor(ledger, store, world), ledger)

    assert told(ledger)[-1] == "decided wait: unconfirmed"
    assert store.job(1).state is State.RUNNING
    assert world.boxes["w1"].calls == []


# --- the loop


@contextmanager
def looping(works: Executor) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=works.run)
    thread.start()
    try:
        yield thread
    finally:
        works.close()
        thread.join(20)
        assert not thread.is_alive()


def test_newer_tables_end_the_executor_and_for_older_ones_it_waits(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    works = executor(ledger, store, world)
    ((ours,),) = sql(ledger, "SELECT version_num FROM gpuwarden_ledger_version")
    before = ledger.reports.totals(HOST).executor
    revision = "UPDATE gpuwarden_ledger_version SET version_num = '{}'"

    sql(ledger, revision.format("9999"))
    with pytest.raises(NewerTablesError, match="upgrade this program"):
        works.run()
    sql(ledger, revision.format("0000"))
    with looping(executor(ledger, store, world)):
        time.sleep(0.5)
        assert (ledger.reports.totals(HOST).executor, world.boxes["w1"].calls) == (before, [])
        sql(ledger, revision.format(ours))
        eventually(lambda: [each.outcome for each in ledger.reports.newest()] == ["mended"], "it goes on")

    assert world.boxes["w1"].calls == ["stop", "start"]


def test_an_alert_is_taken_up_at_once_not_at_the_next_look(ledger: Ledger, store: JobStore) -> None:
    job_id = running(store)
    world = World(Box(worker="w1", job_id=job_id))
    with looping(executor(ledger, store, world, pace=replace(PACE, look_again_s=60.0))):
        eventually(lambda: ledger.reports.totals(HOST).executor, "the first beat")
        ledger.inbox.accept([alert(job_id=str(job_id))], [], now=time.time())
        eventually(lambda: story_outcome(ledger) == "mended", "mended", within_s=30)


def story_outcome(ledger: Ledger) -> str | None:
    found = ledger.reports.get(1)
    return found.outcome if found else None


def test_an_idle_executor_is_quiet_its_own_beat_wakes_nobody(
    ledger_url: str, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    beat = Executors.beat

    def counted(self: Executors, **row: Any) -> None:
        nonlocal count
        count += 1
        beat(self, **row)

    monkeypatch.setattr(Executors, "beat", counted)
    counting = Ledger.open(ledger_url, host=HOST)
    began_s = time.monotonic()
    with looping(executor(counting, store, World(), pace=replace(PACE, look_again_s=0.3))):
        eventually(lambda: count >= 4, "four beats")
        took_s = time.monotonic() - began_s
    counting.close()

    assert took_s >= 0.9


def test_what_waits_is_looked_at_again_on_a_timer(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    world.boxes["w1"].wedged = False
    with looping(executor(ledger, store, world)):
        eventually(lambda: "decided wait: unconfirmed" in (told(ledger) if ledger.reports.newest() else []), "it waits")
        world.boxes["w1"].wedged = True
        eventually(lambda: story_outcome(ledger) == "mended", "mended without another alert")


def test_a_container_that_is_slow_to_stop_holds_up_its_own_episode_only(ledger: Ledger, store: JobStore) -> None:
    slow, quick = running(store, worker="w1"), running(store, worker="w2")
    world = World(Box(worker="w1", job_id=slow), Box(worker="w2", job_id=quick))
    stopping, go_on = threading.Event(), threading.Event()

    def before_stop(box: Box) -> None:
        if box.worker == "w1":
            stopping.set()
            assert go_on.wait(20)

    world.before_stop = before_stop
    with looping(executor(ledger, store, world)):
        ledger.inbox.accept([alert("a", job_id=str(slow))], [], now=time.time())
        eventually(stopping.is_set, "the slow stop has begun")
        ledger.inbox.accept([alert("b", worker="w2", job_id=str(quick))], [], now=time.time())
        eventually(
            lambda: len(ledger.reports.newest()) == 2 and story(ledger, 2).outcome == "mended", "the other is mended"
        )
        assert story(ledger, 1).outcome is None
        go_on.set()
        eventually(lambda: story(ledger, 1).outcome == "mended", "the slow one is mended too")

    assert world.boxes["w1"].calls == ["stop", "start"]


def test_another_hosts_episodes_are_not_its_own(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    ledger.inbox.accept([alert("b", host="box2")], [], now=time.time())

    with looping(executor(ledger, store, world)):
        eventually(lambda: story_outcome(ledger) == "mended", "its own is mended")

    assert len(ledger.reports.newest()) == 1
    assert ledger.inbox.take_new("box2", now=time.time()) == 1, "it is left for its own host's executor"


def test_a_defect_in_one_episode_is_counted_and_the_others_go_on(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = wedged(ledger, store)
    ledger.inbox.accept([alert("b", worker="w2")], [], now=time.time())
    remedy = REMEDIES["restart_worker"]

    def defective(facts: Facts) -> Any:
        if facts.episode.worker == "w2":
            raise ZeroDivisionError
        return remedy.decide(facts)

    defect = replace(remedy, decide=defective)
    monkeypatch.setattr("remediator.executor.process_episode.REMEDIES", {"restart_worker": defect})

    def errors() -> int:
        found = ledger.reports.totals(HOST).executor
        return found[2] if found else 0

    with looping(executor(ledger, store, healthy)):
        eventually(lambda: story_outcome(ledger) == "mended", "the healthy one is mended")
        eventually(lambda: errors() >= 2, "the defect is counted each time")


def test_a_defect_in_the_loop_itself_is_counted_and_outlived(ledger: Ledger, store: JobStore) -> None:
    world = wedged(ledger, store)
    works = executor(ledger, store, world)
    look, times = works.look, itertools.count(1)

    def defective(pool: Any, counting: Any) -> None:
        if next(times) < 3:
            raise ZeroDivisionError
        look(pool, counting)

    works.look = defective  # type: ignore[method-assign]
    with looping(works):
        eventually(lambda: story_outcome(ledger) == "mended", "mended")

    found = ledger.reports.totals(HOST).executor
    assert found is not None
    assert found[2] == 2


def test_while_the_ledger_is_locked_nothing_is_done_and_afterwards_all_is(
    ledger_file: Path, ledger_url: str, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.05)
    ledger = Ledger.open(ledger_url, host=HOST)
    world = wedged(ledger, store)
    refused = threading.Event()

    beat = Executors.beat

    def watching(self: Executors, **its: Any) -> None:
        try:
            beat(self, **its)
        except DatabaseError:
            refused.set()
            raise

    monkeypatch.setattr(Executors, "beat", watching)
    watched = Ledger.open(ledger_url, host=HOST)
    works = executor(watched, store, world)
    with closing(sqlite3.connect(ledger_file, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        with looping(works):
            eventually(refused.is_set, "the ledger refused")
            assert world.boxes["w1"].calls == []
            other.execute("ROLLBACK")
            eventually(lambda: story_outcome(ledger) == "mended", "mended once it answers")
    watched.close()
    ledger.close()


def test_a_lease_that_is_renewed_after_it_ran_out_is_not_reclaimed_by_the_first_sweep(store: JobStore) -> None:
    """A machine that was suspended wakes with every lease expired; its workers renew within a heartbeat."""
    job_id = running(store)
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=0.0)
    queue = BuiltinQueue(store)

    queue.tend(now=time.time())
    assert store.job(job_id).state is State.RUNNING
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=time.time())
    queue.tend(now=time.time())

    assert (store.job(job_id).state, store.job(job_id).reclaims) == (State.RUNNING, 0)


def test_a_lease_that_ran_out_while_nobody_could_write_is_not_reclaimed_before_its_worker_could_renew_it(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is locked can be read all the time."""
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.0)
    steady_s = 1000.0
    monkeypatch.setattr("remediator.clients.job_queue_sql.time", SimpleNamespace(monotonic=lambda: steady_s))
    job_id = running(store)
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=0.0)
    patient = JobStore.open(store._engine.url.render_as_string(hide_password=False))
    queue = BuiltinQueue(patient)
    with closing(patient):
        with closing(sqlite3.connect(str(store._engine.url.database), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for _ in range(2):
                with pytest.raises(DatabaseError, match="locked"):
                    queue.tend(now=time.time())
                steady_s += RENEWAL_S - 1.0

        states = []
        for _ in range(3):
            queue.tend(now=time.time())
            states.append(store.job(job_id).state)
            steady_s += RENEWAL_S / 2

    assert states == [State.RUNNING, State.RUNNING, State.QUEUED]


def test_the_queue_is_tended_on_a_timer_and_may_be_silent(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remediator.clients.job_queue_sql.RENEWAL_S", 0.05)
    job_id = running(store)
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=0.0)
    failures = itertools.count(1)

    class Moody(BuiltinQueue):
        def tend(self, *, now: float) -> None:
            if next(failures) < 3:
                raise DatabaseError("locked")
            super().tend(now=now)

    works = Executor(
        ledger,
        host=HOST,
        hands=Hands(witness=World(), queue=Moody(store), actuators={}),  # type: ignore[arg-type]
        pace=PACE,
    )
    with looping(works):
        eventually(lambda: store.job(job_id).state is State.QUEUED, "the expired lease is reclaimed")


def test_a_defect_in_a_sweep_is_counted_and_the_next_one_comes(ledger: Ledger, store: JobStore) -> None:
    sweeps: list[float] = []

    class Defective(BuiltinQueue):
        def tend(self, *, now: float) -> None:
            sweeps.append(now)
            if len(sweeps) < 3:
                raise ZeroDivisionError

    works = executor(ledger, Defective(store), World())

    def errors() -> int | None:
        found = ledger.reports.totals(HOST).executor
        return found and found[2]

    with looping(works):
        eventually(lambda: len(sweeps) > 5, "it is swept again")
        eventually(lambda: errors() == 2, "both are counted")


def test_no_sweep_is_begun_once_it_is_to_end(ledger: Ledger, store: JobStore) -> None:
    sweeps: list[float] = []

    class Swept(BuiltinQueue):
        def tend(self, *, now: float) -> None:
            sweeps.append(now)

    works = executor(ledger, Swept(store), World())
    works.housekeeping.tend()
    works.close()

    works.housekeeping.tend()

    assert len(sweeps) == 1


# --- one executor a ledger, where it is a file


def lock(url: str) -> None:
    with closing(Ledger.open(url, host=HOST)) as ledger:
        ExecutorLock(ledger, host=HOST).close()


@pytest.mark.parametrize("spelling", ["sqlite:///{folder}/ledger.db", "sqlite:///{link}/ledger.db"])
def test_a_second_executor_is_refused_and_told_who_holds_the_ledger(
    ledger: Ledger, tmp_path: Path, spelling: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    url = spelling.format(folder=tmp_path, link=link)
    with (
        closing(ExecutorLock(ledger, host=HOST)),
        pytest.raises(AlreadyExecutingError, match=rf"pid {os.getpid()} holds"),
    ):
        lock(url)

    lock(url)


def test_another_process_is_refused_and_the_lock_ends_with_its_holder(ledger: Ledger, ledger_url: str) -> None:
    script = (
        "import sys; from remediator.executor.lock import ExecutorLock\n"
        "from remediator.ledger.ledger import Ledger\n"
        "ExecutorLock(Ledger.open(sys.argv[1]), host='another')"
    )
    command = [sys.executable, "-c", script, ledger_url]
    with closing(ExecutorLock(ledger, host=HOST)):
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    free = subprocess.run(command, capture_output=True, text=True, check=False)

    assert f"another executor works this ledger (pid {os.getpid()} holds" in refused.stderr
    assert free.returncode == 0
