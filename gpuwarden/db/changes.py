"""Waits for what others commit, and wakes those who wait."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

from sqlalchemy import Connection, Engine

from gpuwarden.db.engine import DatabaseError, is_idle, is_shared, own_connection, translated

CHANGES_POLL_S: Final = 0.05
"""How often a wait on SQLite looks whether another has committed, seconds; PostgreSQL wakes its waiters itself."""


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


def watch(engine: Engine, channel: str) -> Changes:
    """A cheap watch on the tables of a schema, by its channel.

    Raises:
        DatabaseError: the database cannot be asked.
    """
    return _PostgresChanges(engine, channel) if is_shared(engine) else _SqliteChanges(engine)


def notify_after_commit(connection: Connection, channel: str) -> None:
    """Wake whoever waits for changes on `channel`, right after this transaction is committed.

    Not within it: PostgreSQL commits one transaction at a time of those that notify, and each would hold up all others
    for as long as its sync takes. Who dies between the two wakes nobody, and what it wrote is found at the next look.
    """
    connection.info["notify"].add(channel)


@contextmanager
def sending_notifications(connection: Connection) -> Iterator[None]:
    """Send what `notify_after_commit` asked for inside, after the commit. On SQLite waiters see for themselves."""
    channels: set[str] = set()
    connection.info["notify"] = channels
    yield
    if not channels or connection.dialect.name != "postgresql":
        return
    driver: Any = connection.connection.driver_connection
    alone: bool = driver.autocommit
    try:
        driver.autocommit = True
        _wake(driver, channels)
    finally:
        if not is_idle(driver):
            connection.invalidate()
        else:
            driver.autocommit = alone


def _wake(driver: Any, channels: Iterable[str]) -> None:
    """Of what has been written nothing is lost with a connection that breaks now; but nobody is woken by it."""
    with suppress(driver.Error):
        for channel in channels:
            driver.execute("SELECT pg_notify(%s, '')", (channel,))


class _SqliteChanges:
    """SQLite's `data_version`: it changes when another connection has committed, whatever it wrote."""

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
            with translated(self._engine):
                self._connection = own_connection(self._engine)
                self._connection.execute(f'LISTEN "{self._channel}"')
        except DatabaseError:
            self.close()  # a connection that does not listen would wait for ever
            raise

    def _told(self, timeout_s: float) -> bool:
        if self._connection is None:
            self._listen()
            return True
        try:
            with translated(self._engine):
                told = list(self._connection.notifies(timeout=timeout_s, stop_after=1))
                if told:
                    list(self._connection.notifies(timeout=0))
        except DatabaseError:
            self.close()
            raise
        return bool(told)
