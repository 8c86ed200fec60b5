"""Whether the ledger can be read and written."""

import shutil
from pathlib import Path
from typing import Final

from sqlalchemy import false, func, select, text, update

from gpuwarden.db.errors import DatabaseError
from gpuwarden.db.transactions import reading, writing
from remediator.ledger.database import LedgerPart
from remediator.ledger.schema import EXECUTORS, LEDGER

ROOM_MIN_BYTES: Final = 2**20
"""Minimum free space on the ledger's disk: the usual size of one payload."""


class Health(LedgerPart):
    """Whether the ledger can be read and written."""

    def check_usable(self) -> None:
        """Read every table, lock for writing, and check free disk space. Raises DatabaseError."""
        with reading(self._engine) as connection:
            for table in LEDGER.tables.sorted_tables:
                connection.execute(select(table).limit(1))
        with writing(self._engine) as connection:
            # Updates no row, but a standby refuses it.
            connection.execute(update(EXECUTORS).where(false()).values(errors=EXECUTORS.c.errors))
        if self.shared:
            self._check_servers_room()
        else:
            self._check_room()

    def _check_servers_room(self) -> None:
        """Make the server write a temporary file of that size: PostgreSQL does not report free disk space."""
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
            raise DatabaseError(f"free space on the disk of {file} unknown: {error.strerror}") from None
        if free_bytes < ROOM_MIN_BYTES:
            raise DatabaseError(f"only {free_bytes // 1024} KiB free on the disk of {file}: free some space")

    def check_writable(self) -> None:
        """Acquire the write lock and write nothing. Raises DatabaseError."""
        with writing(self._engine):
            pass
