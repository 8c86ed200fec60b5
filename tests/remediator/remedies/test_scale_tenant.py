"""The remedy `scale_tenant` as truth tables."""

from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.evidence import OnDemandFacts
from gpuwarden.job import Condition
from remediator.plan import Close, Facts, Outcome, Scale, Subject, Wait, WouldAct
from remediator.reasons import Doubt, Reason
from remediator.remedies import REMEDIES, guards
from remediator.remedies.guards import Act, Order, Orders, RecentActivity, SafetyLimits
from remediator.remedies.scale_tenant import CONFIRMABLE, RETRY_S, confirm, decide
from tests.remediator.builders import (
    HANDLE,
    HOST,
    MIB,
    NOW,
    container,
    idle_on_demand,
    on_demand,
    on_demand_facts,
    on_demand_gpu,
    stopped,
    wish,
)

pytestmark = pytest.mark.pure

ARMED = Orders(given=(Order(act=Act.ARM, at=NOW, who="a test", reason=""),))


def test_remedy_has_the_name_of_the_rules_and_is_about_tenants_on_demand() -> None:
    remedy = REMEDIES["scale_tenant"]

    assert (remedy.decide, remedy.conditions, remedy.subject) == (decide, CONFIRMABLE, Subject.ON_DEMAND)
    assert {Condition.DEMAND_UP, Condition.DEMAND_DOWN} == CONFIRMABLE


@pytest.mark.parametrize("on", [False, True], ids=["start", "stop"])
def test_tenant_is_scaled_by_fresh_evidence(on: bool) -> None:
    step = decide(on_demand_facts(on=on))

    assert isinstance(step, Scale)
    assert (step.on, step.container_kind, step.container_handle) == (not on, "docker", HANDLE)
    assert step.gpus == frozenset({"GPU-0"})


def test_message_has_the_figures() -> None:
    reserved = on_demand(cards=[on_demand_gpu(reserved_bytes=100 * MIB)])

    assert decide(on_demand_facts(on_demand=reserved)).message == (
        "it needs 3000 MiB, and has had room for 75 s of 60 s: 6000 MiB free on GPU-0, 0 MiB returning, 100 MiB for "
        "other tenants, the floor is 1536 MiB; it is off for 900 s of at least 600 s"
    )
    assert decide(on_demand_facts(on=True)).message == (
        "idle for 301 s of 300 s; memory has been short for 75 s of 60 s: 400 MiB free on GPU-0, 0 MiB returning, the "
        "floor is 1536 MiB; it is on for 900 s of at least 600 s"
    )


UNKNOWN_GPU = [on_demand_gpu(free_bytes=None)]

UNCONFIRMED: dict[str, tuple[OnDemandFacts, bool, Doubt]] = {
    "the exporter shows it on already": (on_demand(on=True), True, Doubt.OTHER_CONTAINER),
    "the exporter shows it off already": (on_demand(), False, Doubt.OTHER_CONTAINER),
    "its need is invalid": (on_demand(needed_bytes=None, invalid="bad"), True, Doubt.NO_BUDGET),
    "a person stopped it": (on_demand(state_s=599.9), True, Doubt.UNDER_BOUND),
    "a person started it": (idle_on_demand(state_s=599.9), False, Doubt.UNDER_BOUND),
    "free memory unknown": (on_demand(room_s=None, cards=UNKNOWN_GPU), True, Doubt.MEMORY_UNKNOWN),
    "no GPU": (on_demand(room_s=None, cards=[]), True, Doubt.MEMORY_UNKNOWN),
    "shortage unknown": (idle_on_demand(short_s=None, cards=UNKNOWN_GPU), False, Doubt.MEMORY_UNKNOWN),
    "room for a moment": (on_demand(room_s=59.9), True, Doubt.UNDER_BOUND),
    "short for a moment": (idle_on_demand(short_s=59.9), False, Doubt.UNDER_BOUND),
    "in use": (idle_on_demand(idle_s=299.9), False, Doubt.UNDER_BOUND),
    "use unknown": (idle_on_demand(idle_s=None), False, Doubt.GPU_UNKNOWN),
}


@pytest.mark.parametrize(("seen", "on", "doubt"), UNCONFIRMED.values(), ids=UNCONFIRMED.keys())
def test_doubtful_evidence_scales_nothing(seen: OnDemandFacts, on: bool, doubt: Doubt) -> None:
    assert confirm(seen, on=on).doubt is doubt


WAITS: dict[str, tuple[dict[str, Any], Reason]] = {
    "not in the Role": (
        {"forbidden": "no right", "container": None, "container_known": False},
        Reason.SCALE_FORBIDDEN,
    ),
    "the engine does not answer": ({"container": None, "container_known": False}, Reason.ENGINE_UNREACHABLE),
    "the exporter does not answer": ({"on_demand": None}, Reason.NO_EVIDENCE),
    "an old sample": ({"on_demand": on_demand(sample_age_s=60.0)}, Reason.STALE_EVIDENCE),
    "not confirmed": ({"on_demand": on_demand(room_s=0.0)}, Reason.UNCONFIRMED),
    "its GPU is in quarantine": ({"quarantined": "GPU-0 is in quarantine (lost)"}, Reason.GPU_QUARANTINED),
    "a person paused it": ({"container": stopped(paused=True)}, Reason.CONTAINER_PAUSED),
    "the last try failed": ({"stopped_s_ago": RETRY_S - 1}, Reason.SCALE_FAILED),
}


