"""One episode from its alert to its end with a real ledger and a real queue. The host is a fake: see `world`."""

import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from gpuwarden.evidence import WorkerFacts
from gpuwarden.job import Condition, State
from gpuwarden.queue import JobStore, Submission
from remediator.actuators import NotAllowedError
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor.executor import Clients, Executor
from remediator.executor.perform import Performer
from remediator.executor.process_episode import STEPS_MAX
from remediator.ledger.ledger import Ledger
from remediator.plan import Begin, ContainerState, Facts, Outcome, Step, WouldAct
from remediator.reasons import Finding, Reason
from remediator.remedies import REMEDIES
from tests.remediator.builders import HOST, alert
from tests.remediator.executor.builders import (
    LIMITS,
    PACE,
    Crash,
    Crashing,
    claims,
    executor,
    history,
    journal,
    on_a_lost_gpu,
    running,
    sql,
    stalled_job,
    to_the_end,
    turn,
)
from tests.remediator.world import Box, World


def reason_of(ledger: Ledger, step: str) -> str | None:
    """The reason of a step in the journal."""
    (found,) = (entry.reason for entry in history(ledger).entries if entry.step == step)
    return found


def test_stalled_job_is_fixed_and_every_step_recorded(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store, priority=100)

    to_the_end(executor(ledger, store, world), ledger)

    assert journal(ledger) == [
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
        "decided close: fixed",
    ]
    assert world.boxes["w1"].calls == ["stop", "start"]
    job = store.job(1)
    assert (job.state, job.watchdog_retries, job.priority) == (State.QUEUED, 1, 10)


def test_row_of_a_killed_worker_does_not_count_as_busy(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store, model="sdxl")

    to_the_end(executor(ledger, store, world), ledger)

    ((model, seen_at),) = sql(store, "SELECT current_model, last_seen_at FROM workers")
    assert model is None
    assert seen_at < time.time() - 90


def test_fourth_stall_fails_the_job_and_its_run(ledger: Ledger, store: JobStore) -> None:
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

    assert [journal(ledger, each)[6] for each in range(1, 5)] == ["did requeue"] * 3 + ["did fail"]
    assert store.job(job_id).state is State.FAILED
    assert store.outbox.events_of(job_id) == ["failed", "run_failed"]
    assert store.runs.state("r1") == "failed"
    assert store.job(sibling).state is State.CANCELLED


