"""A job is completed, the worker's row refreshed and the next job claimed, in one transaction."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, select, text, update

from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import Kind, State
from gpuwarden.queue import DrainedError, Job, JobStore, ReplacedError
from gpuwarden.queue.models import Completion, Success
from gpuwarden.queue.schema import JOBS, WORKERS
from tests.gpuwarden.queue.builders import NOW, claim, register, submit
from tests.waiting import eventually

pytestmark = pytest.mark.both_databases

LATER = NOW + 10


def turn(store: JobStore, job: Job, **changed: Any) -> tuple[bool, Job | None]:
    """Complete the job of worker `w1` and claim the next."""
    found = turn_of(store, job, **changed)
    return found.done, found.job


def turn_of(store: JobStore, job: Job, *, result: Any = None, reason: str | None = None, **changed: Any) -> Completion:
    its: dict[str, Any] = {"queue": "gpu", "host": "box1", "worker": "w1", "incarnation": "i1", "now": LATER, **changed}
    success = Success(job.job_id, job.attempt, result, reason, in_run=job.run_id is not None)
    return store.claims.complete_and_claim(success, **its)


def row_of(store: JobStore) -> tuple[str | None, str | None, float, float | None]:
    """Current and loaded model, last contact and last completion of `w1`."""
    row = (WORKERS.c.current_model, WORKERS.c.loaded_model, WORKERS.c.last_seen_at, WORKERS.c.completed_at)
    with reading(store._engine) as connection:
        model, loaded, seen_at, completed_at = connection.execute(select(*row).where(WORKERS.c.worker == "w1")).one()
        return model, loaded, seen_at, completed_at


def events(store: JobStore) -> list[tuple[int, str, float | None]]:
    return [(each.job_id, each.kind, each.ran_s) for each in store.outbox.events("anyone")]


def test_job_is_completed_and_the_next_one_claimed(store: JobStore) -> None:
    register(store, "i1")
    first, second = submit(store), submit(store, model="m2")

    accepted, job = turn(store, claim(store), result={"n": 1}, reason="kept in part", lease_s=60)

    assert accepted
    assert job == store.job(second)
    assert (job.state, job.attempt, job.claimed_by, job.claimed_at) == (State.RUNNING, 1, "i1", LATER)
    assert job.lease_expires_at == LATER + 60
    done = store.job(first)
    assert (done.state, done.result, done.reason, done.ended_at) == (State.COMPLETED, {"n": 1}, "kept in part", LATER)
    assert (done.claimed_by, done.lease_expires_at) == (None, None)
    assert events(store) == [(first, Kind.COMPLETED, 10)]
    assert row_of(store) == ("m2", None, LATER, LATER)


def test_worker_is_idle_only_if_nothing_but_jobs_is_missing(store: JobStore) -> None:
    register(store, "i1")
    submit(store)
    submit(store)
    found = turn_of(store, claim(store))
    assert found.idle is False
    assert found.job is not None
    store.admin.drain(host="box1", worker="w1")
    assert turn_of(store, found.job) == Completion(done=True)
    register(store, "i2")
    submit(store)
    assert turn_of(store, claim(store, "i2"), worker="w2", incarnation="i2") == Completion(done=True, idle=True)


def test_job_of_another_slot_is_not_completed_with_a_claim(store: JobStore) -> None:
    """Its worker knows the claim, and took the other's incarnation."""
    register(store, "i1")
    store.claims.register("gpu", host="box1", worker="w2", incarnation="i1", now=NOW)
    submit(store)
    job = claim(store)

    assert turn_of(store, job, worker="w2") == Completion(done=False)
    assert store.job(job.job_id) == job


def test_last_job_leaves_a_row_without_a_model(store: JobStore) -> None:
    register(store, "i1")
    submit(store, model="m1")

    assert turn(store, claim(store), loaded="m1") == (True, None)

    assert row_of(store) == (None, "m1", LATER, LATER)


def test_jobs_of_the_loaded_model_go_first(store: JobStore) -> None:
    register(store, "i1")
    submit(store, model="m1")
    submit(store, model="m2")
    alike = submit(store, model="m1")

    _, job = turn(store, claim(store), loaded="m1")

    assert job is not None
    assert job.job_id == alike


def test_lost_attempt_writes_nothing(store: JobStore) -> None:
    register(store, "i1")
    submit(store)
    job, second = claim(store), submit(store)
    store.claims.release(job.job_id, attempt=1, incarnation="i1", now=NOW)
    before = store.jobs(), row_of(store)

    assert turn(store, job) == (False, None)

    assert (store.jobs(), row_of(store)) == before
    assert events(store) == []
    assert store.job(second).state is State.QUEUED


def test_repeated_request_writes_nothing_and_the_claim_returns_the_job(store: JobStore) -> None:
    register(store, "i1")
    submit(store)
    submit(store)
    third = submit(store)
    job = claim(store)
    _, following = turn(store, job)

    assert turn(store, job) == (False, None)

    assert claim(store, now=LATER) == following
    assert store.job(third).state is State.QUEUED


def drain(store: JobStore) -> None:
    store.admin.drain(host="box1", worker="w1")


def lock(store: JobStore) -> None:
    store.admin.lock(host="box1", worker="w1", who="someone", reason="it fails", now=NOW)


def quarantine(store: JobStore) -> None:
    store.gpu_quarantine.quarantine(["GPU-0"], host="box1", worker=None, reason="it fell off the bus", now=NOW)


def retire(store: JobStore) -> None:
    store.fencing.retire_worker(host="box1", worker="w1", incarnation="i1", now=NOW)


