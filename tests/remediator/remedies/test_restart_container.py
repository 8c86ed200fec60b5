"""The remedy `restart_container` as truth tables."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.evidence import ServerFacts
from gpuwarden.job import Condition
from remediator.plan import (
    Advance,
    Begin,
    Close,
    Facts,
    Kind,
    Outcome,
    Quarantine,
    Stage,
    Start,
    Step,
    Stop,
    Subject,
    Wait,
    Withdraw,
    WouldAct,
)
from remediator.reasons import Doubt, Finding, Reason
from remediator.remedies import REMEDIES, container_conditions
from remediator.remedies.container_conditions import confirm
from remediator.remedies.restart_container import CONFIRMABLE, decide
from tests.remediator.builders import (
    HANDLE,
    KEY,
    LIMITS,
    PIDS,
    REBORN,
    container,
    free,
    server,
    server_episode,
    server_facts,
    stopped,
)

pytestmark = pytest.mark.pure

PLANNED = free(Stage.PLANNED)
STOPPING = free(Stage.STOPPING, tries=1)
DEAD = free(Stage.DEAD, tries=1)
STARTING = free(Stage.STARTING, tries=1)
GONE_FROM_GPUS = server(container_id=None, container_incarnation=None, gpu_pids={"GPU-0": []})
UNFIT = container(unstartable="container 0123, whose network it shares, is gone")
UNLISTED = server(container_id=None, container_incarnation=None)
ANSWERS = server(probe_failing_s=0.0)
LATE = {"free_for_s": LIMITS.restart_timeout_s}


def test_remedy_has_the_name_of_the_rules_and_is_about_servers() -> None:
    remedy = REMEDIES["restart_container"]

    assert (remedy.decide, remedy.conditions, remedy.subject) == (decide, CONFIRMABLE, Subject.SERVER)


# --- a hung server

CONFIRM: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "no answer, GPUs idle, RAM idle": (
        {},
        None,
    ),
    "by its own health check": ({"probe": "docker"}, None),
    "exactly at the timeout": (
        {"probe_failing_s": 120.0, "gpu_idle_s": 120.0, "ram_idle_s": 120.0, "io_idle_s": 120.0},
        None,
    ),
    "just under the timeout": ({"probe_failing_s": 119.999}, Doubt.UNDER_BOUND),
    "longer timeout by its owner": ({"restart_after_s": 600.0}, Doubt.UNDER_BOUND),
    "it answers": ({"probe_failing_s": 0.0}, Doubt.UNDER_BOUND),
    "it never answered in this incarnation": ({"answered": False}, Doubt.NEVER_ANSWERED),
    "earlier answers unknown": ({"answered": None}, Doubt.NEVER_ANSWERED),
    "not probed recently": (
        {"probe_failing_s": None, "probe_unknown": "not probed recently"},
        Doubt.ANSWER_UNKNOWN,
    ),
    "probe unknown without a reason": ({"probe_failing_s": None}, Doubt.ANSWER_UNKNOWN),
    "its GPU is busy": ({"gpu_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "its GPU is unknown": ({"gpu_idle_s": None, "gpu_unknown": "GPU-1 is lost"}, Doubt.GPU_UNKNOWN),
    "its GPU is unknown without a reason": ({"gpu_idle_s": None}, Doubt.GPU_UNKNOWN),
    "its RAM is active": ({"ram_idle_s": 3.0}, Doubt.UNDER_BOUND),
    "its RAM is unknown": ({"ram_idle_s": None, "ram_unknown": "cgroup gone"}, Doubt.RAM_UNKNOWN),
    "its RAM is unknown without a reason": ({"ram_idle_s": None}, Doubt.RAM_UNKNOWN),
    "I/O active: it may load from a network": ({"io_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "I/O active within the timeout": ({"io_idle_s": 119.9}, Doubt.UNDER_BOUND),
    "its I/O is unknown": ({"io_idle_s": None, "work_unknown": "not read"}, Doubt.WORK_UNKNOWN),
    "it faults pages: it compiles or maps a model": ({"server_fault_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "its page faults are unknown": ({"server_fault_idle_s": None}, Doubt.WORK_UNKNOWN),
    "its I/O is unknown without a reason": ({"io_idle_s": None}, Doubt.WORK_UNKNOWN),
    "CPU active: it may spin in a driver": ({"container_cpu_idle_s": 0.0}, None),
    "not probed: invalid labels": (
        {"probe": None, "restart_after_s": None, "probe_unknown": "its host must be localhost"},
        Doubt.NOT_PROBED,
    ),
    "not probed: no labels": ({"probe": None}, Doubt.NOT_PROBED),
    "timeout unknown": ({"restart_after_s": None}, Doubt.NOT_PROBED),
    "a simulated GPU": ({"gpu_simulated": True}, None),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM.values(), ids=CONFIRM)
def test_hung_server_is_confirmed_or_doubted(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(server(**seen), Condition.SERVER).doubt is doubt


def test_condition_of_another_remedy_is_never_confirmed() -> None:
    assert confirm(server(), Condition.STALL).doubt is Doubt.NO_CONDITION


SEVERAL: dict[str, tuple[frozenset[Condition], frozenset[Condition], Condition | None]] = {
    "the first is met": (
        frozenset({Condition.SERVER, Condition.VRAM}),
        frozenset({Condition.SERVER}),
        Condition.SERVER,
    ),
    "only the second is met": (
        frozenset({Condition.SERVER, Condition.VRAM}),
        frozenset({Condition.VRAM}),
        Condition.VRAM,
    ),
    "neither is met": (frozenset({Condition.SERVER, Condition.VRAM}), frozenset(), None),
    "the second was not reported": (frozenset({Condition.SERVER}), frozenset({Condition.VRAM}), None),
}


@pytest.mark.parametrize(("reported", "met", "by"), SEVERAL.values(), ids=SEVERAL)
def test_any_reported_condition_confirms_and_becomes_that_of_the_episode(
    reported: frozenset[Condition], met: frozenset[Condition], by: Condition | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(condition: Condition) -> Callable[[ServerFacts], Finding]:
        return lambda seen: Finding.of(condition in met, seen.host)

    table = {condition: check(condition) for condition in (Condition.SERVER, Condition.VRAM)}
    monkeypatch.setattr(container_conditions, "CONDITIONS", table)
    own, owed = server_episode(conditions=reported), server_episode(free(Stage.PLANNED), conditions=reported)

    begun, stopped = decide(server_facts(episode=own)), decide(server_facts(episode=owed))

    assert (begun.condition if isinstance(begun, Begin) else None) is by
    assert isinstance(stopped, Stop if by else Wait)


def test_message_names_every_figure_or_why_it_is_unknown() -> None:
    figures = {"probe_failing_s": 131.0, "gpu_idle_s": 132.0, "ram_idle_s": 133.0, "io_idle_s": 134.0}
    message = confirm(server(**figures), Condition.SERVER).message

    assert [each for each in ("131.0", "132.0", "133.0", "134.0", "120.0", "http") if each not in message] == []
    assert "cgroup gone" in confirm(server(ram_idle_s=None, ram_unknown="cgroup gone"), Condition.SERVER).message


# --- before the intent

WAITS: dict[str, tuple[Facts, str]] = {
    "the exporter does not answer": (server_facts(server=None, unknown="no answer"), Reason.NO_EVIDENCE),
    "the sample is stale": (server_facts(server=server(sample_age_s=5.1)), Reason.STALE_EVIDENCE),
    "it is not confirmed": (server_facts(server=server(gpu_idle_s=0.0)), Reason.UNCONFIRMED),
    "its workers are unknown": (server_facts(server=server(workers=None)), Reason.UNCONFIRMED),
    "the engine does not answer": (server_facts(container=None, container_known=False), Reason.NO_CONTAINER),
    "it is paused": (server_facts(container=container(paused=True)), Reason.CONTAINER_PAUSED),
    "it could not start again": (server_facts(container=UNFIT), Reason.UNSTARTABLE),
    "the exporter does not list it": (server_facts(server=UNLISTED), Reason.NO_CONTAINER),
    "the exporter does not list it, and the engine does not answer": (
        server_facts(server=UNLISTED, container=None, container_known=False, unknown="no daemon"),
        Reason.NO_CONTAINER,
    ),
    "the exporter does not list it, no engine": (
        server_facts(server=UNLISTED, container=None, container_known=False),
        Reason.NO_CONTAINER,
    ),
    "a recorded dry run": (
        server_facts(armed=False, episode=server_episode(dry_run_recorded=True)),
        Reason.DRY_RUN,
    ),
}


@pytest.mark.parametrize(("given", "reason"), WAITS.values(), ids=WAITS)
def test_waits_while_the_alert_fires(given: Facts, reason: str) -> None:
    step = decide(given)

    assert isinstance(step, Wait)
    assert step.reason == reason


@pytest.mark.parametrize("name", [name for name in WAITS if "dry run" not in name])
def test_closes_when_the_alert_is_resolved(name: str) -> None:
    given, reason = WAITS[name]

    step = decide(replace(given, episode=replace(given.episode, firing=False)))

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (Outcome.UNCONFIRMED, reason)


CLOSES: dict[str, tuple[Facts, Outcome, Reason]] = {
    "it did not opt in": (
        server_facts(container=container(managed=False)),
        Outcome.REFUSED,
        Reason.NOT_MANAGED,
    ),
    "its engine removes it at its end": (
        server_facts(container=container(vanishes=True)),
        Outcome.REFUSED,
        Reason.NOT_RESTARTABLE,
    ),
    "it has a worker": (server_facts(server=server(workers=1)), Outcome.REFUSED, Reason.HAS_WORKERS),
    "Docker's policy restarted it": (
        server_facts(
            server=server(container_incarnation=REBORN, probe_failing_s=0.0), container=container(incarnation=REBORN)
        ),
        Outcome.SUPERSEDED,
        Reason.REPLACED,
    ),
    "autoheal restarted it after the last sample": (
        server_facts(container=container(incarnation=REBORN)),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "an operator stopped it": (
        server_facts(server=UNLISTED, container=stopped()),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "an operator removed it, and it is not listed": (
        server_facts(server=UNLISTED, container=None),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "it was restarted, and is not listed yet": (
        server_facts(server=UNLISTED, container=container(incarnation=REBORN)),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "an operator stopped it after the last sample": (
        server_facts(container=stopped()),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "it exited, and Docker is about to restart it": (
        server_facts(container=stopped(cgroup=None)),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "an operator removed it": (server_facts(container=None), Outcome.SUPERSEDED, Reason.ENDED_ELSEWHERE),
    "another container has its name": (
        server_facts(server=server(container_id="d" * 64, container_incarnation="d@1")),
        Outcome.SUPERSEDED,
        Reason.REPLACED,
    ),
}


@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize(("given", "outcome", "reason"), CLOSES.values(), ids=CLOSES)
def test_closes_before_the_intent(given: Facts, outcome: Outcome, reason: Reason, armed: bool) -> None:
    step = decide(replace(given, armed=armed))

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (outcome, reason)


def test_confirmed_server_is_begun_without_a_settle() -> None:
    step = decide(server_facts())

    assert isinstance(step, Begin)
    assert (step.condition, step.free_key, step.settle_key) == (Condition.SERVER, KEY, None)
    assert (step.container_kind, step.container_handle, step.container_name) == ("docker", HANDLE, "c1")
    assert (step.gpus, step.pids, step.cgroup) == (("GPU-0",), PIDS, "/sys/fs/cgroup/docker/c1")


def test_dry_run_names_the_action() -> None:
    step = decide(server_facts(armed=False))

    assert isinstance(step, WouldAct)
    assert confirm(server(), Condition.SERVER).message in step.message


# --- after the intent

STEPS: dict[str, tuple[Facts, type[Step]]] = {
    "planned, no answer": (server_facts(PLANNED), Stop),
    "planned, disarmed": (server_facts(PLANNED, armed=False), Wait),
    "planned, answers": (server_facts(PLANNED, server=server(probe_failing_s=0.0)), Wait),
    "planned, answers past the timeout": (
        server_facts(PLANNED, server=server(probe_failing_s=0.0), **LATE),
        Withdraw,
    ),
    "planned, no exporter": (server_facts(PLANNED, server=None), Wait),
    "planned, stale sample": (server_facts(PLANNED, server=server(sample_age_s=5.1)), Wait),
    "planned, another incarnation in the sample": (
        server_facts(PLANNED, server=server(container_incarnation=REBORN)),
        Wait,
    ),
    "planned, has a worker": (server_facts(PLANNED, server=server(workers=1)), Wait),
    "planned, workers unknown": (server_facts(PLANNED, server=server(workers=None)), Wait),
    "planned, container paused": (server_facts(PLANNED, container=container(paused=True)), Wait),
    "planned, could not start again": (server_facts(PLANNED, container=UNFIT), Wait),
    "planned, container removed": (server_facts(PLANNED, container=None), Withdraw),
    "planned, no engine": (
        server_facts(PLANNED, container=None, container_known=False),
        Wait,
    ),
    "planned, stopped by an operator": (server_facts(PLANNED, container=stopped()), Withdraw),
    "planned, restarted by Docker or autoheal": (
        server_facts(PLANNED, container=container(incarnation=REBORN)),
        Withdraw,
    ),
    "stopping, runs": (server_facts(STOPPING), Stop),
    "stopping, runs and answers": (server_facts(STOPPING, server=ANSWERS), Wait),
    "stopping, runs and answers past the timeout": (
        server_facts(STOPPING, server=ANSWERS, **LATE),
        Advance,
    ),
    "stopping, runs, no exporter": (server_facts(STOPPING, server=None), Wait),
    "stopping, runs, has a worker": (server_facts(STOPPING, server=server(workers=1)), Wait),
    "stopping, down, processes in its cgroup": (
        server_facts(STOPPING, container=stopped(pids=PIDS), server=None),
        Stop,
    ),
    "stopping, restarted by autoheal": (
        server_facts(
            STOPPING,
            container=container(incarnation=REBORN, pids=frozenset({5001})),
            server=server(container_incarnation=REBORN, gpu_pids={"GPU-0": [5001]}),
        ),
        Advance,
    ),
    "planned, not managed": (server_facts(free(Stage.PLANNED), container=container(managed=False)), Wait),
    "stopping, not managed": (server_facts(STOPPING, container=container(managed=False)), Wait),
    "stopping, down, not managed, processes in its cgroup": (
        server_facts(STOPPING, container=stopped(pids=PIDS, managed=False)),
        Wait,
    ),
    "dead, not managed": (server_facts(DEAD, container=stopped(managed=False)), Advance),
    "stopping, down, off its GPUs": (server_facts(STOPPING, container=stopped(), server=GONE_FROM_GPUS), Advance),
    "stopping, down, listed by the driver": (server_facts(STOPPING, container=stopped()), Wait),
    "stopping, unkillable": (
        server_facts(free(Stage.STOPPING, tries=9), **LATE),
        Quarantine,
    ),
    "dead": (server_facts(DEAD, container=stopped(), server=GONE_FROM_GPUS), Start),
    "dead, started by another program": (server_facts(DEAD, container=container(incarnation=REBORN)), Advance),
    "dead, removed": (server_facts(DEAD, container=None), Wait),
    "dead, removed past the timeout": (server_facts(DEAD, container=None, **LATE), Advance),
    "dead, recreated": (server_facts(DEAD, container=None, server=server(container_incarnation=REBORN)), Advance),
    "starting, runs": (server_facts(STARTING, container=container(incarnation=REBORN)), Advance),
    "starting, stopped by an operator": (
        server_facts(STARTING, container=stopped(incarnation=REBORN)),
        Advance,
    ),
    "starting, does not run yet": (server_facts(STARTING, container=stopped()), Start),
    "done": (server_facts(free(Stage.DONE)), Close),
    "abandoned": (server_facts(free(Stage.ABANDONED)), Close),
}


@pytest.mark.parametrize(("given", "step"), STEPS.values(), ids=STEPS)
def test_next_step(given: Facts, step: type[Step]) -> None:
    assert type(decide(given)) is step


def test_server_that_answers_after_a_failed_stop_is_left_running() -> None:
    waits = decide(STEPS["stopping, runs and answers"][0])
    leaves = decide(STEPS["stopping, runs and answers past the timeout"][0])

    assert isinstance(waits, Wait)
    assert waits.reason == Reason.UNCONFIRMED
    assert isinstance(leaves, Advance)
    assert (leaves.stage, leaves.reason, leaves.unspent) == (Stage.ABANDONED, Reason.UNCONFIRMED, True)


@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith("planned")])
def test_server_that_was_not_stopped_is_not_started(name: str) -> None:
    assert not isinstance(decide(STEPS[name][0]), Start)
    assert not isinstance(decide(STEPS[name][0]), Advance)


def test_server_restarted_during_the_stop_is_dead_and_not_started() -> None:
    dead = decide(STEPS["stopping, restarted by autoheal"][0])
    done = decide(STEPS["dead, started by another program"][0])

    assert isinstance(dead, Advance)
    assert (dead.kind, dead.stage) == (Kind.FREE, Stage.DEAD)
    assert isinstance(done, Advance)
    assert (done.stage, done.reason) == (Stage.DONE, Reason.STARTED_ELSEWHERE)


def test_restarted_server_is_fixed_and_an_abandoned_one_partly() -> None:
    fixed, partly = decide(STEPS["done"][0]), decide(STEPS["abandoned"][0])

    assert isinstance(fixed, Close)
    assert fixed.outcome is Outcome.FIXED
    assert isinstance(partly, Close)
    assert partly.outcome is Outcome.PARTLY
