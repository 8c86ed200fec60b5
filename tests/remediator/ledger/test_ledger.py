"""The ledger in real databases: the inbox, one open episode per worker, one intent per target, and crashes."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Event
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.db.engine import connect
from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.transactions import writing
from gpuwarden.job import Condition
from remediator.alert import Alert, Refusal
from remediator.ledger.inbox import TAKE_MAX, _open_episode, _row
from remediator.ledger.ledger import Ledger
from remediator.ledger.reports import EpisodeHistory
from remediator.ledger.schema import METADATA
from remediator.plan import Begin, Close, Episode, Intent, Kind, Outcome, Stage, Subject, Wait
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order, SafetyLimits, may_begin, proposed_action
from tests.remediator.builders import HANDLE, HOST, KEY, NOW, REBORN, alert, server_alert, tenant_alert
from tests.waiting import eventually

pytestmark = pytest.mark.both_databases

sqlite_only = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)

BOUNDLESS = SafetyLimits(cooldown_s=0.0, breaker_targets=1000, breaker_restarts=1000)
REFUSAL = Refusal(reason=Reason.OTHER_HOST, message="it is for box2", fingerprint="f9", labels={"host": "box2"})
BEGIN = Begin(
    condition=Condition.STALL,
    free_key=KEY,
    container_kind="docker",
    container_handle=HANDLE,
    container_name="c1",
    settle_key="7/1",
    worker_incarnation="i1",
    message="silent",
    gpus=("GPU-0",),
    pids=frozenset({4001}),
    cgroup="/cgroup",
)


def accept(ledger: Ledger, *alerts: Alert, take: bool = True) -> None:
    ledger.inbox.accept(alerts, [], now=NOW)
    if take:
        ledger.inbox.take_new(HOST, now=NOW)


def opened(ledger: Ledger, **labels: Any) -> Episode:
    if not ledger.orders.current().given:
        armed(ledger)
    accept(ledger, alert(**labels))
    return ledger.episodes.list_open()[-1]


def read(ledger: Ledger, episode: Episode) -> Episode:
    again = ledger.episodes.get_open(episode.episode_id)
    assert again is not None
    return again


def history(ledger: Ledger, episode_id: int = 1) -> EpisodeHistory:
    found = ledger.reports.get(episode_id)
    assert found is not None
    return found


def armed(ledger: Ledger, *, host: str | None = None) -> None:
    ledger.orders.give(Order(act=Act.ARM, at=NOW, who="test", reason="a test", host=host))


def begins(
    ledger: Ledger, episode: Episode, step: Begin, *, now: float, safety_limits: SafetyLimits = BOUNDLESS
) -> bool:
    """Whether an armed remediator begins the step, by default without safety limits."""
    if not ledger.orders.current().given:
        armed(ledger)
    return ledger.intents.begin(episode, step, safety_limits=safety_limits, now=now) is None


def begun(ledger: Ledger, **labels: Any) -> tuple[Episode, Intent, Intent]:
    episode = opened(ledger, **labels)
    assert begins(ledger, episode, BEGIN, now=NOW)
    episode = read(ledger, episode)
    assert episode.free is not None
    assert episode.settle is not None
    return episode, episode.free, episode.settle


def advance(ledger: Ledger, intent: Intent, stage: Stage, *, now: float = NOW, **data: Any) -> bool:
    return ledger.intents.advance(
        intent, stage, episode_id=1, act="did", step="s", message="b", now=now, data=data or None
    )


def rows(ledger: Ledger, query: str) -> list[tuple[Any, ...]]:
    with writing(ledger._engine) as connection:
        found = connection.exec_driver_sql(query)
        return [tuple(row) for row in found] if found.returns_rows else []


@contextmanager
def full_disk(ledger: Ledger) -> Iterator[None]:
    """The database file may not grow by a page."""
    with ledger._engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        before = connection.exec_driver_sql("PRAGMA max_page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    yield
    with ledger._engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {before}")


# --- the inbox


def test_payload_is_saved_with_its_refusals(ledger: Ledger) -> None:
    ledger.inbox.accept([alert("a"), alert("b", worker="w2")], [REFUSAL], now=NOW)

    assert ledger.reports.totals(HOST).alerts == {("accepted", ""): 2, ("refused", "other_host"): 1}
    assert ledger.inbox.refused() == [(NOW, "other_host", "it is for box2", {"host": "box2"})]


@sqlite_only
def test_no_alert_of_a_payload_is_saved_when_the_disk_is_full(ledger: Ledger) -> None:
    many = [alert(f"f{number}", worker=f"w{number}", pad="x" * 1000) for number in range(100)]

    with full_disk(ledger), pytest.raises(DatabaseError, match="full"):
        ledger.inbox.accept(many, [REFUSAL], now=NOW)

    assert rows(ledger, "SELECT count(*) FROM alerts") == [(0,)]
    ledger.inbox.accept(many, [REFUSAL], now=NOW)
    assert rows(ledger, "SELECT count(*) FROM alerts") == [(101,)]


def test_accepted_alert_is_taken_once_after_a_kill(ledger: Ledger, ledger_url: str) -> None:
    """The process is killed between the commit and the intake."""
    script = (
        "import os, signal, sys; from remediator.ledger.ledger import Ledger\n"
        "from tests.remediator.builders import alert\n"
        "Ledger.open(sys.argv[1]).inbox.accept([alert('a')], [], now=1.0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    checkout = Path(__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", script, ledger_url], cwd=checkout, check=False)
    assert killed.returncode == -signal.SIGKILL

    assert ledger.inbox.take_new(HOST, now=NOW) == 1
    assert ledger.inbox.take_new(HOST, now=NOW) == 0
    assert len(ledger.episodes.list_open()) == 1
    assert rows(ledger, "SELECT state, episode_id FROM alerts") == [("linked", 1)]


def test_alerts_are_taken_in_bounded_batches_oldest_first(ledger: Ledger) -> None:
    ledger.inbox.accept([alert(f"f{n}", worker=f"w{n}") for n in range(TAKE_MAX + 3)], [], now=NOW)

    assert [ledger.inbox.take_new(HOST, now=NOW) for _ in range(3)] == [TAKE_MAX, 3, 0]
    assert [episode.worker for episode in ledger.episodes.list_open()][:2] == ["w0", "w1"]


def test_refused_alert_opens_no_episode(ledger: Ledger) -> None:
    ledger.inbox.accept([], [REFUSAL], now=NOW)

    assert ledger.inbox.take_new(HOST, now=NOW) == 0
    assert ledger.episodes.list_open() == []


# --- one open episode per worker


def test_episode_has_the_labels_of_its_alert(ledger: Ledger) -> None:
    episode = opened(ledger)

    assert (episode.remedy, episode.condition, episode.host, episode.worker) == (
        "restart_worker",
        Condition.STALL,
        HOST,
        "w1",
    )
    assert (episode.incarnation, episode.job_id, episode.attempt) == ("i1", 7, 1)
    assert (episode.firing, episode.dry_run_recorded, episode.free, episode.settle) == (True, False, None, None)


@pytest.mark.parametrize("text", [None, "", "-1", "7.0", "٧", "1e3", "9" * 19, "7; DROP TABLE jobs", " 7"])
def test_invalid_job_id_is_no_job(ledger: Ledger, text: str | None) -> None:
    assert opened(ledger, job_id=text).job_id is None


def test_largest_job_id_is_kept(ledger: Ledger) -> None:
    assert opened(ledger, job_id="9" * 18).job_id == int("9" * 18)


def test_hostile_names_are_data(ledger: Ledger) -> None:
    hostile = "w'; DROP TABLE alerts; --\n$(reboot)\x1b🙈"

    episode = opened(ledger, worker=hostile)
    accept(ledger, alert("other", worker=hostile))

    assert episode.worker == hostile
    assert len(ledger.episodes.list_open()) == 1


def test_duplicate_and_related_alerts_join_the_open_episode(ledger: Ledger) -> None:
    accept(ledger, alert("a"), alert("a"), alert("b", alertname="SecondRule"))
    accept(ledger, alert("a"))

    assert len(ledger.episodes.list_open()) == 1
    assert [entry.what for entry in history(ledger).entries] == ["alert: firing"] * 4


def test_database_allows_one_open_episode_per_worker(ledger: Ledger) -> None:
    opened(ledger)

    with pytest.raises(DatabaseError, match=r"UNIQUE|unique"):
        rows(
            ledger,
            "INSERT INTO episodes (remedy, condition, host, worker, opened_at, dry_run_recorded)"
            " SELECT remedy, condition, host, worker, opened_at, dry_run_recorded FROM episodes",
        )


def test_server_and_worker_with_the_same_name_have_separate_episodes(ledger: Ledger) -> None:
    accept(ledger, alert(worker="c1"), server_alert("s1", container="c1"), server_alert("s2", container="c1"))

    worker, server = ledger.episodes.list_open()
    assert (worker.subject, worker.worker, worker.incarnation) == (Subject.WORKER, "c1", "i1")
    assert (server.subject, server.worker, server.incarnation) == (Subject.SERVER, "c1", KEY)
    assert (server.remedy, server.condition, server.job_id, server.attempt) == (
        "restart_container",
        Condition.SERVER,
        None,
        None,
    )


def of_gpu(container: str, *gpus: str) -> Begin:
    """The step that restarts a container because of GPU memory."""
    key = f"{container}@1"
    return replace(
        BEGIN, condition=Condition.VRAM, settle_key=None, free_key=key, container_handle=container, gpus=gpus
    )


def test_containers_of_one_gpu_are_recycled_one_at_a_time_with_a_cooldown(ledger: Ledger) -> None:
    armed(ledger)
    names = ("c1", "c2", "c3")
    accept(ledger, *(tenant_alert(name, container=name, incarnation=f"{name}@1") for name in names))
    first, second, elsewhere = ledger.episodes.list_open()
    cools = replace(BOUNDLESS, vram_cooldown_s=120.0)
    assert ledger.intents.begin(first, of_gpu("c1", "GPU-0"), safety_limits=cools, now=NOW) is None

    def tried(at_s: float) -> str | None:
        wanted = proposed_action(second, of_gpu("c2", "GPU-1", "GPU-0"))
        orders, recent = ledger.orders.with_activity(wanted, cools, now=NOW + at_s)
        instead = may_begin(wanted, orders, recent, cools, now=NOW + at_s)
        return instead.reason if isinstance(instead, Wait) else None

    assert (tried(1), tried(1000)) == ("gpu_cooldown", "gpu_cooldown"), "a planned restart counts"
    promised = read(ledger, first).free
    assert promised is not None
    assert advance(ledger, promised, Stage.STOPPING, now=NOW + 1)
    assert tried(1000) == "gpu_cooldown", "a restart in progress counts without a time limit"
    stopping = read(ledger, first).free
    assert stopping is not None
    assert advance(ledger, stopping, Stage.DONE, now=NOW + 2)
    assert (tried(121), tried(123)) == ("gpu_cooldown", None)
    assert ledger.intents.begin(elsewhere, of_gpu("c3", "GPU-2"), safety_limits=cools, now=NOW + 3) is None


def test_container_with_server_and_vram_alerts_is_restarted_once(ledger: Ledger) -> None:
    armed(ledger)
    accept(ledger, server_alert("s1"), tenant_alert("t1"), tenant_alert("t2"))
    server, tenant = ledger.episodes.list_open()
    freed = replace(BEGIN, condition=Condition.SERVER, settle_key=None)
    assert ledger.intents.begin(server, freed, safety_limits=BOUNDLESS, now=NOW) is None

    second = ledger.intents.begin(
        tenant, replace(freed, condition=Condition.VRAM), safety_limits=SafetyLimits(vram_cooldown_s=0), now=NOW
    )

    assert (tenant.subject, tenant.remedy, tenant.condition) == (Subject.TENANT, "recycle_container", Condition.VRAM)
    assert isinstance(second, Close)
    assert second.outcome is Outcome.SUPERSEDED


def test_resolved_alert_of_a_server_does_not_end_an_episode_of_a_worker(ledger: Ledger) -> None:
    accept(ledger, alert(worker="c1"), server_alert("s1", container="c1"))
    accept(ledger, server_alert("s1", container="c1", firing=False))

    assert [(each.subject, each.firing) for each in ledger.episodes.list_open()] == [
        (Subject.WORKER, True),
        (Subject.SERVER, False),
    ]


def test_concurrent_intakes_link_each_alert_once(ledger: Ledger, ledger_url: str) -> None:
    ledger.inbox.accept([alert(f"f{n}", worker=f"w{n % 10}") for n in range(200)], [], now=NOW)
    other = Ledger.open(ledger_url, host=HOST)

    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(lambda each: each.inbox.take_new(HOST, now=NOW), [ledger, other]))

    other.close()
    assert sum(taken) == 200
    assert len(ledger.episodes.list_open()) == 10


def test_crossed_intakes_do_not_deadlock_on_episodes(
    ledger: Ledger, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each intake opens its first episode before the other opens its second, if locks allow."""
    monkeypatch.setattr("remediator.ledger.inbox.TAKE_MAX", 2)
    ledger.inbox.accept(
        [alert(f"f{n}", worker=worker) for n, worker in enumerate(("w1", "w2", "w2", "w1"))], [], now=NOW
    )
    opens, one_began, both_began = _open_episode, Event(), Barrier(2)

    def opens_then_waits(*args: Any, **kwargs: Any) -> int | None:
        episode_id = opens(*args, **kwargs)
        one_began.set()
        with suppress(BrokenBarrierError):
            both_began.wait(timeout=1)
        return episode_id

    monkeypatch.setattr("remediator.ledger.inbox._open_episode", opens_then_waits)
    with closing(Ledger.open(ledger_url, host=HOST)) as other, ThreadPoolExecutor(2) as pool:
        one = pool.submit(ledger.inbox.take_new, HOST, now=NOW)
        assert one_began.wait(10)
        two = pool.submit(other.inbox.take_new, HOST, now=NOW)
        assert (one.result(), two.result()) == (2, 2)

    assert len(ledger.episodes.list_open()) == 2


