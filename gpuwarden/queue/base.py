"""Base class."""

from sqlalchemy import Engine


class QueueBase:
    """One part of the queue."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
