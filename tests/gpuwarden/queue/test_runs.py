"""Runs: dependencies, results, lost hosts and events; on both databases."""

from collections.abc import Iterable
from typing import Any

import pytest

from gpuwarden.job import AFFINITY_S, FENCE_S, LEASE_S, Condition, JobClass, JobId, Kind, State
from gpuwarden.queue import (
    Event,
    Job,
    JobStore,
    QueueSettings,
    ReplacedError,
    ResultError,
    Submission,
    SubmissionError,
    sql,
)
from tests.waiting import together

pytestmark = pytest.mark.both_databases

NOW = 1_000_000.0


def submit(store: JobStore, **changed: Any) -> JobId:
    return store.runs.submit(Submission(**{"queue": "gpu", **changed}), now=changed.pop("now", NOW))


def claim(store: JobStore, number: int = 1, *, now: float = NOW, queue: str = "gpu", loaded: str | None = None) -> Job:
    """Claim as incarnation `i1` of worker `w1`, and so on."""
    job = claim_or_none(store, number, now=now, queue=queue, loaded=loaded)
    assert job is not None
    return job


def claim_or_none(
    store: JobStore, number: int = 1, *, now: float = NOW, queue: str = "gpu", loaded: str | None = None
) -> Job | None:
    worker, incarnation = f"w{number}", f"i{number}"
    return store.claims.claim(queue, host="box1", worker=worker, incarnation=incarnation, now=now, loaded=loaded)


def complete(store: JobStore, job: Job, *, result: Any = None, now: float = NOW) -> None:
    assert job.claimed_by is not None
    assert store.claims.complete(job.job_id, attempt=job.attempt, incarnation=job.claimed_by, now=now, result=result)


def run_next(store: JobStore, *, result: Any = None, now: float = NOW) -> JobId:
    job = claim(store, now=now)
    complete(store, job, result=result, now=now)
    return job.job_id


def fail(store: JobStore, job: Job) -> None:
    assert job.claimed_by is not None
    assert store.claims.fail_by_worker(
        job.job_id, attempt=job.attempt, incarnation=job.claimed_by, reason="boom", now=NOW
    )
    store.sweeps.consume_events(now=NOW)


def states(store: JobStore, ids: Iterable[JobId]) -> list[State]:
    return [store.job(each).state for each in ids]


def diamond(store: JobStore, **changed: Any) -> dict[str, JobId]:
    jobs = {name: Submission(queue="gpu", **changed) for name in ("fetch", "left", "right", "join")}
    needs = {"left": ["fetch"], "right": ["fetch"], "join": ["left", "right"]}
    return store.runs.submit_run("r1", jobs, needs=needs, now=NOW)


def kinds(store: JobStore, *ids: JobId) -> list[str]:
    return [kind for each in ids for kind in store.outbox.events_of(each)]


# --- dependencies


def test_job_is_queued_once_its_needs_are_completed(store: JobStore) -> None:
    ids = diamond(store)
    assert states(store, ids.values()) == [State.QUEUED, State.WAITING, State.WAITING, State.WAITING]

    assert run_next(store) == ids["fetch"]
    assert states(store, ids.values()) == [State.COMPLETED, State.QUEUED, State.QUEUED, State.WAITING]
    assert run_next(store) == ids["left"]
    assert store.job(ids["join"]).pending == 1
    assert claim(store, 2).job_id == ids["right"]
    assert claim_or_none(store, 3) is None


def test_handler_gets_the_results_of_needed_jobs(store: JobStore) -> None:
    ids = diamond(store)
    run_next(store, result={"path": "é"})
    run_next(store, result=[1, 2.5, None])
    run_next(store)

    assert claim(store).job_id == ids["join"]
    assert store.runs.inputs(ids["join"]) == {ids["left"]: [1, 2.5, None], ids["right"]: None}
    assert store.runs.needs(ids["join"]) == [ids["left"], ids["right"]]
    assert store.job(ids["fetch"]).result == {"path": "é"}


