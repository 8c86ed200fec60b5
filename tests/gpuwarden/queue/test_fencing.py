"""Fences, requeues, failures and their events."""

import pytest

from gpuwarden.db.errors import DatabaseError
from gpuwarden.job import FENCE_S, Condition, State
from gpuwarden.queue import JobStore, Submission, SubmissionError
from tests.gpuwarden.queue.builders import NOW, claim, fenced, refuse_events, submit
from tests.waiting import eventually

pytestmark = pytest.mark.both_databases


@pytest.mark.behaviour("A9")
@pytest.mark.parametrize(("priority", "becomes"), [(100, 10), (11, 10), (10, 10), (3, 3)])
def test_requeue_counts_one_retry_and_never_lowers_urgency(store: JobStore, priority: int, becomes: int) -> None:
    job = fenced(store, priority=priority, run_id="r1")

    assert store.fencing.requeue(job.job_id, attempt=1, condition=Condition.STALL, now=NOW)

    back = store.job(job.job_id)
    assert (back.state, back.priority, back.watchdog_retries, back.reclaims) == (State.QUEUED, becomes, 1, 0)
    assert (back.claimed_by, back.host, back.worker, back.lease_expires_at) == (None, None, None, None)
    assert back.reason == "stall: requeued"
    assert store.outbox.events_of(job.job_id) == []
    assert store.runs.state("r1") == "running"


@pytest.mark.behaviour("A9")
def test_requeued_job_is_claimed_before_older_jobs(store: JobStore) -> None:
    job = fenced(store)
    submit(store)
    store.fencing.requeue(job.job_id, attempt=1, condition=Condition.STALL, now=NOW)

    again = claim(store, "i2")

    assert (again.job_id, again.attempt, again.reason) == (job.job_id, 2, None)


@pytest.mark.behaviour("A9")
def test_idle_worker_notices_a_requeue_without_a_claim(store: JobStore) -> None:
    job = fenced(store)
    watch = store.changes()
    assert not watch.any()

    store.fencing.requeue(job.job_id, attempt=1, condition=Condition.STALL, now=NOW)

    assert watch.wait(10)
    assert not watch.any()
    store.runs.submit(Submission(queue="gpu"), now=NOW)
    eventually(watch.any, "the look alone sees a change too")
    watch.close()


