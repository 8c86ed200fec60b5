"""How the queue and the ledger reach their database: SQLite on one box, PostgreSQL where hosts share one.

On SQLite a transaction that reads and then writes fails at once when another has written meanwhile, whatever the
timeout; so every transaction of `writing` opens with BEGIN IMMEDIATE and waits its turn. On PostgreSQL writers run side
by side, and each change is one statement that compares before it sets. Commits are synced to disk on both.

Tables are made and upgraded by Alembic when a program opens the database.
"""

import fcntl
import hashlib
import math
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, Final, Protocol

from sqlalchemy import (
    Connection,
    Engine,
    MetaData,
    Table,
    column,
    create_engine,
    event,
    func,
    inspect,
    make_url,
    select,
    table,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as NoConnectionFreeError
from sqlalchemy.pool import ConnectionPoolEntry

from gpuwarden import clock
from gpuwarden.errors import GpuwardenError

BUSY_TIMEOUT_S: Final = 5.0
"""How long a writer waits for another before it gives up, seconds: half of what Alertmanager gives a webhook."""

STATEMENT_TIMEOUT_S: Final = 30.0
"""How long one statement may take on PostgreSQL, seconds; migrations may take as long as they need."""

CHANGES_POLL_S: Final = 0.05
"""How often a wait on SQLite looks whether another has committed, seconds; PostgreSQL wakes its waiters itself."""

IDLE_TRUSTED_S: Final = 1.0
"""A connection that was used within this time is used again unasked, seconds: asking costs each claim a round trip."""

_DISK_FULL: Final = "53100"
"""PostgreSQL's error code for it (its manual, appendix A)."""

CLOCK_TRUSTED_S: Final = 5.0
"""How long the distance between the server's clock and ours is taken as known, seconds.

When the server's clock is set ahead by more than a lease, every lease looks expired until its next renewal by the new
clock, which comes at most this and a heartbeat later. A sweep must have the patience for both (20 s, against 5 + 10).
"""


class DatabaseError(GpuwardenError):
    """The database did not do what was asked. Nothing of the transaction was kept."""


class NoAnswerError(DatabaseError):
    """The database could not be reached or was not ready: asked again later, it may do it."""


class NewerTablesError(DatabaseError):
    """The tables are of a newer gpuwarden: they may mean what this one does not know."""


class OlderTablesError(DatabaseError):
    """The tables are of an older gpuwarden, and no revision leads from them to this version's."""


class LockHeldElsewhereError(GpuwardenError):
    """Another process does what only one may do at a time; the message says which, where that is known."""


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


def connect(url: str) -> Engine:
    """Make ready to connect, whatever the tables are like.

    Raises:
        DatabaseError: the URL cannot be used.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # the second: a port that is no number
        shown = re.sub("(://[^/@]*:)[^/@]*@", r"\1***@", url)
        raise DatabaseError(
            f"{shown!r} is no database URL: sqlite:////absolute/path.db or postgresql://user@server/database is one"
        ) from None
    return _postgresql(parsed) if parsed.get_backend_name() == "postgresql" else _sqlite(parsed)


def is_shared(engine: Engine) -> bool:
    """Whether other hosts may use the database: then it can be out of this host's reach and yet at work."""
    return engine.dialect.name == "postgresql"


def _connected(engine: Engine, **options: Any) -> Connection:
    return engine.connect().execution_options(**options)


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that may write: all of it is kept, or none.

    Raises:
        DatabaseError: the database refused, is full, locked beyond the timeout, or gone.
    """
    with _translated(engine), _connected(engine, writes=True) as connection, _telling(connection), connection.begin():
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
    with _translated(engine), _connected(engine, **options) as connection, connection.begin():
        yield connection


@contextmanager
def at_once(engine: Engine) -> Iterator[Connection]:
    """Each statement is a transaction of its own.

    On PostgreSQL that is one round trip instead of three. On SQLite a statement that returns no rows has the write lock
    within one call of the library, which lets go of Python's lock meanwhile: a process that wedges with Python's lock
    in another thread then never keeps the database's.

    Raises:
        DatabaseError: the database refused, or is gone; of a statement that writes nobody knows whether it was done.
    """
    options: dict[str, Any] = {"writes": True, "at_once": True}
    if is_shared(engine):
        options["isolation_level"] = "AUTOCOMMIT"  # on SQLite `_begin` sees to it, and the pool would undo our settings
    with _translated(engine), _connected(engine, **options) as connection, _telling(connection), connection.begin():
        yield connection


def upsert(connection: Connection, table: Table) -> Any:
    """An INSERT that may say what happens where the row is there already, in the words of this database.

    `Any`, for the two dialects' inserts share their methods and no type.
    """
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def tell(connection: Connection, channel: str) -> None:
    """Wake whoever waits for changes on `channel`, right after this transaction is committed.

    Not within it: PostgreSQL commits one transaction at a time of those that tell, and each would hold up all others
    for as long as its sync takes. Who dies between the two wakes nobody, and what it wrote is found at the next look.
    """
    connection.info["tell"].add(channel)


@contextmanager
def _telling(connection: Connection) -> Iterator[None]:
    """Tell, after what is inside, whoever waits for changes of it; on SQLite they see for themselves."""
    channels: set[str] = set()
    connection.info["tell"] = channels
    yield
    if not channels or connection.dialect.name != "postgresql":
        return
    driver: Any = connection.connection.driver_connection
    alone: bool = driver.autocommit
    try:
        driver.autocommit = True
        _wake(driver, channels)
    finally:
        if not _is_idle(driver):
            connection.invalidate()
        else:
            driver.autocommit = alone


def _wake(driver: Any, channels: Iterable[str]) -> None:
    """Of what has been written nothing is lost with a connection that breaks now; but nobody is woken by it."""
    with suppress(driver.Error):
        for channel in channels:
            driver.execute("SELECT pg_notify(%s, '')", (channel,))


def _is_idle(driver: Any) -> bool:
    """Whether PostgreSQL's driver has a connection that can be used again.

    What interrupts a call, as a signal's handler may, leaves one on which the server's answer is still to come.
    """
    return not driver.closed and driver.info.transaction_status.name == "IDLE"


def only_one(connection: Connection, what: str) -> bool:
    """Whether this transaction is the one that does `what` now; false while another does it.

    Writers of SQLite take turns anyway.
    """
    if connection.dialect.name != "postgresql":
        return True
    return bool(connection.scalar(select(func.pg_try_advisory_xact_lock(lock_number(what)))))


def in_turn(connection: Connection, what: str) -> None:
    """Wait until no other transaction does `what`; nobody else begins it before this one is over.

    Of two that lock the same rows, each in an order of its own, PostgreSQL breaks one off. Writers of SQLite take turns
    anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(lock_number(what))))


