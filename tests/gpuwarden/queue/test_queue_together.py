"""Workers, operators, timers and consumers on one queue at once."""
# ruff: noqa: S311, S608 - chance that keeps no secret, and queries of our own words

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final

import pytest
from sqlalchemy import Connection, select, text

from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import Condition, State
from gpuwarden.queue import (
    DrainedError,
    JobStore,
    ReplacedError,
    Slot,
    Submission,
    SubmissionError,
    UnknownJobError,
    runs,
)
from gpuwarden.queue.schema import JOBS
from tests.waiting import eventually

TOGETHER_S: Final = 8.0
WORKERS: Final = 6
NEEDS: Final = {"b": ["a"], "c": ["a"], "d": ["b", "c"]}
OVER: Final = "('completed', 'failed', 'cancelled')"

# Each query must return nothing.
LAWS: Final = {
    "an ended job without one event of its end": f"""
        SELECT job_id FROM jobs WHERE state IN {OVER} AND 1 <> (
            SELECT count(*) FROM outbox_events e WHERE e.job_id = jobs.job_id AND e.kind = jobs.state)""",
    "an event of another end": f"""
        SELECT job_id FROM jobs JOIN outbox_events e USING (job_id) WHERE e.kind IN {OVER} AND e.kind <> state""",
    "a wrong count of pending needs": f"""
        SELECT job_id FROM jobs WHERE state NOT IN {OVER} AND pending <> (
            SELECT count(*) FROM dependencies d JOIN jobs n ON n.job_id = d.needs_job_id
            WHERE d.job_id = jobs.job_id AND n.state <> 'completed')""",
    "a job that waits for nothing": "SELECT job_id FROM jobs WHERE state = 'waiting' AND pending = 0",
    "a job that ran before its needs": """
        SELECT job_id FROM jobs
        WHERE pending > 0 AND (attempt > 0 OR state NOT IN ('waiting', 'blocked', 'cancelled'))""",
    "a job that waits for a cancelled one": """
        SELECT j.job_id FROM jobs j JOIN dependencies d ON d.job_id = j.job_id JOIN jobs n ON n.job_id = d.needs_job_id
        WHERE j.state IN ('waiting', 'blocked') AND n.state = 'cancelled'""",
    "two jobs of one incarnation": """
        SELECT claimed_by FROM jobs WHERE state IN ('running', 'host_lost') GROUP BY claimed_by HAVING count(*) > 1""",
    "a run without an end": f"""
        SELECT run_id FROM runs WHERE state = 'running' AND NOT EXISTS (
            SELECT 1 FROM jobs j WHERE j.run_id = runs.run_id AND (j.state NOT IN {OVER} OR j.state = 'failed'))""",
    "an unfinished job of an ended run": f"""
        SELECT job_id FROM jobs JOIN runs r USING (run_id) WHERE r.state <> 'running' AND jobs.state NOT IN {OVER}""",
    "an ended run without its event": """
        SELECT run_id FROM runs WHERE state <> 'running' AND NOT EXISTS (
            SELECT 1 FROM outbox_events e WHERE e.run_id = runs.run_id AND e.kind = 'run_' || runs.state)""",
}


