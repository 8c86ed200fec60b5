"""Measures against faulty workers and runs, on both databases."""

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import AVOID_S, LEASE_S, RECLAIMS_MAX, Condition, ItemOutcome, ItemState, State
from gpuwarden.queue import BlockedError, Job, JobStore, Slot, SpentError, Submission, SubmissionError
from gpuwarden.queue.items.failures import HAND_OVER_S
from gpuwarden.queue.items.tally import RunTally, WorkerTally
from gpuwarden.queue.schema import ITEM_OUTCOMES, ITEMS, JOBS, METADATA, RUN_EXCLUSIONS, WORKERS
from tests.waiting import eventually, together

pytestmark = pytest.mark.both_databases

NOW = 1_000_000.0
LATER = NOW + HAND_OVER_S + 1
W1: dict[str, Any] = {"host": "box1", "worker": "w1"}
BY: dict[str, Any] = {"who": "ann@box1", "reason": "wrangled: it failed 6", "now": NOW}
FORGIVING = {"who": "bob@box2", "reason": "forgiven by bob"}


def still(_: RunTally) -> bool:
    return True


def start(store: JobStore, *, jobs: int = 2, items: int = 9, run_id: str = "r1") -> None:
    """A run that is wrangled, with jobs and items."""
    store.runs.submit_run(run_id, {str(n): Submission(queue="gpu") for n in range(jobs)}, wrangled=True, now=NOW)
    store.items.add(run_id, [f"{n:02}" for n in range(items)], now=NOW)


def claim(store: JobStore, number: int, *, now: float = NOW) -> Job | None:
    return store.claims.claim("gpu", host="box1", worker=f"w{number}", incarnation=f"i{number}", now=now)


def claimed(store: JobStore, number: int, *, now: float = NOW) -> Job:
    job = claim(store, number, now=now)
    assert job is not None
    return job


def by(job: Job) -> dict[str, Any]:
    return {"attempt": job.attempt, "incarnation": job.claimed_by, "now": NOW}


def fail(store: JobStore, job: Job, *, times: int = 1, tries_max: int = 3) -> None:
    for _ in range(times):
        item = store.items.take(job.job_id, **by(job))
        assert item is not None
        assert store.items.fail(job.job_id, **by(job), item=item.item, reason="boom", tries_max=tries_max)


def finish(store: JobStore, job: Job) -> bool:
    item = store.items.take(job.job_id, **by(job))
    return item is not None and store.items.finish(job.job_id, **by(job), item=item.item)


def counts(store: JobStore, run_id: str = "r1", *, now: float = NOW) -> dict[str, tuple[int, int, float | None]]:
    """Of each worker: finished items, failed items, and seconds in the run."""
    found = store.item_failures.tally(run_id, now=now)
    assert found is not None
    return {each.worker: (each.done, each.failed, each.runs_for_s) for each in found.workers}


def everything(store: JobStore) -> dict[str, list[Any]]:
    with reading(store._engine) as connection:
        return {
            table.name: sorted(map(tuple, connection.execute(select(table))), key=str)
            for table in METADATA.sorted_tables
        }


def test_items_of_a_run_are_counted_by_worker(store: JobStore) -> None:
    start(store, jobs=3)
    first, second = claimed(store, 1), claimed(store, 2)
    claimed(store, 3, now=NOW + 5)
    fail(store, first, times=2)
    finish(store, second)
    store.claims.release(second.job_id, **by(second))

    assert store.item_failures.tally("r1", now=NOW + 9) == RunTally(
        run_id="r1",
        asked=True,
        over=False,
        ranked=False,
        unsettled=0,
        migrations=0,
        workers=(
            WorkerTally(host="box1", worker="w1", done=0, failed=2, runs_for_s=9.0),
            WorkerTally(host="box1", worker="w2", done=1, failed=0, runs_for_s=None),
            WorkerTally(host="box1", worker="w3", done=0, failed=0, runs_for_s=4.0),
        ),
    )
    assert store.item_failures.tally("r2", now=NOW) is None