def test_resolved_alert_opens_no_episode(ledger: Ledger) -> None:
    accept(ledger, alert("a", firing=False))

    assert ledger.episodes.list_open() == []
    assert rows(ledger, "SELECT state, message FROM alerts") == [("ignored", "no open episode")]


def test_listed_alerts_are_accepted_except_those_resolved_since(ledger: Ledger) -> None:
    accept(ledger, alert("a", firing=False), alert("b", worker="w2", firing=False))
    newest = ledger.inbox.newest_alert()
    ledger.inbox.accept([alert("b", worker="w2", firing=False)], [replace(REFUSAL, fingerprint="c")], now=NOW)

    listed = [alert("a"), alert("b", worker="w2"), alert("c", worker="w3")]
    over = ledger.inbox.accept_listed(listed, [REFUSAL], asked_after=newest, now=NOW)

    assert [each.fingerprint for each in over] == ["b"]
    while ledger.inbox.take_new(HOST, now=NOW):
        pass
    assert [each.worker for each in ledger.episodes.list_open()] == ["w1", "w3"]
    assert ledger.reports.totals(HOST).alerts[("refused", "other_host")] == 2
    assert (
        ledger.inbox.accept_listed([alert("b", worker="w2")], [], asked_after=ledger.inbox.newest_alert(), now=NOW)
        == []
    )