class Together:
    """Each actor is a loop in a thread; failures are collected."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.wrong: list[str] = []
        self.did: Counter[str] = Counter()
        self.seen: dict[str, list[int]] = {}
        self._newest = 1
        self._run = 0
        self._ends_s = time.monotonic() + TOGETHER_S

    def play(self) -> None:
        parts: list[Callable[[random.Random], Iterator[str]]] = [
            partial(self.works, number) for number in range(WORKERS)
        ]
        parts += [self.submits, self.meddles, self.meddles, self.tends, self.loses, self.conditions]
        parts += [partial(self.reads, name) for name in ("notifier", "planner")]
        threads = [threading.Thread(target=self._loop, args=(number, part)) for number, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _loop(self, number: int, part: Callable[[random.Random], Iterator[str]]) -> None:
        acts = part(random.Random(number))
        while time.monotonic() < self._ends_s:
            try:
                self.did[next(acts)] += 1
            except DatabaseError as error:
                self.wrong.append(f"{error}: {error.__cause__}")
                acts = part(random.Random(len(self.wrong)))

    def _some_job(self, r: random.Random) -> int:
        return max(1, self._newest - r.randint(0, 30))

    def works(self, number: int, r: random.Random) -> Iterator[str]:
        slot = {"host": f"h{number % 2}", "worker": f"w{number}"}
        while True:
            me = f"{number}-{r.random()}"
            self.store.claims.register("gpu", **slot, incarnation=me, now=time.time(), gpus=[f"GPU-{number // 2}"])
            with suppress(ReplacedError, DrainedError):
                while r.random() > 0.02:
                    job = self.store.claims.claim("gpu", **slot, incarnation=me, now=time.time(), lease_s=0.2)
                    yield "claims" if job else "finds nothing"
                    if job is None:
                        time.sleep(0.005)
                        continue
                    its: dict[str, Any] = {"attempt": job.attempt, "incarnation": me}
                    for _ in range(r.randint(0, 3)):
                        self.store.claims.renew(job.job_id, **its, now=time.time(), lease_s=0.2)
                        yield "renews"
                    act = r.choice(["complete"] * 6 + ["release", "fail", "leave it"])
                    if act == "complete":
                        self.store.claims.complete(job.job_id, **its, now=time.time(), result=[job.attempt])
                    elif act == "release":
                        self.store.claims.release(job.job_id, **its, now=time.time())
                    elif act == "fail":
                        self.store.claims.fail_by_worker(job.job_id, **its, reason="boom", now=time.time())
                    yield act

    def submits(self, r: random.Random) -> Iterator[str]:
        while True:
            self._run += r.randint(0, 1)
            jobs = {
                name: Submission(queue="gpu", priority=r.choice([50, 100]), ranks=r.choice([1, 1, 2]))
                for name in "abcd"
            }
            with suppress(SubmissionError):
                ids = self.store.runs.submit_run(f"r{self._run}", jobs, needs=NEEDS, now=time.time())
                self._newest = max(ids.values())
            yield "submits"
            time.sleep(0.03)

    def meddles(self, r: random.Random) -> Iterator[str]:
        while True:
            job_id, now = self._some_job(r), time.time()
            act = r.choice(["cancel", "cancel run", "block", "unblock", "unblock"])
            if act == "cancel":
                self.store.admin.cancel(job_id, reason="so", now=now)
            elif act == "cancel run" and r.random() < 0.3:
                self.store.admin.cancel_run(f"r{max(0, self._run - r.randint(0, 2))}", reason="so", now=now)
            elif act == "block":
                self.store.admin.block(job_id, reason="so", now=self.store.now())
            else:
                for each in range(job_id, job_id + 10):
                    self.store.admin.unblock(each, reason="so", now=now)
            yield act
            time.sleep(0.01)

    def tends(self, r: random.Random) -> Iterator[str]:
        while True:
            self.store.sweeps.reclaim_expired(now=time.time())
            yield "sweeps"
            self.store.sweeps.consume_events(now=time.time())
            yield "consumes"
            time.sleep(r.choice([0.0, 0.02]))

    def loses(self, r: random.Random) -> Iterator[str]:
        while True:
            for job in self.store.lost_hosts.jobs_on(r.choice(["h0", "h1"])):
                self.store.lost_hosts.mark_lost(job.job_id, attempt=job.attempt, now=time.time())
            yield "loses"
            time.sleep(0.02)

    def conditions(self, r: random.Random) -> Iterator[str]:
        while True:
            with suppress(UnknownJobError):
                job = self.store.job(self._some_job(r))
                its: dict[str, Any] = {"attempt": job.attempt, "now": time.time()}
                if job.claimed_by and self.store.fencing.fence(
                    job.job_id, incarnation=job.claimed_by, condition=Condition.STALL, **its
                ):
                    if r.random() < 0.2:
                        self.store.fencing.fail(job.job_id, reason="at the cap", **its)
                    else:
                        avoid = Slot(host=job.host or "", worker=job.worker or "")
                        self.store.fencing.requeue(
                            job.job_id, condition=Condition.STALL, avoid=avoid, avoid_s=0.1, **its
                        )
                    yield "conditions"
            yield "looks"
            time.sleep(0.03)

    def reads(self, consumer: str, r: random.Random) -> Iterator[str]:
        while True:
            self.read(consumer, r.randint(1, 20))
            yield f"reads as {consumer}"
            time.sleep(0.01)

    def read(self, consumer: str, limit: int) -> int:
        events = self.store.outbox.events(consumer, limit=limit)
        self.seen.setdefault(consumer, []).extend(each.position for each in events)
        if events:
            self.store.outbox.acknowledge(consumer, events[-1], now=time.time())
        return len(events)


@pytest.mark.needs_postgres
def test_sweeps_and_consumers_of_several_runs_do_not_deadlock(shared_store: JobStore) -> None:
    slot: dict[str, Any] = {"host": "h", "worker": "w", "incarnation": "i"}
    for run_id in ("b", "a"):  # the consumer reads them in this order
        failing = shared_store.runs.submit(Submission(queue=run_id, run_id=run_id), now=0)
        shared_store.claims.claim(run_id, **slot, now=0)
        shared_store.claims.fail_by_worker(failing, attempt=1, incarnation="i", reason="boom", now=0)
        shared_store.runs.submit(Submission(queue=run_id, run_id=run_id, ranks=2), now=0)
        shared_store.claims.claim(run_id, host="h", worker=run_id, incarnation=run_id, now=0, lease_s=1)

    with ThreadPoolExecutor(2) as pool:
        with writing(shared_store._engine) as another:
            of_b = select(JOBS.c.job_id).where(JOBS.c.run_id == "b", JOBS.c.state == State.QUEUED)
            another.execute(of_b.with_for_update())
            consumed = pool.submit(shared_store.sweeps.consume_events, now=2)
            eventually(lambda: waiting(shared_store) == 1, "the consumer has run b, and waits for a job of it")
            swept = pool.submit(shared_store.sweeps.reclaim_expired, now=2)
            eventually(lambda: waiting(shared_store) == 2, "the sweep waits for run b")

        assert consumed.result() == 2
        assert swept.result() == []


@pytest.mark.needs_postgres
def test_cancel_of_an_old_job_id_spares_a_new_job(shared_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = runs.lock_run_of

    def asked_too_early(connection: Connection, job_id: int) -> str | None:
        found = asked(connection, job_id)
        jobs = {name: Submission(queue="gpu") for name in ("first", "second")}
        shared_store.runs.submit_run("r", jobs, needs={"second": ["first"]}, now=0)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(runs, "lock_run_of", asked_too_early)
        assert not shared_store.admin.cancel(1, reason="so", now=1), "there was no such job"

    assert [shared_store.job(each).state for each in (1, 2)] == [State.QUEUED, State.WAITING]
    assert shared_store.admin.cancel(1, reason="so", now=2)
    assert [shared_store.job(each).state for each in (1, 2)] == [State.CANCELLED, State.CANCELLED]


def waiting(store: JobStore) -> int:
    with reading(store._engine) as connection:
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return connection.scalar(text(waits)) or 0


@pytest.mark.needs_postgres
def test_concurrent_use_does_not_block_and_all_adds_up(shared_store: JobStore) -> None:
    together = Together(shared_store)

    together.play()

    assert not together.wrong, "\n".join(together.wrong)
    for act in (
        "claims",
        "complete",
        "release",
        "fail",
        "conditions",
        "loses",
        "cancel",
        "cancel run",
        "unblock",
        "sweeps",
    ):
        assert together.did[act], f"no thread {act}"
    with reading(shared_store._engine) as connection:
        broken = {law: connection.execute(text(query)).all() for law, query in LAWS.items()}
        events = connection.scalar(text("SELECT count(*) FROM outbox_events")) or 0
    assert {law: found for law, found in broken.items() if found} == {}
    for consumer, seen in together.seen.items():
        while together.read(consumer, 500):
            pass
        assert seen == list(range(1, events + 1)), f"{consumer} saw each event once, in order"
