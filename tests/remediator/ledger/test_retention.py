"""Deletion of old rows in batches: which rows are deleted and which stay, on both databases."""

from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import pytest
from sqlalchemy import Connection, update
from structlog.testing import capture_logs

from gpuwarden.db.engine import is_shared
from gpuwarden.db.transactions import writing
from gpuwarden.queue import JobStore, Submission
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
    ((found,),) = rows(ledger, f"SELECT count(*) FROM {table} WHERE {where}")  # noqa: S608 - fixed text
    return int(found)


def delete_all(ledger: Ledger, *, before: float = LATER) -> int:
    """Delete until nothing old is left. Returns the number of batches."""
    batches = 0
    while ledger.episodes.delete_old(before=before):
        batches += 1
        assert batches < 1000
    return batches


def fixed_episode(
    ledger: Ledger, *, worker: str = "w1", key: str = KEY, settle_key: str = "7/1", at: float = NOW
) -> int:
    """A closed episode with a restart, a settle and a capture. Returns its id."""
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


# --- deleted


def test_old_episode_is_deleted_with_all_its_rows(ledger: Ledger) -> None:
    armed(ledger)
    old, young = fixed_episode(ledger), fixed_episode(ledger, key=REBORN, settle_key="7/2", at=LATER + 1)
    for episode_id in (old, young):
        block = f"({episode_id}, 'block', 1.0)"
        rows(ledger, f"INSERT INTO run_decisions (episode_id, kind, decided_at) VALUES {block}")  # noqa: S608 - fixed text
    before = {table: count(ledger, table) for table in TABLES}
    whole = ledger.reports.get(young)

    delete_all(ledger)

    assert {table: before[table] - count(ledger, table) for table in TABLES} == {
        "episodes": 1, "alerts": 1, "journal": 6, "intents": 2, "captures": 1, "run_decisions": 1,
    }  # fmt: skip
    assert ledger.reports.get(old) is None
    assert ledger.reports.get(young) == whole
    assert len(ledger.captures.of_episode(young)) == 1


def test_totals_do_not_change(ledger: Ledger) -> None:
    fixed_episode(ledger)
    accept(ledger, alert("x", worker="w9", firing=False))
    ledger.inbox.accept([], [REFUSAL], now=NOW)
    opened(ledger, worker="w2")
    before = ledger.reports.totals(HOST)

    assert delete_all(ledger) > 0

    assert ledger.reports.totals(HOST) == before
    assert before.outcomes == {("fixed", "stall"): 1}
    assert before.alerts == {("accepted", ""): 3, ("refused", "other_host"): 1}


def test_old_alerts_without_effect_are_deleted_except_the_newest(ledger: Ledger) -> None:
    ledger.inbox.accept([], [REFUSAL], now=NOW)
    accept(ledger, alert("x", firing=False))
    ledger.inbox.accept([], [REFUSAL], now=LATER + 1)
    delete_all(ledger)
    assert rows(ledger, "SELECT state, received_at FROM alerts") == [("refused", LATER + 1)]

    delete_all(ledger, before=LATER + 9)

    assert count(ledger, "alerts") == 1, "its id is not used again"
    assert ledger.inbox.last_alert_at() == LATER + 1


def test_orders_without_effect_are_deleted(ledger: Ledger) -> None:
    armed(ledger)
    for act, host in (
        (Act.PAUSE, HOST), (Act.RESUME, None), (Act.PAUSE, None), (Act.DISARM, HOST), (Act.ARM, HOST),
        (Act.BREAKER, None), (Act.RELEASE, None),
    ):  # fmt: skip
        ledger.orders.give(Order(act=act, at=NOW, who="test", reason="", host=host))
    standing = ledger.orders.current()

    delete_all(ledger)

    assert ledger.orders.current() == standing
    left = [(order.act, order.host) for order in ledger.orders.given_since(since=0.0)]
    assert (Act.DISARM, HOST) not in left
    assert (Act.BREAKER, None) not in left
    assert {(Act.ARM, None), (Act.ARM, HOST), (Act.RELEASE, None)} <= set(left)


