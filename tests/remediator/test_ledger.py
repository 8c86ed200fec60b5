"""The ledger in a real SQLite file: the inbox, one episode a worker, one intent a target, and what a crash leaves."""

import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.database import DatabaseError
from gpuwarden.job import Trip
from remediator.alert import Alert, Refusal
from remediator.ledger import TAKE_MAX, Ledger, Story
from remediator.plan import Begin, Episode, Intent, Kind, Outcome, Stage
from tests.remediator.builders import HANDLE, HOST, KEY, NOW, REBORN, alert

REFUSAL = Refusal(reason="other_host", because="it is for box2", fingerprint="f9", labels={"host": "box2"})
BEGIN = Begin(
    free_key=KEY,
    container_kind="docker",
    container_handle=HANDLE,
    container_name="c1",
    settle_key="7/1",
    worker_incarnation="i1",
    because="silent",
    gpus=("GPU-0",),
)


def accept(ledger: Ledger, *alerts: Alert, take: bool = True) -> None:
    ledger.accept(alerts, [], now=NOW)
    if take:
        ledger.take_new(now=NOW)


def opened(ledger: Ledger, **labels: Any) -> Episode:
    accept(ledger, alert(**labels))
    return ledger.open_episodes()[-1]


def read(ledger: Ledger, episode: Episode) -> Episode:
    again = ledger.episode(episode.episode_id)
    assert again is not None
    return again


def story(ledger: Ledger, episode_id: int = 1) -> Story:
    found = ledger.story(episode_id)
    assert found is not None
    return found


def begun(ledger: Ledger, **labels: Any) -> tuple[Episode, Intent, Intent]:
    episode = opened(ledger, **labels)
    assert ledger.begin(episode, BEGIN, now=NOW)
    episode = read(ledger, episode)
    assert episode.free is not None
    assert episode.settle is not None
    return episode, episode.free, episode.settle


def advance(ledger: Ledger, intent: Intent, stage: Stage, *, now: float = NOW, **data: Any) -> bool:
    return ledger.advance(intent, stage, episode_id=1, act="did", step="s", because="b", now=now, data=data or None)


