"""Items of a run: pieces of work that its jobs share, such as the frames of a render.

An item counts as taken only while its attempt runs. Each outcome is kept with its worker (B).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Update, and_, exists, func, insert, not_, or_, select, update

from gpuwarden.db.rows import readable
from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.job import ITEM_MOVES, ITEM_TRIES_MAX, ItemMove, ItemOutcome, ItemState, State
from gpuwarden.queue import runs, sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import Item, Result, SubmissionError, check_result
from gpuwarden.queue.rows import to_item
from gpuwarden.queue.schema import ITEM_OUTCOMES, ITEMS, JOBS
from gpuwarden.state_file import TEXT_MAX, is_text

TAKE_TRIES_MAX: Final = 32
"""Items that one take tries. Other jobs may be taking the first ones."""


class Items(QueueBase):
    """The items of runs."""

    def add(self, run_id: str, items: Sequence[str], *, now: float) -> int:
        """Add items to a run; returns how many are new.

        Raises:
            SubmissionError: the run failed or was cancelled, or a name is invalid.
        """
        if bad := [each for each in items if not is_text(each)]:
            raise SubmissionError(f"item {bad[0][:80]!a} is invalid: use 1 to {TEXT_MAX} printable characters")
        names = list(dict.fromkeys(items))
        with reading(self._engine) as connection:
            its = select(ITEMS.c.item).where(ITEMS.c.run_id == run_id)
            if set(names) <= set(connection.scalars(its)):
                return 0  # do not open a run for nothing
        with writing(self._engine) as connection:
            runs.open_run(connection, run_id, now)
            last = connection.scalar(select(func.max(ITEMS.c.position)).where(ITEMS.c.run_id == run_id)) or 0
            rows = [
                {"run_id": run_id, "item": item, "position": last + n, "state": ItemState.PENDING, "changed_at": now}
                for n, item in enumerate(names, 1)
            ]
            known = set(connection.scalars(select(ITEMS.c.item).where(ITEMS.c.run_id == run_id)))
            connection.execute(upsert(connection, ITEMS).on_conflict_do_nothing(), rows)
            return sum(row["item"] not in known for row in rows)

    def take(self, job_id: int, *, attempt: int, incarnation: str, now: float) -> Item | None:
        """Take the next item for this attempt, or the one it has; `None` if there is none.

        Items that failed on this worker come last.
        """
        with writing(self._engine) as connection:
            job = _hold(connection, job_id, attempt, incarnation, now)
            if job is None or job.run_id is None:
                return None
            item = _find_item_of(connection, job) or _take(connection, job)
            if item is None:
                return None
            holder = {"job_id": job_id, "attempt": attempt, "host": job.host, "worker": job.worker}
            taken = _transition(ItemMove.TAKE, job.run_id, item, **holder, reason=None, changed_at=now)
            return to_item(connection.execute(taken.returning(ITEMS)).one())

    def finish(
        self, job_id: int, *, attempt: int, incarnation: str, item: str, now: float, result: Result = None
    ) -> bool:
        """Mark an item as done; False, with nothing written, if the attempt has lost it.

        A repeated report also returns True.

        Raises:
            ResultError: the result cannot be stored.
        """
        check_result(result)
        with writing(self._engine) as connection:
            job = _hold(connection, job_id, attempt, incarnation, now)
            if job is None:
                return False
            done = _transition(ItemMove.FINISH, job.run_id, item, *_by(job_id, attempt), result=result, changed_at=now)
            if connection.execute(done).rowcount != 1:
                return _reported(connection, job, item) == ItemOutcome.DONE
            _note(connection, job, item, ItemOutcome.DONE, None, now)
            return True

    def fail(
        self,
        job_id: int,
        *,
        attempt: int,
        incarnation: str,
        item: str,
        reason: str,
        now: float,
        tries_max: int = ITEM_TRIES_MAX,
    ) -> bool:
        """Report a failed item, to be retried until it failed `tries_max` times; returns as `finish`."""
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
            moved = _transition(move, job.run_id, item, *_by(job_id, attempt), reason=reason, changed_at=now)
            if connection.execute(moved).rowcount != 1:
                return _reported(connection, job, item) in (ItemOutcome.FAILED, ItemOutcome.CLEARED)
            _note(connection, job, item, ItemOutcome.FAILED, reason, now)
            return True

    def reset(self, run_id: str, *, now: float, host: str | None = None, worker: str | None = None) -> int:
        """Retry failed items of a run, or of one worker; returns how many. Old failures no longer count.

        Raises:
            SubmissionError: the run is over.
        """
        failed = [ITEMS.c.run_id == run_id, ITEMS.c.state == ItemState.FAILED]
        failed += [ITEMS.c[name] == value for name, value in (("host", host), ("worker", worker)) if value is not None]
        with writing(self._engine) as connection:
            if (state := runs.lock(connection, run_id)) != "running":
                raise SubmissionError(f"run {run_id!r} is {state or 'not there'}: give its items to another run")
            names = _reset(connection, failed, run_id, now)
            for name in names:
                past = and_(ITEM_OUTCOMES.c.run_id == run_id, ITEM_OUTCOMES.c.item == name)
                connection.execute(update(ITEM_OUTCOMES).where(past).values(outcome=ItemOutcome.CLEARED))
            return len(names)

    def of_run(self, run_id: str) -> list[Item]:
        """A run's items in order."""
        found = select(ITEMS, _is_held().label("held")).where(ITEMS.c.run_id == run_id).order_by(ITEMS.c.position)
        with reading(self._engine) as connection:
            return list(readable(connection.execute(found), _with_its_holder))

    def counts(self, run_id: str) -> Counter[ItemState]:
        """Number of items of a run by state."""
        return Counter(item.state for item in self.of_run(run_id))


