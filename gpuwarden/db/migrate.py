"""Upgrades the tables of a schema to the newest revision, with Alembic."""

import threading
import time
from collections.abc import Collection
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from sqlalchemy import Connection, Engine, func, inspect, select, text
from sqlalchemy.exc import OperationalError

from gpuwarden.db.engine import (
    DatabaseError,
    Schema,
    is_shared,
    lock_number,
    newest_revision,
    refusal,
    revision_of,
    revisions,
    writing,
)

# Alembic keeps what it migrates in module globals: two threads of one process would migrate each other's databases.
_MIGRATING: Final = threading.Lock()

IN_USE_S: Final = 60.0
"""How long tables of PostgreSQL are waited for that programs use, in seconds."""

_LOCK_MS: Final = 500
"""How long for one of them at a time: less than PostgreSQL's `deadlock_timeout`, which is 1 s unless it is told."""

_LET_THROUGH_S: Final = 0.1
_TAKEN: Final = frozenset({"55P03", "40P01"})
"""PostgreSQL's states of what could not be locked in time, or not without a deadlock."""


def upgrade(engine: Engine, schema: Schema) -> None:
    """Bring one schema's tables to the newest revision, one process at a time, in one transaction.

    Raises:
        DatabaseError: the tables are of a revision that this version does not know, or another program's, or programs
            go on using them.
    """
    with writing(engine) as connection:
        if is_shared(engine):
            for timeout in ("lock_timeout", "statement_timeout"):
                connection.execute(select(func.set_config(timeout, "0", True)))
            connection.execute(select(func.pg_advisory_xact_lock(lock_number(f"migrate {schema.name}"))))
        found = revision_of(connection, schema)
        if found == newest_revision(schema):
            return
        if found not in {None, *revisions(schema)}:
            raise refusal(engine, schema, found)
        tables = set(inspect(connection).get_table_names())
        if found is None and (others := tables & set(schema.tables.tables)):
            raise DatabaseError(
                f"{engine.url.render_as_string(hide_password=True)}: a table {min(others)!r} is there that is not "
                f"gpuwarden's (there is no {schema.version_table}): give gpuwarden a database of its own"
            )
        if is_shared(engine):
            # The version table among them: a program that has read its revision acts upon the others.
            _take(connection, tables & {*schema.tables.tables, schema.version_table}, schema)
        config = Config()
        config.set_main_option("script_location", schema.migrations)
        config.attributes.update(connection=connection, version_table=schema.version_table)
        with _MIGRATING:
            command.upgrade(config, "head")


def _take(connection: Connection, tables: Collection[str], schema: Schema) -> None:
    """Lock all that changes before any of it does.

    One after the other as they change, they would lock out a transaction that holds the next one, and PostgreSQL would
    break off one of the two. Here all are let go again where one cannot be had at once, and such a transaction ends.
    """
    if not tables:
        return
    preparer = connection.dialect.identifier_preparer
    names = ", ".join(preparer.quote(table) for table in sorted(tables))
    give_up_s = time.monotonic() + IN_USE_S
    while True:
        try:
            with connection.begin_nested():
                connection.execute(select(func.set_config("lock_timeout", f"{_LOCK_MS}", True)))
                connection.execute(text(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE"))
                connection.execute(select(func.set_config("lock_timeout", "0", True)))
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) not in _TAKEN:
                raise
            if time.monotonic() >= give_up_s:
                raise DatabaseError(
                    f"the {schema.name}'s tables have been in use for {IN_USE_S:g} s: end the programs that use them "
                    "(pg_stat_activity tells which have a transaction open), then start this one again"
                ) from None
            time.sleep(_LET_THROUGH_S)
        else:
            return


def migrate_within(context: EnvironmentContext | Any) -> None:
    """What each schema's `env.py` does: run in the transaction that `upgrade` began."""
    attributes = context.config.attributes
    context.configure(connection=attributes["connection"], version_table=attributes["version_table"])
    with context.begin_transaction():
        context.run_migrations()
