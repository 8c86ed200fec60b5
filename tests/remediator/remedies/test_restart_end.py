"""How a restart ends: closed, or given up until its target runs. And which container is not stopped at all."""

from typing import Any

import pytest

from remediator.plan import (
    Close,
    Facts,
    Outcome,
    Stage,
    Step,
    Stop,
    Wait,
)
from remediator.reasons import Reason
from remediator.remedies.restart_worker import decide
from tests.remediator.builders import (
    FENCED_JOB,
    REBORN,
    container,
    episode,
    evidence,
    facts,
    free,
    settle,
    stopped,
)

pytestmark = pytest.mark.pure

COMING_UP = container(incarnation=REBORN, starting=True)
DIED = evidence(alive=False, container_incarnation=None)
SUCCESSOR = evidence(worker_incarnation="i2", container_incarnation=f"{'d' * 64}@1", job_id=None, attempt=None)
UNFIT = container(unstartable="its image is gone")

CLOSED: dict[str, tuple[Facts, Outcome]] = {
    "both done": (facts(free(Stage.DONE), settle(Stage.DONE)), Outcome.FIXED),
    "restarted without a job": (facts(free(Stage.DONE), None), Outcome.FIXED),
    "restarted, job settled by another program": (
        facts(free(Stage.DONE), settle(Stage.ABANDONED)),
        Outcome.FIXED,
    ),
    "abandoned without a job": (facts(free(Stage.ABANDONED), None), Outcome.PARTLY),
}


@pytest.mark.parametrize(("known", "outcome"), CLOSED.values(), ids=CLOSED)
def test_outcome_of_the_close(known: Facts, outcome: Outcome) -> None:
    step = decide(known)

    assert isinstance(step, Close)
    assert step.outcome is outcome


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        pytest.param({"container": container(incarnation=REBORN)}, "was restarted", id="it runs"),
        pytest.param({"container": None, "evidence": SUCCESSOR}, "was restarted", id="another runs in its place"),
        pytest.param(
            {"container": stopped(left_down=True), "evidence": DIED}, "stays down", id="an operator stopped it"
        ),
        pytest.param({"container": None, "evidence": DIED}, "stays down", id="an operator removed it"),
    ],
)
def test_close_says_whether_the_container_runs(seen: dict[str, Any], says: str) -> None:
    assert says in decide(facts(free(Stage.DONE), settle(Stage.DONE), **seen)).message


STOPPED = {"tries": 1, "abandoned": "start_failed"}

GIVEN_UP: dict[str, tuple[Facts, Step]] = {
    "down": (
        facts(free(Stage.ABANDONED, **STOPPED), None, container=stopped(), evidence=DIED),
        Wait(reason=Reason.GIVEN_UP, message=""),
    ),
    "down, by an executor of an earlier version": (
        facts(free(Stage.ABANDONED, tries=1), None, container=stopped(), evidence=DIED),
        Wait(reason=Reason.GIVEN_UP, message=""),
    ),
    "down, the alert ended": (
        facts(
            episode=episode(free(Stage.ABANDONED, **STOPPED), firing=False), container=stopped(), evidence=DIED
        ),
        Wait(reason=Reason.GIVEN_UP, message=""),
    ),
    "gone": (
        facts(free(Stage.ABANDONED, **STOPPED), settle(Stage.DONE), container=None, evidence=DIED),
        Wait(reason=Reason.GIVEN_UP, message=""),
    ),
    "its engine does not answer": (
        facts(free(Stage.ABANDONED, **STOPPED), None, container=None, container_known=False, evidence=None),
        Wait(reason=Reason.GIVEN_UP, message=""),
    ),
    "cannot be killed": (
        facts(free(Stage.ABANDONED, tries=9, abandoned="stop_failed"), settle(Stage.DONE)),
        Wait(reason=Reason.GIVEN_UP, message=""),
    ),
    "runs again for a moment": (
        facts(
            free(Stage.ABANDONED, **STOPPED), None, container=container(incarnation=REBORN), evidence=DIED,
            runs_for_s=1.9,
        ),
        Wait(reason=Reason.GIVEN_UP, message=""),
    ),
    "its engine starts it": (
        facts(free(Stage.ABANDONED, **STOPPED), None, container=COMING_UP, evidence=DIED, runs_for_s=9.0),
        Wait(reason=Reason.GIVEN_UP, message=""),
    ),
    "runs again": (
        facts(
            free(Stage.ABANDONED, **STOPPED), None, container=container(incarnation=REBORN), evidence=DIED,
            runs_for_s=2.0,
        ),
        Close(outcome=Outcome.PARTLY, reason=Reason.STARTED_ELSEWHERE, message=""),
    ),
    "another container runs in its place": (
        facts(free(Stage.ABANDONED, **STOPPED), settle(Stage.DONE), container=None, evidence=SUCCESSOR),
        Close(outcome=Outcome.PARTLY, reason=Reason.STARTED_ELSEWHERE, message=""),
    ),
    "works again after a failed stop": (
        facts(free(Stage.ABANDONED, tries=1, abandoned="unconfirmed"), None),
        Close(outcome=Outcome.PARTLY, reason=Reason.GIVEN_UP, message=""),
    ),
    "has another attempt after the fence": (
        facts(free(Stage.ABANDONED, abandoned="attempt_over"), settle(Stage.DONE)),
        Close(outcome=Outcome.PARTLY, reason=Reason.GIVEN_UP, message=""),
    ),
    "nothing was done": (
        facts(free(Stage.ABANDONED, abandoned="exit_unconfirmed"), settle(Stage.ABANDONED), container=stopped()),
        Close(outcome=Outcome.PARTLY, reason=Reason.GIVEN_UP, message=""),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "expected"), GIVEN_UP.values(), ids=GIVEN_UP)
def test_restart_that_was_given_up_waits_until_its_target_runs(known: Facts, expected: Step) -> None:
    assert decide(known) == expected


UNSTARTABLE: dict[str, tuple[Facts, Step | type[Step]]] = {
    "nothing planned": (facts(container=UNFIT), Wait(reason=Reason.UNSTARTABLE, message="")),
    "planned": (
        facts(free(Stage.PLANNED), settle(Stage.PLANNED), container=UNFIT),
        Wait(reason=Reason.UNCONFIRMED, message=""),
    ),
    "planned without a job": (
        facts(free(Stage.PLANNED), None, container=UNFIT),
        Wait(reason=Reason.UNCONFIRMED, message=""),
    ),
    "fenced: its attempt is over": (
        facts(free(Stage.PLANNED), settle(Stage.FENCED), job=FENCED_JOB, container=UNFIT),
        Stop,
    ),
}


@pytest.mark.parametrize(("known", "expected"), UNSTARTABLE.values(), ids=UNSTARTABLE)
def test_container_that_could_not_start_again_is_not_stopped(known: Facts, expected: Step | type[Step]) -> None:
    step = decide(known)

    assert isinstance(step, expected) if isinstance(expected, type) else step == expected
    assert isinstance(step, Stop) or "its image is gone" in step.message