def test_run_ends_with_its_last_job_and_one_event(store: JobStore) -> None:
    ids = diamond(store)
    for _ in range(3):
        run_next(store)
    assert store.runs.state("r1") == "running"

    run_next(store, now=NOW + 9)

    run = store.runs.get("r1")
    assert run is not None
    assert (run.state, run.submitted_at, run.ended_at, run.jobs) == ("completed", NOW, NOW + 9, {State.COMPLETED: 4})
    assert kinds(store, *ids.values()) == [*["completed"] * 4, "run_completed"]


def test_last_two_jobs_that_complete_together_end_the_run(store: JobStore) -> None:
    for turn in range(10):
        run_id = f"r{turn}"
        ids = store.runs.submit_run(
            run_id,
            {name: Submission(queue="gpu") for name in ("a", "b", "end")},
            needs={"end": ["a", "b"]},
            now=NOW,
        )
        jobs = [claim(store, 1), claim(store, 2)]

        answers = together(*(lambda job=job: complete(store, job) for job in jobs))

        assert not [each for each in answers if isinstance(each, Exception)]
        assert store.job(ids["end"]).state is State.QUEUED
        run_next(store)
        assert store.runs.state(run_id) == "completed"


def test_added_job_reopens_a_completed_run(store: JobStore) -> None:
    first = submit(store, run_id="r1")
    run_next(store)
    assert store.runs.state("r1") == "completed"

    second = submit(store, run_id="r1", needs=(first,))

    assert store.job(second).state is State.QUEUED
    assert store.runs.state("r1") == "running"
    run_next(store)
    assert store.runs.state("r1") == "completed"


def test_job_may_need_an_earlier_job(store: JobStore) -> None:
    first = submit(store, run_id="r1")
    second = submit(store, run_id="r1", needs=(first, first))

    assert (store.job(second).state, store.job(second).needs, store.job(second).pending) == (State.WAITING, 1, 1)
    assert run_next(store) == first
    assert run_next(store) == second


def test_cancelled_job_cancels_its_dependants_and_its_run(store: JobStore) -> None:
    ids = diamond(store)
    run_next(store)

    assert store.admin.cancel(ids["left"], reason="not wanted", now=NOW)

    assert states(store, ids.values()) == [State.COMPLETED, State.CANCELLED, State.QUEUED, State.CANCELLED]
    assert store.job(ids["join"]).reason == f"job {ids['left']}, which it needs, was cancelled"
    assert run_next(store) == ids["right"]
    assert store.runs.state("r1") == "cancelled"
    assert kinds(store, ids["left"], ids["join"]) == ["cancelled", "cancelled"]
    assert kinds(store, ids["right"]) == ["completed", "run_cancelled"]


@pytest.mark.behaviour("A10")
def test_failed_job_cancels_its_dependants(store: JobStore) -> None:
    ids = diamond(store)

    fail(store, claim(store))

    assert states(store, ids.values()) == [State.FAILED, *[State.CANCELLED] * 3]
    assert store.runs.state("r1") == "failed"
    assert kinds(store, *ids.values()) == ["failed", "run_failed", *["cancelled"] * 3]


def test_waiting_job_can_be_blocked_and_waits_again_when_unblocked(store: JobStore) -> None:
    ids = diamond(store)
    assert store.admin.block(ids["left"], reason="later", now=store.now())
    assert store.admin.block(ids["right"], reason="later", now=store.now())

    assert store.admin.unblock(ids["left"], reason="", now=NOW)
    run_next(store)
    assert store.admin.unblock(ids["right"], reason="", now=NOW)

    assert states(store, ids.values()) == [State.COMPLETED, State.QUEUED, State.QUEUED, State.WAITING]


