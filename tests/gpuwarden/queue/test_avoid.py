"""Avoidance after a requeue, and GPU quarantine."""

from collections.abc import Callable

import pytest
from sqlalchemy import func, select

from gpuwarden.db.transactions import reading
from gpuwarden.job import AVOID_S, Condition, JobId
from gpuwarden.queue import JobStore, Slot
from gpuwarden.queue.schema import GPU_AVOIDANCE
from tests.gpuwarden.queue.builders import NOW, claim, fenced, register, stale, submit

pytestmark = pytest.mark.both_databases


def avoiding(store: JobStore) -> JobId:
    """A job that was requeued from worker `w1` and `GPU-a`."""
    register(store, "i1", gpus=("GPU-a",))
    job = fenced(store)
    avoid = Slot(host="box1", worker="w1", gpus=("GPU-a",))
    assert store.fencing.requeue(
        job.job_id, attempt=1, condition=Condition.STALL, now=NOW, avoid=avoid, avoid_s=AVOID_S
    )
    register(store, "i1b", gpus=("GPU-a",))
    return job.job_id


def takes(store: JobStore, incarnation: str, *, now: float = NOW) -> bool:
    worker = incarnation.replace("i", "w").rstrip("b")
    return store.claims.claim("gpu", host="box1", worker=worker, incarnation=incarnation, now=now) is not None


def test_requeued_job_is_left_to_another_live_gpu(store: JobStore) -> None:
    avoiding(store)
    register(store, "i2", gpus=("GPU-b",))

    assert not takes(store, "i1b")
    assert takes(store, "i2")


def test_another_worker_with_the_same_gpu_is_avoided_too(store: JobStore) -> None:
    avoiding(store)
    register(store, "i2", gpus=("GPU-a", "GPU-c"))
    register(store, "i3", gpus=("GPU-b",))

    assert not takes(store, "i2")
    assert takes(store, "i3")


def test_avoided_worker_still_claims_other_jobs(store: JobStore) -> None:
    avoiding(store)
    register(store, "i2")
    other = submit(store)

    assert store.claims.claim("gpu", host="box1", worker="w1", incarnation="i1b", now=NOW) == store.job(other)


def avoided_too(store: JobStore) -> None:
    register(store, "i2", gpus=("GPU-a",))


def of_another_queue(store: JobStore) -> None:
    store.claims.register("cpu", host="box1", worker="w2", incarnation="i2", now=NOW)


def retired(store: JobStore) -> None:
    register(store, "i2")
    store.fencing.retire_worker(host="box1", worker="w2", incarnation="i2", now=NOW)


def in_quarantine(store: JobStore) -> None:
    register(store, "i2", gpus=("GPU-b",))
    store.gpu_quarantine.quarantine(["GPU-b"], host="box1", worker=None, reason="D state", now=NOW)


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
def test_job_returns_to_its_worker_if_no_other_could_run_it(store: JobStore, other: Callable[[JobStore], None]) -> None:
    avoiding(store)
    other(store)

    assert takes(store, "i1b")


def test_avoidance_ends_after_a_while(store: JobStore) -> None:
    avoiding(store)
    register(store, "i2", now=NOW + AVOID_S)

    assert not takes(store, "i1b", now=NOW + AVOID_S - 1)
    assert takes(store, "i1b", now=NOW + AVOID_S)


def test_sweep_deletes_only_expired_avoidances(store: JobStore) -> None:
    avoiding(store)

    store.sweeps.reclaim_expired(now=NOW + AVOID_S - 1)
    before = avoided_rows(store)
    store.sweeps.reclaim_expired(now=NOW + AVOID_S)

    assert (before, avoided_rows(store)) == (2, 0)


def avoided_rows(store: JobStore) -> int | None:
    with reading(store._engine) as connection:
        return connection.scalar(select(func.count()).select_from(GPU_AVOIDANCE))


def test_avoided_slots_add_up_over_requeues(store: JobStore) -> None:
    job_id = avoiding(store)
    register(store, "i2", gpus=("GPU-b",))
    register(store, "i3", gpus=("GPU-c",))
    job = claim(store, "i2")
    store.fencing.fence(job_id, attempt=2, incarnation="i2", condition=Condition.STALL, now=NOW)
    avoid = Slot(host="box1", worker="w2", gpus=("GPU-b",))
    store.fencing.requeue(job.job_id, attempt=2, condition=Condition.STALL, now=NOW, avoid=avoid, avoid_s=AVOID_S)
    register(store, "i2b", gpus=("GPU-b",))

    assert not takes(store, "i1b")
    assert not takes(store, "i2b")
    assert takes(store, "i3")


# --- quarantine


def test_quarantined_gpu_claims_nothing_until_it_is_released(store: JobStore) -> None:
    register(store, "i1", gpus=("GPU-a", "GPU-b"))
    register(store, "i2", gpus=("GPU-c",))
    submit(store)
    submit(store)
    store.gpu_quarantine.quarantine(["GPU-b"], host="box1", worker=None, reason="D state", now=NOW)

    assert not takes(store, "i1")
    assert takes(store, "i2")
    assert store.gpu_quarantine.release_gpu("GPU-b")
    assert not store.gpu_quarantine.release_gpu("GPU-b")
    assert takes(store, "i1")


def test_worker_with_unknown_gpus_is_matched_by_its_slot(store: JobStore) -> None:
    submit(store)
    store.gpu_quarantine.quarantine(["GPU-a"], host="box1", worker="w1", reason="D state", now=NOW)

    assert not takes(store, "i1")
    assert takes(store, "i2")


def test_slots_that_share_an_unknown_gpu_are_both_in_quarantine(store: JobStore) -> None:
    submit(store)
    for worker in ("w1", "w2"):
        store.gpu_quarantine.quarantine(["GPU-a"], host="box1", worker=worker, reason="D state", now=NOW)

    assert not takes(store, "i1")
    assert not takes(store, "i2")
    assert [each.worker for each in store.gpu_quarantine.quarantined()] == ["w1", "w2"]
    assert store.gpu_quarantine.release_gpu("GPU-a")
    assert store.gpu_quarantine.quarantined() == []
    assert takes(store, "i2")


def test_quarantine_is_listed_with_its_first_reason(store: JobStore) -> None:
    register(store, "i1", gpus=("GPU-a", "GPU-b"))
    assert store.gpu_quarantine.quarantine_of(host="box1", worker="w1") is None
    store.gpu_quarantine.quarantine(["GPU-b"], host="box1", worker="w7", reason="D state", now=NOW)
    store.gpu_quarantine.quarantine(["GPU-b"], host="box1", worker="w7", reason="again", now=NOW + 1)
    store.gpu_quarantine.quarantine(["GPU-b", "GPU-a"], host="box1", worker=None, reason="again", now=NOW + 1)

    found = store.gpu_quarantine.quarantined()

    assert [(each.gpu, each.worker, each.since, each.reason) for each in found] == [
        ("GPU-b", "w7", NOW, "D state"),
        ("GPU-a", None, NOW + 1, "again"),
        ("GPU-b", None, NOW + 1, "again"),
    ]
    assert store.gpu_quarantine.quarantine_of(host="box1", worker="w1") == found[0]
    assert store.gpu_quarantine.quarantine_of(host="box1", worker="w2") is None
