"""PostgreSQL only: claims and results in one statement. It does the common case or writes nothing."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    CursorResult,
    Executable,
    and_,
    exists,
    func,
    insert,
    literal,
    literal_column,
    not_,
    null,
    or_,
    select,
    true,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.compiler import SQLCompiler

from gpuwarden.job import Kind, Move
from gpuwarden.queue import sql
from gpuwarden.queue.claiming import parts
from gpuwarden.queue.claiming.parts import Params
from gpuwarden.queue.schema import JOBS, OUTBOX_EVENTS, WORKERS
from gpuwarden.queue.sql import Prepared


class OneTrip(Prepared):
    """A prepared statement that is also compiled once.

    SQLAlchemy would find it by a hash of all its parts, with half of the CPU time of a claim.
    """

    def __init__(self, build: Callable[..., Executable]) -> None:
        super().__init__(build)
        self._compiled: dict[frozenset[str], _Text] = {}

    def execute(self, connection: Connection, **values: object) -> CursorResult[Any]:
        """Execute the statement."""
        names = frozenset(values)
        if (text := self._compiled.get(names)) is None:
            statement, _ = self(**values)
            compiled = cast("ClauseElement", statement).compile(dialect=connection.dialect)
            text = self._compiled[names] = _Text(cast("SQLCompiler", compiled), connection.dialect)
        return connection.exec_driver_sql(text.sql, text.parameters(values))


class _Text:
    """A statement as the driver gets it."""

    def __init__(self, compiled: SQLCompiler, dialect: Dialect) -> None:
        self.sql = str(compiled)
        self._order = compiled.positiontup  # None before SQLAlchemy 2.1
        self._params = dict(compiled.params)
        kinds = {name: bind.type.dialect_impl(dialect) for name, bind in compiled.binds.items()}
        found = {name: kind.bind_processor(dialect) for name, kind in kinds.items()}
        self._to_driver = {name: convert for name, convert in found.items() if convert is not None}

    def parameters(self, values: Mapping[str, object]) -> dict[str, Any] | tuple[Any, ...]:
        """The values and the statement's constants, converted for the driver."""
        params = self._params | {f"p_{name}": value for name, value in values.items()}
        for name, convert in self._to_driver.items():
            params[name] = convert(params[name])
        return params if self._order is None else tuple(params[name] for name in self._order)


@OneTrip
def claim(**params: ColumnElement[Any]) -> Executable:
    """Claim the next job. The row has what `parts.look` found, and the claimed job."""
    found = parts.look(params).cte("found")
    free = and_(not_(func.coalesce(found.c.over, true())), not_(found.c.drained), not_(found.c.mine))
    # A claim without a job must not write: a write would wake the other idle workers.
    row = _lock_row(params, exists(select(found.c.next).where(free, found.c.next.is_not(None))))
    taken = _take(params, row)
    touch = _touch(params, taken).where(exists(select(taken.c.job_id))).cte("touched")
    return select(found, taken).select_from(found.outerjoin(taken, true())).add_cte(touch)


@OneTrip
def complete(**params: ColumnElement[Any]) -> Executable:
    """Complete a job without a run. The row has its id."""
    done = _complete(params, *_of_slot(params))
    return select(done.c.job_id).add_cte(_event(params, done))


@OneTrip
def complete_and_claim(**params: ColumnElement[Any]) -> Executable:
    """Complete a job without a run, refresh the worker's row and claim the next job.

    The row has the completed job's id as `done`, whether the worker takes no job as `busy`, and the claimed job.
    """
    row = _lock_row(params)
    done = _complete(params, *_of_slot(params), exists(select(row.c.worker)))
    drained = parts.is_drained(params)
    other = exists().where(
        sql.running_with(params["host"], params["worker"], params["incarnation"]), JOBS.c.job_id != params["job_id"]
    )
    taken = _take(params, done, not_(drained), not_(other))
    touch = _touch(params, taken).values(completed_at=params["now"]).where(exists(select(done.c.job_id)))
    one = select(literal_column("1").label("one")).subquery("one")
    answer = select(done.c.job_id.label("done"), or_(drained, other).label("busy"), taken)
    return answer.select_from(one.outerjoin(done, true()).outerjoin(taken, true())).add_cte(
        _event(params, done), touch.cte("touched")
    )


def _of_slot(params: Params) -> list[ColumnElement[bool]]:
    """The job's slot, if given. An expression: the plan uses only the index of the job's id."""
    return [func.coalesce(JOBS.c[name], "") == params[name] for name in ("host", "worker") if name in params]


def _lock_row(params: Params, *where: ColumnElement[bool]) -> CTE:
    """Lock the row of an incarnation that is not over.

    An earlier claim of this worker may be committed while this statement waits for the row, and the statement would
    not see its job. Each claim changes the row, so a changed row is not used.
    """
    before = WORKERS.alias("before")
    seen = (before.c.host == params["host"], before.c.worker == params["worker"])
    version = select(literal_column("before.xmin")).select_from(before).where(*seen).scalar_subquery()
    row = select(WORKERS.c.worker).where(
        WORKERS.c.host == params["host"],
        WORKERS.c.worker == params["worker"],
        WORKERS.c.incarnation == params["incarnation"],
        sql.is_not_retired(params["incarnation"]),
        literal_column("workers.xmin") == version,
        *where,
    )
    return row.with_for_update(key_share=True).cte("locked_row")


def _take(params: Params, after: CTE, *where: ColumnElement[bool]) -> CTE:
    """Claim the next job, if `after` has a row."""
    return (
        parts.take(params, exists(select(literal_column("1")).select_from(after)), *where).returning(JOBS).cte("taken")
    )


def _complete(params: Params, *where: ColumnElement[bool]) -> CTE:
    alone = and_(parts.is_held(params), JOBS.c.run_id.is_(None), *where)
    done = sql.transition(Move.COMPLETE, alone, ended_at=params["now"], **parts.left_by(params))
    return done.returning(JOBS).cte("done")


def _event(params: Params, done: CTE) -> CTE:
    event = sql.event_of({"kind": literal(Kind.COMPLETED), "now": params["now"]}, done)
    return insert(OUTBOX_EVENTS).from_select(sql.EVENT, event).returning(OUTBOX_EVENTS.c.event_id).cte("event")


def _touch(params: Params, taken: CTE) -> Any:
    """Refresh the worker's row, with the model of the claimed job."""
    model = select(func.coalesce(taken.c.model, taken.c.job_class)).scalar_subquery()
    return sql.update_worker(params["host"], params["worker"], params["incarnation"]).values(
        queue=params["queue"],
        current_model=model,
        loaded_model=params.get("loaded", null()),
        last_seen_at=params["now"],
    )
