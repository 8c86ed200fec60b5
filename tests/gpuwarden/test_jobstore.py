"""The queue in a real SQLite file: claims, fencing, requeue, fail, leases, and a model that it must agree with."""

import sqlite3
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from gpuwarden.database import DatabaseError
from gpuwarden.job import (
    FINAL,
    RECLAIMS_MAX,
    JobClass,
    JobId,
    Move,
    State,
    Trip,
    after,
    claim_is_valid,
)
from gpuwarden.jobstore import Job, JobStore, Submission, SubmissionError, UnknownJobError
from tests.waiting import eventually

Spawn = Callable[..., subprocess.Popen[str]]

NOW = 1_000_000.0


def submit(store: JobStore, **changed: Any) -> JobId:
    return store.submit(Submission(**{"queue": "gpu", **changed}), now=NOW)


def claim(store: JobStore, incarnation: str = "i1", *, now: float = NOW, queue: str = "gpu") -> Job:
    job = store.claim(queue, host="box1", worker="w1", incarnation=incarnation, now=now)
    assert job is not None
    return job


def fenced(store: JobStore, **changed: Any) -> Job:
    submit(store, **changed)
    job = claim(store)
    assert store.fence(job.job_id, attempt=job.attempt, incarnation="i1", trip=Trip.STALL, now=NOW + 1)
    return job


