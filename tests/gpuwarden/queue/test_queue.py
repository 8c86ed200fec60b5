"""The queue on real databases: claims, fencing, requeue, fail, leases, caps."""

import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from gpuwarden.db.clock import CLOCK_TRUSTED_S
from gpuwarden.db.engine import DatabaseError
from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import (
    AVOID_S,
    FENCE_S,
    HEARTBEAT_S,
    RECLAIMS_MAX,
    JobClass,
    JobId,
    State,
    Trip,
)
from gpuwarden.queue import (
    Job,
    JobStore,
    ReplacedError,
    Slot,
    Submission,
    SubmissionError,
    UnknownJobError,
    claims,
    runs,
)
from gpuwarden.queue.schema import AVOIDED, JOBS, WORKERS
from remediator.clients.job_queue_sql import RENEWAL_S
from testbed.postgres import Postgres
from tests.waiting import eventually, together

pytestmark = pytest.mark.both_databases

Spawn = Callable[..., subprocess.Popen[str]]

NOW = 1_000_000.0


def submit(store: JobStore, **changed: Any) -> JobId:
    return store.runs.submit(Submission(**{"queue": "gpu", **changed}), now=NOW)


def claim(store: JobStore, incarnation: str = "i1", *, now: float = NOW, queue: str = "gpu") -> Job:
    """Incarnation `i1` is of worker `w1`, and so on."""
    worker = incarnation.replace("i", "w")
    job = store.claims.claim(queue, host="box1", worker=worker, incarnation=incarnation, now=now)
    assert job is not None
    return job


def fenced(store: JobStore, **changed: Any) -> Job:
    submit(store, **changed)
    job = claim(store)
    assert store.fencing.fence(job.job_id, attempt=job.attempt, incarnation="i1", trip=Trip.STALL, now=NOW + 1)
    return job


def worker_rows(store: JobStore) -> list[tuple[Any, ...]]:
    with reading(store._engine) as connection:
        columns = [WORKERS.c[name] for name in ("host", "worker", "incarnation", "current_model", "last_seen_at")]
        return [tuple(row) for row in connection.execute(select(*columns))]


# --- submitting


def test_a_job_takes_its_budget_and_its_silence_from_its_class(store: JobStore) -> None:
    job = store.job(submit(store))

    assert (job.state, job.attempt, job.budget_s, job.stall_timeout_s) == (State.QUEUED, 0, 8100, 120)


def test_an_owner_sets_a_budget_and_a_silence_of_their_own(store: JobStore) -> None:
    job = store.job(submit(store, budget_s=60, stall_timeout_s=5, payload={"prompt": "é"}, steps_total=20))

    assert (job.budget_s, job.stall_timeout_s, job.payload, job.steps_total) == (60, 5, {"prompt": "é"}, 20)


