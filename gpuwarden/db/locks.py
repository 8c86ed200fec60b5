"""Locks of a transaction, and locks of a process."""

import fcntl
import hashlib
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from sqlalchemy import Connection, Engine, func, select

from gpuwarden.db.engine import is_shared, own_connection, translated
from gpuwarden.db.errors import DatabaseError
from gpuwarden.errors import GpuwardenError


class LockHeldElsewhereError(GpuwardenError):
    """Another process has the lock."""


def try_advisory_lock(connection: Connection, what: str) -> bool:
    """Try to take the lock `what` for this transaction. SQLite has one writer anyway."""
    if connection.dialect.name != "postgresql":
        return True
    return bool(connection.scalar(select(func.pg_try_advisory_xact_lock(lock_number(what)))))


def advisory_lock(connection: Connection, what: str) -> None:
    """Take the lock `what` for this transaction.

    This avoids deadlocks between transactions that lock rows in different orders.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(lock_number(what))))


class ProcessLock(Protocol):
    """A lock that one process holds."""

    def held(self) -> bool:
        """Whether the lock is still ours. A lost connection loses it."""

    def close(self) -> None:
        """Release the lock."""


def lock_for_one(engine: Engine, what: str) -> ProcessLock:
    """Take the lock `what` of a database for this process.

    A file lock for SQLite, an advisory lock for PostgreSQL.

    Raises:
        LockHeldElsewhereError: another process has it.
        DatabaseError: the lock cannot be taken.
    """
    return _AdvisoryLock(engine, what) if is_shared(engine) else _FileLock(engine, what)


class _FileLock:
    def __init__(self, engine: Engine, what: str) -> None:
        database = Path(engine.url.database or "").resolve()  # one lock for all spellings of the URL
        path = database.with_name(f"{database.name}.{what.split(maxsplit=1)[0]}.lock")
        try:
            self._file: IO[str] = path.open("a+", encoding="ascii")
        except OSError as error:
            raise DatabaseError(f"cannot open the lock {path} ({error}): make it writable for this user") from None
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
        with translated(engine), ExitStack() as undo:
            self._connection: Any = own_connection(engine)
            undo.callback(self.close)
            row = self._connection.execute("SELECT pg_try_advisory_lock($1)", (lock_number(what),)).fetchone()
            if not row[0]:
                raise LockHeldElsewhereError(f"{self._holder()} holds the lock for {what}")
            undo.pop_all()

    def held(self) -> bool:
        try:
            self._connection.execute("SELECT 1")
        except Exception:  # noqa: BLE001 - the server releases a broken connection's locks
            return False
        return True

    def close(self) -> None:
        with suppress(Exception):
            self._connection.close()

    def _holder(self) -> str:
        number = lock_number(self._what)
        # pg_locks shows the two halves of the number, and objsubid 1.
        row = self._connection.execute(
            "SELECT a.pid, a.client_addr, a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
            " WHERE l.locktype = 'advisory' AND l.granted AND l.classid = $1 AND l.objid = $2 AND l.objsubid = 1"
            " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            ((number >> 32) & 0xFFFFFFFF, number & 0xFFFFFFFF),
        ).fetchone()
        return "another process" if row is None else f"{row[2] or 'a program'} at {row[1] or 'a local socket'}"


def lock_number(what: str) -> int:
    """A signed 64-bit number for PostgreSQL's advisory locks."""
    return int.from_bytes(hashlib.sha256(f"gpuwarden {what}".encode()).digest()[:8], "big", signed=True)
