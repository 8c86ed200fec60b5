"""What becomes of runs whose items fail and of the workers that fail them (B): counted, and carried out.

Whoever judges is asked again in the transaction that acts, with the run and its jobs in hand, so that no item is
finished or failed in between: what is not true any more is not done. A job that is taken from its worker is fenced, or
held while it is blocked, for the worker may still be at it: one that is there stops by itself within a second
(`HAND_OVER_S`), one that is cut off from the queue runs on until its lease ends, and so long nobody else has the job.
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
from gpuwarden.job import FINAL, HEARTBEAT_S, RECLAIMS_MAX, ItemOutcome, JobId, Move, State
from gpuwarden.queue import runs, sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.items import items
from gpuwarden.queue.items.tally import RunTally, WorkerTally
from gpuwarden.queue.models import BlockedError, SpentError, SubmissionError
from gpuwarden.queue.schema import BARRED, ITEM_OUTCOMES, JOBS, QUEUE, RUNS, WORKERS

HAND_OVER_S: Final = 3 * HEARTBEAT_S
"""How long a job stays fenced or held that was taken from a worker which was seen as lately as this, seconds.

A worker looks every second whether it still has its job.
"""

Still: TypeAlias = Callable[[RunTally], bool]
"""Whether the counts, read again, still say what is about to be done. Pure: it is asked with locks held."""


class ItemFailures(QueueBase):
    """Runs that asked for it, and what is done about them and their workers. A worker is a slot, whoever is in it."""

    def ask_wrangling(self, run_id: str, *, wrangled: bool) -> bool:
        """Have a run judged from now on, or no more (B7); false where there is no such run."""
        with writing(self._engine) as connection:
            asked = update(RUNS).where(RUNS.c.run_id == run_id).values(wrangled=wrangled)
            return connection.execute(asked).rowcount == 1

    def wrangled_runs(self) -> list[str]:
        """The runs that asked for it and have not ended."""
        asked = select(RUNS.c.run_id).where(RUNS.c.wrangled, RUNS.c.state == "running")
        with reading(self._engine) as connection:
            return list(connection.scalars(asked.order_by(RUNS.c.submitted_at, RUNS.c.run_id)))

    def tally(self, run_id: str, *, now: float) -> RunTally | None:
        """How a run's items went, worker by worker; `None` for a run that nobody submitted."""
        with reading(self._engine) as connection:
            return _tally(connection, run_id, now)

    def lock_faulty(
        self, run_id: str, *, host: str, worker: str, still: Still, who: str, because: str, now: float
    ) -> bool:
        """Lock a worker, take its jobs of this run from it, and have what it failed there tried again (B2, B4).

        A lock that stands already stays as it is. False, and nothing written, where it is no longer so, or there is no
        such worker.

        Raises:
            SpentError: a job that would be taken from it is at a cap, and would fail with its run; nothing is written.
        """
        with writing(self._engine) as connection:
            if not _is_still(connection, run_id, still, now, of_worker=(host, worker)):
                return False
            slot = and_(WORKERS.c.host == host, WORKERS.c.worker == worker)
            if connection.scalar(select(WORKERS.c.worker).where(slot)) is None:
                return False
            row = {"locked_at": now, "locked_by": who, "locked_because": because}
            connection.execute(update(WORKERS).where(slot, WORKERS.c.locked_at.is_(None)).values(**row))
            _take_from(connection, run_id, host, worker, because, now)
            its = and_(ITEM_OUTCOMES.c.host == host, ITEM_OUTCOMES.c.worker == worker)
            items.try_again(connection, run_id, its, now)
            items.forgive(connection, run_id, its)
            notify_after_commit(connection, QUEUE.channel)
            return True

    def migrate_run(
        self, run_id: str, *, host: str, worker: str, still: Still, who: str, because: str, now: float
    ) -> bool:
        """Take a run from the one worker that runs it, and keep it from everyone who has tried it, for good (B5).

        Items that failed for good are tried again by the next worker, once more each. False, and nothing written, where
        it is no longer so.

        Raises:
            SpentError: a job that would be taken from it is at a cap, and would fail with its run; nothing is written.
        """
        with writing(self._engine) as connection:
            if not _is_still(connection, run_id, still, now, of_worker=(host, worker)):
                return False
            before = _migrations(connection, run_id)
            tried = select(ITEM_OUTCOMES.c.host, ITEM_OUTCOMES.c.worker).where(
                ITEM_OUTCOMES.c.run_id == run_id, ITEM_OUTCOMES.c.outcome != ItemOutcome.FORGIVEN
            )
            kept = select(BARRED.c.host, BARRED.c.worker).where(BARRED.c.run_id == run_id)
            barred = {(row.host, row.worker) for row in connection.execute(kept)}
            new = {(host, worker), *((row.host, row.worker) for row in connection.execute(tried.distinct()))} - barred
            its = {"run_id": run_id, "migration": before + 1, "at": now, "barred_by": who, "because": because}
            rows = [{**its, "host": each[0], "worker": each[1]} for each in sorted(new)]
            if rows:  # else it had claimed the run while it was barred from it, and that was no other move
                connection.execute(insert(BARRED), rows)
            _take_from(connection, run_id, host, worker, because, now)
            items.try_again(connection, run_id, true(), now)
            notify_after_commit(connection, QUEUE.channel)
            return True

    def block_run(self, run_id: str, *, still: Still, because: str, now: float) -> list[JobId]:
        """Let nobody claim a run's jobs, and take those that run from their workers (B3, B5); the ids of all those.

        One that is fenced stays with whoever settles it. Those that were running are unblocked only once their workers
        have stopped for certain. None, and nothing written, where it is no longer so.
        """
        with writing(self._engine) as connection:
            if not _is_still(connection, run_id, still, now, jobs=frozenset(State) - FINAL):
                return []
            its = JOBS.c.run_id == run_id
            found = select(JOBS.c.job_id).where(its, or_(sql.from_sources(Move.BLOCK), sql.from_sources(Move.HALT)))
            ids = [JobId(each) for each in connection.scalars(found.order_by(JOBS.c.job_id))]
            connection.execute(sql.transition(Move.BLOCK, its, because=because))
            halted = {
                **sql.UNCLAIMED,
                "because": because,
                "queued_at": now,
                "lease_expires_at": _may_run_until(now),
            }
            connection.execute(sql.transition(Move.HALT, its, **halted))
            notify_after_commit(connection, QUEUE.channel)
            return ids

    def forgive_run(self, run_id: str, *, who: str, because: str, now: float) -> int:
        """Undo what was done to a run: its jobs may be claimed, by everyone, its failures count no more (B9).

        Items that failed for good are tried again. A blocked job that has no attempt left is given one. A worker that
        was locked on the run's account stays so. Who did it last, and when, is kept with the run; `because` with its
        jobs until they are claimed. How many of its jobs were blocked.

        Raises:
            BlockedError: a worker from which one of its jobs was taken may still run it; nothing is written.
            SubmissionError: the run has ended, or nobody submitted it.
        """
        with writing(self._engine) as connection:
            if (state := runs.lock(connection, run_id)) != "running":
                raise SubmissionError(f"run {run_id!r} is {state or 'not there'}: give its items to another run")
            its = JOBS.c.run_id == run_id
            blocked = sql.locked(select(JOBS).where(its, sql.from_sources(Move.UNBLOCK)))
            for row in connection.execute(blocked).all():
                refuse_while_held(row, now)
            items.try_again(connection, run_id, true(), now)
            items.forgive(connection, run_id, true())
            connection.execute(delete(BARRED).where(BARRED.c.run_id == run_id))
            connection.execute(update(RUNS).where(RUNS.c.run_id == run_id).values(forgiven_at=now, forgiven_by=who))
            spent = JOBS.c.attempt >= JOBS.c.attempts_max
            values: dict[str, Any] = {
                "because": case((spent, f"{because}, with an attempt more than it had left"), else_=because),
                "attempts_max": case((spent, JOBS.c.attempt + 1), else_=JOBS.c.attempts_max),
                "lease_expires_at": None,
            }
            waits = sql.transition(Move.DEFER, its, JOBS.c.pending > 0, **values)
            freed = sql.transition(Move.UNBLOCK, its, JOBS.c.pending == 0, **values)
            count = connection.execute(waits).rowcount + connection.execute(freed).rowcount
            notify_after_commit(connection, QUEUE.channel)
            return count


