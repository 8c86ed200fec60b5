"""Actions on runs with failed items and on their workers (B).

The acting transaction checks the verdict again with the run and its jobs locked. A job that is taken from its worker
stays fenced or held while that worker may run it: `HAND_OVER_S`, or until its lease ends if the worker is cut off.
"""

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    and_,
    case,
    delete,
    distinct,
    exists,
    func,
    insert,
    not_,
    or_,
    select,
    true,
    update,
)

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import FINAL, HEARTBEAT_S, RECLAIMS_MAX, ItemOutcome, JobId, Kind, Move, State
from gpuwarden.queue import runs, sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.items import items
from gpuwarden.queue.items.tally import RunTally, WorkerTally
from gpuwarden.queue.models import BlockedError, SpentError, SubmissionError
from gpuwarden.queue.schema import ITEM_OUTCOMES, JOBS, QUEUE, RUN_EXCLUSIONS, RUNS, WORKERS

HAND_OVER_S: Final = 3 * HEARTBEAT_S
"""How long a job stays fenced or held after it leaves a connected worker, seconds."""

Still: TypeAlias = Callable[[RunTally], bool]
"""Whether the verdict still holds. Pure: called with locks held."""


class ItemFailures(QueueBase):
    """Wrangling of runs and their workers."""

    def ask_wrangling(self, run_id: str, *, wrangled: bool) -> bool:
        """Turn wrangling of a run on or off (B7); False if the run is unknown."""
        with writing(self._engine) as connection:
            asked = update(RUNS).where(RUNS.c.run_id == run_id).values(wrangled=wrangled)
            return connection.execute(asked).rowcount == 1

    def wrangled_runs(self) -> list[str]:
        """Running runs with wrangling."""
        asked = select(RUNS.c.run_id).where(RUNS.c.wrangled, RUNS.c.state == "running")
        with reading(self._engine) as connection:
            return list(connection.scalars(asked.order_by(RUNS.c.submitted_at, RUNS.c.run_id)))

    def tally(self, run_id: str, *, now: float) -> RunTally | None:
        """Item counts of a run; `None` if the run is unknown."""
        with reading(self._engine) as connection:
            return _tally(connection, run_id, now)

    def lock_faulty(
        self, run_id: str, *, host: str, worker: str, still: Still, who: str, reason: str, now: float
    ) -> bool:
        """Lock a worker, take its jobs of this run, and retry the items that it failed (B2, B4).

        False, with nothing written, if the verdict no longer holds.

        Raises:
            SpentError: one of its jobs is at a cap and would fail.
        """
        with writing(self._engine) as connection:
            if not _check_verdict(connection, run_id, still, now, of_worker=(host, worker)):
                return False
            slot = and_(WORKERS.c.host == host, WORKERS.c.worker == worker)
            if connection.scalar(select(WORKERS.c.worker).where(slot)) is None:
                return False
            row = {"locked_at": now, "locked_by": who, "locked_reason": reason}
            connection.execute(update(WORKERS).where(slot, WORKERS.c.locked_at.is_(None)).values(**row))
            _take_from(connection, run_id, host, worker, reason, now)
            its = and_(ITEM_OUTCOMES.c.host == host, ITEM_OUTCOMES.c.worker == worker)
            items.try_again(connection, run_id, its, now)
            items.forgive(connection, run_id, its)
            notify_after_commit(connection, QUEUE.channel)
            return True

    def migrate_run(
        self, run_id: str, *, host: str, worker: str, still: Still, who: str, reason: str, now: float
    ) -> bool:
        """Take a run from its only worker, bar all workers that have tried it, and retry its items (B5).

        False, with nothing written, if the verdict no longer holds.

        Raises:
            SpentError: one of its jobs is at a cap and would fail.
        """
        with writing(self._engine) as connection:
            if not _check_verdict(connection, run_id, still, now, of_worker=(host, worker)):
                return False
            before = _migrations(connection, run_id)
            tried = select(ITEM_OUTCOMES.c.host, ITEM_OUTCOMES.c.worker).where(
                ITEM_OUTCOMES.c.run_id == run_id, ITEM_OUTCOMES.c.outcome != ItemOutcome.CLEARED
            )
            kept = select(RUN_EXCLUSIONS.c.host, RUN_EXCLUSIONS.c.worker).where(RUN_EXCLUSIONS.c.run_id == run_id)
            barred = {(row.host, row.worker) for row in connection.execute(kept)}
            new = {(host, worker), *((row.host, row.worker) for row in connection.execute(tried.distinct()))} - barred
            its = {"run_id": run_id, "migration": before + 1, "at": now, "excluded_by": who, "reason": reason}
            rows = [{**its, "host": each[0], "worker": each[1]} for each in sorted(new)]
            if rows:  # empty if the worker was barred already
                connection.execute(insert(RUN_EXCLUSIONS), rows)
            _take_from(connection, run_id, host, worker, reason, now)
            items.try_again(connection, run_id, true(), now)
            notify_after_commit(connection, QUEUE.channel)
            return True

    def block_run(self, run_id: str, *, still: Still, reason: str, now: float) -> list[JobId]:
        """Block a run's jobs and take running ones from their workers (B3, B5); returns their ids.

        Writes nothing if the verdict no longer holds.
        """
        with writing(self._engine) as connection:
            if not _check_verdict(connection, run_id, still, now, jobs=frozenset(State) - FINAL):
                return []
            its = JOBS.c.run_id == run_id
            found = select(JOBS.c.job_id).where(its, or_(sql.from_sources(Move.BLOCK), sql.from_sources(Move.HALT)))
            ids = [JobId(each) for each in connection.scalars(found.order_by(JOBS.c.job_id))]
            connection.execute(sql.transition(Move.BLOCK, its, reason=reason))
            halted = {
                **sql.UNCLAIMED,
                "reason": reason,
                "queued_at": now,
                "lease_expires_at": _may_run_until(now),
            }
            connection.execute(sql.transition(Move.HALT, its, **halted))
            sql.write_untimed(connection, Kind.BLOCKED, ids, now)
            notify_after_commit(connection, QUEUE.channel)
            return ids

    def forgive_run(self, run_id: str, *, who: str, reason: str, now: float) -> int:
        """Undo the wrangling of a run: unblock its jobs, lift bars, retry its items (B9).

        A job without attempts gets one more. Locked workers stay locked. Returns the number of unblocked jobs.

        Raises:
            BlockedError: a previous worker may still run one of the jobs.
            SubmissionError: the run has ended or is unknown.
        """
        with writing(self._engine) as connection:
            if (state := runs.lock(connection, run_id)) != "running":
                raise SubmissionError(f"run {run_id!r} is {state or 'not there'}: give its items to another run")
            its = JOBS.c.run_id == run_id
            blocked = sql.lock_jobs(select(JOBS).where(its, sql.from_sources(Move.UNBLOCK)))
            for row in connection.execute(blocked).all():
                refuse_while_held(row, now)
            items.try_again(connection, run_id, true(), now)
            items.forgive(connection, run_id, true())
            connection.execute(delete(RUN_EXCLUSIONS).where(RUN_EXCLUSIONS.c.run_id == run_id))
            connection.execute(update(RUNS).where(RUNS.c.run_id == run_id).values(forgiven_at=now, forgiven_by=who))
            spent = JOBS.c.attempt >= JOBS.c.attempts_max
            values: dict[str, Any] = {
                "reason": case((spent, f"{reason}, with an attempt more than it had left"), else_=reason),
                "attempts_max": case((spent, JOBS.c.attempt + 1), else_=JOBS.c.attempts_max),
                "lease_expires_at": None,
            }
            waits = sql.transition(Move.DEFER, its, JOBS.c.pending > 0, **values)
            freed = sql.transition(Move.UNBLOCK, its, JOBS.c.pending == 0, **values)
            count = connection.execute(waits).rowcount + connection.execute(freed).rowcount
            notify_after_commit(connection, QUEUE.channel)
            return count


