"""Deletion of finished jobs in batches: which are deleted and which stay, on both databases."""

from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import pytest
from sqlalchemy import func, select

from gpuwarden.db.transactions import reading
from gpuwarden.job import Condition, JobId, State
from gpuwarden.queue import JobStore, QueueSettings, Submission, SubmissionError, UnknownJobError, retention
from gpuwarden.queue.schema import METADATA
from tests.gpuwarden.queue.builders import NOW, claim, submit
from tests.waiting import together

pytestmark = pytest.mark.both_databases

DAY_S: Final = 86400.0
OLD: Final = NOW + 90 * DAY_S + 1
"""When a job that ended at `NOW` is old."""


def keep(store: JobStore, queue: str, days: int | None) -> None:
    its = QueueSettings(
        queue=queue, job_class=None, budget_s=None, lost_hold_s=None, retention_days=days, set_at=NOW, set_by="ann"
    )
    store.queue_settings.set_queue(its)


def completed(store: JobStore, *, now: float = NOW, **changed: Any) -> JobId:
    """A completed job."""
    job_id = submit(store, **changed)
    job = claim(store, now=now, queue=changed.get("queue", "gpu"))
    assert job.job_id == job_id
    assert store.claims.complete(job_id, attempt=1, incarnation="i1", now=now)
    return job_id


def delete_all(store: JobStore, *, now: float = OLD) -> int:
    """Delete until nothing old is left. Returns the number of batches."""
    batches = 0
    while store.sweeps.delete_old(now=now):
        batches += 1
        assert batches < 1000
    return batches


def ids(store: JobStore) -> list[int]:
    return [job.job_id for job in store.queries.newest()]


def counts(store: JobStore) -> dict[str, int]:
    with reading(store._engine) as connection:
        return {
            table.name: connection.scalar(select(func.count()).select_from(table)) or 0
            for table in METADATA.sorted_tables
        }


# --- deleted


def test_finished_job_is_deleted_with_its_rows_after_90_days(store: JobStore) -> None:
    old = completed(store)
    last = completed(store)

    assert delete_all(store, now=OLD - 2) == 0
    assert ids(store) == [old, last]
    assert delete_all(store) == 1

    assert ids(store) == [last], "the newest job stays: its id is not used again"
    assert counts(store)["outbox_events"] == 1
    with pytest.raises(UnknownJobError):
        store.job(old)


def test_each_queue_has_its_retention(store: JobStore) -> None:
    short, long, endless = (completed(store, queue=queue) for queue in ("short", "long", "endless"))
    usual = completed(store)
    completed(store, now=OLD)
    for queue, days in (("short", 1), ("long", 100), ("endless", 0)):
        keep(store, queue, days)

    delete_all(store, now=NOW + DAY_S - 1)
    assert ids(store)[:4] == [short, long, endless, usual]
    delete_all(store, now=NOW + DAY_S + 1)
    assert ids(store)[:3] == [long, endless, usual]
    delete_all(store)
    assert ids(store)[:2] == [long, endless]
    delete_all(store, now=NOW + 101 * DAY_S)

    assert ids(store)[0] == endless


def test_negative_retention_is_refused(store: JobStore) -> None:
    with pytest.raises(SubmissionError, match="retention_days -1 is invalid"):
        keep(store, "gpu", -1)


def test_run_is_deleted_with_its_jobs_and_items(store: JobStore) -> None:
    one = Submission(queue="gpu")
    named = store.runs.submit_run("r1", {"a": one, "b": one}, needs={"b": ["a"]}, now=NOW)
    store.items.add("r1", ["x", "y", "z"], now=NOW)
    for job_id in named.values():
        job = claim(store)
        its: dict[str, Any] = {"attempt": 1, "incarnation": "i1", "now": NOW}
        store.items.take(job.job_id, **its)
        assert store.items.finish(job.job_id, **its, item="x" if job_id == named["a"] else "y")
        assert store.claims.complete(job.job_id, **its)
    assert store.runs.state("r1") == "completed"
    last = completed(store, now=OLD)

    delete_all(store)

    assert ids(store) == [last]
    left = {table: count for table, count in counts(store).items() if count}
    assert left == {"jobs": 1, "outbox_events": 1, "workers": 1}


