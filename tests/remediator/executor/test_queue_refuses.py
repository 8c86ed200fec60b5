"""A queue that refuses writes: what the executor does, and when it retries."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, text

from gpuwarden.db import engine as db_engine
from gpuwarden.db.errors import DatabaseError
from gpuwarden.job import JobClass, State
from gpuwarden.queue import JobStore
from gpuwarden.queue.schema import QUEUE
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.ledger.ledger import Ledger
from tests.remediator.executor.builders import (
    LIMITS,
    PACE,
    executor,
    history,
    journal,
    looping,
    on_a_lost_gpu,
    outcome_of,
    running,
    stalled_job,
    take_up,
    to_the_end,
    turn,
)
from tests.remediator.world import Box
from tests.waiting import eventually


@pytest.fixture
def impatient(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobStore]:
    """The same queue, with a lock timeout of 0.02 s."""
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.02)
    with closing(JobStore.open(store._engine.url.render_as_string(hide_password=False))) as found:
        yield found


def test_worker_that_holds_the_queue_lock_is_stopped(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker hangs in the middle of a write. Its transaction ends with it."""
    monkeypatch.setattr("remediator.remedies.restart_worker.QUEUE_TIMEOUT_S", 0.1)
    world = stalled_job(ledger, store)
    with closing(store._engine.connect().execution_options(writes=True)) as its_own:
        transaction = its_own.begin()
        its_own.execute(text("UPDATE jobs SET priority = priority"))
        world.before_stop = lambda _: transaction.rollback()

        to_the_end(executor(ledger, store, world), ledger)

    lines = journal(ledger)
    assert lines.index("did stop") < lines.index("did fence") < lines.index("did requeue")
    assert "not fenced yet" in next(entry.message for entry in history(ledger).entries if entry.step == "stop")
    assert world.boxes["w1"].calls == ["stop", "start"]
    assert (store.job(1).state, store.job(1).watchdog_retries) == (State.QUEUED, 1)


