"""What becomes of a job whose host is silent: it may still be running (D4)."""

from sqlalchemy import ColumnElement, and_, case, literal, select

from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import LEASE_S, JobId, Move, State
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import HostsJob
from gpuwarden.queue.schema import JOBS, QUEUES, WORKERS


class LostHosts(QueueBase):
    """Node lost, which is not failed."""

    def jobs_on(self, host: str) -> list[HostsJob]:
        """What runs on a host or is lost with it, and when the worker that holds it was last heard of; by job."""
        slot = and_(WORKERS.c.host == JOBS.c.host, WORKERS.c.worker == JOBS.c.worker)
        its = and_(slot, WORKERS.c.incarnation == JOBS.c.claimed_by)
        held = sql.is_in({State.RUNNING, State.HOST_LOST})
        found = (
            select(JOBS.c.job_id, JOBS.c.attempt, JOBS.c.state, WORKERS.c.last_seen_at)
            .select_from(JOBS.outerjoin(WORKERS, its))
            .where(JOBS.c.host == host, held)
        )
        with reading(self._engine) as connection:
            return [
                HostsJob(job_id=row.job_id, attempt=row.attempt, state=State(row.state), heard_at=row.last_seen_at)
                for row in connection.execute(found.order_by(JOBS.c.job_id))
            ]

    def mark_lost(self, job_id: int, *, attempt: int, now: float) -> bool:
        """Mark a job that runs as one whose host is lost; false unless it runs, as this attempt.

        Nobody claims it, and its GPU is kept from others, until its worker is heard of again: a renewal, a result, a
        new incarnation. Where its queue says for how long it is held, it is given away after that, and never before its
        lease has ended: by that its worker, cut off and alive, stops itself.
        """
        hold_s = select(QUEUES.c.lost_hold_s).where(QUEUES.c.queue == JOBS.c.queue).correlate(JOBS).scalar_subquery()
        this = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt)
        lost = sql.transition(Move.LOSE, this, lease_expires_at=_not_before_the_lease(now + hold_s))
        with writing(self._engine) as connection:
            return connection.execute(lost).rowcount == 1

    def mark_returned(self, job_id: int, *, attempt: int, now: float) -> bool:
        """Have a job of a host that is back run again, for a lease; false unless it is lost, as this attempt.

        Its worker renews that lease, if it is there; if it is not, the job is given away as any that nobody renews. A
        longer one that it has still is left to it.
        """
        this = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt)
        found = sql.transition(Move.RETURN, this, lease_expires_at=_not_before_the_lease(literal(now + LEASE_S)))
        with writing(self._engine) as connection:
            return connection.execute(found).rowcount == 1

    def lose_host(self, host: str, *, now: float) -> list[JobId]:
        """As `mark_lost`, for all that runs on a host; the ids.

        One job after the other, none held for the next: who queues the ranks of a gang again holds one of them first,
        and comes to those before it afterwards.
        """
        there = select(JOBS.c.job_id, JOBS.c.attempt).where(JOBS.c.host == host, sql.from_sources(Move.LOSE))
        with reading(self._engine) as connection:
            found = connection.execute(there.order_by(JOBS.c.job_id)).all()
        return [JobId(row.job_id) for row in found if self.mark_lost(row.job_id, attempt=row.attempt, now=now)]


def _not_before_the_lease(until: ColumnElement[float]) -> ColumnElement[float]:
    """The later of a time and the end of a job's lease; none where there is no such time."""
    return case((JOBS.c.lease_expires_at > until, JOBS.c.lease_expires_at), else_=until)