def test_idle_worker_notices_a_release_without_a_claim(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    watch = store.changes()
    assert not watch.any()

    store.claims.release(job.job_id, attempt=1, incarnation="i1", now=NOW)

    assert watch.wait(10)
    watch.close()


def test_fence_for_an_incarnation_without_the_job_is_refused(store: JobStore) -> None:
    submit(store)
    job = claim(store, "holder")

    assert not store.fencing.fence(job.job_id, attempt=1, incarnation="liar", condition=Condition.STALL, now=NOW)

    assert store.job(job.job_id) == job
    assert store.fencing.fence(job.job_id, attempt=1, incarnation="holder", condition=Condition.STALL, now=NOW)


def test_requeue_needs_the_fence_and_happens_once(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    assert not store.fencing.requeue(job.job_id, attempt=1, condition=Condition.STALL, now=NOW)
    store.fencing.fence(job.job_id, attempt=1, incarnation="i1", condition=Condition.STALL, now=NOW)
    assert not store.fencing.requeue(job.job_id, attempt=2, condition=Condition.STALL, now=NOW)

    assert store.fencing.requeue(job.job_id, attempt=1, condition=Condition.STALL, now=NOW)
    assert not store.fencing.requeue(job.job_id, attempt=1, condition=Condition.STALL, now=NOW)

    assert store.job(job.job_id).watchdog_retries == 1


@pytest.mark.behaviour("A10")
def test_failed_job_is_final_and_has_one_event(store: JobStore) -> None:
    job = fenced(store)

    assert store.fencing.fail(job.job_id, attempt=1, reason="stall: at the cap", now=NOW + 2)
    assert not store.fencing.fail(job.job_id, attempt=1, reason="again", now=NOW + 3)

    ended = store.job(job.job_id)
    assert (ended.state, ended.reason, ended.claimed_by) == (State.FAILED, "stall: at the cap", None)
    assert store.outbox.events_of(job.job_id) == ["failed"]


def accept_events(store: JobStore) -> None:
    refuse_events(store, "")


@pytest.mark.behaviour("A10")
def test_fenced_job_is_unchanged_if_its_event_cannot_be_written(store: JobStore) -> None:
    job = fenced(store)
    before = store.job(job.job_id)
    refuse_events(store)

    with pytest.raises(DatabaseError, match="refusal"):
        store.fencing.fail(job.job_id, attempt=1, reason="stall", now=NOW + 2)

    assert store.job(job.job_id) == before
    accept_events(store)
    assert store.fencing.fail(job.job_id, attempt=1, reason="stall", now=NOW + 2)
    assert store.outbox.events_of(job.job_id) == ["failed"]


@pytest.mark.behaviour("A10")
def test_worker_keeps_its_job_if_the_event_cannot_be_written(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    refuse_events(store)

    with pytest.raises(DatabaseError, match="refusal"):
        store.claims.fail_by_worker(job.job_id, attempt=1, incarnation="i1", reason="boom", now=NOW + 2)

    assert store.job(job.job_id) == job
    assert store.claims.owns(job.job_id, attempt=1, incarnation="i1")


@pytest.mark.behaviour("A10")
def test_event_fails_the_run_and_cancels_its_other_jobs(store: JobStore) -> None:
    done, tripped, running, waiting = (submit(store, run_id="r1") for _ in range(4))
    stranger = submit(store, run_id="r2")
    assert claim(store, "i0").job_id == done
    store.claims.complete(done, attempt=1, incarnation="i0", now=NOW)
    assert [claim(store, name).job_id for name in ("i1", "i2")] == [tripped, running]
    store.fencing.fence(tripped, attempt=1, incarnation="i1", condition=Condition.STALL, now=NOW)
    store.fencing.fail(tripped, attempt=1, reason="stall", now=NOW)
    assert store.runs.state("r1") == "running"

    assert store.sweeps.consume_events(now=NOW + 5) == 1

    assert store.runs.state("r1") == "failed"
    assert {job.job_id: job.state for job in store.jobs()} == {
        done: State.COMPLETED,
        tripped: State.FAILED,
        running: State.CANCELLED,
        waiting: State.CANCELLED,
        stranger: State.QUEUED,
    }
    assert store.job(waiting).reason == f"job {tripped} of its run failed"
    assert not store.claims.owns(running, attempt=1, incarnation="i2")
    assert store.runs.state("r2") == "running"


@pytest.mark.behaviour("A10")
def test_event_is_consumed_once(store: JobStore) -> None:
    job = fenced(store, run_id="r1")
    store.fencing.fail(job.job_id, attempt=1, reason="stall", now=NOW)
    stranger = submit(store, run_id="r2")
    assert store.sweeps.consume_events(now=NOW) == 1

    assert store.sweeps.consume_events(now=NOW + 1) == 0

    assert store.job(stranger).state is State.QUEUED


@pytest.mark.behaviour("A10")
def test_failed_run_takes_no_more_jobs(store: JobStore) -> None:
    job = fenced(store, run_id="r1")
    store.fencing.fail(job.job_id, attempt=1, reason="stall", now=NOW)
    before = submit(store, run_id="r1")
    store.sweeps.consume_events(now=NOW)

    with pytest.raises(SubmissionError, match="run 'r1' has failed: give the job another run"):
        submit(store, run_id="r1")

    assert store.job(before).state is State.CANCELLED
    assert [found.job_id for found in store.jobs()] == [job.job_id, before]


def test_event_of_a_job_without_a_run_is_consumed_without_effect(store: JobStore) -> None:
    job = fenced(store)
    other = submit(store)
    store.fencing.fail(job.job_id, attempt=1, reason="stall", now=NOW)

    assert store.sweeps.consume_events(now=NOW) == 1

    assert store.job(other).state is State.QUEUED


def test_consumer_that_dies_half_way_leaves_the_event_unread(store: JobStore) -> None:
    job = fenced(store, run_id="r1")
    sibling = submit(store, run_id="r1")
    store.fencing.fail(job.job_id, attempt=1, reason="stall", now=NOW)
    refuse_events(store, "UPDATE")

    with pytest.raises(DatabaseError, match="refusal"):
        store.sweeps.consume_events(now=NOW)

    assert store.runs.state("r1") == "running"
    assert store.job(sibling).state is State.QUEUED
    accept_events(store)
    assert store.sweeps.consume_events(now=NOW) == 1
    assert store.job(sibling).state is State.CANCELLED


@pytest.mark.behaviour("A13")
def test_fence_without_a_holder_expires_and_records_its_condition(store: JobStore) -> None:
    job = fenced(store)

    assert store.sweeps.reclaim_expired(now=NOW + 1 + FENCE_S) == []
    assert store.sweeps.expired(now=NOW + 2 + FENCE_S) == {(job.job_id, 1)}
    assert store.sweeps.reclaim_expired(now=NOW + 2 + FENCE_S) == [job.job_id]

    back = store.job(job.job_id)
    assert (back.state, back.reclaims, back.watchdog_retries) == (State.QUEUED, 1, 0)
    assert back.reason == "stall: fenced, and its fence ran out"
    assert not store.fencing.requeue(job.job_id, attempt=1, condition=Condition.STALL, now=NOW)


def test_held_fence_stays_and_others_expire(store: JobStore) -> None:
    job = fenced(store)

    assert store.fencing.hold_fence(job.job_id, attempt=1, now=NOW + FENCE_S)
    assert not store.fencing.hold_fence(job.job_id, attempt=2, now=NOW + 9000)

    assert store.sweeps.reclaim_expired(now=NOW + 2 + FENCE_S) == []
    assert store.fencing.requeue(job.job_id, attempt=1, condition=Condition.STALL, now=NOW)
    assert not store.fencing.hold_fence(job.job_id, attempt=1, now=NOW + 600)