@pytest.mark.parametrize("how", ["fenced", "host lost", "ranks", "over", "asked for nothing"])
def test_obstacles_of_a_judgement_are_counted_too(store: JobStore, how: str) -> None:
    start(store, jobs=1)
    job = claimed(store, 1)
    fail(store, job)
    if how == "fenced":
        store.fencing.fence(job.job_id, **by(job), condition=Condition.STALL)
    elif how == "host lost":
        store.lost_hosts.mark_lost(job.job_id, attempt=1, now=NOW)
    elif how == "ranks":
        store.runs.submit(Submission(queue="gpu", run_id="r1", ranks=2), now=NOW)
    elif how == "over":
        store.admin.cancel_run("r1", reason="", now=NOW)
    else:
        assert store.item_failures.ask_wrangling("r1", wrangled=False)

    found = store.item_failures.tally("r1", now=NOW)

    assert found is not None
    assert (found.unsettled, found.ranked, found.over, found.asked) == (
        int(how in ("fenced", "host lost")),
        how == "ranks",
        how == "over",
        how != "asked for nothing",
    )
    assert (store.item_failures.wrangled_runs() == ["r1"]) is (how not in ("over", "asked for nothing"))


def test_only_enabled_runs_are_wrangled_and_enabling_works_at_any_time(store: JobStore) -> None:
    store.runs.submit_run("r1", {"a": Submission(queue="gpu")}, now=NOW)
    start(store, run_id="r2")
    assert store.item_failures.wrangled_runs() == ["r2"]

    store.runs.submit_run("r2", {"more": Submission(queue="gpu")}, now=NOW)
    assert store.item_failures.ask_wrangling("r1", wrangled=True)

    assert store.item_failures.wrangled_runs() == ["r1", "r2"]
    assert not store.item_failures.ask_wrangling("r3", wrangled=True)


# --- a faulty worker


def test_faulty_worker_is_locked_and_others_do_its_failed_items(store: JobStore) -> None:
    start(store, items=7)
    bad, good = claimed(store, 1), claimed(store, 2)
    fail(store, bad, times=3, tries_max=1)
    fail(store, bad, times=3)
    assert store.items.take(bad.job_id, **by(bad)) is not None
    assert store.items.counts("r1")[ItemState.FAILED] == 3

    assert store.item_failures.lock_faulty("r1", **W1, still=still, **BY)

    (row,) = (each for each in store.admin.workers(now=NOW) if each.worker == "w1")
    assert (row.locked_at, row.locked_by, row.locked_reason) == (NOW, "ann@box1", "wrangled: it failed 6")
    assert store.job(bad.job_id).state is State.FENCING
    assert not store.claims.owns(bad.job_id, attempt=1, incarnation="i1"), "its worker finds out, and stops"
    assert not finish(store, bad)
    while finish(store, good):
        pass
    assert store.items.counts("r1") == {ItemState.DONE: 6, ItemState.CLAIMED: 1}, "it may still be at that one"
    assert store.sweeps.reclaim_expired(now=LATER) == [bad.job_id]
    assert claim(store, 1, now=LATER) is None
    assert claimed(store, 3, now=LATER).job_id == bad.job_id
    assert finish(store, good)
    assert store.items.counts("r1") == {ItemState.DONE: 7}


def test_job_has_one_attempt_while_its_worker_may_still_run(store: JobStore) -> None:
    start(store, jobs=1)
    claimed(store, 1)
    store.item_failures.lock_faulty("r1", **W1, still=still, **BY)

    assert store.sweeps.reclaim_expired(now=NOW + HAND_OVER_S) == []
    assert claim(store, 2, now=NOW + HAND_OVER_S) is None


def test_failures_of_a_locked_worker_no_longer_count(store: JobStore) -> None:
    start(store, jobs=3, items=1)
    bad, second, third = (claimed(store, number) for number in (1, 2, 3))
    fail(store, bad, times=2)
    fail(store, second)
    assert store.items.counts("r1") == {ItemState.FAILED: 1}

    store.item_failures.lock_faulty("r1", **W1, still=still, **BY)

    assert counts(store) == {"w1": (0, 0, None), "w2": (0, 1, 0.0), "w3": (0, 0, 0.0)}
    fail(store, third)  # the second of three tries
    assert finish(store, second)


def test_final_failures_of_another_worker_are_judged_separately(store: JobStore) -> None:
    start(store, items=2)
    bad, second = claimed(store, 1), claimed(store, 2)
    fail(store, bad, tries_max=1)
    fail(store, second, tries_max=1)

    store.item_failures.lock_faulty("r1", **W1, still=still, **BY)

    assert [each.state for each in store.items.of_run("r1")] == [ItemState.PENDING, ItemState.FAILED]


