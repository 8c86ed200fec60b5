"""The history of the tables: how those of one revision become those of another. By Alembic, one history a schema."""

import threading
import time
from collections.abc import Collection
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, func, inspect, select, text
from sqlalchemy.exc import OperationalError

from gpuwarden.database import (
    NOTHING,
    Agree,
    DatabaseError,
    Schema,
    is_shared,
    lock_number,
    newer_tables,
    reading,
    revision_of,
    writing,
)

BASELINE: Final = "0001"
"""The revision of an SQLite database that was made before there was a history."""

# Alembic keeps what it migrates in module globals: two threads of one process would migrate each other's databases.
_MIGRATING: Final = threading.Lock()

IN_USE_S: Final = 60.0
"""How long tables of PostgreSQL are waited for that programs use, in seconds."""

_LOCK_MS: Final = 500
"""How long for one of them at a time: less than PostgreSQL's `deadlock_timeout`, which is 1 s unless it is told."""

_LET_THROUGH_S: Final = 0.1
_TAKEN: Final = frozenset({"55P03", "40P01"})
"""PostgreSQL's states of what could not be locked in time, or not without a deadlock."""


def _config(schema: Schema) -> Config:
    config = Config()
    config.set_main_option("script_location", schema.migrations)
    return config


def migrate_to(
    engine: Engine, schema: Schema, revision: str | None = None, *, agree: Agree | None = None
) -> tuple[str | None, str | None]:
    """Bring one schema's tables to a revision, one process at a time, in one transaction.

    Args:
        engine: the database.
        schema: whose tables.
        revision: to which one; the newest when not given, `NOTHING` for no tables at all.
        agree: asked before tables go down; without it they never do.

    Returns:
        The revision that was there and the one that is there now; `None` is for no tables.

    Raises:
        DatabaseError: the tables are of a newer gpuwarden or another program's, or there is no such revision; or they
            would go down and nobody was asked; or programs go on using them.
    """
    config = _config(schema)
    script = ScriptDirectory.from_config(config)
    history = {each.revision: each.module for each in reversed(list(script.walk_revisions()))}  # oldest first
    newest = script.get_current_head()
    wanted = newest if revision is None else None if revision == NOTHING else revision
    if wanted not in {None, *history}:
        known = ", ".join((NOTHING, *history))
        raise DatabaseError(f"the {schema.name} has no revision {wanted!r}: there are {known}")
    with reading(engine) as connection:
        if revision_of(connection, schema) == wanted is not None:
            return wanted, wanted
    with writing(engine) as connection:
        if is_shared(engine):
            for timeout in ("lock_timeout", "statement_timeout"):
                connection.execute(select(func.set_config(timeout, "0", True)))
            connection.execute(select(func.pg_advisory_xact_lock(lock_number(f"migrate {schema.name}"))))
        found = revision_of(connection, schema)
        if found not in {None, *history}:
            raise newer_tables(engine, schema, found)
        tables = set() if found is not None else set(inspect(connection).get_table_names()) & set(schema.tables.tables)
        if tables and is_shared(engine):
            raise DatabaseError(
                f"{engine.url.render_as_string(hide_password=True)}: a table {min(tables)!r} is there that is not "
                f"gpuwarden's (there is no {schema.version_table}): give gpuwarden a database of its own"
            )
        if is_shared(engine) and found != wanted:
            # The one that says which revision it is among them, for a program that has read it acts upon the others.
            ours = {*schema.tables.tables, schema.version_table}
            _take(connection, set(inspect(connection).get_table_names()) & ours, schema)
        config.attributes.update(connection=connection, version_table=schema.version_table)
        with _MIGRATING:
            if schema.first in tables:
                command.stamp(config, BASELINE)
                found = BASELINE
            order = [None, *history]
            undone = [
                history[each] for each in history if order.index(wanted) < order.index(each) <= order.index(found)
            ]
            if undone:
                if agree is None:
                    raise DatabaseError(f"the {schema.name} is of revision {found}, and going down to {wanted} loses")
                agree(connection, undone[::-1])
                command.downgrade(config, wanted or "base")
            elif found != wanted:
                command.upgrade(config, wanted or "base")
    return found, wanted


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
    """What each history's `env.py` does: run in the transaction that `migrate_to` began."""
    attributes = context.config.attributes
    context.configure(connection=attributes["connection"], version_table=attributes["version_table"])
    with context.begin_transaction():
        context.run_migrations()