def test_listing_waits_for_a_resolve_in_progress(ledger: Ledger, ledger_url: str) -> None:
    """Another webhook has written the resolved alert, but not committed."""
    newest = ledger.inbox.newest_alert()
    with (
        closing(Ledger.open(ledger_url, host=HOST)) as other,
        writing(other._engine) as connection,
        ThreadPoolExecutor(1) as pool,
    ):
        other.inbox._insert(connection, [_row(alert(firing=False), NOW)])
        listing = pool.submit(ledger.inbox.accept_listed, [alert()], [], asked_after=newest, now=NOW)
        if ledger.shared:
            eventually(lambda: waits_for_a_lock(ledger_url), "it waits for the writer")
        assert not listing.done()
        connection.commit()
        over = listing.result()

    assert [each.fingerprint for each in over] == ["f1"]


def waits_for_a_lock(url: str) -> bool:
    engine = connect(url)
    with closing(engine.raw_connection()) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        found = cursor.fetchone()
    engine.dispose()
    return found is not None and found[0] > 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from(["w1", "w2"])), max_size=12))
def test_worker_has_at_most_one_open_episode_in_any_order(came: list[tuple[str, bool, str]]) -> None:
    newest: dict[str, dict[str, bool]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger.open(f"sqlite:///{folder}/ledger.db", host=HOST)
        for fingerprint, fires, worker in came:
            accept(ledger, alert(fingerprint, firing=fires, worker=worker))
            if fires or worker in newest:
                newest.setdefault(worker, {})[fingerprint] = fires

        found = {episode.worker: episode.firing for episode in ledger.episodes.list_open()}
        ledger.close()

    assert found == {worker: any(series.values()) for worker, series in newest.items()}


# --- alerts about another attempt while an episode is open


def test_alert_of_a_later_attempt_opens_an_episode_after_the_close(ledger: Ledger) -> None:
    """Alertmanager repeats an alert only after hours, so one linked to a closed episode would be lost."""
    first = opened(ledger)
    accept(ledger, alert("later", attempt="2", incarnation="i2"))
    assert ledger.inbox.take_new(HOST, now=NOW) == 0

    ledger.episodes.close(first.episode_id, Outcome.SUPERSEDED, Reason.DONE, "over", now=NOW)

    assert ledger.inbox.take_new(HOST, now=NOW) == 1
    assert [(each.attempt, each.incarnation) for each in ledger.episodes.list_open()] == [(2, "i2")]


def test_alerts_of_the_same_attempt_open_no_new_episode(ledger: Ledger) -> None:
    first = opened(ledger)
    accept(ledger, alert("second rule"), alert("ended", attempt="2"), alert("ended", attempt="2", firing=False))

    ledger.episodes.close(first.episode_id, Outcome.FIXED, Reason.DONE, "done", now=NOW)

    assert ledger.inbox.take_new(HOST, now=NOW) == 0
    assert ledger.episodes.list_open() == []


def test_repeated_closes_come_to_an_end(ledger: Ledger) -> None:
    """Each returned alert opens an episode for its attempt, which does not return it again."""
    opened(ledger)
    accept(ledger, *[alert(f"f{attempt}", attempt=str(attempt)) for attempt in range(2, 6)])

    closed = 0
    while episodes := ledger.episodes.list_open():
        ledger.episodes.close(episodes[0].episode_id, Outcome.SUPERSEDED, Reason.DONE, "over", now=NOW)
        ledger.inbox.take_new(HOST, now=NOW)
        closed += 1

    assert closed == 5


# --- one intent per target


def test_begin_writes_both_intents_and_a_journal_entry(ledger: Ledger) -> None:
    _, free, settle = begun(ledger)

    assert (free.kind, free.key, free.stage) == (Kind.FREE, KEY, Stage.PLANNED)
    assert dict(free.data) == {
        "kind": "docker", "handle": HANDLE, "name": "c1", "gpus": ["GPU-0"], "pids": [4001], "cgroup": "/cgroup",
    }  # fmt: skip
    assert (settle.kind, settle.key, settle.stage) == (Kind.SETTLE, "7/1", Stage.PLANNED)
    assert dict(settle.data) == {"incarnation": "i1"}
    assert history(ledger).entries[-1].step == "begin"


def test_container_without_a_job_has_no_settle(ledger: Ledger) -> None:
    episode = opened(ledger, job_id=None, attempt=None)

    assert begins(ledger, episode, Begin(**{**vars(BEGIN), "settle_key": None}), now=NOW)

    assert rows(ledger, "SELECT kind FROM intents") == [("free",)]


def test_incarnation_is_restarted_once(ledger: Ledger) -> None:
    first, *_ = begun(ledger)
    assert not begins(ledger, first, BEGIN, now=NOW)
    ledger.episodes.close(first.episode_id, Outcome.FIXED, Reason.DONE, "done", now=NOW)
    second = opened(ledger)

    assert not begins(ledger, second, BEGIN, now=NOW)
    assert rows(ledger, "SELECT count(*) FROM intents") == [(2,)]
    assert read(ledger, second).free is None


def test_attempt_is_settled_once_over_two_restarts(ledger: Ledger) -> None:
    first, *_ = begun(ledger)
    ledger.episodes.close(first.episode_id, Outcome.PARTLY, Reason.DONE, "done", now=NOW)
    second = opened(ledger)

    assert begins(ledger, second, Begin(**{**vars(BEGIN), "free_key": REBORN}), now=NOW)

    assert rows(ledger, "SELECT kind, key, episode_id FROM intents ORDER BY intent_id") == [
        ("free", KEY, 1),
        ("settle", "7/1", 1),
        ("free", REBORN, 2),
    ]
    assert read(ledger, second).settle is None


def test_intent_abandoned_before_any_action_releases_its_key(ledger: Ledger) -> None:
    first, free, settle = begun(ledger)
    assert advance(ledger, free, Stage.ABANDONED)
    assert advance(ledger, settle, Stage.ABANDONED)
    ledger.episodes.close(first.episode_id, Outcome.PARTLY, Reason.DONE, "it was active", now=NOW)

    second = opened(ledger)

    assert begins(ledger, second, BEGIN, now=NOW)
    again = read(ledger, second)
    assert again.free is not None
    assert again.settle is not None
    assert (again.free.key, again.settle.key) == (KEY, "7/1")


def test_withdrawn_intent_can_begin_again(ledger: Ledger) -> None:
    first, *_ = begun(ledger)

    ledger.intents.withdraw(first.episode_id, Reason.UNCONFIRMED, "it is active", now=NOW)

    withdrawn = read(ledger, first)
    assert (withdrawn.free, withdrawn.settle) == (None, None)
    assert begins(ledger, withdrawn, BEGIN, now=NOW)
    again = read(ledger, first)
    assert again.free is not None
    assert again.settle is not None
    assert (again.free.key, again.settle.key) == (KEY, "7/1")


def test_only_a_planned_intent_can_be_withdrawn(ledger: Ledger) -> None:
    first, free, settle = begun(ledger)
    assert advance(ledger, settle, Stage.FENCED)
    assert advance(ledger, free, Stage.STOPPING)

    ledger.intents.withdraw(first.episode_id, Reason.UNCONFIRMED, "too late", now=NOW)

    kept = read(ledger, first)
    assert kept.free is not None
    assert kept.settle is not None
    assert (kept.free.stage, kept.settle.stage) == (Stage.STOPPING, Stage.FENCED)


@pytest.mark.parametrize("reached", [Stage.STOPPING, Stage.DEAD])
def test_intent_abandoned_after_an_action_keeps_its_key(ledger: Ledger, reached: Stage) -> None:
    first, free, _ = begun(ledger)
    assert advance(ledger, free, reached)
    acted = read(ledger, first).free
    assert acted is not None
    assert advance(ledger, acted, Stage.ABANDONED)
    ledger.episodes.close(first.episode_id, Outcome.PARTLY, Reason.DONE, "it cannot be stopped", now=NOW)

    assert not begins(ledger, opened(ledger), BEGIN, now=NOW)


def test_unspent_intent_releases_its_key(ledger: Ledger) -> None:
    first, free, settle = begun(ledger)
    assert advance(ledger, settle, Stage.ABANDONED)
    assert advance(ledger, free, Stage.STOPPING)
    acted = read(ledger, first).free
    assert acted is not None
    its: dict[str, Any] = {"episode_id": 1, "act": "saw", "step": "s", "message": "it answers again"}
    assert ledger.intents.advance(acted, Stage.ABANDONED, **its, now=NOW, unspent=True)
    ledger.episodes.close(first.episode_id, Outcome.PARTLY, Reason.DONE, "it answers again", now=NOW)

    assert begins(ledger, opened(ledger), BEGIN, now=NOW)


@sqlite_only
def test_begin_is_atomic_when_the_disk_is_full(ledger: Ledger) -> None:
    episode = opened(ledger)
    step = Begin(**{**vars(BEGIN), "container_name": "c" * 100_000})

    with full_disk(ledger), pytest.raises(DatabaseError, match="full"):
        begins(ledger, episode, step, now=NOW)

    assert rows(ledger, "SELECT count(*) FROM intents") == [(0,)]
    assert begins(ledger, episode, step, now=NOW)


def test_concurrent_begins_write_one_intent(ledger: Ledger, ledger_url: str) -> None:
    episode = opened(ledger)
    other = Ledger.open(ledger_url, host=HOST)

    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(lambda each: begins(each, episode, BEGIN, now=NOW), [ledger, other]))

    other.close()
    assert sorted(won) == [False, True]


