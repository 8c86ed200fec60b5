"""What each part of the queue has."""

from sqlalchemy import Engine


class QueueBase:
    """One part of the queue, in its database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
