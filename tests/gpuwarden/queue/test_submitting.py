"""Submission: defaults, checks and runs."""

from typing import Any

import pytest

from gpuwarden.job import State
from gpuwarden.queue import JobStore, Submission, SubmissionError, UnknownJobError
from tests.gpuwarden.queue.builders import claim, submit

pytestmark = pytest.mark.both_databases


def test_budget_and_stall_timeout_default_to_the_class(store: JobStore) -> None:
    job = store.job(submit(store))

    assert (job.state, job.attempt, job.budget_s, job.stall_timeout_s) == (State.QUEUED, 0, 8100, 120)


def test_submission_may_set_budget_and_stall_timeout(store: JobStore) -> None:
    job = store.job(submit(store, budget_s=60, stall_timeout_s=5, payload={"prompt": "é"}, steps_total=20))

    assert (job.budget_s, job.stall_timeout_s, job.payload, job.steps_total) == (60, 5, {"prompt": "é"}, 20)


def test_stall_condition_ignores_a_job_without_steps(store: JobStore) -> None:
    assert store.job(submit(store, reports_steps=False)).stall_timeout_s == 0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"budget_s": float("inf")}, "budget_s inf is invalid"),
        ({"budget_s": float("nan")}, "budget_s nan"),
        ({"budget_s": -1.0}, "budget_s -1"),
        ({"stall_timeout_s": -1.0}, "stall_timeout_s -1"),
        ({"steps_total": -1}, "steps_total -1"),
        ({"steps_total": 2**31}, "steps_total 2147483648 is invalid: use a whole number from 0, below 2147483648"),
        ({"priority": 2**31}, "priority 2147483648"),
        ({"priority": -(2**31) - 1}, "priority -2147483649"),
        ({"retries_max": -1}, "retries_max -1 is invalid: use a whole number from 0"),
        ({"retries_max": 1, "ranks": 2}, "retries_max 1 is invalid: a gang is not retried after an exception"),
        ({"attempts_max": 0}, "attempts_max 0 is invalid: use a whole number from 1"),
        ({"attempts_max": 2**31}, "attempts_max 2147483648"),
        ({"model": ""}, "model '' is invalid: use 1 to 256 printable"),
        ({"model": "a\nb"}, "model"),
        ({"model": "m" * 257}, "model"),
        ({"queue": ""}, "queue ''"),
        ({"run_id": "\udcff"}, "run_id"),
    ],
)
def test_values_that_a_state_file_cannot_hold_are_refused_at_submit(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(SubmissionError, match=says):
        Submission(**{"queue": "gpu", **asked})


def test_unsubmitted_job_is_unknown(store: JobStore) -> None:
    with pytest.raises(UnknownJobError, match="no job 99"):
        store.job(99)


def test_first_job_opens_its_run_and_the_next_joins(store: JobStore) -> None:
    assert store.runs.state("r1") is None

    submit(store, run_id="r1")
    submit(store, run_id="r1")

    assert store.runs.state("r1") == "running"


def test_jobs_are_listed_by_state_oldest_first(store: JobStore) -> None:
    first, second = submit(store), submit(store)
    claim(store)

    assert [job.job_id for job in store.jobs()] == [first, second]
    assert [job.job_id for job in store.jobs(states=frozenset({State.QUEUED}))] == [second]
