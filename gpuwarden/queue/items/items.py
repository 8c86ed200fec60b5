"""What a run has to do besides its jobs, piece by piece: the frames of a render. Its jobs share them.

A job takes an item, does it, and takes the next, for as long as there is one. What an attempt had taken when it ended
is there for others again, without a word from anybody: whether an item is held is read from the job that took it. Each
time an item is done or fails is kept, with the worker, for whoever is to tell a faulty worker from a faulty job (B).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Update, and_, exists, func, insert, not_, or_, select, update

from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.job import ITEM_MOVES, ITEM_TRIES_MAX, ItemMove, ItemOutcome, ItemState, State
from gpuwarden.queue import runs, sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import Item, Result, SubmissionError, check_result, to_item
from gpuwarden.queue.schema import ITEM_OUTCOMES, ITEMS, JOBS
from gpuwarden.state_file import TEXT_MAX, is_text

LOOKED_AT_MAX: Final = 32
"""How many items one take tries before it leaves the rest to the next: others may be taking the first ones."""


class Items(QueueBase):
    """A run's items, as its jobs and people see them."""

    def add(self, run_id: str, items: Sequence[str], *, now: float) -> int:
        """Give a run more to do, in this order, and open it where it is new; how many it did not have yet.

        Raises:
            SubmissionError: the run has failed or was cancelled, or an item has no name that can be kept.
        """
        if bad := [each for each in items if not is_text(each)]:
            raise SubmissionError(f"item {bad[0][:80]!a} will not do: 1 to {TEXT_MAX} printable characters")
        names = list(dict.fromkeys(items))
        with reading(self._engine) as connection:
            its = select(ITEMS.c.item).where(ITEMS.c.run_id == run_id)
            if set(names) <= set(connection.scalars(its)):
                return 0  # nothing to do opens no run
        with writing(self._engine) as connection:
            runs.open_run(connection, run_id, now)
            last = connection.scalar(select(func.max(ITEMS.c.place)).where(ITEMS.c.run_id == run_id)) or 0
            rows = [
                {"run_id": run_id, "item": item, "place": last + n, "state": ItemState.PENDING, "changed_at": now}
                for n, item in enumerate(names, 1)
            ]
            known = set(connection.scalars(select(ITEMS.c.item).where(ITEMS.c.run_id == run_id)))
            connection.execute(upsert(connection, ITEMS).on_conflict_do_nothing(), rows)
            return sum(row["item"] not in known for row in rows)

    def take(self, job_id: int, *, attempt: int, incarnation: str, now: float) -> Item | None:
        """The next item of the job's run for this attempt; `None` when there is none, or the attempt is over.

        An attempt has one at a time: the one that it has, of a take whose answer was lost, is given to it again. One
        that failed on this worker comes after all that did not.
        """
        with writing(self._engine) as connection:
            job = _hold(connection, job_id, attempt, incarnation, now)
            if job is None or job.run_id is None:
                return None
            item = _held_by(connection, job) or _take(connection, job)
            if item is None:
                return None
            holder = {"job_id": job_id, "attempt": attempt, "host": job.host, "worker": job.worker}
            taken = _transition(ItemMove.TAKE, job.run_id, item, **holder, because=None, changed_at=now)
            return to_item(connection.execute(taken.returning(ITEMS)).one())

    def finish(
        self, job_id: int, *, attempt: int, incarnation: str, item: str, now: float, result: Result = None
    ) -> bool:
        """An item is done; false when the attempt does not hold it, or its job, and nothing was written.

        True also where this attempt has told it before, and the answer was lost.

        Raises:
            ResultError: the result cannot be kept.
        """
        check_result(result)
        with writing(self._engine) as connection:
            job = _hold(connection, job_id, attempt, incarnation, now)
            if job is None:
                return False
            done = _transition(ItemMove.FINISH, job.run_id, item, *_by(job_id, attempt), result=result, changed_at=now)
            if connection.execute(done).rowcount != 1:
                return _is_told(connection, job, item, ItemState.DONE)
            _note(connection, job, item, ItemOutcome.DONE, None, now)
            return True

    def fail(
        self,
        job_id: int,
        *,
        attempt: int,
        incarnation: str,
        item: str,
        because: str,
        now: float,
        tries_max: int = ITEM_TRIES_MAX,
    ) -> bool:
        """An item failed: it is tried again, until it has failed `tries_max` times. False as for `finish_item`."""
        with writing(self._engine) as connection:
            job = _hold(connection, job_id, attempt, incarnation, now)
            if job is None:
                return False
            failed = and_(
                *(ITEM_OUTCOMES.c.run_id == job.run_id, ITEM_OUTCOMES.c.item == item),
                ITEM_OUTCOMES.c.outcome == ItemOutcome.FAILED,
            )
            before = connection.scalar(select(func.count()).where(failed)) or 0
            move = ItemMove.TRY_AGAIN if before + 1 < tries_max else ItemMove.GIVE_UP
            moved = _transition(move, job.run_id, item, *_by(job_id, attempt), because=because, changed_at=now)
            if connection.execute(moved).rowcount != 1:
                return _is_told(connection, job, item, ItemState.PENDING, ItemState.FAILED)
            _note(connection, job, item, ItemOutcome.FAILED, because, now)
            return True

    def reset(self, run_id: str, *, now: float, host: str | None = None, worker: str | None = None) -> int:
        """Have items that failed for good tried again: all of a run, or those that this worker failed last; how many.

        What has failed so far does not count any more.

        Raises:
            SubmissionError: the run is over, so that nobody would try them: give them to another run.
        """
        failed = [ITEMS.c.run_id == run_id, ITEMS.c.state == ItemState.FAILED]
        failed += [ITEMS.c[name] == told for name, told in (("host", host), ("worker", worker)) if told is not None]
        with writing(self._engine) as connection:
            if (state := runs.lock(connection, run_id)) != "running":
                raise SubmissionError(f"run {run_id!r} is {state or 'not there'}: give its items to another run")
            names = _reset(connection, failed, run_id, now)
            for name in names:
                past = and_(ITEM_OUTCOMES.c.run_id == run_id, ITEM_OUTCOMES.c.item == name)
                connection.execute(update(ITEM_OUTCOMES).where(past).values(outcome=ItemOutcome.FORGIVEN))
            return len(names)

    def of_run(self, run_id: str) -> list[Item]:
        """A run's items, in order. What an attempt that is over had taken is pending."""
        found = select(ITEMS, _is_held().label("held")).where(ITEMS.c.run_id == run_id).order_by(ITEMS.c.place)
        with reading(self._engine) as connection:
            return [
                to_item(row) if row.held or row.state != ItemState.TAKEN else _free(to_item(row))
                for row in connection.execute(found)
            ]

    def counts(self, run_id: str) -> Counter[ItemState]:
        """How many items of a run are in which state."""
        return Counter(item.state for item in self.of_run(run_id))


