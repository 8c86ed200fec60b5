"""`gpuwarden arm|disarm|pause|resume|breaker`, and their effect on the ledger and a running executor."""

import io
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import structlog
from structlog.testing import capture_logs

from gpuwarden.db.clock import DatabaseClock
from gpuwarden.format import format_duration, operator_name, parse_duration_s, printable
from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from remediator.plan import Outcome, Stage, Wait
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order, SafetyLimits
from tests.remediator.builders import HOST, NOW, alert, missing, wish
from tests.remediator.executor.builders import (
    BOUNDLESS,
    executor,
    journal,
    looping,
    outcome_of,
    stalled_job,
    to_the_end,
    turn,
)
from tests.remediator.ledger.test_ledger import BEGIN, accept, rows
from tests.remediator.world import Box, World
from tests.waiting import eventually

REMEDY = "restart_worker"


@pytest.fixture(autouse=True)
def _ann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "ann")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def standing(ledger: Ledger) -> list[tuple[str, str | None, str | None]]:
    return [(each.act, each.host, each.remedy) for each in ledger.orders.current().given]


def dry(ledger: Ledger, store: JobStore) -> World:
    """A stalled job that a dry run has recorded."""
    world = stalled_job(ledger, store)
    turn(executor(ledger, store, world, armed=False), ledger)
    assert journal(ledger)[-1] == "decided wait: dry_run"
    return world


# --- arm and disarm


def test_arm_lists_waiting_episodes_and_asks_on_a_terminal(
    ledger: Ledger,
    store: JobStore,
    cli: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dry(ledger, store)
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))

    assert cli("arm") == 1

    said = capsys.readouterr()
    first, second = said.out.splitlines()[:2]
    assert (first.split()[0], missing(first, "every remedy", "every host")) == ("1", [])
    assert missing(second, "episode 1", "w1 on box1", "job 1", "silent 130.0 s") == []
    assert missing(said.out, "every remedy on every host", "[y/N]") == []
    assert not ledger.orders.current().armed(host=HOST, remedy=REMEDY)

    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert cli("arm", "--reason", "we read the ledger") == 0
    (order,) = ledger.orders.current().given
    assert (order.act, order.reason) == (Act.ARM, "we read the ledger")
    assert order.who.startswith("ann@")


def test_arm_without_a_terminal_needs_yes(
    ledger: Ledger, cli: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))

    assert cli("arm") == 1
    assert missing(capsys.readouterr().err, "--yes") == []
    assert ledger.orders.current().given == ()

    assert cli("arm", "--yes") == 0
    waits, armed = capsys.readouterr().out.splitlines()
    assert "would do nothing now" in waits
    assert armed.startswith("armed: ")


def test_arm_and_disarm_accept_a_remedy_and_a_host(ledger: Ledger, cli: Callable[..., int]) -> None:
    assert cli("arm", "--yes", "--remedy", REMEDY, "--host", HOST) == 0
    assert standing(ledger) == [("arm", HOST, REMEDY)]

    assert cli("disarm", "--remedy", REMEDY, "--host", HOST) == 0
    assert standing(ledger) == [("disarm", HOST, REMEDY)]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("arm", "--yes", "--remedy", "pray"), 2, ("'pray'",)),
        (("disarm", "--host", "bxo1"), 1, ("'bxo1'", "box1")),
        (("pause",), 2, ("--for", "--until")),
        (("pause", "30m"), 2, ("write --for 30m",)),
        (("pause", "--for", "soon"), 2, ("'soon'",)),
        (("pause", "--for", "0s"), 2, ("after its start",)),
        (("pause", "--for", "32d"), 2, ("31 days",)),
        (("pause", "--until", "noon"), 2, ("'noon'",)),
        (("pause", "--until", "2001-01-01T00:00"), 2, ("after its start",)),
        (("pause", "--until", "25:99"), 2, ("'25:99'",)),
        (("resume",), 1, ("nothing is paused",)),
        (("breaker", "reset"), 1, ("not open",)),
        (("breaker",), 2, ("reset",)),
    ],
)
def test_invalid_order_is_refused_and_changes_nothing(
    ledger: Ledger,
    cli: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    code: int,
    words: tuple[str, ...],
) -> None:
    assert cli(*argv) == code

    assert missing(capsys.readouterr().err, *words) == []
    assert ledger.orders.current().given == ()