def refuse_while_held(job: Row[Any], now: float) -> None:
    """See that nobody runs this blocked job any more.

    Raises:
        BlockedError: the worker that it was taken from may.
    """
    if job.lease_expires_at is not None and job.lease_expires_at >= now:
        left_s = math.ceil(job.lease_expires_at - now) + 1
        raise BlockedError(
            f"job {job.job_id} stays blocked: the worker that it was taken from may still run it; in {left_s} s it "
            f"does not, try again then"
        )


def _is_still(
    connection: Connection,
    run_id: str,
    still: Still,
    now: float,
    *,
    of_worker: tuple[str, str] | None = None,
    jobs: frozenset[State] = frozenset({State.RUNNING}),
) -> bool:
    """Whether what was judged is so, once with the run locked, and again with the worker's row and its `jobs`, too.

    Whose running jobs are locked, no item of it ends before this transaction does. In this order, which is everybody's;
    but a registration has the worker's row before the runs of its jobs of several ranks, so those are past by then.
    """
    if runs.lock(connection, run_id) is None or not _says(connection, run_id, still, now):
        return False
    if of_worker is not None:
        slot = and_(WORKERS.c.host == of_worker[0], WORKERS.c.worker == of_worker[1])
        connection.execute(select(WORKERS.c.worker).where(slot).with_for_update())
    its = select(JOBS.c.job_id).where(JOBS.c.run_id == run_id, sql.is_in(jobs))
    connection.execute(sql.locked(its)).all()
    return _says(connection, run_id, still, now)