class DatabaseClock:
    """The clock that everyone who shares the database goes by, Unix seconds: leases are measured with it.

    On PostgreSQL it is the server's, so that no host's own clock, wrong or stepped, takes a job from anyone. On SQLite
    all are on one host, and it is that host's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked_s = 0.0
        self._ahead_s: float | None = None

    def now(self) -> float:
        """The time, Unix seconds.

        Raises:
            DatabaseError: the server cannot be asked, and never could be.
        """
        if not is_shared(self._engine):
            return time.time()
        now_s = clock.boottime_s()
        if self._ahead_s is None or now_s - self._asked_s >= CLOCK_TRUSTED_S:
            try:
                # Nothing to roll back: psycopg forgets its prepared statements with every transaction that is.
                with at_once(self._engine) as connection:
                    told = connection.scalar(select(func.extract("epoch", func.clock_timestamp())))
                    now_s = clock.boottime_s()
                self._ahead_s, self._asked_s = float(told or 0) - now_s, now_s
            except DatabaseError:
                if self._ahead_s is None:
                    raise
        return now_s + self._ahead_s


class Changes(Protocol):
    """Tells whether anyone else has committed since the last look. Holds a connection; use it from one thread."""

    def any(self) -> bool:
        """Whether the database changed since the last call.

        Raises:
            DatabaseError: the database cannot be asked.
        """

    def wait(self, timeout_s: float) -> bool:
        """Return true at the next change, or false after `timeout_s`.

        Raises:
            DatabaseError: the database cannot be asked.
        """

    def close(self) -> None:
        """Give the connection back."""


def watch(engine: Engine, schema: Schema) -> Changes:
    """A cheap watch on one schema's tables.

    Raises:
        DatabaseError: the database cannot be asked.
    """
    return _PostgresChanges(engine, schema.channel) if is_shared(engine) else _SqliteChanges(engine)


class _SqliteChanges:
    """SQLite's `data_version`: it changes when another connection has committed, whatever it wrote."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        with _translated(engine):
            self._connection = engine.raw_connection()
            self._seen = self._version()

    def any(self) -> bool:
        """See `Changes.any`."""
        with _translated(self._engine):
            version = self._version()
        changed, self._seen = version != self._seen, version
        return changed

    def wait(self, timeout_s: float) -> bool:
        """See `Changes.wait`."""
        deadline_s = time.monotonic() + timeout_s
        while not self.any():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(left_s, CHANGES_POLL_S))
        return True

    def close(self) -> None:
        """See `Changes.close`."""
        self._connection.close()

    def _version(self) -> int:
        cursor = self._connection.cursor()
        cursor.execute("PRAGMA data_version")
        row: tuple[int] = cursor.fetchone()  # type: ignore[assignment]
        cursor.close()
        return row[0]


