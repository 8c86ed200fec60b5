"""What becomes of a job whose host is silent: it may still be running (D4)."""

from sqlalchemy import and_, select

from gpuwarden.database import reading, writing
from gpuwarden.job import JobId, Move
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
        hold_s = select(QUEUES.c.lost_hold_s).where(QUEUES.c.queue == JOBS.c.queue).correlate(JOBS).scalar_subquery()
        this = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt)
        lost = statements.transition(Move.LOSE, this, lease_expires_at=now + hold_s)
        with writing(self._engine) as connection:
            return connection.execute(lost).rowcount == 1

    def lose_host(self, host: str, *, now: float) -> list[JobId]:
        """As `lose`, for all that runs on a host; the ids.

        One job after the other, none held for the next: who queues the ranks of a gang again holds one of them first,
        and comes to those before it afterwards.
        """
        there = select(JOBS.c.job_id, JOBS.c.attempt).where(JOBS.c.host == host, statements.from_sources(Move.LOSE))
        with reading(self._engine) as connection:
            found = connection.execute(there.order_by(JOBS.c.job_id)).all()
        return [JobId(row.job_id) for row in found if self.lose(row.job_id, attempt=row.attempt, now=now)]
