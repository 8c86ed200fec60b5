"""Items of a run, on both databases."""

from typing import Any

import pytest
from sqlalchemy import select

from gpuwarden.db.transactions import reading
from gpuwarden.job import ITEM_MOVES, LEASE_S, Condition, ItemMove, ItemState, State
from gpuwarden.queue import Item, Job, JobStore, Submission, SubmissionError
from gpuwarden.queue.schema import ITEM_OUTCOMES
from tests.waiting import together

pytestmark = pytest.mark.both_databases

NOW = 1_000_000.0


def share(store: JobStore, number: int = 1) -> Job:
    """A job of run `r1`, claimed by worker `w1`, and so on."""
    store.runs.submit(Submission(queue="gpu", run_id="r1"), now=NOW)
    job = store.claims.claim("gpu", host="box1", worker=f"w{number}", incarnation=f"i{number}", now=NOW)
    assert job is not None
    return job


def by(job: Job) -> dict[str, Any]:
    return {"attempt": job.attempt, "incarnation": job.claimed_by, "now": NOW}


def take(store: JobStore, job: Job) -> str | None:
    item = store.items.take(job.job_id, **by(job))
    return None if item is None else item.item


def finish(store: JobStore, job: Job, item: str | None, **changed: Any) -> bool:
    assert item is not None
    return store.items.finish(job.job_id, **by(job), item=item, **changed)


def fail(store: JobStore, job: Job, item: str | None, **changed: Any) -> bool:
    assert item is not None
    return store.items.fail(job.job_id, **by(job), item=item, reason="boom", **changed)


def states(store: JobStore) -> list[ItemState]:
    return [item.state for item in store.items.of_run("r1")]


def test_jobs_of_a_run_take_its_items_in_order(store: JobStore) -> None:
    assert store.items.add("r1", ["a", "b", "a", "c"], now=NOW) == 3
    first, second, third, fourth = (share(store, number) for number in (1, 2, 3, 4))

    assert [take(store, job) for job in (first, second, third, fourth)] == ["a", "b", "c", None]
    assert take(store, third) == "c"  # again: the answer of the take was lost
    assert finish(store, first, "a", result={"frame": "é"})
    assert finish(store, second, "b")
    assert store.items.of_run("r1")[:2] == [
        Item(run_id="r1", item="a", state=ItemState.DONE, job_id=first.job_id, attempt=1, host="box1", worker="w1",
             reason=None, result={"frame": "é"}),
        Item(run_id="r1", item="b", state=ItemState.DONE, job_id=second.job_id, attempt=1, host="box1", worker="w2",
             reason=None, result=None),
    ]  # fmt: skip
    assert store.items.counts("r1") == {ItemState.DONE: 2, ItemState.CLAIMED: 1}


def test_items_can_be_added_and_duplicates_are_ignored(store: JobStore) -> None:
    store.items.add("r1", ["a", "b"], now=NOW)

    assert store.items.add("r1", ["b", "c"], now=NOW) == 1
    assert store.items.add("r1", [], now=NOW) == 0
    assert [item.item for item in store.items.of_run("r1")] == ["a", "b", "c"]
    with pytest.raises(SubmissionError, match="item '' is invalid"):
        store.items.add("r1", [""], now=NOW)


@pytest.mark.parametrize("end", ["requeued", "reclaimed", "restarted", "released", "cancelled"])
def test_ended_attempt_keeps_its_results_and_takes_no_more(store: JobStore, end: str) -> None:
    store.items.add("r1", ["a", "b"], now=NOW)
    old, other = share(store), share(store, 2)
    assert take(store, old) == "a"

    if end == "requeued":
        assert store.fencing.fence(old.job_id, **by(old), condition=Condition.STALL)
        assert states(store) == [ItemState.CLAIMED, ItemState.PENDING]  # its process may still run
        assert not finish(store, old, "a")
        assert store.fencing.requeue(old.job_id, attempt=1, condition=Condition.STALL, now=NOW)
    elif end == "reclaimed":
        store.claims.renew(other.job_id, attempt=1, incarnation="i2", now=NOW + LEASE_S)
        assert store.sweeps.reclaim_expired(now=NOW + LEASE_S + 1) == [old.job_id]
    elif end == "restarted":
        store.claims.register("gpu", host="box1", worker="w1", incarnation="new", now=NOW)
    elif end == "released":
        assert store.claims.release(old.job_id, **by(old))
    else:
        assert store.admin.cancel(old.job_id, reason="", now=NOW)

    assert states(store) == [ItemState.PENDING, ItemState.PENDING]
    assert not finish(store, old, "a")
    assert not fail(store, old, "a")
    assert take(store, old) is None
    assert take(store, other) == "b"
    assert finish(store, other, "b")
    assert take(store, other) == "a"
    assert finish(store, other, "a")


def test_next_attempt_does_not_finish_items_of_the_previous_one(store: JobStore) -> None:
    store.items.add("r1", ["a"], now=NOW)
    old = share(store)
    take(store, old)
    store.claims.release(old.job_id, **by(old))
    new = store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1", now=NOW)
    assert new is not None

    assert not finish(store, new, "a")
    assert take(store, new) == "a"
    assert not finish(store, old, "a")
    assert finish(store, new, "a")
    assert finish(store, new, "a")  # again: the answer was lost
    assert not finish(store, old, "a")


