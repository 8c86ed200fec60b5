"""The database's promises on real files: clear refusals, bounded waits, whole transactions, writers in turn."""

import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, insert, select, update

from gpuwarden import database as database_module
from gpuwarden.database import Changes, DatabaseError, open_database, reading, writing
from tests.waiting import eventually

Spawn = Callable[..., subprocess.Popen[str]]

TABLES = MetaData()
COUNTS = Table("counts", TABLES, Column("name", String, primary_key=True), Column("n", Integer, nullable=False))


@pytest.fixture
def engine(database: Path) -> Iterator[Engine]:
    opened = open_database(f"sqlite:///{database}", TABLES)
    with writing(opened) as connection:
        connection.execute(insert(COUNTS).values(name="a", n=0))
    yield opened
    opened.dispose()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers give up after a tenth of a second."""
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.1)


def count(engine: Engine, name: str = "a") -> int | None:
    with reading(engine) as connection:
        return connection.scalar(select(COUNTS.c.n).where(COUNTS.c.name == name))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        pytest.param("queue.db", "'queue.db' is no database URL: sqlite:////absolute/path.db is one", id="a path"),
        pytest.param("", "'' is no database URL", id="nothing"),
        pytest.param("postgresql://u:p@h/d", "only SQLite is supported so far, not postgresql", id="PostgreSQL"),
        pytest.param("sqlite+aiosqlite:////x.db", "only SQLite .* not sqlite.aiosqlite", id="another SQLite driver"),
        pytest.param("sqlite://", "a database in memory forgets: give a file", id="no file"),
        pytest.param("sqlite:///:memory:", "a database in memory forgets", id="memory"),
        pytest.param(
            "sqlite:////no/such/folder/q.db", "the folder of /no/such/.* does not exist: make it", id="folder"
        ),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_what_to_do(url: str, says: str) -> None:
    with pytest.raises(DatabaseError, match=says):
        open_database(url, TABLES)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(DatabaseError) as refused:
        open_database("postgresql://u:secret@h/d", TABLES)

    assert "secret" not in str(refused.value)


def test_a_file_that_is_no_database_is_refused(database: Path) -> None:
    database.write_text("this is a letter, " * 100)

    with pytest.raises(DatabaseError, match="file is not a database"):
        open_database(f"sqlite:///{database}", TABLES)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="unable to open database file"):
        open_database(f"sqlite:///{tmp_path}", TABLES)


@pytest.mark.usefixtures("engine")
def test_opening_again_keeps_what_is_there(database: Path) -> None:
    again = open_database(f"sqlite:///{database}", TABLES)

    assert count(again) == 0
    again.dispose()


@pytest.mark.usefixtures("impatient")
def test_a_writer_gives_up_after_the_timeout_while_another_writes(engine: Engine, database: Path) -> None:
    again = open_database(f"sqlite:///{database}", TABLES)
    with writing(engine) as holder:
        holder.execute(update(COUNTS).values(n=1))
        with pytest.raises(DatabaseError, match="database is locked"), writing(again):
            pytest.fail("two writers at once")
        assert count(again) == 0

    with writing(again) as connection:
        connection.execute(update(COUNTS).values(n=COUNTS.c.n + 1))
    assert count(engine) == 2
    again.dispose()


@pytest.mark.usefixtures("impatient")
def test_a_database_that_is_locked_whole_cannot_be_opened(database: Path) -> None:
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")

    with pytest.raises(DatabaseError, match="database is locked"):
        open_database(f"sqlite:///{database}", TABLES)

    holder.close()


def test_a_writer_waits_its_turn_while_another_writes(engine: Engine, database: Path) -> None:
    holder = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    holder.execute("UPDATE counts SET n = 1")
    begun = threading.Event()

    def write() -> None:
        begun.set()
        with writing(engine) as connection:
            connection.execute(update(COUNTS).values(n=COUNTS.c.n * 10 + 2))

    writer = threading.Thread(target=write)
    writer.start()
    begun.wait()
    holder.execute("COMMIT")
    writer.join()
    holder.close()

    assert count(engine) == 12


def test_two_that_read_and_then_write_both_succeed(engine: Engine) -> None:
    # A transaction that begins as a reader and upgrades would fail at once here, whatever the timeout.
    together = threading.Barrier(2)
    failures: list[BaseException] = []

    def read_then_write() -> None:
        try:
            together.wait()
            for _ in range(30):
                with writing(engine) as connection:
                    found = connection.scalar(select(COUNTS.c.n))
                    connection.execute(update(COUNTS).values(n=(found or 0) + 1))
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=read_then_write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert count(engine) == 60


def test_a_reader_waits_for_no_writer_and_sees_one_snapshot(engine: Engine) -> None:
    with reading(engine) as reader:
        before = reader.scalar(select(COUNTS.c.n))
        with writing(engine) as writer:
            writer.execute(update(COUNTS).values(n=9))
        during = reader.scalar(select(COUNTS.c.n))

    assert (before, during, count(engine)) == (0, 0, 9)


def write_half(engine: Engine) -> None:
    with writing(engine) as connection:
        connection.execute(update(COUNTS).values(n=5))
        raise RuntimeError("half way")


def write_much(engine: Engine, *, n: int) -> None:
    with writing(engine) as connection:
        connection.execute(update(COUNTS).values(n=n))
        connection.execute(insert(COUNTS), [{"name": f"{n}" * 200, "n": n} for n in range(1000)])


def test_a_transaction_that_raises_keeps_nothing(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        write_half(engine)

    assert count(engine) == 0


def test_a_full_disk_loses_nothing_that_was_kept_and_keeps_nothing_of_what_was_not(engine: Engine) -> None:
    with writing(engine) as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(DatabaseError, match="database or disk is full"):
        write_much(engine, n=7)

    assert count(engine) == 0
    with writing(engine) as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
    write_much(engine, n=1)
    assert (count(engine), count(engine, "999" * 200)) == (1, 999)


def test_a_commit_is_on_the_disk_and_journalled(engine: Engine) -> None:
    with reading(engine) as connection:
        asked = [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("journal_mode", "synchronous")]

    assert asked == ["wal", 2]


def test_no_connection_free_is_the_databases_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.pool, "_timeout", 0.01)
    monkeypatch.setattr(engine.pool, "_max_overflow", 0)
    held = [engine.connect() for _ in range(5)]

    with pytest.raises(DatabaseError, match="QueuePool"), reading(engine):
        pytest.fail("a sixth connection")

    for connection in held:
        connection.close()


# --- Changes


@pytest.fixture
def changes(engine: Engine) -> Iterator[Changes]:
    watch = Changes(engine)
    yield watch
    watch.close()


def test_nothing_changed_until_somebody_commits(engine: Engine, changes: Changes) -> None:
    assert not changes.any()
    with writing(engine) as connection:
        connection.execute(update(COUNTS).values(n=1))
        assert not changes.any()

    assert changes.any()
    assert not changes.any()


def test_a_rollback_and_a_reader_are_no_change(engine: Engine, changes: Changes) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        write_half(engine)
    count(engine)

    assert not changes.any()


def test_a_commit_of_another_process_is_a_change(database: Path, changes: Changes, spawn: Spawn) -> None:
    lines = "import sqlite3, sys\nwith sqlite3.connect(sys.argv[1]) as c: c.execute('UPDATE counts SET n = 3')"
    writer = spawn("-c", lines, str(database))
    writer.wait()

    assert writer.returncode == 0
    assert changes.any()


def test_a_watch_that_cannot_ask_says_so_in_our_words(engine: Engine) -> None:
    watch = Changes(engine)
    watch._connection.driver_connection.close()  # type: ignore[union-attr]

    with pytest.raises(DatabaseError, match="closed database"):
        watch.any()


# --- opening together

OPENER = """
import sys, time
from pathlib import Path
from gpuwarden.jobstore import JobStore
url, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
(folder / f"{name}.ready").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
print(len(JobStore.open(url).jobs()))
"""


def test_processes_that_open_a_new_database_together_all_succeed(database: Path, tmp_path: Path, spawn: Spawn) -> None:
    openers = [spawn("-c", OPENER, f"sqlite:///{database}", str(n), str(tmp_path)) for n in range(4)]
    eventually(lambda: len(list(tmp_path.glob("*.ready"))) == 4, "every process is ready", within_s=40)

    (tmp_path / "go").touch()

    assert [opener.communicate()[0] for opener in openers] == ["0\n"] * 4