def _says(connection: Connection, run_id: str, still: Still, now: float) -> bool:
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
        told: dict[str, Any] = {"runs_for_s": runs_for_s, "spent": spent.get((host, worker))}
        workers.append(WorkerTally(host=host, worker=worker, done=done, failed=failed, **told))
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
    """How many items went so; one that failed several times is one."""
    return func.count(distinct(case((ITEM_OUTCOMES.c.outcome == outcome, ITEM_OUTCOMES.c.item))))


def _migrations(connection: Connection, run_id: str) -> int:
    newest = select(func.max(BARRED.c.migration)).where(BARRED.c.run_id == run_id)
    return int(connection.scalar(newest) or 0)


def _take_from(connection: Connection, run_id: str, host: str, worker: str, because: str, now: float) -> None:
    """Fence what this worker runs of the run, unless that would end it: a fence that runs out is a reclaim.

    Raises:
        SpentError: a job of it is at a cap.
    """
    held = and_(JOBS.c.run_id == run_id, JOBS.c.host == host, JOBS.c.worker == worker)
    running = sql.is_in({State.RUNNING})
    connection.execute(sql.locked(select(JOBS.c.job_id).where(held, running))).all()
    if (spent := _spent(connection, run_id).get((host, worker))) is not None:
        raise SpentError(f"nothing is done: {spent}")
    fence = sql.transition(Move.FENCE, held, running, because=because, lease_expires_at=_may_run_until(now))
    connection.execute(fence)


def _spent(connection: Connection, run_id: str) -> dict[tuple[str, str], str]:
    """The workers from which what they run of a run cannot be taken, by host and name: why, and what to do instead."""
    running = and_(JOBS.c.run_id == run_id, sql.is_in({State.RUNNING}))
    at_a_cap = or_(JOBS.c.attempt >= JOBS.c.attempts_max, JOBS.c.reclaims >= RECLAIMS_MAX)
    told = {}
    for row in connection.execute(select(JOBS).where(running, at_a_cap).order_by(JOBS.c.job_id.desc())):
        used = f"attempt {row.attempt} of {row.attempts_max}, reclaimed {row.reclaims} times of {RECLAIMS_MAX}"
        told[row.host, row.worker] = (
            f"job {row.job_id} has no attempt or reclaim left ({used}): taken from {row.worker} on {row.host} it would "
            f"fail, and its run; `gpuwarden worker lock {row.worker} --host {row.host}` lets the worker finish it and "
            f"claim nothing more"
        )
    return told


def _may_run_until(now: float) -> ColumnElement[float]:
    """When the worker that runs a job has stopped for certain, from which it is taken now.

    One that was not seen for three heartbeats may be cut off from the queue: it does not hear of it, and stops only
    when its lease ends.
    """
    soon = now + HAND_OVER_S
    seen = exists().where(
        *(WORKERS.c.host == JOBS.c.host, WORKERS.c.worker == JOBS.c.worker),
        *(WORKERS.c.incarnation == JOBS.c.claimed_by, WORKERS.c.last_seen_at > now - HAND_OVER_S),
    )
    cut_off = and_(not_(seen.correlate(JOBS)), JOBS.c.lease_expires_at > soon)
    return case((cut_off, JOBS.c.lease_expires_at), else_=soon)
