"""Whether the ledger can be read and written."""

import shutil
from pathlib import Path
from typing import Final

from sqlalchemy import false, func, select, text, update

from gpuwarden.db.engine import DatabaseError
from gpuwarden.db.transactions import reading, writing
from remediator.ledger.database import LedgerPart
from remediator.ledger.schema import EXECUTORS, LEDGER

ROOM_MIN_BYTES: Final = 2**20
"""With less room on the ledger's disk, nothing more is expected to be kept there; a payload's usual need."""


class Health(LedgerPart):
    """Whether the ledger can be read and written."""

    def check_usable(self) -> None:
        """Read of every table, be a writer for a moment, see that its disk has room, and change nothing.

        Raises:
            DatabaseError: it cannot be read, or not written: another process holds the write lock, it is read-only, or
                its disk is full.
        """
        with reading(self._engine) as connection:
            for table in LEDGER.tables.sorted_tables:
                connection.execute(select(table).limit(1))
        with writing(self._engine) as connection:
            # Of no row: a server that only reads, a standby for one, refuses it all the same.
            connection.execute(update(EXECUTORS).where(false()).values(errors=EXECUTORS.c.errors))
        if self.shared:
            self._check_servers_room()
        else:
            self._check_room()

    def _check_servers_room(self) -> None:
        """Have the server write so much to a file of its own, beside its tables, and remove it.

        It does not tell how much room it has, and what is written to the tables and taken back would be left in them.
        """
        with reading(self._engine) as connection:
            connection.execute(text("SET LOCAL work_mem = '64kB'"))
            connection.execute(text("SET LOCAL temp_tablespaces = ''"))
            rows = func.unnest(func.array_fill(func.repeat("x", 1024), [ROOM_MIN_BYTES // 1024]))
            connection.execute(select(func.count()).select_from(rows.alias()))

    def _check_room(self) -> None:
        file = self._engine.url.database or ""
        try:
            free_bytes = shutil.disk_usage(Path(file).parent).free
        except OSError as error:
            raise DatabaseError(f"the room on the disk of {file} is not known: {error.strerror}") from None
        if free_bytes < ROOM_MIN_BYTES:
            raise DatabaseError(f"only {free_bytes // 1024} KiB are free on the disk of {file}: make room")

    def check_writable(self) -> None:
        """Be the one writer for a moment, and write nothing.

        Raises:
            DatabaseError: another process holds the write lock, or the database cannot be written.
        """
        with writing(self._engine):
            pass