@pytest.mark.parametrize("keep", [drain, lock, quarantine, retire])
def test_worker_that_may_not_claim_completes_only(store: JobStore, keep: Callable[[JobStore], None]) -> None:
    register(store, "i1", gpus=("GPU-0",))
    submit(store)
    job, second = claim(store), submit(store)
    keep(store)

    assert turn(store, job) == (True, None)

    assert store.job(second).state is State.QUEUED
    if keep is drain:
        with pytest.raises(DrainedError):
            claim(store)
    if keep is retire:
        with pytest.raises(ReplacedError):
            claim(store)


def test_completion_frees_the_job_that_is_then_claimed(store: JobStore) -> None:
    register(store, "i1")
    first = submit(store, run_id="r1")
    second = submit(store, run_id="r1", needs=(first,))

    accepted, job = turn(store, claim(store))

    assert accepted
    assert job is not None
    assert job.job_id == second
    assert turn(store, job) == (True, None)
    assert [kind for _, kind, _ in events(store)] == [Kind.COMPLETED, Kind.COMPLETED, Kind.RUN_COMPLETED]
    assert row_of(store) == (None, None, LATER, LATER)


def test_job_of_another_slot_is_not_completed(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    its: dict[str, Any] = {"attempt": 1, "incarnation": "i1", "now": LATER}

    assert not store.claims.complete(job.job_id, **its, of=("box1", "w2"))
    assert not store.claims.complete(job.job_id, **its, of=("box2", "w1"))
    assert store.job(job.job_id) == job
    assert store.claims.complete(job.job_id, **its, of=("box1", "w1"))


@contextmanager
def recorded(store: JobStore) -> Iterator[list[str]]:
    """Statements that are sent to the server."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        found.append(statement)

    event.listen(store._engine, "before_cursor_execute", note)
    yield found
    event.remove(store._engine, "before_cursor_execute", note)


@pytest.mark.needs_postgres
def test_a_job_costs_one_statement_on_postgresql(shared_store: JobStore) -> None:
    register(shared_store, "i1")
    submit(shared_store)
    submit(shared_store)

    with recorded(shared_store) as claims:
        job = claim(shared_store)
    with recorded(shared_store) as turns:
        _, following = turn(shared_store, job)
    assert following is not None
    with recorded(shared_store) as ends:
        assert shared_store.claims.complete(following.job_id, attempt=1, incarnation="i1", now=NOW)
    with recorded(shared_store) as idle:
        assert shared_store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1", now=NOW) is None

    assert [len(each) for each in (claims, turns, ends, idle)] == [1, 1, 1, 1]


@contextmanager
def meanwhile(store: JobStore, act: Callable[[], Any], *changes: Any) -> Iterator[Future[Any]]:
    """Call `act`, and commit changes of the worker's row once it waits for them."""
    with ThreadPoolExecutor(1) as pool:
        with writing(store._engine) as first:
            for each in changes:
                first.execute(each)
            acting = pool.submit(act)
            eventually(lambda: waits_for_a_row(store), "it waits")
        yield acting


def waits_for_a_row(store: JobStore) -> bool:
    with reading(store._engine) as connection:
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return bool(connection.scalar(text(waits)))


ITS_ROW = update(WORKERS).where(WORKERS.c.worker == "w1")


@pytest.mark.needs_postgres
def test_fence_during_the_request_refuses_the_result(shared_store: JobStore) -> None:
    register(shared_store, "i1")
    submit(shared_store)
    job, second = claim(shared_store), submit(shared_store)
    fence = (
        ITS_ROW.values(retired_incarnation="i1"),
        update(JOBS).where(JOBS.c.job_id == job.job_id).values(state="fencing"),
    )

    with meanwhile(shared_store, lambda: turn(shared_store, job), *fence) as acting:
        assert acting.result() == (False, None)

    assert shared_store.job(job.job_id).state is State.FENCING
    assert shared_store.job(second).state is State.QUEUED
    assert events(shared_store) == []


@pytest.mark.needs_postgres
@pytest.mark.parametrize(
    "change",
    [{"draining_incarnation": "i1"}, {"locked_at": NOW}, {"retired_incarnation": "i1"}],
    ids=["drained", "locked", "retired"],
)
def test_change_of_the_row_during_the_request_keeps_it_from_a_claim(
    shared_store: JobStore, change: dict[str, Any]
) -> None:
    register(shared_store, "i1")
    submit(shared_store)
    job, second = claim(shared_store), submit(shared_store)

    with meanwhile(shared_store, lambda: turn(shared_store, job), ITS_ROW.values(**change)) as acting:
        assert acting.result() == (True, None)

    assert shared_store.job(second).state is State.QUEUED


@pytest.mark.needs_postgres
def test_request_that_is_sent_twice_claims_one_job(shared_store: JobStore) -> None:
    register(shared_store, "i1")
    submit(shared_store)
    job, second, third = claim(shared_store), submit(shared_store), submit(shared_store)
    held = {"state": "running", "attempt": 1, "claimed_by": "i1", "host": "box1", "worker": "w1"}
    sent_before = (
        ITS_ROW.values(completed_at=LATER),
        update(JOBS).where(JOBS.c.job_id == job.job_id).values(state="completed", claimed_by=None),
        update(JOBS).where(JOBS.c.job_id == second).values(**held),
    )

    with meanwhile(shared_store, lambda: turn(shared_store, job), *sent_before) as acting:
        assert acting.result() == (False, None)

    assert claim(shared_store, now=LATER).job_id == second
    assert shared_store.job(third).state is State.QUEUED
