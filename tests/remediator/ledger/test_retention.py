"""What the ledger forgets and what it never does, on both databases, and that it does so a little at a time."""

from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import pytest
from sqlalchemy import Connection, update
from structlog.testing import capture_logs

from gpuwarden.db.engine import is_shared
from gpuwarden.db.transactions import writing
from gpuwarden.queue import JobStore
from remediator.ledger import retention
from remediator.ledger.captures import Capture
from remediator.ledger.ledger import Ledger
from remediator.ledger.schema import ALERTS, CAPTURES, JOURNAL, RUN_DECISIONS
from remediator.plan import Close, Outcome, Stage
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order
from tests.remediator.builders import HOST, KEY, NOW, REBORN, alert
from tests.remediator.executor.builders import PACE, executor, looping
from tests.remediator.ledger.test_ledger import (
    BEGIN,
    BOUNDLESS,
    REFUSAL,
    accept,
    advance,
    armed,
    begins,
    begun,
    opened,
    rows,
)
from tests.remediator.world import World
from tests.waiting import eventually, together

pytestmark = pytest.mark.both_databases

LATER: Final = NOW + 1000.0
TABLES: Final = ("episodes", "alerts", "journal", "intents", "captures", "run_decisions")


def count(ledger: Ledger, table: str, where: str = "1 = 1") -> int:
    ((found,),) = rows(ledger, f"SELECT count(*) FROM {table} WHERE {where}")  # noqa: S608 - a test's own words
    return int(found)


def forget(ledger: Ledger, *, before: float = LATER) -> int:
    """Until nothing is left; in how many bites."""
    bites = 0
    while ledger.episodes.delete_old(before=before):
        bites += 1
        assert bites < 1000
    return bites


def mended(ledger: Ledger, *, worker: str = "w1", key: str = KEY, settle_key: str = "7/1", at: float = NOW) -> int:
    """An episode with a free, a settle and a capture, all of it over and closed; its number."""
    ledger.inbox.accept([alert(worker=worker)], [], now=at)
    ledger.inbox.take_new(HOST, now=at)
    (episode,) = [each for each in ledger.episodes.list_open() if each.worker == worker]
    assert begins(ledger, episode, replace(BEGIN, free_key=key, settle_key=settle_key), now=at)
    episode = next(each for each in ledger.episodes.list_open() if each.worker == worker)
    assert episode.free is not None
    assert episode.settle is not None
    nothing: dict[str, Any] = {"processes": [], "cut_short": None, "curves": []}
    assert ledger.captures.save(episode, Capture(armed=True, took_s=0.1, document=nothing), now=at)
    for intent in (episode.free, episode.settle):
        its: dict[str, Any] = {"episode_id": episode.episode_id, "act": "did", "step": "s", "message": "b"}
        assert ledger.intents.advance(intent, Stage.DONE, **its, now=at)
    ledger.episodes.close(episode.episode_id, Outcome.FIXED, Reason.DONE, "", now=at)
    return episode.episode_id


# --- what goes


def test_an_episode_goes_with_all_that_is_told_of_it_and_younger_ones_stay_whole(ledger: Ledger) -> None:
    armed(ledger)
    old, young = mended(ledger), mended(ledger, key=REBORN, settle_key="7/2", at=LATER + 1)
    for episode_id in (old, young):
        block = f"({episode_id}, 'block', 1.0)"
        rows(ledger, f"INSERT INTO run_decisions (episode_id, kind, decided_at) VALUES {block}")  # noqa: S608 - our own
    before = {table: count(ledger, table) for table in TABLES}
    whole = ledger.reports.get(young)

    forget(ledger)

    assert {table: before[table] - count(ledger, table) for table in TABLES} == {
        "episodes": 1, "alerts": 1, "journal": 6, "intents": 2, "captures": 1, "run_decisions": 1,
    }  # fmt: skip
    assert ledger.reports.get(old) is None
    assert ledger.reports.get(young) == whole
    assert len(ledger.captures.of_episode(young)) == 1


