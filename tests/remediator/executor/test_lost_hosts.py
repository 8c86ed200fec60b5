"""A silent host, one ledger in PostgreSQL, and executors of other hosts that hold its jobs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.job import JobId, State
from gpuwarden.queue import JobStore, Submission
from remediator import plan
from remediator.executor.executor import Executor, Pools
from remediator.ledger.inbox import _open_episodes_of
from remediator.ledger.ledger import Ledger
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order
from remediator.webhook.intake import Inbox
from tests.remediator.builders import HOST, alert, host_alert
from tests.remediator.executor.builders import LIMITS, PACE, arm, executor, history, journal, looping, running, sql
from tests.remediator.executor.test_shared_ledger import beat
from tests.remediator.world import World
from tests.waiting import eventually

pytestmark = [
    pytest.mark.needs_postgres,
    pytest.mark.parametrize("backend", ["postgresql"], indirect=True),
]

BOUND_S = 0.5
QUICK = replace(PACE, limits=replace(LIMITS, host_lost_after_s=BOUND_S))
LIVES_S = 2.5
"""The timeout while a host is alive: longer than the delay of a heartbeat on a busy machine."""


@contextmanager
def beating(ledger: Ledger) -> Iterator[None]:
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(0.05):
            beat(ledger)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture(autouse=True)
def _short_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remediator.executor.hosts.ALIVE_S", BOUND_S)
    monkeypatch.setattr("remediator.executor.executor.SLOW_CHECK_S", PACE.interval_s)
    monkeypatch.setattr("remediator.executor.perform.ANNOUNCED_S", 0.1)


@pytest.fixture
def ledgers(ledger_url: str) -> Iterator[Callable[[str], Ledger]]:
    """The same ledger, opened by each host."""
    with ExitStack() as stack:
        yield lambda host: stack.enter_context(closing(Ledger.open(ledger_url, host=host)))


@pytest.fixture
def other(ledger: Ledger, ledgers: Callable[[str], Ledger]) -> Ledger:
    """The ledger as opened by box2. Box1 is armed, had a heartbeat, and has an alert that it is silent."""
    arm(ledger)
    beat(ledger)
    found = ledgers("box2")
    assert Inbox(found, host="box2").take([host_alert()], []).result(10) == (1, 0)
    return found


def silent_job(store: JobStore, **submission: Any) -> JobId:
    """A job on box1 whose worker has no recent heartbeat."""
    job_id = running(store, **submission)
    silence(store)
    return JobId(job_id)


def silence(store: JobStore) -> None:
    sql(store, "UPDATE workers SET last_seen_at = last_seen_at - 1000")


def hear(store: JobStore, job_id: int) -> None:
    now = store.now()
    assert store.claims.heartbeat(host=HOST, worker="w1", queue="w1", incarnation="i1", model=None, now=now)
    assert store.claims.renew(job_id, attempt=1, incarnation="i1", now=now)


def observer(other: Ledger, store: JobStore, host: str = "box2", **changed: Any) -> Executor:
    return executor(other, store, World(), host=host, settings=QUICK, **changed)


@contextmanager
def observed(works: Executor) -> Iterator[None]:
    """Run long past the timeout, and several looks after that."""
    looks = 0
    process = works.process_episode

    def counted(episode: plan.Episode) -> None:
        nonlocal looks
        process(episode)
        looks += works.liveness.silent_s(HOST, time.monotonic()) > 2 * BOUND_S

    works.process_episode = counted  # type: ignore[method-assign]
    with looping(works):
        eventually(lambda: looks > 3, "it has looked several times after the timeout")
        yield


def lines(ledger: Ledger, step: str) -> list[str]:
    return [f"{entry.host} {entry.act}" for entry in history(ledger).entries if entry.step == step]


@pytest.mark.behaviour("D4")
@pytest.mark.behaviour("D6")
def test_job_of_a_silent_host_is_held_and_resumes(ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id = silent_job(store)
    store.runs.submit(Submission(queue="w1"), now=time.time())

    with looping(observer(other, store)):
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "it is held")
        eventually(lambda: "decided wait: jobs_held" in journal(ledger), "and that is recorded")
        assert store.job(job_id).attempt == 1
        assert store.claims.claim("w1", host="box2", worker="w1", incarnation="j1", now=time.time()).job_id != job_id  # type: ignore[union-attr]
        other.inbox.accept([host_alert(firing=False)], [], now=time.time())
        eventually(lambda: "saw alert: resolved" in journal(ledger), "its alert has ended")
        assert store.job(job_id).state is State.HOST_LOST

        hear(store, job_id)
        eventually(lambda: history(ledger).outcome == "fixed", "it is over")

    assert (store.job(job_id).state, store.job(job_id).attempt) == (State.RUNNING, 1)
    assert lines(ledger, "lose") == ["box2 decided", "box2 did"]
    assert history(ledger).worker == HOST


@pytest.mark.behaviour("D4")
def test_job_of_a_silent_host_without_an_executor_is_held(
    ledger: Ledger, ledgers: Callable[[str], Ledger], store: JobStore
) -> None:
    arm(ledger)
    found = ledgers("box2")
    assert Inbox(found, host="box2").take([host_alert()], []).result(10) == (1, 0)
    job_id = silent_job(store)

    with looping(observer(found, store)):
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "it is held")


@pytest.mark.behaviour("D4")
@pytest.mark.behaviour("D6")
def test_gateway_decides_about_a_host_that_it_heard(ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id, now = silent_job(store), store.now()
    store.batches.sync(HOST, [], [], now=now - 200)
    store.batches.sync("box2", [], [], now=now)
    works = observer(other, store)

    with observed(works):
        assert store.job(job_id).state is State.RUNNING
        assert journal(ledger)[-1] == "decided wait: observation_too_short"

        assert store.seen_hosts.decide(now=now, since=0.0, after_s=180.0).lost
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "the gateway has decided")
        store.batches.sync(HOST, [], [], now=store.now())
        eventually(lambda: store.job(job_id).state is State.RUNNING, "the gateway hears it")

    assert lines(ledger, "return") == ["box2 decided", "box2 did"]


@pytest.mark.behaviour("D4")
def test_job_with_a_worker_heartbeat_is_not_lost(ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id = silent_job(store)
    hear(store, job_id)
    sql(store, "UPDATE workers SET last_seen_at = last_seen_at + 1000")
    works = observer(other, store)

    with observed(works):
        assert store.job(job_id).state is State.RUNNING
        assert journal(ledger)[-1] == "decided wait: workers_alive"

        silence(store)
        silence(store)
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "lost once the heartbeat is old")


@pytest.mark.behaviour("D4")
def test_no_job_is_lost_while_the_executor_of_its_host_is_alive(
    ledger: Ledger, other: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = silent_job(store)
    monkeypatch.setattr("remediator.executor.hosts.ALIVE_S", LIVES_S)
    patient = replace(QUICK, limits=replace(LIMITS, host_lost_after_s=LIVES_S))
    works = executor(other, store, World(), host="box2", settings=patient)

    with looping(works):
        with beating(ledger):
            began_s = time.monotonic()
            eventually(lambda: time.monotonic() - began_s > 2 * LIVES_S, "it has looked long enough")
            assert store.job(job_id).state is State.RUNNING
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "lost once the executor is silent too")


@pytest.mark.behaviour("D5")
def test_job_without_any_heartbeat_is_not_lost(ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id = silent_job(store)
    sql(store, "DELETE FROM workers")
    works = observer(other, store)

    with observed(works):
        assert store.job(job_id).state is State.RUNNING
        assert history(ledger).entries[-1].reason == Reason.WORKERS_ALIVE


@pytest.mark.parametrize("disarmed", [HOST, "box2"])
def test_both_hosts_must_be_armed_to_hold_a_job(disarmed: str, ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id = silent_job(store)
    works = observer(other, store)
    arm(ledger, host=disarmed, armed=False)

    with observed(works):
        assert store.job(job_id).state is State.RUNNING
        assert journal(ledger).count("would act") == 1

        arm(ledger, host=disarmed)
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "armed, it is held")


@pytest.mark.parametrize("paused", [HOST, "box2"])
def test_pause_of_either_host_delays_the_hold(paused: str, ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id = silent_job(store)
    ledger.orders.give(Order(act=Act.PAUSE, at=ledger.now(), who="test", reason="a test", host=paused))
    works = observer(other, store)

    with observed(works):
        assert store.job(job_id).state is State.RUNNING
        assert journal(ledger)[-1] == "decided wait: paused"

        ledger.orders.give(Order(act=Act.RESUME, at=ledger.now(), who="test", reason="a test", host=paused))
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "resumed, it is held")


def test_hold_needs_approval_if_armed_so(ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id = silent_job(store)
    works = observer(other, store)
    ledger.orders.give(Order(act=Act.ASK, at=ledger.now(), who="test", reason="a test", host=HOST))

    with observed(works):
        assert store.job(job_id).state is State.RUNNING
        assert journal(ledger)[-1] == "decided wait: approval"

        ledger.orders.answer(1, Act.APPROVE, who="test", reason="a test", now=ledger.now(), until=ledger.now() + 60)
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "approved, it is held")


def test_no_job_is_held_while_more_hosts_are_silent_than_alive(ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id = silent_job(store)
    other.executors.beat(host="box3", pid=1, armed=True, started_at=1.0, errors=0, now=time.time())
    Inbox(other, host="box2").take([host_alert("h3", host="box3")], []).result(10)
    works = observer(other, store)

    with observed(works):
        assert store.job(job_id).state is State.RUNNING
        assert journal(ledger)[-1] == "decided wait: majority_silent"

        other.inbox.accept([host_alert("h3", host="box3", firing=False)], [], now=time.time())
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "held once the other host is alive")


def test_alert_older_than_a_heartbeat_does_not_count(
    ledger: Ledger, ledgers: Callable[[str], Ledger], store: JobStore
) -> None:
    arm(ledger)
    other, job_id = ledgers("box2"), silent_job(store)
    inbox = Inbox(other, host="box2")
    other.executors.beat(host="box3", pid=1, armed=True, started_at=1.0, errors=0, now=time.time())
    inbox.take([host_alert("h3", host="box3")], []).result(10)
    works = observer(other, store)

    with looping(works):
        eventually(lambda: works.liveness.silent_episodes, "the alert about box3 is taken")
        with beating(ledger):
            began_s = time.monotonic()
            eventually(lambda: works.liveness.is_alive(HOST, began_s + BOUND_S), "then box1 is alive")
        inbox.take([host_alert()], []).result(10)
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "then box1 is lost")
        assert [each.firing for each in works.liveness.silent_episodes] == [True, True]


def test_one_of_several_observers_holds_the_jobs(
    ledger: Ledger,
    other: Ledger,
    ledgers: Callable[[str], Ledger],
    store: JobStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("remediator.executor.perform.ANNOUNCED_S", 60.0)
    job_ids = [silent_job(store), JobId(running(store, worker="w2", incarnation="i2"))]
    silence(store)

    with ExitStack() as stack:
        for number in range(3, 6):
            stack.enter_context(looping(observer(ledgers(f"box{number}"), store, f"box{number}")))
        stack.enter_context(looping(observer(other, store)))
        eventually(lambda: all(store.job(each).state is State.HOST_LOST for each in job_ids), "both are held")
        eventually(lambda: "decided wait: jobs_held" in journal(ledger), "and that is recorded")

    decided, *did = lines(ledger, "lose")
    assert did == [decided.replace("decided", "did")] * 2


def test_silent_host_is_checked_at_the_slow_interval(
    other: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remediator.executor.executor.SLOW_CHECK_S", 3600.0)
    works = observer(other, store)
    rounds, looks = 0, 0
    look, look_for = works.reconcile, works.process_episode

    def counted(pools: Pools) -> None:
        nonlocal rounds
        look(pools)
        rounds += 1

    def counted_for(episode: plan.Episode) -> None:
        nonlocal looks
        look_for(episode)
        looks += 1

    works.reconcile, works.process_episode = counted, counted_for  # type: ignore[method-assign]
    with looping(works):
        eventually(lambda: looks and rounds > 10, "one check in many iterations")
        assert looks == 1

        works._next_slow_check_s = 0.0
        eventually(lambda: looks == 2, "the next check when it is due")


def test_hold_announced_by_a_killed_executor_is_done_by_another(ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id = silent_job(store)
    other.inbox.take_new("box2", now=time.time())
    assert ledger.journal.record_once_per(1, "lose", "and was killed", now=ledger.now(), for_s=10.0)
    assert not other.journal.record_once_per(1, "lose", "so soon", now=other.now(), for_s=10.0)

    with looping(observer(other, store)):
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "it is held")

    assert lines(ledger, "lose") == [f"{HOST} decided", "box2 decided", "box2 did"]


def test_host_that_returns_without_its_workers_keeps_its_jobs_for_a_lease(
    ledger: Ledger, other: Ledger, store: JobStore
) -> None:
    job_id = silent_job(store)

    with looping(observer(other, store)):
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "it is held")
        other.inbox.accept([host_alert(firing=False)], [], now=time.time())
        with beating(ledger):
            eventually(lambda: history(ledger).outcome == "fixed", "it is over")

    assert (store.job(job_id).state, store.job(job_id).attempt) == (State.RUNNING, 1)
    assert store.job(job_id).lease_expires_at is not None
    assert lines(ledger, "return") == ["box2 decided", "box2 did"]


def test_host_that_returns_has_its_jobs_again(ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id = silent_job(store)

    with looping(observer(other, store)):
        eventually(lambda: store.job(job_id).state is State.HOST_LOST, "it is held")
        with beating(ledger):
            eventually(lambda: store.job(job_id).state is State.RUNNING, "it runs again")

    assert lines(ledger, "return") == ["box2 decided", "box2 did"]
    assert [each.firing for each in ledger.episodes.about_silent_hosts()] == [True]


def test_own_executor_of_the_host_does_not_hold_its_jobs(ledger: Ledger, other: Ledger, store: JobStore) -> None:
    job_id = silent_job(store)
    works = executor(ledger, store, World(), settings=QUICK)

    with looping(works):
        eventually(
            lambda: ledger.episodes.about_silent_hosts() and "decided wait: executor_alive" in journal(ledger),
            "it has looked",
        )
        assert store.job(job_id).state is State.RUNNING
        other.inbox.accept([host_alert(firing=False)], [], now=time.time())
        eventually(lambda: history(ledger).outcome == "unconfirmed", "nothing was done")


def test_concurrent_alerts_open_one_episode(ledger: Ledger, other: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    other.inbox.accept([host_alert("h2")], [], now=time.time())
    found: list[object] = []

    def late(connection: Any, labels: Any) -> dict[tuple[str, str, str], int]:
        before = _open_episodes_of(connection, labels)
        if not found:
            found.append(dict(before))
            sql(
                ledger,
                "INSERT INTO episodes (remedy, condition, host, subject, worker, opened_at, dry_run_recorded) "
                "VALUES ('hold_lost_host', 'host_lost', 'box1', 'host', 'box1', 1.0, false)",
            )
        return before

    monkeypatch.setattr("remediator.ledger.inbox._open_episodes_of", late)

    other.inbox.take_new("box2", now=time.time())

    (episode,) = other.episodes.about_silent_hosts()
    assert found == [{}]
    assert episode.fingerprints == {"h1", "h2"}


def test_resolve_waits_for_the_firing_alert(ledger: Ledger, other: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def slow(connection: Any, labels: Any) -> dict[tuple[str, str, str], int]:
        if not taken:
            taken.append(0)
            other.inbox.accept([host_alert(firing=False)], [], now=time.time())
            taken.append(other.inbox.take_new("box2", now=time.time()))
        return _open_episodes_of(connection, labels)

    monkeypatch.setattr("remediator.ledger.inbox._open_episodes_of", slow)
    ledger.inbox.take_new(HOST, now=time.time())

    assert taken == [0, 0]
    assert [each.firing for each in other.episodes.about_silent_hosts()] == [True]
    assert other.inbox.take_new("box2", now=time.time()) == 1
    assert [each.firing for each in other.episodes.about_silent_hosts()] == [False]


def test_alert_received_while_its_episode_closes_opens_the_next(ledger: Ledger, other: Ledger) -> None:
    other.inbox.take_new("box2", now=time.time())

    other.episodes.close(1, plan.Outcome.UNCONFIRMED, Reason.DONE, "closed before the next alert", now=other.now())

    assert other.inbox.take_new("box2", now=time.time()) == 1
    assert [(each.episode_id, each.firing) for each in other.episodes.about_silent_hosts()] == [(2, True)]
    assert ledger.reports.totals(HOST).alerts == {}


def test_alert_whose_episode_failed_to_open_is_taken_at_the_next_look(
    other: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.inbox.accept([host_alert(firing=False)], [], now=time.time())
    with monkeypatch.context() as patched:
        patched.setattr("remediator.ledger.inbox._open_episode", lambda *_, **__: None)
        assert other.inbox.take_new("box2", now=time.time()) == 0
    assert other.episodes.about_silent_hosts() == []

    assert other.inbox.take_new("box2", now=time.time()) == 2
    assert [each.firing for each in other.episodes.about_silent_hosts()] == [False]


def test_alert_about_a_worker_has_a_separate_episode(ledger: Ledger, other: Ledger) -> None:
    other.inbox.accept([alert()], [], now=time.time())

    assert other.inbox.take_new("box2", now=time.time()) == 1
    assert ledger.inbox.take_new(HOST, now=time.time()) == 1
    assert [each.subject for each in ledger.episodes.list_open(HOST)] == [plan.Subject.HOST, plan.Subject.WORKER]


def test_alert_is_counted_by_the_executor_that_takes_it(ledger: Ledger, other: Ledger) -> None:
    assert [each.reports.totals(host).oldest_new_at is None for each, host in ((ledger, HOST), (other, "box2"))] == [
        False
    ] * 2
    assert other.reports.totals("box2").alerts == {}

    other.inbox.take_new("box2", now=time.time())

    assert other.reports.totals("box2").alerts == {("accepted", ""): 1}
    assert ledger.reports.totals(HOST).alerts == {}
    assert (ledger.reports.totals(HOST).oldest_new_at, ledger.reports.totals(HOST).episodes_open) == (None, 1)