def rows(file: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(file)
    found = connection.execute(query).fetchall()
    connection.close()
    return found


@contextmanager
def full_disk(ledger: Ledger) -> Iterator[None]:
    """The database may not grow by a page, on whichever connection."""
    with ledger._engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        before = connection.exec_driver_sql("PRAGMA max_page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    yield
    with ledger._engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {before}")


# --- the inbox


def test_a_payload_is_kept_whole_with_its_refusals(ledger: Ledger) -> None:
    ledger.accept([alert("a"), alert("b", worker="w2")], [REFUSAL], now=NOW)

    assert ledger.totals(HOST).alerts == {("accepted", ""): 2, ("refused", "other_host"): 1}
    assert ledger.refused() == [(NOW, "other_host", "it is for box2", {"host": "box2"})]


def test_a_payload_is_kept_not_at_all_when_the_disk_is_full(ledger: Ledger, ledger_file: Path) -> None:
    many = [alert(f"f{number}", worker=f"w{number}", pad="x" * 1000) for number in range(100)]

    with full_disk(ledger), pytest.raises(DatabaseError, match="full"):
        ledger.accept(many, [REFUSAL], now=NOW)

    assert rows(ledger_file, "SELECT count(*) FROM alerts") == [(0,)]
    ledger.accept(many, [REFUSAL], now=NOW)
    assert rows(ledger_file, "SELECT count(*) FROM alerts") == [(101,)]


def test_what_was_accepted_is_taken_after_a_kill_and_only_once(
    ledger: Ledger, ledger_url: str, ledger_file: Path
) -> None:
    """Killed between the commit and taking it up, with no chance to tidy."""
    script = (
        "import os, signal, sys; from remediator.ledger import Ledger; from tests.remediator.builders import alert\n"
        "Ledger.open(sys.argv[1]).accept([alert('a')], [], now=1.0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    checkout = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", script, ledger_url], cwd=checkout, check=False)
    assert killed.returncode == -signal.SIGKILL

    assert ledger.take_new(now=NOW) == 1
    assert ledger.take_new(now=NOW) == 0
    assert len(ledger.open_episodes()) == 1
    assert rows(ledger_file, "SELECT state, episode_id FROM alerts") == [("linked", 1)]


def test_alerts_are_taken_in_bounded_bites_oldest_first(ledger: Ledger) -> None:
    ledger.accept([alert(f"f{n}", worker=f"w{n}") for n in range(TAKE_MAX + 3)], [], now=NOW)

    assert [ledger.take_new(now=NOW) for _ in range(3)] == [TAKE_MAX, 3, 0]
    assert [episode.worker for episode in ledger.open_episodes()][:2] == ["w0", "w1"]


def test_a_refused_alert_opens_nothing(ledger: Ledger) -> None:
    ledger.accept([], [REFUSAL], now=NOW)

    assert ledger.take_new(now=NOW) == 0
    assert ledger.open_episodes() == []


# --- one episode a worker


def test_an_episode_carries_what_its_alert_accused(ledger: Ledger) -> None:
    episode = opened(ledger)

    assert (episode.remedy, episode.trip, episode.host, episode.worker) == ("restart_worker", Trip.STALL, HOST, "w1")
    assert (episode.incarnation, episode.job_id, episode.attempt) == ("i1", 7, 1)
    assert (episode.firing, episode.would_act, episode.free, episode.settle) == (True, False, None, None)


@pytest.mark.parametrize("text", [None, "", "-1", "7.0", "٧", "1e3", "9" * 19, "7; DROP TABLE jobs", " 7"])
def test_a_job_id_that_is_no_number_is_no_job(ledger: Ledger, text: str | None) -> None:
    assert opened(ledger, job_id=text).job_id is None


def test_the_largest_job_id_is_kept(ledger: Ledger) -> None:
    assert opened(ledger, job_id="9" * 18).job_id == int("9" * 18)


def test_hostile_names_are_data(ledger: Ledger) -> None:
    hostile = "w'; DROP TABLE alerts; --\n$(reboot)\x00\x1b🙈"

    episode = opened(ledger, worker=hostile)
    accept(ledger, alert("other", worker=hostile))

    assert episode.worker == hostile
    assert len(ledger.open_episodes()) == 1


def test_duplicates_replays_and_a_second_rule_join_the_open_episode(ledger: Ledger) -> None:
    accept(ledger, alert("a"), alert("a"), alert("b", alertname="SecondRule"))
    accept(ledger, alert("a"))

    assert len(ledger.open_episodes()) == 1
    assert [entry.step for entry in story(ledger).entries] == ["alert firing"] * 4


def test_two_workers_have_two_episodes(ledger: Ledger) -> None:
    accept(ledger, alert("a"), alert("b", worker="w2"))

    assert [episode.worker for episode in ledger.open_episodes()] == ["w1", "w2"]


def test_the_database_itself_allows_one_open_episode_a_worker(ledger: Ledger, ledger_file: Path) -> None:
    opened(ledger)

    connection = sqlite3.connect(ledger_file)
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        connection.execute(
            "INSERT INTO episodes (remedy, trip, host, worker, opened_at, would_act) VALUES ('r', 's', ?, 'w1', 1, 0)",
            (HOST,),
        )
    connection.close()


def test_two_executors_that_take_at_once_tie_each_alert_once(ledger: Ledger, ledger_url: str) -> None:
    ledger.accept([alert(f"f{n}", worker=f"w{n % 10}") for n in range(200)], [], now=NOW)
    other = Ledger.open(ledger_url)

    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(lambda each: each.take_new(now=NOW), [ledger, other]))

    other.close()
    assert sorted(taken) == [0, 200]
    assert len(ledger.open_episodes()) == 10


def test_a_resolved_alert_opens_nothing(ledger: Ledger, ledger_file: Path) -> None:
    accept(ledger, alert("a", firing=False))

    assert ledger.open_episodes() == []
    assert rows(ledger_file, "SELECT state, because FROM alerts") == [("idle", "nothing was open for it")]