def test_what_is_counted_is_counted_still(ledger: Ledger) -> None:
    mended(ledger)
    accept(ledger, alert("x", worker="nobody", firing=False))
    ledger.inbox.accept([], [REFUSAL], now=NOW)
    opened(ledger, worker="w2")
    before = ledger.reports.totals(HOST)

    assert forget(ledger) > 0

    assert ledger.reports.totals(HOST) == before
    assert before.outcomes == {("mended", "stall"): 1}
    assert before.alerts == {("accepted", ""): 3, ("refused", "other_host"): 1}


def test_alerts_that_came_to_nothing_go_by_age_and_the_newest_of_all_stays(ledger: Ledger) -> None:
    ledger.inbox.accept([], [REFUSAL], now=NOW)
    accept(ledger, alert("x", firing=False))
    ledger.inbox.accept([], [REFUSAL], now=LATER + 1)
    forget(ledger)
    assert rows(ledger, "SELECT state, received_at FROM alerts") == [("refused", LATER + 1)]

    forget(ledger, before=LATER + 9)

    assert count(ledger, "alerts") == 1, "its number is not given to another"
    assert ledger.inbox.last_alert_at() == LATER + 1


def test_orders_go_once_they_cannot_matter_any_more(ledger: Ledger) -> None:
    armed(ledger)
    for act, host in (
        (Act.PAUSE, HOST), (Act.RESUME, None), (Act.PAUSE, None), (Act.DISARM, HOST), (Act.ARM, HOST),
        (Act.BREAKER, None), (Act.RELEASE, None),
    ):  # fmt: skip
        ledger.orders.give(Order(act=act, at=NOW, who="test", because="", host=host))
    standing = ledger.orders.current()

    forget(ledger)

    assert ledger.orders.current() == standing
    left = [(order.act, order.host) for order in ledger.orders.given_since(since=0.0)]
    assert (Act.DISARM, HOST) not in left
    assert (Act.BREAKER, None) not in left
    assert {(Act.ARM, None), (Act.ARM, HOST), (Act.RELEASE, None)} <= set(left)


# --- what nobody takes up


def states(ledger: Ledger) -> list[tuple[str, str]]:
    return rows(ledger, "SELECT host, state FROM alerts ORDER BY alert_id")


def test_an_alert_that_no_executor_took_for_as_long_is_abandoned_with_its_reason(ledger: Ledger) -> None:
    ledger.inbox.accept([alert("old", host="gone"), alert("young", host="gone")], [], now=NOW)
    sql_at(ledger, "young", LATER + 1)
    before = ledger.reports.totals("gone").alerts

    assert ledger.inbox.abandon(before=LATER, now=LATER + 90 * 86400.0) == {"gone": 1}

    assert states(ledger) == [("gone", "abandoned"), ("gone", "new")]
    ((at, reason, because, labels),) = ledger.inbox.refused()
    assert (at, reason, labels["host"]) == (NOW, "abandoned", "gone")
    assert because.startswith("the executor of its host did not process it within 90 days: ")
    assert "start `gpuwarden remediator execute` there" in because
    assert ledger.reports.totals("gone").alerts == before == {("accepted", ""): 2}, (
        "it was accepted, and is counted so still"
    )
    assert ledger.inbox.take_new("gone", now=LATER + 1) == 1, (
        "the young one alone: an executor that comes back finds it"
    )
    assert ledger.inbox.abandon(before=LATER, now=LATER) == {}


def sql_at(ledger: Ledger, fingerprint: str, at: float) -> None:
    with writing(ledger._engine) as connection:
        connection.execute(update(ALERTS).where(ALERTS.c.fingerprint == fingerprint).values(received_at=at))


def test_what_an_executor_has_taken_is_not_abandoned_however_old(ledger: Ledger) -> None:
    opened(ledger)
    accept(ledger, alert("x", worker="nobody", firing=False))

    assert ledger.inbox.abandon(before=LATER, now=LATER) == {}

    assert [state for _, state in states(ledger)] == ["linked", "idle"]