def refuse_while_held(job: Row[Any], now: float) -> None:
    """Check that no worker can still run this blocked job.

    Raises:
        BlockedError: its last worker may still run it.
    """
    if job.lease_expires_at is not None and job.lease_expires_at >= now:
        left_s = math.ceil(job.lease_expires_at - now) + 1
        raise BlockedError(f"job {job.job_id} stays blocked: its last worker may still run it; try again in {left_s} s")


def _check_verdict(
    connection: Connection,
    run_id: str,
    still: Still,
    now: float,
    *,
    of_worker: tuple[str, str] | None = None,
    jobs: frozenset[State] = frozenset({State.RUNNING}),
) -> bool:
    """Check the verdict with the run locked, then with the worker's row and `jobs` locked.

    A registration locks the worker's row before the runs of its ranks, so runs with gangs are excluded first.
    """
    if runs.lock(connection, run_id) is None or not _verdict_holds(connection, run_id, still, now):
        return False
    if of_worker is not None:
        slot = and_(WORKERS.c.host == of_worker[0], WORKERS.c.worker == of_worker[1])
        connection.execute(select(WORKERS.c.worker).where(slot).with_for_update())
    its = select(JOBS.c.job_id).where(JOBS.c.run_id == run_id, sql.is_in(jobs))
    connection.execute(sql.lock_jobs(its)).all()
    return _verdict_holds(connection, run_id, still, now)


def _verdict_holds(connection: Connection, run_id: str, still: Still, now: float) -> bool:
    found = _tally(connection, run_id, now)
    return found is not None and not found.ranked and still(found)


