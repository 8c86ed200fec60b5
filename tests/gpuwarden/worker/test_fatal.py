"""A worker whose process cannot go on gives its job back and ends."""

from collections.abc import Callable
from typing import Any

import pytest

from gpuwarden import tasks
from gpuwarden.db.errors import DatabaseError, NoAnswerError
from gpuwarden.job import EXIT_FATAL, ItemState, State
from gpuwarden.queue import Job, JobStore
from gpuwarden.reporter import Reporter
from gpuwarden.worker import worker as worker_module
from gpuwarden.worker.worker import FatalError
from tests.gpuwarden.worker.builders import run_worker, submit

ASSERT = "CUDA error: device-side assert triggered"


def raising(error: BaseException) -> Callable[[Job, Reporter], Callable[[], None]]:
    def work() -> None:
        raise error

    return lambda *_: work


def other_completes(store: JobStore, worker: str = "w2", *, ago_s: float = 0.0) -> None:
    now = store.now()
    store.claims.register("gpu", host="box2", worker=worker, incarnation="i2", now=now)
    its: dict[str, Any] = {"host": "box2", "worker": worker, "queue": "gpu", "incarnation": "i2", "model": None}
    assert store.claims.heartbeat(**its, now=now - ago_s, completed_at=now - ago_s)
    assert store.fencing.retire_worker(host="box2", worker=worker, incarnation="i2", now=now)


def states(store: JobStore) -> list[State]:
    return [job.state for job in sorted(store.jobs(), key=lambda job: job.job_id)]


def test_fatal_error_gives_the_job_back_and_ends_the_worker(store: JobStore, reporter: Reporter) -> None:
    first, _ = submit(store), submit(store)

    with pytest.raises(FatalError, match=ASSERT):
        run_worker(store, reporter, raising(RuntimeError(ASSERT)), jobs_max=2)

    assert states(store) == [State.QUEUED, State.QUEUED]
    back = store.job(first)
    assert (back.reclaims, back.reason) == (1, f"its worker's process could not go on: RuntimeError: {ASSERT}")
    assert str(back.traceback).endswith(f"RuntimeError: {ASSERT}")


def test_out_of_memory_fails_the_job_only(store: JobStore, reporter: Reporter) -> None:
    other_completes(store)
    for _ in range(4):
        submit(store)

    run_worker(store, reporter, raising(RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")), jobs_max=4)

    assert states(store) == [State.FAILED] * 4


@pytest.mark.parametrize("fatal", [True, False])
def test_handlers_hook_decides(store: JobStore, reporter: Reporter, fatal: bool) -> None:
    queue = tasks.Queue(fatal=lambda error: fatal and "engine dead" in str(error))
    queue.serve_from(store)

    @queue.job()
    def generate() -> None:
        raise RuntimeError("engine dead")

    generate.submit()

    if fatal:
        with pytest.raises(FatalError):
            run_worker(store, reporter, queue)
    else:
        run_worker(store, reporter, queue)

    assert states(store) == [State.QUEUED if fatal else State.FAILED]


def test_fatal_error_of_an_item_costs_no_try(store: JobStore, reporter: Reporter) -> None:
    queue = tasks.Queue()
    queue.serve_from(store)

    @queue.job()
    def render() -> None:
        for item in tasks.current().items():
            with item:
                raise RuntimeError(ASSERT)

    store.items.add("r1", ["a", "b"], now=store.now())
    store.runs.submit_run("r1", {"render": render.submission()}, now=store.now())

    with pytest.raises(FatalError):
        run_worker(store, reporter, queue)

    assert ItemState.FAILED not in [item.state for item in store.items.of_run("r1")]
    assert [item.reason for item in store.items.of_run("r1")] == [None, None]


def test_third_job_that_fails_fast_ends_the_worker_while_another_completes(store: JobStore, reporter: Reporter) -> None:
    other_completes(store, ago_s=590)
    for _ in range(4):
        submit(store)

    with pytest.raises(FatalError, match="no such file"):
        run_worker(store, reporter, raising(RuntimeError("no such file")), jobs_max=4)

    assert states(store) == [State.FAILED, State.FAILED, State.QUEUED, State.QUEUED]


@pytest.mark.parametrize("ago_s", [None, 620.0], ids=["none completed", "completed long ago"])
def test_fast_failures_alone_do_not_end_the_worker(store: JobStore, reporter: Reporter, ago_s: float | None) -> None:
    if ago_s is not None:
        other_completes(store, ago_s=ago_s)
    for _ in range(4):
        submit(store)

    run_worker(store, reporter, raising(RuntimeError("no such file")), jobs_max=4)

    assert states(store) == [State.FAILED] * 4


def test_completed_job_starts_a_new_row(store: JobStore, reporter: Reporter) -> None:
    other_completes(store)
    for bad in (True, True, False, True, True):
        submit(store, bad=bad)

    def body(job: Job, _report: Reporter) -> Callable[[], None]:
        if job.payload["bad"]:
            raise RuntimeError("no such file")
        return lambda: None

    run_worker(store, reporter, body, jobs_max=5)

    assert states(store).count(State.FAILED) == 4


def test_unknown_other_workers_do_not_end_the_worker(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_answer(*_: Any, **__: Any) -> bool:
        raise DatabaseError("database is locked")

    monkeypatch.setattr(store.claims, "others_completed", no_answer)
    for _ in range(3):
        submit(store)

    run_worker(store, reporter, raising(RuntimeError("no such file")), jobs_max=3)

    assert states(store) == [State.FAILED] * 3


def test_completed_job_is_noted_for_other_workers(store: JobStore, reporter: Reporter) -> None:
    submit(store)
    begun = store.now()

    run_worker(store, reporter, lambda *_: lambda: None)

    assert store.claims.others_completed("gpu", host="box2", worker="w2", since=begun)


def test_failed_job_is_not_noted_as_completed(store: JobStore, reporter: Reporter) -> None:
    submit(store)

    run_worker(store, reporter, raising(RuntimeError("no such file")))

    assert not store.claims.others_completed("gpu", host="box2", worker="w2", since=0)


def test_lost_answer_gives_the_job_back_once(
    store: JobStore, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(store)
    give_back = store.claims.give_back
    answers: list[bool] = []

    def asked(*arguments: Any, **named: Any) -> bool:
        answers.append(give_back(*arguments, **named))
        if len(answers) == 1:
            raise NoAnswerError("connection lost")
        return answers[-1]

    monkeypatch.setattr(worker_module, "RETRY_S", 0.01)
    monkeypatch.setattr(store.claims, "give_back", asked)

    with pytest.raises(FatalError):
        run_worker(store, reporter, raising(RuntimeError(ASSERT)), lease_s=60)

    assert answers == [True, False]
    assert store.job(job_id).reclaims == 1


def test_process_ends_with_its_exit_code(start: Callable[..., Any], store: JobStore) -> None:
    job_id = submit(store, do="assert")
    process = start()

    process.communicate(timeout=30)

    assert process.returncode == EXIT_FATAL == 79
    assert store.job(job_id).state is State.QUEUED
