"""One ledger in PostgreSQL, several hosts and several executors: who settles, who waits, and who is the one."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.job import State
from gpuwarden.queue import JobStore
from remediator import plan
from remediator.executor.executor import AlreadyExecutingError, Executor, ExecutorLock
from remediator.ledger.ledger import Ledger
from remediator.ledger.schema import LEDGER
from remediator.plan import Stage
from remediator.process_id import Holder
from remediator.remedies.restart_worker import decide
from remediator.settings.policy_file import PolicyFile
from testbed.postgres import Postgres
from tests.remediator.builders import HOST, alert
from tests.remediator.executor.test_executor import (
    LIMITS,
    PACE,
    executor,
    looping,
    running,
    sql,
    story,
    story_outcome,
    to_the_end,
    told,
    turn,
    wedged,
)
from tests.remediator.world import Box, World
from tests.waiting import eventually

pytestmark = [
    pytest.mark.needs_postgres,
    pytest.mark.parametrize("backend", ["postgresql"], indirect=True),
]

BOUND_S = 0.4
QUICK = replace(PACE, limits=replace(LIMITS, settle_bound_s=BOUND_S))
LIVES_S = 2.5
"""The bound where a host shows life meanwhile: longer than a busy machine keeps a sign of it back."""


@pytest.fixture(autouse=True)
def _short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remediator.executor.executor.ACT_MARGIN_S", 0.1)
    monkeypatch.setattr("remediator.executor.executor.SETTLE_HELD_S", 0.1)


@pytest.fixture
def ledger_b(ledger_url: str) -> Iterator[Ledger]:
    """The same ledger, as host box2 has it."""
    with closing(Ledger.open(ledger_url, host="box2")) as opened:
        opened.take_over(replace(Holder.this_process("box2"), boot_id="of box2"))
        yield opened


def beat(ledger: Ledger) -> None:
    ledger.beat(host=HOST, pid=1, armed=True, started_at=1.0, errors=0, now=time.time())


def fenced_and_gone(ledger: Ledger, store: JobStore) -> World:
    """Host box1's executor has fenced the job of a wedge, and says no more."""
    world = wedged(ledger, store)
    ledger.take_over(Holder.this_process(HOST))
    beat(ledger)
    works = executor(ledger, store, world)
    ledger.take_new(HOST, now=time.time())
    while (episode := ledger.open_episodes(HOST)[0]).settle is None or episode.settle.stage is Stage.PLANNED:
        works._perform(episode, plan_of(works, episode))
    assert store.job(1).state is State.FENCING
    return world


def plan_of(works: Executor, episode: plan.Episode) -> plan.Step:
    return decide(works._facts(episode))


