"""Jobs of several ranks, on both databases."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.job import LEASE_S, WATCHDOG_RETRIES_MAX, Condition, JobId, State
from gpuwarden.queue import Job, JobStore, Submission, SubmissionError
from tests.waiting import eventually, together

pytestmark = pytest.mark.both_databases

NOW = 1_000_000.0


def gang(store: JobStore, ranks: int = 3, **changed: Any) -> JobId:
    return store.runs.submit(Submission(**{"queue": "gpu", "ranks": ranks, **changed}), now=NOW)


def claim(store: JobStore, number: int) -> Job:
    """Claim as incarnation `i1` of worker `w1`, and so on."""
    job = store.claims.claim("gpu", host="box1", worker=f"w{number}", incarnation=f"i{number}", now=NOW)
    assert job is not None
    return job


def claimed(store: JobStore, ranks: int = 3, **changed: Any) -> list[Job]:
    gang(store, ranks, **changed)
    return [claim(store, number) for number in range(1, ranks + 1)]


def by(job: Job) -> dict[str, Any]:
    return {"attempt": job.attempt, "incarnation": job.claimed_by}


def complete(store: JobStore, job: Job, result: Any = None) -> bool:
    return store.claims.complete(job.job_id, **by(job), now=NOW, result=result)


def states(store: JobStore, gang_id: int = 1) -> list[State]:
    return [job.state for job in store.queries.of_gang(gang_id)]


def condition(store: JobStore, job: Job) -> None:
    assert store.fencing.fence(job.job_id, **by(job), condition=Condition.STALL, now=NOW)
    assert store.fencing.requeue(job.job_id, attempt=job.attempt, condition=Condition.STALL, now=NOW)


def test_each_rank_has_a_worker_and_lists_the_others(store: JobStore) -> None:
    jobs = claimed(store)

    assert [(job.gang, job.rank, job.ranks) for job in jobs] == [(1, 0, 3), (1, 1, 3), (1, 2, 3)]
    assert [(job.worker, job.host) for job in store.queries.of_gang(1)] == [(f"w{n}", "box1") for n in (1, 2, 3)]
    assert len({job.run_id for job in jobs}) == 1


def test_ranks_complete_with_the_last_one(store: JobStore) -> None:
    jobs = claimed(store, run_id="r1")
    after = store.runs.submit(Submission(queue="gpu", run_id="r1", needs=(jobs[0].job_id,)), now=NOW)

    assert complete(store, jobs[1], result={"loss": 1})
    assert states(store) == [State.RUNNING, State.FINISHED, State.RUNNING]
    assert store.outbox.events_of(jobs[1].job_id) == []
    assert not complete(store, jobs[1])
    assert complete(store, jobs[0])
    assert store.job(after).state is State.WAITING
    assert complete(store, jobs[2])

    assert states(store) == [State.COMPLETED] * 3
    assert [store.outbox.events_of(job.job_id) for job in jobs] == [["completed"]] * 3
    assert store.job(jobs[1].job_id).result == {"loss": 1}
    assert store.job(after).state is State.QUEUED
    assert set(store.runs.inputs(after)) == {job.job_id for job in jobs}


def test_worker_of_a_finished_rank_may_claim_another_job(store: JobStore) -> None:
    jobs = claimed(store, 2)
    other = store.runs.submit(Submission(queue="gpu"), now=NOW)
    complete(store, jobs[0])

    assert claim(store, 1).job_id == other


@pytest.mark.parametrize("end", ["fenced", "its lease expired", "released", "restarted"])
def test_requeued_rank_requeues_all_ranks_finished_or_not(store: JobStore, end: str) -> None:
    jobs = claimed(store, attempts_max=5)
    lost, finished, other = jobs
    complete(store, finished, result=1)

    if end == "fenced":
        condition(store, lost)
    elif end == "its lease expired":
        store.claims.renew(other.job_id, **by(other), now=NOW + LEASE_S)
        assert store.sweeps.reclaim_expired(now=NOW + LEASE_S + 1) == [lost.job_id]
    elif end == "released":
        assert store.claims.release(lost.job_id, **by(lost), now=NOW)
    else:
        assert store.claims.register("gpu", host="box1", worker="w1", incarnation="new", now=NOW) == [lost.job_id]

    assert states(store) == [State.QUEUED] * 3
    assert not store.claims.owns(other.job_id, **by(other))
    assert not complete(store, other)
    assert not store.claims.renew(other.job_id, **by(other), now=NOW)
    again = store.job(finished.job_id)
    assert (again.result, again.reason) == (None, "another rank was queued again")
    assert {job.watchdog_retries for job in store.queries.of_gang(1)} == {1 if end == "fenced" else 0}
    assert [claim(store, number).attempt for number in (4, 5, 6)] == [2, 2, 2]


def test_started_gang_gets_its_workers_before_another_starts(store: JobStore) -> None:
    first = gang(store, 3, model="m1")
    claim(store, 1)
    gang(store, 2, model="m2", priority=1)
    store.runs.submit(Submission(queue="gpu", priority=-5), now=NOW)

    for number in (2, 3):
        job = store.claims.claim(
            "gpu", host="box1", worker=f"w{number}", incarnation=f"i{number}", now=NOW, loaded="m2"
        )
        assert job is not None
        assert job.gang == first


@pytest.mark.parametrize("end", ["fenced", "released"])
def test_requeued_ranks_have_one_place_in_the_queue(store: JobStore, end: str) -> None:
    jobs = claimed(store, attempts_max=9)
    if end == "fenced":
        condition(store, jobs[1])
    else:
        store.claims.release(jobs[1].job_id, **by(jobs[1]), now=NOW)

    assert {job.priority for job in store.queries.of_gang(1)} == {10}
    gang(store, 2)
    assert [claim(store, number).gang for number in (4, 5, 6)] == [1, 1, 1]


def test_ranks_fenced_together_are_requeued_once(store: JobStore) -> None:
    first, second, _ = claimed(store)
    for job in (first, second):
        assert store.fencing.fence(job.job_id, **by(job), condition=Condition.STALL, now=NOW)

    assert store.fencing.requeue(first.job_id, attempt=1, condition=Condition.STALL, now=NOW)
    assert states(store) == [State.QUEUED, State.FENCING, State.QUEUED]
    back = [claim(store, 4), claim(store, 5)]
    assert store.fencing.requeue(second.job_id, attempt=1, condition=Condition.STALL, now=NOW)

    assert states(store) == [State.RUNNING, State.QUEUED, State.RUNNING]
    assert {job.watchdog_retries for job in store.queries.of_gang(1)} == {1}
    assert all(store.claims.owns(job.job_id, **by(job)) for job in back)
    condition(store, claim(store, 6))
    assert states(store) == [State.QUEUED] * 3


def test_ranks_reach_the_cap_together(store: JobStore) -> None:
    gang(store, 2)
    for turn in range(WATCHDOG_RETRIES_MAX):
        jobs = [claim(store, 2 * turn + number) for number in (1, 2)]
        condition(store, jobs[turn % 2])

    assert {job.watchdog_retries for job in store.queries.of_gang(1)} == {WATCHDOG_RETRIES_MAX}


def test_failed_rank_fails_all(store: JobStore) -> None:
    jobs = claimed(store)
    complete(store, jobs[0])

    assert store.claims.fail_by_worker(jobs[1].job_id, **by(jobs[1]), reason="boom", now=NOW)
    store.sweeps.consume_events(now=NOW)

    assert states(store) == [State.CANCELLED, State.FAILED, State.CANCELLED]
    assert not store.claims.owns(jobs[2].job_id, **by(jobs[2]))


def test_exhausted_attempts_of_one_rank_end_all(store: JobStore) -> None:
    jobs = claimed(store, 2, attempts_max=1)

    assert store.claims.release(jobs[0].job_id, **by(jobs[0]), now=NOW)
    store.sweeps.consume_events(now=NOW)

    assert states(store) == [State.FAILED, State.CANCELLED]


def test_cancelled_rank_cancels_all(store: JobStore) -> None:
    jobs = claimed(store)
    complete(store, jobs[0])

    assert store.admin.cancel(jobs[1].job_id, reason="not wanted", now=NOW)

    assert states(store) == [State.CANCELLED] * 3
    assert store.runs.state(str(jobs[0].run_id)) == "cancelled"


def test_last_two_ranks_that_finish_together_complete_the_gang(store: JobStore) -> None:
    for _ in range(10):
        jobs = claimed(store, 2)

        answers = together(*(lambda job=job: complete(store, job) for job in jobs))

        assert answers == [True, True]
        assert states(store, jobs[0].job_id) == [State.COMPLETED] * 2


def test_ranks_lost_together_are_requeued_once(store: JobStore) -> None:
    for _ in range(10):
        jobs = claimed(store, 2, attempts_max=50)

        answers = together(*(lambda job=job: store.claims.release(job.job_id, **by(job), now=NOW) for job in jobs))

        assert sorted(answers) == [False, True]
        assert states(store, jobs[0].job_id) == [State.QUEUED] * 2
        store.admin.cancel(jobs[0].job_id, reason="", now=NOW)


def test_invalid_number_of_ranks_is_refused() -> None:
    for ranks in (0, 4097):
        with pytest.raises(SubmissionError, match=f"ranks {ranks} is invalid"):
            Submission(queue="gpu", ranks=ranks)


BODIES = """
import time
from pathlib import Path