def test_batches_are_small(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH_JOBS", 3)
    monkeypatch.setattr(retention, "BATCH_ROWS", 2)
    for number in range(7):
        job_id = submit(store, run_id="r1")
        store.items.add("r1", [f"{number} {each}" for each in range(3)], now=NOW)
        claim(store)
        for _ in range(3):
            item = store.items.take(job_id, attempt=1, incarnation="i1", now=NOW)
            assert item is not None
            store.items.finish(job_id, attempt=1, incarnation="i1", item=item.item, now=NOW)
        store.claims.complete(job_id, attempt=1, incarnation="i1", now=NOW)
    last = completed(store, now=OLD)

    assert delete_all(store) > 20

    assert ids(store) == [last]
    assert counts(store)["items"] == counts(store)["item_outcomes"] == counts(store)["runs"] == 0


def test_concurrent_deletions_delete_each_job_once(store: JobStore, url: str) -> None:
    for _ in range(6):
        completed(store)
        retried(store)
    before = store.counts.snapshot(now=OLD).retries

    def deletes() -> None:
        with closing(JobStore.open(url)) as own:
            delete_all(own)

    assert together(deletes, deletes) == [None, None]
    delete_all(store)

    assert len(ids(store)) == 1
    assert store.counts.snapshot(now=OLD).retries == before


def retried(store: JobStore) -> JobId:
    """A job that was requeued once and then completed."""
    job_id = submit(store)
    for attempt in (1, 2):
        its: dict[str, Any] = {"attempt": attempt, "incarnation": f"{job_id} {attempt}"}
        slot = {"host": "box1", "worker": f"w {job_id}", "incarnation": its["incarnation"]}
        store.claims.register("gpu", **slot, now=NOW)
        assert store.claims.claim("gpu", **slot, now=NOW) is not None
        if attempt == 1:
            assert store.fencing.fence(job_id, **its, condition=Condition.STALL, now=NOW)
            assert store.fencing.requeue(job_id, attempt=1, condition=Condition.STALL, now=NOW)
        else:
            assert store.claims.complete(job_id, **its, now=NOW)
    return job_id


def test_counted_retries_do_not_go_down(store: JobStore) -> None:
    retried(store)
    completed(store)
    before = store.counts.snapshot(now=OLD).retries
    assert before["gpu"].watchdog == 1

    assert delete_all(store) == 1

    assert len(ids(store)) == 1
    assert store.counts.snapshot(now=OLD).retries == before


# --- kept


def test_unfinished_jobs_stay(store: JobStore) -> None:
    blocked = submit(store)
    store.admin.block(blocked, reason="", now=store.now())
    running = submit(store)
    claim(store)
    queued = submit(store)

    assert delete_all(store) == 0

    assert ids(store) == [blocked, running, queued]


def test_job_of_an_open_run_stays_until_the_run_is_old(store: JobStore) -> None:
    first = completed(store, run_id="r1")
    second = submit(store, run_id="r1")
    completed(store, queue="other", now=OLD)
    assert delete_all(store) == 0
    assert ids(store)[:2] == [first, second]

    assert store.admin.cancel(second, reason="", now=OLD)
    assert delete_all(store, now=OLD + 1) == 0
    assert store.runs.get("r1") is not None
    last = completed(store, queue="other", now=OLD + 90 * DAY_S)
    assert delete_all(store, now=OLD + 90 * DAY_S + 1) == 1

    assert ids(store) == [last]
    assert store.runs.get("r1") is None


def test_failed_job_stays_until_its_run_has_failed(store: JobStore) -> None:
    job_id = submit(store)
    claim(store)
    store.claims.fail_by_worker(job_id, attempt=1, incarnation="i1", reason="", now=NOW)
    completed(store)
    assert delete_all(store) == 0

    store.sweeps.consume_events(now=NOW)
    assert delete_all(store) == 1

    assert job_id not in ids(store)


def test_ids_and_positions_are_not_used_again(store: JobStore) -> None:
    jobs = [completed(store) for _ in range(3)]
    events = store.outbox.events("a")
    delete_all(store)

    new = completed(store, now=OLD)

    assert new > max(jobs)
    later = store.outbox.events("b")
    assert [each.job_id for each in later] == [jobs[-1], new]
    assert later[-1].position > max(each.position for each in events)


def test_jobs_that_are_kept_longer_do_not_hide_others(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH_JOBS", 2)
    keep(store, "endless", 0)
    kept = [completed(store, queue="endless") for _ in range(5)]
    old = completed(store)
    last = completed(store, now=OLD)

    for _ in range(10):
        delete_all(store)

    assert old not in ids(store)
    assert ids(store) == [*kept, last]


def test_run_name_is_free_after_its_deletion(store: JobStore) -> None:
    completed(store, run_id="r1")
    completed(store, now=OLD)
    delete_all(store)

    again = submit(store, run_id="r1")

    run = store.runs.get("r1")
    assert run is not None
    assert run.jobs == {State.QUEUED: 1}
    assert store.job(again).run_id == "r1"


def test_reopened_run_is_not_deleted(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    old = completed(store, run_id="r1")
    completed(store, now=OLD)
    next_batch = retention.next_batch
    found: list[retention.Batch] = []

    def reopened_in_between(*its: Any) -> retention.Batch:
        found.append(next_batch(*its))
        return found[-1] if len(found) == 1 else replace(found[-1], jobs=[], runs=[])

    monkeypatch.setattr(retention, "next_batch", reopened_in_between)
    store.sweeps.delete_old(now=OLD)

    assert list(found[0].jobs) == [old]
    assert old in ids(store)
