"""SQLite or PostgreSQL: engine, transactions, locks, notifications, schema revisions."""
