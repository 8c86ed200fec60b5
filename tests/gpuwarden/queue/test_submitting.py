"""Submitting a job: its defaults by class, what is refused, and its run."""

from typing import Any

import pytest

from gpuwarden.job import State
from gpuwarden.queue import JobStore, Submission, SubmissionError, UnknownJobError
from tests.gpuwarden.queue.builders import claim, submit

pytestmark = pytest.mark.both_databases


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
        ({"budget_s": float("inf")}, "budget_s inf is invalid"),
        ({"budget_s": float("nan")}, "budget_s nan"),
        ({"budget_s": -1.0}, "budget_s -1"),
        ({"stall_timeout_s": -1.0}, "stall_timeout_s -1"),
        ({"steps_total": -1}, "steps_total -1"),
        ({"steps_total": 2**31}, "steps_total 2147483648 is invalid: use a whole number from 0, below 2147483648"),
        ({"priority": 2**31}, "priority 2147483648"),
        ({"priority": -(2**31) - 1}, "priority -2147483649"),
        ({"attempts_max": 0}, "attempts_max 0 is invalid: use a whole number from 1"),
        ({"attempts_max": 2**31}, "attempts_max 2147483648"),
        ({"model": ""}, "model '' is invalid: use 1 to 256 printable"),
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