def test_container_without_a_job_is_restarted(ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No condition confirms this yet: the test replaces one to drive the performer."""
    ledger.inbox.accept([alert(job_id=None, attempt=None)], [], now=time.time())
    world = World(Box(worker="w1", job_id=None, attempt=None))
    monkeypatch.setattr(
        "remediator.remedies.job_conditions.confirm",
        lambda seen, _: Finding.of(world.boxes["w1"].hung, seen.worker),
    )

    to_the_end(executor(ledger, store, world), ledger)

    assert history(ledger).outcome == "fixed"
    assert world.boxes["w1"].calls == ["stop", "start"]


def test_dry_run_records_once_and_arming_acts(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    dry = executor(ledger, store, world, armed=False)
    for _ in range(5):
        turn(dry, ledger)
    before = store.job(1)

    assert journal(ledger) == ["saw alert: firing", "would act", "decided wait: dry_run"]
    assert (before.state, before.attempt, before.reason) == (State.RUNNING, 1, None)
    assert world.boxes["w1"].calls == []

    to_the_end(executor(ledger, store, world), ledger)
    assert world.boxes["w1"].calls == ["stop", "start"]


def test_disarm_holds_a_begun_restart_and_arm_resumes_it(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    with pytest.raises(Crash):
        turn(executor(Crashing(ledger, after=1), store, world), ledger)
    assert journal(ledger)[-1] == "decided begin"

    turn(executor(ledger, store, world, armed=False), ledger)
    assert journal(ledger)[-1] == "decided wait: dry_run"
    assert store.job(1).state is State.RUNNING
    assert world.boxes["w1"].calls == []

    to_the_end(executor(ledger, store, world), ledger)
    assert history(ledger).outcome == "fixed"


def test_unconfirmed_episode_records_each_reason_once(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    world.boxes["w1"].hung = False
    works = executor(ledger, store, world)
    for silent in (False, False, True, True):
        world.silent = silent
        turn(works, ledger)
        turn(works, ledger)
    world.silent = False
    ledger.inbox.accept([alert(job_id="1", firing=False)], [], now=time.time())
    turn(works, ledger)

    assert journal(ledger) == [
        "saw alert: firing",
        "decided wait: unconfirmed",
        "decided wait: no_evidence",
        "saw alert: resolved",
        "decided close: unconfirmed",
    ]
    assert store.job(1).state is State.RUNNING


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda world: setattr(world, "engine_down", True), Reason.NO_CONTAINER),
        (lambda world: world.boxes.clear(), Reason.NO_EVIDENCE),
    ],
    ids=["engine is down", "no such worker"],
)
def test_episode_waits_for_missing_evidence(
    ledger: Ledger, store: JobStore, broken: Callable[[World], None], reason: Reason
) -> None:
    world = stalled_job(ledger, store)
    broken(world)

    turn(executor(ledger, store, world), ledger)

    assert history(ledger).entries[-1].reason == reason
    assert store.job(1).state is State.RUNNING


def test_episode_waits_without_an_actuator_for_its_container(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    clients = Clients(exporter=world, queue=BuiltinQueue(store), actuators={})  # type: ignore[arg-type]
    works = Executor(ledger, host=HOST, clients=clients, settings=PACE)

    turn(works, ledger)

    assert history(ledger).entries[-1].reason == Reason.NO_CONTAINER


def test_episode_waits_for_an_unreachable_queue(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    sql(store, "ALTER TABLE jobs RENAME TO lost")

    turn(executor(ledger, store, world), ledger)

    assert journal(ledger)[-2:] == ["decided begin", "decided wait: queue_unreachable"]
    sql(store, "ALTER TABLE lost RENAME TO jobs")
    to_the_end(executor(ledger, store, world), ledger)
    assert store.job(1).state is State.QUEUED


def test_failed_stop_is_recorded_and_retried_in_the_next_iteration(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    world.boxes["w1"].unkillable = True
    works = executor(ledger, store, world)

    turn(works, ledger)
    assert journal(ledger)[-2:] == ["decided stop", "failed stop"]
    assert history(ledger).entries[-1].message == "it does not die"
    assert world.boxes["w1"].calls == ["stop"]

    world.boxes["w1"].unkillable = False
    to_the_end(works, ledger)
    assert history(ledger).outcome == "fixed"
    assert world.boxes["w1"].calls == ["stop", "stop", "start"]


def test_gpu_of_an_unkillable_worker_is_quarantined(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    world.boxes["w1"].unkillable = True
    bounds = replace(LIMITS, settle_timeout_s=0.05, restart_timeout_s=0.1)

    to_the_end(executor(ledger, store, world, settings=replace(PACE, limits=bounds)), ledger)

    lines = journal(ledger)
    assert lines.index("did quarantine") < lines.index("saw free: abandoned")
    assert lines.count("did quarantine") == 1
    assert history(ledger).wait_reason == "given_up"
    assert history(ledger).outcome is None
    assert "start" not in world.boxes["w1"].calls
    (out_of_use,) = store.gpu_quarantine.quarantined()
    assert (out_of_use.gpu, out_of_use.host, out_of_use.worker) == ("GPU-0", HOST, "w1")
    assert reason_of(ledger, "quarantine") == Reason.STOP_FAILED

    assert store.job(1).state is State.QUEUED
    assert claims(store, "w2", gpu="GPU-0") is None, "another worker of that GPU"
    assert claims(store, "w1", incarnation="i2") is None, "the slot itself, with any GPU"
    assert claims(store, "w3", gpu="GPU-1") == 1


def test_lost_gpu_is_quarantined_and_its_worker_starts(ledger: Ledger, store: JobStore) -> None:
    world = on_a_lost_gpu(ledger, store)

    to_the_end(executor(ledger, store, world), ledger)

    lines = journal(ledger)
    assert lines.index("decided stop") < lines.index("did quarantine") < lines.index("did requeue")
    assert lines.index("did requeue") < lines.index("decided start")
    assert lines.count("did quarantine") == 1
    assert history(ledger).outcome == "fixed"
    (out_of_use,) = store.gpu_quarantine.quarantined()
    assert (out_of_use.gpu, out_of_use.host, out_of_use.worker) == ("GPU-0", HOST, "w1")
    assert reason_of(ledger, "quarantine") == Reason.GPU_LOST
    assert claims(store, "w1", incarnation="i2") is None, "the slot itself"
    assert claims(store, "w2", gpu="GPU-0") is None, "another worker of that GPU"
    assert claims(store, "w3", gpu="GPU-1") == 1


def test_gpu_lost_in_one_look_stays_in_use(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    world.gpu_lost_s, about = 0.0, world.worker_evidence

    def lost_once(worker: str, *, host: str) -> WorkerFacts:
        box = world.boxes["w1"]
        world.gpu_lost = not world.gpu_lost and not box.running and not box.starts
        return about(worker, host=host)

    world.worker_evidence = lost_once  # type: ignore[method-assign]

    to_the_end(executor(ledger, store, world), ledger)

    assert "decided wait: driver_unreachable" in journal(ledger), "the GPU was lost while the stop was checked"
    assert history(ledger).outcome == Outcome.FIXED
    assert store.gpu_quarantine.quarantined() == []


@pytest.mark.parametrize(("avoid_s", "gets_it"), [(600.0, None), (0.0, 1)], ids=["600 s", "off"])
def test_requeued_job_avoids_its_slot(ledger: Ledger, store: JobStore, avoid_s: float, gets_it: int | None) -> None:
    world = stalled_job(ledger, store)
    store.claims.register("w1", host="box2", worker="w2", incarnation="i9", now=store.now(), gpus=["GPU-1"])
    settings = replace(PACE, limits=replace(LIMITS, requeue_avoid_gpu_s=avoid_s))

    to_the_end(executor(ledger, store, world, settings=settings), ledger)

    assert claims(store, "w1", incarnation="i2") == gets_it
    assert claims(store, "w4", gpu="GPU-0") is None
    assert gets_it or claims(store, "w2", host="box2", gpu="GPU-1") == 1


def test_endless_episode_yields(ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    world = stalled_job(ledger, store)
    asked = itertools.count()
    begin = Begin(
        condition=Condition.STALL, free_key="k", container_kind="docker", container_handle="h", container_name="n",
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


def test_alert_without_an_incarnation_is_fixed(ledger: Ledger, store: JobStore) -> None:
    job_id = running(store)
    ledger.inbox.accept([alert(job_id=str(job_id), incarnation=None)], [], now=time.time())
    world = World(Box(worker="w1", job_id=job_id))

    to_the_end(executor(ledger, store, world), ledger)

    assert history(ledger).outcome == Outcome.FIXED
    assert store.job(job_id).state is State.QUEUED


class GuardedPods(World):
    """A host with containers that end for ever, as pods do, and a PodDisruptionBudget."""

    guarded = True

    def check_stop(self, handle: str) -> None:
        if self.guarded:
            raise NotAllowedError(Reason.DISRUPTION_BUDGET, f"the disruption budget of {handle} needs 1 healthy pod")

    def list_others(self, _handle: str) -> frozenset[str] | None:
        return None

    def list_pids(self, handle: str) -> frozenset[int]:
        return self._box(handle).pids

    def find_successor(self, handle: str, *, others: Collection[str]) -> ContainerState | None:
        raise AssertionError(f"nothing replaces {handle}: {others}")


@pytest.mark.behaviour("C3")
def test_job_of_a_hung_worker_runs_until_the_eviction_of_its_pod_is_allowed(ledger: Ledger, store: JobStore) -> None:
    world = GuardedPods(*stalled_job(ledger, store).boxes.values())
    hasty = replace(PACE, limits=replace(LIMITS, settle_timeout_s=0.0))
    works = executor(ledger, store, world, settings=hasty)

    for _ in range(5):
        turn(works, ledger)

    assert journal(ledger) == ["saw alert: firing", "decided begin", "decided wait: disruption_budget"]
    assert history(ledger).wait_reason == "disruption_budget"
    assert store.job(1).state is State.RUNNING
    world.guarded = False
    to_the_end(executor(ledger, store, world), ledger)
    assert journal(ledger)[3:7] == ["did fence", "decided stop", "did stop", "saw free: dead"]
    assert (store.job(1).state, store.job(1).watchdog_retries) == (State.QUEUED, 1)
