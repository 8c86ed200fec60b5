"""The ledger's database, and the base class of its parts."""

from sqlalchemy import Engine

from gpuwarden.db.clock import DatabaseClock
from gpuwarden.db.engine import is_shared


class LedgerDatabase:
    """One database with the ledger's tables. `host` is the writing host, `None` for a reader."""

    def __init__(self, engine: Engine, *, host: str | None = None) -> None:
        self.engine = engine
        self.host = host
        self.clock = DatabaseClock(engine)
        self.shared = is_shared(engine)
        """Whether several hosts share it."""


class LedgerPart:
    """The operations on one group of the ledger's tables. Safe to share between threads."""

    def __init__(self, database: LedgerDatabase) -> None:
        self._engine = database.engine
        self._host = database.host
        self._clock = database.clock
        self.shared = database.shared