def test_run_is_submitted_whole_or_not_at_all(store: JobStore) -> None:
    jobs = {"a": Submission(queue="gpu"), "b": Submission(queue="mine", job_class=JobClass.INGEST)}

    with pytest.raises(SubmissionError):
        store.runs.submit_run("r1", jobs, now=NOW)

    assert store.jobs() == []
    assert store.runs.get("r1") is None


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        ({"a": ["b"], "b": ["a"]}, r"wait for one another: \w -> \w -> \w"),
        ({"a": ["a"]}, "wait for one another: a -> a"),
        ({"a": ["c"]}, "no job of this run is named 'c'"),
        ({"c": ["a"]}, "no job of this run is named 'c'"),
    ],
)
def test_circular_and_unknown_needs_are_refused(store: JobStore, needs: dict[str, list[str]], says: str) -> None:
    with pytest.raises(SubmissionError, match=says):
        store.runs.submit_run("r1", {name: Submission(queue="gpu") for name in "ab"}, needs=needs, now=NOW)


def test_needs_that_cannot_complete_are_refused(store: JobStore) -> None:
    other = submit(store, run_id="r2")
    gone = submit(store, run_id="r1")
    submit(store, run_id="r1")
    store.admin.cancel(gone, reason="", now=NOW)

    for needed, run_id, says in (
        (other, "r1", "is not in run 'r1'"),
        (99, "r1", "is not in run 'r1'"),
        (gone, "r1", "is cancelled: a job that needs it would never start"),
        (other, None, "must be in their run: set the run"),
    ):
        with pytest.raises(SubmissionError, match=says):
            submit(store, run_id=run_id, needs=(needed,))


# --- results


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (object(), "is not JSON"),
        (float("nan"), "is not JSON"),
        ("x" * 65536, "has 65538 bytes as JSON, more than 65536: write the data to a file"),
        ("a\0b", "contains a NUL character"),
    ],
    ids=["not JSON", "not a number", "too long", "a NUL"],
)
def test_invalid_result_is_refused_and_ends_nothing(store: JobStore, result: Any, says: str) -> None:
    submit(store)
    job = claim(store)

    with pytest.raises(ResultError, match=says):
        store.claims.complete(job.job_id, attempt=1, incarnation="i1", now=NOW, result=result)

    assert store.job(job.job_id).state is State.RUNNING
    complete(store, job, result={"backslash u0000": "\\u0001"})


# --- settings of queues


def settings(queue: str, **changed: Any) -> QueueSettings:
    settings = {"job_class": None, "budget_s": None, "lost_hold_s": None, "set_at": NOW, "set_by": "ann", **changed}
    return QueueSettings(queue=queue, **settings)


@pytest.mark.behaviour("A1")
@pytest.mark.parametrize(
    ("queue", "job_class", "budget_s"),
    [
        ("gpu", JobClass.GPU, 8100),
        ("cpu", JobClass.CPU, 2100),
        ("fetch", JobClass.INGEST_FETCH, 7200),
        ("load", JobClass.INGEST_LOAD, 3600),
        ("__input__", JobClass.INPUT, 120),
        ("any other", JobClass.GPU, 8100),
    ],
)
def test_queue_name_sets_the_class(store: JobStore, queue: str, job_class: JobClass, budget_s: float) -> None:
    job = store.job(submit(store, queue=queue))

    assert (job.job_class, job.budget_s) == (job_class, budget_s)


@pytest.mark.behaviour("A1")
def test_ingest_queue_of_a_host_has_its_configured_budget(store: JobStore) -> None:
    with pytest.raises(SubmissionError, match="gpuwarden queue set camera --budget-s SECONDS"):
        submit(store, queue="camera", job_class=JobClass.INGEST)
    store.queue_settings.set_queue(settings("camera", job_class=JobClass.INGEST, budget_s=900.0))

    job = store.job(submit(store, queue="camera"))

    assert (job.job_class, job.budget_s, job.submitted_budget_s) == (JobClass.INGEST, 900, None)