def test_a_silent_hosts_job_that_is_to_be_held_is_settled_by_nobody_and_no_sweep_gives_it_away(
    ledger: Ledger, ledger_b: Ledger, store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced_and_gone(ledger, store)
    file = tmp_path / "policy.toml"
    file.write_text('[restart_worker]\nunconfirmed = "hold"\n')
    monkeypatch.setattr("remediator.executor.executor.HEARTBEAT_S", 0.05)
    lease = sql(store, "SELECT lease_expires_at FROM jobs")

    works = executor(ledger_b, store, World(), host="box2", pace=QUICK, policy=PolicyFile(file))
    with looping(works):
        eventually(lambda: works._silent_s(HOST, time.monotonic()) > 3 * BOUND_S, "it was silent for long")
        before = sql(store, "SELECT lease_expires_at FROM jobs")
        eventually(lambda: sql(store, "SELECT lease_expires_at FROM jobs") > before > lease, "its fence goes on")
        assert store.job(1).state is State.FENCING

        file.write_text('[restart_worker]\nunconfirmed = "requeue"\n')
        eventually(lambda: store.job(1).state is State.QUEUED, "a person has decided")


@contextmanager
def beating(ledger: Ledger) -> Iterator[None]:
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(0.05):
            beat(ledger)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_silent_hosts_job_is_settled_by_another_and_its_own_executor_goes_on_when_it_is_back(
    ledger: Ledger, ledger_b: Ledger, store: JobStore
) -> None:
    world = fenced_and_gone(ledger, store)

    with looping(executor(ledger_b, store, World(), host="box2", pace=QUICK)):
        eventually(lambda: store.job(1).state is State.QUEUED, "it is queued again")
    assert world.boxes["w1"].calls == []
    assert store.job(1).watchdog_retries == 1

    to_the_end(executor(ledger, store, world), ledger)

    assert world.boxes["w1"].calls == ["stop", "start"]
    assert story(ledger).outcome == "mended"
    settled = [entry for entry in story(ledger).entries if entry.step == "requeue"]
    assert [entry.host for entry in settled] == ["box2"]
    assert "the remediator of box1 has been silent" in settled[0].message


def test_a_host_that_shows_life_settles_its_own_job(ledger: Ledger, ledger_b: Ledger, store: JobStore) -> None:
    fenced_and_gone(ledger, store)
    looks = 0
    patient = replace(QUICK, limits=replace(LIMITS, settle_bound_s=LIVES_S))
    works = executor(ledger_b, store, World(), host="box2", pace=patient)
    adopt = works._adopt

    def counted(episode: plan.Episode) -> None:
        nonlocal looks
        looks += 1
        adopt(episode)

    works._adopt = counted  # type: ignore[method-assign]
    with looping(works):
        with beating(ledger):
            began_s = time.monotonic()
            eventually(lambda: time.monotonic() - began_s > 2 * LIVES_S and looks > 5, "it has looked for long enough")
            assert store.job(1).state is State.FENCING
        eventually(lambda: store.job(1).state is State.QUEUED, "settled, once that one is silent")


def test_a_dry_run_settles_nothing_for_another_host(ledger: Ledger, ledger_b: Ledger, store: JobStore) -> None:
    fenced_and_gone(ledger, store)
    works = executor(ledger_b, store, World(), host="box2", pace=QUICK, armed=False)

    with looping(works):
        eventually(lambda: works._silent_s(HOST, time.monotonic()) > 2 * BOUND_S, "well past the bound")

    assert store.job(1).state is State.FENCING


def test_two_that_settle_at_once_settle_it_once(ledger: Ledger, ledger_b: Ledger, store: JobStore) -> None:
    fenced_and_gone(ledger, store)
    a, b = executor(ledger, store, World()), executor(ledger_b, store, World(), host="box2")
    episode = ledger.open_episodes(HOST)[0]
    step = plan.Requeue(retry=1, seen_dead=True, message="both of them", avoid_s=0.0)
    eventually(lambda: episode.settle and ledger_b.hold(episode.settle, for_s=-1.0), "the first lease ran out")

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(works._perform, episode, step) for works in (a, b)]:
            each.result()

    assert told(ledger).count("did requeue") == 1
    assert (store.job(1).state, store.job(1).watchdog_retries) == (State.QUEUED, 1)


def test_while_an_executor_holds_the_settle_another_does_not_act_on_it(
    ledger: Ledger, ledger_b: Ledger, store: JobStore
) -> None:
    fenced_and_gone(ledger, store)
    episode = ledger.open_episodes(HOST)[0]
    assert episode.settle is not None
    assert ledger.hold(episode.settle, for_s=60.0)

    executor(ledger_b, store, World(), host="box2")._perform(
        episode, plan.Requeue(retry=1, seen_dead=True, message="b", avoid_s=0.0)
    )

    assert store.job(1).state is State.FENCING


# --- one executor a host


def test_a_second_executor_of_a_host_is_refused_and_told_who_is_the_first(ledger: Ledger, ledger_url: str) -> None:
    with closing(ExecutorLock(ledger, host=HOST)), closing(Ledger.open(ledger_url, host=HOST)) as other:
        with pytest.raises(AlreadyExecutingError, match=r"another executor works this ledger \(gpuwarden pid \d+ at "):
            ExecutorLock(other, host=HOST)
        ExecutorLock(other, host="box2").close()
    with closing(Ledger.open(ledger_url, host=HOST)) as next_one:
        ExecutorLock(next_one, host=HOST).close()


