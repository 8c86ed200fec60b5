"""Jobs that a worker gives back because its process cannot go on, and the lock of such a worker."""

from typing import Any

import pytest

from gpuwarden.job import AVOID_S, RECLAIMS_MAX, State
from gpuwarden.queue import Job, JobStore, Slot
from gpuwarden.queue.claims import FATAL_JOBS_MAX, FATAL_WINDOW_S, LOCKED_BY_ERRORS
from tests.gpuwarden.queue.builders import NOW, claim, register, submit

pytestmark = pytest.mark.both_databases

SLOT = Slot(host="box1", worker="w1", gpus=("GPU-a",))
WHY = "its worker's process could not go on: RuntimeError: CUDA error"


def give_back(store: JobStore, job: Job, *, now: float = NOW, incarnation: str = "i1") -> bool:
    return store.claims.give_back(
        job.job_id, attempt=job.attempt, incarnation=incarnation, slot=SLOT, reason=WHY, now=now
    )


def ends(store: JobStore, *, times: int, now: float = NOW, every_s: float = 0) -> None:
    """End the worker w1 with this many different jobs."""
    for n in range(times):
        submit(store, priority=-len(store.jobs()))  # before those that came back
        assert give_back(store, claim(store, now=now + n * every_s), now=now + n * every_s)


def locked(store: JobStore, now: float = NOW) -> str | None:
    (row,) = [row for row in store.admin.workers(now=now) if row.worker == "w1"]
    return row.locked_by


@pytest.mark.behaviour("A13")
def test_job_that_is_given_back_counts_as_a_reclaim(store: JobStore) -> None:
    submit(store)
    job = claim(store)

    assert give_back(store, job)

    back = store.job(job.job_id)
    assert (back.state, back.reason) == (State.QUEUED, WHY)
    assert (back.reclaims, back.watchdog_retries, back.priority, back.claimed_by) == (1, 0, 10, None)


@pytest.mark.behaviour("A13")
def test_job_that_ends_its_third_worker_fails_with_its_event(store: JobStore) -> None:
    job_id = submit(store)
    for _ in range(2):
        assert give_back(store, claim(store))

    assert give_back(store, claim(store))

    ended = store.job(job_id)
    assert (ended.state, ended.reason) == (State.FAILED, f"{WHY}, and all 3 lost attempts are used")
    assert store.outbox.events_of(job_id) == ["failed"]


def test_former_owner_gives_nothing_back(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    store.claims.release(job.job_id, attempt=1, incarnation="i1", now=NOW)

    assert not give_back(store, job)

    assert store.job(job.job_id).reclaims == 0
    ends(store, times=FATAL_JOBS_MAX - 1)
    assert locked(store) is None, "the refused one does not count"


def test_job_avoids_the_worker_while_another_can_take_it(store: JobStore) -> None:
    register(store, "i2", gpus=("GPU-b",))
    submit(store)
    job = claim(store)
    give_back(store, job)

    taken: dict[str, Any] = {"queue": "gpu", "host": "box1", "worker": "w1", "incarnation": "i1"}
    assert store.claims.claim(**taken, now=NOW) is None
    assert claim(store, "i2").job_id == job.job_id
    store.claims.release(job.job_id, attempt=2, incarnation="i2", now=NOW)
    assert claim(store, now=NOW + AVOID_S).job_id == job.job_id


def test_all_ranks_of_a_gang_come_back(store: JobStore) -> None:
    submit(store, ranks=2, run_id="r1")
    first, second = claim(store), claim(store, "i2")

    assert give_back(store, first)

    assert [store.job(each.job_id).state for each in (first, second)] == [State.QUEUED] * 2


def test_third_job_in_an_hour_locks_the_worker(store: JobStore) -> None:
    ends(store, times=FATAL_JOBS_MAX - 1, every_s=FATAL_WINDOW_S / 3)
    assert locked(store) is None

    ends(store, times=1, now=NOW + FATAL_WINDOW_S - 1)

    assert locked(store) == LOCKED_BY_ERRORS
    submit(store)
    assert store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1", now=NOW + 9999) is None


def test_older_errors_do_not_lock(store: JobStore) -> None:
    ends(store, times=FATAL_JOBS_MAX - 1)

    ends(store, times=2, now=NOW + FATAL_WINDOW_S)

    assert locked(store) is None


def test_one_job_does_not_lock_its_worker(store: JobStore) -> None:
    submit(store, attempts_max=100)
    for _ in range(RECLAIMS_MAX):
        assert give_back(store, claim(store))

    assert locked(store) is None


def test_errors_are_counted_for_each_worker(store: JobStore) -> None:
    ends(store, times=FATAL_JOBS_MAX - 1)
    submit(store, priority=-99)
    job = claim(store, "i2")

    store.claims.give_back(
        job.job_id, attempt=1, incarnation="i2", slot=Slot(host="box1", worker="w2"), reason=WHY, now=NOW
    )

    assert [row.locked_by for row in store.admin.workers(now=NOW)] == [None, None]


def test_errors_before_an_unlock_do_not_count(store: JobStore) -> None:
    ends(store, times=FATAL_JOBS_MAX)
    store.admin.unlock(host="box1", worker="w1", who="ann", now=NOW + 1)

    ends(store, times=FATAL_JOBS_MAX - 1, now=NOW + 2)

    assert locked(store) is None
    ends(store, times=1, now=NOW + 3)
    assert locked(store) == LOCKED_BY_ERRORS


def test_operators_lock_is_kept(store: JobStore) -> None:
    ends(store, times=FATAL_JOBS_MAX - 1)
    submit(store, priority=-99)
    job = claim(store)
    store.admin.lock(host="box1", worker="w1", who="ann", reason="fan", now=NOW)

    give_back(store, job)

    assert locked(store) == "ann"


def test_completed_jobs_of_other_workers_of_the_queue_are_known(store: JobStore) -> None:
    its: dict[str, Any] = {"host": "box1", "incarnation": "i", "model": None, "now": NOW}
    for worker, queue, completed_at in (("w1", "gpu", NOW), ("w2", "gpu", None), ("w3", "cpu", NOW)):
        store.claims.register(queue, host="box1", worker=worker, incarnation="i", now=NOW)
        assert store.claims.heartbeat(**its, worker=worker, queue=queue, completed_at=completed_at)
    asked: dict[str, Any] = {"host": "box1", "worker": "w1", "since": NOW - 600}
    assert not store.claims.others_completed("gpu", **asked)

    store.claims.heartbeat(**its, worker="w2", queue="gpu", completed_at=NOW - 600)
    store.claims.heartbeat(**its, worker="w2", queue="gpu")

    assert store.claims.others_completed("gpu", **asked)
    assert not store.claims.others_completed("gpu", **asked | {"since": NOW - 599})