def try_again(connection: Connection, run_id: str, whose: ColumnElement[bool], now: float) -> int:
    """Retry failed items of a locked run; returns how many. Failures still count."""
    names = select(ITEM_OUTCOMES.c.item).where(_is_failed(run_id), whose)
    failed = (ITEMS.c.run_id == run_id, ITEMS.c.state == ItemState.FAILED, ITEMS.c.item.in_(names))
    return len(_reset(connection, failed, run_id, now))


def forgive(connection: Connection, run_id: str, whose: ColumnElement[bool]) -> None:
    """Stop counting the failures that match `whose`."""
    connection.execute(update(ITEM_OUTCOMES).where(_is_failed(run_id), whose).values(outcome=ItemOutcome.CLEARED))


def _is_failed(run_id: str) -> ColumnElement[bool]:
    return and_(ITEM_OUTCOMES.c.run_id == run_id, ITEM_OUTCOMES.c.outcome == ItemOutcome.FAILED)


def _reset(connection: Connection, failed: Sequence[ColumnElement[bool]], run_id: str, now: float) -> list[str]:
    names = list(connection.scalars(select(ITEMS.c.item).where(*failed).order_by(ITEMS.c.position).with_for_update()))
    for name in names:
        connection.execute(_transition(ItemMove.RESET, run_id, name, reason=None, changed_at=now))
    return names


def _find_item_of(connection: Connection, job: Any) -> str | None:
    """The item that this attempt already has."""
    its = and_(ITEMS.c.run_id == job.run_id, ITEMS.c.state == ItemState.CLAIMED, *_by(job.job_id, job.attempt))
    item: str | None = connection.scalar(select(ITEMS.c.item).where(its).limit(1))
    return item


