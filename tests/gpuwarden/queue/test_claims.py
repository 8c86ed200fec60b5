"""Claims: order, races and the rights of the holder."""

import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text, update

from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import FENCE_S, Condition, State
from gpuwarden.queue import JobStore
from gpuwarden.queue.schema import JOBS, WORKERS
from tests.gpuwarden.queue.builders import NOW, claim, fenced, register, submit
from tests.waiting import eventually

pytestmark = pytest.mark.both_databases

Spawn = Callable[..., subprocess.Popen[str]]


def test_claim_sets_holder_attempt_and_lease(store: JobStore) -> None:
    submit(store)

    job = claim(store)

    assert (job.state, job.attempt, job.claimed_by, job.host, job.worker) == (State.RUNNING, 1, "i1", "box1", "w1")
    assert job.lease_expires_at == NOW + 600
    assert job == store.job(job.job_id)


def test_lowest_priority_number_goes_first_then_the_oldest(store: JobStore) -> None:
    late, first, soon = submit(store), submit(store), submit(store, priority=5)

    assert [claim(store, f"i{n}").job_id for n in range(3)] == [soon, late, first]


def test_empty_queue_and_another_queue_have_no_job(store: JobStore) -> None:
    submit(store, queue="cpu")

    assert store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1", now=NOW) is None
    assert claim(store, queue="cpu").queue == "cpu"


CLAIMER = """
import sys, time
from pathlib import Path
from gpuwarden.db.errors import NoAnswerError
from gpuwarden.queue import JobStore

def as_a_worker(asks):  # a write that times out has written nothing: retry
    while True:
        try:
            return asks()
        except NoAnswerError as error:
            print(error, file=sys.stderr)

url, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
store = JobStore.open(url)
(folder / f"{name}.ready").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
def claim():
    return store.claims.claim("gpu", host="box1", worker=name, incarnation=name, now=time.time())
while (job := as_a_worker(claim)) is not None:
    print(job.job_id, job.attempt)
    its = {"attempt": job.attempt, "incarnation": name}
    assert as_a_worker(lambda: store.claims.complete(job.job_id, **its, now=time.time()))
"""


@pytest.mark.behaviour("A11")
def test_racing_processes_claim_each_job_once(store: JobStore, url: str, tmp_path: Path, spawn: Spawn) -> None:
    submitted = [submit(store) for _ in range(200)]
    said = {f"w{n}": tmp_path / f"w{n}.err" for n in range(8)}
    racers = {name: spawn("-c", CLAIMER, url, name, str(tmp_path), stderr=path) for name, path in said.items()}
    eventually(lambda: len(list(tmp_path.glob("*.ready"))) == 8, "every process is ready", within_s=40)

    (tmp_path / "go").touch()
    claims = {name: [line.split() for line in racer.communicate()[0].splitlines()] for name, racer in racers.items()}

    assert {said[name].read_text() for name, racer in racers.items() if racer.returncode != 0} == set()
    assert Counter(int(job_id) for lines in claims.values() for job_id, _ in lines) == Counter(submitted)
    assert {attempt for lines in claims.values() for _, attempt in lines} == {"1"}
    assert {job.state for job in store.jobs()} == {State.COMPLETED}
    assert sum(bool(lines) for lines in claims.values()) > 1


# --- holders


@pytest.mark.behaviour("A11")
@pytest.mark.parametrize(
    ("attempt", "incarnation"), [(1, "i1"), (2, "i1"), (1, "i2")], ids=["old", "attempt alone", "incarnation alone"]
)
def test_former_holder_is_refused_everything(store: JobStore, attempt: int, incarnation: str) -> None:
    submit(store)
    first = claim(store, "i1")
    assert store.claims.release(first.job_id, attempt=1, incarnation="i1", now=NOW)
    held = claim(store, "i2")
    assert held.attempt == 2
    stale = {"attempt": attempt, "incarnation": incarnation}

    assert not store.claims.owns(held.job_id, **stale)  # type: ignore[arg-type]
    assert not store.claims.renew(held.job_id, **stale, now=NOW + 50)  # type: ignore[arg-type]
    assert not store.claims.complete(held.job_id, **stale, now=NOW + 50)  # type: ignore[arg-type]
    assert not store.claims.fail_by_worker(held.job_id, **stale, reason="no", now=NOW + 50)  # type: ignore[arg-type]
    assert not store.claims.release(held.job_id, **stale, now=NOW)  # type: ignore[arg-type]

    assert store.job(held.job_id) == held
    assert store.outbox.events_of(held.job_id) == []
    assert store.claims.complete(held.job_id, attempt=2, incarnation="i2", now=NOW + 50)