def cut_off(ledger: Ledger, lock: ExecutorLock) -> None:
    """The server ends the connection that holds the lock."""
    held: Any = lock._lock
    sql(ledger, f"SELECT pg_terminate_backend({held._connection.info.backend_pid}, 5000)")


def test_a_lock_that_was_lost_with_its_connection_is_asked_for_again(ledger: Ledger, store: JobStore) -> None:
    world = World(Box(worker="w1"))
    with closing(ExecutorLock(ledger, host=HOST)) as lock, looping(executor(ledger, store, world, lock=lock)):
        eventually(ledger.executors, "it beats")
        cut_off(ledger, lock)

        job_id = running(store)
        world.boxes["w1"].job_id = job_id
        ledger.accept([alert(job_id=str(job_id))], [], now=time.time())
        eventually(lambda: story_outcome(ledger) == "mended", "it acts again")


def test_while_another_has_the_lock_nothing_is_done(ledger: Ledger, ledger_url: str, store: JobStore) -> None:
    world = wedged(ledger, store)
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
            eventually(lambda: asked > 3, "it has asked for it")
            assert (ledger.executors(), ledger.stories(), world.boxes["w1"].calls) == ({}, [], [])
            second.close()
            eventually(lambda: story_outcome(ledger) == "mended", "it has it, and acts")


# --- what wakes an executor


def test_an_executor_is_woken_by_the_server_when_another_has_accepted_an_alert(
    ledger: Ledger, ledger_b: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0
    works = executor(ledger, store, World(), pace=replace(PACE, look_again_s=60.0, tend_s=60.0))
    look_on = works._look_on

    def counted() -> None:
        nonlocal rounds
        rounds += 1
        look_on()

    works._look_on = counted  # type: ignore[method-assign]
    with looping(works):
        eventually(lambda: rounds > 3, "it goes round")
        with monkeypatch.context() as patched:
            patched.setattr("remediator.ledger.ledger.tell", lambda *_: None)
            ledger_b.accept([alert()], [], now=time.time())
        silent_since = rounds
        eventually(lambda: rounds > silent_since + 5, "it goes round, and nobody has told it anything")
        assert ledger.stories() == []

        sql(ledger, f"NOTIFY {LEDGER.channel}")
        eventually(lambda: len(ledger.stories()) == 1, "it was told, and has looked")

        ledger_b.accept([alert("b", worker="w2")], [], now=time.time())
        eventually(lambda: len(ledger.stories()) == 2, "who accepts an alert tells")


# --- the database goes away


def test_a_database_that_goes_away_in_the_middle_loses_nothing(
    postgres: Postgres, ledger: Ledger, store: JobStore
) -> None:
    world = wedged(ledger, store)
    stopping, go_on = threading.Event(), threading.Event()

    def before_stop(_: Box) -> None:
        stopping.set()
        assert go_on.wait(30)

    world.before_stop = before_stop
    with closing(ExecutorLock(ledger, host=HOST)) as lock, looping(executor(ledger, store, world, lock=lock)):
        assert stopping.wait(20)
        postgres.stop()
        go_on.set()
        eventually(lambda: not world.boxes["w1"].running, "the act goes on")
        assert world.boxes["w1"].calls == ["stop"]
        postgres.start()
        eventually(lambda: reached(lambda: story_outcome(ledger)) == "mended", "mended", within_s=30)

    assert world.boxes["w1"].calls == ["stop", "start"]
    assert (store.job(1).state, store.job(1).watchdog_retries) == (State.QUEUED, 1)


def reached(ask: Callable[[], Any]) -> Any:
    """What the database answers; nothing while it is away."""
    try:
        return ask()
    except Exception:  # noqa: BLE001 - however it says that it is away
        return None


def test_what_another_host_watches_is_no_part_of_the_story(ledger: Ledger, ledger_b: Ledger, store: JobStore) -> None:
    world = fenced_and_gone(ledger, store)
    onlooker = executor(ledger_b, store, World(), host="box2")
    for _ in range(3):
        for episode in ledger_b.unsettled_elsewhere("box2"):
            onlooker._adopt(episode)
    turn(executor(ledger, store, world), ledger)

    assert {entry.host for entry in story(ledger).entries} == {HOST}
