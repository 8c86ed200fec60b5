"""What a queue's owner sets for it: the class and the budget of its jobs, and how long it waits for a lost host."""

from dataclasses import asdict

from sqlalchemy import delete, select

from gpuwarden.db.transactions import reading, upsert, writing
from gpuwarden.queue.base import QueueBase
from gpuwarden.queue.models import QueueSettings, SubmissionError, to_settings
from gpuwarden.queue.schema import QUEUES
from gpuwarden.state_file import SECONDS_MAX, TEXT_MAX, is_text


class Settings(QueueBase):
    """Queues need not be made: one is there once a job is submitted to it. This is for those that are to differ."""

    def set_queue(self, settings: QueueSettings) -> None:
        """Set all of a queue's settings. The class is for jobs submitted from now on, the budget for attempts (A1).

        Raises:
            SubmissionError: a name that no job could carry, or a figure that is none.
        """
        if not is_text(settings.queue):
            raise SubmissionError(f"queue {settings.queue[:80]!a} will not do: 1 to {TEXT_MAX} printable characters")
        for name in ("budget_s", "lost_hold_s"):
            figure = getattr(settings, name)
            if figure is not None and not 0 <= figure < SECONDS_MAX:
                raise SubmissionError(f"{name} {figure} will not do: a number from 0, below {SECONDS_MAX:.0e}")
        row = asdict(settings)
        del row["queue"]
        with writing(self._engine) as connection:
            kept = upsert(connection, QUEUES).values(queue=settings.queue, **row)
            connection.execute(kept.on_conflict_do_update(index_elements=[QUEUES.c.queue], set_=row))

    def unset_queue(self, queue: str) -> bool:
        """Forget a queue's settings; false where it had none."""
        with writing(self._engine) as connection:
            return connection.execute(delete(QUEUES).where(QUEUES.c.queue == queue)).rowcount == 1

    def all(self) -> list[QueueSettings]:
        """Of every queue that has any."""
        with reading(self._engine) as connection:
            return [to_settings(row) for row in connection.execute(select(QUEUES).order_by(QUEUES.c.queue))]