@pytest.mark.parametrize(("changed", "reason"), WAITS.values(), ids=WAITS.keys())
def test_episode_waits_while_its_alert_fires_and_then_closes(changed: dict[str, Any], reason: Reason) -> None:
    firing, ended = decide(on_demand_facts(**changed)), decide(on_demand_facts(firing=False, **changed))

    assert isinstance(firing, Wait)
    assert firing.reason is reason
    assert isinstance(ended, Close)
    assert (ended.outcome, ended.reason) == (Outcome.UNCONFIRMED, reason)


CLOSES: dict[str, tuple[Facts, Outcome, Reason]] = {
    "it was started": (on_demand_facts(container=container(), scaled_on=True), Outcome.FIXED, Reason.DONE),
    "it was stopped": (on_demand_facts(on=True, container=stopped(), scaled_on=False), Outcome.FIXED, Reason.DONE),
    "someone else started it": (on_demand_facts(container=container()), Outcome.SUPERSEDED, Reason.SCALED_ELSEWHERE),
    "it is gone": (on_demand_facts(container=None), Outcome.SUPERSEDED, Reason.CONTAINER_GONE),
    "it is not managed": (on_demand_facts(container=stopped(managed=False)), Outcome.REFUSED, Reason.NOT_MANAGED),
    "its engine would remove it": (
        on_demand_facts(on=True, container=container(vanishes=True)),
        Outcome.REFUSED,
        Reason.NOT_RESTARTABLE,
    ),
}


@pytest.mark.parametrize(("facts", "outcome", "reason"), CLOSES.values(), ids=CLOSES.keys())
def test_episode_closes(facts: Facts, outcome: Outcome, reason: Reason) -> None:
    step = decide(facts)

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (outcome, reason)


def test_a_later_try_and_the_other_direction_are_possible() -> None:
    assert isinstance(decide(on_demand_facts(stopped_s_ago=RETRY_S)), Scale)
    assert isinstance(decide(on_demand_facts(scaled_on=True)), Scale)
    assert isinstance(decide(on_demand_facts(on=True, quarantined="GPU-0 is in quarantine (lost)")), Scale)


def test_dry_run_is_recorded_once() -> None:
    first = decide(on_demand_facts(armed=False))
    again = decide(on_demand_facts(armed=False, dry_run_recorded=True))

    assert isinstance(first, WouldAct)
    assert first.message.startswith("would start c1: it needs 3000 MiB")
    assert isinstance(again, Wait)
    assert again.reason is Reason.DRY_RUN


def proposed(on: bool = True) -> guards.ProposedAction:
    facts = on_demand_facts(on=not on)
    return guards.proposed_action(facts.episode, decide(facts))


def test_proposed_action_names_the_gpus_of_a_start_only() -> None:
    assert (proposed().key, proposed().gpus) == (f"start {HANDLE}", frozenset({"GPU-0"}))
    assert (proposed(on=False).key, proposed(on=False).gpus) == (f"stop {HANDLE}", frozenset())


HELD: dict[str, tuple[Orders, dict[str, Any], Reason | None]] = {
    "armed": (ARMED, {}, None),
    "not armed": (Orders(), {}, Reason.DRY_RUN),
    "paused": (
        Orders(given=(*ARMED.given, Order(act=Act.PAUSE, at=NOW, who="a test", reason="", order_id=1))),
        {},
        Reason.PAUSED,
    ),
    "approval": (Orders(given=(Order(act=Act.ASK, at=NOW, who="a test", reason=""),)), {}, Reason.APPROVAL),
    "another tenant was started": (ARMED, {"started_s_ago": 119.0}, Reason.GPU_COOLDOWN),
    "another tenant was started before": (ARMED, {"started_s_ago": 120.0}, None),
    "a container of the GPU restarts": (
        ARMED,
        {"recent": RecentActivity(gpu_restarted_s_ago=0.0)},
        Reason.GPU_COOLDOWN,
    ),
    "a container of the GPU restarted": (ARMED, {"recent": RecentActivity(gpu_restarted_s_ago=120.0)}, None),
}


@pytest.mark.parametrize(("orders", "changed", "reason"), HELD.values(), ids=HELD.keys())
def test_guards_hold_a_scaling(orders: Orders, changed: dict[str, Any], reason: Reason | None) -> None:
    action = replace(wish(remedy="scale_tenant"), host=HOST)
    given = {"recent": RecentActivity(), "started_s_ago": None, **changed}

    held = guards.may_scale(
        action, orders, given["recent"], SafetyLimits(), started_s_ago=given["started_s_ago"], now=NOW
    )

    assert (None if held is None else held.reason) is reason