def test_intent_advances_only_from_the_stage_that_was_read(ledger: Ledger) -> None:
    episode, free, _ = begun(ledger)

    assert advance(ledger, free, Stage.STOPPING, pids=[4001])
    before = len(history(ledger).entries)
    assert not advance(ledger, free, Stage.DEAD)

    now = read(ledger, episode).free
    assert now is not None
    assert (now.stage, now.data["pids"], now.data["handle"]) == (Stage.STOPPING, [4001], HANDLE)
    assert len(history(ledger).entries) == before


def test_age_of_a_stage_counts_from_its_first_entry(ledger: Ledger) -> None:
    episode, free, _ = begun(ledger)
    advance(ledger, free, Stage.STOPPING, now=NOW + 5)
    stopping = read(ledger, episode).free
    assert stopping is not None

    advance(ledger, stopping, Stage.STOPPING, now=NOW + 50)

    again = read(ledger, episode).free
    assert again is not None
    assert again.entered_at == NOW + 5


# --- the journal


def test_dry_run_is_marked_on_its_episode(ledger: Ledger) -> None:
    episode = opened(ledger)

    ledger.journal.record_dry_run(episode.episode_id, "would stop c1", now=NOW)

    assert read(ledger, episode).dry_run_recorded
    assert ledger.reports.totals(HOST).steps == {("would", "act"): 1}