# --- alerts that no executor takes


def states(ledger: Ledger) -> list[tuple[str, str]]:
    return rows(ledger, "SELECT host, state FROM alerts ORDER BY alert_id")


def test_old_alert_that_no_executor_took_is_abandoned_with_a_reason(ledger: Ledger) -> None:
    ledger.inbox.accept([alert("old", host="gone"), alert("young", host="gone")], [], now=NOW)
    sql_at(ledger, "young", LATER + 1)
    before = ledger.reports.totals("gone").alerts

    assert ledger.inbox.abandon(before=LATER, now=LATER + 90 * 86400.0) == {"gone": 1}

    assert states(ledger) == [("gone", "abandoned"), ("gone", "new")]
    ((at, reason, message, labels),) = ledger.inbox.refused()
    assert (at, reason, labels["host"]) == (NOW, "abandoned", "gone")
    assert message.startswith("the executor of its host did not process it within 90 days: ")
    assert "start `gpuwarden remediator execute` there" in message
    assert ledger.reports.totals("gone").alerts == before == {("accepted", ""): 2}, "it still counts as accepted"
    assert ledger.inbox.take_new("gone", now=LATER + 1) == 1, "the recent alert is taken by a returning executor"
    assert ledger.inbox.abandon(before=LATER, now=LATER) == {}


def sql_at(ledger: Ledger, fingerprint: str, at: float) -> None:
    with writing(ledger._engine) as connection:
        connection.execute(update(ALERTS).where(ALERTS.c.fingerprint == fingerprint).values(received_at=at))


def test_taken_alert_is_never_abandoned(ledger: Ledger) -> None:
    opened(ledger)
    accept(ledger, alert("x", worker="w9", firing=False))

    assert ledger.inbox.abandon(before=LATER, now=LATER) == {}

    assert [state for _, state in states(ledger)] == ["linked", "ignored"]


def test_abandoned_alert_is_deleted_after_another_month(ledger: Ledger) -> None:
    ledger.inbox.accept([alert(host="gone")], [], now=NOW)
    ledger.inbox.abandon(before=LATER, now=LATER)
    ledger.inbox.accept([], [REFUSAL], now=LATER + 2 * retention.ABANDONED_S)

    delete_all(ledger, before=NOW + retention.ABANDONED_S)
    assert len(states(ledger)) == 2
    delete_all(ledger, before=NOW + retention.ABANDONED_S + 1)
    assert [state for _, state in states(ledger)] == ["refused"]


