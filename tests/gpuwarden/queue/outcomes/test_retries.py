"""Retries of a job after its own exceptions."""

import pytest

from gpuwarden.job import RETRY_WAIT_MAX_S, State, retry_wait_s
from gpuwarden.queue import Job, JobStore
from tests.gpuwarden.queue.builders import NOW, claim, submit

pytestmark = pytest.mark.both_databases


def retry(store: JobStore, job: Job, *, now: float = NOW, incarnation: str = "i1") -> bool:
    its = {"attempt": job.attempt, "incarnation": incarnation}
    return store.claims.retry(job.job_id, **its, reason="E: boom", traceback="line 1", now=now)  # type: ignore[arg-type]


def claimed_at(store: JobStore, now: float) -> bool:
    return store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1", now=now) is not None


def test_retried_job_waits_and_says_why(store: JobStore) -> None:
    job_id = submit(store, retries_max=2)

    assert retry(store, claim(store))

    back = store.job(job_id)
    assert (back.state, back.attempt, back.retries, back.retry_at) == (State.QUEUED, 1, 1, NOW + 5)
    assert (back.reason, back.traceback, back.priority) == ("E: boom; retry 1 of 2", "line 1", 100)
    assert (back.reclaims, back.watchdog_retries, back.claimed_by) == (0, 0, None)
    assert store.outbox.events_of(job_id) == []
    assert not claimed_at(store, NOW + 4.9)
    assert claimed_at(store, NOW + 5)


def test_job_that_waits_for_its_retry_does_not_hold_up_others(store: JobStore) -> None:
    submit(store, retries_max=1)
    retry(store, claim(store))
    other = submit(store)

    assert claim(store).job_id == other


def test_job_is_not_retried_more_often_than_allowed(store: JobStore) -> None:
    submit(store, retries_max=2)
    assert retry(store, claim(store))
    assert retry(store, claim(store, now=NOW + 5), now=NOW + 5)
    last = claim(store, now=NOW + 15)

    assert not retry(store, last, now=NOW + 15)
    assert (store.job(last.job_id).state, store.job(last.job_id).retries) == (State.RUNNING, 2)


@pytest.mark.parametrize("its", [{}, {"retries_max": 3, "attempts_max": 1}], ids=["no retries", "no attempt left"])
def test_job_without_a_retry_or_an_attempt_is_not_retried(store: JobStore, its: dict[str, int]) -> None:
    submit(store, **its)

    assert not retry(store, claim(store))


def test_former_holder_retries_nothing(store: JobStore) -> None:
    submit(store, retries_max=2)
    job = claim(store)
    store.claims.release(job.job_id, attempt=1, incarnation="i1", now=NOW)
    claim(store, "i2")

    assert not retry(store, job)


def test_clock_that_is_set_back_does_not_hold_the_job(store: JobStore) -> None:
    submit(store, retries_max=1)
    retry(store, claim(store))

    assert not claimed_at(store, NOW - RETRY_WAIT_MAX_S + 5)
    assert claimed_at(store, NOW - RETRY_WAIT_MAX_S)


@pytest.mark.pure
def test_wait_doubles_up_to_its_maximum() -> None:
    assert [retry_wait_s(retries) for retries in (0, 1, 2, 6, 2000)] == [5, 10, 20, 300, 300]
