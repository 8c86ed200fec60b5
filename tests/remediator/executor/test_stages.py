"""The stages that a decided step passes."""

import time
from typing import cast

import pytest

from gpuwarden.procfs import ProcessId
from remediator import plan
from remediator.actuators import Actuator, ActuatorError, NotAllowedError
from remediator.clients.alertmanager import SilenceResult, Silences
from remediator.executor.clock import SuspendAwareClock
from remediator.executor.limits import RemedyLimits
from remediator.executor.stages import CheckSilences, CheckStop
from remediator.executor.timers import Timers
from remediator.plan import Facts, Stage
from remediator.reasons import Reason
from remediator.remedies.guards import Silence
from tests.remediator.builders import (
    FENCED_JOB,
    KEY,
    LIMITS,
    facts,
    free,
    held_job,
    host_facts,
    run_facts,
    server_facts,
    settle,
    tenant_facts,
)
from tests.remediator.executor.builders import BOUNDLESS


class Silenced:
    """An Alertmanager that silences every alert."""

    def of(self, _fingerprints: frozenset[str], *, host: str) -> SilenceResult:
        return SilenceResult(silences=[Silence(silence_id="s1", by="ann", comment=f"{host} moves")])


SUBJECTS = {
    "worker": facts(),
    "server": server_facts(),
    "container over its VRAM budget": tenant_facts(),
    "lost host": host_facts(held_job()),
    "run": run_facts(None),
}


@pytest.mark.parametrize("found", SUBJECTS.values(), ids=SUBJECTS.keys())
def test_silence_replaces_the_request_for_approval(found: Facts) -> None:
    limits = RemedyLimits(None, limits=LIMITS, safety_limits=BOUNDLESS)
    asks = plan.Wait(reason=Reason.APPROVAL, message="an operator must approve", asks=KEY)

    step = CheckSilences(cast("Silences", Silenced()), limits=limits)(found, asks)

    assert isinstance(step, plan.Wait)
    assert (step.reason, step.asks) == (Reason.SILENCED, None)
    assert CheckSilences(None, limits=limits)(found, asks) is asks


class Pods:
    """An actuator of pods that allows no eviction, or all."""

    def __init__(self, answer: Exception | None) -> None:
        self.answer = answer
        self.asked = 0

    def check_stop(self, handle: str) -> None:
        assert handle
        self.asked += 1
        if self.answer is not None:
            raise self.answer

    def list_others(self, handle: str) -> frozenset[str] | None:
        raise NotImplementedError

    def list_pids(self, handle: str) -> frozenset[int]:
        raise NotImplementedError

    def find_successor(self, handle: str, *, others: object) -> None:
        raise NotImplementedError


@pytest.mark.behaviour("C3")
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(NotAllowedError(Reason.DISRUPTION_BUDGET, "web needs 2"), Reason.DISRUPTION_BUDGET, id="budget"),
        pytest.param(NotAllowedError(Reason.EVICTION_FORBIDDEN, "web needs 2"), Reason.EVICTION_FORBIDDEN, id="RBAC"),
        pytest.param(ActuatorError("web needs 2"), Reason.ENGINE_UNREACHABLE, id="unknown"),
    ],
)
def test_stop_that_the_api_does_not_allow_waits_and_is_asked_again_later(answer: Exception, reason: Reason) -> None:
    pods, timers = Pods(answer), Timers()
    stage = CheckStop({"kubernetes": cast("Actuator", pods)}, timers, SuspendAwareClock())
    planned, stop = server_facts(free(Stage.PLANNED, kind="kubernetes")), plan.Stop(message="over its budget")

    held = [stage(planned, stop) for _ in range(3)]

    assert held == [plan.Wait(reason=reason, message="")] * 3
    assert "web needs 2" in held[-1].message
    assert pods.asked == 1
    timers.of(planned.episode.episode_id).stop_held = cast("plan.Wait", held[0]), time.monotonic()
    pods.answer = None
    assert stage(planned, stop) is stop


LISTENER = ProcessId(4001, 1)
FIRST_STEPS = [plan.Fence(message=""), plan.Warn(signal="SIGUSR1", listener=LISTENER, message="")]


@pytest.mark.behaviour("C3")
@pytest.mark.parametrize("step", FIRST_STEPS, ids=["fence", "warning"])
def test_nothing_is_done_to_a_worker_before_the_eviction_of_its_pod_is_allowed(step: plan.Step) -> None:
    pods = Pods(NotAllowedError(Reason.DISRUPTION_BUDGET, "web needs 2"))
    stage = CheckStop({"kubernetes": cast("Actuator", pods)}, Timers(), SuspendAwareClock())
    planned, begun = free(Stage.PLANNED, kind="kubernetes"), settle(Stage.PLANNED)

    assert stage(facts(planned, begun), step) == plan.Wait(reason=Reason.DISRUPTION_BUDGET, message="")
    # A job that is already fenced cannot wait, and a pod that has ended needs no eviction.
    assert stage(facts(planned, begun, job=FENCED_JOB), step) is step
    assert stage(facts(planned, begun, container=None), step) is step
    assert pods.asked == 1


def test_stop_of_a_container_and_other_steps_of_a_pod_are_not_asked_about() -> None:
    pods = Pods(ActuatorError("no answer"))
    actuators = {"kubernetes": cast("Actuator", pods), "docker": cast("Actuator", object())}
    stage = CheckStop(actuators, Timers(), SuspendAwareClock())
    stop, start = plan.Stop(message=""), plan.Start(message="")

    assert stage(server_facts(free(Stage.PLANNED)), stop) is stop
    assert stage(server_facts(free(Stage.DEAD, kind="kubernetes")), start) is start
    assert stage(server_facts(), start) is start
    assert pods.asked == 0
