"""What gateways ask the queue for many workers at once."""

from typing import Any

import pytest
from sqlalchemy import event, insert

from gpuwarden.db.transactions import writing
from gpuwarden.job import Condition, State
from gpuwarden.queue import Job, JobStore
from gpuwarden.queue.models import Beat, Renewal, SlotClaim, Synced
from gpuwarden.queue.schema import DEAD_WORKERS
from tests.gpuwarden.queue.builders import NOW, claim, submit

pytestmark = pytest.mark.both_databases


def slot_claim(job: Job) -> SlotClaim:
    return SlotClaim(job.job_id, job.attempt, str(job.claimed_by), str(job.host), str(job.worker))


def test_owned_claims_are_those_that_run_or_are_lost(store: JobStore) -> None:
    for _ in range(5):
        submit(store)
    runs, lost, fenced, done, again = (slot_claim(claim(store, f"i{n}")) for n in range(1, 6))
    store.lost_hosts.mark_lost(lost.job_id, attempt=1, now=NOW)
    store.fencing.fence(fenced.job_id, attempt=1, incarnation="i3", condition=Condition.STALL, now=NOW)
    store.claims.complete(done.job_id, attempt=1, incarnation="i4", now=NOW)
    store.claims.release(again.job_id, attempt=1, incarnation="i5", now=NOW)
    retaken = slot_claim(claim(store, "i5"))

    asked = [runs, lost, fenced, done, again, retaken, runs._replace(job_id=2**53 - 1)]
    assert store.batches.owned(asked) == {runs, lost, retaken}
    assert store.batches.owned([]) == set()


def test_claim_is_its_slots_only(store: JobStore) -> None:
    submit(store)
    its = slot_claim(claim(store))

    others = [its._replace(host="box2"), its._replace(worker="w2"), its._replace(incarnation="i2"),
              its._replace(attempt=2)]  # fmt: skip
    assert store.batches.owned([*others, its]) == {its}


def beat(worker: str, **changed: Any) -> Beat:
    its = {"worker": worker, "queue": "gpu", "incarnation": worker.replace("w", "i")}
    return Beat(**{**its, **changed})


def register(store: JobStore, *names: str) -> None:
    for name in names:
        store.claims.register("gpu", host="box1", worker=name, incarnation=name.replace("w", "i"), now=NOW)


def test_sync_is_the_heartbeat_and_renewal_of_each_slot(store: JobStore) -> None:
    register(store, "w1", "w2", "w3")
    submit(store)
    job = claim(store, "i1")

    beats = [beat("w3", model="m", loaded="l"), beat("w1", completed=True), beat("w2")]
    synced = store.batches.sync("box1", beats, [Renewal(slot_claim(job), 630)], now=NOW + 10)

    assert synced == Synced([], [], [])
    assert store.job(job.job_id).lease_expires_at == NOW + 640
    rows = {row.worker: row for row in store.admin.workers(now=NOW + 11)}
    assert {row.last_seen_at for row in rows.values()} == {NOW + 10}
    assert (rows["w3"].current_model, rows["w3"].loaded_model) == ("m", "l")
    assert store.claims.others_completed("gpu", host="box1", worker="w2", since=NOW + 10)
    assert not store.claims.others_completed("gpu", host="box1", worker="w1", since=NOW)


def test_sync_names_what_is_over_and_lost_and_carries_out_the_rest(store: JobStore) -> None:
    register(store, "w1", "w2", "w3", "w4")
    for _ in range(4):
        submit(store)
    runs, lost, fenced, gone = (claim(store, f"i{n}") for n in range(1, 5))
    store.lost_hosts.mark_lost(lost.job_id, attempt=1, now=NOW)
    store.fencing.fence(fenced.job_id, attempt=1, incarnation="i3", condition=Condition.DEAD_WORKER, now=NOW)
    store.claims.register("gpu", host="box1", worker="w4", incarnation="new", now=NOW)

    beats = [beat(f"w{n}") for n in range(1, 6)]
    renewals = [Renewal(slot_claim(job), 600) for job in (gone, fenced, lost, runs)]
    synced = store.batches.sync("box1", beats, renewals, now=NOW + 10)

    assert synced == Synced([beat("w3"), beat("w4")], [slot_claim(fenced), slot_claim(gone)], [])
    assert [store.job(job.job_id).state for job in (runs, lost)] == [State.RUNNING] * 2
    assert {store.job(job.job_id).lease_expires_at for job in (runs, lost)} == {NOW + 610}
    assert store.job(fenced.job_id).state is State.FENCING
    assert "w5" in {row.worker for row in store.admin.workers(now=NOW + 11)}  # its row was deleted: as a heartbeat does


def test_sync_ends_the_flag_of_a_worker_that_lives(store: JobStore) -> None:
    register(store, "w1", "w2")
    for name in ("i1", "i2"):
        submit(store)
        job = claim(store, name)
        store.fencing.fence(job.job_id, attempt=1, incarnation=name, condition=Condition.DEAD_WORKER, now=NOW)
    store.claims.register("gpu", host="box1", worker="w1", incarnation="new", now=NOW)
    with writing(store._engine) as connection:
        connection.execute(insert(DEAD_WORKERS).values(
            host="box1", worker="w1", queue="gpu", incarnation="i1", since=NOW, stamped_at=NOW, reason="r"
        ))  # fmt: skip

    store.batches.sync("box1", [beat("w1", incarnation="new"), beat("w2")], [], now=NOW + 1)

    assert [each.worker for each in store.fencing.dead_workers(now=NOW + 1)] == ["w2"]


def test_host_syncs_its_own_slots_only(store: JobStore) -> None:
    register(store, "w1")
    submit(store)
    job = claim(store, "i1")
    its = slot_claim(job)

    others = [
        its._replace(host="box2"),
        its._replace(worker="w2"),
        its._replace(incarnation="i2"),
        its._replace(attempt=2),
    ]
    synced = store.batches.sync("box2", [beat("w1")], [Renewal(each, 9000) for each in others], now=NOW + 10)

    assert set(synced.lost) == set(others)
    assert store.job(job.job_id) == job
    (row,) = (row for row in store.admin.workers(now=NOW + 11) if row.host == "box1")
    assert row.last_seen_at == NOW


def test_sync_of_many_slots_takes_few_statements(store: JobStore) -> None:
    names = [f"w{n}" for n in range(1, 31)]
    register(store, *names)
    renewals = []
    for name in names:
        submit(store)
        renewals.append(Renewal(slot_claim(claim(store, name.replace("w", "i"))), 600))
    statements: list[str] = []
    event.listen(store._engine, "before_cursor_execute", lambda *its: statements.append(its[2]))

    assert store.batches.sync("box1", [beat(name) for name in names], renewals, now=NOW) == Synced([], [], [])

    assert [text.split()[0] for text in statements if not text.startswith("BEGIN")] == [
        "UPDATE",
        "SELECT",
        "UPDATE",
        "INSERT",
    ]


def test_sync_names_draining_workers(store: JobStore) -> None:
    register(store, "w1", "w2", "w3")
    store.admin.drain(host="box1", worker="w1")
    store.admin.drain(host="box1", worker="w3")
    store.claims.register("gpu", host="box1", worker="w3", incarnation="new", now=NOW)

    beats = [beat("w1"), beat("w2"), beat("w3", incarnation="new")]
    assert store.batches.sync("box1", beats, [], now=NOW + 1).draining == [beat("w1")]
