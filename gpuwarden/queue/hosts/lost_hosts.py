"""Jobs of silent hosts (D4). Such a job may still be running."""

from sqlalchemy import ColumnElement, and_, case, literal, select

from gpuwarden.db.rows import readable
from gpuwarden.db.transactions import reading, writing
from gpuwarden.job import LEASE_S, Move, State
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import HostsJob
from gpuwarden.queue.rows import to_hosts_job
from gpuwarden.queue.schema import JOBS, QUEUES, WORKERS


class LostHosts(QueueBase):
    """Moves of jobs with a lost host."""

    def jobs_on(self, host: str) -> list[HostsJob]:
        """Jobs on a host, lost ones too, with the last contact of their workers."""
        slot = and_(WORKERS.c.host == JOBS.c.host, WORKERS.c.worker == JOBS.c.worker)
        its = and_(slot, WORKERS.c.incarnation == JOBS.c.claimed_by)
        held = sql.is_in({State.RUNNING, State.HOST_LOST})
        found = (
            select(JOBS.c.job_id, JOBS.c.attempt, JOBS.c.state, WORKERS.c.last_seen_at)
            .select_from(JOBS.outerjoin(WORKERS, its))
            .where(JOBS.c.host == host, JOBS.c.worker.is_not(None), held)  # as the index says
        )
        with reading(self._engine) as connection:
            return list(readable(connection.execute(found.order_by(JOBS.c.job_id)), to_hosts_job))

    def mark_lost(self, job_id: int, *, attempt: int, now: float) -> bool:
        """Mark a running job as lost; False unless this attempt runs.

        It keeps its GPU until its worker makes contact. After the queue's `lost_hold_s` it is requeued, never before
        its lease ends: by then a cut-off worker has stopped itself.
        """
        hold_s = select(QUEUES.c.lost_hold_s).where(QUEUES.c.queue == JOBS.c.queue).correlate(JOBS).scalar_subquery()
        this = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt)
        lost = sql.transition(Move.LOSE, this, lease_expires_at=_not_before_the_lease(now + hold_s))
        with writing(self._engine) as connection:
            return connection.execute(lost).rowcount == 1

    def mark_returned(self, job_id: int, *, attempt: int, now: float) -> bool:
        """Mark a lost job as running again, with a new lease; False unless this attempt is lost."""
        this = and_(JOBS.c.job_id == job_id, JOBS.c.attempt == attempt)
        found = sql.transition(Move.RETURN, this, lease_expires_at=_not_before_the_lease(literal(now + LEASE_S)))
        with writing(self._engine) as connection:
            return connection.execute(found).rowcount == 1


def _not_before_the_lease(until: ColumnElement[float]) -> ColumnElement[float]:
    return case((JOBS.c.lease_expires_at > until, JOBS.c.lease_expires_at), else_=until)