def _tally(connection: Connection, run_id: str, now: float) -> RunTally | None:
    run = connection.execute(select(RUNS).where(RUNS.c.run_id == run_id)).one_or_none()
    if run is None:
        return None
    of_run = JOBS.c.run_id == run_id
    running = {
        (row.host, row.worker): max(0.0, now - row.since)
        for row in connection.execute(
            select(JOBS.c.host, JOBS.c.worker, func.min(JOBS.c.claimed_at).label("since"))
            .where(of_run, sql.is_in({State.RUNNING}))
            .group_by(JOBS.c.host, JOBS.c.worker)
        )
    }
    unsettled = select(func.count()).where(of_run, sql.is_in({State.FENCING, State.HOST_LOST}))
    ranked = select(exists().where(of_run, JOBS.c.gang.is_not(None), sql.is_in(set(State) - FINAL)))
    counts = {
        (row.host, row.worker): (int(row.done), int(row.failed))
        for row in connection.execute(
            select(
                ITEM_OUTCOMES.c.host,
                ITEM_OUTCOMES.c.worker,
                _items(ItemOutcome.DONE).label("done"),
                _items(ItemOutcome.FAILED).label("failed"),
            )
            .where(ITEM_OUTCOMES.c.run_id == run_id)
            .group_by(ITEM_OUTCOMES.c.host, ITEM_OUTCOMES.c.worker)
        )
    }
    workers, spent = [], _spent(connection, run_id)
    for host, worker in sorted({*running, *counts}):
        done, failed = counts.get((host, worker), (0, 0))
        runs_for_s = running.get((host, worker))
        current: dict[str, Any] = {"runs_for_s": runs_for_s, "spent": spent.get((host, worker))}
        workers.append(WorkerTally(host=host, worker=worker, done=done, failed=failed, **current))
    return RunTally(
        run_id=run_id,
        asked=run.wrangled,
        over=run.state != "running",
        ranked=bool(connection.scalar(ranked)),
        unsettled=int(connection.scalar(unsettled) or 0),
        migrations=_migrations(connection, run_id),
        workers=tuple(workers),
    )


def _items(outcome: ItemOutcome) -> ColumnElement[int]:
    return func.count(distinct(case((ITEM_OUTCOMES.c.outcome == outcome, ITEM_OUTCOMES.c.item))))


def _migrations(connection: Connection, run_id: str) -> int:
    newest = select(func.max(RUN_EXCLUSIONS.c.migration)).where(RUN_EXCLUSIONS.c.run_id == run_id)
    return int(connection.scalar(newest) or 0)


def _take_from(connection: Connection, run_id: str, host: str, worker: str, reason: str, now: float) -> None:
    """Fence the worker's jobs of the run.

    Raises:
        SpentError: a job is at a cap and would fail.
    """
    held = and_(JOBS.c.run_id == run_id, JOBS.c.host == host, JOBS.c.worker == worker)
    running = sql.is_in({State.RUNNING})
    connection.execute(sql.lock_jobs(select(JOBS.c.job_id).where(held, running))).all()
    if (spent := _spent(connection, run_id).get((host, worker))) is not None:
        raise SpentError(f"nothing is done: {spent}")
    fence = sql.transition(Move.FENCE, held, running, reason=reason, lease_expires_at=_may_run_until(now))
    connection.execute(fence)


def _spent(connection: Connection, run_id: str) -> dict[tuple[str, str], str]:
    running = and_(JOBS.c.run_id == run_id, sql.is_in({State.RUNNING}))
    at_a_cap = or_(JOBS.c.attempt >= JOBS.c.attempts_max, JOBS.c.reclaims + 1 >= RECLAIMS_MAX)
    reasons = {}
    for row in connection.execute(select(JOBS).where(running, at_a_cap).order_by(JOBS.c.job_id.desc())):
        used = f"attempt {row.attempt} of {row.attempts_max}, {row.reclaims} lost attempts, and {RECLAIMS_MAX} fail it"
        reasons[row.host, row.worker] = (
            f"job {row.job_id} has no attempt or reclaim left ({used}): without {row.worker} on {row.host} "
            f"the job and its run would fail; `gpuwarden worker lock {row.worker} --host {row.host}` lets the worker "
            f"finish it and claim nothing more"
        )
    return reasons


def _may_run_until(now: float) -> ColumnElement[float]:
    """When the worker that loses the job has certainly stopped, Unix seconds.

    A cut-off worker stops when its lease ends.
    """
    soon = now + HAND_OVER_S
    seen = exists().where(
        *(WORKERS.c.host == JOBS.c.host, WORKERS.c.worker == JOBS.c.worker),
        *(WORKERS.c.incarnation == JOBS.c.claimed_by, WORKERS.c.last_seen_at > now - HAND_OVER_S),
    )
    cut_off = and_(not_(seen.correlate(JOBS)), JOBS.c.lease_expires_at > soon)
    return case((cut_off, JOBS.c.lease_expires_at), else_=soon)
