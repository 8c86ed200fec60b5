"""The clock of leases."""

import time
from typing import Final

from sqlalchemy import Engine, func, select

from gpuwarden import clock
from gpuwarden.db.engine import is_shared
from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.transactions import autocommit

CLOCK_TRUSTED_S: Final = 5.0
"""How long the offset of the server's clock is reused, seconds.

After the server's clock jumps ahead, leases look expired for this and a heartbeat. A sweep waits longer (20 s).
"""


class DatabaseClock:
    """The shared clock of a database, Unix seconds.

    PostgreSQL's own clock, so that a host's wrong clock takes no job away. On SQLite the host's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked_s = 0.0
        self._ahead_s: float | None = None

    def now(self) -> float:
        """The time, Unix seconds.

        Raises:
            DatabaseError: the server never answered.
        """
        if not is_shared(self._engine):
            return time.time()
        now_s = clock.boottime_s()
        if self._ahead_s is None or now_s - self._asked_s >= CLOCK_TRUSTED_S:
            try:
                # A rollback would drop psycopg's prepared statements.
                with autocommit(self._engine) as connection:
                    server_s = connection.scalar(select(func.extract("epoch", func.clock_timestamp())))
                    now_s = clock.boottime_s()
                self._ahead_s, self._asked_s = float(server_s or 0) - now_s, now_s
            except DatabaseError:
                if self._ahead_s is None:
                    raise
        return now_s + self._ahead_s
