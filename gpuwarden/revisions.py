"""The history of the tables: how those of one revision become those of another. By Alembic, one history a schema."""

import threading
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, func, inspect, select

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
            would go down and nobody was asked.
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


def migrate_within(context: EnvironmentContext | Any) -> None:
    """What each history's `env.py` does: run in the transaction that `migrate_to` began."""
    attributes = context.config.attributes
    context.configure(connection=attributes["connection"], version_table=attributes["version_table"])
    with context.begin_transaction():
        context.run_migrations()
