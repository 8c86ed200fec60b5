"""What every part of the queue has: its database, and the clock that leases go by."""

from sqlalchemy import Engine

from gpuwarden.db.engine import DatabaseClock, is_shared


class Room:
    """One database, shared by all that is done in it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._clock = DatabaseClock(engine)
        self.shared = is_shared(engine)
        """Whether other hosts work on this queue, so that it can be lost to this one and go on without it."""

    def now(self) -> float:
        """The time that leases go by, Unix seconds: the server's on PostgreSQL, this host's on SQLite.

        Raises:
            DatabaseError: the server's time is not known.
        """
        return self._clock.now()
