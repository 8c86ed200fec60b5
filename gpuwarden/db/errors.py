"""Errors of a database, for its users and for those of a gateway. Without SQLAlchemy."""

from gpuwarden.errors import GpuwardenError


class DatabaseError(GpuwardenError):
    """The database failed. Nothing of the transaction was written."""


class NoAnswerError(DatabaseError):
    """The database is not reachable or ready. A retry may succeed."""


class UnreadableRowError(GpuwardenError):
    """A row has a value that this version does not know."""

    def __init__(self, table: str, key: str, reason: str) -> None:
        super().__init__(f"row {key} of table {table} is unreadable: {reason}")
        self.table, self.key, self.reason = table, key, reason