class _PostgresChanges:
    """LISTEN: the server tells. After a lost connection everything counts as changed, for nobody knows."""

    def __init__(self, engine: Engine, channel: str) -> None:
        self._engine = engine
        self._channel = channel
        self._connection: Any = None
        self._listen()

    def any(self) -> bool:
        """See `Changes.any`."""
        return self._told(0.0)

    def wait(self, timeout_s: float) -> bool:
        """See `Changes.wait`."""
        return self._told(timeout_s)

    def close(self) -> None:
        """See `Changes.close`."""
        if self._connection is not None:
            with suppress(Exception):  # it is being let go of, however broken it is
                self._connection.close()
            self._connection = None

    def _listen(self) -> None:
        try:
            with _translated(self._engine):
                self._connection = _own_connection(self._engine)
                self._connection.execute(f'LISTEN "{self._channel}"')
        except DatabaseError:
            self.close()  # a connection that does not listen would wait for ever
            raise

    def _told(self, timeout_s: float) -> bool:
        if self._connection is None:
            self._listen()
            return True
        try:
            with _translated(self._engine):
                told = list(self._connection.notifies(timeout=timeout_s, stop_after=1))
                if told:
                    list(self._connection.notifies(timeout=0))
        except DatabaseError:
            self.close()
            raise
        return bool(told)


class ProcessLock(Protocol):
    """What one process alone may hold."""

    def held(self) -> bool:
        """Whether it is still ours: a lost connection loses it."""

    def close(self) -> None:
        """Let go."""


def lock_for_one(engine: Engine, what: str) -> ProcessLock:
    """Be the one process that does `what` on this database, until the lock is closed or the process ends.

    On SQLite a file beside the database is locked, whatever its URL spells it like; on PostgreSQL an advisory lock.

    Raises:
        LockHeldElsewhereError: another process is.
        DatabaseError: the lock cannot be asked for.
    """
    return _AdvisoryLock(engine, what) if is_shared(engine) else _FileLock(engine, what)


class _FileLock:
    def __init__(self, engine: Engine, what: str) -> None:
        database = Path(engine.url.database or "").resolve()  # one file, one lock, however the URL spells it
        path = database.with_name(f"{database.name}.{what.split(maxsplit=1)[0]}.lock")
        try:
            self._file: IO[str] = path.open("a+", encoding="ascii")
        except OSError as error:
            raise DatabaseError(f"the lock {path} cannot be opened ({error}): let this user write it") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise LockHeldElsewhereError(f"pid {holder} holds {path}") from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def held(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()


class _AdvisoryLock:
    def __init__(self, engine: Engine, what: str) -> None:
        self._engine = engine
        self._what = what
        with _translated(engine), ExitStack() as undo:
            self._connection: Any = _own_connection(engine)
            undo.callback(self.close)
            row = self._connection.execute("SELECT pg_try_advisory_lock(%s)", (lock_number(what),)).fetchone()
            if not row[0]:
                raise LockHeldElsewhereError(f"{self._holder()} holds the lock for {what}")
            undo.pop_all()

    def held(self) -> bool:
        try:
            self._connection.execute("SELECT 1")
        except Exception:  # noqa: BLE001 - whatever broke the connection, the server lets go of its locks
            return False
        return True

    def close(self) -> None:
        with suppress(Exception):  # it is being let go of, however broken it is
            self._connection.close()

    def _holder(self) -> str:
        number = lock_number(self._what)
        # How pg_locks shows a lock of one 64-bit number: its halves, and objsubid 1.
        row = self._connection.execute(
            "SELECT a.pid, a.client_addr, a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
            " WHERE l.locktype = 'advisory' AND l.granted AND l.classid = %s AND l.objid = %s AND l.objsubid = 1"
            " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            ((number >> 32) & 0xFFFFFFFF, number & 0xFFFFFFFF),
        ).fetchone()
        return "another process" if row is None else f"{row[2] or 'a program'} at {row[1] or 'a local socket'}"


def _own_connection(engine: Engine) -> Any:
    """The driver's own connection, out of the pool, each statement a transaction of its own."""
    borrowed = engine.raw_connection()
    connection: Any = borrowed.driver_connection
    borrowed.detach()
    connection.rollback()  # whatever the pool began on it
    connection.autocommit = True
    return connection


def lock_number(what: str) -> int:
    """A name as PostgreSQL's advisory locks want it: a signed 64-bit number."""
    return int.from_bytes(hashlib.sha256(f"gpuwarden {what}".encode()).digest()[:8], "big", signed=True)


def _sqlite(url: URL) -> Engine:
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise DatabaseError(f"SQLite and PostgreSQL are supported, not {url.drivername}")
    if not url.database or url.database == ":memory:":
        raise DatabaseError("a database in memory forgets: give a file, as in sqlite:////absolute/path.db")
    folder = Path(url.database).parent
    if not folder.is_dir():
        raise DatabaseError(f"the folder of {url.database} does not exist: make it first")
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin)
    return engine


