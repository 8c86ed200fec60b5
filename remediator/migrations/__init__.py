"""The history of the ledger's tables, for Alembic. A revision that was released is never changed."""