def try_again(connection: Connection, run_id: str, whose: ColumnElement[bool], now: float) -> int:
    """Have items of a locked run that failed for good tried again, where an outcome says that `whose` failed; how many.

    What failed so far still counts: see `forgive`.
    """
    names = select(ITEM_OUTCOMES.c.item).where(_failed(run_id), whose)
    failed = (ITEMS.c.run_id == run_id, ITEMS.c.state == ItemState.FAILED, ITEMS.c.item.in_(names))
    return len(_reset(connection, failed, run_id, now))


def forgive(connection: Connection, run_id: str, whose: ColumnElement[bool]) -> None:
    """What failed so far by these outcomes counts no more."""
    connection.execute(update(ITEM_OUTCOMES).where(_failed(run_id), whose).values(outcome=ItemOutcome.FORGIVEN))


def _failed(run_id: str) -> ColumnElement[bool]:
    return and_(ITEM_OUTCOMES.c.run_id == run_id, ITEM_OUTCOMES.c.outcome == ItemOutcome.FAILED)


def _reset(connection: Connection, failed: Sequence[ColumnElement[bool]], run_id: str, now: float) -> list[str]:
    names = list(connection.scalars(select(ITEMS.c.item).where(*failed).order_by(ITEMS.c.place).with_for_update()))
    for name in names:
        connection.execute(_transition(ItemMove.RESET, run_id, name, because=None, changed_at=now))
    return names


def _held_by(connection: Connection, job: Any) -> str | None:
    """The item that this attempt has already."""
    its = and_(ITEMS.c.run_id == job.run_id, ITEMS.c.state == ItemState.TAKEN, *_by(job.job_id, job.attempt))
    item: str | None = connection.scalar(select(ITEMS.c.item).where(its).limit(1))
    return item


