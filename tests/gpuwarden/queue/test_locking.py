"""Concurrent claims, registrations, sweeps and consumers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select, update

from gpuwarden.db.transactions import writing
from gpuwarden.job import Condition, State
from gpuwarden.queue import Job, JobStore, ReplacedError, SubmissionError, runs
from gpuwarden.queue.schema import JOBS
from tests.gpuwarden.queue.builders import NOW, claim, submit
from tests.waiting import together

pytestmark = pytest.mark.both_databases


@pytest.mark.behaviour("A11")
def test_claim_and_next_registration_leave_no_job_with_the_old(store: JobStore) -> None:
    for turn in range(15):
        old, new = f"{turn}-old", f"{turn}-new"
        job_id = submit(store)
        slot: dict[str, Any] = {"host": "box1", "worker": "w1", "now": NOW}
        store.claims.register("gpu", incarnation=old, **slot)

        claimed, settled = together(
            partial(store.claims.claim, "gpu", incarnation=old, **slot),
            partial(store.claims.register, "gpu", incarnation=new, **slot),
        )

        assert isinstance(claimed, Job | ReplacedError), claimed
        assert settled == ([job_id] if isinstance(claimed, Job) else [])
        assert store.job(job_id).state is State.QUEUED
        assert not store.claims.renew(job_id, attempt=1, incarnation=old, now=NOW)
        last = store.claims.claim("gpu", incarnation=new, **slot)
        assert last is not None
        assert store.claims.complete(job_id, attempt=last.attempt, incarnation=new, now=NOW)


@pytest.mark.behaviour("A11")
def test_fence_and_next_registration_settle_the_job_once(store: JobStore) -> None:
    for turn in range(15):
        old, new = f"{turn}-old", f"{turn}-new"
        job_id = submit(store)
        slot: dict[str, Any] = {"host": "box1", "worker": "w1", "now": NOW}
        store.claims.register("gpu", incarnation=old, **slot)
        assert store.claims.claim("gpu", incarnation=old, **slot)

        took, settled = together(
            partial(store.fencing.fence, job_id, attempt=1, incarnation=old, condition=Condition.STALL, now=NOW),
            partial(store.claims.register, "gpu", incarnation=new, **slot),
        )

        assert (took, settled) in ((True, []), (False, [job_id]))
        if took:
            assert store.fencing.fail(job_id, attempt=1, reason="stall", now=NOW)
        else:
            last = store.claims.claim("gpu", incarnation=new, **slot)
            assert last is not None
            assert store.claims.complete(job_id, attempt=2, incarnation=new, now=NOW)


@pytest.mark.behaviour("A13")
def test_sweep_and_renewal_of_an_expired_lease_agree_on_the_holder(store: JobStore) -> None:
    for _ in range(15):
        job_id = submit(store)
        claim(store)

        swept, renewed = together(
            lambda: store.sweeps.reclaim_expired(now=NOW + 601),
            partial(store.claims.renew, job_id, attempt=1, incarnation="i1", now=NOW + 601),
        )

        assert (swept, renewed) in (([job_id], False), ([], True))
        assert store.claims.owns(job_id, attempt=1, incarnation="i1") is renewed
        if renewed:
            store.claims.complete(job_id, attempt=1, incarnation="i1", now=NOW)
        else:
            store.claims.complete(claim(store).job_id, attempt=2, incarnation="i1", now=NOW)


def test_fence_that_expires_while_it_is_settled_is_settled_once(store: JobStore) -> None:
    for turn in range(15):
        job_id = submit(store)
        claim(store, f"i{turn}")
        store.fencing.fence(job_id, attempt=1, incarnation=f"i{turn}", condition=Condition.STALL, now=NOW)

        swept, requeued = together(
            lambda: store.sweeps.reclaim_expired(now=NOW + 601),
            partial(store.fencing.requeue, job_id, attempt=1, condition=Condition.STALL, now=NOW + 601),
        )

        assert (swept, requeued) in (([job_id], False), ([], True))
        back = store.job(job_id)
        assert (back.state, back.reclaims, back.watchdog_retries) == (State.QUEUED, int(not requeued), int(requeued))
        store.claims.complete(claim(store, "i99").job_id, attempt=2, incarnation="i99", now=NOW)


def test_concurrent_sweeps_registrations_and_consumers_do_not_deadlock(store: JobStore) -> None:
    for turn in range(8):
        ids = [submit(store, run_id=f"r{turn}", attempts_max=1) for _ in range(12)]
        culprit = submit(store, run_id=f"r{turn}", priority=1)
        other = submit(store, queue="cpu")
        for n in range(13):
            slot: dict[str, Any] = {"host": "box1", "worker": f"w{n}", "incarnation": f"{turn}-i{n}", "now": NOW}
            store.claims.register("gpu", **slot)
            assert store.claims.claim("gpu", **slot)
        with writing(store._engine) as connection:  # for a registration with many jobs
            connection.execute(update(JOBS).where(JOBS.c.state == State.RUNNING).values(worker="w0"))
        assert store.claims.fail_by_worker(culprit, attempt=1, incarnation=f"{turn}-i0", reason="boom", now=NOW)

        answers = together(
            lambda: store.sweeps.reclaim_expired(now=NOW + 601),
            lambda: store.sweeps.reclaim_expired(now=NOW + 601),
            lambda: store.sweeps.consume_events(now=NOW),
            lambda: store.sweeps.consume_events(now=NOW),
            partial(store.claims.register, "gpu", host="box1", worker="w0", incarnation=f"{turn}-new", now=NOW),
        )

        assert not [answer for answer in answers if isinstance(answer, Exception)]
        for job_id in ids:
            state = store.job(job_id).state
            assert state in (State.FAILED, State.CANCELLED)
            assert [each for each in store.outbox.events_of(job_id) if each != "run_failed"] == [state]
        store.sweeps.consume_events(now=NOW)
        assert store.job(other).state is State.QUEUED


def test_job_is_not_added_to_a_run_while_the_run_fails(store: JobStore) -> None:
    for turn in range(15):
        run_id = f"r{turn}"
        culprit = submit(store, run_id=run_id)
        claim(store)
        store.claims.fail_by_worker(culprit, attempt=1, incarnation="i1", reason="boom", now=NOW)

        added, consumed = together(partial(submit, store, run_id=run_id), lambda: store.sweeps.consume_events(now=NOW))

        assert consumed == 1
        assert store.jobs(states=frozenset({State.QUEUED})) == []
        assert isinstance(added, int | SubmissionError), added


@pytest.mark.needs_postgres
def test_claim_does_not_wait_for_uncommitted_claims(shared_store: JobStore) -> None:
    first, second = submit(shared_store), submit(shared_store)
    with writing(shared_store._engine) as connection:
        connection.execute(select(JOBS).where(JOBS.c.job_id == first).with_for_update())

        assert claim(shared_store).job_id == second

    assert claim(shared_store, "i2").job_id == first


@pytest.mark.needs_postgres
@pytest.mark.parametrize("act", ["renew", "claim", "fail_by_worker", "release"])
def test_sign_of_a_lost_job_does_not_wait_for_a_lock_on_its_run(shared_store: JobStore, act: str) -> None:
    job_id = submit(shared_store, run_id="r1")
    claim(shared_store)
    shared_store.lost_hosts.mark_lost(job_id, attempt=1, now=NOW)
    its: dict[str, Any] = {"attempt": 1, "incarnation": "i1", "now": NOW}
    acts: dict[str, Callable[[], object]] = {
        "renew": partial(shared_store.claims.renew, job_id, **its),
        "claim": partial(claim, shared_store),
        "fail_by_worker": partial(shared_store.claims.fail_by_worker, job_id, reason="boom", **its),
        "release": partial(shared_store.claims.release, job_id, **its),
    }

    with ThreadPoolExecutor(1) as pool, writing(shared_store._engine) as another:
        runs.lock_run_of(another, job_id)

        assert pool.submit(acts[act]).result()
