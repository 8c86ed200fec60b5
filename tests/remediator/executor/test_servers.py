"""Episodes of servers, with a real ledger and a real queue; the host is a fake: see `world`."""

import time
from dataclasses import replace

import pytest

from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from remediator.remedies.guards import Act, Order, SafetyLimits
from tests.remediator.builders import server_alert
from tests.remediator.executor.builders import (
    LIMITS,
    PACE,
    after_begin,
    executor,
    history,
    journal,
    silent_server,
    to_the_end,
    turn,
)
from tests.remediator.world import Box


def test_a_silent_server_is_freed_and_every_step_of_it_told_in_order(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)

    to_the_end(executor(ledger, store, world), ledger)

    assert journal(ledger) == [
        "saw alert: firing",
        "decided begin",
        "decided stop",
        "did stop",
        "saw free: dead",
        "decided start",
        "did start",
        "saw free: done",
        "decided close: mended",
    ]
    assert world.boxes["w1"].calls == ["stop", "start"]


def test_a_server_is_freed_by_its_own_remedy_alone(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    works = executor(ledger, store, world, armed=False)
    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="test", because="", remedy="restart_worker"))
    turn(works, ledger)
    assert journal(ledger)[1:] == ["would act", "decided wait: dry_run"]

    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="test", because="", remedy="restart_container"))
    to_the_end(works, ledger)

    assert history(ledger).outcome == "mended"


def test_a_pause_a_cool_down_and_the_brake_hold_servers_too(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    guarded = replace(PACE, safety_limits=SafetyLimits(cooldown_s=3600.0, breaker_targets=1))
    works = executor(ledger, store, world, settings=guarded)
    ledger.orders.give(Order(act=Act.PAUSE, at=time.time(), who="test", because="", until=time.time() + 3600))
    turn(works, ledger)
    assert "decided wait: paused" in journal(ledger)
    ledger.orders.give(Order(act=Act.RESUME, at=time.time(), who="test", because=""))
    to_the_end(works, ledger)
    box = world.boxes["w1"]
    box.hung = True
    world.boxes["w2"] = other = Box(worker="w2", job_id=None, attempt=None)

    again = server_alert("s2", container="w1", incarnation=box.incarnation)
    ledger.inbox.accept([again, server_alert("s3", container="w2", incarnation=other.incarnation)], [], now=time.time())
    turn(works, ledger)

    assert "decided wait: cooldown" in journal(ledger, 2)
    assert journal(ledger, 3)[-1] == "decided wait: circuit_breaker"
    assert (box.calls, other.calls) == (["stop", "start"], [])


def test_a_server_that_is_stopped_after_the_promise_is_left_down(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    works = executor(ledger, store, world)
    after_begin(ledger, lambda: setattr(world.boxes["w1"], "running", False))

    to_the_end(works, ledger)

    assert world.boxes["w1"].calls == []
    assert "decided withdraw" in journal(ledger)
    assert history(ledger).outcome == "superseded"


def test_a_server_that_answers_again_after_the_promise_is_not_stopped(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    works = executor(ledger, store, world)
    world.before_stop = lambda _: pytest.fail("it was stopped")
    after_begin(ledger, lambda: setattr(world.boxes["w1"], "hung", False))

    turn(works, ledger)

    assert journal(ledger)[-1] == "decided wait: unconfirmed"


def test_an_unkillable_server_quarantines_its_gpus_alone(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger, unkillable=True)
    hurried = replace(PACE, limits=replace(LIMITS, restart_timeout_s=0.0))

    to_the_end(executor(ledger, store, world, settings=hurried), ledger)

    assert [(each.gpu, each.worker) for each in store.gpu_quarantine.quarantined()] == [("GPU-0", None)]
    assert history(ledger).outcome == "partly_mended"