def test_lock_of_an_operator_is_kept(store: JobStore) -> None:
    start(store)
    fail(store, claimed(store, 1), times=6)
    store.admin.lock(**W1, who="bob@box2", reason="smells", now=NOW - 5)

    assert store.item_failures.lock_faulty("r1", **W1, still=still, **BY)

    (row,) = store.admin.workers(now=NOW)
    assert (row.locked_by, row.locked_reason) == ("bob@box2", "smells")
    assert counts(store)["w1"] == (0, 0, None)


def test_locked_worker_finishes_jobs_of_other_runs(store: JobStore) -> None:
    start(store, jobs=1)
    bad = claimed(store, 1)
    fail(store, bad, times=6)
    store.claims.release(bad.job_id, **by(bad))
    store.admin.cancel(bad.job_id, reason="", now=NOW)
    start(store, run_id="r2")
    other = claimed(store, 1)
    store.runs.submit(Submission(queue="gpu", run_id="r3"), now=NOW)
    store.item_failures.lock_faulty("r2", **W1, still=lambda _: False, **BY)

    assert store.item_failures.lock_faulty("r3", **W1, still=still, **BY)

    assert store.job(other.job_id).state is State.RUNNING


# --- moves of a run


def test_moved_run_never_returns_to_a_tried_worker(store: JobStore) -> None:
    start(store, jobs=5)
    store.runs.submit_run("r2", {"a": Submission(queue="gpu", priority=200)}, now=NOW)
    now = NOW
    for number in range(1, 5):
        job = claimed(store, number, now=now)
        fail(store, job, times=6)
        assert store.item_failures.migrate_run(
            "r1", host="box1", worker=f"w{number}", still=still, **{**BY, "now": now}
        )
        assert store.job(job.job_id).state is State.FENCING
        now += HAND_OVER_S + 1
        assert store.sweeps.reclaim_expired(now=now) == [job.job_id]
    found = store.item_failures.tally("r1", now=now)
    assert found is not None
    assert found.migrations == 4
    assert store.job(job.job_id).reclaims == 0, "a move is no lost lease"

    others = [claimed(store, number, now=now) for number in (1,)]
    assert [each.run_id for each in others] == ["r2"], "the first worker claims jobs of another run"
    assert [claim(store, number, now=now) for number in (2, 3, 4)] == [None, None, None]
    assert claimed(store, 5, now=now).run_id == "r1"


def test_all_tried_workers_are_barred_and_items_get_one_more_try(store: JobStore) -> None:
    start(store, items=1)
    first, second = claimed(store, 1), claimed(store, 2)
    fail(store, first, times=2)
    fail(store, second)
    store.claims.release(first.job_id, **by(first))
    assert store.items.counts("r1") == {ItemState.FAILED: 1}

    assert store.item_failures.migrate_run("r1", host="box1", worker="w2", still=still, **BY)

    with reading(store._engine) as connection:
        rows = connection.execute(
            select(RUN_EXCLUSIONS.c.worker, RUN_EXCLUSIONS.c.migration, RUN_EXCLUSIONS.c.excluded_by)
        ).all()
    assert sorted(map(tuple, rows)) == [("w1", 1, "ann@box1"), ("w2", 1, "ann@box1")]
    assert claim(store, 1) is None
    assert claim(store, 2) is None
    assert store.items.counts("r1") == {ItemState.PENDING: 1}
    assert counts(store)["w1"] == (0, 1, None), "their failures are remembered"


def test_claim_from_before_the_bar_is_taken_without_another_move(store: JobStore) -> None:
    start(store)
    job = claimed(store, 1)
    fail(store, job, times=6)
    row = {"run_id": "r1", **W1, "migration": 1, "at": NOW, "excluded_by": "ann@box1", "reason": ""}
    with writing(store._engine) as connection:
        connection.execute(insert(RUN_EXCLUSIONS).values(**row))

    assert store.item_failures.migrate_run("r1", **W1, still=still, **BY)

    assert store.job(job.job_id).state is State.FENCING
    found = store.item_failures.tally("r1", now=NOW)
    assert found is not None
    assert found.migrations == 1