def _take(connection: Connection, job: Any) -> str | None:
    """The next item for this worker, locked."""
    mine = exists().where(
        *(ITEM_OUTCOMES.c.run_id == ITEMS.c.run_id, ITEM_OUTCOMES.c.item == ITEMS.c.item),
        *(ITEM_OUTCOMES.c.host == job.host, ITEM_OUTCOMES.c.worker == job.worker),
        ITEM_OUTCOMES.c.outcome == ItemOutcome.FAILED,
    )
    pending = ITEMS.c.state == ItemState.PENDING
    left_behind = and_(_from_sources(ItemMove.TAKE), not_(pending), not_(_is_held()))
    # One query each, so that the database does not read all pending items.
    for choice in (and_(pending, not_(mine)), and_(left_behind, not_(mine)), or_(pending, left_behind)):
        this = ITEMS.c.run_id == job.run_id
        first = select(ITEMS.c.item).where(this, choice).order_by(ITEMS.c.position).limit(TAKE_TRIES_MAX)
        for item in connection.scalars(first):
            one = select(ITEMS.c.item).where(this, ITEMS.c.item == item, or_(pending, left_behind))
            # Check again with the row locked: on PostgreSQL the first SELECT may predate another worker's claim.
            if connection.scalar(one.with_for_update(skip_locked=True, of=ITEMS)) is None:
                continue
            if connection.scalar(select(ITEMS.c.item).where(this, ITEMS.c.item == item, not_(_is_held()))) is not None:
                return str(item)
    return None


def _reported(connection: Connection, job: Any, item: str) -> str | None:
    """This attempt's last outcome. Another may have the item since."""
    its = ITEM_OUTCOMES.c
    mine = and_(its.job_id == job.job_id, its.attempt == job.attempt, its.run_id == job.run_id, its.item == item)
    last: str | None = connection.scalar(select(its.outcome).where(mine).order_by(its.outcome_id.desc()))
    return last


def _with_its_holder(row: Row[Any]) -> Item:
    return to_item(row) if row.held or row.state != ItemState.CLAIMED else _without_holder(to_item(row))


def _without_holder(item: Item) -> Item:
    return replace(item, state=ItemState.PENDING, job_id=None, attempt=None, host=None, worker=None)


def _hold(connection: Connection, job_id: int, attempt: int, incarnation: str, now: float) -> Any:
    """The job, locked; `None` if the attempt has lost it."""
    sql.recover_lost(connection, job_id, attempt, incarnation, now)
    held = select(JOBS.c.job_id, JOBS.c.attempt, JOBS.c.run_id, JOBS.c.host, JOBS.c.worker)
    held = held.where(sql.is_held(job_id, attempt, incarnation)).with_for_update(read=True)
    return connection.execute(held).one_or_none()


def _is_held() -> ColumnElement[bool]:
    """Whether a running or fenced attempt has the item."""
    job = JOBS.alias("holder")
    at_it = sql.is_in({State.RUNNING, State.FENCING, State.HOST_LOST}, job)
    return and_(
        ITEMS.c.state == ItemState.CLAIMED,
        exists().where(job.c.job_id == ITEMS.c.job_id, job.c.attempt == ITEMS.c.attempt, at_it).correlate(ITEMS),
    )


def _from_sources(move: ItemMove) -> ColumnElement[bool]:
    return ITEMS.c.state.in_(sorted(ITEM_MOVES[move][0]))


def _by(job_id: int, attempt: int) -> tuple[ColumnElement[bool], ...]:
    return ITEMS.c.job_id == job_id, ITEMS.c.attempt == attempt


def _transition(move: ItemMove, run_id: str, item: str, *where: ColumnElement[bool], **values: Any) -> Update:
    """Write an item's state. Nothing else writes it."""
    this = and_(ITEMS.c.run_id == run_id, ITEMS.c.item == item, _from_sources(move))
    return update(ITEMS).where(this, *where).values(state=ITEM_MOVES[move][1], **values)


def _note(connection: Connection, job: Any, item: str, outcome: ItemOutcome, reason: str | None, now: float) -> None:
    by = {"run_id": job.run_id, "job_id": job.job_id, "attempt": job.attempt, "host": job.host, "worker": job.worker}
    connection.execute(insert(ITEM_OUTCOMES).values(**by, item=item, outcome=outcome, at=now, reason=reason))
