"""Workers have their last completed job and their fatal errors."""

import sqlalchemy
from alembic import op

from gpuwarden.queue.schema import FATAL_ERRORS

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add them."""
    FATAL_ERRORS.create(op.get_bind(), checkfirst=True)
    columns = {column["name"] for column in sqlalchemy.inspect(op.get_bind()).get_columns("workers")}
    if "completed_at" not in columns:  # the first revision makes the tables of now
        op.add_column("workers", sqlalchemy.Column("completed_at", sqlalchemy.Float))
