"""Sweeps of the queue on a timer."""

import itertools
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpuwarden.db import engine as db_engine
from gpuwarden.db.errors import DatabaseError
from gpuwarden.job import State
from gpuwarden.queue import JobStore
from remediator.clients.job_queue_sql import RENEWAL_S, BuiltinQueue
from remediator.executor.executor import Clients, Executor
from remediator.ledger.ledger import Ledger
from tests.remediator.builders import HOST
from tests.remediator.executor.builders import PACE, executor, looping, running
from tests.remediator.world import World
from tests.waiting import eventually


def test_first_sweep_does_not_reclaim_an_expired_lease(store: JobStore) -> None:
    """After a suspend of the host every lease is expired, and workers renew theirs within a heartbeat."""
    job_id = running(store)
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=0.0)
    queue = BuiltinQueue(store)

    queue.sweep(now=time.time())
    assert store.job(job_id).state is State.RUNNING
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=time.time())
    queue.sweep(now=time.time())

    assert (store.job(job_id).state, store.job(job_id).reclaims) == (State.RUNNING, 0)


def test_lease_is_reclaimed_only_after_its_worker_could_renew_it(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A locked database can be read."""
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.0)
    steady_s = 1000.0
    monkeypatch.setattr("remediator.clients.job_queue_sql.time", SimpleNamespace(monotonic=lambda: steady_s))
    job_id = running(store)
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=0.0)
    patient = JobStore.open(store._engine.url.render_as_string(hide_password=False))
    queue = BuiltinQueue(patient)
    with closing(patient):
        with closing(sqlite3.connect(str(store._engine.url.database), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for _ in range(2):
                with pytest.raises(DatabaseError, match="locked"):
                    queue.sweep(now=time.time())
                steady_s += RENEWAL_S - 1.0

        states = []
        for _ in range(3):
            queue.sweep(now=time.time())
            states.append(store.job(job_id).state)
            steady_s += RENEWAL_S / 2

    assert states == [State.RUNNING, State.RUNNING, State.QUEUED]


@pytest.mark.parametrize("seats_on", [True, False])
def test_heartbeat_says_whether_seats_are_on(ledger: Ledger, store: JobStore, *, seats_on: bool) -> None:
    executor(ledger, store, World(), settings=replace(PACE, seats_on=seats_on)).housekeeping.beat()

    (found,) = ledger.executors.list_all()
    assert found.seats_on is seats_on


def test_queue_is_swept_on_a_timer(ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remediator.clients.job_queue_sql.RENEWAL_S", 0.05)
    job_id = running(store)
    store.claims.renew(job_id, attempt=1, incarnation="i1", now=0.0)
    failures = itertools.count(1)

    class Moody(BuiltinQueue):
        def sweep(self, *, now: float) -> None:
            if next(failures) < 3:
                raise DatabaseError("locked")
            super().sweep(now=now)

    works = Executor(
        ledger,
        host=HOST,
        clients=Clients(exporter=World(), queue=Moody(store), actuators={}),  # type: ignore[arg-type]
        settings=PACE,
    )
    with looping(works):
        eventually(lambda: store.job(job_id).state is State.QUEUED, "the expired lease is reclaimed")


def test_exception_in_a_sweep_is_counted_and_sweeps_continue(ledger: Ledger, store: JobStore) -> None:
    sweeps: list[float] = []

    class Defective(BuiltinQueue):
        def sweep(self, *, now: float) -> None:
            sweeps.append(now)
            if len(sweeps) < 3:
                raise ZeroDivisionError

    works = executor(ledger, Defective(store), World())

    def errors() -> int | None:
        found = ledger.reports.totals(HOST).executor
        return None if found is None else found.errors

    with looping(works):
        eventually(lambda: len(sweeps) > 5, "it is swept again")
        eventually(lambda: errors() == 2, "both are counted")


def test_no_sweep_begins_after_close(ledger: Ledger, store: JobStore) -> None:
    sweeps: list[float] = []

    class Swept(BuiltinQueue):
        def sweep(self, *, now: float) -> None:
            sweeps.append(now)

    works = executor(ledger, Swept(store), World())
    works.housekeeping.sweep()
    works.close()

    works.housekeeping.sweep()

    assert len(sweeps) == 1