def test_failed_item_is_retried_last_and_given_up_after_its_tries(store: JobStore) -> None:
    store.items.add("r1", ["a", "b"], now=NOW)
    first, second = share(store), share(store, 2)

    assert fail(store, first, take(store, first))
    assert fail(store, first, "a")  # again: the answer was lost
    assert take(store, first) == "b"
    assert take(store, second) == "a"
    taken = store.items.of_run("r1")[0]
    assert fail(store, first, "a")  # again, after another worker took the item
    assert store.items.of_run("r1")[0] == taken
    assert not finish(store, first, "a")
    assert fail(store, second, "a")
    assert finish(store, first, "b")
    assert not fail(store, first, "b")
    assert take(store, first) == "a"
    assert fail(store, first, "a")

    item = store.items.of_run("r1")[0]
    assert (item.state, item.reason, item.worker) == (ItemState.FAILED, "boom", "w1")
    assert take(store, second) is None


def test_final_failures_are_retried_after_a_reset(store: JobStore) -> None:
    store.items.add("r1", ["a", "b"], now=NOW)
    first, second = share(store), share(store, 2)
    for job in (first, second):
        assert fail(store, job, take(store, job), tries_max=1)
    assert states(store) == [ItemState.FAILED, ItemState.FAILED]

    assert store.items.reset("r1", host="box1", worker="w2", now=NOW) == 1
    assert states(store) == [ItemState.FAILED, ItemState.PENDING]
    assert take(store, second) == "b"
    assert fail(store, second, "b")
    assert states(store) == [ItemState.FAILED, ItemState.PENDING]
    assert store.items.reset("r1", now=NOW) == 1


def test_items_of_an_ended_run_are_not_reset(store: JobStore) -> None:
    store.items.add("r1", ["a"], now=NOW)
    job = share(store)
    fail(store, job, take(store, job), tries_max=1)
    store.admin.cancel_run("r1", reason="", now=NOW)

    with pytest.raises(SubmissionError, match="run 'r1' is cancelled: give its items to another run"):
        store.items.reset("r1", now=NOW)
    with pytest.raises(SubmissionError, match="run 'r2' is not there"):
        store.items.reset("r2", now=NOW)
    assert states(store) == [ItemState.FAILED]


def test_worker_of_each_result_and_failure_is_stored(store: JobStore) -> None:
    store.items.add("r1", ["a", "b"], now=NOW)
    job = share(store)
    fail(store, job, take(store, job))
    finish(store, job, take(store, job))

    with reading(store._engine) as connection:
        kept = connection.execute(select(ITEM_OUTCOMES).order_by(ITEM_OUTCOMES.c.outcome_id)).all()

    assert [(row.item, row.outcome, row.worker, row.attempt, row.reason) for row in kept] == [
        ("a", "failed", "w1", 1, "boom"),
        ("b", "done", "w1", 1, None),
    ]


def test_concurrent_takes_get_different_items(store: JobStore) -> None:
    store.items.add("r1", [str(n) for n in range(40)], now=NOW)
    jobs = [share(store, number) for number in range(1, 5)]

    def all_of(job: Job) -> list[str]:
        found = []
        while item := take(store, job):
            assert finish(store, job, item)
            found.append(item)
        return found

    answers = together(*(lambda job=job: all_of(job) for job in jobs))

    assert sorted(int(each) for answer in answers for each in answer) == list(range(40))
    assert set(states(store)) == {ItemState.DONE}


def test_lost_host_keeps_its_item_and_may_finish_it(store: JobStore) -> None:
    store.items.add("r1", ["a"], now=NOW)
    first, second = share(store), share(store, 2)
    item = take(store, first)
    store.lost_hosts.mark_lost(first.job_id, attempt=1, now=NOW)

    assert take(store, second) is None
    assert finish(store, first, item)
    job = store.job(first.job_id)
    assert (job.state, job.lease_expires_at) == (State.RUNNING, NOW + LEASE_S)


def test_empty_addition_does_not_reopen_a_run(store: JobStore) -> None:
    store.items.add("r1", ["a"], now=NOW)
    job = share(store)
    finish(store, job, take(store, job))
    assert store.claims.complete(job.job_id, **by(job))
    assert store.runs.state("r1") == "completed"

    assert store.items.add("r1", ["a"], now=NOW) == 0
    assert store.runs.submit_run("r1", {}, now=NOW) == {}
    assert store.runs.state("r1") == "completed"


def test_run_with_items_only_can_be_cancelled(store: JobStore) -> None:
    store.items.add("r1", ["a"], now=NOW)

    assert store.admin.cancel_run("r1", reason="", now=NOW) == []

    assert store.runs.state("r1") == "cancelled"
    with pytest.raises(SubmissionError, match="was cancelled"):
        share(store)


def test_every_item_move_is_listed() -> None:
    assert set(ITEM_MOVES) == set(ItemMove)
    assert {target for _, target in ITEM_MOVES.values()} == set(ItemState)
