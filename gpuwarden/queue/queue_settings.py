"""Settings of a queue."""

from dataclasses import asdict

from sqlalchemy import delete, select

from gpuwarden.db.rows import readable
from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import COUNT_MAX, QueueSettings, SubmissionError
from gpuwarden.queue.rows import to_settings
from gpuwarden.queue.schema import QUEUES
from gpuwarden.state_file import SECONDS_MAX, TEXT_MAX, is_text


class Settings(QueueBase):
    """Settings of queues. A queue exists without any."""

    def set_queue(self, settings: QueueSettings) -> None:
        """Set all settings of a queue, for new jobs and new attempts (A1).

        Raises:
            SubmissionError: the name or a number is invalid.
        """
        if not is_text(settings.queue):
            raise SubmissionError(f"queue {settings.queue[:80]!a} is invalid: use 1 to {TEXT_MAX} printable characters")
        for name in ("budget_s", "lost_hold_s"):
            figure = getattr(settings, name)
            if figure is not None and not 0 <= figure < SECONDS_MAX:
                raise SubmissionError(f"{name} {figure} is invalid: use a number from 0, below {SECONDS_MAX:.0e}")
        days = settings.retention_days
        if days is not None and not 0 <= days < COUNT_MAX:
            raise SubmissionError(f"retention_days {days} is invalid: use a whole number from 0, below {COUNT_MAX}")
        row = asdict(settings)
        del row["queue"]
        with writing(self._engine) as connection:
            kept = upsert(connection, QUEUES).values(queue=settings.queue, **row)
            connection.execute(kept.on_conflict_do_update(index_elements=[QUEUES.c.queue], set_=row))

    def unset_queue(self, queue: str) -> bool:
        """Delete a queue's settings; False if it had none."""
        with writing(self._engine) as connection:
            return connection.execute(delete(QUEUES).where(QUEUES.c.queue == queue)).rowcount == 1

    def all(self) -> list[QueueSettings]:
        """The settings of every queue that has any."""
        with reading(self._engine) as connection:
            return list(readable(connection.execute(select(QUEUES).order_by(QUEUES.c.queue)), to_settings))
