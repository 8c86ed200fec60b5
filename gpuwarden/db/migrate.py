"""Creation and migration of tables, by Alembic."""

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Index,
    MetaData,
    column,
    func,
    inspect,
    select,
    table,
    text,
)
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateIndex

from gpuwarden.db.engine import connect, is_shared
from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.locks import lock_number
from gpuwarden.db.transactions import reading, writing

IN_USE_S: Final = 60.0
"""How long a migration waits for tables in use, seconds."""


_LOCK_MS: Final = 500
"""Timeout of one attempt, below PostgreSQL's default `deadlock_timeout` of 1 s."""


_LET_THROUGH_S: Final = 0.1


_WHERE: Final = "postgresql_where"


_TAKEN: Final = frozenset({"55P03", "40P01"})
"""PostgreSQL's codes for a lock timeout and a deadlock."""


# Alembic uses module globals: threads would migrate each other's databases.
_MIGRATING: Final = threading.Lock()


class NewerTablesError(DatabaseError):
    """The tables are of a newer gpuwarden."""


class OlderTablesError(DatabaseError):
    """The tables are of an older gpuwarden and cannot be migrated."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """One program's tables and their revisions.

    Args:
        name: `queue` or `ledger`, also for the version table and the channel.
        tables: the current tables.
        migrations: Alembic's script location, `package:folder`.
    """

    name: str
    tables: MetaData
    migrations: str

    @property
    def channel(self) -> str:
        """The PostgreSQL channel of changes."""
        return f"gpuwarden_{self.name}"

    @property
    def version_table(self) -> str:
        """Alembic's version table."""
        return f"gpuwarden_{self.name}_version"


def partial_index(
    name: str,
    *columns: str | Column[Any],
    sqlite: str | ColumnElement[bool],
    postgresql: str | ColumnElement[bool],
    unique: bool = False,
) -> Index:
    """An index of some rows. The option `postgresql_where` would import PostgreSQL's dialect at each start."""
    where = {"sqlite": sqlite, "postgresql": postgresql}
    made = {of: text(each) if isinstance(each, str) else each for of, each in where.items()}
    return Index(name, *columns, unique=unique, sqlite_where=made["sqlite"], info={_WHERE: made["postgresql"]})


@compiles(CreateIndex, "postgresql")
def _compile_index(create: CreateIndex, compiler: Any, **options: Any) -> str:
    index = create.element
    if _WHERE in index.info:
        index.dialect_options["postgresql"]["where"] = index.info[_WHERE]
    compiled: str = compiler.visit_create_index(create, **options)
    return compiled


def open_database(url: str, schema: Schema, *, migrate: bool = True, connections: int | None = None) -> Engine:
    """Connect, and check or migrate the tables.

    Args:
        url: an SQLAlchemy URL.
        schema: the tables.
        migrate: migrate older tables. This stops programs of older versions, so commands that only read must not.
        connections: see `connect`.

    Raises:
        DatabaseError: the database cannot be opened, or has another version.
    """
    engine = connect(url, connections=connections)
    try:
        _bring_up_to_date(engine, schema, migrate=migrate)
    except Exception:
        engine.dispose()
        raise
    return engine


def refuse_other_revisions(connection: Connection, schema: Schema) -> None:
    """Check in a transaction that the tables still have this version.

    Raises:
        NewerTablesError: they are newer.
        DatabaseError: they are older or missing.
    """
    version = table(schema.version_table, column("version_num"))
    found = connection.scalar(select(version.c.version_num))
    if found != newest_revision(schema):
        raise refusal(connection.engine, schema, found)


def refusal(engine: Engine, schema: Schema, found: str | None) -> DatabaseError:
    """The error for tables of another revision, without a password."""
    known = revisions(schema)
    url, newest = engine.url.render_as_string(hide_password=True), known[-1]
    if found is None or found in known:
        what = f"tables of another version (revision {found}; this one knows {newest})" if found else "no tables"
        return DatabaseError(
            f"{url} has {what}: start this version's programs first, which migrate the {schema.name}, or use "
            "the `gpuwarden` of the running version"
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
    """This version's revision."""
    return revisions(schema)[-1]


@cache
def revisions(schema: Schema) -> tuple[str, ...]:
    """The revisions that this version knows, oldest first."""
    package, _, folder = schema.migrations.partition(":")
    names = [each.name for each in (files(package) / folder / "versions").iterdir()]
    return tuple(sorted(name[1:].partition("_")[0] for name in names if name.startswith("r") and name.endswith(".py")))


def revision_of(connection: Connection, schema: Schema) -> str | None:
    """The tables' revision; `None` without a version table."""
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
    """Migrate a schema's tables in one transaction, one process at a time.

    Raises:
        DatabaseError: the tables are unknown, belong to another program, or stay in use.
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
                f"{engine.url.render_as_string(hide_password=True)}: its table {min(others)!r} is not "
                f"gpuwarden's (no {schema.version_table}): use a separate database"
            )
        if is_shared(engine):
            # With the version table: programs read it before they use the others.
            _take(connection, tables & {*schema.tables.tables, schema.version_table}, schema)
        from alembic import command  # noqa: PLC0415 - slow to import, and rarely needed
        from alembic.config import Config  # noqa: PLC0415

        config = Config()
        config.set_main_option("script_location", schema.migrations)
        config.attributes.update(connection=connection, version_table=schema.version_table)
        with _MIGRATING:
            command.upgrade(config, "head")


def _take(connection: Connection, tables: Collection[str], schema: Schema) -> None:
    """Lock all tables before the first change, or release all and retry.

    Single locks could deadlock with a transaction that has the next table.
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
                    f"the {schema.name}'s tables are in use for {IN_USE_S:g} s: stop programs with an open transaction "
                    "(pg_stat_activity lists them), then start this one again"
                ) from None
            time.sleep(_LET_THROUGH_S)
        else:
            return


def migrate_within(context: Any) -> None:
    """Run migrations in the transaction of `upgrade`, for each `env.py`."""
    attributes = context.config.attributes
    context.configure(connection=attributes["connection"], version_table=attributes["version_table"])
    with context.begin_transaction():
        context.run_migrations()
