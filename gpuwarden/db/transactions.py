"""Transactions that write, transactions that read, and autocommit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.dialects import sqlite

from gpuwarden.db.changes import sending_notifications
from gpuwarden.db.engine import is_shared, translated


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that may write.

    Raises:
        DatabaseError: it failed, or a lock timed out.
    """
    with _connected(engine, writes=True) as connection, sending_notifications(connection), connection.begin():
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A read-only transaction on one snapshot. Waits for no writer.

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
    """Each statement is its own transaction.

    One round trip on PostgreSQL instead of three. On SQLite a library call holds the write lock, without the GIL: a
    process that hangs with the GIL never keeps it.

    Raises:
        DatabaseError: it failed; a write may have been done.
    """
    options: dict[str, Any] = {"writes": True, "autocommit": True}
    if is_shared(engine):
        options["isolation_level"] = "AUTOCOMMIT"  # on SQLite `_begin` handles it; the pool would undo our settings
    with _connected(engine, **options) as connection, sending_notifications(connection), connection.begin():
        yield connection


def upsert(connection: Connection, table: Table) -> Any:
    """An INSERT with ON CONFLICT for this database. `Any`: the dialects share no type."""
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql  # noqa: PLC0415 - slow to import

        return postgresql.insert(table)
    return sqlite.insert(table)


@contextmanager
def _connected(engine: Engine, **options: Any) -> Iterator[Connection]:
    with translated(engine), engine.connect().execution_options(**options) as connection:
        yield connection