@pytest.mark.behaviour("A11")
def test_fenced_job_accepts_nothing_and_is_not_claimed(store: JobStore) -> None:
    job = fenced(store)
    held = {"attempt": 1, "incarnation": "i1"}

    assert not store.claims.owns(job.job_id, **held)  # type: ignore[arg-type]
    assert not store.claims.renew(job.job_id, **held, now=NOW + 2)  # type: ignore[arg-type]
    assert not store.claims.complete(job.job_id, **held, now=NOW + 2)  # type: ignore[arg-type]
    assert not store.claims.fail_by_worker(job.job_id, **held, reason="no", now=NOW + 2)  # type: ignore[arg-type]
    assert not store.claims.release(job.job_id, **held, now=NOW)  # type: ignore[arg-type]
    assert store.claims.claim("gpu", host="box2", worker="w2", incarnation="i2", now=NOW + 2) is None
    assert store.sweeps.reclaim_expired(now=NOW + 1 + FENCE_S) == []

    found = store.job(job.job_id)
    assert (found.state, found.attempt, found.reason) == (State.FENCING, 1, "stall: fenced")


def test_fence_of_another_attempt_is_refused(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert not store.fencing.fence(job.job_id, attempt=2, incarnation="i1", condition=Condition.BUDGET, now=NOW)
    assert not store.fencing.fence(job.job_id, attempt=0, incarnation="i1", condition=Condition.BUDGET, now=NOW)

    assert store.job(job.job_id) == job


def test_renewal_extends_the_lease(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.claims.renew(job.job_id, attempt=1, incarnation="i1", now=NOW + 10, lease_s=60)

    assert store.job(job.job_id).lease_expires_at == NOW + 70


def test_completed_job_has_no_holder_and_one_event(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.claims.complete(job.job_id, attempt=1, incarnation="i1", now=NOW + 10)

    done = store.job(job.job_id)
    assert (done.state, done.claimed_by, done.worker, done.lease_expires_at) == (State.COMPLETED, None, None, None)
    assert store.outbox.events_of(job.job_id) == ["completed"]
    assert not store.claims.complete(job.job_id, attempt=1, incarnation="i1", now=NOW + 11)


def test_released_job_counts_no_retry_and_keeps_its_priority(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.claims.release(job.job_id, attempt=1, incarnation="i1", now=NOW)

    back = store.job(job.job_id)
    assert (back.state, back.claimed_by, back.reason) == (State.QUEUED, None, "released by its worker")
    assert (back.watchdog_retries, back.reclaims, back.priority) == (0, 0, 100)


def test_empty_claim_writes_nothing_and_wakes_no_worker(store: JobStore) -> None:
    register(store, "i1")
    watch = store.changes()
    watch.any()

    assert store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1", now=NOW) is None
    assert not watch.any()

    submit(store)
    assert watch.wait(10)
    watch.close()


def test_claim_with_a_lost_answer_returns_the_job_with_a_renewed_lease(store: JobStore) -> None:
    submit(store)
    other = submit(store)
    lost = claim(store)

    again = claim(store, now=NOW + 100)

    assert again == replace(lost, lease_expires_at=NOW + 700)
    assert store.job(other).state is State.QUEUED
    store.claims.complete(again.job_id, attempt=1, incarnation="i1", now=NOW + 101)
    assert claim(store).job_id == other


def test_claim_with_a_lost_answer_is_repeated_only_for_its_holder(store: JobStore) -> None:
    submit(store)
    lost = claim(store)

    assert store.claims.claim("gpu", host="box1", worker="w2", incarnation="i2", now=NOW) is None
    assert claim(store) == lost


@pytest.mark.needs_postgres
def test_repeated_claim_waits_for_the_commit_of_the_first(shared_store: JobStore) -> None:
    lost = submit(shared_store)
    other = submit(shared_store)
    register(shared_store, "i1")
    with ThreadPoolExecutor(1) as pool:
        with writing(shared_store._engine) as first:  # as `claim` writes, before its commit
            first.execute(update(WORKERS).where(WORKERS.c.worker == "w1").values(current_model="m"))
            held = {"state": "running", "attempt": 1, "claimed_by": "i1", "host": "box1", "worker": "w1"}
            first.execute(update(JOBS).where(JOBS.c.job_id == lost).values(**held))
            again = pool.submit(claim, shared_store)
            eventually(lambda: waits_for_a_row(shared_store), "the second claim waits")

        assert again.result().job_id == lost

    assert shared_store.job(other).state is State.QUEUED


def waits_for_a_row(store: JobStore) -> bool:
    with reading(store._engine) as connection:
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return bool(connection.scalar(text(waits)))


def test_job_ready_while_blocked_has_waited_since_then(store: JobStore) -> None:
    first = submit(store, run_id="r1")
    second = submit(store, run_id="r1", needs=(first,))
    store.admin.block(second, reason="a person said so", now=store.now())
    claim(store)
    store.claims.complete(first, attempt=1, incarnation="i1", now=NOW + 10)

    store.admin.unblock(second, reason="", now=NOW)

    assert store.job(second).queued_at == NOW + 10
    store.claims.complete(second, attempt=claim(store, now=NOW + 15).attempt, incarnation="i1", now=NOW + 20)
    assert [
        each.waited_s for each in store.outbox.events("anyone") if each.job_id == second and each.kind == "completed"
    ] == [5]