@pytest.mark.behaviour("A1")
def test_budget_is_read_when_the_attempt_begins_unless_the_job_has_one(store: JobStore) -> None:
    by_class, by_queue, own = submit(store), submit(store, queue="video"), submit(store, queue="video", budget_s=5.0)
    store.queue_settings.set_queue(settings("video", budget_s=77.0))

    assert claim(store).budget_s == 8100
    assert claim(store, 2, queue="video").budget_s == 77
    assert claim(store, 3, queue="video").budget_s == 5
    assert store.queue_settings.unset_queue("video")
    assert not store.queue_settings.unset_queue("video")
    assert store.claims.release(by_queue, attempt=1, incarnation="i2", now=NOW)
    assert claim(store, 2, queue="video").budget_s == 8100
    assert [store.job(each).budget_s for each in (by_class, by_queue, own)] == [8100, 8100, 5]


def test_queue_settings_are_stored_with_their_author(store: JobStore) -> None:
    store.queue_settings.set_queue(settings("b", budget_s=1.0))
    store.queue_settings.set_queue(settings("a", lost_hold_s=60.0, set_by="bob"))
    store.queue_settings.set_queue(settings("b", budget_s=2.0, set_at=NOW + 1))

    first, second = store.queue_settings.all()

    assert (first.queue, first.lost_hold_s, first.set_by) == ("a", 60, "bob")
    assert (second.queue, second.budget_s, second.set_at) == ("b", 2, NOW + 1)
    with pytest.raises(SubmissionError, match="budget_s -1"):
        store.queue_settings.set_queue(settings("b", budget_s=-1.0))
    with pytest.raises(SubmissionError, match="queue ''"):
        store.queue_settings.set_queue(settings(""))


# --- ingest


@pytest.mark.behaviour("A17")
def test_ingest_job_belongs_to_no_run(store: JobStore) -> None:
    with pytest.raises(SubmissionError, match="a job of class ingest_fetch cannot be in a run"):
        submit(store, queue="fetch", run_id="r1")


@pytest.mark.behaviour("A17")
@pytest.mark.behaviour("A13")
def test_ingest_leases_have_a_separate_sweep(store: JobStore) -> None:
    ingest, other = submit(store, queue="fetch"), submit(store)
    claim(store, 1, queue="fetch")
    claim(store, 2)
    late = NOW + LEASE_S + 1

    assert store.sweeps.reclaim_expired(now=late, ingest=True) == [ingest]
    assert states(store, (ingest, other)) == [State.QUEUED, State.RUNNING]
    assert store.sweeps.reclaim_expired(now=late, ingest=False) == [other]
    assert (store.job(ingest).reclaims, store.job(ingest).watchdog_retries) == (1, 0)


# --- lost hosts


def lost(store: JobStore, **changed: Any) -> Job:
    submit(store, **changed)
    job = claim(store)
    assert store.lost_hosts.mark_lost(job.job_id, attempt=1, now=NOW)
    assert store.job(job.job_id).state is State.HOST_LOST
    return job


@pytest.mark.behaviour("D4")
def test_job_of_a_lost_host_is_held(store: JobStore) -> None:
    job = lost(store)

    assert store.job(job.job_id).state is State.HOST_LOST
    assert store.sweeps.reclaim_expired(now=NOW + 10 * LEASE_S) == []
    assert claim_or_none(store, 2) is None
    assert not store.lost_hosts.mark_lost(job.job_id, attempt=1, now=NOW)
    assert not store.lost_hosts.mark_lost(job.job_id, attempt=2, now=NOW)


@pytest.mark.behaviour("D4")
def test_gpu_of_a_lost_host_is_held_too(store: JobStore) -> None:
    for number in (1, 2, 3):
        gpus = ["GPU-other"] if number == 3 else ["GPU-shared", f"GPU-{number}"]
        store.claims.register("gpu", host="box1", worker=f"w{number}", incarnation=f"i{number}", now=NOW, gpus=gpus)
    job = lost(store)
    submit(store)

    assert claim_or_none(store, 2) is None
    assert claim(store, 3).job_id != job.job_id
    assert store.claims.renew(job.job_id, attempt=1, incarnation="i1", now=NOW)
    submit(store)
    assert claim(store, 2)


