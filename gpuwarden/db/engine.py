"""Connects to the database: SQLite on one box, PostgreSQL where hosts share one. Commits are synced to disk on both.

On SQLite a transaction that reads and then writes fails at once when another has written meanwhile, whatever the
timeout; so each transaction that may write opens with BEGIN IMMEDIATE and waits its turn. On PostgreSQL writers run
side by side, and each change is one statement that compares before it sets.
"""

import math
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as NoConnectionFreeError
from sqlalchemy.pool import ConnectionPoolEntry

from gpuwarden.errors import GpuwardenError

BUSY_TIMEOUT_S: Final = 5.0
"""How long a writer waits for another before it gives up, seconds: half of what Alertmanager gives a webhook."""


STATEMENT_TIMEOUT_S: Final = 30.0
"""How long one statement may take on PostgreSQL, seconds; migrations may take as long as they need."""


IDLE_TRUSTED_S: Final = 1.0
"""A connection that was used within this time is used again unasked, seconds: asking costs each claim a round trip."""


_DISK_FULL: Final = "53100"
"""PostgreSQL's error code for it (its manual, appendix A)."""


class DatabaseError(GpuwardenError):
    """The database did not do what was asked. Nothing of the transaction was kept."""


class NoAnswerError(DatabaseError):
    """The database could not be reached or was not ready: asked again later, it may do it."""


def connect(url: str) -> Engine:
    """Make ready to connect, whatever the tables are like.

    Raises:
        DatabaseError: the URL cannot be used.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # the second: a port that is no number
        shown = re.sub("(://[^/@]*:)[^/@]*@", r"\1***@", url)
        raise DatabaseError(
            f"{shown!r} is no database URL: sqlite:////absolute/path.db or postgresql://user@server/database is one"
        ) from None
    return _postgresql(parsed) if parsed.get_backend_name() == "postgresql" else _sqlite(parsed)


def is_shared(engine: Engine) -> bool:
    """Whether other hosts may use the database: then it can be out of this host's reach and yet at work."""
    return engine.dialect.name == "postgresql"


def own_connection(engine: Engine) -> Any:
    """The driver's own connection, out of the pool, each statement a transaction of its own."""
    borrowed = engine.raw_connection()
    connection: Any = borrowed.driver_connection
    borrowed.detach()
    connection.rollback()  # whatever the pool began on it
    connection.autocommit = True
    return connection


def is_idle(driver: Any) -> bool:
    """Whether PostgreSQL's driver has a connection that can be used again.

    What interrupts a call, as a signal's handler may, leaves one on which the server's answer is still to come.
    """
    return not driver.closed and driver.info.transaction_status.name == "IDLE"


@contextmanager
def translated(engine: Engine) -> Iterator[None]:
    """Raise what the database and its driver raise as a `DatabaseError`."""
    try:
        yield
    except (DBAPIError, sqlite3.Error, NoConnectionFreeError) as error:
        raise _error_of(engine, error) from error
    except Exception as error:
        # What the driver raises outside SQLAlchemy's own calls; it is imported only where it is used.
        if is_shared(engine) and isinstance(error, engine.dialect.dbapi.Error):  # type: ignore[union-attr]
            raise _error_of(engine, error) from error
        raise


def _error_of(engine: Engine, error: Exception) -> DatabaseError:
    cause = error.orig if isinstance(error, DBAPIError) else error
    because = str(cause).strip().partition("\n")[0]
    if getattr(cause, "sqlstate", None) == _DISK_FULL:
        because = f"its server's disk is full, make room there: {because}"
    # The three that say so in so many words: the drivers' common name for it, and the pool's.
    away = isinstance(error, NoConnectionFreeError) or any(
        each.__name__ == "OperationalError" for each in type(cause).__mro__
    )
    told = NoAnswerError if away else DatabaseError
    return told(f"{engine.url.render_as_string(hide_password=True)}: {because}")


def _sqlite(url: URL) -> Engine:
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise DatabaseError(f"SQLite and PostgreSQL are supported, not {url.drivername}")
    if not url.database or url.database == ":memory:":
        raise DatabaseError("a database in memory forgets: give a file, as in sqlite:////absolute/path.db")
    folder = Path(url.database).parent
    if not folder.is_dir():
        raise DatabaseError(f"the folder of {url.database} does not exist: make it first")
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver opens no transaction of its own; _begin does
    _log_ahead(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _log_ahead(connection: sqlite3.Connection) -> None:
    """Write ahead to a log. Whoever else opens a database that does not yet is refused at once, and asks again."""
    give_up_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= give_up_s:
                raise
            time.sleep(0.02)
        else:
            return


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("autocommit"):
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("writes") else "BEGIN")


def _postgresql(url: URL) -> Engine:
    try:
        engine = create_engine(url.set(drivername="postgresql+psycopg"), connect_args=_connect_args(url.query))
    except ImportError:
        raise DatabaseError("PostgreSQL needs its driver: pip install 'gpuwarden[postgresql]'") from None
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", _check_if_idle)
    return engine


def _note_use(_connection: object, record: ConnectionPoolEntry) -> None:
    record.info["used_at_s"] = time.monotonic()


def _check_if_idle(connection: Any, record: ConnectionPoolEntry, _fairy: object) -> None:
    """Before it is used again, ask over a connection that lay idle; the pool makes another where it is gone."""
    if time.monotonic() - record.info.get("used_at_s", math.inf) < IDLE_TRUSTED_S:
        return
    try:
        connection.autocommit = True  # a transaction that is rolled back takes the prepared statements with it
        connection.execute("SELECT 1")
        connection.autocommit = False
    except Exception as error:
        raise DisconnectionError from error


def _connect_args(query: Mapping[str, str | Sequence[str]]) -> dict[str, Any]:
    """What libpq is told beside what the URL says, which holds where the two differ."""
    # Whoever vanished without a word is noticed within seconds, not after TCP's own two hours: by us, and by the
    # server, whose session would keep the locks of a client that is gone, and its successor out.
    keepalive = {"keepalives_idle": 5, "keepalives_interval": 5, "keepalives_count": 3}
    user_timeout_ms = 20_000
    settings = {
        "lock_timeout": round(BUSY_TIMEOUT_S * 1000),
        "statement_timeout": round(STATEMENT_TIMEOUT_S * 1000),
        "idle_in_transaction_session_timeout": 60_000,
        **{f"tcp_{name}": figure for name, figure in keepalive.items()},
        "tcp_user_timeout": user_timeout_ms,
    }
    told = query.get("options", ())
    options = [
        *(f"-c {name}={figure}" for name, figure in settings.items()),
        *([told] if isinstance(told, str) else told),
    ]
    ours = {
        "connect_timeout": round(BUSY_TIMEOUT_S),
        "application_name": f"gpuwarden pid {os.getpid()}",
        **keepalive,
        "tcp_user_timeout": user_timeout_ms,
    }
    return {name: value for name, value in ours.items() if name not in query} | {"options": " ".join(options)}
