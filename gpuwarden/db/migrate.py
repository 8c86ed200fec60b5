"""Makes and upgrades the tables of a schema when a program opens the database, by Alembic."""

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from sqlalchemy import Connection, Engine, MetaData, column, func, inspect, select, table, text
from sqlalchemy.exc import OperationalError

from gpuwarden.db.engine import DatabaseError, connect, is_shared
from gpuwarden.db.locks import lock_number
from gpuwarden.db.transactions import reading, writing

IN_USE_S: Final = 60.0
"""How long tables of PostgreSQL are waited for that programs use, in seconds."""


_LOCK_MS: Final = 500
"""How long for one of them at a time: less than PostgreSQL's `deadlock_timeout`, which is 1 s unless it is told."""


_LET_THROUGH_S: Final = 0.1


_TAKEN: Final = frozenset({"55P03", "40P01"})
"""PostgreSQL's states of what could not be locked in time, or not without a deadlock."""


# Alembic keeps what it migrates in module globals: two threads of one process would migrate each other's databases.
_MIGRATING: Final = threading.Lock()


class NewerTablesError(DatabaseError):
    """The tables are of a newer gpuwarden: they may mean what this one does not know."""


class OlderTablesError(DatabaseError):
    """The tables are of an older gpuwarden, and no revision leads from them to this version's."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """One program's tables in a database: their names' family, what they are, and the revisions that make them.

    Args:
        name: `queue` or `ledger`; also names the version table and the channel on which changes are told.
        tables: the tables as they are now.
        migrations: Alembic's script location, as `package:folder`.
    """

    name: str
    tables: MetaData
    migrations: str

    @property
    def channel(self) -> str:
        """Where changes of these tables are told on PostgreSQL."""
        return f"gpuwarden_{self.name}"

    @property
    def version_table(self) -> str:
        """Where Alembic keeps how far the tables have come."""
        return f"gpuwarden_{self.name}_version"


def open_database(url: str, schema: Schema, *, migrate: bool = True) -> Engine:
    """Connect, and bring the tables up to this version.

    Args:
        url: an SQLAlchemy URL; `sqlite:////absolute/path.db` for one box, `postgresql://user@server/database` for many.
        schema: what must exist.
        migrate: whether to bring the tables up to this version where they are older: programs that run do, and so end
            those of an older version, while a person's command that only asks must not.

    Raises:
        DatabaseError: the URL cannot be used, the database cannot be opened, or it is of a newer gpuwarden; without
            `migrate` also of an older one.
    """
    engine = connect(url)
    try:
        _bring_up_to_date(engine, schema, migrate=migrate)
    except Exception:
        engine.dispose()
        raise
    return engine


def refuse_other_revisions(connection: Connection, schema: Schema) -> None:
    """Go on only where the tables are still of this version: a newer one may have taken them over meanwhile.

    Raises:
        NewerTablesError: it has.
        DatabaseError: they are of an older version, or there are none.
    """
    version = table(schema.version_table, column("version_num"))
    found = connection.scalar(select(version.c.version_num))
    if found != newest_revision(schema):
        raise refusal(connection.engine, schema, found)


def refusal(engine: Engine, schema: Schema, found: str | None) -> DatabaseError:
    """The error for tables that are not of this version's newest revision. It names the database without a password."""
    known = revisions(schema)
    url, newest = engine.url.render_as_string(hide_password=True), known[-1]
    if found is None or found in known:
        what = f"tables of another version (revision {found}; this one knows {newest})" if found else "no tables"
        return DatabaseError(
            f"{url} has {what}: start this version's programs first, which bring the {schema.name} up to date, or ask "
            "with the `gpuwarden` of the version that runs"
        )
    if found > newest:
        return NewerTablesError(
            f"{url}: its {schema.name} tables are of a newer gpuwarden (revision {found}; this one knows {newest}): "
            "upgrade this program, or give it a new database"
        )
    return OlderTablesError(
        f"{url}: its {schema.name} tables are of an older gpuwarden (revision {found}; this one upgrades from "
        f"{known[0]} on): give this program a new database"
    )


def newest_revision(schema: Schema) -> str:
    """The revision that this version makes and knows."""
    return revisions(schema)[-1]


@cache
def revisions(schema: Schema) -> tuple[str, ...]:
    """The revisions that this version knows, oldest first, by the names of their files."""
    package, _, folder = schema.migrations.partition(":")
    names = [each.name for each in (files(package) / folder / "versions").iterdir()]
    return tuple(sorted(name[1:].partition("_")[0] for name in names if name.startswith("r") and name.endswith(".py")))


def revision_of(connection: Connection, schema: Schema) -> str | None:
    """The revision that the tables are of; `None` where there is no version table."""
    if not inspect(connection).has_table(schema.version_table):
        return None
    found: str | None = connection.scalar(select(column("version_num")).select_from(table(schema.version_table)))
    return found


def _bring_up_to_date(engine: Engine, schema: Schema, *, migrate: bool) -> None:
    with reading(engine) as connection:
        found = revision_of(connection, schema)
    if found == newest_revision(schema):
        return
    if not migrate or found not in {None, *revisions(schema)}:
        raise refusal(engine, schema, found)
    upgrade(engine, schema)


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
        from alembic import command  # noqa: PLC0415 - it is slow to import, and needed once a version
        from alembic.config import Config  # noqa: PLC0415

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


def migrate_within(context: Any) -> None:
    """What each schema's `env.py` does: run in the transaction that `upgrade` began."""
    attributes = context.config.attributes
    context.configure(connection=attributes["connection"], version_table=attributes["version_table"])
    with context.begin_transaction():
        context.run_migrations()