@pytest.mark.behaviour("D4")
def test_held_job_is_requeued_after_the_hold_of_its_queue(store: JobStore) -> None:
    store.queue_settings.set_queue(settings("gpu", lost_hold_s=650.0))
    job = lost(store)

    assert store.sweeps.reclaim_expired(now=NOW + 649) == []
    assert store.sweeps.reclaim_expired(now=NOW + 651) == [job.job_id]
    assert not store.claims.renew(job.job_id, attempt=1, incarnation="i1", now=NOW)
    assert claim(store, 2).attempt == 2


@pytest.mark.behaviour("D4")
def test_held_job_is_not_requeued_before_its_lease_ends(store: JobStore) -> None:
    store.queue_settings.set_queue(settings("gpu", lost_hold_s=50.0))
    job = lost(store)

    assert store.sweeps.reclaim_expired(now=NOW + LEASE_S - 1) == []
    assert store.sweeps.reclaim_expired(now=NOW + LEASE_S + 1) == [job.job_id]


@pytest.mark.behaviour("D6")
def test_longer_lease_is_left_to_a_returning_host(store: JobStore) -> None:
    store.queue_settings.set_queue(settings("gpu", lost_hold_s=50.0))
    job_id = submit(store)
    claim(store)
    assert store.claims.renew(job_id, attempt=1, incarnation="i1", now=NOW, lease_s=3 * LEASE_S)
    assert store.lost_hosts.mark_lost(job_id, attempt=1, now=NOW)

    assert store.lost_hosts.mark_returned(job_id, attempt=1, now=NOW)

    assert store.job(job_id).lease_expires_at == NOW + 3 * LEASE_S


@pytest.mark.behaviour("D6")
@pytest.mark.parametrize("sign", ["a renewal", "its result", "its failure", "a release", "the next claim"])
def test_held_job_returns_with_its_first_sign(store: JobStore, sign: str) -> None:
    job = lost(store)
    claimed: dict[str, Any] = {"attempt": 1, "incarnation": "i1", "now": NOW}
    assert store.claims.owns(job.job_id, attempt=1, incarnation="i1")

    if sign == "a renewal":
        assert store.claims.renew(job.job_id, **claimed)
        assert store.job(job.job_id).state is State.RUNNING
        assert store.job(job.job_id).lease_expires_at == NOW + LEASE_S
    elif sign == "its result":
        assert store.claims.complete(job.job_id, **claimed, result=1)
        assert (store.job(job.job_id).state, store.job(job.job_id).result) == (State.COMPLETED, 1)
    elif sign == "its failure":
        assert store.claims.fail_by_worker(job.job_id, **claimed, reason="boom")
        assert store.job(job.job_id).state is State.FAILED
    elif sign == "a release":
        assert store.claims.release(job.job_id, **claimed)
        assert store.job(job.job_id).state is State.QUEUED
    else:
        again = claim(store)
        assert (again.job_id, again.attempt, again.state) == (job.job_id, 1, State.RUNNING)


@pytest.mark.behaviour("D6")
def test_held_job_returns_with_its_host_and_a_new_lease(store: JobStore) -> None:
    job = lost(store)

    assert not store.lost_hosts.mark_returned(job.job_id, attempt=2, now=NOW)
    assert store.lost_hosts.mark_returned(job.job_id, attempt=1, now=NOW)
    assert not store.lost_hosts.mark_returned(job.job_id, attempt=1, now=NOW)

    assert store.job(job.job_id).state is State.RUNNING
    assert store.sweeps.reclaim_expired(now=NOW + LEASE_S - 1) == []
    assert store.sweeps.reclaim_expired(now=NOW + LEASE_S + 1) == [job.job_id]


