"""Rows of workers, and replaced incarnations."""

from typing import Any

import pytest
from sqlalchemy import select

from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.transactions import reading
from gpuwarden.job import Condition, State
from gpuwarden.queue import JobStore, ReplacedError
from gpuwarden.queue.schema import WORKERS
from tests.gpuwarden.queue.builders import NOW, claim, fenced, refuse_events, register, submit

pytestmark = pytest.mark.both_databases


def worker_rows(store: JobStore) -> list[tuple[Any, ...]]:
    with reading(store._engine) as connection:
        columns = [WORKERS.c[name] for name in ("host", "worker", "incarnation", "current_model", "last_seen_at")]
        return [tuple(row) for row in connection.execute(select(*columns))]


@pytest.mark.behaviour("A12")
def test_row_of_a_killed_worker_loses_its_model_and_ages_at_once(store: JobStore) -> None:
    submit(store, model="sd-xl")
    claim(store)
    assert worker_rows(store) == [("box1", "w1", "i1", "sd-xl", NOW)]

    assert store.fencing.retire_worker(host="box1", worker="w1", incarnation="i1", now=NOW + 5)

    assert worker_rows(store) == [("box1", "w1", "i1", None, NOW - 95)]


@pytest.mark.behaviour("A18")
def test_only_the_retired_incarnation_gets_its_condition(store: JobStore) -> None:
    submit(store)
    claim(store)

    def condition_of(incarnation: str) -> Condition | None:
        return store.claims.retired_for(host="box1", worker="w1", incarnation=incarnation)

    assert condition_of("i1") is None
    assert store.fencing.fence(1, attempt=1, incarnation="i1", condition=Condition.BUDGET, now=NOW)
    assert store.fencing.retire_worker(host="box1", worker="w1", incarnation="i1", now=NOW)
    assert condition_of("i1") is Condition.BUDGET

    register(store, "i1b")
    assert condition_of("i1b") is None
    assert store.fencing.retire_worker(host="box1", worker="w1", incarnation="i1b", now=NOW)
    assert condition_of("i1b") is None


@pytest.mark.behaviour("A12")
def test_heartbeat_of_the_replacement_restores_the_row(store: JobStore) -> None:
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
    ids=["its replacement has registered", "another worker", "another host"],
)
def test_only_its_own_row_is_changed(store: JobStore, host: str, worker: str, incarnation: str) -> None:
    store.claims.heartbeat(host="box1", worker="w1", queue="gpu", incarnation="i1", model="m", now=NOW)

    assert not store.fencing.retire_worker(host=host, worker=worker, incarnation=incarnation, now=NOW)

    assert worker_rows(store) == [("box1", "w1", "i1", "m", NOW)]


def test_job_without_a_model_shows_its_class_in_the_row(store: JobStore) -> None:
    submit(store)

    claim(store)

    assert worker_rows(store)[0][3] == "gpu"


def test_registration_requeues_the_jobs_of_the_previous_incarnation(store: JobStore) -> None:
    register(store, "i1")
    job_id = submit(store)
    claim(store)

    assert register(store, "i1b") == [job_id]

    back = store.job(job_id)
    assert (back.state, back.claimed_by, back.reason) == (State.QUEUED, None, "its worker was restarted")
    assert (back.reclaims, back.watchdog_retries, back.priority) == (1, 0, 10)
    assert worker_rows(store) == [("box1", "w1", "i1b", None, NOW)]
    assert register(store, "i1b") == []


def test_registration_leaves_fenced_jobs_and_those_of_other_workers(store: JobStore) -> None:
    job = fenced(store)
    other = submit(store)
    claim(store, "i2")

    assert register(store, "i1b") == []

    assert store.job(job.job_id).state is State.FENCING
    assert store.claims.owns(other, attempt=1, incarnation="i2")
    assert store.fencing.requeue(job.job_id, attempt=1, condition=Condition.STALL, now=NOW)


def test_failed_registration_changes_nothing(store: JobStore) -> None:
    job_id = submit(store, attempts_max=1)
    claim(store)
    refuse_events(store)

    with pytest.raises(DatabaseError, match="refusal"):
        register(store, "i1b")

    assert worker_rows(store)[0][2] == "i1"
    assert store.claims.owns(job_id, attempt=1, incarnation="i1")


@pytest.mark.behaviour("A11")
def test_replaced_incarnation_is_refused_everything(store: JobStore) -> None:
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
def test_ending_incarnation_claims_nothing_and_its_successor_does(store: JobStore, end: str) -> None:
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