def test_worker_is_stopped_although_the_fence_raises(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remediator.remedies.restart_worker.QUEUE_TIMEOUT_S", 0.1)
    world = stalled_job(ledger, store)

    class Defective(BuiltinQueue):
        def fence(self, job_id: int, **how: Any) -> bool:
            if world.boxes["w1"].running:
                raise ZeroDivisionError
            return super().fence(job_id, **how)

    with looping(executor(ledger, Defective(store), world)):
        eventually(lambda: outcome_of(ledger) == "fixed", "it is stopped and then fenced")

    lines = journal(ledger)
    assert lines.index("did stop") < lines.index("did fence") < lines.index("did requeue")


def test_old_refusal_does_not_stop_a_worker_without_a_fence(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence fails once. The worker is active for longer than facts are valid, and stalls again."""
    monkeypatch.setattr("remediator.remedies.restart_worker.QUEUE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("remediator.executor.gather_facts.FACTS_S", 1.0)
    world = stalled_job(ledger, store)
    box = world.boxes["w1"]

    class Moody(BuiltinQueue):
        def fence(self, job_id: int, **how: Any) -> bool:
            if "failed fence" not in journal(ledger):
                box.hung = False
                raise DatabaseError("database is locked")
            return super().fence(job_id, **how)

    works = executor(ledger, Moody(store), world)

    def is_refused() -> bool:
        turn(works, ledger)
        return "failed fence" in journal(ledger)

    eventually(is_refused, "the fence is refused")
    until_s = time.monotonic() + 1.5
    while time.monotonic() < until_s:
        turn(works, ledger)
    assert journal(ledger)[-1] == "decided wait: unconfirmed"
    box.hung = True

    to_the_end(works, ledger)

    lines = journal(ledger)
    assert lines.index("did fence") < lines.index("did stop")
    assert history(ledger).outcome == "fixed"


def test_accepted_write_ends_a_refusal(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world)
    episode = take_up(ledger)

    def refuse() -> bool:
        raise DatabaseError("database is locked")

    def refused() -> list[int]:
        return [
            works.processor.facts.of_container(episode).refused_s_ago is not None,
            journal(ledger).count("failed fence"),
        ]

    works.processor.performer._write_to_queue(episode, "fence", refuse)
    works.processor.performer._write_to_queue(episode, "fence", refuse)
    assert refused() == [True, 1], "recorded once"
    works.processor.performer._write_to_queue(episode, "fence", lambda: True)
    assert refused() == [False, 1]

    works.processor.performer._write_to_queue(episode, "fence", refuse)

    assert refused() == [True, 2], "recorded again after an accepted write"


def test_quarantine_waits_for_a_retried_stop(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch, impatient: JobStore
) -> None:
    """The worker locks the queue, which the quarantine needs."""
    monkeypatch.setattr("remediator.remedies.restart_worker.QUEUE_TIMEOUT_S", 0.1)
    world = on_a_lost_gpu(ledger, store)
    with closing(sqlite3.connect(str(store._engine.url.database), isolation_level=None)) as its_own:
        its_own.execute("BEGIN IMMEDIATE")

        def fails_once(box: Box) -> None:
            box.unkillable = box.calls.count("stop") == 1
            if not box.unkillable:
                its_own.rollback()

        world.before_stop = fails_once

        to_the_end(executor(ledger, impatient, world), ledger)

    lines = journal(ledger)
    assert lines.index("did stop") < lines.index("did quarantine") < lines.index("did requeue")
    assert world.boxes["w1"].calls == ["stop", "stop", "start"]


def test_hung_worker_is_stopped_by_an_executor_that_starts_while_the_queue_is_locked(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can read the queue. The executor ends while it is locked, and the next one settles the job."""
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.2)
    monkeypatch.setattr("remediator.remedies.restart_worker.QUEUE_TIMEOUT_S", 0.5)
    world = stalled_job(ledger, store)
    url = store._engine.url.render_as_string(hide_password=False)
    store.close()
    with closing(sqlite3.connect(str(store._engine.url.database), isolation_level=None)) as its_own:
        its_own.execute("PRAGMA locking_mode = EXCLUSIVE")
        its_own.execute("BEGIN EXCLUSIVE")
        with closing(BuiltinQueue.open(url)) as queue, looping(executor(ledger, queue, world)) as loop:
            eventually(lambda: world.boxes["w1"].calls == ["stop"], "it is stopped", within_s=30)
            queue_is_locked_s = time.monotonic()
        assert not loop.is_alive()
        assert time.monotonic() - queue_is_locked_s < 10

    with closing(BuiltinQueue.open(url)) as queue:
        to_the_end(executor(ledger, queue, world), ledger)

    assert history(ledger).outcome == "fixed"
    assert (store.job(1).state, store.job(1).watchdog_retries) == (State.QUEUED, 1)


def refuse_all(queue: Connection) -> None:
    """Begin a transaction that blocks all other writes to the queue."""
    queue.begin()
    if queue.dialect.name == "postgresql":  # SQLite takes its lock at the begin
        queue.execute(text(f"LOCK TABLE {', '.join(QUEUE.tables.tables)} IN SHARE ROW EXCLUSIVE MODE"))


SETTLES_LATE: dict[str, tuple[dict[str, Any], bool, str, str]] = {
    "requeued": ({}, False, "requeue", "did requeue"),
    "failed": ({"job_class": JobClass.INGEST_LOAD}, False, "fail", "did fail"),
    "lost GPU quarantined": ({}, True, "quarantine", "did quarantine"),
}


@pytest.mark.parametrize(("submission", "lost", "refused", "done"), SETTLES_LATE.values(), ids=SETTLES_LATE)
def test_refused_settle_at_its_timeout_does_not_delay_the_stop(
    submission: dict[str, Any],
    lost: bool,
    refused: str,
    done: str,
    ledger: Ledger,
    store: JobStore,
    impatient: JobStore,
) -> None:
    """The stop of a fenced worker fails until the settle timeout. The queue is locked until the worker ends."""
    world = (on_a_lost_gpu if lost else stalled_job)(ledger, store, **submission)
    settings = replace(PACE, limits=replace(LIMITS, settle_timeout_s=0.3))
    with closing(store._engine.connect().execution_options(writes=True)) as its_own:

        def ends_after_the_bound(box: Box) -> None:
            box.unkillable = f"failed {refused}" not in journal(ledger)
            if not box.unkillable:
                its_own.rollback()
            elif not its_own.in_transaction():
                refuse_all(its_own)
                time.sleep(settings.limits.settle_timeout_s)

        world.before_stop = ends_after_the_bound

        to_the_end(executor(ledger, impatient, world, settings=settings), ledger)

    lines = journal(ledger)
    assert lines.count(f"failed {refused}") == 1, lines
    assert lines.index("failed stop") < lines.index(f"failed {refused}") < lines.index("did stop")
    assert lines.index("did stop") < lines.index("saw free: dead") < lines.index(done)
    assert (lines.count(done), history(ledger).outcome) == (1, "fixed"), lines
    assert store.job(1).state == (State.FAILED if refused == "fail" else State.QUEUED)


def test_refused_quarantine_is_recorded_once_per_stage(ledger: Ledger, store: JobStore, impatient: JobStore) -> None:
    """A refusal counts for one stage. Here the queue refuses at two."""
    world = on_a_lost_gpu(ledger, store)
    settings = replace(PACE, limits=replace(LIMITS, settle_timeout_s=0.3))
    with closing(store._engine.connect().execution_options(writes=True)) as its_own:

        def stops_at_the_second_try(box: Box) -> None:
            box.unkillable = "failed quarantine" not in journal(ledger)
            if not its_own.in_transaction():
                refuse_all(its_own)
                time.sleep(settings.limits.settle_timeout_s)

        world.before_stop = stops_at_the_second_try
        works = executor(ledger, impatient, world, settings=settings)

        def refused_twice() -> bool:
            turn(works, ledger)
            return journal(ledger).count("failed quarantine") == 2

        eventually(refused_twice, "it is refused at both stages", within_s=30, log=lambda: str(journal(ledger)))
        for _ in range(5):
            turn(works, ledger)
        lines = journal(ledger)
        assert lines.count("failed quarantine") == 2, "once per stage"
        its_own.rollback()

        to_the_end(works, ledger)

    first, second = (each for each, entry in enumerate(lines) if entry == "failed quarantine")
    assert first < lines.index("saw free: dead") < second
    assert journal(ledger).count("did quarantine") == 1


def test_settle_timeout_is_reached_while_the_queue_is_locked(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweeps wait for the lock longer in total than the loop may pause. All times are scaled by 0.2."""
    monkeypatch.setattr("remediator.executor.clock.PAUSE_MAX_S", 2.0)
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 1.0)
    monkeypatch.setattr("remediator.executor.housekeeping.HEARTBEAT_S", 0.0)
    monkeypatch.setattr("remediator.clients.job_queue_sql.RENEWAL_S", 0.0)
    world = stalled_job(ledger, store)
    world.boxes["w1"].unkillable = True
    store.claims.renew(running(store, worker="w2"), attempt=1, incarnation="i1", now=0.0)
    patient = JobStore.open(store._engine.url.render_as_string(hide_password=False))
    bound = replace(PACE, limits=replace(LIMITS, settle_timeout_s=3.0))
    with closing(sqlite3.connect(str(store._engine.url.database), isolation_level=None)) as its_own:
        works = executor(ledger, patient, world, settings=bound)
        for _ in range(2):
            turn(works, ledger)
        its_own.execute("BEGIN IMMEDIATE")
        with looping(works):
            eventually(lambda: "failed requeue" in journal(ledger), "the settle timeout is reached", within_s=30)
            its_own.execute("ROLLBACK")

    patient.close()
