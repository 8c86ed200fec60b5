"""The executors of all hosts and their heartbeats."""

from dataclasses import dataclass

from sqlalchemy import select

from gpuwarden.db.migrate import refuse_other_revisions
from gpuwarden.db.transactions import reading, upsert, writing
from remediator.ledger.database import LedgerPart
from remediator.ledger.schema import EXECUTORS, LEDGER


@dataclass(frozen=True, kw_only=True)
class ExecutorHeartbeat:
    """One host's executor. Times are Unix seconds."""

    host: str
    pid: int
    armed: bool
    started_at: float
    heartbeat_at: float
    errors: int
    workers: int | None
    seats_on: bool


class Executors(LedgerPart):
    """The executors of all hosts and their heartbeats."""

    def beat(
        self,
        *,
        host: str,
        pid: int,
        armed: bool,
        started_at: float,
        errors: int,
        now: float,
        workers: int | None = None,
        seats_on: bool = False,
    ) -> None:
        """Write the heartbeat of an executor, with the number of containers it watches.

        Raises:
            NewerTablesError: a newer gpuwarden migrated the tables.
            DatabaseError: it could not be written.
        """
        row: dict[str, float | None] = {"pid": pid, "armed": armed, "started_at": started_at, "heartbeat_at": now}
        row |= {"errors": errors, "workers": workers, "seats_on": seats_on}
        with writing(self._engine) as connection:
            refuse_other_revisions(connection, LEDGER)
            connection.execute(
                upsert(connection, EXECUTORS)
                .values(host=host, **row)
                .on_conflict_do_update(index_elements=[EXECUTORS.c.host], set_=row)
            )

    def last_beats(self) -> dict[str, float]:
        """The last heartbeat of each host's executor, Unix seconds."""
        return {each.host: each.heartbeat_at for each in self.list_all()}

    def list_all(self) -> list[ExecutorHeartbeat]:
        """List the executors by host."""
        names = [EXECUTORS.c[name] for name in ExecutorHeartbeat.__dataclass_fields__]
        with reading(self._engine) as connection:
            rows = connection.execute(select(*names).order_by(EXECUTORS.c.host)).mappings()
            return [ExecutorHeartbeat(**row) for row in rows]