def test_job_is_not_left_to_a_barred_worker(store: JobStore) -> None:
    start(store, jobs=1)
    job = claimed(store, 2)
    fail(store, job)
    store.item_failures.migrate_run("r1", host="box1", worker="w2", still=still, **BY)
    store.sweeps.reclaim_expired(now=LATER)
    again = claimed(store, 1, now=LATER)
    store.fencing.fence(again.job_id, attempt=again.attempt, incarnation="i1", condition=Condition.STALL, now=LATER)
    avoid = Slot(host="box1", worker="w1")
    store.fencing.requeue(
        again.job_id, attempt=again.attempt, condition=Condition.STALL, now=LATER, avoid=avoid, avoid_s=AVOID_S
    )
    for number in (1, 2):  # both have restarted
        store.claims.register("gpu", host="box1", worker=f"w{number}", incarnation=f"n{number}", now=LATER)

    assert store.claims.claim("gpu", host="box1", worker="w2", incarnation="n2", now=LATER) is None
    assert store.claims.claim("gpu", host="box1", worker="w1", incarnation="n1", now=LATER) is not None


# --- a faulty run


def test_blocked_run_is_not_claimed_and_its_workers_stop(store: JobStore) -> None:
    ids = store.runs.submit_run(
        "r1",
        {name: Submission(queue="gpu") for name in ("runs", "waits", "needs", "fenced")},
        needs={"needs": ["waits"]},
        wrangled=True,
        now=NOW,
    )
    store.admin.cancel(ids["fenced"], reason="", now=NOW)
    store.runs.submit_run("r2", {"a": Submission(queue="gpu", priority=200)}, now=NOW)
    store.items.add("r1", ["a"], now=NOW)
    running = claimed(store, 1)

    blocked = store.item_failures.block_run("r1", still=still, reason="wrangled: it is the job", now=NOW)

    assert blocked == sorted(ids[name] for name in ("runs", "waits", "needs"))
    assert {store.job(each).state for each in blocked} == {State.BLOCKED}
    assert store.job(running.job_id).reason == "wrangled: it is the job"
    assert not store.claims.owns(running.job_id, attempt=1, incarnation="i1")
    assert not finish(store, running)
    assert claimed(store, 2).run_id == "r2"
    assert claim(store, 3) is None
    assert store.runs.state("r1") == "running"


def test_one_command_undoes_all_measures_on_a_run(store: JobStore) -> None:
    ids = store.runs.submit_run(
        "r1",
        {name: Submission(queue="gpu") for name in ("a", "b", "c")},
        needs={"c": ["a"]},
        wrangled=True,
        now=NOW,
    )
    store.items.add("r1", [f"{n:02}" for n in range(9)], now=NOW)
    job = claimed(store, 1)
    fail(store, job, times=6, tries_max=1)
    store.item_failures.migrate_run("r1", **W1, still=still, **BY)
    store.sweeps.reclaim_expired(now=LATER)
    fail(store, claimed(store, 2, now=LATER))
    store.item_failures.block_run("r1", still=still, reason="", now=LATER)

    later = LATER + HAND_OVER_S + 1
    assert store.item_failures.forgive_run("r1", **FORGIVING, now=later) == 3

    assert [store.job(ids[name]).state for name in ("a", "b", "c")] == [State.QUEUED, State.QUEUED, State.WAITING]
    found = store.item_failures.tally("r1", now=LATER)
    assert found is not None
    assert found.migrations == 0
    assert {each.failed for each in found.workers} == {0}
    assert store.items.counts("r1") == {ItemState.PENDING: 9}
    assert {store.job(ids[name]).reason for name in ("a", "b", "c")} == {"forgiven by bob"}
    run = store.runs.get("r1")
    assert run is not None
    assert (run.forgiven_at, run.forgiven_by) == (later, "bob@box2")
    assert claim(store, 1, now=later) is not None
    store.admin.cancel_run("r1", reason="", now=later)
    with pytest.raises(SubmissionError, match="run 'r1' is cancelled"):
        store.item_failures.forgive_run("r1", **FORGIVING, now=later)
    with pytest.raises(SubmissionError, match="run 'r9' is not there"):
        store.item_failures.forgive_run("r9", **FORGIVING, now=later)


def test_move_after_forgive_bars_only_the_worker_that_failed_again(store: JobStore) -> None:
    start(store, jobs=1)
    for number in (1, 2):
        now = NOW + (number - 1) * (HAND_OVER_S + 1)
        fail(store, claimed(store, number, now=now), times=6)
        store.item_failures.migrate_run("r1", host="box1", worker=f"w{number}", still=still, **{**BY, "now": now})
        store.sweeps.reclaim_expired(now=now + HAND_OVER_S + 1)
    later = NOW + 3 * HAND_OVER_S
    store.item_failures.forgive_run("r1", **FORGIVING, now=later)
    fail(store, claimed(store, 2, now=later))

    assert store.item_failures.migrate_run("r1", host="box1", worker="w2", still=still, **{**BY, "now": later})

    later += HAND_OVER_S + 1
    store.sweeps.reclaim_expired(now=later)
    assert claim(store, 2, now=later) is None
    assert claim(store, 1, now=later) is not None