def test_order_is_in_the_journal_of_its_episodes(ledger: Ledger, store: JobStore, cli: Callable[..., int]) -> None:
    dry(ledger, store)
    accept(ledger, alert("b", host="box2"))
    ledger.inbox.take_new("box2", now=NOW)

    cli("arm", "--yes", "--host", HOST, "--reason", "we agree")

    assert journal(ledger)[-1] == "ordered arm"
    found = ledger.reports.get(1)
    assert found is not None
    assert re.fullmatch(r"by ann@\S+: we agree", found.entries[-1].message)
    assert journal(ledger, 2) == ["saw alert: firing"]


def test_audit_lists_orders(cli: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    cli("arm", "--yes", "--reason", "shift\x1b[2J")
    cli("pause", "--for", "2h")
    cli("disarm")
    capsys.readouterr()

    assert cli("ledger", "audit") == 0
    lines = capsys.readouterr().out.splitlines()
    assert cli("ledger", "audit", "--json") == 0
    parsed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [line.split()[2] for line in lines] == ["arm", "pause", "disarm"]
    assert all(line.isprintable() for line in lines)
    assert [each["act"] for each in parsed] == ["arm", "pause", "disarm"]


# --- a running executor


def test_arm_and_disarm_are_logged_by_the_executor(ledger: Ledger, store: JobStore, cli: Callable[..., int]) -> None:
    structlog.reset_defaults()
    with capture_logs() as logged, looping(executor(ledger, store, World(), armed=False)):
        cli("arm", "--yes", "--reason", "go")
        eventually(lambda: any(each["event"] == "armed: acts" for each in logged), "the arm is logged")
        cli("disarm")
        eventually(lambda: logged[-1]["event"].startswith("dry run"), "the disarm is logged")

    acts = next(each for each in logged if each["event"] == "armed: acts")
    assert (acts["remedy"], acts["reason"]) == (REMEDY, "go")
    assert acts["by"].startswith("ann@")


def test_disarm_before_the_begin_is_committed_is_obeyed(ledger: Ledger) -> None:
    accept(ledger, alert())
    (episode,) = ledger.episodes.list_open()

    found = ledger.intents.begin(episode, BEGIN, safety_limits=BOUNDLESS, now=NOW)

    assert isinstance(found, Wait)
    assert found.reason == "dry_run"
    assert rows(ledger, "SELECT count(*) FROM intents") == [(0,)]


# --- pauses


def test_pause_lists_begun_restarts_which_are_finished(
    ledger: Ledger, store: JobStore, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    world = stalled_job(ledger, store)

    def before_stop(_: Box) -> None:
        assert cli("pause", "--for", "1h") == 0

    world.before_stop = before_stop

    to_the_end(executor(ledger, store, world), ledger)

    assert outcome_of(ledger) == "fixed"
    assert missing(capsys.readouterr().out, "episode 1 of w1 on box1", "will finish") == []


def test_pause_until_a_time_of_day_ends_at_its_next_occurrence(ledger: Ledger, cli: Callable[..., int]) -> None:
    now = time.time()
    hour_ago = time.strftime("%H:%M", time.localtime(now - 3600))

    assert cli("pause", "--until", hour_ago) == 0
    assert cli("pause", "--host", HOST, "--until", time.strftime("%Y-%m-%dT%H:%M", time.localtime(now + 7200))) == 0

    by_clock, by_date = ledger.orders.current().given
    assert by_clock.until is not None
    assert by_date.until is not None
    assert now + 22 * 3600 < by_clock.until < now + 24 * 3600
    assert now + 7100 < by_date.until <= now + 7200


def test_time_of_day_is_local_time(ledger: Ledger, cli: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    before_it_changes = datetime(2026, 10, 24, 20, 0, tzinfo=UTC).timestamp()
    monkeypatch.setattr(DatabaseClock, "now", lambda _: before_it_changes)
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert cli("pause", "--until", "04:00") == 0
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()

    (given,) = ledger.orders.current().given
    assert given.until == datetime(2026, 10, 25, 3, 0, tzinfo=UTC).timestamp()


def test_resume_ends_pauses(ledger: Ledger, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    cli("pause", "--for", "1h30m")
    assert cli("resume", "--host", HOST) == 1
    assert missing(capsys.readouterr().err, "every host", "--host") == []
    assert cli("resume") == 0
    assert ledger.orders.current().pauses(host=HOST, now=time.time()) == []

    cli("pause", "--for", "90s", "--host", HOST)
    assert cli("resume", "--host", HOST) == 0
    assert ledger.orders.current().pauses(host=HOST, now=time.time()) == []


def test_ended_pause_does_not_return_with_the_next_one(ledger: Ledger, cli: Callable[..., int]) -> None:
    cli("pause", "--for", "30d", "--host", HOST)
    cli("resume")
    cli("pause", "--for", "10m")

    (pause,) = ledger.orders.current().pauses(host=HOST, now=time.time())

    assert pause.host is None


# --- cool-downs


def test_recent_restarts_are_listed_without_planned_ones(ledger: Ledger, store: JobStore) -> None:
    to_the_end(executor(ledger, store, stalled_job(ledger, store)), ledger)
    accept(ledger, alert("b", worker="w2"))
    (planned,) = ledger.episodes.list_open()
    step = replace(BEGIN, free_key="another", settle_key=None)
    assert ledger.intents.begin(planned, step, safety_limits=BOUNDLESS, now=time.time()) is None

    found = ledger.orders.restarts_since(time.time() - 60)

    assert [(host, name) for host, name, _ in found] == [(HOST, "w1")]
    assert ledger.orders.restarts_since(time.time() - 60, host="box2") == []


# --- the circuit breaker


def test_concurrent_begins_are_counted_one_after_another(ledger: Ledger, ledger_url: str) -> None:
    ledger.orders.give(Order(act=Act.ARM, at=NOW, who="ann", reason=""))
    workers = [f"w{number}" for number in range(8)]
    accept(ledger, *(alert(worker, worker=worker) for worker in workers))
    steps = {
        each.episode_id: replace(BEGIN, free_key=f"{each.worker}@1", container_handle=each.worker, settle_key=None)
        for each in ledger.episodes.list_open()
    }
    with closing(Ledger.open(ledger_url, host="box2")) as other, ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(
                lambda each: (ledger, other)[each.episode_id % 2].intents.begin(
                    each, steps[each.episode_id], safety_limits=SafetyLimits(), now=NOW
                ),
                ledger.episodes.list_open(),
            )
        )

    assert found.count(None) == 3
    assert {each.reason for each in found if isinstance(each, Wait)} == {Reason.CIRCUIT_BREAKER}
    assert rows(ledger, "SELECT count(*) FROM intents") == [(3,)]
    assert rows(ledger, "SELECT count(*) FROM standing_orders WHERE act = 'breaker'") == [(1,)]


def test_fleet_size_counts_workers_of_every_running_executor(ledger: Ledger) -> None:
    for host, workers, now in (("box1", 12, NOW), ("box2", 8, NOW - 5), ("box3", 100, NOW - 3600), ("box4", None, NOW)):
        ledger.executors.beat(host=host, pid=1, armed=True, started_at=1.0, errors=0, now=now, workers=workers)

    _, recent = ledger.orders.with_activity(wish(handle="h"), SafetyLimits(), now=NOW)

    assert recent.fleet == 20


def begun(ledger: Ledger, worker: str, *, life: int, now: float) -> None:
    """A restart of this incarnation of the worker's container, which is being stopped."""
    accept(ledger, alert(f"{worker}{life}", worker=worker, attempt=str(life)))
    episode = ledger.episodes.list_open()[-1]
    step = replace(BEGIN, free_key=f"{worker}@{life}", container_handle=worker, settle_key=None)
    assert ledger.intents.begin(episode, step, safety_limits=replace(BOUNDLESS, cooldown_s=0.0), now=now) is None
    kept = ledger.episodes.get_open(episode.episode_id)
    assert kept is not None
    assert kept.free is not None
    assert ledger.intents.advance(
        kept.free,
        Stage.STOPPING,
        episode_id=kept.episode_id,
        act="decided",
        step="stop",
        message="b",
        now=now,
    )
    ledger.episodes.close(kept.episode_id, Outcome.PARTLY, Reason.DONE, "b", now=now)


def test_restart_before_a_clock_step_back_does_not_hide_a_later_one(ledger: Ledger) -> None:
    ledger.orders.give(Order(act=Act.ARM, at=NOW, who="ann", reason=""))
    begun(ledger, "w1", life=1, now=NOW + 3600)
    _, before = ledger.orders.with_activity(wish(handle="w1"), SafetyLimits(), now=NOW)
    begun(ledger, "w1", life=2, now=NOW)

    _, after = ledger.orders.with_activity(wish(handle="w1"), SafetyLimits(), now=NOW + 10)

    assert (before.restarted_s_ago, after.restarted_s_ago) == (-3600, 10)


def test_breaker_reset_before_a_clock_step_back_hides_no_later_restarts(ledger: Ledger) -> None:
    ledger.orders.give(Order(act=Act.ARM, at=NOW, who="ann", reason=""))
    ledger.orders.give(Order(act=Act.RELEASE, at=NOW + 3600, who="ann", reason=""))
    for worker in ("w1", "w2"):
        begun(ledger, worker, life=1, now=NOW)

    _, recent = ledger.orders.with_activity(wish(handle="w3"), SafetyLimits(), now=NOW + 10)

    assert recent.targets == {f"{HOST}/w1", f"{HOST}/w2"}


def test_restarts_before_a_clock_step_back_count_no_longer_than_others(ledger: Ledger) -> None:
    ledger.orders.give(Order(act=Act.ARM, at=NOW, who="ann", reason=""))
    begun(ledger, "w1", life=1, now=NOW + 86400)
    begun(ledger, "w2", life=1, now=NOW + 60)

    _, recent = ledger.orders.with_activity(wish(handle="w3"), SafetyLimits(), now=NOW)

    assert recent.targets == {f"{HOST}/w2"}
    assert recent.restarts == 1


def test_restarts_of_one_container_open_the_breaker_and_count_from_its_reset(ledger: Ledger) -> None:
    ledger.orders.give(Order(act=Act.ARM, at=NOW, who="ann", reason=""))
    safety_limits = SafetyLimits(cooldown_s=0.0, breaker_restarts=2)

    def begin(life: int, *, now: float) -> Reason | None:
        accept(ledger, alert(f"f{life}", attempt=str(life)))
        episode = ledger.episodes.list_open()[-1]
        step = replace(BEGIN, free_key=f"c1@{life}", settle_key=None)
        found = ledger.intents.begin(episode, step, safety_limits=safety_limits, now=now)
        ledger.episodes.close(episode.episode_id, Outcome.PARTLY, Reason.DONE, "b", now=now)
        return found.reason if isinstance(found, Wait) else None

    def breaker_orders() -> list[str]:
        return [each.reason for each in ledger.orders.given_since(since=0.0) if each.act is Act.BREAKER]

    assert [begin(life, now=NOW + life * 600) for life in (1, 2)] == [None, None]
    assert begin(3, now=NOW + 1800) is Reason.CIRCUIT_BREAKER
    assert [missing(each, "3 restarts", "3600 s") for each in breaker_orders()] == [[]]
    assert begin(4, now=NOW + 9000) is Reason.CIRCUIT_BREAKER, "it stays open"
    assert len(breaker_orders()) == 1

    ledger.orders.give(Order(act=Act.RELEASE, at=NOW + 1801, who="ann", reason=""))
    assert [begin(life, now=NOW + 1802) for life in (5, 6)] == [None, None]
    assert (begin(7, now=NOW + 1803), len(breaker_orders())) == (Reason.CIRCUIT_BREAKER, 2)
    ledger.orders.give(Order(act=Act.RELEASE, at=NOW + 1, who="ann", reason="before the clock was set"))
    assert [begin(life, now=NOW + 1802 + 3600) for life in (8, 9)] == [None, None], "the hour is over"


# --- formats


@pytest.mark.parametrize(
    ("given", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400), ("1h30m", 5400)]
)
def test_durations_with_units_are_parsed(given: str, seconds: float) -> None:
    assert parse_duration_s(given) == seconds


def test_operator_is_the_user_behind_sudo_or_the_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    assert operator_name().startswith("ann@")
    monkeypatch.delenv("SUDO_USER")

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert operator_name().startswith("uid ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1.0, "0 s"), (12.4, "12 s"), (60.0, "1 min"), (3725.0, "1 h 2 min"), (90000.0, "1 d 1 h"), (86405.0, "1 d 5 s")],
)
def test_duration_is_formatted_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_unprintable_characters_are_escaped() -> None:
    assert printable("é\x1b[2J\n") == "é\\x1b[2J\\n"
