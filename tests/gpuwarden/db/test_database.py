"""Databases: errors, timeouts, transactions, changes and locks."""

import os
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    insert,
    select,
    update,
)

from gpuwarden.db import changes as db_changes
from gpuwarden.db import engine as db_engine
from gpuwarden.db.changes import Changes, notify_after_commit, watch
from gpuwarden.db.errors import DatabaseError, NoAnswerError
from gpuwarden.db.locks import LockHeldElsewhereError, lock_for_one
from gpuwarden.db.migrate import open_database
from gpuwarden.db.transactions import reading, writing
from gpuwarden.gateway import main as gateway
from gpuwarden.queue import JobStore, Submission
from gpuwarden.queue.schema import QUEUE
from testbed.postgres import Postgres
from tests.waiting import eventually

pytestmark = pytest.mark.both_databases

Spawn = Callable[..., subprocess.Popen[str]]

TABLES = MetaData()
COUNTS = Table("counts", TABLES, Column("name", String, primary_key=True), Column("n", Integer, nullable=False))


def opened_with_counts(url: str) -> Iterator[Engine]:
    opened = open_database(url, QUEUE)
    with writing(opened) as connection:
        TABLES.create_all(connection)
        connection.execute(insert(COUNTS).values(name="a", n=0))
    yield opened
    opened.dispose()


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """A database with the queue's tables and a table of counts."""
    yield from opened_with_counts(url)


@pytest.fixture
def sqlite_engine(database: Path) -> Iterator[Engine]:
    yield from opened_with_counts(f"sqlite:///{database}")


