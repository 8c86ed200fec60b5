"""Run by Alembic."""

from alembic import context

from gpuwarden.database import migrate_within

migrate_within(context)
