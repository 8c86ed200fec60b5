"""The history of the queue's tables, for Alembic. A revision that was released is never changed."""
