"""Sweeps of expired leases, and the cap on reclaims."""

import pytest

from gpuwarden.job import FENCE_S, RECLAIMS_MAX, Condition, JobClass, State
from gpuwarden.queue import Job, JobStore
from tests.gpuwarden.queue.builders import NOW, claim, fenced, submit

pytestmark = pytest.mark.both_databases


@pytest.mark.behaviour("A13")
def test_expired_lease_requeues_the_job_with_high_priority(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.sweeps.reclaim_expired(now=NOW + 600) == []
    assert store.sweeps.reclaim_expired(now=NOW + 600.1) == [job.job_id]

    back = store.job(job.job_id)
    assert (back.state, back.priority, back.claimed_by, back.reason) == (State.QUEUED, 10, None, "lease expired")
    assert (back.reclaims, back.watchdog_retries) == (1, 0)
    assert not store.claims.complete(job.job_id, attempt=1, incarnation="i1", now=NOW + 601)


@pytest.mark.behaviour("A13")
def test_renewed_lease_is_not_reclaimed(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    store.claims.renew(job.job_id, attempt=1, incarnation="i1", now=NOW + 590)

    assert store.sweeps.reclaim_expired(now=NOW + 601) == []

    assert store.claims.owns(job.job_id, attempt=1, incarnation="i1")


@pytest.mark.behaviour("A13")
def test_job_whose_worker_died_under_it_three_times_fails_with_its_event(store: JobStore) -> None:
    job_id = submit(store, run_id="r1", attempts_max=100)
    now = NOW
    for reclaim in range(2):
        claim(store, now=now)
        now += 601
        assert store.sweeps.reclaim_expired(now=now) == [job_id]
        assert store.job(job_id).reclaims == reclaim + 1
    claim(store, now=now)
    other = submit(store)
    claim(store, "i2", now=now)

    assert store.sweeps.reclaim_expired(now=now + 601) == [job_id, other]

    ended = store.job(job_id)
    assert (ended.state, ended.reason) == (State.FAILED, "lease expired, and all 3 lost attempts are used")
    assert (ended.attempt, ended.reclaims, ended.watchdog_retries) == (3, 2, 0)
    assert store.outbox.events_of(job_id) == ["failed"]
    assert store.job(other).state is State.QUEUED


def test_ingest_job_is_reclaimed_like_any(store: JobStore) -> None:
    job_id = submit(store, job_class=JobClass.INGEST_FETCH)
    claim(store)

    assert store.sweeps.reclaim_expired(now=NOW + 601) == [job_id]


def test_cancelled_job_keeps_its_pending_count(store: JobStore) -> None:
    first = submit(store, run_id="r1")
    second = submit(store, run_id="r1", needs=(first,))
    store.admin.cancel(second, reason="a person said so", now=NOW)
    over = store.job(second)

    store.claims.complete(claim(store).job_id, attempt=1, incarnation="i1", now=NOW + 10)

    assert over.pending == 1
    assert store.job(second) == over


# --- caps


def lose(store: JobStore, how: str, job: Job, *, now: float) -> None:
    """End an attempt so that the job is requeued."""
    attempt, incarnation = job.attempt, job.claimed_by or ""
    if how == "reclaim":
        store.sweeps.reclaim_expired(now=now + 601)
    elif how == "fence":
        store.fencing.fence(job.job_id, attempt=attempt, incarnation=incarnation, condition=Condition.STALL, now=now)
        store.sweeps.reclaim_expired(now=now + FENCE_S + 1)
    elif how == "release":
        store.claims.release(job.job_id, attempt=attempt, incarnation=incarnation, now=now)
    else:
        store.claims.register("gpu", host="box1", worker="w1", incarnation=f"next-{attempt}", now=now)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("reclaim", "lease expired, and all 3 attempts are used"),
        ("fence", "lease expired, and all 3 attempts are used"),
        ("release", "released by its worker, and all 3 attempts are used"),
        ("register", "its worker was restarted, and all 3 attempts are used"),
    ],
)
def test_lost_last_attempt_fails_the_job_with_one_event(store: JobStore, how: str, reason: str) -> None:
    job_id = submit(store, attempts_max=3, run_id="r1")
    for attempt in range(1, 4):
        incarnation = f"{how}-{attempt}"
        store.claims.register("gpu", host="box1", worker="w1", incarnation=incarnation, now=NOW)
        job = store.claims.claim("gpu", host="box1", worker="w1", incarnation=incarnation, now=NOW)
        assert job is not None
        assert store.outbox.events_of(job_id) == []
        lose(store, how, job, now=NOW)

    ended = store.job(job_id)
    assert (ended.state, ended.attempt, ended.reason, ended.claimed_by) == (State.FAILED, 3, reason, None)
    assert store.outbox.events_of(job_id) == ["failed"]
    assert store.claims.claim("gpu", host="box1", worker="w9", incarnation="i9", now=NOW) is None
    assert store.sweeps.consume_events(now=NOW) == 1
    assert store.runs.state("r1") == "failed"


def test_exhausted_job_is_not_requeued_but_can_be_failed(store: JobStore) -> None:
    job = fenced(store, attempts_max=1)

    assert not store.fencing.requeue(job.job_id, attempt=1, condition=Condition.STALL, now=NOW)
    assert store.job(job.job_id).state is State.FENCING

    assert store.fencing.fail(job.job_id, attempt=1, reason="stall: no attempt left", now=NOW)
    assert store.outbox.events_of(job.job_id) == ["failed"]


def test_reclaims_and_registrations_share_a_cap(store: JobStore) -> None:
    job_id = submit(store, attempts_max=100)
    for turn in range(RECLAIMS_MAX - 1):
        assert store.job(job_id).reclaims == turn
        store.claims.register("gpu", host="box1", worker="w1", incarnation=f"{turn}", now=NOW)
        job = store.claims.claim("gpu", host="box1", worker="w1", incarnation=f"{turn}", now=NOW)
        assert job is not None
        lose(store, ("reclaim", "register")[turn % 2], job, now=NOW)
    store.claims.register("gpu", host="box1", worker="w1", incarnation="last", now=NOW)
    assert store.claims.claim("gpu", host="box1", worker="w1", incarnation="last", now=NOW)

    assert store.claims.register("gpu", host="box1", worker="w1", incarnation="after", now=NOW) == [job_id]

    ended = store.job(job_id)
    assert (ended.state, ended.reason) == (
        State.FAILED, "its worker was restarted, and all 3 lost attempts are used"
    )  # fmt: skip
    assert store.outbox.events_of(job_id) == ["failed"]


def test_sweep_is_bounded_and_the_next_one_takes_the_rest(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.queue.sql.SWEEP_MAX", 2)
    ids = [submit(store) for _ in range(3)]
    for n in range(3):
        claim(store, f"i{n}")

    assert store.sweeps.reclaim_expired(now=NOW + 601) == ids[:2]
    assert store.sweeps.reclaim_expired(now=NOW + 601) == ids[2:]
