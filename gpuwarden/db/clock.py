"""The clock that leases are measured with."""

import time
from typing import Final

from sqlalchemy import Engine, func, select

from gpuwarden import clock
from gpuwarden.db.engine import DatabaseError, is_shared
from gpuwarden.db.transactions import autocommit

CLOCK_TRUSTED_S: Final = 5.0
"""How long the distance between the server's clock and ours is taken as known, seconds.

When the server's clock is set ahead by more than a lease, every lease looks expired until its next renewal by the new
clock, which comes at most this and a heartbeat later. A sweep must have the patience for both (20 s, against 5 + 10).
"""


class DatabaseClock:
    """The clock that everyone who shares the database goes by, Unix seconds: leases are measured with it.

    On PostgreSQL it is the server's, so that no host's own clock, wrong or stepped, takes a job from anyone. On SQLite
    all are on one host, and it is that host's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked_s = 0.0
        self._ahead_s: float | None = None

    def now(self) -> float:
        """The time, Unix seconds.

        Raises:
            DatabaseError: the server cannot be asked, and never could be.
        """
        if not is_shared(self._engine):
            return time.time()
        now_s = clock.boottime_s()
        if self._ahead_s is None or now_s - self._asked_s >= CLOCK_TRUSTED_S:
            try:
                # Nothing to roll back: psycopg forgets its prepared statements with every transaction that is.
                with autocommit(self._engine) as connection:
                    told = connection.scalar(select(func.extract("epoch", func.clock_timestamp())))
                    now_s = clock.boottime_s()
                self._ahead_s, self._asked_s = float(told or 0) - now_s, now_s
            except DatabaseError:
                if self._ahead_s is None:
                    raise
        return now_s + self._ahead_s
