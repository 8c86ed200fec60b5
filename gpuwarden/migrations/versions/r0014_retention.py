"""Queues have a retention of finished jobs, which needs indexes."""

import sqlalchemy
from alembic import op

from gpuwarden.queue.schema import DELETED_RETRIES, ITEM_OUTCOMES, ITEMS, JOBS

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Add them."""
    found = op.get_bind()
    DELETED_RETRIES.create(found, checkfirst=True)
    columns = {column["name"] for column in sqlalchemy.inspect(found).get_columns("queues")}
    if "retention_days" not in columns:
        op.add_column("queues", sqlalchemy.Column("retention_days", sqlalchemy.Integer))
    for table, name in ((JOBS, "jobs_by_end"), (ITEMS, "items_by_job"), (ITEM_OUTCOMES, "item_outcomes_by_job")):
        next(index for index in table.indexes if index.name == name).create(found, checkfirst=True)
