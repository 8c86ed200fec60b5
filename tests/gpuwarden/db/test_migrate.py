"""Creation, upgrade and refusal of tables."""

import hashlib
import importlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

import gpuwarden
from gpuwarden.db import migrate as db_migrate
from gpuwarden.db.engine import connect
from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.migrate import (
    NewerTablesError,
    OlderTablesError,
    Schema,
    newest_revision,
    open_database,
    refusal,
    refuse_other_revisions,
)
from gpuwarden.queue import JobStore, Submission
from gpuwarden.queue.schema import METADATA, QUEUE
from remediator.ledger.schema import LEDGER
from testbed.postgres import Postgres
from tests.waiting import eventually

pytestmark = pytest.mark.both_databases

NOW: Final = 1000.0
OLDER: Final = "0001"
NEWER: Final = "9999"

NEXT: Final = '''"""What the next release adds."""

import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "{before}"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("of_the_next_release", sa.String))
    op.create_index("jobs_of_the_next_release", "jobs", ["of_the_next_release"])
'''

NEXT_SCHEMA: Final = """
from gpuwarden.db.migrate import Schema
from gpuwarden.queue.schema import METADATA

SCHEMA = Schema(name="queue", tables=METADATA, migrations="next_release:migrations")
"""


@pytest.fixture(scope="module")
def next_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of the package `next_release`: the queue's revisions and one more."""
    folder = tmp_path_factory.mktemp("next")
    package = folder / "next_release"
    shutil.copytree(Path(gpuwarden.__file__).parent / "migrations", package / "migrations")
    (package / "__init__.py").write_text(NEXT_SCHEMA)
    (package / "migrations" / "versions" / "rnext_next.py").write_text(NEXT.format(before=newest_revision(QUEUE)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture
def next_schema(next_folder: Path) -> Schema:
    """The queue's schema of the next release."""
    assert next_folder
    found: Schema = importlib.import_module("next_release").SCHEMA
    return found


@pytest.fixture
def empty_url(backend: str, request: pytest.FixtureRequest, database: Path) -> Iterator[str]:
    """URL of an empty database."""
    if backend == "sqlite":
        yield f"sqlite:///{database}"
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    postgres.create("empty")
    yield postgres.url("empty")
    postgres.drop("empty")


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    """A database with the current tables of the queue."""
    opened = open_database(empty_url, QUEUE)
    yield opened
    opened.dispose()


only_postgresql = pytest.mark.parametrize(
    "backend", [pytest.param("postgresql", marks=pytest.mark.needs_postgres)], indirect=True
)


def differences(engine: Engine, schema: Schema = QUEUE) -> list[Any]:
    with engine.connect() as connection:
        options = {"version_table": schema.version_table, "compare_server_default": True}
        found = compare_metadata(MigrationContext.configure(connection, opts=options), schema.tables)
    return list(found)


def set_revision(engine: Engine, revision: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE gpuwarden_queue_version SET version_num = :found"), {"found": revision})


def has_next_column(engine: Engine) -> bool:
    return "of_the_next_release" in {column["name"] for column in inspect(engine).get_columns("jobs")}


# --- this version


def test_new_database_has_the_tables_of_the_code(engine: Engine) -> None:
    assert differences(engine) == []


def test_older_database_gets_the_columns_and_tables_of_this_one(engine: Engine, empty_url: str) -> None:
    with engine.begin() as connection:
        for column in ("busy_timeout_s", "traceback", "retries_max", "retries", "retry_at"):
            connection.execute(text(f"ALTER TABLE jobs DROP COLUMN {column}"))
        connection.execute(text("ALTER TABLE workers DROP COLUMN completed_at"))
        connection.execute(text("DROP TABLE worker_fatal_errors"))
        connection.execute(text("DROP TABLE deleted_retries"))
        connection.execute(text("DROP TABLE host_tokens"))
        connection.execute(text("DROP TABLE hosts"))
        connection.execute(text("ALTER TABLE queues DROP COLUMN retention_days"))
        for index in ("jobs_ended", "jobs_by_queue", "jobs_by_end", "items_by_job", "item_outcomes_by_job"):
            connection.execute(text(f"DROP INDEX {index}"))
    set_revision(engine, "0010")

    upgraded = open_database(empty_url, QUEUE)

    assert differences(upgraded) == []
    upgraded.dispose()


def test_older_ledger_gets_the_columns_of_this_one(empty_url: str) -> None:
    engine = open_database(empty_url, LEDGER)
    with engine.begin() as connection:
        for column in ("seats_on", "seats_failures"):
            connection.execute(text(f"ALTER TABLE executors DROP COLUMN {column}"))
        connection.execute(text("UPDATE gpuwarden_ledger_version SET version_num = '0019'"))
    engine.dispose()

    upgraded = open_database(empty_url, LEDGER)

    assert differences(upgraded, LEDGER) == []
    upgraded.dispose()


def test_table_check_finds_a_difference(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE workers DROP COLUMN retired_incarnation"))
        connection.execute(text("DROP INDEX jobs_by_lease"))

    assert {each[0] for each in differences(engine)} == {"add_column", "add_index"}


def test_changed_tables_need_a_new_revision() -> None:
    made = [
        str(each.compile(dialect=postgresql.dialect()))  # type: ignore[attr-defined, no-untyped-call]
        for table in METADATA.sorted_tables
        for each in (CreateTable(table), *map(CreateIndex, sorted(table.indexes, key=lambda index: str(index.name))))
    ]
    shape = hashlib.sha256(" ".join("".join(made).split()).encode()).hexdigest()[:8]

    assert (newest_revision(QUEUE), shape) == ("0023", "8a87657a"), "raise the number of the revision, then pin this"


# --- other versions


@pytest.mark.parametrize("migrate", [True, False])
@pytest.mark.parametrize(
    ("found", "error", "advice"),
    [(OLDER, OlderTablesError, "give this program a new database"), (NEWER, NewerTablesError, "upgrade this program")],
    ids=["older", "newer"],
)
def test_tables_of_an_unknown_revision_are_refused_and_unchanged(
    empty_url: str, engine: Engine, found: str, error: type[DatabaseError], advice: str, *, migrate: bool
) -> None:
    set_revision(engine, found)

    with pytest.raises(error, match=f"revision {found}; .*{advice}"):
        open_database(empty_url, QUEUE, migrate=migrate)
    with engine.connect() as connection, pytest.raises(error):
        refuse_other_revisions(connection, QUEUE)

    assert differences(engine) == []


@pytest.mark.parametrize("found", [None, OLDER, NEWER])
def test_revision_error_is_one_line_without_a_password(found: str | None) -> None:
    engine = connect("postgresql://ann:secret@db.example/queue")

    said = str(refusal(engine, QUEUE, found))

    assert said.startswith("postgresql+psycopg://ann:***@db.example/queue")
    assert "\n" not in said


@pytest.mark.parametrize("table", ["jobs", "job_gpu_avoidance"])
def test_table_of_another_program_is_named_and_unchanged(empty_url: str, table: str) -> None:
    theirs = connect(empty_url)
    with theirs.begin() as connection:
        connection.execute(text(f"CREATE TABLE {table} (id integer)"))

    with pytest.raises(
        DatabaseError,
        match=f"its table '{table}' is not gpuwarden's .no gpuwarden_queue_version.: use a separate database",
    ):
        open_database(empty_url, QUEUE)

    assert inspect(theirs).get_table_names() == [table]
    theirs.dispose()


# --- upgrades


def test_upgrade_keeps_the_rows(empty_url: str, next_schema: Schema) -> None:
    store = JobStore.open(empty_url)
    submitted = store.runs.submit(Submission(queue="gpu", payload={"a": 1}), now=NOW)

    upgraded = open_database(empty_url, next_schema)

    assert has_next_column(upgraded)
    assert store.job(submitted).payload == {"a": 1}, "a program of the older version that is open reads them, too"
    upgraded.dispose()
    store.close()


def test_failed_upgrade_leaves_the_tables_unchanged(
    empty_url: str, engine: Engine, next_schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("alembic.op.create_index", broken)
        with pytest.raises(RuntimeError, match="power cut"):
            open_database(empty_url, next_schema)
    assert not has_next_column(engine)

    again = open_database(empty_url, next_schema)

    assert has_next_column(again)
    again.dispose()


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("power cut")


def test_read_only_program_changes_no_tables(empty_url: str, next_schema: Schema) -> None:
    with pytest.raises(DatabaseError, match="has no tables: start this version's programs first"):
        open_database(empty_url, QUEUE, migrate=False)
    open_database(empty_url, QUEUE).dispose()
    with pytest.raises(DatabaseError, match=r"has tables of another version .*: start this version's programs first"):
        open_database(empty_url, next_schema, migrate=False)
    open_database(empty_url, next_schema).dispose()

    open_database(empty_url, next_schema, migrate=False).dispose()


OPENER: Final = """
import sys, time
from pathlib import Path
from gpuwarden.db.migrate import open_database
from next_release import SCHEMA
url, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
(folder / f"{name}.ready").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
open_database(url, SCHEMA).dispose()
print("open")
"""


@pytest.mark.parametrize("old", [False, True], ids=["empty", "previous version"])
@pytest.mark.slow
def test_processes_that_open_a_database_together_all_succeed(
    empty_url: str, next_folder: Path, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]], *, old: bool
) -> None:
    if old:
        open_database(empty_url, QUEUE).dispose()
    openers = [spawn("-c", OPENER, empty_url, str(n), str(tmp_path), PYTHONPATH=str(next_folder)) for n in range(3)]
    eventually(lambda: len(list(tmp_path.glob("*.ready"))) == 3, "every process is ready", within_s=40)

    (tmp_path / "go").touch()

    assert [opener.communicate()[0] for opener in openers] == ["open\n"] * 3


@only_postgresql
def test_upgrade_lets_a_begun_transaction_through(empty_url: str, engine: Engine, next_schema: Schema) -> None:
    plain = empty_url.replace("+psycopg", "")
    with ExitStack() as stack:
        other, asking = (stack.enter_context(closing(psycopg.connect(plain))) for _ in range(2))
        beside = stack.enter_context(ThreadPoolExecutor())
        asking.autocommit = True
        other.execute("UPDATE workers SET last_seen_at = 0")
        upgrading = beside.submit(open_database, empty_url, next_schema)
        waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'workers'::regclass"
        eventually(lambda: asking.execute(waits).fetchall(), "it waits for the transaction")

        other.execute("SELECT 1 FROM jobs")
        other.execute("SELECT 1 FROM runs")
        other.commit()

        upgrading.result(timeout=30).dispose()
    assert has_next_column(engine)


@only_postgresql
def test_transaction_that_read_the_revision_precedes_the_upgrade(
    empty_url: str, engine: Engine, next_schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_migrate, "IN_USE_S", 0.6)
    with engine.connect() as other:
        refuse_other_revisions(other, QUEUE)

        with pytest.raises(DatabaseError, match="in use for 0"):
            open_database(empty_url, next_schema)
        other.execute(text("UPDATE workers SET last_seen_at = 0"))


@only_postgresql
def test_tables_in_use_are_not_upgraded(
    empty_url: str, engine: Engine, next_schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_migrate, "IN_USE_S", 0.6)
    with engine.connect() as other:
        other.execute(text("UPDATE workers SET last_seen_at = 0"))

        with pytest.raises(DatabaseError, match=r"in use for 0\.6 s: stop programs with an open transaction"):
            open_database(empty_url, next_schema)

    assert not has_next_column(engine)
