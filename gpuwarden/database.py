"""How the queue and the ledger reach their database: one engine, transactions that write begin as writers.

On SQLite a transaction that reads and then writes fails at once when another has written meanwhile, whatever the
timeout; so every transaction of `writing` opens with BEGIN IMMEDIATE and waits its turn. Commits are synced to disk.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, MetaData, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionFreeError

from gpuwarden.errors import GpuwardenError

BUSY_TIMEOUT_S: Final = 10.0
"""How long a writer waits for another before it gives up, seconds."""


class DatabaseError(GpuwardenError):
    """The database did not do what was asked. Nothing of the transaction was kept."""


def open_database(url: str, tables: MetaData) -> Engine:
    """Connect, and make the tables that are not there yet.

    Args:
        url: an SQLAlchemy URL; `sqlite:////absolute/path.db` for one box.
        tables: what must exist.

    Raises:
        DatabaseError: the URL cannot be used, or the database cannot be opened.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise DatabaseError(f"{url!r} is no database URL: sqlite:////absolute/path.db is one") from None
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise DatabaseError(f"only SQLite is supported so far, not {parsed.drivername}")
    if not parsed.database or parsed.database == ":memory:":
        raise DatabaseError("a database in memory forgets: give a file, as in sqlite:////absolute/path.db")
    folder = Path(parsed.database).parent
    if not folder.is_dir():
        raise DatabaseError(f"the folder of {parsed.database} does not exist: make it first")
    engine = create_engine(parsed, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin)
    try:
        with writing(engine) as connection:
            tables.create_all(connection)
    except DatabaseError:
        engine.dispose()
        raise
    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that may write: all of it is kept, or none.

    Raises:
        DatabaseError: the database refused, is full, locked beyond the timeout, or gone.
    """
    with _translated(engine), engine.connect().execution_options(writes=True) as connection, connection.begin():
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads, from one snapshot; it waits for no writer.

    Raises:
        DatabaseError: the database cannot be read.
    """
    with _translated(engine), engine.connect() as connection, connection.begin():
        yield connection


class Changes:
    """Tells cheaply whether anyone else has committed since the last look: SQLite's `data_version`.

    Holds one connection of its own; use it from one thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        with _translated(engine):
            self._connection = engine.raw_connection()
            self._seen = self._version()

    def any(self) -> bool:
        """Whether the database changed since the last call.

        Raises:
            DatabaseError: the database cannot be asked.
        """
        with _translated(self._engine):
            version = self._version()
        changed, self._seen = version != self._seen, version
        return changed

    def close(self) -> None:
        """Give the connection back."""
        self._connection.close()

    def _version(self) -> int:
        cursor = self._connection.cursor()
        cursor.execute("PRAGMA data_version")
        row: tuple[int] = cursor.fetchone()  # type: ignore[assignment]
        cursor.close()
        return row[0]


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver opens no transaction of its own; _begin does
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


@contextmanager
def _translated(engine: Engine) -> Iterator[None]:
    try:
        yield
    except (DBAPIError, sqlite3.Error, NoConnectionFreeError) as error:
        because = error.orig if isinstance(error, DBAPIError) else error
        raise DatabaseError(f"{engine.url.render_as_string(hide_password=True)}: {because}") from error
