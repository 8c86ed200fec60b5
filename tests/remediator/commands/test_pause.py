"""`gpuwarden pause` and `resume`: periods without new restarts."""

import re
import time
from collections.abc import Callable

import pytest

from gpuwarden.format import format_time
from gpuwarden.job import State
from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from remediator.remedies.guards import Act, Order
from tests.remediator.builders import HOST, missing
from tests.remediator.executor.builders import executor, history, journal, stalled_job, to_the_end, turn
from tests.remediator.ledger.test_ledger import rows
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _ann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ann")


def left(ledger: Ledger) -> list[int | None]:
    return [each.order_id for each in ledger.orders.current().pauses(host=None, now=ledger.now())]


def local(in_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + in_s))


def test_pause_holds_a_stalled_job_until_its_end(ledger: Ledger, store: JobStore) -> None:
    world = stalled_job(ledger, store)
    works = executor(ledger, store, world)
    now = time.time()
    ledger.orders.give(
        Order(act=Act.PAUSE, at=now, who="ann", reason="a new driver", host=HOST, since=now, until=now + 2.0)
    )

    turn(works, ledger)
    assert journal(ledger)[-1] == "decided wait: paused"
    assert (world.boxes["w1"].calls, store.job(1).state) == ([], State.RUNNING)
    assert rows(ledger, "SELECT count(*) FROM intents") == [(0,)]

    eventually(lambda: not left(ledger), "the pause has ended")
    to_the_end(works, ledger)
    assert (history(ledger).outcome, world.boxes["w1"].calls) == ("fixed", ["stop", "start"])


def test_planned_pause_holds_nothing_before_its_start(
    ledger: Ledger, store: JobStore, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    world = stalled_job(ledger, store)
    assert cli("pause", "--from", local(3600), "--for", "2h", "--reason", "new\x1b driver") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"pause 1 on every host from \S+ \S+ until \S+ \S+, by ann@\S+: new\\x1b driver; "
        r"end it with `gpuwarden resume 1`",
        line,
    )

    to_the_end(executor(ledger, store, world), ledger)

    assert history(ledger).outcome == "fixed"


def test_time_of_day_is_the_first_after_the_start(ledger: Ledger, cli: Callable[..., int]) -> None:
    hour_before = time.strftime("%H:%M", time.localtime(time.time() + 7200 - 3600))

    assert cli("pause", "--from", local(7200), "--until", hour_before) == 0

    (window,) = ledger.orders.current().pauses(host=HOST, now=ledger.now())
    assert window.since is not None
    assert window.until is not None
    assert window.since == pytest.approx(time.time() + 7200, abs=30)
    assert 22 * 3600 < window.until - window.since < 24 * 3600


def test_pause_is_ended_by_its_number(
    ledger: Ledger, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    cli("pause", "--from", local(86400), "--for", "1h", "--host", HOST)
    cli("pause", "--from", local(3600), "--for", "1h", "--host", HOST)
    cli("pause", "--for", "1h")
    assert left(ledger) == [3, 2, 1]
    capsys.readouterr()

    assert cli("resume", "2", "--reason", "postponed") == 0
    assert missing(capsys.readouterr().out, "ended", "pause 2 on box1") == []

    assert left(ledger) == [3, 1]
    assert cli("resume", "2") == 1
    assert missing(capsys.readouterr().err, "pause 2:", "`gpuwarden status`") == []
    cli("ledger", "audit")
    audit = capsys.readouterr().out.splitlines()
    assert "  resume     pause 2 on box1 until " in audit[-1]
    assert audit[-1].endswith(": postponed")


def test_ended_pause_is_not_read(ledger: Ledger, cli: Callable[..., int]) -> None:
    now = time.time()
    ledger.orders.give(Order(act=Act.PAUSE, at=now - 9, who="ann", reason="", until=now - 1))
    cli("pause", "--for", "1h")

    assert [each.order_id for each in ledger.orders.current().given] == [2]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("pause",), 2, ("--for", "--until")),
        (("pause", "--for", "0s"), 2, ("after its start",)),
        (("pause", "--for", "32d"), 2, ("31 days",)),
        (("pause", "--for", "1h", "--from", "2001-01-01T00:00"), 2, ("begin now",)),
        (("pause", "--for", "1h", "--from", local(367 * 86400)), 2, ("366 days",)),
        (("pause", "--until", "2001-01-01T00:00"), 2, ("after its start",)),
        (("pause", "--for", "1h", "--host", "bxo1"), 1, ("'bxo1'", HOST)),
        (("resume", "1"), 1, ("pause 1:",)),
    ],
)
def test_invalid_pause_is_refused_and_changes_nothing(
    ledger: Ledger,
    cli: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    code: int,
    words: tuple[str, ...],
) -> None:
    assert cli(*argv) == code

    assert missing(capsys.readouterr().err, *words) == []
    assert ledger.orders.current().given == ()


def test_number_of_pauses_is_limited(
    cli: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remediator.commands.orders.PAUSES_MAX", 1)
    assert cli("pause", "--for", "1h") == 0

    assert cli("pause", "--for", "2h") == 1

    assert missing(capsys.readouterr().err, "1 ", "`gpuwarden status`") == []


def test_arm_lists_pauses(ledger: Ledger, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    cli("pause", "--for", "1h")
    (window,) = ledger.orders.current().pauses(host=None, now=ledger.now())
    capsys.readouterr()

    cli("arm", "--yes")

    assert missing(capsys.readouterr().out, "pause 1 on every host", format_time(window.at)) == []
