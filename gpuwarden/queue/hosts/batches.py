"""What gateways ask the queue for many workers at once."""

import json
from collections.abc import Collection
from typing import Any, Final

from sqlalchemy import ARRAY, BigInteger, Connection, Select, any_, bindparam, func, select

from gpuwarden.db.transactions import reading
from gpuwarden.job import State
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import SlotClaim
from gpuwarden.queue.schema import JOBS


class Batches(QueueBase):
    """Reads and writes for many workers."""

    def owned(self, claims: Collection[SlotClaim]) -> set[SlotClaim]:
        """Which of these attempts own their jobs, as `Claims.owns`, and are these slots'. One statement."""
        if not claims:
            return set()
        job_ids = sorted({claim.job_id for claim in claims})
        with reading(self._engine) as connection:
            found = connection.execute(*_holders(connection, job_ids))
            return {SlotClaim(*row) for row in found}.intersection(claims)


def _holders(connection: Connection, job_ids: list[int]) -> tuple[Select[Any], dict[str, Any]]:
    """The valid claims of these jobs. The ids are one parameter, so that the statement is prepared once."""
    if connection.dialect.name == "postgresql":
        return _OF_ARRAY, {"job_ids": job_ids}
    return _OF_JSON, {"job_ids": json.dumps(job_ids)}


_HELD: Final = select(JOBS.c.job_id, JOBS.c.attempt, JOBS.c.claimed_by, JOBS.c.host, JOBS.c.worker).where(
    sql.is_in({State.RUNNING, State.HOST_LOST})
)

_OF_ARRAY: Final = _HELD.where(JOBS.c.job_id == any_(bindparam("job_ids", type_=ARRAY(BigInteger))))

_OF_JSON: Final = _HELD.where(
    JOBS.c.job_id.in_(select(func.json_each(bindparam("job_ids")).table_valued("value").c.value))
)
