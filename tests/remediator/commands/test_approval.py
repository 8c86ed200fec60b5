"""`gpuwarden arm --approval`: each action needs the approval of an operator."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import structlog
from structlog.testing import capture_logs

from gpuwarden.job import State
from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from remediator.plan import Outcome, Wait
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order
from remediator.remedies.restart_worker import decide
from tests.remediator.builders import NOW, alert, missing
from tests.remediator.executor.builders import (
    BOUNDLESS,
    executor,
    history,
    journal,
    looping,
    stalled_job,
    take_up,
    to_the_end,
    turn,
)
from tests.remediator.ledger.test_ledger import BEGIN, accept, rows
from tests.remediator.world import Box, World
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _ann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ann")


def waits_for_approval(ledger: Ledger, store: JobStore, cli: Callable[..., int]) -> World:
    """A stalled job whose restart waits for approval."""
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world, armed=False)
    assert cli("arm", "--yes", "--approval") == 0
    turn(works, ledger)
    assert journal(ledger)[-1] == "decided wait: approval"
    return world


def go_on(ledger: Ledger, store: JobStore, world: World) -> None:
    """One iteration of another executor, without the state of the first."""
    turn(executor(ledger, store, world), ledger)


def test_confirmed_stall_waits_for_approval_and_is_fixed_then(
    ledger: Ledger, store: JobStore, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    world = waits_for_approval(ledger, store, cli)
    assert (world.boxes["w1"].calls, store.job(1).state) == ([], State.RUNNING)
    assert rows(ledger, "SELECT count(*) FROM intents") == [(0,)]
    message = history(ledger).entries[-1].message
    required = ("`gpuwarden approve 1`", "`gpuwarden decline 1`", "silent 130.0 s")
    assert [each for each in required if each not in message] == []
    capsys.readouterr()

    assert cli("approve", "1", "--reason", "I looked at it") == 0

    first, second = capsys.readouterr().out.splitlines()
    assert missing(first, "approved", "episode 1 on box1", "ann@") == []
    assert "silent 130.0 s" in second
    assert journal(ledger)[-1] == "ordered approve"
    assert history(ledger).entries[-1].message.endswith(": I looked at it")
    to_the_end(executor(ledger, store, world), ledger)
    assert (world.boxes["w1"].calls, store.job(1).watchdog_retries) == (["stop", "start"], 1)
    assert history(ledger).outcome == "fixed"


def test_running_executor_acts_after_an_approval(ledger: Ledger, store: JobStore, cli: Callable[..., int]) -> None:
    structlog.reset_defaults()
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world, armed=False)
    with capture_logs() as logged, looping(works):
        cli("arm", "--yes", "--approval")
        eventually(
            lambda: ledger.reports.newest() and "decided wait: approval" in journal(ledger), "it waits for approval"
        )
        assert world.boxes["w1"].calls == []
        assert cli("approve", "1") == 0
        eventually(lambda: history(ledger).outcome == "fixed", "it is fixed")

    assert journal(ledger).count("decided wait: approval") == 1
    assert any(each["event"].startswith("armed with approval") for each in logged)


def test_decline_holds_until_an_approval(ledger: Ledger, store: JobStore, cli: Callable[..., int]) -> None:
    world = waits_for_approval(ledger, store, cli)
    assert cli("decline", "1", "--reason", "the job is nearly done") == 0
    go_on(ledger, store, world)
    assert journal(ledger)[-1] == "decided wait: declined"
    assert cli("arm", "--yes") == 0

    go_on(ledger, store, world)

    assert journal(ledger)[-1] == "decided wait: declined"
    assert world.boxes["w1"].calls == []
    assert cli("approve", "1") == 0
    to_the_end(executor(ledger, store, world), ledger)
    assert history(ledger).outcome == "fixed"


def test_approval_is_for_one_incarnation(ledger: Ledger) -> None:
    ledger.orders.give(Order(act=Act.ASK, at=NOW, who="ann", reason=""))
    accept(ledger, alert())
    (episode,) = ledger.episodes.list_open()
    first = ledger.intents.begin(episode, BEGIN, safety_limits=BOUNDLESS, now=NOW)
    assert isinstance(first, Wait)
    ledger.journal.wait(1, first, now=NOW)
    ledger.orders.answer(1, Act.APPROVE, who="ann", reason="", until=NOW + 60, now=NOW)

    another = ledger.intents.begin(episode, replace(BEGIN, free_key="reborn"), safety_limits=BOUNDLESS, now=NOW + 1)

    assert isinstance(another, Wait)
    assert (another.reason, another.asks) == ("approval", "reborn")
    assert ledger.intents.begin(episode, BEGIN, safety_limits=BOUNDLESS, now=NOW + 60) is not None, "it has expired"
    assert ledger.intents.begin(episode, BEGIN, safety_limits=BOUNDLESS, now=NOW + 59) is None, "the control"


def test_approval_is_for_one_episode(ledger: Ledger) -> None:
    ledger.orders.give(Order(act=Act.ASK, at=NOW, who="ann", reason=""))
    accept(ledger, alert("a"), alert("b", worker="w2"))
    first, second = ledger.episodes.list_open()
    ledger.journal.wait(first.episode_id, Wait(reason=Reason.APPROVAL, message="asks", asks=BEGIN.free_key), now=NOW)
    ledger.orders.answer(first.episode_id, Act.APPROVE, who="ann", reason="", until=NOW + 60, now=NOW)

    found = ledger.intents.begin(second, BEGIN, safety_limits=BOUNDLESS, now=NOW)

    assert isinstance(found, Wait)
    assert found.reason == "approval"
    assert journal(ledger, second.episode_id) == ["saw alert: firing"], "the answer is in the journal of the first only"


def test_planned_restart_needs_approval_if_ordered_later(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world)
    episode = take_up(ledger)
    works.processor.performer.perform(episode, decide(works.processor.facts.of_container(episode)))
    ledger.orders.give(Order(act=Act.ASK, at=time.time(), who="ann", reason=""))

    turn(works, ledger)
    assert journal(ledger)[-1] == "decided wait: approval"
    assert store.job(1).state is State.RUNNING

    ledger.orders.answer(1, Act.APPROVE, who="ann", reason="", now=time.time())
    to_the_end(works, ledger)
    assert history(ledger).outcome == "fixed"


def test_begun_restart_is_finished_if_approval_is_ordered_later(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)

    def before_stop(_: Box) -> None:
        ledger.orders.give(Order(act=Act.ASK, at=time.time(), who="ann", reason=""))

    world.before_stop = before_stop

    to_the_end(executor(ledger, store, world), ledger)

    assert (history(ledger).outcome, store.job(1).watchdog_retries) == ("fixed", 1)


@pytest.mark.parametrize("command", ["approve", "decline"])
def test_answer_is_refused_for_an_episode_that_does_not_ask(
    ledger: Ledger, store: JobStore, cli: Callable[..., int], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    def said(episode: str) -> str:
        assert cli(command, episode) == 1
        return capsys.readouterr().err

    assert said("1").startswith(
        f"gpuwarden {command}: no episode 1 in the ledger: `gpuwarden status` lists episodes that ask"
    )
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world, armed=False)
    turn(works, ledger)
    assert missing(said("1"), "episode 1 ", "(dry_run)") == []
    cli("arm", "--yes", "--approval")
    turn(works, ledger)
    cli("approve", "1")
    to_the_end(works, ledger)
    capsys.readouterr()

    assert missing(said("1"), "episode 1 ", "closed", "fixed") == []
    assert [each.act for each in ledger.orders.given_since(since=0.0)][-1] is Act.APPROVE


def test_begun_restart_cannot_be_declined(
    ledger: Ledger, store: JobStore, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    world = waits_for_approval(ledger, store, cli)
    world.boxes["w1"].unkillable = True
    cli("approve", "1")
    go_on(ledger, store, world)
    capsys.readouterr()

    assert cli("decline", "1") == 1

    assert missing(capsys.readouterr().err, "episode 1 ", "no approval") == []


@pytest.mark.parametrize("for_s", ["0s", "25h"])
def test_duration_of_an_approval_is_limited(
    ledger: Ledger, cli: Callable[..., int], capsys: pytest.CaptureFixture[str], for_s: str
) -> None:
    assert cli("approve", "1", "--for", for_s) == 2

    assert missing(capsys.readouterr().err, "1 day") == []
    assert ledger.orders.given_since(since=0.0) == []


def test_arm_without_approval_lists_episodes_that_wait_for_one(
    ledger: Ledger, store: JobStore, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    waits_for_approval(ledger, store, cli)
    capsys.readouterr()

    cli("arm", "--yes", "--approval")
    nothing, waiting = capsys.readouterr().out.splitlines()[:2]
    assert "would do nothing now" in nothing
    assert waiting.startswith("waiting for other reasons: 1;")
    cli("arm", "--yes")

    assert capsys.readouterr().out.split()[0] == "1"


def test_audit_lists_answers(
    ledger: Ledger, store: JobStore, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    waits_for_approval(ledger, store, cli)
    cli("approve", "1", "--for", "15m", "--reason", "looked")
    ledger.episodes.close(1, Outcome.SUPERSEDED, Reason.DONE, "closed", now=time.time())
    capsys.readouterr()

    assert cli("ledger", "audit") == 0

    assert "approve    episode 1 on box1 until " in capsys.readouterr().out.splitlines()[-1]
