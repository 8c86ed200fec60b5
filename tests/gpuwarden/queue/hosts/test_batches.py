"""What gateways ask the queue for many workers at once."""

import pytest

from gpuwarden.job import Condition
from gpuwarden.queue import Job, JobStore
from gpuwarden.queue.models import SlotClaim
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
