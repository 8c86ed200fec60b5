"""The remedy for servers as truth tables: what it decides from which facts, with a sentence a row."""

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
UNLISTED = server(container_id=None, container_incarnation=None)
ANSWERS = server(probe_failing_s=0.0)
LATE = {"free_for_s": LIMITS.restart_timeout_s}


def test_the_remedy_is_found_by_the_name_that_rules_use_and_is_about_servers() -> None:
    remedy = REMEDIES["restart_container"]

    assert (remedy.decide, remedy.conditions, remedy.subject) == (decide, CONFIRMABLE, Subject.SERVER)
    assert {Condition.SERVER} == CONFIRMABLE


# --- what counts as a server that is wedged

CONFIRM: dict[str, tuple[dict[str, Any], Doubt | None]] = {
    "silent, every GPU idle, RAM still": (
        {},
        None,
    ),
    "by its own health check": ({"probe": "docker"}, None),
    "exactly as long as is allowed": (
        {"probe_failing_s": 120.0, "gpu_idle_s": 120.0, "ram_idle_s": 120.0, "io_idle_s": 120.0},
        None,
    ),
    "a hair less": ({"probe_failing_s": 119.999}, Doubt.UNDER_BOUND),
    "its owner allows more": ({"restart_after_s": 600.0}, Doubt.UNDER_BOUND),
    "it answers": ({"probe_failing_s": 0.0}, Doubt.UNDER_BOUND),
    "it never answered in this incarnation": ({"answered": False}, Doubt.NEVER_ANSWERED),
    "whether it ever answered is unknown": ({"answered": None}, Doubt.NEVER_ANSWERED),
    "it was not asked lately": (
        {"probe_failing_s": None, "probe_unknown": "it was not asked lately"},
        Doubt.ANSWER_UNKNOWN,
    ),
    "nobody says why it was not asked": ({"probe_failing_s": None}, Doubt.ANSWER_UNKNOWN),
    "its GPU is busy": ({"gpu_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "its GPU is unknown": ({"gpu_idle_s": None, "gpu_unknown": "GPU-1 is lost"}, Doubt.GPU_UNKNOWN),
    "its GPU is unknown and nobody says why": ({"gpu_idle_s": None}, Doubt.GPU_UNKNOWN),
    "its RAM moves": ({"ram_idle_s": 3.0}, Doubt.UNDER_BOUND),
    "its RAM is unknown": ({"ram_idle_s": None, "ram_unknown": "cgroup gone"}, Doubt.RAM_UNKNOWN),
    "its RAM is unknown and nobody says why": ({"ram_idle_s": None}, Doubt.RAM_UNKNOWN),
    "it reads, as one that loads from a network does": ({"io_idle_s": 0.0}, Doubt.UNDER_BOUND),
    "it read within the silence": ({"io_idle_s": 119.9}, Doubt.UNDER_BOUND),
    "its I/O is unknown": ({"io_idle_s": None, "work_unknown": "not told"}, Doubt.WORK_UNKNOWN),
    "its I/O is unknown and nobody says why": ({"io_idle_s": None}, Doubt.WORK_UNKNOWN),
    "it spins, as one that hangs in a driver may": ({"container_cpu_idle_s": 0.0}, None),
    "it is not asked: its labels are wrong": (
        {"probe": None, "restart_after_s": None, "probe_unknown": "its host must be localhost"},
        Doubt.NOT_PROBED,
    ),
    "it is not asked: it has no such labels": ({"probe": None}, Doubt.NOT_PROBED),
    "no silence is told": ({"restart_after_s": None}, Doubt.NOT_PROBED),
    "a simulated GPU says so": ({"gpu_simulated": True}, None),
}


@pytest.mark.parametrize(("seen", "doubt"), CONFIRM.values(), ids=CONFIRM)
def test_what_confirms_a_silent_server(seen: dict[str, Any], doubt: Doubt | None) -> None:
    assert confirm(server(**seen), Condition.SERVER).doubt is doubt


def test_a_trip_without_a_condition_confirms_nothing() -> None:
    assert confirm(server(), Condition.STALL).doubt is Doubt.NO_CONDITION


SEVERAL: dict[str, tuple[frozenset[Condition], frozenset[Condition], Condition | None]] = {
    "the first is so": (frozenset({Condition.SERVER, Condition.VRAM}), frozenset({Condition.SERVER}), Condition.SERVER),
    "only the second is so": (
        frozenset({Condition.SERVER, Condition.VRAM}),
        frozenset({Condition.VRAM}),
        Condition.VRAM,
    ),
    "neither is so": (frozenset({Condition.SERVER, Condition.VRAM}), frozenset(), None),
    "the second was not reported": (frozenset({Condition.SERVER}), frozenset({Condition.VRAM}), None),
}


@pytest.mark.parametrize(("reported", "met", "by"), SEVERAL.values(), ids=SEVERAL)
def test_any_reported_condition_may_confirm_and_names_the_episode(
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


def test_the_sentence_names_every_figure_and_its_bound_or_why_one_is_unknown() -> None:
    figures = {"probe_failing_s": 131.0, "gpu_idle_s": 132.0, "ram_idle_s": 133.0, "io_idle_s": 134.0}
    message = confirm(server(**figures), Condition.SERVER).message

    assert [each for each in ("131.0", "132.0", "133.0", "134.0", "120.0", "http") if each not in message] == []
    assert "cgroup gone" in confirm(server(ram_idle_s=None, ram_unknown="cgroup gone"), Condition.SERVER).message


# --- before anything is promised

WAITS: dict[str, tuple[Facts, str]] = {
    "the exporter does not answer": (server_facts(server=None, unknown="no answer"), Reason.NO_EVIDENCE),
    "the exporter's look is stale": (server_facts(server=server(sample_age_s=5.1)), Reason.STALE_EVIDENCE),
    "it is not confirmed": (server_facts(server=server(gpu_idle_s=0.0)), Reason.UNCONFIRMED),
    "whether workers live in it is unknown": (server_facts(server=server(workers=None)), Reason.UNCONFIRMED),
    "the engine does not answer": (server_facts(container=None, container_known=False), Reason.NO_CONTAINER),
    "it is paused": (server_facts(container=container(paused=True)), Reason.CONTAINER_PAUSED),
    "the exporter misses it in one listing": (server_facts(server=UNLISTED), Reason.NO_CONTAINER),
    "the exporter misses it, and the engine does not answer": (
        server_facts(server=UNLISTED, container=None, container_known=False, unknown="no daemon"),
        Reason.NO_CONTAINER,
    ),
    "the exporter misses it, and the engine cannot be asked": (
        server_facts(server=UNLISTED, container=None, container_known=False),
        Reason.NO_CONTAINER,
    ),
    "a dry run that has said so": (
        server_facts(armed=False, episode=server_episode(would_act=True)),
        Reason.DRY_RUN,
    ),
}


@pytest.mark.parametrize(("given", "reason"), WAITS.values(), ids=WAITS)
def test_it_waits_while_the_alert_fires_when(given: Facts, reason: str) -> None:
    step = decide(given)

    assert isinstance(step, Wait)
    assert step.reason == reason


@pytest.mark.parametrize("name", [name for name in WAITS if "dry run" not in name])
def test_it_lets_go_once_the_alert_has_ended_when(name: str) -> None:
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
    "its engine removes it when it ends": (
        server_facts(container=container(vanishes=True)),
        Outcome.REFUSED,
        Reason.NOT_RESTARTABLE,
    ),
    "a worker lives in it": (server_facts(server=server(workers=1)), Outcome.REFUSED, Reason.HAS_WORKERS),
    "Docker's policy restarted it": (
        server_facts(
            server=server(container_incarnation=REBORN, probe_failing_s=0.0), container=container(incarnation=REBORN)
        ),
        Outcome.SUPERSEDED,
        Reason.REPLACED,
    ),
    "autoheal restarted it after the exporter's last look": (
        server_facts(container=container(incarnation=REBORN)),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "a person stopped it": (
        server_facts(server=UNLISTED, container=stopped()),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "a person removed it, and it is not listed": (
        server_facts(server=UNLISTED, container=None),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "it was restarted, and is not listed yet": (
        server_facts(server=UNLISTED, container=container(incarnation=REBORN)),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "a person stopped it after the exporter's last look": (
        server_facts(container=stopped()),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "it ended by itself, and Docker is about to restart it": (
        server_facts(container=stopped(cgroup=None)),
        Outcome.SUPERSEDED,
        Reason.ENDED_ELSEWHERE,
    ),
    "a person removed it": (server_facts(container=None), Outcome.SUPERSEDED, Reason.ENDED_ELSEWHERE),
    "another container bears its name now": (
        server_facts(server=server(container_id="d" * 64, container_incarnation="d@1")),
        Outcome.SUPERSEDED,
        Reason.REPLACED,
    ),
}


@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize(("given", "outcome", "reason"), CLOSES.values(), ids=CLOSES)
def test_it_is_over_before_it_began_when(given: Facts, outcome: Outcome, reason: Reason, armed: bool) -> None:
    step = decide(replace(given, armed=armed))

    assert isinstance(step, Close)
    assert (step.outcome, step.reason) == (outcome, reason)


def test_a_confirmed_silence_is_begun_without_a_job_to_settle() -> None:
    step = decide(server_facts())

    assert isinstance(step, Begin)
    assert (step.condition, step.free_key, step.settle_key) == (Condition.SERVER, KEY, None)
    assert (step.container_kind, step.container_handle, step.container_name) == ("docker", HANDLE, "c1")
    assert (step.gpus, step.pids, step.cgroup) == (("GPU-0",), PIDS, "/sys/fs/cgroup/docker/c1")


def test_a_dry_run_says_what_it_would_do() -> None:
    step = decide(server_facts(armed=False))

    assert isinstance(step, WouldAct)
    assert confirm(server(), Condition.SERVER).message in step.message


# --- once it is promised

STEPS: dict[str, tuple[Facts, type[Step]]] = {
    "planned, and silent still": (server_facts(PLANNED), Stop),
    "planned, and disarmed since": (server_facts(PLANNED, armed=False), Wait),
    "planned, and it answers": (server_facts(PLANNED, server=server(probe_failing_s=0.0)), Wait),
    "planned, and it answers for longer than patience lasts": (
        server_facts(PLANNED, server=server(probe_failing_s=0.0), **LATE),
        Withdraw,
    ),
    "planned, and the exporter is silent": (server_facts(PLANNED, server=None), Wait),
    "planned, and the exporter's look is stale": (server_facts(PLANNED, server=server(sample_age_s=5.1)), Wait),
    "planned, and the exporter saw another incarnation": (
        server_facts(PLANNED, server=server(container_incarnation=REBORN)),
        Wait,
    ),
    "planned, and a worker has moved in": (server_facts(PLANNED, server=server(workers=1)), Wait),
    "planned, and whether a worker has is unknown": (server_facts(PLANNED, server=server(workers=None)), Wait),
    "planned, and paused": (server_facts(PLANNED, container=container(paused=True)), Wait),
    "planned, and the engine is gone from the facts": (server_facts(PLANNED, container=None), Withdraw),
    "planned, and the engine does not answer": (
        server_facts(PLANNED, container=None, container_known=False),
        Wait,
    ),
    "planned, and a person stopped it": (server_facts(PLANNED, container=stopped()), Withdraw),
    "planned, and Docker or autoheal restarted it": (
        server_facts(PLANNED, container=container(incarnation=REBORN)),
        Withdraw,
    ),
    "stopping, and it still runs": (server_facts(STOPPING), Stop),
    "stopping, and it runs and answers again": (server_facts(STOPPING, server=ANSWERS), Wait),
    "stopping, and it runs and answers for longer than patience lasts": (
        server_facts(STOPPING, server=ANSWERS, **LATE),
        Advance,
    ),
    "stopping, and it runs and the exporter is silent": (server_facts(STOPPING, server=None), Wait),
    "stopping, and it runs and a worker has moved in": (server_facts(STOPPING, server=server(workers=1)), Wait),
    "stopping, down, and its processes are still in its cgroup": (
        server_facts(STOPPING, container=stopped(pids=PIDS), server=None),
        Stop,
    ),
    "stopping, and autoheal restarted it meanwhile": (
        server_facts(
            STOPPING,
            container=container(incarnation=REBORN, pids=frozenset({5001})),
            server=server(container_incarnation=REBORN, gpu_pids={"GPU-0": [5001]}),
        ),
        Advance,
    ),
    "stopping, down, and off its GPUs": (server_facts(STOPPING, container=stopped(), server=GONE_FROM_GPUS), Advance),
    "stopping, down, and the driver still lists it": (server_facts(STOPPING, container=stopped()), Wait),
    "stopping, and it cannot be killed": (
        server_facts(free(Stage.STOPPING, tries=9), **LATE),
        Quarantine,
    ),
    "dead": (server_facts(DEAD, container=stopped(), server=GONE_FROM_GPUS), Start),
    "dead, and somebody has started it": (server_facts(DEAD, container=container(incarnation=REBORN)), Advance),
    "dead, and removed": (server_facts(DEAD, container=None), Advance),
    "starting, and it runs": (server_facts(STARTING, container=container(incarnation=REBORN)), Advance),
    "starting, and a person has stopped it since": (
        server_facts(STARTING, container=stopped(incarnation=REBORN)),
        Advance,
    ),
    "starting, and it does not run yet": (server_facts(STARTING, container=stopped()), Start),
    "done": (server_facts(free(Stage.DONE)), Close),
    "abandoned": (server_facts(free(Stage.ABANDONED)), Close),
}


@pytest.mark.parametrize(("given", "step"), STEPS.values(), ids=STEPS)
def test_what_comes_next_when_it_is(given: Facts, step: type[Step]) -> None:
    assert type(decide(given)) is step


def test_what_a_stop_did_not_end_and_what_answers_again_is_left_running_for_a_person_to_look() -> None:
    waits = decide(STEPS["stopping, and it runs and answers again"][0])
    leaves = decide(STEPS["stopping, and it runs and answers for longer than patience lasts"][0])

    assert isinstance(waits, Wait)
    assert waits.reason == Reason.UNCONFIRMED
    assert isinstance(leaves, Advance)
    assert (leaves.stage, leaves.reason, leaves.unspent) == (Stage.ABANDONED, Reason.UNCONFIRMED, True)


@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith("planned")])
def test_nothing_is_started_that_we_did_not_stop(name: str) -> None:
    assert not isinstance(decide(STEPS[name][0]), Start)
    assert not isinstance(decide(STEPS[name][0]), Advance)


def test_what_restarted_by_itself_while_it_was_stopped_counts_as_dead_and_is_not_started() -> None:
    dead = decide(STEPS["stopping, and autoheal restarted it meanwhile"][0])
    done = decide(STEPS["dead, and somebody has started it"][0])

    assert isinstance(dead, Advance)
    assert (dead.kind, dead.stage) == (Kind.FREE, Stage.DEAD)
    assert isinstance(done, Advance)
    assert (done.stage, done.reason) == (Stage.DONE, Reason.STARTED_ELSEWHERE)


def test_a_freed_server_is_mended_and_one_that_was_given_up_is_not() -> None:
    mended, partly = decide(STEPS["done"][0]), decide(STEPS["abandoned"][0])

    assert isinstance(mended, Close)
    assert mended.outcome is Outcome.FIXED
    assert isinstance(partly, Close)
    assert partly.outcome is Outcome.PARTLY
