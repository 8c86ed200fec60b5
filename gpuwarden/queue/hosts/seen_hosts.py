"""When each host was last heard, and which hosts are lost."""

from typing import Any

from sqlalchemy import Connection, Row, Select, and_, delete, func, or_, select, update

from gpuwarden.db.locks import advisory_lock
from gpuwarden.db.rows import converted, readable
from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.fields import made_from
from gpuwarden.job import State
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.hosts.silence import KNOWN_S, QUIET_S, SeenHost, Verdict, decide
from gpuwarden.queue.hosts.tokens import valid_after
from gpuwarden.queue.schema import HOST_TOKENS, HOSTS, JOBS, WORKERS


class SeenHosts(QueueBase):
    """Hosts that were heard."""

    def decide(self, *, now: float, since: float, after_s: float) -> Verdict:
        """Mark lost hosts, and return them."""
        with writing(self._engine) as connection:
            advisory_lock(connection, "hosts")
            _hear_workers(connection, now)
            _forget_old(connection, now)
            hosts = list(readable(connection.execute(select(HOSTS)), _to_host))
            at_work = set(connection.scalars(_at_work()))
            found = decide(hosts, at_work=at_work, now=now, since=since, after_s=after_s)
            return Verdict(lost=tuple(each for each in found.lost if _lose(connection, each, now)), spared=found.spared)

    def rows(self) -> list[SeenHost]:
        """All hosts."""
        with reading(self._engine) as connection:
            return list(readable(connection.execute(select(HOSTS).order_by(HOSTS.c.host)), _to_host))

    def get(self, host: str, *, now: float) -> SeenHost | None:
        """One host; `None` if no gateway decides about it."""
        fresh = or_(HOSTS.c.lost_at.is_not(None), HOSTS.c.heard_at >= now - KNOWN_S)
        with reading(self._engine) as connection:
            found = connection.execute(select(HOSTS).where(HOSTS.c.host == host, fresh))
            return next(readable(found, _to_host), None)

    def forget(self, host: str, *, now: float) -> bool:
        """Forget a removed host; False if it is unknown or was heard lately."""
        with writing(self._engine) as connection:
            gone = delete(HOSTS).where(HOSTS.c.host == host, HOSTS.c.heard_at < now - QUIET_S)
            return connection.execute(gone).rowcount > 0


def hear(connection: Connection, host: str, now: float) -> None:
    """Note that a host was heard. A lost one is back (D6)."""
    heard = {"heard_at": now, "lost_at": None}
    row = upsert(connection, HOSTS).values(host=host, **heard)
    connection.execute(row.on_conflict_do_update(index_elements=["host"], set_=heard))


def _hear_workers(connection: Connection, now: float) -> None:
    """Note the contacts of workers without a gateway."""
    heard_at = func.max(WORKERS.c.last_seen_at)
    known = HOSTS.alias("known")
    # A conflict that writes nothing locks the row.
    is_newer = or_(known.c.heard_at.is_(None), WORKERS.c.last_seen_at > known.c.heard_at)
    lately = (
        select(WORKERS.c.host, heard_at)
        .select_from(WORKERS.outerjoin(known, known.c.host == WORKERS.c.host))
        .where(WORKERS.c.last_seen_at >= now - QUIET_S, is_newer)
        .group_by(WORKERS.c.host)
    )
    rows = upsert(connection, HOSTS).from_select(["host", "heard_at"], lately)
    newer = rows.excluded.heard_at > HOSTS.c.heard_at
    its = {"heard_at": rows.excluded.heard_at, "lost_at": None}
    connection.execute(rows.on_conflict_do_update(index_elements=["host"], set_=its, where=newer))


def _forget_old(connection: Connection, now: float) -> None:
    """Forget revoked hosts, and silent ones unless they have lost jobs."""
    enrolled, valid = select(HOST_TOKENS.c.host), select(HOST_TOKENS.c.host).where(valid_after(now))
    revoked = and_(HOSTS.c.host.in_(enrolled), HOSTS.c.host.not_in(valid))
    old = and_(HOSTS.c.heard_at < now - KNOWN_S, or_(HOSTS.c.lost_at.is_(None), HOSTS.c.host.not_in(_at_work())))
    connection.execute(delete(HOSTS).where(or_(revoked, old)))


def _at_work() -> Select[Any]:
    """Hosts with jobs."""
    held = sql.is_in({State.RUNNING, State.HOST_LOST})
    return select(JOBS.c.host).where(JOBS.c.worker.is_not(None), held).distinct()  # as the index says


def _lose(connection: Connection, host: SeenHost, now: float) -> bool:
    """Mark a host as lost, unless it was heard since."""
    unheard = and_(HOSTS.c.host == host.host, HOSTS.c.heard_at == host.heard_at, HOSTS.c.lost_at.is_(None))
    return connection.execute(update(HOSTS).where(unheard).values(lost_at=now)).rowcount == 1


def _to_host(row: Row[Any]) -> SeenHost:
    return converted(row, HOSTS, lambda row: made_from(row, SeenHost))
