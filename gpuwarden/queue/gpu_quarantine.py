"""GPUs out of use until an operator releases them."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import delete, exists, or_, select

from gpuwarden.db.changes import notify_after_commit
from gpuwarden.db.rows import readable
from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.queue import sql
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import Quarantine
from gpuwarden.queue.rows import to_quarantine
from gpuwarden.queue.schema import QUARANTINED_GPUS, QUEUE, WORKER_GPUS, WORKERS

_LONGEST_FIRST: Final = tuple(QUARANTINED_GPUS.c[name] for name in ("since", "gpu", "host", "worker"))


class GpuQuarantine(QueueBase):
    """GPU quarantines."""

    def quarantine(self, gpus: Sequence[str], *, host: str, worker: str | None, reason: str, now: float) -> None:
        """Stop claims by all workers with one of these GPUs, and by the slot `worker`."""
        with writing(self._engine) as connection:
            for gpu in gpus:
                row = {"gpu": gpu, "host": host, "worker": worker or "", "since": now, "reason": reason}
                connection.execute(upsert(connection, QUARANTINED_GPUS).values(**row).on_conflict_do_nothing())

    def release_gpu(self, gpu: str) -> bool:
        """Release a GPU for all slots; False if it was not in quarantine."""
        with writing(self._engine) as connection:
            released = connection.execute(delete(QUARANTINED_GPUS).where(QUARANTINED_GPUS.c.gpu == gpu)).rowcount > 0
            notify_after_commit(connection, QUEUE.channel)
            return released

    def keeps_anyone_from(self, gpu: str, *, host: str, worker: str | None) -> bool:
        """Whether a worker registered this GPU, or the slot `worker` exists."""
        of_slot = exists().where(WORKERS.c.host == host, WORKERS.c.worker == (worker or ""))
        with reading(self._engine) as connection:
            return bool(connection.scalar(select(or_(exists().where(WORKER_GPUS.c.gpu == gpu), of_slot))))

    def quarantine_of(self, *, host: str, worker: str) -> Quarantine | None:
        """The oldest quarantine that stops this worker's claims."""
        its = select(QUARANTINED_GPUS).where(sql.match_quarantines(host, worker)).order_by(*_LONGEST_FIRST).limit(1)
        with reading(self._engine) as connection:
            row = connection.execute(its).one_or_none()
            return None if row is None else to_quarantine(row)

    def quarantined(self) -> list[Quarantine]:
        """All quarantines, oldest first."""
        with reading(self._engine) as connection:
            found = connection.execute(select(QUARANTINED_GPUS).order_by(*_LONGEST_FIRST))
            return list(readable(found, to_quarantine))