def test_episode_closes_once(ledger: Ledger) -> None:
    episode = opened(ledger)

    ledger.episodes.close(episode.episode_id, Outcome.FIXED, Reason.DONE, "done", now=NOW)
    ledger.episodes.close(episode.episode_id, Outcome.PARTLY, Reason.DONE, "late", now=NOW + 1)

    assert ledger.episodes.get_open(episode.episode_id) is None
    assert (history(ledger).outcome, history(ledger).message, history(ledger).closed_at) == ("fixed", "done", NOW)
    assert ledger.reports.totals(HOST).outcomes == {("fixed", "stall"): 1}


def test_history_has_every_entry_in_order_and_limits_its_length(ledger: Ledger) -> None:
    episode = opened(ledger)
    ledger.journal.record(episode.episode_id, "failed", "stop", "x" * 5000, now=NOW + 1)

    assert [entry.act for entry in history(ledger).entries] == ["saw", "failed"]
    assert len(history(ledger).entries[1].message) == 2000
    assert ledger.reports.get(99) is None


def test_newest_episodes_are_listed_oldest_first(ledger: Ledger) -> None:
    for number in range(4):
        opened(ledger, worker=f"w{number}")

    assert [each.worker for each in ledger.reports.newest(last=2)] == ["w2", "w3"]


