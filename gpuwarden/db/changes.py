"""Wait for other transactions, and wake their waiters."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

from sqlalchemy import Connection, Engine

from gpuwarden.db.engine import is_idle, is_shared, own_connection, translated
from gpuwarden.db.errors import DatabaseError

CHANGES_POLL_S: Final = 0.05
"""Interval between checks on SQLite, seconds."""


class Changes(Protocol):
    """A watch for other connections' commits. For one thread."""

    def any(self) -> bool:
        """Whether the database changed since the last call.

        Raises:
            DatabaseError: the database does not answer.
        """

    def wait(self, timeout_s: float) -> bool:
        """True at the next change, False after `timeout_s`.

        Raises:
            DatabaseError: the database does not answer.
        """

    def close(self) -> None:
        """Release the connection."""


def watch(engine: Engine, channel: str) -> Changes:
    """A cheap watch on a schema's tables, by its channel.

    Raises:
        DatabaseError: the database does not answer.
    """
    return _PostgresChanges(engine, channel) if is_shared(engine) else _SqliteChanges(engine)


def notify_after_commit(connection: Connection, channel: str) -> None:
    """Notify `channel` right after this transaction commits.

    Not within it: PostgreSQL commits notifying transactions one at a time, each with its sync. After a crash in
    between, waiters see the change at their next check.
    """
    connection.info["notify"].add(channel)


@contextmanager
def sending_notifications(connection: Connection) -> Iterator[None]:
    """Send the notifications after the commit. SQLite needs none."""
    channels: set[str] = set()
    connection.info["notify"] = channels
    yield
    if not channels or connection.dialect.name != "postgresql":
        return
    driver: Any = connection.connection.driver_connection
    autocommits: bool = driver.autocommit
    try:
        driver.autocommit = True
        _wake(driver, channels)
    finally:
        if not is_idle(driver):
            connection.invalidate()
        else:
            driver.autocommit = autocommits


def _wake(driver: Any, channels: Iterable[str]) -> None:
    """A broken connection loses only the notification."""
    with suppress(driver.Error):
        for channel in channels:
            driver.execute("SELECT pg_notify($1, '')", (channel,))


class _SqliteChanges:
    """SQLite's `data_version` changes with each commit of another connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        with translated(engine):
            self._connection = engine.raw_connection()
            self._seen = self._version()

    def any(self) -> bool:
        """See `Changes.any`."""
        with translated(self._engine):
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
    """LISTEN. A lost connection counts as a change."""

    def __init__(self, engine: Engine, channel: str) -> None:
        self._engine = engine
        self._channel = channel
        self._connection: Any = None
        self._listen()

    def any(self) -> bool:
        """See `Changes.any`."""
        return self._receive(0.0)

    def wait(self, timeout_s: float) -> bool:
        """See `Changes.wait`."""
        return self._receive(timeout_s)

    def close(self) -> None:
        """See `Changes.close`."""
        if self._connection is not None:
            with suppress(Exception):  # it is closed, however broken
                self._connection.close()
            self._connection = None

    def _listen(self) -> None:
        try:
            with translated(self._engine):
                self._connection = own_connection(self._engine)
                self._connection.execute(f'LISTEN "{self._channel}"')
        except DatabaseError:
            self.close()  # without LISTEN a wait would never end
            raise

    def _receive(self, timeout_s: float) -> bool:
        if self._connection is None:
            self._listen()
            return True
        try:
            with translated(self._engine):
                received = list(self._connection.notifies(timeout=timeout_s, stop_after=1))
                if received:
                    list(self._connection.notifies(timeout=0))
        except DatabaseError:
            self.close()
            raise
        return bool(received)