def test_alert_taken_during_an_abandon_is_spared(
    ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(retention.BATCH_ROWS, ALERTS, 2)
    ledger.inbox.accept([alert(f"f{n}", host="gone", worker=f"w{n}") for n in range(5)], [], now=NOW)
    untaken_alerts = retention.untaken_alerts

    def taken_in_between(connection: Connection, *, before: float) -> list[int]:
        found = untaken_alerts(connection, before=before)
        if is_shared(ledger._engine) and connection.get_execution_options().get("writes"):
            with closing(Ledger.open(ledger_url, host="gone")) as its:
                its.inbox.take_new("gone", now=LATER)
        return found

    assert ledger.inbox.abandon(before=LATER, now=LATER) == {"gone": 2}
    monkeypatch.setattr(retention, "untaken_alerts", taken_in_between)

    found = ledger.inbox.abandon(before=LATER, now=LATER)

    taken = [state for _, state in states(ledger)].count("linked")
    assert (found, taken) == (({}, 3) if ledger.shared else ({"gone": 2}, 0))
    assert len({(host, state) for host, state in states(ledger) if state == "abandoned"}) == 1


@pytest.mark.usefixtures("clock_is_trusted")
def test_executor_abandons_alerts_of_another_host_and_logs_it(ledger: Ledger, store: JobStore) -> None:
    ledger.inbox.accept([alert(host="gone")], [], now=ledger.now() - 7200.0)
    works = executor(ledger, store, World(), settings=replace(PACE, keep_s=3600.0))

    with capture_logs() as logged, looping(works):
        eventually(lambda: ("gone", "abandoned") in states(ledger), "it is abandoned")

    (found,) = [line for line in logged if line["event"] == "accepted alerts abandoned"]
    assert (found["host"], found["count"], found["log_level"]) == ("gone", 1, "error")
    assert "`gpuwarden ledger refused`" in found["reason"]


def test_executor_without_a_retention_abandons_nothing(ledger: Ledger, store: JobStore) -> None:
    ledger.inbox.accept([alert(host="gone")], [], now=1000.0)

    executor(ledger, store, World(), settings=PACE).housekeeping.delete_old()

    assert states(ledger) == [("gone", "new")]


# --- never deleted


def test_open_episodes_are_never_deleted(ledger: Ledger) -> None:
    begun(ledger)
    fixed_episode(ledger, worker="w2", key=REBORN, settle_key="8/1")
    opened(ledger, worker="w3")
    before = {table: count(ledger, table, "episode_id <> 2") for table in TABLES}

    delete_all(ledger)

    assert [each.worker for each in ledger.episodes.list_open()] == ["w1", "w3"]
    assert {table: count(ledger, table, "episode_id <> 2") for table in TABLES} == before
    assert count(ledger, "episodes") == 2


def test_closed_episode_with_an_open_intent_is_never_deleted(ledger: Ledger) -> None:
    _, free, settle = begun(ledger)
    advance(ledger, free, Stage.DONE)
    ledger.episodes.close(1, Outcome.PARTLY, Reason.DONE, "", now=NOW)
    opened(ledger, worker="w2")
    delete_all(ledger)
    assert count(ledger, "intents") == 2

    advance(ledger, settle, Stage.ABANDONED)
    delete_all(ledger)

    assert count(ledger, "intents") == 0


def test_incarnation_of_a_deleted_episode_is_not_restarted_again(ledger: Ledger) -> None:
    """A container that could not be stopped may run for years, and an old alert may be replayed."""
    fixed_episode(ledger)
    fixed_episode(ledger, worker="w2", key="another", settle_key="8/1")
    delete_all(ledger)
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


def test_released_key_can_be_used_after_the_deletion(ledger: Ledger) -> None:
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
    delete_all(ledger)
    assert count(ledger, "intents") == 0

    assert begins(ledger, third, BEGIN, now=LATER)

    (third,) = ledger.episodes.list_open()
    assert third.settle is not None
    assert count(ledger, "used_intent_keys") == 0


def test_episode_id_is_never_reused(ledger: Ledger) -> None:
    fixed_episode(ledger)
    last = fixed_episode(ledger, key=REBORN, settle_key="7/2")
    delete_all(ledger)

    assert opened(ledger).episode_id > last
    assert ledger.reports.get(last) is not None, "the newest stays"


# --- batches and limits


def test_batch_is_within_its_limit(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
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

    assert sum(sizes) == 13 + 12 + 1  # with the entry of its close
    assert max(sizes) <= 5 + 5 + 1


@pytest.mark.parametrize("state", ["refused", "ignored"])
def test_number_of_alerts_without_effect_is_limited(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
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


def test_number_of_refusals_is_limited(ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "UNUSED_ALERTS_MAX", 5)

    def flood() -> None:
        with closing(Ledger.open(ledger_url, host=HOST)) as own:
            for _ in range(10):
                own.inbox.accept([], [REFUSAL] * 4, now=NOW)

    assert together(*[flood] * 4) == [None] * 4
    ledger.inbox.accept([], [REFUSAL], now=NOW)

    assert count(ledger, "alerts") == 5
    assert ledger.reports.totals(HOST).alerts == {("refused", "other_host"): 161}


def test_concurrent_deletions_delete_everything_once(ledger: Ledger, ledger_url: str) -> None:
    for n in range(6):
        fixed_episode(ledger, key=f"key {n}", settle_key=f"{n}/1")

    def forgets() -> None:
        with closing(Ledger.open(ledger_url, host="box2")) as own:
            delete_all(own)

    assert together(forgets, forgets) == [None, None]
    delete_all(ledger)

    assert count(ledger, "episodes") == 1
    assert count(ledger, "used_intent_keys") == 10


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_file_does_not_grow_at_a_constant_load(ledger: Ledger) -> None:
    def a_year(number: int) -> int:
        for n in range(40):
            fixed_episode(ledger, key=f"key {number} {n}", settle_key=f"{number}{n}/1", at=NOW + number)
        delete_all(ledger, before=NOW + number + 0.5)
        ((pages,),) = rows(ledger, "PRAGMA page_count")
        return int(pages)

    first = a_year(1)
    last = max(a_year(year) for year in range(2, 6))

    assert last <= first + 8, "only the keys of restarts are added"


# --- the executor


@pytest.fixture
def clock_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts as set."""
    monkeypatch.setattr("remediator.executor.housekeeping.CLOCK_BELIEVED_S", 0.0)


@pytest.mark.usefixtures("clock_is_trusted")
def test_executor_deletes_rows_older_than_its_retention(ledger: Ledger, store: JobStore) -> None:
    fixed_episode(ledger, at=1000.0)
    fixed_episode(ledger, key=REBORN, settle_key="7/2", at=ledger.now())

    with looping(executor(ledger, store, World(), settings=replace(PACE, keep_s=3600.0))):
        eventually(lambda: ledger.reports.get(1) is None, "it is deleted")

    assert ledger.reports.get(2) is not None


@pytest.mark.usefixtures("clock_is_trusted")
def test_executor_deletes_jobs_older_than_the_retention_of_their_queue(ledger: Ledger, store: JobStore) -> None:
    ids = [store.runs.submit(Submission(queue="gpu"), now=1000.0) for _ in range(2)]
    for job_id in ids:
        assert store.admin.cancel(job_id, reason="", now=1000.0)

    with looping(executor(ledger, store, World(), settings=PACE)):
        eventually(lambda: [job.job_id for job in store.jobs()] == ids[1:], "all but the newest are deleted")


def test_executor_without_a_retention_deletes_nothing(ledger: Ledger, store: JobStore) -> None:
    fixed_episode(ledger, at=1000.0)
    fixed_episode(ledger, key=REBORN, settle_key="7/2", at=ledger.now())
    works = executor(ledger, store, World(), settings=PACE)

    works.housekeeping.delete_old()

    assert ledger.reports.get(1) is not None


def test_nothing_is_deleted_before_the_clock_is_set(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_at = ledger.now()
    fixed_episode(ledger, at=1000.0)
    fixed_episode(ledger, key=REBORN, settle_key="7/2", at=started_at)
    works = executor(ledger, store, World(), settings=replace(PACE, keep_s=3600.0))

    def left(boot_s: float, *, ahead_s: float = 0.0) -> int:
        monkeypatch.setattr("remediator.executor.housekeeping.clock.boottime_s", lambda: boot_s)
        monkeypatch.setattr(ledger, "now", lambda: started_at + boot_s + ahead_s)
        works.housekeeping.delete_old()
        return count(ledger, "episodes")

    days_s = 90 * 86400.0
    assert [left(100), left(650), left(690, ahead_s=days_s), left(710, ahead_s=days_s), left(720)] == [2] * 5
    assert [left(1310), left(1330)] == [2, 1]


@pytest.mark.usefixtures("clock_is_trusted")
def test_one_iteration_deletes_for_a_limited_time(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remediator.executor.housekeeping.DELETE_S", 0.0)
    monkeypatch.setattr(retention, "EPISODES_BATCH", 1)
    for n in range(3):
        fixed_episode(ledger, key=f"key {n}", settle_key=f"{n}/1", at=1000.0)
    works = executor(ledger, store, World(), settings=replace(PACE, keep_s=3600.0))

    left = []
    for _ in range(3):
        works.housekeeping.delete_old()
        left.append(count(ledger, "episodes"))

    assert left == [2, 1, 1]
