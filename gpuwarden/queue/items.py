"""What a run has to do besides its jobs, piece by piece: the frames of a render. Its jobs share them.

A job takes an item, does it, and takes the next, for as long as there is one. What an attempt had taken when it ended
is there for others again, without a word from anybody: whether an item is held is read from the job that took it. Each
time an item is done or fails is kept, with the worker, for whoever is to tell a faulty worker from a faulty job (B).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Update, and_, exists, func, insert, not_, or_, select, update

from gpuwarden.database import reading, upsert, writing
from gpuwarden.job import ITEM_MOVES, ITEM_TRIES_MAX, ItemMove, ItemState, State
from gpuwarden.queue import runs, statements
from gpuwarden.queue.records import Item, Result, SubmissionError, check_result, to_item
from gpuwarden.queue.room import Room
from gpuwarden.schema import ITEM_OUTCOMES, ITEMS, JOBS
from gpuwarden.statefile import TEXT_MAX, is_text


class Items(Room):
    """A run's items, as its jobs and people see them."""

    def add_items(self, run_id: str, items: Sequence[str], *, now: float) -> int:
        """Give a run more to do, in this order, and open it where it is new; how many it did not have yet.

        Raises:
            SubmissionError: the run has failed or was cancelled, or an item has no name that can be kept.
        """
        if bad := [each for each in items if not is_text(each)]:
            raise SubmissionError(f"item {bad[0][:80]!a} will not do: 1 to {TEXT_MAX} printable characters")
        with writing(self._engine) as connection:
            runs.open_run(connection, run_id, now)
            last = connection.scalar(select(func.max(ITEMS.c.place)).where(ITEMS.c.run_id == run_id)) or 0
            rows = [
                {"run_id": run_id, "item": item, "place": last + n, "state": ItemState.PENDING, "changed_at": now}
                for n, item in enumerate(dict.fromkeys(items), 1)
            ]
            if not rows:
                return 0
            known = set(connection.scalars(select(ITEMS.c.item).where(ITEMS.c.run_id == run_id)))
            connection.execute(upsert(connection, ITEMS).on_conflict_do_nothing(), rows)
            return sum(row["item"] not in known for row in rows)

    def take_item(self, job_id: int, *, attempt: int, incarnation: str, now: float) -> Item | None:
        """The next item of the job's run for this attempt; `None` when there is none, or the attempt is over.

        One that failed on this worker comes after all that did not.
        """
        with writing(self._engine) as connection:
            job = _hold(connection, job_id, attempt, incarnation)
            if job is None or job.run_id is None:
                return None
            mine = exists().where(
                *(ITEM_OUTCOMES.c.run_id == ITEMS.c.run_id, ITEM_OUTCOMES.c.item == ITEMS.c.item),
                *(ITEM_OUTCOMES.c.host == job.host, ITEM_OUTCOMES.c.worker == job.worker),
                ITEM_OUTCOMES.c.outcome == ItemState.FAILED,
            )
            pending = ITEMS.c.state == ItemState.PENDING
            left_behind = and_(_from_sources(ItemMove.TAKE), not_(pending), not_(_is_held()))
            choices = (and_(pending, not_(mine)), and_(left_behind, not_(mine)), or_(pending, left_behind))
            # One after the other, so that the many that are pending are not all looked at for the first of them.
            items = (connection.scalar(_first(job.run_id, choice)) for choice in choices)
            item = next((each for each in items if each is not None), None)
            if item is None:
                return None
            holder = {"job_id": job_id, "attempt": attempt, "host": job.host, "worker": job.worker}
            taken = _transition(ItemMove.TAKE, job.run_id, item, **holder, because=None, changed_at=now)
            return to_item(connection.execute(taken.returning(ITEMS)).one())

    def finish_item(
        self, job_id: int, *, attempt: int, incarnation: str, item: str, now: float, result: Result = None
    ) -> bool:
        """An item is done; false when the attempt does not hold it, or its job, and nothing was written.

        Raises:
            ResultError: the result cannot be kept.
        """
        check_result(result)
        with writing(self._engine) as connection:
            job = _hold(connection, job_id, attempt, incarnation)
            if job is None:
                return False
            done = _transition(ItemMove.FINISH, job.run_id, item, *_by(job_id, attempt), result=result, changed_at=now)
            if connection.execute(done).rowcount != 1:
                return False
            _note(connection, job, item, ItemState.DONE, None, now)
            return True

    def fail_item(
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
            job = _hold(connection, job_id, attempt, incarnation)
            if job is None:
                return False
            failed = and_(
                *(ITEM_OUTCOMES.c.run_id == job.run_id, ITEM_OUTCOMES.c.item == item),
                ITEM_OUTCOMES.c.outcome == ItemState.FAILED,
            )
            before = connection.scalar(select(func.count()).where(failed)) or 0
            move = ItemMove.TRY_AGAIN if before + 1 < tries_max else ItemMove.GIVE_UP
            moved = _transition(move, job.run_id, item, *_by(job_id, attempt), because=because, changed_at=now)
            if connection.execute(moved).rowcount != 1:
                return False
            _note(connection, job, item, ItemState.FAILED, because, now)
            return True

    def reset_items(self, run_id: str, *, now: float, host: str | None = None, worker: str | None = None) -> int:
        """Have items that failed for good tried again: all of a run, or those that this worker failed last; how many.

        What has failed so far does not count any more.
        """
        failed = [ITEMS.c.run_id == run_id, ITEMS.c.state == ItemState.FAILED]
        failed += [ITEMS.c[name] == told for name, told in (("host", host), ("worker", worker)) if told is not None]
        with writing(self._engine) as connection:
            names = list(connection.scalars(select(ITEMS.c.item).where(*failed).with_for_update()))
            for name in names:
                connection.execute(_transition(ItemMove.RESET, run_id, name, because=None, changed_at=now))
                past = and_(ITEM_OUTCOMES.c.run_id == run_id, ITEM_OUTCOMES.c.item == name)
                connection.execute(update(ITEM_OUTCOMES).where(past).values(outcome="forgiven"))
            return len(names)

    def items(self, run_id: str) -> list[Item]:
        """A run's items, in order. What an attempt that is over had taken is pending."""
        found = select(ITEMS, _is_held().label("held")).where(ITEMS.c.run_id == run_id).order_by(ITEMS.c.place)
        with reading(self._engine) as connection:
            return [
                to_item(row) if row.held or row.state != ItemState.TAKEN else _free(to_item(row))
                for row in connection.execute(found)
            ]

    def item_counts(self, run_id: str) -> Counter[ItemState]:
        """How many items of a run are in which state."""
        return Counter(item.state for item in self.items(run_id))


def _first(run_id: str, choice: ColumnElement[bool]) -> Select[Any]:
    first = select(ITEMS.c.item).where(ITEMS.c.run_id == run_id, choice).order_by(ITEMS.c.place).limit(1)
    return first.with_for_update(skip_locked=True, of=ITEMS)


def _free(item: Item) -> Item:
    return replace(item, state=ItemState.PENDING, job_id=None, attempt=None, host=None, worker=None)


def _hold(connection: Connection, job_id: int, attempt: int, incarnation: str) -> Any:
    """The job, kept from changing hands until this transaction is over; `None` where the attempt does not hold it."""
    statements.come_back(connection, job_id, attempt, incarnation)
    held = select(JOBS.c.job_id, JOBS.c.attempt, JOBS.c.run_id, JOBS.c.host, JOBS.c.worker)
    held = held.where(statements.held(job_id, attempt, incarnation)).with_for_update(read=True)
    return connection.execute(held).one_or_none()


def _is_held() -> ColumnElement[bool]:
    """Whether an item is taken by an attempt that is not over. One that is fenced may still be at it."""
    job = JOBS.alias("holder")
    at_it = statements.is_in({State.RUNNING, State.FENCING, State.NODE_LOST}, job)
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


def _note(connection: Connection, job: Any, item: str, outcome: ItemState, because: str | None, now: float) -> None:
    by = {"run_id": job.run_id, "job_id": job.job_id, "attempt": job.attempt, "host": job.host, "worker": job.worker}
    connection.execute(insert(ITEM_OUTCOMES).values(**by, item=item, outcome=outcome, at=now, because=because))