def test_failures_before_an_unlock_bar_no_worker(store: JobStore) -> None:
    start(store, jobs=1)
    fail(store, claimed(store, 1), times=6)
    store.item_failures.lock_faulty("r1", **W1, still=still, **BY)
    store.admin.unlock(**W1, who="bob", now=NOW)
    store.sweeps.reclaim_expired(now=LATER)
    fail(store, claimed(store, 2, now=LATER), times=6)

    store.item_failures.migrate_run("r1", host="box1", worker="w2", still=still, **{**BY, "now": LATER})

    later = LATER + HAND_OVER_S + 1
    store.sweeps.reclaim_expired(now=later)
    assert claim(store, 2, now=later) is None
    assert claim(store, 1, now=later) is not None


# --- workers that may still run

CUT_OFF = NOW + HAND_OVER_S
OVER = NOW + LEASE_S
"""When an unreachable worker stops itself."""


@pytest.mark.parametrize("act", ["lock", "migrate"])
def test_job_of_an_unreachable_worker_is_not_requeued_before_its_lease(store: JobStore, act: str) -> None:
    start(store, jobs=1)
    fail(store, claimed(store, 1), times=6)
    by: dict[str, Any] = {**BY, "now": CUT_OFF}
    done = store.item_failures.lock_faulty if act == "lock" else store.item_failures.migrate_run
    assert done("r1", **W1, still=still, **by)

    assert store.sweeps.reclaim_expired(now=OVER) == []
    assert store.sweeps.reclaim_expired(now=OVER + 1) != []
    assert claim(store, 2, now=OVER + 1) is not None


@pytest.mark.parametrize("how", ["job", "run"])
@pytest.mark.parametrize(
    ("at", "over"),
    [pytest.param(NOW, NOW + HAND_OVER_S, id="reachable"), pytest.param(CUT_OFF, OVER, id="unreachable")],
)
def test_blocked_job_is_kept_while_its_worker_may_run(store: JobStore, how: str, at: float, over: float) -> None:
    start(store, jobs=1)
    job = claimed(store, 1)
    store.item_failures.block_run("r1", still=still, reason="", now=at)
    blocked = everything(store)

    def let_go(now: float) -> object:
        if how == "run":
            return store.item_failures.forgive_run("r1", **FORGIVING, now=now)
        return store.admin.unblock(job.job_id, reason="", now=now)

    with pytest.raises(BlockedError, match=f"job {job.job_id} stays blocked: its last worker .* in 11 s"):
        let_go(over - 10)

    assert everything(store) == blocked
    assert let_go(over + 1)
    assert claimed(store, 2, now=over + 1).job_id == job.job_id


# --- caps


@pytest.mark.parametrize("cap", ["attempts", "reclaims"])
@pytest.mark.parametrize("act", ["lock", "migrate"])
def test_job_at_its_last_attempt_is_left_to_its_worker(store: JobStore, act: str, cap: str) -> None:
    start(store, jobs=1)
    job = claimed(store, 1)
    fail(store, job, times=6)
    used = {"attempts_max": 1} if cap == "attempts" else {"reclaims": RECLAIMS_MAX - 1}
    with writing(store._engine) as connection:
        connection.execute(update(JOBS).values(**used))
    before = everything(store)

    with pytest.raises(SpentError, match=f"job {job.job_id} has no attempt or reclaim left .*gpuwarden worker lock w1"):
        ACTS[act](store, still)

    assert everything(store) == before
    assert store.claims.owns(job.job_id, attempt=1, incarnation="i1")


def test_forgive_gives_an_exhausted_blocked_job_one_more_attempt(store: JobStore) -> None:
    ids = store.runs.submit_run("r1", {"a": Submission(queue="gpu", attempts_max=1)}, wrangled=True, now=NOW)
    claimed(store, 1)
    store.item_failures.block_run("r1", still=still, reason="", now=NOW)

    with pytest.raises(BlockedError, match="has used all 1 attempts; `gpuwarden wrangle forgive` of its run gives it"):
        store.admin.unblock(ids["a"], reason="", now=LATER)
    assert claim(store, 2, now=LATER) is None
    assert store.item_failures.forgive_run("r1", **FORGIVING, now=LATER) == 1

    assert store.job(ids["a"]).reason == "forgiven by bob, with an attempt more than it had left"
    again = claimed(store, 2, now=LATER)
    assert (again.attempt, again.attempts_max) == (2, 2)


