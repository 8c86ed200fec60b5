"""Jobs and runs for lists."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from sqlalchemy import ColumnElement, func, literal_column, select

from gpuwarden.db.errors import UnreadableRowError
from gpuwarden.db.rows import readable
from gpuwarden.db.transactions import reading
from gpuwarden.job import FINAL, JobId, State
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import KNOWN_STATES, Job, Run
from gpuwarden.queue.rows import to_job, to_run
from gpuwarden.queue.schema import AT_WORK, JOBS, RUNS, UNWELL, WORKERS

PAGE: Final = 1000
"""Jobs read at a time."""

Unreadable: TypeAlias = Callable[[UnreadableRowError], None] | None

_AT_WORK: Final = frozenset(State) - FINAL - {State.QUEUED}
_UNWELL: Final = frozenset({State.FAILED, State.CANCELLED})


class Queries(QueueBase):
    """Reads only. Jobs are in the order of their ids."""

    def newest(
        self,
        *,
        limit: int = 0,
        states: frozenset[State] = frozenset(State),
        queue: str | None = None,
        run_id: str | None = None,
        unreadable: Unreadable = None,
    ) -> Iterator[Job]:
        """The newest jobs, oldest first. A `limit` of 0 means all. `unreadable`: see `readable`."""
        its: list[ColumnElement[bool]] = [] if states == frozenset(State) else [sql.is_in(states)]
        # SQLite uses a partial index only if the query repeats the index's condition.
        its += [literal_column(AT_WORK)] if states <= _AT_WORK else []
        its += [literal_column(UNWELL)] if states <= _UNWELL else []
        its += [] if queue is None else [JOBS.c.queue == queue]
        its += [] if run_id is None else [JOBS.c.run_id == run_id]
        if limit:
            with reading(self._engine) as connection:
                rows = connection.execute(select(JOBS).where(*its).order_by(JOBS.c.job_id.desc()).limit(limit)).all()
            yield from readable(reversed(rows), to_job, unreadable)
            return
        last = 0
        while True:
            page = select(JOBS).where(*its, JOBS.c.job_id > last).order_by(JOBS.c.job_id).limit(PAGE)
            with reading(self._engine) as connection:
                rows = connection.execute(page).all()
            yield from readable(rows, to_job, unreadable)
            if len(rows) < PAGE:
                return
            last = rows[-1].job_id

    def known(self, host: str, *, workers: Sequence[str], runs: Sequence[str]) -> tuple[set[str], set[str]]:
        """Those of the workers of a host, and of the runs, that the queue has ever seen."""
        with reading(self._engine) as connection:
            registered: set[str] = set()
            submitted: set[str] = set()
            for first in range(0, len(workers), PAGE):
                some = workers[first : first + PAGE]
                found = select(WORKERS.c.worker).where(WORKERS.c.host == host, WORKERS.c.worker.in_(some))
                registered.update(connection.scalars(found))
            for first in range(0, len(runs), PAGE):
                some = runs[first : first + PAGE]
                submitted.update(connection.scalars(select(RUNS.c.run_id).where(RUNS.c.run_id.in_(some))))
            return registered, submitted

    def of_gang(self, gang: int) -> list[Job]:
        """The ranks of a gang, in order. A rendezvous reads their hosts and workers."""
        with reading(self._engine) as connection:
            found = connection.execute(select(JOBS).where(JOBS.c.gang == gang).order_by(JOBS.c.rank))
            return list(readable(found, to_job))

    def states_of(self, job_ids: Iterable[int]) -> dict[JobId, State]:
        """The states of these jobs. An unknown id is absent."""
        found = select(JOBS.c.job_id, JOBS.c.state).where(JOBS.c.job_id.in_(sorted(job_ids)))
        with reading(self._engine) as connection:
            return {
                JobId(row.job_id): State(row.state) for row in connection.execute(found) if row.state in KNOWN_STATES
            }

    def newest_runs(self, *, limit: int = 0, state: str | None = None) -> list[Run]:
        """The newest runs, oldest first, with job counts by state. A `limit` of 0 means all."""
        chosen = select(RUNS).order_by(RUNS.c.submitted_at.desc(), RUNS.c.run_id.desc())
        if state is not None:
            chosen = chosen.where(RUNS.c.state == state)
        if limit:
            chosen = chosen.limit(limit)
        runs = chosen.subquery("chosen")
        counted = (
            select(JOBS.c.run_id, JOBS.c.state, func.count().label("jobs"))
            .where(JOBS.c.run_id.in_(select(runs.c.run_id)))
            .group_by(JOBS.c.run_id, JOBS.c.state)
        )
        with reading(self._engine) as connection:
            rows = connection.execute(chosen).all()
            jobs: dict[str, dict[State, int]] = {row.run_id: {} for row in rows}
            for each in connection.execute(counted):
                if each.state in KNOWN_STATES:
                    jobs[each.run_id][State(each.state)] = int(each.jobs)
        return list(readable(reversed(rows), lambda row: to_run(row, jobs[row.run_id])))
