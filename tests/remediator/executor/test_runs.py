"""A run whose items fail on a worker of this host, from its alert to the action, with a real ledger and queue."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.db.errors import DatabaseError
from gpuwarden.job import State
from gpuwarden.queue import Job, JobStore, Submission
from gpuwarden.queue.items.failures import ItemFailures
from remediator import plan
from remediator.clients.job_queue_sql import BuiltinQueue
from remediator.executor.executor import MAX_CONCURRENT, Executor, LoopSettings
from remediator.ledger.ledger import Ledger
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order, SafetyLimits
from tests.remediator.builders import HOST, run_alert
from tests.remediator.executor.builders import LIMITS, PACE, executor, history, journal, looping, stalled_job, take_up
from tests.remediator.world import World
from tests.waiting import eventually

DONE = ["saw alert: firing", "decided lock", "did lock"]


def render(store: JobStore, run_id: str = "r1", *, jobs: int = 2) -> None:
    its = {str(n): Submission(queue=run_id) for n in range(jobs)}
    store.runs.submit_run(run_id, its, wrangled=True, now=store.now())
    store.items.add(run_id, [f"{n:03}" for n in range(50)], now=store.now())


def works_on(store: JobStore, run_id: str, worker: str, *, failed: int = 0, done: int = 0, host: str = HOST) -> Job:
    """Let a worker claim a job of the run, and end items of it."""
    job = store.claims.claim(run_id, host=host, worker=worker, incarnation=f"i-{worker}", now=store.now())
    assert job is not None
    end(store, job, failed=failed, done=done)
    return job


def end(store: JobStore, job: Job, *, failed: int = 0, done: int = 0) -> None:
    its: dict[str, Any] = {"attempt": job.attempt, "incarnation": job.claimed_by, "now": store.now()}
    for n in range(failed + done):
        item = store.items.take(job.job_id, **its)
        assert item is not None
        if n < failed:
            assert store.items.fail(job.job_id, **its, item=item.item, reason="boom")
        else:
            assert store.items.finish(job.job_id, **its, item=item.item)


def accuse(ledger: Ledger, *, firing: bool = True, run_id: str = "r1", worker: str = "bad") -> None:
    name = f"{run_id}-{worker}"
    ledger.inbox.accept([run_alert(name, firing=firing, run=run_id, worker=worker)], [], now=time.time())


def faulty_worker(store: JobStore, run_id: str = "r1", worker: str = "bad") -> Job:
    """One worker fails six items of a run, and another finishes one. Returns the job of the first."""
    render(store, run_id)
    job = works_on(store, run_id, worker, failed=6)
    works_on(store, run_id, f"good-{run_id}", done=1)
    return job


def accused_worker(ledger: Ledger, store: JobStore, run_id: str = "r1", worker: str = "bad") -> Job:
    """As `faulty_worker`, with its alert in the inbox."""
    job = faulty_worker(store, run_id, worker)
    accuse(ledger, run_id=run_id, worker=worker)
    return job


def judge(works: Executor, ledger: Ledger) -> None:
    """Process every run episode once, without the interval between two tallies."""
    while ledger.inbox.take_new(HOST, now=time.time()):
        pass
    for episode in ledger.episodes.list_open(HOST):
        assert episode.subject is plan.Subject.RUN
        works.process_episode(episode)


def locked(store: JobStore) -> dict[str, str | None]:
    return {each.worker: each.locked_by for each in store.admin.workers(now=store.now()) if each.locked_at is not None}


@pytest.mark.behaviour("B2")
def test_faulty_worker_is_locked_and_every_step_recorded(ledger: Ledger, store: JobStore) -> None:
    job = accused_worker(ledger, store)
    works = executor(ledger, store, World())

    judge(works, ledger)

    assert locked(store) == {"bad": f"the executor of {HOST}, episode 1"}
    assert store.job(job.job_id).state is State.FENCING
    assert journal(ledger) == DONE
    decided, did = history(ledger).entries[1:]
    assert [each for each in ("lock bad on box1", "failed 6", "finished 1") if each not in decided.message] == []
    assert [each for each in ("lock bad on box1", "administrator") if each not in did.message] == []

    judge(works, ledger)
    assert journal(ledger) == [*DONE, "decided wait: no_fault_found"], (
        "it is done once, and waits for the end of its alert"
    )
    accuse(ledger, firing=False)
    judge(works, ledger)
    assert (history(ledger).outcome, history(ledger).worker) == ("fixed", "r1")


@pytest.mark.behaviour("B1")
@pytest.mark.behaviour("B6")
@pytest.mark.parametrize(("failed", "done"), [(5, 0), (9, 1)], ids=["five failures", "one finished item"])
def test_alert_without_enough_failures_does_nothing(ledger: Ledger, store: JobStore, failed: int, done: int) -> None:
    render(store)
    works_on(store, "r1", "bad", failed=failed, done=done)
    works_on(store, "r1", "good", done=1)
    accuse(ledger)
    works = executor(ledger, store, World())

    judge(works, ledger)
    assert (locked(store), journal(ledger)[1:]) == ({}, ["decided wait: no_fault_found"])
    accuse(ledger, firing=False)
    judge(works, ledger)

    assert history(ledger).outcome == "unconfirmed"


@pytest.mark.behaviour("B4")
def test_faulty_worker_is_locked_after_the_wait_for_an_undecided_one(ledger: Ledger, store: JobStore) -> None:
    render(store)
    works_on(store, "r1", "bad", failed=6)
    works_on(store, "r1", "slow")
    accuse(ledger)
    patient = executor(ledger, store, World())
    judge(patient, ledger)
    assert (locked(store), journal(ledger)[1:]) == ({}, ["decided wait: insufficient_data"])

    quick = replace(PACE, limits=replace(LIMITS, wrangle_timeout_s=0.0))
    judge(executor(ledger, store, World(), settings=quick), ledger)

    assert list(locked(store)) == ["bad"]


@pytest.mark.behaviour("B5")
def test_run_of_a_single_worker_is_moved_and_at_last_blocked(ledger: Ledger, store: JobStore) -> None:
    render(store, jobs=1)
    job = works_on(store, "r1", "w1", failed=6)
    accuse(ledger, worker="w1")
    works = executor(ledger, store, World(), settings=replace(PACE, limits=replace(LIMITS, wrangle_migrations_max=1)))
    judge(works, ledger)
    judge(works, ledger)
    assert journal(ledger)[1:] == ["decided move", "did move", "decided wait: jobs_in_doubt"]
    assert locked(store) == {}
    store.sweeps.reclaim_expired(now=store.now() + 3600)
    works_on(store, "r1", "w2", failed=6)
    accuse(ledger, worker="w2")

    judge(works, ledger)

    assert journal(ledger)[4:] == ["saw alert: firing", "decided block", "did block"], (
        "one episode for the run on this host"
    )
    assert "submitter" in history(ledger).entries[-1].message
    blocked = store.job(job.job_id)
    assert blocked.state is State.BLOCKED
    assert f"(blocked by the executor of {HOST}, episode 1, " in (blocked.reason or "")


def test_dry_run_records_the_action_and_arming_does_it(ledger: Ledger, store: JobStore) -> None:
    job = accused_worker(ledger, store)
    works = executor(ledger, store, World(), armed=False)
    judge(works, ledger)
    judge(works, ledger)
    assert journal(ledger)[1:] == ["would act", "decided wait: dry_run"]
    assert (locked(store), store.job(job.job_id).state) == ({}, State.RUNNING)

    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="test", reason="", remedy="wrangle"))
    judge(works, ledger)

    assert list(locked(store)) == ["bad"]


@pytest.mark.parametrize(
    ("held", "ended"),
    [
        pytest.param({"act": Act.PAUSE}, {"act": Act.RESUME}, id="paused"),
        pytest.param({"act": Act.BREAKER}, {"act": Act.RELEASE}, id="circuit_breaker"),
    ],
)
def test_held_verdict_waits_and_is_applied_later(
    ledger: Ledger,
    store: JobStore,
    held: dict[str, Any],
    ended: dict[str, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accused_worker(ledger, store)
    works = executor(ledger, store, World())
    ledger.orders.give(Order(**held, at=time.time(), who="ann", reason=""))
    with monkeypatch.context() as patch:
        patch.setattr(ItemFailures, "tally", None)  # a held run is not counted
        judge(works, ledger)
    assert locked(store) == {}
    assert journal(ledger)[-1].removeprefix("decided wait: ") in request.node.name

    ledger.orders.give(Order(**ended, at=time.time(), who="ann", reason=""))
    judge(works, ledger)

    assert list(locked(store)) == ["bad"]


def test_each_action_needs_its_own_approval(ledger: Ledger, store: JobStore) -> None:
    render(store)
    bad = works_on(store, "r1", "bad", failed=6)
    accuse(ledger)
    works = executor(ledger, store, World())
    ledger.orders.give(Order(act=Act.ASK, at=time.time(), who="ann", reason="", remedy="wrangle"))
    judge(works, ledger)
    assert journal(ledger)[-1] == "decided wait: approval"
    ledger.orders.answer(1, Act.APPROVE, who="ann", reason="", now=time.time(), until=time.time() + 3600)
    works_on(store, "r1", "good", done=1)

    judge(works, ledger)
    assert locked(store) == {}, "the approval of a move does not approve a lock"
    assert store.job(bad.job_id).state is State.RUNNING
    ledger.orders.answer(1, Act.APPROVE, who="ann", reason="", now=time.time(), until=time.time() + 3600)
    judge(works, ledger)

    assert list(locked(store)) == ["bad"]


def test_too_many_faulty_workers_open_the_breaker(ledger: Ledger, store: JobStore) -> None:
    for number in range(4):
        accused_worker(ledger, store, f"r{number}", f"bad{number}")
    works = executor(ledger, store, World(), settings=replace(PACE, safety_limits=SafetyLimits(breaker_targets=3)))

    judge(works, ledger)

    assert sorted(locked(store)) == ["bad0", "bad1", "bad2"]
    breaker = ledger.orders.current().breaker()
    assert breaker is not None
    assert [each for each in ("4 workers", "600 s", "above 3") if each not in breaker.reason] == []
    assert journal(ledger, 4)[1:] == ["ordered breaker", "decided wait: circuit_breaker"]


def test_worker_faulty_in_many_runs_counts_once(ledger: Ledger, store: JobStore) -> None:
    for number in range(4):
        job = accused_worker(ledger, store, f"r{number}", "bad")
        assert store.claims.release(job.job_id, attempt=job.attempt, incarnation="i-bad", now=store.now())
    works = executor(ledger, store, World(), settings=replace(PACE, safety_limits=SafetyLimits(breaker_targets=1)))

    judge(works, ledger)

    assert ledger.orders.current().breaker() is None
    assert [journal(ledger, number) for number in (1, 2, 3, 4)] == [DONE] * 4
    accused_worker(ledger, store, "r4", "another")
    judge(works, ledger)
    assert ledger.orders.current().breaker() is not None, "another worker is the second"


def test_run_reported_by_several_hosts_counts_once(ledger: Ledger, store: JobStore, at_first: list[Any]) -> None:
    there = ["box2", "box3", "box4"]
    render(store, jobs=4)
    for host in (HOST, *there):
        works_on(store, "r1", f"w-{host}", failed=6, host=host)
    accuse(ledger)
    settings = replace(PACE, safety_limits=SafetyLimits(breaker_targets=1))
    works = executor(ledger, store, World(), settings=settings)
    others = [executor_there(ledger, store, f"w-{host}", host=host, settings=settings) for host in there]
    at_first.extend([lambda each=each: judge_there(each, ledger) for each in others])

    judge(works, ledger)
    assert ledger.orders.current().breaker() is None
    lines = sorted(journal(ledger, number)[-1] for number in range(1, 5))
    assert lines == ["decided block"] * 3 + ["did block"], "all decided before the first acted"
    ledger.inbox.accept(
        [run_alert(host, host=host, worker=f"w-{host}", firing=False) for host in there], [], now=time.time()
    )
    accuse(ledger, firing=False)
    judge(works, ledger)
    for host, other in zip(there, others, strict=True):
        ledger.inbox.take_new(host, now=time.time())
        judge_there(other, ledger)

    histories = [ledger.reports.get(number) for number in range(1, 5)]
    assert [each and each.outcome for each in histories] == ["fixed"] * 4


def test_moves_do_not_open_the_breaker(ledger: Ledger, store: JobStore) -> None:
    for number in range(2):
        render(store, f"r{number}", jobs=1)
        works_on(store, f"r{number}", f"w{number}", failed=6)
        accuse(ledger, run_id=f"r{number}", worker=f"w{number}")
    works = executor(ledger, store, World(), settings=replace(PACE, safety_limits=SafetyLimits(breaker_targets=1)))

    judge(works, ledger)

    assert [journal(ledger, number)[1:] for number in (1, 2)] == [["decided move", "did move"] for number in (0, 1)]


def executor_there(
    ledger: Ledger, store: JobStore, worker: str, *, host: str = "box2", settings: LoopSettings = PACE
) -> Executor:
    """An armed executor of another host, with an alert about its worker."""
    ledger.orders.give(Order(act=Act.ARM, at=time.time(), who="test", reason="", host=host))
    ledger.inbox.accept([run_alert(host, host=host, worker=worker)], [], now=time.time())
    ledger.inbox.take_new(host, now=time.time())
    return executor(ledger, store, World(), host=host, settings=settings)


def judge_there(there: Executor, ledger: Ledger) -> None:
    there.process_episode(*ledger.episodes.list_open(there._host))


def test_executor_locks_only_workers_of_its_own_host(ledger: Ledger, store: JobStore) -> None:
    render(store, jobs=3)
    works_on(store, "r1", "bad", failed=6)
    works_on(store, "r1", "worse", failed=7, host="box2")
    works_on(store, "r1", "good", done=1)
    accuse(ledger)
    works = executor(ledger, store, World())

    judge(works, ledger)
    judge(works, ledger)
    assert (list(locked(store)), journal(ledger)) == (["bad"], [*DONE, "decided wait: other_worker_faulty"])
    judge_there(executor_there(ledger, store, "worse"), ledger)

    assert sorted(locked(store)) == ["bad", "worse"]


def test_worker_at_its_attempt_cap_does_not_prevent_another_lock(ledger: Ledger, store: JobStore) -> None:
    its = {"last": Submission(queue="r1", attempts_max=1), "2": Submission(queue="r1"), "3": Submission(queue="r1")}
    store.runs.submit_run("r1", its, wrangled=True, now=store.now())
    store.items.add("r1", [f"{n:03}" for n in range(50)], now=store.now())
    works_on(store, "r1", "worse", failed=7)
    works_on(store, "r1", "bad", failed=6)
    works_on(store, "r1", "good", done=1)
    accuse(ledger)
    works = executor(ledger, store, World())

    judge(works, ledger)
    judge(works, ledger)

    assert (list(locked(store)), journal(ledger)) == (["bad"], [*DONE, "decided wait: attempts_exhausted"])


def test_wait_is_recorded_again_for_another_worker_but_not_for_a_figure(ledger: Ledger, store: JobStore) -> None:
    render(store, jobs=3)
    worse = works_on(store, "r1", "worse", failed=6, host="box2")
    works_on(store, "r1", "worst", failed=9, host="box3")
    works_on(store, "r1", "good", done=1)
    accuse(ledger)
    works = executor(ledger, store, World())
    judge(works, ledger)
    judge_there(executor_there(ledger, store, "worst", host="box3"), ledger)
    judge(works, ledger)
    end(store, worse, failed=1)

    judge(works, ledger)

    first, second = (each for each in history(ledger).entries if each.what == "wait: other_worker_faulty")
    assert "worst on box3" in first.message
    assert "worse on box2" in second.message


@pytest.fixture
def at_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls to make between the intent and the action."""
    meanwhile: list[Any] = []
    wrangle = BuiltinQueue.wrangle

    def wrangled(*what: Any, **how: Any) -> bool:
        if meanwhile:
            meanwhile.pop()()
        return wrangle(*what, **how)

    monkeypatch.setattr(BuiltinQueue, "wrangle", wrangled)
    yield meanwhile
    assert not meanwhile