def test_jobs_of_a_host_are_listed_with_the_last_sign_of_their_workers(store: JobStore) -> None:
    first, second, third, elsewhere = submit(store), submit(store), submit(store), submit(store)
    claim(store, 1)
    claim(store, 2)
    claim(store, 3)
    assert store.claims.claim("gpu", host="box2", worker="w1", incarnation="j1", now=NOW)
    store.lost_hosts.mark_lost(second, attempt=1, now=NOW)
    store.claims.heartbeat(host="box1", worker="w1", queue="gpu", incarnation="i1", model=None, now=NOW + 7)
    store.claims.complete(third, attempt=1, incarnation="i3", now=NOW)

    assert [(each.job_id, each.attempt, each.state, each.heard_at) for each in store.lost_hosts.jobs_on("box1")] == [
        (first, 1, State.RUNNING, NOW + 7),
        (second, 1, State.HOST_LOST, NOW),
    ]
    assert [each.job_id for each in store.lost_hosts.jobs_on("box2")] == [elsewhere]
    assert store.lost_hosts.jobs_on("box3") == []


@pytest.mark.behaviour("D6")
def test_another_attempt_does_not_return_a_held_job(store: JobStore) -> None:
    job = lost(store)

    assert not store.claims.renew(job.job_id, attempt=1, incarnation="i9", now=NOW)
    assert not store.claims.renew(job.job_id, attempt=2, incarnation="i1", now=NOW)
    assert store.job(job.job_id).state is State.HOST_LOST


