"""Submissions and claims with defaults, on a queue in a real database."""

from typing import Any

from gpuwarden.db.transactions import writing
from gpuwarden.job import Condition, JobId
from gpuwarden.queue import Job, JobStore, Submission

NOW = 1_000_000.0


def submit(store: JobStore, **changed: Any) -> JobId:
    return store.runs.submit(Submission(**{"queue": "gpu", **changed}), now=NOW)


def claim(store: JobStore, incarnation: str = "i1", *, now: float = NOW, queue: str = "gpu") -> Job:
    """Claim as incarnation `i1` of worker `w1`, and so on."""
    worker = incarnation.replace("i", "w")
    job = store.claims.claim(queue, host="box1", worker=worker, incarnation=incarnation, now=now)
    assert job is not None
    return job


def put_to_work(store: JobStore, *hosts: str, now: float = NOW - 1000) -> None:
    """Let each host claim a job."""
    for host in hosts:
        submit(store)
        assert store.claims.claim("gpu", host=host, worker="w1", incarnation=f"{host}-i1", now=now)


def fenced(store: JobStore, **changed: Any) -> Job:
    submit(store, **changed)
    job = claim(store)
    assert store.fencing.fence(
        job.job_id, attempt=job.attempt, incarnation="i1", condition=Condition.STALL, now=NOW + 1
    )
    return job


_REFUSALS = {
    (
        "sqlite",
        "INSERT",
    ): "CREATE TRIGGER refusal BEFORE INSERT ON outbox_events BEGIN SELECT RAISE(ABORT, 'refusal'); END",
    (
        "sqlite",
        "UPDATE",
    ): "CREATE TRIGGER refusal BEFORE UPDATE ON outbox_events BEGIN SELECT RAISE(ABORT, 'refusal'); END",
    ("sqlite", ""): "DROP TRIGGER refusal",
    ("postgresql", "INSERT"): "ALTER TABLE outbox_events ADD CONSTRAINT refusal CHECK (kind <> 'failed')",
    ("postgresql", "UPDATE"): "ALTER TABLE outbox_events ADD CONSTRAINT refusal CHECK (run_failed_at IS NULL)",
    ("postgresql", ""): "ALTER TABLE outbox_events DROP CONSTRAINT refusal",
}


def refuse_events(store: JobStore, when: str = "INSERT") -> None:
    with writing(store._engine) as connection:
        connection.exec_driver_sql(_REFUSALS[connection.dialect.name, when])


def register(store: JobStore, incarnation: str, *, now: float = NOW, gpus: tuple[str, ...] = ()) -> list[JobId]:
    """Register incarnation `i1` or `i1b` of worker `w1`."""
    worker = incarnation.replace("i", "w").rstrip("b")
    return store.claims.register("gpu", host="box1", worker=worker, incarnation=incarnation, now=now, gpus=gpus)


def stale(store: JobStore) -> None:
    register(store, "i2", now=NOW - 31)