def test_watch_detects_alerts_accepted_by_another_process(ledger: Ledger, ledger_url: str) -> None:
    changes = ledger.changes()
    changes.any()
    assert not changes.any()
    other = Ledger.open(ledger_url, host=HOST)

    other.inbox.accept([alert()], [], now=NOW)

    other.close()
    assert changes.wait(10)
    assert not changes.any()
    changes.close()


def test_closed_episode_begins_no_intent(ledger: Ledger) -> None:
    episode = opened(ledger)
    ledger.episodes.close(episode.episode_id, Outcome.SUPERSEDED, Reason.DONE, "over", now=NOW)

    assert not begins(ledger, episode, BEGIN, now=NOW)
    assert rows(ledger, "SELECT count(*) FROM intents") == [(0,)]


def test_episode_has_the_confirmed_condition(ledger: Ledger) -> None:
    accept(ledger, alert("a"), alert("b", condition="dead_worker"))
    (episode,) = ledger.episodes.list_open()
    assert (episode.condition, episode.conditions) == (
        Condition.STALL,
        frozenset({Condition.STALL, Condition.DEAD_WORKER}),
    )

    assert begins(ledger, episode, replace(BEGIN, condition=Condition.DEAD_WORKER), now=NOW)

    assert read(ledger, episode).condition is Condition.DEAD_WORKER