def test_held_job_that_reports_is_not_requeued(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.queue_settings.set_queue(settings("gpu", lost_hold_s=700.0))
    job_id = submit(store)
    claim(store)
    store.lost_hosts.mark_lost(job_id, attempt=1, now=NOW)
    recover_lost = sql.recover_lost

    def recover_and_wait(*arguments: Any, **named: Any) -> bool:
        back = recover_lost(*arguments, **named)
        store.sweeps.reclaim_expired(now=NOW + 701)
        return back

    monkeypatch.setattr(sql, "recover_lost", recover_and_wait)

    assert store.claims.renew(job_id, attempt=1, incarnation="i1", now=NOW + 701)
    assert (store.job(job_id).state, store.job(job_id).attempt) == (State.RUNNING, 1)


def test_restarted_worker_settles_the_lost_job_of_its_predecessor(store: JobStore) -> None:
    job = lost(store)

    assert store.claims.register("gpu", host="box1", worker="w1", incarnation="new", now=NOW) == [job.job_id]
    assert store.job(job.job_id).state is State.QUEUED


def test_whole_host_is_lost_at_once_and_its_jobs_can_be_fenced(store: JobStore) -> None:
    first, second, third = submit(store), submit(store), submit(store)
    claim(store, 1)
    claim(store, 2)

    there = store.lost_hosts.jobs_on("box1")
    assert [each.job_id for each in there] == [first, second]
    assert [store.lost_hosts.mark_lost(each.job_id, attempt=each.attempt, now=NOW) for each in there] == [True, True]
    assert [store.lost_hosts.mark_lost(each.job_id, attempt=each.attempt, now=NOW) for each in there] == [False, False]
    assert store.fencing.fence(second, attempt=1, incarnation="i2", condition=Condition.DEAD_WORKER, now=NOW)
    assert states(store, (first, second, third)) == [State.HOST_LOST, State.FENCING, State.QUEUED]
    assert store.job(second).lease_expires_at == NOW + FENCE_S


# --- models


def test_worker_prefers_its_loaded_model_among_jobs_of_one_priority(store: JobStore) -> None:
    plain, flux, sdxl = submit(store), submit(store, model="flux"), submit(store, model="sdxl")
    urgent = submit(store, priority=1)

    taken = []
    for loaded in ("sdxl", "sdxl", "flux", "sdxl"):
        job = claim(store, loaded=loaded)
        complete(store, job)
        taken.append(job.job_id)

    assert taken == [urgent, sdxl, flux, plain]


def test_job_is_not_overtaken_for_ever(store: JobStore) -> None:
    old = submit(store, model="flux")
    submit(store, model="sdxl")

    assert claim(store, loaded="sdxl", now=NOW + AFFINITY_S + 1).job_id == old


def test_idle_worker_lists_its_loaded_model_and_is_not_busy(store: JobStore) -> None:
    store.claims.register("gpu", host="box1", worker="w1", incarnation="i1", now=NOW)
    assert store.claims.heartbeat(
        host="box1", worker="w1", queue="gpu", incarnation="i1", model=None, now=NOW, loaded="sdxl"
    )

    (row,) = store.admin.workers(now=NOW)

    assert (row.current_model, row.loaded_model) == (None, "sdxl")
    submit(store, model="sdxl")
    claim(store, loaded="sdxl")
    (row,) = store.admin.workers(now=NOW)
    assert (row.current_model, row.loaded_model) == ("sdxl", "sdxl")


# --- a claim in one statement


def test_second_claim_applies_the_rules_of_the_first(store: JobStore) -> None:
    for number in (1, 2):
        store.claims.register(
            "gpu", host="box1", worker=f"w{number}", incarnation=f"i{number}", now=NOW, gpus=["GPU-1"]
        )
    for _ in range(3):
        submit(store)
    run_next(store)

    store.admin.lock(host="box1", worker="w1", who="ann", reason="", now=NOW)
    assert claim_or_none(store) is None
    store.admin.unlock(host="box1", worker="w1", who="bob", now=NOW)
    store.gpu_quarantine.quarantine(["GPU-1"], host="box1", worker=None, reason="", now=NOW)
    assert claim_or_none(store) is None
    store.gpu_quarantine.release_gpu("GPU-1")
    job = claim(store)
    assert claim(store).job_id == job.job_id
    complete(store, job)
    assert store.fencing.retire_worker(host="box1", worker="w1", incarnation="i1", now=NOW)
    with pytest.raises(ReplacedError):
        claim(store)


# --- events


def positions(events: list[Event]) -> list[int]:
    return [event.position for event in events]


def test_each_consumer_gets_every_event_in_order_until_acknowledged(store: JobStore) -> None:
    for _ in range(3):
        submit(store)
        run_next(store)

    first = store.outbox.events("bill", limit=2)
    assert [(each.kind, each.job_id) for each in first] == [(Kind.COMPLETED, 1), (Kind.COMPLETED, 2)]
    assert store.outbox.events("bill", limit=2) == first
    store.outbox.acknowledge("bill", first[0], now=NOW)
    assert [each.job_id for each in store.outbox.events("bill")] == [2, 3]
    store.outbox.acknowledge("bill", store.outbox.events("bill")[-1], now=NOW)
    store.outbox.acknowledge("bill", first[0], now=NOW)
    assert store.outbox.events("bill") == []
    assert positions(store.outbox.events("mail")) == [1, 2, 3]
    assert store.outbox.consumers() == {"bill": 0}


def test_event_has_wait_and_run_time(store: JobStore) -> None:
    job_id = submit(store, queue="video", model="svd", job_class=JobClass.GPU_VIDEO, run_id="r1")
    job = claim(store, queue="video", now=NOW + 3)
    complete(store, job, now=NOW + 10)

    event, run_event = store.outbox.events("bill")

    assert (event.job_id, event.run_id, event.queue, event.job_class) == (job_id, "r1", "video", JobClass.GPU_VIDEO)
    assert (event.attempt, event.waited_s, event.ran_s, event.written_at) == (1, 3, 7, NOW + 10)
    assert (run_event.kind, run_event.job_id) == (Kind.RUN_COMPLETED, job_id)


def test_events_are_numbered_once_under_concurrent_readers(store: JobStore) -> None:
    for _ in range(30):
        submit(store)
    for _ in range(30):
        run_next(store)

    together(*(lambda name=name: store.outbox.events(name) for name in "abcd"))

    assert positions(store.outbox.events("a")) == list(range(1, 31))
