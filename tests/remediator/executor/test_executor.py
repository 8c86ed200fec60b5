"""The loop of the executor with a real ledger and a real queue. The host is a fake: see `world`."""

import itertools
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.db import engine as db_engine
from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.migrate import NewerTablesError
from gpuwarden.queue import JobStore
from remediator.executor.executor import Pools
from remediator.ledger.chain import Executors
from remediator.ledger.ledger import Ledger
from remediator.plan import Facts
from remediator.remedies import REMEDIES
from tests.remediator.builders import HOST, alert
from tests.remediator.executor.builders import (
    PACE,
    executor,
    history,
    journal,
    looping,
    outcome_of,
    running,
    sql,
    stalled_job,
)
from tests.remediator.world import Box, World
from tests.waiting import eventually


def test_executor_exits_on_newer_tables_and_waits_on_older_ones(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world)
    ((ours,),) = sql(ledger, "SELECT version_num FROM gpuwarden_ledger_version")
    before = ledger.reports.totals(HOST).executor
    revision = "UPDATE gpuwarden_ledger_version SET version_num = '{}'"

    sql(ledger, revision.format("9999"))
    with pytest.raises(NewerTablesError, match="upgrade this program"):
        works.run()
    sql(ledger, revision.format("0000"))
    with looping(executor(ledger, store, world)):
        time.sleep(0.5)
        assert (ledger.reports.totals(HOST).executor, world.boxes["w1"].calls) == (before, [])
        sql(ledger, revision.format(ours))
        eventually(lambda: [each.outcome for each in ledger.reports.newest()] == ["fixed"], "it continues")

    assert world.boxes["w1"].calls == ["stop", "start"]


def test_alert_is_processed_at_once(ledger: Ledger, store: JobStore) -> None:
    job_id = running(store)
    world = World(Box(worker="w1", job_id=job_id))
    with looping(executor(ledger, store, world, settings=replace(PACE, interval_s=60.0))):
        eventually(lambda: ledger.reports.totals(HOST).executor, "the first heartbeat")
        ledger.inbox.accept([alert(job_id=str(job_id))], [], now=time.time())
        eventually(lambda: outcome_of(ledger) == "fixed", "it is fixed", within_s=30)


def test_idle_executor_iterates_only_once_per_interval(
    ledger_url: str, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    beat = Executors.beat

    def counted(self: Executors, **row: Any) -> None:
        nonlocal count
        count += 1
        beat(self, **row)

    monkeypatch.setattr(Executors, "beat", counted)
    counting = Ledger.open(ledger_url, host=HOST)
    began_s = time.monotonic()
    with looping(executor(counting, store, World(), settings=replace(PACE, interval_s=0.3))):
        eventually(lambda: count >= 4, "four heartbeats")
        took_s = time.monotonic() - began_s
    counting.close()

    assert took_s >= 0.9


def test_waiting_episode_is_processed_again_on_a_timer(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    world.boxes["w1"].hung = False
    with looping(executor(ledger, store, world)):
        eventually(
            lambda: "decided wait: unconfirmed" in (journal(ledger) if ledger.reports.newest() else []), "it waits"
        )
        world.boxes["w1"].hung = True
        eventually(lambda: outcome_of(ledger) == "fixed", "it is fixed without another alert")


def test_slow_stop_delays_only_its_own_episode(ledger: Ledger, store: JobStore) -> None:
    slow, quick = running(store, worker="w1"), running(store, worker="w2")
    world = World(Box(worker="w1", job_id=slow), Box(worker="w2", job_id=quick))
    stopping, go_on = threading.Event(), threading.Event()

    def before_stop(box: Box) -> None:
        if box.worker == "w1":
            stopping.set()
            assert go_on.wait(20)

    world.before_stop = before_stop
    with looping(executor(ledger, store, world)):
        ledger.inbox.accept([alert("a", job_id=str(slow))], [], now=time.time())
        eventually(stopping.is_set, "the slow stop has begun")
        ledger.inbox.accept([alert("b", worker="w2", job_id=str(quick))], [], now=time.time())
        eventually(
            lambda: len(ledger.reports.newest()) == 2 and history(ledger, 2).outcome == "fixed", "the other is fixed"
        )
        assert history(ledger, 1).outcome is None
        go_on.set()
        eventually(lambda: history(ledger, 1).outcome == "fixed", "the slow one is fixed too")

    assert world.boxes["w1"].calls == ["stop", "start"]


def test_episode_of_another_host_is_ignored(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    ledger.inbox.accept([alert("b", host="box2")], [], now=time.time())

    with looping(executor(ledger, store, world)):
        eventually(lambda: outcome_of(ledger) == "fixed", "its own episode is fixed")

    assert len(ledger.reports.newest()) == 1
    assert ledger.inbox.take_new("box2", now=time.time()) == 1, "the executor of box2 takes it"


def test_exception_affects_only_its_own_episode(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = stalled_job(ledger, store)
    ledger.inbox.accept([alert("b", worker="w2")], [], now=time.time())
    remedy = REMEDIES["restart_worker"]

    def defective(facts: Facts) -> Any:
        if facts.episode.worker == "w2":
            raise ZeroDivisionError
        return remedy.decide(facts)

    defect = replace(remedy, decide=defective)
    monkeypatch.setattr("remediator.executor.process_episode.REMEDIES", {"restart_worker": defect})

    def errors() -> int:
        found = ledger.reports.totals(HOST).executor
        return found.errors if found else 0

    with looping(executor(ledger, store, healthy)):
        eventually(lambda: outcome_of(ledger) == "fixed", "the other one is fixed")
        eventually(lambda: errors() >= 2, "each exception is counted")


def test_exception_in_the_loop_is_counted_and_the_loop_continues(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world)
    look, times = works.reconcile, itertools.count(1)

    def defective(pools: Pools) -> None:
        if next(times) < 3:
            raise ZeroDivisionError
        look(pools)

    works.reconcile = defective  # type: ignore[method-assign]
    with looping(works):
        eventually(lambda: outcome_of(ledger) == "fixed", "it is fixed")

    found = ledger.reports.totals(HOST).executor
    assert found is not None
    assert found.errors == 2


def test_executor_waits_while_the_ledger_is_locked(
    ledger_file: Path, ledger_url: str, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.05)
    ledger = Ledger.open(ledger_url, host=HOST)
    world = stalled_job(ledger, store)
    refused = threading.Event()

    beat = Executors.beat

    def watching(self: Executors, **its: Any) -> None:
        try:
            beat(self, **its)
        except DatabaseError:
            refused.set()
            raise

    monkeypatch.setattr(Executors, "beat", watching)
    watched = Ledger.open(ledger_url, host=HOST)
    works = executor(watched, store, world)
    with closing(sqlite3.connect(ledger_file, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        with looping(works):
            eventually(refused.is_set, "the ledger refused")
            assert world.boxes["w1"].calls == []
            other.execute("ROLLBACK")
            eventually(lambda: outcome_of(ledger) == "fixed", "it is fixed once the ledger answers")
    watched.close()
    ledger.close()
