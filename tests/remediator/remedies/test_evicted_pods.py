"""An evicted pod counts as restarted once its controller has another one ready."""

from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.kube import pods
from remediator.plan import Advance, Close, ContainerState, Facts, Kind, Outcome, Stage, Step, Wait, WouldAct
from remediator.reasons import Reason
from remediator.remedies import restart_container, restart_worker
from tests.remediator.builders import container, facts, free, server_facts, settle

pytestmark = pytest.mark.pure


def successor(**changed: Any) -> ContainerState:
    """The next pod of the controller; by default it is ready."""
    default = container(kind=pods.KIND, name="ml/web-2", incarnation="u2", pids=frozenset(), cgroup=None)
    return replace(default, **changed)


def gone(stage: Stage = Stage.DEAD, *, alone: bool = False, **changed: Any) -> Facts:
    """Facts after the eviction of a pod that is gone."""
    intent = free(stage, kind=pods.KIND, tries=1, others=None if alone else ["u0"])
    return server_facts(intent, container=None, **changed)


LATE: dict[str, Any] = {"free_for_s": 600.0}
DONE = Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.DONE, message="")
FAILED = Advance(kind=Kind.FREE, stage=Stage.ABANDONED, reason=Reason.START_FAILED, message="")
STARTING = Wait(reason=Reason.STARTING, message="")
AFTER: dict[str, tuple[Facts, Step]] = {
    "ready": (gone(successor=successor()), DONE),
    "ready for too short": (
        gone(successor=successor(), runs_for_s=1.9), Wait(reason=Reason.STABILIZING, message=""),
    ),
    "not ready": (gone(successor=successor(running=False, unstartable="ErrImagePull")), STARTING),
    "not created": (gone(), STARTING),
    "not created for too long": (gone(**LATE), FAILED),
    "not ready for too long": (gone(successor=successor(running=False), **LATE), FAILED),
    "the API did not answer all the time": (gone(**LATE, quiet_for_s=1.0), STARTING),
    "nothing replaces it": (
        gone(alone=True), Advance(kind=Kind.FREE, stage=Stage.DONE, reason=Reason.CONTAINER_GONE, message=""),
    ),
}  # fmt: skip


@pytest.mark.behaviour("C3")
@pytest.mark.parametrize(("found", "step"), AFTER.values(), ids=AFTER.keys())
def test_step_after_an_eviction(found: Facts, step: Step) -> None:
    assert restart_container.decide(found) == step


def test_wait_says_why_the_next_pod_is_not_ready() -> None:
    step = restart_container.decide(gone(successor=successor(running=False, unstartable="Unschedulable: no seat")))

    assert "ml/web-2" in step.message
    assert "Unschedulable: no seat" in step.message


@pytest.mark.parametrize("listed", [True, False])
def test_episode_of_an_evicted_worker_closes_with_the_next_pod(listed: bool) -> None:
    intent, after = free(Stage.DONE, kind=pods.KIND, tries=1, others=[]), successor() if listed else None
    step = restart_worker.decide(
        facts(intent, settle(Stage.DONE), container=None, successor=after, evidence=None, unknown="404")
    )

    assert isinstance(step, Close)
    assert step.outcome is Outcome.FIXED
    assert step.message.startswith("it was restarted")


def test_abandoned_eviction_closes_once_a_pod_is_ready() -> None:
    waits = restart_container.decide(gone(Stage.ABANDONED, successor=successor(running=False, starting=True)))
    closes = restart_container.decide(gone(Stage.ABANDONED, successor=successor()))

    assert waits == Wait(reason=Reason.GIVEN_UP, message="")
    assert closes == Close(outcome=Outcome.PARTLY, reason=Reason.STARTED_ELSEWHERE, message="")


@pytest.mark.behaviour("C5")
@pytest.mark.parametrize("managed", [True, False])
def test_dry_run_says_that_it_would_evict(managed: bool) -> None:
    pod = container(kind=pods.KIND, name="ml/web-1/c", managed=managed, refusal="" if managed else "no controller")

    step = restart_container.decide(server_facts(armed=False, container=pod))
    worker = restart_worker.decide(facts(armed=False, container=pod))

    assert isinstance(step, WouldAct if managed else Close)
    for each in (step, worker):
        assert ("evict the pod of ml/web-1/c" if managed else "not managed: no controller") in each.message


def test_refusal_is_read_again_before_the_stop() -> None:
    pod = container(kind=pods.KIND, managed=False, refusal="its label is not true")

    step = restart_container.decide(server_facts(free(Stage.PLANNED), container=pod))

    assert isinstance(step, Wait)
    assert "its label is not true" in step.message
