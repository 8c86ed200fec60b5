"""What becomes of a job whose host is silent: it may still be running (D4)."""

from sqlalchemy import ColumnElement, Connection, and_, select

from gpuwarden.database import reading, writing
from gpuwarden.job import JobId, Move, State
from gpuwarden.queue import statements
from gpuwarden.queue.room import Room
from gpuwarden.schema import JOBS, QUEUES


class Hosts(Room):
    """Node lost, which is not failed."""

    def lose(self, job_id: int, *, attempt: int, now: float) -> bool:
        """Mark a job that runs as one whose host is lost; false unless it runs, as this attempt.

        Nobody claims it, and its GPU is kept from others, until its worker is heard of again: a renewal, a result, a
        new incarnation. Where its queue says for how long it is held, it is given away after that.
        """
        with writing(self._engine) as connection:
            return bool(self._lose(connection, and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt), now))

    def lose_host(self, host: str, *, now: float) -> list[JobId]:
        """As `lose`, for all that runs on a host; the ids."""
        with writing(self._engine) as connection:
            return self._lose(connection, JOBS.c.host == host, now)

    def _lose(self, connection: Connection, which: ColumnElement[bool], now: float) -> list[JobId]:
        hold_s = select(QUEUES.c.lost_hold_s).where(QUEUES.c.queue == JOBS.c.queue).correlate(JOBS).scalar_subquery()
        running = and_(which, statements.from_sources(Move.LOSE))
        ids = [JobId(each) for each in connection.scalars(statements.locked(select(JOBS.c.job_id).where(running)))]
        lost = statements.transition(Move.LOSE, JOBS.c.job_id.in_(ids), lease_expires_at=now + hold_s)
        connection.execute(lost)
        return ids

    def lost(self) -> list[JobId]:
        """The jobs whose host is lost."""
        with reading(self._engine) as connection:
            found = select(JOBS.c.job_id).where(statements.is_in({State.NODE_LOST})).order_by(JOBS.c.job_id)
            return [JobId(each) for each in connection.scalars(found)]