def test_after_its_episode_closed_the_next_alert_opens_another(ledger: Ledger) -> None:
    first = opened(ledger)
    ledger.close_episode(first.episode_id, Outcome.MENDED, "done", now=NOW)

    second = opened(ledger, attempt="2")

    assert second.episode_id != first.episode_id


FIRING: dict[str, tuple[list[tuple[str, bool]], bool]] = {
    "one rule fires": ([("a", True)], True),
    "its alert ended": ([("a", True), ("a", False)], False),
    "it fired again": ([("a", True), ("a", False), ("a", True)], True),
    "two rules fire": ([("a", True), ("b", True)], True),
    "one of two rules ended": ([("a", True), ("b", True), ("a", False)], True),
    "both ended": ([("a", True), ("b", True), ("a", False), ("b", False)], False),
    "an end that was sent twice": ([("a", True), ("a", False), ("a", False)], False),
    "the end of a rule that never fired here": ([("a", True), ("b", False)], True),
}


@pytest.mark.parametrize(("came", "firing"), FIRING.values(), ids=FIRING)
def test_an_episode_fires_while_any_series_of_it_does(
    ledger: Ledger, came: list[tuple[str, bool]], firing: bool
) -> None:
    for fingerprint, fires in came:
        accept(ledger, alert(fingerprint, firing=fires))

    assert [episode.firing for episode in ledger.open_episodes()] == [firing]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from(["w1", "w2"])), max_size=12))