def _take(connection: Connection, job: Any) -> str | None:
    """The item that is next for this worker, locked."""
    mine = exists().where(
        *(ITEM_OUTCOMES.c.run_id == ITEMS.c.run_id, ITEM_OUTCOMES.c.item == ITEMS.c.item),
        *(ITEM_OUTCOMES.c.host == job.host, ITEM_OUTCOMES.c.worker == job.worker),
        ITEM_OUTCOMES.c.outcome == ItemOutcome.FAILED,
    )
    pending = ITEMS.c.state == ItemState.PENDING
    left_behind = and_(_from_sources(ItemMove.TAKE), not_(pending), not_(_is_held()))
    # One after the other, so that the many that are pending are not all looked at for the first of them.
    for choice in (and_(pending, not_(mine)), and_(left_behind, not_(mine)), or_(pending, left_behind)):
        this = ITEMS.c.run_id == job.run_id
        first = select(ITEMS.c.item).where(this, choice).order_by(ITEMS.c.place).limit(LOOKED_AT_MAX)
        for item in connection.scalars(first):
            one = select(ITEMS.c.item).where(this, ITEMS.c.item == item, or_(pending, left_behind))
            # Asked anew with the row in hand: on PostgreSQL the first look may be older than its taker's claim.
            if connection.scalar(one.with_for_update(skip_locked=True, of=ITEMS)) is None:
                continue
            if connection.scalar(select(ITEMS.c.item).where(this, ITEMS.c.item == item, not_(_is_held()))) is not None:
                return str(item)
    return None


def _is_told(connection: Connection, job: Any, item: str, *states: ItemState) -> bool:
    """Whether what this attempt tells of an item is there already."""
    its = and_(ITEMS.c.run_id == job.run_id, ITEMS.c.item == item, *_by(job.job_id, job.attempt))
    return connection.scalar(select(ITEMS.c.state).where(its)) in states


def _free(item: Item) -> Item:
    return replace(item, state=ItemState.PENDING, job_id=None, attempt=None, host=None, worker=None)


def _hold(connection: Connection, job_id: int, attempt: int, incarnation: str, now: float) -> Any:
    """The job, kept from changing hands until this transaction is over; `None` where the attempt does not hold it."""
    sql.come_back(connection, job_id, attempt, incarnation, now)
    held = select(JOBS.c.job_id, JOBS.c.attempt, JOBS.c.run_id, JOBS.c.host, JOBS.c.worker)
    held = held.where(sql.held(job_id, attempt, incarnation)).with_for_update(read=True)
    return connection.execute(held).one_or_none()


def _is_held() -> ColumnElement[bool]:
    """Whether an item is taken by an attempt that is not over. One that is fenced may still be at it."""
    job = JOBS.alias("holder")
    at_it = sql.is_in({State.RUNNING, State.FENCING, State.HOST_LOST}, job)
    return and_(
        ITEMS.c.state == ItemState.TAKEN,
        exists().where(job.c.job_id == ITEMS.c.job_id, job.c.attempt == ITEMS.c.attempt, at_it).correlate(ITEMS),
    )


def _from_sources(move: ItemMove) -> ColumnElement[bool]:
    return ITEMS.c.state.in_(sorted(ITEM_MOVES[move][0]))


def _by(job_id: int, attempt: int) -> tuple[ColumnElement[bool], ...]:
    return ITEMS.c.job_id == job_id, ITEMS.c.attempt == attempt


def _transition(move: ItemMove, run_id: str, item: str, *where: ColumnElement[bool], **values: Any) -> Update:
    """The one way an item's state is written."""
    this = and_(ITEMS.c.run_id == run_id, ITEMS.c.item == item, _from_sources(move))
    return update(ITEMS).where(this, *where).values(state=ITEM_MOVES[move][1], **values)


def _note(connection: Connection, job: Any, item: str, outcome: ItemOutcome, because: str | None, now: float) -> None:
    by = {"run_id": job.run_id, "job_id": job.job_id, "attempt": job.attempt, "host": job.host, "worker": job.worker}
    connection.execute(insert(ITEM_OUTCOMES).values(**by, item=item, outcome=outcome, at=now, because=because))
