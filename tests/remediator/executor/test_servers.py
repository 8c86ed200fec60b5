"""Episodes of servers with a real ledger and a real queue. The host is a fake: see `world`."""

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


def test_hung_server_is_restarted_and_every_step_recorded(ledger: Ledger, store: JobStore) -> None:
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
        "decided close: fixed",
    ]
    assert world.boxes["w1"].calls == ["stop", "start"]


def test_server_is_restarted_only_by_its_own_remedy(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    works = executor(ledger, store, world, armed=False)
    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="test", reason="", remedy="restart_worker"))
    turn(works, ledger)
    assert journal(ledger)[1:] == ["would act", "decided wait: dry_run"]

    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="test", reason="", remedy="restart_container"))
    to_the_end(works, ledger)

    assert history(ledger).outcome == "fixed"


def test_pause_cooldown_and_breaker_hold_servers(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    guarded = replace(PACE, safety_limits=SafetyLimits(cooldown_s=3600.0, breaker_targets=1))
    works = executor(ledger, store, world, settings=guarded)
    ledger.orders.give(Order(act=Act.PAUSE, at=time.time(), who="test", reason="", until=time.time() + 3600))
    turn(works, ledger)
    assert "decided wait: paused" in journal(ledger)
    ledger.orders.give(Order(act=Act.RESUME, at=time.time(), who="test", reason=""))
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


def test_server_stopped_after_the_intent_is_left_down(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    works = executor(ledger, store, world)
    after_begin(ledger, lambda: setattr(world.boxes["w1"], "running", False))

    to_the_end(works, ledger)

    assert world.boxes["w1"].calls == []
    assert "decided withdraw" in journal(ledger)
    assert history(ledger).outcome == "superseded"


def test_server_that_answers_after_the_intent_is_not_stopped(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger)
    works = executor(ledger, store, world)
    world.before_stop = lambda _: pytest.fail("it was stopped")
    after_begin(ledger, lambda: setattr(world.boxes["w1"], "hung", False))

    turn(works, ledger)

    assert journal(ledger)[-1] == "decided wait: unconfirmed"


def test_unkillable_server_quarantines_only_its_gpus(ledger: Ledger, store: JobStore) -> None:
    world = silent_server(ledger, unkillable=True)
    hurried = replace(PACE, limits=replace(LIMITS, restart_timeout_s=0.0))

    to_the_end(executor(ledger, store, world, settings=hurried), ledger)

    assert [(each.gpu, each.worker) for each in store.gpu_quarantine.quarantined()] == [("GPU-0", None)]
    assert (history(ledger).outcome, history(ledger).wait_reason) == (None, "given_up")
