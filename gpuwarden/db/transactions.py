"""Transactions that write, that read, and statements that are transactions of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.dialects import postgresql, sqlite

from gpuwarden.db.changes import sending_notifications
from gpuwarden.db.engine import is_shared, translated


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that may write: all of it is kept, or none.

    Raises:
        DatabaseError: the database refused, is full, locked beyond the timeout, or gone.
    """
    with _connected(engine, writes=True) as connection, sending_notifications(connection), connection.begin():
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads, from one snapshot; it waits for no writer.

    Raises:
        DatabaseError: the database cannot be read.
    """
    options: dict[str, Any] = {}
    if is_shared(engine):
        options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
    with _connected(engine, **options) as connection, connection.begin():
        yield connection


@contextmanager
def autocommit(engine: Engine) -> Iterator[Connection]:
    """Each statement is a transaction of its own.

    On PostgreSQL that is one round trip instead of three. On SQLite a statement that returns no rows has the write lock
    within one call of the library, which lets go of Python's lock meanwhile: a process that wedges with Python's lock
    in another thread then never keeps the database's.

    Raises:
        DatabaseError: the database refused, or is gone; of a statement that writes nobody knows whether it was done.
    """
    options: dict[str, Any] = {"writes": True, "autocommit": True}
    if is_shared(engine):
        options["isolation_level"] = "AUTOCOMMIT"  # on SQLite `_begin` sees to it, and the pool would undo our settings
    with _connected(engine, **options) as connection, sending_notifications(connection), connection.begin():
        yield connection


def upsert(connection: Connection, table: Table) -> Any:
    """An INSERT that may say what happens where the row is there already, in the words of this database.

    `Any`, for the two dialects' inserts share their methods and no type.
    """
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


@contextmanager
def _connected(engine: Engine, **options: Any) -> Iterator[Connection]:
    with translated(engine), engine.connect().execution_options(**options) as connection:
        yield connection