def _postgresql(url: URL) -> Engine:
    try:
        engine = create_engine(url.set(drivername="postgresql+psycopg"), connect_args=_connect_args(url.query))
    except ImportError:
        raise DatabaseError("PostgreSQL needs its driver: pip install 'gpuwarden[postgresql]'") from None
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", _check_if_idle)
    return engine


def _note_use(_connection: object, record: ConnectionPoolEntry) -> None:
    record.info["used_at_s"] = time.monotonic()


def _check_if_idle(connection: Any, record: ConnectionPoolEntry, _fairy: object) -> None:
    """Before it is used again, ask over a connection that lay idle; the pool makes another where it is gone."""
    if time.monotonic() - record.info.get("used_at_s", math.inf) < IDLE_TRUSTED_S:
        return
    try:
        connection.autocommit = True  # a transaction that is rolled back takes the prepared statements with it
        connection.execute("SELECT 1")
        connection.autocommit = False
    except Exception as error:
        raise DisconnectionError from error


def _connect_args(query: Mapping[str, str | Sequence[str]]) -> dict[str, Any]:
    """What libpq is told beside what the URL says, which holds where the two differ."""
    # Whoever vanished without a word is noticed within seconds, not after TCP's own two hours: by us, and by the
    # server, whose session would keep the locks of a client that is gone, and its successor out.
    keepalive = {"keepalives_idle": 5, "keepalives_interval": 5, "keepalives_count": 3}
    user_timeout_ms = 20_000
    settings = {
        "lock_timeout": round(BUSY_TIMEOUT_S * 1000),
        "statement_timeout": round(STATEMENT_TIMEOUT_S * 1000),
        "idle_in_transaction_session_timeout": 60_000,
        **{f"tcp_{name}": figure for name, figure in keepalive.items()},
        "tcp_user_timeout": user_timeout_ms,
    }
    told = query.get("options", ())
    options = [
        *(f"-c {name}={figure}" for name, figure in settings.items()),
        *([told] if isinstance(told, str) else told),
    ]
    ours = {
        "connect_timeout": round(BUSY_TIMEOUT_S),
        "application_name": f"gpuwarden pid {os.getpid()}",
        **keepalive,
        "tcp_user_timeout": user_timeout_ms,
    }
    return {name: value for name, value in ours.items() if name not in query} | {"options": " ".join(options)}


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver opens no transaction of its own; _begin does
    _log_ahead(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _log_ahead(connection: sqlite3.Connection) -> None:
    """Write ahead to a log. Whoever else opens a database that does not yet is refused at once, and asks again."""
    give_up_s = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= give_up_s:
                raise
            time.sleep(0.02)
        else:
            return


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("at_once"):
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("writes") else "BEGIN")


def _bring_up_to_date(engine: Engine, schema: Schema, *, migrate: bool) -> None:
    with reading(engine) as connection:
        found = revision_of(connection, schema)
    if found == newest_revision(schema):
        return
    if not migrate or found not in {None, *revisions(schema)}:
        raise refusal(engine, schema, found)
    from gpuwarden.db.migrate import upgrade  # noqa: PLC0415 - Alembic is slow to import, and needed once a version

    upgrade(engine, schema)


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


@contextmanager
def _translated(engine: Engine) -> Iterator[None]:
    try:
        yield
    except (DBAPIError, sqlite3.Error, NoConnectionFreeError) as error:
        raise _told_of(engine, error) from error
    except Exception as error:
        # What the driver raises outside SQLAlchemy's own calls; it is imported only where it is used.
        if is_shared(engine) and isinstance(error, engine.dialect.dbapi.Error):  # type: ignore[union-attr]
            raise _told_of(engine, error) from error
        raise


def _told_of(engine: Engine, error: Exception) -> DatabaseError:
    cause = error.orig if isinstance(error, DBAPIError) else error
    because = str(cause).strip().partition("\n")[0]
    if getattr(cause, "sqlstate", None) == _DISK_FULL:
        because = f"its server's disk is full, make room there: {because}"
    # The three that say so in so many words: the drivers' common name for it, and the pool's.
    away = isinstance(error, NoConnectionFreeError) or any(
        each.__name__ == "OperationalError" for each in type(cause).__mro__
    )
    told = NoAnswerError if away else DatabaseError
    return told(f"{engine.url.render_as_string(hide_password=True)}: {because}")
