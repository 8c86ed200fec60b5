"""The remedy `taint_node` as truth tables."""

from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.job import Condition
from remediator.plan import Close, Facts, Outcome, Step, Subject, Taint, Untaint, Wait, WouldAct
from remediator.reasons import Reason
from remediator.remedies import REMEDIES
from remediator.remedies.taint_node import CONFIRMABLE, decide
from tests.remediator.builders import LIMITS, facts, gpu_facts

pytestmark = pytest.mark.pure

SET: dict[str, Any] = {"begun": True, "set_here": True, "tainted": True}
WORKS: dict[str, Any] = {"fault": "", "doubt": "", "works_for_s": LIMITS.gpu_lost_s}


def test_remedy_has_the_name_of_the_rule_and_is_about_gpus() -> None:
    remedy = REMEDIES["taint_node"]

    assert (remedy.decide, remedy.conditions, remedy.subject) == (decide, CONFIRMABLE, Subject.GPU)
    assert {Condition.GPU_FAULTY} == CONFIRMABLE


WAITS: dict[str, tuple[Facts, Reason]] = {
    "the node is unknown": (replace(facts(), unknown="no answer"), Reason.NODE_UNKNOWN),
    "the GPU shows no fault": (gpu_facts(**WORKS), Reason.UNCONFIRMED),
    "the GPU is not listed, which is no fault": (gpu_facts(fault=""), Reason.UNCONFIRMED),
    "someone else set the taint": (gpu_facts(tainted=True), Reason.TAINTED_ALREADY),
    "a recorded dry run": (gpu_facts(armed=False, dry_run_recorded=True), Reason.DRY_RUN),
    "tainted, and still lost": (gpu_facts(**SET), Reason.NODE_TAINTED),
    "tainted, and the alert ended": (gpu_facts(**SET, firing=False), Reason.NODE_TAINTED),
    "tainted, and not listed": (gpu_facts(**SET, fault=""), Reason.NODE_TAINTED),
    "tainted, and it works for a moment": (
        gpu_facts(**SET, fault="", doubt="", works_for_s=LIMITS.gpu_lost_s - 1),
        Reason.NODE_TAINTED,
    ),
    "a person removed the taint": (gpu_facts(**{**SET, "tainted": False}), Reason.TAINT_REMOVED),
    "a person removed the taint, and a scrape failed": (
        gpu_facts(**{**SET, "tainted": False}, firing=False),
        Reason.TAINT_REMOVED,
    ),
    "it works, and the remedy was disarmed": (gpu_facts(**SET, **WORKS, armed=False), Reason.DRY_RUN),
}


@pytest.mark.parametrize(("given", "reason"), WAITS.values(), ids=WAITS)
def test_waits(given: Facts, reason: Reason) -> None:
    step = decide(given)

    assert isinstance(step, Wait)
    assert step.reason is reason


UNCONFIRMED = Close(outcome=Outcome.UNCONFIRMED, reason=Reason.UNCONFIRMED, message="")
FIXED = Close(outcome=Outcome.FIXED, reason=Reason.DONE, message="")
ACTS: dict[str, tuple[Facts, Step]] = {
    "lost": (gpu_facts(), Taint(message="")),
    "a fault that only a reset ends": (gpu_facts(fatal=True), Taint(message="", fatal=True)),
    "another GPU of the node is tainted for": (gpu_facts(tainted=True, others=("GPU-1",)), Taint(message="")),
    "the last try failed": (gpu_facts(begun=True), Taint(message="")),
    "the last try was not recorded": (gpu_facts(begun=True, tainted=True), Taint(message="")),
    "a dry run": (gpu_facts(armed=False), WouldAct(message="")),
    "the alert ended before": (gpu_facts(firing=False), UNCONFIRMED),
    "it works again": (gpu_facts(**SET, **WORKS), Untaint(message="")),
    "it works again, and another GPU does not": (gpu_facts(**SET, **WORKS, others=("GPU-1",)), FIXED),
    "a person removed the taint, and it works": (gpu_facts(**{**SET, "tainted": False}, **WORKS), FIXED),
    "a person removed the taint, and the alert and the fault ended": (
        gpu_facts(**{**SET, "tainted": False}, fault="", firing=False),
        FIXED,
    ),
    "the last try was not recorded, and it works": (gpu_facts(begun=True, tainted=True, **WORKS), Untaint(message="")),
    "the last try failed, and the alert ended": (gpu_facts(begun=True, firing=False), UNCONFIRMED),
}


@pytest.mark.parametrize(("given", "step"), ACTS.values(), ids=ACTS)
def test_acts(given: Facts, step: Step) -> None:
    assert decide(given) == step


def test_messages_name_the_gpu_and_its_fault() -> None:
    assert decide(gpu_facts()).message == "GPU-0: lost for 61 s"
    assert "GPU-1" in decide(gpu_facts(**SET, **WORKS, others=("GPU-1",))).message
    assert "gpuwarden seats untaint" in decide(gpu_facts(**SET)).message
