"""Timeouts count by the monotonic clock while the executor runs."""

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpuwarden.db import engine as db_engine
from gpuwarden.job import FENCE_S, State
from gpuwarden.queue import JobStore
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor.clock import PAUSE_MAX_S
from remediator.executor.executor import Executor
from remediator.ledger.ledger import Ledger
from remediator.reasons import Reason
from remediator.remedies.restart import PAUSE_S
from remediator.remedies.restart_worker import decide
from tests.remediator.builders import HOST
from tests.remediator.executor.builders import LIMITS, PACE, executor, history, journal, stalled_job, take_up, turn
from tests.remediator.world import Box, World

BOUND_S = PACE.limits.settle_timeout_s


class Clocks:
    """Fake clocks of the executor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steady_s = 1000.0
        self.stepped_s = 0.0
        monkeypatch.setattr(
            "remediator.executor.clock.time", SimpleNamespace(time=self.wall, monotonic=lambda: self.steady_s)
        )

    def wall(self) -> float:
        return time.time() + self.stepped_s


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def lingering(ledger: Ledger, store: JobStore) -> World:
    """A stalled job whose container stops, and whose process the driver lists for ever."""
    world = stalled_job(ledger, store)
    box, about = world.boxes["w1"], world.worker_evidence
    pids = box.pids

    def haunted(worker: str, *, host: str) -> Any:
        return replace(about(worker, host=host), gpu_pids={"GPU-0": sorted(pids)})

    world.worker_evidence = haunted  # type: ignore[method-assign]
    return world


def look_on(works: Executor, ledger: Ledger, clocks: Clocks, *, for_s: float) -> None:
    for _ in range(round(for_s / 5)):
        clocks.steady_s += 5
        turn(works, ledger)


def test_timeouts_count_by_the_monotonic_clock(ledger: Ledger, store: JobStore, clocks: Clocks) -> None:
    """The control of the tests below."""
    works = executor(ledger, store, lingering(ledger, store))
    turn(works, ledger)

    look_on(works, ledger, clocks, for_s=BOUND_S - 5)
    assert store.job(1).state is State.FENCING
    look_on(works, ledger, clocks, for_s=5)
    assert store.job(1).state is State.QUEUED
    look_on(works, ledger, clocks, for_s=PACE.limits.restart_timeout_s)
    assert (history(ledger).outcome, history(ledger).wait_reason) == (None, "given_up")


@pytest.mark.parametrize("step_s", [600.0, -600.0])
def test_step_of_the_wall_clock_changes_no_timeout(
    ledger: Ledger, store: JobStore, clocks: Clocks, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    works = executor(ledger, store, lingering(ledger, store))
    turn(works, ledger)
    assert journal(ledger)[-1] == "decided wait: stopping"

    clocks.stepped_s = step_s
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    look_on(works, ledger, clocks, for_s=BOUND_S - 5)

    assert store.job(1).state is State.FENCING
    assert journal(ledger)[-1] == "decided wait: stopping"
    look_on(works, ledger, clocks, for_s=5)
    assert store.job(1).state is State.QUEUED


def test_suspended_loop_restarts_its_timers(ledger: Ledger, store: JobStore, clocks: Clocks) -> None:
    works = executor(ledger, store, lingering(ledger, store))
    turn(works, ledger)

    clocks.steady_s += 10 * BOUND_S
    turn(works, ledger)
    assert store.job(1).state is State.FENCING
    look_on(works, ledger, clocks, for_s=BOUND_S - 5)
    assert store.job(1).state is State.FENCING
    look_on(works, ledger, clocks, for_s=5)
    assert store.job(1).state is State.QUEUED


def test_thread_before_the_next_tick_sees_restarted_timers(ledger: Ledger, store: JobStore, clocks: Clocks) -> None:
    works = executor(ledger, store, lingering(ledger, store))
    turn(works, ledger)
    look_on(works, ledger, clocks, for_s=30)
    (episode,) = ledger.episodes.list_open()
    assert works.processor.facts.of_container(episode).settle_for_s == 30.0

    clocks.steady_s += PAUSE_MAX_S + 1
    found = works.processor.facts.of_container(episode)

    assert (found.free_for_s, found.settle_for_s, found.quiet_for_s) == (0.0, 0.0, 0.0)


def test_second_intent_has_its_own_timers(ledger: Ledger, store: JobStore, clocks: Clocks) -> None:
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world)
    episode = take_up(ledger)
    works.processor.performer.perform(episode, _begin(works, episode))
    world.boxes["w1"].hung = False
    look_on(works, ledger, clocks, for_s=60)
    (begun,) = ledger.episodes.list_open()
    assert works.processor.facts.of_container(begun).free_for_s >= 55.0

    world.boxes["w1"].hung = True
    ledger.intents.withdraw(begun.episode_id, Reason.UNCONFIRMED, "it is active", now=time.time())
    (episode,) = ledger.episodes.list_open()
    works.processor.performer.perform(episode, _begin(works, episode))
    (again,) = ledger.episodes.list_open()

    assert works.processor.facts.of_container(again).free_for_s == 0.0


def test_timers_of_a_held_episode_do_not_run(ledger: Ledger, store: JobStore, clocks: Clocks) -> None:
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world)
    episode = take_up(ledger)
    works.processor.performer.perform(episode, _begin(works, episode))
    held = executor(ledger, store, world, armed=False)

    look_on(held, ledger, clocks, for_s=LIMITS.restart_timeout_s + 10)

    (begun,) = ledger.episodes.list_open()
    assert held.processor.facts.of_container(begun).free_for_s < 10.0


def _begin(works: Executor, episode: Any) -> Any:
    return decide(works.processor.facts.of_container(episode))


def test_fence_is_renewed_until_its_settle_after_a_clock_step(ledger: Ledger, store: JobStore) -> None:
    works = executor(ledger, store, lingering(ledger, store))
    turn(works, ledger)
    later = store.now() + FENCE_S + 60

    class At:
        """The queue, with a clock that was set."""

        def __getattr__(self, name: str) -> Any:
            return getattr(queue, name)

        def now(self) -> float:
            return later

    queue = BuiltinQueue(store)
    assert store.sweeps.expired(now=later) == {(1, 1)}

    executor(ledger, At(), World()).housekeeping.renew_fences(ledger.episodes.list_open(HOST))

    assert store.sweeps.expired(now=later) == frozenset()


def test_repeated_failed_stop_keeps_the_journal_short(
    ledger: Ledger, store: JobStore, clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stop of a fenced worker fails for half an hour, and the worker locks the queue."""
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.0)
    world = stalled_job(ledger, store)
    box = world.boxes["w1"]
    box.unkillable = True
    patient = JobStore.open(store._engine.url.render_as_string(hide_password=False))
    works = executor(ledger, patient, world)

    def go_on(for_s: float) -> None:
        until_s = clocks.steady_s + for_s
        while clocks.steady_s < until_s:
            clocks.steady_s += 5.0
            turn(works, ledger)

    with closing(patient), closing(sqlite3.connect(str(store._engine.url.database), isolation_level=None)) as its_own:

        def stop(box: Box) -> None:
            if not box.unkillable:
                its_own.rollback()
            elif not its_own.in_transaction:
                its_own.execute("BEGIN IMMEDIATE")

        world.before_stop = stop
        go_on(300.0)
        before = journal(ledger)
        go_on(1500.0)
        since = journal(ledger)[len(before) :]
        box.unkillable = False
        go_on(PAUSE_S)

    assert "failed requeue" in before
    assert since == ["decided stop", "failed stop", "decided wait: stopping"] * 5
    lines = journal(ledger)
    assert lines.index("did stop") < lines.index("saw free: dead") < lines.index("did requeue")
    assert (lines.count("failed requeue"), history(ledger).outcome) == (1, "fixed"), lines