def test_item_that_fails_repeatedly_counts_once(store: JobStore) -> None:
    start(store, items=2)
    job = claimed(store, 1)

    fail(store, job, times=6, tries_max=9)

    assert counts(store) == {"w1": (0, 2, 0.0)}


# --- outdated measures

ACTS: dict[str, Callable[..., Any]] = {
    "lock": lambda store, its: store.item_failures.lock_faulty("r1", **W1, still=its, **BY),
    "migrate": lambda store, its: store.item_failures.migrate_run("r1", **W1, still=its, **BY),
    "block": lambda store, its: store.item_failures.block_run("r1", still=its, reason="", now=NOW),
}


@pytest.mark.parametrize("act", ACTS)
def test_outdated_measure_writes_nothing(store: JobStore, act: str) -> None:
    start(store)
    fail(store, claimed(store, 1), times=6)
    before, asked = everything(store), list[RunTally]()

    def no_more(found: RunTally) -> bool:
        asked.append(found)
        return False

    assert not ACTS[act](store, no_more)

    assert everything(store) == before
    assert asked == [store.item_failures.tally("r1", now=NOW)]
    assert ACTS[act](store, still), "and where it is so, it is done"
    assert everything(store) != before


@pytest.mark.parametrize("act", ACTS)
def test_ranks_are_not_wrangled(store: JobStore, act: str) -> None:
    start(store)
    store.runs.submit(Submission(queue="gpu", run_id="r1", ranks=2), now=NOW)
    fail(store, claimed(store, 1), times=6)
    before = everything(store)

    assert not ACTS[act](store, still)

    assert everything(store) == before


@pytest.mark.parametrize("act", ACTS)
def test_unknown_run_is_not_changed(store: JobStore, act: str) -> None:
    assert not ACTS[act](store, still)


def test_unregistered_worker_is_not_locked(store: JobStore) -> None:
    start(store)

    assert not store.item_failures.lock_faulty("r1", host="box1", worker="w9", still=still, **BY)


@pytest.mark.parametrize("act", ACTS)
def test_concurrent_actions_run_once(store: JobStore, act: str) -> None:
    start(store)
    fail(store, claimed(store, 1), times=6)

    def runs_it_and_failed(found: RunTally) -> bool:
        return any(each.failed > 5 and each.runs_for_s is not None for each in found.workers)

    answers = together(*[lambda: ACTS[act](store, runs_it_and_failed)] * 2)

    assert sorted(map(bool, answers)) == [False, True], answers
    with reading(store._engine) as connection:
        assert len(connection.execute(select(RUN_EXCLUSIONS)).all()) == (act == "migrate")
        assert (connection.scalar(select(WORKERS.c.locked_at)) is not None) is (act == "lock")


def waiting(store: JobStore) -> Any:
    """Number of waits for a lock, in a new transaction, since one sees a single snapshot."""
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with store._engine.connect() as connection:
        return connection.exec_driver_sql(waits).scalar()


@pytest.mark.parametrize("act", ACTS)
def test_item_finished_meanwhile_is_awaited_and_counts(shared_store: JobStore, act: str) -> None:
    """An item outcome that is not committed yet."""
    store = shared_store
    start(store)
    job = claimed(store, 1)
    fail(store, job, times=6)
    item = store.items.take(job.job_id, **by(job))
    assert item is not None
    answers: list[Any] = []

    def no_worker_finished(found: RunTally) -> bool:
        return not any(each.done for each in found.workers)

    acting = Thread(target=lambda: answers.append(ACTS[act](store, no_worker_finished)))
    with store._engine.begin() as connection:  # as in `finish_item`, before the commit
        connection.execute(select(JOBS.c.job_id).where(JOBS.c.job_id == job.job_id).with_for_update(read=True))
        its = {"run_id": "r1", "item": item.item, "job_id": job.job_id, "attempt": 1, "at": NOW, **W1}
        connection.execute(insert(ITEM_OUTCOMES).values(**its, outcome=ItemOutcome.DONE))
        connection.execute(ITEMS.update().where(ITEMS.c.item == item.item).values(state=ItemState.DONE))
        acting.start()
        eventually(lambda: waiting(store), "the act waits for the item's transaction")
    acting.join(30)

    assert [bool(each) for each in answers] == [False]
    assert store.job(job.job_id).state is State.RUNNING