def load(job, report):
    def work():
        room = Path(job.payload["room"])
        (room / f"{job.rank}-{job.attempt}").touch()
        while not all((room / f"{rank}-{job.attempt}").exists() for rank in range(job.ranks)):
            report.step()
            time.sleep(0.01)
        while job.attempt == 1:  # the ranks of the first attempt never end
            report.step()
            time.sleep(0.01)
        return job.rank
    return work
"""


def test_dead_worker_stops_its_gang_and_all_ranks_run_again(
    store: JobStore,
    url: str,
    tmp_path: Path,
    host_dir: Path,
    spawn: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bodies.py").write_text(BODIES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(name: str) -> subprocess.Popen[str]:
        options = ["--queue-db", url, "--runtime-dir", str(host_dir), "--handler", "bodies:load", "--name", name]
        return spawn("-m", "gpuwarden", "worker", "run", *options, stderr=tmp_path / f"{name}.log")

    workers = {name: start(name) for name in ("a", "b")}
    first = store.runs.submit(Submission(queue="gpu", ranks=2, payload={"room": str(tmp_path)}), now=store.now())
    eventually(lambda: (tmp_path / "0-1").exists() and (tmp_path / "1-1").exists(), within_s=30)

    workers["a"].kill()
    start("a")

    assert workers["b"].wait(30) == 77
    start("b")
    eventually(lambda: states(store, first) == [State.COMPLETED] * 2, within_s=30)
    assert [(job.attempt, job.result) for job in store.queries.of_gang(first)] == [(2, 0), (2, 1)]