# --- several hosts


def test_host_takes_and_lists_only_its_own_episodes(ledger: Ledger) -> None:
    accept(ledger, alert("a"), alert("b", host="box2"), alert("c", host="box2", worker="w2"))
    assert ledger.inbox.take_new("box2", now=NOW) == 2

    assert [each.worker for each in ledger.episodes.list_open("box2")] == ["w1", "w2"]
    assert len(ledger.episodes.list_open()) == 3
    assert (ledger.reports.totals(HOST).episodes_open, ledger.reports.totals("box2").episodes_open) == (1, 2)
    assert ledger.reports.totals("box2").alerts == {("accepted", ""): 2}


def test_entry_names_the_host_that_wrote_it(ledger: Ledger, ledger_url: str) -> None:
    episode = opened(ledger)
    with closing(Ledger.open(ledger_url, host="box2")) as other:
        other.journal.record(episode.episode_id, "did", "requeue", "b", now=NOW)

    assert [entry.host for entry in history(ledger).entries] == [HOST, "box2"]
    assert ledger.reports.totals("box2").steps == {("did", "requeue"): 1}
    assert ledger.reports.totals(HOST).steps == {}


def test_newest_heartbeat_of_each_executor_is_returned(ledger: Ledger) -> None:
    for host, now in ((HOST, 1.0), ("box2", 2.0), (HOST, 3.0)):
        ledger.executors.beat(host=host, pid=1, armed=True, started_at=0.0, errors=0, now=now)

    assert ledger.executors.last_beats() == {HOST: 3.0, "box2": 2.0}