@pytest.fixture
def postgres_engine(postgres_url: str) -> Iterator[Engine]:
    yield from opened_with_counts(postgres_url)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the busy timeout to 0.1 s."""
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.1)


def count(engine: Engine, name: str = "a") -> int | None:
    with reading(engine) as connection:
        return connection.scalar(select(COUNTS.c.n).where(COUNTS.c.name == name))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        pytest.param(
            "queue.db", "invalid database URL 'queue.db': use sqlite:////absolute/path.db or postgresql://", id="a path"
        ),
        pytest.param("", "invalid database URL ''", id="nothing"),
        pytest.param("mysql://u:p@h/d", "SQLite and PostgreSQL are supported, not mysql", id="MySQL"),
        pytest.param("postgresql://u@h:port/d", "invalid database URL", id="invalid port"),
        pytest.param("sqlite+aiosqlite:////x.db", "are supported, not sqlite.aiosqlite", id="another SQLite driver"),
        pytest.param("sqlite://", "a database in memory is not kept: give a file", id="no file"),
        pytest.param("sqlite:///:memory:", "a database in memory is not kept", id="memory"),
        pytest.param(
            "sqlite:////no/such/folder/q.db", "the folder of /no/such/.* does not exist: create it", id="folder"
        ),
    ],
)
def test_invalid_url_is_refused_with_a_hint(url: str, says: str) -> None:
    with pytest.raises(DatabaseError, match=says):
        open_database(url, QUEUE)


def _replace_by_link(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(file.with_name("ledger.db"))


def _replace_by_dangling_link(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(file.with_name("nothing.db"))


def _replace_by_pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def _link_the_log(file: Path) -> None:
    file.with_name(f"{file.name}-wal").symlink_to(file.with_name("ledger.db"))


REPLACED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link to the ledger": (_replace_by_link, "queue.db is a symbolic link, so it is not opened"),
    "a link to nothing": (_replace_by_dangling_link, "queue.db is a symbolic link, so it is not opened"),
    "a pipe": (_replace_by_pipe, "queue.db is not a regular file, so it is not opened"),
    "its log links to the ledger": (_link_the_log, "queue.db-wal is a symbolic link, so it is not opened"),
}


@pytest.mark.parametrize(("replace", "says"), REPLACED.values(), ids=REPLACED)
def test_replaced_sqlite_file_is_refused(tmp_path: Path, replace: Callable[[Path], None], says: str) -> None:
    ledger = tmp_path / "ledger.db"
    with closing(sqlite3.connect(ledger)) as connection:
        connection.execute("CREATE TABLE episodes (n)")
    before = ledger.read_bytes()
    url = f"sqlite:///{tmp_path}/queue.db"
    JobStore.open(url).close()
    replace(tmp_path / "queue.db")

    with pytest.raises(DatabaseError, match=says):
        JobStore.open(url)

    assert ledger.read_bytes() == before
    assert not (tmp_path / "nothing.db").exists()


def test_sqlite_file_that_is_replaced_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    JobStore.open(url).close()
    (tmp_path / "ledger.db").touch()
    engine = db_engine.connect(url)
    connect = engine.dialect.connect

    def replace_and_connect(*arguments: Any, **named: Any) -> Any:
        (tmp_path / "ledger.db").replace(tmp_path / "queue.db")
        return connect(*arguments, **named)

    monkeypatch.setattr(engine.dialect, "connect", replace_and_connect)

    with pytest.raises(DatabaseError, match="was replaced while it was opened"), reading(engine):
        pass


@pytest.mark.parametrize(("owner", "opens"), [(0, True), (os.geteuid(), True), (54_321, False)])
def test_sqlite_file_must_belong_to_root_the_caller_or_its_folders_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, opens: bool
) -> None:
    file = tmp_path / "queue.db"
    JobStore.open(f"sqlite:///{file}").close()
    lstat = Path.lstat

    def of_owner(path: Path) -> os.stat_result:
        found = list(lstat(path))
        found[4] = owner
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", of_owner)
    if opens:
        JobStore.open(f"sqlite:///{file}").close()
        return
    with pytest.raises(DatabaseError, match=f"queue.db belongs to user {owner}"):
        JobStore.open(f"sqlite:///{file}")


@pytest.mark.parametrize("url", ["postgresql://u:secret@127.0.0.1:1/d", "postgresql://u:secret@127.0.0.1:port/d"])
def test_password_is_not_shown(url: str) -> None:
    with pytest.raises(DatabaseError) as refused:
        open_database(url, QUEUE)

    assert "secret" not in str(refused.value)


def test_file_that_is_not_a_database_is_refused(database: Path) -> None:
    database.write_text("this is a letter, " * 100)

    with pytest.raises(DatabaseError, match="file is not a database"):
        open_database(f"sqlite:///{database}", QUEUE)


def test_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="is not a regular file, so it is not opened"):
        open_database(f"sqlite:///{tmp_path}", QUEUE)


@pytest.mark.usefixtures("engine")
def test_reopening_keeps_the_rows(url: str) -> None:
    again = open_database(url, QUEUE)

    assert count(again) == 0
    again.dispose()


@pytest.mark.usefixtures("impatient")
def test_writer_times_out_while_another_writes(sqlite_engine: Engine, database: Path) -> None:
    engine = sqlite_engine
    again = open_database(f"sqlite:///{database}", QUEUE)
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
def test_locked_database_cannot_be_opened(database: Path) -> None:
    holder = sqlite3.connect(database, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")

    with pytest.raises(DatabaseError, match="database is locked"):
        open_database(f"sqlite:///{database}", QUEUE)

    holder.close()


def test_writer_waits_while_another_writes(sqlite_engine: Engine, database: Path) -> None:
    engine = sqlite_engine
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


def test_concurrent_read_then_write_transactions_both_succeed(sqlite_engine: Engine) -> None:
    engine = sqlite_engine
    # A read transaction that becomes a write would fail here at once.
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


def test_reader_does_not_wait_and_sees_one_snapshot(engine: Engine) -> None:
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


def test_failed_transaction_writes_nothing(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        write_half(engine)

    assert count(engine) == 0


def test_full_disk_keeps_committed_rows_only(sqlite_engine: Engine) -> None:
    engine = sqlite_engine
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


def test_commit_is_synced_and_in_the_wal(sqlite_engine: Engine) -> None:
    with reading(sqlite_engine) as connection:
        asked = [connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("journal_mode", "synchronous")]

    assert asked == ["wal", 2]


def test_exhausted_pool_is_a_database_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.pool, "_timeout", 0.01)
    monkeypatch.setattr(engine.pool, "_max_overflow", 0)
    held = [engine.connect() for _ in range(5)]

    with pytest.raises(DatabaseError, match="QueuePool"), reading(engine):
        pytest.fail("a sixth connection")

    for connection in held:
        connection.close()


def test_busy_gateway_opens_no_connection_twice(url: str) -> None:
    store = gateway._opened(url)
    opened: list[Any] = []
    event.listen(store._engine, "connect", lambda *_: opened.append(None))
    for _ in range(3):
        held = [store._engine.connect() for _ in range(gateway.THREADS)]
        for connection in held:
            connection.close()
    store.close()

    assert len(opened) < gateway.THREADS


@pytest.mark.needs_postgres
def test_postgresql_reader_cannot_write(postgres_engine: Engine) -> None:
    with pytest.raises(DatabaseError, match="read-only transaction"), reading(postgres_engine) as connection:
        connection.execute(update(COUNTS).values(n=1))

    with writing(postgres_engine) as connection:
        connection.execute(update(COUNTS).values(n=1))
    assert count(postgres_engine) == 1


@pytest.mark.needs_postgres
def test_row_lock_times_out(postgres_engine: Engine, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 1)
    again = open_database(postgres_url, QUEUE)
    with writing(postgres_engine) as holder:
        holder.execute(update(COUNTS).values(n=1))
        with pytest.raises(NoAnswerError, match="lock timeout"), writing(again) as connection:
            connection.execute(update(COUNTS).values(n=2))

    assert count(again) == 1
    again.dispose()


SETTINGS = {
    "lock_timeout": "5s",
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "1min",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20000",
}


def settings_of(engine: Engine, *names: str) -> dict[str, str]:
    with reading(engine) as connection:
        return {name: connection.scalar(select(func.current_setting(name))) or "" for name in names}


@pytest.mark.needs_postgres
def test_server_notices_a_vanished_client(postgres_engine: Engine) -> None:
    assert settings_of(postgres_engine, *SETTINGS) == SETTINGS


@pytest.mark.needs_postgres
@pytest.mark.parametrize(
    ("options", "changed"),
    [
        pytest.param("options=-csearch_path%3Dpg_temp,public", {"search_path": "pg_temp,public"}, id="another setting"),
        pytest.param("options=-c%20lock_timeout%3D7s", {"lock_timeout": "7s"}, id="our setting"),
        pytest.param(
            "options=-clock_timeout%3D7s&options=-cwork_mem%3D1MB", {"lock_timeout": "7s", "work_mem": "1MB"}, id="two"
        ),
        pytest.param("application_name=mine", {"application_name": "mine"}, id="with other options"),
    ],
)
def test_options_of_the_url_are_added_to_ours(postgres_url: str, options: str, changed: dict[str, str]) -> None:
    engine = open_database(f"{postgres_url}?{options}", QUEUE)

    found = settings_of(engine, *(SETTINGS | changed))

    assert found == SETTINGS | changed
    engine.dispose()


@pytest.mark.needs_postgres
def test_server_is_reached_through_a_unix_socket(postgres: Postgres, postgres_url: str) -> None:
    name = postgres_url.rpartition("/")[2]
    engine = open_database(postgres.url(name, sockets=str(postgres.sockets)), QUEUE)

    assert settings_of(engine, "lock_timeout", "tcp_keepalives_idle") == {
        "lock_timeout": "5s", "tcp_keepalives_idle": "0"
    }  # fmt: skip
    engine.dispose()


# --- changes


@pytest.fixture
def changes(engine: Engine) -> Iterator[Changes]:
    watching = watch(engine, QUEUE.channel)
    yield watching
    watching.close()


def change(engine: Engine) -> None:
    with writing(engine) as connection:
        connection.execute(update(COUNTS).values(n=COUNTS.c.n + 1))
        notify_after_commit(connection, QUEUE.channel)


def test_watch_sees_no_change_before_a_commit(engine: Engine, changes: Changes) -> None:
    assert not changes.any()
    with writing(engine) as connection:
        connection.execute(update(COUNTS).values(n=1))
        notify_after_commit(connection, QUEUE.channel)
        assert not changes.any()

    assert changes.wait(10)
    assert not changes.any()


def test_rollback_and_read_are_no_change(engine: Engine, changes: Changes) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        write_half(engine)
    count(engine)

    assert not changes.wait(0.1)


def test_wait_ends_at_a_change_or_its_timeout(engine: Engine, changes: Changes) -> None:
    writer = threading.Timer(0.1, change, args=[engine])
    began_s = time.monotonic()
    writer.start()

    assert changes.wait(30)
    assert time.monotonic() - began_s < 20
    assert not changes.wait(0.05)
    writer.join()


def test_earlier_change_ends_the_wait(engine: Engine, changes: Changes) -> None:
    for _ in range(3):
        change(engine)

    assert changes.wait(10)
    eventually(lambda: not changes.wait(0.1), "the change is reported once")


def test_commit_of_another_process_is_a_change(database: Path, sqlite_engine: Engine, spawn: Spawn) -> None:
    watching = watch(sqlite_engine, QUEUE.channel)
    lines = "import sqlite3, sys\nwith sqlite3.connect(sys.argv[1]) as c: c.execute('UPDATE counts SET n = 3')"
    writer = spawn("-c", lines, str(database))
    writer.wait()

    assert writer.returncode == 0
    assert watching.any()
    watching.close()


def test_failed_watch_raises_a_database_error(sqlite_engine: Engine) -> None:
    watching: Any = watch(sqlite_engine, QUEUE.channel)
    watching._connection.driver_connection.close()

    with pytest.raises(DatabaseError, match="closed database"):
        watching.any()


@pytest.mark.needs_postgres
def test_watch_survives_a_server_restart(postgres_engine: Engine, postgres: Postgres) -> None:
    watching = watch(postgres_engine, QUEUE.channel)
    assert not watching.any()
    postgres.stop()

    for _ in range(2):
        with pytest.raises(DatabaseError):
            watching.wait(5)

    postgres.start()
    assert watching.any()
    assert not watching.any()
    change(postgres_engine)
    assert watching.wait(10)
    watching.close()


# --- server outages


@pytest.mark.needs_postgres
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_restarted_server_is_used_again(postgres_engine: Engine, postgres: Postgres, end: str) -> None:
    assert count(postgres_engine) == 0
    getattr(postgres, end)()

    for _ in range(2):
        with pytest.raises(NoAnswerError):
            count(postgres_engine)
        with pytest.raises(NoAnswerError, match=r"connection.* failed: "):
            change(postgres_engine)

    postgres.start()
    change(postgres_engine)
    assert count(postgres_engine) == 1


@pytest.mark.needs_postgres
def test_transaction_of_a_dead_server_writes_nothing(postgres_engine: Engine, postgres: Postgres) -> None:
    def half() -> None:
        with writing(postgres_engine) as connection:
            connection.execute(update(COUNTS).values(n=5))
            postgres.kill()
            connection.execute(update(COUNTS).values(n=6))

    with pytest.raises(NoAnswerError):
        half()

    postgres.start()
    assert count(postgres_engine) == 0


@pytest.mark.needs_postgres
def test_commit_without_answer(postgres_engine: Engine, postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = postgres_engine.dialect.do_commit

    def commit_and_lose(borrowed: Any) -> None:
        commit(borrowed)
        pid = borrowed.driver_connection.info.backend_pid
        with psycopg.connect(postgres.url("postgres").replace("+psycopg", ""), autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))

    with monkeypatch.context() as losing:
        losing.setattr(postgres_engine.dialect, "do_commit", commit_and_lose)
        change(postgres_engine)

    assert count(postgres_engine) == 1
    change(postgres_engine)
    assert count(postgres_engine) == 2


@contextmanager
def alarmed(after_s: float) -> Iterator[None]:
    """Raise from a signal handler, as a time limit does."""

    def too_late(*_: object) -> None:
        raise TimeoutError("it took too long")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.needs_postgres
def test_interrupted_watch_drops_its_connection(postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hanging:
        hanging.setattr(db_changes, "_wake", lambda driver, _: driver.execute("SELECT pg_sleep(20)"))
        with pytest.raises(TimeoutError, match="it took too long"), alarmed(0.5):
            change(postgres_engine)

    assert count(postgres_engine) == 1
    with pytest.raises(RuntimeError, match="half way"):
        write_half(postgres_engine)
    assert count(postgres_engine) == 1


@pytest.mark.needs_postgres
def test_permanent_server_error_differs_from_no_answer(postgres_engine: Engine) -> None:
    with pytest.raises(DatabaseError, match="does not exist") as refused, reading(postgres_engine) as connection:
        connection.exec_driver_sql("SELECT 1 FROM nothing")

    assert not isinstance(refused.value, NoAnswerError)


@pytest.mark.needs_postgres
def test_missing_database_is_named(postgres: Postgres) -> None:
    with pytest.raises(DatabaseError, match='database "no_such" does not exist'):
        open_database(postgres.url("no_such"), QUEUE)


# --- process locks


LOCKER = """
import sys
from gpuwarden.db.locks import lock_for_one
from gpuwarden.db.migrate import open_database
from gpuwarden.queue.schema import QUEUE
lock = lock_for_one(open_database(sys.argv[1], QUEUE), "sweeping the floor")
print("held", flush=True)
sys.stdin.read()
"""


def held_elsewhere(url: str, spawn: Spawn) -> subprocess.Popen[str]:
    holder = spawn("-c", LOCKER, url)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_second_process_is_refused_and_the_holder_named(engine: Engine, url: str, spawn: Spawn) -> None:
    holder = held_elsewhere(url, spawn)

    with pytest.raises(LockHeldElsewhereError, match=rf"pid {holder.pid}\b.* holds"):
        lock_for_one(engine, "sweeping the floor")
    other = lock_for_one(engine, "another thing")
    assert other.held()
    other.close()

    holder.kill()
    holder.wait()
    mine = eventually(lambda: free(engine), "the lock of a dead process is free")
    assert mine.held()
    mine.close()


def free(engine: Engine) -> Any:
    try:
        return lock_for_one(engine, "sweeping the floor")
    except LockHeldElsewhereError:
        return None


def test_released_lock_is_free(engine: Engine) -> None:
    for _ in range(2):
        lock_for_one(engine, "sweeping the floor").close()


def test_all_spellings_of_a_url_share_one_lock(database: Path, sqlite_engine: Engine) -> None:
    link = database.with_name("link.db")
    link.symlink_to(database)
    other = create_engine(f"sqlite:///{link}")
    mine = lock_for_one(sqlite_engine, "sweeping the floor")

    with pytest.raises(LockHeldElsewhereError, match=f"pid {os.getpid()} holds"):
        lock_for_one(other, "sweeping the floor")

    mine.close()
    other.dispose()


@pytest.mark.needs_postgres
def test_each_database_has_its_own_lock(postgres_engine: Engine, postgres: Postgres, queue_template: str) -> None:
    postgres.create("other", template=queue_template)
    other = open_database(postgres.url("other"), QUEUE)
    mine, theirs = (lock_for_one(each, "sweeping the floor") for each in (postgres_engine, other))

    with pytest.raises(LockHeldElsewhereError, match=f"gpuwarden pid {os.getpid()} at 127.0.0.1 holds"):
        lock_for_one(postgres_engine, "sweeping the floor")

    mine.close()
    theirs.close()
    other.dispose()
    postgres.drop("other")


@pytest.mark.needs_postgres
def test_lost_connection_loses_the_lock(postgres_engine: Engine, postgres: Postgres) -> None:
    lock = lock_for_one(postgres_engine, "sweeping the floor")
    assert lock.held()
    postgres.stop()

    assert not lock.held()
    with pytest.raises(DatabaseError):
        lock_for_one(postgres_engine, "sweeping the floor")

    postgres.start()
    assert not lock.held()
    again = lock_for_one(postgres_engine, "sweeping the floor")
    assert again.held()
    again.close()
    lock.close()


# --- opening


@pytest.mark.needs_postgres
def test_queue_waits_for_a_migration_and_not_for_a_busy_row(postgres_engine: Engine, postgres_url: str) -> None:
    with writing(postgres_engine) as holder:
        holder.execute(update(COUNTS).values(n=1))

        again = JobStore.open(postgres_url)
        assert again.runs.submit(Submission(queue="gpu"), now=1) == 1
        again.close()


@pytest.mark.needs_postgres
def test_postgresql_url_needs_no_driver_name(postgres_url: str) -> None:
    engine = open_database(postgres_url.replace("+psycopg", ""), QUEUE)

    with writing(engine) as connection:
        raw: Any = connection.connection.driver_connection
        assert isinstance(raw, psycopg.Connection)
    engine.dispose()


def test_threads_that_open_new_databases_at_once_both_succeed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda n: JobStore.open(f"sqlite:///{tmp_path}/{n}.db"), range(8)))

    for store in stores:
        assert store.jobs() == []
        store.close()
