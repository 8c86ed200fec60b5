"""A worker in this process: lease, lost answers and stops."""

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpuwarden.db.errors import DatabaseError, NoAnswerError
from gpuwarden.errors import WorkerStopping
from gpuwarden.job import Condition, State
from gpuwarden.queue import Job, JobStore, Submission
from gpuwarden.reporter import Reporter
from gpuwarden.worker import lease as lease_module
from gpuwarden.worker import worker as worker_module
from gpuwarden.worker.worker import DisownedError, Stop
from tests.gpuwarden.worker.builders import nothing_to_do, run_worker, submit


@pytest.fixture
def disowned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Threads in which a worker stopped itself over a lost job; only the thread ends."""
    threads: list[str] = []

    def stop(_bound: object, _reason: str, _exit_code: int) -> None:
        threads.append(threading.current_thread().name)
        raise SystemExit

    monkeypatch.setattr(lease_module, "stop_at_once", stop)
    monkeypatch.setattr(lease_module, "OWNERSHIP_S", 0.005)
    return threads


def keeper_ends() -> None:
    """Let the lease thread check once more, or end."""
    for thread in threading.enumerate():
        if thread.name == "gpuwarden-lease":
            thread.join(timeout=5)


@pytest.mark.parametrize("settle", ["complete", "fail_by_worker"])
def test_lease_thread_does_not_take_a_settled_job_for_lost(
    store: JobStore, reporter: Reporter, disowned: list[str], monkeypatch: pytest.MonkeyPatch, settle: str
) -> None:
    job_id = submit(store)
    settled = getattr(store.claims, settle)

    def slowly(*arguments: Any, **named: Any) -> bool:
        accepted: bool = settled(*arguments, **named)
        keeper_ends()
        return accepted

    monkeypatch.setattr(store.claims, settle, slowly)

    run_worker(store, reporter, nothing_to_do if settle == "complete" else lambda *_: None)

    assert disowned == []
    assert store.job(job_id).state is (State.COMPLETED if settle == "complete" else State.FAILED)


def test_refused_result_stops_the_worker(store: JobStore, reporter: Reporter, disowned: list[str]) -> None:
    submit(store)

    def lose(job: Job, _report: Reporter) -> Callable[[], None]:
        def work() -> None:
            store.fencing.fence(
                job.job_id, attempt=job.attempt, incarnation=job.claimed_by or "", condition=Condition.BUDGET, now=1
            )

        return work

    with pytest.raises(SystemExit):
        run_worker(store, reporter, lose)

    assert "MainThread" in disowned


@pytest.mark.behaviour("A18")
@pytest.mark.parametrize(("is_retired", "code"), [(True, 75), (False, 77)], ids=["known", "unknown"])
def test_stopped_worker_with_a_lost_job_ends_with_its_exit_code(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch, is_retired: bool, code: int
) -> None:
    submit(store)
    stop = Stop()
    if not is_retired:
        monkeypatch.setattr(store.claims, "retired_for", no_answer)

    def lose(job: Job, _report: Reporter) -> Callable[[], None]:
        def work() -> None:
            store.fencing.fence(
                job.job_id, attempt=job.attempt, incarnation=job.claimed_by or "", condition=Condition.BUDGET, now=1
            )
            stop.on_signal(signal.SIGTERM, None)

        return work

    with pytest.raises(DisownedError) as ended:
        run_worker(store, reporter, lose, stop=stop, heartbeat_s=10)

    assert ended.value.exit_code == code


def no_answer(**_: Any) -> None:
    raise DatabaseError("database is locked")


def settled_without_an_answer(
    store: JobStore, monkeypatch: pytest.MonkeyPatch, settle: str, *, committed: bool
) -> list[bool]:
    """Lose the first answer to a result, with or without its commit; returns the later answers."""
    ask, answers = getattr(store.claims, settle), list[bool]()
    lost = False

    def asked(job_id: int, **named: Any) -> bool:
        nonlocal lost
        if not lost:
            lost = True
            if committed:
                assert ask(job_id, **named)
            else:
                store.fencing.fence(
                    job_id, attempt=named["attempt"], incarnation=named["incarnation"], condition=Condition.STALL, now=1
                )
                store.fencing.fail(job_id, attempt=named["attempt"], reason="stall", now=1)
            raise NoAnswerError("connection lost")
        answers.append(ask(job_id, **named))
        return answers[-1]

    monkeypatch.setattr(worker_module, "RETRY_S", 0.01)
    monkeypatch.setattr(store.claims, settle, asked)
    return answers


@pytest.mark.parametrize("settle", ["complete", "fail_by_worker", "retry"])
def test_result_with_a_lost_answer_is_accepted_and_the_worker_continues(
    store: JobStore, reporter: Reporter, disowned: list[str], monkeypatch: pytest.MonkeyPatch, settle: str
) -> None:
    for _ in range(2):
        store.runs.submit(Submission(queue="gpu", retries_max=1 if settle == "retry" else 0), now=0)
    answers = settled_without_an_answer(store, monkeypatch, settle, committed=True)

    body = nothing_to_do if settle == "complete" else lambda *_: None
    # Its row is always due, so that it writes a result and claims in two requests.
    run_worker(store, reporter, body, jobs_max=2, lease_s=60, heartbeat_s=0)

    assert answers == [False, True]
    ends = {"complete": State.COMPLETED, "fail_by_worker": State.FAILED, "retry": State.QUEUED}
    assert {job.state for job in store.jobs()} == {ends[settle]}
    assert disowned == []


@pytest.mark.parametrize("settle", ["complete", "fail_by_worker"])
def test_job_that_ended_during_an_outage_is_lost(
    store: JobStore, reporter: Reporter, disowned: list[str], monkeypatch: pytest.MonkeyPatch, settle: str
) -> None:
    submit(store)
    answers = settled_without_an_answer(store, monkeypatch, settle, committed=False)

    with pytest.raises(SystemExit):
        run_worker(store, reporter, nothing_to_do if settle == "complete" else lambda *_: None, lease_s=60)

    assert answers == [False]
    assert "MainThread" in disowned


def test_handler_without_a_valid_loaded_model_has_none(store: JobStore, reporter: Reporter) -> None:
    class Body:
        @property
        def loaded_model(self) -> str:
            raise RuntimeError("dictionary changed size during iteration")

        def __call__(self, *_: object) -> Callable[[], None]:
            return lambda: None

    submit(store)

    run_worker(store, reporter, Body())

    assert [job.state for job in store.jobs()] == [State.COMPLETED]


@pytest.mark.parametrize("error", [NoAnswerError("connection lost"), RuntimeError("unexpected")])
def test_failed_renewal_is_retried_at_the_next_check(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    submit(store)
    renewed = threading.Event()
    renew = store.claims.renew
    asked = 0

    def at_last(*arguments: Any, **named: Any) -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise error
        accepted = renew(*arguments, **named)
        renewed.set()
        return accepted

    monkeypatch.setattr(lease_module, "OWNERSHIP_S", 0.005)
    monkeypatch.setattr(store.claims, "renew", at_last)
    in_time: list[bool] = []

    run_worker(store, reporter, lambda *_: lambda: in_time.append(renewed.wait(10)), heartbeat_s=1000)

    assert in_time == [True]
    assert asked == 2


def test_early_stop_releases_the_job(store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = submit(store)
    stop = Stop()
    claim = store.claims.claim

    def stopped_after(*arguments: Any, **named: Any) -> Job | None:
        job = claim(*arguments, **named)
        stop.on_signal(signal.SIGTERM, None)
        return job

    monkeypatch.setattr(store.claims, "claim", stopped_after)

    with pytest.raises(WorkerStopping):
        run_worker(store, reporter, nothing_to_do, stop=stop)

    back = store.job(job_id)
    assert (back.state, back.attempt, back.reason) == (State.QUEUED, 1, "released by its worker")


def test_handler_that_turns_the_stop_into_an_error_is_not_failed(store: JobStore, reporter: Reporter) -> None:
    job_id = submit(store)
    stop = Stop()

    def body(_job: Job, _report: Reporter) -> Callable[[], None]:
        def work() -> None:
            try:
                stop.on_signal(signal.SIGTERM, None)
            except WorkerStopping:
                raise RuntimeError("interrupted") from None

        return work

    with pytest.raises(WorkerStopping):
        run_worker(store, reporter, body, stop=stop)

    assert store.job(job_id).state is State.QUEUED
    assert store.outbox.events_of(job_id) == []


def test_late_stop_keeps_the_result(store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = submit(store), submit(store)
    stop = Stop()
    complete = store.claims.complete

    def stopped_before(*arguments: Any, **named: Any) -> bool:
        stop.on_signal(signal.SIGTERM, None)
        return complete(*arguments, **named)

    monkeypatch.setattr(store.claims, "complete", stopped_before)

    with pytest.raises(WorkerStopping):
        run_worker(store, reporter, nothing_to_do, stop=stop, jobs_max=2, heartbeat_s=0)

    assert [store.job(job_id).state for job_id in (first, second)] == [State.COMPLETED, State.QUEUED]


def test_refused_result_ends_the_worker(store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = submit(store)
    monkeypatch.setattr(worker_module, "RETRY_S", 0.05)
    offered = 0

    def refuse(*_: Any, **__: Any) -> bool:
        nonlocal offered
        offered += 1
        raise DatabaseError("disk I/O error")

    monkeypatch.setattr(store.claims, "complete", refuse)

    with pytest.raises(DatabaseError, match="disk I/O error"):
        run_worker(store, reporter, nothing_to_do)

    assert offered > 2
    assert store.job(job_id).state is State.RUNNING
