"""What gateways ask the queue for many workers at once."""

import json
from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    Executable,
    and_,
    any_,
    bindparam,
    func,
    null,
    select,
    union_all,
    update,
)

from gpuwarden.db.transactions import autocommit, writing
from gpuwarden.job import Move, State
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.claims import delete_dead_flag
from gpuwarden.queue.hosts.seen_hosts import hear
from gpuwarden.queue.models import Beat, Renewal, SlotClaim, Synced
from gpuwarden.queue.schema import DEAD_WORKERS, JOBS, WORKERS
from gpuwarden.queue.sql import Prepared


class Batches(QueueBase):
    """Reads and writes for many workers."""

    def owned(self, claims: Collection[SlotClaim]) -> set[SlotClaim]:
        """Which of these attempts own their jobs, as `Claims.owns`, and are these slots'. One statement."""
        if not claims:
            return set()
        with autocommit(self._engine) as connection:
            return set(_holders(connection, claims)).intersection(claims)

    def sync(self, host: str, beats: Sequence[Beat], renewals: Sequence[Renewal], *, now: float) -> Synced:
        """Do `Claims.heartbeat` and `Claims.renew` for slots of one host, in one transaction."""
        with writing(self._engine) as connection:  # the workers' rows first, and each in order: no deadlock
            over, draining = _touch_all(connection, host, sorted(beats, key=lambda beat: beat.worker), now)
            lost = _renew_all(connection, sorted(renewals, key=lambda renewal: renewal.claim), now)
            hear(connection, host, now)
            return Synced(over=over, lost=lost, draining=draining)


def _touch_all(connection: Connection, host: str, beats: list[Beat], now: float) -> tuple[list[Beat], list[Beat]]:
    """Refresh the workers' rows. Returns the heartbeats of incarnations that are over, and of draining ones."""
    over: list[Beat] = []
    for completed_at in (None, now):
        some = [beat for beat in beats if beat.completed is (completed_at is not None)]
        its = {} if completed_at is None else {"completed_at": completed_at}
        rows = [
            sql.touch(host=host, worker=beat.worker, incarnation=beat.incarnation, queue=beat.queue, model=beat.model,
                      loaded=beat.loaded, now=now, **its)
            for beat in some
        ]  # fmt: skip
        if rows and connection.execute(rows[0][0], [row for _, row in rows]).rowcount < len(rows):
            over += [beat for beat in some if not _touch_one(connection, host, beat, now)]
    marked = {tuple(row) for row in connection.execute(*_marked(host=host))} if beats else set()
    for beat in beats:
        if (beat.worker, None) in marked:
            connection.execute(*delete_dead_flag(host=host, worker=beat.worker, incarnation=beat.incarnation))
    return over, [beat for beat in beats if (beat.worker, beat.incarnation) in marked]


def _touch_one(connection: Connection, host: str, beat: Beat, now: float) -> bool:
    return sql.touch_worker(
        *(connection, host, beat.worker, beat.queue, beat.incarnation, now), model=beat.model, loaded=beat.loaded
    )


def _renew_all(connection: Connection, renewals: list[Renewal], now: float) -> list[SlotClaim]:
    """Extend the leases. Returns the claims that are lost."""
    rows = {
        each.claim: {f"p_{name}": value for name, value in each.claim._asdict().items()}
        | {"p_until": now + each.lease_s}
        for each in renewals
    }
    if not rows or connection.execute(_RENEW, list(rows.values())).rowcount == len(rows):
        return []
    held = set(_holders(connection, rows))
    again = [row for claim, row in rows.items() if claim in held]
    if again:  # a job of a lost host runs again after this contact
        connection.execute(_RETURN, again)
        connection.execute(_RENEW, again)
    return [claim for claim in rows if claim not in held]


def _holders(connection: Connection, claims: Collection[SlotClaim]) -> list[SlotClaim]:
    """The valid claims of these jobs. The ids are one parameter, so that the statement is prepared once."""
    job_ids = sorted({claim.job_id for claim in claims})
    if connection.dialect.name == "postgresql":
        found = connection.execute(_OF_ARRAY, {"job_ids": job_ids})
    else:
        found = connection.execute(_OF_JSON, {"job_ids": json.dumps(job_ids)})
    return [SlotClaim(*row) for row in found]


@Prepared
def _marked(**params: ColumnElement[Any]) -> Executable:
    """The host's workers with a flag (A14), and the draining ones with their incarnations."""
    flagged = select(DEAD_WORKERS.c.worker, null()).where(DEAD_WORKERS.c.host == params["host"])
    is_draining = WORKERS.c.draining_incarnation == WORKERS.c.incarnation
    draining = select(WORKERS.c.worker, WORKERS.c.incarnation).where(WORKERS.c.host == params["host"], is_draining)
    return union_all(flagged, draining)


_HELD: Final = select(JOBS.c.job_id, JOBS.c.attempt, JOBS.c.claimed_by, JOBS.c.host, JOBS.c.worker).where(
    sql.is_in({State.RUNNING, State.HOST_LOST})
)

_OF_ARRAY: Final = _HELD.where(JOBS.c.job_id == any_(bindparam("job_ids", type_=ARRAY(BigInteger))))

_OF_JSON: Final = _HELD.where(
    JOBS.c.job_id.in_(select(func.json_each(bindparam("job_ids")).table_valued("value").c.value))
)

_ITS: Final[dict[str, BindParameter[Any]]] = {name: bindparam(f"p_{name}") for name in (*SlotClaim._fields, "until")}

_SLOT: Final = and_(JOBS.c.host == _ITS["host"], JOBS.c.worker == _ITS["worker"])

_CLAIM: Final = (_ITS["job_id"], _ITS["attempt"], _ITS["incarnation"])

_RENEW: Final = update(JOBS).where(sql.is_held(*_CLAIM), _SLOT).values(lease_expires_at=_ITS["until"])

_RETURN: Final = sql.transition(Move.RETURN, sql.is_claimed(*_CLAIM), _SLOT, lease_expires_at=_ITS["until"])