def test_outdated_verdict_is_not_applied(ledger: Ledger, store: JobStore, at_first: list[Any]) -> None:
    job = accused_worker(ledger, store)
    at_first.append(lambda: end(store, job, done=1))
    works = executor(ledger, store, World())

    judge(works, ledger)
    judge(works, ledger)
    assert journal(ledger)[1:] == ["decided lock", "decided wait: no_fault_found"]
    assert locked(store) == {}
    accuse(ledger, firing=False)
    judge(works, ledger)

    assert history(ledger).outcome == "partly_fixed", "it was decided and not done"


def test_failed_action_is_repeated_under_its_intent(ledger: Ledger, store: JobStore, at_first: list[Any]) -> None:
    accused_worker(ledger, store)

    def fails() -> None:
        raise DatabaseError("the server has gone")

    at_first.append(fails)
    works = executor(ledger, store, World(), settings=replace(PACE, safety_limits=SafetyLimits(breaker_targets=1)))
    judge(works, ledger)
    assert journal(ledger) == DONE[:2]

    judge(works, ledger)

    assert journal(ledger) == DONE, "one intent, counted once by the breaker"
    assert list(locked(store)) == ["bad"]


def test_verdict_waits_for_an_unreachable_queue(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    accused_worker(ledger, store)
    works = executor(ledger, store, World())

    def silent(*_: Any, **__: Any) -> None:
        raise DatabaseError("the server has gone")

    with monkeypatch.context() as patch:
        patch.setattr(ItemFailures, "tally", silent)
        judge(works, ledger)
    assert journal(ledger)[-1] == "decided wait: queue_unreachable"
    assert history(ledger).entries[-1].message.endswith("the server has gone")
    judge(works, ledger)

    assert list(locked(store)) == ["bad"]


def test_alert_that_fires_again_at_the_close_opens_the_next_episode(ledger: Ledger, store: JobStore) -> None:
    render(store)
    accuse(ledger)
    accuse(ledger, firing=False)
    episode = take_up(ledger)
    accuse(ledger)
    ledger.inbox.take_new(HOST, now=time.time())

    ledger.episodes.close(episode.episode_id, plan.Outcome.UNCONFIRMED, Reason.DONE, "the alert ended", now=time.time())
    ledger.inbox.take_new(HOST, now=time.time())

    assert [(each.episode_id, each.firing) for each in ledger.episodes.list_open(HOST)] == [(2, True)]


def test_stalled_job_does_not_wait_for_a_tally(
    ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MAX_CONCURRENT):
        accuse(ledger, run_id=f"r{number}")
    world = stalled_job(ledger, store)
    ledger.inbox.take_new(HOST, now=time.time())
    counts, done = 0, threading.Event()

    def slow(*_: Any, **__: Any) -> None:
        nonlocal counts
        counts += 1
        done.wait()

    monkeypatch.setattr(ItemFailures, "tally", slow)
    with looping(executor(ledger, store, world)):
        try:
            eventually(lambda: "decided close: fixed" in journal(ledger, MAX_CONCURRENT + 1), "it is fixed")
            assert counts == 1, "runs are tallied one at a time"
        finally:
            done.set()


def test_sweep_does_not_wait_for_a_tally(ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    render(store)
    accuse(ledger)
    counted, done = threading.Event(), threading.Event()
    sweeps = 0

    class Swept(BuiltinQueue):
        def sweep(self, *, now: float) -> None:
            nonlocal sweeps
            sweeps += 1
            super().sweep(now=now)

    def slow(*_: Any, **__: Any) -> None:
        counted.set()
        done.wait()

    monkeypatch.setattr(ItemFailures, "tally", slow)
    with looping(executor(ledger, Swept(store), World())):
        try:
            eventually(counted.is_set, "the tally of a run has begun")
            before = sweeps
            eventually(lambda: sweeps > before + 3, "the queue is swept")
        finally:
            done.set()


def test_run_is_tallied_every_ten_seconds(ledger: Ledger, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    render(store)
    accuse(ledger)
    ledger.inbox.take_new(HOST, now=time.time())
    works = executor(ledger, store, World())
    counted, looks = 0, 0
    tally, look = ItemFailures.tally, works.reconcile

    def counting(*what: Any, **how: Any) -> Any:
        nonlocal counted
        counted += 1
        return tally(*what, **how)

    def looking(*what: Any) -> None:
        nonlocal looks
        looks += 1
        look(*what)

    monkeypatch.setattr(ItemFailures, "tally", counting)
    monkeypatch.setattr(works, "reconcile", looking)
    with looping(works):
        eventually(lambda: "decided wait: no_fault_found" in journal(ledger), "it is judged")
        before = looks
        eventually(lambda: looks > before + 5, "it continues to look")

    assert counted == 1