@pytest.mark.needs_postgres
def test_alert_taken_during_a_close_is_not_linked_to_the_closed_episode(postgres_url: str) -> None:
    """PostgreSQL runs writers in parallel: the intake locks the open episode or finds it closed."""
    taking, closing_ = Ledger.open(postgres_url, host=HOST), Ledger.open(postgres_url, host=HOST)
    for attempt in range(1, 21):
        accept(taking, alert(f"f{attempt}", attempt=str(attempt)))
        (episode,) = taking.episodes.list_open()
        accept(taking, alert(f"later{attempt}", attempt=str(attempt + 1)), take=False)
        with ThreadPoolExecutor(2) as pool:
            taken = pool.submit(taking.inbox.take_new, HOST, now=NOW)
            pool.submit(
                closing_.episodes.close, episode.episode_id, Outcome.SUPERSEDED, Reason.DONE, "over", now=NOW
            ).result()
            taken.result()
        taking.inbox.take_new(HOST, now=NOW)

        (next_one,) = taking.episodes.list_open()
        assert next_one.attempt == attempt + 1
        taking.episodes.close(next_one.episode_id, Outcome.SUPERSEDED, Reason.DONE, "over", now=NOW)
    taking.close()
    closing_.close()


def test_characters_that_a_database_refuses_are_escaped(ledger: Ledger) -> None:
    episode = opened(ledger)

    ledger.journal.record(episode.episode_id, "failed", "stop", "a\x00b\ud800c", now=NOW)
    ledger.episodes.close(episode.episode_id, Outcome.PARTLY, Reason.DONE, "a\x00b", now=NOW)

    assert history(ledger).entries[1].message == "a\\x00b\\ud800c"
    assert history(ledger).message == "a\\x00b"


# --- tables


def test_first_revision_creates_the_tables_of_the_schema(ledger: Ledger) -> None:
    with ledger._engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        differences = [
            each
            for each in compare_metadata(context, METADATA)
            if each[0] not in ("remove_table", "remove_index") or each[1].name in METADATA.tables
        ]

    assert differences == []