def test_whatever_order_alerts_come_in_a_worker_has_at_most_one_open_episode_and_it_fires_rightly(
    came: list[tuple[str, bool, str]],
) -> None:
    newest: dict[str, dict[str, bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.open(f"sqlite:///{folder}/ledger.db")
        for fingerprint, fires, worker in came:
            accept(ledger, alert(fingerprint, firing=fires, worker=worker))
            if fires or worker in newest:
                newest.setdefault(worker, {})[fingerprint] = fires

        found = {episode.worker: episode.firing for episode in ledger.open_episodes()}
        ledger.close()

    assert found == {worker: any(series.values()) for worker, series in newest.items()}


# --- what comes while an episode is open, and is about something else


def test_a_later_attempts_alert_gets_its_own_episode_once_the_open_one_closes(ledger: Ledger) -> None:
    """Alertmanager sends it once, and again only after hours: to be tied to a closed episode is to be lost."""
    first = opened(ledger)
    accept(ledger, alert("later", attempt="2", incarnation="i2"))
    assert ledger.take_new(now=NOW) == 0

    ledger.close_episode(first.episode_id, Outcome.SUPERSEDED, "over", now=NOW)

    assert ledger.take_new(now=NOW) == 1
    assert [(each.attempt, each.incarnation) for each in ledger.open_episodes()] == [(2, "i2")]


def test_what_accused_the_same_attempt_does_not_come_back(ledger: Ledger) -> None:
    first = opened(ledger)
    accept(ledger, alert("second rule"), alert("ended", attempt="2"), alert("ended", attempt="2", firing=False))

    ledger.close_episode(first.episode_id, Outcome.MENDED, "done", now=NOW)

    assert ledger.take_new(now=NOW) == 0
    assert ledger.open_episodes() == []


def test_closing_again_and_again_ends(ledger: Ledger) -> None:
    """Each alert that comes back opens an episode of its own identity, and so does not come back from that one."""
    opened(ledger)
    accept(ledger, *[alert(f"f{attempt}", attempt=str(attempt)) for attempt in range(2, 6)])

    closed = 0
    while episodes := ledger.open_episodes():
        ledger.close_episode(episodes[0].episode_id, Outcome.SUPERSEDED, "over", now=NOW)
        ledger.take_new(now=NOW)
        closed += 1

    assert closed == 5


# --- one intent a target


def test_begin_writes_both_intents_and_why(ledger: Ledger) -> None:
    _, free, settle = begun(ledger)

    assert (free.kind, free.key, free.stage) == (Kind.FREE, KEY, Stage.PLANNED)
    assert dict(free.data) == {"kind": "docker", "handle": HANDLE, "name": "c1", "gpus": ["GPU-0"]}
    assert (settle.kind, settle.key, settle.stage) == (Kind.SETTLE, "7/1", Stage.PLANNED)
    assert dict(settle.data) == {"incarnation": "i1"}
    assert story(ledger).entries[-1].step == "begin"


def test_a_container_without_a_job_is_only_freed(ledger: Ledger, ledger_file: Path) -> None:
    episode = opened(ledger, job_id=None, attempt=None)

    assert ledger.begin(episode, Begin(**{**vars(BEGIN), "settle_key": None}), now=NOW)

    assert rows(ledger_file, "SELECT kind FROM intents") == [("free",)]


def test_one_incarnation_is_freed_once(ledger: Ledger, ledger_file: Path) -> None:
    first, *_ = begun(ledger)
    assert not ledger.begin(first, BEGIN, now=NOW)
    ledger.close_episode(first.episode_id, Outcome.MENDED, "done", now=NOW)
    second = opened(ledger)

    assert not ledger.begin(second, BEGIN, now=NOW)
    assert rows(ledger_file, "SELECT count(*) FROM intents") == [(2,)]
    assert read(ledger, second).free is None


def test_an_attempt_is_settled_once_though_its_container_is_freed_again(ledger: Ledger, ledger_file: Path) -> None:
    first, *_ = begun(ledger)
    ledger.close_episode(first.episode_id, Outcome.PARTLY, "done", now=NOW)
    second = opened(ledger)

    assert ledger.begin(second, Begin(**{**vars(BEGIN), "free_key": REBORN}), now=NOW)

    assert rows(ledger_file, "SELECT kind, key, episode_id FROM intents ORDER BY intent_id") == [
        ("free", KEY, 1),
        ("settle", "7/1", 1),
        ("free", REBORN, 2),
    ]
    assert read(ledger, second).settle is None


def test_a_promise_given_up_before_anything_was_done_gives_its_key_back(ledger: Ledger) -> None:
    first, free, settle = begun(ledger)
    assert advance(ledger, free, Stage.ABANDONED)
    assert advance(ledger, settle, Stage.ABANDONED)
    ledger.close_episode(first.episode_id, Outcome.PARTLY, "it showed life", now=NOW)

    second = opened(ledger)

    assert ledger.begin(second, BEGIN, now=NOW)
    again = read(ledger, second)
    assert again.free is not None
    assert again.settle is not None
    assert (again.free.key, again.settle.key) == (KEY, "7/1")


def test_what_is_withdrawn_is_off_the_episode_and_can_be_promised_again(ledger: Ledger) -> None:
    first, *_ = begun(ledger)

    ledger.withdraw(first.episode_id, "it shows life", now=NOW)

    withdrawn = read(ledger, first)
    assert (withdrawn.free, withdrawn.settle) == (None, None)
    assert ledger.begin(withdrawn, BEGIN, now=NOW)
    again = read(ledger, first)
    assert again.free is not None
    assert again.settle is not None
    assert (again.free.key, again.settle.key) == (KEY, "7/1")


def test_only_what_is_planned_can_be_withdrawn(ledger: Ledger) -> None:
    first, free, settle = begun(ledger)
    assert advance(ledger, settle, Stage.FENCED)
    assert advance(ledger, free, Stage.STOPPING)

    ledger.withdraw(first.episode_id, "too late", now=NOW)

    kept = read(ledger, first)
    assert kept.free is not None
    assert kept.settle is not None
    assert (kept.free.stage, kept.settle.stage) == (Stage.STOPPING, Stage.FENCED)


@pytest.mark.parametrize("reached", [Stage.STOPPING, Stage.DEAD])
def test_a_promise_given_up_after_something_was_done_keeps_its_key(ledger: Ledger, reached: Stage) -> None:
    first, free, _ = begun(ledger)
    assert advance(ledger, free, reached)
    acted = read(ledger, first).free
    assert acted is not None
    assert advance(ledger, acted, Stage.ABANDONED)
    ledger.close_episode(first.episode_id, Outcome.PARTLY, "it cannot be stopped", now=NOW)

    assert not ledger.begin(opened(ledger), BEGIN, now=NOW)


def test_begin_is_all_or_nothing_when_the_disk_is_full(ledger: Ledger, ledger_file: Path) -> None:
    episode = opened(ledger)
    step = Begin(**{**vars(BEGIN), "container_name": "c" * 100_000})

    with full_disk(ledger), pytest.raises(DatabaseError, match="full"):
        ledger.begin(episode, step, now=NOW)

    assert rows(ledger_file, "SELECT count(*) FROM intents") == [(0,)]
    assert ledger.begin(episode, step, now=NOW)


def test_two_that_begin_at_once_get_one_free_between_them(ledger: Ledger, ledger_url: str) -> None:
    episode = opened(ledger)
    other = Ledger.open(ledger_url)

    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(lambda each: each.begin(episode, BEGIN, now=NOW), [ledger, other]))

    other.close()
    assert sorted(won) == [False, True]


def test_an_intent_moves_only_from_the_stage_it_was_read_at(ledger: Ledger) -> None:
    episode, free, _ = begun(ledger)

    assert advance(ledger, free, Stage.STOPPING, pids=[4001])
    before = len(story(ledger).entries)
    assert not advance(ledger, free, Stage.DEAD)

    now = read(ledger, episode).free
    assert now is not None
    assert (now.stage, now.data["pids"], now.data["handle"]) == (Stage.STOPPING, [4001], HANDLE)
    assert len(story(ledger).entries) == before


def test_a_stage_is_as_old_as_its_first_entry(ledger: Ledger) -> None:
    episode, free, _ = begun(ledger)
    advance(ledger, free, Stage.STOPPING, now=NOW + 5)
    stopping = read(ledger, episode).free
    assert stopping is not None

    advance(ledger, stopping, Stage.STOPPING, now=NOW + 50)

    again = read(ledger, episode).free
    assert again is not None
    assert again.entered_at == NOW + 5


# --- the account


def test_a_dry_run_is_marked_on_its_episode(ledger: Ledger) -> None:
    episode = opened(ledger)

    ledger.would_act(episode.episode_id, "would stop c1", now=NOW)

    assert read(ledger, episode).would_act
    assert ledger.totals(HOST).steps == {("would", "act"): 1}


def test_an_episode_closes_once(ledger: Ledger) -> None:
    episode = opened(ledger)

    ledger.close_episode(episode.episode_id, Outcome.MENDED, "done", now=NOW)
    ledger.close_episode(episode.episode_id, Outcome.PARTLY, "late", now=NOW + 1)

    assert ledger.episode(episode.episode_id) is None
    assert (story(ledger).outcome, story(ledger).because, story(ledger).closed_at) == ("mended", "done", NOW)
    assert ledger.totals(HOST).outcomes == {("mended", "stall"): 1}


def test_a_story_tells_every_entry_in_order_and_bounds_each(ledger: Ledger) -> None:
    episode = opened(ledger)
    ledger.record(episode.episode_id, "failed", "stop", "x" * 5000, now=NOW + 1)

    assert [entry.act for entry in story(ledger).entries] == ["saw", "failed"]
    assert len(story(ledger).entries[1].because) == 2000
    assert ledger.story(99) is None


def test_the_newest_stories_come_oldest_first(ledger: Ledger) -> None:
    for number in range(4):
        opened(ledger, worker=f"w{number}")

    assert [each.worker for each in ledger.stories(last=2)] == ["w2", "w3"]


def test_the_executors_beat_is_the_newest_one(ledger: Ledger) -> None:
    assert ledger.totals(HOST).executor is None

    ledger.beat(host=HOST, pid=1, armed=False, started_at=1.0, errors=0, now=2.0)
    ledger.beat(host=HOST, pid=2, armed=True, started_at=1.0, errors=3, now=4.0)

    assert ledger.totals(HOST).executor == (True, 4.0, 3)
    assert ledger.totals("box2").executor is None


def test_a_watch_sees_what_another_process_accepted(ledger: Ledger, ledger_url: str) -> None:
    changes = ledger.changes()
    assert not changes.any()
    other = Ledger.open(ledger_url)

    other.accept([alert()], [], now=NOW)

    other.close()
    assert changes.any()
    assert not changes.any()
    changes.close()
