"""Run by Alembic."""

from alembic import context

from gpuwarden.db.migrate import migrate_within

migrate_within(context)
