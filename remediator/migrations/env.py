"""Run by Alembic."""

from alembic import context

from gpuwarden.revisions import migrate_within

migrate_within(context)