def test_what_was_abandoned_stays_on_record_for_a_month_more_and_then_goes(ledger: Ledger) -> None:
    ledger.inbox.accept([alert(host="gone")], [], now=NOW)
    ledger.inbox.abandon(before=LATER, now=LATER)
    ledger.inbox.accept([], [REFUSAL], now=LATER + 2 * retention.ABANDONED_S)

    forget(ledger, before=NOW + retention.ABANDONED_S)
    assert len(states(ledger)) == 2
    forget(ledger, before=NOW + retention.ABANDONED_S + 1)
    assert [state for _, state in states(ledger)] == ["refused"]


def test_abandoning_spares_what_is_taken(ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(retention.BATCH_ROWS, ALERTS, 2)
    ledger.inbox.accept([alert(f"f{n}", host="gone", worker=f"w{n}") for n in range(5)], [], now=NOW)
    untaken_alerts = retention.untaken_alerts

    def taken_meanwhile(connection: Connection, *, before: float) -> list[int]:
        found = untaken_alerts(connection, before=before)
        if is_shared(ledger._engine) and connection.get_execution_options().get("writes"):
            with closing(Ledger.open(ledger_url, host="gone")) as its:
                its.inbox.take_new("gone", now=LATER)
        return found

    assert ledger.inbox.abandon(before=LATER, now=LATER) == {"gone": 2}
    monkeypatch.setattr(retention, "untaken_alerts", taken_meanwhile)

    found = ledger.inbox.abandon(before=LATER, now=LATER)

    taken = [state for _, state in states(ledger)].count("linked")
    assert (found, taken) == (({}, 3) if ledger.shared else ({"gone": 2}, 0))
    assert len({(host, state) for host, state in states(ledger) if state == "abandoned"}) == 1


@pytest.mark.usefixtures("believes_the_clock")
def test_a_living_executor_abandons_what_is_another_hosts_and_says_so(ledger: Ledger, store: JobStore) -> None:
    ledger.inbox.accept([alert(host="gone")], [], now=ledger.now() - 7200.0)
    works = executor(ledger, store, World(), settings=replace(PACE, keep_s=3600.0))

    with capture_logs() as logged, looping(works):
        eventually(lambda: ("gone", "abandoned") in states(ledger), "it is abandoned")

    (told,) = [line for line in logged if line["event"] == "accepted alerts abandoned"]
    assert (told["host"], told["count"], told["log_level"]) == ("gone", 1, "error")
    assert "`gpuwarden ledger refused`" in told["because"]


def test_an_executor_that_is_to_keep_all_abandons_nothing(ledger: Ledger, store: JobStore) -> None:
    ledger.inbox.accept([alert(host="gone")], [], now=1000.0)

    executor(ledger, store, World(), settings=PACE).housekeeping.delete_old()

    assert states(ledger) == [("gone", "new")]


# --- what never goes


def test_nothing_goes_of_what_is_open(ledger: Ledger) -> None:
    begun(ledger)
    mended(ledger, worker="w2", key=REBORN, settle_key="8/1")
    opened(ledger, worker="w3")
    before = {table: count(ledger, table, "episode_id <> 2") for table in TABLES}

    forget(ledger)

    assert [each.worker for each in ledger.episodes.list_open()] == ["w1", "w3"]
    assert {table: count(ledger, table, "episode_id <> 2") for table in TABLES} == before
    assert count(ledger, "episodes") == 2


def test_nothing_goes_of_what_is_owed_though_its_episode_is_closed(ledger: Ledger) -> None:
    _, free, settle = begun(ledger)
    advance(ledger, free, Stage.DONE)
    ledger.episodes.close(1, Outcome.PARTLY, Reason.DONE, "", now=NOW)
    opened(ledger, worker="w2")
    forget(ledger)
    assert count(ledger, "intents") == 2

    advance(ledger, settle, Stage.ABANDONED)
    forget(ledger)

    assert count(ledger, "intents") == 0


def test_what_was_freed_is_not_freed_again_though_nothing_else_is_known_of_it(ledger: Ledger) -> None:
    """A container that could not be stopped may run for years; an old alert may be replayed as late."""
    mended(ledger)
    mended(ledger, worker="w2", key="another", settle_key="8/1")
    forget(ledger)
    assert count(ledger, "intents", f"kind = 'free' AND key = '{KEY}'") == 0

    again = opened(ledger)
    assert ledger.intents.begin(again, BEGIN, safety_limits=BOUNDLESS, now=LATER) == Close(
        outcome=Outcome.SUPERSEDED,
        reason=Reason.RESTARTED_ALREADY,
        message="this incarnation of the container was already restarted",
    )
    assert ledger.intents.begin(again, replace(BEGIN, free_key=REBORN), safety_limits=BOUNDLESS, now=LATER) is None
    (begun_again,) = ledger.episodes.list_open()
    assert begun_again.free is not None
    assert begun_again.settle is None, "that attempt was settled already"


def test_a_key_that_was_given_back_is_free_for_ever(ledger: Ledger) -> None:
    episode, _, _ = begun(ledger)
    ledger.intents.withdraw(episode.episode_id, Reason.UNCONFIRMED, "all is well", now=NOW)
    ledger.episodes.close(episode.episode_id, Outcome.UNCONFIRMED, Reason.DONE, "", now=NOW)
    second = opened(ledger)
    assert begins(ledger, second, BEGIN, now=NOW)
    (second,) = ledger.episodes.list_open()
    assert second.free is not None
    assert second.settle is not None
    advance(ledger, second.free, Stage.ABANDONED)
    advance(ledger, second.settle, Stage.ABANDONED)
    ledger.episodes.close(second.episode_id, Outcome.PARTLY, Reason.DONE, "", now=NOW)
    third = opened(ledger)
    forget(ledger)
    assert count(ledger, "intents") == 0

    assert begins(ledger, third, BEGIN, now=LATER)

    (third,) = ledger.episodes.list_open()
    assert third.settle is not None
    assert count(ledger, "spent") == 0


def test_no_number_is_given_twice(ledger: Ledger) -> None:
    mended(ledger)
    last = mended(ledger, key=REBORN, settle_key="7/2")
    forget(ledger)

    assert opened(ledger).episode_id > last
    assert ledger.reports.get(last) is not None, "the newest stays"


# --- how much at a time


def test_a_bite_is_no_larger_than_it_may_be(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(12):
        accept(ledger, alert())
    ledger.episodes.close(1, Outcome.FIXED, Reason.DONE, "", now=NOW)
    opened(ledger, worker="w2")
    monkeypatch.setattr(retention, "BATCH_ROWS", {CAPTURES: 10, JOURNAL: 5, RUN_DECISIONS: 5, ALERTS: 5})
    sizes, had = list[int](), sum(count(ledger, table) for table in TABLES)

    while ledger.episodes.delete_old(before=LATER):
        left = sum(count(ledger, table) for table in TABLES)
        sizes.append(had - left)
        had = left

    assert sum(sizes) == 13 + 12 + 1  # with the line of its close
    assert max(sizes) <= 5 + 5 + 1


@pytest.mark.parametrize("state", ["refused", "idle"])
def test_alerts_without_effect_are_bounded(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(retention, "UNUSED_ALERTS_MAX", 5)
    opened(ledger, worker="w2")

    for n in range(4):
        if state == "refused":
            ledger.inbox.accept([], [replace(REFUSAL, fingerprint=f"f{n}.{each}") for each in range(3)], now=NOW + n)
        else:
            accept(ledger, *(alert(f"f{n}.{each}", firing=False) for each in range(3)))

    kept = rows(ledger, f"SELECT fingerprint FROM alerts WHERE state = '{state}' ORDER BY alert_id")  # noqa: S608
    assert [fingerprint for (fingerprint,) in kept] == ["f2.1", "f2.2", "f3.0", "f3.1", "f3.2"]
    assert len(ledger.episodes.list_open()) == 1
    assert sum(ledger.reports.totals(HOST).alerts.values()) == 13, "all are counted"


def test_refusals_are_bounded(ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "UNUSED_ALERTS_MAX", 5)

    def flood() -> None:
        with closing(Ledger.open(ledger_url, host=HOST)) as own:
            for _ in range(10):
                own.inbox.accept([], [REFUSAL] * 4, now=NOW)

    assert together(*[flood] * 4) == [None] * 4
    ledger.inbox.accept([], [REFUSAL], now=NOW)

    assert count(ledger, "alerts") == 5
    assert ledger.reports.totals(HOST).alerts == {("refused", "other_host"): 161}


def test_two_that_forget_at_once_forget_everything_once(ledger: Ledger, ledger_url: str) -> None:
    for n in range(6):
        mended(ledger, key=f"key {n}", settle_key=f"{n}/1")

    def forgets() -> None:
        with closing(Ledger.open(ledger_url, host="box2")) as own:
            forget(own)

    assert together(forgets, forgets) == [None, None]
    forget(ledger)

    assert count(ledger, "episodes") == 1
    assert count(ledger, "spent") == 10


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_the_file_does_not_grow_while_as_much_goes_as_comes(ledger: Ledger) -> None:
    def a_year(number: int) -> int:
        for n in range(40):
            mended(ledger, key=f"key {number} {n}", settle_key=f"{number}{n}/1", at=NOW + number)
        forget(ledger, before=NOW + number + 0.5)
        ((pages,),) = rows(ledger, "PRAGMA page_count")
        return int(pages)

    first = a_year(1)
    last = max(a_year(year) for year in range(2, 6))

    assert last <= first + 8, "the keys of what was freed are all that is added"


# --- the executor


@pytest.fixture
def believes_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock has gone on for long enough."""
    monkeypatch.setattr("remediator.executor.housekeeping.CLOCK_BELIEVED_S", 0.0)


@pytest.mark.usefixtures("believes_the_clock")
def test_the_executor_forgets_what_is_older_than_it_is_to_keep(ledger: Ledger, store: JobStore) -> None:
    mended(ledger, at=1000.0)
    mended(ledger, key=REBORN, settle_key="7/2", at=ledger.now())

    with looping(executor(ledger, store, World(), settings=replace(PACE, keep_s=3600.0))):
        eventually(lambda: ledger.reports.get(1) is None, "it is forgotten")

    assert ledger.reports.get(2) is not None


def test_an_executor_that_is_to_keep_all_forgets_nothing(ledger: Ledger, store: JobStore) -> None:
    mended(ledger, at=1000.0)
    mended(ledger, key=REBORN, settle_key="7/2", at=ledger.now())
    works = executor(ledger, store, World(), settings=PACE)

    works.housekeeping.delete_old()

    assert ledger.reports.get(1) is not None


def test_an_unset_clock_ages_nothing(ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    started_at = ledger.now()
    mended(ledger, at=1000.0)
    mended(ledger, key=REBORN, settle_key="7/2", at=started_at)
    works = executor(ledger, store, World(), settings=replace(PACE, keep_s=3600.0))

    def left(boot_s: float, *, ahead_s: float = 0.0) -> int:
        monkeypatch.setattr("remediator.executor.housekeeping.clock.boottime_s", lambda: boot_s)
        monkeypatch.setattr(ledger, "now", lambda: started_at + boot_s + ahead_s)
        works.housekeeping.delete_old()
        return count(ledger, "episodes")

    days_s = 90 * 86400.0
    assert [left(100), left(650), left(690, ahead_s=days_s), left(710, ahead_s=days_s), left(720)] == [2] * 5
    assert [left(1310), left(1330)] == [2, 1]


@pytest.mark.usefixtures("believes_the_clock")
def test_one_round_forgets_for_a_moment_only(ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remediator.executor.housekeeping.DELETE_S", 0.0)
    monkeypatch.setattr(retention, "EPISODES_BATCH", 1)
    for n in range(3):
        mended(ledger, key=f"key {n}", settle_key=f"{n}/1", at=1000.0)
    works = executor(ledger, store, World(), settings=replace(PACE, keep_s=3600.0))

    left = []
    for _ in range(3):
        works.housekeeping.delete_old()
        left.append(count(ledger, "episodes"))

    assert left == [2, 1, 1]
