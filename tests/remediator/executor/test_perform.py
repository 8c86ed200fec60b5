"""Actions that fail, repeat or race: each takes effect once."""

import itertools
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.db.errors import DatabaseError
from gpuwarden.job import JobClass, State
from gpuwarden.queue import JobStore
from remediator import plan
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.ledger.ledger import Ledger
from remediator.plan import Kind, Stage, Start
from remediator.reasons import Reason
from tests.remediator.builders import alert
from tests.remediator.executor.builders import (
    LIMITS,
    PACE,
    Crash,
    Crashing,
    assert_fixed_once,
    executor,
    history,
    journal,
    stalled_job,
    take_up,
    to_the_end,
    turn,
)
from tests.waiting import eventually


class Losing:
    """A ledger whose database fails right before it saves one advance."""

    def __init__(self, ledger: Ledger, *, step: str) -> None:
        self._ledger = ledger
        self._step = step
        self.lost = 0
        self.intents = self

    def __getattr__(self, name: str) -> Any:
        intents = self._ledger.intents
        return getattr(intents if hasattr(intents, name) else self._ledger, name)

    def advance(self, *arguments: Any, **named: Any) -> bool:
        if named["step"] == self._step and not self.lost:
            self.lost += 1
            raise DatabaseError("the server closed the connection unexpectedly")
        return self._ledger.intents.advance(*arguments, **named)


@pytest.mark.parametrize("lost", ["fence", "stop", "requeue", "fail", "quarantine", "start"])
def test_action_whose_record_was_lost_is_repeated_without_effect(ledger: Ledger, store: JobStore, lost: str) -> None:
    world = stalled_job(ledger, store, job_class=JobClass.INGEST_LOAD if lost == "fail" else JobClass.GPU)
    world.boxes["w1"].unkillable = lost == "quarantine"
    losing = Losing(ledger, step=lost)
    bounds = replace(LIMITS, settle_timeout_s=0.05, restart_timeout_s=0.1) if lost == "quarantine" else LIMITS

    to_the_end(executor(losing, store, world, settings=replace(PACE, limits=bounds)), ledger)

    assert losing.lost == 1
    if lost == "quarantine":
        assert [each.gpu for each in store.gpu_quarantine.quarantined()] == ["GPU-0"]
        assert store.job(1).watchdog_retries == 1
    else:
        assert_fixed_once(ledger, store, world, failed=lost == "fail")


def test_container_that_ends_at_its_start_is_not_started_again(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    start = world.start

    def start_and_end(handle: str) -> None:
        start(handle)
        world.boxes["w1"].running = False

    world.start = start_and_end  # type: ignore[method-assign]
    works = executor(ledger, store, world)

    turn(works, ledger)
    turn(works, ledger)

    assert world.boxes["w1"].calls == ["stop", "start"]
    assert journal(ledger)[-2:] == ["saw free: abandoned", "decided wait: given_up"]
    assert history(ledger).outcome is None

    world.boxes["w1"].starts += 1  # by a person
    world.boxes["w1"].running = True
    turn(works, ledger)

    assert journal(ledger)[-1] == "decided close: partly_fixed"
    assert history(ledger).message == "restart abandoned, settle done; the target runs again"


@pytest.mark.parametrize(("lasts", "result"), [(False, (None, "given_up")), (True, ("fixed", None))])
def test_start_counts_only_after_a_later_look(
    ledger: Ledger, store: JobStore, *, lasts: bool, result: tuple[str | None, str | None]
) -> None:
    world = stalled_job(ledger, store)
    seen_s = 0.5
    works = executor(ledger, store, world, settings=replace(PACE, limits=replace(LIMITS, start_seen_s=seen_s)))

    started_s = time.monotonic()
    turn(works, ledger)
    assert journal(ledger)[-2:] == ["did start", "decided wait: stabilizing"]
    world.boxes["w1"].running = lasts

    def is_over() -> bool:
        turn(works, ledger)
        return all(each.reason == "given_up" for each in ledger.reports.list_held())

    eventually(is_over, "the restart is done or given up", within_s=10)

    assert (history(ledger).outcome, history(ledger).wait_reason) == result
    assert world.boxes["w1"].calls == ["stop", "start"]
    assert not lasts or time.monotonic() - started_s >= seen_s


def test_incarnation_that_ends_before_the_stop_is_not_stopped(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    box, look, looks = world.boxes["w1"], world.look, itertools.count()

    def look_and_restart(handle: str, *, cgroup: str | None = None) -> Any:
        if next(looks) == 3:  # it is restarted right before the stop
            box.starts, box.hung = box.starts + 1, False
        return look(handle, cgroup=cgroup)

    world.look = look_and_restart  # type: ignore[method-assign]

    to_the_end(executor(ledger, store, world), ledger)

    assert box.calls == []
    assert "decided stop" not in journal(ledger)
    assert history(ledger).outcome == "fixed"
    assert store.job(1).watchdog_retries == 1


def test_job_that_completes_before_the_fence_stays_completed(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)

    class Finishing(BuiltinQueue):
        def fence(self, job_id: int, **how: Any) -> bool:
            assert store.claims.complete(job_id, attempt=1, incarnation="i1", now=time.time())
            world.boxes["w1"].hung = False
            world.boxes["w1"].attempt = None
            world.boxes["w1"].job_id = None
            return super().fence(job_id, **how)

    to_the_end(executor(ledger, Finishing(store), world), ledger)

    assert store.job(1).state is State.COMPLETED
    assert "did fence" not in journal(ledger)
    assert world.boxes["w1"].calls == []
    assert history(ledger).outcome == "superseded"


def test_second_alert_about_the_same_incarnation_is_superseded(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    to_the_end(executor(ledger, store, world), ledger)
    box = world.boxes["w1"]
    box.starts, box.hung = 0, True  # the same incarnation again
    ledger.inbox.accept([alert("second", job_id="1")], [], now=time.time())

    to_the_end(executor(ledger, store, world), ledger)

    assert history(ledger, 2).outcome == "superseded"
    assert box.calls == ["stop", "start"]


def test_failure_to_retire_a_worker_is_ignored(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)

    class Sulking(BuiltinQueue):
        def retire_worker(self, **_: Any) -> None:
            raise DatabaseError("locked")

    to_the_end(executor(ledger, Sulking(store), world), ledger)

    assert history(ledger).outcome == "fixed"


def test_same_decision_twice_starts_the_container_once(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world)
    for after in itertools.count(1):
        with suppress(Crash):
            turn(executor(Crashing(ledger, after=after), store, world), ledger)
        (held,) = ledger.episodes.list_open()
        if held.free and held.free.stage is Stage.DEAD:
            break

    works.processor.performer.perform(held, Start(message="first"))
    works.processor.performer.perform(held, Start(message="second, from the same facts"))

    assert world.boxes["w1"].calls.count("start") == 1


def test_step_that_does_not_fit_its_episode_is_an_assertion_error(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world)
    episode = take_up(ledger)

    for step in (
        plan.Fence(message="no settle"),
        plan.Stop(message="no free"),
        plan.Quarantine(reason=Reason.GPU_LOST, message="no free"),
        plan.Wait(reason=Reason.DONE, message="b"),
    ):
        with pytest.raises(AssertionError):
            works.processor.performer.perform(episode, step)
    works.processor.performer.perform(
        episode, plan.Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.DONE, message="no free either")
    )

    assert journal(ledger) == ["saw alert: firing"]
    assert world.boxes["w1"].calls == []
