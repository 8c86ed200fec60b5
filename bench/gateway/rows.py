"""The rows of a fleet: tokens, idle workers, and workers that run a job. Registration one by one would take minutes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import func, insert, select

from bench.queue.worker import execute
from gpuwarden.db.engine import connect
from gpuwarden.db.transactions import writing
from gpuwarden.job import LEASE_S, State
from gpuwarden.queue import JobStore, Submission
from gpuwarden.queue.schema import JOBS, WORKERS

RUNNING_QUEUE: Final = "long"
"""Queue of the workers that run a job all the time."""

IDLE_QUEUE: Final = "short"
"""Queue of the workers that wait for a job."""

TEMPLATE_QUEUE: Final = "template"
"""Queue of the first job, which the others are copies of. No worker serves it."""

MODEL: Final = "model"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A worker of a simulated host. One with a `job_id` runs that job, attempt 1."""

    host: str
    worker: str
    incarnation: str
    job_id: int | None = None

    @property
    def queue(self) -> str:
        """The queue that it serves."""
        return IDLE_QUEUE if self.job_id is None else RUNNING_QUEUE


@dataclass(frozen=True, kw_only=True)
class HostRow:
    """A simulated host."""

    name: str
    token: str
    slots: tuple[Slot, ...]


def fill(url: str, *, hosts: int, workers: int) -> list[HostRow]:
    """Create hosts with this number of workers each. Each second worker runs a job."""
    store = JobStore.open(url)
    try:
        now = store.now()
        template = store.runs.submit(Submission(queue=TEMPLATE_QUEUE, model=MODEL), now=now)
        names = [f"host-{number:04}" for number in range(hosts)]
        tokens = [store.host_tokens.enrol(name, now=now) for name in names]
    finally:
        store.close()
    job_ids = iter(range(template + 1, template + 1 + hosts * workers))
    found = [
        HostRow(name=name, token=token, slots=tuple(_slot(name, each, job_ids) for each in range(workers)))
        for name, token in zip(names, tokens, strict=True)
    ]
    _insert(url, [slot for host in found for slot in host.slots], now)
    return found


def _slot(host: str, number: int, job_ids: Iterator[int]) -> Slot:
    job_id = None if number % 2 else next(job_ids)
    return Slot(host=host, worker=f"{host}-{number}", incarnation=f"{host}-{number}-0", job_id=job_id)


def _insert(url: str, slots: list[Slot], now: float) -> None:
    running = {"state": State.RUNNING, "attempt": 1, "claimed_at": now, "lease_expires_at": now + LEASE_S}
    engine = connect(url)
    with writing(engine) as connection:
        template: dict[str, Any] = dict(connection.execute(select(JOBS)).mappings().one())
        jobs = [
            {
                **template,
                **running,
                "job_id": each.job_id,
                "queue": each.queue,
                "claimed_by": each.incarnation,
                "host": each.host,
                "worker": each.worker,
            }
            for each in slots
            if each.job_id is not None
        ]
        workers = [
            {
                "host": each.host,
                "worker": each.worker,
                "queue": each.queue,
                "incarnation": each.incarnation,
                "current_model": None if each.job_id is None else MODEL,
                "last_seen_at": now,
            }
            for each in slots
        ]
        connection.execute(insert(JOBS), jobs)
        connection.execute(insert(WORKERS), workers)
        highest = select(func.max(JOBS.c.job_id)).scalar_subquery()
        connection.execute(select(func.setval(func.pg_get_serial_sequence("jobs", "job_id"), highest)))
    engine.dispose()
    execute(url, "VACUUM (ANALYZE)")
