"""The ledger: what was observed, decided and done, and which intents are open. Write first, then act.

An alert is stored before Alertmanager gets 202, an intent before any action for it.
"""

from typing import Self

from sqlalchemy import Engine

from gpuwarden.db.changes import Changes, watch
from gpuwarden.db.locks import ProcessLock, lock_for_one
from gpuwarden.db.migrate import open_database
from remediator.ledger.captures import Captures
from remediator.ledger.chain import Chain, Executors
from remediator.ledger.database import LedgerDatabase
from remediator.ledger.episodes import Episodes
from remediator.ledger.health import Health
from remediator.ledger.inbox import Inbox
from remediator.ledger.intents import Intents
from remediator.ledger.journal import Journal
from remediator.ledger.notices import Notices
from remediator.ledger.orders import OrderBook
from remediator.ledger.reports import Reports
from remediator.ledger.roles import refuse_shared_role
from remediator.ledger.run_decisions import RunDecisions
from remediator.ledger.schema import LEDGER


class Ledger:
    """The ledger in one database. Safe to share between threads. `host` is the writing host, `None` for a reader."""

    def __init__(self, engine: Engine, *, host: str | None = None) -> None:
        database = LedgerDatabase(engine, host=host)
        self._engine = engine
        self._clock = database.clock
        self.shared = database.shared
        """Whether several hosts share it."""
        self.inbox = Inbox(database)
        self.episodes = Episodes(database)
        self.intents = Intents(database)
        self.run_decisions = RunDecisions(database)
        self.orders = OrderBook(database)
        self.journal = Journal(database)
        self.captures = Captures(database)
        self.executors = Executors(database)
        self.reports = Reports(database)
        self.health = Health(database)
        self.notices = Notices(database)
        self.chain = Chain(database)

    @classmethod
    def open(cls, url: str, *, host: str | None = None, migrate: bool = True) -> Self:
        """Open the ledger at an SQLAlchemy URL. Raises DatabaseError."""
        return cls(open_database(url, LEDGER, migrate=migrate), host=host)

    def now(self) -> float:
        """The ledger's time, Unix seconds: the server's on PostgreSQL. Raises DatabaseError."""
        return self._clock.now()

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def refuse_role_of(self, queue_url: str) -> None:
        """See `refuse_shared_role`."""
        refuse_shared_role(self._engine, queue_url)

    def changes(self) -> Changes:
        """Watch the ledger for changes, in one thread."""
        return watch(self._engine, LEDGER.channel)

    def lock_executor(self, host: str) -> ProcessLock:
        """Acquire the executor lock of a host; on SQLite, of the whole ledger.

        Raises:
            LockHeldElsewhereError: another process holds it.
            DatabaseError: the ledger is unreachable.
        """
        return lock_for_one(self._engine, f"executor of {host}")
