"""Database connections: SQLite for one host, PostgreSQL for several. Commits are synced to disk.

On SQLite a read transaction that becomes a write fails if another has written. So each write begins with BEGIN
IMMEDIATE and waits. On PostgreSQL each change is one compare-and-set statement.
"""

import math
import os
import re
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Dialect, Engine, create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as NoConnectionFreeError
from sqlalchemy.pool import ConnectionPoolEntry

from gpuwarden.db.errors import DatabaseError, NoAnswerError
from gpuwarden.db.rows import json_or_bad

BUSY_TIMEOUT_S: Final = 5.0
"""How long a writer waits, seconds: half of Alertmanager's webhook timeout."""


STATEMENT_TIMEOUT_S: Final = 30.0
"""Limit of one PostgreSQL statement, seconds. Migrations have none."""


IDLE_TRUSTED_S: Final = 1.0
"""How long an idle connection is reused without a check, seconds."""


_DISK_FULL: Final = "53100"
"""PostgreSQL's error code (manual, appendix A)."""


_WRITERS: Final = "check who may write its folder"


def connect(url: str, *, connections: int | None = None) -> Engine:
    """Create an engine.

    Args:
        url: an SQLAlchemy URL.
        connections: most connections. They stay open: for a program that uses them all the time. By default it keeps
            five, and opens ten more for a moment.

    Raises:
        DatabaseError: the URL is invalid.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: invalid port
        shown = re.sub("(://[^/@]*:)[^/@]*@", r"\1***@", url)
        raise DatabaseError(
            f"invalid database URL {shown!r}: use sqlite:////absolute/path.db or postgresql://user@server/database"
        ) from None
    pool = {} if connections is None else {"pool_size": connections, "max_overflow": 0, "pool_use_lifo": True}
    return _postgresql(parsed, pool) if parsed.get_backend_name() == "postgresql" else _sqlite(parsed, pool)


def is_shared(engine: Engine) -> bool:
    """Whether other hosts may use the database."""
    return engine.dialect.name == "postgresql"


def own_connection(engine: Engine) -> Any:
    """A driver connection outside the pool, in autocommit."""
    borrowed = engine.raw_connection()
    connection: Any = borrowed.driver_connection
    borrowed.detach()
    connection.rollback()  # the pool may have begun a transaction
    connection.autocommit = True
    return connection


def is_idle(driver: Any) -> bool:
    """Whether a PostgreSQL connection can be reused.

    An interrupted call leaves a connection with an unread answer.
    """
    return not driver.closed and driver.info.transaction_status.name == "IDLE"


@contextmanager
def translated(engine: Engine) -> Iterator[None]:
    """Translate database errors into `DatabaseError`."""
    try:
        yield
    except (DBAPIError, sqlite3.Error, NoConnectionFreeError) as error:
        raise _error_of(engine, error) from error
    except Exception as error:
        # Errors of the driver itself. The driver is imported only if used.
        if is_shared(engine) and isinstance(error, engine.dialect.dbapi.Error):  # type: ignore[union-attr]
            raise _error_of(engine, error) from error
        raise


def _error_of(engine: Engine, error: Exception) -> DatabaseError:
    cause = error.orig if isinstance(error, DBAPIError) else error
    reason = str(cause).strip().partition("\n")[0]
    if getattr(cause, "sqlstate", None) == _DISK_FULL:
        reason = f"its server's disk is full, make room there: {reason}"
    # The driver's and the pool's errors for an unreachable database.
    away = isinstance(error, NoConnectionFreeError) or any(
        each.__name__ == "OperationalError" for each in type(cause).__mro__
    )
    kind = NoAnswerError if away else DatabaseError
    return kind(f"{engine.url.render_as_string(hide_password=True)}: {reason}")


def _sqlite(url: URL, pool: Mapping[str, int]) -> Engine:
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise DatabaseError(f"SQLite and PostgreSQL are supported, not {url.drivername}")
    if not url.database or url.database == ":memory:":
        raise DatabaseError("a database in memory is not kept: give a file, as in sqlite:////absolute/path.db")
    folder = Path(url.database).parent
    if not folder.is_dir():
        raise DatabaseError(f"the folder of {url.database} does not exist: create it first")
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S}, json_deserializer=json_or_bad, **pool)
    event.listen(engine, "do_connect", partial(_open_file, Path(url.database)))
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin)
    return engine


def _open_file(path: Path, dialect: Dialect, _record: object, arguments: Any, named: Any) -> Any:
    """Open a database without following a link. A worker that writes its folder may replace the file."""
    before = _check_file(path)
    connection = dialect.connect(*arguments, **named)
    if before not in (None, _check_file(path)):
        connection.close()
        raise DatabaseError(f"{path} was replaced while it was opened: {_WRITERS}")
    return connection


def _check_file(path: Path) -> tuple[int, int] | None:
    """Check a database file and its logs. Returns device and inode; `None` if the file does not exist yet.

    Raises:
        DatabaseError: a link, or a file of an unexpected user.
    """
    found = None
    for each in (path, *(path.with_name(f"{path.name}-{log}") for log in ("wal", "shm", "journal"))):
        try:
            status = each.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DatabaseError(f"{each} cannot be checked: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise DatabaseError(
                f"{each} is {kind}, so it is not opened: remove it, or name the file itself; {_WRITERS}"
            )
        if each == path:
            found = status.st_dev, status.st_ino
            expected = {0, os.geteuid(), path.parent.stat().st_uid}
            if status.st_uid not in expected:
                raise DatabaseError(
                    f"{path} belongs to user {status.st_uid}, not to you, to root or to its folder's owner, so it is "
                    f"not opened: correct its owner; {_WRITERS}"
                )
    return found


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # _begin opens transactions
    connection.text_factory = partial(str, encoding="utf-8", errors="backslashreplace")
    _log_ahead(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _log_ahead(connection: sqlite3.Connection) -> None:
    """Set WAL mode. SQLite refuses at once while another process opens the database: retry."""
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


def _postgresql(url: URL, pool: Mapping[str, int]) -> Engine:
    try:
        from psycopg import RawCursor  # noqa: PLC0415 - an extra
    except ImportError:
        raise DatabaseError("PostgreSQL needs its driver: in a checkout, pip install '.[postgresql]'") from None
    # PostgreSQL's own parameters ($1): the driver would parse long statements again at each call.
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        paramstyle="numeric_dollar",
        connect_args=_connect_args(url.query) | {"cursor_factory": RawCursor},
        **pool,
    )
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", _check_if_idle)
    return engine


def _note_use(_connection: object, record: ConnectionPoolEntry) -> None:
    record.info["used_at_s"] = time.monotonic()


def _check_if_idle(connection: Any, record: ConnectionPoolEntry, _fairy: object) -> None:
    """Check an idle connection before reuse. The pool replaces a broken one."""
    if time.monotonic() - record.info.get("used_at_s", math.inf) < IDLE_TRUSTED_S:
        return
    try:
        connection.autocommit = True  # a rollback would drop the prepared statements
        connection.execute("SELECT 1")
        connection.autocommit = False
    except Exception as error:
        raise DisconnectionError from error


def _connect_args(query: Mapping[str, str | Sequence[str]]) -> dict[str, Any]:
    """Settings of libpq. Those of the URL win."""
    # Detect a vanished peer within seconds, not TCP's two hours. The server would keep its locks.
    keepalive = {"keepalives_idle": 5, "keepalives_interval": 5, "keepalives_count": 3}
    user_timeout_ms = 20_000
    settings = {
        "lock_timeout": round(BUSY_TIMEOUT_S * 1000),
        "statement_timeout": round(STATEMENT_TIMEOUT_S * 1000),
        "idle_in_transaction_session_timeout": 60_000,
        **{f"tcp_{name}": figure for name, figure in keepalive.items()},
        "tcp_user_timeout": user_timeout_ms,
    }
    given = query.get("options", ())
    options = [
        *(f"-c {name}={figure}" for name, figure in settings.items()),
        *([given] if isinstance(given, str) else given),
    ]
    ours = {
        "connect_timeout": round(BUSY_TIMEOUT_S),
        "application_name": f"gpuwarden pid {os.getpid()}",
        **keepalive,
        "tcp_user_timeout": user_timeout_ms,
    }
    return {name: value for name, value in ours.items() if name not in query} | {"options": " ".join(options)}