def worker_rows(database: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT host, worker, incarnation, current_model, last_seen_at FROM workers")
        return rows.fetchall()


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
    assert store.run_state("r1") is None

    submit(store, run_id="r1")
    submit(store, run_id="r1")

    assert store.run_state("r1") == "running"


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

    assert [claim(store).job_id for _ in range(3)] == [soon, late, first]


def test_an_empty_queue_and_another_queue_give_nothing(store: JobStore) -> None:
    submit(store, queue="cpu")

    assert store.claim("gpu", host="box1", worker="w1", incarnation="i1", now=NOW) is None
    assert claim(store, queue="cpu").queue == "cpu"


CLAIMER = """
import sys, time
from pathlib import Path
from gpuwarden.jobstore import JobStore
url, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
store = JobStore.open(url)
(folder / f"{name}.ready").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
while (job := store.claim("gpu", host="box1", worker=name, incarnation=name, now=time.time())) is not None:
    print(job.job_id, job.attempt)
"""


@pytest.mark.behaviour("A11")
def test_of_eight_processes_racing_for_200_jobs_each_job_is_claimed_exactly_once(
    store: JobStore, database: Path, tmp_path: Path, spawn: Spawn
) -> None:
    submitted = [submit(store) for _ in range(200)]
    racers = {f"w{n}": spawn("-c", CLAIMER, f"sqlite:///{database}", f"w{n}", str(tmp_path)) for n in range(8)}
    eventually(lambda: len(list(tmp_path.glob("*.ready"))) == 8, "every process is ready", within_s=40)

    (tmp_path / "go").touch()
    claims = {name: [line.split() for line in racer.communicate()[0].splitlines()] for name, racer in racers.items()}

    assert all(racer.returncode == 0 for racer in racers.values())
    assert Counter(int(job_id) for lines in claims.values() for job_id, _ in lines) == Counter(submitted)
    assert {attempt for lines in claims.values() for _, attempt in lines} == {"1"}
    assert {job.job_id: job.claimed_by for job in store.jobs()} == {
        int(job_id): name for name, lines in claims.items() for job_id, _ in lines
    }
    assert sum(bool(lines) for lines in claims.values()) > 1


# --- holding, and no longer holding


@pytest.mark.behaviour("A11")
@pytest.mark.parametrize(
    ("attempt", "incarnation"), [(1, "i1"), (2, "i1"), (1, "i2")], ids=["old", "attempt alone", "incarnation alone"]
)
def test_whoever_no_longer_holds_the_job_is_refused_everything(store: JobStore, attempt: int, incarnation: str) -> None:
    submit(store)
    first = claim(store, "i1")
    assert store.release(first.job_id, attempt=1, incarnation="i1")
    held = claim(store, "i2")
    assert held.attempt == 2
    stale = {"attempt": attempt, "incarnation": incarnation}

    assert not store.owns(held.job_id, **stale)  # type: ignore[arg-type]
    assert not store.renew(held.job_id, **stale, now=NOW + 50)  # type: ignore[arg-type]
    assert not store.complete(held.job_id, **stale, now=NOW + 50)  # type: ignore[arg-type]
    assert not store.fail_by_worker(held.job_id, **stale, because="no", now=NOW + 50)  # type: ignore[arg-type]
    assert not store.release(held.job_id, **stale)  # type: ignore[arg-type]

    assert store.job(held.job_id) == held
    assert store.dispatch_events(held.job_id) == []
    assert store.complete(held.job_id, attempt=2, incarnation="i2", now=NOW + 50)


@pytest.mark.behaviour("A11")
def test_while_fencing_nothing_is_accepted_and_nobody_claims(store: JobStore) -> None:
    job = fenced(store)
    held = {"attempt": 1, "incarnation": "i1"}

    assert not store.owns(job.job_id, **held)  # type: ignore[arg-type]
    assert not store.renew(job.job_id, **held, now=NOW + 2)  # type: ignore[arg-type]
    assert not store.complete(job.job_id, **held, now=NOW + 2)  # type: ignore[arg-type]
    assert not store.fail_by_worker(job.job_id, **held, because="no", now=NOW + 2)  # type: ignore[arg-type]
    assert not store.release(job.job_id, **held)  # type: ignore[arg-type]
    assert store.claim("gpu", host="box2", worker="w2", incarnation="i2", now=NOW + 2) is None
    assert store.reclaim_expired(now=NOW + 10_000) == []

    found = store.job(job.job_id)
    assert (found.state, found.attempt, found.because) == (State.FENCING, 1, "stall: fenced")


def test_a_fence_of_another_attempt_is_refused(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert not store.fence(job.job_id, attempt=2, incarnation="i1", trip=Trip.BUDGET, now=NOW)
    assert not store.fence(job.job_id, attempt=0, incarnation="i1", trip=Trip.BUDGET, now=NOW)

    assert store.job(job.job_id) == job


def test_a_renewal_lengthens_the_lease(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.renew(job.job_id, attempt=1, incarnation="i1", now=NOW + 10, lease_s=60)

    assert store.job(job.job_id).lease_expires_at == NOW + 70


def test_a_completed_job_has_no_holder_and_no_event(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.complete(job.job_id, attempt=1, incarnation="i1", now=NOW + 10)

    done = store.job(job.job_id)
    assert (done.state, done.claimed_by, done.worker, done.lease_expires_at) == (State.COMPLETED, None, None, None)
    assert store.dispatch_events(job.job_id) == []
    assert not store.complete(job.job_id, attempt=1, incarnation="i1", now=NOW + 11)


def test_a_job_given_back_counts_no_retry_and_keeps_its_priority(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.release(job.job_id, attempt=1, incarnation="i1")

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

    assert store.requeue(job.job_id, attempt=1, trip=Trip.STALL)

    back = store.job(job.job_id)
    assert (back.state, back.priority, back.watchdog_retries, back.reclaims) == (State.QUEUED, becomes, 1, 0)
    assert (back.claimed_by, back.host, back.worker, back.lease_expires_at) == (None, None, None, None)
    assert back.because == "stall: requeued"
    assert store.dispatch_events(job.job_id) == []
    assert store.run_state("r1") == "running"


@pytest.mark.behaviour("A9")
def test_a_requeued_job_is_claimed_before_what_waited_longer(store: JobStore) -> None:
    job = fenced(store)
    submit(store)
    store.requeue(job.job_id, attempt=1, trip=Trip.STALL)

    again = claim(store, "i2")

    assert (again.job_id, again.attempt, again.because) == (job.job_id, 2, None)


@pytest.mark.behaviour("A9")
def test_an_idle_worker_notices_a_requeue_without_asking_for_jobs(store: JobStore) -> None:
    job = fenced(store)
    watch = store.changes()
    assert not watch.any()

    store.requeue(job.job_id, attempt=1, trip=Trip.STALL)

    assert watch.any()
    watch.close()


def test_a_fence_for_an_incarnation_that_does_not_hold_the_job_is_refused(store: JobStore) -> None:
    submit(store)
    job = claim(store, "holder")

    assert not store.fence(job.job_id, attempt=1, incarnation="liar", trip=Trip.STALL, now=NOW)

    assert store.job(job.job_id) == job
    assert store.fence(job.job_id, attempt=1, incarnation="holder", trip=Trip.STALL, now=NOW)


def test_a_requeue_needs_the_fence_and_happens_once(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    assert not store.requeue(job.job_id, attempt=1, trip=Trip.STALL)
    store.fence(job.job_id, attempt=1, incarnation="i1", trip=Trip.STALL, now=NOW)
    assert not store.requeue(job.job_id, attempt=2, trip=Trip.STALL)

    assert store.requeue(job.job_id, attempt=1, trip=Trip.STALL)
    assert not store.requeue(job.job_id, attempt=1, trip=Trip.STALL)

    assert store.job(job.job_id).watchdog_retries == 1


@pytest.mark.behaviour("A10")
def test_a_failed_job_is_final_and_has_one_event(store: JobStore) -> None:
    job = fenced(store)

    assert store.fail(job.job_id, attempt=1, because="stall: at the cap", now=NOW + 2)
    assert not store.fail(job.job_id, attempt=1, because="again", now=NOW + 3)

    ended = store.job(job.job_id)
    assert (ended.state, ended.because, ended.claimed_by) == (State.FAILED, "stall: at the cap", None)
    assert store.dispatch_events(job.job_id) == ["failed"]


def refuse_events(database: Path) -> None:
    connection = sqlite3.connect(database)
    connection.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON dispatch_events BEGIN SELECT RAISE(ABORT, 'no events today'); END"
    )
    connection.close()


def accept_events(database: Path) -> None:
    connection = sqlite3.connect(database)
    connection.execute("DROP TRIGGER refuse")
    connection.close()


@pytest.mark.behaviour("A10")
def test_when_the_event_cannot_be_written_a_tripped_job_stays_as_it_was(store: JobStore, database: Path) -> None:
    job = fenced(store)
    before = store.job(job.job_id)
    refuse_events(database)

    with pytest.raises(DatabaseError, match="no events today"):
        store.fail(job.job_id, attempt=1, because="stall", now=NOW + 2)

    assert store.job(job.job_id) == before
    accept_events(database)
    assert store.fail(job.job_id, attempt=1, because="stall", now=NOW + 2)
    assert store.dispatch_events(job.job_id) == ["failed"]


@pytest.mark.behaviour("A10")
def test_when_the_event_cannot_be_written_the_worker_still_holds_its_job(store: JobStore, database: Path) -> None:
    submit(store)
    job = claim(store)
    refuse_events(database)

    with pytest.raises(DatabaseError, match="no events today"):
        store.fail_by_worker(job.job_id, attempt=1, incarnation="i1", because="boom", now=NOW + 2)

    assert store.job(job.job_id) == job
    assert store.owns(job.job_id, attempt=1, incarnation="i1")


@pytest.mark.behaviour("A10")
def test_the_event_fails_the_run_and_cancels_its_other_jobs_even_those_that_run(store: JobStore) -> None:
    done, tripped, running, waiting = (submit(store, run_id="r1") for _ in range(4))
    stranger = submit(store, run_id="r2")
    assert claim(store, "i0").job_id == done
    store.complete(done, attempt=1, incarnation="i0", now=NOW)
    assert [claim(store, name).job_id for name in ("i1", "i2")] == [tripped, running]
    store.fence(tripped, attempt=1, incarnation="i1", trip=Trip.STALL, now=NOW)
    store.fail(tripped, attempt=1, because="stall", now=NOW)
    assert store.run_state("r1") == "running"

    assert store.consume_events(now=NOW + 5) == 1

    assert store.run_state("r1") == "failed"
    assert {job.job_id: job.state for job in store.jobs()} == {
        done: State.COMPLETED,
        tripped: State.FAILED,
        running: State.CANCELLED,
        waiting: State.CANCELLED,
        stranger: State.QUEUED,
    }
    assert store.job(waiting).because == f"job {tripped} of its run failed"
    assert not store.owns(running, attempt=1, incarnation="i2")
    assert store.run_state("r2") == "running"


@pytest.mark.behaviour("A10")
def test_an_event_is_consumed_once_however_often_it_is_looked_for(store: JobStore) -> None:
    job = fenced(store, run_id="r1")
    store.fail(job.job_id, attempt=1, because="stall", now=NOW)
    store.consume_events(now=NOW)
    late = submit(store, run_id="r1")

    assert store.consume_events(now=NOW + 1) == 0

    assert store.job(late).state is State.QUEUED


def test_the_event_of_a_job_without_a_run_is_consumed_and_touches_nobody(store: JobStore) -> None:
    job = fenced(store)
    other = submit(store)
    store.fail(job.job_id, attempt=1, because="stall", now=NOW)

    assert store.consume_events(now=NOW) == 1

    assert store.job(other).state is State.QUEUED


def test_a_consumer_that_dies_half_way_leaves_the_event_unread(store: JobStore, database: Path) -> None:
    job = fenced(store, run_id="r1")
    sibling = submit(store, run_id="r1")
    store.fail(job.job_id, attempt=1, because="stall", now=NOW)
    connection = sqlite3.connect(database)
    connection.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON dispatch_events BEGIN SELECT RAISE(ABORT, 'dies here'); END"
    )
    connection.close()

    with pytest.raises(DatabaseError, match="dies here"):
        store.consume_events(now=NOW)

    assert store.run_state("r1") == "running"
    assert store.job(sibling).state is State.QUEUED
    accept_events(database)
    assert store.consume_events(now=NOW) == 1
    assert store.job(sibling).state is State.CANCELLED


# --- leases


@pytest.mark.behaviour("A13")
def test_a_lease_that_nobody_renews_gives_the_job_back_sooner_than_most(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert store.reclaim_expired(now=NOW + 600) == []
    assert store.reclaim_expired(now=NOW + 600.1) == [job.job_id]

    back = store.job(job.job_id)
    assert (back.state, back.priority, back.claimed_by, back.because) == (State.QUEUED, 10, None, "lease expired")
    assert (back.reclaims, back.watchdog_retries) == (1, 0)
    assert not store.complete(job.job_id, attempt=1, incarnation="i1", now=NOW + 601)


@pytest.mark.behaviour("A13")
def test_a_renewed_lease_is_left_alone(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    store.renew(job.job_id, attempt=1, incarnation="i1", now=NOW + 590)

    assert store.reclaim_expired(now=NOW + 601) == []

    assert store.owns(job.job_id, attempt=1, incarnation="i1")


@pytest.mark.behaviour("A13")
def test_at_the_reclaim_cap_the_job_fails_with_its_event(store: JobStore) -> None:
    job_id = submit(store, run_id="r1")
    now = NOW
    for reclaim in range(RECLAIMS_MAX):
        claim(store, now=now)
        now += 601
        assert store.reclaim_expired(now=now) == [job_id]
        assert store.job(job_id).reclaims == reclaim + 1
    claim(store, now=now)
    other = submit(store)
    claim(store, "i2", now=now)

    assert store.reclaim_expired(now=now + 601) == [job_id, other]

    ended = store.job(job_id)
    assert (ended.state, ended.because) == (State.FAILED, "lease expired 11 times")
    assert (ended.attempt, ended.reclaims, ended.watchdog_retries) == (11, 10, 0)
    assert store.dispatch_events(job_id) == ["failed"]
    assert store.job(other).state is State.QUEUED


def test_an_ingest_job_has_its_lease_reclaimed_like_any(store: JobStore) -> None:
    job_id = submit(store, job_class=JobClass.INGEST_FETCH)
    claim(store)

    assert store.reclaim_expired(now=NOW + 601) == [job_id]


# --- workers' rows


@pytest.mark.behaviour("A12")
def test_the_row_of_a_killed_worker_drops_its_model_and_ages_at_once(store: JobStore, database: Path) -> None:
    submit(store, model="sd-xl")
    claim(store)
    assert worker_rows(database) == [("box1", "w1", "i1", "sd-xl", NOW)]

    assert store.clear_busy_ghost(host="box1", worker="w1", incarnation="i1", now=NOW + 5)

    assert worker_rows(database) == [("box1", "w1", "i1", None, NOW - 95)]


@pytest.mark.behaviour("A12")
def test_a_fresh_heartbeat_of_the_replacement_restores_the_row(store: JobStore, database: Path) -> None:
    submit(store)
    claim(store)
    store.clear_busy_ghost(host="box1", worker="w1", incarnation="i1", now=NOW)

    store.heartbeat(host="box1", worker="w1", queue="gpu", incarnation="i2", model=None, now=NOW + 3)

    assert worker_rows(database) == [("box1", "w1", "i2", None, NOW + 3)]


@pytest.mark.behaviour("A12")
@pytest.mark.parametrize(
    ("host", "worker", "incarnation"),
    [("box1", "w1", "i0"), ("box1", "w2", "i1"), ("box2", "w1", "i1")],
    ids=["its replacement is there already", "another worker", "another host"],
)
def test_a_row_that_is_absent_or_of_another_is_no_ghost(
    store: JobStore, database: Path, host: str, worker: str, incarnation: str
) -> None:
    store.heartbeat(host="box1", worker="w1", queue="gpu", incarnation="i1", model="m", now=NOW)

    assert not store.clear_busy_ghost(host=host, worker=worker, incarnation=incarnation, now=NOW)

    assert worker_rows(database) == [("box1", "w1", "i1", "m", NOW)]


def test_a_job_without_a_model_shows_its_class_in_the_row(store: JobStore, database: Path) -> None:
    submit(store)

    claim(store)

    assert worker_rows(database)[0][3] == "gpu"


# --- against a model


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the model knows of a job."""

    state: State = State.QUEUED
    priority: int
    run_id: str | None
    attempt: int = 0
    holder: str | None = None
    lease: float = 0.0
    retries: int = 0
    reclaims: int = 0
    events: int = 0


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim that a worker believes it has, for good or no longer."""

    job_id: JobId
    attempt: int
    incarnation: str


@dataclass
class History:
    """What must never fall back."""

    attempts: dict[JobId, int] = field(default_factory=dict)
    requeues: Counter[JobId] = field(default_factory=Counter)


class QueueMachine(RuleBasedStateMachine):
    """Workers that come late, trips that come twice, leases that run out: the store and a small model agree."""

    claims = Bundle("claims")

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = JobStore.open(f"sqlite:///{self.folder.name}/queue.db")
        self.model: dict[JobId, Expected] = {}
        self.failed_runs: set[str] = set()
        self.unread: list[str | None] = []
        self.history = History()
        self.now = NOW

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def move(self, job_id: JobId, move: Move, **changed: Any) -> None:
        job = self.model[job_id]
        self.model[job_id] = replace(job, state=after(job.state, move), **changed)

    def stands(self, claim: Claim) -> bool:
        job = self.model[claim.job_id]
        return claim_is_valid(
            job.state,
            attempt=job.attempt,
            incarnation=job.holder,
            claim_attempt=claim.attempt,
            claim_incarnation=claim.incarnation,
        )

    def ends_failed(self, job_id: JobId, move: Move) -> None:
        self.move(job_id, move, holder=None, events=self.model[job_id].events + 1)
        self.unread.append(self.model[job_id].run_id)

    @rule(priority=st.sampled_from([1, 10, 50, 100]), run_id=st.sampled_from([None, "r1", "r2"]))
    def submit(self, priority: int, run_id: str | None) -> None:
        job_id = submit(self.store, priority=priority, run_id=run_id)
        self.model[job_id] = Expected(priority=priority, run_id=run_id)

    @rule(target=claims, incarnation=st.sampled_from(["a", "b", "c"]))
    def claim(self, incarnation: str) -> Any:
        waiting = [(job.priority, job_id) for job_id, job in self.model.items() if job.state is State.QUEUED]
        job = self.store.claim("gpu", host="h", worker=incarnation, incarnation=incarnation, now=self.now)
        if job is None:
            assert not waiting
            return multiple()
        assert job.job_id == min(waiting)[1]
        attempt = self.model[job.job_id].attempt + 1
        self.move(job.job_id, Move.CLAIM, attempt=attempt, holder=incarnation, lease=self.now + 600)
        return Claim(job_id=job.job_id, attempt=attempt, incarnation=incarnation)

    @rule(claim=claims)
    def renew(self, claim: Claim) -> None:
        stands = self.stands(claim)
        assert self.store.owns(claim.job_id, attempt=claim.attempt, incarnation=claim.incarnation) is stands
        assert stands is self.store.renew(
            claim.job_id, attempt=claim.attempt, incarnation=claim.incarnation, now=self.now
        )
        if stands:
            self.model[claim.job_id] = replace(self.model[claim.job_id], lease=self.now + 600)

    @rule(claim=claims)
    def complete(self, claim: Claim) -> None:
        stands = self.stands(claim)
        assert stands is self.store.complete(
            claim.job_id, attempt=claim.attempt, incarnation=claim.incarnation, now=self.now
        )
        if stands:
            self.move(claim.job_id, Move.COMPLETE, holder=None)

    @rule(claim=claims)
    def fail_by_worker(self, claim: Claim) -> None:
        stands = self.stands(claim)
        assert stands is self.store.fail_by_worker(
            claim.job_id, attempt=claim.attempt, incarnation=claim.incarnation, because="boom", now=self.now
        )
        if stands:
            self.ends_failed(claim.job_id, Move.FAIL_BY_WORKER)

    @rule(claim=claims)
    def release(self, claim: Claim) -> None:
        stands = self.stands(claim)
        assert stands is self.store.release(claim.job_id, attempt=claim.attempt, incarnation=claim.incarnation)
        if stands:
            self.move(claim.job_id, Move.RELEASE, holder=None)

    @rule(claim=claims)
    def fence(self, claim: Claim) -> None:
        legal = self.stands(claim)
        assert legal is self.store.fence(
            claim.job_id, attempt=claim.attempt, incarnation=claim.incarnation, trip=Trip.STALL, now=self.now
        )
        if legal:
            self.move(claim.job_id, Move.FENCE)

    @rule(claim=claims)
    def requeue(self, claim: Claim) -> None:
        job = self.model[claim.job_id]
        legal = job.state is State.FENCING and job.attempt == claim.attempt
        assert legal is self.store.requeue(claim.job_id, attempt=claim.attempt, trip=Trip.STALL)
        if legal:
            self.history.requeues[claim.job_id] += 1
            priority = min(job.priority, 10)
            self.move(claim.job_id, Move.REQUEUE, holder=None, retries=job.retries + 1, priority=priority)

    @rule(claim=claims)
    def fail(self, claim: Claim) -> None:
        job = self.model[claim.job_id]
        legal = job.state is State.FENCING and job.attempt == claim.attempt
        assert legal is self.store.fail(claim.job_id, attempt=claim.attempt, because="cap", now=self.now)
        if legal:
            self.ends_failed(claim.job_id, Move.FAIL)

    @rule(waited_s=st.sampled_from([1, 599, 601, 2000]))
    def reclaim(self, waited_s: int) -> None:
        self.now += waited_s
        expired = {job_id for job_id, job in self.model.items() if job.state is State.RUNNING and job.lease < self.now}
        assert set(self.store.reclaim_expired(now=self.now)) == expired
        for job_id in expired:
            job = self.model[job_id]
            if job.reclaims >= RECLAIMS_MAX:
                self.move(job_id, Move.FENCE)
                self.ends_failed(job_id, Move.FAIL)
            else:
                priority = min(job.priority, 10)
                self.move(job_id, Move.RECLAIM, holder=None, reclaims=job.reclaims + 1, priority=priority)

    @rule()
    def consume_events(self) -> None:
        assert self.store.consume_events(now=self.now) == len(self.unread)
        for run_id in self.unread:
            if run_id is not None:
                self.failed_runs.add(run_id)
                for job_id, job in self.model.items():
                    if job.run_id == run_id and job.state not in FINAL:
                        self.move(job_id, Move.CANCEL, holder=None)
        self.unread = []

    @invariant()
    def the_store_agrees_with_the_model_and_nothing_falls_back(self) -> None:
        events = self.count_events()
        for job in self.store.jobs():
            expected = self.model[job.job_id]
            found = (job.state, job.priority, job.attempt, job.watchdog_retries, job.reclaims, job.claimed_by)
            assert found == (
                expected.state, expected.priority, expected.attempt, expected.retries, expected.reclaims,
                expected.holder,
            )  # fmt: skip
            assert job.attempt >= self.history.attempts.get(job.job_id, 0)
            self.history.attempts[job.job_id] = job.attempt
            assert job.watchdog_retries <= self.history.requeues[job.job_id]
            assert job.reclaims <= RECLAIMS_MAX
            assert events[job.job_id] == expected.events == (job.state is State.FAILED)
            assert (job.claimed_by is not None) == (job.state in {State.RUNNING, State.FENCING})
        for run_id in ("r1", "r2"):
            assert (self.store.run_state(run_id) == "failed") == (run_id in self.failed_runs)

    def count_events(self) -> Counter[int]:
        with closing(sqlite3.connect(f"{self.folder.name}/queue.db")) as connection:
            return Counter(job_id for (job_id,) in connection.execute("SELECT job_id FROM dispatch_events"))


QueueMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_the_queue_agrees_with_its_model = QueueMachine.TestCase
