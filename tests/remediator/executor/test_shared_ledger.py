"""One ledger in PostgreSQL with several hosts and executors."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.job import FENCE_S, State
from gpuwarden.queue import JobStore
from remediator import plan
from remediator.executor.executor import Executor
from remediator.executor.lock import AlreadyExecutingError, ExecutorLock
from remediator.ledger.ledger import Ledger
from remediator.ledger.schema import LEDGER
from remediator.plan import Stage
from remediator.remedies.restart_worker import decide
from testbed.postgres import Postgres
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
    to_the_end,
    turn,
)
from tests.remediator.world import Box, World
from tests.waiting import eventually

pytestmark = [
    pytest.mark.needs_postgres,
    pytest.mark.parametrize("backend", ["postgresql"], indirect=True),
]


@pytest.fixture
def ledger_b(ledger_url: str) -> Iterator[Ledger]:
    """The same ledger, opened by box2."""
    with closing(Ledger.open(ledger_url, host="box2")) as opened:
        yield opened


def beat(ledger: Ledger) -> None:
    ledger.executors.beat(host=HOST, pid=1, armed=True, started_at=1.0, errors=0, now=time.time())


def fenced_and_gone(ledger: Ledger, store: JobStore) -> World:
    """The executor of box1 fenced a stalled job and ended."""
    world = stalled_job(ledger, store)
    beat(ledger)
    works = executor(ledger, store, world)
    ledger.inbox.take_new(HOST, now=time.time())
    while (episode := ledger.episodes.list_open(HOST)[0]).settle is None or episode.settle.stage is Stage.PLANNED:
        works.processor.performer.perform(episode, plan_of(works, episode))
    assert store.job(1).state is State.FENCING
    return world


def plan_of(works: Executor, episode: plan.Episode) -> plan.Step:
    return decide(works.processor.facts.of_container(episode))


def test_sweep_requeues_the_job_of_a_dead_executor(ledger: Ledger, store: JobStore) -> None:
    world = fenced_and_gone(ledger, store)
    assert store.sweeps.reclaim_expired(now=store.now() + FENCE_S - 10) == []
    assert store.sweeps.reclaim_expired(now=store.now() + FENCE_S + 1) == [1]

    assert world.boxes["w1"].calls == []
    assert (store.job(1).state, store.job(1).reclaims, store.job(1).watchdog_retries) == (State.QUEUED, 1, 0)

    to_the_end(executor(ledger, store, world), ledger)

    assert world.boxes["w1"].calls == ["stop", "start"]
    assert history(ledger).outcome == "fixed"
    assert "did requeue" not in journal(ledger)


def test_concurrent_settles_settle_once(ledger: Ledger, ledger_b: Ledger, store: JobStore) -> None:
    fenced_and_gone(ledger, store)
    works = [executor(each, store, World()) for each in (ledger, ledger_b)]
    episode = ledger.episodes.list_open(HOST)[0]

    with ThreadPoolExecutor(2) as pool:
        step = plan.Requeue(retry=1, seen_dead=False, message="both of them", avoid_s=0.0)
        for done in [pool.submit(each.processor.performer.perform, episode, step) for each in works]:
            done.result()

    assert journal(ledger).count("did requeue") == 1
    assert (store.job(1).state, store.job(1).watchdog_retries) == (State.QUEUED, 1)


# --- one executor per host


def test_second_executor_of_a_host_is_refused_and_the_first_named(ledger: Ledger, ledger_url: str) -> None:
    with closing(ExecutorLock(ledger, host=HOST)), closing(Ledger.open(ledger_url, host=HOST)) as other:
        with pytest.raises(
            AlreadyExecutingError, match=r"another executor holds this ledger's lock \(gpuwarden pid \d+ at "
        ):
            ExecutorLock(other, host=HOST)
        ExecutorLock(other, host="box2").close()
    with closing(Ledger.open(ledger_url, host=HOST)) as next_one:
        ExecutorLock(next_one, host=HOST).close()


def cut_off(ledger: Ledger, lock: ExecutorLock) -> None:
    """The server ends the connection that holds the lock."""
    held: Any = lock._lock
    sql(ledger, f"SELECT pg_terminate_backend({held._connection.info.backend_pid}, 5000)")


def test_lock_lost_with_its_connection_is_taken_again(ledger: Ledger, store: JobStore) -> None:
    world = World(Box(worker="w1"))
    with closing(ExecutorLock(ledger, host=HOST)) as lock, looping(executor(ledger, store, world, lock=lock)):
        eventually(ledger.executors.last_beats, "the first heartbeat")
        cut_off(ledger, lock)

        job_id = running(store)
        world.boxes["w1"].job_id = job_id
        ledger.inbox.accept([alert(job_id=str(job_id))], [], now=time.time())
        eventually(lambda: outcome_of(ledger) == "fixed", "it acts again")


def test_executor_without_the_lock_does_nothing(ledger: Ledger, ledger_url: str, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    asked = 0
    with closing(ExecutorLock(ledger, host=HOST)) as lock, closing(Ledger.open(ledger_url, host=HOST)) as other:
        cut_off(ledger, lock)
        held = lock.held

        def counted() -> bool:
            nonlocal asked
            asked += 1
            return held()

        lock.held = counted  # type: ignore[method-assign]
        with closing(ExecutorLock(other, host=HOST)) as second, looping(executor(ledger, store, world, lock=lock)):
            eventually(lambda: asked > 3, "it has tried to take the lock")
            assert (ledger.executors.last_beats(), ledger.reports.newest(), world.boxes["w1"].calls) == ({}, [], [])
            second.close()
            eventually(lambda: outcome_of(ledger) == "fixed", "it takes the lock and acts")


def test_executor_that_lost_its_lock_performs_no_decided_action(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    with closing(ExecutorLock(ledger, host=HOST)) as lock:
        works = executor(ledger, store, world, lock=lock)
        lock.lost = True
        turn(works, ledger)
        assert journal(ledger) == ["saw alert: firing"]

        lock.lost = False
        to_the_end(works, ledger)
        assert history(ledger).outcome == "fixed"


# --- notifications


def test_executor_is_notified_of_an_alert_accepted_by_another_process(
    ledger: Ledger, ledger_b: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0
    works = executor(ledger, store, World(), settings=replace(PACE, interval_s=60.0, sweep_interval_s=60.0))
    look_on = works.clock.tick

    def counted() -> None:
        nonlocal rounds
        rounds += 1
        look_on()

    works.clock.tick = counted  # type: ignore[method-assign]
    with looping(works):
        eventually(lambda: rounds > 3, "the loop iterates")
        with monkeypatch.context() as patched:
            patched.setattr("remediator.ledger.inbox.notify_after_commit", lambda *_: None)
            ledger_b.inbox.accept([alert()], [], now=time.time())
        silent_since = rounds
        eventually(lambda: rounds > silent_since + 5, "the loop iterates without a notification")
        assert ledger.reports.newest() == []

        sql(ledger, f"NOTIFY {LEDGER.channel}")
        eventually(lambda: len(ledger.reports.newest()) == 1, "it looks after the notification")

        ledger_b.inbox.accept([alert("b", worker="w2")], [], now=time.time())
        eventually(lambda: len(ledger.reports.newest()) == 2, "accepting an alert notifies")


# --- a database restart


def test_restart_of_the_database_loses_nothing(postgres: Postgres, ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    stopping, go_on = threading.Event(), threading.Event()

    def before_stop(_: Box) -> None:
        stopping.set()
        assert go_on.wait(30)

    world.before_stop = before_stop
    with closing(ExecutorLock(ledger, host=HOST)) as lock, looping(executor(ledger, store, world, lock=lock)):
        assert stopping.wait(20)
        postgres.stop()
        go_on.set()
        eventually(lambda: not world.boxes["w1"].running, "the stop completes")
        assert world.boxes["w1"].calls == ["stop"]
        postgres.start()
        eventually(lambda: reached(lambda: outcome_of(ledger)) == "fixed", "it is fixed", within_s=30)

    assert world.boxes["w1"].calls == ["stop", "start"]
    assert (store.job(1).state, store.job(1).watchdog_retries) == (State.QUEUED, 1)


def reached(ask: Callable[[], Any]) -> Any:
    """The answer of the database, or `None` while it is stopped."""
    try:
        return ask()
    except Exception:  # noqa: BLE001 - any error of a stopped database
        return None