def test_a_job_that_reports_no_steps_is_not_policed_by_the_stall_condition(store: JobStore) -> None:
    assert store.job(submit(store, reports_steps=False)).stall_timeout_s == 0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"budget_s": float("inf")}, "budget_s inf will not do"),
        ({"budget_s": float("nan")}, "budget_s nan"),
        ({"budget_s": -1.0}, "budget_s -1"),
        ({"stall_timeout_s": -1.0}, "stall_timeout_s -1"),
        ({"steps_total": -1}, "steps_total -1"),
        ({"steps_total": 2**31}, "steps_total 2147483648 will not do: a whole number from 0, below 2147483648"),
        ({"priority": 2**31}, "priority 2147483648"),
        ({"priority": -(2**31) - 1}, "priority -2147483649"),
        ({"attempts_max": 0}, "attempts_max 0 will not do: a whole number from 1"),
        ({"attempts_max": 2**31}, "attempts_max 2147483648"),
        ({"model": ""}, "model '' will not do: 1 to 256 printable"),
        ({"model": "a\nb"}, "model"),
        ({"model": "m" * 257}, "model"),
        ({"queue": ""}, "queue ''"),
        ({"run_id": "\udcff"}, "run_id"),
    ],
)
def test_what_a_state_file_could_not_carry_is_refused_when_submitted(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(SubmissionError, match=says):
        Submission(**{"queue": "gpu", **asked})


def test_a_job_that_nobody_submitted_is_unknown(store: JobStore) -> None:
    with pytest.raises(UnknownJobError, match="no job 99"):
        store.job(99)


def test_the_first_job_of_a_run_opens_it_and_the_next_joins(store: JobStore) -> None:
    assert store.runs.state("r1") is None

    submit(store, run_id="r1")
    submit(store, run_id="r1")

    assert store.runs.state("r1") == "running"


def test_jobs_are_listed_by_state_oldest_first(store: JobStore) -> None:
    first, second = submit(store), submit(store)
    claim(store)

    assert [job.job_id for job in store.jobs()] == [first, second]
    assert [job.job_id for job in store.jobs(states=frozenset({State.QUEUED}))] == [second]


# --- claiming


def test_a_claim_names_its_holder_raises_the_attempt_and_leases(store: JobStore) -> None:
    submit(store)

    job = claim(store)

    assert (job.state, job.attempt, job.claimed_by, job.host, job.worker) == (State.RUNNING, 1, "i1", "box1", "w1")
    assert job.lease_expires_at == NOW + 600
    assert job == store.job(job.job_id)


def test_the_lowest_priority_goes_first_then_the_oldest(store: JobStore) -> None:
    late, first, soon = submit(store), submit(store), submit(store, priority=5)

    assert [claim(store, f"i{n}").job_id for n in range(3)] == [soon, late, first]


def test_an_empty_queue_and_another_queue_give_nothing(store: JobStore) -> None:
    submit(store, queue="cpu")

    assert store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1", now=NOW) is None
    assert claim(store, queue="cpu").queue == "cpu"


CLAIMER = """
import sys, time
from pathlib import Path
from gpuwarden.db.engine import NoAnswerError
from gpuwarden.queue import JobStore

def as_a_worker(asks):  # who waits in vain for its turn to write has written nothing, and asks again
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
def test_of_eight_processes_racing_for_200_jobs_each_job_is_claimed_exactly_once(
    store: JobStore, url: str, tmp_path: Path, spawn: Spawn
) -> None:
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


# --- holding, and no longer holding


@pytest.mark.behaviour("A11")
@pytest.mark.parametrize(
    ("attempt", "incarnation"), [(1, "i1"), (2, "i1"), (1, "i2")], ids=["old", "attempt alone", "incarnation alone"]
)
def test_whoever_no_longer_holds_the_job_is_refused_everything(store: JobStore, attempt: int, incarnation: str) -> None:
    submit(store)
    first = claim(store, "i1")
    assert store.claims.release(first.job_id, attempt=1, incarnation="i1", now=NOW)
    held = claim(store, "i2")
    assert held.attempt == 2
    stale = {"attempt": attempt, "incarnation": incarnation}

    assert not store.claims.owns(held.job_id, **stale)  # type: ignore[arg-type]
    assert not store.claims.renew(held.job_id, **stale, now=NOW + 50)  # type: ignore[arg-type]
    assert not store.claims.complete(held.job_id, **stale, now=NOW + 50)  # type: ignore[arg-type]
    assert not store.claims.fail_by_worker(held.job_id, **stale, because="no", now=NOW + 50)  # type: ignore[arg-type]
    assert not store.claims.release(held.job_id, **stale, now=NOW)  # type: ignore[arg-type]

    assert store.job(held.job_id) == held
    assert store.outbox.dispatch_events(held.job_id) == []
    assert store.claims.complete(held.job_id, attempt=2, incarnation="i2", now=NOW + 50)


@pytest.mark.behaviour("A11")
def test_while_fencing_nothing_is_accepted_and_nobody_claims(store: JobStore) -> None:
    job = fenced(store)
    held = {"attempt": 1, "incarnation": "i1"}

    assert not store.claims.owns(job.job_id, **held)  # type: ignore[arg-type]
    assert not store.claims.renew(job.job_id, **held, now=NOW + 2)  # type: ignore[arg-type]
    assert not store.claims.complete(job.job_id, **held, now=NOW + 2)  # type: ignore[arg-type]
    assert not store.claims.fail_by_worker(job.job_id, **held, because="no", now=NOW + 2)  # type: ignore[arg-type]
    assert not store.claims.release(job.job_id, **held, now=NOW)  # type: ignore[arg-type]
    assert store.claims.claim("gpu", host="box2", worker="w2", incarnation="i2", now=NOW + 2) is None
    assert store.sweeps.reclaim_expired(now=NOW + 1 + FENCE_S) == []

    found = store.job(job.job_id)
    assert (found.state, found.attempt, found.because) == (State.FENCING, 1, "stall: fenced")


def test_a_fence_of_another_attempt_is_refused(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert not store.fencing.fence(job.job_id, attempt=2, incarnation="i1", trip=Trip.BUDGET, now=NOW)
    assert not store.fencing.fence(job.job_id, attempt=0, incarnation="i1", trip=Trip.BUDGET, now=NOW)

    assert store.job(job.job_id) == job


def test_a_renewal_lengthens_the_lease(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.claims.renew(job.job_id, attempt=1, incarnation="i1", now=NOW + 10, lease_s=60)

    assert store.job(job.job_id).lease_expires_at == NOW + 70


def test_a_completed_job_has_no_holder_and_one_event(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.claims.complete(job.job_id, attempt=1, incarnation="i1", now=NOW + 10)

    done = store.job(job.job_id)
    assert (done.state, done.claimed_by, done.worker, done.lease_expires_at) == (State.COMPLETED, None, None, None)
    assert store.outbox.dispatch_events(job.job_id) == ["completed"]
    assert not store.claims.complete(job.job_id, attempt=1, incarnation="i1", now=NOW + 11)


def test_a_job_given_back_counts_no_retry_and_keeps_its_priority(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.claims.release(job.job_id, attempt=1, incarnation="i1", now=NOW)

    back = store.job(job.job_id)
    assert (back.state, back.claimed_by, back.because) == (State.QUEUED, None, "released by its worker")
    assert (back.watchdog_retries, back.reclaims, back.priority) == (0, 0, 100)


# --- a trip: requeue or fail


@pytest.mark.behaviour("A9")
@pytest.mark.parametrize(("priority", "becomes"), [(100, 10), (11, 10), (10, 10), (3, 3)])
def test_a_requeue_clears_the_claim_counts_one_retry_and_never_lowers_urgency(
    store: JobStore, priority: int, becomes: int
) -> None:
    job = fenced(store, priority=priority, run_id="r1")

    assert store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW)

    back = store.job(job.job_id)
    assert (back.state, back.priority, back.watchdog_retries, back.reclaims) == (State.QUEUED, becomes, 1, 0)
    assert (back.claimed_by, back.host, back.worker, back.lease_expires_at) == (None, None, None, None)
    assert back.because == "stall: requeued"
    assert store.outbox.dispatch_events(job.job_id) == []
    assert store.runs.state("r1") == "running"


@pytest.mark.behaviour("A9")
def test_a_requeued_job_is_claimed_before_what_waited_longer(store: JobStore) -> None:
    job = fenced(store)
    submit(store)
    store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW)

    again = claim(store, "i2")

    assert (again.job_id, again.attempt, again.because) == (job.job_id, 2, None)


@pytest.mark.behaviour("A9")
def test_an_idle_worker_notices_a_requeue_without_asking_for_jobs(store: JobStore) -> None:
    job = fenced(store)
    watch = store.changes()
    assert not watch.any()

    store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW)

    assert watch.wait(10)
    assert not watch.any()
    store.runs.submit(Submission(queue="gpu"), now=NOW)
    eventually(watch.any, "the look alone sees a change too")
    watch.close()


def test_an_idle_worker_notices_a_job_given_back_without_asking_for_jobs(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    watch = store.changes()
    assert not watch.any()

    store.claims.release(job.job_id, attempt=1, incarnation="i1", now=NOW)

    assert watch.wait(10)
    watch.close()


def test_a_fence_for_an_incarnation_that_does_not_hold_the_job_is_refused(store: JobStore) -> None:
    submit(store)
    job = claim(store, "holder")

    assert not store.fencing.fence(job.job_id, attempt=1, incarnation="liar", trip=Trip.STALL, now=NOW)

    assert store.job(job.job_id) == job
    assert store.fencing.fence(job.job_id, attempt=1, incarnation="holder", trip=Trip.STALL, now=NOW)


def test_a_requeue_needs_the_fence_and_happens_once(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    assert not store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW)
    store.fencing.fence(job.job_id, attempt=1, incarnation="i1", trip=Trip.STALL, now=NOW)
    assert not store.fencing.requeue(job.job_id, attempt=2, trip=Trip.STALL, now=NOW)

    assert store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW)
    assert not store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW)

    assert store.job(job.job_id).watchdog_retries == 1


@pytest.mark.behaviour("A10")
def test_a_failed_job_is_final_and_has_one_event(store: JobStore) -> None:
    job = fenced(store)

    assert store.fencing.fail(job.job_id, attempt=1, because="stall: at the cap", now=NOW + 2)
    assert not store.fencing.fail(job.job_id, attempt=1, because="again", now=NOW + 3)

    ended = store.job(job.job_id)
    assert (ended.state, ended.because, ended.claimed_by) == (State.FAILED, "stall: at the cap", None)
    assert store.outbox.dispatch_events(job.job_id) == ["failed"]


_REFUSALS = {
    (
        "sqlite",
        "INSERT",
    ): "CREATE TRIGGER refusal BEFORE INSERT ON dispatch_events BEGIN SELECT RAISE(ABORT, 'refusal'); END",
    (
        "sqlite",
        "UPDATE",
    ): "CREATE TRIGGER refusal BEFORE UPDATE ON dispatch_events BEGIN SELECT RAISE(ABORT, 'refusal'); END",
    ("sqlite", ""): "DROP TRIGGER refusal",
    ("postgresql", "INSERT"): "ALTER TABLE dispatch_events ADD CONSTRAINT refusal CHECK (kind <> 'failed')",
    ("postgresql", "UPDATE"): "ALTER TABLE dispatch_events ADD CONSTRAINT refusal CHECK (consumed_at IS NULL)",
    ("postgresql", ""): "ALTER TABLE dispatch_events DROP CONSTRAINT refusal",
}


def refuse_events(store: JobStore, when: str = "INSERT") -> None:
    with writing(store._engine) as connection:
        connection.exec_driver_sql(_REFUSALS[connection.dialect.name, when])


def accept_events(store: JobStore) -> None:
    refuse_events(store, "")


@pytest.mark.behaviour("A10")
def test_when_the_event_cannot_be_written_a_tripped_job_stays_as_it_was(store: JobStore) -> None:
    job = fenced(store)
    before = store.job(job.job_id)
    refuse_events(store)

    with pytest.raises(DatabaseError, match="refusal"):
        store.fencing.fail(job.job_id, attempt=1, because="stall", now=NOW + 2)

    assert store.job(job.job_id) == before
    accept_events(store)
    assert store.fencing.fail(job.job_id, attempt=1, because="stall", now=NOW + 2)
    assert store.outbox.dispatch_events(job.job_id) == ["failed"]


@pytest.mark.behaviour("A10")
def test_when_the_event_cannot_be_written_the_worker_still_holds_its_job(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    refuse_events(store)

    with pytest.raises(DatabaseError, match="refusal"):
        store.claims.fail_by_worker(job.job_id, attempt=1, incarnation="i1", because="boom", now=NOW + 2)

    assert store.job(job.job_id) == job
    assert store.claims.owns(job.job_id, attempt=1, incarnation="i1")


@pytest.mark.behaviour("A10")
def test_the_event_fails_the_run_and_cancels_its_other_jobs_even_those_that_run(store: JobStore) -> None:
    done, tripped, running, waiting = (submit(store, run_id="r1") for _ in range(4))
    stranger = submit(store, run_id="r2")
    assert claim(store, "i0").job_id == done
    store.claims.complete(done, attempt=1, incarnation="i0", now=NOW)
    assert [claim(store, name).job_id for name in ("i1", "i2")] == [tripped, running]
    store.fencing.fence(tripped, attempt=1, incarnation="i1", trip=Trip.STALL, now=NOW)
    store.fencing.fail(tripped, attempt=1, because="stall", now=NOW)
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
    assert store.job(waiting).because == f"job {tripped} of its run failed"
    assert not store.claims.owns(running, attempt=1, incarnation="i2")
    assert store.runs.state("r2") == "running"


@pytest.mark.behaviour("A10")
def test_an_event_is_consumed_once_however_often_it_is_looked_for(store: JobStore) -> None:
    job = fenced(store, run_id="r1")
    store.fencing.fail(job.job_id, attempt=1, because="stall", now=NOW)
    stranger = submit(store, run_id="r2")
    assert store.sweeps.consume_events(now=NOW) == 1

    assert store.sweeps.consume_events(now=NOW + 1) == 0

    assert store.job(stranger).state is State.QUEUED


@pytest.mark.behaviour("A10")
def test_a_run_that_has_failed_takes_no_more_jobs(store: JobStore) -> None:
    job = fenced(store, run_id="r1")
    store.fencing.fail(job.job_id, attempt=1, because="stall", now=NOW)
    before = submit(store, run_id="r1")
    store.sweeps.consume_events(now=NOW)

    with pytest.raises(SubmissionError, match="run 'r1' has failed: give the job another run"):
        submit(store, run_id="r1")

    assert store.job(before).state is State.CANCELLED
    assert [found.job_id for found in store.jobs()] == [job.job_id, before]


def test_the_event_of_a_job_without_a_run_is_consumed_and_touches_nobody(store: JobStore) -> None:
    job = fenced(store)
    other = submit(store)
    store.fencing.fail(job.job_id, attempt=1, because="stall", now=NOW)

    assert store.sweeps.consume_events(now=NOW) == 1

    assert store.job(other).state is State.QUEUED


def test_a_consumer_that_dies_half_way_leaves_the_event_unread(store: JobStore) -> None:
    job = fenced(store, run_id="r1")
    sibling = submit(store, run_id="r1")
    store.fencing.fail(job.job_id, attempt=1, because="stall", now=NOW)
    refuse_events(store, "UPDATE")

    with pytest.raises(DatabaseError, match="refusal"):
        store.sweeps.consume_events(now=NOW)

    assert store.runs.state("r1") == "running"
    assert store.job(sibling).state is State.QUEUED
    accept_events(store)
    assert store.sweeps.consume_events(now=NOW) == 1
    assert store.job(sibling).state is State.CANCELLED


# --- leases


@pytest.mark.behaviour("A13")
def test_a_lease_that_nobody_renews_gives_the_job_back_sooner_than_most(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.sweeps.reclaim_expired(now=NOW + 600) == []
    assert store.sweeps.reclaim_expired(now=NOW + 600.1) == [job.job_id]

    back = store.job(job.job_id)
    assert (back.state, back.priority, back.claimed_by, back.because) == (State.QUEUED, 10, None, "lease expired")
    assert (back.reclaims, back.watchdog_retries) == (1, 0)
    assert not store.claims.complete(job.job_id, attempt=1, incarnation="i1", now=NOW + 601)


@pytest.mark.behaviour("A13")
def test_a_renewed_lease_is_left_alone(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    store.claims.renew(job.job_id, attempt=1, incarnation="i1", now=NOW + 590)

    assert store.sweeps.reclaim_expired(now=NOW + 601) == []

    assert store.claims.owns(job.job_id, attempt=1, incarnation="i1")


@pytest.mark.behaviour("A13")
def test_at_the_reclaim_cap_the_job_fails_with_its_event(store: JobStore) -> None:
    job_id = submit(store, run_id="r1", attempts_max=100)
    now = NOW
    for reclaim in range(RECLAIMS_MAX):
        claim(store, now=now)
        now += 601
        assert store.sweeps.reclaim_expired(now=now) == [job_id]
        assert store.job(job_id).reclaims == reclaim + 1
    claim(store, now=now)
    other = submit(store)
    claim(store, "i2", now=now)

    assert store.sweeps.reclaim_expired(now=now + 601) == [job_id, other]

    ended = store.job(job_id)
    assert (ended.state, ended.because) == (State.FAILED, "lease expired, and all 10 reclaims are used")
    assert (ended.attempt, ended.reclaims, ended.watchdog_retries) == (11, 10, 0)
    assert store.outbox.dispatch_events(job_id) == ["failed"]
    assert store.job(other).state is State.QUEUED


def test_an_ingest_job_has_its_lease_reclaimed_like_any(store: JobStore) -> None:
    job_id = submit(store, job_class=JobClass.INGEST_FETCH)
    claim(store)

    assert store.sweeps.reclaim_expired(now=NOW + 601) == [job_id]


# --- workers' rows


@pytest.mark.behaviour("A12")
def test_the_row_of_a_killed_worker_drops_its_model_and_ages_at_once(store: JobStore) -> None:
    submit(store, model="sd-xl")
    claim(store)
    assert worker_rows(store) == [("box1", "w1", "i1", "sd-xl", NOW)]

    assert store.fencing.retire_worker(host="box1", worker="w1", incarnation="i1", now=NOW + 5)

    assert worker_rows(store) == [("box1", "w1", "i1", None, NOW - 95)]


@pytest.mark.behaviour("A18")
def test_a_retired_incarnation_is_told_for_which_trip_and_the_next_one_is_not(store: JobStore) -> None:
    submit(store)
    claim(store)

    def told(incarnation: str) -> Trip | None:
        return store.claims.retired_for(host="box1", worker="w1", incarnation=incarnation)

    assert told("i1") is None
    assert store.fencing.fence(1, attempt=1, incarnation="i1", trip=Trip.BUDGET, now=NOW)
    assert store.fencing.retire_worker(host="box1", worker="w1", incarnation="i1", now=NOW)
    assert told("i1") is Trip.BUDGET

    register(store, "i1b")
    assert told("i1b") is None
    assert store.fencing.retire_worker(host="box1", worker="w1", incarnation="i1b", now=NOW)
    assert told("i1b") is None


@pytest.mark.behaviour("A12")
def test_a_fresh_heartbeat_of_the_replacement_restores_the_row(store: JobStore) -> None:
    submit(store)
    claim(store)
    store.fencing.retire_worker(host="box1", worker="w1", incarnation="i1", now=NOW)
    register(store, "i1b")

    assert store.claims.heartbeat(host="box1", worker="w1", queue="gpu", incarnation="i1b", model=None, now=NOW + 3)

    assert worker_rows(store) == [("box1", "w1", "i1b", None, NOW + 3)]


@pytest.mark.behaviour("A12")
@pytest.mark.parametrize(
    ("host", "worker", "incarnation"),
    [("box1", "w1", "i0"), ("box1", "w2", "i1"), ("box2", "w1", "i1")],
    ids=["its replacement is there already", "another worker", "another host"],
)
def test_a_row_that_is_absent_or_of_another_is_no_ghost(
    store: JobStore, host: str, worker: str, incarnation: str
) -> None:
    store.claims.heartbeat(host="box1", worker="w1", queue="gpu", incarnation="i1", model="m", now=NOW)

    assert not store.fencing.retire_worker(host=host, worker=worker, incarnation=incarnation, now=NOW)

    assert worker_rows(store) == [("box1", "w1", "i1", "m", NOW)]


def test_a_job_without_a_model_shows_its_class_in_the_row(store: JobStore) -> None:
    submit(store)

    claim(store)

    assert worker_rows(store)[0][3] == "gpu"


# --- incarnations


def register(store: JobStore, incarnation: str, *, now: float = NOW, gpus: tuple[str, ...] = ()) -> list[JobId]:
    """Incarnation `i1` and `i1b` are of worker `w1`."""
    worker = incarnation.replace("i", "w").rstrip("b")
    return store.claims.register("gpu", host="box1", worker=worker, incarnation=incarnation, now=now, gpus=gpus)


def test_a_registration_queues_again_what_the_incarnation_before_it_ran(store: JobStore) -> None:
    register(store, "i1")
    job_id = submit(store)
    claim(store)

    assert register(store, "i1b") == [job_id]

    back = store.job(job_id)
    assert (back.state, back.claimed_by, back.because) == (State.QUEUED, None, "its worker was started anew")
    assert (back.reclaims, back.watchdog_retries, back.priority) == (1, 0, 10)
    assert worker_rows(store) == [("box1", "w1", "i1b", None, NOW)]
    assert register(store, "i1b") == []


def test_a_registration_leaves_other_workers_jobs_and_what_is_fenced(store: JobStore) -> None:
    job = fenced(store)
    other = submit(store)
    claim(store, "i2")

    assert register(store, "i1b") == []

    assert store.job(job.job_id).state is State.FENCING
    assert store.claims.owns(other, attempt=1, incarnation="i2")
    assert store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW)


def test_a_registration_that_cannot_settle_everything_registers_nothing(store: JobStore) -> None:
    job_id = submit(store, attempts_max=1)
    claim(store)
    refuse_events(store)

    with pytest.raises(DatabaseError, match="refusal"):
        register(store, "i1b")

    assert worker_rows(store)[0][2] == "i1"
    assert store.claims.owns(job_id, attempt=1, incarnation="i1")


@pytest.mark.behaviour("A11")
def test_an_incarnation_that_was_replaced_is_refused_everything(store: JobStore) -> None:
    job_id, other = submit(store), submit(store)
    claim(store)
    register(store, "i1b")
    old = {"attempt": 1, "incarnation": "i1"}

    with pytest.raises(ReplacedError, match="incarnation i1 of worker box1/w1 is over"):
        claim(store)
    assert not store.claims.heartbeat(host="box1", worker="w1", queue="gpu", incarnation="i1", model="m", now=NOW)
    assert not store.claims.renew(job_id, **old, now=NOW)  # type: ignore[arg-type]
    assert not store.claims.complete(job_id, **old, now=NOW)  # type: ignore[arg-type]
    assert not store.claims.release(job_id, **old, now=NOW)  # type: ignore[arg-type]

    assert worker_rows(store) == [("box1", "w1", "i1b", None, NOW)]
    assert [claim(store, "i1b").job_id if n else store.job(other).job_id for n in range(2)] == [other, job_id]


@pytest.mark.parametrize("end", ["fence", "retire"])
def test_an_incarnation_whose_process_is_being_ended_claims_nothing_and_its_successor_does(
    store: JobStore, end: str
) -> None:
    if end == "fence":
        fenced(store)
    else:
        register(store, "i1")
        assert store.fencing.retire_worker(host="box1", worker="w1", incarnation="i1", now=NOW)
    job_id = submit(store)

    with pytest.raises(ReplacedError):
        claim(store)
    assert not store.claims.heartbeat(host="box1", worker="w1", queue="gpu", incarnation="i1", model=None, now=NOW)

    register(store, "i1b")
    again = store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1b", now=NOW)
    assert again is not None
    assert again.job_id == job_id


def test_a_claim_that_finds_nothing_writes_nothing_and_so_wakes_nobody(store: JobStore) -> None:
    register(store, "i1")
    watch = store.changes()
    watch.any()

    assert store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1", now=NOW) is None
    assert not watch.any()

    submit(store)
    assert watch.wait(10)
    watch.close()


def test_a_claim_whose_answer_was_lost_gives_the_same_job_again_with_its_lease_renewed(store: JobStore) -> None:
    submit(store)
    other = submit(store)
    lost = claim(store)

    again = claim(store, now=NOW + 100)

    assert again == replace(lost, lease_expires_at=NOW + 700)
    assert store.job(other).state is State.QUEUED
    store.claims.complete(again.job_id, attempt=1, incarnation="i1", now=NOW + 101)
    assert claim(store).job_id == other


def test_a_claim_whose_answer_was_lost_is_given_again_on_an_empty_queue_and_to_nobody_else(store: JobStore) -> None:
    submit(store)
    lost = claim(store)

    assert store.claims.claim("gpu", host="box1", worker="w2", incarnation="i2", now=NOW) is None
    assert claim(store) == lost


@pytest.mark.needs_postgres
def test_a_claim_waits_for_the_commit_of_the_one_that_it_repeats(shared_store: JobStore) -> None:
    lost = submit(shared_store)
    other = submit(shared_store)
    register(shared_store, "i1")
    with ThreadPoolExecutor(1) as pool:
        with writing(shared_store._engine) as first:  # as `claim` writes, and its commit is on its way
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


@pytest.mark.behaviour("A11")
def test_a_claim_and_the_registration_of_the_next_incarnation_leave_no_job_with_the_old(store: JobStore) -> None:
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
def test_a_fence_and_the_registration_of_the_next_incarnation_settle_the_job_once(store: JobStore) -> None:
    for turn in range(15):
        old, new = f"{turn}-old", f"{turn}-new"
        job_id = submit(store)
        slot: dict[str, Any] = {"host": "box1", "worker": "w1", "now": NOW}
        store.claims.register("gpu", incarnation=old, **slot)
        assert store.claims.claim("gpu", incarnation=old, **slot)

        took, settled = together(
            partial(store.fencing.fence, job_id, attempt=1, incarnation=old, trip=Trip.STALL, now=NOW),
            partial(store.claims.register, "gpu", incarnation=new, **slot),
        )

        assert (took, settled) in ((True, []), (False, [job_id]))
        if took:
            assert store.fencing.fail(job_id, attempt=1, because="stall", now=NOW)
        else:
            last = store.claims.claim("gpu", incarnation=new, **slot)
            assert last is not None
            assert store.claims.complete(job_id, attempt=2, incarnation=new, now=NOW)


@pytest.mark.behaviour("A13")
def test_a_sweep_and_a_renewal_of_an_expired_lease_agree_who_has_the_job(store: JobStore) -> None:
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


def test_a_fence_that_runs_out_while_it_is_settled_is_settled_once(store: JobStore) -> None:
    for turn in range(15):
        job_id = submit(store)
        claim(store, f"i{turn}")
        store.fencing.fence(job_id, attempt=1, incarnation=f"i{turn}", trip=Trip.STALL, now=NOW)

        swept, requeued = together(
            lambda: store.sweeps.reclaim_expired(now=NOW + 601),
            partial(store.fencing.requeue, job_id, attempt=1, trip=Trip.STALL, now=NOW + 601),
        )

        assert (swept, requeued) in (([job_id], False), ([], True))
        back = store.job(job_id)
        assert (back.state, back.reclaims, back.watchdog_retries) == (State.QUEUED, int(not requeued), int(requeued))
        store.claims.complete(claim(store, "i99").job_id, attempt=2, incarnation="i99", now=NOW)


def test_sweeps_registrations_and_consumers_that_meet_on_many_jobs_never_block_one_another(store: JobStore) -> None:
    for turn in range(8):
        ids = [submit(store, run_id=f"r{turn}", attempts_max=1) for _ in range(12)]
        culprit = submit(store, run_id=f"r{turn}", priority=1)
        other = submit(store, queue="cpu")
        for n in range(13):
            slot: dict[str, Any] = {"host": "box1", "worker": f"w{n}", "incarnation": f"{turn}-i{n}", "now": NOW}
            store.claims.register("gpu", **slot)
            assert store.claims.claim("gpu", **slot)
        with writing(store._engine) as connection:  # so that a registration meets all of them, too
            connection.execute(update(JOBS).where(JOBS.c.state == State.RUNNING).values(worker="w0"))
        assert store.claims.fail_by_worker(culprit, attempt=1, incarnation=f"{turn}-i0", because="boom", now=NOW)

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
            assert [each for each in store.outbox.dispatch_events(job_id) if each != "run_failed"] == [state]
        store.sweeps.consume_events(now=NOW)
        assert store.job(other).state is State.QUEUED


def test_a_job_is_not_added_to_a_run_while_that_fails(store: JobStore) -> None:
    for turn in range(15):
        run_id = f"r{turn}"
        culprit = submit(store, run_id=run_id)
        claim(store)
        store.claims.fail_by_worker(culprit, attempt=1, incarnation="i1", because="boom", now=NOW)

        added, consumed = together(partial(submit, store, run_id=run_id), lambda: store.sweeps.consume_events(now=NOW))

        assert consumed == 1
        assert store.jobs(states=frozenset({State.QUEUED})) == []
        assert isinstance(added, int | SubmissionError), added


def test_threads_that_claim_together_get_a_job_each(store: JobStore) -> None:
    ids = [submit(store) for _ in range(8)]

    claimed = together(*(partial(claim, store, f"i{n}") for n in range(8)))

    assert sorted(job.job_id for job in claimed) == ids


@pytest.mark.needs_postgres
def test_a_claim_waits_for_no_other_that_is_not_committed(shared_store: JobStore) -> None:
    first, second = submit(shared_store), submit(shared_store)
    with writing(shared_store._engine) as connection:
        connection.execute(select(JOBS).where(JOBS.c.job_id == first).with_for_update())

        assert claim(shared_store).job_id == second

    assert claim(shared_store, "i2").job_id == first


# --- runs


def test_a_job_that_was_ready_while_blocked_has_waited_since_then(store: JobStore) -> None:
    first = submit(store, run_id="r1")
    second = submit(store, run_id="r1", needs=(first,))
    store.admin.block(second, because="a person said so")
    claim(store)
    store.claims.complete(first, attempt=1, incarnation="i1", now=NOW + 10)

    store.admin.unblock(second, because="", now=NOW)

    assert store.job(second).queued_at == NOW + 10
    store.claims.complete(second, attempt=claim(store, now=NOW + 15).attempt, incarnation="i1", now=NOW + 20)
    assert [
        each.waited_s for each in store.outbox.events("anyone") if each.job_id == second and each.kind == "completed"
    ] == [5]


@pytest.mark.needs_postgres
@pytest.mark.parametrize("act", ["renew", "claim", "fail_by_worker", "release"])
def test_what_is_heard_of_a_lost_job_waits_for_nobody_who_has_its_run(shared_store: JobStore, act: str) -> None:
    job_id = submit(shared_store, run_id="r1")
    claim(shared_store)
    shared_store.lost_hosts.mark_lost(job_id, attempt=1, now=NOW)
    its: dict[str, Any] = {"attempt": 1, "incarnation": "i1", "now": NOW}
    acts: dict[str, Callable[[], object]] = {
        "renew": partial(shared_store.claims.renew, job_id, **its),
        "claim": partial(claim, shared_store),
        "fail_by_worker": partial(shared_store.claims.fail_by_worker, job_id, because="boom", **its),
        "release": partial(shared_store.claims.release, job_id, **its),
    }

    with ThreadPoolExecutor(1) as pool, writing(shared_store._engine) as another:
        runs.lock_run_of(another, job_id)

        assert pool.submit(acts[act]).result()


def test_a_cancelled_job_keeps_the_count_of_what_it_lacked(store: JobStore) -> None:
    first = submit(store, run_id="r1")
    second = submit(store, run_id="r1", needs=(first,))
    store.admin.cancel(second, because="a person said so", now=NOW)
    over = store.job(second)

    store.claims.complete(claim(store).job_id, attempt=1, incarnation="i1", now=NOW + 10)

    assert over.pending == 1
    assert store.job(second) == over


# --- caps


def lose(store: JobStore, how: str, job: Job, *, now: float) -> None:
    """End an attempt in a way that would queue the job once more."""
    attempt, incarnation = job.attempt, job.claimed_by or ""
    if how == "reclaim":
        store.sweeps.reclaim_expired(now=now + 601)
    elif how == "fence":
        store.fencing.fence(job.job_id, attempt=attempt, incarnation=incarnation, trip=Trip.STALL, now=now)
        store.sweeps.reclaim_expired(now=now + FENCE_S + 1)
    elif how == "release":
        store.claims.release(job.job_id, attempt=attempt, incarnation=incarnation, now=now)
    else:
        store.claims.register("gpu", host="box1", worker="w1", incarnation=f"next-{attempt}", now=now)


@pytest.mark.parametrize(
    ("how", "because"),
    [
        ("reclaim", "lease expired, and all 3 attempts are used"),
        ("fence", "lease expired, and all 3 attempts are used"),
        ("release", "released by its worker, and all 3 attempts are used"),
        ("register", "its worker was started anew, and all 3 attempts are used"),
    ],
)
def test_the_last_attempt_that_is_lost_fails_the_job_with_one_event(store: JobStore, how: str, because: str) -> None:
    job_id = submit(store, attempts_max=3, run_id="r1")
    for attempt in range(1, 4):
        incarnation = f"{how}-{attempt}"
        store.claims.register("gpu", host="box1", worker="w1", incarnation=incarnation, now=NOW)
        job = store.claims.claim("gpu", host="box1", worker="w1", incarnation=incarnation, now=NOW)
        assert job is not None
        assert store.outbox.dispatch_events(job_id) == []
        lose(store, how, job, now=NOW)

    ended = store.job(job_id)
    assert (ended.state, ended.attempt, ended.because, ended.claimed_by) == (State.FAILED, 3, because, None)
    assert store.outbox.dispatch_events(job_id) == ["failed"]
    assert store.claims.claim("gpu", host="box1", worker="w9", incarnation="i9", now=NOW) is None
    assert store.sweeps.consume_events(now=NOW) == 1
    assert store.runs.state("r1") == "failed"


def test_a_job_without_attempts_left_is_not_requeued_but_can_be_failed(store: JobStore) -> None:
    job = fenced(store, attempts_max=1)

    assert not store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW)
    assert store.job(job.job_id).state is State.FENCING

    assert store.fencing.fail(job.job_id, attempt=1, because="stall: no attempt left", now=NOW)
    assert store.outbox.dispatch_events(job.job_id) == ["failed"]


def test_reclaims_and_registrations_share_a_cap(store: JobStore) -> None:
    job_id = submit(store, attempts_max=100)
    for turn in range(RECLAIMS_MAX):
        assert store.job(job_id).reclaims == turn
        store.claims.register("gpu", host="box1", worker="w1", incarnation=f"{turn}", now=NOW)
        job = store.claims.claim("gpu", host="box1", worker="w1", incarnation=f"{turn}", now=NOW)
        assert job is not None
        lose(store, ("reclaim", "register")[turn % 2], job, now=NOW)
    store.claims.register("gpu", host="box1", worker="w1", incarnation="last", now=NOW)
    assert store.claims.claim("gpu", host="box1", worker="w1", incarnation="last", now=NOW)

    assert store.claims.register("gpu", host="box1", worker="w1", incarnation="after", now=NOW) == [job_id]

    ended = store.job(job_id)
    assert (ended.state, ended.because) == (
        State.FAILED, "its worker was started anew, and all 10 reclaims are used"
    )  # fmt: skip
    assert store.outbox.dispatch_events(job_id) == ["failed"]


def test_a_sweep_is_bounded_and_the_next_takes_up_the_rest(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.queue.sql.SWEEP_MAX", 2)
    ids = [submit(store) for _ in range(3)]
    for n in range(3):
        claim(store, f"i{n}")

    assert store.sweeps.reclaim_expired(now=NOW + 601) == ids[:2]
    assert store.sweeps.reclaim_expired(now=NOW + 601) == ids[2:]


# --- the fence's own lease


@pytest.mark.behaviour("A13")
def test_a_fence_that_nobody_holds_runs_out_and_says_what_it_was_for(store: JobStore) -> None:
    job = fenced(store)

    assert store.sweeps.reclaim_expired(now=NOW + 1 + FENCE_S) == []
    assert store.sweeps.expired(now=NOW + 2 + FENCE_S) == {(job.job_id, 1)}
    assert store.sweeps.reclaim_expired(now=NOW + 2 + FENCE_S) == [job.job_id]

    back = store.job(job.job_id)
    assert (back.state, back.reclaims, back.watchdog_retries) == (State.QUEUED, 1, 0)
    assert back.because == "stall: fenced, and its fence ran out"
    assert not store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW)


def test_a_fence_that_is_held_stays_and_no_other_is_held(store: JobStore) -> None:
    job = fenced(store)

    assert store.fencing.hold_fence(job.job_id, attempt=1, now=NOW + FENCE_S)
    assert not store.fencing.hold_fence(job.job_id, attempt=2, now=NOW + 9000)

    assert store.sweeps.reclaim_expired(now=NOW + 2 + FENCE_S) == []
    assert store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW)
    assert not store.fencing.hold_fence(job.job_id, attempt=1, now=NOW + 600)


# --- a requeued job avoids where it was


def avoiding(store: JobStore) -> JobId:
    """A job that was taken from worker `w1` and its GPU `GPU-a`."""
    register(store, "i1", gpus=("GPU-a",))
    job = fenced(store)
    avoid = Slot(host="box1", worker="w1", gpus=("GPU-a",))
    assert store.fencing.requeue(job.job_id, attempt=1, trip=Trip.STALL, now=NOW, avoid=avoid, avoid_s=AVOID_S)
    register(store, "i1b", gpus=("GPU-a",))
    return job.job_id


def takes(store: JobStore, incarnation: str, *, now: float = NOW) -> bool:
    worker = incarnation.replace("i", "w").rstrip("b")
    return store.claims.claim("gpu", host="box1", worker=worker, incarnation=incarnation, now=now) is not None


def test_a_requeued_job_is_left_to_another_gpu_that_is_there(store: JobStore) -> None:
    avoiding(store)
    register(store, "i2", gpus=("GPU-b",))

    assert not takes(store, "i1b")
    assert takes(store, "i2")


def test_another_worker_with_the_same_gpu_avoids_it_too(store: JobStore) -> None:
    avoiding(store)
    register(store, "i2", gpus=("GPU-a", "GPU-c"))
    register(store, "i3", gpus=("GPU-b",))

    assert not takes(store, "i2")
    assert takes(store, "i3")


def test_a_job_passes_over_the_worker_it_avoids_but_others_do_not(store: JobStore) -> None:
    avoiding(store)
    register(store, "i2")
    other = submit(store)

    assert store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1b", now=NOW) == store.job(other)


def avoided_too(store: JobStore) -> None:
    register(store, "i2", gpus=("GPU-a",))


def of_another_queue(store: JobStore) -> None:
    store.claims.register("cpu", host="box1", worker="w2", incarnation="i2", now=NOW)


def stale(store: JobStore) -> None:
    register(store, "i2", now=NOW - 31)


def retired(store: JobStore) -> None:
    register(store, "i2")
    store.fencing.retire_worker(host="box1", worker="w2", incarnation="i2", now=NOW)


def in_quarantine(store: JobStore) -> None:
    register(store, "i2", gpus=("GPU-b",))
    store.gpu_quarantine.quarantine(["GPU-b"], host="box1", worker=None, because="D state", now=NOW)


def beside_a_lost_job(store: JobStore) -> None:
    register(store, "i3", gpus=("GPU-b",))
    job_id = submit(store, priority=1)
    assert takes(store, "i3")
    assert store.lost_hosts.mark_lost(job_id, attempt=1, now=NOW)
    register(store, "i2", gpus=("GPU-b",))


def absent(_store: JobStore) -> None: ...


@pytest.mark.parametrize(
    "other", [absent, avoided_too, of_another_queue, stale, retired, in_quarantine, beside_a_lost_job]
)
def test_where_nobody_else_could_run_it_the_job_goes_back(store: JobStore, other: Callable[[JobStore], None]) -> None:
    avoiding(store)
    other(store)

    assert takes(store, "i1b")


def test_a_job_avoids_for_a_while_only(store: JobStore) -> None:
    avoiding(store)
    register(store, "i2", now=NOW + AVOID_S)

    assert not takes(store, "i1b", now=NOW + AVOID_S - 1)
    assert takes(store, "i1b", now=NOW + AVOID_S)


def test_a_sweep_forgets_what_no_job_has_to_avoid_any_more_and_nothing_else(store: JobStore) -> None:
    avoiding(store)

    store.sweeps.reclaim_expired(now=NOW + AVOID_S - 1)
    before = avoided_rows(store)
    store.sweeps.reclaim_expired(now=NOW + AVOID_S)

    assert (before, avoided_rows(store)) == (2, 0)


def avoided_rows(store: JobStore) -> int | None:
    with reading(store._engine) as connection:
        return connection.scalar(select(func.count()).select_from(AVOIDED))


def test_what_a_job_avoids_adds_up_over_its_trips(store: JobStore) -> None:
    job_id = avoiding(store)
    register(store, "i2", gpus=("GPU-b",))
    register(store, "i3", gpus=("GPU-c",))
    job = claim(store, "i2")
    store.fencing.fence(job_id, attempt=2, incarnation="i2", trip=Trip.STALL, now=NOW)
    avoid = Slot(host="box1", worker="w2", gpus=("GPU-b",))
    store.fencing.requeue(job.job_id, attempt=2, trip=Trip.STALL, now=NOW, avoid=avoid, avoid_s=AVOID_S)
    register(store, "i2b", gpus=("GPU-b",))

    assert not takes(store, "i1b")
    assert not takes(store, "i2b")
    assert takes(store, "i3")


# --- quarantine


def test_nothing_is_claimed_with_a_gpu_in_quarantine_until_it_is_released(store: JobStore) -> None:
    register(store, "i1", gpus=("GPU-a", "GPU-b"))
    register(store, "i2", gpus=("GPU-c",))
    submit(store)
    submit(store)
    store.gpu_quarantine.quarantine(["GPU-b"], host="box1", worker=None, because="D state", now=NOW)

    assert not takes(store, "i1")
    assert takes(store, "i2")
    assert store.gpu_quarantine.release_gpu("GPU-b")
    assert not store.gpu_quarantine.release_gpu("GPU-b")
    assert takes(store, "i1")


def test_a_worker_that_does_not_know_its_gpus_is_known_by_its_slot(store: JobStore) -> None:
    submit(store)
    store.gpu_quarantine.quarantine(["GPU-a"], host="box1", worker="w1", because="D state", now=NOW)

    assert not takes(store, "i1")
    assert takes(store, "i2")


def test_two_slots_that_share_a_gpu_which_neither_knows_are_both_kept_from_it_until_it_is_released(
    store: JobStore,
) -> None:
    submit(store)
    for worker in ("w1", "w2"):
        store.gpu_quarantine.quarantine(["GPU-a"], host="box1", worker=worker, because="D state", now=NOW)

    assert not takes(store, "i1")
    assert not takes(store, "i2")
    assert [each.worker for each in store.gpu_quarantine.quarantined()] == ["w1", "w2"]
    assert store.gpu_quarantine.release_gpu("GPU-a")
    assert store.gpu_quarantine.quarantined() == []
    assert takes(store, "i2")


def test_a_quarantine_is_told_with_its_first_reason(store: JobStore) -> None:
    register(store, "i1", gpus=("GPU-a", "GPU-b"))
    assert store.gpu_quarantine.quarantine_of(host="box1", worker="w1") is None
    store.gpu_quarantine.quarantine(["GPU-b"], host="box1", worker="w7", because="D state", now=NOW)
    store.gpu_quarantine.quarantine(["GPU-b"], host="box1", worker="w7", because="again", now=NOW + 1)
    store.gpu_quarantine.quarantine(["GPU-b", "GPU-a"], host="box1", worker=None, because="again", now=NOW + 1)

    found = store.gpu_quarantine.quarantined()

    assert [(each.gpu, each.worker, each.since, each.because) for each in found] == [
        ("GPU-b", "w7", NOW, "D state"),
        ("GPU-a", None, NOW + 1, "again"),
        ("GPU-b", None, NOW + 1, "again"),
    ]
    assert store.gpu_quarantine.quarantine_of(host="box1", worker="w1") == found[0]
    assert store.gpu_quarantine.quarantine_of(host="box1", worker="w2") is None


# --- whose clock


@pytest.mark.needs_postgres
def test_on_postgresql_the_time_is_the_servers_whatever_this_host_believes(
    shared_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reading(shared_store._engine) as connection:
        server = float(connection.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0)

    monkeypatch.setattr("time.time", lambda: 0.0)

    assert server <= shared_store.now() <= server + 30


@pytest.mark.needs_postgres
def test_the_servers_time_is_known_while_it_is_away_once_it_was_asked(
    shared_store: JobStore, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shared_store.now()
    fresh = JobStore(shared_store._engine)
    monkeypatch.setattr("gpuwarden.db.clock.CLOCK_TRUSTED_S", 0.0)
    postgres.stop()

    assert before <= shared_store.now() <= before + 30
    with pytest.raises(DatabaseError):
        fresh.now()

    postgres.start()
    assert fresh.now() >= before


@pytest.mark.needs_postgres
def test_renewals_follow_a_server_clock_that_is_set_ahead_before_a_sweep_acts(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore.open(f"{postgres_url}?options=-csearch_path%3Dpublic,pg_catalog")
    steady_s = 1000.0
    monkeypatch.setattr("gpuwarden.clock.boottime_s", lambda: steady_s)
    job_id = store.runs.submit(Submission(queue="gpu"), now=store.now())
    claim(store, now=store.now())
    with writing(store._engine) as connection:  # stands before the server's own, by the order of the search path
        ahead = "SELECT pg_catalog.clock_timestamp() + interval '700 s'"
        returns = "RETURNS timestamptz LANGUAGE sql"
        connection.execute(text(f"CREATE FUNCTION public.clock_timestamp() {returns} AS $${ahead}$$"))
    stepped_s = steady_s
    others = JobStore(store._engine)

    steady_s += CLOCK_TRUSTED_S - 0.1  # as late as a renewal can come that goes by the old clock
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=store.now())
    assert others.sweeps.expired(now=others.now()) == {(job_id, 1)}
    steady_s += HEARTBEAT_S
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=store.now())

    assert steady_s - stepped_s < RENEWAL_S
    assert others.sweeps.expired(now=others.now()) == frozenset()
    store.close()


def scans(plan: dict[str, Any]) -> set[tuple[str, str]]:
    """Each look at a table in a plan: the table, and the index by which it is looked at, or none."""
    is_look = "Relation Name" in plan and "Scan" in plan["Node Type"]
    found = {(plan["Relation Name"], plan.get("Index Name", "none"))} if is_look else set()
    return found.union(*(scans(each) for each in plan.get("Plans", [])))


@pytest.mark.needs_postgres
@pytest.mark.parametrize("statement", ["_look", "_take", "_complete"])
def test_the_statements_that_every_job_takes_find_it_by_an_index_however_full_the_table_is(
    shared_store: JobStore, postgres_url: str, statement: str
) -> None:
    for _ in range(3):
        submit(shared_store)
    shared_store.claims.complete(claim(shared_store).job_id, attempt=1, incarnation="i1", now=NOW)
    shared_store.claims.release(claim(shared_store).job_id, attempt=1, incarnation="i1", now=NOW)
    text, parameters = for_postgresql(
        next(kept for names, kept in getattr(claims, statement).statements.items() if "loaded" not in names),
        queue="gpu",
        host="box1",
        worker="w1",
        incarnation="i1",
        now=NOW,
        until=NOW + 600,
        fresh_since=NOW - 30,
        job_id=1,
        attempt=1,
        result=None,
    )
    columns = ", ".join(column.name for column in JOBS.columns if not column.primary_key)
    with psycopg.connect(
        postgres_url.replace("+psycopg", ""), autocommit=True, cursor_factory=psycopg.ClientCursor
    ) as connection:
        # As planned of a full queue in which nothing runs yet, and kept.
        more = f"INSERT INTO jobs ({columns}) SELECT {columns} FROM jobs, generate_series(1, 5000)"  # noqa: S608 - our own
        connection.execute(more)
        connection.execute("UPDATE jobs SET state = 'queued', worker = NULL")
        connection.execute("VACUUM ANALYZE jobs")
        connection.execute("SET plan_cache_mode = force_generic_plan")
        connection.execute(b"PREPARE it AS " + text.encode())
        places = ", ".join(["%s"] * len(parameters))
        (found,) = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE it ({places})", parameters).fetchone() or ([],)

    looks = {index for table, index in scans(found[0]["Plan"]) if table == "jobs"}
    assert looks
    assert "none" not in looks
    assert statement != "_complete" or looks == {"jobs_pkey"}


def for_postgresql(statement: Any, **values: object) -> tuple[str, list[object]]:
    """A kept statement as the server gets it, with `$1` and so on, and what stands for each."""
    compiled = statement.compile(dialect=PGDialect_psycopg(paramstyle="numeric_dollar"))  # type: ignore[no-untyped-call]
    found = compiled.construct_params({f"p_{name}": value for name, value in values.items()}, _check=False)
    return str(compiled), [found[name] for name in compiled.positiontup]
