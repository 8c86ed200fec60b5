"""What was seen, decided and done, and what is still owed. Write ahead, then act.

An accepted alert is here before Alertmanager hears 202. An intent is here before anything is done for it, at most one
per container incarnation and one per job attempt, and stays until it is done or abandoned with a reason. Who works on
an intent holds it: a lease, taken and lengthened with each change of it, keeps every other executor's hands off.
"""

from typing import Self

from sqlalchemy import Engine

from gpuwarden.db.changes import Changes, watch
from gpuwarden.db.locks import ProcessLock, lock_for_one
from gpuwarden.db.migrate import open_database
from remediator.ledger.captures import Captures
from remediator.ledger.database import LedgerDatabase
from remediator.ledger.episodes import Episodes
from remediator.ledger.executors import Executors
from remediator.ledger.health import Health
from remediator.ledger.inbox import Inbox
from remediator.ledger.intents import Intents
from remediator.ledger.journal import Journal
from remediator.ledger.orders import OrderBook
from remediator.ledger.reports import Reports
from remediator.ledger.run_decisions import RunDecisions
from remediator.ledger.schema import LEDGER


class Ledger:
    """The ledger in one database: a part for each group of its tables. Safe to share between threads.

    Args:
        engine: the database.
        host: whose remediator writes; `None` for a reader.
    """

    def __init__(self, engine: Engine, *, host: str | None = None) -> None:
        database = LedgerDatabase(engine, host=host)
        self._engine = engine
        self._clock = database.clock
        self.shared = database.shared
        """Whether remediators of several hosts may work on it."""
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

    @classmethod
    def open(cls, url: str, *, host: str | None = None, migrate: bool = True) -> Self:
        """Open the ledger at an SQLAlchemy URL; `migrate` as `open_database` has it.

        Raises:
            DatabaseError: it cannot be opened.
        """
        return cls(open_database(url, LEDGER, migrate=migrate), host=host)

    def now(self) -> float:
        """The time that the ledger goes by, Unix seconds: the server's on PostgreSQL, this host's on SQLite.

        Raises:
            DatabaseError: the server's time is not known.
        """
        return self._clock.now()

    def close(self) -> None:
        """Let go of every connection."""
        self._engine.dispose()

    def changes(self) -> Changes:
        """A cheap watch on the ledger, for one thread."""
        return watch(self._engine, LEDGER.channel)

    def lock_executor(self, host: str) -> ProcessLock:
        """Be the one executor of a host, and on SQLite of the whole ledger.

        Raises:
            LockHeldElsewhereError: another one is; the message says which process.
            DatabaseError: the lock cannot be asked for.
        """
        return lock_for_one(self._engine, f"executor of {host}")
